"""The EAGLE-3 head of an embedded model: the small model's, as large as one of the large model's layers.

The small bundle's is rounded to q4 with heads as wide as the large model's, like the layers of the model. In
the large bundle its codes are copied, as those of the model's own blocks are: rows and columns, heads and
neurons beside them have codes of their own, and scales of zero where they would write. So it drafts what the
small one drafts, with the same chances, for the reads and products of a layer and an `fc` in the large shape.

The tokens of its head are those that the small one drafts, by the rows of the small model's own head: a
reduced vocabulary, as heads for large models have. It needs no logits of ids without tokens.

Legend: D the small model's width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.bundle.draft_layers import DraftLayer, draft_layer_layout, draft_layer_text
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import weights_digest
from ondevice.config import GROUP_SIZE
from ondevice.converters.draft_layers.write import write_draft_layer
from ondevice.converters.quantize import QuantizedRows, dequantize
from ondevice.converters.training.sidecars import save_sidecar, write_tensors
from ondevice.model_config import ModelConfig
from tests.benchmarks.lib.embedded_weights import EmbeddedModel, even_places, put, recoded, silent_rows
from tests.benchmarks.lib.stored_model import Q4, matrix_of, place_groups, widened_context, widened_qkv

UNREAD = ("qkv.embedding", "qkv.hidden", "gate", "up")
"""Matrices with rows that nothing reads: those of heads and neurons beside the small head's."""


def copy_eagle(source: Path, folder: Path) -> None:
    """Give the small bundle in `folder` the head of `source`, from which it was rounded, if that has one.

    Raises ValueError for a head that isn't like a layer of its model.
    """
    old, new = Bundle.open(source), Bundle.open(folder)
    layer = old.eagle
    if layer is None:
        return
    _check_plain(layer, old.config)
    stored, wide = load_file(source / layer.sidecar.tensors), new.config.head_dim
    arrays = {name: stored[layer.name(name)] for name in layer.vectors(old.config)}
    for name, matrix in layer.matrices(old.config).items():
        values = dequantize(matrix_of(stored, layer.name(name)), layer.bits, matrix.cols)
        if name.startswith("qkv."):
            values = widened_qkv(values, old.config, wide)
        if name == "out":
            values = widened_context(values, old.config, wide)
        arrays[name] = np.ascontiguousarray(values)
    frequencies = new.config.ropes[0].frequencies
    write_draft_layer(folder, replace(layer, bits=4, head_dim=wide, frequencies=frequencies), arrays)


def _check_plain(layer: DraftLayer, model: ModelConfig) -> None:
    """Raises ValueError unless a head is like a layer of its model, whose embeddings and head it takes."""
    same = (layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.frequencies) == (
        *(model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim),
        model.ropes[0].frequencies,
    )
    others = layer.own_head or layer.own_embeddings or layer.qkv_bias or layer.output_bias or layer.head_norm
    if not same or others or layer.bits == 16 or layer.neurons % GROUP_SIZE:
        raise ValueError(f"the head in {layer.sidecar.manifest} isn't like a layer of its model")


def embed_eagle(model: EmbeddedModel, folder: Path) -> None:
    """Give the large bundle in `folder` the small one's head, if that has one."""
    large, small = Bundle.open(folder), Bundle.open(model.small.bundle.path)
    if small.eagle is None:
        return
    wide = _wide(model, small.eagle, large)
    arrays = _arrays(model, small, wide, large.config)
    sha256, crcs = write_tensors(wide.sidecar, draft_layer_layout(wide, large.config), arrays, folder)
    save_sidecar(wide.sidecar, draft_layer_text(replace(wide, sha256=sha256, crcs=crcs)), folder)


def _wide(model: EmbeddedModel, layer: DraftLayer, large: Bundle) -> DraftLayer:
    """The head in the large shape. It taps the stream where that is what the small one taps."""
    own, shape = model.small.config, model.shape
    places = [*model.layers, shape.num_layers]
    return replace(
        layer,
        model=weights_digest(large.manifest),
        taps=tuple(places[tap] for tap in layer.taps),
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_heads,
        neurons=shape.intermediate_size,
        eps=layer.eps * own.hidden_size / shape.hidden_size,
        own_head=True,
        sha256="0" * 64,
        crcs=(),
    )


def _arrays(
    model: EmbeddedModel, small: Bundle, wide: DraftLayer, large: ModelConfig
) -> Iterator[NDArray[Any]]:
    """Each tensor of the large bundle's head."""
    layer, random = small.eagle, np.random.default_rng(38)
    assert layer is not None
    stored = load_file(small.path / layer.sidecar.tensors)
    for name in wide.vectors(large):
        yield model.norm(stored[layer.name(name)])
    yield np.arange(wide.tokens, dtype=np.uint32)
    blocks = np.array(even_places(layer.neurons // GROUP_SIZE, wide.neurons // GROUP_SIZE))
    neurons = (blocks[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)).ravel()
    for name, matrix in wide.matrices(large).items():
        rows = model.small.embedding if name == "head" else matrix_of(stored, layer.name(name))
        places = np.arange(len(rows.codes))
        if name.startswith("qkv."):
            places = model.qkv_rows()
        if name in ("gate", "up"):
            places = neurons
        columns = {"out": model.context_groups(), "down": blocks}.get(name, model.columns)
        found = _placed(rows, matrix.shape, places, columns, random, made_up=name in UNREAD)
        yield from (found.codes, found.scales, found.biases)


def _placed(
    rows: QuantizedRows,
    size: tuple[int, int],
    places: NDArray[np.int64],
    columns: NDArray[np.int64],
    random: np.random.Generator,
    *,
    made_up: bool,
) -> QuantizedRows:
    """A matrix of `size` with `rows` at `places`, their groups at `columns`.

    made_up: whether the rows beside them have the scales of some of `rows`; else they are zero.
    """
    found = silent_rows(*size, Q4.bits, random)
    groups = found.scales.shape[1]
    if made_up:
        picked = recoded(rows, random.integers(0, len(rows.codes), size[0]), random)
        found = place_groups(picked, Q4.bits, groups, columns, random)
    put(found, places, place_groups(rows, Q4.bits, groups, columns, random))
    return found
