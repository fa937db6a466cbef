"""States of recurrent layers as MLX arrays, and the ops on them.

Each pass gives a new array, so a checkpoint or a fork shares the old one. Rules (`mlx_rules.py`) take tokens
one by one, in ops whose shapes don't depend on the number of tokens. Everything else is elementwise, or sums
in one fixed order. So a row's bits don't depend on other rows, up to the number of rows that is measured
(`mlx_row_ops.py`).

Legend as in `recurrent.py`; T tokens of a pass, n tokens since the state, the pass's included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Bytes, Int32
from ondevice.backends.mlx_memory import begin, require_memory
from ondevice.backends.mlx_rules import DeltaRule, MixerRule
from ondevice.backends.mlx_sums import convolved
from ondevice.backends.recurrent import RULE_TOKENS, DeltaWeights, MixerWeights, StateLayout, ahead_parents
from ondevice.model_config import ConvSpec, DeltaSpec, Mamba2Spec, RecurrentSpec


class MlxBuffer:
    """One buffer of states, by layer, or of inputs, by (layer, kind). Entries that are missing count
    as zero.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes that the plan counts for it. Buffers may share arrays."""
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
    """`StateMemory` in MLX arrays. A state is (rule state, tail (taps - 1, C)); a short convolution has only
    the tail.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout

    def new_buffer(self, allocate: Callable[[int], Any], nbytes: int) -> MlxBuffer:
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
        rows = mx.array(list(sources))
        buffer.arrays = {key: values[rows] for key, values in buffer.arrays.items()}
        begin(*buffer.arrays.values())

    def data(self, buffer: MlxBuffer) -> Bytes:
        data = np.zeros(self._layout.nbytes, np.uint8)
        for layer in self._layout.config.recurrent_layers:
            parts = buffer.arrays.get(layer)
            if parts is not None:
                flat = np.concatenate([np.array(part).reshape(-1) for part in parts])
                self._layout.of(data, layer)[:] = flat
        return data

    def load(self, buffer: MlxBuffer, read: Callable[[Bytes], None]) -> None:
        data = np.empty(self._layout.nbytes, np.uint8)
        read(data)
        for layer in self._layout.config.recurrent_layers:
            flat, first, parts = self._layout.of(data, layer), 0, []
            spec = self._layout.config.layers[layer].recurrent
            assert spec is not None
            for shape in state_shapes(spec):
                size = int(np.prod(shape))
                parts.append(mx.array(flat[first : first + size].reshape(shape)))
                first += size
            buffer.arrays[layer] = tuple(parts)
            mx.eval(parts)


