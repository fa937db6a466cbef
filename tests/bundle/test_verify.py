"""verify: sound bundles pass with a report, each kind of damage is named with its place."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.bundle import digest, verify
from ondevice.bundle.file_layouts import FileLayout
from ondevice.bundle.layout import DATA_OFFSET, SliceLayout
from ondevice.bundle.matrix_layout import TILE_ROWS, HalfRange
from ondevice.bundle.reader import Bundle
from ondevice.bundle.writer import BundleWriter
from ondevice.converters.convert import convert
from ondevice.errors import BundleError, ModelNotFoundError
from ondevice.kernels._native import crc32c
from tests.golden.build import GOLDEN, Recipe, fill, golden_config
from tests.malformed.rules import overwrite, put, reseal
from tests.support.mlx_folders import MXFP4, write_mlx_folder

GATES, NEURONS = "gates-00001.safetensors", "neurons-00001.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "bundle")


def test_the_report_lists_every_file_and_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    report = verify.verify(GOLDEN, crc32c, lambda done, total: seen.append((done, total)))
    assert dict(report.files) == {
        path.name: path.stat().st_size for path in GOLDEN.iterdir() if path.name != "bundle.json"
    }
    assert report.nbytes == sum(nbytes for _, nbytes in report.files)
    assert report.checksums == 582
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {report.nbytes}


@pytest.mark.fast("1000", "5000")
@pytest.mark.parametrize("chunk_bytes", [1, 200, 1000, 5000])
def test_chunk_size_changes_nothing(chunk_bytes: int, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
    assert verify.verify(copy, crc32c).checksums == 582
    overwrite(NEURONS, 4096 + 95 * 192 + 70, b"\x00\x01\x02")(copy)
    with pytest.raises(BundleError, match="record 95, part 1, at byte 22400"):
        verify.verify(copy, crc32c)


@pytest.mark.parametrize(
    ("name", "offset", "place"),
    [
        (NEURONS, 4096, "record 0, part 0, at byte 4096"),
        (NEURONS, 4096 + 192 * 5 + 63, "record 5, part 0, at byte 5056"),
        (NEURONS, 4096 + 192 * 5 + 64, "record 5, part 1, at byte 5120"),
        ("embedding.safetensors", 6399, "record 3, part 0, at byte 5824"),
        ("resident.safetensors", 19199, "the block at byte 16384"),
    ],
)
def test_damage_is_named(name: str, offset: int, place: str, copy: Path) -> None:
    byte = (copy / name).read_bytes()[offset]
    overwrite(name, offset, bytes([byte ^ 0x10]))(copy)
    with pytest.raises(BundleError, match=f"{name}: {place} doesn't match its CRC32C"):
        verify.verify(copy, crc32c)


def test_a_wrong_sha256_is_found(copy: Path) -> None:
    put("files", NEURONS, "sha256", value="0" * 64)(copy)
    with pytest.raises(BundleError, match=f"{NEURONS} doesn't match its sha256"):
        verify.verify(copy, crc32c)


@pytest.mark.parametrize("record", [0, 95])
def test_padding_that_is_not_zero_is_found(record: int, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hash is made to match, as another writer's would."""
    monkeypatch.setattr(verify, "CHUNK_BYTES", 1000)
    place = 4096 + record * 192 + 36
    overwrite(NEURONS, place, b"\x07")(copy)
    reseal(copy, NEURONS)
    with pytest.raises(BundleError, match=f"{NEURONS}: byte {place} is padding and not zero"):
        verify.verify(copy, crc32c)


@pytest.mark.fast("*-1000", "*-4194304")
@pytest.mark.parametrize("chunk_bytes", [1, 1000, digest.CHUNK_BYTES])
@pytest.mark.parametrize(
    ("name", "offset", "record"),
    [(GATES, 4096 + 50 * 64 + 3, 50), (GATES, 4096, 0), (NEURONS, 4096 + 95 * 192 + 35, 95)],
)
def test_gates_that_are_not_the_neurons_are_named(
    name: str, offset: int, record: int, chunk_bytes: int, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "CHUNK_BYTES", chunk_bytes)
    overwrite(name, offset, bytes([(copy / name).read_bytes()[offset] ^ 1]))(copy)
    reseal(copy, name)
    with pytest.raises(BundleError, match=f"{GATES}: record {record} isn't the gate row that {NEURONS} has"):
        verify.verify(copy, crc32c)


