"""What prefetching experts gains, by how often the estimate is right: one run, with and without it in turns.

Qwen3-30B-A3B's shape with few layers, routed as a trace (`tests/benchmarks/lib/routed_experts.py`), in a
cgroup of its budget from dropped caches. There the next layer's router chooses for this layer's input just
what it then chooses, which real models do in 81 to 89 % of cases; so estimates are spoilt by a seed. Blocks
of eight tokens take turns: without prefetch; with 85 % right, the others any expert of the layer; the same,
the others by how much the layer uses them; all right. A block's first token doesn't count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

import ondevice
from ondevice.backends.base import Int32
from ondevice.sparsity.expert_prefetch import ExpertPrefetcher
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.stats import PassTimes
from tests.benchmarks.lib.expert_cases import CONTEXT, TRACE_PROMPT
from tests.benchmarks.lib.measure import drop_caches, memory_cgroup, require_rig
from tests.benchmarks.lib.routed_experts import FIRST, RoutedShape, routed_gguf
from tests.support.bundles import convert_bundle
from tests.support.paths import ROOT

BLOCK = 8
LEFT_OUT = 16
VOCABULARY = 4096


@dataclass
class Mode:
    """One way to estimate. right: share that is; None: nothing is prefetched. seconds: of its tokens."""

    name: str
    right: float | None
    by_use: bool = False
    seconds: list[float] = field(default_factory=list)


def measure(folder: Path, budget: int, tokens: int, seed: int) -> list[Mode]:
    """Decode the trace; the modes take turns. Raises SystemExit if the text isn't the trace's."""
    modes = [Mode("off", None), Mode("85 %", 0.85), Mode("85 %, by use", 0.85, True), Mode("100 %", 1.0)]
    rng, mode, text, count = np.random.default_rng(seed), modes[0], [], 0
    turns = np.concatenate([rng.permutation(len(modes)) for _ in range(tokens // BLOCK + 1)])
    options: dict[str, Any] = {"backend": "cpu", "speculation": "off", "threads": 2, "kv_bits": 8}
    with ExitStack() as stack:
        load = ondevice.load(folder, dram_budget=budget, max_context=CONTEXT, **options)
        model = stack.enter_context(load)
        neurons = model._engine._neurons
        assert isinstance(neurons, ExpertFetcher)
        policy, experts = neurons._cache._policy, neurons._experts.count
        assert isinstance(policy, ExpertReuse)

        def spoilt(turn: int, chosen: Int32) -> Int32:
            found = chosen.copy()
            for place in np.ndindex(found.shape):
                if rng.random() > (mode.right or 0.0):
                    used = policy._slow[turn].astype(float) if mode.by_use else np.ones(experts)
                    used[found[place[0]]] = 0.0  # a router names none twice
                    found[place] = rng.choice(experts, p=used / used.sum())
            return found

        expect = ExpertPrefetcher.expect

        def expecting(own: ExpertPrefetcher, turn: int, chosen: Callable[[], Int32]) -> None:
            expect(own, turn, lambda: spoilt(turn, chosen()))

        def next_pass(own: ExpertPrefetcher, tokens: int, times: PassTimes) -> None:
            own.on = True

        stack.enter_context(patch.object(ExpertPrefetcher, "expect", expecting))
        stack.enter_context(patch.object(ExpertPrefetcher, "next_pass", next_pass))
        neurons._prefetches = False
        prompt = [FIRST + step for step in range(TRACE_PROMPT)]
        begin = time.perf_counter()
        for event in model.stream(tokens=prompt, max_tokens=tokens, temperature=0.0):
            if event.token is None:
                continue
            now = time.perf_counter()
            if count > LEFT_OUT and count % BLOCK > 1:
                mode.seconds.append(now - begin)
            text.append(event.token)
            count += 1
            mode = modes[turns[count // BLOCK]]
            neurons._prefetches = mode.right is not None
            begin = time.perf_counter()
    if text != [FIRST + TRACE_PROMPT + step for step in range(tokens)]:
        raise SystemExit("the text isn't the trace's")
    return modes


def main() -> int:
    """Measure every budget in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, action="append", help="default: 0.6, 1 and 1.4 GB")
    parser.add_argument("--inside", action="store_true", help="this process is in a cgroup")
    args = parser.parse_args()
    folder = args.workdir / f"routed-{args.layers}"
    if args.inside:
        for mode in measure(folder, args.budget[-1], args.tokens, args.seed):
            print(json.dumps([mode.name, mode.seconds]))
        return 0
    require_rig()
    if not folder.is_dir():
        gguf = routed_gguf(RoutedShape(layers=args.layers, vocabulary=VOCABULARY), args.workdir)
        convert_bundle(gguf, folder)
        gguf.unlink()
    for budget in args.budget or (600_000_000, 1_000_000_000, 1_400_000_000):
        drop_caches()
        inside = [sys.executable, "-m", "tests.benchmarks.explain.expert_prefetch", *sys.argv[1:]]
        with memory_cgroup(budget) as group:
            command = group.command([*inside, "--inside", f"--budget={budget}"])
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        found = {name: seconds for name, seconds in map(json.loads, lines)}
        off = found["off"]
        for name, seconds in found.items():
            print(
                f"{budget / 1e9:.1f} GB, {name}: {1000 * sum(seconds) / len(seconds):.2f} ms a token, "
                f"{len(seconds) * sum(off) / len(off) / sum(seconds):.2f} x; "
                f"medians {1000 * median(seconds):.2f} ms, {median(off) / median(seconds):.2f} x"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
