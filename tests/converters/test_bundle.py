"""What `convert` writes: every byte of every tensor against the definition, for any source and blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.layout import SliceLayout, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import StoredMatrix, joined_slices, untiled
from ondevice.bundle.verify import verify
from ondevice.config import QuantConfig
from ondevice.converters import reading
from ondevice.converters.bundling import pack_records
from ondevice.converters.convert import convert
from ondevice.converters.progress import Progress
from ondevice.converters.quantize import QuantizedRows
from ondevice.kernels import _native
from tests.support.models import (
    VARIANTS,
    random_tensors,
    save_safetensors,
    tiny_config,
    to_bfloat16,
    write_checkpoint,
)
from tests.support.planes import in_planes
from tests.support.quantize_reference import quantize_reference
from tests.support.stored_matrices import embedding_matrix, resident_matrix


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stored_as(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a checkpoint that stores `dtype` holds of float32 values."""
    kinds: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "F32": lambda v: v,
        "F16": lambda v: v.astype(np.float16),
        "BF16": to_bfloat16,
    }
    return kinds[dtype](values)


@pytest.mark.fast(
    "llama-F32-1-q4",
    "llama-F32-1-f16",
    "llama-tails-BF16-5-q4",
    "llama-tails-F16-3-f16",
    "llama-tails-F32-1-q8",
    "llama-relu-F32-1-q4",
    "qwen2-window-tied-F32-1-q4",
    "qwen3-bias-relu2-F32-1-q8",
)
@pytest.mark.parametrize("quant", ["q4", "q8", "f16"])
@pytest.mark.parametrize(("variant", "dtype", "shards"), [
    *((variant, "F32", 1) for variant in VARIANTS),
    ("llama-tails", "F16", 3), ("llama-tails", "BF16", 5), ("qwen3-bias-relu2", "BF16", 2),
])  # fmt: skip
def test_every_byte_is_the_definitions(
    tmp_path: Path, variant: str, dtype: str, shards: int, quant: str
) -> None:
    source = write_checkpoint(tmp_path / "source", dtype=dtype, shards=shards, seed=3, **VARIANTS[variant])
    bundle = Bundle.open(convert(source, tmp_path / "bundle", quant))
    verify(bundle.path, _native.crc32c)
    bits = QuantConfig.parse(quant).bits
    tensors = random_tensors(tiny_config(**VARIANTS[variant]), seed=3)
    weights = {name: stored_as(values, dtype) for name, values in tensors.items()}

    def rows(name: str, transposed: bool = False) -> QuantizedRows:
        matrix = weights[name]
        return quantize_reference(np.ascontiguousarray(matrix.T) if transposed else matrix, bits)

    check_matrix(embedding_matrix(bundle), rows("model.embed_tokens.weight"))
    for layer in range(bundle.config.num_layers):
        mlp = f"model.layers.{layer}.mlp"
        if bundle.config.is_sliced:
            check_slices(bundle, layer, rows, weights[f"{mlp}.down_proj.weight"])
            continue
        parts = [rows(f"{mlp}.gate_proj.weight"), rows(f"{mlp}.up_proj.weight")]
        parts.append(rows(f"{mlp}.down_proj.weight", transposed=True))
        expected = pack_records(parts, bundle.record_layout)
        assert (load_file(bundle.path / neuron_file_name(layer))["records"] == expected).all()
    check_resident(load_file(bundle.path / "resident.safetensors"), bundle, rows, weights)


def check_slices(bundle: Bundle, layer: int, rows: Callable[..., QuantizedRows], down: NDArray[Any]) -> None:
    """A layer's slices have rows of gate and up, and columns of down (D, F), with zeros behind them."""
    layout, neurons, bits = bundle.neuron_layouts[0], bundle.config.widths[layer], bundle.quant.bits
    assert isinstance(layout, SliceLayout)
    tiles = layout.tiles
    names = [f"model.layers.{layer}.mlp.{which}_proj.weight" for which in ("gate", "up")]
    records = load_file(bundle.path / neuron_file_name(layer))["records"]
    for at, record in enumerate(joined_slices(records, layout)):
        assert in_planes(record, layout).tobytes() == records[at].tobytes()
        first = at * layout.neurons
        stop = min(first + layout.neurons, neurons)
        expected = [rows(name) for name in names] + [quantize_reference(down[:, first:stop], bits)]
        places = [slice(first, stop), slice(first, stop), slice(None)]
        parts = zip(tiles.part_offsets, tiles.matrices, expected, places, strict=True)
        for offset, matrix, whole, place in parts:
            found = untiled(record[offset : offset + matrix.nbytes], matrix)
            for field in ("codes", "scales", "biases"):
                values, theirs = getattr(found, field), getattr(whole, field)[place]
                count, width = theirs.shape
                assert (values[:count, :width] == theirs).all(), (matrix.rows, field)
                assert not values[count:].any()
                assert not values[:, width:].any()


def check_matrix(found: StoredMatrix, expected: QuantizedRows) -> None:
    for field in ("codes", "scales", "biases"):
        assert getattr(found, field).tobytes() == getattr(expected, field).tobytes(), field


