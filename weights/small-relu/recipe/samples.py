"""Samples of the model's text, made by our runtime: SQL that is scored, dialogues and stories to read.

    python -m recipe.samples --model ..

asks 300 held-out WikiSQL questions, and continues 20 held-out dialogues and 10 openings of held-out novels.
All but the stories are greedy. Continuations go unedited to SAMPLES.md beside the model. The SQL stats are
printed as one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from recipe import sql
from recipe.config import DATA, MODEL_FOLDER
from recipe.data import Document, clean, split_documents
from recipe.export import SAMPLING

QUESTIONS, DIALOGUES, STORIES = 300, 20, 10
SEED = 3
REPLY_TOKENS, STORY_TOKENS = 96, 120
STORY_SAMPLING: dict[str, Any] = {
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "seed": SEED,
}
"""Sampling as in `ondevice chat`; greedy stories of small models repeat themselves."""
TURNS = 3
"""User turns of a dialogue, each answered by the model."""


def chosen(documents: list[Document], count: int) -> list[Document]:
    """`count` documents at random, the same at every call."""
    order = np.random.default_rng(SEED).permutation(len(documents))
    return [documents[i] for i in order[:count]]


def questions(data: Path, count: int) -> list[sql.Example]:
    """`count` held-out questions that name their table's columns, at random, the same at every call."""
    examples = [
        example
        for example in sql.read(data / "prompts" / "wikisql" / "wikisql.json.bz2")
        if example.split == "test" and example.prompt != example.question
    ]
    order = np.random.default_rng(SEED).permutation(len(examples))
    return [examples[i] for i in order[:count]]


def judge_sql(model: ondevice.Model, examples: list[sql.Example]) -> dict[str, Any]:
    """Shares of the answers that are SQL, that fit the table, and that equal the reference but for case."""
    answers = [
        model.session().respond(clean(example.prompt), max_tokens=REPLY_TOKENS).text.strip()
        for example in examples
    ]
    pairs = list(zip(answers, examples, strict=True))
    return {
        "questions": len(examples),
        "parse_share": sum(map(sql.parses, answers)) / len(examples),
        "compile_share": sum(sql.compiles(answer, asked.columns) for answer, asked in pairs) / len(examples),
        "exact_match_share": sum(answer.lower() == clean(asked.query).lower() for answer, asked in pairs)
        / len(examples),
        "unparsed": [answer for answer in answers if not sql.parses(answer)],
    }


def dialogues(model: ondevice.Model, documents: list[Document]) -> Iterator[str]:
    """Held-out dialogues as Markdown: the user's true turns, each answered by the model."""
    for number, document in enumerate(documents, 1):
        session = model.session()
        lines = [f"### Dialogue {number}", ""]
        for said in [text for role, text in document if role == "user"][:TURNS]:
            reply = session.respond(said, max_tokens=REPLY_TOKENS).text
            lines += [f"User: {said}", "", f"**Model:** {reply}", ""]
        yield "\n".join(lines)


def stories(model: ondevice.Model, documents: list[Document]) -> Iterator[str]:
    """Openings of pieces of held-out novels as Markdown, continued by the model."""
    for number, document in enumerate(documents, 1):
        text = document[0][1]
        opening = text[: text.find(" ", 160)]
        reply = model.generate(opening, max_tokens=STORY_TOKENS, **STORY_SAMPLING).text
        yield "\n".join([f"### Story {number}", "", f"{opening} **|**{reply}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample the model on held-out prompts.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a bundle of this recipe")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of text")
    parser.add_argument("--output", type=Path, help="SAMPLES.md in the model's folder unless given")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    arguments = parser.parse_args()
    held = {domain: split_documents(arguments.data, domain)[1] for domain in ("dialogue", "novels")}
    with ondevice.load(arguments.model) as model:
        text = [
            f"# What {model.name} says\n",
            "Written by `python -m recipe.samples`, unedited. All prompts are held out. Dialogues are "
            f"greedy; stories are sampled ({', '.join(f'{k} {v}' for k, v in STORY_SAMPLING.items())}).\n",
            "## Dialogues\n",
            *dialogues(model, chosen(held["dialogue"], DIALOGUES)),
            "## Stories\n",
            "The model's part begins after the bar.\n",
            *stories(model, chosen(held["novels"], STORIES)),
        ]
        result = judge_sql(model, questions(arguments.data, arguments.questions))
    output = arguments.output or arguments.model / "SAMPLES.md"
    output.write_text("\n".join(text), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
