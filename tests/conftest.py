"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ondevice import cli
from ondevice.api import Model, load
from ondevice.converters.convert import convert
from ondevice.doctor import rates
from ondevice.errors import START_AGAIN
from ondevice.flash.reader import FlashReader
from ondevice.runtime import resolving
from ondevice.units import process_memory
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.command_line import Result, Run
from tests.support.faults import build_shim
from tests.support.flash_files import RecordFile, write_records
from tests.support.hub_server import HubServer, serving
from tests.support.mlx_models import ON_GPU
from tests.support.models import VARIANTS, write_checkpoint
from tests.support.paths import SHARED_DATA
from tests.support.small_tokenizers import train_sentencepiece

# What a shell starts in the background is deaf to Ctrl-C, and so is what it starts; several tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any, obj: object) -> Generator[None, Any, Any]:
    """Of a test with the marker `fast`, the cases that it names are fast; the others get the marker `slow`.

    Raises pytest.UsageError for a pattern of a test's own marker that names no case.
    """
    made = yield
    cases = [item for item in made or () if hasattr(item, "callspec")] if isinstance(made, list) else []
    own = {pattern for mark in getattr(obj, "pytestmark", ()) if mark.name == "fast" for pattern in mark.args}
    unused = set(own)
    for item in cases:
        mark = item.get_closest_marker("fast")
        if mark is None:
            continue
        fitting = {pattern for pattern in mark.args if fnmatchcase(item.callspec.id, pattern)}
        unused -= fitting
        if not fitting:
            item.add_marker(pytest.mark.slow)
    if unused:
        raise pytest.UsageError(f"{collector.nodeid}: no case of {obj} is {', '.join(sorted(unused))}")
    return made


def pytest_collection_finish() -> None:
    """What has been imported and collected stays, and no collection of garbage goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports go from one process to another, and names that aren't UTF-8 can't: they are escaped."""
    report = yield
    report.sections = [(name, sendable(text)) for name, text in report.sections]
    if report.failed and sendable(report.longreprtext) != report.longreprtext:
        report.longrepr = sendable(report.longreprtext)
    return report


def sendable(text: str) -> str:
    """The text with escapes in place of what UTF-8 can't say."""
    return text.encode(errors="backslashreplace").decode()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured of this machine's flash is kept for these tests alone, with their own processes."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def known_multiply_rate() -> Iterator[None]:
    """`inspect` doesn't measure in this process how fast weights are multiplied, which takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "multiply_rate", lambda threads: 1e10)
        yield


@pytest.fixture(scope="session", autouse=True)
def unhurried_disk() -> Iterator[None]:
    """Nothing waits for the disk, as nothing here takes the machine's power; a conversion would, 52 times.

    Tests of what is durable put their own in place of these calls, or kill processes of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        for call in ("fsync", "fdatasync"):
            patch.setattr(os, call, lambda file: None, raising=False)
        yield


@pytest.fixture(scope="module")
def usual_threads() -> Iterator[None]:
    """Processes begin with as many threads for numpy as a person's: memory that they take is measured."""
    with pytest.MonkeyPatch.context() as patch:
        for library in ("OMP", "OPENBLAS"):
            patch.delenv(f"{library}_NUM_THREADS", raising=False)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data that others made, beside the repository. Skips where it is absent."""
    folder = SHARED_DATA
    if not folder.is_dir():
        pytest.skip("../shared/data is absent: this test needs its models, tokenizers or text")
    return folder


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of random weights with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint"), folder / "tiny-chat")


@pytest.fixture(scope="session")
def relu_chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat bundle with ReLU gates, of 900 neurons a layer."""
    folder = tmp_path_factory.mktemp("relu-chat")
    shape = {"hidden_act": "relu", "intermediate_size": 900}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "relu-chat")


@pytest.fixture(scope="session")
def token_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An f16 bundle of random weights without a tokenizer."""
    folder = tmp_path_factory.mktemp("tokens")
    return convert_bundle(
        write_checkpoint(folder / "checkpoint", num_hidden_layers=1), folder / "mute", "f16"
    )


@pytest.fixture(scope="session")
def stories_bundle(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as a q8 bundle."""
    folder = tmp_path_factory.mktemp("stories")
    return convert_bundle(shared_data / "models" / "stories260K", folder / "stories260K", "q8")


