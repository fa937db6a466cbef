"""Texts that share passes: each has the bits that it has alone, and what happens to one harms no other."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import inspect, load
from ondevice.backends.base import Array
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.config import RuntimeConfig
from ondevice.errors import FlashReadError, UsageError
from ondevice.model.layer_range import SequencePart
from ondevice.model.prefill_schedule import UNTIMED_ROWS
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from tests.support.bundles import EOS
from tests.support.chat import slow_down, squeeze
from tests.support.shared_texts import ENDS, Parts, alone, asked, at_once, prompts, said, together


@pytest.mark.fast("predicted")
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted", "experts"])
def test_texts_made_together_have_the_bits_of_each_alone(
    mode: str, parts: Parts, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue("expert_bundle") if mode == "experts" else None
    options: dict[str, Any] = {"sparsity": mode, "threads": 2, "prefill_chunk": 29, "memory_pressure": "off"}
    with load(bundle, **options) as model:
        requests = asked(model, 4 if mode == "experts" else 6)
        expected = alone(model, requests)
    assert not parts
    for clients in (3, len(requests)):
        with load(bundle, parallel=clients, **options) as model:
            if clients == 3:
                squeeze(model)
            assert together(model, requests) == expected
        assert max(map(len, parts)) == clients
        parts.clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted", "experts"])
def test_joining_and_leaving_at_random_times_changes_no_text(
    mode: str, seed: int, parts: Parts, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(seed)
    bundle = request.getfixturevalue("expert_bundle") if mode == "experts" else None
    with load(bundle, sparsity=mode, threads=1, speculation="off", memory_pressure="off") as model:  # type: ignore[arg-type]
        requests = asked(model, 40)
        expected = alone(model, requests)

    def work(at: int) -> Callable[[], None]:
        wait, most = rng.random(), rng.choice([1, 4, 1000])

        def run() -> None:
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
            assert len(found) in (most, len(expected[at]))

        return run

    with load(
        bundle,
        sparsity=mode,  # type: ignore[arg-type]
        parallel=rng.choice([2, 4, 8]),
        prefill_chunk=rng.choice([1, 7, 256]),
        speculation=rng.choice(["off", "auto", "lookup"]),
        memory_pressure="off",
    ) as model:
        if rng.random() < 0.5:
            squeeze(model)
        assert at_once([work(at) for at in range(len(requests))]) == [None] * len(requests)
    assert max(map(len, parts)) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("steady_process")
def test_without_memory_for_all_the_last_ones_compute_theirs_again(parts: Parts) -> None:
    options: dict[str, Any] = {"sparsity": "dense", "speculation": "off", "memory_pressure": "off"}
    wanted = {**ENDS, "max_tokens": 130, "temperature": 0.9}
    with load(**options) as model:
        given = prompts(model.config.vocab_size, 4)
        requests = [(ids, {**wanted, "seed": at}) for at, ids in enumerate(given)]
        expected = alone(model, requests)
    small = inspect(parallel=4, max_context=256, **options).minimum_budget_bytes
    with load(parallel=4, max_context=256, dram_budget=small, **options) as model:
        limit = model.plan.kv_limit_bytes // model.plan.kv_block_bytes
        assert limit < sum(-(-(len(ids) + 130) // 64) for ids, _ in requests)
        assert together(model, requests) == expected
    prompt_rows = sum(rows for each in parts for rows, _ in each if rows > 1)
    assert prompt_rows > sum(len(ids) for ids, _ in requests), "nothing was computed twice"


@pytest.mark.slow
def test_a_budget_that_changes_takes_memory_and_changes_no_text() -> None:
    options: dict[str, Any] = {"sparsity": "dense", "speculation": "off", "memory_pressure": "off"}
    wanted = {**ENDS, "max_tokens": 60, "temperature": 0.9}
    with load(**options) as model:
        given = prompts(model.config.vocab_size, 4)
        requests = [((ids * 160)[:160], {**wanted, "seed": at}) for at, ids in enumerate(given)]
        expected = alone(model, requests)
    sized: dict[str, Any] = {"parallel": 4, "max_context": 256, **options}
    small, ended = inspect(**sized).minimum_budget_bytes, threading.Event()
    with load(dram_budget=3 * small, **sized) as model:

        def change() -> int:
            changes = 0
            while not ended.is_set():
                model.set_dram_budget(small if changes % 2 == 0 else 3 * small)
                changes += 1
            return changes

        def answer() -> list[Any]:
            try:
                return together(model, requests)
            finally:
                ended.set()

        changes, found = at_once([change, answer])
    assert found == expected
    assert changes > 20


def test_a_long_prompt_goes_in_pieces_between_the_tokens_of_others(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(parallel=2, speculation="off", memory_pressure="off", pass_seconds=0) as model:
        (first,) = prompts(model.config.vocab_size, 1)
        long = (first * 300)[:300]
        running = model.stream(tokens=first[:5], **{**ENDS, "max_tokens": 400})
        with monkeypatch.context() as patch:
            # The running text is far from its end when the long prompt has been read.
            slow_down(model, patch, 0.05)
            next(running)
            events = list(model.stream(tokens=long, max_tokens=2))
            running.close()  # type: ignore[attr-defined]
        assert said(events) == said(list(model.stream(tokens=long, max_tokens=2)))
    pieces = [rows for each in parts for rows, _ in each if rows > 1]
    assert sum(pieces) == 300
    assert max(pieces) == UNTIMED_ROWS
    rows_of = [[rows for rows, _ in each] for each in parts]
    assert all(1 in each for each in rows_of if max(each) > 1)


@pytest.mark.fast("0.0")
@pytest.mark.parametrize("pass_seconds", [0.0, 1e-6])
def test_the_time_of_passes_changes_no_text(pass_seconds: float, parts: Parts) -> None:
    """Prompts in parts of 32 rows, or of as many as there are, beside short ones and texts that write."""
    options: dict[str, Any] = {"sparsity": "dense", "threads": 2, "memory_pressure": "off"}
    with load(**options) as model:
        requests = asked(model, 5)
        requests[0] = ((requests[1][0] * 300)[:300], requests[0][1])
        requests[3] = ((requests[1][0] * 200)[:200], requests[3][1])
        expected = alone(model, requests)
    with load(parallel=5, pass_seconds=pass_seconds, **options) as model:
        assert together(model, requests) == expected
    assert max(map(len, parts)) == 5


def test_texts_take_turns_where_a_pass_may_have_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MLX, and here every row has the same bits whatever its pass is made of."""
    turns: list[list[tuple[SequenceState, int]]] = []
    each, one = Transformer.run_each, Transformer.run

    def run_each(self: Transformer, given: Sequence[SequencePart], *rest: Any) -> Any:
        turns.append([(kv, len(batch.tokens)) for batch, kv in given])
        return each(self, given, *rest)

    def run(self: Transformer, batch: ForwardBatch, kv: SequenceState, *rest: Any, **options: Any) -> Any:
        turns.append([(kv, len(batch.tokens))])
        return one(self, batch, kv, *rest, **options)

    options: dict[str, Any] = {"speculation": "off", "prefill_chunk": 29, "memory_pressure": "off"}
    with load(**options) as model:
        requests = [([5 + at], {**ENDS, "max_tokens": 25, "seed": at, "temperature": 0.9}) for at in range(5)]
        requests.append(([7, 8, 9] * 39 + [7], {**ENDS, "max_tokens": 2}))
        expected = alone(model, requests)
    monkeypatch.setattr(Transformer, "run_each", run_each)
    monkeypatch.setattr(Transformer, "run", run)
    with load(parallel=6, **options) as model:
        engine = model._engine
        engine._generator = replace(engine._generator, equal_rows=3)
        assert together(model, requests) == expected
    rows = [sum(own for _, own in turn) for turn in turns]
    first, last = rows.index(29), len(rows) - 1 - rows[::-1].index(29)
    assert [own for own in rows if own > 3] == [29] * 4, "a chunk of a prompt runs whole"
    assert [own == 29 for own in rows[first : last + 1]] == [True, False] * 3 + [True]
    assert all(own == 3 for own in rows[first + 1 : last : 2])
    told = Counter(kv for turn in turns for kv, _ in turn)
    counts = dict.fromkeys((kv for kv, count in told.items() if count == 25), 0)
    assert len(counts) == 5
    for turn in turns[: first + 30]:
        for kv in counts.keys() & {kv for kv, _ in turn}:
            counts[kv] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


