"""Reads sizes as people write them, and reads the memory and cores of this process and machine.

GB is 10^9 bytes, GiB is 2^30. Limits of control groups count as the machine's, because a process that exceeds
them is killed.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from ondevice.errors import NO_DESCRIPTOR, BackendUnavailableError, UsageError, descriptor_refused
from ondevice.records import dataclass

PAGE_BYTES = 4096
"""Alignment of direct reads, and of memory mappings."""
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*(%|[a-z]*)", re.ASCII)
_MAX_BYTES = 1 << 62
MIN_BARE_BYTES = 10**6
"""Smallest budget that may be written in bytes without a unit. No model runs in less."""
_MALLOC_MAPS_BYTES = 256 << 10
"""Least size of a block that `map_large_arrays` keeps out of heaps. A prompt chunk's arrays reach it, a
token's don't."""
_M_MMAP_THRESHOLD = -3
"""The parameter's number in glibc's malloc.h."""
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def parse_size(value: str | int, *, percent_of: int | None = None, auto: int | None = None) -> int:
    """The number of bytes that `value` means: `4GB`, `3.5GiB`, `60%`, `123456`, or `auto`. Fractions round
    down.

    percent_of: bytes that `100%` stands for; the machine's memory by default. auto: bytes that `auto` stands
    for; by default `auto` is refused. Raises UsageError on anything else, on a negative size and on more than
    2^62 bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MAX_BYTES:
            raise UsageError(f"size {value} is out of range; it must be from 0 to 2^62 bytes")
        return value
    text = str(value).strip().lower()
    if text == "auto" and auto is not None:
        return auto
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in (*_UNITS, "%"):
        raise UsageError(_size_help(str(value), match, auto is not None))
    number = Fraction(match[1])
    if match[2] == "%":
        if number > 100:
            raise UsageError(f"size {value!r} is above 100%")
        return math.floor(number * (memory_total() if percent_of is None else percent_of) / 100)
    if not match[2] and number.denominator != 1:
        raise UsageError(f"size {value!r} is not a whole number of bytes; did you mean {match[1]}GB?")
    size = math.floor(number * _UNITS[match[2]])
    if size > _MAX_BYTES:
        raise UsageError(f"size {value!r} is above the limit of 2^62 bytes")
    return size


def parse_budget(value: str | int, *, auto: int | None = None) -> int:
    """The bytes of a memory budget, parsed as by `parse_size`. Also raises UsageError for a small number
    without a unit.
    """
    size = parse_size(value, auto=auto)
    bare = str(value).strip().replace(".", "", 1).isdigit()
    if bare and 0 < size < MIN_BARE_BYTES:
        unit = "GB" if size < 1000 else "MB" if size < 100_000 else "kB"
        raise UsageError(f"a DRAM budget of {size} is {size} bytes; did you mean {size}{unit}?")
    return size


def _size_help(value: str, match: re.Match[str] | None, auto: bool) -> str:
    if match is not None and f"{match[2]}b" in _UNITS:
        unit = match[2].upper()
        return f"size {value!r} is ambiguous: write {match[1]}{unit}B (10^n) or {match[1]}{unit}iB (2^n)"
    kinds = "bytes, a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, a percentage such as 60%"
    return f"size {value[:40]!r} is not one; write {kinds}" + (", or auto" if auto else "")


def format_bytes(count: int) -> str:
    """`count` bytes in decimal units to three digits: `999 B`, `3.79 GB`, `-12.0 MB`."""
    if abs(count) < 1000:
        return f"{count} B"
    value, names = abs(count) / 1000, ["TB", "GB", "MB", "kB"]
    # 999.5 and up would round to four digits, so it belongs to the next unit.
    while value >= 999.5 and len(names) > 1:
        value /= 1000
        names.pop()
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{'-' if count < 0 else ''}{value:.{digits}f} {names[-1]}"


@dataclass(frozen=True)
class ProcessMemory:
    """Memory that the operating system charges to this process: current and peak.

    Linux: VmRSS and VmHWM (anonymous and mapped file pages). macOS: phys_footprint and its lifetime peak.
    """

    current_bytes: int
    peak_bytes: int


