"""Text that the models of the recipe were never trained on: its held-out documents, as prompts and as tokens.

Chats begin with a held-out dialogue's first turn, a held-out question or meaning representation; novels are
continued as they stand. The documents are read from the shared data, which this exits without.
"""

from __future__ import annotations

import sys

import numpy as np

from ondevice.measure.prompts import Task
from tests.support.paths import SHARED_DATA, SHIPPED

DOMAINS = {"dialogue": "dialogue", "sql": "sql", "meaning": "restaurants", "novels": "novels"}
NOVEL_WORDS = 60
"""Words of a novel that are given."""


def held_out_tasks(count: int) -> tuple[Task, ...]:
    """`count` prompts of each kind, always the same ones. Exits if the shared data isn't there."""
    tasks = []
    for name in DOMAINS:
        firsts = dict.fromkeys(document[0][1] for document in _documents(name))
        prompts = list(firsts)[:count]
        if name == "novels":
            prompts = [" ".join(prompt.split()[:NOVEL_WORDS]) for prompt in prompts]
        tasks.append(Task(name, tuple(prompts), chat=name != "novels"))
    return tuple(tasks)


def held_out_tokens(name: str, count: int) -> list[int]:
    """The first `count` tokens of a kind's documents, one after another, in the shipped model's tokens."""
    documents = _documents(name)
    from recipe.tokenizer import Encoder

    encoder = Encoder((SHIPPED / "tokenizer.model").read_bytes())
    tokens: list[int] = []
    for document in documents:
        if len(tokens) >= count:
            break
        tokens += encoder.encode(document)
    return [int(token) for token in tokens[:count]]


def _documents(name: str) -> list[tuple[tuple[str, str], ...]]:
    """A kind's held-out documents, each a sequence of (role, text), in an order that never changes."""
    if not SHARED_DATA.is_dir():
        raise SystemExit(f"held-out text is read from {SHARED_DATA}, which isn't there")
    if str(SHIPPED) not in sys.path:
        sys.path.insert(0, str(SHIPPED))
    from recipe.data import split_documents

    _, documents = split_documents(SHARED_DATA, DOMAINS[name])
    order = np.random.default_rng(24).permutation(len(documents))
    return [documents[index] for index in order.tolist()]
