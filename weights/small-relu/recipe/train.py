"""Training of the model: seeded, resumable, and as fast as two processor cores allow.

    python -m recipe.train --name small-relu --minutes 60

goes on from the run's checkpoint if there is one, and stops after an hour with a new checkpoint. `--decay`
ends a run early: its learning rate falls to zero from here on. The folder of a run has `checkpoint.pt`, and
`log.jsonl` with the curve: losses on held-out text by domain, and the share of zeros of every layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ondevice.units import usable_cores
from recipe.config import BUILD, MIXTURE, SIZES, Shape, Training
from recipe.model import Llama
from recipe.optimizer import Optimizer
from recipe.pack import Batches, held_out_windows, read_stream
from recipe.schedule import Penalty, Schedule

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
SAVE_SECONDS = 240.0
LOG_STEPS, EVALUATE_STEPS = 20, 200
CURVE_WINDOWS = 16
"""Held-out windows per domain in the curve; `recipe.evaluate` uses more."""


@dataclass
class Run:
    """A run in progress: everything that a checkpoint restores."""

    training: Training
    model: Llama
    optimizer: Optimizer
    batches: Batches
    schedule: Schedule
    penalty: Penalty
    step: int = 0
    """Number of updates so far."""

    def update(self) -> dict[str, float]:
        """Take one step. Returns its stats by name."""
        training = self.training
        passes = training.batch_windows // training.micro_windows
        weight = self.penalty.weight if training.penalty else 0.0
        if training.shape.num_experts:
            weight = training.balance
        loss_sum, zeros_sum, penalised_sum = 0.0, 0.0, 0.0
        for windows in torch.from_numpy(self.batches.draw(training.batch_windows)).chunk(passes):
            loss, seen = self.model.loss(windows, self.schedule.bits(self.step))
            ((loss + weight * seen[:, 1].mean()) / passes).backward()
            loss_sum += loss.item() / passes
            zeros_sum += seen[:, 0].mean().item() / passes
            penalised_sum += seen[:, 1].mean().item() / passes
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip_norm, foreach=True)
        rate = self.schedule.learning_rate(self.step)
        self.optimizer.step(rate)
        self.model.zero_grad(set_to_none=True)
        if training.penalty:
            self.penalty.observe(zeros_sum, self.step, self.schedule.steps)
        self.step += 1
        return {
            "loss": loss_sum,
            "zeros": zeros_sum,
            "norm": float(norm),
            "learning_rate": rate,
            "penalty": weight,
            "penalised": penalised_sum,
        }

    def state(self) -> dict[str, Any]:
        return {
            "training": dataclasses.asdict(self.training),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "drawn": self.batches.drawn,
            "decay": [self.schedule.decay_from, self.schedule.decay_steps],
            "penalty": [self.penalty.weight, self.penalty.zeros],
            "step": self.step,
        }


def start(training: Training, build: Path) -> Run:
    """A new run, at step 0."""
    torch.manual_seed(training.seed)
    model = Llama(training.shape)
    context = training.shape.max_position_embeddings
    streams = {domain: read_stream(build, domain, "train") for domain in MIXTURE}
    batches = Batches(streams, MIXTURE, context, training.seed)
    optimizer = Optimizer(model, training.weight_decay)
    return Run(training, model, optimizer, batches, Schedule.of(training), Penalty(training))


def resume(state: dict[str, Any], build: Path) -> Run:
    """A run at the state of its checkpoint."""
    run = start(training_of(state), build)
    run.model.load_state_dict(state["model"])
    run.optimizer.load(state["optimizer"])
    run.batches.drawn = dict(state["drawn"])
    run.schedule.decay_from, run.schedule.decay_steps = state["decay"]
    run.penalty.weight, run.penalty.zeros = state["penalty"]
    run.step = state["step"]
    return run


def training_of(state: dict[str, Any]) -> Training:
    values = dict(state["training"])
    return Training(**(values | {"shape": Shape(**values["shape"])}))


def load_checkpoint(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
    return state


def save_checkpoint(run: Run, folder: Path) -> None:
    partial = folder / f"{CHECKPOINT}.partial"
    torch.save(run.state(), partial)
    os.replace(partial, folder / CHECKPOINT)


def held_out_losses(model: Llama, ids: Tensor, batch: int = 8) -> tuple[Tensor, Tensor]:
    """(n, T - 1) losses in nats of the predicted tokens of (n, T) windows, and each layer's zeros (L,)."""
    losses, zeros = [], []
    with torch.no_grad():
        for part in ids.split(batch):
            logits, seen = model.logits_and_gates(part)
            chances = logits[:, :-1].log_softmax(-1)
            losses.append(-chances.gather(2, part[:, 1:, None]).squeeze(2))
            zeros.append(seen[:, 0] * len(part))
    return torch.cat(losses), torch.stack(zeros).sum(0) / len(ids)


