"""MLX folders of mixtures of experts: stacks of experts' matrices, quantised routers, bits that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import untiled
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords
from tests.support.families import CASES, GPT_OSS, write_model
from tests.support.mlx_folders import (
    MXFP4,
    MlxFolder,
    Scheme,
    named_by_mlx,
    save_shards,
    write_quantised,
)

NEURONS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Numbers of neurons, which are 64 here: whole groups."""
FAMILIES = {
    "olmoe": Scheme(4, 32), "qwen3 moe": Scheme(4), "mixtral": Scheme(8, 32, "BF16"), "phimoe": Scheme(3, 32),
    "granite moe": Scheme(6, 32), "qwen2 moe": Scheme(2), "glm4 moe": Scheme(5, 32), "gemma4 moe": MXFP4,
    "mimo v2 moe": Scheme(4, 32),
}  # fmt: skip


def folders(folder: Path, case: str, scheme: Scheme, exceptions: Any = None) -> tuple[Path, MlxFolder]:
    """A checkpoint of the values that an MLX folder's codes stand for, and that folder."""
    source, (family, options) = folder / "source", CASES[case]
    write_model(source, family, {**options, **dict.fromkeys(set(NEURONS) & set(options), 64)})
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )

    def of(module: str) -> Scheme | None:
        """As mlx-lm does, 8 bits for routers, but where these aren't matrices of a layer."""
        if case.startswith(("glm4", "mimo")) and module.endswith("mlp.gate"):
            return None
        if module.endswith(("mlp.gate", "router.proj", "router.layer", "shared_expert_gate")):
            return Scheme(8, scales=scheme.scales if scheme.mode == "affine" else "F16")
        return scheme if exceptions is None else exceptions(module)

    mlx = write_quantised(folder / "mlx", config, named_by_mlx(tensors), scheme, of, "F32", 3)
    exact = {name: values_of(mlx, name, tensor.shape) for name, tensor in tensors.items()}
    save_file(
        {name: np.ascontiguousarray(values) for name, values in exact.items()}, source / "model.safetensors"
    )
    return source, mlx


