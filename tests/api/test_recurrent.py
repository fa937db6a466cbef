"""Models with recurrent layers through the API: no way of running one changes its text."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.backends import recurrent
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.recurrent import MARKS, PROMPT_TAIL
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.errors import FlashReadError, OndeviceError
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafters import intersection
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.training import train_ngrams
from tests.support.bundles import EOS, write_byte_tokenizer
from tests.support.cached_texts import PROMPT, said, settle, written
from tests.support.damaged_caches import DAMAGES
from tests.support.engines import always_draft
from tests.support.families import CASES, write_model
from tests.support.paths import SHIPPED
from tests.support.scripted_drafts import drafted
from tests.support.shared_texts import alone, asked, together


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of a small Qwen3.5 or LFM2 with a byte tokenizer and a chat template."""
    return made(tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5 moe", "lfm2"])
def every_hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likewise, or with experts."""
    return made(tmp_path_factory.mktemp("every"), request.param)


OTHER_KINDS = (
    *("qwen3 next", "lfm2 moe", "granite hybrid moe", "nemotron h moe", "falcon h1", "falcon h1 norm"),
    *("deepseek v2 moe", "deepseek v3 moe", "glm4 moe lite", "mimo v2 moe wide"),
)


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5 moe", "lfm2", *OTHER_KINDS])
def every_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of every kind of state, of latent attention, and of values narrower than keys."""
    return made(tmp_path_factory.mktemp("kinds"), request.param)


def made(folder: Path, case: str) -> Path:
    family, options = CASES[case]
    write_model(folder / "source", family, {**options, "vocab_size": 320})
    write_byte_tokenizer(folder / "source")
    return convert(folder / "source", folder / case.replace(" ", "-"), "q4")


WAYS: list[dict[str, Any]] = [
    {"threads": 2},
    {"prefill_chunk": 1, "threads": 1},
    {"prefill_chunk": 7},
    {"prefill_chunk": 64, "parallel": 3},
]


@pytest.mark.fast("qwen3.5 moe")
def test_no_way_of_running_it_changes_the_text(every_hybrid: Path) -> None:
    with load(every_hybrid, threads=1) as model:
        expected = said(model)
    with pytest.raises(ondevice.BudgetError) as refused:
        load(every_hybrid, dram_budget="1MB").close()
    for way in (*WAYS, {"dram_budget": refused.value.required_bytes + (4 << 20)}):
        with load(every_hybrid, **way) as model:
            assert said(model) == expected, way


@pytest.mark.fast("qwen3.5")
def test_a_chat_goes_on_and_goes_back(hybrid: Path, tmp_path: Path) -> None:
    def reply(session: ondevice.Session, text: str) -> tuple[int, ...]:
        return tuple(session.respond(text, max_tokens=20, logit_bias={EOS: -math.inf}).tokens)

    with load(hybrid) as model:
        session = model.session("Be brief. " * 12)
        first = reply(session, "Hello")
        branch = session.fork()
        others = reply(branch, "Something else")
        second = reply(session, "And again")
        session.save(tmp_path / "talk.json")
        assert written(tmp_path / "talk.json.state")
        third = reply(session, "And so on")
    with load(hybrid) as model:
        session = model.session()
        session.load(tmp_path / "talk.json")
        assert reply(session, "And so on") == third
        # A conversation that parts from an earlier one goes back to a checkpoint.
        again = model.session("Be brief. " * 12)
        assert (reply(again, "Hello"), reply(again, "Something else")) == (first, others)
        again._messages = again._messages[:-2]
        assert reply(again, "And again") == second


@pytest.mark.fast("qwen3.5")
def test_a_prompt_cache_has_what_lies_before_a_checkpoint(hybrid: Path, tmp_path: Path) -> None:
    prompt = [*PROMPT, *PROMPT]
    with load(hybrid) as model:
        expected = said(model, prompt)[0]
        spacing = model._engine.kv.layout.states.spacing
    assert spacing < len(prompt)
    with load(hybrid, prompt_cache=tmp_path) as model:
        assert said(model, prompt) == (expected, 0)
        settle(model)
    for chunk in (512, 7):
        with load(hybrid, prompt_cache=tmp_path, prefill_chunk=chunk) as model:
            assert said(model, prompt) == (expected, (len(prompt) - 1) // spacing * spacing)


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2", "granite hybrid"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of a small Qwen3.5, LFM2 or Granite 4, the last with Mamba-2 mixers."""
    return made(tmp_path_factory.mktemp("sparse"), request.param)


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens between checkpoints, as in large models: more than a prompt has."""
    monkeypatch.setattr(recurrent, "MIN_SPACING", 512)
    return 512


SHORT = [*PROMPT, *PROMPT]


@pytest.mark.fast("lfm2")
def test_a_short_prompt_is_restored_after_a_restart(sparse: Path, tmp_path: Path, far_apart: int) -> None:
    with load(sparse, threads=1, speculation="off", prefill_chunk=512) as model:
        expected = said(model, SHORT)[0]
        others = said(model, [*SHORT[:295], 7, 8, 9])[0]
        assert model._engine.kv.layout.states.spacing >= far_apart > len(SHORT)
        # The prompt's states near its end cost no pass.
        assert model.generate(tokens=SHORT, max_tokens=1).stats.forward_passes == 1
    with load(sparse, prompt_cache=tmp_path) as model:
        assert said(model, SHORT) == (expected, 0)
        settle(model)
    assert len(written(tmp_path)) == 1
    ways: list[dict[str, Any]] = [{}, {"prefill_chunk": 7}, {"prefill_chunk": 64, "speculation": "lookup"}]
    for way in (*ways, {"prefill_chunk": 1, "dram_budget": least_bytes(sparse) + (4 << 20)}):
        with load(sparse, prompt_cache=tmp_path, **way) as model:
            assert said(model, SHORT) == (expected, 292), way
            # Another text that begins alike.
            assert said(model, [*SHORT[:295], 7, 8, 9]) == (others, 292), way
    with load(sparse, prompt_cache=tmp_path) as model:
        assert said(model, SHORT[:292])[1] == 0


def least_bytes(bundle: Path) -> int:
    """The smallest budget that the model runs in."""
    with pytest.raises(ondevice.BudgetError) as refused:
        load(bundle, dram_budget="1MB").close()
    return refused.value.required_bytes


@pytest.mark.fast("lfm2")
def test_damage_behind_the_last_checkpoint_costs_a_computation(
    sparse: Path, tmp_path: Path, far_apart: int
) -> None:
    with load(sparse, prompt_cache=tmp_path, threads=1, speculation="off") as model:
        expected, restored = said(model, SHORT, 4)
        settle(model)
        assert (restored, len(written(tmp_path)) > 0, far_apart > len(SHORT)) == (0, True, True)
        for seed, damage in enumerate(DAMAGES):
            (path,) = written(tmp_path)
            damage(path, random.Random(seed))
            text, restored = said(model, SHORT, 4)
            assert text == expected, damage.__name__
            assert restored in (0, 292)
            for other in [*tmp_path.glob("elsewhere*"), *tmp_path.glob("*/*")]:
                if not other.is_file() or other.is_symlink():
                    other.rmdir() if other.is_dir() else other.unlink()
            said(model, SHORT, 4)
            settle(model)
            assert said(model, SHORT, 4) == (expected, 292), damage.__name__
            settle(model)
            for other in tmp_path.glob("elsewhere*"):
                other.unlink()


@pytest.mark.fast("granite hybrid")
def test_an_edited_turn_goes_on_from_the_turn_before(sparse: Path, tmp_path: Path, far_apart: int) -> None:
    """So does a turn behind an answer that the template renders otherwise."""

    def reply(session: ondevice.Session, text: str) -> ondevice.Response:
        return session.respond(text, max_tokens=20, logit_bias={EOS: -math.inf})

    def alone(messages: list[Any], text: str) -> tuple[int, ...]:
        fresh = model.session()
        fresh._messages = list(messages)
        return reply(fresh, text).tokens

    with load(sparse) as model:
        session = model.session("Be brief. " * 12)
        first = reply(session, "Hello").stats
        assert first.prompt_tokens < far_apart
        before = session.transcript
        kv = model._engine.kv.of_sessions[session._key]
        held = kv.length
        second = reply(session, "And again").stats
        assert first.prompt_tokens - PROMPT_TAIL <= second.reused_tokens <= held
        # The second turn is edited, and said again; what was computed for the first one stays.
        for text in ("Something else", "Nothing"):
            session._messages = list(before)
            answer = reply(session, text)
            assert answer.stats.reused_tokens == second.reused_tokens
            assert answer.tokens == alone(before, text)
        session._messages = list(before)
        assert reply(session, "Nothing").stats.reused_tokens == answer.stats.prompt_tokens - PROMPT_TAIL
        # The last answer is there without its beginning, as a chat's that drops thoughts.
        changed = [*session.transcript[:-1], {"role": "assistant", "content": "!"}]
        session._messages = list(changed)
        session.save(tmp_path / "talk.json")
        third = reply(session, "And so on")
        assert third.stats.reused_tokens == answer.stats.prompt_tokens - PROMPT_TAIL
        assert third.tokens == alone(changed, "And so on")
    with load(sparse) as model:
        session = model.session()
        session.load(tmp_path / "talk.json")
        again = reply(session, "And so on")
        assert (again.tokens, again.stats.reused_tokens) == (third.tokens, third.stats.reused_tokens)


def test_logits_that_fail_end_the_texts_that_share_a_pass(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state can't go back by a token: the pass must not run again for what failed behind it."""
    logits, passes = Transformer.logits, [0]

    def failing(self: Transformer, *arguments: Any) -> Any:
        if passes[0] > 12:
            raise FlashReadError("made up")
        return logits(self, *arguments)

    run_each = Transformer.run_each

    def counted(self: Transformer, *arguments: Any) -> Any:
        passes[0] += 1
        return run_each(self, *arguments)

    monkeypatch.setattr(Transformer, "logits", failing)
    monkeypatch.setattr(Transformer, "run_each", counted)
    found: list[OndeviceError] = []

    def text(model: Model, first: int) -> None:
        with pytest.raises(FlashReadError, match="made up") as caught:
            model.generate(tokens=[first] * 100, max_tokens=200, logit_bias={EOS: -math.inf})
        found.append(caught.value)

    with load(hybrid, threads=1, parallel=2, max_context=400, prefill_chunk=32) as model:
        threads = [threading.Thread(target=text, args=(model, first), daemon=True) for first in (5, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 2
    assert passes[0] < 40


def test_the_plan_has_the_states(hybrid: Path) -> None:
    with load(hybrid, max_context=512, speculation="off") as model:
        layout = model._engine.kv.layout
        blocks = layout.blocks(512) * layout.block_bytes
        buffers = 2 + 512 // layout.states.spacing + MARKS
        assert model.plan.kv_cache_bytes == blocks + buffers * layout.states.nbytes
        said(model, [*PROMPT, *PROMPT])
        assert model._engine.kv.nbytes <= model.plan.kv_cache_bytes


def texts_of(model: Model) -> list[tuple[int, ...]]:
    """What the model says with each of `SAMPLINGS`."""
    return [model.generate("Hello, hello, hello", **LONG, **options).tokens for options in SAMPLINGS]


BIAS: dict[str, Any] = {"logit_bias": {2: -math.inf, EOS: -math.inf}}
LONG: dict[str, Any] = {"max_tokens": 60, **BIAS}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5}]


@pytest.mark.fast("qwen3.5 moe", "lfm2")
def test_trees_of_all_shapes_change_nothing(every_hybrid: Path) -> None:
    with load(every_hybrid, threads=2, speculation="lookup") as model:
        model._engine.draft_with("off", None)
        texts = texts_of(model)
        judged = 0
        for scripted, answer in drafted(model, "Hello, hello, hello", SAMPLINGS, texts, **BIAS):
            judged += sum(scripted.sizes)
            assert answer.stats.forward_passes < 50
            assert len(set(scripted.sizes)) > 8
        assert judged > 200


DRAFTERS: list[dict[str, Any]] = [
    {"speculation": "lookup"},
    {"speculation": "recycling", "prefill_chunk": 7},
    {"speculation": "resident", "prefill_chunk": 64},
    {"speculation": "ngrams", "threads": 1},
    {"speculation": "auto", "prefill_chunk": 1},
    {"speculation": "auto", "threads": 2},
]


def drafters_of(bundle: Path, folder: Path) -> list[dict[str, Any]]:
    """Options of every drafter that the model can have. folder: for the second model."""
    if Bundle.open(bundle).config.experts is None:
        return [*DRAFTERS, {"speculation": "model", "draft_model": bundle}]
    # Drafts take the neurons in memory, or other experts.
    able = [it for it in DRAFTERS if it["speculation"] != "resident"]
    return [*able, {"speculation": "model", "draft_model": made(folder / "second", "lfm2")}]


@pytest.mark.fast("lfm2")
def test_no_drafter_changes_the_text(
    every_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [DRAFT_NODES, 3, 8])
    with load(every_hybrid, threads=1) as model:
        assert model._engine._drafting is not None
        model._engine.draft_with("off", None)
        expected = texts_of(model)
        start = model.tokenizer.encode("Hello, hello, hello")
    train_ngrams(every_hybrid, pieces=[[*start, *expected[0][:40]]], output=tmp_path / "bundle")
    for options in drafters_of(every_hybrid, tmp_path):
        with load(tmp_path / "bundle", **options) as model:
            assert texts_of(model) == expected, options
            assert len(expected[0]) == 60
            answer = model.generate("Hello, hello, hello", **LONG)
            assert answer.stats.drafting.draft_tokens > 0 or options.get("prefill_chunk") == 1, options
            assert model._engine.kv.nbytes <= model.plan.kv_cache_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("steady_process")
def test_twenty_thousand_tokens_are_those_of_plain_decoding(
    every_kind: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three budgets, every drafter, chunks, threads, with and without a prompt cache."""
    always_draft(monkeypatch, [DRAFT_NODES, 3, 8])
    rng = np.random.default_rng(12)
    prompts = [rng.integers(3, 300, length).tolist() for length in (4, 30, 64, 129, 170)]

    def texts(model: Model) -> list[tuple[int, ...]]:
        return [
            model.generate(tokens=it, **LONG, **options).tokens for it in prompts for options in SAMPLINGS
        ]

    with load(every_kind, threads=1, speculation="off") as model:
        expected = texts(model)
    train_ngrams(every_kind, pieces=[[*prompts[0], *expected[0][:40]]], output=tmp_path / "bundle")
    compared = 0
    for drafter in drafters_of(every_kind, tmp_path):
        for cache in ({}, {"prompt_cache": tmp_path / "cache"}):
            options = {**drafter, **cache}
            with pytest.raises(ondevice.BudgetError) as refused:
                load(tmp_path / "bundle", **options, dram_budget="1MB").close()
            for spare in (1 << 20, 4 << 20, 1 << 30):
                budget = refused.value.required_bytes + spare
                with load(tmp_path / "bundle", **options, dram_budget=budget) as model:
                    assert texts(model) == expected, (options, spare)
                compared += sum(map(len, expected))
    assert compared >= 20_000


def test_a_second_model_with_states_needs_few_passes(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts for itself, so it is always right; what it drafted isn't computed again."""
    always_draft(monkeypatch, [5])
    with load(hybrid, speculation="model", draft_model=hybrid) as model:
        second: Any = model._engine._drafting._drafter  # type: ignore[union-attr]
        run, rows = second._model.transformer.run, list[int]()

        def counted(batch: ForwardBatch, *arguments: Any, **options: Any) -> Any:
            rows.append(len(batch.tokens))
            return run(batch, *arguments, **options)

        monkeypatch.setattr(second._model.transformer, "run", counted)
        answer = model.generate("Hello, hello, hello", **LONG)
    assert answer.stats.forward_passes < 30
    assert sum(rows) < 160


@pytest.mark.slow
@pytest.mark.parametrize("least_shared", [0.0, 2.0])
def test_it_drafts_for_another_vocabulary(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, least_shared: float
) -> None:
    """However many tokens are shared."""
    always_draft(monkeypatch, [DRAFT_NODES])
    monkeypatch.setattr(intersection, "MIN_SHARED", least_shared)
    with load(SHIPPED, speculation="off") as model:
        expected = texts_of(model)
    with load(SHIPPED, speculation="model", draft_model=hybrid) as model:
        assert texts_of(model) == expected
        assert model.generate("Hello, hello, hello", **LONG).stats.drafting.draft_tokens > 0


@pytest.mark.fast("qwen3.5")
def test_texts_that_share_passes_draft(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [DRAFT_NODES, 4, 9])
    with load(hybrid, speculation="off") as model:
        requests = asked(model, 6)
        expected = alone(model, requests)
    with load(hybrid, speculation="lookup", parallel=3, prefill_chunk=16) as model:
        assert together(model, requests) == expected


@pytest.mark.fast("lfm2")
def test_a_small_budget_has_room_for_drafts(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [DRAFT_NODES, 3])
    with load(hybrid, threads=1, speculation="off") as model:
        expected = texts_of(model)
    with pytest.raises(ondevice.BudgetError) as refused:
        load(hybrid, speculation="resident", dram_budget="1MB").close()
    least = refused.value.required_bytes
    for speculation in ("resident", "auto"):
        with load(hybrid, speculation=speculation, dram_budget=least + (4 << 20)) as model:
            assert texts_of(model) == expected, speculation


def test_the_plan_has_what_drafts_keep(hybrid: Path) -> None:
    plain = ondevice.inspect(hybrid, speculation="off")
    drafting = ondevice.inspect(hybrid, speculation="lookup")
    config = Bundle.open(hybrid).config
    specs = [config.layers[layer] for layer in config.recurrent_layers]
    deltas, convs = [it.delta for it in specs if it.delta], [it.conv for it in specs if it.conv]
    floats = [it.channels + 2 * it.value_heads for it in deltas] + [it.channels for it in convs]
    assert len(floats) == 3
    assert drafting.kv_cache_bytes - plain.kv_cache_bytes == 4 * DRAFT_NODES * sum(floats)
