"""Row invariance: up to how many rows of a pass a row has the bits that it has alone.

Drafts leave a text as it is only on a backend that is row-invariant: a token must have the same bits beside
draft tokens as in plain decoding. A backend lists its ops, in the shapes that run, and every op is measured
on the device at hand: kernels are chosen by shapes and by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from ondevice.backends.base import Float32
from ondevice.records import dataclass

MOST_ROWS = 16
"""Most rows of a pass that are measured."""
ANY_ROWS = 1 << 20
"""Width of a backend on which the number of rows makes no difference: more rows than any pass has."""
Kind = Literal["any", "chain", "tree"]
"""The drafts that an op is part of: all, those that don't branch, or those that do or have streams."""


class RowOp(NamedTuple):
    """An op of a backend over an input of its own, of `MOST_ROWS` rows.

    alone(row): (1, ...), that row's result by itself, as in plain decoding. together(rows): (rows, ...), the
    results of the first rows in one call.
    """

    name: str
    alone: Callable[[int], Float32]
    together: Callable[[int], Float32]
    kind: Kind = "any"


@dataclass(frozen=True)
class RowWidths:
    """Largest number of rows up to which every row of a pass has the bits that it has alone; 1: none other.

    chain: of a draft whose tokens follow each other. tree: of one that branches, or that has streams.
    """

    chain: int
    tree: int

    @property
    def nodes(self) -> int:
        """Most nodes of a draft, its root included."""
        return self.tree if self.branches else self.chain

    @property
    def branches(self) -> bool:
        """Whether drafts may branch, and have streams in their own pass."""
        return self.tree > 1


@dataclass(frozen=True)
class RowInvariance:
    """The widths of passes in which a backend gives each row the bits that it has alone.

    device: the device that multiplies. ops: each op's width; empty if nothing was measured. skips_zeros:
    whether a product over neurons has the same bits without those that add zero, so that modes `dense` and
    `exact` give one text.
    """

    device: str
    widths: RowWidths
    ops: Mapping[str, int]
    skips_zeros: bool

    @property
    def narrowest(self) -> str:
        """The op that gives a row other bits beside the fewest rows."""
        return min(self.ops, key=lambda name: self.ops[name], default="")


BY_CONSTRUCTION = RowInvariance("cpu", RowWidths(ANY_ROWS, ANY_ROWS), {}, skips_zeros=True)
"""Our own kernels: they compute every row by itself, in an order of their own."""
UNKNOWN = RowInvariance("", RowWidths(1, 1), {}, skips_zeros=False)
"""A backend that makes no promise: it can't draft."""


def width_of(op: RowOp) -> int:
    """Largest number of rows up to which `op` gives each the bits that it has alone; MOST_ROWS at most."""
    # Two rows first: where they differ, no kernels need be compiled for more.
    for counts in (range(2, 3), range(3, MOST_ROWS + 1)):
        alone = [op.alone(row).tobytes() for row in range(counts.stop - 1)]
        for rows in counts:
            together = op.together(rows)
            if any(together[row].tobytes() != alone[row] for row in range(rows)):
                return rows - 1
    return MOST_ROWS


def measured(ops: Iterable[RowOp]) -> tuple[RowWidths, dict[str, int]]:
    """The widths of a backend with these ops, and each op's own. `ops` is gone through once.

    It ends at an op with which nothing can draft: what the others would do changes nothing.
    """
    found: dict[str, int] = {}
    widths = RowWidths(MOST_ROWS, MOST_ROWS)
    least: dict[Kind, int] = {"any": MOST_ROWS, "chain": MOST_ROWS, "tree": MOST_ROWS}
    for op in ops:
        found[op.name] = width_of(op)
        least[op.kind] = min(least[op.kind], found[op.name])
        widths = RowWidths(min(least["any"], least["chain"]), min(least["any"], least["tree"]))
        if widths.nodes == 1:
            break
    return widths, found
