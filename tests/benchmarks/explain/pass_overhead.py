"""How much of a decode pass is spent in kernels, with everything in memory, and how many calls it takes.

The shipped model (or another) continues a prompt greedily, in dense, exact and predicted mode. Texts
alternate between plain ones, which say how long a pass takes (hidden states and logits) and a token (with
sampling and text), and ones in which every native call has a clock, which say how much of each pass is inside
such calls; the clocks' own cost is measured and taken off. What a call makes of its arguments is inside. Ends
with one JSON line.

    python -m tests.benchmarks.explain.pass_overhead [--threads 1] [--rounds 5] [--tokens 200]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig, SamplingConfig, Sparsity
from ondevice.kernels import _native
from ondevice.model.transformer import Transformer
from ondevice.runtime.engine import Engine
from ondevice.runtime.resolving import resolve
from tests.benchmarks.lib.measure import STEADY_TOKENS, machine
from tests.support.paths import ROOT

MODES: tuple[Sparsity, ...] = ("dense", "exact", "predicted")
PROMPT = "Find me a restaurant in London for tomorrow evening."
PASS: list[tuple[Any, str]] = [(Transformer, "run"), (Transformer, "logits"), (Transformer, "check_finite")]
CLASSES = ("Matrix", "FeedForward", "FeedForwardPass", "FlashReader", "RecordBatch", "ReadAhead")


class Clock:
    """Seconds in the calls of some functions, and how many there were."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return timed

    @contextmanager
    def on(self, places: list[tuple[Any, str]]) -> Iterator[None]:
        """While it lasts, attribute `name` of each owner is timed."""
        before = [(owner, name, getattr(owner, name)) for owner, name in places]
        try:
            for owner, name, function in before:
                setattr(owner, name, self.around(function))
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def taken(self) -> tuple[float, int]:
        """(seconds, calls) since the last time."""
        taken = self.seconds, self.calls
        self.seconds, self.calls = 0.0, 0
        return taken


def native_calls() -> list[tuple[Any, str]]:
    """Every function and method of the native extension."""
    found: list[tuple[Any, str]] = [
        (_native, name)
        for name, value in vars(_native).items()
        if callable(value) and not isinstance(value, type)
    ]
    for owner in (getattr(_native, name) for name in CLASSES):
        found += [(owner, name) for name, value in vars(owner).items() if callable(value) and name[0] != "_"]
    return found


def clock_cost() -> tuple[float, float]:
    """Seconds that a clock shows of a call that does nothing, and that it adds to one in all."""
    clock = Clock()
    nothing = clock.around(bool)
    bare, clocked, shown = [], [], []
    for _ in range(50):
        times = [time.perf_counter()]
        for call in (bool, nothing):
            for _ in range(1000):
                call(None)
            times.append(time.perf_counter())
        bare.append(times[1] - times[0])
        clocked.append(times[2] - times[1])
        shown.append(clock.taken()[0])
    return min(shown) / 1000, (min(clocked) - min(bare)) / 1000


@dataclass
class Texts:
    """Of every token: seconds of its pass and in all, where native calls have no clocks; where they have, the
    part of its pass that was spent inside, clocks not counted, and how many calls there were."""

    passes: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def run(engine: Engine, prompt: list[int], sampling: SamplingConfig, rounds: int) -> Texts:
    """Texts in turn without and with clocks in native calls, `rounds` of each."""
    found, outer, inner = Texts(), Clock(), Clock()
    shown, added = clock_cost()
    for turn in range(2 * rounds):
        clocked = turn % 2 == 1
        with outer.on(PASS), inner.on(native_calls() if clocked else []):
            since = time.perf_counter()
            for index, event in enumerate(engine.generate(None, prompt, sampling, lambda: False)):
                now = time.perf_counter()
                (seconds, _), (inside, count) = outer.taken(), inner.taken()
                if event.token is None or index < STEADY_TOKENS:
                    pass
                elif clocked:
                    found.shares.append((inside - count * shown) / (seconds - count * added))
                    found.calls.append(count)
                else:
                    found.passes.append(seconds)
                    found.tokens.append(now - since)
                since = time.perf_counter()
    return found


def measure(bundle: Bundle, mode: Sparsity, args: argparse.Namespace) -> dict[str, float]:
    """Medians of one mode."""
    runtime = RuntimeConfig(speculation="off", dram_budget="8GB", sparsity=mode, threads=args.threads)
    resolved = resolve(bundle, runtime)
    assert resolved.tokenizer is not None
    with closing(Engine(resolved, lambda: False)) as engine:
        while engine.fill_ahead():
            pass
        prompt = list(resolved.tokenizer.encode(PROMPT))
        # All texts are as long; a bias costs a token a copy of its logits.
        no_end = tuple((token, -math.inf) for token in bundle.manifest.tokenizer.eos_ids)
        sampling = SamplingConfig(temperature=0.0, max_tokens=args.tokens, logit_bias=no_end)
        run(engine, prompt, sampling, 1)
        read = engine.counters().flash_bytes_read
        found = run(engine, prompt, sampling, args.rounds)
        read = engine.counters().flash_bytes_read - read
    return {
        "pass_us": 1e6 * statistics.median(found.passes),
        "quickest_tenth_pass_us": 1e6 * statistics.quantiles(found.passes, n=10)[0],
        "share": statistics.median(found.shares),
        "native_calls": statistics.median(found.calls),
        "token_us": 1e6 * statistics.median(found.tokens),
        "tokens": len(found.tokens),
        "flash_bytes": read,
    }


def main() -> int:
    """Print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    found = {}
    print("| mode | pass us | of it native | native calls | token us |\n|---|---|---|---|---|")
    for mode in args.modes:
        row = found[mode] = measure(bundle, mode, args)
        print(
            f"| {mode} | {row['pass_us']:.0f} | {100 * row['share']:.0f} % | {row['native_calls']:.0f} | "
            f"{row['token_us']:.0f} |",
            flush=True,
        )
    print(json.dumps({"machine": machine(), "threads": args.threads, "modes": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