def test_equal_gates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes: Counter[str] = Counter()

    class CountedFile(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            nbytes[Path(str(self.name)).name] += len(data)
            return data

        def readinto(self, buffer: memoryview, /) -> int:
            count = super().readinto(buffer)
            nbytes[Path(str(self.name)).name] += count
            return count

    monkeypatch.setattr(Path, "open", lambda path, mode: CountedFile(path, mode))
    verify.verify(GOLDEN, crc32c)
    for name in (GATES, NEURONS):
        # Opening the bundle reads the header of 4096 bytes besides.
        assert nbytes[name] == 4096 + (GOLDEN / name).stat().st_size


def test_a_scale_that_is_not_finite_is_found(copy: Path) -> None:
    """Every hash is made to match, as another writer's would."""
    places = broken_halves(Bundle.open(copy))
    for name, offset in places.items():
        broken = copy.with_name(name)
        shutil.copytree(copy, broken)
        overwrite(name, offset, b"\x00\x7c")(broken)
        reseal(broken, name)
        with pytest.raises(BundleError, match=f"{name}: the scale or weight at byte {offset} is not finite"):
            verify.verify(broken, crc32c)
    assert set(places) == {NEURONS, "embedding.safetensors", "resident.safetensors"}


@pytest.mark.fast("253")
@pytest.mark.parametrize("scale", [253, 255])
def test_a_scale_of_mxfp4_that_is_too_large_is_found(tmp_path: Path, scale: int) -> None:
    source = write_mlx_folder(tmp_path / "source", MXFP4, num_hidden_layers=1).path
    bundle = Bundle.open(convert(source, tmp_path / "bundle"))
    neurons, embedding = bundle.neuron_layouts[0], bundle.embedding_layout
    places = {
        "neurons-00000.safetensors": DATA_OFFSET + neurons.row_bytes[0] - 1,
        "embedding.safetensors": DATA_OFFSET + 3 * embedding.stride + embedding.halves[0].start,
        "resident.safetensors": bundle.tensor_span("layers.0.attention.out").offset
        + TILE_ROWS * embedding.row.nbytes
        - 1,
    }
    for name, offset in places.items():
        broken = bundle.path.with_name(name)
        shutil.copytree(bundle.path, broken)
        overwrite(name, offset, bytes([252]))(broken)
        reseal(broken, name)
        verify.verify(broken, crc32c)
        overwrite(name, offset, bytes([scale]))(broken)
        reseal(broken, name)
        with pytest.raises(BundleError, match=f"{name}: the scale or weight at byte {offset} is not finite"):
            verify.verify(broken, crc32c)


def test_scales_and_padding_of_slices_are_checked(tmp_path: Path) -> None:
    recipe = Recipe(config=golden_config(hidden_act="silu"))
    fill(BundleWriter(tmp_path / "b", recipe.config, recipe.quant, crc32c), recipe)
    layout, name = Bundle.open(tmp_path / "b").neuron_layouts[1], "neurons-00001.safetensors"
    assert isinstance(layout, SliceLayout)
    (stain, end), *_ = layout.padding
    assert (stain, end, layout.high_bytes) == (3840, 4096, 4096)
    second = DATA_OFFSET + layout.stride
    # The last bias of the second matrix's last tile, in the high plane of slice 1.
    scale = second + layout.places[2][0] - 2
    for at, data, error in (
        (scale, b"\x00\x7c", f"{name}: the scale or weight at byte {scale} is not finite"),
        (second + stain, b"\x01", f"{name}: byte {second + stain} is padding and not zero"),
    ):
        broken = tmp_path / str(at)
        shutil.copytree(tmp_path / "b", broken)
        overwrite(name, at, data)(broken)
        reseal(broken, name)
        with pytest.raises(BundleError, match=error):
            verify.verify(broken, crc32c)


@given(st.data())
def test_repeated_ranges_are_checked_in_any_chunk(data: st.DataObject) -> None:
    """Ranges that repeat in a file without records: a chunk may begin and end in or between any of them."""
    size, gap, times, start = (
        2 * data.draw(st.integers(1, 5)),
        2 * data.draw(st.integers(0, 5)),
        data.draw(st.integers(2, 9)),
        2 * data.draw(st.integers(0, 9)),
    )
    halves = HalfRange(start, start + size, size + gap, times)
    nbytes = halves.stop + (times - 1) * halves.step + 2 * data.draw(st.integers(0, 5))
    place = 2 * data.draw(st.integers(0, nbytes // 2 - 1))
    values = np.zeros(nbytes, np.uint8)
    values[place : place + 2] = (0x00, 0x7C)
    layout = FileLayout(nbytes, b"", 0, (1 << 20,), halves=(halves,))
    chunk = 2 * data.draw(st.integers(1, nbytes // 2))
    pieces = ((at, values[at : at + chunk]) for at in range(0, nbytes, chunk))
    found = [verify._broken_half(piece, layout, at) for at, piece in pieces]
    checked = start <= place < nbytes and (place - start) % halves.step < size
    checked = checked and (place - start) // halves.step < times
    assert [it for it in found if it is not None] == ([place] if checked else [])


def broken_halves(bundle: Bundle) -> dict[str, int]:
    """Where a float16 lies in each kind of file: the last neuron's last bias, a token's scale, a matrix's."""
    neurons, embedding = bundle.neuron_layouts[0], bundle.embedding_layout
    last, out = bundle.config.intermediate_size - 1, bundle.tensor_span("layers.1.attention.out")
    return {
        NEURONS: DATA_OFFSET + last * neurons.stride + neurons.part_offsets[1] + neurons.row_bytes[1] - 2,
        "embedding.safetensors": DATA_OFFSET + 3 * embedding.stride + embedding.halves[0].start,
        # The last tile of a matrix, whose other values lie further ahead.
        "resident.safetensors": out.offset + out.nbytes - 2,
    }


def test_a_folder_without_a_bundle_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        verify.verify(tmp_path, crc32c)
