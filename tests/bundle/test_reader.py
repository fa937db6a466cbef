"""Bundle.open: what it gives for a sound bundle, and a typed error for each rule broken."""

from __future__ import annotations

import hashlib
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.bundle import reader
from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.files import read_range
from ondevice.bundle.manifest import MAX_BLOB_BYTES, TokenizerInfo
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.bundle.writer import BundleWriter
from ondevice.config import QuantConfig
from ondevice.converters.slices import write_slice
from ondevice.errors import BundleError, ModelNotFoundError, OndeviceError
from ondevice.model_config import AttentionSpec, FeedForwardSpec, LayerSpec, NormSpec, RopeSpec
from tests.golden.build import CONFIG, GOLDEN, Recipe, fill, golden_config
from tests.malformed.rules import RULES, Rule, manifest_of, put
from tests.malformed.slice_rules import SLICE_RULES
from tests.support.crc32c import crc32c
from tests.support.sources import FEED_FORWARDS, with_feed_forward
from tests.support.widths import with_widths

MOST_MEMORY = 8 << 20


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the golden bundle that may be spoilt."""
    return shutil.copytree(GOLDEN, tmp_path / "bundle")


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails what allocates more than a small bundle can need."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_malformed_bundle_is_refused(rule: Rule, copy: Path) -> None:
    rule.break_bundle(copy)
    with little_memory(), pytest.raises(OndeviceError, match=rule.message) as caught:
        Bundle.open(copy)
    assert type(caught.value) is rule.error


@pytest.fixture(scope="module")
def later_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slice of the golden model's second layer, and of no more."""
    return write_slice(Bundle.open(GOLDEN).slice(1, 2), tmp_path_factory.mktemp("slice") / "rank-1")


@pytest.mark.parametrize("rule", SLICE_RULES, ids=lambda rule: rule.name)
def test_malformed_slice_is_refused(rule: Rule, later_layer: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(later_layer, tmp_path / "slice")
    rule.break_bundle(folder)
    with little_memory(), pytest.raises(OndeviceError, match=rule.message) as caught:
        Bundle.open(folder)
    assert type(caught.value) is rule.error


def test_only_a_slice_is_of_a_whole(copy: Path) -> None:
    put("part_of", value="0" * 64)(copy)
    with pytest.raises(BundleError, match="unknown key 'part_of'"):
        Bundle.open(copy)


def test_rules_are_told_apart() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len({rule.name for rule in SLICE_RULES}) == len(SLICE_RULES)


@pytest.mark.parametrize("path", ["absent", "a\0b", "x" * 5000])
def test_a_path_without_a_bundle_is_not_found(path: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="ondevice convert SOURCE --output"):
        Bundle.open(tmp_path / path)


def test_an_opened_bundle_tells_the_facts_of_its_manifest() -> None:
    bundle = Bundle.open(str(GOLDEN))
    assert bundle.path == GOLDEN
    assert bundle.name == "bundle-v3"
    assert bundle.config == CONFIG
    assert bundle.quant == QuantConfig(4)
    assert bundle.bundle_bytes == sum(path.stat().st_size for path in GOLDEN.iterdir())
    assert bundle.manifest.tokenizer == TokenizerInfo(bos_id=1, eos_ids=(2,), add_bos=True)
    assert bundle.manifest.generation == {"temperature": 0.5, "top_k": 40}
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert bundle.parameters == 64 * 64 + 2 * layer + 64


def test_parameters_count_every_option(tmp_path: Path) -> None:
    config = golden_config(
        tie_embeddings=False, attention_bias=True, attention_output_bias=True, qk_norm=True
    )
    bundle = _written(tmp_path / "b", Recipe(config=config, quant=QuantConfig(16)))
    in_resident = sum(np.prod(spec.shape) for spec in resident_tensors(config, bundle.quant).values())
    assert bundle.parameters == in_resident + 64 * 64 + 2 * 3 * 64 * 96


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_spans_are_where_safetensors_finds_the_tensors(bits: int, tmp_path: Path) -> None:
    config = golden_config(tie_embeddings=False, attention_bias=True, qk_norm=True, head_dim=6)
    bundle = _written(tmp_path / "b", Recipe(config=config, quant=QuantConfig(bits)))  # type: ignore[arg-type]
    tensors = load_file(tmp_path / "b" / "resident.safetensors")
    assert set(tensors) == set(resident_tensors(config, bundle.quant))
    for name, tensor in tensors.items():
        span = bundle.tensor_span(name)
        data = (bundle.path / span.file).read_bytes()[span.offset : span.offset + span.nbytes]
        assert (span.shape, span.dtype) == (tensor.shape, tensor.dtype)
        assert span.offset % 4 == 0
        assert data == tensor.tobytes()


def test_record_files_are_safetensors_files() -> None:
    bundle = Bundle.open(GOLDEN)
    layers = [bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)]
    for file in (bundle.embedding_file, *layers):
        tensors = load_file(file.path)
        assert list(tensors) == ["records"]
        assert tensors["records"].dtype == np.uint8
        assert tensors["records"].tobytes() == file.path.read_bytes()[4096:]
        assert tensors["records"].shape[1] == sum(file.crc_units)


