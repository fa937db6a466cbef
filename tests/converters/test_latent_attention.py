"""Latent attention: DeepSeek V2 and V3 and GLM-4.7-Flash, in long texts, and a token's bits in any company.

`test_families.py` and `test_expert_parity.py` compare these families with `transformers` too, over fewer
tokens and with experts. Routers' near ties would part the two somewhere in a long text, so layers are dense
here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.api import Model, inspect, load
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.draft_layers import MTP_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.checkpoints.fp8_folder import values_of_codes
from ondevice.converters.convert import convert
from ondevice.converters.draft_layers.mtp import convert_mtp
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import LatentSpec, ModelConfig
from tests.support.chat import squeeze
from tests.support.engines import BackendName, all_logits, error, every_logits, expert_fetcher, running
from tests.support.families import DEEPSEEK, DEEPSEEK_V3, LATENT_YARN, write_model
from tests.support.mtp_checkpoints import write_mtp_checkpoint

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

LONG = 300
TEXT: list[int] = np.random.default_rng(5).integers(0, 256, 520).tolist()
V3 = {**DEEPSEEK_V3, "rope_parameters": LATENT_YARN}
DENSE = {"first_k_dense_replace": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {**DEEPSEEK, **DENSE, "q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "v2 queries of a latent": ("DeepseekV2", {**DEEPSEEK, **DENSE, "kv_lora_rank": 64, "v_head_dim": 48}),
    "v2 wide": ("DeepseekV2", {**DEEPSEEK, **DENSE, "qk_rope_head_dim": 32, "qk_nope_head_dim": 96}),
    "v3": ("DeepseekV3", {**V3, **DENSE}),
    "v3 halves": ("DeepseekV3", {**DEEPSEEK_V3, **DENSE, "rope_interleave": False, "q_lora_rank": None}),
    "v3 wide": ("DeepseekV3", {**V3, **DENSE, "kv_lora_rank": 128, "v_head_dim": 64, "num_attention_heads": 8}
        | {"num_key_value_heads": 8}),
    "glm": ("Glm4MoeLite", {**DEEPSEEK, "mlp_layer_types": ["dense"] * 3, "first_k_dense_replace": None}),
    "glm yarn": ("Glm4MoeLite", {**DEEPSEEK, "mlp_layer_types": ["dense"] * 3, "rope_parameters": LATENT_YARN}
        | {"first_k_dense_replace": None}),
    "glm narrow": ("Glm4MoeLite", {**DEEPSEEK, "mlp_layer_types": ["dense"] * 3, "kv_lora_rank": 16}
        | {"first_k_dense_replace": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "q_lora_rank": None}),
}  # fmt: skip
FAST = ("v3", "glm")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in FAMILIES]
)
def test_a_long_text_is_that_of_transformers(tmp_path: Path, case: str) -> None:
    model = write_model(tmp_path / "source", *FAMILIES[case])
    with torch.no_grad():
        theirs = model(torch.tensor([TEXT[:LONG]])).logits[0].numpy()
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "f16")
    kept: list[tuple[BackendName, Literal[32, 16], float]] = [("reference", 32, 2e-5), ("cpu", 16, 1e-3)]
    for backend, kv_bits, limit in kept:
        with running(bundle, backend) as loaded:
            far = error(all_logits(loaded, TEXT[:LONG], kv_bits), theirs)
        print(f"{case}, {backend}: {far:.1e}")
        assert far < limit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A V3 with experts in two of its three layers."""
    made = tmp_path_factory.mktemp("latent")
    write_model(
        made / "source", "DeepseekV3", {**V3, "intermediate_size": 300, "max_position_embeddings": 600}
    )
    return convert(made / "source", made / "bundle", "q4")


def logits(folder: Path, chunk: int, threads: int, slots: int | None, kv_bits: Literal[16, 8]) -> bytes:
    """The bits of every token's logits, in chunks of a size, with experts in some slots."""
    bundle = Bundle.open(folder)
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        backend = CpuBackend(make_runner(threads), segment_neurons=64, piece_neurons=64)
        model = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        fetcher = expert_fetcher(bundle, reader, backend, slots)
        kv, found = SequenceState(KVLayout(model.config, kv_bits)), []
        count = 130 if chunk == 1 else len(TEXT)
        for at in range(0, count, chunk):
            found.append(every_logits(model, TEXT[at : min(count, at + chunk)], kv))
        fetcher.close()
    return np.concatenate(found).tobytes()


@pytest.mark.fast("16")
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_bits_depend_on_nothing(folder: Path, kv_bits: Literal[16, 8]) -> None:
    expected = logits(folder, 512, 1, None, kv_bits)
    for chunk, threads, slots in ((1, 2, None), (7, 2, 5), (64, 1, 3), (512, 2, 9)):
        found = logits(folder, chunk, threads, slots, kv_bits)
        assert found == expected[: len(found)], (chunk, threads, slots)


