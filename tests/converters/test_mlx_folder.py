"""MLX quantised folders: the values of their codes, which codes a bundle copies, and what it says it did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from ondevice.bundle.layout import gate_file_name, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.config import MATRIX_KINDS, RowFormat
from ondevice.config import MXFP4 as FORMAT
from ondevice.converters import reading
from ondevice.converters.checkpoints import mlx_tensor
from ondevice.converters.checkpoints.mlx_tensor import MlxTensor
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.chosen_quant import chosen_quant
from ondevice.converters.convert import convert
from ondevice.converters.progress import Progress
from ondevice.converters.quantize import dequantize
from ondevice.errors import CheckpointError
from ondevice.kernels import _native
from tests.converters.test_resume import KILLER, folder_bytes, interrupted
from tests.support.engines import bundle_weights
from tests.support.mlx_folders import MXFP4, MlxFolder, Scheme, save_shards, typed, write_mlx_folder
from tests.support.models import write_checkpoint
from tests.support.quantize_reference import quantize_reference
from tests.support.stored_matrices import embedding_matrix, resident_matrix

SCHEMES = [
    *(Scheme(bits, 64) for bits in (2, 3, 4, 5, 6, 8)), Scheme(3, 32, "BF16"), Scheme(4, 128, "F32"),
    Scheme(6, 128, "BF16"), Scheme(8, 32, "F32"), MXFP4,
]  # fmt: skip
QKV = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def matrix(folder: MlxFolder, name: str) -> MlxTensor:
    return cast(MlxTensor, open_checkpoint(folder.path).tensors[name])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_any_rows_and_columns_decode_to_the_stored_values(
    tmp_path: Path, scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mlx_folder(tmp_path / "s", scheme, shards=3, num_hidden_layers=1)
    monkeypatch.setattr(mlx_tensor, "STEP_BYTES", 3000)
    name = f"{MLP}.down_proj.weight"
    tensor, values = matrix(folder, name), folder.values[name]
    assert tensor.shape == values.shape == (128, 256)
    assert tensor.values_nbytes == values.nbytes
    parts = [array for part, (_, array) in folder.stored.items() if part.startswith(f"{MLP}.down_proj.")]
    assert tensor.nbytes == sum(part.nbytes for part in parts)
    assert len(tensor.files) == len({file.path for file in tensor.files}) > 1
    for start, stop in ((0, 128), (0, 1), (77, 128)):
        assert (tensor.rows(start, stop) == values[start:stop]).all()
    for start, stop in ((0, 256), (0, 1), (63, 65), (64, 128), (200, 256), (255, 256)):
        assert (tensor.columns(start, stop) == values[:, start:stop]).all()


@pytest.mark.fast("*-float16")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("mode", "bits", "group"), [
    ("affine", 2, 32), ("affine", 3, 64), ("affine", 4, 64), ("affine", 5, 128), ("affine", 6, 32),
    ("affine", 8, 128), ("mxfp4", 4, 32),
])  # fmt: skip
def test_values_are_those_of_mlx(tmp_path: Path, mode: str, bits: int, group: int, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core", exc_type=ImportError)
    folder = write_mlx_folder(
        tmp_path / "s", Scheme(bits, group, mode=mode) if mode == "affine" else MXFP4, num_hidden_layers=1
    )
    weights = mx.array(np.random.default_rng(1).standard_normal((256, 128), np.float32))
    with mx.stream(mx.cpu):
        parts = mx.quantize(weights.astype(getattr(mx, dtype)), group_size=group, bits=bits, mode=mode)
        float_parts = [part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in parts[1:]]
        theirs = mx.dequantize(parts[0], *float_parts, group_size=group, bits=bits, mode=mode)
        theirs = np.array(theirs.astype(mx.float32))
    module = f"{MLP}.up_proj"
    folder.stored[f"{module}.weight"] = ("U32", np.array(parts[0]))
    for suffix, part in zip(("scales", "biases"), parts[1:], strict=False):
        if mode == "mxfp4":
            folder.stored[f"{module}.{suffix}"] = ("U8", np.array(part))
        else:
            short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
            folder.stored[f"{module}.{suffix}"] = typed(np.array(part.astype(mx.float32)), short)
    save_shards(folder.path, folder.stored)
    mine = matrix(folder, f"{module}.weight").rows(0, 256)
    # MLX may fuse the multiplication and the addition.
    assert np.abs(mine - theirs).max() <= 2.0**-22 * np.abs(theirs).max()


def codes_of(folder: MlxFolder, module: str) -> tuple[bytes, bytes, bytes]:
    """Codes, scales and biases (float16; MXFP4 has none) of a module."""
    weights = folder.stored[f"{module}.weight"][1]
    if f"{module}.biases" not in folder.stored:
        return weights.tobytes(), folder.stored[f"{module}.scales"][1].tobytes(), b""
    halves = []
    for part in ("scales", "biases"):
        dtype, stored = folder.stored[f"{module}.{part}"]
        values = stored if dtype != "BF16" else (stored.astype(np.uint32) << 16).view(np.float32)
        halves.append(values.astype(np.float16).tobytes())
    return weights.tobytes(), halves[0], halves[1]


@pytest.mark.fast("*mxfp4*", "*bits=4, group=64, scales='BF16'*", "*bits=8, group=64, scales='F16'*")
@pytest.mark.parametrize(("scheme", "quant"), [
    (Scheme(4), "q4"), (Scheme(4, scales="BF16"), "q4"), (Scheme(4, scales="F32"), "q4"),
    (Scheme(8), "q8"), (Scheme(8, scales="BF16"), "q8"), (MXFP4, "q4"),
], ids=str)  # fmt: skip
def test_codes_are_copied_byte_for_byte(tmp_path: Path, scheme: Scheme, quant: str) -> None:
    folder = write_mlx_folder(tmp_path / "s", scheme, hidden_act="relu", num_hidden_layers=1)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b"))
    verify(bundle.path, _native.crc32c)
    assert bundle.quant.name == quant
    matrices = {which: resident_matrix(bundle, f"layers.0.attention.{which}") for which in ("q", "k", "v")}
    matrices |= {"o": resident_matrix(bundle, "layers.0.attention.out")}
    modules_of = {f"{QKV}.{which}_proj": found for which, found in matrices.items()}
    modules_of |= {"lm_head": resident_matrix(bundle, "head"), "model.embed_tokens": embedding_matrix(bundle)}
    for module, found in modules_of.items():
        assert tuple(part.tobytes() for part in found[:3]) == codes_of(folder, module), module
    files = {gate_file_name(0): [f"{MLP}.gate_proj"]}
    files[neuron_file_name(0)] = [f"{MLP}.gate_proj", f"{MLP}.up_proj"]
    for file, modules in files.items():
        records = load_file(bundle.path / file)["records"]
        offset = 0
        for number, module in enumerate(modules):
            if file == neuron_file_name(0) and number == 1:
                offset = bundle.neuron_layouts[0].part_offsets[1]
            for expected in codes_of(folder, module):
                width = len(expected) // len(records)
                assert records[:, offset : offset + width].tobytes() == expected, module
                offset += width
    down = folder.values[f"{MLP}.down_proj.weight"]
    rounded = dequantize(quantize_reference(down.T, scheme.bits), scheme.bits, 128).T
    assert (bundle_weights(bundle.path)[f"{MLP}.down_proj.weight"] == rounded).all()
    notes = dict(note.split(": ", 1) for note in bundle.manifest.provenance.notes)
    assert list(notes) == ["attention", "attention_output", "down", "embedding", "gate", "head", "up"]
    assert {kind for kind, note in notes.items() if note == "codes and scales copied"} == set(notes) - {
        "down"
    }
    assert notes["down"].startswith(f"rounded to {scheme.bits} bits; relative error 0.")
    errors = bundle.manifest.provenance.quantisation_error
    assert errors["attention"] == errors["embedding"] == errors["head"] == 0.0
    assert 0.0 < errors["feed_forward"] < 0.1


@pytest.mark.fast("*bits=8, group=128*", "*bits=3, group=64*", "*bits=2, *")
@pytest.mark.parametrize(("scheme", "quant"), [
    (Scheme(2), "q4"), (Scheme(3, 128), "q4"), (Scheme(4, 128), "q4"), (Scheme(4), "q8"), (Scheme(3), "q8"),
    (Scheme(5), "q8"), (Scheme(6, 128), "q8"), (Scheme(8, 128), "q8"),
], ids=str)  # fmt: skip
def test_wider_groups_and_narrower_codes_keep_their_values(
    tmp_path: Path, scheme: Scheme, quant: str
) -> None:
    folder = write_mlx_folder(tmp_path / "s", scheme, num_hidden_layers=1)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b", quant))
    weights = bundle_weights(bundle.path)
    for name, values in folder.values.items():
        assert (weights[name] == values).all(), name
    assert all("copied" in note for note in bundle.manifest.provenance.notes)


@pytest.mark.fast("*mxfp4*", "*bits=6, *")
@pytest.mark.parametrize(("scheme", "quant"), [
    (Scheme(4, 32), "q4"), (Scheme(6), "q4"), (Scheme(8, 32), "q8"), (MXFP4, "q4"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_rounded_from_its_values(tmp_path: Path, scheme: Scheme, quant: str) -> None:
    """Columns are no multiple of 64, so a bundle's last group is partly padding."""
    options = {"hidden_size": 96, "intermediate_size": 160} if scheme.group == 32 else {}
    folder = write_mlx_folder(tmp_path / "s", scheme, num_hidden_layers=1, **options)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b", quant))
    weights, bits = bundle_weights(bundle.path), int(quant[1])
    for name, values in folder.values.items():
        if values.ndim == 2:
            rounded = dequantize(quantize_reference(values, bits), bits, values.shape[1])
            assert (weights[name] == rounded).all(), name
    notes = bundle.manifest.provenance.notes
    assert len(notes) == 7
    assert all(f": rounded to {bits} bits; relative error 0." in note for note in notes)


