"""Drafts of a model with SiLU gates, whose neurons are read from flash: they change no token.

No gate of such a model is exactly zero, so that a pass reads all of a layer's neurons. Those of `resident`
are computed with the neurons in memory alone, and those of `streams` come from the pass itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.response import Response
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.stats import DraftStats
from tests.support.chat import squeeze
from tests.support.engines import always_draft
from tests.support.trained_models import TWIN

QUESTIONS = ("Hi! Can you book a table for two at an Italian restaurant?", "How many students are there?")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "seed": 1},
)
SIZES = ([2], [DRAFT_NODES], [5, 1, 9])
"""Nodes of one pass after another: chains, the largest trees, and sizes that change."""
SEGMENTS = (0, 8)
"""Beside the least that the model needs, of 48: half or most of what passes ask for is then in memory."""


def answers(model: Model) -> Iterator[Response]:
    for words in QUESTIONS:
        prompt = model.chat_ids([{"role": "user", "content": words}])
        for sampling in SAMPLINGS:
            yield model.generate(tokens=prompt, max_tokens=20, **sampling)


@pytest.fixture(scope="module")
def plain_texts() -> list[tuple[int, ...]]:
    """What plain decoding writes with everything in memory."""
    with load(TWIN, sparsity="dense", speculation="off", threads=1) as model:
        return [answer.tokens for answer in answers(model)]


@pytest.mark.fast("streams-0", "auto-8")
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("drafter", ["streams", "resident", "auto"])
def test_drafts_beside_neurons_on_flash_change_no_token(
    plain_texts: list[tuple[int, ...]], drafter: str, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, SIZES[0])
    taken = 0
    with load(TWIN, sparsity="dense", speculation=drafter, threads=1) as model:
        squeeze(model, segments)
        for sizes in SIZES:
            always_draft(monkeypatch, sizes)
            found = list(answers(model))
            assert [answer.tokens for answer in found] == plain_texts
            drafting = sum((answer.stats.drafting for answer in found), DraftStats())
            assert drafting.drafts > 4
            assert (drafting.draft_tokens > 2 * drafting.drafts) == (sizes != [2])
            taken += sum(drafting.accepted_by_depth)
        neurons = model._engine._neurons
        assert 0 < neurons.hits < neurons.lookups, "nothing is kept, or nothing is read"
    assert taken > 8
