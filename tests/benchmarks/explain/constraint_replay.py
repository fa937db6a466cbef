"""How long other texts wait while one that has met shared limits of its grammar is followed anew.

    .venv/bin/python -m tests.benchmarks.explain.constraint_replay

Answers to two schemas with long strings of limited length, which take many of a lexer's states: texts of one
constraint come one after another, as a server's do, and share its grammar. `met`: how many met shared limits;
`ended`: how many met those of a text alone. Most milliseconds of the process: of a `step`, a mask or a token
that is taken; of a `replay`, all masks of a text anew; and of a `pause`, a piece of that, behind which others
go. Vocabularies that aren't there are left out. It ends with one JSON line.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ondevice.constraints.constrained import Constrained
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.grammars import Grammars, GrammarVocabulary
from ondevice.errors import ConstraintError
from tests.benchmarks.explain.mask_overhead import longest_first, vocabularies

TEXTS = 6
TEXT = """\
Evening after evening the people of the town went down to the water, which had been of no use to the old
machine since 1987; nobody had an answer. “Yes,” said the naïve one from Zürich, “it's well known that
energy, between important development and information, costs 3.5% more (some £30) without children, e.g. at
this government's.”"""
WORDS = TEXT.split()


def limited(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


ARTICLE = {
    "title": limited(120),
    "summary": limited(800),
    "tags": {"type": "array", "items": limited(30), "maxItems": 8},
    "sentiment": {"enum": ["good", "bad", "neither"]},
}
TICKETS = {
    "tickets": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": limited(80), "reply": limited(300), "steps": {"type": "integer"}},
            "required": ["name", "reply", "steps"],
            "additionalProperties": False,
        },
    }
}


def schema(properties: dict[str, Any]) -> Constraint:
    whole = {"type": "object", "properties": properties, "required": list(properties)}
    return Constraint.json_schema({**whole, "additionalProperties": False})


def prose(rng: random.Random, most: int) -> str:
    said = ""
    while len(more := f"{said}{rng.choice(WORDS)}{rng.choice(['', '', '', ',', '.'])} ") < most:
        said = more
    return said.strip()


def article(rng: random.Random) -> dict[str, Any]:
    return {
        "title": prose(rng, 100),
        "summary": prose(rng, 760),
        "tags": [prose(rng, 25) for _ in range(6)],
        "sentiment": "good",
    }


def tickets(rng: random.Random) -> dict[str, Any]:
    return {
        "tickets": [
            {"name": prose(rng, 70), "reply": prose(rng, 280), "steps": rng.randrange(90)} for _ in range(4)
        ]
    }


KINDS = {"article": (schema(ARTICLE), article), "tickets": (schema(TICKETS), tickets)}


class Waits:
    """Seconds for which others wait: of each step of a text, and of the pieces of those that catch up."""

    def __init__(self) -> None:
        self.steps, self.replays, self.pieces = [0.0], [0.0], [0.0]
        self.met = self.ended = 0

    def follow(self, text: Constrained, tokens: Sequence[int]) -> None:
        try:
            for token in tokens:
                self._step(text.is_ready)
                self._catch_up(text)
                assert text.allowed()[token]
                self._step(partial(text.take, token, ""))
                self._catch_up(text)
        except ConstraintError:
            self.ended += 1

    def _step(self, work: Callable[[], object]) -> None:
        started = time.process_time()
        work()
        self.steps.append(time.process_time() - started)

    def _catch_up(self, text: Constrained) -> None:
        if not text.lags:
            return
        steps, pieces = text.catch_up(), list[float]()
        try:
            while True:
                started = time.process_time()
                try:
                    next(steps)
                finally:
                    pieces.append(time.process_time() - started)
        except StopIteration:
            pass
        finally:
            self.met += 1
            self.replays.append(sum(pieces))
            self.pieces += pieces


def measured(
    vocabulary: GrammarVocabulary, constraint: Constraint, answer: Callable[..., Any]
) -> dict[str, Any]:
    ids = {text: token for token, text in enumerate(vocabulary.token_bytes) if text}
    grammars, rng, ends = Grammars(vocabulary), random.Random(1), frozenset(vocabulary.eos_ids)
    waits, most = Waits(), 0
    for _ in range(TEXTS):
        tokens = longest_first(json.dumps(answer(rng), ensure_ascii=False), ids)
        own = partial(grammars.unshared_matcher, constraint)
        waits.follow(
            Constrained(grammars.matcher(constraint), grammars.vocab_size, ends, unshared=own), tokens
        )
        most = max(most, len(tokens))
    found = {"step": waits.steps, "replay": waits.replays, "pause": waits.pieces}
    figures = {name: round(1e3 * max(seconds), 1) for name, seconds in found.items()}
    return {"texts": TEXTS, "tokens": most, "met": waits.met, "ended": waits.ended} | figures


def main() -> None:
    found = {}
    for name, vocabulary in vocabularies():
        for kind, (constraint, answer) in KINDS.items():
            found[f"{name} {kind}"] = measured(vocabulary, constraint, answer)
            print(name, kind, found[f"{name} {kind}"], flush=True)
    print(json.dumps({"constraint_replay": found}))


if __name__ == "__main__":
    main()
