"""The CPU backend: attention and feed-forward against oracles; one result for every way to run a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import neuron_layout
from ondevice.config import MATRIX_KINDS, MXFP4, TILE_FORMATS, QuantConfig, RowFormat
from ondevice.errors import BackendUnavailableError
from ondevice.kernels import _native
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import ACTIVATIONS, AttentionSpec, FeedForwardSpec, ModelConfig
from tests.support.engines import every_logits
from tests.support.sources import (
    FEED_FORWARDS,
    ArrayFeedForward,
    RandomWeights,
    RecordSource,
    every_block,
    form,
    quantise_rows,
    record_layout,
    tiny_config,
    with_feed_forward,
    with_sinks,
)

TARGETS = _native.available_targets()


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_backend(threads: int = 2, target: str = "auto") -> CpuBackend:
    return CpuBackend(make_runner(threads, target), segment_neurons=64, piece_neurons=64)


def lend(layer: FeedForwardLayer, segments: int) -> None:
    """Make the first `segments` of a layer resident and stream the rest, without a flash reader."""
    del layer.segments[:]
    for index in range(segments):
        neurons = layer.segment_range(index)
        (segment,) = layer.new_segments(1)
        layer.pack(segment, index, neurons.start, layer.source.read(neurons.start, len(neurons)))
        layer.segments.append(segment)

    layer.neurons = RecordSource(layer)


def load(config: ModelConfig, backend: CpuBackend, bits: Any, segments: int = 99) -> Transformer:
    model = RandomWeights(config).load(backend, bits)
    for layer in backend.feed_forwards:
        lend(layer, min(segments, layer.num_segments))
    return model


def logits_of(model: Transformer, tokens: list[int], chunk: int, kv_bits: Any) -> Float32:
    kv = SequenceState(KVLayout(model.config, kv_bits))
    parts = [every_logits(model, tokens[i : i + chunk], kv) for i in range(0, len(tokens), chunk)]
    return np.concatenate(parts)  # type: ignore[arg-type]


@pytest.mark.fast("4-4-8-*", "6-2-10-*", "8-1-64-8-0-2.0-False", "2-2-128-16-5-*")
@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks"),
    [(0, 0.0, False), (1, 0.0, False), (5, 1.5, True), (70, 0.0, False), (0, 2.0, False), (0, 0.0, True)],
)
@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (6, 2, 10), (8, 1, 64), (2, 2, 128)])
def test_attention_equals_the_reference_on_the_same_stored_keys(
    heads: int, kv_heads: int, width: int, kv_bits: Any, window: int, soft_cap: float, has_sinks: bool
) -> None:
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    spec = AttentionSpec(0.4, window=window, soft_cap=soft_cap)
    layout = KVLayout(config, kv_bits)
    tokens = 150
    qkv = normal(tokens, (heads + 2 * kv_heads) * width)
    # Angles of zero: a rotation rounds, and what is stored must be the same.
    cos, sin = np.ones((tokens, width // 2), np.float32), np.zeros((tokens, width // 2), np.float32)
    sinks = np.linspace(-1, 9, heads, dtype=np.float32) if has_sinks else None
    reference, expected_kv = ReferenceBackend(), SequenceState(layout)
    expected_kv.reserve(tokens)
    expected = reference.attend(qkv, expected_kv, 1, 0, cos, sin, spec, sinks=sinks)
    results = []
    for target in TARGETS:
        for threads in (1, 2):
            backend, kv = make_backend(threads, target), SequenceState(layout)
            kv.reserve(tokens)
            out = np.empty((tokens, heads * width), dtype=np.float32)
            for first, last in ((0, 1), (1, 64), (64, 67), (67, 150)):
                chunk = slice(first, last)
                given = qkv[chunk].copy()
                out[chunk] = backend.attend(given, kv, 1, first, cos[chunk], sin[chunk], spec, sinks=sinks)
            for mine, theirs in zip(kv.blocks, expected_kv.blocks, strict=True):
                assert mine.tobytes() == theirs.tobytes()
            results.append(out)
    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.fast("16-gelu_tanh", "8-relu", "4-clamped_swish")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_feed_forward_close_to_float_and_equal_for_every_residency(bits: Any, activation: Any) -> None:
    hidden, neurons, tokens, spec = 100, 200, 11, FeedForwardSpec(activation)
    config = with_feed_forward(tiny_config(hidden_size=hidden, intermediate_size=neurons), spec)
    gate, up, down = (normal(neurons, hidden, seed=seed) / 10 for seed in range(3))
    source = ArrayFeedForward(gate, up, down, neuron_layout(config, QuantConfig(bits), 0))
    x, batch, single = normal(tokens, hidden, seed=9), ForwardBatch(range(tokens)), ForwardBatch([0])
    results = []
    for target in TARGETS:
        for threads in (1, 2):
            backend = make_backend(threads, target)
            layer = backend.load_feed_forward(0, source)
            for segments in (0, 1, 3, 4):
                lend(layer, segments)
                results.append(backend.feed_forward(x, layer, spec, batch).copy())
                alone = [backend.feed_forward(row[None], layer, spec, single).copy() for row in x]
                results.append(np.concatenate(alone))
    assert len({result.tobytes() for result in results}) == 1
    rounded = [quantise_rows(matrix, bits)[3] for matrix in (gate, up, down)]
    if config.is_sliced:
        rounded[2] = quantise_rows(np.ascontiguousarray(down.T), bits)[3].T
    exact = ArrayFeedForward(*rounded, neuron_layout(config, QuantConfig(16), 0))
    reference = ReferenceBackend()
    expected = reference.feed_forward(x, reference.load_feed_forward(0, exact), spec, batch)
    # float16 weights: rounding alone. Quantised: activations carry 7 bits, twice in a row.
    tolerance = 2e-3 if bits == 16 else 2e-2
    assert np.abs(results[0] - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_estimates_have_the_resident_neurons_alone(bits: Any) -> None:
    """Streams see in a draft's pass what they see in a pass of their own; exact rows see every neuron."""
    hidden, neurons, exact, streams = 100, 200, 3, 5
    config = tiny_config(hidden_size=hidden, intermediate_size=neurons)
    gate, up, down = (normal(neurons, hidden, seed=seed) / 10 for seed in range(3))
    source = ArrayFeedForward(gate, up, down, neuron_layout(config, QuantConfig(bits), 0))
    x = normal(exact + streams, hidden, seed=9)
    drafted = ForwardBatch(range(exact), stream_rows=streams)
    own = ForwardBatch((), stream_rows=streams, resident_only=True)
    for target in TARGETS:
        backend = make_backend(target=target)
        layer = backend.load_feed_forward(0, source)
        for segments in (0, 1, 3):
            lend(layer, segments)
            expected = [
                backend.feed_forward(rows, layer, FeedForwardSpec("silu"), batch).copy()
                for rows, batch in ((x[:exact], ForwardBatch(range(exact))), (x[exact:], own))
            ]
            found = backend.feed_forward(x, layer, FeedForwardSpec("silu"), drafted)
            assert found.tobytes() == np.concatenate(expected).tobytes(), (target, segments)


