"""Prompts that the model that ships was never trained on: the held-out documents of its recipe, by kind.

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
    if not SHARED_DATA.is_dir():
        raise SystemExit(f"held-out prompts are read from {SHARED_DATA}, which isn't there")
    sys.path.insert(0, str(SHIPPED))
    from recipe.data import split_documents

    tasks = []
    for name, domain in DOMAINS.items():
        _, documents = split_documents(SHARED_DATA, domain)
        order = np.random.default_rng(24).permutation(len(documents))
        firsts = dict.fromkeys(documents[index][0][1] for index in order.tolist())
        prompts = list(firsts)[:count]
        if name == "novels":
            prompts = [" ".join(prompt.split()[:NOVEL_WORDS]) for prompt in prompts]
        tasks.append(Task(name, tuple(prompts), chat=name != "novels"))
    return tuple(tasks)