def test_errors_of_one_text_harm_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []
    own = Transformer.run_each

    def run_each(self: Transformer, parts: Sequence[SequencePart], *rest: Any) -> Array:
        found = own(self, parts, *rest)
        if len(failed) < 2 and len(parts) > 2:
            failed.append(len(parts))
            raise FlashReadError("made up")
        return found

    with load(parallel=4, speculation="off", memory_pressure="off") as model:
        requests = asked(model, 3)
        expected = alone(model, requests)
        monkeypatch.setattr(Transformer, "run_each", run_each)
        bad = [model.config.vocab_size]
        found = together(model, [*requests, (bad, dict(ENDS))])
    assert len(failed) == 2
    assert found[:3] == expected
    assert isinstance(found[3], UsageError)


def test_drafts_come_back_with_the_last_text() -> None:
    with load(speculation="lookup", parallel=2, memory_pressure="off") as model:
        requests = [(ids, {**ENDS, "max_tokens": 90}) for ids in ([7, 8, 9, 7, 8, 9, 7], [11, 12, 11, 12])]
        requests[1][1]["max_tokens"] = 6
        expected = alone(model, requests)
        first = model.stream(tokens=requests[0][0], **requests[0][1])
        found = [next(first)]
        assert said(list(model.stream(tokens=requests[1][0], **requests[1][1]))) == expected[1]
        found += first
        assert said(found) == expected[0]
        stats = found[-1].stats
    assert stats is not None
    assert stats.drafting.drafts > 0


