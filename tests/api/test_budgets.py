"""One text whatever the budget, and a process that keeps to it."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget import plan as budget_plan
from ondevice.budget.sizes import DECODE_TOKENS
from ondevice.errors import BackendUnavailableError, BudgetError
from ondevice.runtime import resolving
from ondevice.units import process_memory
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.chat import PROMPT, budget_between, greedy, squeeze
from tests.support.paths import SHIPPED

pytestmark = pytest.mark.usefixtures("steady_process")


def test_the_text_is_the_same_whatever_the_settings(chat_bundle: Path, model: Model) -> None:
    expected = greedy(model, 60)
    sampled = greedy(model, 40, temperature=0.9, seed=3)
    settings: list[dict[str, Any]] = [
        {"threads": 2},
        {"prefill_chunk": 1},
        {"prefill_chunk": 7},
        {"io": "buffered"},
        {"kernel_target": "scalar"},
    ]
    for options in settings:
        with load(chat_bundle, **options) as other:
            assert greedy(other, 60) == expected, options
            assert greedy(other, 40, temperature=0.9, seed=3) == sampled, options
    for quarters in (0, 1, 3):
        with load(chat_bundle, dram_budget=budget_between(chat_bundle, quarters), threads=1) as other:
            assert greedy(other, 60) == expected, quarters


def test_five_budgets_hold_five_different_shares_of_a_model_and_say_the_same(tmp_path: Path) -> None:
    """Residency must really differ, lest the same pass be compared with itself."""
    shape = {"num_hidden_layers": 6, "intermediate_size": 4096}
    bundle = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint", **shape), tmp_path / "bundle")
    texts, segments, hit_rates, read = [], [], [], []
    for quarters in range(5):
        # With chunks as narrow as this, no scratch memory of a long prompt is neurons'.
        options = {"threads": 1, "prefill_chunk": DECODE_TOKENS}
        budget = budget_between(bundle, quarters, **options)
        with load(bundle, dram_budget=budget, **options) as model:
            response = model.generate(PROMPT, max_tokens=24, logit_bias={EOS: -math.inf})
            segments.append(model._engine._quota.segments)
            texts.append(response.tokens)
            hit_rates.append(response.stats.neuron_cache_hit_rate)
            read.append(response.stats.flash_bytes_read)
            total = model.plan.segment.total
    assert len(texts[0]) == 24
    assert set(texts) == {texts[0]}
    assert segments == sorted(set(segments))
    assert hit_rates == sorted(set(hit_rates))
    assert read == sorted(set(read), reverse=True)
    # From less than two thirds of the reads spared to everything resident.
    assert hit_rates[0] < 0.67
    assert segments[-1] == total


@pytest.mark.slow
def test_no_setting_changes_two_hundred_tokens_of_a_real_model(stories_bundle: Path) -> None:
    with load(stories_bundle) as model:
        opening = model.tokenizer.encode("Once upon a time")
        prompt = [*opening, *model.generate(tokens=opening, max_tokens=140).tokens]
    assert len(prompt) > 2 * 64

    def tokens(**options: Any) -> tuple[int, ...]:
        with load(stories_bundle, **options) as model:
            response = model.generate(tokens=prompt, max_tokens=200)
            chunk = model.runtime.prefill_chunk
            most = math.ceil(len(prompt) / chunk) + 199
            passes = response.stats.forward_passes
            assert passes == most if options.get("speculation") == "off" else passes <= most, options
            return response.tokens

    expected = tokens()
    assert len(expected) == 200
    ways: list[dict[str, Any]] = [
        {"prefill_chunk": 1, "threads": 1},
        {"prefill_chunk": 7, "io": "buffered"},
        {"prefill_chunk": 64, "threads": 2, "speculation": "off"},
    ]
    assert [way for way in ways if tokens(**way) != expected] == []
    for quarters in (0, 2, 4):
        assert tokens(dram_budget=budget_between(stories_bundle, quarters)) == expected, quarters
    with load(stories_bundle) as model:
        changed = []
        for index, event in enumerate(model.stream(tokens=prompt, max_tokens=200)):
            changed.append(event.token)
            if index % 50 == 25:
                smallest = model.plan.minimum_budget_bytes
                model.set_dram_budget("4GB" if model.plan.offloads_weights else smallest)
        assert tuple(changed[:-1]) == expected


def test_direct_and_buffered_reads_give_the_same_text(chat_bundle: Path, model: Model) -> None:
    smallest = ondevice.inspect(chat_bundle).minimum_budget_bytes
    for io in ("buffered", "direct"):
        try:
            other = load(chat_bundle, io=io, dram_budget=smallest)
        except BackendUnavailableError as refused:
            pytest.skip(str(refused))
        with other:
            assert greedy(other, 100) == greedy(model, 100)
            assert other.stats.io == io
            assert other.stats.flash_bytes_read > 0


def test_the_smallest_budget_streams_and_the_largest_does_not(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    with load(chat_bundle, dram_budget=plan.minimum_budget_bytes) as model:
        stats = model.generate(PROMPT, max_tokens=150, logit_bias={EOS: -math.inf}).stats
        assert stats.flash_bytes_read > 0
        assert stats.flash_read_seconds > 0
        assert stats.flash_cpu_seconds > 0
        assert stats.neuron_cache_hit_rate < 1.0
        assert stats.io in ("direct", "buffered")
        model.set_dram_budget("8GB")
        assert not model.plan.offloads_weights
        deadline = time.monotonic() + 30.0
        while model.stats.neuron_cache_hit_rate < 1.0 and time.monotonic() < deadline:
            model.generate(PROMPT, max_tokens=20, logit_bias={EOS: -math.inf})
        assert model.stats.neuron_cache_hit_rate == 1.0
        assert model.generate(PROMPT, max_tokens=5).stats.flash_bytes_read < 100 * 8192


def test_a_budget_that_cannot_be_met_names_the_one_that_can(chat_bundle: Path) -> None:
    assert not ondevice.inspect(chat_bundle, dram_budget="1MB").fits
    with pytest.raises(BudgetError) as caught:
        load(chat_bundle, dram_budget=0)
    with load(chat_bundle, dram_budget=caught.value.required_bytes) as model:
        assert greedy(model, 2)
        with pytest.raises(BudgetError):
            model.set_dram_budget("1MB")
        assert model.plan.budget_bytes == caught.value.required_bytes


def test_the_budget_may_change_while_a_text_is_made(chat_bundle: Path, model: Model) -> None:
    expected = greedy(model, 120)
    with load(chat_bundle, threads=1, dram_budget="8GB") as other:
        smallest = other.plan.minimum_budget_bytes - budget_plan.REPEAT_MARGIN_BYTES
        tokens: list[int | None] = []
        rates = []
        bias = {EOS: -math.inf}
        for index, event in enumerate(other.stream(PROMPT, max_tokens=120, logit_bias=bias)):
            tokens.append(event.token)
            if index in (20, 60):
                plan = other.set_dram_budget(smallest if index == 20 else "8GB")
                rates.append(plan.offloads_weights)
        assert tuple(tokens[:-1]) == expected
        assert rates == [True, False]


def test_the_embedding_table_goes_and_comes_back_with_the_budget(chat_bundle: Path) -> None:
    with load(chat_bundle, dram_budget="8GB") as model:
        expected = greedy(model, 8)
        bare = model.plan.minimum_budget_bytes - budget_plan.REPEAT_MARGIN_BYTES
        for budget, resident in ((bare, False), ("8GB", True)):
            assert model.set_dram_budget(budget).embedding_resident == resident
            for _ in range(20):
                assert greedy(model, 8) == expected
                if not model.stats.flash_bytes_read:
                    break
            assert bool(model.stats.flash_bytes_read) != resident


def test_residency_yields_to_the_kv_cache_and_comes_back(chat_bundle: Path) -> None:
    with load(chat_bundle) as model:
        squeeze(model, segments=1)
        greedy(model, 2)
        at_start = model._engine._quota.segments
        greedy(model, 230)
        after = model._engine._quota.segments
        greedy(model, 2)
        assert at_start > after
        assert model._engine._quota.segments > after
        assert model._engine.kv.nbytes == 0


@pytest.mark.fast("exact")
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_neurons_have_the_scratch_memory_of_long_prompts_while_tokens_are_decoded(
    tmp_path: Path, sparsity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_plan, "QUOTA_MARGIN_BYTES", 0)  # more than all that so small a model has
    shape = {"num_hidden_layers": 4, "intermediate_size": 8192, "hidden_act": "relu"}
    bundle = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint", **shape), tmp_path / "bundle")
    text = "a long and winding road " * 9
    with load(bundle, sparsity="dense") as model:
        expected = [model.generate(text, max_tokens=20).tokens, greedy(model, 20)]
    budget = ondevice.inspect(bundle, sparsity=sparsity).minimum_budget_bytes
    with load(bundle, sparsity=sparsity, dram_budget=budget) as model:
        engine, plan, quota = model._engine, model.plan, []

        def note(batch: ForwardBatch) -> None:
            engine._before_pass(batch)
            quota.append((len(batch.tokens), engine._quota.segments))

        engine._generator = dataclasses.replace(engine._generator, before_pass=note)
        for _ in range(2):
            assert model.generate(text, max_tokens=20).tokens == expected[0]
            (tokens, prompt), *decoding = quota
            assert tokens > 8 * DECODE_TOKENS
            assert prompt <= plan.segments_for(0, tokens) < plan.segment.total
            assert min(count for _, count in decoding) > prompt
            assert greedy(model, 20) == expected[1]
            quota.clear()


def test_residency_comes_back_between_the_windows_of_a_score(chat_bundle: Path) -> None:
    with load(chat_bundle) as model:
        squeeze(model, segments=1)
        for call in (model.logits, lambda tokens: model.score(tokens=tokens)):
            call([1] * (model.plan.max_context - 1))
            at_full_context = model._engine._quota.segments
            call([1, 2])
            assert model._engine._quota.segments > at_full_context


def test_auto_is_what_the_model_can_use(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    assert plan.budget_bytes == plan.full_bytes
    assert plan.embedding_resident
    assert not plan.offloads_weights


@pytest.mark.fast("session*")
@pytest.mark.parametrize("call", ["generate", "session('Be brief.').respond"])
def test_the_process_stays_below_its_budget(chat_bundle: Path, call: str) -> None:
    program = (
        "import sys, ondevice\n"
        "plan = ondevice.inspect(sys.argv[1])\n"
        "with ondevice.load(sys.argv[1], dram_budget=plan.minimum_budget_bytes) as model:\n"
        f"    stats = model.{call}('Once', max_tokens=200, logit_bias={{257: -1e9}}).stats\n"
        "    print(stats.peak_memory_bytes, model.plan.budget_bytes, model.plan.total_bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(chat_bundle)], capture_output=True, text=True, check=True
    )
    peak, budget, total = map(int, done.stdout.split())
    assert peak <= budget
    assert abs(peak - total) <= max(0.05 * total, 16 << 20)


def test_auto_goes_without_drafts_only_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process grows and shrinks by more than drafts take, from one plan to the next.
    held = process_memory()
    monkeypatch.setattr(resolving, "process_memory", lambda: held)
    names = "lookup", "off"
    plans = {name: ondevice.inspect(SHIPPED, sparsity="dense", speculation=name) for name in names}
    # `auto` has this drafter at least.
    drafts, off = plans["lookup"].draft_bytes, plans["off"]
    assert drafts > 0
    spare = drafts // 10
    least = ondevice.inspect(SHIPPED, sparsity="dense", dram_budget=off.minimum_budget_bytes + spare)
    assert (least.fits, least.draft_bytes) == (True, 0)
    # Rather some weights on flash than no drafts.
    whole = ondevice.inspect(SHIPPED, sparsity="dense", dram_budget=off.full_bytes + spare)
    assert whole.draft_bytes > 0
    assert whole.offloads_weights
