"""What a step of `ondevice train streams` takes at the 7B shape: peak memory and seconds, hours projected.

The last 4 of Llama-7B's 32 layers and its head, of random weights with ReLU gates, in a fresh process: what
enters these layers is random too, as if recorded before, and the layers below aren't in memory. A step of a
few windows of the length that the command cuts is measured, gradients and Adam's update; all steps are alike,
so those of a training are projected from it. Recording comes on top: one dense pass of the CPU backend over
the text (`train_predictors_step.py` measures such a pass).

MLX's wheel for Linux links the reference BLAS. Debian's libopenblas0-pthread is preloaded in its stead where
it is found (--blas has another, `none` the wheel's own), and the result says which it was. Ends with one JSON
line; exits 0 only if the peak stays below the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.streams import MultiStreams, medusa_parameters
from ondevice.converters.architectures.common import llama_config
from ondevice.units import usable_cores
from tests.benchmarks.lib.measure import machine, note, peak_memory_bytes
from tests.benchmarks.lib.random_model import LLAMA_7B, random_tokens

BOUND_BYTES = 8_000_000_000
STREAM_LAYERS = 4
CONFIG = llama_config(
    architecture="llama",
    hidden_size=LLAMA_7B.hidden_size,
    num_layers=LLAMA_7B.num_layers,
    num_heads=LLAMA_7B.num_heads,
    num_kv_heads=LLAMA_7B.num_heads,
    head_dim=LLAMA_7B.hidden_size // LLAMA_7B.num_heads,
    intermediate_size=LLAMA_7B.intermediate_size,
    vocab_size=LLAMA_7B.vocab_size,
    max_context=LLAMA_7B.max_context,
    hidden_act="relu",
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)


def facts(mode: Any) -> MultiStreams:
    """The streams that the command would train, but in STREAM_LAYERS layers."""
    from ondevice.converters.training.streams.options import MultiStreamOptions

    options = MultiStreamOptions(mode=mode)
    return MultiStreams(
        model="",
        mode=options.mode,
        bits=options.bits,
        streams=options.gamma,
        first_layer=CONFIG.num_layers - STREAM_LAYERS,
        attention_rank=options.attention_rank,
        feed_forward_rank=options.feed_forward_rank,
        pruning_rank=options.pruning_rank,
        trained_tokens=0,
        measured_tokens=0,
        acceptance=(0.0,) * options.gamma,
        sha256="",
        crcs=(),
    )


def random_top() -> Any:
    """The `TopLayers`: matrices of deviation 1 / sqrt(columns), so that values stay of one size."""
    import mlx.core as mx

    from ondevice.backends.base import Norm
    from ondevice.backends.mlx_float import MlxFeedForward
    from ondevice.backends.mlx_ops import MlxLinear
    from ondevice.converters.training.streams.loss import TopLayers, top_config
    from ondevice.model.weights import LayerWeights, ModelWeights

    width, neurons = CONFIG.hidden_size, CONFIG.intermediate_size

    def matrix(rows: int, cols: int, fan_in: int) -> Any:
        made = mx.random.normal((rows, cols)) * fan_in**-0.5
        mx.eval(made)
        return made

    norm = Norm(mx.ones((width,)), CONFIG.norm.eps)
    layers = [
        LayerWeights(
            attention_norm=norm,
            qkv=MlxLinear(matrix(CONFIG.qkv_size, width, width), None),
            head_norms=None,
            out=MlxLinear(matrix(width, CONFIG.query_size, CONFIG.query_size), None),
            attention_output_norm=None,
            feed_forward_norm=norm,
            feed_forward=MlxFeedForward(*(matrix(neurons, width, fan) for fan in (width, width, neurons))),
            feed_forward_output_norm=None,
        )
        for _ in range(STREAM_LAYERS)
    ]
    head = MlxLinear(matrix(CONFIG.vocab_size, width, width), None)
    weights = ModelWeights(None, layers, norm, head)
    return TopLayers(top_config(CONFIG, CONFIG.num_layers - STREAM_LAYERS), weights)


def step(spec: dict[str, Any]) -> dict[str, Any]:
    """One step over `windows` windows, in this process."""
    import mlx.core as mx

    from ondevice.converters.training.streams.loss import Window
    from ondevice.converters.training.streams.options import MultiStreamOptions
    from ondevice.converters.training.streams.train import Training
    from ondevice.training import PIECE_TOKENS

    mx.set_default_device(mx.cpu)
    options = MultiStreamOptions(mode=spec["mode"])
    options = replace(options, steps=1, batch_tokens=spec["windows"] * options.run_tokens)
    top, streams = random_top(), facts(spec["mode"])
    tokens = random_tokens(PIECE_TOKENS, CONFIG.vocab_size)
    x = np.random.default_rng(1).standard_normal((len(tokens), CONFIG.hidden_size), np.float32)
    before = peak_memory_bytes()
    with tempfile.TemporaryDirectory(prefix="train-streams-") as folder:
        training = Training(streams, top, CONFIG, options, Path(folder) / "state")
        wall, processor = time.perf_counter(), time.process_time()
        loss = training.step([lambda: Window(tokens, mx.array(x))])
    return {
        "wall_seconds": time.perf_counter() - wall,
        "processor_seconds": time.process_time() - processor,
        "loss": loss,
        "loaded_bytes": before,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def preloaded(wanted: str | None) -> str | None:
    """The BLAS to preload, if there is one. Exits if it was asked for and isn't there."""
    if wanted == "none":
        return None
    if wanted is not None and not Path(wanted).is_file():
        raise SystemExit(f"there is no {wanted}")
    debian = sorted(Path("/usr/lib").glob("*-linux-gnu/openblas-pthread/libopenblas.so.0"))
    return wanted or (str(debian[0]) if debian else None)


