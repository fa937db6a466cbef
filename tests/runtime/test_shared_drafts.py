"""Drafts of texts that share passes: every text is what it is alone, whatever is drafted for it or others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from ondevice.api import Model, inspect, load
from ondevice.backends.base import Array
from ondevice.config import SamplingConfig
from ondevice.errors import FlashReadError
from ondevice.model.layer_range import SequencePart
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafters.combined import Combined, WhileRowsAreCheap
from ondevice.speculation.drafters.lookup import Lookup
from ondevice.speculation.drafters.recycling import Recycling
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.tree import DRAFT_NODES
from tests.support.chat import squeeze
from tests.support.engines import always_draft
from tests.support.paths import SHIPPED
from tests.support.shared_texts import ENDS, Parts, alone, asked, prompts, said, together

LIMITS = [DRAFT_NODES, 5, 9, 4]
"""Most nodes of one pass after another."""


def drafting_texts(found: Parts) -> int:
    """Most texts of a pass that had draft tokens."""
    return max(sum(drafted > 0 for _, drafted in each) for each in found)


def most_rows(found: Parts) -> int:
    """Most rows of the texts of a pass in which all decode."""
    return max(sum(rows for rows, _ in each) for each in found if all(rows == 1 + own for rows, own in each))


CASES_OF = [
    ("dense", "auto", 4),
    ("dense", "resident", 3),
    ("exact", "auto", 4),
    ("exact", "resident", 3),
    ("predicted", "recycling", 3),
    ("experts", "auto", 4),
]


@pytest.mark.fast("experts-auto-4")
@pytest.mark.parametrize(("mode", "drafter", "clients"), CASES_OF)
def test_texts_that_draft_together_have_the_bits_of_each_alone(
    mode: str,
    drafter: Any,
    clients: int,
    parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Greedy and with seeds, from flash, with prompts in pieces beside them."""
    bundle = request.getfixturevalue("expert_bundle") if mode == "experts" else None
    options: dict[str, Any] = {"sparsity": mode, "threads": 2, "prefill_chunk": 29, "memory_pressure": "off"}
    with load(bundle, speculation="off", **options) as model:
        requests = asked(model, clients + 2)
        expected = alone(model, requests)
    assert not parts
    always_draft(monkeypatch, LIMITS)
    with load(bundle, speculation=drafter, parallel=clients, **options) as model:
        squeeze(model)
        assert together(model, requests) == expected
    assert drafting_texts(parts) > 1
    assert most_rows(parts) <= DRAFT_NODES
    assert max(sum(rows for rows, _ in each) for each in parts) <= 29
    assert any(rows > 1 + drafted and own > 0 for each in parts for rows, drafted in each for _, own in each)


def test_a_text_that_repeats_itself_takes_fewer_passes(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [DRAFT_NODES])
    with load(speculation="off", parallel=3, memory_pressure="off") as model:
        requests = [([7, 8, 9, 7, 8, 9, 7 + at], {**ENDS, "max_tokens": 60}) for at in range(3)]
        expected = together(model, requests)
        plain = len(parts)
    parts.clear()
    with load(speculation="lookup", parallel=3, memory_pressure="off") as model:
        streams = together(model, requests)
        drafting = model.stats.drafting
    assert streams == expected
    assert len(parts) < 0.8 * plain
    assert drafting.drafts > 0
    assert sum(drafting.accepted_by_depth) > 0


@pytest.mark.fast("streams")
@pytest.mark.parametrize("drafter", ["model", "streams"])
def test_drafters_of_one_text_draft_for_one_and_the_others_run_beside_it(
    drafter: Any, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [6])
    second: dict[str, Any] = {"draft_model": SHIPPED} if drafter == "model" else {}
    with load(speculation="off", memory_pressure="off") as model:
        requests = asked(model, 4)
        expected = alone(model, requests)
    with load(speculation=drafter, parallel=3, memory_pressure="off", **second) as model:
        assert together(model, requests) == expected
        found = list(model.stream(tokens=requests[0][0], **requests[0][1]))
    assert drafting_texts(parts) == (1 if drafter == "model" else 0)
    assert found[-1].stats is not None
    assert found[-1].stats.drafting.draft_tokens > 0, "it drafts again for one alone"


