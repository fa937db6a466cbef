"""Models on the MLX backend, for its tests: on a GPU when ONDEVICE_TEST_MLX_GPU is set, else on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import ondevice

ON_GPU = bool(os.environ.get("ONDEVICE_TEST_MLX_GPU"))
ON_CUDA = ON_GPU and sys.platform != "darwin"
"""MLX's GPUs are Apple's on macOS, and CUDA's elsewhere."""


def loaded(folder: Path, backend: str = "mlx", **options: Any) -> Any:
    options = {"speculation": "off", "io": "buffered", "memory_pressure": "off"} | options
    return ondevice.load(folder, backend=backend, **options)


def smallest(folder: Path, **options: Any) -> int:
    plan = ondevice.inspect(folder, backend="mlx", speculation="off", **options)
    return plan.minimum_budget_bytes + (2 << 20)


def nudged(x: Any) -> Any:
    """x with other last bits."""
    return x * (1.0 + 2.0**-21)


def break_products(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """From `rows` rows on, products have other last bits."""
    from ondevice.backends.mlx_matrix import MlxMatrix

    true = MlxMatrix._product

    def product(self: Any, x: Any, transpose: bool) -> Any:
        found = true(self, x, transpose)
        return found if x.shape[0] < rows else nudged(found)

    monkeypatch.setattr(MlxMatrix, "_product", product)


def run_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ops are measured, each runs, and none ends it, as the first may that two rows change on a GPU."""
    from ondevice.backends import row_invariance

    def width_of(op: Any) -> int:
        assert len(op.alone(0)) == 1
        assert len(op.together(2)) == 2
        return row_invariance.MAX_ROWS

    monkeypatch.setattr(row_invariance, "width_of", width_of)
