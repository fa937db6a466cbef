"""Prompts of five kinds of text, from public benchmarks that lie in the shared data."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {
    "code": "HumanEval",
    "maths": "GSM8K",
    "sql": "WikiSQL",
    "summaries": "Spec-Bench, summarisation",
    "dialogue": "MT-Bench",
}
MOST_CHARACTERS = 2_000
"""Longer prompts are passed over: reading them would take most of the time."""


def prompts(data: Path, count: int) -> dict[str, list[str]]:
    """`count` prompts of each kind, spread evenly over its file; always the same ones for a count.

    data: the folder with `prompts/`.
    """
    chosen = {}
    for kind, texts in (
        ("code", _code(data / "prompts/humaneval/HumanEval.jsonl.gz")),
        ("maths", _maths(data / "prompts/gsm8k/test.jsonl")),
        ("sql", _sql(data / "prompts/wikisql/wikisql.json.bz2")),
        ("summaries", _summaries(data / "prompts/spec_bench/question.jsonl")),
        ("dialogue", _dialogue(data / "prompts/mt_bench/mt_bench_question.jsonl")),
    ):
        short = [text for text in texts if len(text) <= MOST_CHARACTERS]
        chosen[kind] = [short[index * len(short) // count] for index in range(count)]
    return chosen


def _lines(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _code(path: Path) -> list[str]:
    return [f"Complete this function.\n\n{task['prompt']}" for task in _lines(path)]


def _maths(path: Path) -> list[str]:
    return [str(task["question"]) for task in _lines(path)]


def _sql(path: Path) -> list[str]:
    """Questions about a table, and the columns that the query names."""
    with bz2.open(path, "rt", encoding="utf-8") as file:
        groups = json.load(file)[::997]
    texts = []
    for group in groups:
        fields = [word.strip("(),;") for word in group["sql"][0].split() if "_FIELD" in word]
        columns = ", ".join(sorted({field.split(".")[-1].removesuffix("_FIELD").lower() for field in fields}))
        question = group["sentences"][0]["original"].strip()
        texts.append(f"Write an SQL query.\nTable: records({columns})\nQuestion: {question}")
    return texts


def _summaries(path: Path) -> list[str]:
    return [str(task["turns"][0]) for task in _lines(path) if task["category"] == "summarization"]


def _dialogue(path: Path) -> list[str]:
    return [str(task["turns"][0]) for task in _lines(path)]
