"""Where the files of the real models are kept, and which of them are there. It downloads nothing."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from real_models.table import RealModel

BLOCK_BYTES = 1 << 20


def models_folder() -> Path:
    """The folder of the files: `ONDEVICE_REAL_MODELS`, else ondevice/real-models in the user's cache."""
    if chosen := os.environ.get("ONDEVICE_REAL_MODELS"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path("~/Library/Caches").expanduser()
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "ondevice" / "real-models"


class WrongFileError(Exception):
    """Says in one line which file has a model's name and size, and other bytes."""


def cached_file(model: RealModel, folder: Path, verify: bool = False) -> Path | None:
    """The model's GGUF file in a folder, under its own name or another; None if there is none.

    verify: compute the sha256 of a file that was right before and hasn't changed since, too. Raises
    WrongFileError for one of the model's name and size with another sha256.
    """
    named = folder / model.file
    others = sorted(path for path in folder.glob("*.gguf") if path != named)
    for path in (named, *others):
        if not _has_size(path, model.nbytes):
            continue
        if not verify and _record(path).is_file() and _record(path).read_text() == _state(path, model.sha256):
            return path
        if (digest := sha256_of(path)) == model.sha256:
            remember(path, digest)
            return path
        if path == named:
            raise WrongFileError(
                f"{path} has sha256 {digest}, not {model.sha256}: remove it and fetch it again"
            )
    return None


def remember(path: Path, sha256: str) -> None:
    """Record beside a file that it has a sha256, for as long as it doesn't change."""
    with suppress(OSError):
        _record(path).write_text(_state(path, sha256))


def _record(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified")


def _state(path: Path, sha256: str) -> str:
    status = path.stat()
    return f"{sha256} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes
