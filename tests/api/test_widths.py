"""One model whose layers have different numbers of neurons, for every setting of memory and speed.

A Llama with ReLU gates has every sparsity mode, one with SiLU gates is dense. No id and no slot of one layer
may count for another's, and no wide layer's last neurons may be left out.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.flash.throughput import measure_throughput
from ondevice.kernels import _native
from ondevice.measure import profiling
from ondevice.measure.profiling import profile
from tests.support.bundles import EOS, convert_bundle, open_sound
from tests.support.chat import squeeze
from tests.support.command_line import Run
from tests.support.engines import all_logits, bundle_weights, random_tokens, running
from tests.support.made_up_streams import add_streams
from tests.support.mlx_models import loaded
from tests.support.models import transformers_logits
from tests.support.trained_conversion import convert_and_train
from tests.support.widths import WIDTHS, uneven_transformers_model, write_uneven_checkpoint

PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17, 61, 5, 9]
TEXT = "How long is a piece of string? " * 40
BUDGETS = (0, 3, 9)
"""Segments beside the least that a model needs."""
MODES = (
    ("relu", {"sparsity": "dense", "speculation": "lookup", "threads": 2, "prefill_chunk": 3}),
    ("relu", {"sparsity": "exact", "speculation": "recycling", "io": "buffered", "prefill_chunk": 1}),
    ("relu", {"sparsity": "exact", "speculation": "resident", "kernel_target": "scalar"}),
    ("relu", {"sparsity": "exact", "speculation": "streams"}),
    ("relu", {"sparsity": "predicted", "predictor_recall": 0.9, "threads": 2, "prefill_chunk": 5}),
    ("silu", {"sparsity": "dense", "speculation": "auto", "prefill_chunk": 7}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles `relu`, with predictors, hotness and streams, `silu`, and `f16`.

    A text has rounded and ordered the neurons of the first two.
    """
    folder = tmp_path_factory.mktemp("widths")
    with pytest.MonkeyPatch.context() as patch:
        write_uneven_checkpoint(patch, folder / "source", hidden_act="relu")
        convert_and_train(folder / "source", folder / "relu", TEXT, "q4")
        convert_bundle(folder / "source", folder / "f16", "f16")
        write_uneven_checkpoint(patch, folder / "smooth")
        convert_and_train(folder / "smooth", folder / "silu", TEXT, "q4")
    add_streams(folder / "relu", layers=2)
    return folder


def texts(model: Model) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"max_tokens": 20, "logit_bias": {EOS: -math.inf}}
    sampled = model.generate(tokens=PROMPT, temperature=0.9, seed=3, **options)
    return [model.generate(tokens=PROMPT, temperature=0.0, **options).tokens, sampled.tokens]


@pytest.mark.parametrize("name", ["relu", "silu"])
def test_a_bundle_holds_as_many_neurons_as_each_layer_has(folder: Path, name: str) -> None:
    bundle = open_sound(folder / name)
    assert bundle.config.widths == WIDTHS
    assert bool(bundle.manifest.provenance.ordered_tokens) == (name != "silu")
    verify(bundle.path, _native.crc32c)
    frequencies = bundle.frequencies()
    assert (frequencies is None) == (name == "silu")
    assert frequencies is None or tuple(map(len, frequencies)) == WIDTHS


def test_logits_are_those_of_transformers(folder: Path) -> None:
    """By the reference; other backends, which keep keys in 16 bits, are as near to it as that allows."""
    tokens = random_tokens(Bundle.open(folder / "f16").config, 40)
    model = uneven_transformers_model(folder / "source", bundle_weights(folder / "f16"))
    theirs = transformers_logits(model, tokens)
    with running(folder / "f16") as reference:
        mine, halves = (all_logits(reference, tokens, bits) for bits in (32, 16))
    with running(folder / "f16", "cpu") as cpu:
        found = [all_logits(cpu, tokens)]
    if find_spec("mlx") is not None:
        with loaded(folder / "f16", sparsity="dense") as mlx:
            found.append(mlx.logits(tokens))
    largest = np.abs(theirs).max()
    assert np.abs(mine - theirs).max() < 1e-4 * largest
    assert all(np.abs(it - halves).max() < 3e-3 * largest for it in found)


@pytest.mark.fast("relu-options4", "silu-*")
@pytest.mark.parametrize(("name", "options"), MODES)
def test_no_setting_changes_the_text_of_layers_of_different_widths(
    folder: Path, name: str, options: dict[str, Any]
) -> None:
    plain = {key: options[key] for key in ("sparsity", "predictor_recall") if key in options}
    if plain["sparsity"] == "exact":
        plain["sparsity"] = "dense"
    with load(folder / name, speculation="off", threads=1, **plain) as model:
        expected, logits = texts(model), model.logits(PROMPT)
    assert len(set(expected[1])) > 5, "the text says nothing"
    with load(folder / name, **options) as model:
        for segments in (None, *BUDGETS):
            if segments is not None:
                squeeze(model, segments)
            assert texts(model) == expected, segments
            assert model.logits(PROMPT).tobytes() == logits.tobytes(), segments


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted"])
def test_no_budget_changes_the_text_on_mlx(folder: Path, sparsity: str) -> None:
    pytest.importorskip("mlx.core")
    found = []
    with loaded(folder / "relu", sparsity=sparsity) as model:
        for segments in (None, *BUDGETS[:2]):
            if segments is not None:
                squeeze(model, segments)
            found.append((texts(model), model.logits(PROMPT).tobytes()))
    assert all(it == found[0] for it in found)


def test_a_pass_multiplies_every_layer_s_own_neurons(folder: Path) -> None:
    """As many lookups as there are neurons, all of which come to lie in memory."""
    with load(folder / "relu", sparsity="dense", speculation="off", dram_budget="4GB") as model:
        neurons = model._engine._neurons
        found = 0
        for _ in range(500):
            before = neurons.lookups, neurons.hits
            model.logits([5])
            assert neurons.lookups - before[0] == sum(WIDTHS)
            found = neurons.hits - before[1]
            if found == sum(WIDTHS):
                break
    assert found == sum(WIDTHS)


def test_reports_say_how_wide_the_layers_are(folder: Path, ondevice: Run) -> None:
    text = ondevice("inspect", "-m", folder / "relu")
    assert "feed-forward neurons: 150 in 1 layer, 700 in 1 layer, 1,030 in 1 layer" in text.out
    assert ondevice("inspect", "-m", folder / "relu", "--json").json["neurons"] == list(WIDTHS)


def test_a_profile_counts_layers_by_their_own_neurons(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measure_throughput", partial(measure_throughput, seconds=0.002))
    found = profile(folder / "relu", pieces=[random_tokens(Bundle.open(folder / "relu").config, 90)])
    assert found.firing is not None
    assert found.misses is not None
    assert found.num_neurons == max(WIDTHS)
    assert all(0.3 < share < 0.7 for share in found.firing.active)
    assert any("from 150 to 1,030 neurons" in note for note in found.notes)
    best = found.misses.optimum
    for rates in found.misses.policies.values():
        assert all(least <= rate + 1e-9 for least, rate in zip(best, rates, strict=True))