def test_segments_are_added_to_tokens_of_the_pass_alone() -> None:
    source = ArrayFeedForward(
        *(normal(64, 64, seed=seed) for seed in range(3)),
        record_layout(tiny_config(hidden_size=64, intermediate_size=64), QuantConfig(8)),
    )
    backend = make_backend()
    layer = backend.load_feed_forward(0, source)
    lend(layer, 1)
    forward = _native.FeedForwardPass(backend.runner, layer.native, normal(3, 64), form("silu"))
    for tokens in (0, 4, -1):
        with pytest.raises(ValueError, match="from 1 to those of the pass"):
            forward.add(layer.segments, tokens)


WAYS = [(threads, *how) for threads in (1, 2) for how in ((99, 90), (0, 64), (2, 7), (1, 1))]
"""Threads, resident segments and tokens of a chunk."""


@pytest.mark.fast("every kind-16-8-few", "Qwen's-4-16-few")
@pytest.mark.parametrize("ways", [((2, 99, 90), (1, 0, 64), (2, 2, 7)), WAYS], ids=["few", "all"])
@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("blocks", ["Qwen's", "every kind"])
def test_a_model_has_one_result(bits: Any, kv_bits: Any, blocks: str, ways: Any) -> None:
    """Prefill chunks, threads, targets and residency change no bit of any logit."""
    config = with_sinks(every_block())
    if blocks == "Qwen's":
        config = tiny_config(
            intermediate_size=200, qk_norm=True, attention_bias=True, layer_windows=(0, 40), max_context=256
        )
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, config.vocab_size, 90)]
    results = {
        (target, threads, segments, chunk): logits_of(
            load(config, make_backend(threads, target), bits, segments), tokens, chunk, kv_bits
        ).tobytes()
        for target in TARGETS
        for threads, segments, chunk in ways
    }
    assert len(set(results.values())) == 1, sorted(results, key=lambda key: str(results[key]))


