"""What a chat says of its model: the maker's words, of which nothing steers a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ondevice as package
from ondevice.bundle.about import MAX_BYTES, MAX_LINE_CHARS, MAX_LINES, read_about
from ondevice.runtime.models import shipped_folder
from tests.support.bundles import copy_files
from tests.support.command_line import Run

SHIPPED = shipped_folder() / "small-relu"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"It tells stories.\n\n  Once upon a time\n", "It tells stories.\n\n  Once upon a time"),
        (b"a\x1b]52;c;aGk=\x07b\x9b\xff", ""),
        ("a\x1b[2J\x07b\x9b2J\rc\td\0".encode(), "a[2Jb2Jcd"),
        ("turned \u202e round\u2028here\u200b".encode(), "turned  roundhere"),
        (b"x" * MAX_BYTES, "x" * MAX_LINE_CHARS),
        (b"x" * (MAX_BYTES + 1), ""),
        (b"x\n" * 100, "\n".join("x" * MAX_LINES)),
        (b"", ""),
        (None, ""),
    ],
)
def test_words_of_a_maker_are_short_and_printable(tmp_path: Path, data: bytes | None, shown: str) -> None:
    if data is not None:
        (tmp_path / "about.txt").write_bytes(data)
    assert read_about(tmp_path) == shown


def test_they_come_from_the_folder_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "about.txt").symlink_to(secret)
    assert read_about(tmp_path / "bundle") == ""
    (tmp_path / "bundle" / "about.txt").unlink()
    (tmp_path / "bundle" / "about.txt").mkdir()
    assert read_about(tmp_path / "bundle") == ""


def test_a_chat_begins_with_them(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", 2)
    assert "maker" not in ondevice("chat", chat_bundle, *options, stdin="Hello\n").err
    bundle = copy_files(chat_bundle, tmp_path / "told")
    (bundle / "about.txt").write_text("It says\x1b nothing.\nTry:\n  hello\n")
    shown = ondevice("chat", bundle, *options, stdin="Hello\n")
    assert "told, in its maker's words:\n  It says nothing.\n  Try:\n    hello\n" in shown.err
    assert "maker" not in shown.out


def test_the_shipped_models_examples_are_answered_as_it_says() -> None:
    examples = re.findall(r"^  (.+)", read_about(SHIPPED), re.MULTILINE)
    with package.load(SHIPPED) as model:
        replies = [model.session().respond(example, max_tokens=60).text for example in examples]
    assert len(replies) == 3
    assert "restaurant" in replies[0]
    assert replies[1].startswith("SELECT player FROM records WHERE wins > 3")
    assert "The Mill" in replies[2]


def test_they_are_answered_so_one_after_the_other_too() -> None:
    """What has a list of columns or attributes stands alone, as it did in training."""
    examples = re.findall(r"^  (.+)", read_about(SHIPPED), re.MULTILINE)
    with package.load(SHIPPED) as model:
        session = model.session("Be brief.")
        session.respond("hi", max_tokens=20)
        for example in examples:
            reply = session.respond(example, max_tokens=60).text
            alone = model.session("Be brief.").respond(example, max_tokens=60).text
            assert (reply == alone) == ("[" in example)


@pytest.mark.fast("hi")
@pytest.mark.parametrize("opening", ["hi", "Hello!", "Tell me a story", "What can you do?", "who are you"])
def test_what_fits_nothing_is_answered_as_in_a_dialogue(opening: str) -> None:
    with package.load(SHIPPED) as model:
        for options in ({}, *({"temperature": 0.6, "top_p": 0.9, "seed": seed} for seed in range(4))):
            reply = model.session().respond(opening, max_tokens=60, **options).text
            assert reply
            assert "SELECT" not in reply
        # What fits one of its tasks is told as it always was.
        names = model.tokenizer.special_tokens
        for message in ("Which player won? [player, wins]", "I'm looking for a cheap restaurant in Oakland."):
            ids = model.chat_ids([{"role": "user", "content": message}])
            assert ids.count(names["<|user|>"]) == 1
