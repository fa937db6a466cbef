"""Chats with real models in their templates, turn by turn: prompts, replies, and where they end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from tests.support.real_models import real_model
from tests.support.real_oracles import chat_prompt, chat_tokenizer

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "And of Italy?",
    "What is 2 + 3? Answer with one number.",
    "Is water wet?\n\nAnswer yes or no, naïve as it may be: 日本 🙂",
    "Say goodbye in one short sentence.",
)
NEXT_QUESTION = "And in French?"
START, END = "<|im_start|>", "<|im_end|>"
MAX_TOKENS = 100


@pytest.fixture(params=["smollm2", pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest) -> str:
    """The name of each model that chats."""
    text: str = request.param
    return text


@pytest.fixture
def bundle(name: str, bundle_of: Any) -> Path:
    """The model's bundle."""
    folder: Path = bundle_of(name)
    return folder


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    """The bundle loaded, everything resident."""
    with load(bundle) as loaded:
        yield loaded


def chat_prompt_by_hand(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation in ChatML, the template of both models."""
    tokenizer = model.tokenizer
    start, end = tokenizer.token_id(START), tokenizer.token_id(END)
    assert start is not None
    assert end is not None
    ids: list[int] = []
    for message in messages:
        ids += [start, *tokenizer.encode(f"{message['role']}\n{message['content']}")]
        ids += [end, *tokenizer.encode("\n")]
    return [*ids, start, *tokenizer.encode("assistant\n")]


@pytest.mark.slow
def test_prompts_are_those_of_transformers(name: str, model: Model) -> None:
    file = real_model(name)
    assert chat_tokenizer(file).convert_tokens_to_ids(END) == model.tokenizer.token_id(END)
    history = [{"role": "system", "content": "You answer briefly."}]
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        expected = chat_prompt(file, history)
        assert list(model.chat_ids(history)) == chat_prompt_by_hand(model, history) == expected
        history.append({"role": "assistant", "content": question[::-1].strip()})


@pytest.mark.parametrize("turns", [2, pytest.param(len(QUESTIONS), marks=pytest.mark.slow)])
def test_every_reply_equals_that_of_the_prompt_written_by_hand(model: Model, turns: int) -> None:
    end = model.tokenizer.token_id(END)
    session = model.session("You answer briefly.")
    history: list[dict[str, Any]] = [{"role": "system", "content": "You answer briefly."}]
    for question in QUESTIONS[:turns]:
        history.append({"role": "user", "content": question})
        expected = chat_prompt_by_hand(model, history)
        assert list(model.chat_ids(history)) == expected
        first, *others = session.stream_response(question, max_tokens=MAX_TOKENS)
        assert first.prompt is not None
        assert first.prompt.tokens == len(expected)
        assert (first.prompt.reused_tokens > 0) == (len(history) > 2)
        assert others[-1].finish_reason == "stop"
        reply = [event.token for event in (first, *others) if event.token is not None]
        text = "".join(event.text for event in (first, *others))
        assert reply == list(model.generate(tokens=expected, max_tokens=MAX_TOKENS).tokens)
        likeliest = model.logits([*expected, *reply])[len(expected) - 1 :].argmax(-1)
        assert np.array_equal(likeliest, [*reply, end]), "what ends a reply isn't the end of the turn"
        assert END not in text
        assert text.strip()
        history.append({"role": "assistant", "content": text})
    assert session.transcript == history


def test_a_fork_and_a_saved_chat_reply_alike(bundle: Path, model: Model, tmp_path: Path) -> None:
    session = model.session()
    for question in QUESTIONS[:2]:
        session.respond(question, max_tokens=MAX_TOKENS)
    session.save(tmp_path / "chat.json")
    fork = session.fork()
    expected = session.respond(NEXT_QUESTION, max_tokens=MAX_TOKENS)
    assert expected.tokens
    assert fork.respond(NEXT_QUESTION, max_tokens=MAX_TOKENS).tokens == expected.tokens
    with load(bundle, threads=1) as other:
        again = other.session()
        again.load(tmp_path / "chat.json")
        reply = again.respond(NEXT_QUESTION, max_tokens=MAX_TOKENS)
        assert reply.stats.reused_tokens > 0
        assert reply.tokens == expected.tokens
        assert again.transcript == session.transcript == fork.transcript
