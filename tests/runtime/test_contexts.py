"""The context that a budget has room for: named where it is missing, taken where nobody asked for another."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice import api
from ondevice.api import Model, load, open_model
from ondevice.budget.plan import REPEAT_MARGIN_BYTES, Plan
from ondevice.budget.sizes import PREFILL_CHUNK
from ondevice.commands.reports import plan_summary
from ondevice.config import RuntimeConfig
from ondevice.errors import BudgetError, ContextOverflowError
from ondevice.measure.profiling import SAMPLED_PIECE_TOKENS
from ondevice.runtime import resolving
from ondevice.runtime.resolving import CONTEXT_STEP, MIN_CONTEXT, SMALL_CHUNK, ResolvedModel, check_tokens
from ondevice.training import PIECE_TOKENS
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.command_line import Run

pytestmark = pytest.mark.usefixtures("steady_process")

SHIPPED = api.find_model()
LONGEST = 4096
OPTIONS: dict[str, Any] = {
    "threads": 1,
    "memory_pressure": "off",
    "speculation": "off",
    "prefill_chunk": PREFILL_CHUNK,
}
"""Chunks of a named size are never made smaller."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,096 tokens of its keys and values are 50 MB, most of what it takes."""
    folder = tmp_path_factory.mktemp("contexts")
    shape = {"head_dim": 256, "max_position_embeddings": 2 * LONGEST}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "bundle")


def plan_of(bundle: Path, **options: Any) -> Plan:
    return ondevice.inspect(bundle, **OPTIONS | options)


def resolved(bundle: Path, **options: Any) -> ResolvedModel:
    return open_model(bundle, RuntimeConfig(**OPTIONS | options))


def budget_for(bundle: Path, context: int) -> int:
    """One that holds such a context, and none that is a step longer."""
    return plan_of(bundle, max_context=context).minimum_budget_bytes + REPEAT_MARGIN_BYTES


@pytest.mark.parametrize("context", [MIN_CONTEXT, 1536, LONGEST - CONTEXT_STEP])
def test_the_longest_context_that_fits_is_taken(bundle: Path, context: int) -> None:
    budget = budget_for(bundle, context)
    plan = plan_of(bundle, dram_budget=budget)
    assert (plan.fits, plan.max_context, plan.wanted_context) == (True, context, LONGEST)
    assert plan_of(bundle, dram_budget=budget, max_context=context).fits
    assert not plan_of(bundle, dram_budget=budget, max_context=context + CONTEXT_STEP).fits
    assert plan_summary(plan).endswith(f"\n      context {context} tokens, as 4096 would not fit")
    with load(bundle, dram_budget=budget, **OPTIONS) as model:
        assert (model.plan.max_context, model.runtime.max_context) == (context, context)


def test_prompts_are_read_in_small_chunks_where_nothing_else_fits(bundle: Path) -> None:
    unnamed, (budget, least) = (
        {"prefill_chunk": 0},
        (
            budget_for(bundle, MIN_CONTEXT),
            plan_of(bundle, max_context=MIN_CONTEXT, prefill_chunk=SMALL_CHUNK).minimum_budget_bytes,
        ),
    )
    assert least < plan_of(bundle, max_context=MIN_CONTEXT).minimum_budget_bytes - (1 << 20)
    # A context is shortened first.
    assert resolved(bundle, **unnamed, dram_budget=budget).runtime.prefill_chunk == PREFILL_CHUNK
    small = resolved(bundle, **unnamed, dram_budget=least)
    assert (small.plan.fits, small.plan.max_context, small.runtime.prefill_chunk) == (
        True,
        MIN_CONTEXT,
        SMALL_CHUNK,
    )
    assert small.smallest_plan.plan.minimum_budget_bytes == least
    assert not resolved(bundle, dram_budget=least).plan.fits
    assert not resolved(bundle, **unnamed, dram_budget=least - REPEAT_MARGIN_BYTES - 1).plan.fits
    with load(bundle, dram_budget=least, **OPTIONS | unnamed) as model:
        tokens = [5 + index % 50 for index in range(300)]
        assert model.runtime.prefill_chunk == SMALL_CHUNK
        text = model.generate(tokens=tokens, max_tokens=4).tokens
    with load(bundle, **OPTIONS) as model:
        assert model.generate(tokens=tokens, max_tokens=4).tokens == text


