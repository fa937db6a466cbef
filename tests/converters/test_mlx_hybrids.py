"""MLX folders of hybrids and of models with latent attention: the bundles of their values' checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures import qwen3_next
from ondevice.converters.architectures.nemotron_h import PATTERN
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.checkpoints.views import Scaled
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError
from ondevice.model_config import DeltaSpec
from tests.support.engines import all_logits, running
from tests.support.families import CASES, write_model
from tests.support.mlx_folders import (
    MlxFolder,
    Scheme,
    named_by_mlx,
    save_typed,
    typed,
    widened,
    write_quantised,
)
from tests.support.mlx_hybrids import restored, sanitised
from tests.support.refusals import assert_refused

WIDE: dict[str, Any] = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
"""Sizes of whole groups."""
ANY_TIME: dict[str, Any] = {"time_step_limit": [0.0, math.inf]}
CODED: dict[str, tuple[str, Scheme, dict[str, Any]]] = {
    "deepseek v2": ("deepseek v2 moe", Scheme(4, 32), {**WIDE, "q_lora_rank": None}),
    "deepseek v3": ("deepseek v3 moe", Scheme(4, 32), WIDE),
    "glm4 moe lite": ("glm4 moe lite", Scheme(8, 32, "BF16"), WIDE),
    "qwen3 next": ("qwen3 next", Scheme(4, 32), {"linear_value_head_dim": 32}),
    "qwen3.5": ("qwen3.5", Scheme(6, 32), {"linear_value_head_dim": 16}),
    "qwen3.5 moe": ("qwen3.5 moe", Scheme(4), {"linear_value_head_dim": 32}),
    "lfm2": ("lfm2", Scheme(5, 32), {}),
    "lfm2 moe": ("lfm2 moe", Scheme(4, 32), {"intermediate_size": 64}),
    # mlx-lm takes neurons from another key than transformers, and knows norms over one group alone.
    "granite hybrid": (
        "granite hybrid",
        Scheme(4, 32),
        {"intermediate_size": 64, "mamba_n_groups": 1, **ANY_TIME},
    ),
    "granite hybrid moe": ("granite hybrid moe", Scheme(8), ANY_TIME),
    "nemotron h": ("nemotron h", Scheme(4, 32), {}),
    "nemotron h moe": ("nemotron h moe", Scheme(6, 32, "BF16"), {}),
}
NEURONS = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
)


MULTIPLIERS_OF_MLX = {
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
}
"""Falcon-H1 as mlx-lm runs it: with others it leaves these out. Columns are whole groups."""


def folders(folder: Path, case: str, plain: bool = False) -> tuple[Path, MlxFolder]:
    """A checkpoint, and the MLX folder whose values it has. plain: not quantised."""
    name, scheme, more = CODED[case]
    family, options = CASES[name]
    options = options | {key: 64 for key in NEURONS if options.get(key)} | more
    source = folder / "source"
    write_model(source, family, options)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")

    def of(module: str) -> Scheme | None:
        """As mlx-lm has it: convolutions and DeepSeek's routers stay, the others have 8 bits."""
        of_latents = module.endswith("mlp.gate") and "kv_lora_rank" in config
        if plain or of_latents or module.endswith(("conv1d", "conv.conv", "mixer.gate")):
            return None
        eight = ("mlp.gate", "shared_expert_gate", "feed_forward.gate", "router.layer")
        return Scheme(8, 32) if module.endswith(eight) else scheme

    mlx = write_quantised(folder / "mlx", config, sanitised(config, tensors), scheme, of, "F32")
    if plain:
        (mlx.path / "config.json").write_text(json.dumps(config))
    shapes = {name: values.shape for name, values in tensors.items()}
    save_file(restored(config, shapes, mlx.values), source / "model.safetensors", {"format": "pt"})
    return source, mlx


def assert_same_files(mine: Path, theirs: Path) -> None:
    for path in theirs.iterdir():
        if path.name != "bundle.json":
            assert (mine / path.name).read_bytes() == path.read_bytes(), path.name
    assert Bundle.open(mine).config == Bundle.open(theirs).config


@pytest.mark.fast("qwen3.5 moe", "glm4 moe lite")
@pytest.mark.parametrize("case", CODED)
def test_a_quantised_folder_has_the_values_of_its_codes(tmp_path: Path, case: str) -> None:
    source, mlx = folders(tmp_path, case)
    assert_same_files(
        convert(mlx.path, tmp_path / "mine", "f16"), convert(source, tmp_path / "theirs", "f16")
    )


