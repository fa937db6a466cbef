"""Drafts from a datastore: they change how many passes a text takes, and nothing else."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, inspect, load
from ondevice.bundle.ngrams import index_bytes
from ondevice.bundle.reader import Bundle
from ondevice.config import SamplingConfig
from ondevice.speculation.datastore import READER_BYTES
from ondevice.speculation.drafters.ngrams import NgramDrafter
from ondevice.training import train_ngrams
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.engines import always_draft
from tests.support.flash_files import flip_byte
from tests.support.trained_models import MIXTURE, own_text

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.2, "repetition_penalty": 1.2, "seed": 7},
]


def write(model: Model, count: int = 60, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=count, logit_bias={EOS: -math.inf}, **options).tokens


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    shape = {"num_hidden_layers": 4, "intermediate_size": 1500, "hidden_act": "relu"}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "plain")


@pytest.fixture(scope="module")
def texts(plain_bundle: Path) -> list[tuple[int, ...]]:
    with load(plain_bundle, sparsity="dense", speculation="off") as model:
        return [write(model, **sampling) for sampling in SAMPLINGS]


@pytest.fixture(scope="module")
def bundle(
    plain_bundle: Path, texts: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """With a datastore of what the model wrote, spoilt here and there so that drafts are wrong at times."""
    folder = tmp_path_factory.mktemp("ngrams") / "relu"
    pieces = [[5 if at % 13 == 9 else token for at, token in enumerate(text)] for text in texts]
    train_ngrams(plain_bundle, pieces=[*pieces, *texts[:1]], output=folder)
    return folder


@pytest.mark.fast("exact-False")
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_every_token_stays(bundle: Path, texts: list[tuple[int, ...]], sparsity: Any, resident: bool) -> None:
    with load(bundle, sparsity=sparsity, speculation="ngrams", threads=2) as model:
        if not resident:
            squeeze(model, 2)
        accepted = 0
        for sampling, text in zip(SAMPLINGS, texts, strict=True):
            result = model.generate(PROMPT, max_tokens=60, logit_bias={EOS: -math.inf}, **sampling)
            assert result.tokens == text
            accepted += sum(result.stats.drafting.accepted_by_depth)
        assert accepted > 10


@pytest.mark.slow
def test_every_token_of_a_mixture_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = own_text(MIXTURE, 40)
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}]
    with load(MIXTURE, speculation="off", backend="cpu") as model:
        squeeze(model, 2)
        plain = [model.generate(tokens=start, max_tokens=32, **sampling).tokens for sampling in samplings]
    train_ngrams(MIXTURE, pieces=[[*start, *text] for text in plain], output=tmp_path / "mixture")
    always_draft(monkeypatch, [8])
    with load(tmp_path / "mixture", speculation="ngrams", backend="cpu") as model:
        squeeze(model, 2)
        for sampling, text in zip(samplings, plain, strict=True):
            result = model.generate(tokens=start, max_tokens=32, **sampling)
            assert result.tokens == text
            assert result.stats.decode_passes < 24


def test_a_page_that_is_damaged_while_it_drafts_stops_drafts_alone(
    bundle: Path, texts: list[tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied = copy_files(bundle, tmp_path / "copied")
    with load(copied, speculation="ngrams", sparsity="dense") as model:
        flip_byte(copied / "ngrams.safetensors", 4096 + 100)
        assert write(model) == texts[0]
        assert "no more drafts" in caplog.text
        assert write(model) == texts[0]


def test_the_index_is_in_the_plan(bundle: Path, plain_bundle: Path) -> None:
    ngrams = Bundle.open(bundle).ngrams
    assert ngrams is not None
    nbytes = index_bytes(ngrams) + READER_BYTES
    bytes_of = {
        (folder, name): inspect(folder, speculation=name).draft_bytes  # type: ignore[arg-type]
        for folder in (bundle, plain_bundle)
        for name in ("auto", "lookup", "ngrams")
        if (folder, name) != (plain_bundle, "ngrams")
    }
    assert bytes_of[bundle, "auto"] - bytes_of[plain_bundle, "auto"] == nbytes
    assert bytes_of[bundle, "lookup"] == bytes_of[plain_bundle, "lookup"]
    assert nbytes < bytes_of[bundle, "ngrams"] < nbytes + 2**20


class Slow:
    """A datastore whose lookups take as long as it is told."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.lookups = 0

    def lookup(self, text: list[int]) -> list[Any]:
        self.lookups += 1
        clock.now += self.seconds
        return []


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


def drafts(drafter: NgramDrafter, count: int, pass_seconds: float) -> None:
    for _ in range(count):
        drafter.prepare(None, 8, lambda: False)  # type: ignore[arg-type]
        clock.now += pass_seconds


def test_auto_looks_up_only_while_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", clock)
    store = Slow()
    drafter = NgramDrafter(store, most_share=0.05)  # type: ignore[arg-type]
    drafter.begin([1, 2], SamplingConfig())
    store.seconds = 0.001
    drafts(drafter, 100, 0.1)
    assert store.lookups == 100
    # Passes get faster: a lookup takes a third of one.
    drafts(drafter, 650, 0.003)
    assert 110 < store.lookups < 160
    # The device gets faster, which one lookup in 64 finds.
    store.seconds, before = 0.00001, store.lookups
    drafts(drafter, 5000, 0.003)
    assert store.lookups - before > 1500
    always = NgramDrafter(store)  # type: ignore[arg-type]
    always.begin([1, 2], SamplingConfig())
    store.seconds, before = 0.003, store.lookups
    drafts(always, 50, 0.001)
    assert store.lookups - before == 50
