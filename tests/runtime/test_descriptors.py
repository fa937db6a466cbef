"""Files are given back at once: when a model is closed, when loading or converting is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ondevice.api import load
from ondevice.converters.checkpoints.base import SourceFile
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.errors import OndeviceError
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from tests.malformed.rules import overwrite
from tests.support.bundles import copy_files
from tests.support.chat import PROMPT
from tests.support.flash_files import HEADER_BYTES, RecordFile, slot_bytes, write_records
from tests.support.llama2c_reference import Shape
from tests.support.llama2c_reference import write_checkpoint as write_llama2c
from tests.support.models import write_checkpoint

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd"),
    pytest.mark.usefixtures("quick_collections"),
]


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sorted(found)


@contextmanager
def none_left_open() -> Iterator[None]:
    """What is open at the end was open before, while nothing is collected."""
    gc.collect()
    gc.disable()
    before = open_files()
    try:
        yield
        assert open_files() == before
    finally:
        gc.enable()


@pytest.mark.fast("exact")
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_a_closed_model_has_no_file_open(relu_chat_bundle: Path, sparsity: str) -> None:
    with load(relu_chat_bundle, sparsity=sparsity, threads=1) as warm_up:
        warm_up.generate(PROMPT, max_tokens=2)
    with none_left_open():
        model = load(relu_chat_bundle, sparsity=sparsity, threads=1)
        events = model.stream(PROMPT, max_tokens=4)
        next(events)
        assert len([name for name in open_files() if str(relu_chat_bundle) in name]) > 3
        model.close()
        # Whoever holds what is left of it holds no file.
        kept = model, events
    del kept


def test_a_model_that_could_not_be_loaded_has_no_file_open(relu_chat_bundle: Path, tmp_path: Path) -> None:
    broken = copy_files(relu_chat_bundle, tmp_path / "broken")
    overwrite("resident.safetensors", 5000, b"\xff\xff\xff\xff")(broken)
    load(relu_chat_bundle, threads=1).close()
    with none_left_open():
        with pytest.raises(OndeviceError) as caught:
            load(broken, threads=1)
        assert caught.value.__traceback__ is not None


@pytest.fixture(scope="module")
def three_records(tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    return write_records(tmp_path_factory.mktemp("flash") / "records.flash", 3)


@pytest.mark.fast("True")
@pytest.mark.parametrize("ring", [False, True])
def test_a_closed_reader_has_no_file_open_and_reads_nothing(three_records: RecordFile, ring: bool) -> None:
    with none_left_open():
        reader = FlashReader([three_records.checked], threads=2, ring=ring)
        extents = [Extent(0, HEADER_BYTES, 100)]
        stream = ReadAhead(reader, extents, slot_bytes(extents), 3, cyclic=True)
        stream.next()
        reader.close()
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.read(0, HEADER_BYTES, 10)
        with pytest.raises(ValueError, match="closed"):
            reader.read_records(0, [0], np.empty((1, 1792), np.uint8))
        with pytest.raises(ValueError, match="closed"):
            stream.next()


@pytest.mark.fast("3")
@pytest.mark.parametrize("shards", [1, 3])
def test_a_refused_checkpoint_has_no_file_open(tmp_path: Path, shards: int) -> None:
    source = write_checkpoint(tmp_path / "source", shards=shards)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(
        config.replace('"intermediate_size": 160', '"intermediate_size": 161')
    )
    with none_left_open():
        with pytest.raises(OndeviceError, match="gate_proj") as caught:
            open_checkpoint(source)
        assert caught.value.__traceback__ is not None
    (source / "config.json").write_text(config)
    (source / "tokenizer.json").write_text("{}")
    with none_left_open(), pytest.raises(OndeviceError, match=r"tokenizer\.json"):
        open_checkpoint(source)


def test_a_refused_llama2c_file_is_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama2c(tmp_path / "model.bin", Shape(), tied=True)
    opened: list[SourceFile] = []
    before = SourceFile.open

    def noted(file: SourceFile) -> None:
        opened.append(file)
        before(file)

    monkeypatch.setattr(SourceFile, "open", noted)
    (tmp_path / "model.bin").write_bytes((tmp_path / "model.bin").read_bytes()[:-4])
    with none_left_open(), pytest.raises(OndeviceError, match="its header asks for"):
        open_checkpoint(tmp_path / "model.bin")
    assert opened


SCARCE = """
import resource, sys
import ondevice
from ondevice.api import inspect, load, verify

path = sys.argv[1]

def use():
    inspect(path)
    verify(path)
    with load(path, threads=1) as model:
        model.generate("hello", max_tokens=2)

use()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
refused = 0
for limit in range(3, 40, 2):
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        use()
        break
    except ondevice.OndeviceError as error:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert type(error) is ondevice.OndeviceError, repr(error)
        assert "the system refuses a file descriptor" in str(error), error
        refused += 1
print("refused", refused)
"""


def test_too_few_descriptors_are_not_damage(relu_chat_bundle: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCARCE, str(relu_chat_bundle)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[1]) > 3