@pytest.mark.fast("nemotron h moe", "lfm2")
@pytest.mark.parametrize("case", ["deepseek v3", "qwen3.5 moe", "lfm2", "nemotron h moe"])
def test_a_folder_that_isnt_quantised_is_read(tmp_path: Path, case: str) -> None:
    source, mlx = folders(tmp_path, case, plain=True)
    assert_same_files(convert(mlx.path, tmp_path / "mine", "q4"), convert(source, tmp_path / "theirs", "q4"))


@pytest.mark.fast("falcon h1 norm before gate")
@pytest.mark.parametrize("case", ["falcon h1", "falcon h1 norm before gate"])
def test_multipliers_that_are_in_the_weights_count_once(tmp_path: Path, case: str) -> None:
    """MLX's Falcon-H1 has most of them there. The head of the second is its embedding."""
    family, options = CASES[case]
    source, mlx = tmp_path / "source", tmp_path / "mlx"
    write_model(source, family, options)
    config = json.loads((source / "config.json").read_text())
    tensors = sanitised(config, load_file(source / "model.safetensors"))
    assert not np.allclose(
        tensors["model.embed_tokens.weight"],
        load_file(source / "model.safetensors")["model.embed_tokens.weight"],
    )
    mlx.mkdir()
    (mlx / "config.json").write_text(json.dumps(config))
    save_typed(mlx / "model.safetensors", {name: ("F32", values) for name, values in tensors.items()})
    found = []
    for folder in (source, mlx):
        with running(
            convert(folder, tmp_path / f"{folder.name}-bundle", "f16"), backend="reference"
        ) as model:
            found.append(all_logits(model, list(range(40)), 32))
    # Weights are rounded to 16 bits before their factor in the one, and behind it in the other.
    assert np.abs(found[0] - found[1]).max() < 5e-3 * np.abs(found[0]).max()


def test_codes_of_latent_heads_are_copied(tmp_path: Path) -> None:
    _, mlx = folders(tmp_path, "glm4 moe lite")
    mine = Bundle.open(convert(mlx.path, tmp_path / "mine"))
    assert "attention: codes and scales copied" in mine.manifest.provenance.notes


def test_names_beside_other_towers_are_known(tmp_path: Path) -> None:
    """mlx-lm writes every Qwen3.5 as the text part of a model with towers."""
    source, mlx = folders(tmp_path, "qwen3.5", plain=True)
    named = {f"language_model.{name}": ("F32", values) for name, values in mlx.values.items()}
    save_typed(mlx.path / "model.safetensors", named)
    assert_same_files(convert(mlx.path, tmp_path / "mine", "q8"), convert(source, tmp_path / "theirs", "q8"))


def test_betas_and_decays_may_be_made_of_two_types(tmp_path: Path) -> None:
    _, mlx = folders(tmp_path, "qwen3.5", plain=True)
    rounded = {name: widened(typed(it, "BF16")) for name, it in mlx.values.items() if "in_proj_b." in name}
    stored = {name: ("F32", values) for name, values in (mlx.values | rounded).items()}
    save_typed(mlx.path / "model.safetensors", stored)
    alike = convert(mlx.path, tmp_path / "alike", "f16")
    mixed = stored | {name: typed(values, "BF16") for name, values in rounded.items()}
    save_typed(mlx.path / "model.safetensors", mixed)
    assert_same_files(convert(mlx.path, tmp_path / "mixed", "f16"), alike)