def check_resident(
    found: dict[str, np.ndarray],
    bundle: Bundle,
    rows: Callable[..., QuantizedRows],
    weights: dict[str, np.ndarray],
) -> None:
    sources: dict[str, tuple[str, ...]] = {"final_norm": ("model.norm.weight",)}
    matrices = {"head": "lm_head.weight"}
    for layer in range(bundle.config.num_layers):
        theirs = f"model.layers.{layer}"
        attention = f"{theirs}.self_attn"
        sources |= {
            f"layers.{layer}.attention_norm": (f"{theirs}.input_layernorm.weight",),
            f"layers.{layer}.feed_forward_norm": (f"{theirs}.post_attention_layernorm.weight",),
            f"layers.{layer}.attention.qkv": tuple(f"{attention}.{which}_proj.weight" for which in "qkv"),
            f"layers.{layer}.attention.out": (f"{attention}.o_proj.weight",),
            f"layers.{layer}.attention.q_norm": (f"{attention}.q_norm.weight",),
            f"layers.{layer}.attention.k_norm": (f"{attention}.k_norm.weight",),
        }
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
        matrices |= {
            f"layers.{layer}.attention.{own}": f"{attention}.{their}.weight" for own, their in names.items()
        }
    assert set(found) == set(resident_tensors(bundle.config, bundle.quant))
    for name, values in found.items():
        if name in matrices:
            check_matrix(resident_matrix(bundle, name), rows(matrices[name]))
            continue
        stem, _, field = name.rpartition(".")
        theirs_of = [source.replace(".weight", f".{field}") for source in sources[stem]]
        stored = np.concatenate([weights[source] for source in theirs_of])
        if stored.dtype == np.uint16:
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        assert (values == stored.astype(np.float32)).all(), name


@pytest.mark.fast("*-BF16")
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_blocks_leave_no_trace(tmp_path: Path, act: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a down projection read in several bands of columns, the last one narrow."""
    shape = VARIANTS["llama-tails"] | {"hidden_act": act}
    source = write_checkpoint(tmp_path / "s", dtype=dtype, **shape)
    whole = folder_bytes(convert(source, tmp_path / "whole"))
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1)
    monkeypatch.setattr(reading, "DOWN_BLOCK_BYTES", 72 * 48 * 4)
    blocks = [
        b
        for b in reading.read_blocks(_opened(source), lambda file, tensor: True, QuantConfig(4))
        if len(b.rows) == 3
    ]
    if act == "relu":
        assert {len(block.rows[0]) for block in blocks} == {16, 4}
        assert len({id(block.rows[2].base) for block in blocks}) > 2, "one band only"
    in_blocks = folder_bytes(convert(source, tmp_path / "blocks"))
    # The error is sampled block by block, so it alone may differ.
    del whole["bundle.json"], in_blocks["bundle.json"]
    assert in_blocks == whole


def _opened(source: Path) -> Any:
    from ondevice.converters.checkpoints.opening import open_checkpoint

    return open_checkpoint(source)


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "a" / "model", shards=2)
    two = write_checkpoint(tmp_path / "b" / "model", shards=2)
    for path in two.iterdir():
        os.utime(path, (1, 1))
    assert folder_bytes(convert(one, tmp_path / "x")) == folder_bytes(convert(two, tmp_path / "y"))


def test_the_manifest_tells_the_source_and_the_quantisation_error(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "my-model")
    errors = {}
    for quant in ("q4", "q8", "f16"):
        provenance = Bundle.open(convert(source, tmp_path / quant, quant)).manifest.provenance
        assert (provenance.source, provenance.source_format) == ("my-model", "huggingface")
        errors[quant] = provenance.quantisation_error
    assert list(errors["q4"]) == ["attention", "attention_output", "embedding", "feed_forward", "head"]
    assert all(0.05 < error < 0.12 for error in errors["q4"].values())
    assert all(0.003 < error < 0.008 for error in errors["q8"].values())
    assert errors["f16"] == {}


def test_progress_is_monotonic_and_ends_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ondevice.converters.progress.REPORT_SECONDS", 0.0)
    source = write_checkpoint(tmp_path / "s")
    seen: list[Progress] = []
    convert(source, tmp_path / "b", on_progress=seen.append)
    sizes = sum(values.nbytes for values in random_tensors(tiny_config()).values())
    assert {progress.total_bytes for progress in seen} == {sizes}
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert seen[0].fraction < 0.5
    assert (seen[-1].fraction, seen[-1].remaining_seconds) == (1.0, 0.0)
    assert {p.step for p in seen} >= {"neurons-00001.safetensors", "embedding.safetensors"}
    assert all(p.bytes_per_second > 0 for p in seen)


def test_copies_that_carry_nothing_are_left_out(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    expected = folder_bytes(convert(source, tmp_path / "expected"))
    config = json.loads((source / "config.json").read_text())
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_safetensors(source / "model.safetensors", tensors)
    assert folder_bytes(convert(source, tmp_path / "b")) == expected


def test_a_snapshot_in_hugging_face_s_cache_is_named_after_its_repository(tmp_path: Path) -> None:
    """Snapshots are links to blobs outside the folder; the name is the repository's."""
    plain = write_checkpoint(tmp_path / "plain")
    repository = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repository / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in plain.iterdir():
        path.rename(repository / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    bundle = Bundle.open(convert(snapshot, tmp_path / "b"))
    assert bundle.manifest.provenance.source == "some-org/some-model@01234567"


def test_generation_defaults_come_from_generation_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", num_hidden_layers=1)
    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
         {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 1e-9}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "repetition_penalty": 1e-5}, {"temperature": 0.6}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": -1}, {"temperature": 1.0}),
        ({"max_new_tokens": 5}, {}),
    ]  # fmt: skip
    for number, (values, expected) in enumerate(cases):
        (source / "generation_config.json").write_text(json.dumps(values))
        bundle = Bundle.open(convert(source, tmp_path / str(number)))
        assert bundle.manifest.generation == expected
