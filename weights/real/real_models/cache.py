"""Where the files of the real models are kept, and which of them are there. It downloads nothing."""

from __future__ import annotations

import hashlib
import os
import sys
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


def cached_file(model: RealModel, folder: Path) -> Path | None:
    """The model's GGUF file in a folder: the one of its name and size, else one of its size and sha256.

    None if there is neither.
    """
    named = folder / model.file
    if _has_size(named, model.nbytes):
        return named
    others = sorted(folder.glob("*.gguf"))
    return next((it for it in others if _has_size(it, model.nbytes) and sha256_of(it) == model.sha256), None)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _has_size(path: Path, nbytes: int) -> bool:
    return path.is_file() and path.stat().st_size == nbytes
