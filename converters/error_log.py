"""The quantisation error measured so far, kept beside an unfinished bundle so that it can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

from ondevice.bundle.files import write_durably
from ondevice.bundle.layout import EMBEDDING
from ondevice.converters.quantize import SquaredError
from ondevice.errors import OndeviceError


class ErrorLog:
    """Squared errors by record file or resident tensor. An entry is on disk before the data it belongs to."""

    FILE = "quantisation-error.json"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.FILE
        self._entries = _load(self._path)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def save(self, name: str, error: SquaredError) -> None:
        """Save the error of one file or tensor durably. Raises OndeviceError if the disk refuses."""
        self._entries[name] = error
        content = {key: [entry.error, entry.weight] for key, entry in sorted(self._entries.items())}
        try:
            write_durably(self._path, json.dumps(content).encode())
        except OSError as error_:
            raise OndeviceError(
                f"{self._path} can't be written: {error_.strerror}; make room, then run again with --resume"
            ) from error_

    def summary(self) -> dict[str, float]:
        """Relative error by kind: attention, embedding, feed_forward, head."""
        kinds: dict[str, SquaredError] = {}
        for name, error in sorted(self._entries.items()):
            kinds[_kind(name)] = kinds.get(_kind(name), SquaredError()) + error
        return {kind: error.relative for kind, error in sorted(kinds.items())}


def _kind(name: str) -> str:
    if name.startswith("neurons-"):
        return "feed_forward"
    if name == EMBEDDING:
        return "embedding"
    return "head" if name.startswith("head.") else "attention"


def _load(path: Path) -> dict[str, SquaredError]:
    """Errors that an earlier run saved; empty if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
        return {name: SquaredError(float(error), float(weight)) for name, (error, weight) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
