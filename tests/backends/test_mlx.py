"""The MLX backend: near `reference` on every family, in every mode, and of equal bits under every budget.

All on MLX's CPU device; on a Mac or beside a CUDA device the same tests run with half-precision operands when
ONDEVICE_TEST_MLX_GPU is set.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.row_invariance import UNKNOWN
from ondevice.bundle.layout import TileLayout
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.bundle.reader import Bundle
from ondevice.config import TILE_FORMATS, RowFormat, RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.errors import BackendUnavailableError, BudgetError
from ondevice.measure.prompts import BUILT_IN
from ondevice.model_config import FeedForwardSpec
from ondevice.runtime import backend_choice, resolving
from ondevice.sparsity.segments import SegmentPool
from ondevice.units import memory_total
from tests.kernels.test_kernels import normal
from tests.support.chat import squeeze
from tests.support.engines import error, random_tokens
from tests.support.mlx_folders import MXFP4, write_mlx_folder
from tests.support.mlx_models import ON_GPU, loaded, smallest
from tests.support.models import QUANTS, VARIANTS
from tests.support.paths import SHIPPED
from tests.support.sources import ArrayEmbedding, ArrayTiles

# A wheel whose shared libraries are missing fails to import too, and is as good as absent.
mx = pytest.importorskip("mlx.core", exc_type=ImportError)
from ondevice.backends.mlx import MlxBackend  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_device")

TOLERANCE = 2e-2 if ON_GPU else 1e-3
"""Of logits, of the largest: keys and values are rounded to float16, and what is near the middle of two goes
either way; operands of a GPU have 11 bits."""


@pytest.mark.fast("llama-relu-q4", "qwen3-bias-relu2-q8", "llama-tails-*", "qwen2-window-tied-*")
@pytest.mark.parametrize(("variant", "quant"), [*QUANTS.items(), ("llama-relu", "q4"), ("llama-tails", "q8")])
def test_logits_are_those_of_reference(bundles: Any, variant: str, quant: str) -> None:
    folder = bundles(variant, quant)
    with loaded(folder, "reference", sparsity="dense") as reference:
        tokens = random_tokens(reference.config, 100)
        theirs = reference.logits(tokens)
    modes = ["dense", "exact"] if VARIANTS[variant].get("hidden_act") in ("relu", "relu2") else ["dense"]
    for mode in modes:
        with loaded(folder, sparsity=mode, prefill_chunk=37) as model:
            assert error(model.logits(tokens), theirs) < TOLERANCE, mode


def test_mxfp4_logits_are_those_of_reference(tmp_path: Path) -> None:
    source = write_mlx_folder(tmp_path / "s", MXFP4, hidden_act="relu").path
    folder = convert(source, tmp_path / "b")
    assert dict(Bundle.open(folder).quant.formats)["feed_forward"].mxfp4
    with loaded(folder, "reference", sparsity="dense") as reference:
        tokens = random_tokens(reference.config, 100)
        theirs = reference.logits(tokens)
    for mode in ("dense", "exact"):
        with loaded(folder, sparsity=mode, prefill_chunk=37) as model:
            assert error(model.logits(tokens), theirs) < TOLERANCE, mode


@pytest.mark.parametrize("stored", TILE_FORMATS)
def test_sections_are_those_of_reference(stored: RowFormat) -> None:
    """Formats that MLX lacks become float16 values; neighbours of one format become one matrix."""
    formats = [(40, stored), (17, RowFormat(4)), (33, RowFormat(4)), (5, RowFormat(6, 32, "symmetric"))]
    if not ON_GPU:
        formats.append((16, RowFormat(16)))
    sections = [ArrayTiles(normal(rows, 256, seed=at), own, step=1) for at, (rows, own) in enumerate(formats)]
    x, bias = normal(3, 256), normal(sum(rows for rows, _ in formats))
    mlx, reference = MlxBackend(segment_neurons=64), ReferenceBackend()
    found = mlx.to_numpy(mlx.linear(mx.array(x), mlx.load_tiles(sections, bias)))
    expected = reference.linear(x, reference.load_tiles(sections, bias))
    assert error(found, expected) < TOLERANCE
    table = ArrayEmbedding(normal(50, 256), TileLayout(RowLayout(256, *stored)))
    tokens = np.array([0, 49, 16, 16, 31], dtype=np.int32)
    assert (mlx.to_numpy(mlx.embedding(table, tokens)) == reference.embedding(table, tokens)).all()


def test_neurons_of_mxfp4_that_mlx_cannot_read_in_place_are_refused(tmp_path: Path) -> None:
    source = write_mlx_folder(
        tmp_path / "s", MXFP4, hidden_size=192, num_hidden_layers=1, hidden_act="relu"
    ).path
    folder = convert(source, tmp_path / "b")
    with pytest.raises(BackendUnavailableError, match="192 columns of MXFP4"), loaded(folder):
        pass


@pytest.mark.fast("predicted")
@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted"])
def test_the_budget_changes_no_bit(sparsity: str) -> None:
    """Resident, nothing but the least, and in between; logits of a prompt, and tokens one by one."""
    found, hits = [], []
    for segments in (None, 0, 1):
        with loaded(SHIPPED, sparsity=sparsity, dram_budget=memory_total()) as model:
            if segments is not None:
                squeeze(model, segments)
            tokens = random_tokens(model.config, 12)
            logits = model.logits(tokens).tobytes()
            for _ in range(2):
                text = model.generate(tokens=tokens, max_tokens=5, logit_bias={2: -math.inf})
            assert len(text.tokens) == 5
            found.append((logits, text.tokens))
            hits.append(text.stats.neuron_cache_hit_rate)
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert hits[1] < hits[2] < 0.98 < hits[0], "with less memory, more neurons should have come from flash"


def test_estimates_have_the_resident_neurons_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams see in a draft's pass what they see in a pass of their own; exact rows see every neuron."""
    resize = SegmentPool.resize
    # At most one segment of each layer is resident.
    monkeypatch.setattr(SegmentPool, "resize", lambda pool, quota: resize(pool, [min(1, it) for it in quota]))
    with loaded(SHIPPED, sparsity="dense") as model:
        model.logits(random_tokens(model.config, 8))
        backend = model._engine._backend
        neurons = model.config.intermediate_size
        layer = next(layer for layer in backend.feed_forwards if layer.resident_neurons < neurons)
        rng = np.random.default_rng(4)
        x = mx.array(rng.standard_normal((8, model.config.hidden_size), np.float32))
        parts = []
        for rows, batch in (
            (x[:3], ForwardBatch(range(3))),
            (x[3:], ForwardBatch((), stream_rows=5, resident_only=True)),
            (x, ForwardBatch(range(3), stream_rows=5)),
        ):
            backend.begin_pass(batch)
            parts.append(np.array(backend.feed_forward(rows, layer, FeedForwardSpec("relu"), batch)))
        # A GPU's kernels multiply in float16, and may give a row other bits beside others.
        tolerance = 1e-3 * np.abs(parts[2]).max() if ON_GPU else 1e-5
        np.testing.assert_allclose(np.concatenate(parts[:2]), parts[2], atol=tolerance)
        assert np.abs(parts[0]).max() > 1e-3


