"""What one call does of a layer, against the kernels it is made of called one by one: equal bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32, HeadNorms, Norm
from ondevice.backends.reference import activate, read_rows
from ondevice.bundle.layout import RecordLayout
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.config import QuantConfig
from ondevice.converters.architectures.common import score_scale
from ondevice.kernels import _native
from tests.backends.test_token_tree import PARENTS, TokenTree
from tests.kernels.test_gathered import Layer
from tests.kernels.test_kernels import RUNNERS, SHAPES, TARGETS, TOKENS, normal, on_every_target, packed
from tests.support.sources import ArrayFeedForward, Bits, form, record_layout, records, tiny_config

EPS = 1e-5
SCALAR = RUNNERS["scalar", 1]


def normed(x: Float32, weight: Float32) -> Float32:
    out = np.empty_like(x)
    _native.norm(SCALAR, x, Norm(weight, EPS), out)
    return out


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_product_of_normed_rows_is_added_bit_for_bit(
    tokens: int, shape: tuple[int, int], bits: int
) -> None:
    rows, cols = shape
    weight, bias, norm = normal(rows, cols), normal(rows, seed=1), normal(cols, seed=2)
    x, added = normal(tokens, cols, seed=3), normal(tokens, rows, seed=4)
    expected = np.empty_like(added)
    packed(SCALAR, weight, bits)[0].forward(SCALAR, normed(x, norm), bias, expected)
    expected += added

    def run(runner: _native.Runner) -> Float32:
        matrix, out = packed(runner, weight, bits)[0], added.copy()
        matrix.forward(runner, x, bias, out, Norm(norm, EPS), out)
        apart = np.full_like(out, np.nan)
        matrix.forward(runner, x, bias, apart, Norm(norm, EPS), added)
        assert apart.tobytes() == out.tobytes()
        return out

    assert on_every_target(run).tobytes() == expected.tobytes()


@pytest.mark.fast("*-100-200-*", "1-1-1-4", "1-192-321-8")
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("hidden", "neurons"), [(1, 1), (64, 64), (100, 200), (192, 321)])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_feed_forward_of_normed_rows_is_added_bit_for_bit(
    tokens: int, hidden: int, neurons: int, bits: Bits
) -> None:
    gate, up, down = (normal(neurons, hidden, seed=seed) for seed in range(3))
    layout = record_layout(tiny_config(hidden_size=hidden, intermediate_size=neurons), QuantConfig(bits))
    source = ArrayFeedForward(gate, up, down, layout)
    x, norm, blocks = normal(tokens, hidden, seed=3), normal(hidden, seed=4), -(-neurons // 64)

    def run(runner: _native.Runner, wide: bool) -> Float32:
        layer = _native.FeedForward(hidden, bits, layout.stride, *layout.row_offsets)
        segment = _native.Segment(layer.segment_bytes(blocks))
        layer.pack(runner, segment, blocks, 0, source.read(0, neurons))
        out, silu = x.copy(), form("silu")
        if not wide:
            forward = _native.FeedForwardPass(runner, layer, normed(x, norm), silu)
            forward.add([segment])
            forward.finish(out)
            return out
        forward = _native.FeedForwardPass(runner, layer, x, silu, Norm(norm, EPS))
        forward.add([segment])
        forward.finish(out, out)
        at_once = x.copy()
        layer.forward(runner, at_once, [segment], silu, at_once, Norm(norm, EPS), at_once)
        assert at_once.tobytes() == out.tobytes()
        return out

    expected = run(SCALAR, False) + x
    assert on_every_target(lambda runner: run(runner, True)).tobytes() == expected.tobytes()


@pytest.mark.fast("*-100-200-*", "1-1-1-*-4", "13-576-321-True-4")
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("hidden", "neurons"), [(1, 1), (64, 64), (100, 200), (576, 321)])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_the_neurons_that_count_of_a_layer_that_is_in_memory(
    tokens: int, hidden: int, neurons: int, whole: bool, bits: Bits
) -> None:
    """Scored, chosen and found in one call, or by others: by gates, or predicted for whole records."""
    layer = Layer.of(hidden, neurons, bits)
    x, norm, relu = normal(tokens, hidden, seed=3), normal(hidden, seed=4), form("relu")
    slots = np.random.default_rng(0).permutation(neurons + 3)[:neurons].astype(np.int32)
    stored = np.zeros((neurons + 3, layer.records.shape[1]), dtype=np.uint8)
    stored[slots] = layer.records
    part = 0 if whole else layer.source.layout.part_offsets[1]
    addresses = stored.ctypes.data + part + np.arange(neurons + 3, dtype=np.uint64) * stored.shape[1]

    rank, bias = 5, normal(neurons, seed=5) if whole else None
    down, up = normal(rank, hidden, seed=6), normal(neurons, rank, seed=7)

    def run(runner: _native.Runner, wide: bool) -> Float32:
        out, native = x.copy(), layer.native
        narrow = packed(runner, down, bits)[0] if whole else None
        scorer = packed(runner, up if whole else layer.source.gate, bits)[0]
        if wide:
            places = (slots, addresses, whole, relu, out, Norm(norm, EPS), out)
            count = native.forward_selected(runner, x, scorer, bias, narrow, *places)
            assert 0 <= count <= neurons
            return out
        rows = given = normed(x, norm)
        if narrow is not None:
            given = np.empty((tokens, rank), dtype=np.float32)
            narrow.forward(runner, rows, None, given)
        scores = np.empty((tokens, neurons), dtype=np.float32)
        scorer.forward(runner, given, bias, scores)
        ids = np.flatnonzero((scores > 0).any(axis=0)).astype(np.int32)
        forward = _native.FeedForwardPass(runner, native, rows, relu)
        forward.add_selected(ids, addresses[slots[ids]], whole, scores)
        forward.finish(out)
        return out

    expected = run(SCALAR, False) + x
    assert on_every_target(lambda runner: run(runner, True)).tobytes() == expected.tobytes()


@pytest.mark.fast(
    "2-2-128-layer-8-0", "2-2-128-none-16-5", "4-1-64-head-16-0", "4-1-64-none-8-5", "6-2-10-*-0"
)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("kind", ["none", "head", "layer"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 10), (4, 1, 64), (2, 2, 128)])
def test_one_wide_attention_equals_its_steps_bit_for_bit(
    heads: int, kv_heads: int, dim: int, kind: str, bits: int, window: int
) -> None:
    """A text in three passes, the last of them the nodes of a tree."""
    tree = TokenTree(PARENTS)
    passes = [(0, 1, None), (1, 70, None), (70, 70 + len(tree), (tree.parents, tree.depths))]
    tokens, width = passes[-1][1], (heads + 2 * kv_heads) * dim
    qkv, angle = normal(tokens, width), normal(tokens, dim // 2, seed=1)
    cos, sin = np.cos(angle), np.sin(angle)
    norms, given_norms = _head_norms(kind, heads, kv_heads, dim)
    block_bytes = kv_heads * 2 * 64 * (dim * bits // 8 + (4 if bits == 8 else 0))

    def run(runner: _native.Runner, wide: bool) -> Float32:
        memory = np.zeros((2, block_bytes), dtype=np.uint8)
        blocks = np.array([block.ctypes.data for block in memory], dtype=np.uint64)
        results = []
        for first, last, nodes in passes:
            given, turn = qkv[first:last].copy(), (cos[first:last], sin[first:last])
            out = np.full((last - first, heads * dim), np.nan, dtype=np.float32)
            if wide:
                shape = (0, bits, heads, kv_heads, first, window, score_scale(dim), 0.0)
                _native.attend(runner, given, blocks, *shape, *turn, given_norms, nodes, out)
            else:
                parts = given.reshape(last - first, -1, dim)
                q, k, v = np.split(parts, [heads, heads + kv_heads], axis=1)
                for part, own in zip((q, k), norms, strict=True):
                    for head, norm in enumerate(own):
                        rows = np.ascontiguousarray(part[:, head])
                        _native.norm(runner, rows, norm, rows)
                        part[:, head] = rows
                    _native.testing.rope(runner, part, *turn)
                _native.testing.kv_write(runner, blocks, 0, bits, first, k, v)
                _native.testing.attention(runner, q, blocks, 0, bits, kv_heads, first, window, nodes, out)
            results += [out.tobytes(), given.tobytes()]
        return np.frombuffer(b"".join([*results, memory.tobytes()]), dtype=np.uint8)

    expected = run(SCALAR, False)
    assert on_every_target(lambda runner: run(runner, True)).tobytes() == expected.tobytes()


def test_attention_accepts_normed_values_and_queries_alone() -> None:
    """Values normed by the caller, and keys that are stored already, give the same context."""
    heads, kv_heads, dim, tokens = 4, 2, 10, 9
    qkv, angle = normal(tokens, (heads + 2 * kv_heads) * dim), normal(tokens, dim // 2, seed=1)
    turn, ones = (np.cos(angle), np.sin(angle)), np.ones(dim, np.float32)
    norms = HeadNorms(*(Norm(normal(dim, seed=seed), EPS) for seed in (2, 3)))
    at = (heads + kv_heads) * dim
    given = qkv.copy()
    values = given[:, at:].reshape(-1, dim).copy()
    _native.norm(SCALAR, values, Norm(ones, EPS), values)
    given[:, at:] = values.reshape(tokens, -1)

    def run(runner: _native.Runner, rows: Float32, values: Norm | None, twice: bool) -> Float32:
        memory = np.zeros((1, kv_heads * 2 * 64 * dim * 2), dtype=np.uint8)
        blocks = np.array([memory[0].ctypes.data], dtype=np.uint64)
        out = np.full((tokens, heads * dim), np.nan, dtype=np.float32)
        shape = (0, 16, heads, kv_heads, 0, 0, score_scale(dim), 0.0)
        _native.attend(runner, rows.copy(), blocks, *shape, *turn, norms._replace(v=values), None, out)
        stored = memory.copy()
        if twice:
            queries, out = rows[:, : heads * dim].copy(), np.full_like(out, np.nan)
            _native.attend(
                runner, queries, blocks, *shape, *turn, norms._replace(k=None, v=values), None, out, False
            )
            assert np.array_equal(memory, stored)
        return np.frombuffer(out.tobytes() + stored.tobytes(), dtype=np.uint8)

    expected = run(SCALAR, given, None, False).tobytes()
    for twice in (False, True):
        found = on_every_target(lambda runner, twice=twice: run(runner, qkv, Norm(ones, EPS), twice))
        assert found.tobytes() == expected


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_given_gates_take_the_place_of_computed_ones(bits: int) -> None:
    """In a layer whose neurons don't fill its last block, segment by segment."""
    hidden, neurons, tokens = 40, 100, 3
    layout = RecordLayout(((RowLayout(hidden, bits),), (RowLayout(hidden, bits),) * 2))
    gate_values, *others = (normal(neurons, hidden, seed=seed) for seed in range(3))
    stored = records(layout, [[gate_values], others])
    x, gates = normal(tokens, hidden, seed=4), normal(tokens, neurons, seed=5)

    def run(runner: _native.Runner, given: Float32 | None) -> Float32:
        gate, up, down = layout.row_offsets
        layer = _native.FeedForward(hidden, bits, layout.stride, gate, up, down)
        segments = []
        for first in (0, 64):
            segments.append(_native.Segment(layer.segment_bytes(1)))
            layer.pack(runner, segments[-1], 1, 0, np.ascontiguousarray(stored[first : first + 64]))
        out = np.empty((tokens, hidden), dtype=np.float32)
        forward = _native.FeedForwardPass(runner, layer, x, form("gelu_tanh"))
        for segment in segments:
            forward.add([segment], None, given)
        forward.finish(out)
        return out

    gate_rows = read_rows(stored, layout.row_offsets[0], RowLayout(hidden, bits))
    up_rows, down_rows = (read_rows(stored, at, RowLayout(hidden, bits)) for at in layout.row_offsets[1:])
    assert not np.array_equal(run(SCALAR, None), run(SCALAR, gates))
    expected = (activate(gates, "gelu_tanh") * (x @ up_rows.T)) @ down_rows
    found = on_every_target(lambda runner: run(runner, gates))
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    computed = (activate(x @ gate_rows.T, "gelu_tanh") * (x @ up_rows.T)) @ down_rows
    assert np.abs(run(SCALAR, None) - computed).max() < 0.03 * np.abs(computed).max()
    with pytest.raises(ValueError, match="more neurons than gates"):
        run(SCALAR, gates[:, :60].copy())
    with pytest.raises(ValueError, match="gates are"):
        run(SCALAR, gates[:2].copy())


