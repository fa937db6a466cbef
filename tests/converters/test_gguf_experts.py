"""Mixtures of experts in GGUF files, whose experts are merged; see also `test_gguf_families.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.backends.reference import dequantize_rows
from ondevice.bundle.matrix_layout import TiledMatrix
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import untiled
from ondevice.bundle.verify import verify
from ondevice.config import MXFP4, RowFormat
from ondevice.converters.checkpoints.gguf_codecs import TILE_FORMATS, decode
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.converters.quantize import dequantize, to_float32
from ondevice.errors import CheckpointError, OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.kernels._native import crc32c
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords
from tests.backends.test_parity_transformers import rms_error
from tests.converters.test_gguf_model import assert_same_bundle
from tests.support.engines import all_logits, running
from tests.support.families import CASES, QWEN2_MOE, QWEN3_MOE, write_model
from tests.support.gguf_blocks import with_experts_of, write_wide_mixture
from tests.support.gguf_families import Arrangement, write_family

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 8 experts of 64 neurons, 2 chosen, and 3 layers of 64 values."""
    folder = tmp_path_factory.mktemp("qwen3") / "source"
    write_model(folder, "Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True})
    return folder


def set_key(writer: Any, key: str, value: Any) -> None:
    name = f"{writer.arch}.{key}"
    writer.kv_data[0].pop(name, None)
    add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    add[type(value)](name, value)


LYING: list[tuple[str, Any, str]] = [
    ("expert_count", 7, r"blk\.0\.ffn_gate_exps\.weight has shape \[8, 64, 64\]; .* \[7, 64, 64\]"),
    ("expert_count", 1 << 31, "num_experts is 2147483648; it must be from 1 to 4096"),
    ("expert_count", 4096, r"asks for \[4096, 64, 64\]"),
    ("expert_count", 0, "num_experts is 0"),
    ("expert_count", [8, 8, 7], "must be an integer"),
    ("expert_used_count", 9, "chosen is 9; it must be an integer from 1 to 8"),
    ("expert_feed_forward_length", 32, r"has shape \[8, 64, 64\].*asks for \[8, 32, 64\]"),
    ("expert_gating_func", 2, "expert_gating_func is 2; only 1, softmax"),
    ("expert_gating_func", 77, "expert_gating_func is 77"),
    ("expert_weights_scale", 2.5, "expert_weights_scale is 2.5; only 1"),
    ("expert_group_count", 4, "expert_group_count is 4; only 1"),
    ("leading_dense_block_count", 1, "leading_dense_block_count is 1; only 0"),
    ("expert_shared_feed_forward_length", 64, "expert_shared_feed_forward_length is 64; only 0"),
    ("expert_chunk_feed_forward_length", 64, "expert_chunk_feed_forward_length"),
]
"""Metadata of Qwen3-MoE that are refused."""


@pytest.mark.parametrize(("key", "value", "message"), LYING)
def test_lying_metadata_are_refused(source: Path, tmp_path: Path, key: str, value: Any, message: str) -> None:
    write_family(tmp_path / "model.gguf", source, change=lambda writer: set_key(writer, key, value))
    with pytest.raises(OndeviceError, match=message):
        open_checkpoint(tmp_path / "model.gguf")


def test_merged_tensors_of_other_sizes_are_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for name, shape in (("gate", (8, 32, 128)), ("up", (4, 128, 64)), ("down", (512, 64)), ("down", (8, 64))):
        full = f"blk.1.ffn_{name}_exps.weight"

        def change(writer: Any, name: str = full, shape: tuple[int, ...] = shape) -> None:
            add = writer.add_tensor

            def add_other(new: str, values: np.ndarray, **options: Any) -> None:
                add(new, np.resize(values, shape) if new == name else values, **options)

            writer.add_tensor = add_other

        write_family(path, source, change=change)
        with pytest.raises(CheckpointError, match=rf"{full} has shape .*asks for \[8, 64, 64\]; download"):
            open_checkpoint(path)


@pytest.mark.fast("mixtral-single")
@pytest.mark.parametrize("experts", ["two", "single"])
@pytest.mark.parametrize("case", ["mixtral", "qwen2 moe", "gemma4 moe"])
def test_other_arrangements_give_the_same_bundle(tmp_path: Path, case: str, experts: Arrangement) -> None:
    """Gates above ups in one tensor; experts one by one, as files from before April 2024 have them."""
    source, family = tmp_path / "source", CASES[case]
    write_model(source, family[0], family[1])
    found = []
    for arrangement in ("three", experts):
        path = tmp_path / f"{arrangement}.gguf"
        write_family(path, source, "Q8_0", experts=arrangement)
        found.append(convert(path, tmp_path / arrangement, "q8"))
    assert_same_bundle(*found)


def test_experts_that_are_missing_or_there_twice_are_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for old, new, message in (
        ("ffn_up_exps", "ffn_gone", r"blk\.0\.ffn_up_exps\.weight.* is missing"),
        ("ffn_down_exps", "ffn_down.9", r"blk\.0\.ffn_down_exps\.weight.* is missing"),
        ("ffn_down_exps", "ffn_down.0", r"7 tensors of experts"),
        ("ffn_norm", "ffn_gate.0", "are the same"),
        ("ffn_norm", "ffn_gate_up_exps", r"ffn_gate_up_exps\.weight has shape \[64\]"),
    ):

        def change(writer: Any, old: str = old, new: str = new) -> None:
            add = writer.add_tensor
            writer.add_tensor = lambda name, values, **options: add(name.replace(old, new), values, **options)

        write_family(path, source, change=change)
        with pytest.raises(OndeviceError, match=message):
            open_checkpoint(path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4", "BF16"])
def test_quantised_experts_are_decoded_and_codes_kept(source: Path, tmp_path: Path, kind: str) -> None:
    """Values and codes of an expert are those of the file's merged matrices, down projections' too."""
    path = tmp_path / "model.gguf"
    write_family(path, source, kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    exact = {
        name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for name in ("gate", "down")
        for tensor in [stored[f"blk.0.ffn_{name}_exps.weight"]]
    }
    with closing(open_checkpoint(path)) as checkpoint:
        for name, values in exact.items():
            own, values = checkpoint.tensors[f"model.layers.0.experts.5.{name}.weight"], values[5]
            assert np.array_equal(to_float32(own.rows(7, 50)), values[7:50])
            assert own.code_format == FORMATS.get(kind)
            assert own.code_bits == (own.code_format.bits if own.code_format else 0)
            if own.code_format is None:
                continue
            codes = own.quantized_rows(7, 50, own.code_format)
            assert codes is not None
            assert np.array_equal(dequantize(codes, own.code_format, 64), values[7:50])
            assert own.quantized_rows(7, 50, RowFormat(4, 64)) is None


FORMATS = {
    "Q4_0": RowFormat(4, 32, "symmetric"),
    "Q4_1": RowFormat(4, 32),
    "Q5_0": RowFormat(5, 32, "symmetric"),
    "Q5_1": RowFormat(5, 32),
    "Q8_0": RowFormat(8, 32, "symmetric"),
    "MXFP4": MXFP4,
}


def copied_matrices(
    bundle: Bundle, stored: RowFormat, expert: int
) -> Iterator[tuple[str, TiledMatrix, np.ndarray]]:
    """Name in the file, layout and values of each matrix of an expert of layer 1.

    Checks that all experts are `stored` so, and that the manifest's notes say that codes were copied.
    """
    layout = bundle.expert_layouts[-1]
    assert layout is not None
    assert (bundle.quant.of("experts"), bundle.quant.of("experts_down")) == (stored, stored)
    notes = [f"expert_{which}: codes and scales copied" for which in ("down", "gate", "up")]
    assert [it for it in bundle.manifest.provenance.notes if it.startswith("expert")] == notes
    with FlashReader(bundle_files(bundle)) as reader:
        records = NeuronRecords(bundle, reader, 1).experts
        assert records is not None
        record = records.read(expert)
    for name, offset, matrix in zip(
        ("gate", "up", "down"), layout.part_offsets, layout.matrices, strict=True
    ):
        codes, scales, biases, _ = untiled(record[offset : offset + matrix.nbytes], matrix)
        values = dequantize_rows(codes, scales, biases, stored, matrix.row.cols)
        yield f"blk.1.ffn_{name}_exps.weight", matrix, values


@pytest.mark.fast("Q5_0", "MXFP4")
@pytest.mark.parametrize("kind", FORMATS)
def test_all_codes_of_experts_are_copied(source: Path, tmp_path: Path, kind: str) -> None:
    """Every value of a record is the file's, and the manifest's notes say so."""
    path = tmp_path / "model.gguf"
    write_family(path, source, kind)
    bundle = Bundle.open(convert(path, tmp_path / "mine"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, _, mine in copied_matrices(bundle, FORMATS[kind], 6):
        tensor = tensors[name]
        assert np.array_equal(mine, gguf.quants.dequantize(tensor.data, tensor.tensor_type)[6])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "source"
    write_wide_mixture(folder)
    return folder


@pytest.mark.fast("Q3_K", "Q4_K", "IQ4_NL")
@pytest.mark.parametrize("kind", TILE_FORMATS)
def test_experts_of_tile_formats_have_the_bits_of_their_file(wide: Path, tmp_path: Path, kind: str) -> None:
    """Every value, and the notes say so; the records are as large as the file's tensors."""
    path = tmp_path / "model.gguf"
    tensors = with_experts_of(path, wide, kind)
    bundle = Bundle.open(convert(path, tmp_path / "mine"))
    verify(bundle.path, crc32c)
    for name, matrix, mine in copied_matrices(bundle, TILE_FORMATS[kind], 3):
        values = tensors[name]
        assert matrix.rows_bytes <= 1.02 * values[3].nbytes
        theirs = np.empty_like(mine)
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        decode(kind, np.ascontiguousarray(values[3]).reshape(-1, nbytes), theirs.reshape(-1, block))
        assert mine.tobytes() == theirs.tobytes()


def test_each_layers_experts_have_their_own_types(wide: Path, tmp_path: Path) -> None:
    """As mixes of types have them: down matrices of a layer in Q6_K, of another in Q4_K."""
    path = tmp_path / "model.gguf"
    with_experts_of(path, wide, "Q4_K", "Q6_K", "Q4_K")
    bundle = Bundle.open(convert(path, tmp_path / "mine"))
    q4_k, q6_k = TILE_FORMATS["Q4_K"], TILE_FORMATS["Q6_K"]
    formats = [
        (bundle.quant.of("experts", layer), bundle.quant.of("experts_down", layer)) for layer in (0, 1)
    ]
    assert formats == [(q4_k, q6_k), (q4_k, q4_k)]
    notes = [it for it in bundle.manifest.provenance.notes if it.startswith("expert")]
    assert notes == [f"expert_{which}: codes and scales copied" for which in ("down", "gate", "up")]
    verify(bundle.path, crc32c)
    tokens = list(range(20))
    with running(bundle.path) as reference, running(bundle.path, "cpu") as model:
        assert 0 < rms_error(all_logits(model, tokens), all_logits(reference, tokens, 32)) < 0.08


def test_scales_that_are_not_finite_are_refused(wide: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = with_experts_of(path, wide, "Q6_K")["blk.1.ffn_up_exps.weight"]
    whole, start = path.read_bytes(), values[2].tobytes()
    broken = start[:208] + b"\x00\x7c" + start[210:]
    path.write_bytes(whole.replace(start, broken))
    with pytest.raises(CheckpointError, match=r"experts\.2\.up.* holds NaN, infinity"):
        convert(path, tmp_path / "mine")


@pytest.mark.parametrize("kind", ["Q2_K", "IQ4_XS"])
def test_a_mixture_in_tile_formats_answers_as_its_values_do(wide: Path, tmp_path: Path, kind: str) -> None:
    """The kernels against numpy on the bundle's values."""
    path = tmp_path / "model.gguf"
    with_experts_of(path, wide, kind)
    bundle = convert(path, tmp_path / "mine")
    tokens = np.random.default_rng(8).integers(0, 256, 24).tolist()
    with running(bundle) as reference, running(bundle, "cpu") as model:
        assert 0 < rms_error(all_logits(model, tokens), all_logits(reference, tokens, 32)) < 0.08


def test_a_shared_expert_may_be_of_another_type(tmp_path: Path) -> None:
    """As in files of mixed types. Neurons of 72 don't fill blocks, so its down projection is float32."""
    path, source = tmp_path / "model.gguf", tmp_path / "source"
    write_model(source, "Qwen2Moe", {**QWEN2_MOE, "moe_intermediate_size": 64})
    write_family(path, source, "Q8_0")
    with closing(open_checkpoint(path)) as checkpoint:
        shared = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"]
        assert (shared.shape, shared.code_bits) == ((64, 72), 0)
        assert checkpoint.tensors["model.layers.0.experts.7.down.weight"].code_bits == 8
    convert(path, tmp_path / "mine", "q4")


def test_layers_that_predict_ahead_are_left_out(tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "model.gguf"
    write_model(source, "Glm4Moe", CASES["glm4 moe"][1])

    def change(writer: Any) -> None:
        set_key(writer, "block_count", 4)
        set_key(writer, "nextn_predict_layers", 1)
        for name in ("nextn.eh_proj", "attn_q", "ffn_gate_exps", "attn_norm"):
            writer.add_tensor(f"blk.3.{name}.weight", np.ones((2, 32), np.float32))

    write_family(path, source, change=change)
    assert_same_bundle(convert(path, tmp_path / "mine", "f16"), convert(source, tmp_path / "theirs", "f16"))
    write_family(path, source, change=lambda writer: set_key(writer, "nextn_predict_layers", 3))
    with pytest.raises(CheckpointError, match="nextn_predict_layers is 3 of 3 layers"):
        open_checkpoint(path)