def curve_point(run: Run, build: Path) -> dict[str, Any]:
    """Held-out loss (nats per token) by domain, and zeros by layer, mean over domains."""
    context = run.training.shape.max_position_embeddings
    losses, zeros = {}, []
    for domain in MIXTURE:
        ids = torch.from_numpy(held_out_windows(build, domain, context, CURVE_WINDOWS))
        found, layers = held_out_losses(run.model, ids)
        losses[domain] = round(found.mean().item(), 5)
        zeros.append(layers)
    by_layer = [round(share, 4) for share in torch.stack(zeros).mean(0).tolist()]
    return {"held_out": losses, "zeros_by_layer": by_layer}


def train(run: Run, build: Path, folder: Path, minutes: float) -> Iterator[dict[str, Any]]:
    """Train to the end or for `minutes`, with saves at intervals. Yields and writes the lines of the log."""
    begun = saved = marked = time.monotonic()
    marked_step = run.step
    with open(folder / LOG, "a", encoding="utf-8") as log:

        def line(values: dict[str, Any]) -> dict[str, Any]:
            entry = {"step": run.step, "tokens": run.step * run.training.batch_tokens, **values}
            log.write(json.dumps(entry) + "\n")
            log.flush()
            return entry

        while run.step < run.schedule.steps and time.monotonic() - begun < 60 * minutes:
            seen = run.update()
            if run.step % LOG_STEPS == 0 or run.step == run.schedule.steps:
                tokens = (run.step - marked_step) * run.training.batch_tokens
                speed = round(tokens / (time.monotonic() - marked))
                yield line(
                    {name: float(f"{value:.6g}") for name, value in seen.items()}
                    | {"tokens_per_second": speed}
                )
            if run.step % EVALUATE_STEPS == 0 or run.step == run.schedule.steps:
                yield line(curve_point(run, build))
            if run.step % LOG_STEPS == 0:
                marked, marked_step = time.monotonic(), run.step
            if time.monotonic() - saved > SAVE_SECONDS:
                save_checkpoint(run, folder)
                saved = time.monotonic()
    save_checkpoint(run, folder)


def forget_after(folder: Path, step: int) -> None:
    """Delete from the log the lines after `step`, the step of the checkpoint that the run resumes from."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    # A last line without a newline is incomplete: the run was killed while it wrote the line.
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")


def _chosen(arguments: argparse.Namespace, training: Training) -> Training:
    """`training` with the settings of the command line."""
    shape = SIZES[arguments.size] if arguments.size else training.shape
    activation = arguments.act or shape.hidden_act
    penalty = training.penalty if arguments.penalty is None else bool(arguments.penalty)
    names = ("tokens", "seed", "learning_rate", "target_zeros", "batch_windows", "micro_windows")
    given = {name: getattr(arguments, name) for name in names}
    return dataclasses.replace(
        training,
        shape=dataclasses.replace(shape, hidden_act=activation),
        penalty=penalty and activation == "relu",
        **{name: value for name, value in given.items() if value is not None},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model, or go on with it.")
    parser.add_argument("--name", default="small-relu", help="the run's folder under BUILD/runs")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the token streams are")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--act", choices=("relu", "silu"), help="the gates' activation")
    parser.add_argument("--penalty", type=int, choices=(0, 1), help="0: ask for no zeros")
    parser.add_argument("--target-zeros", type=float)
    parser.add_argument("--tokens", type=int, help="length of the whole run")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--batch-windows", type=int, help="windows of an update")
    parser.add_argument("--micro-windows", type=int, help="windows of a forward and backward pass")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall from here on")
    parser.add_argument("--fresh", action="store_true", help="begin again even if there is a checkpoint")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--no-compile", action="store_true", help="for a machine without a C++ compiler")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = arguments.build / "runs" / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CHECKPOINT).exists() and not arguments.fresh:
        state = load_checkpoint(folder)
        if _chosen(arguments, training_of(state)) != training_of(state):
            parser.error(
                f"the run in {folder} has other settings; leave them out, or begin again with --fresh"
            )
        run = resume(state, arguments.build)
    else:
        run = start(_chosen(arguments, Training()), arguments.build)
    forget_after(folder, run.step)
    if arguments.decay:
        run.schedule.decay_now(run.step)
    if not arguments.no_compile:
        run.model.compile()
    for entry in train(run, arguments.build, folder, arguments.minutes):
        print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