def test_a_budget_changes_between_tokens_and_the_text_does_not() -> None:
    with loaded(SHIPPED, sparsity="dense") as model:
        tokens = random_tokens(model.config, 20)
        expected = model.generate(tokens=tokens, max_tokens=60).tokens
        least = smallest(SHIPPED, sparsity="dense")
        found = []
        for index, event in enumerate(model.stream(tokens=tokens, max_tokens=60)):
            found.append(event.token)
            if index % 10 == 5:
                model.set_dram_budget(memory_total() if index % 20 == 15 else least)
    assert tuple(found[: len(expected)]) == tuple(expected)


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_cpu(stories_bundle: Path) -> None:
    """2,000 teacher-forced positions of greedy texts each: 99 % of them, in all.

    `cpu` rounds activations to 8 bits; where tokens differ, the two best logits are within 0.5 % of the
    spread of all. `reference`, which rounds keys and values only, has the same but for 1 of 1,000.
    """
    prompts = [prompt for task in BUILT_IN for prompt in task.prompts]
    stories = ["Once upon a time", "One day, a little girl named Lily", "Tom had a big red ball."]
    equal = seen = 0
    for folder, begun in ((SHIPPED, prompts), (stories_bundle, stories)):
        ours, theirs, right, texts = [], [], [], 0
        with (
            loaded(folder, "cpu") as cpu,
            loaded(folder, sparsity="dense") as model,
            loaded(folder, "reference", sparsity="dense") as reference,
        ):
            for index, prompt in enumerate(begun * 5):
                start = cpu.tokenizer.encode(prompt)[: 20 + index]
                text = [*start, *cpu.generate(tokens=start, max_tokens=200).tokens]
                for found, it in ((ours, model), (theirs, cpu), (right, reference)):
                    found.append(it.logits(text))
                texts += len(text)
                if texts >= 2000:
                    break
        mine, cpus, exact = (np.concatenate(found) for found in (ours, theirs, right))
        best, own = cpus.argmax(axis=1), mine.argmax(axis=1)
        places = np.arange(len(cpus))
        margins = cpus[places, best] - cpus[places, own]
        assert (margins < 0.005 * np.ptp(cpus, axis=1)).all(), margins.max()
        assert (own == exact.argmax(axis=1)).mean() > (0.99 if ON_GPU else 0.999)
        equal, seen = equal + int((own == best).sum()), seen + len(own)
    assert seen >= 4000
    assert equal >= 0.99 * seen, f"{equal} of {seen}"


def test_a_pass_synchronises_once_a_layer_and_once_for_the_logits() -> None:
    with loaded(SHIPPED, sparsity="exact") as model:
        tokens = random_tokens(model.config, 60)
        model.generate(tokens=tokens, max_tokens=2)
        stats = model.generate(tokens=tokens, max_tokens=8, logit_bias={2: -math.inf}).stats
        assert stats.prompt_tokens + stats.generated_tokens > 64, "keys and values grow meanwhile"
        assert stats.synchronisations == stats.forward_passes * (model.config.num_layers + 1)
        assert 0 < stats.synchronised_seconds < 60


def test_a_prompts_chunks_are_computed_one_by_one() -> None:
    """MLX is lazy: what nobody waits for would pile up, beyond the plan and beyond cancelling."""
    with loaded(SHIPPED, sparsity="dense", prefill_chunk=16) as model:
        stats = model.generate(tokens=random_tokens(model.config, 100), max_tokens=1).stats
        assert stats.forward_passes == 7
        assert stats.synchronisations >= 7


@pytest.mark.skipif(ON_GPU, reason="MLX's CPU kernels give rows the same bits in any company; others may not")
@pytest.mark.fast("exact")
@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted"])
def test_on_the_cpu_device_no_chunk_changes_a_bit(sparsity: str) -> None:
    """Nor do zeros that are skipped."""
    found = []
    modes = [(sparsity, 256), (sparsity, 17), *([("dense", 5)] if sparsity == "exact" else [(sparsity, 1)])]
    for mode, chunk in modes:
        with loaded(SHIPPED, sparsity=mode, prefill_chunk=chunk) as model:
            found.append(model.logits(random_tokens(model.config, 24)))
    assert all((other == found[0]).all() for other in found)


@pytest.mark.skipif(ON_GPU, reason="MLX's CPU kernels give rows the same bits in any company; others may not")
@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted"])
def test_on_the_cpu_device_no_drafter_changes_a_token(sparsity: str) -> None:
    """Greedy and sampled."""
    prompt, texts, drafts = "It was a cold morning, and the old man, the old man went to the", [], 0
    for drafter in ("off", "lookup", "recycling", "streams", "resident", "model", "eagle"):
        second = {"draft_model": SHIPPED} if drafter == "model" else {}
        with loaded(SHIPPED, sparsity=sparsity, speculation=drafter, **second) as model:
            greedy = model.generate(prompt, max_tokens=16)
            sampled = model.generate(prompt, max_tokens=12, temperature=0.7, seed=5)
            texts.append((greedy.tokens, sampled.tokens))
            drafts += greedy.stats.drafting.drafts
    assert texts == [texts[0]] * 7
    assert drafts >= 6


def test_a_budget_that_is_too_small_is_refused_with_the_smallest_one(bundles: Any) -> None:
    folder = bundles("llama", "q4")
    with pytest.raises(BudgetError) as refused:
        loaded(folder, dram_budget="1MB")
    assert refused.value.required_bytes > 1 << 20


def test_limits_of_mlx_are_those_of_who_is_loaded_and_are_given_back(bundles: Any) -> None:
    own = 123 << 20, 7 << 30

    def now() -> tuple[int, int]:
        found = mx.set_cache_limit(1), mx.set_memory_limit(1)
        mx.set_cache_limit(found[0])
        mx.set_memory_limit(found[1])
        return found

    before = mx.set_cache_limit(own[0]), mx.set_memory_limit(own[1])
    try:
        with loaded(bundles("llama", "q4"), dram_budget="3GB"):
            assert now() == (16 << 20, 3 * 10**9)
            with loaded(bundles("qwen2", "q8"), dram_budget="4GB") as second:
                assert now()[1] == 4 * 10**9
                second.set_dram_budget("2GB")
                assert now()[1] == 3 * 10**9
            assert now() == (16 << 20, 3 * 10**9)
            with pytest.raises(BudgetError):
                loaded(bundles("qwen2", "q8"), dram_budget="1MB")
        assert now() == own
    finally:
        mx.set_cache_limit(before[0])
        mx.set_memory_limit(before[1])


def test_the_budget_chooses_no_mode_where_modes_differ_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = (smallest(SHIPPED, sparsity="dense"), memory_total())

    def chosen() -> list[str]:
        return [ondevice.inspect(SHIPPED, backend="mlx", dram_budget=it).sparsity for it in budgets]

    if not ON_GPU:
        assert chosen() == ["dense", "exact"]
    monkeypatch.setattr(resolving, "row_invariance", lambda *_: UNKNOWN)
    assert chosen() == ["exact", "exact"]


def test_auto_is_cpu_but_on_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RuntimeConfig().backend == "auto"
    monkeypatch.setattr(backend_choice.sys, "platform", "linux")
    assert backend_choice.resolved_backend("auto") == "cpu"
    monkeypatch.setattr(backend_choice.sys, "platform", "darwin")
    monkeypatch.setattr(backend_choice.platform, "machine", lambda: "arm64")
    assert backend_choice.resolved_backend("auto") == "mlx"
    monkeypatch.setattr(backend_choice, "has_mlx", lambda: False)
    assert backend_choice.resolved_backend("auto") == "cpu"