def process_memory(proc: Path = PROC) -> ProcessMemory:
    """The memory of this process. Raises BackendUnavailableError if the system doesn't report it."""
    if sys.platform == "darwin":
        return _macos_footprint()
    sizes = read_kilobytes(proc / "self" / "status", ("VmRSS", "VmHWM"))
    # VmRSS is summed from per-thread counters and may run ahead of the recorded peak by a few pages.
    return ProcessMemory(sizes["VmRSS"], max(sizes["VmRSS"], sizes["VmHWM"]))


@dataclass(frozen=True)
class MemoryRoom:
    """The memory of the machine, or of a control group that this process is in."""

    name: str
    """The machine or the control group, in words for messages."""
    limit_bytes: int
    """Total memory."""
    available_bytes: int
    """Memory that can still be allocated without swapping or being killed, never below 0.

    It excludes memory that this process already holds. Page cache that isn't in active use counts as free.
    """


def machine_room(proc: Path = PROC) -> MemoryRoom:
    """The machine's memory, regardless of control groups."""
    if sys.platform == "darwin":
        total = sysctl("hw.memsize")
        return MemoryRoom("this machine", total, total * sysctl("kern.memorystatus_level", 4) // 100)
    sizes = read_kilobytes(proc / "meminfo", ("MemTotal", "MemAvailable"))
    return MemoryRoom("this machine", sizes["MemTotal"], sizes["MemAvailable"])


def group_rooms(proc: Path = PROC, cgroup: Path = CGROUP) -> list[MemoryRoom]:
    """The memory of every control group with a limit that this process is in; empty on macOS."""
    if sys.platform == "darwin":
        return []
    return [
        MemoryRoom(
            f"the control group {group.folder}",
            group.limit_bytes,
            max(0, group.limit_bytes - group.used_bytes + group.unused_cache_bytes),
        )
        for group in memory_groups(proc, cgroup)
    ]


def memory_rooms(proc: Path = PROC, cgroup: Path = CGROUP) -> list[MemoryRoom]:
    """The machine's memory, and that of every control group with a limit that this process is in."""
    return [machine_room(proc), *group_rooms(proc, cgroup)]


def memory_total(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes of memory this process could ever have: the machine's, or a control group's limit if lower."""
    return min(room.limit_bytes for room in memory_rooms(proc, cgroup))


def memory_available(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that can still be allocated without swapping or being killed, never below 0."""
    return min(room.available_bytes for room in memory_rooms(proc, cgroup))


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Number of cores this process may use, at least 1.

    It is the number of cores in the CPU affinity, or the control group's quota, rounded up, if that is less.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    for folder in _group_folders(proc, cgroup, "cpu"):
        words: list[str | None] = [*(read_text(folder / "cpu.max") or "").split()]
        if len(words) != 2:
            words = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = map(_digits, words)
        if quota and period:
            cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a memory limit: where its files are, and what they say. Sizes are bytes."""

    folder: Path
    limit_bytes: int
    """Memory at which the group's processes are killed, or throttled if that limit is lower."""
    used_bytes: int
    """Memory of all processes in the group, page cache included."""
    inactive_cache_bytes: int
    active_cache_bytes: int
    mapped_cache_bytes: int
    """The part of both page caches that programs have mapped, such as their code."""
    limit_hits: int
    """Number of times that usage has hit the limit since the group was made."""

    @property
    def unused_cache_bytes(self) -> int:
        """Bytes of inactive page cache that no program has mapped.

        The system counts even mapped code as inactive until memory is short.
        """
        return max(0, self.inactive_cache_bytes - self.mapped_cache_bytes)


@dataclass(frozen=True)
class _GroupFiles:
    """The names of control files in a hierarchy, and of lines in these files."""

    limits: tuple[str, ...]
    usage: str
    cache: str
    """Prefix of the lines of `memory.stat` that count this group and those below it."""
    mapped: str
    """The line of `memory.stat` for page cache that is mapped."""
    hits: str


_GROUP_FILES = (
    _GroupFiles(("memory.max", "memory.high"), "memory.current", "", "file_mapped", "memory.events"),
    _GroupFiles(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "total_mapped_file", "memory.failcnt"
    ),
)


def memory_groups(proc: Path = PROC, cgroup: Path = CGROUP) -> Iterator[MemoryGroup]:
    """Yields every control group with a memory limit that this process is in, from the innermost
    to the root.
    """
    for folder in _group_folders(proc, cgroup, "memory"):
        for names in _GROUP_FILES:
            limits = [_digits(read_text(folder / name)) for name in names.limits]
            limit = min((limit for limit in limits if limit is not None), default=_MAX_BYTES)
            usage = _digits(read_text(folder / names.usage))
            if usage is None or limit >= _MAX_BYTES:
                continue
            counts = _counts(read_text(folder / "memory.stat"))
            hits = read_text(folder / names.hits)
            events = _counts(hits)
            yield MemoryGroup(
                folder,
                limit,
                usage,
                inactive_cache_bytes=counts.get(f"{names.cache}inactive_file", 0),
                active_cache_bytes=counts.get(f"{names.cache}active_file", 0),
                mapped_cache_bytes=counts.get(names.mapped, 0),
                limit_hits=(_digits(hits) or 0) + events.get("max", 0) + events.get("high", 0),
            )


def _group_folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of the controller's groups in v2 and v1 hierarchies, from the innermost to the root.

    Inside a container the path may name folders of the host that aren't mounted, which callers skip. The
    mount's root is then the container's group.
    """
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (cgroup / name for name in (controllers, controller))
        root = next((mount for mount in mounts if controllers and mount.is_dir()), cgroup)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth])


def read_text(path: Path) -> str | None:
    """The text of a system file; None if it can't be read.

    Raises OndeviceError if the process has no descriptor left for it, because the file may hold a limit.
    """
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise descriptor_refused(error) from error
        return None


def _counts(text: str | None) -> dict[str, int]:
    """Numbers by name, from those lines of a control file that consist of a name and an integer."""
    pairs = (line.partition(" ") for line in (text or "").splitlines())
    return {name: count for name, _, value in pairs if (count := _digits(value)) is not None}


def _digits(text: str | None) -> int | None:
    """The integer in a control file; None for `max`, -1 or a missing file."""
    text = (text or "").strip()
    return int(text) if text.isdecimal() and len(text) <= 20 else None


def read_kilobytes(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Bytes by name from lines such as `MemTotal: 8 kB`. Raises BackendUnavailableError if one is missing."""
    sizes = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        kilobytes = _digits(value.partition("kB")[0])
        if name in names and kilobytes is not None:
            sizes[name] = 1024 * kilobytes
    missing = [name for name in names if name not in sizes]
    if missing:
        raise BackendUnavailableError(f"{path} doesn't tell {', '.join(missing)}; memory can't be planned")
    return sizes


def sysctl(name: str, width: int = 8) -> int:
    """An integer of `width` bytes from macOS's sysctl."""
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib", use_errno=True)
    value, size = (ctypes.c_uint64 if width == 8 else ctypes.c_uint32)(0), ctypes.c_size_t(width)
    if library.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise BackendUnavailableError(f"sysctl {name} failed: {os.strerror(ctypes.get_errno())}")
    return int(value.value)


def _macos_footprint() -> ProcessMemory:
    """`proc_pid_rusage` with RUSAGE_INFO_V4: 16 bytes of uuid, then 36 counters (sys/resource.h)."""
    counters = (ctypes.c_uint64 * 38)()
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib", use_errno=True)
    if library.proc_pid_rusage(os.getpid(), 4, ctypes.byref(counters)):
        raise BackendUnavailableError(f"proc_pid_rusage failed: {os.strerror(ctypes.get_errno())}")
    footprint, lifetime_peak = counters[2 + 7], counters[2 + 28]
    return ProcessMemory(footprint, max(footprint, lifetime_peak))


def trim_heap() -> None:
    """Give freed memory back to the system. glibc would keep it, and it would count against the budget."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def map_large_arrays() -> None:
    """Make glibc give every block of _MALLOC_MAPS_BYTES or more a separate memory mapping.

    By default glibc raises that size to the largest freed block, up to 32 MiB, and keeps freed memory in
    heaps: after a prompt of 1,000 tokens, 65 MB in the heap of the thread that runs MLX.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MALLOC_MAPS_BYTES)
