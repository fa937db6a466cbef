"""DFlash and DSpark heads: converted for a bundle, equal to plain PyTorch, refused where they are hostile."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import ondevice
from ondevice.api import load
from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.draft_layers import DFLASH_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.converters.draft_layers.dflash import convert_dflash
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.draft_block import DraftBlock
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.speculation.drafters.block import BlockDrafter
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.command_line import Run
from tests.support.dflash_heads import (
    dflash_config,
    dflash_tensors,
    dflash_twin,
    dspark_config,
    write_dflash_head,
)
from tests.support.engines import BackendName, always_draft, running
from tests.support.models import transformers_model

TOKENS = [3, 250, 7, 7, 90, 14, 200, 3, 41, 5, 66, 250, 1]
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True
}  # fmt: skip
HEADS = {"dflash": dflash_config(), "sliding": dflash_config(**SLIDING), "dspark": dspark_config()}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "checkpoint"
    return write_chat_checkpoint(folder, dtype="F16", hidden_act="relu")


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Path:
    return convert_bundle(checkpoint, checkpoint.parent / "target", "f16")


def twin(
    checkpoint: Path, config: dict[str, Any], tensors: dict[str, Any], text: list[int]
) -> tuple[np.ndarray, list[int]]:
    """What the twin drafts after a text."""
    torch, model = pytest.importorskip("torch"), transformers_model(checkpoint)
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    taps = {**config, **config.get("dflash_config", {})}["target_layer_ids"]
    entering = [states[tap + 1][0].numpy() for tap in taps]
    table, head = (it.weight.detach().numpy() for it in (model.get_input_embeddings(), model.lm_head))
    return dflash_twin(tensors, config, table, head, text[-1], entering)


def chain(block: DraftBlock, token: int, logits: Float32) -> tuple[Float32, list[int]]:
    """Logits (places, V), each after the likeliest token before it, and these tokens."""
    given, drafted = list[Float32](), [token]
    for row in logits:
        given.append(block.after(drafted[-1], row))
        drafted.append(int(given[-1].argmax()))
    return np.array(given), drafted[1:]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", HEADS)
def test_a_block_is_that_of_plain_pytorch(
    checkpoint: Path, target: Path, tmp_path: Path, name: str, backend: BackendName
) -> None:
    """Its logits, and the tokens that they draft, behind rows of a text in pieces of several lengths."""
    config, folder = HEADS[name], copy_files(target, tmp_path / "bundle")
    tensors = dflash_tensors(config)
    layer = convert_dflash(write_dflash_head(tmp_path / "head", config, tensors), folder, 16)
    assert Bundle.open(folder).dflash == layer
    kv_bits: Literal[32, 16] = 32 if backend == "reference" else 16
    with running(folder, backend) as transformer:
        transformer.taps = tuple(sorted(set(layer.taps)))
        kv = SequenceState(KVLayout(transformer.config, kv_bits))
        output = transformer.run(ForwardBatch(TOKENS[:-1]), kv)
        bundle = Bundle.open(folder)
        with FlashReader([bundle.sidecar_file(DFLASH_SIDECAR.tensors)], "buffered") as reader:
            loaded = load_draft_layer(bundle, layer, reader, transformer.backend, transformer.weights, 256)
        block, own = DraftBlock(loaded), SequenceState(KVLayout(loaded.config, kv_bits))
        mixed = loaded.mixed(output.tapped)
        for start, stop in ((0, 1), (1, 6), (6, len(TOKENS) - 1)):
            rows = transformer.backend.rows(mixed, range(start, stop))
            block.add_rows(TOKENS[start:stop], rows, own)
        for _ in range(2):
            # A second time, as a block leaves nothing behind.
            logits = block.logits(TOKENS[-1], layer.block_drafts, own)
        given, drafted = chain(block, TOKENS[-1], logits)
    expected, tokens = twin(checkpoint, config, tensors, TOKENS)
    assert logits.shape == expected.shape == (5, 272)
    assert np.abs(given - expected).max() < 2e-3 * np.abs(expected).max()
    assert drafted == tokens


@pytest.mark.parametrize("name", HEADS)
def test_no_token_depends_on_blocks(
    checkpoint: Path, target: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, in little memory, in a conversation; and drafts are the twin's for the text."""
    always_draft(monkeypatch, [8])
    monkeypatch.setattr("ondevice.runtime.engine.MIN_PASS_SECONDS", 0.0)
    config, folder = HEADS[name], copy_files(target, tmp_path / "bundle")
    tensors = dflash_tensors(config)
    convert_dflash(write_dflash_head(tmp_path / "head", config, tensors), folder, 16)
    blocks: list[tuple[list[int], Float32]] = []
    drafts = DraftBlock.logits

    def note(block: DraftBlock, token: int, count: int, kv: SequenceState) -> Float32:
        logits = drafts(block, token, count, kv)
        blocks.append(([*kv.tokens, token], chain(block, token, logits)[0]))
        return logits

    monkeypatch.setattr(DraftBlock, "logits", note)
    bias = {EOS: -math.inf}
    with (
        load(folder, speculation="off") as plain,
        load(folder, speculation="dflash", threads=2) as drafting,
        load(folder, prefill_chunk=7) as small,
    ):
        squeeze(small, small.plan.segment.least + 1)
        assert isinstance(drafting._engine._drafting._drafter, BlockDrafter)
        for sampling in SAMPLINGS:
            expected = plain.generate(PROMPT, max_tokens=20, logit_bias=bias, **sampling).tokens
            for model in (drafting, small):
                blocks.clear()
                found = model.generate(PROMPT, max_tokens=20, logit_bias=bias, **sampling)
                assert found.tokens == expected
                assert found.stats.drafting.draft_tokens > 15
                assert len(blocks) > 5
        text, logits = blocks[-1]
        spoken = [plain.session().respond("A?", max_tokens=8).tokens, drafting.session()]
        assert spoken[1].respond("A?", max_tokens=8).tokens == spoken[0]
    reference, _ = twin(checkpoint, config, tensors, text)
    assert np.abs(logits - reference[: len(logits)]).max() < 5e-3 * np.abs(reference).max()


