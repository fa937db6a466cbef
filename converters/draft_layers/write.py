"""Adds a draft layer to a finished bundle: checks, quantises and writes it, whatever its source.

The format is in `ondevice/bundle/draft_layers.py`. All quantised matrices are in memory at once. Experts are
read one by one when they are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.draft_layers import (
    EMBEDDINGS,
    ROUTER_BITS,
    TOKENS,
    DraftLayer,
    check_draft_layer,
    draft_layer_layout,
    draft_layer_text,
)
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.config import Bits
from ondevice.converters.quantize import Weights, quantize
from ondevice.converters.training.sidecars import save_sidecar, write_tensors
from ondevice.errors import BundleError, CheckpointError, UnsupportedModelError
from ondevice.kernels import _native
from ondevice.model_config import ModelConfig
from ondevice.units import usable_cores


@dataclass(frozen=True)
class Pieces:
    """A matrix of `shape`, whose pieces, one below the other, are read only when they are quantised."""

    shape: tuple[int, int]
    reads: tuple[Callable[[], Weights], ...]


def check_draft_layers_possible(bundle: Bundle) -> None:
    """Check that draft layers can read the model's hidden states. Raises UnsupportedModelError if not."""
    if bundle.config.residual_copies > 1:
        raise UnsupportedModelError(
            f"{bundle.name} can't have a draft layer: it has {bundle.config.residual_copies} copies of the "
            "residual, and a draft layer reads one"
        )


def write_draft_layer(
    folder: str | Path, layer: DraftLayer, arrays: Mapping[str, Weights | Pieces]
) -> DraftLayer:
    """Add a draft layer to the bundle in `folder`; an older one of its kind is replaced.

    layer: its description; `model`, `sha256` and `crcs` are filled in here. arrays: by the names of the
    specification. Matrices have their logical shapes, in a checkpoint's types, and aren't quantised; vectors
    are float32; `tokens` are int64, ascending.

    Raises, before anything is changed, what `Bundle.open` raises, BundleError for a fact out of range,
    UnsupportedModelError for a model that can't have one, and CheckpointError for an array that is missing,
    unknown, of another shape, or not finite. Raises OndeviceError if the disk has no room.
    """
    bundle = Bundle.open(folder)
    check_draft_layers_possible(bundle)
    layer = replace(layer, model=weights_digest(bundle.manifest), sha256="0" * 64, crcs=())
    check_draft_layer(layer, bundle.config)
    _check_arrays(layer, bundle.config, arrays)
    # Quantise everything first: if that fails, the older layer is still there.
    stored = list(_stored(layer, bundle.config, arrays))
    layout = draft_layer_layout(layer, bundle.config)
    sha256, crcs = write_tensors(layer.sidecar, layout, stored, bundle.path)
    written = replace(layer, sha256=sha256, crcs=crcs)
    save_sidecar(layer.sidecar, draft_layer_text(written), bundle.path)
    return written


def _check_arrays(layer: DraftLayer, target: ModelConfig, arrays: Mapping[str, Weights | Pieces]) -> None:
    """Check the arrays. Raises CheckpointError for the first one that doesn't match the specification."""
    vectors = layer.vectors(target)
    shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in vectors.items()}
    shapes |= {name: matrix.shape for name, matrix in layer.matrices(target).items()}
    if layer.own_head:
        shapes[TOKENS] = (layer.tokens,)
    if layer.table_width:
        shapes[EMBEDDINGS] = (target.vocab_size, layer.table_width)
    unknown = sorted(set(arrays) - set(shapes))
    if unknown:
        raise CheckpointError(f"a draft layer has no array {unknown[0]!r}; leave it out")
    for name, shape in shapes.items():
        if name not in arrays:
            raise CheckpointError(f"the draft layer lacks the array {name!r} of shape {shape}")
        if arrays[name].shape != shape:
            raise CheckpointError(f"{name} has shape {arrays[name].shape}; it must be {shape}")
        if name in vectors and not np.isfinite(_array(arrays, name)).all():
            raise CheckpointError(f"{name} holds values that are not finite; take another draft layer")
    if layer.own_head:
        tokens = _array(arrays, TOKENS)
        if tokens[0] < 0 or tokens[-1] >= target.vocab_size or (np.diff(tokens) <= 0).any():
            raise CheckpointError(f"tokens aren't ascending ids from 0 to {target.vocab_size - 1}")


def _array(arrays: Mapping[str, Weights | Pieces], name: str) -> Weights:
    """The array `name`, which must not be given in pieces."""
    array = arrays[name]
    assert not isinstance(array, Pieces)
    return array


def _stored(
    layer: DraftLayer, target: ModelConfig, arrays: Mapping[str, Weights | Pieces]
) -> Iterator[NDArray[Any]]:
    """Each tensor as it is stored, in the order of `draft_layer_tensors`.

    Raises CheckpointError for values beyond float16.
    """
    runner = _native.Runner(usable_cores(), "auto")

    def matrix(name: str, bits: Bits) -> Iterator[NDArray[Any]]:
        source, columns, first = arrays[name], list[NDArray[Any]](), 0
        for read in source.reads if isinstance(source, Pieces) else (lambda: _array(arrays, name),):
            rows = quantize(runner, np.ascontiguousarray(read()), bits, name)
            parts = (rows.codes,) if bits == 16 else (rows.codes, rows.scales, rows.biases)
            if len(rows.codes) == source.shape[0]:
                yield from parts
                return
            # Pieces go where they are to be, as what would join them would hold them all twice.
            columns = columns or [np.empty((source.shape[0], it.shape[1]), it.dtype) for it in parts]
            for joined, part in zip(columns, parts, strict=True):
                joined[first : first + len(part)] = part
            first += len(rows.codes)
        yield from columns

    for name in layer.vectors(target):
        yield _array(arrays, name).astype("<f4")
    if layer.own_head:
        yield _array(arrays, TOKENS).astype("<u4")
    for name, stored in layer.matrices(target).items():
        yield from matrix(name, ROUTER_BITS if stored.halves else layer.bits)
    if layer.table_width:
        yield from matrix(EMBEDDINGS, 16)


def checked(layer: DraftLayer, target: ModelConfig) -> DraftLayer:
    """`layer` itself, checked. Raises CheckpointError for values from its source that no bundle may have."""
    try:
        check_draft_layer(layer, target)
    except BundleError as error:
        raise CheckpointError(f"config.json doesn't go with this model: {error}") from error
    return layer
