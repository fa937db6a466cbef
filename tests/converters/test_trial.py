"""What `convert` makes can say something: its tokenizer spells, its logits are finite and differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.api import load
from ondevice.bundle.reader import Bundle
from ondevice.bundle.writer import _FileSink
from ondevice.converters import trial, trial_layer
from ondevice.converters.convert import convert
from ondevice.converters.trial import trial_logits
from ondevice.errors import CheckpointError, FlashReadError
from ondevice.tokenizer.base import byte_letters
from tests.support.bundles import write_chat_checkpoint
from tests.support.models import save_safetensors, write_checkpoint
from tests.support.small_tokenizers import added, small_json, train_sentencepiece

Tensors = dict[str, NDArray[Any]]
TOKENS = [3, 200, 17, 5]


def with_tensors(folder: Path, change: Callable[[Tensors], None]) -> Path:
    source = write_checkpoint(folder, num_hidden_layers=2)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_safetensors(source / "model.safetensors", tensors)
    return source


def family_checkpoint(folder: Path, family: str) -> Path:
    from tests.support.families import CASES, write_model

    write_model(folder, *CASES[family])
    return folder


@pytest.mark.fast("*-q4", "options0-f16")
@pytest.mark.parametrize("quant", ["q4", "f16"])
@pytest.mark.parametrize("options", [
    {}, {"family": "qwen3"}, {"family": "qwen2", "hidden_act": "relu"},
    {"family": "mistral", "sliding_window": 2}, {"tie_word_embeddings": True},
])  # fmt: skip
def test_a_trial_gives_the_loaded_models_logits(
    tmp_path: Path, options: dict[str, Any], quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer at a time, and the neurons and the head in pieces: to the bit."""
    monkeypatch.setattr(trial_layer, "PIECE_BYTES", 1 << 12)
    bundle = convert(write_checkpoint(tmp_path / "source", **options), tmp_path / "b", quant)
    found = trial_logits(Bundle.open(bundle), TOKENS)
    with load(bundle, sparsity="dense") as model:
        assert found.tobytes() == model.logits(TOKENS).tobytes()


FAMILIES = ["gemma3n", "gemma4 e", "gemma4 moe with inputs", "olmoe", "glm4 moe", "qwen2 moe dense between"]
"""Copies of the residual, cutoffs, shared keys, and experts alone and beside others."""


@pytest.mark.fast("glm4 moe", "gemma4 e")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_gives_the_logits_of_models_of_other_blocks(tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers")
    bundle = convert(family_checkpoint(tmp_path / "source", family), tmp_path / "b", "q4")
    has_experts = Bundle.open(bundle).config.experts is not None
    with load(bundle, sparsity="auto" if has_experts else "dense") as model:
        tokens = trial.trial_tokens(Bundle.open(bundle).config)
        assert trial_logits(Bundle.open(bundle), tokens).tobytes() == model.logits(list(tokens)).tobytes()


@pytest.mark.fast("gemma4 e-change0-*", "olmoe-change1-*")
@pytest.mark.parametrize(("change", "match"), [
    (("norm.weight", 3e38), "what it computes is not finite"),
    (("norm.weight", 0.0), "every token is as likely as any other"),
])  # fmt: skip
@pytest.mark.parametrize("family", ["gemma4 e", "olmoe"])
def test_models_of_other_blocks_that_say_nothing_are_refused(
    tmp_path: Path, family: str, change: tuple[str, float], match: str
) -> None:
    pytest.importorskip("transformers")
    source = family_checkpoint(tmp_path / "source", family)
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(f"model.{change[0]}"):
            tensors[name][...] = change[1]
    save_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=match):
        convert(source, tmp_path / "b", "q4")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"num_hidden_layers": 1}])
def test_layers_that_are_tried_while_others_are_converted_compute_the_same(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_layer, "PIECE_BYTES", 1 << 16)
    states: list[NDArray[np.float32] | None] = []
    logits: list[NDArray[np.float32]] = []

    def recorded(bundle: Bundle, tokens: Any, x: Any = None) -> Any:
        states.append(x)
        logits.append(trial_logits(bundle, tokens, x))
        return logits[-1]

    monkeypatch.setattr(trial, "trial_logits", recorded)
    bundle = Bundle.open(convert(write_checkpoint(tmp_path / "source", **options), tmp_path / "b"))
    assert states[0] is not None
    again = trial_logits(bundle, trial.trial_tokens(bundle.config))
    assert logits[0].tobytes() == again.tobytes()