def test_blocks_draft_on_mlx(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.default_device() == mx.gpu:
        pytest.skip("MLX's CPU kernels give rows the same bits in any company; others may not")
    always_draft(monkeypatch, [8])
    folder = copy_files(target, tmp_path / "bundle")
    convert_dflash(write_dflash_head(tmp_path / "head", HEADS["dspark"]), folder)
    texts, drafted = [], 0
    for speculation in ("off", "dflash"):
        with load(folder, backend="mlx", speculation=speculation) as model:
            found = model.generate(PROMPT, max_tokens=12, logit_bias={EOS: -math.inf})
        texts.append(found.tokens)
        drafted = found.stats.drafting.draft_tokens
    assert texts[0] == texts[1]
    assert drafted > 15


def test_a_plan_counts_the_layers(target: Path, tmp_path: Path) -> None:
    folder = copy_files(target, tmp_path / "bundle")
    for bits in (4, 8, 16):
        layer = convert_dflash(write_dflash_head(tmp_path / f"head{bits}", dspark_config()), folder, bits)
        assert (layer.bits, layer.taps, layer.windows, layer.markov_rank) == (bits, (1, 2), (0, 0), 48)
    assert DFLASH_SIDECAR.tensors in dict(verify(folder, _native.crc32c).files)
    plans = {name: ondevice.inspect(folder, speculation=name) for name in ("off", "lookup", "dflash")}
    assert plans["dflash"].draft_bytes > plans["lookup"].draft_bytes + 300_000
    with pytest.raises(UnsupportedModelError, match=r"no dflash layer; `ondevice convert HEADS --draft-for"):
        load(target, speculation="dflash")


Change = Callable[[dict[str, Any]], None]


def tensor(name: str, values: Any) -> Change:
    return lambda tensors: tensors.update({name: values})


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": dflash_config()["dflash_config"] | changes}


def same(tensors: dict[str, Any]) -> None:
    """Nothing is changed."""


NAN = np.full((64, 192), np.nan, np.float16)
HOSTILE: list[tuple[dict[str, Any], Change, type[OndeviceError], str]] = [
    ({"hidden_size": 128}, same, CheckpointError, "of 272 tokens and width 64, but"),
    ({"vocab_size": 300}, same, CheckpointError, "vocabulary of 300 tokens"),
    ({"num_target_layers": 36}, same, CheckpointError, "a model of 36 layers, and this one has 3"),
    (nested(target_layer_ids=[0, 2]), same, CheckpointError, r"\[0.0, 2.0\]; .* from -1 to 1"),
    (nested(target_layer_ids=[]), same, CheckpointError, "target_layer_ids is"),
    (nested(target_layer_ids=[0.5]), same, CheckpointError, "target_layer_ids is"),
    (nested(mask_token_id=272), same, CheckpointError, "mask is 272"),
    (nested(mask_token_id=None), same, CheckpointError, "no mask_token_id"),
    ({"dflash_config": [1]}, same, CheckpointError, "dflash_config is"),
    ({"block_size": 1}, same, CheckpointError, "block_size is 1; it must be from 2 to 64"),
    ({"block_size": 1 << 40}, same, CheckpointError, "block_size is 1099511627776"),
    ({"num_hidden_layers": 3}, same, CheckpointError, "num_hidden_layers is 3, and layer_types has 2"),
    ({"num_hidden_layers": 1 << 40, "layer_types": None}, same, CheckpointError, "num_hidden_layers is 1099"),
    ({"layer_types": ["linear_attention"] * 2}, same, UnsupportedModelError, "linear_attention, which isn't"),
    ({"layer_types": ["sliding_attention"] * 2}, same, CheckpointError, "sliding_window is missing"),
    ({"layer_types": None, "use_sliding_window": True}, same, UnsupportedModelError, "use_sliding_window"),
    ({"attention_bias": True}, same, UnsupportedModelError, "attention_bias = True"),
    (nested(causal=True), same, UnsupportedModelError, "causal is True"),
    ({"markov_rank": 8}, same, UnsupportedModelError, "markov_rank is 8"),
    (nested(projector_type="domino"), same, UnsupportedModelError, "projector_type = 'domino'"),
    ({"architectures": ["DFlash2DraftModel"]}, same, UnsupportedModelError, "DFlash2DraftModel; .* DSpark"),
    ({"architectures": ["Gemma4DSparkModel"]}, same, UnsupportedModelError, "config.json names Gemma4DSpark"),
    ({"speculators_model_type": "dflash"}, same, UnsupportedModelError, "as the authors of DFlash"),
    ({}, lambda it: it.pop("fc.weight"), CheckpointError, "1 tensors of a DFlash or DSpark head are missing"),
    ({}, tensor("fc.weight", np.zeros((64, 64), np.float16)), CheckpointError, "fc.weight has shape"),
    ({}, tensor("fc.weight", NAN), CheckpointError, "fc.0"),
    ({}, tensor("norm.weight", np.full(64, np.inf, np.float16)), CheckpointError, "norm.weight holds NaN"),
    ({}, tensor("extra", np.zeros(3, np.float16)), UnsupportedModelError, "no part of a DFlash or DSpark"),
    ({}, tensor("model.norm.weight", np.zeros(64, np.float16)), CheckpointError, "twice under two names"),
]


@pytest.mark.parametrize(("options", "spoil", "error", "message"), HOSTILE)
def test_hostile_heads_are_refused_by_name(
    target: Path,
    tmp_path: Path,
    options: dict[str, Any],
    spoil: Change,
    error: type[OndeviceError],
    message: str,
) -> None:
    """And the bundle stays as it was."""
    tensors: dict[str, Any] = dflash_tensors(dflash_config())
    spoil(tensors)
    head = write_dflash_head(tmp_path / "head", dflash_config(**options), tensors)
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(error, match=message):
        convert_dflash(head, target)
    assert sorted(path.name for path in target.iterdir()) == before


def test_models_that_scale_embeddings_are_refused(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "head_dim": 16}
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", **gemma)
    folder = convert_bundle(checkpoint, tmp_path / "bundle")
    with pytest.raises(UnsupportedModelError, match="multiplies its embeddings by 8"):
        convert_dflash(write_dflash_head(tmp_path / "head", dflash_config()), folder)


def test_the_command_tells_heads_apart(target: Path, tmp_path: Path, ondevice: Run) -> None:
    folder = copy_files(target, tmp_path / "bundle")
    for name, config in (("dflash", dflash_config()), ("dspark", dspark_config(mtp_num_hidden_layers=1))):
        found = ondevice("convert", write_dflash_head(tmp_path / name, config), "--draft-for", folder)
        if name == "dflash":
            assert found.code == 0, found.err
            assert "--speculation dflash drafts with it" in found.err
            seen = ondevice("inspect", folder).out
            assert "dflash: 2 layers of 96 neurons each that draft 5 tokens at once, at 8 bits" in seen
        else:
            assert "mtp_num_hidden_layers = 1" in found.err
    head = write_dflash_head(tmp_path / "domino", dflash_config(architectures=["DominoDraftModel"]))
    found = ondevice("convert", head, "--draft-for", folder)
    assert found.code == 3
    assert "config.json names DominoDraftModel; layers that draft blocks are read of" in found.err
