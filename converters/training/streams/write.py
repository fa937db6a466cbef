"""Adds stream adapters to a finished bundle: checks, quantises and writes them, however they were trained.

The format is in `ondevice/bundle/streams.py`. All quantised adapters are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.bundle.file_layouts import tensors_layout
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.bundle.streams import (
    EMBEDDINGS,
    STREAMS_SIDECAR,
    MultiStreamMode,
    MultiStreams,
    check_streams,
    stream_tensors,
    streams_text,
)
from ondevice.converters.quantize import quantize
from ondevice.converters.training.sidecars import save_sidecar, write_tensors
from ondevice.errors import BundleError, CheckpointError
from ondevice.kernels import _native
from ondevice.model_config import ModelConfig
from ondevice.units import usable_cores


def write_streams(
    folder: str | Path,
    arrays: Mapping[str, Float32],
    *,
    mode: MultiStreamMode,
    bits: Literal[4, 8, 16],
    streams: int,
    first_layer: int,
    attention_rank: int,
    feed_forward_rank: int,
    trained_tokens: int = 0,
    measured_tokens: int = 0,
    acceptance: Sequence[float] | None = None,
) -> MultiStreams:
    """Add streams to the bundle in `folder`; older ones are replaced.

    arrays: float32, under the names of the specification. Matrices (`layers.{i}.qkv.down` ...) have their
    logical shapes and aren't quantised. acceptance: acceptance rate of each stream; None writes zeros. The
    other arguments are those of `MultiStreams`.

    Raises, before anything is changed, what `Bundle.open` raises, BundleError for a fact out of range, and
    CheckpointError for an array that is missing, unknown, of another type or shape, or not finite. Raises
    OndeviceError if the disk has no room.
    """
    bundle = Bundle.open(folder)
    facts = MultiStreams(
        model=weights_digest(bundle.manifest),
        mode=mode,
        bits=bits,
        streams=streams,
        first_layer=first_layer,
        attention_rank=attention_rank,
        feed_forward_rank=feed_forward_rank,
        trained_tokens=trained_tokens,
        measured_tokens=measured_tokens,
        acceptance=(0.0,) * streams if acceptance is None else tuple(map(float, acceptance)),
        sha256="0" * 64,
        crcs=(),
    )
    _check_facts(facts, bundle.config)
    _check_arrays(facts, bundle.config, arrays)
    tensors = stream_tensors(bundle.config, facts)
    # Quantise everything first: if that fails, the older streams are still there.
    stored = list(_stored(facts, bundle.config, arrays))
    sha256, crcs = write_tensors(STREAMS_SIDECAR, tensors_layout(tensors), stored, bundle.path)
    written = replace(facts, sha256=sha256, crcs=crcs)
    save_streams(written, bundle.path)
    return written


def save_streams(streams: MultiStreams, folder: Path) -> None:
    """Write `streams.json` durably. This must be the last step, because it makes the streams part of the
    bundle.
    """
    save_sidecar(STREAMS_SIDECAR, streams_text(streams), folder)


def _check_facts(facts: MultiStreams, config: ModelConfig) -> None:
    """Check the facts. Raises BundleError for those that no reader would accept."""
    if not all(0.0 <= share <= 1.0 for share in facts.acceptance):
        raise BundleError(f"acceptance is {facts.acceptance}; it must be shares from 0 to 1, one per stream")
    check_streams(facts, config)


def _check_arrays(facts: MultiStreams, config: ModelConfig, arrays: Mapping[str, Float32]) -> None:
    """Check the arrays. Raises CheckpointError for the first one that doesn't match the specification."""
    shapes = {EMBEDDINGS: (facts.streams, config.hidden_size)} | facts.matrices(config)
    unknown = sorted(set(arrays) - set(shapes))
    if unknown:
        raise CheckpointError(f"streams have no array {unknown[0]!r}; leave it out")
    for name, shape in shapes.items():
        if name not in arrays:
            raise CheckpointError(f"streams lack the array {name!r} of shape {shape}")
        array = arrays[name]
        if array.dtype != np.float32 or array.shape != shape:
            raise CheckpointError(f"{name} is {array.dtype} {array.shape}; it must be float32 {shape}")
        if not np.isfinite(array).all():
            raise CheckpointError(f"{name} holds values that are not finite; train the streams again")


def _stored(
    facts: MultiStreams, config: ModelConfig, arrays: Mapping[str, Float32]
) -> Iterator[NDArray[np.generic]]:
    """Yields each tensor in its stored form, in the order of `stream_tensors`.

    Raises CheckpointError for values beyond float16.
    """
    runner = _native.Runner(usable_cores(), "auto")
    yield arrays[EMBEDDINGS].astype("<f4")
    for name in facts.matrices(config):
        rows = quantize(runner, np.ascontiguousarray(arrays[name]), facts.bits, name)
        affine = () if facts.bits == 16 else (rows.scales, rows.biases)
        yield from (rows.codes, *affine)
