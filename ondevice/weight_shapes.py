"""Names and shapes of weights that only some models have: of per-layer inputs, copies of the residual, and
low-rank blocks beside attention. Sizes are those of `model_config.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class WeightShape(NamedTuple):
    """A weight that only some models have: its name in a bundle, behind the prefix of a layer's.

    shape: (rows, columns) of a matrix that is quantised, else the shape of float32 values.
    """

    name: str
    shape: tuple[int, ...]
    quantised: bool


def model_weights(hidden: int, layers: int, width: int, copies: int) -> tuple[WeightShape, ...]:
    """Those that no layer has, in a bundle's order: of per-layer inputs of `width`, and of `copies`.

    The copies' matrices are one for each copy but the first: `spread` makes it of the embedding, `gather`
    is multiplied by it in the end.
    """
    found = []
    if width:
        found += [
            WeightShape("per_layer.projection", (layers * width, hidden), True),
            WeightShape("per_layer.norm.weight", (width,), False),
        ]
    for name in ("spread", "gather"):
        for copy in range(1, copies):
            found.append(WeightShape(f"copies.{name}.{copy}", (hidden, hidden), True))
    return tuple(found)


def layer_weights(hidden: int, width: int, copies: int, rank: int) -> tuple[WeightShape, ...]:
    """Those of a layer with a block of `rank` beside attention, in a bundle's order."""
    found = []
    if rank:
        found += [
            WeightShape("laurel.down", (rank, hidden), True),
            WeightShape("laurel.up", (hidden, rank), True),
            WeightShape("laurel.norm.weight", (hidden,), False),
        ]
    if copies > 1:
        found += [
            WeightShape("copies.norm.weight", (hidden,), False),
            WeightShape("copies.router", (copies, hidden), False),
            WeightShape("copies.predict", (copies * copies, copies), False),
            WeightShape("copies.correct", (copies, copies), False),
            WeightShape("copies.scale", (hidden,), False),
        ]
    if width:
        found += [
            WeightShape("per_layer.gate", (width, hidden), True),
            WeightShape("per_layer.out", (hidden, width), True),
            WeightShape("per_layer.norm.weight", (hidden,), False),
        ]
    return tuple(found)