def test_with_room_the_default_context_stays(bundle: Path) -> None:
    for budget in ("auto", "8GB", budget_for(bundle, LONGEST)):
        plan = plan_of(bundle, dram_budget=budget)
        assert (plan.max_context, plan.wanted_context) == (LONGEST, 0)
        assert "would not fit" not in plan_summary(plan)


def test_below_the_least_context_there_is_no_budget_unless_a_shorter_one_is_asked_for(bundle: Path) -> None:
    budget = budget_for(bundle, 256)
    with pytest.raises(
        BudgetError, match=r"KV cache of 512 tokens .*; max_context=256 would fit\.$"
    ) as caught:
        load(bundle, dram_budget=budget, **OPTIONS)
    with load(bundle, dram_budget=caught.value.required_bytes, **OPTIONS) as model:
        assert model.plan.max_context >= MIN_CONTEXT
    with load(bundle, dram_budget=budget, max_context=256, **OPTIONS) as model:
        assert model.plan.max_context == 256
    with pytest.raises(BudgetError) as caught:
        load(bundle, dram_budget="1MB", **OPTIONS)
    assert "would fit" not in str(caught.value)


def test_a_context_that_was_asked_for_is_kept_or_refused_with_the_one_that_fits(bundle: Path) -> None:
    budget = budget_for(bundle, 1536)
    for asked in (1536 + CONTEXT_STEP, LONGEST, 2 * LONGEST):
        with pytest.raises(BudgetError, match=rf"KV cache of {asked} .*; max_context=1536 would fit\.$"):
            load(bundle, dram_budget=budget, max_context=asked, **OPTIONS)
    found = plan_of(bundle, dram_budget=budget, max_context=1500)
    assert (found.fits, found.max_context, found.wanted_context) == (True, 1500, 0)


def longest_within(bundle: Path, budget: int, most_bytes: float) -> int:
    """Tokens of the longest context from 4,096 on with which everything stays in memory, and that takes at
    most so many bytes for keys and values and, beyond 4,096 tokens, for scratch memory.
    """
    plans = [plan_of(bundle, max_context=it) for it in range(LONGEST, 2 * LONGEST + 1, CONTEXT_STEP)]
    least = plans[0].activation_bytes
    fitting = [it for it in plans if it.full_bytes <= budget]
    return max(
        it.max_context for it in fitting if it.kv_cache_bytes + it.activation_bytes - least <= most_bytes
    )


@pytest.mark.fast("20", "8000")
@pytest.mark.parametrize("more", [20, 60, 150, 8000])
def test_a_share_of_the_budget_makes_the_default_context_longer(bundle: Path, more: int) -> None:
    """As long as keys and values stay within it, up to the model's own; what a text takes first stays."""
    budget = plan_of(bundle, dram_budget="8GB", max_context=LONGEST).full_bytes + more * 10**6
    plain = plan_of(bundle, dram_budget=budget)
    plan = plan_of(bundle, dram_budget=budget, context_share=0.25)
    assert (plain.max_context, plain.context_share) == (LONGEST, 0.0)
    assert plan.max_context == longest_within(bundle, budget, budget / 4)
    assert (plan.context_share == 0.25) == (plan.max_context > LONGEST)
    assert (plan.fits, plan.offloads_weights, plan.embedding_resident) == (True, False, True)
    # Only attention's scores are longer.
    assert plan.start_bytes - plain.start_bytes < 4 << 20
    if more == 8000:
        taken = 100 * plan.kv_cache_bytes // budget
        words = f"context {2 * LONGEST} tokens, whose keys and values take up to {taken} % of the budget"
        assert plan_summary(plan).endswith(f"\n      {words}")
        with load(bundle, dram_budget=budget, context_share=0.25, **OPTIONS) as model:
            assert model.plan.max_context == model.runtime.max_context == 2 * LONGEST


def test_a_named_context_or_a_small_budget_leaves_the_share_unused(bundle: Path) -> None:
    """Nor does a longer context push out weights that are in memory without it."""
    named = plan_of(bundle, dram_budget="8GB", context_share=0.25, max_context=5000)
    assert (named.max_context, named.context_share) == (5000, 0.0)
    short = plan_of(bundle, dram_budget=budget_for(bundle, 1536), context_share=1.0)
    assert (short.max_context, short.wanted_context, short.context_share) == (1536, LONGEST, 0.0)
    whole = plan_of(bundle, dram_budget="8GB", max_context=LONGEST)
    edge = whole.resident_budget_bytes + whole.embedding_bytes
    for budget in (edge, edge - 1, edge + (8 << 20)):
        plan = plan_of(bundle, dram_budget=budget, context_share=1.0)
        plain = plan_of(bundle, dram_budget=budget)
        assert plan.embedding_resident == plain.embedding_resident == (budget >= edge)
        assert (plan.max_context > LONGEST) == (budget > edge)


