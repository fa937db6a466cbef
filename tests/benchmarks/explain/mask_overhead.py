"""What a constraint adds to a token: the mask and drawing under it, at 32,000 and 151,643 entries.

    .venv/bin/python -m tests.benchmarks.explain.mask_overhead [--pass-ms 150]

Answers to the schemas of ../shared/data/schemas are random walks among the allowed tokens. Every step's mask,
draw and acceptance is timed, and so is a draw without a mask; `share` is the mean difference as a share of a
pass of a 7B, whose milliseconds are an argument. Vocabularies that aren't there are left out. It ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import time
from collections.abc import Iterator

import numpy as np

from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.constraints.constraint import Constraint
from ondevice.constraints.grammars import Grammars, GrammarVocabulary
from ondevice.errors import ConstraintError
from ondevice.sampling import sample
from ondevice.tokenizer import load_tokenizer
from tests.support.paths import SHARED_DATA

STEPS = 40
SCHEMAS = 24
PASS_MS = 150.0
"""Milliseconds of a pass of a 7B in q4 on two cores with AVX2, at the fast end."""
SAMPLING = SamplingConfig(temperature=1.0, seed=1)


def vocabularies() -> Iterator[tuple[str, GrammarVocabulary]]:
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


def measured(vocabulary: GrammarVocabulary) -> dict[str, float]:
    """Milliseconds of a token: of the mask, of a draw under it, and of one without."""
    begun = time.perf_counter()
    grammars = Grammars(vocabulary)
    table_seconds = time.perf_counter() - begun
    with lzma.open(SHARED_DATA / "schemas/jsonschemabench_sample.json.xz") as stream:
        schemas = list(json.load(stream).values())
    rng = np.random.default_rng(1)
    logits = rng.normal(size=grammars.vocab_size).astype(np.float32)
    masks, draws, plain, reads = [], [], [], []
    for schema in schemas[:: max(1, len(schemas) // SCHEMAS)]:
        start = time.perf_counter()
        try:
            matcher = grammars.matcher(Constraint.json_schema(schema))
        except ConstraintError:
            continue
        reads.append(time.perf_counter() - start)
        constrained = Constrained(matcher, grammars.vocab_size, frozenset(vocabulary.eos_ids))
        for position in range(STEPS):
            times = [time.perf_counter()]
            allowed = constrained.allowed()
            times.append(time.perf_counter())
            token = sample(logits, SAMPLING, position, (), allowed)
            times.append(time.perf_counter())
            if token in vocabulary.eos_ids:
                break
            constrained.take(token, "")
            times.append(time.perf_counter())
            sample(logits, SAMPLING, position)
            plain.append(time.perf_counter() - times[-1])
            masks.append(times[1] - times[0] + times[3] - times[2])
            draws.append(times[2] - times[1])
            if constrained.is_complete:
                break
    found = {name: 1e3 * float(np.mean(each)) for name, each in (("mask", masks), ("draw", draws))}
    found |= {"plain_draw": 1e3 * float(np.mean(plain)), "mask_99": 1e3 * float(np.percentile(masks, 99))}
    found |= {"mask_most": 1e3 * max(masks), "read_most": 1e3 * max(reads), "table": 1e3 * table_seconds}
    return found | {"tokens": len(masks)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pass-ms", type=float, default=PASS_MS)
    pass_ms = arguments.parse_args().pass_ms
    rows = {}
    for name, vocabulary in vocabularies():
        row = measured(vocabulary)
        row["share"] = (row["mask"] + row["draw"] - row["plain_draw"]) / pass_ms
        row["share_of_mask_99"] = row["mask_99"] / pass_ms
        rows[name] = {"entries": len(vocabulary.token_bytes)} | {key: round(row[key], 4) for key in row}
        print(name, rows[name], flush=True)
    print(json.dumps({"mask_overhead": rows, "pass_ms": pass_ms}))


if __name__ == "__main__":
    main()