def test_scales_that_float16_rounds_are_counted_and_their_error_stated(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s", Scheme(4, scales="F32", rough=True), num_hidden_layers=1)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b"))
    name = "model.embed_tokens.weight"
    stored, exact = bundle_weights(bundle.path)[name], folder.values[name]
    expected = np.sqrt(np.square(stored - exact).sum() / np.square(exact).sum())
    note = next(note for note in bundle.manifest.provenance.notes if note.startswith("embedding"))
    said, _, relative = note.rpartition("; relative error ")
    assert "codes copied, scales rounded to float16" in said
    assert float(relative) == pytest.approx(expected, rel=0.5)
    assert 1e-5 < float(relative) < 1e-3
    codes = embedding_matrix(bundle).codes
    assert codes.tobytes() == folder.stored[name][1].tobytes()


def mixed(module: str) -> Scheme | None:
    """8 bits for the head, 6 for values and down projections, groups of 32 for gates, float keys."""
    exceptions = {
        "lm_head": Scheme(8), "v_proj": Scheme(6, scales="BF16"), "down_proj": Scheme(6, scales="BF16"),
        "gate_proj": Scheme(4, 32), "k_proj": None, "up_proj": MXFP4,
    }  # fmt: skip
    return exceptions.get(module.rpartition(".")[2], Scheme(4))


