"""Trains streams for a finished bundle: records the inputs of their layers, fits adapters, measures and
writes them.

The loss is in `loss.py`, the format in `ondevice/bundle/streams.py`. The state of a training is kept in a
separate folder, so that a stopped training can continue. Its numbers are then the same as without the stop.
Memory: the layers that have streams and the head in float32, and one window's gradients. The inputs are on
disk.

Legend: N tokens, D hidden size, S streams.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import optimizers
from numpy.random import Generator
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ondevice.backends.base import Float32
from ondevice.bundle.files import disk_errors, temporary_path, write_durably
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.streams import MultiStreams
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.converters.training.activations import record_entering
from ondevice.converters.training.sidecars import check_streams_possible, held_out
from ondevice.converters.training.streams.loss import (
    TopLayers,
    TrainingWindow,
    acceptance,
    initial_parameters,
    load_top,
    right_draft_tokens,
    stored_parameters,
    stream_loss,
)
from ondevice.converters.training.streams.options import (
    MAX_STREAM_LAYERS,
    RESIDENT_PARTS,
    MultiStreamOptions,
)
from ondevice.converters.training.streams.write import write_streams
from ondevice.errors import OndeviceError, UsageError
from ondevice.model_config import ModelConfig

WARM_UP_SHARE = 0.05
"""Share of the steps in which the learning rate rises, before it falls as a cosine."""
MAX_GRADIENT_NORM = 1.0
"""Largest norm of all gradients; larger ones are clipped."""
MAX_RESIDENT_TOKENS = RESIDENT_PARTS
"""Most recent tokens whose neurons streams are trained with; without ReLU, as many parts of a layer."""
METHOD = 3
"""Version of the training. It changes whenever the same arguments would give other numbers."""
SAVE_SECONDS = 60.0
LAYER_INPUTS, STATE, IDENTITY = "layer_inputs.f32", "state.safetensors", "training.json"
_WRITTEN_FACTS = ("model", "sha256", "crcs", "begins", "part_of")
_REMEDY = "make room, or choose another --output"

OnStep = Callable[[int, float], None]
"""Called after each step with the number of tokens whose streams were trained so far, and the loss in
nats."""
Pieces = Sequence[Sequence[int]]
ReadWindow = Callable[[], TrainingWindow]


@dataclass(frozen=True)
class TrainedMultiStreams:
    """Trained adapters.

    facts: description of the streams, without checksums. arrays: float32, by the names in
    `streams.safetensors`.
    """

    facts: MultiStreams
    arrays: Mapping[str, Float32]

    def write(self, folder: Path) -> MultiStreams:
        """Add the adapters to the bundle in `folder`. Raises what `write_streams` raises."""
        facts = {name: value for name, value in vars(self.facts).items() if name not in _WRITTEN_FACTS}
        return write_streams(folder, self.arrays, **facts)


def check(bundle: Bundle, pieces: Pieces, options: MultiStreamOptions) -> Pieces:
    """The pieces used only for measuring: the last ones, at least one and never all.

    Raises UsageError if the text is too short, or for more stream layers than the model has,
    UnsupportedModelError for a model that can't have streams.
    """
    check_streams_possible(bundle)
    if options.layers > bundle.config.num_layers:
        raise UsageError(f"layers is {options.layers}; {bundle.name} has {bundle.config.num_layers}")
    measured = held_out(pieces)
    trained = pieces[: len(pieces) - len(measured)]
    if not all(any(_long_enough(piece, options) for piece in some) for some in (trained, measured)):
        least = options.gamma + 2
        raise UsageError(f"all pieces of the text are shorter than {least} tokens; give it longer ones")
    return measured


def train_streams(
    bundle: Bundle,
    pieces: Pieces,
    folder: Path,
    options: MultiStreamOptions,
    on_progress: OnProgress = ignore_progress,
    on_step: OnStep = lambda tokens, loss: None,
) -> TrainedMultiStreams:
    """Train streams for `bundle`, and measure them as they will be stored.

    The last MEASURED_SHARE of the pieces is used only for measuring.

    Args:
        bundle: the model.
        pieces: token ids of the text.
        folder: keeps the state of the training. A second call with the same arguments goes on from there. The
            folder is not deleted.
        options: the shape of the streams, and how they are trained.
        on_progress: gets the share done and what is being done.
        on_step: gets the tokens and loss after each step.

    Raises what `check` raises. Raises UsageError if `folder` belongs to another training. Raises
    OndeviceError if the disk has no room, another process trains there, or the loss isn't finite. Raises
    FlashReadError.
    """
    measured = check(bundle, pieces, options)
    facts = _facts(bundle, pieces, measured, options)
    with _claimed(folder, _identity(bundle, pieces, options)):
        total = sum(len(piece) for piece in pieces)
        record_entering(
            bundle,
            pieces,
            folder / LAYER_INPUTS,
            facts.first_layer,
            lambda tokens: on_progress(0.1 * tokens / total, f"hidden states of {tokens} of {total} tokens"),
        )
        top = load_top(bundle, facts.first_layer)
        windows = _windows(pieces, folder / LAYER_INPUTS, bundle.config.hidden_size, options)
        trained = len(pieces) - len(measured)
        training = StreamTraining(facts, top, bundle.config, options, folder / STATE)
        training.run([window for index, window in windows if index < trained], on_progress, on_step)
        on_progress(0.95, "acceptance")
        arrays = {name: np.array(values) for name, values in training.parameters.items()}
        model = top.model(stored_parameters(arrays, facts.bits), facts)
        right = [right_draft_tokens(model, window()) for index, window in windows if index >= trained]
    on_progress(1.0, "trained")
    facts = replace(facts, acceptance=acceptance(right))
    return TrainedMultiStreams(facts, arrays)


def forget(folder: Path) -> None:
    """Delete the folder of a finished training with its state. Raises OndeviceError if the disk refuses."""
    with disk_errors(folder, "delete it yourself"):
        for name in (STATE, LAYER_INPUTS, IDENTITY):
            for path in (folder / name, temporary_path(folder / name)):
                path.unlink(missing_ok=True)
        folder.rmdir()


def _facts(bundle: Bundle, pieces: Pieces, measured: Pieces, options: MultiStreamOptions) -> MultiStreams:
    """The shape of the streams, and the sizes of the text. `acceptance` and checksums are placeholders."""
    config = bundle.config
    layers = options.layers or min(MAX_STREAM_LAYERS, max(1, config.num_layers // 2))
    measured_tokens = sum(len(piece) for piece in measured)
    facts = MultiStreams(
        model=weights_digest(bundle.manifest),
        mode=options.mode,
        bits=options.bits,
        streams=options.gamma,
        first_layer=config.num_layers - layers,
        attention_rank=options.attention_rank,
        feed_forward_rank=options.feed_forward_rank,
        trained_tokens=sum(len(piece) for piece in pieces) - measured_tokens,
        measured_tokens=measured_tokens,
        acceptance=(0.0,) * options.gamma,
        sha256="",
        crcs=(),
    )
    factor = options.most_of_model * bundle.parameters / facts.adapter_parameters(config)
    if factor >= 1.0:
        return facts
    ranks = (max(1, int(factor * rank)) for rank in (options.attention_rank, options.feed_forward_rank))
    attention_rank, feed_forward_rank = ranks
    return replace(facts, attention_rank=attention_rank, feed_forward_rank=feed_forward_rank)


def _identity(bundle: Bundle, pieces: Pieces, options: MultiStreamOptions) -> bytes:
    """Bytes that identify a training. It continues only if model, text and options are the same."""
    text = hashlib.sha256()
    for piece in pieces:
        text.update(len(piece).to_bytes(8, "little") + np.array(piece, dtype="<i8").tobytes())
    content = {"model": weights_digest(bundle.manifest), "text": text.hexdigest(), "method": METHOD}
    content |= {"options": asdict(options)}
    return json.dumps(content, sort_keys=True, indent=1).encode()


@contextmanager
def _claimed(folder: Path, identity: bytes) -> Iterator[None]:
    """A context in which only this process uses the training's folder, which is made if it doesn't exist.

    Raises UsageError if it belongs to another training, OndeviceError if the disk refuses or another process
    trains there.
    """
    with disk_errors(folder, "choose an --output that you may write beside"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with disk_errors(folder, "another process trains there: wait for it, or stop it"):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = folder / IDENTITY
        if not path.exists():
            with disk_errors(path, _REMEDY):
                write_durably(path, identity)
        elif path.read_bytes() != identity:
            raise UsageError(
                f"{folder} holds an unfinished training of another model, another text or other options; "
                "go on with these, delete it, or choose another --output"
            )
        yield
    finally:
        os.close(descriptor)


def _long_enough(piece: Sequence[int], options: MultiStreamOptions) -> bool:
    """Whether a piece is long enough: it must contain all tokens that the streams of at least one token
    draft.
    """
    return len(piece) >= options.gamma + 2


def _windows(
    pieces: Pieces, layer_inputs: Path, hidden_size: int, options: MultiStreamOptions
) -> list[tuple[int, ReadWindow]]:
    """The index and the reader of each piece that is long enough. A reader loads the window when it is
    called.
    """
    values = np.memmap(layer_inputs, np.float32, "r").reshape(-1, hidden_size)
    starts = np.cumsum([0, *(len(piece) for piece in pieces)])

    def read(index: int) -> TrainingWindow:
        rows = values[starts[index] : starts[index + 1]]
        return TrainingWindow(pieces[index], mx.array(np.array(rows)))

    return [(i, partial(read, i)) for i, piece in enumerate(pieces) if _long_enough(piece, options)]


class StreamTraining:
    """The parameters and Adam's moments (arXiv 1412.6980), which are moved step by step and saved every
    SAVE_SECONDS.
    """

    def __init__(
        self,
        facts: MultiStreams,
        top: TopLayers,
        config: ModelConfig,
        options: MultiStreamOptions,
        path: Path,
    ) -> None:
        """path: the file of the saved state. If an earlier run has left one, training continues
        from there.
        """
        self._facts, self._top, self._options, self._path = facts, top, options, path
        self._zeros_gates = config.zeros_gates
        self._adam = optimizers.Adam(options.learning_rate, betas=[0.9, 0.95], bias_correction=True)
        self.parameters = initial_parameters(facts, config, options.seed)
        self._adam.init(self.parameters)
        self._step = self._tokens = 0
        if path.exists():
            self._restore()

    def run(self, windows: Sequence[ReadWindow], on_progress: OnProgress, on_step: OnStep) -> None:
        """Take all remaining steps."""
        steps, saved = self._options.steps, time.monotonic()
        while self._step < steps:
            loss = self.step(windows)
            if time.monotonic() - saved >= SAVE_SECONDS or self._step == steps:
                self._save()
                saved = time.monotonic()
            on_step(self._tokens, loss)
            what = f"step {self._step} of {steps}, {self._tokens} tokens, loss {loss:.3f}"
            on_progress(0.1 + 0.85 * self._step / steps, what)

    def step(self, windows: Sequence[ReadWindow]) -> float:
        """Take one step. Returns the mean loss of its windows before the parameters move.

        Raises OndeviceError if the loss isn't finite.
        """
        options = self._options
        rng = np.random.default_rng([options.seed, 1, self._step])
        total, sums = 0.0, dict[str, Any]()
        for number in range(self._step * options.windows, (self._step + 1) * options.windows):
            epoch, place = divmod(number, len(windows))
            order = np.random.default_rng([options.seed, 2, epoch]).permutation(len(windows))
            loss, gradients = self._gradients(windows[order[place]](), rng)
            total += loss
            sums = {name: sums[name] + array if sums else array for name, array in gradients.items()}
            mx.eval(sums)
        loss = total / options.windows
        if not math.isfinite(loss):
            raise OndeviceError(
                f"the loss is {loss} at step {self._step} with a learning rate of {options.learning_rate}; "
                "choose a lower one"
            )
        means = {name: array / options.windows for name, array in sums.items()}
        means, _ = optimizers.clip_grad_norm(means, MAX_GRADIENT_NORM)
        self._adam.learning_rate = learning_rate(options, self._step)
        self.parameters = self._adam.apply_gradients(means, self.parameters)
        mx.eval(self.parameters, self._adam.state)
        self._step += 1
        return loss

    def _gradients(self, window: TrainingWindow, rng: Generator) -> tuple[float, dict[str, Any]]:
        """The loss of a random run of the window, and its gradients by parameter."""
        count = self._facts.streams
        length = len(window.tokens) - count - 1
        tokens = min(self._options.run_tokens, length)
        start = int(rng.integers(length - tokens + 1))
        # Both are drawn for every model, so that a seed gives the same runs whatever the model.
        masked, drawn = rng.random() < 0.5, int(rng.integers(1, MAX_RESIDENT_TOKENS + 1))
        resident = {}
        if masked and self._zeros_gates:
            resident = {"resident_tokens": drawn}
        elif masked:
            resident = {"resident_parts": drawn}
        loss, gradients = mx.value_and_grad(stream_loss)(
            self.parameters,
            self._facts,
            self._top,
            window,
            range(start, start + tokens),
            **resident,
        )
        mx.eval(loss, gradients)
        self._tokens += tokens
        return float(loss.item()), gradients

    def _state(self) -> dict[str, NDArray[Any]]:
        """All arrays that determine the remaining training, by name."""
        state = self._adam.state
        arrays = {f"parameter/{name}": np.array(values) for name, values in self.parameters.items()}
        for moment in ("m", "v"):
            arrays |= {f"{moment}/{name}": np.array(state[name][moment]) for name in self.parameters}
        return arrays | {"counts": np.array([self._step, self._tokens], dtype=np.int64)}

    def _save(self) -> None:
        with disk_errors(self._path, _REMEDY):
            write_durably(self._path, save(self._state()))

    def _restore(self) -> None:
        """Load the saved state. Raises OndeviceError for a file that isn't the state of such a training."""
        try:
            arrays, state = load(self._path.read_bytes()), self._state()
            for name in sorted(state.keys() | arrays.keys()):
                stored, expected = _kind(arrays.get(name)), _kind(state.get(name))
                if stored != expected:
                    raise ValueError(f"{name} is {stored}; it must be {expected}")
            step, tokens = (int(count) for count in arrays["counts"])
            if not 0 <= step <= self._options.steps or tokens < 0:
                raise ValueError(f"it is at step {step} of {self._options.steps}, after {tokens} tokens")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise OndeviceError(
                f"{self._path} can't be gone on from: {error}; delete {self._path.parent} to start again"
            ) from error
        self._step, self._tokens = step, tokens
        self.parameters = {name: mx.array(arrays[f"parameter/{name}"]) for name in self.parameters}
        for name in self.parameters:
            self._adam.state[name] = {moment: mx.array(arrays[f"{moment}/{name}"]) for moment in ("m", "v")}
        self._adam.state["step"] = mx.array(step, mx.uint64)


def _kind(array: NDArray[Any] | None) -> str:
    """The type and the shape of a saved array, to be compared with the expected ones, or "missing"."""
    return "missing" if array is None else f"{array.dtype} {array.shape}"


def learning_rate(options: MultiStreamOptions, step: int) -> float:
    """The learning rate of a step, counted from 0: first it rises, then it falls to zero as half a cosine."""
    rise = max(1.0, WARM_UP_SHARE * options.steps)
    fall = 0.5 * (1.0 + math.cos(math.pi * step / options.steps))
    return options.learning_rate * min(1.0, (step + 1) / rise) * fall
