"""The units into which the matrices that every token uses are divided: one per layer, then runs of the head's
rows.

A unit is in memory, or comes from flash when a pass needs it. Routers, vectors, and weights outside layers
and head are in no unit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ondevice.bundle.layout import head_matrix, out_matrix, projection_matrices
from ondevice.bundle.matrix_layout import TILE_ROWS, TiledMatrix, padded
from ondevice.bundle.weight_shapes import layer_weight_shapes
from ondevice.config import QuantConfig
from ondevice.model_config import ModelConfig

HEAD_UNITS = 12
"""Most units of the output head: each is a separate product, which costs a pass 27 microseconds."""
HEAD_UNIT_BYTES = 4 << 20
"""Least bytes of such a unit. With SmolLM2's head of 28 MB in 24 units, passes are a tenth slower."""
DRAFT_HEAD_SHARE = 3
"""Divisor of the head's units that gives the draft head, from whose tokens drafts are chosen: the first
units.

Vocabularies are in the order of learnt merges, frequent ones first: the first third of Qwen's has 96 to 98 %
of the tokens of English and code (a quarter 93 to 98, a sixth 89 to 97)."""
ROUTER = "router"
"""Name of a matrix that stays in memory, as experts are prefetched by it."""


class HeadRows(NamedTuple):
    """A unit of the head: `matrix` is the rows of the head that begin at row `first`, a multiple of 16."""

    first: int
    matrix: TiledMatrix


def layer_matrices(config: ModelConfig, quant: QuantConfig, layer: int) -> dict[str, tuple[TiledMatrix, ...]]:
    """The matrices of a layer's unit, by field of `LayerWeights`. A field may have several, placed below each
    other.
    """
    units = {
        "qkv": tuple(projection_matrices(config, quant, layer).values()),
        "out": (out_matrix(config, quant, layer),),
    }
    for weight in layer_weight_shapes(config, config.layers[layer]):
        matrix = weight.tiled(quant)
        if matrix is not None and weight.name != ROUTER:
            units[weight.name] = (matrix,)
    return units


def head_rows(config: ModelConfig, quant: QuantConfig) -> tuple[HeadRows, ...]:
    """The units of the head, in order; empty in a part without the head."""
    if not config.part.heads:
        return ()
    head = head_matrix(config, quant)
    most = max(1, min(HEAD_UNITS, head.nbytes // HEAD_UNIT_BYTES))
    # Units of equal size share memory.
    units = next((count for count in range(most, most // 2, -1) if head.tiles % count == 0), most)
    rows = padded(-(-head.rows // units), TILE_ROWS)
    return tuple(
        HeadRows(first, replace(head, rows=min(rows, head.rows - first)))
        for first in range(0, head.rows, rows)
    )


def draft_head_units(units: int) -> int:
    """The number of units that the draft head has, if the head has `units` units."""
    return -(-units // DRAFT_HEAD_SHARE)


def matrix_units(config: ModelConfig, quant: QuantConfig) -> tuple[tuple[tuple[TiledMatrix, ...], ...], ...]:
    """The matrices of every unit, in order of use: those of `layer_matrices`, then of `head_rows`."""
    layers = range(config.num_layers)
    units = tuple(tuple(layer_matrices(config, quant, layer).values()) for layer in layers)
    return (*units, *(((rows.matrix,),) for rows in head_rows(config, quant)))
