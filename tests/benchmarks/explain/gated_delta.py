"""What the gated delta rule takes of a layer's time, in order inside a pass, beside the layer's projections.

    .venv/bin/python -m tests.benchmarks.explain.gated_delta

One layer of Qwen3.5-35B-A3B's shape with random weights at 4 bits. Medians of `--rounds` rounds, in which the
rule and its two projections take turns. Prints a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from ondevice.backends.base import Float32, Norm
from ondevice.kernels import _native
from ondevice.model_config import DeltaSpec
from ondevice.units import usable_cores

HIDDEN = 2048
SPEC = DeltaSpec(key_heads=16, value_heads=32, key_width=128, value_width=128)
WIDTHS = (1, 8, 64, 512)


def matrix(runner: _native.Runner, rows: int, cols: int) -> _native.Matrix:
    """Random codes of 4 bits, with one scale and one bias."""
    found, rng = _native.Matrix(rows, cols, 4), np.random.default_rng(rows)
    codes = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    halves = np.full((rows, cols // 64), 0.01, np.float16)
    found.load_rows(runner, 0, codes, halves.view(np.uint8), (-8 * halves).view(np.uint8))
    return found


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measured(runner: _native.Runner, tokens: int, rounds: int) -> tuple[float, float]:
    """Median seconds of the rule and of the projections before and behind it, in a pass of `tokens`."""
    rng = np.random.default_rng(tokens)

    def normal(*shape: int) -> Float32:
        return rng.standard_normal(shape).astype(np.float32)

    entering, leaving = (
        matrix(runner, SPEC.channels + SPEC.value_size, HIDDEN),
        matrix(runner, HIDDEN, SPEC.value_size),
    )
    x, projected = normal(tokens, HIDDEN), normal(tokens, SPEC.channels + SPEC.value_size)
    gates, out = normal(tokens, 2 * SPEC.value_heads), np.empty((tokens, SPEC.value_size), np.float32)
    conv, norm = normal(4, SPEC.channels), Norm(np.ones(SPEC.value_width, np.float32), 1e-6)
    decay, bias = -np.exp(normal(SPEC.value_heads)), normal(SPEC.value_heads)
    states = [np.zeros(SPEC.state_floats, np.float32) for _ in range(2)]
    y = np.empty((tokens, HIDDEN), np.float32)

    def rule() -> None:
        _native.gated_delta(runner, projected, gates, SPEC.sizes, conv, decay, bias, norm, *states, out)
        states.reverse()

    def projections() -> None:
        entering.forward(runner, x, None, projected, None, None)
        leaving.forward(runner, out, None, y, None, None)

    projections()
    times = [(seconds(rule), seconds(projections)) for _ in range(rounds)]
    first, second = (statistics.median(each) for each in zip(*times, strict=True))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    runner, rows = _native.Runner(options.threads, "auto"), []
    print(f"{runner.target}, {options.threads} threads: milliseconds a token in one layer")
    for tokens in WIDTHS:
        rule, projections = (1e3 * each / tokens for each in measured(runner, tokens, options.rounds))
        rows.append({"tokens": tokens, "rule_ms": round(rule, 4), "projections_ms": round(projections, 4)})
        print(f"{tokens:4} tokens: rule {rule:.3f}, projections {projections:.3f}")
    print(json.dumps({"target": runner.target, "threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