def measured(spec: dict[str, Any], blas: str | None) -> dict[str, Any]:
    """What a fresh process says of one step."""
    preload = [] if blas is None else [blas]
    environment = os.environ | {"LD_PRELOAD": ":".join([*preload, *os.environ.get("LD_PRELOAD", "").split()])}
    done = subprocess.run(
        [sys.executable, __file__, "--step", json.dumps(spec)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"the step ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    note(f"{spec}: {found}")
    return found


def projected(mode: str, windows: int, tokens: int | None, row: dict[str, Any]) -> dict[str, Any]:
    """Hours for `tokens`, or as many as the default options train, and what was trained."""
    from ondevice.converters.training.streams.options import MultiStreamOptions

    options, streams = MultiStreamOptions(), facts(mode)
    tokens = tokens or options.steps * options.windows * options.run_tokens
    trained = windows * options.run_tokens
    clocks = ("wall", "processor")
    return {
        "mode": mode,
        "layers": STREAM_LAYERS,
        "cores": usable_cores(),
        "windows": windows,
        "trained_tokens": trained,
        "projected_tokens": tokens,
        "hours": {clock: row[f"{clock}_seconds"] / trained * tokens / 3600 for clock in clocks},
        "adapter_parameters": streams.adapter_parameters(CONFIG),
        "embedding_parameters": streams.embedding_parameters(CONFIG),
        "medusa_parameters": medusa_parameters(CONFIG, streams.streams),
    }


def table(row: dict[str, Any]) -> str:
    """What a reader wants to know."""
    parameters = row["adapter_parameters"] + row["embedding_parameters"]
    return "\n".join(
        [
            f"{row['mode']}, {STREAM_LAYERS} of {CONFIG.num_layers} layers, {parameters:,} parameters; "
            f"{row['cores']} cores, BLAS {row['blas']}",
            f"peak {row['peak_memory_bytes'] / 1e6:.0f} MB; before, {row['loaded_bytes'] / 1e6:.0f} MB",
            f"{row['windows']} windows, {row['trained_tokens']} tokens with their streams: "
            f"{row['wall_seconds']:.1f} s, {row['processor_seconds']:.1f} s of processor time",
            f"{row['projected_tokens']} tokens: {row['hours']['wall']:.1f} hours, "
            f"{row['hours']['processor']:.1f} of processor time",
        ]
    )


def main() -> int:
    """0 if a step stays within the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4, help="of the measured step")
    parser.add_argument("--mode", choices=("lossless", "shared"), default="lossless")
    parser.add_argument("--tokens", type=int, help="to project for; by default, those of the default options")
    parser.add_argument("--blas", help="a library to preload, or none")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step is not None:
        print(json.dumps(step(json.loads(args.step))))
        return 0
    blas = preloaded(args.blas)
    row = measured({"mode": args.mode, "windows": args.windows}, blas)
    row |= projected(args.mode, args.windows, args.tokens, row) | {"blas": blas or "of the wheel"}
    passed = row["peak_memory_bytes"] < BOUND_BYTES
    print(table(row))
    summary = {"benchmark": "train_streams_step", "passed": passed, "machine": machine()}
    print(json.dumps(summary | {"bound_bytes": BOUND_BYTES} | row))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
