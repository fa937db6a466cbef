"""MLX folders that lie or are damaged: each ends in a typed error that says where, what and what to do."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from tests.converters.test_fuzz import changed
from tests.support.mlx_folders import (
    MXFP4,
    MlxFolder,
    Scheme,
    Typed,
    save_shards,
    save_typed,
    write_mlx_folder,
)
from tests.support.models import write_checkpoint
from tests.support.refusals import assert_refused

UP = "model.layers.0.mlp.up_proj"
SAME_SOURCE = "take config.json and the weights from the same repository"
UNQUANTISED = "start from the checkpoint before it was quantised"


@pytest.fixture
def folder(tmp_path: Path) -> MlxFolder:
    return write_mlx_folder(tmp_path / "source", num_hidden_layers=1)


def with_config(folder: MlxFolder, quantisation: Any, copy: Any = None) -> Path:
    config = folder.config | {"quantization": quantisation, "quantization_config": copy}
    (folder.path / "config.json").write_text(json.dumps(config))
    return folder.path


def with_parts(folder: MlxFolder, **parts: Typed | None) -> Path:
    """The folder with other parts of one module; None for one that is missing."""
    stored = dict(folder.stored)
    for part, values in parts.items():
        if values is None:
            del stored[f"{UP}.{part}"]
        else:
            stored[f"{UP}.{part}"] = values
    save_shards(folder.path, stored)
    return folder.path


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 64}
    (source / "config.json").write_text(json.dumps(config))
    assert_refused(
        source, UnsupportedModelError, f"quantization_config is of the method '{method}'.*; {UNQUANTISED}"
    )
    config["quantization"] = {"bits": 4, "group_size": 64}
    (source / "config.json").write_text(json.dumps(config))
    assert_refused(source, UnsupportedModelError, f"is of the method '{method}'")


def nested(depth: int) -> Any:
    value: Any = 4
    for _ in range(depth):
        value = [{"bits": value}]
    return value


PLAIN = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(("quantisation", "error", "match"), [
    (5, CheckpointError, "quantization is 5; it must be an object"),
    ([1], CheckpointError, "quantization is a list; it must be"),
    ({"bits": 4}, CheckpointError, f"quantization has no group_size; {SAME_SOURCE}"),
    ({"group_size": 64}, CheckpointError, "quantization has no bits"),
    (PLAIN | {"bits": 7}, UnsupportedModelError, f"bits is 7; affine has 2, 3, 4.*; {UNQUANTISED}"),
    (PLAIN | {"bits": True}, UnsupportedModelError, "quantization.bits is True"),
    (PLAIN | {"bits": 4.0}, UnsupportedModelError, "quantization.bits is 4.0"),
    (PLAIN | {"bits": -4}, UnsupportedModelError, "quantization.bits is -4"),
    (PLAIN | {"bits": 10**400}, UnsupportedModelError, r"quantization.bits is 1000*\.\.\.;"),
    (PLAIN | {"bits": None}, UnsupportedModelError, "quantization.bits is None"),
    (PLAIN | {"bits": nested(100)}, UnsupportedModelError, "quantization.bits is a list"),
    (PLAIN | {"group_size": 16}, UnsupportedModelError, "quantization.group_size is 16; affine has 32, 64"),
    (PLAIN | {"group_size": 0}, UnsupportedModelError, "group_size is 0"),
    (PLAIN | {"group_size": "64"}, UnsupportedModelError, "group_size is '64'"),
    (PLAIN | {"mode": "nvfp4"}, UnsupportedModelError, f"'nvfp4'; only aff.*{UNQUANTISED}"),
    (PLAIN | {"mode": ["affine"]}, UnsupportedModelError, "mode is a list"),
    (PLAIN | {"mode": "mxfp4"}, UnsupportedModelError, "group_size is 64; mxfp4 has 32"),
    (PLAIN | {"symmetric": 1}, UnsupportedModelError, "quantization.symmetric is 1; it is no"),
    (PLAIN | {UP: "q4"}, UnsupportedModelError, f"quantization.{UP} is 'q4'"),
    (PLAIN | {UP: {"bits": 4, "global_scale": True}}, UnsupportedModelError, "has global_scale = True"),
    (PLAIN | {UP: {"bits": nested(50)}}, UnsupportedModelError, f"quantization.{UP}.bits is a list"),
    (PLAIN | {UP: {"a\nb": 1}}, UnsupportedModelError, r"has 'a\\nb' = 1"),
    (PLAIN | {"model.layers.7.mlp.up_proj": {"bits": 4}}, CheckpointError,
     f"names the module model.layers.7.mlp.up_proj, which has no .weight here; {SAME_SOURCE}"),
    (PLAIN | {"model.layers.7.mlp.up_proj": False}, CheckpointError, "which has no .weight here"),
    (PLAIN | {"model.norm": {"bits": 8}}, CheckpointError, "model.norm is affine with 8 bits.*no .scales"),
    (PLAIN | {"x" * 5000: {"bits": 8}}, CheckpointError, r"names the module x+\.\.\., which"),
    (PLAIN | {UP: False}, CheckpointError, f"{UP} isn't quantised, but {UP}.scales is"),
    (PLAIN | {UP: {"bits": 8}}, CheckpointError,
     "up_proj.weight has rows of 16 words, and .scales 2 groups; config.json says affine with 8 bits in "
     f"groups of 64, and 2 such groups have 1024 bits, not 512; {SAME_SOURCE}"),
    (PLAIN | {UP: {"group_size": 32}}, CheckpointError, "affine with 4 bits in groups of 32, and"),
    (PLAIN | {UP: {"mode": "mxfp4"}}, CheckpointError, f"{UP} has .biases, though it has .scales"),
    ({"group_size": 32, "bits": 8}, CheckpointError, r"\.weight has shape \[256, 64\]; config.json asks for"),
    ({"group_size": 128, "bits": 2}, CheckpointError, r"has shape \[256, 256\]; config.json asks for"),
])  # fmt: skip
def test_impossible_settings_are_refused(
    folder: MlxFolder, quantisation: Any, error: type[OndeviceError], match: str
) -> None:
    assert_refused(with_config(folder, quantisation), error, match)


def test_the_two_keys_must_agree(folder: MlxFolder) -> None:
    source = with_config(folder, PLAIN, PLAIN | {"bits": 8})
    assert_refused(
        source, CheckpointError, f"quantization and quantization_config contradict each other; {SAME_SOURCE}"
    )
    source = with_config(folder, PLAIN, PLAIN | {UP: {"bits": nested(400)}})
    assert_refused(source, UnsupportedModelError, "quantization_config.*bits is a list")
    for copy in (PLAIN, {"load_in_4bit": True}, [4]):
        source = with_config(folder, None, copy)
        assert_refused(
            source, UnsupportedModelError, f"without a quant_method, and no quantization.*{UNQUANTISED}"
        )


def test_deeply_nested_settings_are_refused(folder: MlxFolder) -> None:
    """As deep as JSON is parsed, and deeper."""
    for depth in range(100, 100_000, 4321):
        text = json.dumps(folder.config | {"quantization": "here", "quantization_config": "here"})
        value = '{"bits":' * depth + "1" + "}" * depth
        (folder.path / "config.json").write_text(text.replace('"here"', value))
        with pytest.raises((CheckpointError, UnsupportedModelError)):
            open_checkpoint(folder.path)


HALF = np.ones((256, 2), np.float16)


@pytest.mark.parametrize(("parts", "match"), [
    ({"biases": None}, rf"{UP} has no \.biases, though it has \.scales and is affine with 4 bits"),
    ({"weight": None}, rf"{UP} has no \.weight, though"),
    ({"scales": None}, rf"{UP}\.weight is stored as U32, but {UP}\.scales is missing"),
    ({"weight": ("F32", np.ones((256, 16), np.float32))}, r"weight is stored as F32; aff.* has it as U32"),
    ({"weight": ("I32", np.ones((256, 16), np.int32))}, r"weight is stored as I32; affine"),
    ({"scales": ("U8", np.ones((256, 2), np.uint8))}, r"scales is stored as U8; .* has it as F32, F16, BF16"),
    ({"biases": ("F64", np.ones((256, 2)))}, r"biases is stored as F64"),
    ({"scales": ("F16", HALF[:255])}, r"shapes \[256, 16\] and \[255, 2\] and \[256, 2\]; they must be"),
    ({"biases": ("F16", HALF[:, :1])}, r"shapes \[256, 16\] and \[256, 2\] and \[256, 1\]"),
    ({"biases": ("F16", HALF.reshape(-1))}, r"and \[512\]"),
    ({"scales": ("F16", HALF.reshape(-1)), "biases": ("F16", HALF.reshape(-1))}, r"\[512\] and \[512\]"),
    ({"weight": ("U32", np.ones((256, 4, 4), np.uint32))}, r"shapes \[256, 4, 4\]"),
    ({"weight": ("U32", np.ones((256, 17), np.uint32))}, r"rows of 17 words, and \.scales 2 groups"),
    ({"weight": ("U32", np.ones((256, 0), np.uint32))}, r"rows of 0 words"),
    ({"scales": ("F16", HALF[:, :1]), "biases": ("F16", HALF[:, :1])}, r"\.scales 1 groups"),
    ({"weight": ("U32", np.ones((256, 0), np.uint32)), "scales": ("F16", HALF[:, :0]),
      "biases": ("F16", HALF[:, :0])}, r"has shape \[256, 0\]; config.json asks for \[256, 128\]"),
    ({"weight": ("U32", np.ones((255, 16), np.uint32)), "scales": ("F16", HALF[:255]),
      "biases": ("F16", HALF[:255])}, r"has shape \[255, 128\]; config.json asks for \[256, 128\]"),
])  # fmt: skip
def test_parts_that_disagree_are_refused(
    folder: MlxFolder, parts: dict[str, Typed | None], match: str
) -> None:
    assert_refused(with_parts(folder, **parts), CheckpointError, match)


def test_biases_without_scales_are_no_part_of_a_model(folder: MlxFolder) -> None:
    folder.stored["model.norm.biases"] = ("F16", HALF)
    assert_refused(with_parts(folder), CheckpointError, r"no part of a llama model, model\.norm\.biases")


def test_a_quantised_norm_is_refused(folder: MlxFolder) -> None:
    ones = np.ones((1, 2), np.float16)
    folder.stored["model.norm.weight"] = ("U32", np.ones((1, 16), np.uint32))
    folder.stored["model.norm.scales"] = folder.stored["model.norm.biases"] = ("F16", ones)
    assert_refused(
        with_parts(folder), CheckpointError, r"norm\.weight has shape \[1, 128\]; config.json asks"
    )


def test_quantised_tensors_without_the_setting_are_refused(folder: MlxFolder) -> None:
    source = with_config(folder, None)
    assert_refused(source, UnsupportedModelError, f"is stored as U32; only F32.* so {UNQUANTISED}")


def test_the_setting_without_quantised_tensors_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    (source / "config.json").write_text(json.dumps(config))
    assert_refused(source, CheckpointError, f"no tensor has .scales; {SAME_SOURCE}, or remove quantization")


def test_unsound_scales_of_mxfp4_are_refused(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "source", MXFP4, num_hidden_layers=1)
    scales = folder.stored[f"{UP}.scales"][1].copy()
    assert_refused(
        with_parts(folder, scales=("F16", scales.astype(np.float16))),
        CheckpointError,
        "scales is stored as F16; mxfp4 with 4 bits in groups of 32 has it as U8",
    )
    scales[200, 1] = 255
    assert_refused(
        with_parts(folder, scales=("U8", scales)),
        CheckpointError,
        r"up_proj\.scales holds 255, which means NaN; .* download",
    )
    scales[200, 1] = 254
    assert_refused(
        with_parts(folder, scales=("U8", scales)), CheckpointError, r"up_proj\.weight holds NaN, infin"
    )


@pytest.mark.fast("nan-mlp.up_proj-32-*-auto", "*-mlp.up_proj-32-scales-q8", "*-mlp.down_proj-64-*-auto")
@pytest.mark.parametrize("quant", ["auto", "q8", "f16"])
@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("module", ["mlp.up_proj", "mlp.down_proj"])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_scales_that_are_no_numbers(
    tmp_path: Path, quant: str, part: str, group: int, module: str, value: float
) -> None:
    """Also those that are beyond float16."""
    scheme = Scheme(4, group, scales="F32")
    folder = write_mlx_folder(tmp_path / "source", scheme, num_hidden_layers=1, intermediate_size=128)
    name = f"model.layers.0.{module}"
    folder.stored[f"{name}.{part}"][1][-1, -1] = value
    save_shards(folder.path, folder.stored)
    where = (
        f"{name}.weight holds NaN, infinity, or values beyond"
        if value == 3e38
        else f"{name}.{part} holds NaN"
    )
    assert_refused(folder.path, CheckpointError, where, quant)


def test_a_head_that_differs_from_tied_embeddings_is_refused(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "source", num_hidden_layers=1, tie_word_embeddings=True)
    head = {
        f"lm_head.{part}": folder.stored[f"model.embed_tokens.{part}"]
        for part in ("weight", "scales", "biases")
    }
    save_shards(folder.path, folder.stored | head)
    assert convert(folder.path, tmp_path / "b")
    dtype, codes = head["lm_head.weight"]
    head["lm_head.weight"] = (dtype, codes ^ np.uint32(1))
    save_shards(folder.path, folder.stored | head)
    assert_refused(folder.path, CheckpointError, r"lm_head\.weight differs from model\.embed_tokens\.weight")


def test_a_file_that_ends_early(folder: MlxFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header was sound; the bytes behind it are gone."""
    file = folder.path / "model.safetensors"

    def truncate(_: object) -> str:
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size - 1000)
        return "f"

    monkeypatch.setattr("ondevice.converters.convert.fingerprint", truncate)
    assert_refused(folder.path, CheckpointError, "ends at byte .* download it again")


