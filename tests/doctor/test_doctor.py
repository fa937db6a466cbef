"""`ondevice doctor`: what is wrong is found, check by check, and said in words and in JSON; nothing stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import ondevice as package
from ondevice import doctor
from ondevice.doctor import machine, storage
from ondevice.doctor.check import Check, DoctorReport, attempt
from ondevice.doctor.rates import multiply_rate
from ondevice.errors import BackendUnavailableError, FlashReadError, OndeviceError, UsageError
from ondevice.kernels import _native
from ondevice.runtime import owner
from ondevice.runtime.models import shipped_folder
from tests.support.bundles import copy_files
from tests.support.command_line import Run

SHIPPED = shipped_folder() / "small-relu"
NAMES = [
    "versions", "processor", "kernels", "memory", "dram", "mlx", "metal", "models folder", "settings file",
    "cache folder", "package folder", "shipped model", "flash",
    "generation cpu", "generation mlx", "generation reference", "rows mlx",
]  # fmt: skip
FINE = Check("kernels", "ok", "avx2: bit for bit as scalar")
SLOW = Check("flash", "warning", "1 MiB at 9.00 MB/s", "an internal SSD", {"io": "direct"})
WRONG = Check("memory", "failed", "it doesn't tell", "ask it")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of the disk that take no time and find any disk fast enough."""
    monkeypatch.setattr(storage, "SAMPLE_BYTES", storage.CHUNK_BYTES)
    monkeypatch.setattr(storage, "READ_SECONDS", 0.01)
    monkeypatch.setattr(storage, "SLOW_BYTES_PER_SECOND", 1.0)


def below_a_file(folder: Path) -> Path:
    """A folder that nobody can make, root included."""
    (folder / "file").touch()
    return folder / "file" / "models"


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*arguments: object, **options: object) -> NoReturn:
        raise error

    return fail


# --- the whole ------------------------------------------------------------------------------------------


def at_work() -> int:
    """Threads but those that closed models on MLX left to the next."""
    return threading.active_count() - len(owner._IDLE_THREADS)


def test_this_machine_is_sound(ondevice: Run, small: None, tmp_path: Path) -> None:
    files, threads = sorted(SHIPPED.iterdir()), at_work()
    result = ondevice("doctor", "--json")
    found = result.json
    assert (result.code, found["ok"], found["failed"]) == (0, True, 0), found
    assert list(found) == ["ok", "failed", "warnings", "seconds", "checks"]
    assert {tuple(check) for check in found["checks"]} == {("name", "status", "value", "remedy", "figures")}
    checks = {check["name"]: check for check in found["checks"]}
    assert [name for name in checks if not name.startswith("flash ")] == NAMES
    assert checks["generation cpu"]["figures"]["different_tokens"] == []
    assert checks["flash"]["figures"]["rates"]
    assert "100 %" in result.err
    assert sorted(SHIPPED.iterdir()) == files
    assert not (tmp_path / "home").exists()
    assert at_work() == threads


def test_an_app_gets_the_report_and_no_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_steps", lambda model: [("a", lambda: FINE), ("b", lambda: SLOW)])
    told: list[tuple[float, str]] = []
    report = package.examine(on_progress=lambda share, what: told.append((share, what)))
    assert report.checks == (FINE, SLOW)
    assert report.ok
    assert told == [(0.0, "a"), (0.5, "b"), (1.0, "done")]
    assert capfd.readouterr() == ("", "")


