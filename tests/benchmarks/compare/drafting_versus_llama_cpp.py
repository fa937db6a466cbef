"""Sparsity or drafts against llama.cpp: the same function in the same cgroup of half the GGUF's size.

ondevice with `--speculation auto` against plain llama.cpp and against llama-cpp-python's prompt lookup, each
from cold caches in turns, on held-out prompts of four kinds. A pair's figure is the ratio of tokens per
second over all texts, prompts left out. llama.cpp maps the file and copies nothing (`use_extra_bufts=False`).
A model with predictors runs by these unless `--sparsity` says otherwise, as its gates would take too much of
the memory; drafts then add nothing. Another one runs dense, with drafts alone. The models are embedded ones.
Texts may differ where rounding or a predictor decides between two likely tokens. Ends with one JSON line;
exits 0 only if every `at least` holds.

    python -m tests.benchmarks.lib.embedded_model --output DIR --shape 7b
    python -m tests.benchmarks.lib.embedded_gguf --output DIR
    python -m tests.benchmarks.compare.drafting_versus_llama_cpp --model DIR/large --gguf DIR/large.gguf
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ondevice.api import open_model
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.measure.drafters import prompt_ids
from tests.benchmarks.lib.held_out_prompts import held_out_tasks
from tests.benchmarks.lib.measure import Result, machine, note, require_rig, run_engine, spread

PLAIN, LOOKUP = "plain", "prompt lookup"
AT_LEAST = {PLAIN: 7.0, LOOKUP: 4.5}
AIM = {PLAIN: 10.0, LOOKUP: 4.5}
CONTEXT = 512
TIMEOUT_SECONDS = 7200.0


def rate(result: Result) -> float:
    """Decoded tokens per second, ends of text included; a text's first token comes with its prompt."""
    tokens: int = result["decoded_tokens"]
    seconds: float = result["decode_seconds"]
    return tokens / seconds if seconds else 0.0


def shared_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of the texts' tokens before the first that differs."""
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        equal = [a == b for a, b in zip(mine, other, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
        total += max(len(mine), len(other))
    return same / total


def verdict(ratios: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """A Markdown table of the ratios by rival, and whether all medians are large enough."""
    lines = ["| rival | ondevice over it | at least | aim | |", "|---|---|---|---|---|"]
    passed = True
    for rival, values in ratios.items():
        held = median(values) >= AT_LEAST[rival]
        passed &= held
        word = "held" if held else "MISSED"
        lines.append(f"| llama.cpp, {rival} | {spread(values)} | {AT_LEAST[rival]} | {AIM[rival]} | {word} |")
    return "\n".join(lines), passed


def run(script: str, spec: Mapping[str, object], limit: int) -> Result:
    """One cold run. Exits with the reason if it doesn't survive."""
    result = run_engine(script, spec, limit, TIMEOUT_SECONDS)
    if not result["survived"]:
        raise SystemExit(f"{script} in {limit} bytes: {result['reason']}")
    return result


def main() -> int:
    """Run the pairs; 0 if all ratios are large enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="bundle of an embedded model")
    parser.add_argument("--gguf", type=Path, required=True, help="the same function for llama.cpp")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sparsity", choices=("dense", "exact", "predicted"), help="of ondevice")
    parser.add_argument("--draft-tokens", type=int, default=10, help="of llama.cpp's prompt lookup")
    args = parser.parse_args()
    if not args.gguf.is_file() or args.pairs < 1:
        parser.error("--gguf must be a file, and --pairs 1 or more")
    require_rig()
    bundle, limit = Bundle.open(args.model), args.gguf.stat().st_size // 2
    resolved = open_model(args.model, RuntimeConfig(speculation="off", max_context=CONTEXT))
    prompts = prompt_ids(resolved, held_out_tasks(args.prompts), args.max_tokens)
    both: dict[str, object] = {
        "prompts": [ids for of_task in prompts.values() for ids in of_task],
        "max_tokens": args.max_tokens,
        "context": CONTEXT,
        "threads": args.threads,
    }
    ours = both | {
        "model": str(args.model.resolve()),
        "dram_budget": limit,
        "io": "auto",
        "speculation": "auto",
    }
    ours["sparsity"] = args.sparsity or ("predicted" if bundle.predictors is not None else "dense")
    theirs = both | {"model": str(args.gguf.resolve()), "end": list(bundle.manifest.tokenizer.eos_ids)}
    theirs |= {"load_mode": "mmap", "repack": False, "micro_batch": 0}
    ratios: dict[str, list[float]] = {PLAIN: [], LOOKUP: []}
    runs: dict[str, list[dict[str, Any]]] = {"ondevice": [], PLAIN: [], LOOKUP: []}
    for pair in range(args.pairs):
        mine = run("run_ondevice", ours, limit)
        runs["ondevice"].append({"tokens_per_second": rate(mine), "passes": mine["decode_passes"]})
        for rival, draft_tokens in ((PLAIN, 0), (LOOKUP, args.draft_tokens)):
            other = run("run_llama_cpp", theirs | {"draft_tokens": draft_tokens}, limit)
            if not rate(other):
                raise SystemExit("every text of llama.cpp ended with its prompt; take other prompts")
            ratios[rival].append(rate(mine) / rate(other))
            shared = shared_tokens(mine["texts"], other["texts"])
            facts = {
                "tokens_per_second": rate(other),
                "passes": other["decode_passes"],
                "shared_tokens": shared,
            }
            runs[rival].append(facts)
            note(f"{pair + 1}/{args.pairs}: ondevice {rate(mine):.2f} tokens/s, llama.cpp {rival} {facts}")
    shown, passed = verdict(ratios)
    print("embedded models: the function of a small trained model in a large shape\n")
    print(shown)
    found = {"benchmark": "drafting_versus_llama_cpp", "passed": passed, "limit_bytes": limit, "runs": runs}
    found["sparsity"] = ours["sparsity"]
    asked = {
        name: getattr(args, name) for name in ("prompts", "max_tokens", "pairs", "threads", "draft_tokens")
    }
    print(json.dumps(found | {"ratios": ratios} | asked | {"machine": machine()}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
