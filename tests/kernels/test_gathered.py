"""The feed-forward of the neurons that fire, from their records, against the dense one: equal bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32
from ondevice.backends.cpu_neurons import native_form
from ondevice.bundle.layout import neuron_layout
from ondevice.config import QuantConfig, RowFormat
from ondevice.kernels import _native
from ondevice.model_config import Activation, FeedForwardSpec
from tests.kernels.test_kernels import RUNNERS, TARGETS, normal, on_every_target, packed
from tests.support.sources import FEED_FORWARDS, ArrayFeedForward, Bits, form, tiny_config, with_feed_forward

RELU = FeedForwardSpec("relu")
ZEROING = {"relu": RELU, "relu2": FeedForwardSpec("relu2")} | {
    kind: spec for kind, spec in FEED_FORWARDS.items() if spec.zeros_gates
}
GateForm = tuple[int, float, bool, float, float]


@dataclass(frozen=True)
class Layer:
    """Random neurons of which about a tenth fires for a token, and a run of them never does."""

    source: ArrayFeedForward
    records: Bytes
    stored: RowFormat
    bias: Float32 | None = None
    least: float = 0.0
    """Neurons with a gate above this fire."""

    @staticmethod
    @lru_cache(maxsize=2)
    def of(hidden: int, neurons: int, stored: Bits | RowFormat, spec: FeedForwardSpec = RELU) -> Layer:
        stored = stored if isinstance(stored, RowFormat) else RowFormat(stored)
        quant = QuantConfig(stored.bits, (("feed_forward", stored),))
        gate, up, down = (normal(neurons, hidden, seed=seed) for seed in range(3))
        gate[neurons // 4 : neurons // 2] = -np.abs(gate[neurons // 4 : neurons // 2])
        config = tiny_config(hidden_size=hidden, intermediate_size=neurons)
        layout = neuron_layout(with_feed_forward(config, spec), quant, 0)
        source = ArrayFeedForward(gate - 0.15, up if spec.gated else None, down, layout)
        bias = normal(neurons, seed=3) / 10 if spec.bias else None
        return Layer(source, source.read(0, neurons), stored, bias, spec.threshold)

    @property
    def native(self) -> _native.FeedForward:
        layout = self.source.layout
        gate, *up, down = layout.row_offsets
        where = (layout.stride, gate, up[0] if up else None, down)
        return _native.FeedForward(self.source.hidden_size, self.stored, *where, self.bias)

    def dense(self, runner: _native.Runner, x: Float32, activation: GateForm) -> Float32:
        layer, blocks = self.native, -(-self.source.num_neurons // 64)
        segment = _native.Segment(layer.segment_bytes(blocks))
        layer.pack(runner, segment, blocks, 0, self.records)
        out = np.full(x.shape, np.nan, dtype=np.float32)
        forward = _native.FeedForwardPass(runner, layer, x, activation)
        forward.add([segment])
        forward.finish(out)
        return out

    def gates(self, runner: _native.Runner, x: Float32) -> Float32:
        out = np.empty((len(x), self.source.num_neurons), dtype=np.float32)
        packed(runner, self.source.gate, self.stored)[0].forward(runner, x, self.bias, out)
        return out

    def without(self, removed: NDArray[np.bool_]) -> Layer:
        """The same layer, but these neurons (F,) contribute nothing: their up and down rows are zero."""
        records = self.records.copy()
        records[removed, self.source.layout.part_offsets[1] :] = 0
        return replace(self, records=records)

    def selected(self, runner: _native.Runner, x: Float32, scores: Float32, activation: GateForm) -> Float32:
        """Those with a score (T, F) above zero, each from a copy of its whole record."""
        ids = np.flatnonzero((scores > 0).any(axis=0)).astype(np.int32)
        copies = [self.records[i].copy() for i in ids]
        parts = np.array([copy.ctypes.data for copy in copies], dtype=np.uint64)
        out = np.full(x.shape, np.nan, dtype=np.float32)
        forward = _native.FeedForwardPass(runner, self.native, x, activation)
        forward.add_selected(ids, parts, True, scores)
        forward.finish(out)
        return out

    def gathered(
        self, runner: _native.Runner, x: Float32, activation: GateForm, also: int = 0, blocks: int = 1 << 20
    ) -> Float32:
        """The same from scattered copies of the records of those that fire, and of `also` that don't.

        At most `blocks` blocks of 64 stored neurons are added at a time.
        """
        gates = self.gates(runner, x)
        chosen = (gates > self.least).any(axis=0)
        chosen[np.flatnonzero(~chosen)[:also]] = True
        ids = np.flatnonzero(chosen).astype(np.int32)
        part = self.source.layout.part_offsets[1]
        copies = [self.records[i, part:].copy() for i in ids]
        parts = np.array([copy.ctypes.data for copy in copies], dtype=np.uint64)
        out = np.full(x.shape, np.nan, dtype=np.float32)
        forward = _native.FeedForwardPass(runner, self.native, x, activation)
        for first in range(0, self.source.num_neurons, 64 * blocks):
            batch = (ids >= first) & (ids < first + 64 * blocks)
            forward.add_selected(ids[batch], parts[batch], False, gates)
        forward.finish(out)
        return out

    def alone(self, runner: _native.Runner, x: Float32, activation: GateForm) -> Float32:
        """The same as an expert, from records of which nothing but the gate row is a number if none fires."""
        records, out = self.records.copy(), np.full(x.shape, np.nan, dtype=np.float32)
        idle = ~(self.gates(runner, x) > self.least).any(axis=0)
        records[idle, self.source.layout.part_offsets[1] :] = 0xFF
        self.native.forward_records(runner, x, records.ctypes.data, len(records), activation, out)
        return out


@pytest.mark.fast(
    "1-1-4-*-1", "64-64-8-*-5", "100-200-*-2", "100-200-4-*-5", "576-321-4-drelu-19", "576-321-16-relu-1"
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 19])
@pytest.mark.parametrize("kind", ZEROING)
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize(("hidden", "neurons"), [(1, 1), (64, 64), (100, 200), (576, 321)])
def test_the_neurons_that_fire_give_the_dense_bits(
    hidden: int, neurons: int, bits: Bits, kind: str, tokens: int
) -> None:
    spec = ZEROING[kind]
    layer, x, act = Layer.of(hidden, neurons, bits, spec), normal(tokens, hidden, seed=3), native_form(spec)
    dense = on_every_target(lambda runner: layer.dense(runner, x, act))
    assert on_every_target(lambda runner: layer.gathered(runner, x, act)).tobytes() == dense.tobytes()
    assert on_every_target(lambda runner: layer.gathered(runner, x, act, also=9)).tobytes() == dense.tobytes()
    in_batches = on_every_target(lambda runner: layer.gathered(runner, x, act, blocks=2))
    assert in_batches.tobytes() == dense.tobytes()
    scores = layer.gates(RUNNERS[TARGETS[0], 1], x) - np.float32(layer.least)
    whole = on_every_target(lambda runner: layer.selected(runner, x, scores, act))
    assert whole.tobytes() == dense.tobytes()
    if not spec.bias:
        alone = on_every_target(lambda runner: layer.alone(runner, x, act))
        assert alone.tobytes() == dense.tobytes()


@pytest.mark.fast("100-*-silu", "1088-[58]-relu")
@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize("hidden", [100, 1088])
def test_only_what_a_token_selects_counts_for_it(hidden: int, bits: Bits, activation: Activation) -> None:
    layer, act = Layer.of(hidden, 200, bits), form(activation)
    x, scores = normal(3, hidden, seed=3), normal(3, 200, seed=4)
    scores[:, 64:128] = -1
    together = on_every_target(lambda runner: layer.selected(runner, x, scores, act))
    for token in range(3):
        alone = on_every_target(
            lambda runner, t=token: layer.selected(runner, x[t : t + 1], scores[t : t + 1], act)
        )
        dense = on_every_target(
            lambda runner, t=token: layer.without(scores[t] <= 0).dense(runner, x[t : t + 1], act)
        )
        assert alone.tobytes() == dense.tobytes() == together[token : token + 1].tobytes()


@pytest.mark.fast("16-0.6-4", "5-0.1-8", "2-0.1-*", "1-0.6-5")
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_gates_of_any_sign_count_unless_they_are_zero(bits: Bits, share: float, tokens: int) -> None:
    """As with statistical cutoffs: what is cut off has a gate of zero. Tokens share few neurons, or most."""
    layer, act = Layer.of(200, 330, bits), form("silu")
    x, part = normal(tokens, 200, seed=3), layer.source.layout.part_offsets[1]
    rng = np.random.default_rng(5)

    def selected(runner: _native.Runner, rows: slice, cut: NDArray[np.bool_]) -> Float32:
        gates = layer.gates(runner, x[rows])
        gates[cut[rows]] = np.where(rng.random(cut[rows].sum()) < 0.5, 0.0, -0.0)
        ids = np.flatnonzero((gates != 0).any(axis=0)).astype(np.int32)
        copies = [layer.records[i, part:].copy() for i in ids]
        parts = np.array([copy.ctypes.data for copy in copies], dtype=np.uint64)
        out = np.full(x[rows].shape, np.nan, dtype=np.float32)
        forward = _native.FeedForwardPass(runner, layer.native, x[rows], act)
        forward.add_selected(ids, parts, False, gates)
        forward.finish(out)
        return out

    cut = rng.random((tokens, 330)) > share
    together = on_every_target(lambda runner: selected(runner, slice(tokens), cut))
    for token in range(tokens):
        one = slice(token, token + 1)
        alone = on_every_target(lambda runner, rows=one: selected(runner, rows, cut))
        dense = on_every_target(
            lambda runner, rows=one, t=token: layer.without(cut[t]).dense(runner, x[rows], act)
        )
        assert alone.tobytes() == dense.tobytes() == together[one].tobytes()


def patterned_scores(pattern: str, tokens: int, neurons: int) -> Float32:
    """Scores (T, F) by which each token selects its own neurons."""
    scores = normal(tokens, neurons, seed=4)
    if pattern == "sparse":
        scores -= 1.5
    elif pattern == "dense":
        scores = np.abs(scores) + 0.1
    elif pattern == "runs":
        # Blocks that fire whole for some tokens and not at all for others, and a token that selects none.
        scores = np.abs(scores)
        scores[::2, : neurons // 2] *= -1
        scores[-1] = -1
    else:
        # Every neuron counts for one token alone.
        scores = -np.abs(scores)
        scores[np.arange(neurons) % tokens, np.arange(neurons)] *= -1
    return scores


@pytest.mark.fast(
    "3-200-*", "8-200-330-4-*", "33-200-330-4-sparse", "16-1100-150-[58]-runs", "7-1100-150-16-alone"
)
@pytest.mark.parametrize("pattern", ["sparse", "dense", "runs", "alone"])
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize(("hidden", "neurons"), [(200, 330), (1100, 150)])
@pytest.mark.parametrize("tokens", [2, 3, 4, 7, 8, 16, 33])
def test_tokens_together_have_the_bits_of_each_alone(
    hidden: int, neurons: int, bits: Bits, tokens: int, pattern: str
) -> None:
    layer, act = Layer.of(hidden, neurons, bits), form("silu")
    x, scores = normal(tokens, hidden, seed=3), patterned_scores(pattern, tokens, neurons)
    together = on_every_target(lambda runner: layer.selected(runner, x, scores, act))
    runner = _native.Runner(1, "auto")
    for token in range(tokens):
        one = slice(token, token + 1)
        assert layer.selected(runner, x[one], scores[one], act).tobytes() == together[one].tobytes()


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
def test_more_than_scratch_memory_holds_at_once(bits: Bits) -> None:
    """600 tokens x 1000 neurons are more hidden values than are computed at a time."""
    layer, act = Layer.of(64, 1000, bits), form("relu")
    x, runner = normal(600, 64, seed=3), _native.Runner(2, "auto")
    assert layer.gathered(runner, x, act).tobytes() == layer.dense(runner, x, act).tobytes()


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("broken", [np.nan, np.inf, 3e38])
def test_what_is_no_number_stays_with_its_token(bits: Bits, broken: float) -> None:
    layer, act = Layer.of(200, 130, bits), form("relu")
    x, scores = normal(9, 200, seed=3), normal(9, 130, seed=4)
    x[4, 7] = broken
    alone = [
        layer.selected(RUNNERS["scalar", 1], x[t : t + 1], scores[t : t + 1], act) for t in range(len(x))
    ]
    for runner in RUNNERS.values():
        together = layer.selected(runner, x, scores, act)
        assert np.isfinite(np.delete(together, 4, axis=0)).all()
        # The sign of what is no number is the instruction set's affair.
        np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
def test_no_neuron_at_all_gives_zeros(bits: Bits) -> None:
    layer, runner = Layer.of(100, 70, bits), _native.Runner(1, "auto")
    x, out = normal(2, 100), np.full((2, 100), np.nan, dtype=np.float32)
    forward = _native.FeedForwardPass(runner, layer.native, x, form("relu"))
    none = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint64)
    scores = np.zeros((2, 70), dtype=np.float32)
    forward.add_selected(*none, False, scores)
    forward.finish(out)
    assert not out.any()


@pytest.mark.parametrize("ids", [[3, 3], [5, 4], [-1, 2], [2, 70]])
def test_ids_that_do_not_ascend_within_the_layer_are_refused(ids: list[int]) -> None:
    layer, runner = Layer.of(64, 70, 8), _native.Runner(1, "auto")
    parts = np.full(2, layer.records.ctypes.data, dtype=np.uint64)
    forward = _native.FeedForwardPass(runner, layer.native, normal(1, 64), form("relu"))
    with pytest.raises(ValueError, match="ascend"):
        forward.add_selected(np.array(ids, dtype=np.int32), parts, False, np.ones((1, 70), dtype=np.float32))


def test_a_pass_ends_where_its_scratch_memory_is_used_again() -> None:
    layer, runner = Layer.of(64, 70, 8), _native.Runner(1, "auto")
    x, out = normal(2, 64), np.empty((2, 64), dtype=np.float32)

    def begun() -> _native.FeedForwardPass:
        return _native.FeedForwardPass(runner, layer.native, x, form("relu"))

    for use in (runner.trim, lambda: layer.gates(runner, x), begun):
        forward = begun()
        use()
        with pytest.raises(ValueError, match="another op"):
            forward.add([])
        with pytest.raises(ValueError, match="another op"):
            forward.finish(out)
    forward = begun()
    forward.finish(out)
    with pytest.raises(ValueError, match="is finished"):
        forward.finish(out)