def test_a_callback_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_steps", lambda model: [("a", raising(AssertionError()))])
    with pytest.raises(KeyboardInterrupt):
        doctor.examine(on_progress=raising(KeyboardInterrupt()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("checks", "code", "last"),
    [
        ((FINE, SLOW), 0, "2 checks in 1.5 s: 0 failed, 1 with a warning"),
        ((FINE, WRONG), 1, "2 checks in 1.5 s: 1 failed, 0 with a warning"),
    ],
)
def test_text_and_exit_codes(
    ondevice: Run, monkeypatch: pytest.MonkeyPatch, checks: tuple[Check, ...], code: int, last: str
) -> None:
    asked: list[Any] = []
    report = DoctorReport(checks, 1.5)
    monkeypatch.setattr(doctor, "examine", lambda model, on_progress: asked.append(model) or report)
    shown = ondevice("doctor", "--model", "a-name")
    assert (shown.code, asked) == (code, ["a-name"])
    first, second, remedy, end = shown.out.splitlines()
    assert first.split(maxsplit=2) == ["ok", "kernels", "avx2: bit for bit as scalar"]
    assert second.split(maxsplit=2) == [checks[1].status, checks[1].name, checks[1].value]
    assert (remedy.strip(), end) == (f"-> {checks[1].remedy}", last)
    as_json = ondevice("doctor", "--json")
    assert (as_json.code, as_json.json) == (code, json.loads(json.dumps(report.to_dict())))
    assert as_json.json["checks"][1]["remedy"] == checks[1].remedy


def test_an_installation_without_kernels_is_a_finding(tmp_path: Path) -> None:
    """As in an app that was packed without the extension."""
    program = (
        "import sys, ondevice\n"
        "sys.modules['ondevice.kernels._native'] = None\n"
        "print({check.name: check.status for check in ondevice.examine().checks})"
    )
    environment = os.environ | {"HOME": str(tmp_path), "ONDEVICE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    status = eval(done.stdout)
    broken = {name for name in NAMES if name.split()[0] in ("kernels", "shipped", "generation")}
    assert {name for name, value in status.items() if value == "failed"} >= broken
    assert (status["versions"], status["memory"]) == ("ok", "ok")


def test_refusals_become_failed_checks() -> None:
    for error, value in (
        (OndeviceError("too little"), "too little"),
        (FileNotFoundError(2, "No such file", "x"), "x: No such file"),
        (ImportError("no tokenizers"), "can't be imported: no tokenizers"),
    ):
        check = attempt("name", raising(error))
        assert (check.name, check.status) == ("name", "failed")
        assert value in check.value
    with pytest.raises(ZeroDivisionError):
        attempt("name", raising(ZeroDivisionError()))


# --- the machine ----------------------------------------------------------------------------------------


def test_a_missing_module_fails() -> None:
    check = machine.versions(("numpy", "no_such_module"))
    assert check.status == "failed"
    assert check.value.startswith("no_such_module missing; ondevice ")
    assert "pip install no_such_module" in check.remedy


def test_a_target_that_computes_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "available_targets", lambda: ["avx512", "avx2", "scalar"])
    right, wrong = machine.kernel_product("scalar"), bytearray(machine.kernel_product("scalar"))
    wrong[-1] ^= 1
    monkeypatch.setattr(machine, "kernel_product", lambda target: wrong if target == "avx512" else right)
    check = machine.kernels()
    assert (check.status, check.figures["wrong_targets"]) == ("failed", ["avx512"])
    assert "right: avx2" in check.value


def test_targets_are_compared_at_every_number_of_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    used, quantise = [], _native.quantize_rows
    monkeypatch.setattr(_native, "quantize_rows", lambda *args: (used.append(args[2]), quantise(*args)))
    machine.kernel_product("scalar")
    assert used == [4, 5, 6, 8, 16]


def test_a_processor_without_instruction_sets_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "available_targets", lambda: ["scalar"])
    assert machine.kernels().status == "warning"


def test_the_processors_name_is_optional(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : Some Chip 9\n")
    assert machine.processor(tmp_path / "cpuinfo").value.startswith("Some Chip 9, ")
    assert machine.processor(tmp_path / "absent").figures["usable_cores"] >= 1


def test_little_memory_is_warned_of_and_none_told_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_groups", lambda: iter([SimpleNamespace(limit_bytes=10**9)]))
    monkeypatch.setattr(machine, "_wired_limit", lambda: 2 * 10**9)
    monkeypatch.setattr(machine, "memory_available", lambda: machine.LOW_MEMORY_BYTES - 1)
    check = machine.memory()
    assert check.status == "warning"
    assert "limit: 1.00 GB; the GPU may hold 2.00 GB" in check.value
    monkeypatch.setattr(machine, "memory_total", raising(BackendUnavailableError("it doesn't tell")))
    assert attempt("memory", machine.memory).status == "failed"


def test_a_machine_without_mlx_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.util, "find_spec", lambda name: None)
    assert machine.mlx("linux").status == "skipped"
    assert machine.mlx("darwin").status == "warning"
    assert machine.metal("darwin").status == "skipped"
    assert "pip install" in machine.mlx("linux").remedy


