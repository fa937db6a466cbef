"""Mixtures of experts on MLX: near `reference` and `transformers`, and of equal bits under every budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.backends.routing import route
from ondevice.bundle.layout import DATA_OFFSET, expert_file_name
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.errors import FlashReadError
from ondevice.runtime import backend_choice
from tests.backends.test_routing import SPECS, bias_of, logits
from tests.converters.test_mlx_experts import folders
from tests.support.bundles import copy_files
from tests.support.chat import squeeze
from tests.support.engines import always_draft, error, random_tokens
from tests.support.families import CASES, OLMOE, write_model
from tests.support.flash_files import flip_byte
from tests.support.gguf_blocks import with_experts_of, write_wide_mixture
from tests.support.mlx_folders import MXFP4
from tests.support.mlx_models import ON_GPU, loaded, smallest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)
from ondevice.backends import mlx_experts  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_device")

PROMPT = np.random.default_rng(5).integers(3, 256, 50).tolist()
TOLERANCE = 2e-2 if ON_GPU else 1e-3
FAMILIES = {
    "olmoe": "q4", "qwen3 moe renormalised": "q8", "qwen2 moe": "q4", "mixtral": "f16", "phimoe": "q5",
    "granite moe": "q6", "glm4 moe": "q4", "gemma4 moe": "q8", "qwen3 moe dense between": "q4",
    "mimo v2 moe": "q8", "gpt-oss moe": "q4",
}  # fmt: skip

FAST = ("mixtral", "gemma4 moe")
"""16 bits, and blocks side by side; the others are slow."""


def made(folder: Path, case: str, quant: str) -> Path:
    write_model(folder / "source", *CASES[case])
    return convert(folder / "source", folder / "bundle", quant)


@pytest.mark.parametrize("name", SPECS)
def test_the_choice_is_that_of_routing(name: str) -> None:
    spec, bias, rows = SPECS[name], bias_of(SPECS[name]), logits(200)
    scales = logits(1, 3)[0] if spec.scoring == "softmax" else None
    wanted = route(rows, spec, bias, scales)
    found = mlx_experts.route(
        mx.array(rows),
        spec,
        None if bias is None else mx.array(bias),
        None if scales is None else mx.array(scales),
    )
    assert np.array_equal(np.array(found.ids), wanted.ids)
    np.testing.assert_allclose(np.array(found.weights), wanted.weights, rtol=3e-6)


@pytest.mark.parametrize("name", SPECS)
def test_a_choice_has_the_same_bits_beside_any_others(name: str) -> None:
    spec, rows = SPECS[name], logits(9)
    bias = None if (own := bias_of(spec)) is None else mx.array(own)
    together = mlx_experts.route(mx.array(rows), spec, bias)
    for row in range(len(rows)):
        alone = mlx_experts.route(mx.array(rows[row : row + 1]), spec, bias)
        for mine, theirs in zip(alone, together, strict=True):
            assert np.array_equal(np.array(mine)[0], np.array(theirs)[row])


@pytest.mark.parametrize("name", SPECS)
def test_of_equal_scores_the_lower_number_is_chosen(name: str) -> None:
    spec = SPECS[name]
    rows = np.zeros((3, 16), np.float32)
    rows[1, 5:] = 1.0
    rows[2, [3, 9]] = np.inf, np.nan
    found = np.array(mlx_experts.route(mx.array(rows), spec).ids)
    assert np.array_equal(found[:2], route(rows, spec).ids[:2])
    assert (found >= 0).all()
    assert (found < 16).all()


@pytest.mark.parametrize(
    "case", [it if it in FAST else pytest.param(it, marks=pytest.mark.slow) for it in FAMILIES]
)
def test_logits_are_those_of_reference(tmp_path: Path, case: str) -> None:
    """With all experts held, and with the fewest slots; both of the same bits."""
    folder = made(tmp_path, case, FAMILIES[case])
    tokens = random_tokens(Bundle.open(folder).config, 40)
    options: dict[str, Any] = {"prefill_chunk": 13}
    with loaded(folder, "reference", **options) as reference:
        theirs = reference.logits(tokens)
    with loaded(folder, **options) as model:
        whole = model.logits(tokens)
    assert error(whole, theirs) < TOLERANCE
    with loaded(folder, dram_budget=smallest(folder, **options), **options) as model:
        assert np.array_equal(model.logits(tokens), whole)


def test_experts_of_mxfp4_are_those_of_reference(tmp_path: Path) -> None:
    _, mlx = folders(tmp_path, "qwen3 moe", MXFP4)
    folder = convert(mlx.path, tmp_path / "bundle")
    assert Bundle.open(folder).quant.of("experts").mxfp4
    tokens = random_tokens(Bundle.open(folder).config, 20)
    with loaded(folder, "reference") as reference:
        theirs = reference.logits(tokens)
    with loaded(folder) as model:
        whole = model.logits(tokens)
        assert error(whole, theirs) < TOLERANCE
        squeeze(model)
        assert np.array_equal(model.logits(tokens), whole)


@pytest.mark.fast("kinds0")
@pytest.mark.parametrize("kinds", [("Q4_K",), ("IQ4_NL",), ("Q2_K", "Q6_K", "Q6_K")])
def test_experts_of_tile_formats_are_near_those_of_reference(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """MLX multiplies them as 16-bit values, held or in slots with equal bits."""
    write_wide_mixture(tmp_path / "source")
    with_experts_of(tmp_path / "model.gguf", tmp_path / "source", *kinds)
    folder = convert(tmp_path / "model.gguf", tmp_path / "bundle")
    assert Bundle.open(folder).quant.of("experts").tiles_only
    tokens = random_tokens(Bundle.open(folder).config, 20)
    with loaded(folder, "reference") as reference:
        theirs = reference.logits(tokens)
    with loaded(folder) as model:
        whole = model.logits(tokens)
        assert error(whole, theirs) < 2e-2
        squeeze(model)
        assert np.array_equal(model.logits(tokens), whole)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 experts of 100 neurons, three for each token; three layers."""
    folder = tmp_path_factory.mktemp("olmoe")
    write_model(folder / "source", "Olmoe", {**OLMOE, "intermediate_size": 100, "num_experts": 12})
    return convert(folder / "source", folder / "bundle", "q4")


