"""llama.cpp's batches without its server: sequences that share every pass, driven here. JSON in, JSON out.

Spec: as `run_llama_cpp.py` has it, with `context` for all sequences together, `sequences`, the most of them,
and `prompts`, a list of prompts of equal lengths for each number of sequences to measure.
Every sequence continues its prompt greedily by `max_tokens` tokens. This is what a server could do at most:
no HTTP, no sampling but the likeliest token.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tests.benchmarks.lib.measure import peak_memory_bytes
from tests.benchmarks.lib.run_llama_cpp import Engine


def rate(engine: Engine, prompts: list[list[int]], max_tokens: int) -> float:
    """Tokens per second of all sequences together, their prompts and first tokens left out."""
    engine.clear()
    newest = []
    for sequence, prompt in enumerate(prompts):
        rows = [(token, position, sequence) for position, token in enumerate(prompt)]
        newest.append(engine.each_row(rows)[-1])
    length, begin = len(prompts[0]), time.monotonic()
    for position in range(length, length + max_tokens - 1):
        rows = [(token, position, sequence) for sequence, token in enumerate(newest)]
        newest = engine.each_row(rows)
    return len(prompts) * (max_tokens - 1) / (time.monotonic() - begin)


def run(spec: dict[str, Any]) -> dict[str, object]:
    """The rate for each number of sequences."""
    engine = Engine(spec)
    rate(engine, [spec["prompts"][0][0]], 4)
    loaded = time.monotonic()
    rates = [rate(engine, prompts, spec["max_tokens"]) for prompts in spec["prompts"]]
    return {"first_token_at": loaded, "rates": rates, "peak_memory_bytes": peak_memory_bytes()}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
