"""The beginning of a reply that the model continues: its token ids, and how the rest is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.chat_template import ChatTemplate
from ondevice.chat_template.replies import ReplyPiece
from ondevice.chat_template.reply_prefix import ReplyPrefix
from ondevice.chat_template.tools import PromptOptions
from ondevice.errors import UsageError
from ondevice.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def thinker(shared_data: Path) -> tuple[ChatTemplate, Tokenizer]:
    """A real template of Qwen 3's kind, with its tokenizer."""
    folder = shared_data / "tokenizers" / "minimind"
    source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    tokenizer = load_tokenizer("tokenizers", (folder / "tokenizer.json").read_bytes(), 1, [2], False)
    return ChatTemplate.load(source.encode(), tokenizer), tokenizer


def behind_prompt(template: ChatTemplate, tokenizer: Tokenizer, prefix: ReplyPrefix) -> list[int]:
    prompt = template.encode(MESSAGES, tokenizer)
    ids = template.encode(MESSAGES, tokenizer, options=PromptOptions(reply_prefix=prefix))
    assert ids[: len(prompt)] == prompt
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (ReplyPrefix("Hello"), "Hello"),
        (ReplyPrefix("Hello", "hm"), "<think>\nhm\n</think>\n\nHello"),
        (ReplyPrefix("", "hm"), "<think>\nhm"),
        # Names of special tokens in what the model wrote are text.
        (ReplyPrefix("a<|im_end|>b", "x<|im_end|>y"), "<think>\nx<|im_end|>y\n</think>\n\na<|im_end|>b"),
    ],
)
def test_the_beginning_is_written_as_the_model_writes_it(
    thinker: tuple[ChatTemplate, Tokenizer], prefix: ReplyPrefix, expected: str
) -> None:
    ids = behind_prompt(*thinker, prefix)
    special = thinker[1].special_tokens
    assert thinker[1].decode(ids, at_start=False) == expected
    assert not {special["<|im_end|>"], special["<|im_start|>"]} & set(ids)


@pytest.mark.parametrize(
    ("prefix", "rest", "pieces"),
    [
        (ReplyPrefix("Hel"), "lo <b>", [ReplyPiece("reply", "lo <b>")]),
        (ReplyPrefix("Hel", "hm"), "lo", [ReplyPiece("reply", "lo")]),
        (
            ReplyPrefix("", "h"),
            "m</think>\n\nHello",
            [ReplyPiece("thinking", "m"), ReplyPiece("reply", "Hello")],
        ),
    ],
)
def test_the_rest_is_told_apart_as_in_a_whole_reply(
    thinker: tuple[ChatTemplate, Tokenizer], prefix: ReplyPrefix, rest: str, pieces: list[ReplyPiece]
) -> None:
    parser = thinker[0].reply_parser(PromptOptions(reply_prefix=prefix))
    assert [*parser.take(None, rest), *parser.finish()] == pieces


def test_replies_in_channels_are_not_continued(thinker: tuple[ChatTemplate, Tokenizer]) -> None:
    _, tokenizer = thinker
    template = ChatTemplate("{{ messages[0].content }}")
    template._has_channels = True
    with pytest.raises(UsageError, match="can't be continued"):
        template.encode(MESSAGES, tokenizer, options=PromptOptions(reply_prefix=ReplyPrefix("x")))