def test_rows_are_numbered_for_projections_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of 1,024 wide layers would cost half a minute before it's refused for what is missing."""
    folder, _ = folders(tmp_path, "qwen3 next", plain=True)
    calls: list[str] = []

    def counted(old: str, rows_of: Callable[[DeltaSpec], Any]) -> Callable[[DeltaSpec], Any]:
        return lambda delta: calls.append(old) or rows_of(delta)

    monkeypatch.setattr(qwen3_next, "PARTS", {old: counted(old, it) for old, it in qwen3_next.PARTS.items()})
    with closing(open_checkpoint(folder)) as checkpoint:
        delta = sum(layer.delta is not None for layer in checkpoint.config.layers)
    assert sorted(calls) == sorted(["in_proj_ba", "in_proj_qkvz"] * delta)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1024, "layer_types": ["linear_attention"] * 1023 + ["full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    calls.clear()
    assert_refused(folder, CheckpointError, "missing")
    assert len(calls) <= 2 * delta + 2


def test_scaled_values_are_float32() -> None:
    source = SimpleNamespace(name="a", dtype="BF16", shape=(2,), vector=lambda: np.ones(2, np.float32))
    scaled = Scaled("a", source, 3.0)  # type: ignore[arg-type]
    assert scaled.vector().dtype == np.float32
    assert scaled.dtype == "F32"


def test_folders_whose_parts_contradict_are_refused(tmp_path: Path) -> None:
    _, qwen = folders(tmp_path / "qwen", "qwen3.5", plain=True)
    _, deep = folders(tmp_path / "deep", "deepseek v3", plain=True)
    latent, delta = "model.layers.1.self_attn.", "model.layers.1.linear_attn."
    for mlx, name, shape, message in (
        (qwen, f"{delta}conv1d.weight", (128, 1, 4), r"conv1d.weight has shape \[128, 1, 4\]"),
        (qwen, f"{delta}conv1d.weight", (128,), r"conv1d.weight has shape \[128\]"),
        (
            qwen,
            f"{delta}in_proj_qkvz.weight",
            (192, 64),
            "in_proj_qkv.weight and another tensor hold the same",
        ),
        (deep, f"{latent}embed_q.weight", (4, 32, 64), r"embed_q.weight has shape \[4, 32, 64\]"),
        (deep, f"{latent}unembed_out.weight", (128, 64), r"unembed_out.weight has shape \[128, 64\]"),
        (deep, f"{latent}kv_b_proj.weight", (256, 64), "kv_b_proj.weight is there whole and in parts"),
    ):
        changed = {it: ("F32", values) for it, values in mlx.values.items()}
        changed[name] = ("F32", np.zeros(shape, np.float32))
        save_typed(mlx.path / "model.safetensors", changed)
        assert_refused(mlx.path, CheckpointError, message)


def as_published(folder: Path) -> None:
    """Give a checkpoint the keys, and its experts the stacks, of published ones, which mlx-lm reads."""
    config, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    kind = config["model_type"].removesuffix("_text")
    if kind == "qwen3_5_moe":
        tensors, stacks = load_file(path), named_by_mlx(load_file(path))
        found = {name: values for name, values in tensors.items() if ".experts." not in name}
        for layer in range(config["num_hidden_layers"]):
            stem = f"model.layers.{layer}.mlp."
            gates, ups, downs = (
                stacks[f"{stem}switch_mlp.{it}_proj.weight"] for it in ("gate", "up", "down")
            )
            found[f"{stem}experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
            found[f"{stem}experts.down_proj"] = downs
        save_file(found, path, {"format": "pt"})
    if kind.startswith("qwen3_5"):
        names = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}
        classes = [f"{names[kind]}ForConditionalGeneration"]
        config = {"model_type": kind, "architectures": classes, "text_config": config}
    elif kind == "nemotron_h":
        letters = {kind: letter for letter, kind in PATTERN.items()}
        config["hybrid_override_pattern"] = "".join(letters[it] for it in config.pop("layers_block_type"))
        config["time_step_limit"] = [0.0, math.inf]
    else:
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        if kind == "granitemoehybrid":
            config["layer_types"] = [older[it] for it in config["layer_types"]]
            config["position_embedding_type"] = "nope"
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if (scaling := rope.pop("rope_type")) != "default":
            config["rope_scaling"] = {"type": scaling, **rope}
        if kind == "lfm2":
            # mlx-lm asks for these keys, which the first published configs have.
            config |= {"block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("case", [*CODED, "falcon h1"])
def test_a_folder_of_mlx_lm_speaks_as_it_does(tmp_path: Path, case: str, bits: int) -> None:
    """Made and run by mlx-lm itself, at `bits` or not quantised: our logits of its folder, and its own."""
    mx = pytest.importorskip("mlx.core")
    utils = pytest.importorskip("mlx_lm.utils", exc_type=ImportError)
    name, _, more = CODED.get(case, (case, None, MULTIPLIERS_OF_MLX))
    family, options = CASES[name]
    options = options | {key: 64 for key in NEURONS if options.get(key)} | more
    write_model(tmp_path / "source", family, options)
    as_published(tmp_path / "source")
    model, config = utils.load_model(tmp_path / "source")
    if bits:
        model, config = utils.quantize_model(model, config, 32, bits)
    utils.save_model(tmp_path / "mlx", model)
    utils.save_config(config, tmp_path / "mlx" / "config.json")
    tokens = np.random.default_rng(7).integers(0, 256, 60).tolist()
    theirs = np.array(model(mx.array([tokens])).astype(mx.float32))[0]
    with running(convert(tmp_path / "mlx", tmp_path / "mine", "f16")) as mine:
        logits = all_logits(mine, tokens, 32)
    # States magnify what values of codes lose in 16 bits.
    limit = 2e-2 if bits and "qwen" in case else 2e-3
    assert np.abs(logits - theirs).max() < limit * np.abs(theirs).max()
