"""Reads memory pressure from the system: Linux's control groups, meminfo and PSI, macOS's levels and events.

A source is used by one thread. `pressure.py` decides what readings mean.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ondevice.budget.pressure import LEVELS, Level, Reading
from ondevice.units import (
    CGROUP,
    PROC,
    memory_available,
    memory_groups,
    memory_total,
    process_memory,
    read_kilobytes,
    read_text,
    sysctl,
)

log = logging.getLogger(__name__)

Wake = Callable[[], None]
"""Asks for a look at once; safe from any thread."""


class PressureSource(Protocol):
    """A source of readings."""

    def read(self) -> Reading:
        """One reading. Raises BackendUnavailableError if the system gives none."""

    def close(self) -> None:
        """Stop reading. Idempotent."""


def system_source(wake: Wake) -> PressureSource:
    """The source of this system. wake: called from a system thread when the level changes."""
    return MacosSource(wake) if sys.platform == "darwin" else LinuxSource()


class LinuxSource:
    """Reads the machine and control groups of both versions. The one with the least available memory
    counts.
    """

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._proc, self._cgroup = proc, cgroup

    def read(self) -> Reading:
        """The reading of the machine or group with the least available memory, and how long its tasks wait
        for memory.
        """
        process_bytes = process_memory(self._proc).current_bytes
        sizes = read_kilobytes(self._proc / "meminfo", ("MemTotal", "MemAvailable"))
        stalled, blocked = _stalls(self._proc / "pressure" / "memory")
        scarcest = Reading(sizes["MemTotal"], sizes["MemAvailable"], process_bytes, stalled, blocked)
        for group in memory_groups(self._proc, self._cgroup):
            # The system drops page cache, active or not, before it kills a process.
            cache_bytes = group.inactive_cache_bytes + group.active_cache_bytes
            available = max(0, group.limit_bytes - group.used_bytes + cache_bytes)
            if available < scarcest.available_bytes:
                stalled, blocked = _stalls(group.folder / "memory.pressure")
                scarcest = Reading(
                    group.limit_bytes, available, process_bytes, stalled, blocked, group.limit_hits
                )
        return scarcest

    def close(self) -> None:
        """Nothing to do: no files are kept open."""


def _stalls(path: Path) -> tuple[float, float]:
    """(some, full) of a PSI file over the last ten seconds, from 0 to 1. Both are 0 if there is no
    such file.
    """
    shares = {"some": 0.0, "full": 0.0}
    for line in (read_text(path) or "").splitlines():
        kind, _, averages = line.partition(" avg10=")
        percent, _, hundredths = averages.partition(" ")[0].partition(".")
        if (
            kind in shares
            and percent.isdecimal()
            and hundredths.isdecimal()
            and len(percent + hundredths) <= 5
        ):
            shares[kind] = int(percent + hundredths) / 10 ** (2 + len(hundredths))
    return shares["some"], shares["full"]


_REPORTED: dict[int, Level] = {1: "normal", 2: "warning", 4: "critical"}
"""Levels by the bits of macOS's kernel and its events (sys/event.h, dispatch/source.h)."""
_EVENTS = sum(_REPORTED)


class MacosSource:
    """Reads the kernel's level at every look, and gets events between looks, which call `wake`."""

    def __init__(self, wake: Wake, library: Any = None) -> None:
        """library: libSystem, or a stand-in for tests. If it refuses events, pressure is noticed only at
        looks.
        """
        self._event: Level = "normal"
        self._wake = wake
        self._library = ctypes.CDLL("/usr/lib/libSystem.B.dylib") if library is None else library
        self._key = next(_keys)
        self._source: ctypes.c_void_p | None = None
        self._open()

    def read(self) -> Reading:
        """The higher of the kernel's level and that of events since the last look."""
        event, self._event = self._event, "normal"
        level = _REPORTED.get(sysctl("kern.memorystatus_vm_pressure_level", 4), "normal")
        worse = max(level, event, key=LEVELS.index)
        return Reading(memory_total(), memory_available(), process_memory().current_bytes, reported=worse)

    def close(self) -> None:
        """Stop receiving events. Idempotent. An event that is on its way is ignored."""
        if _listening.pop(self._key, None) is not None:
            self._library.dispatch_source_cancel(self._source)
            self._library.dispatch_release(self._source)

    def _open(self) -> None:
        library = self._library
        library.dispatch_get_global_queue.restype = ctypes.c_void_p
        library.dispatch_source_create.restype = ctypes.c_void_p
        library.dispatch_source_get_data.restype = ctypes.c_ulong
        # The symbol is data: its address is passed, and it is never called.
        kind = ctypes.cast(library._dispatch_source_type_memorypressure, ctypes.c_void_p)
        queue = ctypes.c_void_p(library.dispatch_get_global_queue(ctypes.c_long(0), ctypes.c_ulong(0)))
        created = library.dispatch_source_create(kind, ctypes.c_size_t(0), ctypes.c_ulong(_EVENTS), queue)
        if not created:
            log.info("macOS gives no memory pressure events; its level is polled")
            return
        source = self._source = ctypes.c_void_p(created)
        _listening[self._key] = self
        library.dispatch_set_context(source, ctypes.c_void_p(self._key))
        library.dispatch_source_set_event_handler_f(source, _handler())
        library.dispatch_resume(source)

    def _happened(self) -> None:
        bits = self._library.dispatch_source_get_data(self._source)
        levels = (level for bit, level in _REPORTED.items() if bits & bit)
        self._event = max(levels, key=LEVELS.index, default="normal")
        self._wake()


_keys = itertools.count(1)
_listening: dict[int, MacosSource] = {}
"""Sources by their events' context, a number, so that no event holds the address of an object."""


@functools.cache
def _handler() -> Any:
    """The function that the system calls for all events. It is never freed, because an event may still call
    it.
    """

    def event(key: int | None) -> None:
        source = _listening.get(key or 0)
        if source is not None:
            source._happened()

    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(event)
