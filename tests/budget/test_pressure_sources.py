"""What the system says of memory pressure, by made-up files and a library that stands in for macOS's."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice.budget import pressure_sources
from ondevice.budget.pressure import Level, Reading
from ondevice.budget.pressure_sources import LinuxSource, MacosSource, system_source
from ondevice.errors import BackendUnavailableError
from ondevice.units import ProcessMemory
from tests.support.fake_system import GIB, FakeSystem

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HELD = 3 * GIB
PSI = "{} avg10={:.2f} avg60=0.00 avg300=0.00 total=7"


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    found = FakeSystem(tmp_path)
    found.write(found.proc / "self" / "status", f"VmRSS: {HELD >> 10} kB\nVmHWM: {HELD >> 10} kB\n")
    return found


def read(system: FakeSystem) -> Reading:
    return LinuxSource(system.proc, system.cgroup).read()


def stalls(system: FakeSystem, path: Path, some: float, full: float) -> None:
    system.write(path, f"{PSI.format('some', some)}\n{PSI.format('full', full)}")


def group(
    system: FakeSystem, folder: str, limit: int | str, used: int, cache: int = 0, hits: int = 0
) -> Path:
    """A version 2 group whose cache is half in active use."""
    path = system.cgroup / folder
    files = {"max": limit, "current": used, "events": f"low 9\nhigh {hits}\nmax {hits}\noom 9"}
    files["stat"] = f"anon 1\nactive_file {cache // 2}\ninactive_file {cache - cache // 2}\nfile 9"
    for name, text in files.items():
        system.write(path / f"memory.{name}", text)
    return path


def test_a_machine_without_cgroups_reports_its_memory_and_stalls(system: FakeSystem) -> None:
    assert read(system) == Reading(8 * GIB, 6 * GIB, HELD)
    stalls(system, system.proc / "pressure" / "memory", 34.5, 100)
    assert read(system) == Reading(8 * GIB, 6 * GIB, HELD, stalled=0.345, blocked=1.0)


def test_the_scarcest_group_counts_with_what_waits_in_it(system: FakeSystem) -> None:
    system.join("0::/a/b/c")
    stalls(system, system.proc / "pressure" / "memory", 99, 99)
    group(system, "a", 7 * GIB, 3 * GIB)
    scarce = group(system, "a/b", 4 * GIB, 4 * GIB, cache=GIB, hits=3)
    group(system, "a/b/c", "max", GIB)
    stalls(system, scarce / "memory.pressure", 20, 5)
    assert read(system) == Reading(4 * GIB, GIB, HELD, stalled=0.2, blocked=0.05, limit_hits=6)
    system.write(scarce / "memory.high", 7 * GIB // 2)
    assert read(system).available_bytes == GIB // 2
    system.write(scarce / "memory.current", 9 * GIB)
    assert read(system).available_bytes == 0


def test_version_1_has_its_own_names_and_no_waiting(system: FakeSystem) -> None:
    system.join("4:memory:/box\n0::/")
    files = {"limit_in_bytes": 2 * GIB, "usage_in_bytes": 2 * GIB, "failcnt": 7}
    files_text = files | {"stat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB // 2}"}
    for name, text in files_text.items():
        system.write(system.cgroup / "memory" / "box" / f"memory.{name}", text)
    stalls(system, system.proc / "pressure" / "memory", 99, 99)
    assert read(system) == Reading(2 * GIB, 3 * GIB // 2, HELD, limit_hits=7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "some",
        "some avg10=",
        "some avg10=x.y avg60=0.00",
        "some avg10=-1.00 avg60=0.00",
        "some avg10=1e9 avg60=0.00",
        "some avg10=" + "9" * 5000 + ".00",
        "some avg10=nan avg60=0.00\nfull avg10=. total=3",
        "none avg10=50.00 avg60=0.00",
        "\x00\xff\n\n=",
    ],
)
def test_waiting_that_is_told_in_vain_is_none(system: FakeSystem, text: str) -> None:
    system.write(system.proc / "pressure" / "memory", text)
    assert read(system) == Reading(8 * GIB, 6 * GIB, HELD)


@pytest.mark.parametrize("file", ["max", "current", "events", "stat", "pressure"])
@pytest.mark.parametrize("text", ["", "-1", "x", "9" * 9999, "max\nmax\n", "\x00"])
def test_a_malformed_group_is_no_error(system: FakeSystem, file: str, text: str) -> None:
    system.join("0::/a\n::\n\n7")
    system.write(group(system, "a", 2 * GIB, GIB) / f"memory.{file}", text)
    found = read(system)
    expected = (8 * GIB, 6 * GIB) if file in ("max", "current") else (2 * GIB, GIB)
    assert (found.limit_bytes, found.available_bytes, found.limit_hits) == (*expected, 0)


def test_a_system_that_does_not_tell_is_a_typed_error(system: FakeSystem) -> None:
    system.write(system.proc / "meminfo", "MemTotal: 1 kB\nMemAvailable:\n")
    with pytest.raises(BackendUnavailableError, match="MemAvailable"):
        read(system)


@linux_only
def test_this_machine_is_plausible() -> None:
    source = system_source(lambda: None)
    found = source.read()
    assert 0 < found.available_bytes <= found.limit_bytes
    assert 0 < found.process_bytes < found.limit_bytes
    source.close()


class FakeDispatch:
    """libSystem's event sources: what is called is noted, and `fire` does what the kernel would."""

    def __init__(self, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.bits = 0
        self.context = 0
        self.handler: Callable[[int], None] = lambda context: None
        # Data, of which only the address is taken.
        self._dispatch_source_type_memorypressure = ctypes.pointer(ctypes.c_int(7))
        made = None if refuses else 4096

        def define(name: str, answer: Callable[..., Any] = lambda *arguments: None) -> None:
            def call(*arguments: Any) -> Any:
                self.calls.append(name)
                return answer(*arguments)

            # ctypes' functions take a `restype`; so do Python's, as any attribute.
            setattr(self, f"dispatch_{name}", call)

        define("get_global_queue", lambda *arguments: 64)
        define("source_create", lambda kind, handle, mask, queue: made if mask.value == 7 else None)
        define("source_get_data", lambda source: self.bits)
        define("set_context", lambda source, context: setattr(self, "context", context.value))
        define("source_set_event_handler_f", lambda source, handler: setattr(self, "handler", handler))
        for name in ("resume", "source_cancel", "release"):
            define(name)

    def fire(self, bits: int) -> None:
        self.bits = bits
        self.handler(self.context)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What macOS's kernel answers: its level, and sizes."""
    answers = SimpleNamespace(level=1)
    monkeypatch.setattr(pressure_sources, "sysctl", lambda name, width: answers.level)
    monkeypatch.setattr(pressure_sources, "memory_total", lambda: 8 * GIB)
    monkeypatch.setattr(pressure_sources, "memory_available", lambda: GIB)
    monkeypatch.setattr(pressure_sources, "process_memory", lambda: ProcessMemory(HELD, HELD))
    yield answers
    assert not pressure_sources._listening


@pytest.mark.parametrize(
    ("level", "reported"), [(1, "normal"), (2, "warning"), (4, "critical"), (9, "normal")]
)
def test_macos_levels_are_polled(kernel: SimpleNamespace, level: int, reported: Level) -> None:
    kernel.level = level
    source = MacosSource(lambda: None, FakeDispatch(refuses=True))
    assert source.read() == Reading(8 * GIB, GIB, HELD, reported=reported)
    source.close()


def test_macos_events_wake_and_count_once(kernel: SimpleNamespace) -> None:
    woken: list[str] = []
    library = FakeDispatch()
    source = MacosSource(lambda: woken.append("up"), library)
    assert library.calls[-1] == "resume"
    library.fire(4)
    assert woken == ["up"]
    assert source.read().reported == "critical"
    assert source.read().reported == "normal"
    kernel.level = 4
    library.fire(2)
    assert source.read().reported == "critical"
    library.fire(64)
    assert (len(woken), source.read().reported) == (3, "critical")
    source.close()
    source.close()
    assert library.calls.count("source_cancel") == library.calls.count("release") == 1


def test_a_macos_event_that_comes_late_finds_nobody(kernel: SimpleNamespace) -> None:
    woken: list[str] = []
    libraries = [FakeDispatch(), FakeDispatch()]
    first, second = (MacosSource(lambda: woken.append("up"), library) for library in libraries)
    first.close()
    libraries[0].fire(4)
    assert not woken
    libraries[1].fire(2)
    assert (woken, second.read().reported) == (["up"], "warning")
    second.close()


@linux_only
def test_a_symbol_of_data_has_an_address() -> None:
    """What the source's type is taken by, tried on a library that is here."""
    library = ctypes.CDLL(None)
    address = ctypes.cast(library.environ, ctypes.c_void_p).value
    assert address == ctypes.addressof(ctypes.c_void_p.in_dll(library, "environ"))
