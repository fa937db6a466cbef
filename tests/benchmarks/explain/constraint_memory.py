"""What constraints take: the table of a vocabulary, grammars of others' schemas, and patterns that explode.

    .venv/bin/python -m tests.benchmarks.explain.constraint_memory

Memory of the process with freed memory given back, for every vocabulary that is there. `schema` is the most
that a schema of ../shared/data/schemas adds to a process that has read those before it; `states` are patterns
whose lexers go to their limit, one after another, each walked through by a text. It ends with one JSON line,
and exits 0 only if `grammars_bytes` covers the table, and GRAMMAR_BYTES each of the others.
"""

from __future__ import annotations

import base64
import gc
import json
import lzma
import sys
from collections.abc import Iterable, Iterator

import numpy as np

from ondevice.constraints.constrained import Constrained
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.grammars import GRAMMAR_BYTES, Grammars, GrammarVocabulary, grammars_bytes
from ondevice.errors import ConstraintError
from ondevice.tokenizer import load_tokenizer
from ondevice.units import process_memory, trim_heap
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


def vocabularies() -> Iterator[tuple[str, GrammarVocabulary]]:
    """Name and vocabulary of each tokenizer that is there."""
    llama = SHARED_DATA / "tokenizers/llama2/tokenizer.model"
    if llama.is_file():
        tokenizer = load_tokenizer("sentencepiece", llama.read_bytes(), 1, (2,), True)
        texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        yield (
            "llama2",
            GrammarVocabulary(
                texts, tokenizer.special_tokens, (2,), lambda text: tokenizer.encode(text, add_bos=False)
            ),
        )
    qwen = SHARED_DATA / "tokenizers/qwen/qwen.tiktoken"
    if qwen.is_file():
        texts = [base64.b64decode(line.split()[0]) for line in qwen.read_bytes().splitlines()]
        ids = {text: token for token, text in enumerate(texts)}
        yield "qwen", GrammarVocabulary(texts, {}, (len(texts) - 1,), lambda text: longest_first(text, ids))


def longest_first(text: str, ids: dict[bytes, int]) -> list[int]:
    """Tokens by the longest match, which takes about as long as byte-pair merges do."""
    data, found, at = text.encode(), [], 0
    while at < len(data):
        length = next(n for n in range(min(24, len(data) - at), 0, -1) if data[at : at + n] in ids)
        found.append(ids[data[at : at + length]])
        at += length
    return found


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
