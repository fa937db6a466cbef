"""Results of an examination: a `Check` per thing examined, and the `DoctorReport` of all checks.

This module knows nothing of machines and models, and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from typing import Any, Literal

from ondevice.errors import OndeviceError
from ondevice.records import dataclass

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """The result of examining one thing.

    value: the result in words. remedy: what to do about it; empty if there is nothing to do. figures: the
    result for programs, by name; names contain the unit.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DoctorReport:
    """All checks, in the order they were made, and the time they took."""

    checks: tuple[Check, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no check failed; warnings are allowed."""
        return not self.count("failed")

    def count(self, status: Status) -> int:
        """Number of checks with that status."""
        return sum(check.status == status for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as an object for JSON."""
        return {
            "ok": self.ok,
            "failed": self.count("failed"),
            "warnings": self.count("warning"),
            "seconds": self.seconds,
            "checks": [asdict(check) for check in self.checks],
        }


def attempt(name: str, examine: Callable[[], Check]) -> Check:
    """The check that `examine` returns, or a failed check if it raises OndeviceError, ImportError
    or OSError.
    """
    try:
        return examine()
    except OndeviceError as error:
        return Check(name, "failed", error.for_command_line)
    except ImportError as error:
        remedy = "install ondevice again; in an app, pack all of its modules and those it depends on"
        return Check(name, "failed", f"a part of this installation can't be imported: {error}", remedy)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        return Check(name, "failed", f"{named}{error.strerror or error}")
