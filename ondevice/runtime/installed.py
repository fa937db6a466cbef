"""The bundles in the model folders, finished and unfinished, with their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ondevice.bundle.layout import MANIFEST, PARTIAL, RESIDENT
from ondevice.bundle.reader import Bundle
from ondevice.errors import BundleError, ModelNotFoundError, OndeviceError, UnsupportedModelError, UsageError
from ondevice.records import dataclass
from ondevice.runtime.models import known_models, model_home, shipped_folder

State = Literal["whole", "unfinished", "damaged", "unusable"]


@dataclass(frozen=True)
class InstalledModel:
    """A bundle in a model folder, finished or not."""

    name: str
    path: Path
    nbytes: int
    """Bytes of all its files."""
    changed: datetime
    """When it was finished, or last written to."""
    state: State
    """unusable: of a format or kind that this version can't read."""
    source: str = ""
    """The source checkpoint's name in the manifest; may be empty."""
    architecture: str = ""
    quantisation: str = ""
    ships: bool = False
    """Whether it belongs to the package, so that it can't be removed."""
    problem: str = ""
    """The reason for `damaged` or `unusable`."""


def installed_models() -> list[InstalledModel]:
    """The models of the model folders by name, then the shipped ones. An unfinished model follows the
    finished one of its name.
    """
    models = [_inspected(name, path) for name, path in known_models().items()]
    models += [
        _measured(path.name.removesuffix(PARTIAL), path, "unfinished")
        for path in _folders_of(model_home())
        if path.name.endswith(PARTIAL)
    ]
    models += [
        _measured(path.name, path, "damaged", problem=f"{MANIFEST} is missing")
        for path in _folders_of(model_home())
        if (path / RESIDENT).is_file() and not (path / MANIFEST).is_file() and not path.name.endswith(PARTIAL)
    ]
    return sorted(models, key=lambda model: (model.ships, model.name, model.state == "unfinished"))


def removable(name: str) -> list[InstalledModel]:
    """What `remove` deletes for a name: the bundle, its unfinished conversion, or both.

    Raises ModelNotFoundError if the folder of converted models has neither, UsageError for a path and for a
    shipped model.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UsageError(
            f"{name[:80]!a} isn't the name of a model in {model_home()}; `ondevice list` has the names, and "
            "folders elsewhere are yours to delete"
        )
    matches = [model for model in installed_models() if model.name == name]
    removable = [model for model in matches if not model.ships]
    if matches and not removable:
        raise UsageError(f"{name} ships with the package, so it goes only with the package")
    if not removable:
        names = ", ".join(sorted({model.name for model in installed_models() if not model.ships})) or "none"
        raise ModelNotFoundError(f"no model called {name} in {model_home()}, where there are: {names}")
    return removable


def _folders_of(home: Path) -> Iterator[Path]:
    if home.is_dir():
        yield from (path for path in sorted(home.iterdir()) if path.is_dir())


def _inspected(name: str, path: Path) -> InstalledModel:
    ships = path.parent == shipped_folder()
    try:
        bundle = Bundle.open(path)
    except UnsupportedModelError as error:
        return _measured(name, path, "unusable", ships=ships, problem=error.for_command_line)
    except (BundleError, ModelNotFoundError) as error:
        return _measured(name, path, "damaged", ships=ships, problem=error.for_command_line)
    return _measured(
        name,
        path,
        "whole",
        source=bundle.manifest.provenance.source,
        architecture=bundle.config.architecture,
        quantisation=bundle.quant.name,
        ships=ships,
    )


def _measured(name: str, path: Path, state: State, ships: bool = False, **facts: str) -> InstalledModel:
    """A model with its size and date. Raises OndeviceError if the system refuses."""
    try:
        files = [file.lstat() for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
        manifest = path / MANIFEST
        stamps = [manifest.stat().st_mtime] if manifest.is_file() else [file.st_mtime for file in files]
        newest = max(stamps, default=path.stat().st_mtime)
    except OSError as error:
        raise OndeviceError(f"{path} can't be looked at: {error.strerror}") from error
    nbytes = sum(file.st_size for file in files)
    changed = datetime.fromtimestamp(newest, UTC)
    return InstalledModel(name, path, nbytes, changed, state, ships=ships, **facts)
