"""GGUF files as checkpoints: the bundle of a model is the same by every road, and what isn't known is
named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.converters.checkpoints.base import StoredTensor
from ondevice.converters.checkpoints.gguf_file import TENSOR_TYPES
from ondevice.converters.checkpoints.llama2c import convert_tokenizer
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.converters.progress import Progress
from ondevice.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ondevice.model_config import ModelConfig
from tests.converters.test_gguf_file import header, pair
from tests.support.engines import all_logits, running
from tests.support.families import write_model
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, gguf_name, write_gguf
from tests.support.models import (
    LLAMA3_ROPE,
    QUANTS,
    VARIANTS,
    random_tensors,
    save_safetensors,
    write_checkpoint,
)
from tests.support.refusals import assert_refused

gguf = pytest.importorskip("gguf")

KNOWN = [
    name
    for name, options in VARIANTS.items()
    if options.get("hidden_act", "silu") == "silu" and not options.get("use_sliding_window")
]
"""Variants that GGUF files can be of: they hold no activation, and no windows of single layers."""


def rope_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensor of Llama 3's factors, computed as llama.cpp's converter computes it."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / config["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    original = scaling["original_max_position_embeddings"]
    found = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(found, dtype=np.float32)}


def config_of(source: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((source / "config.json").read_text())
    return values


def assert_same_bundle(mine: Path, theirs: Path) -> None:
    """Equal bytes of every file but the manifest, and equal models in that, whichever family they say."""
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in mine.iterdir()) == names
    for name in set(names) - {"bundle.json"}:
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    bundles = Bundle.open(mine), Bundle.open(theirs)
    family = {"architecture": bundles[1].config.architecture}
    assert replace(bundles[0].config, **family) == bundles[1].config
    assert bundles[0].manifest.provenance.source_format == "gguf"


PLAIN = [*((variant, "F16") for variant in KNOWN), ("llama-gqa-tied", "F32"), ("qwen2", "BF16")]


@pytest.mark.fast("llama-gqa-tied-F32", "qwen2-BF16", "llama-llama3-rope-F16")
@pytest.mark.parametrize(("variant", "kind"), PLAIN)
def test_plain_files_give_the_bundle_of_safetensors(tmp_path: Path, variant: str, kind: str) -> None:
    source = write_checkpoint(tmp_path / "source", dtype=kind, **VARIANTS[variant])
    write_gguf(tmp_path / "model.gguf", source, kind, extra=rope_factors(config_of(source)))
    quant = QUANTS[variant]
    if kind != "F32":
        # Norms and biases are float32 in GGUF files.
        save_safetensors(source / "model.safetensors", stored_values(source, kind))
    mine = convert(tmp_path / "model.gguf", tmp_path / "mine", quant)
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", quant))


def stored_values(source: Path, kind: str) -> dict[str, np.ndarray]:
    """The folder's random weights as the type `kind` holds the matrices."""
    quant = gguf.GGMLQuantizationType[kind]
    return {
        name: values
        if values.ndim == 1
        else gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)
        for name, values in random_tensors(config_of(source)).items()
    }


@pytest.mark.fast("Q4_0", "Q4_K")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_quantised_files_give_the_bundle_of_their_values(tmp_path: Path, kind: str) -> None:
    block = next(known.block for known in TENSOR_TYPES.values() if known.name == kind)
    shape = {"hidden_size": 2 * block, "intermediate_size": 3 * block, "num_hidden_layers": 1}
    source = write_checkpoint(tmp_path / "source", num_key_value_heads=2, **shape)
    exact = write_gguf(tmp_path / "model.gguf", source, kind)
    save_safetensors(source / "model.safetensors", exact)
    done: list[Progress] = []
    mine = convert(tmp_path / "model.gguf", tmp_path / "mine", "q4", on_progress=done.append)
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", "q4"))
    assert done[-1].fraction == 1.0
    assert all(before.fraction <= after.fraction for before, after in pairwise(done))
    types = {tensor.dtype for tensor in open_checkpoint(tmp_path / "model.gguf").tensors.values()}
    assert types == {kind, "F32"}


