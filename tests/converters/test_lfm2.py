"""LFM2's config and tensors: what published files have, and what is refused.

`test_gguf_families.py` has its GGUF files, and `test_mlx_hybrids.py` its MLX folders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from ondevice.model_config import NO_ATTENTION, ConvSpec, DeltaSpec, FeedForwardSpec, LayerSpec
from tests.converters.test_families import all_logits, expected
from tests.converters.test_mlx_hybrids import folders
from tests.support.engines import bundle_weights, running
from tests.support.families import CASES, write_model
from tests.support.gguf_families import write_family
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level
from tests.support.refusals import assert_refused

safetensors = pytest.importorskip("safetensors.numpy")

PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
"""Keys of the first models, of which `transformers` reads only some."""


MIXTURE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
"""A config with the sizes of LFM2-8B-A1B."""


def test_a_published_mixture_s_config_is_read() -> None:
    config = read_config(MIXTURE)
    assert [layer for layer, spec in enumerate(config.layers) if spec.experts is None] == [0, 1]
    assert [config.neurons(layer) for layer in config.layers[1:3]] == [7168, 32 * 1792]
    assert config.layers[3].conv == ConvSpec(2048, 3)
    experts = config.experts
    assert experts is not None
    assert (experts.scoring, experts.chosen, experts.renormalised) == ("sigmoid", 4, True)
    assert (experts.choice_bias, experts.factor, config.tie_embeddings) == (True, 1.0, True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts_per_tok": 33}, "chosen is 33"),
        ({"moe_intermediate_size": 1 << 60}, "neurons"),
        ({"num_dense_layers": "two"}, "num_dense_layers"),
        ({"n_group": 4}, "n_group"),
        ({"block_ff_dim": 12288}, "block_ff_dim"),
        ({"conv_bias": True}, "conv_bias"),
    ],
)
def test_what_isnt_known_of_a_mixture_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        read_config(MIXTURE | values)


def test_a_published_config_is_read() -> None:
    config = read_config(PUBLISHED)
    assert config.intermediate_size == 8192
    assert config.recurrent_layers == (0, 1, 3, 4, 6, 7, 9, 11, 13, 15)
    assert config.layers[0].conv == ConvSpec(2048, 3)
    assert (config.head_dim, config.tie_embeddings) == (64, True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "lfm2_vl"}, "model_type 'lfm2_vl' is not one of"),
        ({"conv_bias": True}, "conv_bias"),
        ({"block_use_swiglu": False}, "block_use_swiglu"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"conv_dim": 1024}, "conv_dim"),
        ({"block_dim": 1024}, "block_dim"),
        ({"num_heads": 16}, "num_heads"),
        ({"block_norm_eps": 1e-6}, "block_norm_eps"),
        ({"theta": 1e4}, "theta"),
        ({"conv_L_cache": 1}, "taps"),
        ({"conv_L_cache": 17}, "taps"),
        ({"full_attn_idxs": [99]}, "full_attn_idxs"),
        ({"layer_types": ["conv"] * 16}, "layer_types"),
        ({"layer_types": ["full_attention"] * 15}, "names 15 layers of 16"),
        ({"layer_types": ["mamba"] * 16}, "mamba"),
        ({"block_multiple_of": 0}, "block_multiple_of"),
        ({"block_ffn_dim_multiplier": -1.0}, "block_ffn_dim_multiplier"),
        ({"block_ff_dim": 1 << 60}, "block_ff_dim"),
    ],
)
def test_what_isnt_known_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        read_config(PUBLISHED | values)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    write_model(folder, *CASES["lfm2"])
    return folder


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("self_attn.q_proj.weight", np.zeros((64, 64), np.float32), "q_proj of attention"),
        ("conv.conv.weight", np.zeros((64, 3, 1), np.float32), "asks for .64, 3, 1."),
        ("conv.conv.weight", None, "conv.weight"),
        ("conv.in_proj.weight", np.zeros((128, 64), np.float32), "in_proj"),
        ("conv.in_proj.weight", None, "q_proj"),
        ("conv.out_proj.weight", None, "o_proj"),
    ],
)
def test_tensors_that_dont_fit_are_refused(
    source: Path, tmp_path: Path, name: str, value: Any, says: str
) -> None:
    tensors = safetensors.load_file(source / "model.safetensors")
    tensors.pop(f"model.layers.0.{name}", None)
    if value is not None:
        tensors[f"model.layers.0.{name}"] = value
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(OndeviceError, match=says):
        convert(tmp_path, tmp_path / "bundle", "f16")


@pytest.mark.fast("first0")
@pytest.mark.parametrize("first", [["conv", "full_attention"], ["full_attention", "conv"]])
def test_with_keys_of_32_bits_it_is_exact(tmp_path: Path, first: list[str]) -> None:
    """What keys of 16 bits change before convolutions is left out here."""
    family, options = CASES["lfm2"]
    model = write_model(tmp_path / "source", family, {**options, "layer_types": [*first, "conv", "conv"]})
    assert json.loads((tmp_path / "source" / "config.json").read_text())["layer_types"][:2] == first
    text = np.random.default_rng(6).integers(0, 256, 300).tolist()
    theirs = expected(model, text)
    with running(convert(tmp_path / "source", tmp_path / "bundle", "f16")) as loaded:
        mine = all_logits(loaded, text, 32)
    assert np.abs(mine - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_a_layer_has_one_kind_of_state() -> None:
    with pytest.raises(UnsupportedModelError, match="one of the three"):
        LayerSpec(NO_ATTENTION, FeedForwardSpec("silu"), delta=DeltaSpec(1, 1, 16, 16), conv=ConvSpec(16, 3))


def test_codes_of_a_gguf_file_are_copied(source: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write_family(tmp_path / "model.gguf", source, "Q8_0")
    bundle = convert(tmp_path / "model.gguf", tmp_path / "bundle")
    found, stored = bundle_weights(bundle), gguf.GGUFReader(tmp_path / "model.gguf").tensors
    exact = {it.name: gguf.quants.dequantize(it.data, it.tensor_type) for it in stored}
    for layer, kind in enumerate(json.loads((source / "config.json").read_text())["layer_types"]):
        mine, theirs = f"model.layers.{layer}.self_attn.", f"blk.{layer}."
        if kind == "conv":
            # The three parts of a convolution's projection stand in the place of queries, keys and values.
            whole = np.concatenate([found[f"{mine}{which}_proj.weight"] for which in "qkv"])
            assert np.array_equal(whole, exact[f"{theirs}shortconv.in_proj.weight"])
            assert np.array_equal(found[f"{mine}o_proj.weight"], exact[f"{theirs}shortconv.out_proj.weight"])
        else:
            for which, name in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
                assert np.array_equal(
                    found[f"{mine}{which}_proj.weight"], exact[f"{theirs}attn_{name}.weight"]
                )
    assert "attention: codes and scales copied" in Bundle.open(bundle).manifest.provenance.notes


def test_codes_of_an_mlx_folder_are_copied(tmp_path: Path) -> None:
    _, mlx = folders(tmp_path, "lfm2")
    bundle = convert(mlx.path, tmp_path / "bundle")
    found = bundle_weights(bundle)
    for layer in (0, 2, 3):
        mine, theirs = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.conv."
        whole = np.concatenate([found[f"{mine}{which}_proj.weight"] for which in "qkv"])
        assert np.array_equal(whole, mlx.values[f"{theirs}in_proj.weight"])
        assert np.array_equal(found[f"{mine}o_proj.weight"], mlx.values[f"{theirs}out_proj.weight"])
    assert "attention: codes and scales copied" in Bundle.open(bundle).manifest.provenance.notes


def test_a_gguf_file_that_isnt_whole_is_refused(source: Path, tmp_path: Path) -> None:
    path, folder = tmp_path / "model.gguf", tmp_path / "less"
    shutil.copytree(source, folder)
    tensors = safetensors.load_file(source / "model.safetensors")
    for name, says in (
        (
            "layers.0.conv.in_proj",
            r"blk\.0\.shortconv\.in_proj\.weight, which that config asks for, is",
        ),
        ("layers.2.conv.conv", r"blk\.2\.shortconv\.conv\.weight, which that config asks for, is missing"),
        ("layers.1.self_attn.q_proj", r"lacks 1 tensors .*blk\.1\.attn_q\.weight"),
        ("embedding_norm", r"lacks 1 tensors .*output_norm\.weight"),
    ):
        less = {it: values for it, values in tensors.items() if it != f"model.{name}.weight"}
        safetensors.save_file(less, folder / "model.safetensors")
        write_family(path, folder)
        assert_refused(path, CheckpointError, says)


def test_keys_and_tensors_of_a_gguf_file_are_known_by_name(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def without_taps(writer: Any) -> None:
        del writer.kv_data[0]["lfm2.shortconv.l_cache"]

    def of_attention(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_q.weight", np.ones((64, 64), np.float32))

    def another_norm(writer: Any) -> None:
        writer.add_tensor("output_norm.weight", np.ones(64, np.float32))

    def projected(writer: Any) -> None:
        writer.add_tensor("dense_2.weight", np.ones((64, 64), np.float32))

    for change, error, says in (
        (without_taps, CheckpointError, r"has no lfm2\.shortconv\.l_cache"),
        (of_attention, CheckpointError, "layer 0 has a short convolution, and q_proj of attention"),
        (another_norm, UnsupportedModelError, "1 tensors that are no part of a lfm2 model, "),
        (projected, UnsupportedModelError, r"no part of a lfm2 model, dense_2\.weight"),
    ):
        write_family(path, source, change=change)
        assert_refused(path, error, says)


def test_a_gguf_file_has_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    write_model(folder, "Lfm2", {**CASES["lfm2"][1], "vocab_size": BYTE_LEVEL_TOKENS})
    write_family(tmp_path / "model.gguf", folder, change=lambda writer: add_byte_level(writer, "lfm2"))
    info = Bundle.open(convert(tmp_path / "model.gguf", tmp_path / "bundle")).manifest.tokenizer
    assert (info.kind, info.add_bos) == ("byte_pairs", True)
