"""The reference backend against closed forms, and the forward pass against a second writing of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend, activate
from ondevice.callbacks import Cancelled
from ondevice.config import QuantConfig
from ondevice.errors import BudgetError, BundleError, FlashReadError, UsageError
from ondevice.kernels import _native
from ondevice.model.rope import Rope
from ondevice.model.sequence_state import KVLayout, SequenceState, allocate_block
from ondevice.model.transformer import Transformer
from ondevice.model_config import ACTIVATIONS, Activation, FeedForwardSpec, ModelConfig
from tests.support.engines import every_logits
from tests.support.sources import (
    ArrayFeedForward,
    ArrayLinear,
    RandomWeights,
    quantise_rows,
    record_layout,
    tiny_config,
)

BACKEND = ReferenceBackend()


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cache(config: ModelConfig, kv_bits: Any = 16) -> SequenceState:
    return SequenceState(KVLayout(config, kv_bits))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_linear_multiplies_the_dequantised_rows(bits: Any) -> None:
    weight, bias, x = normal(33, 100), normal(33, seed=1), normal(3, 100, seed=2)
    *_, exact = quantise_rows(weight, bits)
    product = BACKEND.linear(x, BACKEND.load_linear(ArrayLinear(weight, bits, bias)))
    np.testing.assert_allclose(product, x @ exact.T + bias, rtol=1e-5, atol=1e-5)
    assert np.abs(exact - weight).max() < {4: 0.25, 8: 0.02, 16: 0.002}[bits]


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_feed_forward_reads_gate_up_and_down_from_the_records(bits: Any) -> None:
    config = tiny_config()
    gate, up, down = (normal(72, 40, seed=seed) for seed in range(3))
    source = ArrayFeedForward(gate, up, down, record_layout(config, QuantConfig(bits)))
    x = normal(2, 40, seed=9)
    out = BACKEND.feed_forward(
        x, BACKEND.load_feed_forward(0, source), FeedForwardSpec("relu"), ForwardBatch(range(len(x)))
    )
    gate, up, down = (quantise_rows(matrix, bits)[3] for matrix in (gate, up, down))
    np.testing.assert_allclose(out, np.maximum(x @ gate.T, 0) * (x @ up.T) @ down, rtol=1e-4, atol=1e-4)


def test_activations_at_known_points() -> None:
    x = np.array([-1e4, -1.0, 0.0, 1.0, 1e4], dtype=np.float32)
    phi = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    tanh = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))
    expected: dict[Activation, list[float]] = {
        "silu": [0, -1 / (1 + math.e), 0, 1 / (1 + 1 / math.e), 1e4],
        "gelu": [0, phi - 1, 0, phi, 1e4],
        "gelu_tanh": [0, tanh - 1, 0, tanh, 1e4],
        "relu": [0, 0, 0, 1, 1e4],
        "relu2": [0, 0, 0, 1, 1e8],
        "fatrelu": [0, 0, 0, 0, 1e4],
        "clamped_swish": [
            0,
            -1 / (1 + math.e**1.702),
            0,
            1 / (1 + math.e**-1.702),
            7 / (1 + math.e**-11.914),
        ],
    }
    assert set(expected) == set(ACTIVATIONS)
    for name, values in expected.items():
        np.testing.assert_allclose(activate(x, name, 1.0), values, rtol=1e-6, atol=1e-30, err_msg=name)


def test_rms_norm_of_a_constant_row_is_its_sign_times_the_weight() -> None:
    weight = normal(16)
    np.testing.assert_allclose(
        BACKEND.normed(np.full((2, 16), -3.0, np.float32), Norm(weight, 1e-9))[1], -weight
    )


def test_rope_rotates_pairs_half_a_head_apart_and_keeps_relative_angles() -> None:
    config = tiny_config(head_dim=4)
    rope = Rope(config.ropes[0])
    turned = BACKEND.rope(np.array([[[1, 0, 0, 0]]], np.float32), *rope.tables(np.arange(1, 2)))
    np.testing.assert_allclose(turned[0, 0], [math.cos(1), 0, math.sin(1), 0], rtol=1e-6)
    q, k = normal(1, 1, 4), normal(1, 1, 4, seed=1)

    def score(at: int, back: int) -> float:
        turned_q = BACKEND.rope(q, *rope.tables(np.arange(at, at + 1)))
        turned_k = BACKEND.rope(k, *rope.tables(np.arange(at - back, at - back + 1)))
        return float((turned_q * turned_k).sum())

    assert score(100, 7) == pytest.approx(score(12, 7), abs=1e-5)
    assert score(100, 7) != pytest.approx(score(100, 8), abs=1e-3)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_keys_and_values_are_stored_as_the_layout_says(kv_bits: Any) -> None:
    config = tiny_config()
    kv = cache(config, kv_bits)
    kv.reserve(70)
    k, v = normal(1, 2, 10), normal(1, 2, 10, seed=1)
    v[0, 1] = 0
    BACKEND.kv_write(kv, 1, k, v, 83)
    layout, block, slot = kv.layout, kv.blocks[1], 19
    for head in range(2):
        for x, is_value in ((k[0, head], False), (v[0, head], True)):
            start = layout.head_offset(1, head) + is_value * layout.head_bytes(1) // 2
            codes = block[start : start + layout.codes_bytes(1)].view(
                np.float16 if kv_bits == 16 else np.int8
            )
            stored = codes.reshape(64, 10)[slot] if is_value else codes.reshape(4, 10, 16)[1, :, slot - 16]
            assert np.count_nonzero(codes) == np.count_nonzero(stored)
            if kv_bits == 16:
                assert (stored == x.astype(np.float16)).all()
                continue
            largest = np.abs(x).max()
            at = start + layout.codes_bytes(1) + slot * 4
            assert block[at : at + 4].view(np.float32)[0] == np.float32(largest / np.float32(127))
            assert np.abs(stored).max() == (127 if largest else 0)
            np.testing.assert_allclose(stored * (largest / 127), x, atol=largest / 253)
    assert not kv.blocks[0].any()


@pytest.mark.parametrize("window", [0, 1, 5])
def test_attention_sees_its_window_and_nothing_after_it(window: int) -> None:
    config = tiny_config()
    kv = cache(config)
    kv.reserve(80)
    k, v = (normal(80, 2, 10, seed=seed).astype(np.float16).astype(np.float32) for seed in (1, 2))
    BACKEND.kv_write(kv, 0, k, v, 0)
    q = normal(4, 4, 10)
    spec = replace(config.layers[0].attention, window=window)
    out = BACKEND.attention(q, kv, 0, 62, spec).reshape(4, 4, 10)
    for token in range(4):
        last = 62 + token
        seen = slice(max(0, last - window + 1) if window else 0, last + 1)
        for head in range(4):
            scores = k[seen, head // 2].astype(np.float64) @ q[token, head] / math.sqrt(10)
            weights = np.exp(scores - scores.max())
            expected = weights @ v[seen, head // 2] / weights.sum()
            np.testing.assert_allclose(out[token, head], expected, rtol=1e-5, atol=1e-6)


def simple_forward(weights: RandomWeights, tokens: list[int]) -> np.ndarray:
    """The model without cache, heads loop or backend, in float64 on f16-rounded weights."""
    config = weights.config
    m = {name: values.astype(np.float16).astype(np.float64) for name, values in weights.matrices.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm.eps) * weights.vectors[name]

    cos, sin = Rope(config.ropes[0]).tables(np.arange(len(tokens)))
    turn = (cos + 1j * sin)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        half = config.head_dim // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = m["embedding"][tokens]
    mask = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for i in range(config.num_layers):
        qkv = norm(x, f"{i}.attention_norm") @ m[f"{i}.qkv"].T + weights.vectors[f"{i}.qkv.bias"]
        heads = qkv.reshape(len(tokens), -1, config.head_dim)
        q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        q, k = rotate(norm(q, f"{i}.q_norm")), rotate(norm(k, f"{i}.k_norm"))
        k, v = (np.repeat(a, config.num_heads // config.num_kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        scores = np.exp(np.where(mask, scores, -np.inf))
        context = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + context.reshape(len(tokens), -1) @ m[f"{i}.out"].T + weights.vectors[f"{i}.out.bias"]
        h = norm(x, f"{i}.feed_forward_norm")
        gate = h @ m[f"{i}.gate"].T
        x = x + gate / (1 + np.exp(-gate)) * (h @ m[f"{i}.up"].T) @ m[f"{i}.down"]
    return norm(x, "final_norm") @ m["head"].T


ALL_OPTIONS = tiny_config(attention_bias=True, attention_output_bias=True, qk_norm=True)
TOKENS = np.random.default_rng(3).integers(0, 50, 70).tolist()


def loaded(config: ModelConfig = ALL_OPTIONS) -> Transformer:
    return RandomWeights(config).load(BACKEND)


def test_forward_equals_the_same_model_written_without_cache_or_backend() -> None:
    logits = every_logits(loaded(), TOKENS, cache(ALL_OPTIONS))
    expected = simple_forward(RandomWeights(ALL_OPTIONS), TOKENS)
    assert logits is not None
    # Keys and values are rounded to float16, which the plain writing doesn't do.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("split", [1, 7, 64])
def test_splitting_a_prompt_changes_nothing_but_rounding(split: int, kv_bits: Any) -> None:
    model = loaded()
    whole = every_logits(model, TOKENS, cache(ALL_OPTIONS, kv_bits))
    kv = cache(ALL_OPTIONS, kv_bits)
    parts = [every_logits(model, TOKENS[i : i + split], kv) for i in range(0, len(TOKENS), split)]
    assert kv.tokens == TOKENS
    assert whole is not None
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-2 if kv_bits == 8 else 2e-3)


def test_the_logits_wanted_are_the_logits_returned() -> None:
    model = loaded()
    every = every_logits(model, TOKENS, cache(ALL_OPTIONS))
    last = model.forward(TOKENS, cache(ALL_OPTIONS), "last")
    kv = cache(ALL_OPTIONS)
    assert model.forward(TOKENS, kv, "none") is None
    assert kv.length == len(TOKENS)
    assert every is not None
    assert last is not None
    assert (every.shape, last.shape) == ((70, 50), (1, 50))
    np.testing.assert_allclose(last[0], every[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("run", [Transformer.forward, every_logits])
def test_cancellation_acts_between_layers_and_leaves_the_cache_as_it_was(run: Callable[..., Any]) -> None:
    model, kv = loaded(), cache(ALL_OPTIONS)
    model.forward(TOKENS[:10], kv)
    before = [block.copy() for block in kv.blocks]
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked == 2

    with pytest.raises(Cancelled):
        run(model, TOKENS[10:], kv, cancelled=cancelled)
    assert (asked, kv.tokens, len(kv.blocks)) == (2, TOKENS[:10], len(before))
    again = model.forward(TOKENS[10:], kv)
    fresh = model.forward(TOKENS, cache(ALL_OPTIONS))
    assert again is not None
    np.testing.assert_allclose(again, fresh, rtol=0, atol=2e-3)


@pytest.mark.parametrize("run", [Transformer.forward, every_logits])
def test_a_refused_block_leaves_the_cache_as_it_was(run: Callable[..., Any]) -> None:
    out = []

    def allocate(nbytes: int) -> Any:
        if len(out) == 1:
            raise BudgetError("no more blocks", required_bytes=2 * nbytes)
        out.append(nbytes)
        return allocate_block(nbytes)

    model, kv = loaded(), SequenceState(KVLayout(ALL_OPTIONS), allocate)
    model.forward(TOKENS[:60], kv)
    with pytest.raises(BudgetError):
        run(model, TOKENS[60:], kv)
    assert (kv.tokens, len(kv.blocks)) == (TOKENS[:60], 1)


@pytest.mark.parametrize("run", [Transformer.forward, every_logits])
def test_a_read_that_fails_leaves_the_cache_as_it_was(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any, **__: Any) -> Float32:
        raise FlashReadError("a record doesn't match its checksum")

    model, kv = loaded(), cache(ALL_OPTIONS)
    model.forward(TOKENS[:10], kv)
    monkeypatch.setattr(ReferenceBackend, "feed_forward", damaged)
    with pytest.raises(FlashReadError):
        run(model, TOKENS[10:], kv)
    assert (kv.tokens, len(kv.blocks)) == (TOKENS[:10], 1)


@pytest.mark.parametrize("tokens", [[], [50], [3, -1]])
def test_token_ids_outside_the_vocabulary_are_refused(tokens: list[int]) -> None:
    kv = cache(ALL_OPTIONS)
    with pytest.raises(UsageError, match="token"):
        loaded().forward(tokens, kv)
    assert (kv.length, kv.blocks) == (0, [])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_seen(value: float) -> None:
    logits = np.full((2, 37), -3.4e38, dtype=np.float32)
    assert _native.all_finite(logits)
    logits[1, 36] = value
    assert not _native.all_finite(logits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_that_give_no_finite_logits_are_an_error_not_text() -> None:
    weights = RandomWeights(ALL_OPTIONS)
    weights.matrices["1.up"][3, 3] = np.nan
    kv = cache(ALL_OPTIONS)
    with pytest.raises(BundleError, match="not finite"):
        weights.load(BACKEND).forward([1, 2, 3], kv)
    assert kv.length == 0
