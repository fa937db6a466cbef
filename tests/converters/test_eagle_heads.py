"""EAGLE-3 heads: converted for a bundle, equal to plain PyTorch, and refused where they are hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.draft_layers import EAGLE_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.errors import BundleError, CheckpointError, OndeviceError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.sequence_state import KVLayout, SequenceState
from tests.support.bundles import convert_bundle, copy_files, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.eagle_heads import head_config, head_tensors, twin_rows, write_eagle_head
from tests.support.engines import BackendName, running
from tests.support.models import transformers_model

TOKENS = [3, 250, 7, 7, 90, 14, 200, 3, 41, 5, 66, 250, 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("target") / "checkpoint", dtype="F16")


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Path:
    return convert_bundle(checkpoint, checkpoint.parent / "target", "f16")


@pytest.mark.fast("options0-False-*", "options1-True-cpu", "options2-False-cpu")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("options", "embeddings"),
    [
        ({}, False),
        ({"norm_before_residual": True, "attention_bias": True, "rope_theta": 500.0}, True),
        ({"draft_vocab_size": 272, "head_dim": 24, "eagle_aux_hidden_state_layer_ids": [2, 0, 2]}, False),
        # EAGLE-3.1, with the head norms of DeepSpec's heads.
        ({"fc_norm": True, "norm_output": True, "ttt_length": 7}, True),
    ],
)
def test_logits_are_those_of_plain_pytorch(
    checkpoint: Path,
    target: Path,
    tmp_path: Path,
    backend: BackendName,
    options: dict[str, Any],
    embeddings: bool,
) -> None:
    """Rows of a text in pieces of several lengths, then three that go on from the layer's own output."""
    torch = pytest.importorskip("torch")
    folder = copy_files(target, tmp_path / "bundle")
    config = head_config(**options)
    tensors = head_tensors(config, embeddings=embeddings, head_norms="ttt_length" in options)
    layer = convert_eagle(write_eagle_head(tmp_path / "head", tensors, **options), folder, 16)
    model = transformers_model(checkpoint)
    with torch.no_grad():
        states = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    taps = config["eagle_aux_hidden_state_layer_ids"]
    entering = [states[tap][0].numpy() for tap in taps]
    kv_bits: Literal[32, 16] = 32 if backend == "reference" else 16
    with running(folder, backend) as transformer:
        transformer.taps = tuple(sorted(set(taps)))
        kv = SequenceState(KVLayout(transformer.config, kv_bits))
        output = transformer.run(ForwardBatch(TOKENS), kv)
        assert len(output.tapped) == len(set(taps))
        bundle = Bundle.open(folder)
        with FlashReader([bundle.sidecar_file(EAGLE_SIDECAR.tensors)], "buffered") as reader:
            loaded = load_draft_layer(bundle, layer, reader, transformer.backend, transformer.weights, 256)
        own = SequenceState(KVLayout(loaded.config, kv_bits))
        mixed = loaded.mixed(output.tapped)
        rows, found = TOKENS[1:], []
        for start, stop in ((0, 1), (1, 6), (6, len(rows))):
            hidden = loaded.run(rows[start:stop], transformer.backend.rows(mixed, range(start, stop)), own)
            found.append(loaded.logits(hidden))
        fed = [17, 33, 8]
        for token in fed:
            last = transformer.backend.rows(hidden, [hidden.shape[0] - 1])
            hidden = loaded.run([token], last, own)
            found.append(loaded.logits(hidden))
    own_table = model.get_input_embeddings().weight.detach().numpy()
    table = tensors["embed_tokens.weight"] if embeddings else own_table
    if options.get("fc_norm"):
        assert layer.taps_normed
        assert layer.states_normed
        for tap, x in enumerate(entering):
            root = np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + config["rms_norm_eps"])
            entering[tap] = x / root * tensors[f"fc_norm.{tap}.weight"].astype(np.float64)
    fc = np.concatenate(entering, 1) @ tensors["fc.weight"].astype(np.float64).T
    expected_hidden = fc[:-1]
    after, logits = twin_rows(tensors, config, table, rows, expected_hidden)
    for count in range(1, len(fed) + 1):
        expected_hidden = np.vstack([expected_hidden, after[-1:]])
        after, logits = twin_rows(tensors, config, table, [*rows, *fed[:count]], expected_hidden)
    got = np.concatenate(found)
    assert got.shape == logits.shape
    assert np.abs(got - logits).max() < 1e-3 * np.abs(logits).max()
    # The token of each place of the head.
    chosen = np.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert (chosen == (np.arange(272) if loaded.tokens is None else loaded.tokens)).all()


