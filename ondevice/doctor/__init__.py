"""Examination of the machine and this installation, for `ondevice doctor` and for an app's self-test.

It prints nothing, starts no other program, leaves no files behind and repairs nothing. Every check imports
its modules when it runs, so a missing module is a finding and not a crash.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.config import BackendName
from ondevice.doctor import generation, machine, storage
from ondevice.doctor.check import Check as Check
from ondevice.doctor.check import DoctorReport as DoctorReport
from ondevice.doctor.check import attempt
from ondevice.errors import OndeviceError
from ondevice.settings import settings_path

Step = tuple[str, Callable[[], Check]]


def examine(
    model: str | os.PathLike[str] | None = None, *, on_progress: OnProgress = ignore_progress
) -> DoctorReport:
    """Examine this machine and this installation, in a few seconds, and report what is wrong with them.

    model: a path, a name or an alias of a bundle to examine as well; the device it lies on is measured.
    on_progress is called with the share done and the next step. Only an exception that it raises ends the
    examination; problems of the machine become failed checks.
    """
    begun, steps, checks = time.monotonic(), list(_steps(model)), []
    for index, (name, step) in enumerate(steps):
        on_progress(index / len(steps), name)
        checks.append(attempt(name, step))
    on_progress(1.0, "done")
    return DoctorReport(tuple(checks), time.monotonic() - begun)


def backends() -> tuple[BackendName, ...]:
    """Every backend that can be chosen. One that can't run here says so when a model is loaded."""
    return tuple(name for name in get_args(BackendName) if name != "auto")


def _steps(model: str | os.PathLike[str] | None) -> Iterator[Step]:
    """The steps of the examination, by name and in order."""
    yield "versions", machine.versions
    yield "processor", machine.processor
    yield "kernels", machine.kernels
    yield "memory", machine.memory
    yield "dram", _dram
    yield "mlx", machine.mlx
    yield "metal", machine.metal
    yield "models folder", lambda: storage.models_folder(_models_folder())
    yield "settings file", lambda: storage.settings_file(settings_path())
    yield "cache folder", lambda: storage.cache_folder(_cache_folder())
    yield "package folder", lambda: storage.package_folder(Path(__file__).resolve().parents[1])
    yield "shipped model", lambda: generation.shipped_model(generation.shipped_bundle())
    if model is not None:
        yield "model", partial(generation.named_model, model)
    yield from _flash_steps(model)
    for backend in backends():
        yield f"generation {backend}", partial(_generation, backend)
    yield "rows mlx", partial(_rows, model)


def _flash_steps(model: str | os.PathLike[str] | None) -> Iterator[Step]:
    """One measurement per device: the model's device first, then those of the models and cache folders."""
    devices: dict[int, list[Path]] = {}
    for find in (partial(_model_folder, model), _models_folder, _cache_folder):
        try:
            folder = find()
            devices.setdefault(storage.device(folder), []).append(folder)
        except (OndeviceError, ImportError, OSError):
            continue  # That folder's own check reports the problem.
    for number, folders in enumerate(devices.values()):
        name = "flash" if not number else f"flash {number + 1}"
        yield name, partial(_flash, name, folders)


def _dram() -> Check:
    from ondevice.doctor.rates import dram

    return dram()


def _flash(name: str, folders: Sequence[Path]) -> Check:
    return storage.flash(name, folders, storage.neuron_files(folders[0]))


def _generation(backend: BackendName) -> Check:
    return generation.generation(backend, generation.shipped_bundle())


def _rows(model: str | os.PathLike[str] | None) -> Check:
    return generation.rows("rows mlx", generation.shipped_bundle() if model is None else _model_folder(model))


def _model_folder(model: str | os.PathLike[str] | None) -> Path:
    from ondevice.runtime.models import find_model

    return find_model(model)


def _models_folder() -> Path:
    from ondevice.runtime.models import model_home

    return model_home()


def _cache_folder() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("ondevice", appauthor=False)
