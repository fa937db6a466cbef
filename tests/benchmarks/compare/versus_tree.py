"""This source tree against another one, as before against after: equal bundles, interleaved cold pairs.

    python -m tests.benchmarks.compare.versus_tree --other ../other --layers 4

The other tree must have been set up (`make build` there): its interpreter, with its own build, runs this
tree's measuring script. Cases: decoding and a prompt of 512 tokens in memory, dense streaming at half of what
the model takes, `exact` at three quarters and `predicted` at half, on Llama-7B shapes of a few layers, and
decoding with the model that ships. A ratio is this tree's rate over the other's. Ends with one JSON line;
exits 0 only if every median ratio is at least `--at-least`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.config import Sparsity
from tests.benchmarks.compare.flash_versus_llama_cpp import RANDOM_TEXT, TENTH
from tests.benchmarks.lib.measure import Result, machine, note, require_rig, run_engine, spread, summary
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import LLAMA_7B, Shape, huggingface_folder, random_tokens
from tests.benchmarks.lib.synthetic import synthetic_bundle
from tests.support.paths import ROOT, SHIPPED

PREFILL, DECODE = "prefill_tokens_per_second", "decode_tokens_per_second"


@dataclass(frozen=True)
class Case:
    """What both trees run. `share`: budget, as a part of what the model takes resident; 0 for no limit."""

    name: str
    model: str
    """`dense` and `planted` are made here; `shipped` is the model that ships."""
    sparsity: Sparsity = "dense"
    share: float = 0.0
    figure: str = DECODE
    prompt_tokens: int = 32
    max_tokens: int = 64
    warm_up: int = 4


CASES = (
    Case("decode resident", "dense"),
    Case("prefill 512", "dense", figure=PREFILL, prompt_tokens=512, max_tokens=1),
    Case("dense at 50 %", "dense", share=0.5, max_tokens=24, warm_up=0),
    Case("exact at 75 %", "planted", "exact", 0.75),
    Case("predicted at 50 %", "planted", "predicted", 0.5),
    Case("shipped model", "shipped", max_tokens=256, warm_up=64),
)


def made(model: str, shape: Shape, workdir: Path) -> Path:
    """The bundle of a case, made on the first call."""
    if model == "shipped":
        return SHIPPED
    if model == "planted":
        return synthetic_bundle(shape, TENTH, workdir)
    return bundle_folder(huggingface_folder(shape, workdir), workdir)


def specification(case: Case, bundle: Path, threads: int) -> dict[str, Any]:
    """What `run_ondevice` takes."""
    context = case.prompt_tokens + case.max_tokens + case.warm_up + 16
    plan = ondevice.inspect(bundle, sparsity=case.sparsity, threads=threads, kv_bits=8, max_context=context)
    budget = max(plan.minimum_budget_bytes, int(case.share * plan.full_bytes)) if case.share else "auto"
    vocab_size = Bundle.open(bundle).config.vocab_size
    return {
        "model": str(bundle),
        "prompt": random_tokens(case.prompt_tokens, vocab_size),
        "max_tokens": case.max_tokens,
        "context": context,
        "threads": threads,
        "warm_up": case.warm_up,
        "dram_budget": budget,
        "io": "auto",
        "sparsity": case.sparsity,
        "temperature": RANDOM_TEXT if case.model == "planted" else 0.0,
    }


def measured(case: Case, spec: dict[str, Any], interpreters: tuple[str, str], pairs: int) -> dict[str, Any]:
    """A row: rates of both trees, and the ratios of their pairs."""
    rates: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        # Whichever goes first warms the device or the processor for the other: they take turns.
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            found: Result = run_engine("run_ondevice", spec, interpreter=interpreters[side])
            if not found["survived"]:
                raise SystemExit(f"{case.name}: {interpreters[side]} failed: {found['reason']}")
            rates[side].append(found[case.figure])
        note(f"{case.name} {pair + 1}/{pairs}: {rates[0][-1]:.2f} against {rates[1][-1]:.2f}")
    ratios = [here / there for here, there in zip(*rates, strict=True)]
    return {
        "case": case.name,
        "figure": case.figure,
        "here": summary(rates[0]) | {"text": spread(rates[0])},
        "other": summary(rates[1]) | {"text": spread(rates[1])},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> int:
    """Run the chosen cases; 0 if none is slower than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="the other source tree, set up")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--layers", type=int, default=LLAMA_7B.num_layers)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--at-least", type=float, default=0.97)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    layers = "" if args.layers == LLAMA_7B.num_layers else f"-{args.layers}-layers"
    shape = replace(LLAMA_7B, name=f"{LLAMA_7B.name}{layers}", num_layers=args.layers)
    interpreters = sys.executable, str(args.other.absolute() / ".venv/bin/python")
    rows = []
    for case in CASES:
        if args.case is None or case.name in args.case:
            spec = specification(case, made(case.model, shape, args.workdir), args.threads)
            rows.append(measured(case, spec, interpreters, args.pairs))
    print("| case | this tree | the other | ratio |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['case']} | {row['here']['text']} | {row['other']['text']} | {row['ratio']:.3f} |")
    passed = all(row["ratio"] >= args.at_least for row in rows)
    closing = {"benchmark": "versus_tree", "passed": passed, "machine": machine(), "layers": args.layers}
    print(json.dumps(closing | {"pairs": args.pairs, "cases": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