def texts(model: Any) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"max_tokens": 12, "logit_bias": {2: -math.inf}}
    sampled = model.generate(tokens=PROMPT, temperature=0.9, seed=3, **options)
    return [model.generate(tokens=PROMPT, temperature=0.0, **options).tokens, sampled.tokens]


def holds_all(model: Any) -> bool:
    return all(layer.held_experts_bytes > 0 for layer in model._engine._backend.feed_forwards)


def test_the_budget_changes_no_bit(olmoe: Path) -> None:
    """From the fewest slots to all experts held, and down again between tokens."""
    with loaded(olmoe, prefill_chunk=7) as model:
        expected, logits = texts(model), model.logits(PROMPT)
        assert holds_all(model)
        assert 0 < model._engine._neurons.nbytes <= model.plan.segment.total * model.plan.segment.nbytes
        assert len(set(expected[1])) > 5, "the text says nothing"
        full, made = model.plan.full_bytes, []
        for event in model.stream(tokens=PROMPT, max_tokens=12, temperature=0.0, logit_bias={2: -math.inf}):
            made += [] if event.token is None else [event.token]
            if len(made) == 9:
                squeeze(model, 2)
        assert tuple(made) == expected[0]
        assert not holds_all(model)
        lookups = model._engine._neurons.lookups
        for segments in (0, 3):
            squeeze(model, segments)
            assert texts(model) == expected, segments
            assert np.array_equal(model.logits(PROMPT), logits), segments
        assert model._engine._neurons.lookups > lookups
        model.set_dram_budget(full)
        assert texts(model) == expected


@pytest.mark.skipif(ON_GPU, reason="MLX's CPU kernels give rows the same bits in any company; others may not")
@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "drafter"), [(3, "recycling"), (20, "lookup")])
def test_chunks_and_drafts_change_no_bit(
    olmoe: Path, chunk: int, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(olmoe) as model:
        expected, logits = texts(model), model.logits(PROMPT)
    always_draft(monkeypatch, (8, 3, 12, 2))
    with loaded(olmoe, prefill_chunk=chunk, speculation=drafter) as model:
        for squeezed in (False, True):
            if squeezed:
                squeeze(model)
            assert texts(model) == expected
            assert np.array_equal(model.logits(PROMPT), logits)
        assert model.generate(tokens=PROMPT, max_tokens=24).stats.drafting.drafts > 1


@pytest.mark.slow
def test_nothing_is_waited_for_where_all_experts_are_held(olmoe: Path) -> None:
    """Then a pass waits for its logits alone; else once a layer too, to know the choice."""
    with loaded(olmoe) as model:
        model.generate(tokens=PROMPT, max_tokens=4)
        stats = model.generate(tokens=PROMPT, max_tokens=20, logit_bias={2: -math.inf}).stats
        assert stats.synchronisations == stats.forward_passes
        squeeze(model, 3)
        stats = model.generate(tokens=PROMPT, max_tokens=20, logit_bias={2: -math.inf}).stats
        # A layer that reads experts also waits for products of the layers before, which have ended by then.
        assert stats.forward_passes * 4 <= stats.synchronisations <= stats.forward_passes * 7
        squeeze(model, 12 * 3)
        model.generate(tokens=PROMPT, max_tokens=20)
        stats = model.generate(tokens=PROMPT, max_tokens=20, logit_bias={2: -math.inf}).stats
        assert not holds_all(model)
        assert stats.neuron_cache_hit_rate == 1
        # Nothing is read, so that routers are all that is read back.
        assert stats.synchronisations == stats.forward_passes * 4


def test_experts_with_a_missing_byte_are_refused(olmoe: Path, tmp_path: Path) -> None:
    """And no slot keeps what hasn't arrived: the next text is right."""
    folder = copy_files(olmoe, tmp_path / "damaged")
    with loaded(olmoe) as model:
        expected = texts(model)
    file, count = folder / expert_file_name(1), 12
    size = file.stat().st_size
    for expert in range(count):
        flip_byte(file, DATA_OFFSET + expert * (size - DATA_OFFSET) // count + 100)
    for squeezed in (False, True):
        with loaded(folder) as model:
            if squeezed:
                squeeze(model, 1)
            for _ in range(2):
                with pytest.raises(FlashReadError):
                    model.logits(PROMPT)
            for expert in range(count):
                flip_byte(file, DATA_OFFSET + expert * (size - DATA_OFFSET) // count + 100)
            assert texts(model) == expected
            for expert in range(count):
                flip_byte(file, DATA_OFFSET + expert * (size - DATA_OFFSET) // count + 100)


@pytest.mark.fast("qwen2 moe-relu2")
@pytest.mark.parametrize(("case", "act"), [("qwen2 moe", "relu2"), ("olmoe", "relu")])
def test_experts_that_are_stored_neuron_by_neuron(tmp_path: Path, case: str, act: str) -> None:
    family, values = CASES[case]
    write_model(tmp_path / "source", family, {**values, "hidden_act": act})
    folder = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    tokens = random_tokens(Bundle.open(folder).config, 40)
    with loaded(folder, "reference") as reference:
        theirs = reference.logits(tokens)
    with loaded(folder, prefill_chunk=13) as model:
        whole = model.logits(tokens)
        assert error(whole, theirs) < TOLERANCE
        expected = texts(model)
        for segments in (0, 3):
            squeeze(model, segments)
            assert np.array_equal(model.logits(tokens), whole)
            assert texts(model) == expected
    with loaded(folder, dram_budget=smallest(folder, prefill_chunk=13), prefill_chunk=13) as model:
        assert np.array_equal(model.logits(tokens), whole)


def test_auto_is_cpu(olmoe: Path) -> None:
    assert backend_choice.resolved_backend(RuntimeConfig().backend, Bundle.open(olmoe).config) == "cpu"