def _head_norms(kind: str, heads: int, kv_heads: int, dim: int) -> tuple[Any, HeadNorms | None]:
    """The norm of each head of queries and of keys, and all of them as `attend` takes them."""
    if kind == "none":
        return ([], []), None
    if kind == "head":
        q, k = (Norm(normal(dim, seed=seed), EPS) for seed in (2, 3))
        return ([q] * heads, [k] * kv_heads), HeadNorms(q, k)
    whole = HeadNorms(
        *(
            Norm(normal(count * dim, seed=seed), EPS, normal(count * dim, seed=seed + 2), True)
            for count, seed in ((heads, 2), (kv_heads, 3))
        )
    )
    each = [
        [
            norm._replace(weight=weight, bias=bias)
            for weight, bias in zip(norm.weight.reshape(-1, dim), norm.bias.reshape(-1, dim), strict=True)
        ]
        for norm in whole[:2]
    ]
    return each, whole


def test_arguments_are_checked() -> None:
    runner, none = RUNNERS[TARGETS[0], 1], np.zeros(0, np.uint64)
    x, out, wrong = np.zeros((1, 64), np.float32), np.zeros((1, 16), np.float32), np.zeros(63, np.float32)
    matrix, layer = _native.Matrix(16, 64, 8), _native.FeedForward(64, 8, 204, 0, 68, 136)
    with pytest.raises(ValueError, match="as long as what it norms"):
        matrix.forward(runner, x, None, out, Norm(wrong, EPS))
    with pytest.raises(ValueError, match="shape of out"):
        matrix.forward(runner, x, None, out, None, x)
    with pytest.raises(ValueError, match="as long as what it norms"):
        _native.FeedForwardPass(runner, layer, x, form("relu"), Norm(wrong, EPS))
    with pytest.raises(ValueError, match="shape of out"):
        _native.FeedForwardPass(runner, layer, x, form("relu")).finish(x, out)
    slots, places, relu = np.zeros(16, np.int32), np.zeros(2, np.uint64), form("relu")
    for wrong_slots, narrow, message in (
        (slots + 2, None, "a neuron has no slot"),
        (slots - 1, None, "a neuron has no slot"),
        (slots[1:].copy(), None, "slots are"),
        (slots, matrix, "follow each other"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.forward_selected(runner, x, matrix, None, narrow, wrong_slots, places, False, relu, x)
    qkv, angles, context = np.zeros((1, 24), np.float32), np.zeros((1, 4), np.float32), out[:, :8].copy()
    with pytest.raises(ValueError, match="past the last KV block"):
        _native.attend(runner, qkv, none, 0, 8, 1, 1, 0, 0, 1.0, 0.0, angles, angles, None, None, context)
    for heads, table, norm, to, message in (
        (3, angles, None, context, "qkv is"),
        (1, angles[:, :3].copy(), None, context, "cos and sin"),
        (1, angles, wrong, context, "as long as what it norms"),
        (1, angles, None, out, "out is"),
    ):
        norms = None if norm is None else HeadNorms(Norm(norm, EPS), Norm(norm, EPS))
        with pytest.raises(ValueError, match=message):
            _native.attend(runner, qkv, none, 0, 8, heads, 1, 0, 0, 1.0, 0.0, table, angles, norms, None, to)