@pytest.mark.parametrize(
    ("core", "value"),
    [
        (None, "it can't compute: "),
        (SimpleNamespace(default_device=raising(RuntimeError("no device\nat all"))), "compute: no device"),
    ],
)
def test_an_mlx_that_does_not_work_fails(monkeypatch: pytest.MonkeyPatch, core: Any, value: str) -> None:
    monkeypatch.setattr(machine.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    check = machine.mlx()
    assert check.status == "failed"
    assert value in check.value
    assert "\n" not in check.value


def mlx_on_a_gpu(monkeypatch: pytest.MonkeyPatch, total: int, system: str) -> Check:
    """The check of an MLX that adds up to `total`."""
    core = SimpleNamespace(
        __version__="1", gpu=1, default_device=lambda: SimpleNamespace(type=1),
        arange=range, sum=lambda numbers: SimpleNamespace(item=lambda: total),
    )  # fmt: skip
    monkeypatch.setattr(machine.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    return machine.mlx(system)


def test_an_mlx_that_adds_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    check = mlx_on_a_gpu(monkeypatch, 4951, "darwin")
    assert (check.status, check.value) == ("failed", "the GPU adds 0 to 99 up to 4951, not 4950")


def test_mlx_on_cuda_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mlx_on_a_gpu(monkeypatch, 4950, "darwin").status == "ok"
    check = mlx_on_a_gpu(monkeypatch, 4950, "linux")
    assert check.status == "warning"
    assert "--backend cpu" in check.remedy


def test_metal_takes_its_library_and_a_gpu(tmp_path: Path) -> None:
    assert machine.metal("linux").status == "skipped"
    absent = machine.metal("darwin", [tmp_path])
    assert absent.status == "failed"
    assert str(tmp_path / "lib/mlx.metallib") in absent.value
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/mlx.metallib").touch()
    device = {"device_name": "Apple M9", "max_recommended_working_set_size": 18 * 10**9}
    there = machine.metal("darwin", [tmp_path / "elsewhere", tmp_path], lambda: device)
    assert (there.status, there.figures["recommended_working_set_bytes"]) == ("ok", 18 * 10**9)
    assert "Apple M9" in there.value
    assert machine.metal("darwin", [tmp_path], lambda: None).status == "warning"
    assert machine.metal("darwin", [tmp_path], raising(RuntimeError("no kernels"))).status == "failed"


# --- the disk -------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    folder = below_a_file(tmp_path)
    models, cache = storage.models_folder(folder), storage.cache_folder(folder)
    assert (models.status, cache.status) == ("failed", "warning")
    assert f"{folder} can't be written: " in models.value
    assert "ONDEVICE_HOME" in models.remedy
    ahead = storage.models_folder(tmp_path / "not" / "yet")
    assert (ahead.status, list(tmp_path.iterdir())) == ("ok", [tmp_path / "file"])
    assert "doesn't exist yet" in ahead.value


def test_a_read_only_package_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for writable in (True, False):
        monkeypatch.setattr(storage.os, "access", lambda path, mode, writable=writable: writable)
        check = storage.package_folder(tmp_path)
        assert (check.status, check.figures["writable"]) == ("ok", writable)


def test_settings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert "isn't there" in storage.settings_file(path).value
    path.write_text('threads = 1\nio = "direct"\n')
    assert "sets threads, io" in storage.settings_file(path).value
    path.write_text("treads = 1\n")
    with pytest.raises(UsageError, match="treads"):
        storage.settings_file(path)


def test_flash_is_measured_and_nothing_stays(small: None, tmp_path: Path) -> None:
    check = storage.flash("flash", [below_a_file(tmp_path), tmp_path])
    assert check.status in ("ok", "warning")
    assert [rate["read_bytes"] for rate in check.figures["rates"]] == list(storage.READ_BYTES)
    assert all(rate["bytes_per_second"] > 0 for rate in check.figures["rates"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_slow_flash_is_warned_of(small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "SLOW_BYTES_PER_SECOND", 1e15)
    check = storage.flash("flash", [tmp_path])
    assert check.status == "warning"
    assert "SSD" in check.remedy or "direct reads" in check.remedy


def test_refused_direct_reads_are_warned_of(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader = SimpleNamespace(native=SimpleNamespace(fallback_reason="it refuses"), has_ring=False)
    monkeypatch.setattr("ondevice.flash.reader.FlashReader", lambda *_, **options: nullcontext(reader))
    check = storage.flash("flash", [tmp_path])
    assert check.status == "warning"
    assert "it refuses" in check.value


def test_no_place_to_measure_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert storage.flash("flash", [below_a_file(tmp_path)]).status == "skipped"
    model = tmp_path / "model"
    model.mkdir()
    (model / "bundle.json").write_text("{}")
    kept = storage.flash("flash", [model])
    assert kept.status == "skipped"
    assert "isn't written to" in kept.value
    assert [path.name for path in model.iterdir()] == ["bundle.json"]
    monkeypatch.setattr(storage, "SPARE_BYTES", 1 << 60)
    full = storage.flash("flash", [tmp_path])
    assert full.status == "skipped"
    assert "are free" in full.value


def test_a_models_own_files_are_read_and_checked(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = copy_files(SHIPPED, tmp_path / "model")
    monkeypatch.setattr(storage, "READ_BYTES", (16 << 10,))
    sound = storage.flash("flash", [folder], storage.neuron_files(folder))
    assert "the model's own files" in sound.value
    for path in folder.glob("neurons-*"):
        data = path.read_bytes()
        path.write_bytes(data[: 64 << 10] + bytes(255 - byte for byte in data[64 << 10 :]))
    with pytest.raises(FlashReadError):
        storage.flash("flash", [folder], storage.neuron_files(folder))
    assert storage.neuron_files(tmp_path) == []


def test_devices_are_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path))
    for devices, names in (([1, 1, 1], ["flash"]), ([1, 2, 1], ["flash", "flash 2"])):
        monkeypatch.setattr(storage, "device", lambda folder, left=devices: left.pop(0))
        assert [name for name, _ in doctor._flash_steps(None)] == names
    monkeypatch.setattr(storage, "device", lambda folder: 1)
    assert len(list(doctor._flash_steps("no-such-model"))) == 1


def test_the_multiply_rate_is_that_of_some_machine() -> None:
    """Imported before a fixture puts a constant in its place."""
    assert 1e7 < multiply_rate(1) < 1e12
