"""What a recurrent layer's rule takes of its time, in order inside a pass, beside the layer's projections.

    .venv/bin/python -m tests.benchmarks.explain.recurrence

One layer with a gated delta rule of Qwen3.5-35B-A3B's shape, and one with a Mamba-2 mixer of Granite 4.0 H
Tiny's, with random weights at 4 bits. Medians of `--rounds` rounds, in which the rule and its two projections
take turns. Prints a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from ondevice.backends.base import Float32, Norm
from ondevice.backends.cpu_recurrent import native_mixer
from ondevice.kernels import _native
from ondevice.model_config import DeltaSpec, Mamba2Spec
from ondevice.units import usable_cores

DELTA = DeltaSpec(key_heads=16, value_heads=32, key_width=128, value_width=128)
MIXER = Mamba2Spec(heads=48, head_width=64, groups=1, state_width=128, conv_bias=True)
LAYERS: dict[str, tuple[DeltaSpec | Mamba2Spec, int]] = {
    "gated delta rule": (DELTA, 2048),
    "mixer": (MIXER, 1536),
}
"""A layer's rule, and its hidden width."""
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


def normal(rng: np.random.Generator, *shape: int) -> Float32:
    return rng.standard_normal(shape).astype(np.float32)


def rule(
    runner: _native.Runner, spec: DeltaSpec | Mamba2Spec, projected: Float32, out: Float32
) -> Callable[[], None]:
    """Runs the rule over these rows, each time behind the state that it left before."""
    rng = np.random.default_rng(1)
    inputs, conv = normal(rng, len(out), spec.gate_floats), normal(rng, spec.taps, spec.channels)
    states = [np.zeros(spec.state_floats, np.float32) for _ in range(2)]

    def run() -> None:
        if isinstance(spec, DeltaSpec):
            _native.gated_delta(runner, projected, inputs, spec.sizes, delta, states[0], states[1], out)
        else:
            _native.mamba2(runner, projected, inputs, native_mixer(spec), mixer, states[0], states[1], out)
        states.reverse()

    heads = spec.value_heads if isinstance(spec, DeltaSpec) else spec.heads
    decay, time_bias, skip = -np.exp(normal(rng, heads)), normal(rng, heads), normal(rng, heads)
    delta = conv, decay, time_bias, Norm(np.ones(spec.value_size // heads, np.float32), 1e-6)
    norm = Norm(np.ones(spec.value_size, np.float32), 1e-6)
    mixer = conv, normal(rng, spec.channels), decay, time_bias, skip, norm
    return run


def measured(
    runner: _native.Runner, spec: DeltaSpec | Mamba2Spec, hidden: int, tokens: int, rounds: int
) -> tuple[float, float]:
    """Median seconds of the rule and of the projections before and behind it, in a pass of `tokens`."""
    rng, width = np.random.default_rng(tokens), spec.channels + spec.value_size
    entering, leaving = matrix(runner, width, hidden), matrix(runner, hidden, spec.value_size)
    x, projected = normal(rng, tokens, hidden), normal(rng, tokens, width)
    out, y = np.empty((tokens, spec.value_size), np.float32), np.empty((tokens, hidden), np.float32)
    ruled = rule(runner, spec, projected, out)

    def projections() -> None:
        entering.forward(runner, x, None, projected, None, None)
        leaving.forward(runner, out, None, y, None, None)

    projections()
    times = [(seconds(ruled), seconds(projections)) for _ in range(rounds)]
    first, second = (statistics.median(each) for each in zip(*times, strict=True))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    runner, rows = _native.Runner(options.threads, "auto"), []
    print(f"{runner.target}, {options.threads} threads: milliseconds a token in one layer")
    for name, (spec, hidden) in LAYERS.items():
        for tokens in WIDTHS:
            taken = measured(runner, spec, hidden, tokens, options.rounds)
            own, around = (round(1e3 * each / tokens, 4) for each in taken)
            rows.append({"layer": name, "tokens": tokens, "rule_ms": own, "projections_ms": around})
            print(f"{name:16} {tokens:4} tokens: rule {own:.3f}, projections {around:.3f}")
    print(json.dumps({"target": runner.target, "threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
