"""Checks of what this process runs on: versions, processor, kernels, memory, MLX and Metal.

This module knows nothing of models and of the disk. It starts no other program, so it also works inside a
packaged app.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any, get_args

from ondevice.config import Bits
from ondevice.doctor.check import Check
from ondevice.errors import BackendUnavailableError
from ondevice.units import (
    format_bytes,
    memory_available,
    memory_groups,
    memory_total,
    sysctl,
    usable_cores,
)

NEEDED = ("numpy", "safetensors", "sentencepiece", "tokenizers", "jinja2", "platformdirs")
"""Modules needed to run a model. Each has the name of its distribution."""
LOW_MEMORY_BYTES = 256_000_000
"""Free memory below which a warning is given: little more than the smallest model takes."""
ROWS, COLUMNS, TOKENS = 37, 100, 5
"""Sizes of the product on which targets are compared. None is a multiple of any target's block size."""
MLX_REMEDY = "install it: pip install 'ondevice[mlx]'"
METALLIB = ("lib/mlx.metallib", "lib/Resources/mlx.metallib")
"""Paths, relative to MLX's package, at which MLX looks for its Metal kernels."""


def versions(needed: Sequence[str] = NEEDED) -> Check:
    """Check of the versions of ondevice, Python, modules and system. Fails if a needed module is missing."""
    installed = {"ondevice": _version("ondevice"), "python": platform.python_version()}
    missing = [name for name in needed if util.find_spec(name) is None]
    installed |= {name: _version(name) for name in (*needed, "mlx") if util.find_spec(name) is not None}
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    shown = [name for name in ("ondevice", "python", "numpy", "mlx") if name in installed]
    value = ", ".join(f"{name} {installed[name] or 'of unknown version'}" for name in shown)
    figures = {**installed, "system": system}
    if missing:
        remedy = f"pip install {' '.join(missing)}; in an app, pack it"
        return Check("versions", "failed", f"{', '.join(missing)} missing; {value}", remedy, figures)
    return Check("versions", "ok", f"{value}; {system}", figures=figures)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """Check of the processor: its name, and the cores that this process may use."""
    name = next(
        (line.partition(":")[2].strip() for line in _lines(cpuinfo) if line.startswith("model name")), ""
    )
    usable, cores = usable_cores(), os.cpu_count() or 1
    shown = ", ".join(filter(None, (name, platform.machine())))
    figures = {"name": name, "architecture": platform.machine(), "cores": cores, "usable_cores": usable}
    return Check("processor", "ok", f"{shown}; {usable} of {cores} cores usable", figures=figures)


def kernels() -> Check:
    """Check that the kernels of every available instruction set match the scalar ones bit for bit."""
    from ondevice.kernels import _native

    targets = _native.available_targets()
    expected = kernel_product("scalar")
    wrong = [target for target in targets if kernel_product(target) != expected]
    figures = {"targets": targets, "wrong_targets": wrong}
    if wrong:
        best = next((target for target in targets if target not in wrong), "none")
        value = f"{', '.join(wrong)} and scalar give different bits for the same product (right: {best})"
        remedy = (
            "install a build made for this machine; if it is one, the processor or its memory is at fault"
        )
        return Check("kernels", "failed", value, remedy, figures)
    if targets == ["scalar"]:
        return Check(
            "kernels",
            "warning",
            "scalar only: this processor has none of the instruction sets that there are kernels for",
            "models run several times slower; there are kernels for AVX2 to AMX on x86-64, and for NEON",
            figures,
        )
    others = ", ".join(target for target in targets if target != "scalar")
    return Check("kernels", "ok", f"{others}: bit for bit as scalar", figures=figures)