def test_a_converted_head_is_part_of_the_bundle(target: Path, tmp_path: Path) -> None:
    folder = copy_files(target, tmp_path / "bundle")
    before = len(verify(folder, _native.crc32c).files)
    for bits in (4, 8, 16):
        layer = convert_eagle(write_eagle_head(tmp_path / f"head{bits}"), folder, bits)
        assert (layer.bits, layer.taps, layer.tokens) == (bits, (0, 1, 2), 100)
        assert Bundle.open(folder).eagle == layer
        assert len(verify(folder, _native.crc32c).files) == before + 1


def test_the_speculators_form_and_the_layers_that_sglang_names(target: Path, tmp_path: Path) -> None:
    folder = copy_files(target, tmp_path / "bundle")
    config = head_config()
    del config["eagle_aux_hidden_state_layer_ids"]
    outer = {key: config.pop(key) for key in ("draft_vocab_size", "architectures")}
    nested = {"speculators_model_type": "eagle3", "norm_before_residual": True, "target_hidden_size": 64}
    tensors = {name.replace("midlayer.", "layers.0."): it for name, it in head_tensors(head_config()).items()}
    head = write_eagle_head(tmp_path / "head", tensors)
    document = outer | nested | {"transformer_layer_config": config}
    document["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    (head / "config.json").write_text(json.dumps(document))
    layer = convert_eagle(head, folder)
    assert (layer.taps, layer.residual_normed) == ((1, 2, 3), True)


def test_the_layers_are_those_of_the_paper_unless_named(tmp_path: Path) -> None:
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", num_hidden_layers=8, intermediate_size=64)
    folder = convert_bundle(checkpoint, tmp_path / "bundle")
    head = write_eagle_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=None)
    assert convert_eagle(head, folder).taps == (2, 4, 5)


def change(name: str, values: Any) -> Callable[[dict[str, Any]], None]:
    def put(tensors: dict[str, Any]) -> None:
        if values is None:
            del tensors[name]
        else:
            tensors[name] = values

    return put


def offset(index: int, value: int) -> Callable[[dict[str, Any]], None]:
    def put(tensors: dict[str, Any]) -> None:
        tensors["d2t"][index] = value

    return put


NAN = np.full((64, 192), np.nan, np.float16)
HOSTILE: list[tuple[dict[str, Any], Callable[[dict[str, Any]], None], type[OndeviceError], str]] = [
    ({"hidden_size": 1 << 40}, lambda it: None, CheckpointError, "hidden_size is 1099511627776; it must be"),
    ({"hidden_size": -1}, lambda it: None, CheckpointError, "hidden_size is -1"),
    ({"head_dim": 1 << 30}, lambda it: None, CheckpointError, "head_dim is 1073741824"),
    ({"head_dim": 15}, lambda it: None, UnsupportedModelError, "15 of a head's 15 dimensions"),
    ({"num_key_value_heads": 3}, lambda it: None, CheckpointError, "not a multiple of num_kv_heads"),
    ({"num_hidden_layers": 2}, lambda it: None, UnsupportedModelError, "num_hidden_layers is 2"),
    ({"draft_vocab_size": 1 << 30}, lambda it: None, CheckpointError, "tokens is 1073741824"),
    ({"vocab_size": 99, "draft_vocab_size": 50}, lambda it: None, CheckpointError, "vocabulary of 99"),
    ({"target_hidden_size": 128}, lambda it: None, CheckpointError, "for a model of width 128"),
    ({"hidden_act": "mish"}, lambda it: None, UnsupportedModelError, "hidden_act mish"),
    ({"rms_norm_eps": 0}, lambda it: None, CheckpointError, "eps is 0.0"),
    ({"mlp_bias": True}, lambda it: None, UnsupportedModelError, "mlp_bias"),
    ({"norm_before_fc": True}, lambda it: None, UnsupportedModelError, "norm_before_fc is True"),
    ({"fc_norm": True}, lambda it: None, CheckpointError, "3 tensors .* fc_norm.0"),
    ({"new_option": 3}, lambda it: None, UnsupportedModelError, "new_option = 3"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, lambda it: None, CheckpointError, "three from 0 to 3"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, lambda it: None, CheckpointError, "layers 0, 1, 9"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1.5]}, lambda it: None, CheckpointError, "1.5"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, lambda it: None, UnsupportedModelError, "use_aux"),
    ({}, change("fc.weight", None), CheckpointError, "1 tensors of an EAGLE-3 head are missing, fc.weight"),
    ({}, change("fc.weight", np.zeros((64, 128), np.float16)), CheckpointError, "fc.weight has shape"),
    ({}, change("fc.weight", NAN), CheckpointError, "fc.0"),
    ({}, change("norm.weight", np.full(64, np.inf, np.float16)), CheckpointError, "norm.weight"),
    ({}, change("extra", np.zeros(3, np.float16)), UnsupportedModelError, "no part of an EAGLE-3 head"),
    ({}, change("lm_head.weight", np.zeros((100, 64), np.int8)), UnsupportedModelError, "stored as I8"),
    ({}, change("d2t", None), CheckpointError, "no d2t that says which"),
    ({}, change("d2t", np.zeros(99, np.int64)), CheckpointError, "must be I64"),
    ({}, change("d2t", np.zeros(100, np.int32)), CheckpointError, "d2t is I32"),
    ({}, offset(0, -1), CheckpointError, "another id from 0 to 271"),
    ({}, offset(3, -2), CheckpointError, "another id"),
    ({}, offset(5, (1 << 63) - 1), CheckpointError, "beyond the vocabulary"),
    ({}, offset(5, -(1 << 63)), CheckpointError, "beyond the vocabulary"),
    ({}, change("model.norm.weight", np.zeros(64, np.float16)), CheckpointError, "twice under two names"),
]


