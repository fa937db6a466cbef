"""Decoding in memory against mlx-lm: the same weights in the same quantisation, on MLX's default device.

A random-weight Llama shape is converted to a q4 bundle, and quantised by mlx-lm's own classes in groups of 64
to 4 bits, in the type that our engine multiplies. Both continue one prompt greedily; rounds alternate. Prints
the median ratio of tokens per second, ends with one JSON line, and exits 0 if it is at least 0.95.

    python -m tests.benchmarks.compare.versus_mlx_lm [--shape small] [--context 64] [--tokens 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from ondevice.api import Model, load
from ondevice.backends.mlx import compute_type
from tests.benchmarks.lib.measure import decode_rate, machine, spread
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import LLAMA_7B, SMALL, TINY, huggingface_folder, random_tokens

SHAPES = {shape.name: shape for shape in (TINY, SMALL, LLAMA_7B)}
BAR = 0.95


def rival(folder: Path) -> Any:
    """mlx-lm's model of the checkpoint, quantised and evaluated."""
    model, _ = load_model(folder, lazy=True)
    model.set_dtype(compute_type())
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def our_rate(model: Model, prompt: list[int], count: int) -> float:
    """Tokens per second of a text's tokens from the second on."""
    times = [time.perf_counter() for _ in model.stream(tokens=prompt, max_tokens=count)]
    return decode_rate(times)


def their_rate(model: Any, prompt: list[int], count: int) -> float:
    """The same of mlx-lm's own loop, which asks for a token before it reads the last one."""
    times = [time.perf_counter() for _ in generate_step(mx.array(prompt), model, max_tokens=count)]
    return decode_rate(times)


def main() -> int:
    """Print the ratio and the JSON line; 0 if it reaches the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("build/bench"))
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--context", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape]
    folder = huggingface_folder(shape, args.workdir)
    bundle = bundle_folder(folder, args.workdir)
    theirs = rival(folder)
    prompt = random_tokens(args.context, shape.vocab_size)
    rates: dict[str, list[float]] = {"ondevice": [], "mlx-lm": []}
    with load(bundle, backend="mlx", speculation="off", memory_pressure="off") as ours:
        for number in range(args.rounds + 1):
            found = our_rate(ours, prompt, args.tokens), their_rate(theirs, prompt, args.tokens)
            if number:  # the first fills what is resident, and compiles
                for name, rate in zip(rates, found, strict=True):
                    rates[name].append(rate)
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    print(
        f"{shape.name}, {args.context} tokens of context, {mx.default_device()}: ondevice "
        f"{spread(rates['ondevice'])}, mlx-lm {spread(rates['mlx-lm'])} tokens/s; ratio {spread(ratios)}"
    )
    figures = {"shape": shape.name, "device": str(mx.default_device()), "rates": rates, "ratios": ratios}
    print(json.dumps(figures | machine()))
    return 0 if statistics.median(ratios) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