def test_the_automatic_budget_grows_no_more_than_by_the_weights(bundle: Path, tmp_path: Path) -> None:
    """A small model's plan isn't made large by its context; that of a model with more weights is longer."""
    plan = plan_of(bundle, context_share=0.25)
    assert plan.model_bytes < plan_of(bundle, max_context=LONGEST).kv_cache_bytes
    assert (plan.max_context, plan) == (LONGEST, plan_of(bundle))
    shape = {"head_dim": 8, "max_position_embeddings": 2 * LONGEST, "intermediate_size": 8192}
    larger = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint", **shape), tmp_path / "larger")
    plan = plan_of(larger, context_share=0.25)
    assert plan.max_context == longest_within(larger, 10**12, plan.model_bytes) > LONGEST
    assert plan.budget_bytes == plan.full_bytes == plan.total_bytes


def test_the_automatic_budget_has_the_share_that_a_named_one_has(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a share of what is planned, however much memory is free."""
    monkeypatch.setattr(resolving, "held_bytes", lambda: 0)
    shape = {"max_position_embeddings": 2 * LONGEST, "intermediate_size": 1 << 16, "head_dim": 64}
    large = convert_bundle(write_chat_checkpoint(tmp_path / "checkpoint", **shape), tmp_path / "large")
    plan = plan_of(large, context_share=0.25)
    named = plan_of(large, dram_budget=plan.budget_bytes, context_share=0.25)
    assert plan.model_bytes > plan.kv_cache_bytes
    assert LONGEST < plan.max_context == named.max_context < 2 * LONGEST


def test_chat_and_inspect_take_the_share_and_generate_does_not(
    bundle: Path, ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = plan_of(bundle, dram_budget="8GB", max_context=LONGEST).full_bytes
    options = ("-m", bundle, "--threads", 1, "--dram-budget", full + 150 * 10**6)
    shown = ondevice("inspect", *options, "--json").json["plan"]
    longer = shown["max_context"]
    assert (longer > LONGEST, shown["context_share"]) == (True, 0.25)
    words = f"context {longer} tokens, whose keys and values take up to "
    assert re.search(
        rf"^memory for .*, {words}\d+ % of the budget, with ", ondevice("inspect", *options).out, re.M
    )
    assert words in ondevice("chat", *options, "--max-tokens", 2, stdin="Hi\n").err
    assert f"at {LONGEST} tokens" in ondevice("generate", *options, "-p", "Once", "--max-tokens", 2).err
    # A model's own settings yield to flags and variables.
    (tmp_path / "config.toml").write_text("max_context = 700\n[models.bundle]\nmax-context = 600\n")
    for command in (("inspect",), ("generate", "-p", "Once", "--max-tokens", 2)):
        found = ondevice(*command, *options, "--json")
        assert found.code == 0
        assert "600 tokens" in found.err or found.json["plan"]["max_context"] == 600
    assert ondevice("inspect", *options, "--max-context", 900, "--json").json["plan"]["max_context"] == 900
    monkeypatch.setenv("ONDEVICE_MAX_CONTEXT", "800")
    assert ondevice("inspect", *options, "--json").json["plan"]["max_context"] == 800


def test_what_training_and_profiles_read_does_not_follow_the_budget() -> None:
    assert max(PIECE_TOKENS, SAMPLED_PIECE_TOKENS) <= MIN_CONTEXT


def test_a_model_with_a_short_context_of_its_own_keeps_it() -> None:
    plan = ondevice.inspect(SHIPPED, dram_budget="1MB")
    assert (plan.max_context, plan.wanted_context, plan.fits) == (512, 0, False)


def test_a_shorter_context_ends_a_text_earlier_and_changes_none_of_its_tokens(bundle: Path) -> None:
    """Promise 2, where a budget has no room for all of it."""
    prompt = [(7 * index) % 250 for index in range(400)]
    sampling: dict[str, Any] = {
        "max_tokens": 200,
        "temperature": 0.8,
        "seed": 5,
        "logit_bias": {EOS: -math.inf},
    }
    with load(bundle, dram_budget="8GB", **OPTIONS) as model:
        whole = model.generate(tokens=prompt, **sampling)
    with load(bundle, dram_budget=budget_for(bundle, MIN_CONTEXT), **OPTIONS) as model:
        cut = model.generate(tokens=prompt, **sampling)
        with pytest.raises(ContextOverflowError):
            model.generate(tokens=prompt * 2)
    assert (len(whole.tokens), len(cut.tokens)) == (200, MIN_CONTEXT - len(prompt))
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert cut.finish_reason == "length"


def test_a_prompt_that_the_shortened_context_cannot_hold_says_why(bundle: Path) -> None:
    short = resolved(bundle, dram_budget=budget_for(bundle, MIN_CONTEXT))
    with pytest.raises(ContextOverflowError) as caught:
        check_tokens(short, range(600))
    (note,) = caught.value.__notes__
    assert note.startswith("context 512 tokens, as 4096 would not fit the budget: that takes --dram-budget ")
    needed = int(re.findall(r"\d+", note)[-1])
    assert plan_of(bundle, dram_budget=needed).max_context == LONGEST


def test_a_score_never_follows_the_budget(bundle: Path, ondevice: Run, tmp_path: Path) -> None:
    """Its windows are as long as the context: a shortened one is refused, one that was asked for is not."""
    said = "Once upon a time. " * 40
    text = tmp_path / "text"
    text.write_text(said)
    budget = budget_for(bundle, MIN_CONTEXT)
    options = ("eval", "-m", bundle, "--text", text, "--threads", 1, "--speculation", "off", "--json")
    refused = ondevice(*options, "--dram-budget", budget)
    assert refused.code == 5
    assert f"; --max-context {MIN_CONTEXT} would fit." in refused.err
    assert "so that one isn't shortened unasked" in refused.err
    with load(bundle, dram_budget=budget, **OPTIONS) as model:
        assert model.plan.max_context == MIN_CONTEXT
        with pytest.raises(BudgetError) as caught:
            model.score(said)
        assert model.generate("Once", max_tokens=2).tokens
    # The commands' process is this one, which other tests may have grown.
    enough = ondevice(*options, "--dram-budget", caught.value.required_bytes + (8 << 20)).json
    assert enough == ondevice(*options, "--dram-budget", "8GB").json
    asked = ondevice(*options, "--dram-budget", budget, "--max-context", MIN_CONTEXT).json
    assert asked["tokens"] == enough["tokens"]
    assert asked["perplexity"] != enough["perplexity"]


def test_inspect_says_what_would_fit(bundle: Path, ondevice: Run) -> None:
    options = ("-m", bundle, "--threads", 1, "--dram-budget", budget_for(bundle, 1536))
    shown = ondevice("inspect", *options, "--json").json
    assert (shown["plan"]["max_context"], shown["plan"]["wanted_context"]) == (1536, LONGEST)
    assert (shown["minimum_budget_context"], shown["fitting_context"]) == (MIN_CONTEXT, 0)
    assert shown["minimum_budget_bytes"] < shown["plan"]["minimum_budget_bytes"]
    text = ondevice("inspect", *options).out
    assert re.search(r"^memory for .*, context 1536 tokens, as 4096 would not fit, with ", text, re.MULTILINE)
    assert re.search(r"^smallest budget that works: .* --max-context 512:$", text, re.MULTILINE)
    refused = ondevice("inspect", *options, "--max-context", LONGEST, "--json").json
    assert (refused["plan"]["fits"], refused["fitting_context"]) == (False, 1536)
    text = ondevice("inspect", *options, "--max-context", LONGEST).out
    assert "fits: no; --max-context 1536 would fit" in text
    told = ondevice("generate", *options, "-p", "Once", "--max-tokens", 2)
    assert "\n      context 1536 tokens, as 4096 would not fit\n" in told.err


def test_a_second_model_drafts_with_the_shortened_context(bundle: Path) -> None:
    options = {"speculation": "model", "draft_model": bundle}
    whole = resolved(bundle, dram_budget="8GB", **options)
    assert whole.draft is not None
    assert whole.draft.plan.max_context == whole.draft.runtime.max_context == LONGEST
    budget = (plan_of(bundle, **options).minimum_budget_bytes + budget_for(bundle, MIN_CONTEXT)) // 2
    short = resolved(bundle, dram_budget=budget, **options)
    assert short.draft is not None
    assert short.plan.fits
    assert short.draft.plan.max_context == short.draft.runtime.max_context == short.plan.max_context < LONGEST
    with Model(short) as model:
        assert model.generate("Once", max_tokens=20).tokens