def test_checksums_belong_to_their_files(tmp_path: Path) -> None:
    recipe = Recipe(
        tokenizer=TokenizerInfo("tokenizers", chat_template="chat_template.jinja"),
        blobs={"tokenizer.json": b"{}" * 600_000, "chat_template.jinja": b"{{ x }}"},
    )
    bundle = _written(tmp_path / "b", recipe)
    sizes = {}
    for name in bundle.manifest.files:
        if name != "checksums.bin":
            file = bundle.file(name)
            data = np.fromfile(file.path, np.uint8)
            assert file.nbytes == data.size
            assert np.array_equal(crc32c(data[file.crc_start :], file.crc_units), file.crcs)
            sizes[name] = file.crcs.size
    assert sizes["tokenizer.json"] == 2
    assert sizes["neurons-00001.safetensors"] == 2 * 96
    with pytest.raises(ValueError, match="read-only"):
        bundle.embedding_file.crcs[0] = 1


def test_tokenizer_files_are_checked_when_read(tmp_path: Path) -> None:
    recipe = Recipe(
        tokenizer=TokenizerInfo("sentencepiece", chat_template="chat_template.jinja"),
        blobs={"tokenizer.model": b"pieces", "chat_template.jinja": b"{{ x }}"},
    )
    bundle = _written(tmp_path / "b", recipe)
    assert bundle.read_small("tokenizer.model") == b"pieces"
    assert bundle.read_small("chat_template.jinja") == b"{{ x }}"
    (bundle.path / "tokenizer.model").write_bytes(b"picces")
    with pytest.raises(BundleError, match=r"tokenizer.model doesn't match its sha256"):
        Bundle.open(bundle.path).read_small("tokenizer.model")
    with pytest.raises(BundleError, match="no tokenizer file"):
        bundle.read_small("resident.safetensors")


