"""States of recurrent layers as MLX arrays, and the ops on them.

A state is a new array for each pass, which nothing ever writes to, so a checkpoint or a fork holds the array
itself. The delta rule takes tokens one after the other, in ops whose shapes don't depend on how many there
are. Everything else is elementwise, or sums in one order: a row's bits don't depend on the rows beside it,
up to the width that is measured (`mlx_row_ops.py`).

Legend as in `recurrent.py`; T tokens of a pass, n tokens from the state on, some of them known before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Bytes, Int32
from ondevice.backends.mlx_memory import begin, require_memory
from ondevice.backends.mlx_sums import in_lanes, sums
from ondevice.backends.recurrent import RULE_TOKENS, DeltaWeights, StateLayout, ahead_parents
from ondevice.backends.reference_delta import SQUARES_EPS
from ondevice.errors import BackendUnavailableError
from ondevice.model_config import ConvSpec, DeltaSpec


class MlxBuffer:
    """A buffer of states, or of inputs: arrays by layer, or by layer and kind. Without one they are zero."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes that the plan has for it. Arrays that other buffers hold too take them once."""
        self.arrays: dict[Any, Any] = {}


class Slot(NamedTuple):
    """The place of a layer's arrays in a buffer."""

    buffer: MlxBuffer
    key: Any

    @property
    def value(self) -> Any:
        return self.buffer.arrays.get(self.key)

    def put(self, value: Any) -> None:
        self.buffer.arrays[self.key] = value


class MlxStates:
    """`StateMemory`: a state is (rule (HV, K, V), tail (taps - 1, C)), or the tail alone of a convolution."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout

    def made(self, allocate: Callable[[int], Any], nbytes: int) -> MlxBuffer:
        require_memory(nbytes)
        allocate(nbytes)
        return MlxBuffer(nbytes)

    def clear(self, buffer: MlxBuffer) -> None:
        buffer.arrays.clear()

    def copy(self, source: MlxBuffer, target: MlxBuffer) -> None:
        target.arrays = dict(source.arrays)

    def state(self, buffer: MlxBuffer, layer: int) -> Slot:
        return Slot(buffer, layer)

    def inputs(self, buffer: MlxBuffer, layer: int, count: int) -> tuple[Slot, Slot]:
        return Slot(buffer, (layer, "channels")), Slot(buffer, (layer, "gates"))

    def move_inputs(self, buffer: MlxBuffer, sources: Sequence[int]) -> None:
        kept = mx.array(list(sources))
        buffer.arrays = {key: rows[kept] for key, rows in buffer.arrays.items()}
        begin(*buffer.arrays.values())

    def data(self, buffer: MlxBuffer) -> Bytes:
        found = np.zeros(self._layout.nbytes, np.uint8)
        for layer in self._layout.config.recurrent_layers:
            parts = buffer.arrays.get(layer)
            if parts is not None:
                flat = np.concatenate([np.array(part).reshape(-1) for part in parts])
                self._layout.of(found, layer)[:] = flat
        return found

    def load(self, buffer: MlxBuffer, read: Callable[[Bytes], None]) -> None:
        data = np.empty(self._layout.nbytes, np.uint8)
        read(data)
        for layer in self._layout.config.recurrent_layers:
            flat, first, parts = self._layout.of(data, layer), 0, []
            for shape in _shapes(self._layout.config.layers[layer].recurrent):
                size = int(np.prod(shape))
                parts.append(mx.array(flat[first : first + size].reshape(shape)))
                first += size
            buffer.arrays[layer] = tuple(parts)
            mx.eval(parts)


def _shapes(spec: Any) -> list[tuple[int, ...]]:
    """Shapes of the arrays of one layer's state."""
    tail = (spec.taps - 1, spec.channels)
    if isinstance(spec, DeltaSpec):
        return [(spec.value_heads, spec.key_width, spec.value_width), tail]
    return [tail]


