"""A conversation that outgrows its context: it stops, or forgets its oldest turns."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model
from ondevice.chat_template.tools import PromptOptions
from ondevice.errors import ContextOverflowError, UsageError
from ondevice.host import Host
from ondevice.session import Session
from tests.support.bundles import CONTEXT, EOS

ENDLESS = {"max_tokens": 30, "logit_bias": {EOS: -math.inf}}
TURN = "a question of some length, number {}"


def talk(session: Session, turns: int) -> list[list[str]]:
    """What the model was told of at every turn, as the messages' contents."""
    seen = []
    for number in range(turns):
        session.respond(TURN.format(number), **ENDLESS)  # type: ignore[arg-type]
        seen.append([message["content"] for message in session.transcript])
    return seen


def test_the_oldest_turns_are_dropped_and_the_text_is_that_of_the_others(model: Model) -> None:
    session = model.session("Be brief.", when_full="drop")
    dropped = []
    for number in range(20):
        told = session.transcript
        reply = session.respond(TURN.format(number), **ENDLESS)  # type: ignore[arg-type]
        dropped.append(session.dropped_turns)
        left = session.transcript
        assert left[0] == {"role": "system", "content": "Be brief."}
        assert [message["role"] for message in left[1:]] == ["user", "assistant"] * (len(left) // 2)
        # What is left are the newest turns, and the reply is what they are answered with from nothing.
        assert [*told, *left[-2:]][-len(left) + 1 :] == left[1:]
        assert left[-2]["content"] == TURN.format(number)
        fresh = model.generate(tokens=model.chat_ids(left[:-1]), **ENDLESS)  # type: ignore[arg-type]
        assert fresh.tokens == reply.tokens
        assert not reply.stats.context_full
        assert len(model.chat_ids(left[:-1])) + 30 <= CONTEXT
    assert dropped[0] == 0
    assert dropped[-1] + (len(session.transcript) - 1) // 2 == 20
    # Not at every turn: half of the context is made free, so that what is computed serves some turns.
    assert 2 <= sum(before < after for before, after in pairwise(dropped)) <= 10


def test_without_it_the_conversation_stops_as_it_was(model: Model) -> None:
    session = model.session()
    with pytest.raises(ContextOverflowError):
        talk(session, 20)
    assert session.dropped_turns == 0
    assert session.transcript[0]["content"] == TURN.format(0)


def test_a_message_that_is_too_long_by_itself_drops_nothing(model: Model) -> None:
    session = model.session("Be brief.", when_full="drop")
    before = talk(session, 1)[-1]
    with pytest.raises(ContextOverflowError):
        session.respond("x" * CONTEXT, max_tokens=4)
    assert [message["content"] for message in session.transcript] == before
    assert session.dropped_turns == 0
    # One that leaves room for its reply alone is answered alone.
    session.respond("x" * (CONTEXT - 60), **ENDLESS)  # type: ignore[arg-type]
    assert [message["role"] for message in session.transcript] == ["system", "user", "assistant"]


def test_a_full_session_replies_as_its_fork_and_its_saved_copy_do(model: Model, tmp_path: Path) -> None:
    session = model.session(when_full="drop")
    talk(session, 5)
    other = session.fork()
    assert (other.when_full, other.dropped_turns) == ("drop", session.dropped_turns)
    session.save(tmp_path / "talk.json")
    third = model.session(when_full="drop")
    third.load(tmp_path / "talk.json")
    assert third.dropped_turns == 0
    replies = [
        session.respond("Go on", **ENDLESS),  # type: ignore[arg-type]
        asyncio.run(other.arespond("Go on", **ENDLESS)),  # type: ignore[arg-type]
        third.respond("Go on", **ENDLESS),  # type: ignore[arg-type]
    ]
    assert len({reply.tokens for reply in replies}) == 1
    session.reset()
    assert session.dropped_turns == 0


def test_a_transcript_of_any_length_is_cut_in_few_steps(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session(when_full="drop")
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    session._messages = turn * 500
    rendered = []
    chat_ids = model._host.chat_ids

    def counted(self: Host, messages: list[Any], prompt: PromptOptions) -> list[int]:
        rendered.append(len(messages))
        return chat_ids(messages, prompt)

    monkeypatch.setattr(Host, "chat_ids", counted)
    assert session.respond("Hello", max_tokens=2).tokens
    assert len(rendered) <= 12
    assert 10 < len(session.transcript) < CONTEXT // 2


def test_what_to_do_is_one_of_two(model: Model) -> None:
    with pytest.raises(UsageError, match="when_full is 'forget'; it must be one of drop, stop"):
        model.session(when_full="forget")  # type: ignore[arg-type]