def test_closing_ends_all(chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(chat_bundle, parallel=3, memory_pressure="off")
    # None has 200 tokens before all have begun.
    slow_down(model, monkeypatch, 0.05)
    options: dict[str, Any] = {"max_tokens": 200, "logit_bias": {EOS: -math.inf}}
    streams = [model.stream(tokens=[5, 6, 7 + at], **options) for at in range(3)]
    begun = [next(it) for it in streams]
    model.close()
    assert len(begun) == 3
    assert [list(it)[-1].finish_reason for it in streams] == ["cancelled"] * 3


def test_where_a_text_would_depend_on_others_there_is_one_at_a_time() -> None:
    with load(parallel=4, memory_pressure="off", backend="reference") as model:
        assert model.runtime.parallel == 1
        requests = [([5, 6, 7], {**ENDS, "max_tokens": 3}), ([8, 9], {**ENDS, "max_tokens": 3})]
        texts = together(model, requests)
    assert all(isinstance(text, list) for text in texts)


@pytest.mark.usefixtures("steady_process")
def test_the_plan_counts_what_texts_add() -> None:
    one, four, eight = (inspect(parallel=count) for count in (1, 4, 8))
    vocabulary = 8 * 4096
    assert four.decode_activation_bytes - one.decode_activation_bytes >= 3 * vocabulary
    assert eight.decode_activation_bytes - four.decode_activation_bytes >= 4 * vocabulary
    assert one.minimum_budget_bytes < four.minimum_budget_bytes < eight.minimum_budget_bytes
    assert inspect(parallel=4, prefill_chunk=1).pass_tokens == 4


@pytest.mark.parametrize("value", [0, -1, 17, 2.0, "2"])
def test_the_number_of_texts_is_checked(value: Any) -> None:
    with pytest.raises(UsageError, match=r"parallel is .*; it must be an integer from 1 to 16"):
        RuntimeConfig(parallel=value)
