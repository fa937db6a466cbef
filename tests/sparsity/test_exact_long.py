"""The long proof of exact sparsity, on the model that ships: dense text, whatever is in memory.

Ten budgets, every cache policy, reading ahead on and off, and budgets that change while text is made. Three
minutes on two cores that have other work too: each configuration has a text of its own, so that all of them
together meet all texts, and every text is met by several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.runtime.models import shipped_folder
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import POLICIES
from tests.support.chat import fetch_with, squeeze

pytestmark = pytest.mark.slow

SHIPPED = shipped_folder() / "small-relu"
STORIES = ("It was a cold morning, and the old man", "The captain said that", "In the year 1850")
QUESTIONS = (
    "I'm looking for a cheap Italian restaurant in Oakland.",
    "How many silver medals did Norway win? [bronze, gold, nation, silver]",
    "Play something by Alessia Cara, please.",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.6, "top_p": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.2, "top_k": 200, "seed": 5},
)
LENGTH = 420
"""Tokens of a text; with its prompt it all but fills the context, and keys and values take segments away."""
TOKENS = 10_000
"""Of all texts together, at least."""
BUDGETS = 10
LIVE_BUDGETS = (9, 0, 6, 2, 8, 1, 4)
LIVE_EVERY = 37
WINDOW = slice(150, 214)
"""Of a text's tokens: those whose logits are compared."""


@dataclass(frozen=True)
class Text:
    """What the dense model makes of a prompt, and its logits (64, V) of a window of it."""

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: tuple[int, ...]
    logits: bytes


@dataclass
class Seen:
    """What the runs of a configuration had in memory and read, lest the same pass be compared with itself."""

    rates: list[float] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    with load(SHIPPED, sparsity="dense", threads=1) as model:
        prompts = [model.tokenizer.encode(story) for story in STORIES]
        prompts += [model.chat_ids([{"role": "user", "content": question}]) for question in QUESTIONS]
        made = []
        for sampling in SAMPLINGS:
            for prompt in prompts:
                tokens = tuple(stream(model, prompt, sampling))
                made.append(Text(prompt, sampling, tokens, window_logits(model, tokens)))
    assert sum(len(text.tokens) for text in made) >= TOKENS
    assert len({text.tokens for text in made}) == len(made)
    assert np.mean([len(set(text.tokens)) for text in made]) > LENGTH / 5
    return made


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many neurons each reading ahead has brought."""
    counts: list[int] = []
    commit = NeuronCache.commit

    def counting(cache: NeuronCache, layer: int, ids: Any, slots: Any) -> tuple[Any, Any]:
        counts.append(len(ids))
        return commit(cache, layer, ids, slots)

    monkeypatch.setattr(NeuronCache, "commit", counting)
    return counts


def stream(model: Model, prompt: list[int], sampling: dict[str, Any]) -> Iterator[int]:
    """LENGTH tokens, one by one: the ends of text are ruled out."""
    ends = dict.fromkeys(model.bundle.manifest.tokenizer.eos_ids, -math.inf)
    for event in model.stream(tokens=prompt, max_tokens=LENGTH, logit_bias=ends, **sampling):
        if event.token is not None:
            yield event.token


def window_logits(model: Model, tokens: tuple[int, ...]) -> bytes:
    return model.logits(tokens[WINDOW]).tobytes()


def hold(model: Model, ninths: int) -> None:
    """Keep the model to a part of the slots: from the fewest (0) to all of them (9)."""
    segment = model.plan.segment
    squeeze(model, (segment.total - segment.least) * ninths // (BUDGETS - 1))


def held_bytes(model: Model) -> int:
    neurons = model._engine._neurons
    assert isinstance(neurons, NeuronFetcher)
    return neurons.nbytes


@pytest.mark.parametrize("ahead", [True, False], ids=["reading-ahead", "on-demand"])
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_budgets_give_the_dense_text(
    texts: list[Text], policy: str, ahead: bool, adopted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_with(monkeypatch, policy=policy, fill_ahead=ahead, prefetch=ahead)
    first = (2 * POLICIES.index(policy) + ahead) * BUDGETS
    seen = Seen()
    for ninths in range(BUDGETS):
        text = texts[(first + ninths) % len(texts)]
        with load(SHIPPED, sparsity="exact", threads=1) as model:
            hold(model, ninths)
            assert tuple(stream(model, text.prompt, text.sampling)) == text.tokens, ninths
            seen.held_bytes.append(held_bytes(model))
            seen.rates.append(model.stats.neuron_cache_hit_rate)
            seen.read_bytes.append(model.stats.flash_bytes_read)
            assert window_logits(model, text.tokens) == text.logits, ninths
    assert 1 - seen.rates[0] > 2 * (1 - seen.rates[-1])
    assert seen.read_bytes[0] > 2 * seen.read_bytes[-1]
    assert len(set(seen.held_bytes)) > BUDGETS // 2
    assert (sum(adopted) > 0) is ahead


@pytest.mark.parametrize("policy", POLICIES)
def test_dense_text_while_the_budget_changes(
    texts: list[Text], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_with(monkeypatch, policy=policy)
    held, count = set(), 0
    with load(SHIPPED, sparsity="exact", threads=1) as model:
        for text in texts[POLICIES.index(policy) :: len(POLICIES)]:
            tokens = []
            for token in stream(model, text.prompt, text.sampling):
                tokens.append(token)
                count += 1
                if count % LIVE_EVERY == 0:
                    held.add(held_bytes(model))
                    hold(model, LIVE_BUDGETS[count // LIVE_EVERY % len(LIVE_BUDGETS)])
            assert tuple(tokens) == text.tokens
    assert count >= TOKENS // len(POLICIES)
    assert len(held) > len(LIVE_BUDGETS) // 2