@pytest.mark.fast("clamped-8", "fatrelu-4", "ungated-16")
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_a_model_of_every_feed_forward_has_one_result(bits: Any, kind: str) -> None:
    config = with_feed_forward(tiny_config(intermediate_size=200), FEED_FORWARDS[kind])
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, config.vocab_size, 40)]
    results = {
        logits_of(load(config, make_backend(threads, target), bits, segments), tokens, chunk, 16).tobytes()
        for target in TARGETS
        for threads, segments, chunk in ((1, 99, 40), (2, 0, 33), (2, 2, 7), (1, 1, 1))
    }
    assert len(results) == 1


def plain_models() -> dict[str, ModelConfig]:
    """Models whose layers are all plain, by the family that is built so."""
    gemma = tiny_config(intermediate_size=200, qk_norm=True, layer_windows=(9, 0))
    gemma = replace(gemma, layers=tuple(replace(layer, norms="both") for layer in gemma.layers))
    llama = tiny_config(intermediate_size=200)
    return {
        "llama": llama,
        "qwen2": tiny_config(intermediate_size=200, attention_bias=True),
        "qwen3": tiny_config(intermediate_size=200, qk_norm=True),
        "gemma3": gemma,
        "sinks": with_sinks(
            tiny_config(intermediate_size=200, attention_bias=True, attention_output_bias=True)
        ),
        "ungated": with_feed_forward(llama, replace(FEED_FORWARDS["ungated-gelu"], output_bias=True)),
    }


def logits_of_a_draft(config: ModelConfig, backend: CpuBackend, tokens: list[int], kv_bits: Any) -> Float32:
    """Logits of a prompt, of tokens between which neurons leave and come back, and of a draft tree."""
    model, layers = load(config, backend, 4), backend.feed_forwards
    kv = SequenceState(KVLayout(config, kv_bits, pass_tokens=70))
    parts = [every_logits(model, tokens[:70], kv)]
    for index, token in enumerate(tokens[70:76]):
        layer = layers[index // 2 % len(layers)]
        lend(layer, layer.num_segments if index % 2 else index // 4)
        parts.append(every_logits(model, [token], kv))
    tree = TokenTree([-1, 0, 0, 1, 2])
    hidden = model.run(ForwardBatch(tokens[:5], tree, drafted=range(1, 5)), kv).hidden
    parts.append(model.checked_logits(hidden))
    model.keep(kv, kv.length - 5, [0, 2, 4])
    return np.concatenate([*parts, every_logits(model, tokens[-1:], kv)])


@pytest.mark.fast("gemma3-8", "sinks-16")
@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("family", plain_models())
def test_plain_layers_have_the_bits_of_their_ops_and_run_without_them(
    monkeypatch: pytest.MonkeyPatch, family: str, kv_bits: Any
) -> None:
    config = plain_models()[family]
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, config.vocab_size, 90)]
    backend, by_ops = make_backend(), make_backend()
    monkeypatch.setattr(by_ops, "plain_layers", lambda config, layers, adapters: None)
    expected = logits_of_a_draft(config, by_ops, tokens, kv_bits)
    ran, run = list[int](), _native.run_layers

    def counted(runner: _native.Runner, layers: Any, *others: Any) -> None:
        ran.append(len(layers))
        run(runner, layers, *others)

    monkeypatch.setattr(_native, "run_layers", counted)
    assert logits_of_a_draft(config, backend, tokens, kv_bits).tobytes() == expected.tobytes()
    # The prompt is too long. Three tokens have one layer whose neurons come from flash.
    assert sum(ran) == 8 * config.num_layers - 3


