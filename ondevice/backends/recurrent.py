"""Layers with a recurrent state instead of keys and values: the states' memory layout, and the ops on them.

Legend as in `base.py`; and HV value heads, K and V widths of a key and a value, C channels, G gates of a
token: 2 * HV for the gated delta rule, 0 for a short convolution, H for a Mamba-2 mixer of H heads, whose
output width is I and whose state width is N.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.token_tree import Int32, TokenTree
from ondevice.model_config import ALIGNED_FLOATS, ConvSpec, DeltaSpec, Mamba2Spec, ModelConfig, RecurrentSpec
from ondevice.records import dataclass

Array: TypeAlias = Any
"""A backend's float32 activations, as in `base.py`."""
States: TypeAlias = NDArray[np.float32]
"""One layer's state, flat: (HV, K, V) of a delta rule or (H, N, I / H) of a mixer, then the convolution's
last inputs (taps - 1, C).
"""

MIN_SPACING = 64
AHEAD_TOKENS = 16
"""Most tokens that run ahead of a text's states: a draft with its root."""
MARKS = 2
"""Checkpoints of a text's last prompt: at the start of its new part, and near its end."""
PROMPT_TAIL = 8
"""Tokens between a prompt's last checkpoint and its end: more than the start of an answer that a template may
render differently afterwards, at most 7 in Qwen's templates."""

RULE_TOKENS = 8
"""Tokens of a rule that MLX computes at a time, which bounds the number of states in memory."""


