"""Text of the recipe as documents by domain, split into training text and held-out text.

A document is a sequence of (role, text): turns of a chat, or one piece of running text with the role "".
The same files give the same documents in the same order.
"""

from __future__ import annotations

import csv
import hashlib
import json
import lzma
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from recipe import sql

Document = tuple[tuple[str, str], ...]

HELD_OUT_BOOKS = frozenset({"Burnett_Garden_1911", "Doyle_Lost_1912", "Gissing_Unclassed_1884"})
ONE_IN = 50
"""One of this many dialogues and meaning representations is held out, chosen by a hash."""
PIECE_CHARS = 6000
"""A novel is cut into documents of about this length, between paragraphs."""
WRAPPED_BELOW = 110
"""Characters of a line. A book whose long lines are shorter has wrapped lines; else a line is a paragraph."""
SENTENCE_ENDS = frozenset(".!?\"')]")

_TYPOGRAPHY = str.maketrans(
    dict(zip("\u2018\u2019\u201c\u201d\u2013\u00a0\t", "''\"\"-  ", strict=True))
    | {"\u2014": "--", "\u2026": "..."}
)
_SPACES = re.compile(" +")
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ufeff]")
_LOWER = re.compile("[^a-z]")


def split_documents(data: Path, domain: str) -> tuple[list[Document], list[Document]]:
    """Documents for training and held-out documents, without duplicates or overlap."""
    train: dict[Document, None] = {}
    held: dict[Document, None] = {}
    for is_held, document in READERS[domain](data):
        (held if is_held else train)[document] = None
    # The first turn identifies a document too, so that no answer to a held-out question is trained on.
    asked = {document[0] for document in held}
    return [document for document in train if document[0] not in asked], list(held)


def clean(text: str) -> str:
    """The text with one spelling of quotes, dashes and spaces, and no control characters but newlines."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").translate(_TYPOGRAPHY))
    return "\n".join(_SPACES.sub(" ", line).strip() for line in text.split("\n")).strip()


def chance(key: str, one_in: int) -> bool:
    """True for one key in `one_in`, by a hash: always the same result for the same key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") % one_in == 0


def read_dialogue(data: Path) -> Iterator[tuple[bool, Document]]:
    """Task dialogues: User and Assistant in turns. Dialogues of another form are left out."""
    for name in ("train", "dev"):
        with lzma.open(data / "corpus" / "sgd_dialogues" / f"{name}.txt.xz", "rt", encoding="utf-8") as file:
            text = file.read()
        for block in text.strip().split("\n\n"):
            turns = [line.partition(": ") for line in block.split("\n")]
            expected = ["User", "Assistant"] * (len(turns) // 2)
            if [speaker for speaker, _, _ in turns] == expected:
                document = tuple((speaker.lower(), clean(said)) for speaker, _, said in turns)
                if all(said for _, said in document):
                    yield chance(block, ONE_IN), document


def read_sql(data: Path) -> Iterator[tuple[bool, Document]]:
    """WikiSQL: a question, in most cases with its table's columns, and SQL. Its test split is held out."""
    for example in sql.read(data / "prompts" / "wikisql" / "wikisql.json.bz2"):
        yield example.split == "test", (("user", clean(example.prompt)), ("assistant", clean(example.query)))


def read_restaurants(data: Path) -> Iterator[tuple[bool, Document]]:
    """E2E: a meaning representation, and a sentence that expresses it. Split by meaning representation."""
    with open(data / "prompts" / "e2e_nlg" / "devset.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            meaning = clean(row["mr"])
            held = chance(meaning, ONE_IN)
            yield held, (("user", meaning), ("assistant", clean(row["ref"])))


def read_math(data: Path) -> Iterator[tuple[bool, Document]]:
    """GSM8K: a word problem and its worked answer, without calculator marks. Its test file is held out."""
    for name in ("train", "test"):
        with open(data / "prompts" / "gsm8k" / f"{name}.jsonl", encoding="utf-8") as file:
            for line in file:
                problem = json.loads(line)
                answer = re.sub("<<.*?>>", "", problem["answer"]).replace("#### ", "The answer is ") + "."
                yield name == "test", (("user", clean(problem["question"])), ("assistant", clean(answer)))


def read_novels(data: Path) -> Iterator[tuple[bool, Document]]:
    """Novels in pieces of a few thousand characters. Whole books are held out."""
    with tarfile.open(data / "corpus" / "english_novels" / "english_novels.tar.xz") as archive:
        books = {Path(member.name).stem: member for member in archive if member.name.endswith(".txt")}
        texts = {}
        for name, member in books.items():
            if (stream := archive.extractfile(member)) is not None:
                texts[name] = stream.read().decode("utf-8", "replace")
    if missing := HELD_OUT_BOOKS - set(texts):
        raise FileNotFoundError(f"the novels lack {', '.join(sorted(missing))}, which are held out")
    for name in sorted(texts):
        # Underscores mark italics.
        for piece in pieces(paragraphs(clean(texts[name].replace("_", "")))):
            yield name in HELD_OUT_BOOKS, (("", piece),)


def paragraphs(text: str) -> list[str]:
    """Unwrapped paragraphs of a book, without title pages, headings, pictures and other non-prose."""
    lines = text.split("\n")
    lengths = sorted(len(line) for line in lines if line)
    width = lengths[len(lengths) * 95 // 100] if lengths else 0
    blank_between = lines.count("") > len(lengths) // 10
    blocks: list[list[str]] = [[]]
    for line in lines:
        last = blocks[-1][-1] if blocks[-1] else ""
        # Without blank lines, a paragraph ends at a sentence's end if the line had room for another word.
        room = len(last) + 1 + len(line.partition(" ")[0]) <= width
        ended = not blank_between and room and (last[-1:] in SENTENCE_ENDS or last.isupper())
        if line and last and width < WRAPPED_BELOW and not ended:
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return [paragraph for block in blocks if _is_prose(paragraph := " ".join(block))]


def _is_prose(paragraph: str) -> bool:
    if not paragraph or paragraph[0].islower() or "[Illus" in paragraph:
        return False
    letters = len(_LOWER.sub("", paragraph))
    return letters > 0.6 * len(paragraph) and (paragraph[-1] in SENTENCE_ENDS or paragraph[-1] in ":;,-")


def pieces(blocks: list[str]) -> Iterator[str]:
    """Paragraphs joined by newlines to pieces of about PIECE_CHARS."""
    current: list[str] = []
    for block in blocks:
        current.append(block)
        if sum(map(len, current)) >= PIECE_CHARS:
            yield "\n".join(current)
            current = []
    if current:
        yield "\n".join(current)


READERS: dict[str, Callable[[Path], Iterator[tuple[bool, Document]]]] = {
    "dialogue": read_dialogue,
    "sql": read_sql,
    "novels": read_novels,
    "math": read_math,
    "restaurants": read_restaurants,
}