def state_shapes(spec: RecurrentSpec) -> list[tuple[int, ...]]:
    """Shapes of the arrays of one layer's state."""
    tail = (spec.taps - 1, spec.channels)
    if isinstance(spec, DeltaSpec):
        return [(spec.value_heads, spec.key_width, spec.value_width), tail]
    if isinstance(spec, Mamba2Spec):
        return [(spec.groups, spec.heads // spec.groups, spec.state_width, spec.head_width), tail]
    return [tail]


class TokenRule(Protocol):
    """How a pass's tokens change a layer's state."""

    def changed(self, state: mx.array, token: int) -> mx.array:
        """The state after a token, from the state before it."""

    def read(self, state: mx.array, token: int) -> mx.array:
        """The token's read of the state after it."""

    def outputs(self, reads: Sequence[mx.array], z: mx.array) -> mx.array:
        """Outputs (T, I) from the reads of the last T tokens and their output gates z, (T, I)."""


class MlxRecurrentOps:
    """`RecurrentOps` over MLX arrays. States are those of `MlxStates`."""

    def bounded(self, *arrays: mx.array) -> None:
        """Start to compute these arrays. May wait until those of the previous call are computed."""
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
        return self._passed(DeltaRule, projected, gates, states, layer, spec, weights)

    def replay_delta(
        self, states: Any, layer: int, count: int, spec: DeltaSpec, weights: DeltaWeights
    ) -> None:
        self._replayed(DeltaRule, states, layer, count, spec, weights)

    def mamba2(
        self,
        projected: mx.array,
        steps: mx.array,
        states: Any,
        layer: int,
        spec: Mamba2Spec,
        weights: MixerWeights,
    ) -> mx.array:
        return self._passed(MixerRule, projected, steps, states, layer, spec, weights)

    def replay_mamba2(
        self, states: Any, layer: int, count: int, spec: Mamba2Spec, weights: MixerWeights
    ) -> None:
        self._replayed(MixerRule, states, layer, count, spec, weights)

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
            products, _ = _ahead_inputs(ahead, products, None)
            parents = ahead.parents
        return convolved(tail, products, parents, weights)[-tokens:] * c

    def replay_conv(self, states: Any, layer: int, count: int) -> None:
        products, known = states.inputs(layer, count)[0].value[:count], states.state(layer).value
        seen = states.layout.config.layers[layer].conv.taps - 1
        tail = mx.zeros((seen, products.shape[1])) if known is None else known[0]
        self._put(states, layer, _tail(tail, products))

    def sigmoid_gated(self, x: mx.array, gates: mx.array) -> mx.array:
        return x * mx.sigmoid(gates)

    def _put(self, states: Any, layer: int, *parts: mx.array) -> None:
        """Store arrays as the layer's next state."""
        states.next_state(layer).put(parts)
        begin(*parts)

    def _passed(
        self,
        rule_type: type[DeltaRule | MixerRule],
        projected: mx.array,
        gates: mx.array,
        states: Any,
        layer: int,
        spec: Any,
        weights: Any,
    ) -> mx.array:
        """The output of `RecurrentOps.gated_delta` or `mamba2`, as `rule_type` says."""
        tokens, channels = projected.shape[0], projected[:, : spec.channels]
        before, ahead = _known(states.state(layer), spec), states.ahead(layer)
        if ahead is None:
            parents = ahead_parents(0, tokens, None)
        else:
            channels, gates = _ahead_inputs(ahead, channels, gates)
            parents = ahead.parents
        rule = rule_type(channels, gates, before[1], parents, spec, weights)
        after, reads = self._along(rule, before[0], parents, tokens)
        if ahead is None:
            self._put(states, layer, after, _tail(before[1], channels))
        return rule.outputs(reads, projected[:, spec.channels :])

    def _replayed(
        self,
        rule_type: type[DeltaRule | MixerRule],
        states: Any,
        layer: int,
        count: int,
        spec: Any,
        weights: Any,
    ) -> None:
        """`RecurrentOps.replay_delta` or `replay_mamba2`, as `rule_type` says."""
        channels, gates = (slot.value[:count] for slot in states.inputs(layer, count))
        before, parents = _known(states.state(layer), spec), ahead_parents(0, count, None)
        rule = rule_type(channels, gates, before[1], parents, spec, weights)
        after, _ = self._along(rule, before[0], parents, 0)
        self._put(states, layer, after, _tail(before[1], channels))

    def _along(
        self, rule: TokenRule, first: mx.array, parents: Int32, wanted: int
    ) -> tuple[mx.array, list[mx.array]]:
        """The state after n tokens that begin at state `first`, and the reads of the last `wanted` tokens.

        parents: (n,), as in `Ahead`.
        """
        held, reads = list[mx.array](), list[mx.array]()
        count, state = len(parents), first
        chain = bool((parents == np.arange(-1, count - 1)).all())
        for token in range(count):
            if not chain:
                state = first if parents[token] < 0 else held[parents[token]]
            state = rule.changed(state, token)
            if not chain:
                held.append(state)
            if token >= count - wanted:
                reads.append(rule.read(state, token))
            if token % RULE_TOKENS == RULE_TOKENS - 1:
                self.bounded(state, *reads[-RULE_TOKENS:])
        return state, reads


def _known(slot: Slot, spec: RecurrentSpec) -> tuple[mx.array, ...]:
    """The arrays of a state; zeros at a text's start."""
    arrays = slot.value
    return tuple(map(mx.zeros, state_shapes(spec))) if arrays is None else arrays


def _ahead_inputs(ahead: Any, channels: mx.array, gates: mx.array | None) -> tuple[mx.array, Any]:
    """The inputs (n, C) and (n, G) of all tokens that run ahead: those stored before, and this pass's, which
    it stores.
    """
    inputs: list[Any] = []
    for slot, new_rows in ((ahead.channels, channels), (ahead.gates, gates)):
        if new_rows is None:
            inputs.append(None)
            continue
        known = len(ahead.parents) - new_rows.shape[0]
        rows = mx.concatenate([slot.value[:known], new_rows]) if known else mx.contiguous(new_rows)
        slot.put(rows)
        begin(rows)
        inputs.append(rows)
    return inputs[0], inputs[1]


def _tail(tail: mx.array, channels: mx.array) -> mx.array:
    """The last inputs (taps - 1, C) of a convolution once channels (n, C) have followed `tail`, the last ones
    before.
    """
    latest = channels[-tail.shape[0] :]
    # Never a view, which would hold all of the pass's channels.
    return mx.concatenate([tail[latest.shape[0] :], latest])