def shortened(stored: dict[str, Typed], rng: random.Random) -> dict[str, Typed]:
    """One tensor with other bytes, another type, fewer rows, or none at all."""
    name = rng.choice(sorted(stored))
    dtype, values = stored[name]
    choices: list[Callable[[], Typed | None]] = [
        lambda: None,
        lambda: (dtype, values[:-1]),
        lambda: (dtype, np.ascontiguousarray(values[..., :-1])),
        lambda: (dtype, values.reshape(-1)),
        lambda: (rng.choice(["F16", "BF16", "I16"]), values.view(np.uint16)),
        lambda: (dtype, np.frombuffer(rng.randbytes(values.nbytes), values.dtype).reshape(values.shape)),
    ]
    made = rng.choice(choices)()
    rest = {other: value for other, value in stored.items() if other != name}
    return rest if made is None else rest | {name: made}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_changed_folder_converts_or_is_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    schemes = {"gate_proj": MXFP4, "o_proj": None, "down_proj": Scheme(6)}
    sound = write_mlx_folder(
        tmp_path / "sound",
        num_hidden_layers=1,
        exceptions=lambda module: schemes.get(module.rpartition(".")[2], Scheme()),
    )
    converted = refused = 0
    for _ in range(30):
        source = shutil.copytree(sound.path, tmp_path / "source")
        if rng.random() < 0.4:
            save_typed(source / "model.safetensors", shortened(sound.stored, rng))
        else:
            victim = rng.choice(sorted(source.iterdir()))
            victim.write_bytes(changed(victim, rng))
        try:
            convert(source, tmp_path / "bundle", force=True)
            converted += 1
        except OndeviceError:
            refused += 1
        shutil.rmtree(source)
    assert converted > 0
    assert refused > converted
