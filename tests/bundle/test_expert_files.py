"""Files of experts that are stored as matrices: their sizes, their checks, and what damage is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ondevice.bundle import digest, verify
from ondevice.bundle.file_layouts import file_layout
from ondevice.bundle.layout import DATA_OFFSET, expert_layout
from ondevice.bundle.manifest import manifest_text, parse_manifest
from ondevice.bundle.matrix_layout import RowLayout, TiledMatrix
from ondevice.bundle.reader import Bundle
from ondevice.bundle.writer import BundleWriter
from ondevice.config import TILE_FORMATS, QuantConfig, RowFormat
from ondevice.errors import BundleError, FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.kernels._native import crc32c
from ondevice.model_config import ExpertsSpec, ModelConfig
from tests.golden.build import Recipe, fill, golden_config
from tests.malformed.rules import overwrite, put, reseal

EXPERTS = "experts-00001.safetensors"
QUANT = QuantConfig(4, (("experts", RowFormat(5, 32)), ("experts_down", RowFormat(8, 32, "symmetric"))))


TWO_LEVELS = QuantConfig(4, (("experts", TILE_FORMATS[0]), ("experts_down", TILE_FORMATS[4])))


def mixture(dense: int = 0, bias: bool = True, width: int = 72, neurons: int = 40) -> ModelConfig:
    """Two layers; only the last has experts, 5 of `neurons` neurons, beside `dense` neurons."""
    config = golden_config(hidden_act="silu", hidden_size=width)
    first, last = config.layers
    wide = replace(last.feed_forward, neurons=5 * neurons + dense)
    experts = ExpertsSpec(5, 2, neurons, bias=bias)
    return replace(config, layers=(first, replace(last, experts=experts, feed_forward=wide)))


def made(
    folder: Path,
    dense: int = 0,
    quant: QuantConfig = QUANT,
    bias: bool = True,
    config: ModelConfig | None = None,
) -> Path:
    recipe = Recipe(mixture(dense, bias) if config is None else config, quant)
    fill(BundleWriter(folder, recipe.config, quant, crc32c, fingerprint="x"), recipe)
    return folder


def test_the_layout_is_that_of_the_specification() -> None:
    """The example there: 2048 wide, 768 neurons, 4 bits."""
    wide, down = TiledMatrix(768, RowLayout(2048, 4)), TiledMatrix(2048, RowLayout(768, 4))
    assert (wide.block_bytes, wide.nbytes, down.nbytes) == (576, 884736, 884736)
    layout = expert_layout(mixture(), QUANT, 0)
    assert layout is not None
    gate, up, last = layout.matrices
    assert gate == up == TiledMatrix(40, RowLayout(72, 5, 32), has_bias=True)
    assert last == TiledMatrix(72, RowLayout(40, 8, 32, "symmetric"), has_bias=True)
    # Three tiles of two blocks of 640 bytes of codes and 2 x 64 of scales and biases; 48 biases.
    assert (gate.nbytes, last.nbytes) == (3 * 2 * (640 + 128) + 192, 5 * (1024 + 64) + 320)
    assert layout.part_bytes == (8192, 8192, 8192)
    assert layout.padding == ((4800, 8192), (12992, 16384), (22144, 24576))
    assert layout.places[2] == (RowFormat(8, 32, "symmetric"), 16384, 16384 + 5440)


@pytest.mark.parametrize("dense", [0, 24])
def test_a_layer_of_experts_has_their_file_and_its_other_neurons(tmp_path: Path, dense: int) -> None:
    bundle = Bundle.open(made(tmp_path / "bundle", dense))
    assert bundle.config.records == (96, dense)
    assert bundle.config.widths == (96, 200 + dense)
    assert [name for name in bundle.manifest.files if name.startswith("experts-")] == [EXPERTS]
    assert bundle.neuron_file(1).nbytes == DATA_OFFSET + dense * bundle.neuron_layouts[0].stride
    file = bundle.expert_file(1)
    assert file.nbytes == DATA_OFFSET + 5 * 24576
    assert file.crcs.size == 15
    assert verify.verify(bundle.path, crc32c).checksums > 15
    assert parse_manifest(manifest_text(bundle.manifest)) == bundle.manifest
    with pytest.raises(BundleError, match="'experts-00000"):
        bundle.expert_file(0)
    with FlashReader([file, bundle.neuron_file(1)]) as reader:
        for expert in range(5):
            reader.read(0, DATA_OFFSET + expert * 24576, 24576)


@pytest.mark.parametrize(("expert", "part"), [(0, 0), (3, 1), (4, 2)])
def test_damage_is_named(tmp_path: Path, expert: int, part: int) -> None:
    folder, offset = made(tmp_path / "bundle"), DATA_OFFSET + (3 * expert + part) * 8192
    byte = (folder / EXPERTS).read_bytes()[offset + 77]
    overwrite(EXPERTS, offset + 77, bytes([byte ^ 1]))(folder)
    with pytest.raises(BundleError, match=f"{EXPERTS}: record {expert}, part {part}, at byte {offset} does"):
        verify.verify(folder, crc32c)


def test_tiles_of_two_levels_take_as_many_bytes_as_their_source() -> None:
    """Bytes of 256 columns of a row in GGUF: its blocks of Q2_K to Q6_K; IQ4_XS takes two bytes more."""
    for stored, nbytes in zip(TILE_FORMATS, (84, 110, 144, 176, 210, 144, 138), strict=True):
        matrix = TiledMatrix(40, RowLayout(512, *stored))
        assert matrix.nbytes == 48 * 2 * nbytes
        if stored.two_levels:
            upper = 64 if stored.scales == "two_level" else 32
            assert matrix.halves == (0, upper, 16 * nbytes, 6, False)


@pytest.mark.fast("4-4194304", "2-4194304")
@pytest.mark.parametrize("chunk_bytes", [1, digest.CHUNK_BYTES])
@pytest.mark.parametrize("bits", [2, 4, 16])
def test_every_scale_is_checked(
    tmp_path: Path, bits: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hashes that match, as another writer's would; a code or a bias of the same bits is none."""
    monkeypatch.setattr(verify, "CHUNK_BYTES", chunk_bytes)
    quant = {2: TWO_LEVELS, 4: QUANT, 16: QuantConfig(16)}[bits]
    config = mixture(width=256, neurons=256) if bits == 2 else mixture()
    folder = made(tmp_path / "bundle", quant=quant, config=config)
    layout = expert_layout(config, quant, 0)
    assert layout is not None
    whole = (folder / EXPERTS).read_bytes()
    for part, halves in enumerate(layout.halves):
        record = DATA_OFFSET + 3 * layout.stride
        last = record + halves.start + halves.step * (halves.times - 1)
        size = halves.stop - halves.start
        for offset in {record + halves.start, last, last + size - 2}:
            overwrite(EXPERTS, offset, b"\x00\xfc")(folder)
            reseal(folder, EXPERTS)
            with pytest.raises(BundleError, match=f"{EXPERTS}: the .* at byte {offset} is not finite"):
                verify.verify(folder, crc32c)
            with FlashReader([Bundle.open(folder).expert_file(1)]) as reader:
                reader.read(0, record - layout.stride, layout.stride)
                with pytest.raises(FlashReadError, match="not finite"):
                    reader.read(0, record + layout.part_offsets[part], layout.part_bytes[part])
            (folder / EXPERTS).write_bytes(whole)
        overwrite(EXPERTS, last + size, b"\xff\xff")(folder)
        reseal(folder, EXPERTS)
        verify.verify(folder, crc32c)
        (folder / EXPERTS).write_bytes(whole)