def test_a_relu_models_copies_of_gates_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its layers are tried when both copies are written."""
    source = write_checkpoint(tmp_path / "source", family="qwen2", hidden_act="relu")
    monkeypatch.setattr(trial.LayersTrial, "add", None)
    convert(source, tmp_path / "b")


@pytest.mark.parametrize("name", ["neurons-00000", "resident", "embedding"])
def test_what_was_written_wrongly_is_found(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trial of the layers, before the last is converted."""
    write = _FileSink.write

    def wrongly(sink: _FileSink, data: NDArray[np.uint8]) -> None:
        write(sink, data)
        if sink.path.name == f"{name}.safetensors" and sink.digest.nbytes > data.size > 512:
            os.pwrite(sink._file.fileno(), b"\xaa\x55", sink.digest.nbytes - data.size // 2)

    monkeypatch.setattr(_FileSink, "write", wrongly)
    with pytest.raises(FlashReadError, match=name):
        convert(write_checkpoint(tmp_path / "source", num_hidden_layers=3), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_the_disk_lost_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = trial.check_computes

    def damaged(bundle: Bundle, layers: trial.LayersTrial | None = None) -> None:
        assert layers is not None
        assert layers.states() is not None
        path = bundle.path / "neurons-00001.safetensors"
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
        opened(bundle, layers)

    monkeypatch.setattr("ondevice.converters.convert.check_computes", damaged)
    with pytest.raises(FlashReadError, match="neurons-00001"):
        convert(write_checkpoint(tmp_path / "source", num_hidden_layers=2), tmp_path / "b")


def absurd(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][...] = value

    return change


@pytest.mark.fast("False-*", "True-*isn*usable*")
@pytest.mark.parametrize(("change", "match"), [
    (absurd("model.norm.weight", 3e38), "isn't a usable model: what it computes is not finite"),
    (absurd("model.layers.1.input_layernorm.weight", 3e38), "not finite"),
    (absurd("model.layers.0.post_attention_layernorm.weight", 3e38), "not finite"),
    (absurd("model.norm.weight", 0.0), "every token is as likely as any other"),
    (absurd("lm_head.weight", 0.0), "every token is as likely as any other"),
    (absurd("model.norm.weight", np.nan), "model.norm.weight holds NaN or infinity"),
    (absurd("model.embed_tokens.weight", np.inf), "embed_tokens"),
])  # fmt: skip
@pytest.mark.parametrize("force", [False, True])
def test_what_says_nothing_is_refused_and_leaves_nothing(
    tmp_path: Path, change: Callable[[Tensors], None], match: str, force: bool
) -> None:
    source = with_tensors(tmp_path / "source", change)
    if force:
        convert(write_checkpoint(tmp_path / "other"), tmp_path / "b")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=match):
        convert(source, tmp_path / "b", force=force)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name != "b.partial")
    assert left == before
    if "usable" in match or "likely" in match:
        assert not (tmp_path / "b.partial").exists()


def test_damage_on_the_disk_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    bundle = convert(write_checkpoint(tmp_path / "source"), tmp_path / "b")
    trial.check_computes(Bundle.open(bundle))
    path = bundle / "neurons-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-900] ^= 1
    path.write_bytes(content)
    with pytest.raises(FlashReadError, match="neurons-00001"):
        trial.check_computes(Bundle.open(bundle))


def with_json(folder: Path, data: bytes) -> Path:
    source = write_chat_checkpoint(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (source / name).unlink(missing_ok=True)
    (source / "tokenizer.json").write_bytes(data)
    return source


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize("vocabulary", [
    {"hello": 0, "world": 1}, {"<0x>": 0}, {"\u0120\u0120": 0}, {},
])  # fmt: skip
def test_a_vocabulary_without_pieces_for_bytes_is_refused(tmp_path: Path, vocabulary: dict[str, int]) -> None:
    """Its long tokens can't be reached: nothing is left of any prompt."""
    data = small_json(
        pre_tokenizer=BYTE_LEVEL,
        model={"type": "BPE", "vocab": vocabulary, "merges": []},
        added_tokens=[added(len(vocabulary), "<end>")],
    )
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't spell a text.* remove it"):
        convert(with_json(tmp_path / "source", data), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.fast("ab")
@pytest.mark.parametrize("text", ["ab", "7", "\u0111"])
def test_a_vocabulary_of_few_letters_is_enough(tmp_path: Path, text: str) -> None:
    """Models of music or proteins have no more, and other scripts have other letters."""
    spelt = "".join(byte_letters()[byte] for byte in text.encode())
    vocabulary = {letter: token for token, letter in enumerate(spelt)} | {spelt: len(spelt)}
    merges = [list(spelt)] if len(spelt) == 2 else []
    data = small_json(pre_tokenizer=BYTE_LEVEL, model={"type": "BPE", "vocab": vocabulary, "merges": merges})
    with load(convert(with_json(tmp_path / "source", data), tmp_path / "b")) as model:
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_a_sentencepiece_model_is_enough(tmp_path: Path) -> None:
    source = write_chat_checkpoint(tmp_path / "source", vocab_size=400)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink(missing_ok=True)
    (source / "tokenizer.model").write_bytes(train_sentencepiece())
    bundle = Bundle.open(convert(source, tmp_path / "b"))
    assert bundle.manifest.tokenizer.kind == "sentencepiece"
