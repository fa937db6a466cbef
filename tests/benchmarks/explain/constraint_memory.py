"""What constraints take: the table of a vocabulary, grammars of others' schemas, and patterns that explode.

    .venv/bin/python -m tests.benchmarks.explain.constraint_memory

Memory of the process with freed memory given back, for every vocabulary that is there. `schema` is the most
that a schema of ../shared/data/schemas adds to a process that has read those before it; `states` are patterns
whose lexers go to their limit, one after another, each walked through by a text. It ends with one JSON line,
and exits 0 only if `grammars_bytes` covers the table, and GRAMMAR_BYTES each of the others.
"""

from __future__ import annotations

import gc
import json
import lzma
import sys
from collections.abc import Iterable

import numpy as np

from ondevice.constraints.constrained import Constrained
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.grammars import GRAMMAR_BYTES, Grammars, GrammarVocabulary, grammars_bytes
from ondevice.errors import ConstraintError
from ondevice.units import process_memory, trim_heap
from tests.benchmarks.explain.mask_overhead import vocabularies
from tests.support.paths import SHARED_DATA

STEPS = 200
EXPLODING = [
    r"(.{1,30} ){1,30}!",
    r"(.{1,40} ){1,40}!",
    r".*(a|e|i).{20}(o|u).{20}x",
    r".*a.{30}.*b.{30}",
    r"(\w+ (the|an|a) ){1,100}\w{3,80}x.{10}y",
    r"([a-z]{1,30} ?){1,60}[a-f]{20}!",
    r"((a|b|c|d)*(a|b)(c|d)){3,40}x",
    r"[^x]*e[^x]{14}",
]


def held() -> int:
    """Bytes of the process now."""
    gc.collect()
    trim_heap()
    return process_memory().current_bytes


def walk(grammars: Grammars, vocabulary: GrammarVocabulary, constraint: Constraint) -> int:
    """Follow a random text under a constraint to its end. Returns the bytes that it added."""
    rng, before = np.random.default_rng(0), held()
    try:
        text = Constrained(grammars.matcher(constraint), grammars.vocab_size, frozenset(vocabulary.eos_ids))
        for _ in range(STEPS):
            token = int(rng.choice(np.flatnonzero(text.allowed())))
            if token in vocabulary.eos_ids or text.is_complete:
                break
            text.take(token, "")
    except ConstraintError:
        pass  # It has taken what it may.
    return held() - before


def most(grammars: Grammars, vocabulary: GrammarVocabulary, constraints: Iterable[Constraint]) -> int:
    """The most that one of them added. Grammars stay until others take their places."""
    return max(walk(grammars, vocabulary, each) for each in constraints)


def main() -> int:
    """The exit status."""
    with lzma.open(SHARED_DATA / "schemas/jsonschemabench_sample.json.xz") as stream:
        schemas = [Constraint.json_schema(it) for it in json.load(stream).values()]
    found, covered = [], True
    for name, vocabulary in vocabularies():
        before = held()
        grammars = Grammars(vocabulary)
        table = held() - before
        walk(grammars, vocabulary, Constraint.json_object())
        schema = most(grammars, vocabulary, schemas[::4])
        states = most(grammars, vocabulary, map(Constraint.regex, EXPLODING))
        covered &= table <= grammars_bytes(grammars.vocab_size, 0)
        covered &= max(schema, states) <= GRAMMAR_BYTES
        row = {"vocabulary": name, "tokens": grammars.vocab_size, "table": table}
        row |= {"schema": schema, "states": states}
        found.append(row)
        print(row)
    print(json.dumps({"grammar_bytes": GRAMMAR_BYTES, "covered": covered, "rows": found}))
    return 0 if covered else 1


if __name__ == "__main__":
    sys.exit(main())
