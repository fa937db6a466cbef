"""Models with windows through the API: what windowed layers give up behind a ring changes no text."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.backends.kv_layout import KVLayout
from ondevice.converters.convert import convert
from ondevice.runtime.state_pool import StatePool
from ondevice.speculation.tree import DRAFT_NODES
from tests.support.bundles import EOS, write_byte_tokenizer
from tests.support.cached_texts import settle, written
from tests.support.engines import always_draft
from tests.support.families import CASES, write_model

WINDOW = 40
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": CASES["gemma3"],
    "gpt-oss": CASES["gpt-oss moe"],
    "mistral": ("Mistral", {}),
}
LONG = [(7 * at * at + 3 * at) % 250 + 3 for at in range(620)]
EDITS = [LONG, [*LONG[:560], 5], [*LONG[:300], 9, 8], [*LONG[:200], 4], [*LONG, *LONG[:50]], LONG]
"""Texts that go on from each other: within the ring, behind it, and where nothing is held any more."""
BIAS = {EOS: -math.inf, 2: -math.inf}
Said = list[tuple[int | None, float | None]]


@pytest.fixture(scope="module", params=FAMILIES)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of a small model with windows, with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("windows")
    family, options = FAMILIES[request.param]
    sizes = {"vocab_size": 320, "sliding_window": WINDOW, "max_position_embeddings": 1024}
    write_model(folder / "source", family, {**options, **sizes})
    write_byte_tokenizer(folder / "source")
    return convert(folder / "source", folder / request.param, "q4")


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory counts as idle."""
    monkeypatch.setattr(StatePool, "_is_idle", lambda pool, nbytes: False)


@pytest.fixture
def without_rings() -> Iterator[pytest.MonkeyPatch]:
    """While it isn't undone, all layers keep all keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVLayout, "windows", property(lambda layout: (0,) * len(layout.heads)))
        yield patch


def said(model: Model, tokens: list[int], keep: bool = True, count: int = 12) -> tuple[Said, int]:
    """Tokens drawn by chance with their exact log-probabilities, and how many of the prompt's were kept."""
    options: dict[str, Any] = {"max_tokens": count, "temperature": 0.9, "seed": 3, "top_logprobs": 0}
    *events, last = model.stream(tokens=tokens, cache_prompt=keep, logit_bias=BIAS, **options)
    assert last.stats is not None
    return [(event.token, event.logprob) for event in events], last.stats.reused_tokens


def texts(model: Model) -> list[Said]:
    return [said(model, text)[0] for text in EDITS]


WAYS: list[dict[str, Any]] = [
    {"speculation": "off", "threads": 2},
    {"speculation": "lookup", "prefill_chunk": 1},
    {"speculation": "recycling", "prefill_chunk": 64},
    {"speculation": "auto", "prefill_chunk": 7},
]


