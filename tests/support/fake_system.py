"""A made-up /proc and /sys/fs/cgroup, for what reads the system's files."""

from __future__ import annotations

from pathlib import Path

from ondevice.units import memory_available, memory_total, usable_cores

GIB = 1 << 30


class FakeSystem:
    """A /proc and a /sys/fs/cgroup in a folder: 8 GiB of memory, 6 GiB of it available."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
        self.cgroup.mkdir()

    def write(self, path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def join(self, lines: str) -> None:
        self.write(self.proc / "self" / "cgroup", lines)

    @property
    def total(self) -> int:
        return memory_total(self.proc, self.cgroup)

    @property
    def available(self) -> int:
        return memory_available(self.proc, self.cgroup)

    @property
    def cores(self) -> int:
        return usable_cores(self.proc, self.cgroup)
