"""A small model embedded in a larger shape: the same text, and neurons beside it that fire like its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.api import load, verify
from ondevice.bundle.draft_layers import EAGLE_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.config import Sparsity
from ondevice.measure.prompts import BUILT_IN
from ondevice.speculation.drafters.draft_layer import DraftLayerDrafter
from ondevice.speculation.tree import Proposals
from tests.benchmarks.lib.embedded_model import TINY, embed, embed_head, firing
from tests.benchmarks.lib.embedded_sidecars import predicted_rates
from tests.benchmarks.lib.embedded_weights import EmbeddedModel
from tests.benchmarks.lib.filler_neurons import own_text, record
from tests.benchmarks.lib.stored_model import pair_places, read_model, small_in_q4
from tests.support.bundles import open_sound
from tests.support.engines import always_draft
from tests.support.paths import SHIPPED

SHAPE = replace(TINY, num_layers=8, intermediate_size=1792)
TOKENS = 512
"""Of text for the fillers' thresholds; enough for what is asked of them here."""
PROMPTS = [
    words for task in BUILT_IN if task.name in ("dialogue", "sql", "story") for words in task.prompts[:2]
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddedModel, Path]:
    """The embedded model and the folder of both bundles."""
    folder = tmp_path_factory.mktemp("embedded")
    return embed(SHIPPED, SHAPE, folder, TOKENS), folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sparsity", "temperature"),
    [("exact", 0.0), *(pytest.param(*it, marks=pytest.mark.slow) for it in (("dense", 0.0), ("exact", 0.9)))],
)
def test_it_says_what_the_small_one_says(
    made: tuple[EmbeddedModel, Path], sparsity: Sparsity, temperature: float
) -> None:
    texts = []
    for name in ("small", "large"):
        with load(made[1] / name, sparsity=sparsity, speculation="off", threads=1) as model:
            prompts = [model.chat_ids([{"role": "user", "content": words}]) for words in PROMPTS]
            texts.append(
                [
                    model.generate(tokens=p, max_tokens=20, temperature=temperature, seed=1).tokens
                    for p in prompts
                ]
            )
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > len(PROMPTS) / 2


def test_its_logits_have_the_same_bits_and_no_other_token_can_win(made: tuple[EmbeddedModel, Path]) -> None:
    embedded, folder = made
    with load(folder / "small", threads=1) as small, load(folder / "large", threads=1) as large:
        prompt = small.chat_ids([{"role": "user", "content": PROMPTS[0]}])[:12]
        expected, found = small.logits(prompt), large.logits(prompt)
    vocabulary = embedded.small.config.vocab_size
    assert np.array_equal(found[..., :vocabulary], expected)
    assert found.shape[-1] == SHAPE.vocab_size > vocabulary
    assert found[..., vocabulary:].max() < -1e6 < expected.min()


