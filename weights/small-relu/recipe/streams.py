"""Streams for a model, from text to arrays: continuations, training, arrays for the bundle, evaluation.

    python -m recipe.streams --model .. --name small-relu --steps 2000

makes the continuations that are missing, since streams learn from them, and goes on from the run's checkpoint
if there is one. At the end of the run it writes BUILD/multi-stream/NAME/streams.npz, writes the stats to
evaluation.json, and prints their table. `--write DIR` adds the streams to a bundle of the same weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from ondevice.converters.training.streams.write import write_streams
from recipe import continuations, stream_evaluation
from recipe.config import BUILD, CONTEXT, MODEL_FOLDER
from recipe.export import model_of_bundle
from recipe.frozen import Frozen
from recipe.multi_stream import MultiStreams, MultiStreamSizes
from recipe.precision import product_type
from recipe.stream_training import (
    ARRAYS,
    CHECKPOINT,
    StreamTraining,
    arrays,
    forget_after,
    load_checkpoint,
    resume,
    run_folder,
    start,
    train,
    training_of,
    write_arrays,
)

FIGURES = "evaluation.json"


def _chosen(arguments: argparse.Namespace, training: StreamTraining) -> StreamTraining:
    """`training` with the settings of the command line."""
    given = {
        field.name: getattr(arguments, field.name)
        for kind in (StreamTraining, MultiStreamSizes)
        for field in dataclasses.fields(kind)
        if getattr(arguments, field.name, None) is not None
    }
    names = {field.name for field in dataclasses.fields(MultiStreamSizes)}
    sizes = dataclasses.replace(training.sizes, **{name: given.pop(name) for name in names & set(given)})
    return dataclasses.replace(training, sizes=sizes, **given)


def write_sidecar(
    folder: Path, streams: MultiStreams, training: StreamTraining, found: dict[str, Any]
) -> None:
    """Add a finished run's streams to the bundle in `folder`.

    The acceptance rates are those of the replies of all chats together; novels have no replies.
    """
    sizes = training.sizes
    measured, acceptance = stream_evaluation.chat_acceptance(found)
    write_streams(
        folder,
        arrays(streams),
        mode=training.mode,
        bits=8,
        streams=sizes.gamma,
        first_layer=streams.first_layer,
        attention_rank=sizes.attention_rank,
        feed_forward_rank=sizes.feed_forward_rank,
        trained_tokens=training.steps * training.windows * CONTEXT // training.stride,
        measured_tokens=measured,
        acceptance=acceptance,
    )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train streams for a model, or go on with it.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a bundle of this recipe")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the token streams are")
    parser.add_argument("--write", type=Path, help="a bundle that gets the streams of the finished run")
    parser.add_argument("--name", default="small-relu", help="the run's folder under BUILD/multi-stream")
    parser.add_argument("--mode", choices=("lossless", "shared"))
    for name in ("steps", "windows", "stride", "seed", "layers", "gamma"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("attention-rank", "feed-forward-rank", "warmup-steps"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("learning-rate", "continued-share", "masked-share"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--groups", type=int, default=continuations.GROUPS, help="of continuations")
    parser.add_argument("--begun-with", metavar="NAME", help="begin with the streams of that finished run")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--fresh", action="store_true", help="begin again even if there is a checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="for a machine without a C++ compiler")
    return parser


def main() -> None:
    parser = _arguments()
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = run_folder(arguments.build, arguments.name)
    folder.mkdir(parents=True, exist_ok=True)
    for line in continuations.make(arguments.model, arguments.build, 0, 1, arguments.groups):
        print(json.dumps(line), flush=True)
    model = model_of_bundle(arguments.model)
    base = Frozen(model, product_type())
    if (folder / CHECKPOINT).exists() and not arguments.fresh:
        state = load_checkpoint(folder)
        if _chosen(arguments, training_of(state)) != training_of(state):
            parser.error(f"the run in {folder} has other settings: leave them out, or use --fresh")
        run = resume(state, base, arguments.build)
    else:
        run = start(_chosen(arguments, StreamTraining()), base, arguments.build)
    forget_after(folder, run.step)
    if not arguments.no_compile:
        run.judge.compile()
    for entry in train(run, folder, arguments.minutes):
        print(json.dumps(entry), flush=True)
    if run.step == run.training.steps:
        write_arrays(folder / ARRAYS, run.judge.streams)
        exact, shared = Frozen(model, torch.float32), run.training.mode == "shared"
        streams = run.judge.streams.requires_grad_(False)
        found = stream_evaluation.evaluate(exact, streams, shared, arguments.build, stream_evaluation.ROWS)
        (folder / FIGURES).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(stream_evaluation.table(found))
        if arguments.write:
            write_sidecar(arguments.write, streams, run.training, found)


if __name__ == "__main__":
    main()
