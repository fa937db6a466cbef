"""Whatever happens to a bundle's bytes: the same content or a typed error, and little memory."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.manifest import Manifest, TokenizerInfo
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.bundle.verify import verify
from ondevice.bundle.writer import BundleWriter
from ondevice.errors import BundleError, OndeviceError
from ondevice.kernels._native import crc32c
from tests.golden.build import Recipe, fill
from tests.malformed.rules import manifest_of, sealed

MOST_MEMORY = 8 << 20
RECIPE = Recipe(
    tokenizer=TokenizerInfo("tokenizers", bos_id=1, eos_ids=(2,), chat_template="chat_template.jinja"),
    blobs={"tokenizer.json": b'{"model": {}}', "chat_template.jinja": b"{{ messages }}"},
)
FILES = (
    "bundle.json",
    "checksums.bin",
    "chat_template.jinja",
    "embedding.safetensors",
    "gates-00000.safetensors",
    "gates-00001.safetensors",
    "neurons-00000.safetensors",
    "neurons-00001.safetensors",
    "resident.safetensors",
    "tokenizer.json",
)
Content = tuple[Manifest, dict[str, bytes]]
many = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Victim:
    """A bundle to be damaged and mended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fill(BundleWriter(folder, RECIPE.config, RECIPE.quant, crc32c), RECIPE)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.manifest = manifest_of(folder)
        self._damaged: set[str] = set()
        self.content = read_as_the_runtime_does(folder)

    def write(self, name: str, data: bytes | bytearray) -> None:
        """Damages one file."""
        self._damaged.add(name)
        (self.folder / name).write_bytes(data)

    @contextmanager
    def mended(self) -> Iterator[None]:
        """Mends the bundle at the end. Fails if much memory was used."""
        tracemalloc.start()
        try:
            yield
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            while self._damaged:
                name = self._damaged.pop()
                (self.folder / name).write_bytes(self.files[name])
            assert peak < MOST_MEMORY

    def outcome(self) -> OndeviceError | None:
        """What reading the damaged bundle raises; if nothing, it must have its old content."""
        with self.mended():
            try:
                assert read_as_the_runtime_does(self.folder) == self.content
            except OndeviceError as error:
                with pytest.raises(OndeviceError):
                    verify(self.folder, crc32c)
                return error
            verify(self.folder, crc32c)
            return None


def read_as_the_runtime_does(folder: Path) -> Content:
    """Opens the bundle and reads all of it against its CRC32Cs, without the sha256 of weights."""
    bundle = Bundle.open(folder)
    pieces = {name: bundle.read_small(name) for name in bundle.manifest.tokenizer.files}
    layers = [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]
    layers += [bundle.gate_file(layer) for layer in range(bundle.config.num_layers)]
    for file in (bundle.embedding_file, *layers):
        pieces[file.path.name] = checked_bytes(file)[file.crc_start :]
    resident = checked_bytes(bundle.file("resident.safetensors"))
    for name in resident_tensors(bundle.config, bundle.quant):
        span = bundle.tensor_span(name)
        pieces[name] = resident[span.offset : span.offset + span.nbytes]
    return bundle.manifest, pieces


def checked_bytes(file: CheckedFile) -> bytes:
    data = np.fromfile(file.path, np.uint8)
    if not np.array_equal(crc32c(data[file.crc_start :], file.crc_units), file.crcs):
        raise BundleError(f"{file.path.name} doesn't match its checksums")
    return data.tobytes()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim(tmp_path_factory.mktemp("damage") / "bundle")


def test_every_file_of_a_bundle_is_damaged(victim: Victim) -> None:
    assert sorted(victim.files) == sorted(FILES)


@many
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_flipped_byte_is_refused(name: str, where: float, mask: int, victim: Victim) -> None:
    data = bytearray(victim.files[name])
    data[int(where * len(data))] ^= mask
    victim.write(name, data)
    error = victim.outcome()
    # Only white space in the manifest can change without being content.
    assert error is not None or name == "bundle.json"


@many
@given(name=st.sampled_from(FILES), keep=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_refused(name: str, keep: float, victim: Victim) -> None:
    data = victim.files[name]
    victim.write(name, data[: int(keep * len(data))])
    error = victim.outcome()
    assert error is not None or data[int(keep * len(data)) :].isspace()


@many
@given(name=st.sampled_from(FILES), extra=st.binary(min_size=1, max_size=300))
def test_an_extended_file_is_refused(name: str, extra: bytes, victim: Victim) -> None:
    victim.write(name, victim.files[name] + extra)
    error = victim.outcome()
    assert error is not None or (name == "bundle.json" and extra.isspace())


@many
@given(
    name=st.sampled_from(FILES),
    where=st.floats(0, 1),
    removed=st.integers(0, 20),
    inserted=st.binary(max_size=20),
)
def test_a_spliced_file_is_refused(
    name: str, where: float, removed: int, inserted: bytes, victim: Victim
) -> None:
    data = victim.files[name]
    start = int(where * len(data))
    spliced = data[:start] + inserted + data[start + removed :]
    victim.write(name, spliced)
    error = victim.outcome()
    # The manifest's meaning is what is hashed, so its white space may change; nothing else may.
    assert error is not None or spliced == data or name == "bundle.json"


@settings(many, max_examples=20)
@given(names=st.permutations(FILES))
def test_files_under_each_other_s_names_are_refused(names: list[str], victim: Victim) -> None:
    for name, source in zip(FILES, names, strict=True):
        victim.write(name, victim.files[source])
    same = all(victim.files[name] == victim.files[source] for name, source in zip(FILES, names, strict=True))
    assert (victim.outcome() is None) == same


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 63, 65, 96, 1 << 10, 1 << 17, 1 << 20, 1 << 24, 1 << 40, 1 << 64, 10**300])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["tokenizer.model", "../x", "sentencepiece", "llama3", "relu", "\ud800", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in paths(value[key], (*path, key)))]


@settings(many, max_examples=30)
@given(data=st.data(), values=st.lists(json_values, min_size=1, max_size=3))
def test_a_hostile_manifest_never_changes_the_layout(
    data: st.DataObject, values: list[Any], victim: Victim
) -> None:
    """Values put in any place of a manifest whose sha256 is right, as an attacker would write it."""
    root: Any = {"manifest": copy.deepcopy(victim.manifest)}
    for value in values:
        path = data.draw(st.sampled_from(paths(root)[1:]))
        target = root
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
    victim.write("bundle.json", sealed(root["manifest"]))
    with victim.mended(), suppress(OndeviceError):
        bundle = Bundle.open(victim.folder)
        assert bundle.neuron_layouts[0].stride == 192
        assert set(bundle.manifest.files) <= set(FILES)
        verify(victim.folder, crc32c)


@many
@given(
    content=st.binary(max_size=2000)
    | st.text(max_size=500).map(str.encode)
    | json_values.map(json.dumps).map(str.encode)
)
@example(content=b'{"manifest":' * 1000)
@example(content=b'"' + b"\\" * 100_000)
@example(content=b'{"a":"' + b"[" * 1000 + b'"}')
def test_a_manifest_of_any_bytes_is_refused(content: bytes, victim: Victim) -> None:
    victim.write("bundle.json", content)
    assert isinstance(victim.outcome(), BundleError)
