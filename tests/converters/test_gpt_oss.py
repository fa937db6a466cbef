"""gpt-oss: experts in MXFP4 as its authors store them, and what its config may say."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.reader import Bundle
from ondevice.bundle.tiles import untiled
from ondevice.bundle.verify import verify
from ondevice.config import MXFP4
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.converters.quantize import to_float32
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files
from ondevice.model.records import NeuronRecords
from ondevice.model.sequence_state import KVLayout, SequenceState
from tests.backends.test_parity_transformers import rms_error
from tests.converters.test_aliases import CONFIGS
from tests.converters.test_expert_parity import logits_and_margins
from tests.support.engines import all_logits, every_logits, running
from tests.support.families import GPT_OSS, write_model
from tests.support.refusals import assert_refused

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

STACKS = {"gate_up_proj": (128, 64), "down_proj": (64, 64)}
"""Rows and columns of an expert's matrices, by the name of their stack."""
NO_CONVERSION = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write_mxfp4(folder: Path) -> Any:
    """A random model with experts in MXFP4, as its authors' folders have them; with the same weights."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = write_model(folder, "GptOss", {**GPT_OSS, "intermediate_size": 64, "swiglu_limit": 1.0})
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(5)
    for layer, block in enumerate(model.model.layers):
        for name, (rows, columns) in STACKS.items():
            full = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[full]
            blocks = rng.integers(0, 256, (8, rows, columns // 32, 16), dtype=np.uint8)
            scales = rng.integers(120, 124, (8, rows, columns // 32), dtype=np.uint8)
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            values = convert_moe_packed_tensors(
                torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
            )
            with torch.no_grad():
                getattr(block.mlp.experts, name).copy_(values)
    save_file(tensors, folder / "model.safetensors")
    change_config(
        folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": NO_CONVERSION}
    )
    return model


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gpt-oss") / "source"
    return folder, write_mxfp4(folder)


def test_experts_in_mxfp4_are_those_of_transformers(mxfp4: tuple[Path, Any], tmp_path: Path) -> None:
    """Positions behind a router's near tie don't count: see `test_expert_parity.py`."""
    folder, model = mxfp4
    texts: list[list[int]] = np.random.default_rng(8).integers(0, 256, (8, 12)).tolist()
    both = [logits_and_margins(model, text) for text in texts]
    theirs, margin = (np.concatenate(parts) for parts in zip(*both, strict=True))
    bundle, decided = convert(folder, tmp_path / "bundle", "f16"), margin >= 1e-4
    assert decided.mean() >= 0.9
    with running(bundle) as loaded:
        mine = np.concatenate([all_logits(loaded, text, 32) for text in texts])
    assert np.abs(mine - theirs).max(axis=1)[decided].max() < 1e-5 * np.abs(theirs).max()


def test_codes_in_mxfp4_are_copied_bit_for_bit(mxfp4: tuple[Path, Any], tmp_path: Path) -> None:
    """Whole experts: gates are the even rows of a stack, ups the odd ones, and downs stay as they are."""
    folder, _ = mxfp4
    bundle = Bundle.open(convert(folder, tmp_path / "bundle"))
    verify(bundle.path, _native.crc32c)
    layout, tensors = bundle.expert_layouts[-1], load_file(folder / "model.safetensors")
    assert layout is not None
    assert [matrix.row.stored for matrix in layout.matrices] == [MXFP4] * 3
    notes = [f"expert_{which}: codes and scales copied" for which in ("down", "gate", "up")]
    assert [it for it in bundle.manifest.provenance.notes if it.startswith("expert")] == notes
    with FlashReader(bundle_files(bundle)) as reader:
        records = NeuronRecords(bundle, reader, 1).experts
        assert records is not None
        record = records.read(6)
    stacks = {"gate": ("gate_up_proj", slice(0, None, 2)), "up": ("gate_up_proj", slice(1, None, 2))}
    for which, offset, matrix in zip(
        ("gate", "up", "down"), layout.part_offsets, layout.matrices, strict=True
    ):
        stack, rows = stacks.get(which, ("down_proj", slice(None)))
        blocks, scales = (
            tensors[f"model.layers.1.mlp.experts.{stack}_{part}"][6, rows] for part in ("blocks", "scales")
        )
        found = untiled(record[offset : offset + matrix.nbytes], matrix)
        assert found.codes.tobytes() == blocks.tobytes()
        assert found.scales.tobytes() == scales.tobytes()
        bias = tensors[f"model.layers.1.mlp.experts.{stack}_bias"][6, rows]
        assert found.added is not None
        assert np.array_equal(found.added, bias)


def test_kernels_multiply_copied_experts(mxfp4: tuple[Path, Any], tmp_path: Path) -> None:
    bundle = convert(mxfp4[0], tmp_path / "bundle")
    tokens = np.random.default_rng(8).integers(0, 256, 24).tolist()
    with running(bundle) as reference, running(bundle, "cpu") as model:
        assert 0 < rms_error(all_logits(model, tokens), all_logits(reference, tokens, 32)) < 0.08


def test_matrices_in_mxfp4_are_read_by_rows_and_columns(mxfp4: tuple[Path, Any]) -> None:
    folder, model = mxfp4
    expected = model.model.layers[1].mlp.experts.requires_grad_(False)
    with closing(open_checkpoint(folder)) as checkpoint:
        for which, values in (
            ("gate", expected.gate_up_proj[5, :, ::2].T),
            ("up", expected.gate_up_proj[5, :, 1::2].T),
            ("down", expected.down_proj[5].T),
        ):
            tensor = checkpoint.tensors[f"model.layers.1.experts.5.{which}.weight"]
            assert np.array_equal(to_float32(tensor.rows(7, 50)), values[7:50].numpy())
            assert np.array_equal(to_float32(tensor.columns(7, 50)), values[:, 7:50].numpy())
            assert tensor.code_bits == 4


def test_values_of_experts_are_read_by_rows_and_columns(tmp_path: Path) -> None:
    """A checkpoint that `transformers` saved has them the other way round."""
    model = write_model(tmp_path / "source", "GptOss", GPT_OSS)
    expected = model.model.layers[2].mlp.experts
    with closing(open_checkpoint(tmp_path / "source")) as checkpoint:
        for which, values, bias in (
            ("up", expected.gate_up_proj[3, :, 1::2].T, expected.gate_up_proj_bias[3, 1::2]),
            ("down", expected.down_proj[3].T, expected.down_proj_bias[3]),
        ):
            name = f"model.layers.2.experts.3.{which}"
            tensor = checkpoint.tensors[f"{name}.weight"]
            assert np.array_equal(to_float32(tensor.rows(7, 40)), values[7:40].detach().numpy())
            assert np.array_equal(to_float32(tensor.columns(7, 40)), values[:, 7:40].detach().numpy())
            assert np.array_equal(checkpoint.tensors[f"{name}.bias"].vector(), bias.detach().numpy())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda name, values: values[..., :8] if name.endswith("_blocks") else values,
            "has shape .*, and its",
        ),
        (lambda name, values: values[:7], r"7 \* .*|tensors of experts|asks for"),
        (lambda name, values: None if name.endswith("_scales") else values, "has no _scales"),
        (lambda name, values: None if name.endswith("_blocks") else values, "stored as U8"),
        (lambda name, values: np.full_like(values, 255) if "_scales" in name else values, "means NaN"),
    ],
)
def test_damaged_mxfp4_is_refused(mxfp4: tuple[Path, Any], tmp_path: Path, damage: Any, message: str) -> None:
    folder, source = mxfp4[0], tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((folder / "config.json").read_bytes())
    changed = {}
    for name, values in load_file(folder / "model.safetensors").items():
        found = (
            damage(name, values)
            if "layers.2.mlp.experts.down_proj_" in name and "bias" not in name
            else values
        )
        changed |= {} if found is None else {name: np.ascontiguousarray(found)}
    save_file(changed, source / "model.safetensors")
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        convert(source, tmp_path / "bundle", "f16")


def test_other_methods_and_settings_are_refused(mxfp4: tuple[Path, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in mxfp4[0].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    change_config(source, quantization_config={"quant_method": "mxfp4", "rotation": True})
    assert_refused(source, UnsupportedModelError, "quantization_config has rotation, which isn't known")
    change_config(source, quantization_config={"quant_method": "awq"})
    assert_refused(source, UnsupportedModelError, "of the method 'awq'")


PUBLISHED = CONFIGS["gpt-oss-20b"]


def test_the_published_config_is_read_and_is_what_missing_keys_mean() -> None:
    config = read_config(PUBLISHED)
    spec, other = config.layers[:2]
    assert (spec.attention.window, other.attention.window) == (128, 0)
    assert spec.attention.sinks
    assert spec.attention.bias
    assert spec.attention.output_bias
    assert (spec.feed_forward.activation, spec.feed_forward.clamp) == ("clamped_swish", 7.0)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.chosen, spec.experts.neurons) == (32, 4, 2880)
    assert spec.experts.bias
    assert spec.experts.router_bias
    assert config.ropes[0].magnitude == pytest.approx(0.1 * np.log(32) + 1)
    left_out = {"experts_per_token", "initial_context_length", "layer_types", "rope_scaling", "rope_theta"}
    left_out |= {"attention_bias", "swiglu_limit", "sliding_window", "head_dim", "num_experts_per_tok"}
    few = {key: value for key, value in PUBLISHED.items() if key not in left_out}
    assert read_config(few) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 3}, "num_experts_per_tok is 4, and experts_per_token 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": None}, "sliding layers"),
        ({"swiglu_limit": 0.0}, "clamp is 0"),
        ({"swiglu_alpha": -1.0}, "slope is -1"),
        ({"num_local_experts": 3}, "chosen is 4"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_config({**PUBLISHED, **changes})


def test_a_bundle_says_what_it_was_converted_from(mxfp4: tuple[Path, Any], tmp_path: Path) -> None:
    """The manifest gives back the description, own constants of the activation included."""
    folder, _ = mxfp4
    bundle = Bundle.open(convert(folder, tmp_path / "bundle", "q4"))
    with closing(open_checkpoint(folder)) as checkpoint:
        assert bundle.config == checkpoint.config
    assert bundle.config.feed_forward.clamp == 1.0


def test_a_text_has_one_result_in_any_pieces_and_as_a_path_of_a_tree(
    mxfp4: tuple[Path, Any], tmp_path: Path
) -> None:
    """On `cpu`, at 4 bits, beyond the window of the layers that slide."""
    tokens: list[int] = np.random.default_rng(4).integers(0, 256, 30).tolist()
    with running(convert(mxfp4[0], tmp_path / "bundle", "q4"), "cpu") as model:
        layout = KVLayout(model.config, 16)
        whole = every_logits(model, tokens, SequenceState(layout))
        for step in (1, 7):
            kv = SequenceState(layout)
            parts = [every_logits(model, tokens[at : at + step], kv) for at in range(0, 30, step)]
            assert np.concatenate(parts).tobytes() == whole.tobytes()
        # The last two tokens, and before them a branch that another text would have.
        kv, tree = SequenceState(layout), TokenTree([-1, -1, 1, 0])
        every_logits(model, tokens[:28], kv)
        nodes = ForwardBatch([9, *tokens[28:], 9], tree)
        found = np.concatenate(list(model.every_logits(nodes, kv, 3)))
        assert found[1:3].tobytes() == whole[28:].tobytes()
