"""Memory that the system gives slowly, as a virtual machine whose host has taken free memory back."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ondevice.kernels import _native


def slow_memory(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Caches that are made from here on have segments made ahead, small ones too, each in `seconds`."""
    allocate = _native.allocate

    def slowly(nbytes: int, populated: bool = False) -> Any:
        if threading.current_thread().name.startswith("ondevice-segments"):
            time.sleep(seconds)
        return allocate(nbytes, populated)

    patch.setattr(_native, "allocate", slowly)
    patch.setattr(_native, "POPULATED_BYTES", 1)