class MlxRecurrentOps:
    """`RecurrentOps` over MLX arrays. States are those of `MlxStates`."""

    def bounded(self, *arrays: mx.array) -> None:
        """Begin to compute these arrays; may wait for those of the call before."""
        begin(*arrays)

    def gated_delta(
        self,
        projected: mx.array,
        gates: mx.array,
        states: Any,
        layer: int,
        spec: DeltaSpec,
        weights: DeltaWeights,
    ) -> mx.array:
        tokens, channels = projected.shape[0], projected[:, : spec.channels]
        before, ahead = _known(states.state(layer), spec), states.ahead(layer)
        if ahead is None:
            parents = ahead_parents(0, tokens, None)
        else:
            channels, gates = _kept(ahead, channels, gates)
            parents = ahead.parents
        after, outputs = self._rule(channels, gates, before, parents, spec, weights, tokens)
        if ahead is None:
            self._put(states, layer, after, _tail(before[1], channels))
        found = mx.fast.rms_norm(mx.stack(outputs)[:, :, 0], weights.norm.weight, weights.norm.eps)
        z = projected[:, spec.channels :]
        return found.reshape(tokens, -1) * _silu(z)

    def replay_delta(
        self, states: Any, layer: int, count: int, spec: DeltaSpec, weights: DeltaWeights
    ) -> None:
        channels, gates = (slot.value[:count] for slot in states.inputs(layer, count))
        before = _known(states.state(layer), spec)
        parents = ahead_parents(0, count, None)
        after, _ = self._rule(channels, gates, before, parents, spec, weights, 0)
        self._put(states, layer, after, _tail(before[1], channels))

    def short_conv(
        self, projected: mx.array, states: Any, layer: int, spec: ConvSpec, weights: mx.array
    ) -> mx.array:
        b, c, x = mx.split(projected, 3, axis=1)
        tokens, products, ahead = projected.shape[0], b * x, states.ahead(layer)
        (tail,) = _known(states.state(layer), spec)
        if ahead is None:
            parents = ahead_parents(0, tokens, None)
            self._put(states, layer, _tail(tail, products))
        else:
            products, _ = _kept(ahead, products, None)
            parents = ahead.parents
        return _convolved(tail, products, parents, weights)[-tokens:] * c

    def mamba2(self, *arguments: Any) -> Any:
        raise BackendUnavailableError("--backend mlx doesn't run Mamba-2 mixers; use --backend cpu")

    replay_mamba2 = mamba2

    def replay_conv(self, states: Any, layer: int, count: int) -> None:
        products, known = states.inputs(layer, count)[0].value[:count], states.state(layer).value
        seen = states.layout.config.layers[layer].conv.taps - 1
        tail = mx.zeros((seen, products.shape[1])) if known is None else known[0]
        self._put(states, layer, _tail(tail, products))

    def sigmoid_gated(self, x: mx.array, gates: mx.array) -> mx.array:
        return x * mx.sigmoid(gates)

    def _put(self, states: Any, layer: int, *parts: mx.array) -> None:
        """Make arrays the layer's next state."""
        states.next_state(layer).put(parts)
        begin(*parts)

    def _rule(
        self,
        channels: mx.array,
        gates: mx.array,
        before: tuple[mx.array, ...],
        parents: Int32,
        spec: DeltaSpec,
        weights: DeltaWeights,
        wanted: int,
    ) -> tuple[mx.array, list[mx.array]]:
        """The state (HV, K, V) behind the last of n tokens, and what the last `wanted` are given, (HV, 1, V)
        each.

        channels: (n, C), before their convolution. gates: (n, 2 * HV). parents: (n,), as of `Ahead`.
        """
        count, heads = len(parents), spec.value_heads
        mixed = _silu(_convolved(before[1], channels, parents, weights.conv))
        q, k, v = mx.split(mixed, [spec.key_size, 2 * spec.key_size], axis=1)
        shared = heads // spec.key_heads
        # Neighbouring value heads share a key head.
        q, k = (mx.repeat(_unit(x.reshape(count, -1, spec.key_width)), shared, axis=1) for x in (q, k))
        q = (q * spec.key_width**-0.5)[:, :, None]
        rows, columns, v = k[:, :, None], k[..., None], v.reshape(count, heads, 1, -1)
        betas, decays = (x.reshape(count, heads, 1, 1) for x in _gates(gates, weights, heads))
        held, found = list[mx.array](), list[mx.array]()
        chain = bool((parents == np.arange(-1, count - 1)).all())
        state = before[0]
        for token in range(count):
            if not chain:
                state = before[0] if parents[token] < 0 else held[parents[token]]
            state = state * decays[token]
            change = (v[token] - rows[token] @ state) * betas[token]
            state = state + columns[token] * change
            if not chain:
                held.append(state)
            if token >= count - wanted:
                found.append(q[token] @ state)
            if token % RULE_TOKENS == RULE_TOKENS - 1:
                self.bounded(state, *found[-RULE_TOKENS:])
        return state, found


def _known(slot: Slot, spec: DeltaSpec | ConvSpec) -> tuple[mx.array, ...]:
    """The arrays of a state; zeros at a text's start."""
    found = slot.value
    return tuple(map(mx.zeros, _shapes(spec))) if found is None else found


def _kept(ahead: Any, channels: mx.array, gates: mx.array | None) -> tuple[mx.array, Any]:
    """The inputs (n, C) and (n, G) of all tokens that run ahead: those known and a pass's, which it keeps."""
    found: list[Any] = []
    for slot, own in ((ahead.channels, channels), (ahead.gates, gates)):
        if own is None:
            found.append(None)
            continue
        known = len(ahead.parents) - own.shape[0]
        rows = mx.concatenate([slot.value[:known], own]) if known else mx.contiguous(own)
        slot.put(rows)
        begin(rows)
        found.append(rows)
    return found[0], found[1]


def _tail(tail: mx.array, channels: mx.array) -> mx.array:
    """The last inputs of a convolution behind more channels (n, C), for those before them, (taps - 1, C)."""
    return mx.concatenate([tail, channels])[-tail.shape[0] :]


def _convolved(tail: mx.array, channels: mx.array, parents: Int32, weights: mx.array) -> mx.array:
    """The causal convolution, (n, C), of channels (n, C) behind a tail (taps - 1, C), its oldest tap first.

    weights: (taps, C). parents: (n,), the token that each follows.
    """
    seen, inputs = tail.shape[0], mx.concatenate([tail, channels])
    # The row before each: those of the tail follow each other, and tokens follow their parents.
    before = np.concatenate([np.arange(-1, seen - 1), parents + seen])
    rows = [np.arange(seen, seen + len(parents))]
    for _ in range(seen):
        rows.append(before[rows[-1]])
    found = None
    for tap, own in enumerate(reversed(rows)):
        product = inputs[mx.array(own)] * weights[tap]
        found = product if found is None else found + product
    assert found is not None
    return found


def _gates(gates: mx.array, weights: DeltaWeights, heads: int) -> tuple[mx.array, mx.array]:
    """Betas and decays, (n, HV) each, of gates (n, 2 * HV)."""
    betas = mx.sigmoid(in_lanes(gates[:, :heads]))
    times = mx.logaddexp(in_lanes(gates[:, heads:] + weights.time_bias), mx.zeros(1))
    decays = mx.exp(in_lanes(weights.decay[None]) * times)
    return betas[:, :heads], decays[:, :heads]


def _silu(x: mx.array) -> mx.array:
    """x * sigmoid(x) for x (n, C)."""
    wide = in_lanes(x)
    return (wide * mx.sigmoid(wide))[:, : x.shape[1]]


def _unit(x: mx.array) -> mx.array:
    """Each of x (n, H, K) divided by its length."""
    rows = x.reshape(-1, x.shape[2])
    return (rows / mx.sqrt(sums(mx.square(rows)) + SQUARES_EPS)).reshape(x.shape)
