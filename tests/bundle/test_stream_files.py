"""The files of streams: where their bytes lie, and that nothing in them is believed before it is checked."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.api import load, verify
from ondevice.backends.base import Float32
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.reference import ReferenceBackend
from ondevice.budget.sizes import stream_bytes
from ondevice.bundle.file_layouts import tensors_layout
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import no_streams, sidecar_text
from ondevice.bundle.streams import (
    STREAMS,
    STREAMS_MANIFEST,
    STREAMS_SIDECAR,
    MultiStreams,
    medusa_parameters,
    stream_tensors,
    streams_text,
)
from ondevice.callbacks import Cancelled
from ondevice.commands.training_reports import stream_table
from ondevice.config import GROUP_SIZE
from ondevice.converters.output_folder import OutputFolder
from ondevice.converters.quantize import dequantize
from ondevice.converters.training.sidecars import write_tensors
from ondevice.converters.training.streams.write import save_streams, write_streams
from ondevice.errors import BundleError, CheckpointError, FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.model import parts
from ondevice.model.loading import bundle_files
from ondevice.model.stream_loading import load_streams
from ondevice.model.weights import MultiStreamWeights
from ondevice.model_config import NO_ATTENTION, DeltaSpec, ModelConfig
from tests.support.bundles import convert_bundle, copy_files, open_sound, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte
from tests.support.made_up_streams import add_streams, made_up_arrays
from tests.support.quantize_reference import quantize_reference
from tests.support.sources import every_block, tiny_config

# Two key/value heads and a head width of its own: no two sizes of the model are equal.
SHAPE = {"head_dim": 24, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers, D 64, 4 heads of 24, N 192."""
    folder = tmp_path_factory.mktemp("streams")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "plain")


@pytest.fixture
def plain(plain_bundle: Path, tmp_path: Path) -> Path:
    return copy_files(plain_bundle, tmp_path / "copied")


@pytest.fixture
def copied(plain: Path) -> Path:
    """A bundle with 2 streams in its last layer, which a test may change."""
    add_streams(plain)
    return plain


def found_in(bundle: Path) -> MultiStreams:
    found = Bundle.open(bundle).streams
    assert found is not None
    return found


def loaded(folder: Path, backend: Any = None, **options: Any) -> MultiStreamWeights:
    bundle = Bundle.open(folder)
    files = bundle_files(bundle, streams=True)
    with FlashReader(files, "buffered") as reader:
        return load_streams(bundle, reader, backend or ReferenceBackend(), len(files) - 1, **options)


def matrices_of(weights: MultiStreamWeights) -> dict[str, Any]:
    """The loaded matrices under the specification's names."""
    adapters = {
        f"layers.{layer}.{name}": getattr(of, name)
        for layer, of in enumerate(weights.layers, weights.first_layer)
        for name in ("qkv", "out", "feed_forward")
    }
    return {f"{name}.{end}": getattr(low, end) for name, low in adapters.items() for end in ("down", "up")}


def test_what_is_written_is_read(plain: Path) -> None:
    assert Bundle.open(plain).streams is None
    before = Bundle.open(plain).bundle_bytes
    written = add_streams(plain, gamma=3, layers=2, mode="shared", bits=4)
    bundle = Bundle.open(plain)
    assert bundle.streams == written
    assert (written.streams, written.first_layer, written.mode, written.bits) == (3, 1, "shared", 4)
    assert written.acceptance == (0.5, 0.25, 0.125)
    added = sum((plain / name).stat().st_size for name in (STREAMS, STREAMS_MANIFEST))
    assert bundle.bundle_bytes == before + added
    assert (STREAMS, (plain / STREAMS).stat().st_size) in verify(plain).files
    # Others take their place; the same arrays and facts give the same bytes.
    data = (plain / STREAMS).read_bytes()
    assert add_streams(plain) == found_in(plain)
    add_streams(plain, gamma=3, layers=2, mode="shared", bits=4)
    assert (plain / STREAMS).read_bytes() == data