@pytest.mark.parametrize(
    ("info", "limit"),
    [
        (TokenizerInfo("sentencepiece"), 16 << 20),
        (TokenizerInfo("tokenizers"), 32 << 20),
        (TokenizerInfo(chat_template="chat_template.jinja"), 4 << 16),
    ],
)
def test_size_of_files_read_whole_is_capped(info: TokenizerInfo, limit: int, tmp_path: Path) -> None:
    (name,) = info.files
    bundle = _written(tmp_path / "b", Recipe(tokenizer=info, blobs={name: b"pieces"}))
    assert MAX_BLOB_BYTES[name] == limit
    with (bundle.path / name).open("r+b") as file:
        file.truncate(limit + 1)
    put("files", name, "bytes", value=limit + 1)(bundle.path)
    put("files", name, "crc", value={"offset": 449, "count": limit // (1 << 20) + 1})(bundle.path)
    with pytest.raises(BundleError, match=f"has {limit + 1} bytes; the limit is {limit}"):
        Bundle.open(bundle.path)
    (bundle.path / name).write_bytes(b"")
    put("files", name, "bytes", value=0)(bundle.path)
    with pytest.raises(BundleError, match=f"{name} has 0 bytes; the limit is {limit}"):
        Bundle.open(bundle.path)


def test_a_checksum_table_above_its_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = (GOLDEN / "checksums.bin").stat().st_size
    monkeypatch.setattr(reader, "MAX_CHECKSUM_BYTES", nbytes)
    Bundle.open(GOLDEN)
    monkeypatch.setattr(reader, "MAX_CHECKSUM_BYTES", nbytes - 1)
    with pytest.raises(BundleError, match=f"checksums.bin has {nbytes} bytes; the limit is {nbytes - 1}"):
        Bundle.open(GOLDEN)


def test_a_range_that_goes_beyond_a_file_is_refused() -> None:
    """As of a file that was cut after its size was checked."""
    path = GOLDEN / "checksums.bin"
    nbytes = path.stat().st_size
    assert read_range(path, nbytes - 4, 4) == path.read_bytes()[-4:]
    with pytest.raises(BundleError, match=r"checksums\.bin ends 3 bytes early"):
        read_range(path, nbytes - 4, 7)


def test_names_that_are_not_there() -> None:
    bundle = Bundle.open(GOLDEN)
    for name in ("checksums.bin", "bundle.json", "../bundle-v3/bundle.json", "tokenizer.model"):
        with pytest.raises(BundleError, match="not a file with checksums"):
            bundle.file(name)
    with pytest.raises(BundleError, match="not a file with checksums"):
        bundle.neuron_file(2)
    with pytest.raises(BundleError, match="no tensor"):
        bundle.tensor_span("head")


def test_link_inside_the_bundle_is_followed(copy: Path) -> None:
    (copy / "neurons-00001.safetensors").rename(copy / "elsewhere")
    (copy / "neurons-00001.safetensors").symlink_to("elsewhere")
    assert Bundle.open(copy).neuron_file(1).nbytes == 22528


def test_a_bundle_opened_through_a_link_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(GOLDEN)
    assert Bundle.open(tmp_path / "alias").name == "bundle-v3"


def test_every_model_option_survives(tmp_path: Path) -> None:
    feed_forward = FeedForwardSpec("relu2")
    layers = (
        LayerSpec(AttentionSpec(0.3, 1, 16, 50.0, "projection", True, True), feed_forward, "both"),
        LayerSpec(AttentionSpec(0.25, head_norm="layer"), feed_forward, "after", parallel=True),
        LayerSpec(AttentionSpec(0.25), feed_forward, "residual"),
    )
    config = replace(
        CONFIG,
        architecture="gemma2",
        norm=NormSpec("layer", 1e-6, bias=True),
        ropes=(RopeSpec((1.0, 0.1) * 4, 1.25), RopeSpec((0.9,) * 8, 1.1, (0.2,) * 8, 7)),
        layers=layers,
        embedding_multiplier=8.5,
        logit_soft_cap=30.0,
        embedding_width=24,
        learned_positions=True,
        head_bias=True,
        final_norm=False,
    )
    assert _written(tmp_path / "b", Recipe(config=config)).config == config


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_every_feed_forward_survives(tmp_path: Path, kind: str) -> None:
    config = with_feed_forward(CONFIG, FEED_FORWARDS[kind])
    bundle = _written(tmp_path / "b", Recipe(config=config))
    assert bundle.config == config
    assert bundle.neuron_layouts[0].stride == sum(bundle.neuron_layouts[0].part_bytes)
    if config.is_sliced:
        assert len(bundle.neuron_layouts[0].part_bytes) == 2
        assert verify(bundle.path, crc32c).checksums > 2 * config.num_layers
        return
    rows = [row for part in bundle.record_layout.parts for row in part]
    assert len(rows) == (3 if config.feed_forward.gated else 2)
    assert verify(bundle.path, crc32c).checksums > 2 * config.num_layers * config.intermediate_size


def test_layers_of_different_widths_survive(tmp_path: Path) -> None:
    """Each layer's files hold its own neurons, which the manifest lists."""
    config = with_widths(CONFIG, [40, None])
    bundle = _written(tmp_path / "b", Recipe(config=config))
    assert bundle.config == config
    assert bundle.config.widths == (40, 96)
    manifest = manifest_of(bundle.path)
    assert manifest["neurons"]["num_records"] == manifest["gates"]["num_records"] == [40, 96]
    assert [layer["feed_forward"].get("neurons") for layer in manifest["model"]["layers"]] == [40, None]
    for layer, neurons in enumerate((40, 96)):
        assert bundle.neuron_file(layer).nbytes == 4096 + neurons * bundle.neuron_layouts[0].stride
        assert len(bundle.gate_file(layer).crcs) == neurons
    # As many units, the two layers of a golden bundle have 112 neurons more.
    golden = verify(GOLDEN, crc32c).checksums
    assert verify(bundle.path, crc32c).checksums == golden - 56 * 3


def test_opening_reads_no_weights(copy: Path) -> None:
    """Weights that don't match any checksum are found when they are read, not before."""
    path = copy / "neurons-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    assert hashlib.sha256(data).hexdigest() != Bundle.open(copy).manifest.files[path.name].sha256


def _written(folder: Path, recipe: Recipe) -> Bundle:
    fill(BundleWriter(folder, recipe.config, recipe.quant, crc32c), recipe)
    return Bundle.open(folder)