@pytest.mark.fast("8")
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_draft_trees_change_no_bit(folder: Path, kv_bits: Literal[16, 8]) -> None:
    """Two tokens a pass with wrong ones beside them, of which none stays."""
    rng, found = np.random.default_rng(3), []
    with running(folder, "cpu") as model:
        expected = all_logits(model, TEXT[:140], kv_bits)
        kv = SequenceState(KVLayout(model.config, kv_bits))
        for at in range(0, 140, 2):
            wrong = rng.integers(0, 256, 3).tolist()
            tokens = [TEXT[at], wrong[0], TEXT[at + 1], wrong[1], wrong[2]]
            batch = ForwardBatch(tokens, TokenTree([-1, 0, 0, 1, 2]), drafted=[1, 2, 3, 4])
            found.append(np.array(model.logits(model.run(batch, kv).hidden))[[0, 2]])
            kv.keep(at, [0, 2], partial(model.backend.kv_move, kv))
            model.accept(batch, [0, 2])
    assert np.concatenate(found).tobytes() == expected.tobytes()


@pytest.mark.fast("8")
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_reference_moves_what_it_keeps(folder: Path, kv_bits: Literal[16, 8]) -> None:
    """A path of a tree that stays, in the plain backend's own blocks, and a fork; near `cpu`."""
    with running(folder, "reference") as model, running(folder, "cpu") as other:
        kv = SequenceState(KVLayout(model.config, kv_bits))
        model.run(ForwardBatch(TEXT[:20]), kv)
        model.run(ForwardBatch([TEXT[20], 3, TEXT[21], TEXT[22]], TokenTree([-1, 0, 0, 2])), kv)
        kv.keep(20, [0, 2, 3], partial(model.backend.kv_move, kv))
        copy = kv.fork()
        found = every_logits(model, TEXT[23:30], kv)
        assert np.array_equal(every_logits(model, TEXT[23:30], copy), found)
        expected = all_logits(model, TEXT[:30], kv_bits)[23:]
        assert error(found, expected) < (5e-5 if kv_bits == 16 else 1e-2)
        assert error(all_logits(other, TEXT[:30], kv_bits)[23:], expected) < 0.1


def texts(model: Model) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"max_tokens": 20, "logit_bias": {2: -math.inf}}
    prompt = TEXT[:8] * 3
    sampled = model.generate(tokens=prompt, temperature=0.9, seed=3, **options)
    return [model.generate(tokens=prompt, temperature=0.0, **options).tokens, sampled.tokens]


@pytest.mark.fast("8")
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_no_setting_changes_the_text(folder: Path, tmp_path: Path, kv_bits: Literal[16, 8]) -> None:
    """For every drafter, budget, chunk and thread count, from a session and from a prompt cache."""
    settled: dict[str, Any] = {"kv_bits": kv_bits, "prompt_cache": tmp_path / "cache"}
    with load(folder, speculation="off", threads=1, kv_bits=kv_bits) as model:
        expected = texts(model)
        assert len(set(expected[1])) > 5, "the text says nothing"
    for settings in (
        {"threads": 2, "prefill_chunk": 3, "speculation": "lookup"},
        {"kernel_target": "scalar", "speculation": "recycling", "io": "buffered"},
        {"speculation": "auto", "prefill_chunk": 1},
    ):
        with load(folder, **settled, **settings) as model:
            assert texts(model) == expected, settings
            for segments in (0, 3):
                squeeze(model, segments)
                assert texts(model) == expected, settings


def test_what_a_token_takes(folder: Path) -> None:
    """One latent and one key part a layer, whatever the number of heads; 8 bits take two scales more."""
    latent = 48 + 8
    for kv_bits, nbytes in ((16, 2 * latent), (8, latent + 8)):
        plan = inspect(folder, kv_bits=kv_bits)
        assert plan.kv_block_bytes == 64 * 3 * nbytes


