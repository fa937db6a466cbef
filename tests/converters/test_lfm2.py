"""LFM2's config and tensors: what published files have, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.architectures.registry import read_config
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from ondevice.model_config import NO_ATTENTION, ConvSpec, DeltaSpec, FeedForwardSpec, LayerSpec
from tests.converters.test_families import all_logits, expected
from tests.support.engines import running
from tests.support.families import CASES, write_model

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


def test_a_published_config() -> None:
    config = read_config(PUBLISHED)
    assert config.intermediate_size == 8192
    assert config.recurrent_layers == (0, 1, 3, 4, 6, 7, 9, 11, 13, 15)
    assert config.layers[0].conv == ConvSpec(2048, 3)
    assert (config.head_dim, config.tie_embeddings) == (64, True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "lfm2_moe"}, "model_type 'lfm2_moe' is not one of"),
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
        ("conv.conv.weight", np.zeros((64, 3, 1), np.float32), "asks for .64, 1, 3."),
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
    with pytest.raises(UnsupportedModelError, match="one of the two"):
        LayerSpec(NO_ATTENTION, FeedForwardSpec("silu"), delta=DeltaSpec(1, 1, 16, 16), conv=ConvSpec(16, 3))