@pytest.mark.usefixtures("steady_process")
def test_without_memory_for_all_the_last_ones_compute_theirs_again(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sparsity": "dense", "memory_pressure": "off"}
    wanted = {**ENDS, "max_tokens": 90, "temperature": 0.9}
    with load(speculation="off", **options) as model:
        requests = [
            (ids, {**wanted, "seed": at}) for at, ids in enumerate(prompts(model.config.vocab_size, 4))
        ]
        expected = alone(model, requests)
    always_draft(monkeypatch, LIMITS)
    options |= {"parallel": 4, "max_context": 256, "speculation": "lookup"}
    small = inspect(**options).minimum_budget_bytes
    with load(dram_budget=small, **options) as model:
        assert together(model, requests) == expected
    prompt_rows = sum(rows - drafted for each in parts for rows, drafted in each if rows > 1 + drafted)
    assert prompt_rows > sum(len(ids) for ids, _ in requests), "nothing was computed twice"
    assert drafting_texts(parts) > 1


def test_texts_that_end_early_or_fail_harm_no_other(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are cancelled in the middle, and some passes fail."""
    always_draft(monkeypatch, [DRAFT_NODES])
    failed: list[int] = []
    own = Transformer.run_each

    def run_each(self: Transformer, given: Sequence[SequencePart], *rest: Any) -> Array:
        found = own(self, given, *rest)
        if len(failed) < 4 and sum(len(batch.drafted) > 0 for batch, _ in given) > 1:
            failed.append(len(given))
            raise FlashReadError("made up")
        return found

    with load(speculation="off", memory_pressure="off") as model:
        requests = asked(model, 10)
        expected = alone(model, requests)
    monkeypatch.setattr(Transformer, "run_each", run_each)
    rng = random.Random(5)
    with load(speculation="auto", parallel=4, memory_pressure="off") as model:

        def run(at: int, most: int, wait: float) -> None:
            time.sleep(wait)
            ids, options = requests[at]
            events = model.stream(tokens=ids, **options)
            found = []
            for event in events:
                found.append(event)
                if len(found) == most:
                    break
            events.close()  # type: ignore[attr-defined]
            assert said(found) == expected[at][: len(found)]
            ended.append(at)

        ended: list[int] = []
        rounds = 0
        # On a busy machine few passes may be shared: then all texts come again.
        while len(failed) < 4 and rounds < 5:
            rounds += 1
            threads = [
                threading.Thread(target=run, args=(at, rng.choice([2, 5, 1000]), 0.2 * rng.random()))
                for at in range(len(requests))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(ended) == sorted(rounds * list(range(len(requests))))
        give_up = time.monotonic() + 60.0
        # A stream that is closed doesn't wait for the end of its text.
        while any(text.is_used for text in drafting_of(model)._texts) and time.monotonic() < give_up:
            time.sleep(0.01)
        assert not any(text.is_used for text in drafting_of(model)._texts), "a drafter was never freed"
    assert len(failed) == 4


def drafting_of(model: Model) -> Drafting:
    found = model._engine._drafting
    assert found is not None
    return found


def test_a_text_gets_a_drafter_once_one_is_free() -> None:
    drafting = Drafting(Combined([Lookup(), Recycling(50)]), DRAFT_NODES, texts=2)
    first, second = (drafting.begin([1, 2, 3], SamplingConfig()) for _ in range(2))
    assert first is not None
    assert second is not None
    assert drafting.begin([4], SamplingConfig()) is None
    drafting.end(first)
    assert drafting.begin([4], SamplingConfig()) is first
    # What one learns of the model, the other knows.
    shared, other = (text.drafter.members[1] for text in (first, second))  # type: ignore[attr-defined]
    assert shared._next is other._next
    assert WhileRowsAreCheap(Lookup()).spawn() is None


@pytest.mark.parametrize("drafter", ["lookup", "auto", "resident", "model"])
def test_the_plan_counts_the_drafters_of_all(drafter: Any) -> None:
    second: dict[str, Any] = {"draft_model": SHIPPED} if drafter == "model" else {}
    one, four = (inspect(parallel=count, speculation=drafter, **second) for count in (1, 4))
    more = four.draft_bytes - one.draft_bytes
    assert more == 0 if drafter == "model" else more > 3 * 8 * four.max_context