@pytest.mark.fast("llama-llama3-rope")
@pytest.mark.parametrize("variant", ["llama-gqa-tied", "llama-llama3-rope", "qwen2", "qwen3"])
def test_logits_are_those_of_llama_cpp_for_the_same_file(tmp_path: Path, variant: str) -> None:
    """llama.cpp computes in another order, with float16 keys; transformers and we would differ by 1e-5."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options = {**VARIANTS[variant], "vocab_size": BYTE_LEVEL_TOKENS}
    source = write_checkpoint(tmp_path / "source", **options)
    write_gguf(tmp_path / "model.gguf", source, extra=rope_factors(config_of(source)), change=add_byte_level)
    tokens = np.random.default_rng(1).integers(0, 256, 200).tolist()
    theirs = llama_cpp.Llama(
        str(tmp_path / "model.gguf"), n_ctx=256, n_threads=1, logits_all=True, verbose=False, n_gpu_layers=0
    )
    theirs.eval(tokens)
    expected = np.array(theirs.scores[: len(tokens)])
    theirs.close()
    with running(convert(tmp_path / "model.gguf", tmp_path / "mine", "f16")) as model:
        mine = all_logits(model, tokens, 32)
    assert np.abs(mine - expected).max() < 5e-3 * np.abs(expected).max()
    assert (mine.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.98


GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}),
    "gemma3": ("Gemma3Text", {"sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
}


def gemma_source(folder: Path, case: str) -> Path:
    """A random Gemma, with the keys of older releases, which say the same."""
    pytest.importorskip("transformers")
    write_model(folder, GEMMAS[case][0], {**GEMMAS[case][1], "vocab_size": BYTE_LEVEL_TOKENS})
    config = config_of(folder)
    rope = config.pop("rope_parameters")
    full = rope.get("full_attention", rope)
    config["rope_theta"] = full["rope_theta"]
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", GEMMAS)
def test_a_gemma_converts_from_gguf_as_from_hugging_face(tmp_path: Path, case: str) -> None:
    """Files store a norm's weight plus one; the scale of scores and the pattern of layers aren't in them."""
    source = gemma_source(tmp_path / "source", case)
    weights = load_file(source / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", source, tensors=weights)
    mine = convert(tmp_path / "model.gguf", tmp_path / "mine", "f16")
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", "f16"))


@pytest.mark.fast("gemma3")
@pytest.mark.parametrize("case", GEMMAS)
def test_gemmas_speak_as_llama_cpp_does(tmp_path: Path, case: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    source = gemma_source(tmp_path / "source", case)
    weights = load_file(source / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", source, tensors=weights, change=add_byte_level)
    tokens = np.random.default_rng(1).integers(0, 256, 100).tolist()
    theirs = llama_cpp.Llama(
        str(tmp_path / "model.gguf"), n_ctx=128, n_threads=1, logits_all=True, verbose=False, n_gpu_layers=0
    )
    theirs.eval(tokens)
    expected = np.array(theirs.scores[: len(tokens)])
    theirs.close()
    with running(convert(tmp_path / "model.gguf", tmp_path / "mine", "f16")) as model:
        logits = all_logits(model, tokens, 32)
    assert np.abs(logits - expected).max() < 2e-2 * np.abs(expected).max()


def add_pieces(writer: Any, model: bytes) -> None:
    """The vocabulary of a sentencepiece model as metadata."""
    from sentencepiece import SentencePieceProcessor

    known = SentencePieceProcessor(model_proto=model)
    ids = range(known.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([known.id_to_piece(i) for i in ids])
    writer.add_token_scores([known.get_score(i) for i in ids])
    kinds = [(known.is_unknown, 2), (known.is_control, 3), (known.is_byte, 6)]
    writer.add_token_types([next((kind for says, kind in kinds if says(i)), 1) for i in ids])
    writer.add_bos_token_id(known.bos_id())
    writer.add_eos_token_id(known.eos_id())


def write_llama(path: Path, config: ModelConfig, vocabulary: bytes, tensors: dict[str, np.ndarray]) -> None:
    """Write a model with llama.cpp's default rotary frequencies; tensors by GGUF's names, in its order."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    add_pieces(writer, vocabulary)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_stories(path: Path, folder: Path) -> None:
    """Write stories260K, whose rows are in the order of GGUF files already, with its vocabulary."""
    checkpoint, tensors = open_checkpoint(folder), {}
    for name, tensor in checkpoint.tensors.items():
        assert isinstance(tensor, StoredTensor)
        plain = replace(tensor, interleaved_head_dim=0)
        values = plain.vector() if len(plain.shape) == 1 else plain.rows(0, plain.shape[0])
        tensors[gguf_name(name)] = values
    vocabulary = convert_tokenizer((folder / "tok512.bin").read_bytes(), 512, "tok512.bin")
    write_llama(path, checkpoint.config, vocabulary, tensors)
    checkpoint.close()