def test_where_the_bytes_lie(copied: Path) -> None:
    """The offsets, worked out by hand from the specification: rows of 8 bits, padded to 64 columns."""
    bundle = Bundle.open(copied)
    config = bundle.config
    assert (config.hidden_size, config.query_size, config.qkv_size) == (64, 96, 192)
    expected = [("embeddings", 2 * 64 * 4)]
    for name, rows, groups in (
        ("layers.2.qkv.down", 8, 1),
        ("layers.2.qkv.up", 192, 1),
        ("layers.2.out.down", 8, 2),
        ("layers.2.out.up", 64, 1),
        ("layers.2.feed_forward.down", 8, 1),
        ("layers.2.feed_forward.up", 64, 1),
    ):
        expected += [(f"{name}.codes", rows * groups * 64)]
        expected += [(f"{name}.{part}", rows * groups * 2) for part in ("scales", "biases")]
    offset = 4096
    for name, nbytes in expected:
        span = bundle.tensor_span(name)
        assert (span.file, span.offset, span.nbytes) == (STREAMS, offset, nbytes), name
        offset += nbytes
    assert (copied / STREAMS).stat().st_size == offset == 33168 - 4624
    assert bundle.tensor_span("layers.2.out.up.codes").offset == 4096 + 512 + 544 + 13056 + 1088
    assert set(load_file(copied / STREAMS)) == {name for name, _ in expected}


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("chunk_bytes", [1, 4 << 20])
def test_what_is_loaded_is_what_was_written(
    plain: Path, bits: Literal[4, 8, 16], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "CHUNK_BYTES", chunk_bytes)
    shape = {"gamma": 3, "layers": 2, "attention_rank": 70, "feed_forward_rank": 5}
    add_streams(plain, **shape, bits=bits, mode="shared")
    arrays = made_up_arrays(Bundle.open(plain).config, **shape)
    weights = loaded(plain)
    assert (weights.first_layer, len(weights.layers), weights.shared) == (1, 2, True)
    assert (np.stack(weights.embeddings) == arrays.pop("embeddings")).all()
    found = matrices_of(weights)
    assert set(found) == set(arrays)
    for name, values in arrays.items():
        stored = dequantize(quantize_reference(values, bits), bits, values.shape[1])
        assert (found[name].weight == stored).all(), name
        assert found[name].bias is None
        assert np.abs(stored - values).max() < {4: 0.03, 8: 0.002, 16: 1e-4}[bits] * 3


def test_the_cpu_engine_multiplies_with_them(plain: Path) -> None:
    add_streams(plain, attention_rank=24, feed_forward_rank=7, bits=16)
    cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
    rng, plainly = np.random.default_rng(3), matrices_of(loaded(plain))
    for name, weight in matrices_of(loaded(plain, cpu)).items():
        x = rng.standard_normal((3, plainly[name].weight.shape[1])).astype(np.float32)
        np.testing.assert_allclose(
            cpu.to_numpy(cpu.linear(x, weight)), x @ plainly[name].weight.T, rtol=1e-4, atol=1e-5
        )


def test_the_file_comes_last_and_only_where_it_is_wanted(copied: Path, plain_bundle: Path) -> None:
    bundle = Bundle.open(copied)
    assert [file.path.name for file in bundle_files(bundle, streams=True)][-1] == STREAMS
    assert STREAMS not in [file.path.name for file in bundle_files(bundle)]
    with pytest.raises(BundleError, match=f"no {STREAMS}"):
        bundle_files(Bundle.open(plain_bundle), streams=True)


