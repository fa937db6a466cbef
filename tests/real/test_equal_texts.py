"""A real model's text is the same whatever memory, chunks, threads, reads and drafts it is made with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from tests.support.chat import budget_between
from tests.support.engines import always_draft

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("steady_process")]

PROMPT = (
    "Monday: the baker opens at six and sells bread, rolls and cakes to the people of the village.\n"
    "Tuesday: the baker opens at six and sells bread, rolls and pies to the people of the village.\n"
    "Wednesday:"
)
"""A text that repeats itself, so that drafts of every kind are tried and some are taken."""
GREEDY_TOKENS, SAMPLED_TOKENS = 20, 20
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 10}
"""With this seed the text of every real model differs from its greedy one."""
PLAIN: dict[str, Any] = {"speculation": "off", "threads": 1}
DRAFTERS = ("lookup", "recycling", "resident")
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 7 on two threads": {"prefill_chunk": 7, "threads": 2},
    "a token a chunk, buffered reads": {"prefill_chunk": 1, "io": "buffered"},
    "direct reads, and what auto drafts": {"io": "direct", "speculation": "auto"},
}
DRAWN_RUNS = 10
"""Runs of a test whose options are drawn by chance."""
LARGER = ("gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")

Texts = tuple[tuple[int, ...], tuple[int, ...]]


def texts(model: Model) -> Texts:
    """Token ids of the greedy text and of the one drawn with a seed."""
    greedy = model.generate(PROMPT, max_tokens=GREEDY_TOKENS)
    return greedy.tokens, model.generate(PROMPT, max_tokens=SAMPLED_TOKENS, **SAMPLING).tokens


@pytest.fixture(params=["smollm2", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)])
def bundle(request: pytest.FixtureRequest, bundle_of: Any) -> Path:
    """The bundle of each real model."""
    folder: Path = bundle_of(request.param)
    return folder


@pytest.fixture(scope="module")
def plain_texts() -> dict[Path, Texts]:
    """Texts by bundle, with everything resident, one thread and no drafts."""
    return {}


@pytest.fixture
def expected(bundle: Path, plain_texts: dict[Path, Texts]) -> Texts:
    """The texts that every way must give."""
    if bundle not in plain_texts:
        with load(bundle, **PLAIN) as model:
            assert not model.plan.offloads_weights
            plain_texts[bundle] = texts(model)
    greedy, sampled = plain_texts[bundle]
    assert len(greedy) == GREEDY_TOKENS
    assert sampled != greedy[: len(sampled)], "nothing was drawn by chance"
    return greedy, sampled


@pytest.mark.fast("smollm2-direct reads*")
@pytest.mark.parametrize("way", WAYS)
def test_chunks_threads_reads_and_drafts_by_themselves(bundle: Path, expected: Texts, way: str) -> None:
    with load(bundle, **(PLAIN | WAYS[way])) as model:
        assert texts(model) == expected


@pytest.mark.fast("smollm2-few")
@pytest.mark.parametrize("budgets", [(0, 2), (0, 1, 2)], ids=["few", "more"])
def test_no_budget_changes_the_texts(bundle: Path, expected: Texts, budgets: tuple[int, ...]) -> None:
    options, read = PLAIN | {"max_context": 512}, []
    for quarters in budgets:
        with load(bundle, dram_budget=budget_between(bundle, quarters, **options), **options) as model:
            assert quarters or model.plan.offloads_weights
            assert texts(model) == expected, quarters
            read.append(model.stats.flash_bytes_read)
    assert read == sorted(read, reverse=True)
    assert read[0] > read[-1]


@pytest.mark.fast("smollm2-lookup")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_changes_the_texts(
    bundle: Path, expected: Texts, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [4])
    with load(bundle, **(PLAIN | {"speculation": drafter})) as model:
        assert texts(model) == expected
        assert model.stats.drafting.draft_tokens > 0


@pytest.mark.slow
def test_a_second_model_that_drafts(bundle_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, second = bundle_of("qwen2.5-coder-1.5b"), bundle_of("qwen2.5-coder-0.5b")
    with load(bundle, **PLAIN) as model:
        expected = texts(model)
    always_draft(monkeypatch, [4])
    with load(bundle, speculation="model", draft_model=str(second), threads=1) as model:
        assert texts(model) == expected
        assert model.stats.accepted_tokens_per_pass > 1.0


@pytest.mark.slow
def test_the_budget_changes_while_a_text_is_made(bundle: Path, expected: Texts) -> None:
    ways: list[dict[str, Any]] = [{"max_tokens": GREEDY_TOKENS}, {"max_tokens": SAMPLED_TOKENS, **SAMPLING}]
    for wanted, options in zip(expected, ways, strict=True):
        with load(bundle, **PLAIN) as model:
            largest, tokens, offloaded = model.plan.budget_bytes, [], set()
            for index, event in enumerate(model.stream(PROMPT, **options)):
                tokens.append(event.token)
                offloaded.add(model.plan.offloads_weights)
                if index % 12 == 5:
                    smallest = model.replanned.minimum_budget_bytes
                    model.set_dram_budget(largest if model.plan.offloads_weights else smallest)
            assert tuple(tokens[:-1]) == wanted
            assert offloaded == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_no_options_drawn_by_chance_change_the_texts(bundle: Path, expected: Texts, seed: int) -> None:
    """Budgets change while a text is made, in both directions; with four models, 200 runs."""
    draw, offloads = random.Random(seed), 0
    for number in range(DRAWN_RUNS):
        options: dict[str, Any] = {
            "threads": draw.choice((1, 2, 3)),
            "prefill_chunk": draw.choice((1, 3, 16, 64)),
            "speculation": draw.choice(("off", "auto", *DRAFTERS)),
            "io": draw.choice(("auto", "direct", "buffered")),
            "max_context": draw.choice((128, 512, 1024)),
        }
        budgets = [budget_between(bundle, 4 * draw.random() ** 2, **options) for _ in range(3)]
        told = f"run {number}: {options}, budgets {budgets}"
        with load(bundle, dram_budget=budgets[0], **options) as model:
            assert texts(model) == expected, told
            offloads += model.plan.offloads_weights
            tokens = []
            for event in model.stream(PROMPT, max_tokens=GREEDY_TOKENS):
                tokens.append(event.token)
                if budgets[1:] and draw.random() < 0.2:
                    # What a text has brought into the process counts as well.
                    model.set_dram_budget(max(budgets.pop(), model.replanned.minimum_budget_bytes))
            assert tuple(tokens[:-1]) == expected[0], told
    assert offloads >= DRAWN_RUNS // 2