@dataclass(frozen=True)
class StateLayout:
    """Layout of a model's recurrent states in one buffer, and the number of buffers of a text.

    A text has the states after its last token, room for those of the next pass, and checkpoints to go back
    to: states after every multiple of `spacing` tokens and at its marks. With drafts it also has the inputs
    of the tokens that run ahead of its states.
    """

    config: ModelConfig
    token_bytes: int
    """Bytes of one token's keys and values in all of the model's layers."""
    drafts: bool = False
    """Whether texts have drafts."""
    marks: int = MARKS
    """Most marks of a text; 0 without prompts."""

    @cached_property
    def offsets(self) -> dict[int, int]:
        """Offset of each recurrent layer's state, in floats."""
        sizes = [self._padded(layer) for layer in self.config.recurrent_layers]
        return dict(zip(self.config.recurrent_layers, accumulate([0, *sizes]), strict=False))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all layers' states after one token; 0 for a model without recurrent layers.

        If a model is split over machines, it isn't 0 in a part without recurrent layers either, so that all
        parts have the same checkpoints.
        """
        return 4 * sum(map(self._padded, self.config.recurrent_layers)) or self._min_bytes

    @cached_property
    def ahead_bytes(self) -> int:
        """Bytes of the inputs of AHEAD_TOKENS tokens in all layers. Never equal to `nbytes`."""
        floats = sum(self._input_floats(layer) for layer in self.config.recurrent_layers)
        return 4 * AHEAD_TOKENS * floats or 2 * self._min_bytes

    @cached_property
    def spacing(self) -> int:
        """Tokens from one checkpoint to the next, apart from marks.

        The smallest multiple of 64 tokens whose keys and values take at least the memory of a checkpoint.
        """
        model_states = self.config.part.states
        state_bytes = 4 * model_states[0] if model_states else self.nbytes
        tokens = -(-state_bytes // max(1, self.token_bytes))
        return max(MIN_SPACING, -(-tokens // MIN_SPACING) * MIN_SPACING)

    def buffers(self, n_tokens: int, marks: int | None = None) -> int:
        """Number of buffers of a text of n_tokens. marks: its number of marks; None: the maximum."""
        marks = self.marks if marks is None else marks
        return 2 + n_tokens // self.spacing + marks if self.nbytes else 0

    def text_bytes(self, n_tokens: int) -> int:
        """Bytes of all buffers of a text of n_tokens."""
        return self.buffers(n_tokens) * self.nbytes + (self.ahead_bytes if self.drafts else 0)

    def inputs_of(self, buffer: NDArray[np.uint8], layer: int, count: int) -> tuple[States, States]:
        """A layer's inputs of the first tokens in a buffer (ahead_bytes,): (count, C) and (count, G)."""
        spec, before = self._spec(layer), 0
        for other in self.config.recurrent_layers:
            if other == layer:
                break
            before += AHEAD_TOKENS * self._input_floats(other)
        gates = before + AHEAD_TOKENS * spec.channels
        floats = buffer.view(np.float32)
        return (
            floats[before : before + count * spec.channels].reshape(count, -1),
            floats[gates : gates + count * spec.gate_floats].reshape(count, spec.gate_floats),
        )

    def of(self, buffer: NDArray[np.uint8], layer: int) -> States:
        """A layer's state in a buffer (nbytes,), as views."""
        spec, offset = self._spec(layer), self.offsets[layer]
        return buffer.view(np.float32)[offset : offset + spec.state_floats]

    @property
    def _min_bytes(self) -> int:
        return 4 * ALIGNED_FLOATS if self.config.part.states else 0

    def _input_floats(self, layer: int) -> int:
        spec = self._spec(layer)
        return spec.channels + spec.gate_floats

    def _padded(self, layer: int) -> int:
        return -(-self._spec(layer).state_floats // ALIGNED_FLOATS) * ALIGNED_FLOATS

    def _spec(self, layer: int) -> RecurrentSpec:
        spec = self.config.layers[layer].recurrent
        assert spec is not None
        return spec


class DeltaWeights(NamedTuple):
    """Weights of a layer with the gated delta rule, without its projections.

    conv: (taps, C), oldest input first. decay: (HV,), -exp(A). time_bias: (HV,). norm: of a value head's
    output, as in `base.py`.
    """

    conv: Any
    decay: Any
    time_bias: Any
    norm: Any


class MixerWeights(NamedTuple):
    """Weights of a Mamba-2 mixer, without its projections.

    conv: (taps, C), oldest input first. conv_bias: (C,), or None. decay: (H,), -exp(A). time_bias, skip:
    (H,). norm: of the output, (I,), as in `base.py`; None without one.
    """

    conv: Any
    conv_bias: Any
    decay: Any
    time_bias: Any
    skip: Any
    norm: Any


class Ahead(NamedTuple):
    """A layer's inputs for the n tokens that run ahead of a text's states. A pass writes the last T of them.

    channels: (n, C), before their convolution. gates: (n, G). parents: (n,), the token that each follows; -1
    for the text's last token before them.
    """

    channels: States
    gates: States
    parents: Int32

    def keep(self, projected: Array, gates: Array) -> None:
        """Store the inputs of a pass: (T, C + HV * V) and (T, 2 * HV), or (T, C + I) and (T, H)."""
        first = len(self.channels) - len(projected)
        self.channels[first:] = projected[:, : self.channels.shape[1]]
        self.gates[first:] = gates


def ahead_parents(known: int, count: int, tree: TokenTree | None) -> Int32:
    """`Ahead.parents` of a chain of `known` tokens and a pass of `count` after it."""
    chain = np.arange(-1, known + count - 1, dtype=np.int32)
    if tree is not None:
        chain[known:] = tree.parents + known
    return chain


def replay_conv(states: StateStore, layer: int, count: int) -> None:
    """Write the next state of a layer with a short convolution, as `RecurrentOps.replay_conv`."""
    products = states.inputs(layer, count)[0].reshape(-1)
    after = states.next_state(layer)
    known = np.concatenate([states.state(layer), products[-after.size :]])
    after[:] = known[-after.size :]


class StateStore(Protocol):
    """The part of a text's recurrent states that ops see."""

    def ahead(self, layer: int) -> Ahead | None:
        """The layer's stored inputs if the pass runs ahead; None if the pass writes the layer's next
        state.
        """

    def state(self, layer: int) -> States:
        """A layer's state after the last token that doesn't run ahead; read only."""

    def inputs(self, layer: int, count: int) -> tuple[States, States]:
        """The layer's inputs of the first `count` tokens that run ahead: (count, C) and (count, G)."""

    def next_state(self, layer: int) -> States:
        """Where a pass writes the layer's state after its last token."""


class RecurrentOps(Protocol):
    """Ops of layers with states. As all ops, they may re-use their output array."""

    def gated_delta(
        self,
        projected: Array,
        gates: Array,
        states: StateStore,
        layer: int,
        spec: DeltaSpec,
        weights: DeltaWeights,
    ) -> Array:
        """The gated delta rule over a chain of T tokens: (T, HV * V). See `DeltaSpec`.

        Reads the layer's state and writes its next one. A token has the same bits in a pass of any size.
        Where the pass runs ahead of the states, tokens may be a tree; their inputs are stored, and no state
        is written.

        projected: (T, C + HV * V), queries, keys and values before their convolution, then output gates.
        gates: (T, 2 * HV), inputs of betas, then of decays.
        """

    def replay_delta(
        self, states: StateStore, layer: int, count: int, spec: DeltaSpec, weights: DeltaWeights
    ) -> None:
        """Write the layer's next state, after the chain of the first `count` tokens that run ahead."""

    def mamba2(
        self,
        projected: Array,
        steps: Array,
        states: StateStore,
        layer: int,
        spec: Mamba2Spec,
        weights: MixerWeights,
    ) -> Array:
        """A Mamba-2 mixer over T tokens, (T, I), as `gated_delta`. See `Mamba2Spec`.

        projected: (T, C + I), x, B and C before their convolution, then gates. steps: (T, H), inputs of time
        steps.
        """

    def replay_mamba2(
        self, states: StateStore, layer: int, count: int, spec: Mamba2Spec, weights: MixerWeights
    ) -> None:
        """`replay_delta` for a layer with a mixer."""

    def replay_conv(self, states: StateStore, layer: int, count: int) -> None:
        """`replay_delta` for a layer with a short convolution."""

    def short_conv(
        self, projected: Array, states: StateStore, layer: int, spec: ConvSpec, weights: Array
    ) -> Array:
        """The gated short convolution over T tokens, (T, C), as `gated_delta`; may overwrite projected.

        projected: (T, 3 * C): b, c and x. weights: (taps, C), oldest input first.
        """

    def sigmoid_gated(self, x: Array, gates: Array) -> Array:
        """x * sigmoid(gates), elementwise; may overwrite x."""
