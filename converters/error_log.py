"""The quantisation error measured so far. It is kept in an unfinished bundle's folder, so that a run can be
resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ondevice.bundle.files import write_durably
from ondevice.converters.fidelity import Fidelity, joined
from ondevice.converters.quantize import SquaredError
from ondevice.errors import OndeviceError

_SUMMARISED = {
    f"{prefix}{which}": "feed_forward" for prefix in ("", "expert_") for which in ("gate", "up", "down")
}
"""Kinds that the summary merges, because a bundle's manifest has one error for them."""


class ErrorLog:
    """Quantisation errors by record file or resident tensor, and within these by kind of matrix.

    An entry is on disk before the data it belongs to.
    """

    FILE = "quantisation-error.json"

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.FILE
        self._entries = _load(self._path)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def save(self, name: str, kinds: Mapping[str, Fidelity]) -> None:
        """Save the errors of one file or tensor durably. Raises OndeviceError if the disk refuses."""
        self._entries[name] = dict(kinds)
        content = {key: _to_json(entry) for key, entry in sorted(self._entries.items())}
        try:
            write_durably(self._path, json.dumps(content).encode())
        except OSError as error_:
            raise OndeviceError(
                f"{self._path} can't be written: {error_.strerror}; make room, then run again with --resume"
            ) from error_

    def kinds(self) -> dict[str, Fidelity]:
        """All errors so far, by kind, such as attention, down or embedding."""
        kinds: dict[str, Fidelity] = {}
        for _, entry in sorted(self._entries.items()):
            kinds = joined(kinds, entry)
        return dict(sorted(kinds.items()))

    def summary(self) -> dict[str, float]:
        """Relative error by kind: attention, embedding, feed_forward, head."""
        errors: dict[str, SquaredError] = {}
        for kind, fidelity in self.kinds().items():
            name = _SUMMARISED.get(kind, kind)
            errors[name] = errors.get(name, SquaredError()) + fidelity.error
        return {name: error.relative for name, error in sorted(errors.items())}


def _to_json(kinds: Mapping[str, Fidelity]) -> dict[str, list[float]]:
    return {
        kind: [each.copied, each.rescaled, each.rounded, each.error.error, each.error.weight]
        for kind, each in sorted(kinds.items())
    }


def _load(path: Path) -> dict[str, dict[str, Fidelity]]:
    """Errors that an earlier run saved; empty if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
        return {
            name: {
                kind: Fidelity(int(copied), int(rescaled), int(rounded), SquaredError(float(e), float(w)))
                for kind, (copied, rescaled, rounded, e, w) in entry.items()
            }
            for name, entry in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}