@pytest.mark.slow
def test_streams_draft_the_same_tokens(
    made: tuple[EmbeddedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of equal size whatever time they take: texts are equal, and so are the passes that they take."""
    embedded, folder = made
    always_draft(monkeypatch, [8])
    found = []
    for name in ("small", "large"):
        with load(folder / name, sparsity="dense", speculation="streams", threads=1) as model:
            prompts = [model.chat_ids([{"role": "user", "content": words}]) for words in PROMPTS]
            answers = [model.generate(tokens=p, max_tokens=32, temperature=0.0) for p in prompts]
            found.append([(answer.tokens, answer.stats.decode_passes) for answer in answers])
    assert found[0] == found[1]
    tokens, passes = (sum(values) for values in zip(*((len(t), p) for t, p in found[0]), strict=True))
    assert tokens > 1.3 * passes
    streams = Bundle.open(folder / "large").streams
    assert streams is not None
    assert len(streams.layers(embedded.config)) > len(embedded.layers) - 3


@pytest.mark.slow
def test_a_head_drafts_the_same_tokens_with_the_same_chances(
    made: tuple[EmbeddedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of equal size whatever time they take; all that the head proposes on the way, bit for bit."""
    always_draft(monkeypatch, [8])
    propose, proposed = DraftLayerDrafter.propose, list[tuple[tuple[int, ...], Proposals]]()

    def recorded(drafter: DraftLayerDrafter, path: Sequence[int]) -> Proposals:
        proposed.append((tuple(path), propose(drafter, path)))
        return proposed[-1][1]

    monkeypatch.setattr(DraftLayerDrafter, "propose", recorded)
    found = []
    for name in ("small", "large"):
        proposed.clear()
        with load(made[1] / name, sparsity="dense", speculation="eagle", threads=1) as model:
            prompts = [model.chat_ids([{"role": "user", "content": words}]) for words in PROMPTS]
            answers = [model.generate(tokens=p, max_tokens=32, temperature=0.0) for p in prompts]
        accepted = [
            (it.tokens, it.stats.decode_passes, it.stats.drafting.accepted_by_depth) for it in answers
        ]
        found.append((accepted, list(proposed)))
    assert found[0] == found[1]
    tokens, passes = (sum(values) for values in zip(*((len(t), p) for t, p, _ in found[0][0]), strict=True))
    assert tokens > 1.3 * passes


def test_a_head_costs_what_a_layer_of_the_large_shape_costs(made: tuple[EmbeddedModel, Path]) -> None:
    """Its matrices have the layer's sizes, codes of their own everywhere, and heads and neurons that run."""
    large = Bundle.open(made[1] / "large")
    head, config = large.eagle, large.config
    assert head is not None
    layer = head.layer_config(config.max_context)
    for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        assert getattr(layer, name) == getattr(config, name), name
    stored = load_file(large.path / head.sidecar.tensors)
    for name in head.matrices(config):
        codes = stored[f"eagle.{name}.codes"].view(np.uint8)
        # Of 256 bytes, those that codes at random have, in every row's last quarter and all last rows.
        assert len(np.unique(codes[:, -codes.shape[1] // 4 :])) == len(np.unique(codes[-64:])) == 256, name
    # The small model's heads have rows of zeros, as they were widened; so have those beside them.
    for name, least in {"qkv.embedding": 0.4, "qkv.hidden": 0.4, "gate": 1.0, "up": 1.0}.items():
        assert stored[f"eagle.{name}.scales"].any(axis=1).mean() >= least, name


@pytest.mark.slow
def test_a_head_is_embedded_into_bundles_that_are_there(made: tuple[EmbeddedModel, Path]) -> None:
    folders = [made[1] / name for name in ("small", "large")]
    before = [Bundle.open(folder).eagle for folder in folders]
    for folder in folders:
        (folder / EAGLE_SIDECAR.manifest).unlink()
    embed_head(SHIPPED, SHAPE, made[1])
    # Their checksums are among them.
    assert [Bundle.open(folder).eagle for folder in folders] == before != [None, None]


@pytest.mark.slow
def test_predictors_select_the_same_neurons(made: tuple[EmbeddedModel, Path]) -> None:
    """The bits of logits in mode `predicted`, which aren't those of every neuron that fires."""
    embedded, folder = made
    found = {}
    for name, sparsity in (("small", "predicted"), ("large", "predicted"), ("large", "exact")):
        with load(folder / name, sparsity=cast(Sparsity, sparsity), threads=1) as model:
            prompt = model.chat_ids([{"role": "user", "content": PROMPTS[0]}])
            found[name, sparsity] = model.logits(prompt)[..., : embedded.small.config.vocab_size]
    assert np.array_equal(found["small", "predicted"], found["large", "predicted"])
    assert not np.array_equal(found["large", "exact"], found["large", "predicted"])


@pytest.mark.slow
def test_fillers_are_predicted_like_the_trained_neurons(made: tuple[EmbeddedModel, Path]) -> None:
    embedded, folder = made
    rates = predicted_rates(embedded, record(embedded.small, own_text(folder / "small", 256, 1)))
    assert rates["fillers"]["missed"] < rates["trained"]["missed"] + 0.05
    assert 0.5 < rates["fillers"]["selected"] / rates["trained"]["selected"] < 1.5


def test_sidecars_are_whole(made: tuple[EmbeddedModel, Path]) -> None:
    for name in ("small", "large"):
        bundle = open_sound(made[1] / name)
        assert bundle.predictors
        assert bundle.streams
        assert bundle.hotness
        assert bundle.eagle
        verify(made[1] / name)


def test_wider_heads_change_nothing_but_rounding(tmp_path: Path) -> None:
    """Scores, rotary pairs and contexts; a pair at another frequency would change every logit by more."""
    found = []
    for head_dim in (64, 128):
        small_in_q4(SHIPPED, head_dim, tmp_path / str(head_dim))
        with load(tmp_path / str(head_dim), speculation="off", threads=1) as model:
            prompt = model.chat_ids([{"role": "user", "content": PROMPTS[0]}])
            found.append(model.logits(prompt))
    difference = np.abs(found[0] - found[1]).max() / np.abs(found[0]).max()
    assert 0 < difference < 0.05
    assert pair_places(4, 8).tolist() == [0, 2, 4, 6]


@pytest.mark.slow
def test_fillers_fire_like_the_trained_neurons(tmp_path: Path) -> None:
    """In the mean of more layers than the other tests' shape has."""
    found = firing(embed(SHIPPED, TINY, tmp_path, TOKENS), tmp_path, tokens=256)
    small, fillers = found["small"], found["fillers alone"]
    for name, tolerance in {
        "share": 0.3,
        "spread": 0.3,
        "again": 0.3,
        "run": 0.1,
        "read": 0.2,
        "in_16": 0.2,
    }.items():
        assert abs(fillers[name] / small[name] - 1) < tolerance, (name, found)


def test_fillers_are_no_copies(made: tuple[EmbeddedModel, Path]) -> None:
    """Of a trained row or of each other, in real layers and in others; their down rows are zero."""
    embedded, _ = made
    codes = embedded.small.config.hidden_size // 2
    real = {row.tobytes() for gate, _, _ in embedded.small.neurons for row in gate.codes}
    for layer in (0, embedded.layers[0]):
        gate, _, down = embedded.neurons(layer)
        own = embedded.filler_places(layer)
        rows = [row.tobytes() for row in gate.codes[own, :codes]]
        assert len(set(rows)) == len(rows)
        assert real.isdisjoint(rows)
        assert not down.scales[own].any()
        assert not down.biases[own].any()


def test_a_shape_that_would_round_is_refused(made: tuple[EmbeddedModel, Path]) -> None:
    embedded, folder = made
    for shape in (replace(TINY, hidden_size=512), replace(TINY, num_layers=5), replace(TINY, head_dim=64)):
        with pytest.raises(ValueError, match=r"isn't|can't|fewer"):
            EmbeddedModel(read_model(folder / "small"), shape, embedded.text)