SMALL_GROUPS = (
    QuantConfig(4, tuple((kind, RowFormat(4, 32, "symmetric")) for kind in MATRIX_KINDS)),
    QuantConfig(8, (("qkv", RowFormat(8, 32)), ("out", RowFormat(4)), ("feed_forward", RowFormat(8, 32)))),
    QuantConfig(4, (("head", RowFormat(8)), ("embedding", RowFormat(8, 32, "symmetric")))),
    QuantConfig(4, tuple((kind, MXFP4) for kind in MATRIX_KINDS)),
)


@pytest.mark.fast("Llama's-*", "every kind-*", "ungated-16-0.001", "fatrelu-16-0.001")
@pytest.mark.parametrize(
    ("bits", "limit"), [(16, 1e-3), (8, 0.05), (4, 0.05), *((quant, 0.05) for quant in SMALL_GROUPS)]
)
@pytest.mark.parametrize("blocks", ["Llama's", "every kind", *FEED_FORWARDS])
def test_a_model_stays_close_to_the_reference(bits: Any, limit: float, blocks: str) -> None:
    """float16: rounding only (16-bit keys and values in both). q8, q4: int8 activations, 1/254 per value."""
    config = with_sinks(every_block())
    if blocks == "Llama's":
        config = tiny_config(hidden_size=128, intermediate_size=256, head_dim=32)
    elif blocks in FEED_FORWARDS:
        config = with_feed_forward(tiny_config(intermediate_size=136), FEED_FORWARDS[blocks])
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, config.vocab_size, 40)]
    mine = logits_of(load(config, make_backend(), bits), tokens, 40, 16)
    expected = logits_of(RandomWeights(config).load(ReferenceBackend(), bits), tokens, 40, 16)
    if blocks == "every kind" and bits != 16:
        # Twice as many layers as the others, and two more matrices.
        limit = 0.08
    assert np.abs(mine - expected).max() <= limit * np.abs(expected).max()


def test_results_of_an_op_are_rewritten_in_place_and_logits_are_not() -> None:
    config = tiny_config()
    model = load(config, make_backend(), 16)
    kv = SequenceState(KVLayout(config, 16))
    first = model.forward([1, 2, 3], kv)
    assert first is not None
    kept = first.copy()
    model.forward([4], kv)
    assert (first == kept).all()


def test_a_target_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailableError, match="sse9"):
        make_runner(1, "sse9")


@pytest.mark.fast("stored0", "stored2", "stored4", "stored5")
@pytest.mark.parametrize("stored", TILE_FORMATS)
def test_formats_of_tiles_have_one_result_near_the_reference(stored: RowFormat) -> None:
    """Of attention, head and embedding, whose weights are made up: scores are kept as small as others'."""
    config = tiny_config(hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
    small = (replace(layer, attention=replace(layer.attention, scale=2e-3)) for layer in config.layers)
    config = replace(config, layers=tuple(small))
    other = TILE_FORMATS[TILE_FORMATS.index(stored) - 1]
    quant = QuantConfig(8, (("qkv", stored), ("out", other), ("head", stored), ("embedding", other)))
    tokens = [int(t) for t in np.random.default_rng(3).integers(0, config.vocab_size, 40)]
    results = {
        (target, threads, chunk): logits_of(
            load(config, make_backend(threads, target), quant), tokens, chunk, 16
        )
        for target in TARGETS
        for threads, chunk in ((1, 40), (2, 7), (1, 1))
    }
    assert len({result.tobytes() for result in results.values()}) == 1
    expected = logits_of(RandomWeights(config).load(ReferenceBackend(), quant), tokens, 40, 16)
    assert np.abs(results[TARGETS[0], 1, 40] - expected).max() <= 0.06 * np.abs(expected).max()
