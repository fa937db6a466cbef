"""One run of ondevice in a fresh process, through the Python API. JSON in, JSON out.

Spec: model, prompt (token ids), max_tokens, context (tokens of KV), threads, warm_up (tokens made
before the clock starts; 0: none), dram_budget (bytes or `auto`), io, sparsity, temperature (0: greedy).
kv_bits is 8 if not given. End-of-text tokens are forbidden, so that every run has its `max_tokens`.
steady_tokens: the first ones, which the decode rate leaves out (`STEADY_TOKENS` if not given); by how much
the engine's counters rose afterwards is `steady`. warm_prompt: what the tokens of the warm-up follow, if not
the prompt's beginning.

With `prompts` (lists of token ids) in place of `prompt`, every one is continued greedily, with drafts
as `speculation` and `draft_model` say, until an end-of-text token or `max_tokens`.

A budget that is refused prints `required_bytes` alone: the smallest that works.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ondevice
from ondevice.meter import Counters
from tests.benchmarks.lib.measure import (
    STEADY_TOKENS,
    decode_rate,
    limit_hits,
    peak_memory_bytes,
    texts_result,
)


def load(spec: dict[str, Any]) -> ondevice.Model:
    """The model as every benchmark loads it: our kernels, and without other options nothing drafted."""
    return ondevice.load(
        spec["model"],
        dram_budget=spec["dram_budget"],
        backend="cpu",
        sparsity=spec["sparsity"],
        speculation=spec.get("speculation", "off"),
        threads=spec["threads"],
        kv_bits=spec.get("kv_bits", 8),
        draft_model=spec.get("draft_model", ""),
        max_context=spec["context"],
        io=spec["io"],
    )


def run(spec: dict[str, Any]) -> dict[str, object]:
    """Prefill and decode once, timed from outside the engine."""
    prompt: list[int] = spec["prompt"]
    failcnt, left_out = Path(spec["failcnt_file"]), spec.get("steady_tokens", STEADY_TOKENS)
    started = time.monotonic()
    with load(spec) as model:
        loaded = time.monotonic()
        if spec["warm_up"]:
            warm = spec.get("warm_prompt", prompt[:16])
            model.generate(tokens=warm, max_tokens=spec["warm_up"], temperature=spec["temperature"], seed=0)
        begin = time.monotonic()
        no_end = dict.fromkeys(model.bundle.manifest.tokenizer.eos_ids, -math.inf)
        times: list[float] = []
        text: list[int] = []
        stats = None
        steady_failcnt, before = 0, model._engine.counters()
        for event in model.stream(
            tokens=prompt,
            max_tokens=spec["max_tokens"],
            temperature=spec["temperature"],
            seed=0,
            logit_bias=no_end,
        ):
            if event.token is not None:
                times.append(time.monotonic())
                text.append(event.token)
                if len(times) == left_out:
                    steady_failcnt, before = limit_hits(failcnt), model._engine.counters()
            stats = event.stats or stats
        if stats is None or len(times) != spec["max_tokens"]:
            raise SystemExit(f"generated {len(times)} of {spec['max_tokens']} tokens")
        return {
            "load_seconds": loaded - started,
            "prompt_at": begin,
            "first_token_at": times[0],
            "last_token_at": times[-1],
            "prefill_tokens_per_second": len(prompt) / (times[0] - begin),
            "decode_tokens_per_second": decode_rate(times, left_out),
            "token_seconds": [moment - begin for moment in times],
            "text": text,
            "steady": _risen(before, model._engine.counters()),
            "peak_memory_bytes": peak_memory_bytes(),
            "steady_failcnt": limit_hits(failcnt) - steady_failcnt,
            "plan_bytes": model.plan.total_bytes,
            "budget_bytes": model.plan.budget_bytes,
            "flash_bytes_read": stats.flash_bytes_read,
            "flash_read_seconds": stats.flash_read_seconds,
            "flash_cpu_seconds": stats.flash_cpu_seconds,
            "neuron_cache_hit_rate": stats.neuron_cache_hit_rate,
            "io": stats.io,
        }


def _risen(before: Counters, after: Counters) -> dict[str, float]:
    """By how much each number rose. This machine runs the model alone, so there are no others' totals."""
    own = {name: value for name, value in asdict(after).items() if name != "ranks"}
    return {name: value - getattr(before, name) for name, value in own.items()}


def continue_texts(spec: dict[str, Any]) -> dict[str, object]:
    """Continue every prompt; decode times leave prompts out."""
    texts, decoded, seconds, passes = [], 0, 0.0, 0
    each: list[dict[str, float]] = []
    started = time.monotonic()
    with load(spec) as model:
        if spec.get("warm_up"):
            model.generate(tokens=spec["prompts"][0][:16], max_tokens=spec["warm_up"], temperature=0.0)
        for prompt in spec["prompts"]:
            drawing = {"temperature": spec.get("temperature", 0.0), "seed": 0}
            response = model.generate(tokens=prompt, max_tokens=spec["max_tokens"], **drawing)
            texts.append(list(response.tokens))
            stats = response.stats
            # The end-of-text token is a pass's result too, though no text has it.
            tokens = round(stats.accepted_tokens_per_pass * stats.decode_passes)
            decoded += tokens
            seconds += stats.decode_seconds
            passes += stats.decode_passes
            each.append({"tokens": tokens, "seconds": stats.decode_seconds, "passes": stats.decode_passes})
    return texts_result(started, texts, decoded, seconds, passes) | {"each": each}


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    try:
        print(json.dumps(continue_texts(spec) if "prompts" in spec else run(spec)))
    except ondevice.BudgetError as error:
        print(json.dumps({"required_bytes": error.required_bytes}))
