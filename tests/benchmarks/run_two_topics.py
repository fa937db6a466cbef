"""One long session of ondevice that changes its topic half-way, in a fresh process. JSON in, JSON out.

Spec: model, topics (lists of token ids: all that is said while a topic lasts), prompt_tokens and max_tokens
(of each topic), context, threads, dram_budget, io, sparsity, limited (by a memory cgroup). KV is 8-bit and
grows through all topics. `steady_failcnt` is counted from the middle of the first topic on, when the neuron
cache has filled.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import decode_rate, peak_memory_bytes
from run_ondevice import load

from ondevice.config import SamplingConfig

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
        session = model.new_key()
        for number, topic in enumerate(spec["topics"]):
            text += prompt(topic, spec["prompt_tokens"], number)
            sampling = SamplingConfig(
                temperature=TEMPERATURE,
                seed=number,
                logit_bias=tuple((token, BIAS) for token in topic),
                max_tokens=spec["max_tokens"],
            )
            times: list[float] = []
            for event in model.stream_ids(session, text, sampling):
                if event.token is not None:
                    text.append(event.token)
                    times.append(time.monotonic())
                    if not halves and len(times) == spec["max_tokens"] // 2:
                        steady_failcnt = settled_failcnt(failcnt, spec["limited"])
            if len(times) != spec["max_tokens"] or not set(text[-len(times) :]) <= set(topic):
                raise SystemExit(f"{len(times)} of {spec['max_tokens']} tokens, or others than the topic's")
            began = began or times[0]
            halves.append(
                {
                    "neuron_cache_hit_rate": model.stats.neuron_cache_hit_rate,
                    "flash_bytes_read": model.stats.flash_bytes_read,
                    "decode_tokens_per_second": decode_rate(times),
                }
            )
        return {
            "first_token_at": began,
            "topics": halves,
            "tokens": len(text),
            "peak_memory_bytes": peak_memory_bytes(),
            "steady_failcnt": int(failcnt.read_text()) - steady_failcnt,
            "plan_bytes": model.plan.total_bytes,
        }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
