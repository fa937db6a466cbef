"""Sizes as people write them, and memory and cores as the system reports them."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.errors import BackendUnavailableError, UsageError
from ondevice.units import (
    format_bytes,
    memory_available,
    memory_total,
    parse_size,
    process_memory,
    usable_cores,
)
from tests.support.fake_system import GIB, FakeSystem

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4_000_000_000),
        ("3.5GiB", 3_758_096_384),
        ("3.5 gib", 3_758_096_384),
        (" 512MB ", 512_000_000),
        ("512MiB", 536_870_912),
        ("64kB", 64_000),
        ("64KB", 64_000),
        ("64KiB", 65_536),
        ("1TB", 10**12),
        ("2TiB", 2**41),
        ("123", 123),
        ("123B", 123),
        ("0", 0),
        ("0.1GB", 100_000_000),
        ("0.3KiB", 307),
        (4_000_000_000, 4_000_000_000),
    ],
)
def test_a_size_is_read_in_decimal_and_binary_units(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


def test_percentages_and_auto_take_the_given_amounts() -> None:
    assert parse_size("60%", percent_of=1001) == 600
    assert parse_size("12.5%", percent_of=8000) == 1000
    assert parse_size("100%") == memory_total()
    assert parse_size("AUTO", auto=77) == 77


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4G", r"ambiguous: write 4GB .* or 4GiB"),
        ("4m", r"4MB .* 4MiB"),
        ("", "GiB"),
        ("GB", "GiB"),
        ("-4GB", "GiB"),
        ("4,5GB", "GiB"),
        ("1e9", "GiB"),
        ("nan", "GiB"),
        ("inf", "GiB"),
        ("٤GB", "GiB"),
        ("4GB extra", "GiB"),
        ("101%", "above 100%"),
        ("1.5", "whole number"),
        ("99999999TB", "limit"),
        ("9" * 1000, "GiB"),
        ("auto", "write"),
        (-1, "out of range"),
        (1 << 63, "out of range"),
        (True, "GiB"),
    ],
)
def test_what_is_not_a_size_is_refused_with_advice(text: str | int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_size(text)


@given(st.integers(0, 1 << 62))
def test_plain_integers_are_themselves(count: int) -> None:
    assert parse_size(str(count)) == parse_size(count) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_995, "10.0 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (3_791_273_984, "3.79 GB"),
        (-12_000_000, "-12.0 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_are_shown_with_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 10**15 - 10**13))
def test_formatted_sizes_read_back_within_half_a_percent(count: int) -> None:
    assert abs(parse_size(format_bytes(count)) - count) <= 0.005 * count + 1


@linux_only
def test_process_memory_sees_an_allocation_come_and_go() -> None:
    size = 64 << 20
    before = process_memory()
    block = np.ones(size, dtype=np.uint8)
    during = process_memory()
    del block
    after = process_memory()
    assert during.current_bytes - before.current_bytes > 0.9 * size
    assert during.current_bytes - after.current_bytes > 0.9 * size
    assert after.peak_bytes >= during.current_bytes - (1 << 20)
    assert after.peak_bytes >= after.current_bytes


@linux_only
def test_this_machine_is_plausible() -> None:
    assert 0 < memory_available() <= memory_total()
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    return FakeSystem(tmp_path)


def test_without_groups_the_machine_counts(system: FakeSystem) -> None:
    assert (system.total, system.available) == (8 * GIB, 6 * GIB)


def test_version_2_limits_bind_from_any_ancestor(system: FakeSystem) -> None:
    system.join("0::/a/b")
    for folder, limit, usage, inactive in (("a", 4 * GIB, 3 * GIB, GIB // 2), ("a/b", "max", 9, 0)):
        system.write(system.cgroup / folder / "memory.max", limit)
        system.write(system.cgroup / folder / "memory.current", usage)
        system.write(system.cgroup / folder / "memory.stat", f"anon 7\ninactive_file {inactive}\nfile 9")
    assert system.total == 4 * GIB
    assert system.available == GIB + GIB // 2


def test_version_1_limits_and_reclaimable_cache(system: FakeSystem) -> None:
    system.join("9:cpu,cpuacct:/\n4:memory:/box\n0::/")
    group = system.cgroup / "memory" / "box"
    system.write(group / "memory.limit_in_bytes", 2 * GIB)
    system.write(group / "memory.usage_in_bytes", 3 * GIB // 2)
    system.write(group / "memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB // 4}")
    system.write(system.cgroup / "memory" / "memory.limit_in_bytes", 9223372036854771712)
    system.write(system.cgroup / "memory" / "memory.usage_in_bytes", GIB)
    assert (system.total, system.available) == (2 * GIB, 3 * GIB // 4)


def test_a_group_is_throttled_before_it_is_killed(system: FakeSystem) -> None:
    system.join("0::/a")
    for name, text in (("max", "max"), ("high", 2 * GIB), ("current", GIB)):
        system.write(system.cgroup / "a" / f"memory.{name}", text)
    assert (system.total, system.available) == (2 * GIB, GIB)
    system.write(system.cgroup / "a" / "memory.max", GIB // 2)
    assert system.total == GIB // 2


@pytest.mark.parametrize(
    "text", ["", "inactive_file", "inactive_file x\n\n \x00", "inactive_file 9" + "9" * 9999]
)
def test_what_a_group_says_in_vain_is_no_cache(system: FakeSystem, text: str) -> None:
    system.join("0::/a")
    for name, content in (("max", 2 * GIB), ("current", GIB), ("stat", text)):
        system.write(system.cgroup / "a" / f"memory.{name}", content)
    assert system.available == GIB


@pytest.mark.parametrize("text", ["MemTotal:", "MemTotal: much kB", "MemTotal: -1 kB", "MemTotal", "\xff"])
def test_sizes_that_are_none_are_a_typed_error(system: FakeSystem, text: str) -> None:
    system.write(system.proc / "meminfo", text)
    with pytest.raises(BackendUnavailableError, match="MemTotal"):
        memory_total(system.proc, system.cgroup)


def test_in_a_container_the_mounts_root_is_the_group(system: FakeSystem) -> None:
    system.join("0::/host/folder/that/is/not/mounted")
    system.write(system.cgroup / "memory.max", 3 * GIB)
    system.write(system.cgroup / "memory.current", 4 * GIB)
    assert (system.total, system.available) == (3 * GIB, 0)


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("max 100000", None), ("0 0", None)])
def test_version_2_quota_cuts_the_cores(system: FakeSystem, quota: str, cores: int | None) -> None:
    system.join("0::/a")
    system.write(system.cgroup / "a" / "cpu.max", quota)
    assert system.cores == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("quota", "cores"), [(30000, 1), (-1, None)])
def test_version_1_quota_cuts_the_cores(system: FakeSystem, quota: int, cores: int | None) -> None:
    system.join("3:cpu,cpuacct:/box")
    system.write(system.cgroup / "cpu,cpuacct" / "box" / "cpu.cfs_quota_us", quota)
    system.write(system.cgroup / "cpu,cpuacct" / "box" / "cpu.cfs_period_us", 100000)
    assert system.cores == (cores or len(os.sched_getaffinity(0)))


def test_a_quota_of_part_of_a_core_rounds_up(system: FakeSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    system.join("0::/a")
    system.write(system.cgroup / "a" / "cpu.max", "250000 100000")
    assert system.cores == 3


def test_a_system_that_does_not_tell_is_a_typed_error(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    with pytest.raises(BackendUnavailableError, match="VmRSS"):
        process_memory(tmp_path)


class FakeSystemLibrary:
    """Answers of macOS's libSystem, written through the pointers as the C functions do."""

    def __init__(self, failing: bool = False) -> None:
        self.failing = failing

    def proc_pid_rusage(self, pid: int, flavor: int, out: object) -> int:
        assert (pid, flavor) == (os.getpid(), 4)
        words = ctypes.cast(out, ctypes.POINTER(ctypes.c_uint64))  # type: ignore[arg-type]
        words[2 + 7], words[2 + 28] = 700, 900
        return -1 if self.failing else 0

    def sysctlbyname(self, name: bytes, out: object, size: object, new: object, length: object) -> int:
        values = {
            b"hw.memsize": (ctypes.c_uint64, 1 << 34),
            b"kern.memorystatus_level": (ctypes.c_uint32, 25),
        }
        kind, value = values[name]
        ctypes.cast(out, ctypes.POINTER(kind))[0] = value  # type: ignore[arg-type]
        return -1 if self.failing else 0


def test_macos_figures_come_from_footprint_and_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda path, use_errno: FakeSystemLibrary())
    assert (process_memory().current_bytes, process_memory().peak_bytes) == (700, 900)
    assert (memory_total(), memory_available()) == (1 << 34, 1 << 32)


def test_macos_failures_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda path, use_errno: FakeSystemLibrary(failing=True))
    with pytest.raises(BackendUnavailableError, match="proc_pid_rusage"):
        process_memory()
    with pytest.raises(BackendUnavailableError, match=r"hw\.memsize"):
        memory_total()
