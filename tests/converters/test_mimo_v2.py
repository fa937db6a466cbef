"""MiMo V2 Flash: its published config and tensors, 8-bit floats, and what is refused."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle.draft_layers import MTP_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.registry import describe, read_config
from ondevice.converters.architectures.tensors import tensor_shapes
from ondevice.converters.convert import convert
from ondevice.converters.draft_layers.mtp import convert_mtp, has_layers_ahead
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model.sequence_state import KVLayout
from ondevice.model_config.model import HeadSizes
from tests.converters.test_latent_attention import write_fp8
from tests.support.bundles import copy_files
from tests.support.families import CASES, write_model
from tests.support.mtp_checkpoints import change_config, write_mtp_checkpoint

transformers = pytest.importorskip("transformers")

GLOBAL = (0, 5, 11, 17, 23, 29, 35, 41, 47)
PUBLISHED: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_dropout": 0.0,
    "attention_value_scale": 0.707,
    "auto_map": {
        "AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig",
        "AutoModel": "modeling_mimo_v2_flash.MiMoV2FlashModel",
        "AutoModelForCausalLM": "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM",
    },
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [int(layer not in GLOBAL) for layer in range(48)],
    "initializer_range": 0.02,
    "intermediate_size": 16_384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262_144,
    "model_type": "mimo_v2_flash",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, *[1] * 47],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(48)],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_theta": 5_000_000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10_000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 152_576,
}
"""The authors' `config.json`, as public code that reads it quotes it; `quantization_config` is read apart."""
OWN_KEYS = {key: value for key, value in PUBLISHED.items() if key != "quantization_config"}


def test_the_published_model_s_config_is_read() -> None:
    """309 billion parameters: five layers of six see 129 tokens, and have twice the keys and sinks."""
    described = describe(OWN_KEYS)
    config = described.config
    local = [layer for layer, spec in enumerate(config.layers) if spec.attention.window]
    assert local == [layer for layer in range(48) if layer not in GLOBAL]
    whole, near = (config.layers[layer].attention for layer in (0, 1))
    assert config.heads(whole) == HeadSizes(64, 4, 192, values=128)
    assert config.heads(near) == HeadSizes(64, 8, 192, values=128)
    assert (whole.window, near.window, whole.sinks, near.sinks) == (0, 129, False, True)
    assert whole.out_factor == near.out_factor == float(np.float32(0.707))
    assert whole.scale == near.scale == float(np.float32(192**-0.5))
    for rope, theta in zip(config.ropes, (5e6, 1e4), strict=True):
        turning = [it for it in rope.frequencies if it > 0]
        assert (len(turning), len(rope.frequencies)) == (32, 96)
        assert turning[1] == float(np.float32(theta ** (-2 / 64)))
    experts = config.experts
    assert experts is not None
    assert (experts.count, experts.chosen, experts.neurons, experts.factor) == (256, 8, 2048, 1.0)
    assert (experts.scoring, experts.choice_bias, experts.renormalised) == ("sigmoid", True, True)
    assert [spec.experts is None for spec in config.layers] == [True, *[False] * 47]
    assert (config.widths[0], config.dense_neurons(config.layers[1])) == (16_384, 0)
    parameters = sum(prod(shape) for shape in tensor_shapes(config).values())
    assert 308e9 < parameters < 310e9
    assert any("adds the first of them" in note for note in described.notes)


def test_the_published_model_is_that_of_transformers() -> None:
    """Which takes layers, windows and rotary bases for its own, as they are the published ones."""
    theirs, config = transformers.MiMoV2FlashConfig(**OWN_KEYS), read_config(OWN_KEYS)
    kinds = ["sliding_attention" if it.attention.window else "full_attention" for it in config.layers]
    assert theirs.layer_types == kinds
    assert theirs.mlp_layer_types == ["dense" if it.experts is None else "sparse" for it in config.layers]
    assert {it.attention.window for it in config.layers} == {0, theirs.sliding_window}
    saved = read_config(theirs.to_dict() | {"architectures": OWN_KEYS["architectures"]})
    assert saved == config


def test_what_a_token_takes() -> None:
    """As zeros would make values as wide as keys, a fifth more of a text, and 0.8 billion weights more."""
    config = read_config(OWN_KEYS)
    layout = KVLayout(config, 16)
    heads = 9 * 4 + 39 * 8
    assert layout.block_bytes == 64 * heads * (192 + 128) * 2
    padded = 64 * heads * 2 * 192 * 2
    assert padded / layout.block_bytes == 1.2
    rows = sum(config.num_heads * 64 * config.hidden_size for _ in config.layers)
    assert rows == 805_306_368