@pytest.fixture(scope="session")
def variant_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """variant_bundle(variant, quant) -> (checkpoint folder, bundle folder), each made once."""
    root = tmp_path_factory.mktemp("variants")

    @cache
    def made(variant: str, quant: str) -> tuple[Path, Path]:
        source = root / variant
        if not source.exists():
            write_checkpoint(source, **VARIANTS[variant])
        return source, convert(source, root / f"{variant}-{quant}", quant)

    return made


@contextmanager
def mlx_on(gpu: bool) -> Iterator[None]:
    """MLX computes there. Skips where it can't be imported."""
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    before = mx.default_device()
    mx.set_default_device(mx.gpu if gpu else mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def mlx_on_cpu() -> Iterator[None]:
    """MLX computes on its CPU device."""
    with mlx_on(gpu=False):
        yield


@pytest.fixture
def mlx_device() -> Iterator[None]:
    """MLX computes on its CPU device, or on a GPU when ONDEVICE_TEST_MLX_GPU is set."""
    with mlx_on(gpu=ON_GPU):
        yield


@pytest.fixture
def rows_measured_anew() -> Iterator[None]:
    """MLX's widths are measured within the test, and forgotten after it."""
    from ondevice.backends import mlx_row_ops

    mlx_row_ops._measured.cache_clear()
    yield
    mlx_row_ops._measured.cache_clear()


@pytest.fixture(scope="session")
def bundles(variant_bundle: Callable[[str, str], tuple[Path, Path]]) -> Callable[[str, str], Path]:
    """bundles(variant, quant) -> a bundle, made once."""
    return lambda variant, quant: variant_bundle(variant, quant)[1]


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    """The chat bundle loaded, everything resident, one thread, a token a pass."""
    with load(chat_bundle, threads=1, speculation="off") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    """A file of as many records as `RECORDS` of the test's module says."""
    return write_records(tmp_path_factory.mktemp("flash") / "records.flash", request.module.RECORDS)


@pytest.fixture(scope="module", params=["direct", "buffered", "ring"])
def reader(records: RecordFile, request: pytest.FixtureRequest) -> Iterator[FlashReader]:
    """A reader of `records`, three at once: past the page cache, through it, and past it by io_uring."""
    ring = request.param == "ring"
    io = "direct" if ring else request.param
    with FlashReader([records.checked], io=io, threads=3, ring=ring) as reader:
        if ring and not reader.has_ring:
            pytest.skip("this system has no io_uring")
        assert reader.io == io
        yield reader


@pytest.fixture(scope="session")
def io_uring(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where the system has no io_uring, or refuses direct reads of the tests' files."""
    records = write_records(tmp_path_factory.mktemp("ring") / "records.flash", 1)
    with FlashReader([records.checked], threads=1, ring=True) as reader:
        if not reader.has_ring:
            pytest.skip("this system has no io_uring")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes reads fail in a process that preloads it; see `tests/support/faults.py`."""
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def small_sentencepiece() -> bytes:
    """A sentencepiece model of a few words, with two pieces its user defined."""
    return train_sentencepiece(user_defined_symbols=["<turn>", "word"], remove_extra_whitespaces=False)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub of the folders OWNER/NAME in `hub/` for huggingface_hub, whose cache is empty, for no user."""
    library = pytest.importorskip("huggingface_hub")
    client = pytest.importorskip("ondevice.converters.hub.client")
    monkeypatch.setattr(client, "RETRY_SECONDS", (0.0, 0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(client, "FIRST_RETRY_SECONDS", (0.0, 0.01))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serving(tmp_path / "hub") as server:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": server.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(library.constants, name, value)
        yield server


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """What earlier tests left is collected once, and no collection goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for the process as it is now: what other tests left may come or go meanwhile."""
    held = process_memory()
    monkeypatch.setattr(resolving, "process_memory", lambda: held)


@pytest.fixture
def ondevice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process, with an empty home and no settings of the person's own."""
    for name in [name for name in os.environ if name.startswith("ONDEVICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("ONDEVICE_CONFIG", str(tmp_path / "config.toml"))

    def run(*arguments: object, stdin: str | bytes = "") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        if code == START_AGAIN:
            code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run