def test_loading_can_be_cancelled(copied: Path) -> None:
    with pytest.raises(Cancelled):
        loaded(copied, cancelled=lambda: True)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "0" * 64}, "other weights"),
        ({"model": ""}, "model"),
        ({"mode": "lossy"}, "mode is 'lossy'"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": 16}, "isn't the .* bytes that"),
        ({"streams": 0}, "streams is 0"),
        ({"streams": 5, "acceptance": (0.5,) * 5}, "streams is 5"),
        ({"streams": 3}, "2 values for 3 streams"),
        ({"streams": 3, "acceptance": (0.5,) * 3}, "isn't the .* bytes that"),
        ({"first_layer": -1}, "first_layer"),
        ({"first_layer": 3}, "first_layer"),
        ({"first_layer": 1}, "isn't the .* bytes that"),
        ({"attention_rank": 0}, "attention_rank"),
        ({"attention_rank": 1025}, "attention_rank"),
        ({"feed_forward_rank": 0}, "feed_forward_rank"),
        ({"feed_forward_rank": 1025}, "feed_forward_rank"),
        ({"trained_tokens": -1}, "trained_tokens"),
        ({"measured_tokens": 1 << 49}, "measured_tokens"),
        ({"acceptance": (0.5,)}, "1 values for 2 streams"),
        ({"acceptance": (0.5, 1.5)}, "acceptance"),
        ({"acceptance": (0.5, -0.1)}, "acceptance"),
        ({"sha256": ""}, "sha256"),
        ({"crcs": ()}, "checksums"),
        ({"crcs": (0, 0)}, "checksums"),
        ({"crcs": (1 << 32,)}, "crcs"),
    ],
)
def test_values_out_of_range_are_refused(copied: Path, changes: dict[str, Any], match: str) -> None:
    save_streams(replace(found_in(copied), **changes), copied)
    with pytest.raises(BundleError, match=match):
        open_sound(copied)


def edited(folder: Path, **changes: Any) -> None:
    """`streams.json` with other values, or without those that are None, and a hash that is right for them."""
    content = json.loads(streams_text(found_in(folder)))["streams"] | changes
    content = {key: value for key, value in content.items() if value is not None}
    (folder / STREAMS_MANIFEST).write_bytes(sidecar_text(STREAMS_SIDECAR, content))


def test_every_key_is_required_and_no_other_allowed(copied: Path) -> None:
    text = (copied / STREAMS_MANIFEST).read_bytes()
    for key in json.loads(text)["streams"]:
        edited(copied, **{key: None})
        with pytest.raises(BundleError, match=f"lacks '{key}'"):
            open_sound(copied)
        (copied / STREAMS_MANIFEST).write_bytes(text)
    for changes, match in (
        ({"version": 1}, "version is 1"),
        ({"group_size": 32}, "group_size is 32"),
        ({"gamma": 2}, "unknown key 'gamma'"),
        ({"streams": 2.0}, "streams is 2.0"),
    ):
        edited(copied, **changes)
        with pytest.raises(BundleError, match=match):
            open_sound(copied)
        (copied / STREAMS_MANIFEST).write_bytes(text)
    assert found_in(copied).streams == 2


def test_an_edit_without_its_hash_is_refused(copied: Path) -> None:
    path = copied / STREAMS_MANIFEST
    document = json.loads(path.read_text())
    document["streams"]["trained_tokens"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(BundleError, match="damaged or edited"):
        open_sound(copied)


def test_damage_is_found_where_it_is_used(copied: Path) -> None:
    for place in (4100, 20000, (copied / STREAMS).stat().st_size - 1):
        flip_byte(copied / STREAMS, place)
        with pytest.raises(FlashReadError, match=STREAMS):
            loaded(copied)
        with pytest.raises(BundleError, match=f"{STREAMS}.*CRC32C"):
            verify(copied)
        # A model that runs without them doesn't read them.
        with load(copied, speculation="off") as model:
            model.logits([1, 2, 3])
        flip_byte(copied / STREAMS, place)
    assert STREAMS in dict(verify(copied).files)


def test_a_file_that_is_not_the_one_described_is_refused(copied: Path) -> None:
    flip_byte(copied / STREAMS, 100)
    with pytest.raises(BundleError, match=f"{STREAMS}.*`ondevice train streams"):
        open_sound(copied)
    flip_byte(copied / STREAMS, 100)
    nbytes = (copied / STREAMS).stat().st_size
    for size in (nbytes - 1, nbytes + 1, 5000):
        os.truncate(copied / STREAMS, size)
        with pytest.raises(BundleError, match=STREAMS):
            open_sound(copied)
    (copied / STREAMS).unlink()
    with pytest.raises(BundleError, match=f"{STREAMS} is missing"):
        open_sound(copied)
    (copied / STREAMS_MANIFEST).unlink()
    assert Bundle.open(copied).streams is None


def test_a_wrong_sha256_is_found_by_verify(copied: Path) -> None:
    save_streams(replace(found_in(copied), sha256="0" * 64), copied)
    with pytest.raises(BundleError, match=f"{STREAMS} doesn't match its sha256"):
        verify(copied)


def test_embeddings_that_are_not_finite_are_refused(copied: Path) -> None:
    config, found = Bundle.open(copied).config, found_in(copied)
    data = np.frombuffer((copied / STREAMS).read_bytes(), np.uint8).copy()
    data[4096:4100] = np.array([np.nan], "<f4").view(np.uint8)
    layout = tensors_layout(stream_tensors(config, found))
    sha256, crcs = write_tensors(STREAMS_SIDECAR, layout, [data[4096:]], copied)
    save_streams(replace(found, sha256=sha256, crcs=crcs), copied)
    with pytest.raises(BundleError, match="embeddings holds values that are not finite"):
        loaded(copied)


def write(folder: Path, arrays: dict[str, Float32], **changes: Any) -> MultiStreams:
    facts: dict[str, Any] = {"mode": "lossless", "bits": 8, "streams": 2, "first_layer": 2}
    facts |= {"attention_rank": 8, "feed_forward_rank": 8}
    return write_streams(folder, arrays, **(facts | changes))


def test_what_cannot_be_written_changes_nothing(copied: Path) -> None:
    arrays, before = made_up_arrays(Bundle.open(copied).config), found_in(copied)
    name = "layers.2.out.up"
    bad = np.full((64, 8), np.nan, np.float32)
    for changed, match in (
        ({key: value for key, value in arrays.items() if key != name}, f"lack the array '{name}'"),
        (arrays | {"layers.1.out.up": arrays[name]}, r"no array 'layers\.1\.out\.up'"),
        (arrays | {name: arrays[name].T}, r"float32 \(8, 64\); it must be float32 \(64, 8\)"),
        (arrays | {name: arrays[name].astype(np.float64)}, "is float64"),
        (arrays | {"embeddings": arrays["embeddings"][:1]}, "embeddings"),
        (arrays | {name: bad}, f"{name} holds values that are not finite"),
        (arrays | {name: np.full((64, 8), 1e6, np.float32)}, f"{name} holds .*float16"),
    ):
        with pytest.raises(CheckpointError, match=match):
            write(copied, changed)
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"mode": "lossy"}, "mode"),
        ({"bits": 5}, "bits is 5"),
        ({"streams": 5}, "streams is 5"),
        ({"first_layer": 3}, "first_layer"),
        ({"attention_rank": 1 << 40}, "attention_rank"),
        ({"acceptance": [0.5]}, "1 values for 2 streams"),
        ({"acceptance": [0.5, np.nan]}, "acceptance"),
    )
    for facts, match in changes:
        with pytest.raises(BundleError, match=match):
            write(copied, arrays, **facts)
    assert found_in(copied) == before
    verify(copied)
    assert write(copied, arrays).acceptance == (0.0, 0.0)


def test_the_table_tells_parameters_and_bytes_of_streams(plain: Path) -> None:
    found = add_streams(plain, gamma=3, layers=2, attention_rank=16, feed_forward_rank=8)
    config = Bundle.open(plain).config
    arrays = made_up_arrays(config, 3, 2, 16, 8)
    layers = [values.size for name, values in arrays.items() if name.startswith("layers.")]
    rest = [values.size for name, values in arrays.items() if not name.startswith("layers.")]
    assert found.adapter_parameters(config) == sum(layers)
    assert found.embedding_parameters(config) == sum(rest)
    assert medusa_parameters(config, 3) == 3 * (64 * 64 + 64 * config.vocab_size)
    # Rows in sixteens, columns in groups, 68 bytes each at 8 bits.
    rows = [-(-len(values) // 16) * 16 for values in arrays.values()]
    groups = [-(-values.shape[1] // GROUP_SIZE) for values in arrays.values()]
    packed = sum(68 * r * g for r, g in list(zip(rows, groups, strict=True))[1:])
    assert stream_bytes(config, found) == packed + 4 * 3 * 64
    table = stream_table(found, config)
    for part in (
        f"{sum(layers):,}",
        f"{medusa_parameters(config, 3):,}",
        "50.0 %",
        "12.5 %",
        "layers 1 to 2",
    ):
        assert part in table
    assert all(len(line) <= 110 for line in table.splitlines())


def test_the_commands_know_them(ondevice: Run, copied: Path) -> None:
    shown = ondevice("inspect", "-m", copied, "--json").json["streams"]
    found = found_in(copied)
    assert (shown["streams"], shown["mode"], shown["acceptance"]) == (2, "lossless", [0.5, 0.25])
    assert shown["adapter_parameters"] == found.adapter_parameters(Bundle.open(copied).config)
    assert "sha256" not in shown
    text = ondevice("inspect", "-m", copied)
    assert "streams: 2, lossless, " in text.out
    assert ondevice("verify", "-m", copied).code == 0
    flip_byte(copied / STREAMS, 9000)
    damaged = ondevice("verify", "-m", copied)
    assert damaged.code == 6
    assert STREAMS in damaged.err


def test_a_conversion_that_replaces_a_bundle_replaces_its_streams(copied: Path) -> None:
    OutputFolder(copied).check(resume=False, force=True)


def of_last_layer(changed: ModelConfig, **changes: Any) -> ModelConfig:
    *others, last = changed.layers
    return replace(changed, layers=(*others, replace(last, **changes)))


def test_every_block_that_stands_in_the_way_is_named() -> None:
    """By itself, where a model can have it by itself."""
    config = tiny_config()
    attention, block = config.layers[-1].attention, config.feed_forward
    assert config.is_plain
    assert every_block().is_plain
    for changed, named in (
        (replace(config, per_layer_width=8), "per-layer inputs"),
        (
            replace(config, per_layer_width=8, residual_copies=2),
            "per-layer inputs and copies of the residual",
        ),
        (of_last_layer(config, laurel_rank=4), "low-rank blocks beside attention"),
        (of_last_layer(config, scaled=True), "layers that scale the residual"),
        (
            of_last_layer(config, attention=replace(attention, head_norm="head", value_norm=True)),
            "normed values",
        ),
        (of_last_layer(config, attention=replace(attention, sinks=True)), "attention sinks"),
        (of_last_layer(config, attention=replace(attention, gated=True)), "gated attention"),
        (of_last_layer(config, attention=NO_ATTENTION, delta=DeltaSpec(1, 2, 16, 16)), "recurrent layers"),
        (of_last_layer(config, attention=replace(attention, keys_of=0)), "keys that layers share"),
        (of_last_layer(config, attention=replace(attention, num_kv_heads=4)), "heads of several sizes"),
        (of_last_layer(config, attention=replace(attention, value_dim=8)), "values narrower than keys"),
        (of_last_layer(config, feed_forward=replace(block, cutoff=1.0)), "statistical cutoffs"),
    ):
        assert not changed.is_plain
        assert f"without {named}, which this model has" in no_streams(changed)