def test_padding_that_is_not_zero_is_found(tmp_path: Path) -> None:
    folder, offset = made(tmp_path / "bundle"), DATA_OFFSET + 2 * 24576 + 12992
    overwrite(EXPERTS, offset, b"\x07")(folder)
    reseal(folder, EXPERTS)
    with pytest.raises(BundleError, match=f"{EXPERTS}: byte {offset} is padding and not zero"):
        verify.verify(folder, crc32c)


def test_formats_of_experts_need_experts(tmp_path: Path) -> None:
    folder, stored = made(tmp_path / "bundle"), {"bits": 5, "group_size": 32, "bias": "stored"}
    assert Bundle.open(folder).quant == QUANT
    plain = Recipe(golden_config(hidden_act="silu"))
    fill(BundleWriter(tmp_path / "plain", plain.config, plain.quant, crc32c), plain)
    put("quantisation", "matrices", value={"experts_down": stored})(tmp_path / "plain")
    with pytest.raises(BundleError, match="stores no such matrices"):
        Bundle.open(tmp_path / "plain")


def test_experts_of_two_levels_have_columns_that_these_divide(tmp_path: Path) -> None:
    config = mixture(width=256, neurons=256)
    folder = made(tmp_path / "bundle", quant=TWO_LEVELS, config=config)
    assert Bundle.open(folder).quant == TWO_LEVELS
    assert parse_manifest(manifest_text(Bundle.open(folder).manifest)).quant == TWO_LEVELS
    folder = made(tmp_path / "narrow")
    stored = {"bits": 2, "group_size": 16, "scales": "two_level"}
    put("quantisation", "matrices", value={"experts": stored})(folder)
    with pytest.raises(BundleError, match="for 72 columns; these must be a multiple of 256"):
        Bundle.open(folder)


def test_biases_count_as_parameters(tmp_path: Path) -> None:
    with_biases, without = (Bundle.open(made(tmp_path / f"{bias}", bias=bias)) for bias in (True, False))
    assert with_biases.parameters - without.parameters == 5 * (40 + 40 + 72)


def test_records_of_experts_are_written_in_pieces(tmp_path: Path) -> None:
    config, random = mixture(), np.random.default_rng(1)
    nbytes = file_layout(EXPERTS, config, QUANT).nbytes
    assert nbytes is not None
    data = random.integers(0, 256, nbytes - DATA_OFFSET, dtype=np.uint8)
    writer = BundleWriter(tmp_path / "bundle", config, QUANT, crc32c)
    with pytest.raises(ValueError, match=r"isn't uint8 \(n,\)"):
        writer.write_records(EXPERTS, iter([data.reshape(5, -1)]))
    with pytest.raises(ValueError, match="got"):
        writer.write_records(EXPERTS, iter([data[:-1]]))
    writer.write_records(EXPERTS, iter(np.split(data, [1, 5000, 30000])))
    file = writer.written(EXPERTS)
    assert (file.crcs == crc32c(data, file.crc_units)).all()


@pytest.mark.parametrize("name", ["resident.safetensors", EXPERTS])
def test_a_float_that_is_not_finite_is_found(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm, and an expert's bias: every hash is made to match, as another writer's would."""
    monkeypatch.setattr(verify, "FLOAT_BYTES", 64)
    folder = made(tmp_path / "bundle")
    bundle = Bundle.open(folder)
    layout = file_layout(name, bundle.config, bundle.quant)
    base = DATA_OFFSET + 4 * 24576 if name == EXPERTS else 0
    offset = base + layout.floats[-1][1] - 4
    overwrite(name, offset, b"\x00\x00\xc0\x7f")(folder)
    reseal(folder, name)
    with pytest.raises(BundleError, match=f"{name}: the float at byte {offset} is not finite; the bundle is"):
        verify.verify(folder, crc32c)
