"""What became of a case, and what counts as a finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["accepted", "refused", "crash", "hang", "memory", "untyped", "difference", "panic"]
FINDINGS: tuple[Kind, ...] = ("crash", "hang", "memory", "untyped", "difference", "panic")

SLACK_BYTES = 64 << 20
"""What a process may take above its plan."""
LIMIT_SECONDS = 10.0


class Difference(Exception):  # noqa: N818
    """One input, two configurations that must agree, and they don't."""


@dataclass(frozen=True)
class Outcome:
    """peak_bytes: resident at most; allowed_bytes: what the plan, or the process before the case, was."""

    kind: Kind
    detail: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    allowed_bytes: int = 0

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS
