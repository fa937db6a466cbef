"""Models on the MLX backend, for its tests: on a GPU when ONDEVICE_TEST_MLX_GPU is set, else on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ondevice

ON_GPU = bool(os.environ.get("ONDEVICE_TEST_MLX_GPU"))


def loaded(folder: Path, backend: str = "mlx", **options: Any) -> Any:
    options = {"speculation": "off", "io": "buffered", "memory_pressure": "off"} | options
    return ondevice.load(folder, backend=backend, **options)


def smallest(folder: Path, **options: Any) -> int:
    plan = ondevice.inspect(folder, backend="mlx", speculation="off", **options)
    return plan.minimum_budget_bytes + (2 << 20)