@pytest.mark.usefixtures("scarce")
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_no_way_of_running_it_changes_a_text(
    bundle: Path, kv_bits: Any, without_rings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: dict[str, Any] = {"kv_bits": kv_bits, "max_context": 1024}
    with load(bundle, threads=1, speculation="off", **shared) as model:
        assert not model._engine.kv.layout.ring
        expected = [said(model, text, keep=False)[0] for text in EDITS]
        all_bytes = model.plan.kv_cache_bytes
    without_rings.undo()
    always_draft(monkeypatch, [DRAFT_NODES, 3, 8])
    with pytest.raises(ondevice.BudgetError) as refused:
        load(bundle, dram_budget="1MB", **shared).close()
    for way in (*WAYS, {"prefill_chunk": 64, "dram_budget": refused.value.required_bytes + (4 << 20)}):
        with load(bundle, **way, **shared) as model:
            plan, layout = model.plan, model._engine.kv.layout
            assert layout.ring == layout.blocks(WINDOW + max(plan.pass_tokens, 64) - 2) + 1
            assert plan.kv_cache_bytes < all_bytes
            for text, alone in zip(EDITS, expected, strict=True):
                assert said(model, text)[0] == alone, way
                most = max(kv.nbytes for kv in model._engine.kv.prefixes)
                assert most <= plan.kv_cache_bytes + plan.kv_marks_bytes


def test_a_budget_that_changes_gives_up_what_a_text_can_do_without(bundle: Path) -> None:
    options: dict[str, Any] = {
        "threads": 1,
        "speculation": "lookup",
        "prefill_chunk": 64,
        "max_context": 1024,
    }
    with load(bundle, **options) as model:
        expected = [said(model, text, keep=False)[0] for text in EDITS]
        full, least = model.plan.full_bytes, model.plan.minimum_budget_bytes
    with load(bundle, dram_budget="2GB", **options) as model:
        pool = model._engine.kv
        assert [said(model, text) for text in EDITS[:3]] == list(
            zip(expected[:3], (0, 560, 300), strict=True)
        )
        # Idle memory keeps everything.
        assert pool.nbytes > model.plan.kv_cache_bytes
        for text, alone, budget in zip(EDITS, expected, (0.4, 0.0, 1.0, 0.0, 0.7, 0.1), strict=True):
            model.set_dram_budget(least + int(budget * (full - least)) + (4 << 20))
            assert said(model, text)[0] == alone
            assert pool.nbytes <= model.plan.kv_limit_bytes
        events = model.stream(tokens=LONG, max_tokens=12, temperature=0.9, seed=3, logit_bias=BIAS)
        assert next(events).token == expected[0][0][0]
        model.set_dram_budget(least + (4 << 20))
        model.set_dram_budget("2GB")
        assert [event.token for event in events][:-1] == [token for token, _ in expected[0][1:]]


@pytest.mark.usefixtures("scarce")
def test_a_prompt_cache_has_what_a_text_gives_up(bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"threads": 1, "prefill_chunk": 64, "max_context": 1024}
    with load(bundle, **options) as model:
        expected = [said(model, text, keep=False)[0] for text in EDITS]
    with load(bundle, prompt_cache=tmp_path, **options) as model:
        model.logits(LONG)
        assert not written(tmp_path)
        assert said(model, LONG) == (expected[0], 0)
        # Before anything is idle, all that isn't held any more is there.
        assert len(written(tmp_path)) >= len(LONG) // 64 - model._engine.kv.layout.ring
        assert said(model, EDITS[3]) == (expected[3], 200)
        settle(model)
    for keep in (False, True):
        with load(bundle, prompt_cache=tmp_path, **options) as model:
            for text, alone, common in zip(EDITS, expected, (619, 560, 300, 200, 620, 619), strict=True):
                drawn, reused = said(model, text, keep)
                assert drawn == alone
                assert reused >= common
            settle(model)


@pytest.mark.usefixtures("scarce")
def test_a_chat_goes_on_and_goes_back(bundle: Path, tmp_path: Path) -> None:
    def reply(session: ondevice.Session, text: str) -> tuple[tuple[int, ...], int]:
        found = session.respond(text, max_tokens=150, logit_bias=BIAS)
        return found.tokens, found.stats.reused_tokens

    options: dict[str, Any] = {"prefill_chunk": 64, "max_context": 1024}
    with load(bundle, **options) as model:
        session = model.session("Be brief. " * 20)
        first, _ = reply(session, "Hello")
        branch, messages = session.fork(), session.transcript
        others, _ = reply(branch, "Something else")
        second, reused = reply(session, "And again")
        assert reused > 300
        # The last answer is given anew, and then another turn: both go back to a mark.
        for _ in range(2):
            session._messages = list(messages)
            anew, kept = reply(session, "And again")
            assert (anew, abs(kept - reused) <= 160) == (second, True)
        session._messages = list(messages)
        again, kept = reply(session, "Something else")
        assert again == others
        assert kept > 300
        session.save(tmp_path / "talk.json")
        third, _ = reply(session, "And so on")
    with load(bundle, **options) as model:
        session = model.session()
        session.load(tmp_path / "talk.json")
        saved, kept = reply(session, "And so on")
        assert saved == third
        assert kept > 300
        fresh = model.session("Be brief. " * 20)
        assert reply(fresh, "Hello") == (first, 0)


@pytest.mark.usefixtures("scarce")
def test_texts_that_share_passes_have_rings_of_their_own(bundle: Path) -> None:
    with load(bundle, parallel=3, threads=1, prefill_chunk=64, max_context=1024) as model:
        expected = [said(model, text, keep=False, count=80)[0] for text in EDITS[:3]]
        said_at: dict[int, Said] = {}

        def text(at: int) -> None:
            said_at[at] = said(model, EDITS[at], count=80)[0]

        threads = [threading.Thread(target=text, args=(at,), daemon=True) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [said_at[at] for at in range(3)] == expected
