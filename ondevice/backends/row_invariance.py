"""Row invariance: how many rows a pass may have while each row keeps the bits that it would have alone.

Drafts leave a text unchanged only on a row-invariant backend: a token must have the same bits in a pass with
draft tokens as in plain decoding. Each op of a backend is measured on the device in the shapes of the model,
as kernels are chosen by shapes and by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from ondevice.backends.base import Float32
from ondevice.records import dataclass

MAX_ROWS = 16
"""Largest number of rows that is measured."""
ANY_ROWS = 1 << 20
"""Width of a backend whose bits don't depend on the number of rows: more rows than any pass has."""
Kind = Literal["any", "chain", "tree"]
"""The drafts that use an op: all, those that don't branch, or those that branch or have streams."""


class RowOp(NamedTuple):
    """An op of a backend over an input of `MAX_ROWS` rows.

    alone(row): (1, ...), one row's result, as in plain decoding. together(rows): (rows, ...), the results of
    the first rows in one call.
    """

    name: str
    alone: Callable[[int], Float32]
    together: Callable[[int], Float32]
    kind: Kind = "any"


@dataclass(frozen=True)
class RowWidths:
    """The largest numbers of rows up to which every row of a pass has the same bits as when it runs alone.

    chain: for drafts that don't branch. tree: for drafts that branch or have streams.
    """

    chain: int
    tree: int

    @property
    def nodes(self) -> int:
        """Largest number of nodes of a draft, its root included."""
        return self.tree if self.branches else self.chain

    @property
    def branches(self) -> bool:
        """Whether drafts may branch, and have streams in the same pass."""
        return self.tree > 1


@dataclass(frozen=True)
class RowInvariance:
    """The widths of passes in which a backend gives every row the same bits as when it runs alone.

    ops: each op's width; empty if nothing was measured. skips_zeros: whether a product over neurons keeps its
    bits when neurons that add zero are left out, so that modes `dense` and `exact` give the same text.
    """

    device: str
    widths: RowWidths
    ops: Mapping[str, int]
    skips_zeros: bool

    @property
    def narrowest(self) -> str:
        """The op with the smallest width."""
        return min(self.ops, key=lambda name: self.ops[name], default="")


BY_CONSTRUCTION = RowInvariance("cpu", RowWidths(ANY_ROWS, ANY_ROWS), {}, skips_zeros=True)
"""The `cpu` backend: its kernels compute every row separately."""
UNKNOWN = RowInvariance("", RowWidths(1, 1), {}, skips_zeros=False)
"""A backend without row invariance: it can't draft."""


def width_of(op: RowOp) -> int:
    """The largest number of rows, at most MAX_ROWS, up to which `op` gives every row the same bits as when it
    runs alone.
    """
    # Two rows first: where they differ, no kernels are compiled for more.
    for counts in (range(2, 3), range(3, MAX_ROWS + 1)):
        alone = [op.alone(row).tobytes() for row in range(counts.stop - 1)]
        for rows in counts:
            together = op.together(rows)
            if any(together[row].tobytes() != alone[row] for row in range(rows)):
                return rows - 1
    return MAX_ROWS


def measured(ops: Iterable[RowOp]) -> tuple[RowWidths, dict[str, int]]:
    """The widths of a backend that has these ops, and the width of each op by name.

    Stops at the first op that rules out drafts.
    """
    op_widths: dict[str, int] = {}
    widths = RowWidths(MAX_ROWS, MAX_ROWS)
    min_rows: dict[Kind, int] = {"any": MAX_ROWS, "chain": MAX_ROWS, "tree": MAX_ROWS}
    for op in ops:
        op_widths[op.name] = width_of(op)
        min_rows[op.kind] = min(min_rows[op.kind], op_widths[op.name])
        widths = RowWidths(min(min_rows["any"], min_rows["chain"]), min(min_rows["any"], min_rows["tree"]))
        if widths.nodes == 1:
            break
    return widths, op_widths
