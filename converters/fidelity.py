"""How a conversion changed weights: how many kept the codes of their source, and the error of rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ondevice.config import GROUP_SIZE, RowFormat
from ondevice.converters.quantize import (
    EncodedColumns,
    QuantizedRows,
    RoundedRows,
    SourceCodes,
    SquaredError,
    Weights,
    sampled_error,
)
from ondevice.kernels import _native


@dataclass(frozen=True)
class Fidelity:
    """Counts of weights by how they were stored, and their error over a sample of rows.

    copied: weights with codes, scale and bias of the source. rescaled: weights with the source's codes, whose
    scale or bias was rounded to float16. rounded: weights that the conversion quantised.
    """

    copied: int = 0
    rescaled: int = 0
    rounded: int = 0
    error: SquaredError = field(default_factory=SquaredError)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.copied + other.copied,
            self.rescaled + other.rescaled,
            self.rounded + other.rounded,
            self.error + other.error,
        )

    def note(self, formats: Sequence[RowFormat]) -> str:
        """A sentence about weights that are stored in these formats."""
        sizes = {stored.group_size for stored in formats}
        groups = f" in groups of {min(sizes)}" if len(sizes) == 1 and sizes != {GROUP_SIZE} else ""
        bits = " or ".join(map(str, sorted({stored.bits for stored in formats})))
        parts = [
            ("codes and scales copied", self.copied),
            ("codes copied, scales rounded to float16", self.rescaled),
            (f"rounded to {bits} bits{groups}", self.rounded),
        ]
        total = self.copied + self.rescaled + self.rounded
        counted = [(what, count) for what, count in parts if count]
        said = [what if count == total else f"{100 * count / total:.3g} % {what}" for what, count in counted]
        error = f"; relative error {self.error.relative:.3g}" if self.copied != total else ""
        return "; ".join(said) + error


def measure(
    runner: _native.Runner,
    source: Weights | SourceCodes | RoundedRows | EncodedColumns,
    rows: QuantizedRows,
    stored: RowFormat,
) -> Fidelity:
    """How storing rows with 4 to 8 bits changed them."""
    if isinstance(source, RoundedRows):
        error, weight = source.squares.sum(axis=0)
        count = len(source.squares) * source.cols
        return Fidelity(rounded=count, error=SquaredError(float(error), float(weight)))
    if not isinstance(source, SourceCodes):
        return Fidelity(rounded=prod(source.shape), error=sampled_error(runner, source, rows, stored))
    total = copied = rows.codes.size * 8 // stored.bits
    if source.scales.dtype != rows.scales.dtype:
        exact = rows.scales == source.scales
        if stored.has_biases:
            exact &= rows.biases == source.biases
        copied = stored.group_size * int(np.count_nonzero(exact))
    error = sampled_error(runner, source, rows, stored, copied=copied == total)
    return Fidelity(copied=copied, rescaled=total - copied, error=error)


def joined(one: Mapping[str, Fidelity], other: Mapping[str, Fidelity]) -> dict[str, Fidelity]:
    """The sums of two results, by kind of matrix."""
    kinds = dict(one)
    for kind, fidelity in other.items():
        kinds[kind] = kinds.get(kind, Fidelity()) + fidelity
    return kinds
