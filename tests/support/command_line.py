"""The command line in this process, and in one of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on the one line of stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Result]


def command(*arguments: object) -> list[str]:
    """A command line for a process of its own."""
    return [sys.executable, "-m", "ondevice", *map(str, arguments)]