def values_of(mlx: MlxFolder, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a checkpoint's tensor in an MLX folder, which may have them in a stack, or in two."""
    if name in mlx.values:
        return mlx.values[name]
    empty = np.zeros(shape, np.float32)
    if len(shape) == 3:
        # Granite's and Gemma's stacks.
        found = [mlx.values[it] for it in named_by_mlx({name: empty})]
        return np.concatenate(found, axis=1)
    prefix, number = name.split(".experts.")[0], int(name.split(".experts.")[1].split(".")[0])
    first = name.replace(f".experts.{number}.", ".experts.0.")
    (stack,) = named_by_mlx({first: empty})
    assert stack.startswith(prefix)
    return mlx.values[stack][number]


def assert_same_weights(mine: Path, theirs: Path) -> None:
    for path in theirs.iterdir():
        if path.name != "bundle.json":
            assert (mine / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.fast("gemma4 moe", "qwen2 moe")
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_has_the_values_of_its_codes(tmp_path: Path, case: str) -> None:
    source, mlx = folders(tmp_path, case, FAMILIES[case])
    mine = convert(mlx.path, tmp_path / "mine", "f16")
    assert_same_weights(mine, convert(source, tmp_path / "theirs", "f16"))
    assert Bundle.open(mine).manifest.provenance.source_format == "mlx"


def test_codes_of_experts_are_copied(tmp_path: Path) -> None:
    """Of down projections too, whose groups lie as they do in a record."""
    _, mlx = folders(tmp_path, "qwen3 moe", Scheme(4))
    notes = Bundle.open(convert(mlx.path, tmp_path / "mine")).manifest.provenance.notes
    for which in ("down", "gate", "up"):
        assert f"expert_{which}: codes and scales copied" in notes


def test_a_folder_that_isnt_quantised_is_read(tmp_path: Path) -> None:
    """mlx-lm stacks experts there too."""
    source, mlx = folders(tmp_path, "qwen3 moe", Scheme(4), lambda module: None)
    del mlx.config["quantization"], mlx.config["quantization_config"]
    (mlx.path / "config.json").write_text(json.dumps(mlx.config))
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(3)}
    save_shards(mlx.path, {name: ("F32", values) for name, values in mlx.values.items()}, 3)
    assert len(routers & set(mlx.values)) == 3
    mine = convert(mlx.path, tmp_path / "mine", "q4")
    assert_same_weights(mine, convert(source, tmp_path / "theirs", "q4"))


@pytest.mark.slow
def test_modules_have_their_own_bits(tmp_path: Path) -> None:
    """As in folders of mixed bits: a layer's downs at 8, its shared expert unlike the others."""

    def bits(module: str) -> Scheme:
        return Scheme(8 if "down_proj" in module else 5 if "shared" in module else 4)

    source, mlx = folders(tmp_path, "qwen2 moe", Scheme(4), bits)
    mine = convert(mlx.path, tmp_path / "mine", "f16")
    assert_same_weights(mine, convert(source, tmp_path / "theirs", "f16"))
    assert Bundle.open(convert(mlx.path, tmp_path / "q4")).quant.bits == 4


def test_stacks_of_mxfp4_are_copied_whole(tmp_path: Path) -> None:
    _, mlx = folders(tmp_path, "qwen3 moe", MXFP4)
    bundle = Bundle.open(convert(mlx.path, tmp_path / "mine"))
    layout = bundle.expert_layouts[-1]
    assert layout is not None
    notes = [f"expert_{which}: codes and scales copied" for which in ("down", "gate", "up")]
    assert [it for it in bundle.manifest.provenance.notes if it.startswith("expert")] == notes
    with FlashReader(bundle_files(bundle)) as reader:
        records = NeuronRecords(bundle, reader, 1).experts
        assert records is not None
        record = records.read(6)
    for which, at, matrix in zip(("gate", "up", "down"), layout.part_offsets, layout.matrices, strict=True):
        found = untiled(record[at : at + matrix.nbytes], matrix)
        stem = f"model.layers.1.mlp.switch_mlp.{which}_proj"
        assert found.codes.tobytes() == mlx.stored[f"{stem}.weight"][1][6].tobytes()
        assert found.scales.tobytes() == mlx.stored[f"{stem}.scales"][1][6].tobytes()


def test_what_doesnt_belong_together_is_refused(tmp_path: Path) -> None:
    _, mlx = folders(tmp_path, "qwen3 moe", Scheme(4))
    stem = "model.layers.1.mlp.switch_mlp.up_proj"
    dtype, codes = mlx.stored[f"{stem}.weight"]
    for changed, message in (
        ({f"{stem}.weight": (dtype, codes[:7])}, r"have the shapes \[7, 64, 8\] and \[8, 64, 1\]"),
        ({f"{stem}.weight": (dtype, codes.reshape(-1, 8))}, r"have the shapes \[512, 8\] and \[8, 64, 1\]"),
        (
            {f"{stem}.{part}": (mlx.stored[f"{stem}.{part}"][0], mlx.stored[f"{stem}.{part}"][1][:7])
             for part in ("weight", "scales", "biases")},
            r"up_proj\.weight has shape \[7, 64, 64\]; config\.json asks for a stack of 8 experts",
        ),
        (
            {f"model.layers.1.mlp.experts.3.up_proj.{part}": (typed[0], typed[1][3])
             for part in ("weight", "scales", "biases") for typed in [mlx.stored[f"{stem}.{part}"]]},
            r"experts\.3\.up_proj\.weight and .* are the same",
        ),
        ({"model.layers.1.mlp.switch_mlp.odd_proj.weight": ("F32", np.ones((8, 64, 64), "<f4"))}, "odd_proj"),
    ):  # fmt: skip
        save_shards(mlx.path, mlx.stored | changed)
        (mlx.path / "model.safetensors.index.json").unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(mlx.path)


def test_a_stack_in_a_dense_layer_is_refused(tmp_path: Path) -> None:
    """It would otherwise be left out without a word."""
    _, mlx = folders(tmp_path, "qwen3 moe", Scheme(4))
    (mlx.path / "config.json").write_text(json.dumps({**mlx.config, "mlp_only_layers": [2]}))
    with pytest.raises(CheckpointError, match="3 tensors that config"):
        open_checkpoint(mlx.path)
    shapes = {"gate_proj": (160, 64), "up_proj": (160, 64), "down_proj": (64, 160)}
    dense = {
        f"model.layers.2.mlp.{name}.weight": ("F32", np.ones(shape, "<f4")) for name, shape in shapes.items()
    }
    save_shards(mlx.path, mlx.stored | dense, 3)
    with pytest.raises(CheckpointError, match=r"switch_mlp\.down_proj.* leaving them out"):
        open_checkpoint(mlx.path)


def gpt_oss_folders(folder: Path, experts: Scheme) -> tuple[Path, MlxFolder]:
    """As `folders`: gates and ups, which take turns in the checkpoint's stack, are apart in MLX's folder."""
    source = folder / "source"
    write_model(source, "GptOss", {**GPT_OSS, "intermediate_size": 64, "num_hidden_layers": 2})
    config = json.loads((source / "config.json").read_text())
    tensors, named = load_file(source / "model.safetensors"), {}
    for name, values in tensors.items():
        stem, _, which = name.rpartition(".")
        if which == "gate_up_proj":
            named[f"{stem}.gate_proj.weight"] = values[..., ::2].swapaxes(1, 2)
            named[f"{stem}.up_proj.weight"] = values[..., 1::2].swapaxes(1, 2)
        elif which == "gate_up_proj_bias":
            named |= {f"{stem}.gate_proj.bias": values[:, ::2], f"{stem}.up_proj.bias": values[:, 1::2]}
        elif which == "down_proj":
            named[f"{stem}.down_proj.weight"] = values.swapaxes(1, 2)
        elif which == "down_proj_bias":
            named[f"{stem}.down_proj.bias"] = values
        else:
            named[name] = values

    def of(module: str) -> Scheme:
        return experts if ".experts." in module else Scheme(8)

    mlx = write_quantised(folder / "mlx", config, named, experts, of, "F32", 2)
    for name in tensors:
        stem, _, which = name.rpartition(".")
        if which in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
            found = np.stack([mlx.values[f"{stem}.{part}.weight"] for part in parts], axis=2)
            tensors[name] = np.ascontiguousarray(found.reshape(len(found), -1, found.shape[3]).swapaxes(1, 2))
        elif name in mlx.values:
            tensors[name] = np.ascontiguousarray(mlx.values[name])
    save_file(tensors, source / "model.safetensors")
    return source, mlx


@pytest.mark.parametrize("experts", [MXFP4, pytest.param(Scheme(4, 32), marks=pytest.mark.slow)])
def test_gpt_oss_has_the_values_of_its_codes(tmp_path: Path, experts: Scheme) -> None:
    source, mlx = gpt_oss_folders(tmp_path, experts)
    mine = convert(mlx.path, tmp_path / "mine", "f16")
    assert_same_weights(mine, convert(source, tmp_path / "theirs", "f16"))
    copied = Bundle.open(convert(mlx.path, tmp_path / "copied"))
    notes = [f"expert_{which}: codes and scales copied" for which in ("down", "gate", "up")]
    assert [it for it in copied.manifest.provenance.notes if it.startswith("expert")] == notes
    if experts == MXFP4:
        assert copied.expert_layouts[-1] is not None
        assert all(matrix.row.stored.mxfp4 for matrix in copied.expert_layouts[-1].matrices)


def test_biases_of_gpt_oss_are_checked(tmp_path: Path) -> None:
    _, mlx = gpt_oss_folders(tmp_path, MXFP4)
    stem = "model.layers.1.mlp.experts"
    _, biases = mlx.stored[f"{stem}.up_proj.bias"]
    for changed, message in (
        (
            {f"{stem}.up_proj.bias": ("F32", biases[:7])},
            r"has shape \[7, 64\]; config\.json asks for \[8, 64\]",
        ),
        ({f"{stem}.3.up_proj.bias": ("F32", biases[3])}, "are the same"),
    ):
        save_shards(mlx.path, mlx.stored | changed)
        (mlx.path / "model.safetensors.index.json").unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(mlx.path)