def authors(folder: Path, window: int, **changes: Any) -> None:
    """Give a folder of `transformers` the authors' config."""
    path = folder / "config.json"
    ours = json.loads(path.read_text())
    kinds, sparse, ropes = (ours.pop(it) for it in ("layer_types", "mlp_layer_types", "rope_parameters"))
    ours["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    ours["moe_layer_freq"] = [int(kind == "sparse") for kind in sparse]
    ours["layernorm_epsilon"] = ours.pop("rms_norm_eps")
    ours["rope_theta"] = ropes["full_attention"]["rope_theta"]
    ours["swa_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
    ours["partial_rotary_factor"] = ropes["full_attention"]["partial_rotary_factor"]
    ours |= {"sliding_window": window - 1, "sliding_window_size": window - 1}
    ours |= {f"swa_{key}": ours[key] for key in ("num_attention_heads", "head_dim", "v_head_dim")}
    ours["swa_num_key_value_heads"] = 2 * ours["num_key_value_heads"]
    ours |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": None}
    path.write_text(json.dumps(ours | {"routed_scaling_factor": None} | changes))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a layer that predicts a token more, with the authors' config and names."""
    folder = tmp_path_factory.mktemp("mimo") / "source"
    write_mtp_checkpoint(folder, "mimo v2 moe")
    return folder


def test_the_authors_config_is_that_of_transformers(source: Path, tmp_path: Path) -> None:
    other = copy_files(source, tmp_path / "authors")
    authors(other, 9)
    assert not {"layer_types", "rope_parameters"} & set(json.loads((other / "config.json").read_text()))
    found, expected = (
        Bundle.open(convert(folder, tmp_path / f"{folder.name} bundle", "q4")) for folder in (other, source)
    )
    assert found.config == expected.config
    for file in expected.path.iterdir():
        if file.name != "bundle.json":
            assert (found.path / file.name).read_bytes() == file.read_bytes(), file.name
    assert any("(mtp) were left out" in note for note in found.manifest.provenance.notes)


@pytest.mark.fast("32")
@pytest.mark.parametrize("block", [128, 32])
def test_8_bit_floats_are_read_as_what_they_stand_for(source: Path, tmp_path: Path, block: int) -> None:
    """Those of the model and of the layer that predicts a token more; output projections aren't quantised."""
    for name in ("fp8", "plain"):
        (tmp_path / name).mkdir()
    kept = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)]
    kept += [f"model.mtp.layers.{layer}.self_attn.o_proj" for layer in range(3)]
    write_fp8(source, tmp_path / "fp8", tmp_path / "plain", block, kept)
    types = {name: it["dtype"] for name, it in header(tmp_path / "fp8").items()}
    assert {types[f"{name}.weight"] for name in kept} == {"F32"}
    assert sum(kind == "F8_E4M3" for kind in types.values()) > 80
    found, expected = (
        convert(tmp_path / name, tmp_path / f"{name} bundle", "q4") for name in ("fp8", "plain")
    )
    for name, bundle in (("fp8", found), ("plain", expected)):
        assert convert_mtp(tmp_path / name, bundle).window == 9
    for file in expected.iterdir():
        if file.name not in ("bundle.json", MTP_SIDECAR.manifest):
            assert (found / file.name).read_bytes() == file.read_bytes(), file.name


def header(folder: Path) -> dict[str, Any]:
    data = (folder / "model.safetensors").read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


@pytest.mark.slow
def test_layers_that_predict_ahead_are_counted_or_not(source: Path, tmp_path: Path) -> None:
    """Configs say how many there are or nothing; a folder of `transformers` has none."""
    bundle = convert(source, tmp_path / "bundle", "q8")
    without = convert_mtp(source, bundle)
    change_config(source, num_nextn_predict_layers=3)
    assert has_layers_ahead(source)
    assert convert_mtp(source, bundle) == without
    change_config(source, num_nextn_predict_layers=None)
    write_model(tmp_path / "bare", *CASES["mimo v2 moe"])
    change_config(tmp_path / "bare", vocab_size=320)
    with pytest.raises(CheckpointError, match=r"no tensors model\.mtp\.layers\.0\."):
        convert_mtp(tmp_path / "bare", bundle)


def test_a_damaged_layer_ahead_is_refused(source: Path, tmp_path: Path) -> None:
    bundle = convert(source, tmp_path / "bundle", "q8")
    tensors, own = load_file(source / "model.safetensors"), "model.mtp.layers.0."
    sinks, values = f"{own}self_attn.attention_sink_bias", f"{own}self_attn.v_proj.weight"
    fused = f"{own}self_attn.qkv_proj.weight"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_bytes((source / "config.json").read_bytes())
    for changed, kind, message in (
        ({it: rows for it, rows in tensors.items() if it != sinks}, CheckpointError, "attention.sinks"),
        (tensors | {values: tensors[values][:-1].copy()}, CheckpointError, "v_proj.weight has shape"),
        (tensors | {fused: tensors[values]}, UnsupportedModelError, "no part of .*qkv_proj"),
    ):
        save_file(changed, tmp_path / "other" / "model.safetensors")
        with pytest.raises(kind, match=message):
            convert_mtp(tmp_path / "other", bundle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be a 0 or a 1 for each of 48"),
        ({"moe_layer_freq": [2] * 48}, "moe_layer_freq must be"),
        ({"layer_types": ["full_attention"] * 48}, "contradict each other"),
        ({"mlp_layer_types": ["moe"] * 48}, "mlp_layer_types"),
        ({"mlp_layer_types": ["sparse"] * 48}, "mlp_layer_types and moe_layer_freq contradict"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 5e5}}},
            "swa_rope_theta is 10000, and rope_parameters say 500000",
        ),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads is 32"),
        ({"swa_num_key_value_heads": 7}, "num_heads 64 is not a multiple"),
        ({"v_head_dim": 256}, "v_head_dim of layers of full_attention is 256; it must be from 1 to 192"),
        ({"swa_head_dim": 1 << 40}, "head_dim of layers of sliding_attention"),
        ({"partial_rotary_factor": 0.33}, "63 of a head's 192 dimensions"),
        ({"sliding_window_size": -1}, "sliding_window is 0"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"rms_norm_eps": 1e-6}, "layernorm_epsilon is 1e-05, and rms_norm_eps 1e-06"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "it must hold objects"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "rope_type is 'yarn'",
        ),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout"),
        ({"hybrid_block_size": 6}, "hybrid_block_size"),
        ({"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        describe(OWN_KEYS | changes)