def test_modules_may_differ(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s", Scheme(4), exceptions=mixed, floats="BF16")
    bundle = Bundle.open(convert(folder.path, tmp_path / "b", "q8"))
    weights = bundle_weights(bundle.path)
    for name, values in folder.values.items():
        worst = np.abs(weights[name] - values).max() / np.abs(values).max()
        exact = values.ndim == 1 or any(
            part in name for part in ("q_proj", "v_proj", "o_proj", "down_proj", "head", "embed")
        )
        assert worst == 0.0 if exact else 0.0 < worst < 0.01, name
    notes = dict(note.split(": ", 1) for note in bundle.manifest.provenance.notes)
    assert notes["attention"].startswith("66.7 % codes and scales copied; 33.3 % rounded to 8 bits; relative")
    assert notes["attention_output"] == notes["head"] == "codes and scales copied"
    assert Bundle.open(convert(folder.path, tmp_path / "q4")).quant.name == "q4"


def test_float16_bundles_hold_the_values(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s", Scheme(8), num_hidden_layers=1)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b", "f16"))
    for name, values in bundle_weights(bundle.path).items():
        exact = folder.values[name]
        assert (values == (exact.astype(np.float16) if exact.ndim == 2 else exact)).all()
    assert bundle.manifest.provenance.notes == ("quantised weights are stored as float16 values",)


@pytest.mark.parametrize(("scheme", "others", "expected"), [
    (Scheme(2), None, "q4"), (Scheme(3), None, "q4"), (Scheme(4), None, "q4"), (MXFP4, None, "q4"),
    (Scheme(5), None, "q5"), (Scheme(6), None, "q6"), (Scheme(8), None, "q8"),
    (Scheme(4), Scheme(8), "q4"), (Scheme(8), Scheme(4), "q8"), (Scheme(3), Scheme(6), "q4"),
], ids=str)  # fmt: skip
def test_auto_takes_the_most_common_bits(
    tmp_path: Path, scheme: Scheme, others: Scheme | None, expected: str
) -> None:
    def exceptions(module: str) -> Scheme:
        return others if others is not None and "self_attn" in module else scheme

    folder = write_mlx_folder(tmp_path / "s", scheme, exceptions=exceptions, num_hidden_layers=1)
    assert chosen_quant(open_checkpoint(folder.path)).name == expected


def test_a_part_of_a_projection_has_a_format_of_its_own(tmp_path: Path) -> None:
    def exceptions(module: str) -> Scheme:
        return Scheme(4, 32) if module.endswith("v_proj") else MXFP4

    folder = write_mlx_folder(tmp_path / "s", MXFP4, exceptions=exceptions, num_hidden_layers=1)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b"))
    formats = {kind: FORMAT for kind in MATRIX_KINDS if not kind.startswith("experts")}
    assert dict(bundle.quant.formats) == formats | {"qkv.v": RowFormat(4, 32)}
    notes = dict(note.split(": ", 1) for note in bundle.manifest.provenance.notes)
    assert set(notes.values()) == {"codes and scales copied"}


