"""Streams in shared mode are part of the model: it is another one, whose text nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.backends.base import Float32
from ondevice.runtime.models import shipped_folder
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.stats import DraftStats
from tests.support.bundles import copy_files
from tests.support.chat import squeeze
from tests.support.engines import always_draft
from tests.support.made_up_streams import PARTS, add_streams
from tests.support.scripted_drafts import STREAMS, drafted

SHIPPED = shipped_folder() / "small-relu"
QUESTION = "The cat sat on the mat. The cat sat on the hat. The cat sat on"
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.2, "repetition_penalty": 1.2, "seed": 7},
]
SPARSITIES = ("dense", "exact")
DRAFTERS = ("lookup", "recycling", "streams", "resident", "auto")
NEW_TOKENS = 30
ERROR = 0.1
"""Of what adapters change in a logit, the part by which `cpu` and `reference` may differ: two engines with
activations of different precision. Measured: 0.03 to 0.06."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The model that ships, with streams that are part of it and change it; of `parts` alone."""

    def made(*parts: str, scale: float = 0.14) -> Path:
        folder = copy_files(SHIPPED, tmp_path_factory.mktemp("shared") / "small-relu")
        ranks = {"attention_rank": 16, "feed_forward_rank": 16}
        add_streams(folder, STREAMS, 2, **ranks, mode="shared", scale=scale, parts=parts)
        return folder

    return made


@pytest.fixture(scope="module")
def bundle(make: Callable[..., Path]) -> Path:
    return make(*PARTS)


@pytest.fixture(scope="module")
def plain_texts(bundle: Path) -> list[tuple[int, ...]]:
    with load(bundle, sparsity="dense", speculation="off", threads=1) as model:
        return list(texts(model))


def texts(model: Model) -> Iterator[tuple[int, ...]]:
    for sampling in SAMPLINGS:
        yield model.generate(QUESTION, max_tokens=NEW_TOKENS, **sampling).tokens


def logits_of(folder: Path, tokens: list[int], **options: Any) -> Float32:
    with load(folder, speculation="off", threads=1, **options) as model:
        return model.logits(tokens)


def size(difference: Float32) -> float:
    return float(np.sqrt(np.square(difference).mean()))


@pytest.mark.fast("qkv-out-feed_forward")
@pytest.mark.parametrize("parts", [PARTS, *((part,) for part in PARTS)], ids="-".join)
def test_plain_decoding_is_of_the_adapted_model(make: Callable[..., Path], parts: tuple[str, ...]) -> None:
    """Whatever adapters add, to each part of a layer: what the other backend says that they do."""
    adapted = make(*parts, scale=0.14 if parts == PARTS else 0.2)
    with load(adapted, speculation="off", threads=1) as model:
        prompt = model.tokenizer.encode(QUESTION)
        written = model.generate(QUESTION, max_tokens=NEW_TOKENS).tokens
    tokens = [*prompt, *written]
    without = logits_of(SHIPPED, tokens)
    expected = logits_of(adapted, tokens, backend="reference") - logits_of(
        SHIPPED, tokens, backend="reference"
    )
    assert size(expected) > 0.2
    for sparsity in SPARSITIES:
        found = logits_of(adapted, tokens, sparsity=sparsity) - without
        assert size(found - expected) < ERROR * size(expected)


def test_the_text_is_the_adapted_models(bundle: Path, plain_texts: list[tuple[int, ...]]) -> None:
    with load(bundle, backend="reference", speculation="off") as model:
        prompt, written = model.tokenizer.encode(QUESTION), plain_texts[0]
        adapted = model.logits([*prompt, *written[:-1]])[len(prompt) - 1 :]
    base = logits_of(SHIPPED, [*prompt, *written[:-1]], backend="reference")[len(prompt) - 1 :]
    behind = [rows.max(1) - rows[np.arange(len(written)), list(written)] for rows in (adapted, base)]
    # Its likeliest tokens, but for ties that the two engines break each in its way.
    assert behind[0].max() < 0.2
    assert behind[1].max() > 0.8
    with load(SHIPPED, sparsity="dense", speculation="off", threads=1) as model:
        assert all(mine != theirs for mine, theirs in zip(texts(model), plain_texts, strict=True))


@pytest.mark.fast("5-exact")
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_may_come_in_any_pieces(
    bundle: Path, plain_texts: list[tuple[int, ...]], chunk: int, sparsity: str
) -> None:
    with load(bundle, sparsity=sparsity, speculation="off", prefill_chunk=chunk, threads=2) as model:
        tokens = model.tokenizer.encode(QUESTION)
        assert len(tokens) > 16
        assert list(texts(model)) == plain_texts
        found = model.logits(tokens)
    assert found.tobytes() == logits_of(bundle, tokens, sparsity="dense").tobytes()


@pytest.mark.fast("streams-exact")
@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("drafter", ["off", *DRAFTERS])
def test_drafters_leave_every_token_as_it_is(
    bundle: Path,
    plain_texts: list[tuple[int, ...]],
    drafter: str,
    sparsity: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_draft(monkeypatch, [DRAFT_NODES, 3, 8])
    for resident in (True, False):
        with load(bundle, sparsity=sparsity, speculation=drafter, threads=2) as model:
            if not resident:
                squeeze(model, model.plan.segment.least)
            drafts = []
            for sampling, expected in zip(SAMPLINGS, plain_texts, strict=True):
                found = model.generate(QUESTION, max_tokens=NEW_TOKENS, **sampling)
                assert found.tokens == expected
                assert found.stats.speculation == drafter
                drafts.append(found.stats.drafting)
        if drafter == "off":
            continue
        drafted = sum(drafts, DraftStats())
        assert drafted.draft_tokens > 2 * drafted.drafts > 30
        # Hardly any draft token of untrained streams is right.
        assert drafter == "streams" or sum(drafted.accepted_by_depth) > 10


def test_a_model_that_drafts_its_own_tokens_has_its_adapters(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [3])
    with load(bundle, sparsity="dense", speculation="resident", threads=2) as model:
        # Of the first time, passes before all neurons are in memory.
        *_, again = (model.generate(QUESTION, max_tokens=NEW_TOKENS).stats.drafting for _ in range(2))
    assert again.drafts > 10
    assert again.accepted_by_depth == again.drafted_by_depth


@pytest.mark.fast("dense-streams-True")
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("drafter", ["lookup", "streams"])
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_any_tree_leaves_every_token_as_it_is(
    bundle: Path, plain_texts: list[tuple[int, ...]], sparsity: str, drafter: str, resident: bool
) -> None:
    """Right draft tokens, so that paths are accepted; nodes left out half-way, and others with streams."""
    with load(bundle, sparsity=sparsity, speculation=drafter, threads=2) as model:
        if not resident:
            squeeze(model, model.plan.segment.least + 1)
        for scripted, found in drafted(model, QUESTION, SAMPLINGS, plain_texts):
            assert scripted.streams > 10
            assert found.stats.accepted_tokens_per_pass > 1.2