def test_a_real_model_is_the_same_from_llama2c_and_gguf(shared_data: Path, tmp_path: Path) -> None:
    theirs = shared_data / "models" / "stories260K"
    write_stories(tmp_path / "stories260K.gguf", theirs)
    bundle = convert(tmp_path / "stories260K.gguf", tmp_path / "mine", "q8")
    assert_same_bundle(bundle, convert(theirs, tmp_path / "theirs", "q8"))
    info = Bundle.open(bundle).manifest.tokenizer
    assert (info.kind, info.bos_id, info.eos_ids, info.add_bos) == ("byte_pairs", 1, (2,), True)
    with ondevice.load(bundle) as model:
        text = model.generate("Once upon a time", max_tokens=12, temperature=0.0).text
    assert text.startswith(", there was a little girl named Lily")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of one layer."""
    return write_checkpoint(tmp_path / "source", num_hidden_layers=1, num_key_value_heads=2)


def test_a_model_in_parts_converts_as_in_one_file(source: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", source)
    write_gguf(tmp_path / "model.gguf", source, split_max_tensors=5)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name for part in parts] == [f"model-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    expected = convert(tmp_path / "whole.gguf", tmp_path / "expected")
    for part in parts:
        assert open_checkpoint(part).name == "model"
        assert len(open_checkpoint(part).source_files) == 3
    mine = convert(parts[1], tmp_path / "mine")
    assert_same_bundle(mine, expected)
    # As downloaded: links into another folder of the hub's cache.
    cache = tmp_path / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "0123456789").mkdir(parents=True)
    for i, part in enumerate(parts):
        part.rename(cache / "blobs" / str(i))
        (cache / "snapshots" / "0123456789" / part.name).symlink_to(cache / "blobs" / str(i))
    assert_same_bundle(convert(cache / "snapshots" / "0123456789", tmp_path / "cached"), expected)


def test_parts_that_do_not_belong_together(source: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", source, split_max_tensors=5)
    first, second, third = sorted(tmp_path.glob("model-*.gguf"))
    renamed = tmp_path / "renamed.gguf"
    first.rename(renamed)
    assert_refused(renamed, CheckpointError, "renamed.gguf is one of 3 parts, whose names must end in")
    renamed.rename(first)
    second.rename(tmp_path / "aside")
    assert_refused(first, CheckpointError, r"has no model-00002-of-00003\.gguf; is the download complete")
    second.write_bytes(third.read_bytes())
    assert_refused(
        first, CheckpointError, r"model-00002-of-00003\.gguf says that it is part 2 \(from 0\) of 3"
    )
    number = b"split.no" + struct.pack("<I", 2)
    assert first.read_bytes().count(number + b"\0\0") == 1
    second.write_bytes(first.read_bytes().replace(number + b"\0\0", number + b"\1\0"))
    assert_refused(
        first, CheckpointError, r"model-00001-of-00003\.gguf and model-00002.* both hold token_embd"
    )
    (tmp_path / "aside").replace(second)
    third.write_bytes(header([pair("split.no", 2, b"\2\0"), pair("split.count", 2, b"\3\0")], []))
    assert_refused(first, CheckpointError, "the parts of model have 10 tensors of 12")
    huge = tmp_path / "x-00001-of-99999.gguf"
    huge.write_bytes(first.read_bytes())
    assert_refused(huge, CheckpointError, "would be part 1 of 99999; parts count from 1, and at most 512")
    beyond = tmp_path / "x-00009-of-00002.gguf"
    beyond.write_bytes(first.read_bytes())
    assert_refused(beyond, CheckpointError, "would be part 9 of 2")


def test_a_folder_opens_its_only_gguf_model_unless_it_has_safetensors(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(folder / "a.gguf", source)
    write_gguf(folder / "mmproj-a.gguf", source)
    assert open_checkpoint(folder).name == "a"
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    assert open_checkpoint(folder).source_format == "gguf"
    write_gguf(folder / "b.gguf", source)
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models; name one, as .*a\.gguf"):
        open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert open_checkpoint(folder).source_format == "huggingface"
    for name in ("a.gguf", "b.gguf", "config.json", "model.safetensors"):
        (folder / name).unlink()
    (folder / "a.gguf").symlink_to(folder / "mmproj-a.gguf")
    assert open_checkpoint(folder).name == "a"
    (folder / "a.gguf").unlink()
    (folder / "a.gguf").symlink_to(write_and_name(tmp_path / "outside.gguf", source))
    with pytest.raises(CheckpointError, match=r"a\.gguf is a link that leads out of"):
        open_checkpoint(folder)
    with pytest.raises(ModelNotFoundError, match="a GGUF file"):
        open_checkpoint(tmp_path / "nothing")


def write_and_name(path: Path, source: Path) -> Path:
    write_gguf(path, source)
    return path


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("original", [8192, 4096])
def test_llama_3_factors_divide_the_frequencies(
    source: Path, tmp_path: Path, factor: float, original: int
) -> None:
    rope = {**LLAMA3_ROPE, "factor": factor, "original_max_position_embeddings": original}
    source = write_checkpoint(tmp_path / "s", head_dim=128, rope_theta=500000.0, rope_scaling=rope)
    write_gguf(tmp_path / "model.gguf", source, extra=rope_factors(config_of(source)))
    found, expected = (open_checkpoint(path).config.ropes[0] for path in (tmp_path / "model.gguf", source))
    np.testing.assert_allclose(found.frequencies, expected.frequencies, rtol=1e-6)
    assert found.frequencies[-1] < 1.01 * 500000.0 ** (-126 / 128) / factor


def test_rope_factors_divide_the_frequencies_or_are_refused(source: Path, tmp_path: Path) -> None:
    path, plain = tmp_path / "model.gguf", open_checkpoint(source).config.ropes[0].frequencies
    write_gguf(path, source, extra={"rope_freqs.weight": np.ones(8, dtype=np.float32)})
    assert open_checkpoint(path).config.ropes[0].frequencies == plain
    factors = np.linspace(1, 5, 8, dtype=np.float32)
    write_gguf(path, source, extra={"rope_freqs.weight": factors})
    found = open_checkpoint(path).config.ropes[0].frequencies
    np.testing.assert_allclose(np.array(found) * factors, plain, rtol=1e-6)
    write_gguf(path, source, extra={"rope_freqs.weight": np.ones(5, dtype=np.float32)})
    assert_refused(path, CheckpointError, r"rope_freqs.weight has shape \[5\], not \[8\]")
    for wrong in (0.0, -1.0, np.nan, np.inf):
        write_gguf(path, source, extra={"rope_freqs.weight": np.full(8, wrong, dtype=np.float32)})
        assert_refused(path, CheckpointError, "rope_freqs.weight h")


def u32(key: str, value: int) -> Callable[[Any], None]:
    return lambda writer: writer.add_uint32(key, value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.add_string("general.type", "adapter"), UnsupportedModelError, "holds adapter, not"),
        (u32("llama.expert_count", 8), CheckpointError, "has no llama.expert_used_count"),
        (u32("llama.some.new_key", 1), UnsupportedModelError, "has keys .* llama.some.new_key = 1"),
        (lambda w: w.add_bool("llama.use_parallel_residual", False), UnsupportedModelError,
         "has keys .* llama.use_parallel_residual = False"),
        (lambda w: w.add_bool("llama.attention.causal", False), UnsupportedModelError, "isn't a causal"),
        (u32("llama.attention.value_length", 8), UnsupportedModelError, "value_length is 8, which"),
        (lambda w: w.add_string("llama.attention.key_length", "x"), CheckpointError, "key_length is 'x'; it"),
        (lambda w: w.add_string("llama.rope.scaling.type", "ntk"), UnsupportedModelError,
         "model.gguf, whose metadata were read as a config.json: rope_scaling: 'ntk' is not"),
        (lambda w: w.add_array("llama.attention.key_length", [16, 8]), CheckpointError, "an array of 2"),
        (u32("llama.attention.key_length", 15), UnsupportedModelError, "rope.dimension_count is 16, which"),
        (lambda w: setattr(w.kv_data[0]["llama.attention.layer_norm_rms_epsilon"], "value", 0.0),
         UnsupportedModelError,
         "^model.gguf, whose metadata .*: norm eps is 0.0; .*; download it again, or convert the"),
        (lambda w: w.kv_data[0].pop("llama.attention.layer_norm_rms_epsilon"), CheckpointError,
         "model.gguf has no llama.attention.layer_norm_rms_epsilon, .*; download it again"),
    ],
)  # fmt: skip
def test_metadata_that_are_not_known(
    source: Path, tmp_path: Path, change: Callable[[Any], None], error: type, message: str
) -> None:
    write_gguf(tmp_path / "model.gguf", source, change=change)
    assert_refused(tmp_path / "model.gguf", error, message)


def test_one_number_per_layer_counts_if_all_are_equal(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    write_gguf(
        tmp_path / "model.gguf", source, change=lambda w: w.add_array("llama.attention.key_length", [16, 16])
    )
    assert open_checkpoint(tmp_path / "model.gguf").config.head_dim == 16


def test_tensors_that_are_missing_extra_or_of_another_shape(source: Path, tmp_path: Path) -> None:
    path, weights = tmp_path / "model.gguf", random_tensors(config_of(source))
    without = {name: values for name, values in weights.items() if "norm" not in name}
    write_gguf(path, source, tensors=without)
    assert_refused(path, CheckpointError, r"lacks 3 tensors .*blk\.0\.attn_norm\.weight, .*; is the download")
    write_gguf(path, source, extra={"blk.0.ffn_gate.bias": np.zeros(160, dtype=np.float32)})
    assert_refused(path, UnsupportedModelError, r"no part of a llama model, blk\.0\.ffn_gate\.bias")
    write_gguf(path, source, tensors=weights | {"model.norm.weight": np.ones(63, dtype=np.float32)})
    assert_refused(path, CheckpointError, r"output_norm.weight has shape \[63\]; the metadata ask for \[64\]")
    write_gguf(path, source, tensors=weights | {"model.norm.weight": np.full(64, np.nan, dtype=np.float32)})
    message = r"^model.gguf: model.norm.weight holds NaN or infinity; .*, download it again"
    assert_refused(path, CheckpointError, message)
    write_gguf(path, source, tensors={k: v for k, v in weights.items() if "embed" not in k})
    assert_refused(path, CheckpointError, "has no matrix token_embd.weight")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grok", "general.architecture grok is not one of .*llama, .*nemotron, .*phi3, .*qwen2, .*qwen3"),
        ("mamba", "general.architecture is mamba"),
        ("clip", "is an encoder of images or sound.* general.architecture is clip; give a language model's"),
        ("", "has no general.architecture"),
    ],
)
def test_other_architectures_are_named(source: Path, tmp_path: Path, name: str, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name or "llama")
    if not name:
        writer.kv_data[0].pop("general.architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kind = UnsupportedModelError if name else CheckpointError
    assert_refused(tmp_path / "model.gguf", kind, message)
