"""A run that trains streams: seeded, resumable, saved at intervals. `recipe.streams` is its command line.

The folder of a run has `checkpoint.pt`, `log.jsonl` with the curve, and at the end `streams.npz`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipe import continuations
from recipe.frozen import Frozen
from recipe.multi_stream import MultiStreams, MultiStreamSizes
from recipe.pack import Batches, read_stream
from recipe.stream_loss import Batch, Judge, Mode

CHECKPOINT, LOG, ARRAYS = "checkpoint.pt", "log.jsonl", "streams.npz"
SAVE_SECONDS = 240.0
LOG_STEPS = 20


@dataclass(frozen=True)
class StreamTraining:
    """Settings of one run. Equal settings, seed and data give equal streams."""

    sizes: MultiStreamSizes = field(default_factory=MultiStreamSizes)
    mode: Mode = "lossless"
    steps: int = 2000
    windows: int = 4
    stride: int = 2
    """One of every `stride` positions has streams; it is drawn anew for every step."""
    learning_rate: float = 4e-3
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    continued_share: float = 0.65
    """Share of the windows that have the base's own replies. The others are true text."""
    masked_share: float = 0.5
    most_residency: int = 16
    seed: int = 1
    begun_with: str = ""
    """Name of the run whose streams this run began with, or "": shared mode starts from lossless streams."""

    def rate(self, step: int) -> float:
        """Learning rate of a step: a short rise, then half a cosine down to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


@dataclass
class Run:
    """A run in progress: everything that a checkpoint restores."""

    training: StreamTraining
    judge: Judge
    optimizer: torch.optim.AdamW
    batches: Batches
    continued: NDArray[np.uint16]
    """(n, T) windows with the base's own replies."""
    continued_drawn: int = 0
    step: int = 0

    def update(self) -> dict[str, float]:
        training = self.training
        loss, seen = self.judge.loss(self.draw())
        loss.backward()
        parameters = self.judge.streams.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.clip_norm, foreach=True)
        rate = training.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"loss": loss.item(), **seen, "norm": float(norm), "learning_rate": rate}

    def draw(self) -> Batch:
        """The next batch. It depends only on the seed, the step, and the windows drawn so far."""
        training = self.training
        rng = np.random.default_rng([training.seed, self.step])
        windows = [
            self._next_continued() if own else self.batches.draw(1)[0, :-1]
            for own in rng.random(training.windows) < training.continued_share
        ]
        ids = torch.from_numpy(np.stack(windows).astype(np.int64))
        cells = np.arange(0, ids.shape[1], training.stride)
        positions = cells + rng.integers(training.stride, size=(training.windows, len(cells)))
        lengths = rng.integers(1, training.most_residency + 1, size=training.windows)
        masked = rng.permutation(training.windows) < training.masked_share * training.windows
        return Batch(
            ids,
            torch.from_numpy(np.minimum(positions, ids.shape[1] - 1)),
            training.stride,
            tuple(int(length) for length in lengths * masked),
        )

    def _next_continued(self) -> NDArray[np.uint16]:
        epoch, index = divmod(self.continued_drawn, len(self.continued))
        order = np.random.default_rng([self.training.seed, 1 << 20, epoch]).permutation(len(self.continued))
        self.continued_drawn += 1
        window: NDArray[np.uint16] = self.continued[order[index]]
        return window

    def state(self) -> dict[str, Any]:
        return {
            "training": dataclasses.asdict(self.training),
            "streams": self.judge.streams.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "drawn": self.batches.drawn,
            "continued_drawn": self.continued_drawn,
            "step": self.step,
            "base": digest(self.judge.base),
        }


def run_folder(build: Path, name: str) -> Path:
    return build / "multi-stream" / name


def digest(base: Frozen) -> str:
    """sha256 (hex) of the base's embedding table, which identifies the base."""
    return hashlib.sha256(base.table.numpy().tobytes()).hexdigest()


def start(training: StreamTraining, base: Frozen, build: Path) -> Run:
    """A new run, at step 0."""
    torch.manual_seed(training.seed)
    streams = MultiStreams(base.shape, training.sizes)
    if training.begun_with:
        with np.load(run_folder(build, training.begun_with) / ARRAYS) as begun:
            streams.load_state_dict({name: torch.from_numpy(values) for name, values in begun.items()})
    text = {domain: read_stream(build, domain, "train") for domain in continuations.WANTED}
    batches = Batches(text, continuations.WANTED, base.shape.max_position_embeddings, training.seed)
    continued = continuations.read_groups(build)[0]
    optimizer = torch.optim.AdamW(
        streams.parameters(), lr=training.learning_rate, betas=training.betas, weight_decay=0.0, foreach=True
    )
    return Run(training, Judge(base, streams, training.mode), optimizer, batches, continued)


def resume(state: dict[str, Any], base: Frozen, build: Path) -> Run:
    """A run at the state of its checkpoint. Raises ValueError for a checkpoint of another base."""
    if state["base"] != digest(base):
        raise ValueError("the checkpoint is of streams for other weights; begin again with --fresh")
    run = start(training_of(state), base, build)
    run.judge.streams.load_state_dict(state["streams"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.batches.drawn = dict(state["drawn"])
    run.continued_drawn, run.step = state["continued_drawn"], state["step"]
    return run


def training_of(state: dict[str, Any]) -> StreamTraining:
    values = dict(state["training"])
    sizes = MultiStreamSizes(**values["sizes"])
    return StreamTraining(**(values | {"sizes": sizes, "betas": tuple(values["betas"])}))


def load_checkpoint(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / CHECKPOINT, weights_only=True)
    return state


def save_checkpoint(run: Run, folder: Path) -> None:
    partial = folder / f"{CHECKPOINT}.partial"
    torch.save(run.state(), partial)
    os.replace(partial, folder / CHECKPOINT)


def train(run: Run, folder: Path, minutes: float) -> Iterator[dict[str, Any]]:
    """Train to the end or for `minutes`, with saves at intervals. Yields and writes the lines of the log."""
    begun = saved = marked = time.monotonic()
    sums: dict[str, float] = {}
    since = 0
    with open(folder / LOG, "a", encoding="utf-8") as log:
        while run.step < run.training.steps and time.monotonic() - begun < 60 * minutes:
            for name, value in run.update().items():
                sums[name] = sums.get(name, 0.0) + value
            since += 1
            if run.step % LOG_STEPS == 0 or run.step == run.training.steps:
                entry: dict[str, Any] = {"step": run.step}
                entry |= {name: float(f"{value / since:.5g}") for name, value in sums.items()}
                entry["seconds_per_step"] = round((time.monotonic() - marked) / since, 3)
                log.write(json.dumps(entry) + "\n")
                log.flush()
                yield entry
                sums, since, marked = {}, 0, time.monotonic()
            if time.monotonic() - saved > SAVE_SECONDS:
                save_checkpoint(run, folder)
                saved = time.monotonic()
    save_checkpoint(run, folder)


def arrays(streams: MultiStreams) -> dict[str, NDArray[np.float32]]:
    """The arrays of a bundle's streams sidecar, by name."""
    return {name: value.detach().numpy().astype(np.float32) for name, value in streams.state_dict().items()}


def write_arrays(path: Path, streams: MultiStreams) -> None:
    partial = path.with_suffix(".partial.npz")
    values: dict[str, Any] = dict(arrays(streams))
    np.savez(partial, **values)
    os.replace(partial, path)


def forget_after(folder: Path, step: int) -> None:
    """Delete from the log the lines after `step`, the step of the checkpoint that the run resumes from."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    path.write_text("".join(kept), encoding="utf-8")