def kernel_product(target: str) -> bytes:
    """The bytes of products computed by `target`, with weights quantised to each number of bits.

    Weights are (ROWS, COLUMNS), and activations (TOKENS, COLUMNS). The bytes of the quantised weights are
    included.
    """
    import numpy as np

    from ondevice.kernels import _native

    runner, rng = _native.Runner(1, target), np.random.default_rng(1)
    weights = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    x = rng.standard_normal((TOKENS, COLUMNS), dtype=np.float32)
    groups, product = -(-COLUMNS // 64), b""
    for bits in get_args(Bits):
        codes = np.empty((ROWS, groups * 64 * bits // 8), dtype=np.uint8)
        scales, biases = (np.empty((ROWS, 0 if bits == 16 else groups), np.uint16) for _ in range(2))
        _native.quantize_rows(runner, weights, bits, codes, scales, biases)
        matrix, out = _native.Matrix(ROWS, COLUMNS, bits), np.empty((TOKENS, ROWS), dtype=np.float32)
        matrix.load_rows(runner, 0, codes, scales.view(np.uint8), biases.view(np.uint8))
        matrix.forward(runner, x, None, out)
        product += codes.tobytes() + scales.tobytes() + biases.tobytes() + out.tobytes()
    return product


def memory() -> Check:
    """Check of memory: total, free, a control group's limit, and macOS's limit for the GPU."""
    total, available, wired = memory_total(), memory_available(), _wired_limit()
    limit = min((group.limit_bytes for group in memory_groups()), default=None)
    value = f"{format_bytes(available)} of {format_bytes(total)} free"
    if limit is not None:
        value += f"; a control group's limit: {format_bytes(limit)}"
    if wired is not None:
        value += f"; the GPU may hold {format_bytes(wired)} of it (iogpu.wired_limit_mb)"
    figures = {
        "total_bytes": total,
        "available_bytes": available,
        "control_group_limit_bytes": limit,
        "wired_limit_bytes": wired,
    }
    if available < LOW_MEMORY_BYTES:
        remedy = f"close other programs, or raise the limit, until {format_bytes(LOW_MEMORY_BYTES)} are free"
        return Check("memory", "warning", value, remedy, figures)
    return Check("memory", "ok", value, figures=figures)


def mlx(system: str = sys.platform) -> Check:
    """Check that MLX is installed and can add numbers on its default device."""
    if util.find_spec("mlx") is None:
        # Only on macOS is MLX installed by default.
        if system == "darwin":
            return Check("mlx", "warning", "not installed; the GPU goes unused", MLX_REMEDY)
        return Check(
            "mlx", "skipped", "not installed; --backend mlx and training streams take it", MLX_REMEDY
        )
    try:
        core = importlib.import_module("mlx.core")
        device = "GPU" if core.default_device().type == core.gpu else "CPU"
        total = int(core.sum(core.arange(100)).item())
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "install MLX again, in a build for this system; in an app, pack all of its folder"
        return Check("mlx", "failed", f"it can't compute: {_first_line(error)}", remedy)
    figures = {"version": core.__version__, "device": device}
    if total != 4950:
        remedy = "install MLX again, in a build for this system"
        return Check("mlx", "failed", f"the {device} adds 0 to 99 up to {total}, not 4950", remedy, figures)
    if device == "GPU" and system != "darwin":
        version = (
            f"{core.__version__}, computes on a GPU through CUDA, where it is slow and not all is proven"
        )
        return Check("mlx", "warning", version, "use --backend cpu; docs/mlx.md says what was seen", figures)
    return Check("mlx", "ok", f"{core.__version__}, computes on the {device}", figures=figures)


def metal(
    system: str = sys.platform,
    folders: Sequence[Path] | None = None,
    describe: Callable[[], dict[str, Any] | None] | None = None,
) -> Check:
    """Check that MLX's Metal kernels are installed and that there is a GPU for them.

    folders: folders of the MLX package; by default those of the installed one. describe: returns MLX's
    description of the GPU, or None if there is no GPU.
    """
    if system != "darwin":
        return Check("metal", "skipped", "Metal is a part of macOS")
    searched = mlx_folders() if folders is None else folders
    if not searched:
        return Check("metal", "skipped", "MLX isn't installed", MLX_REMEDY)
    library = next(
        (path for folder in searched for name in METALLIB if (path := folder / name).is_file()), None
    )
    if library is None:
        missing = searched[0] / METALLIB[0]
        remedy = "install MLX again; in an app, pack that file at the same place in MLX's folder"
        return Check("metal", "failed", f"MLX's Metal kernels are missing: there is no {missing}", remedy)
    try:
        device = (describe or _metal_device)()
    except (ImportError, OSError, RuntimeError) as error:
        return Check("metal", "failed", f"MLX has no word on the GPU: {_first_line(error)}", MLX_REMEDY)
    if device is None:
        remedy = "models run on the processor; a virtual machine may have no GPU to give"
        return Check("metal", "warning", "this Mac offers no GPU to this process", remedy)
    recommended = int(device.get("max_recommended_working_set_size", 0))
    figures = {
        "metallib": str(library),
        "device": str(device.get("device_name", "GPU")),
        "recommended_working_set_bytes": recommended,
    }
    value = f"{figures['device']}, working set {format_bytes(recommended)}; {library.name} is there"
    return Check("metal", "ok", value, figures=figures)


def mlx_folders() -> list[Path]:
    """Folders of the MLX package, which may have several; empty if it isn't installed."""
    spec = util.find_spec("mlx")
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def _wired_limit() -> int | None:
    """The bytes that the GPU may hold, as set in macOS; None if that isn't set, and on other systems."""
    if sys.platform != "darwin":
        return None
    try:
        return sysctl("iogpu.wired_limit_mb", 4) << 20 or None
    except BackendUnavailableError:
        return None  # This macOS release has no such limit.


def _metal_device() -> dict[str, Any] | None:
    core = importlib.import_module("mlx.core")
    if not core.metal.is_available():
        return None
    # MLX before 0.30 has `device_info` in `metal` only. Later releases print a notice if it is used there.
    describe = core.device_info if "device_info" in dir(core) else core.metal.device_info
    return dict(describe())


def _version(distribution: str) -> str | None:
    """Version of an installed distribution; None if unknown, as in an app packed without its metadata."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
