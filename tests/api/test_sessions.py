"""Sessions: transcripts, reuse of the common prefix, forks, files, memory."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.budget.plan import Plan
from ondevice.errors import (
    ContextOverflowError,
    UsageError,
)
from ondevice.generate import Event
from tests.support.bundles import CONTEXT, EOS
from tests.support.chat import PROMPT


def test_a_session_remembers_and_computes_only_what_is_new(model: Model) -> None:
    session = model.session("Be brief.")
    first = session.respond("Hello there", max_tokens=10)
    second = session.respond("And again", max_tokens=10)
    assert [message["role"] for message in session.transcript] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert session.transcript[2]["content"] == first.text
    prompt = model.chat_ids(session.transcript[:-1])
    assert second.stats.prompt_tokens == len(prompt)
    assert second.tokens == model.generate(tokens=prompt, max_tokens=10).tokens
    assert second.stats.prefill_tokens_per_second > 0


def test_a_chat_in_one_call_is_a_first_reply_and_keeps_nothing(model: Model) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    expected = model.session("Be brief.").respond("Hello there", max_tokens=10)
    gc.collect()
    held = model.state_bytes
    reply = model.chat(messages, max_tokens=10)
    assert (reply.tokens, reply.text) == (expected.tokens, expected.text)
    assert "".join(event.text for event in model.stream_chat(messages, max_tokens=10)) == reply.text
    assert model.chat("Hello", max_tokens=4).tokens == model.session().respond("Hello", max_tokens=4).tokens
    gc.collect()
    assert model.state_bytes == held


def test_a_chat_in_one_call_obeys_a_schema_and_is_told_of_tools(model: Model) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    assert json.loads(model.chat("How many?", schema=schema, max_tokens=60).text)["n"] in (1, 2)
    tool = ondevice.Tool("look", "Look it up", {"type": "object", "properties": {}})
    with pytest.raises(ContextOverflowError) as refused:
        model.chat("How many?", tools=[tool])
    assert refused.value.tokens > CONTEXT
    with pytest.raises(UsageError, match="schema and constraint"):
        model.chat("How many?", schema=schema, constraint=ondevice.Constraint.json_object())


def test_a_session_that_answers_is_neither_reset_nor_replaced(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.save(tmp_path / "empty.json")
    reply = session.stream_response("Hello", max_tokens=4)
    next(reply)
    for act in (session.reset, lambda: session.load(tmp_path / "empty.json")):
        with pytest.raises(UsageError, match="already answering"):
            act()
    list(reply)
    assert len(session.transcript) == 2
    session.reset()
    assert session.transcript == []


def test_a_turn_reuses_the_common_prefix(model: Model) -> None:
    session = model.session()
    session.respond("a" * 100, max_tokens=4)
    kv = model._engine.kv.of_sessions[session._key]
    assert kv.length >= 100
    held = kv.blocks[0]
    session.respond("b", max_tokens=4)
    assert kv.blocks[0] is held


def test_a_fork_goes_its_own_way(model: Model) -> None:
    session = model.session()
    session.respond("Hello", max_tokens=6)
    other = session.fork()
    assert other.transcript == session.transcript
    caches = model._engine.kv.of_sessions
    held = caches[session._key].tokens
    assert caches[other._key].tokens == held
    assert len(held) > 5
    same = [branch.respond("Go on", max_tokens=6).tokens for branch in (session, other)]
    assert same[0] == same[1]
    other.respond("More", max_tokens=3)
    assert len(other.transcript) == len(session.transcript) + 2


def test_a_forks_first_turn_computes_only_what_is_new(chat_bundle: Path) -> None:
    with load(chat_bundle, prefill_chunk=16) as model:
        session = model.session()
        session.respond("a" * 120, max_tokens=4)
        other = session.fork()
        turns = [branch.respond("b", max_tokens=1) for branch in (other, session)]
        assert turns[0].tokens == turns[1].tokens
        assert [turn.stats.forward_passes for turn in turns] == [1, 1]
        assert turns[0].stats.prompt_tokens > 120


def test_a_fork_without_room_leaves_the_cache_that_it_copies(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_context = property(lambda plan: plan.kv_cache_bytes)
    monkeypatch.setattr(Plan, "kv_limit_bytes", one_context)
    with load(chat_bundle) as model:
        session = model.session()
        session.respond("a" * 160, max_tokens=4)
        kv = model._engine.kv.of_sessions[session._key]
        held, blocks = list(kv.tokens), [block.copy() for block in kv.blocks]
        other = session.fork()
        assert other._key not in model._engine.kv.of_sessions
        assert kv.tokens == held
        assert [block.tolist() for block in kv.blocks] == [block.tolist() for block in blocks]
        texts = [branch.respond("Go on", max_tokens=6).text for branch in (session, other)]
        expected = model.generate(tokens=model.chat_ids(session.transcript[:-1]), max_tokens=6)
        assert texts == [expected.text] * 2


def test_save_load_and_reset(model: Model, tmp_path: Path) -> None:
    session = model.session("Système 🦙")
    session.respond("Hello", max_tokens=5)
    session.save(tmp_path / "talk.json")
    other = model.session()
    other.load(tmp_path / "talk.json")
    assert other.transcript == session.transcript
    again = [branch.respond("Go on", max_tokens=6).tokens for branch in (session, other)]
    assert again[0] == again[1]
    other.reset()
    assert other.transcript == [{"role": "system", "content": "Système 🦙"}]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "talk.json", tmp_path / "talk.json.state"]


def test_half_a_character_is_saved_and_loaded_as_the_model_read_it(model: Model, tmp_path: Path) -> None:
    session = model.session()
    session.respond("a\ud800", max_tokens=3)
    session.save(tmp_path / "talk.json")
    written = tmp_path / "written.json"
    written.write_text((tmp_path / "talk.json").read_text().replace("\ufffd", "\\ud800"))
    transcripts = []
    for path in (tmp_path / "talk.json", written):
        other = model.session()
        other.load(path)
        transcripts.append(other.transcript)
    assert transcripts[0] == transcripts[1]
    assert transcripts[0][0]["content"] == "a\ufffd"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"format": "ondevice-session", "version": 2, "messages": []}',
        '{"format": "ondevice-session", "version": 1}',
        '{"format": "ondevice-session", "version": 1, "messages": [{"role": "root", "content": "x"}]}',
        '{"format": "ondevice-session", "version": 1, "messages": [{"role": "user", "content": 1}]}',
        '{"format": "ondevice-session", "version": 1, "messages": [{"role": "user"}]}',
    ],
)
def test_a_file_that_is_no_session_is_refused(model: Model, tmp_path: Path, content: str) -> None:
    (tmp_path / "talk.json").write_text(content)
    session = model.session("Keep me.")
    for path in (tmp_path / "talk.json", tmp_path / "absent.json"):
        with pytest.raises(UsageError):
            session.load(path)
    assert session.transcript == [{"role": "system", "content": "Keep me."}]


def test_a_cancelled_reply_is_remembered_as_far_as_it_was_heard(model: Model) -> None:
    session = model.session()
    events = session.stream_response("Tell me", max_tokens=100, logit_bias={EOS: -math.inf})
    heard = [next(events).text for _ in range(5)]
    with pytest.raises(UsageError, match="already answering"):
        session.respond("Me too")
    events.close()  # type: ignore[attr-defined]
    assert session.transcript[-1] == {"role": "assistant", "content": "".join(heard)}
    assert session.respond("Go on", max_tokens=2).finish_reason in ("length", "stop")


def test_a_turn_that_fails_leaves_the_transcript(model: Model) -> None:
    session = model.session()
    session.respond("Hello", max_tokens=3)
    before = session.transcript
    with pytest.raises(ContextOverflowError):
        session.respond("x" * CONTEXT)
    assert session.transcript == before
    assert session.respond("Shorter", max_tokens=3).stats.generated_tokens <= 3


def test_closing_a_sessions_async_stream_closes_the_work_under_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def endless(*_: Any, **options: Any) -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield Event(text="a", token=1)
        finally:
            await asyncio.sleep(0)  # A generator that is merely forgotten is closed later, by the loop.
            closed.append("inner")

    async def ask() -> None:
        events = session.astream_response("Hello")
        await anext(events)
        await events.aclose()
        closed.append("outer")

    session = model.session()
    monkeypatch.setattr(model._host, "astream_ids", endless)
    asyncio.run(ask())
    assert closed == ["inner", "outer"]


def test_a_session_replies_the_same_under_asyncio(model: Model) -> None:
    plain, awaited = model.session(), model.session()
    expected = plain.respond("Hello", max_tokens=5).tokens

    async def ask() -> tuple[tuple[int, ...], int]:
        response = await awaited.arespond("Hello", max_tokens=5)
        events = [event async for event in awaited.astream_response("More", max_tokens=3)]
        return response.tokens, len(events)

    tokens, count = asyncio.run(ask())
    assert tokens == expected
    assert count >= 1
    assert len(awaited.transcript) == 4


@pytest.mark.usefixtures("steady_process")
def test_idle_sessions_yield_their_memory_and_come_back_with_the_same_text(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    with load(chat_bundle, dram_budget=plan.minimum_budget_bytes) as model:
        limit = model.plan.kv_limit_bytes // model.plan.kv_block_bytes
        sessions = [model.session() for _ in range(limit)]
        first = [session.respond("a" * 120, max_tokens=3).tokens for session in sessions]
        assert model._engine.kv.nbytes <= model.plan.kv_limit_bytes
        assert len(set(first)) == 1
        second = {session.respond("b", max_tokens=3).tokens for session in sessions}
        assert len(second) == 1
        assert model._engine.kv.nbytes <= model.plan.kv_limit_bytes


def test_a_dropped_session_gives_its_cache_back(chat_bundle: Path) -> None:
    with load(chat_bundle) as model:
        session = model.session()
        session.respond("Hello", max_tokens=3)
        assert model._engine.kv.nbytes > 0
        del session
        gc.collect()
        model.generate(PROMPT, max_tokens=1)
        assert model._engine.kv.nbytes == 0