def fp8_weights(values: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 codes, factors of blocks, and the values that they stand for, by torch."""
    rows, cols = values.shape
    padded = np.zeros((-(-rows // block) * block, -(-cols // block) * block), np.float32)
    padded[:rows, :cols] = values
    tiles = padded.reshape(padded.shape[0] // block, block, -1, block)
    scales = np.abs(tiles).max(axis=(1, 3)) / 448 + np.float32(1e-8)
    wide = np.repeat(np.repeat(scales, block, 0), block, 1)[:rows, :cols]
    codes = torch.from_numpy(values / wide).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scales, codes.float().numpy() * wide


def write_fp8(source: Path, folder: Path, plain: Path, block: int = 128, ignored: Sequence[str] = ()) -> None:
    """The checkpoint as V3's authors store it, and with the values that this stands for.

    ignored: modules that aren't quantised.
    """
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "ignored_layers": list(ignored),
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, blobs, values, offset = {}, [], {}, 0

    def put(name: str, dtype: str, array: np.ndarray) -> None:
        nonlocal offset
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        blobs.append(array.tobytes())
        offset = end

    for name, array in load_file(source / "model.safetensors").items():
        kept = name.removesuffix(".weight") in ignored
        if name.endswith(("proj.weight", "with_mqa.weight")) and not kept:
            codes, scales, values[name] = fp8_weights(array, block)
            put(name, "F8_E4M3", codes)
            put(f"{name}_scale_inv", "F32", scales)
        else:
            values[name] = array
            put(name, "F32", array)
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"".join(blobs)
    (folder / "model.safetensors").write_bytes(data)
    save_file(values, plain / "model.safetensors")


@pytest.mark.fast("32")
@pytest.mark.parametrize("block", [128, 32])
def test_8_bit_floats_are_read_as_what_they_stand_for(tmp_path: Path, block: int) -> None:
    """The bundle is that of a checkpoint with these values. Matrices have parts of blocks at their edges."""
    for name in ("fp8", "plain"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "source", "DeepseekV3", {**V3, "hidden_size": 192, "intermediate_size": 300})
    write_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain", block)
    found, expected = (
        convert(tmp_path / name, tmp_path / f"{name} bundle", "q4") for name in ("fp8", "plain")
    )
    assert Bundle.open(found).config == Bundle.open(expected).config
    for file in expected.iterdir():
        if file.name != "bundle.json":
            assert (found / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_a_layer_ahead_in_8_bit_floats_is_read_as_what_it_stands_for(tmp_path: Path) -> None:
    """As V3's authors publish it, experts and all."""
    for name in ("fp8", "plain"):
        (tmp_path / name).mkdir()
    write_mtp_checkpoint(tmp_path / "source", "deepseek v3 moe")
    write_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain", 32)
    bundle, found = convert(tmp_path / "plain", tmp_path / "bundle", "q4"), []
    for name in ("plain", "fp8"):
        layer = convert_mtp(tmp_path / name, bundle)
        assert layer.latent is not None
        assert layer.experts is not None
        found.append((bundle / MTP_SIDECAR.tensors).read_bytes())
    assert found[0] == found[1]


def test_every_code_of_8_bit_floats_decodes_as_torch_does() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(values_of_codes(), theirs, equal_nan=True)


def changed(folder: Path, source: Path, **section: Any) -> Path:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], **section}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder


def test_other_8_bit_floats_are_refused(tmp_path: Path) -> None:
    for name in ("fp8", "plain"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "source", "DeepseekV3", V3)
    write_fp8(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain")
    for number, (section, message) in enumerate((
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"weight_block_size": [128, 0]}, "weight_block_size"),
        ({"rotation": True}, "has rotation, which isn't known"),
    )):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match=message):
            convert(changed(tmp_path / f"{number}", tmp_path / "fp8", **section), tmp_path / "bundle", "q4")
    wrong = changed(tmp_path / "blocks", tmp_path / "fp8", weight_block_size=[16, 16])
    with pytest.raises(CheckpointError, match="_scale_inv has shape"):
        convert(wrong, tmp_path / "bundle", "q4")


def test_layers_that_predict_ahead_are_left_out(folder: Path, tmp_path: Path) -> None:
    source = folder.parent / "source"
    tensors = load_file(source / "model.safetensors")
    ahead = {
        name.replace("layers.2.", "layers.3."): values
        for name, values in tensors.items()
        if "layers.2." in name
    }
    ahead["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    save_file({**tensors, **ahead}, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    bundle = Bundle.open(convert(tmp_path, tmp_path / "bundle", "q4"))
    assert bundle.config == Bundle.open(folder).config
    notes = " ".join(bundle.manifest.provenance.notes)
    assert "the layer that predicts one token more (mtp) was left out" in notes


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    return read_config({**json.loads((folder.parent / "source" / "config.json").read_text()), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"qk_head_dim": 30}, "qk_head_dim is 30"),
        ({"kv_lora_rank": 40}, "rank is 40; it must be a multiple of 16"),
        ({"v_head_dim": 24}, "value_dim is 24"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"index_topk": 2048}, "index_topk"),
        ({"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map"),
    ],
)
def test_unsupported_configs_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        config_of(folder, **changes)


def test_the_authors_keys_mean_the_same_as_transformers_keys(folder: Path) -> None:
    """As V3's own config.json has them, which `transformers` reads and writes by other names."""
    theirs = {
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "rope_theta": 10000.0,
        "rope_parameters": None,
        "rope_scaling": {("type" if key == "rope_type" else key): it for key, it in LATENT_YARN.items()},
    }
    assert config_of(folder, **theirs) == config_of(folder)
    assert config_of(folder).layers[0].attention.latent == LatentSpec(48, 8, 20, 16, 40)