@pytest.mark.fast("255")
@pytest.mark.parametrize("scale", [253, 254, 255])
def test_mxfp4_scales_beyond_float32_are_refused(tmp_path: Path, scale: int) -> None:
    folder = write_mlx_folder(tmp_path / "s", MXFP4, num_hidden_layers=1)
    folder.stored[f"{QKV}.o_proj.scales"][1][5, 1] = scale
    save_shards(folder.path, folder.stored)
    with pytest.raises(CheckpointError, match=rf"o_proj.weight has an MXFP4 scale of {scale}; at most 252"):
        convert(folder.path, tmp_path / "b")


def test_auto_is_q4_for_floating_point_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s")
    assert folder_bytes(convert(source, tmp_path / "a")) == folder_bytes(
        convert(source, tmp_path / "b", "q4")
    )


def test_the_second_key_may_be_missing_and_true_is_the_default(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s")
    expected = folder_bytes(convert(folder.path, tmp_path / "expected"))
    del folder.config["quantization_config"]
    folder.config["quantization"] = {
        "group_size": 64,
        "bits": 4,
        f"{QKV}.q_proj": True,
        "lm_head": {"bits": 4},
    }
    (folder.path / "config.json").write_text(json.dumps(folder.config))
    assert folder_bytes(convert(folder.path, tmp_path / "b")) == expected


def test_a_folder_in_which_nothing_is_quantised(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s", exceptions=lambda module: None)
    bundle = Bundle.open(convert(folder.path, tmp_path / "b"))
    assert (bundle.quant.name, bundle.manifest.provenance.notes) == ("q4", ())


def test_blocks_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mlx_folder(tmp_path / "s", exceptions=mixed)
    whole = folder_bytes(convert(folder.path, tmp_path / "whole"))
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1)
    monkeypatch.setattr(reading, "DOWN_BLOCK_BYTES", 128 * 48 * 4)
    in_blocks = folder_bytes(convert(folder.path, tmp_path / "blocks"))
    # The error is sampled block by block, so it alone may differ.
    del whole["bundle.json"], in_blocks["bundle.json"]
    assert in_blocks == whole


@pytest.mark.fast("neurons-00001*")
@pytest.mark.parametrize(
    "step", ["neurons-00001.safetensors", "embedding.safetensors", "resident.safetensors"]
)
def test_a_stopped_conversion_resumes(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ondevice.converters.progress.REPORT_SECONDS", 0.0)
    folder = write_mlx_folder(tmp_path / "s", exceptions=mixed, num_hidden_layers=3)
    seen: list[Progress] = []
    expected = folder_bytes(convert(folder.path, tmp_path / "expected", on_progress=seen.append))
    assert seen[-1].total_bytes == sum(values.nbytes for _, values in folder.stored.values())
    assert (seen[-1].done_bytes, seen[-1].fraction) == (seen[-1].total_bytes, 1.0)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    interrupted(folder.path, tmp_path / "b", step, "auto")
    assert folder_bytes(convert(folder.path, tmp_path / "b", resume=True)) == expected


def test_other_scales_are_another_checkpoint(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s")
    first = Bundle.open(convert(folder.path, tmp_path / "a")).manifest.provenance.fingerprint
    dtype, scales = folder.stored[f"{MLP}.up_proj.scales"]
    folder.stored[f"{MLP}.up_proj.scales"] = (dtype, scales * np.float16(1.25))
    save_shards(folder.path, folder.stored)
    second = Bundle.open(convert(folder.path, tmp_path / "b")).manifest.provenance.fingerprint
    assert first != second


def test_the_command_says_what_became_of_each_kind(tmp_path: Path) -> None:
    from ondevice.cli import cli

    folder = write_mlx_folder(tmp_path / "s", num_hidden_layers=1)
    result = CliRunner().invoke(cli, ["convert", str(folder.path), "--output", str(tmp_path / "b")])
    assert result.exit_code == 0, result.output
    assert "gate: codes and scales copied" in result.stderr
    assert "down: codes and scales copied" in result.stderr
    assert result.stdout == f"{tmp_path / 'b'}\n"


@pytest.mark.slow
def test_kills_leave_no_trace(tmp_path: Path) -> None:
    folder = write_mlx_folder(tmp_path / "s", exceptions=mixed, num_hidden_layers=3)
    (tmp_path / "w").mkdir()
    command = [sys.executable, "-m", KILLER, str(folder.path), str(tmp_path / "w"), "auto", "20", "3"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    assert report["killed"] >= 20
    assert (report["different"], report["left"]) == (0, 0)
