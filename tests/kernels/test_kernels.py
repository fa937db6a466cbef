"""Every kernel against a float64 oracle over shapes with tails, and byte for byte between targets.

What is quantised inside a kernel (activations to int8) is quantised by the oracle's own few lines of numpy,
so that the tolerance covers rounding of float32 sums and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.backends.base import Bytes, Float32, Norm
from ondevice.config import Bits, QuantConfig, RowFormat
from ondevice.kernels import _native
from ondevice.model_config import ACTIVATIONS, Activation
from tests.support.sources import ArrayFeedForward, form, quantise_rows, record_layout, tiny_config

TARGETS = _native.available_targets()
RUNNERS = {(target, threads): _native.Runner(threads, target) for target in TARGETS for threads in (1, 2)}
SHAPES = [(1, 1), (16, 64), (17, 65), (37, 100), (64, 192), (130, 320)]
TOKENS = 13


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_every_target(run: Callable[[_native.Runner], Float32]) -> Float32:
    """The one result of all targets on 1 and 2 threads; fails where a byte differs."""
    results = {key: run(runner) for key, runner in RUNNERS.items()}
    first = results[TARGETS[0], 1]
    for key, result in results.items():
        assert result.tobytes() == first.tobytes(), f"{key} differs from {(TARGETS[0], 1)}"
    return first


def quantised_activations(x: Float32, stored: RowFormat) -> NDArray[np.float64]:
    """What the kernels multiply rows of `stored` with, in float64: x as int8 codes times their scale.

    Each group of the weights' columns has one; with two levels of scales 64 columns have.
    """
    size = 64 if stored.two_levels else stored.group_size
    padded = np.zeros((len(x), -(-x.shape[1] // 64) * 64), dtype=np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, size)
    codes, scales = blockwise_int8(groups)
    return (codes * scales).reshape(padded.shape)


def blockwise_int8(x: Float32) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x (..., n) as the kernels quantise a vector: int8 codes (..., n) and one scale (..., 1), both exact."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(x * (np.float32(127) / largest)), 0)
    return codes.astype(np.float64), (largest / np.float32(127)).astype(np.float64)


@lru_cache(maxsize=4)
def quantised(
    weight: bytes, shape: tuple[int, int], stored: int | RowFormat
) -> tuple[Bytes, NDArray[np.generic], NDArray[np.generic], Float32]:
    """`quantise_rows`, once for all the runners of a test."""
    return quantise_rows(np.frombuffer(weight, np.float32).reshape(shape), stored)  # type: ignore[arg-type]


def packed(
    runner: _native.Runner, weight: Float32, stored: int | RowFormat
) -> tuple[_native.Matrix, NDArray[np.float64]]:
    codes, scales, biases, exact = quantised(np.asarray(weight, np.float32).tobytes(), weight.shape, stored)
    matrix = _native.Matrix(*weight.shape, stored)
    for row in range(0, len(weight), 7):
        part = slice(row, row + 7)
        matrix.load_rows(runner, row, codes[part], scales[part].view(np.uint8), biases[part].view(np.uint8))
    return matrix, exact.astype(np.float64)


def test_scalar_is_always_there_and_last() -> None:
    assert TARGETS[-1] == "scalar"
    assert _native.Runner(1, "auto").target == TARGETS[0]


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_dequantised_rows_matches_float64(bits: int, shape: tuple[int, int]) -> None:
    rows, cols = shape
    weight, bias, x = normal(rows, cols), normal(rows, seed=1), normal(TOKENS, cols, seed=2)

    def run(runner: _native.Runner) -> Float32:
        out = np.full((TOKENS, rows), np.nan, dtype=np.float32)
        packed(runner, weight, bits)[0].forward(runner, x, bias, out)
        return out

    out = on_every_target(run)
    exact = packed(RUNNERS[TARGETS[0], 1], weight, bits)[1]
    used = x.astype(np.float64) if bits == 16 else quantised_activations(x, RowFormat(bits))[:, :cols]
    # Where columns are padded, the padding's codes meet zero activations.
    np.testing.assert_allclose(out, used @ exact.T + bias, rtol=1e-5, atol=2e-5 * np.sqrt(cols))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("tokens", range(1, 10))
def test_the_largest_products_of_all_columns_add_up(tokens: int, bits: int) -> None:
    """AVX2 adds products in 16 bits: codes and activations at their limits would be the first to overflow."""
    rows, cols = 16, 128
    codes = np.full((rows, cols * bits // 8), 255, dtype=np.uint8)
    ones, zeros = (np.full((rows, cols // 64), value, dtype=np.float16).view(np.uint8) for value in (1, 0))
    signs = np.where(np.arange(tokens)[:, None] % 2, -1, 1).astype(np.float32)
    x = np.repeat(signs, cols, axis=1)

    def run(runner: _native.Runner) -> Float32:
        matrix, out = _native.Matrix(rows, cols, bits), np.empty((tokens, rows), dtype=np.float32)
        matrix.load_rows(runner, 0, codes, ones, zeros)
        matrix.forward(runner, x, None, out)
        return out

    expected = np.tile(signs * (2**bits - 1) * cols, rows)
    np.testing.assert_allclose(on_every_target(run), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
def test_a_token_has_the_same_bits_in_any_company(bits: int) -> None:
    weight, x = normal(100, 200), normal(35, 200, seed=1)
    for runner in RUNNERS.values():
        matrix, _ = packed(runner, weight, bits)
        together = np.empty((35, 100), dtype=np.float32)
        matrix.forward(runner, x, None, together)
        for first, last in ((0, 1), (3, 5), (5, 8), (8, 15), (15, 24), (24, 35)):
            apart = np.empty((last - first, 100), dtype=np.float32)
            matrix.forward(runner, x[first:last], None, apart)
            assert apart.tobytes() == together[first:last].tobytes()


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_extreme_codes_do_not_saturate(bits: int) -> None:
    """All codes at their maximum against all activations at theirs: pairs of products pass 2^15."""
    weight = np.tile(np.where(np.arange(128) % 64 == 0, -1.0, 1.0).astype(np.float32), (16, 1))
    x = np.ones((1, 128), dtype=np.float32)

    def run(runner: _native.Runner) -> Float32:
        out = np.empty((1, 16), dtype=np.float32)
        packed(runner, weight, bits)[0].forward(runner, x, None, out)
        return out

    exact = packed(RUNNERS[TARGETS[0], 1], weight, bits)[1]
    np.testing.assert_allclose(on_every_target(run), x.astype(np.float64) @ exact.T, rtol=1e-4)


def hidden_activations(runner: _native.Runner, source: ArrayFeedForward, x: Float32) -> Float32:
    """silu(gate) * up, by kernels that have oracles of their own: the bits that the down projection gets."""
    gate, up = np.empty((2, len(x), source.num_neurons), dtype=np.float32)
    packed(runner, source.gate, source.layout.parts[0][0].stored)[0].forward(runner, x, None, gate)
    packed(runner, source.up, source.layout.parts[0][0].stored)[0].forward(runner, x, None, up)
    h = np.empty(gate.size, dtype=np.float32)
    _native.activate(runner, form("silu"), gate.reshape(-1), up.reshape(-1), h)
    return h.reshape(gate.shape)


def down_oracle(h: Float32, down: Float32, bits: Literal[4, 5, 6, 8]) -> NDArray[np.float64]:
    """(T, D) from h (T, F) and down (F, D), as in down_projection.cc: int8 h * scale, blocks of 64 neurons.

    The codes count from their middle; the biases' share isn't quantised.
    """
    _, scales, biases, exact = quantise_rows(down, bits)
    middle = 1 << (bits - 1)
    neurons, hidden = down.shape
    out = np.zeros((len(h), hidden))
    for group, columns in enumerate(slice(j, j + 64) for j in range(0, hidden, 64)):
        scale, bias = scales[:, group].astype(np.float32), biases[:, group].astype(np.float64)
        offset = bias + middle * scale.astype(np.float64)
        # What is left of a weight is scale * (code - middle), and the scale has moved into the activation.
        centred = (exact[:, columns] - offset[:, None]) / np.where(scale == 0, 1, scale)[:, None]
        moved = h * scale
        for block in (slice(n, n + 64) for n in range(0, neurons, 64)):
            codes, step = blockwise_int8(moved[:, block])
            out[:, columns] += codes * step @ np.rint(centred[block])
        out[:, columns] += (h.astype(np.float64) @ offset)[:, None]
    return out


@pytest.mark.fast("1-1-*", "100-200-*", "64-64-4", "192-321-[48]")
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize(("hidden", "neurons"), [(1, 1), (64, 64), (100, 200), (192, 321)])
def test_the_down_projection_matches_float64(bits: Bits, hidden: int, neurons: int) -> None:
    gate, up, down = (normal(neurons, hidden, seed=seed) for seed in range(3))
    layout = record_layout(tiny_config(hidden_size=hidden, intermediate_size=neurons), QuantConfig(bits))
    source = ArrayFeedForward(gate, up, down, layout)
    x, blocks = normal(TOKENS, hidden, seed=3), -(-neurons // 64)

    def run(runner: _native.Runner) -> Float32:
        layer = _native.FeedForward(hidden, bits, layout.stride, *layout.row_offsets)
        segment = _native.Segment(layer.segment_bytes(blocks))
        layer.pack(runner, segment, blocks, 0, source.read(0, neurons))
        out = np.full((TOKENS, hidden), np.nan, dtype=np.float32)
        forward = _native.FeedForwardPass(runner, layer, x, form("silu"))
        forward.add([segment])
        forward.finish(out)
        return out

    out = on_every_target(run)
    h = hidden_activations(RUNNERS[TARGETS[0], 1], source, x)
    if bits == 16:
        expected = h.astype(np.float64) @ quantise_rows(down, 16)[3].astype(np.float64)
    else:
        expected = down_oracle(h, down, bits)
    terms = np.abs(h).astype(np.float64) @ np.abs(down)
    assert (np.abs(out - expected) <= 1e-6 * terms).all(), np.max(np.abs(out - expected) / terms)


@pytest.mark.fast("4-4-8-8-0", "4-1-64-16-37", "6-2-10-*", "2-2-128-8-1", "2-2-128-16-0")
@pytest.mark.parametrize("window", [0, 1, 37])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 10), (4, 1, 64), (2, 2, 128)])
def test_attention_matches_float64(heads: int, kv_heads: int, dim: int, bits: int, window: int) -> None:
    """Against softmax(q k / sqrt(dim)) v in float64, over keys and values as they are stored."""
    tokens = 150
    q, k, v = (normal(tokens, n, dim, seed=n + 7 * i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    block_bytes = kv_heads * 2 * 64 * (dim * bits // 8 + (4 if bits == 8 else 0))

    def run(runner: _native.Runner) -> Float32:
        memory = np.zeros((3, block_bytes), dtype=np.uint8)
        blocks = np.array([block.ctypes.data for block in memory], dtype=np.uint64)
        _native.testing.kv_write(runner, blocks, 0, bits, 0, k, v)
        out = np.full((tokens, heads * dim), np.nan, dtype=np.float32)
        for first, last in ((0, 1), (1, 70), (70, 150)):
            part = slice(first, last)
            _native.testing.attention(
                runner, q[part], blocks, 0, bits, kv_heads, first, window, None, out[part]
            )
        return out

    stored = []
    for x in (k, v):
        codes, scales = blockwise_int8(x) if bits == 8 else (x.astype(np.float16).astype(np.float64), 1.0)
        stored.append(np.repeat(codes * scales, heads // kv_heads, axis=1).swapaxes(0, 1))
    keys, values = stored
    scores = q.astype(np.float64).swapaxes(0, 1) @ keys.swapaxes(1, 2) / np.sqrt(dim)
    age = np.arange(tokens)[:, None] - np.arange(tokens)
    scores[:, (age < 0) | (age >= (window or tokens))] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = (weights / weights.sum(axis=2, keepdims=True) @ values).swapaxes(0, 1).reshape(tokens, -1)
    np.testing.assert_allclose(on_every_target(run), expected, rtol=0, atol=2e-6)


BROKEN = [[np.nan], [np.inf], [-np.inf], [np.nan, 3.0], [np.inf, np.nan, 1.0]]


@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
@pytest.mark.parametrize("values", BROKEN)
def test_what_is_not_finite_makes_every_output_of_its_token_so(bits: int, values: list[float]) -> None:
    """Whatever comes later in the same lane, and of no other token."""
    weight, x = normal(40, 200), normal(5, 200, seed=1)
    broken = x.copy()
    broken[3, 70 : 70 + 16 * len(values) : 16] = values

    def run(runner: _native.Runner, x: Float32) -> Float32:
        out = np.zeros((5, 40), dtype=np.float32)
        packed(runner, weight, bits)[0].forward(runner, x, None, out)
        return out

    out = on_every_target(lambda runner: run(runner, broken))
    assert not np.isfinite(out[3]).any()
    others = [0, 1, 2, 4]
    assert out[others].tobytes() == on_every_target(lambda runner: run(runner, x))[others].tobytes()


def test_no_activation_makes_a_number_of_nan() -> None:
    gate, up = np.array([np.nan, 1.0, np.nan], np.float32), np.array([1.0, np.nan, np.nan], np.float32)
    for activation in ACTIVATIONS:
        for relu_up in (False,) if activation == "clamped_swish" else (False, True):
            gates = form(activation, up_activation="relu" if relu_up else "none")

            def run(runner: _native.Runner, gates: Any = gates) -> Float32:
                out = np.zeros(3, np.float32)
                _native.activate(runner, gates, gate, up, out)
                return out

            assert np.isnan(on_every_target(run)).all()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 256])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_norm_matches_float64(n: int, biased: bool, centred: bool) -> None:
    x, weight, bias = normal(3, n), normal(n, seed=1), normal(n, seed=2)
    norm = Norm(weight, 1e-5, bias if biased else None, centred)

    def run(runner: _native.Runner) -> Float32:
        out = np.empty_like(x)
        _native.norm(runner, x, norm, out)
        return out

    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=1, keepdims=True) if centred else wide
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    expected = expected + bias if biased else expected
    np.testing.assert_allclose(on_every_target(run), expected, rtol=1e-5, atol=1e-6)

    def added(runner: _native.Runner) -> Float32:
        out = weight + np.zeros_like(x)
        _native.add_normed(runner, out, x, norm)
        return out

    np.testing.assert_allclose(on_every_target(added), weight + expected, rtol=1e-5, atol=1e-6)


def test_the_soft_cap_matches_float64() -> None:
    x = np.concatenate([normal(1, 37), [[0.0, 1e-20, 1e6, -1e6, 200.0]]], axis=1).astype(np.float32)

    def run(runner: _native.Runner) -> Float32:
        out = x.copy()
        _native.soft_cap(runner, out, 30.0)
        return out

    expected = 30.0 * np.tanh(x.astype(np.float64) / 30.0)
    np.testing.assert_allclose(on_every_target(run), expected, rtol=1e-6, atol=1e-5)
    broken = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    _native.soft_cap(RUNNERS[TARGETS[0], 1], broken, 30.0)
    assert np.isnan(broken).all()


@pytest.mark.parametrize("head_dim", [2, 8, 10, 64, 128])
def test_head_norm_and_rope_work_on_slices_of_a_wider_row(head_dim: int) -> None:
    wide = normal(5, 3 * head_dim + 7)
    weight, angle = normal(head_dim, seed=1), normal(5, head_dim // 2, seed=2)
    cos, sin = np.cos(angle), np.sin(angle)

    def run(runner: _native.Runner) -> Float32:
        buffer = wide.copy()
        heads = buffer[:, 7:].reshape(5, 3, head_dim)
        assert np.shares_memory(heads, buffer)
        _native.testing.head_norm(runner, heads, weight, 1e-6)
        _native.testing.rope(runner, heads, cos, sin)
        assert buffer[:, :7].tobytes() == wide[:, :7].tobytes()
        return buffer

    heads = wide[:, 7:].reshape(5, 3, head_dim).astype(np.float64)
    heads = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    a, b = heads[..., : head_dim // 2], heads[..., head_dim // 2 :]
    c, s = cos[:, None], sin[:, None]
    expected = np.concatenate([a * c - b * s, b * c + a * s], axis=2).reshape(5, -1)
    np.testing.assert_allclose(on_every_target(run)[:, 7:], expected, rtol=1e-4, atol=1e-5)


def test_activations_match_float64() -> None:
    from math import erf

    gate = np.concatenate([np.linspace(-30, 30, 1003), [-1e4, -0.0, 0.0, 1e4]]).astype(np.float32)
    up = normal(len(gate))
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        expected: dict[Activation, NDArray[np.float64]] = {
            "silu": wide / (1 + np.exp(-wide)),
            "gelu": wide * np.array([0.5 * (1 + erf(v / np.sqrt(2))) for v in wide]),
            "gelu_tanh": 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))),
            "relu": np.maximum(wide, 0),
            "relu2": np.maximum(wide, 0) ** 2,
            "fatrelu": np.where(wide > np.float32(7.5), wide, 0),
        }
    for activation, values in expected.items():
        threshold = 7.5 if activation == "fatrelu" else 0.0
        for factor, relu_up in ((up, False), (up, True), (None, False)):
            gates = form(activation, threshold=threshold, up_activation="relu" if relu_up else "none")

            def run(runner: _native.Runner, gates: Any = gates, factor: Any = factor) -> Float32:
                out = np.empty_like(gate)
                _native.activate(runner, gates, gate, factor, out)
                return out

            ups = 1.0 if factor is None else np.maximum(factor, 0) if relu_up else factor
            np.testing.assert_allclose(on_every_target(run), values * ups, rtol=2e-6, atol=1e-6)


def test_a_threshold_is_exact() -> None:
    threshold = np.float32(0.01)
    near = [threshold, np.nextafter(threshold, np.float32(0)), np.nextafter(threshold, np.float32(1))]
    gate = np.array([*near, -np.inf, np.inf, -0.0, np.nan], np.float32)

    def run(runner: _native.Runner) -> Float32:
        out = np.empty_like(gate)
        _native.activate(runner, form("fatrelu", threshold=float(threshold)), gate, None, out)
        return out

    expected = np.array([0, 0, near[2], 0, np.inf, 0, np.nan], np.float32)
    np.testing.assert_array_equal(on_every_target(run), expected)


def test_forms_of_gates_are_checked() -> None:
    runner, values = RUNNERS[TARGETS[0], 1], np.zeros(3, np.float32)
    for wrong in ((7, 0.0, False), (-1, 0.0, False), (3, 0.5, False), (5, -0.5, False), (5, np.nan, False)):
        with pytest.raises(ValueError, match="activation"):
            _native.activate(runner, (*wrong, 7.0, 1.702), values, values, values)
    for wrong_clamp in ((0.0, 1.0), (7.0, -1.0), (np.nan, 1.0)):
        with pytest.raises(ValueError, match="clamp and slope"):
            _native.activate(runner, (6, 0.0, False, *wrong_clamp), values, values, values)
    with pytest.raises(ValueError, match="a bias"):
        _native.FeedForward(64, 8, 204, 0, 68, 136, values)
    with pytest.raises(ValueError, match="two rows"):
        _native.FeedForward(64, 8, 204, 0, 68, 68)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_quantised_rows_read_back_near_what_they_were(bits: int) -> None:
    weight = normal(33, 130) * 0.1
    weight[0] = 0.0
    weight[1] = 3.0

    def run(runner: _native.Runner) -> Float32:
        groups = 3
        codes = np.zeros((33, groups * 8 * bits), dtype=np.uint8)
        scales, biases = np.zeros((2, 33, groups), dtype=np.uint16)
        assert _native.quantize_rows(runner, weight, bits, codes, scales, biases)
        rows = np.concatenate([codes, scales.view(np.uint8), biases.view(np.uint8)], axis=1)
        out = np.empty((33, 64 * groups), dtype=np.float32)
        _native.dequantize_rows(runner, bits, rows, 130, out)
        return out

    out = on_every_target(run)[:, :130]
    groups = [weight[:, g : g + 64] for g in (0, 64, 128)]
    steps = [(g.max(axis=1) - g.min(axis=1)) / (2**bits - 1) for g in groups]
    widened = [np.repeat(s[:, None], g.shape[1], 1) for s, g in zip(steps, groups, strict=True)]
    step = np.concatenate(widened, 1)
    if bits == 8:
        # Making zero exact may stretch a step by half a code's share of the range.
        assert (np.abs(out - weight) <= 0.75 * step * (1 + 8 / 256) + 2e-3 * np.abs(weight) + 1e-6).all()
    else:
        # Least squares lets the ends of the range miss by more, so that the rest misses by less.
        square = np.square(out - weight)
        mean = [np.sqrt(square[:, start : start + 64].mean(axis=1)) for start in (0, 64, 128)]
        assert all((m <= 0.29 * s + 1e-3).all() for m, s in zip(mean, steps, strict=True))
    assert (out[0] == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("bits", [4, 5, 6, 8, 16])
def test_quantising_in_place_equals_quantising_a_float32_copy(dtype: type, bits: int) -> None:
    source = normal(70, 45)
    if dtype is np.float16:
        stored = source.astype(np.float16)
        source = stored.astype(np.float32)
    elif dtype is np.uint16:
        stored = (source.view(np.uint32) >> 16).astype(np.uint16)
        source = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = source
    runner = RUNNERS[TARGETS[0], 2]
    for view, plain in ((stored, source), (stored.T, np.ascontiguousarray(source.T))):
        results = []
        for x in (view, plain):
            groups = -(-x.shape[1] // 64)
            codes = np.full((len(x), groups * 8 * bits), 255, dtype=np.uint8)
            scales, biases = np.zeros((2, len(x), groups), dtype=np.uint16)
            assert _native.quantize_rows(runner, x, bits, codes, scales, biases)
            results.append(codes.tobytes() + scales.tobytes() + biases.tobytes())
        assert results[0] == results[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_cannot_be_stored_are_reported(value: float) -> None:
    weight = normal(20, 64)
    weight[7, 5] = value
    for bits in (4, 8, 16):
        codes = np.zeros((20, 8 * bits), dtype=np.uint8)
        scales, biases = np.zeros((2, 20, 1), dtype=np.uint16)
        assert not _native.quantize_rows(RUNNERS[TARGETS[0], 2], weight, bits, codes, scales, biases)


def test_arguments_are_checked_before_any_byte_is_touched() -> None:
    runner = RUNNERS[TARGETS[0], 1]
    matrix = _native.Matrix(16, 64, 4)
    codes, halves = np.zeros((16, 32), dtype=np.uint8), np.zeros((16, 2), dtype=np.uint8)
    with pytest.raises(ValueError, match="outside the matrix"):
        matrix.load_rows(runner, 1, codes, halves, halves)
    with pytest.raises(ValueError, match=r"out is \(T, rows\)"):
        matrix.forward(runner, np.zeros((1, 64), np.float32), None, np.zeros((1, 15), np.float32))
    heads = np.zeros((1, 1, 8), dtype=np.float32)
    with pytest.raises(ValueError, match="past the last KV block"):
        _native.testing.kv_write(runner, np.zeros(0, dtype=np.uint64), 0, 8, 0, heads, heads)
    with pytest.raises(ValueError, match="can't run on this machine"):
        _native.Runner(1, "sse9")
