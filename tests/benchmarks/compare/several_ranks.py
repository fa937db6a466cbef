"""A model over several ranks of one core each against one process on one core, and each in its own memory.

    python -m tests.benchmarks.compare.several_ranks --workdir DIR

The ranks run on this machine, over MLX's ring on loopback, each bound to a core of its own, with slices of
as many layers each. The model is of the Llama-7B shape with a few layers, random weights and q4. Prefill is
of 2,048 tokens, with everything in memory; rounds take turns. Each has a third side: as many processes as
ranks, one on each core, that know nothing of each other. What they lose beside each other, ranks lose too.
Then every rank runs in a cgroup of its own
budget, and the budgets are smaller together than the model. A hop's bytes and seconds are those of decoding
without drafts; `explain.ring_hops` compares messages with plain sends. Ends with one JSON line; exits 0 only
if no rank was killed, and the median of the prefill ratios is at least `AT_LEAST` for two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ondevice import api
from ondevice.bundle.reader import Bundle
from ondevice.units import parse_budget
from tests.benchmarks.lib.measure import (
    drop_caches,
    machine,
    memory_cgroup,
    note,
    require_rig,
    spread,
    summary,
)
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import LLAMA_7B, huggingface_folder
from tests.support.distributed import ring_environments
from tests.support.paths import ROOT

AT_LEAST = 1.6
PROMPT_TOKENS, NEW_TOKENS = 2048, 32
BUDGET_PROMPT_TOKENS = 256
AMPLE = "4GB"
PREFILL, DECODE = "prefill_tokens_per_second", "decode_tokens_per_second"


def slices(bundle: Path, ranks: int) -> list[Path]:
    """Slices of as many layers each, beside the bundle."""
    whole = Bundle.open(bundle)
    edges = [rank * whole.config.num_layers // ranks for rank in range(ranks + 1)]
    made = []
    for rank, (first, stop) in enumerate(pairwise(edges)):
        output = bundle.with_name(f"{bundle.name}-{rank}-of-{ranks}")
        made.append(api.write_slice(whole.slice(first, stop), output, force=True))
    return made


def benched(
    bundles: Sequence[Path], budgets: Sequence[str], prompt_tokens: int, cores: Sequence[int], limited: bool
) -> dict[str, Any]:
    """The JSON of `ondevice bench` on rank 0, a thread and a core each, and how each rank ended.

    limited: each in a cgroup of its budget.
    """
    drop_caches()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environments = ring_environments(folder, len(bundles)) if len(bundles) > 1 else [dict(os.environ)]
        groups, processes = [], list[subprocess.Popen[bytes]]()
        for core, bundle, budget, environment in zip(cores, bundles, budgets, environments, strict=False):
            limit = parse_budget(budget) if limited else None
            groups.append(stack.enter_context(memory_cgroup(limit)))
            options = [
                "--json",
                "--runs",
                "1",
                "--threads",
                "1",
                "--speculation",
                "off",
                "--sparsity",
                "dense",
            ]
            options += ["--prompt-tokens", str(prompt_tokens), "--max-tokens", str(NEW_TOKENS)]
            options += ["--max-context", str(prompt_tokens + NEW_TOKENS + 16), "--dram-budget", budget]
            command = [
                "taskset",
                "-c",
                str(core),
                sys.executable,
                "-m",
                "ondevice",
                "bench",
                str(bundle),
                *options,
            ]
            processes.append(
                subprocess.Popen(
                    groups[-1].command(command), env=environment, cwd=ROOT, stdout=subprocess.PIPE
                )
            )
        printed = [process.communicate()[0] for process in processes]
        codes = [process.returncode for process in processes]
        if any(codes):
            raise SystemExit(f"ranks ended with the exit codes {codes}")
        found: dict[str, Any] = json.loads(printed[0])
        return found | {"failcnt": [group.read("failcnt") for group in groups]}


def apart(bundle: Path, cores: Sequence[int]) -> dict[str, float]:
    """The mean rates of processes on these cores that each run the whole model, at the same time."""
    with ThreadPoolExecutor(len(cores)) as pool:
        found = list(
            pool.map(lambda core: benched([bundle], [AMPLE], PROMPT_TOKENS, [core], limited=False), cores)
        )
    return {name: statistics.fmean(it[name] for it in found) for name in (PREFILL, DECODE)}


def hops(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Bytes and seconds of a message, the mean of all that ranks have sent and waited for."""
    own = [rank["hops"] for rank in ranks]
    messages = sum(it["messages"] for it in own)
    return {
        "messages": messages,
        "bytes": sum(it["sent_bytes"] for it in own) / messages,
        "sending_seconds": sum(it["sent_seconds"] for it in own) / messages,
        "waiting_seconds": sum(it["waited_seconds"] for it in own) / messages,
    }


def main() -> int:
    """Measure; 0 if two ranks are as fast as is asked, and none was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--budget", default="480MB", help="of each rank in its cgroup")
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < args.ranks or shutil.which("taskset") is None:
        raise SystemExit(f"this benchmark needs taskset, and a core for each of {args.ranks} ranks")
    shape = replace(LLAMA_7B, name=f"{LLAMA_7B.name}-{args.layers}-layers", num_layers=args.layers)
    whole = bundle_folder(huggingface_folder(shape, args.workdir), args.workdir)
    parts = slices(whole, args.ranks)
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "one": lambda: benched([whole], [AMPLE], PROMPT_TOKENS, cores, limited=False),
        "ranks": lambda: benched(parts, [AMPLE] * len(parts), PROMPT_TOKENS, cores, limited=False),
        "apart": lambda: apart(whole, cores[: args.ranks]),
    }
    rates: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in sides} for name in (PREFILL, DECODE)
    }
    for pair in range(args.pairs):
        for side in sides if pair % 2 == 0 else reversed(sides):
            found = sides[side]()
            for name in rates:
                rates[name][side].append(found[name])
        last = ", ".join(f"{side} {found[-1]:.1f}" for side, found in rates[PREFILL].items())
        note(f"{pair + 1}/{args.pairs}: prefill, tokens/s: {last}")
    limited = benched(parts, [args.budget] * args.ranks, BUDGET_PROMPT_TOKENS, cores, limited=True)
    together, model_bytes = args.ranks * parse_budget(args.budget), Bundle.open(whole).bundle_bytes
    figures: dict[str, Any] = {}
    for name, found in rates.items():
        ratio, beside = (
            statistics.median(there / here for here, there in zip(found["one"], found[side], strict=True))
            for side in ("ranks", "apart")
        )
        figures[name] = {side: summary(its) for side, its in found.items()}
        figures[name] |= {"ratio": ratio, "apart_ratio": beside}
        print(
            f"{name}: {spread(found['one'])} on one core, {spread(found['ranks'])} over {args.ranks} ranks, "
            f"{ratio:.2f} x; a core beside the others has {beside:.2f} of its rate alone"
        )
    print(
        f"in budgets of {together / 1e6:.0f} MB together, the model has {model_bytes / 1e6:.0f}: "
        f"{limited[DECODE]:.2f} tokens/s, {hops(limited['ranks'])['bytes']:.0f} bytes a hop"
    )
    passed = together < model_bytes and (args.ranks != 2 or figures[PREFILL]["ratio"] >= AT_LEAST)
    closing = {"benchmark": "several_ranks", "passed": passed, "machine": machine(), "layers": args.layers}
    closing |= {"figures": figures, "hops": hops(limited["ranks"]), "budgets_bytes": together}
    closing |= {"model_bytes": model_bytes, "limited": limited}
    print(json.dumps(closing))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
