"""One long session of ondevice that changes its topic half-way, in a fresh process. JSON in, JSON out.

Spec: model, topics (lists of token ids: all that is said while a topic lasts), prompt_tokens and max_tokens
(of each topic), context, threads, dram_budget, io, sparsity, limited (by a memory cgroup). KV is 8-bit and
grows through all topics; when the context is full, a new session goes on from the last words. Rates have the
prompts of new sessions in them. `steady_failcnt` is counted from the middle of the first topic on, when the
neuron cache has filled.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.config import SamplingConfig
from tests.benchmarks.lib.measure import decode_rate, peak_memory_bytes
from tests.benchmarks.lib.run_ondevice import load

# At this temperature a random head's choice is all but uniform, lest it repeat itself; so much bias leaves
# the topic's tokens alone in it.
TEMPERATURE = 50.0
BIAS = 10_000.0


def prompt(topic: Sequence[int], tokens: int, seed: int) -> list[int]:
    """So many of the topic's tokens, drawn at random."""
    return [int(token) for token in np.random.default_rng(seed).choice(topic, tokens)]


def settled_failcnt(failcnt: Path, limited: bool) -> int:
    """The count from which on the limit is not hit for files that the start has left in the page cache.

    A cgroup is emptied of what it can spare: they would leave page by page as the text grows.
    """
    if limited:
        failcnt.with_name("memory.force_empty").write_text("0\n")
    return int(failcnt.read_text())


def run(spec: dict[str, Any]) -> dict[str, object]:
    """All topics in turn, each continuing the text so far."""
    failcnt = Path(spec["failcnt_file"])
    halves: list[dict[str, float]] = []
    text: list[int] = []
    began, steady_failcnt = 0.0, 0
    with load(spec) as model:
        session = model._host.new_key()
        for number, topic in enumerate(spec["topics"]):
            text += prompt(topic, spec["prompt_tokens"], number)
            times: list[float] = []
            hits, bytes_read = 0.0, 0
            while len(times) < spec["max_tokens"]:
                if len(text) >= spec["context"]:
                    model._host.retire(session)
                    session, text = model._host.new_key(), text[-spec["prompt_tokens"] :]
                sampling = SamplingConfig(
                    temperature=TEMPERATURE,
                    seed=number + len(times),
                    logit_bias=tuple((token, BIAS) for token in topic),
                    max_tokens=min(spec["max_tokens"] - len(times), spec["context"] - len(text)),
                )
                before = len(times)
                for event in model._host.stream_ids(session, text, sampling):
                    if event.token is None:
                        continue
                    if event.token not in topic:
                        raise SystemExit(f"{event.token} isn't one of the topic's tokens")
                    text.append(event.token)
                    times.append(time.monotonic())
                    if not halves and len(times) == spec["max_tokens"] // 2:
                        steady_failcnt = settled_failcnt(failcnt, spec["limited"])
                if len(times) == before:
                    raise SystemExit("a session made no token")
                hits += model.stats.neuron_cache_hit_rate * (len(times) - before)
                bytes_read += model.stats.flash_bytes_read
            began = began or times[0]
            halves.append(
                {
                    "neuron_cache_hit_rate": hits / len(times),
                    "flash_bytes_read": bytes_read,
                    "decode_tokens_per_second": decode_rate(times),
                }
            )
        return {
            "first_token_at": began,
            "topics": halves,
            "tokens": len(spec["topics"]) * spec["max_tokens"],
            "peak_memory_bytes": peak_memory_bytes(),
            "steady_failcnt": int(failcnt.read_text()) - steady_failcnt,
            "plan_bytes": model.plan.total_bytes,
        }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