@pytest.mark.parametrize(("options", "spoil", "error", "message"), HOSTILE)
def test_hostile_heads_are_refused_by_name(
    target: Path,
    tmp_path: Path,
    options: dict[str, Any],
    spoil: Callable[[dict[str, Any]], None],
    error: type[OndeviceError],
    message: str,
) -> None:
    """And the bundle stays as it was."""
    tensors: dict[str, Any] = head_tensors(head_config())
    tensors["d2t"] = np.zeros(100, np.int64)
    spoil(tensors)
    head = write_eagle_head(tmp_path / "head", tensors, **options)
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(error, match=message):
        convert_eagle(head, target)
    assert sorted(path.name for path in target.iterdir()) == before


def test_a_pickle_is_refused_with_the_remedy(target: Path, tmp_path: Path) -> None:
    head = write_eagle_head(tmp_path / "head")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"a pickle, which can run code .* safetensors"):
        convert_eagle(head, target)


def test_a_truncated_head_is_refused(target: Path, tmp_path: Path) -> None:
    head = write_eagle_head(tmp_path / "head")
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        convert_eagle(head, target)


def test_an_edited_manifest_counts_as_damaged(target: Path, tmp_path: Path) -> None:
    folder = copy_files(target, tmp_path / "bundle")
    convert_eagle(write_eagle_head(tmp_path / "head"), folder)
    manifest = folder / EAGLE_SIDECAR.manifest
    manifest.write_text(manifest.read_text().replace('"num_heads": 4', '"num_heads": 8'))
    opened = Bundle.open(folder)
    assert opened.eagle is None
    assert isinstance(opened.damaged["eagle"], BundleError)
    assert "ondevice convert HEADS --draft-for" in str(opened.damaged["eagle"])


def test_the_command_adds_a_head(target: Path, tmp_path: Path, ondevice: Run) -> None:
    folder = copy_files(target, tmp_path / "bundle")
    head = write_eagle_head(tmp_path / "head")
    found = ondevice("convert", head, "--draft-for", folder, "--quant", "f16")
    assert found.code == 0, found.err
    assert "--speculation eagle drafts with it" in found.err
    opened = Bundle.open(folder)
    assert opened.eagle is not None
    assert opened.eagle.bits == 16
    found = ondevice("convert", head, "--draft-for", folder, "--quant", "q5")
    assert found.code != 0
    assert "--quant q5 isn't possible with --draft-for" in found.err
    assert "leave --output out" in ondevice("convert", head, "--draft-for", folder, "-o", tmp_path / "o").err
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "head.bin").write_bytes(b"PK")
    for source, words in (
        (tmp_path / "model.gguf", "model.gguf is a file; --draft-for reads a folder"),
        (tmp_path / "head.bin", "head.bin is a pickle, which can run code when it is opened"),
        ("owner/name", "no folder owner/name; --draft-for reads a folder"),
    ):
        refused = ondevice("convert", source, "--draft-for", folder)
        assert refused.code != 0
        assert words in refused.err
