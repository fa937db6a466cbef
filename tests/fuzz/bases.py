"""The sound models that are spoilt: tiny, random, of all kinds of files, made once into a folder."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ondevice.api import load, write_slice
from ondevice.bundle.reader import Bundle
from ondevice.converters.checkpoints.byte_pair_table import byte_pair_table
from ondevice.converters.checkpoints.piece_table import piece_table
from ondevice.converters.draft_layers.dflash import convert_dflash
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.model_config import ExpertsSpec, LatentSpec, cut_places
from ondevice.tokenizer.tokenizer_file import read_tokenizer_file
from ondevice.training import train_predictors
from tests.support.bundles import convert_bundle, copy_files, made_up_pieces, write_byte_tokenizer
from tests.support.cached_texts import said
from tests.support.dflash_heads import dflash_config, dspark_config, write_dflash_head
from tests.support.eagle_heads import (
    add_mtp_layer,
    add_random_mtp_layer,
    head_config,
    head_tensors,
    write_eagle_head,
)
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, add_sentencepiece, write_gguf
from tests.support.made_up_streams import add_streams
from tests.support.mlx_folders import MXFP4, Scheme, write_mlx_folder
from tests.support.models import LINEAR_ROPE, LLAMA3_ROPE, write_checkpoint
from tests.support.small_tokenizers import small_json, train_sentencepiece
from tests.support.widths import write_uneven_checkpoint

VOCAB = 384
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# A row of the embedding for every id, a small context, two layers: some 40 ms from folder to text.
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2, "intermediate_size": 160, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "relu": {"hidden_act": "relu"},
    "silu": {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_scaling": LINEAR_ROPE},
    "qwen3": {
        "family": "qwen3", "hidden_act": "relu2", "attention_bias": True, "rope_scaling": LLAMA3_ROPE,
        "shards": 2, "dtype": "BF16",
    },
    "mistral": {"family": "mistral", "sliding_window": 7, "hidden_act": "gelu", "dtype": "F16"},
}  # fmt: skip
UNEVEN = {"hidden_act": "fatrelu", "hidden_act_param": 0.1}
"""Options of a bundle whose layers have different numbers of neurons."""
QUANTS = {"relu": "q4", "silu": "q8", "qwen3": "f16"}
HEADS: dict[str, dict[str, Any]] = {
    "reduced": {},
    "embeddings": {
        "draft_vocab_size": VOCAB, "attention_bias": True, "norm_before_residual": True, "head_dim": 24,
        "embeddings": True,
    },
    "nested": {"num_key_value_heads": 1, "rope_scaling": LLAMA3_ROPE},
}  # fmt: skip
"""Options of EAGLE-3 heads, each of which goes with every bundle."""
DRAFT_LAYERS: dict[str, tuple[str, int]] = {
    "relu": ("reduced", 8),
    "silu": ("embeddings", 4),
    "qwen3": ("nested", 16),
}
"""Bundles with a head, and the bits of its codes; they and `uneven` have a layer of their own too."""
BLOCK_HEADS: dict[str, dict[str, Any]] = {
    "relu": dspark_config(vocab_size=VOCAB, num_target_layers=2, target_layer_ids=[-1, 0]),
    "qwen3": dflash_config(
        vocab_size=VOCAB, num_target_layers=2, layer_types=["sliding_attention", "full_attention"],
        sliding_window=8, dflash_config={"mask_token_id": 3, "target_layer_ids": [0]},
    ),
}  # fmt: skip
"""Heads of bundles that draft blocks."""
LAYERS_AHEAD: dict[str, dict[str, Any]] = {
    "relu": {
        "neurons": 40, "output_gates": True, "states_normed": True,
        "experts": ExpertsSpec(5, 2, 24, scoring="sigmoid", choice_bias=True, shared_gate=True),
    },
    "silu": {"neurons": 48, "latent": LatentSpec(32, 8, 16, 16, query_rank=32), "scale": 0.2, "bits": 8},
}  # fmt: skip
"""Facts of layers of their own with experts and with latent attention; those of other bundles are dense."""
CACHED = ("relu", "qwen3")
"""Bundles that there are prompt caches of, with CACHED_PROMPT computed in every one of CACHED_WAYS."""
CACHED_PROMPT = [(7 * at * at + 3 * at) % 250 + 3 for at in range(150)]
CACHED_WAYS: tuple[dict[str, Any], ...] = (
    {"backend": "cpu"},
    {"backend": "cpu", "kv_bits": 8},
    {"backend": "reference", "prefill_chunk": 32},
)


@dataclass(frozen=True)
class Bases:
    """Folders of sound models, and bytes of sound tokenizers by kind."""

    folder: Path

    @property
    def bundles(self) -> list[Path]:
        return sorted((self.folder / "bundles").iterdir())

    @property
    def slices(self) -> list[Path]:
        """Folders of a model's two slices, `rank-0` and `rank-1`."""
        return sorted((self.folder / "slices").iterdir())

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").iterdir())

    @property
    def heads(self) -> list[Path]:
        """Folders of EAGLE-3, DFlash and DSpark heads."""
        return sorted((self.folder / "heads").iterdir())

    @property
    def checkpoints_ahead(self) -> list[Path]:
        """Folders with a `source`, which has a layer that predicts one token more, and its `bundle`."""
        return sorted((self.folder / "ahead").glob("*"))

    def tokenizers(self, kind: str) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.folder / kind).iterdir())]


def make_bases(folder: Path) -> Bases:
    """What is in `folder`, made there if it isn't whole yet."""
    if not (folder / "whole").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_tokenizers(folder)
        _write_checkpoints(folder)
        _write_heads(folder)
        _write_bundles(folder)
        for name in (*QUANTS, "uneven"):
            write_slices(folder / "bundles" / name, folder / "slices" / name)
        _write_caches(folder)
        (folder / "whole").touch()
    return Bases(folder)


def _write_tokenizers(folder: Path) -> None:
    for kind in ("sentencepiece", "tokenizers", "byte_pairs"):
        (folder / kind).mkdir()
    plain, normal = (
        train_sentencepiece(user_defined_symbols=["<turn>"], normalization_rule_name=rule)
        for rule in ("identity", "nmt_nfkc")
    )
    (folder / "sentencepiece" / "plain").write_bytes(plain)
    (folder / "sentencepiece" / "nfkc").write_bytes(normal)
    (folder / "tokenizers" / "small").write_bytes(small_json())
    (folder / "tokenizers" / "pattern").write_text(_pattern_tokenizer().to_str())
    (folder / "tokenizers" / "spaces").write_text(_spaces_tokenizer().to_str())
    write_byte_tokenizer(folder)
    os.replace(folder / "tokenizer.json", folder / "tokenizers" / "bytes")
    for name in ("pattern", "bytes"):
        table = byte_pair_table(read_tokenizer_file((folder / "tokenizers" / name).read_bytes()))
        assert table is not None
        (folder / "byte_pairs" / name).write_bytes(table)
    pieces = train_sentencepiece(user_defined_symbols=["<turn>"], remove_extra_whitespaces=False)
    table = piece_table(pieces)
    assert table is not None
    (folder / "byte_pairs" / "pieces").write_bytes(table)


def _pattern_tokenizer() -> Tokenizer:
    """As Llama 3's: a pattern cuts, then bytes are merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "the", "in", "Ġ" + "a"]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *words])}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    return tokenizer


def _spaces_tokenizer() -> Tokenizer:
    """As Llama 2's: spaces are a letter, bytes are a fallback."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlortw",
        "▁a",
        "he",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def _write_checkpoints(folder: Path) -> None:
    root = folder / "checkpoints"
    for name, options in CHECKPOINTS.items():
        checkpoint = write_checkpoint(root / name, **(SHAPE | options))
        if name in ("silu", "mistral"):
            shutil.copy(folder / "sentencepiece" / "plain", checkpoint / "tokenizer.model")
            settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
            (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
        else:
            write_byte_tokenizer(checkpoint)
        if name == "qwen3":
            shutil.copy(folder / "tokenizers" / "pattern", checkpoint / "tokenizer.json")
        recommended = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [2, 3]}
        (checkpoint / "generation_config.json").write_text(json.dumps(recommended))
    schemes = {
        "gate_proj": MXFP4,
        "o_proj": None,
        "lm_head": Scheme(8, 32, "BF16"),
        "up_proj": Scheme(3, 128),
    }
    write_mlx_folder(
        root / "mlx",
        exceptions=lambda module: schemes.get(module.rpartition(".")[2], Scheme()),
        **(SHAPE | {"intermediate_size": 128}),
    )
    write_byte_tokenizer(root / "mlx")
    _write_llama2c(root / "llama2c")
    if find_spec("gguf") is not None:
        _write_gguf(root)


def _write_gguf(root: Path) -> None:
    """Models with both kinds of tokenizer in their metadata, of small and of large blocks."""
    pieces = {"vocab_size": 300, "tie_word_embeddings": True, "rope_scaling": LINEAR_ROPE}
    wide = {"vocab_size": BYTE_LEVEL_TOKENS, "hidden_size": 256, "num_hidden_layers": 1}
    cases: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "gguf": ("Q8_0", add_byte_level, {"vocab_size": BYTE_LEVEL_TOKENS}),
        "gguf-sentencepiece": ("Q5_1", add_sentencepiece, pieces),
        "gguf-k": ("Q4_K", add_byte_level, {"family": "qwen3", "head_dim": 64} | wide),
    }
    for name, (kind, change, options) in cases.items():
        (root / name).mkdir()
        source = write_checkpoint(root / name / "source", **(SHAPE | options))
        write_gguf(root / name / "model.gguf", source, kind, change=change)
        shutil.rmtree(source)


def _write_llama2c(folder: Path) -> None:
    """Seven integers and float32 weights, as llama2.c's first format has them."""
    width, inner, layers, heads, vocabulary, context = 48, 96, 2, 4, 64, 64
    rng = np.random.default_rng(3)
    head = np.array([width, inner, layers, heads, heads, vocabulary, context], dtype="<i4")
    sizes = [vocabulary * width, layers * width, *[layers * width * width] * 4, layers * width]
    sizes += [*[layers * width * inner] * 3, width, context * (width // heads)]
    folder.mkdir(parents=True)
    values = [(0.2 * rng.standard_normal(size)).astype("<f4") for size in sizes]
    (folder / "model.bin").write_bytes(b"".join(part.tobytes() for part in (head, *values)))


def write_slices(bundle: Path, folder: Path) -> None:
    """The two halves of a model, or what comes nearest to them, as slices in `folder`."""
    whole = Bundle.open(bundle)
    places = cut_places(whole.config)
    edges = (0, places[len(places) // 2], whole.config.num_layers)
    for rank, ends in enumerate(pairwise(edges)):
        write_slice(whole.slice(*ends), folder / f"rank-{rank}")


def _write_caches(folder: Path) -> None:
    for name in CACHED:
        for way in CACHED_WAYS:
            with load(folder / "bundles" / name, prompt_cache=folder / "caches" / name, **way) as model:
                said(model, CACHED_PROMPT, 1)


def _write_heads(folder: Path) -> None:
    """As their authors write them, and in the form of `speculators`, in two files."""
    common = {"vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    for name, options in HEADS.items():
        write_eagle_head(folder / "heads" / name, **common | options)
    for name, config in BLOCK_HEADS.items():
        write_dflash_head(folder / "heads" / name, config)
    nested = folder / "heads" / "nested"
    config = head_config(**common | HEADS["nested"])
    del config["eagle_aux_hidden_state_layer_ids"]
    outer = {"speculators_model_type": "eagle3", "draft_vocab_size": config.pop("draft_vocab_size")}
    left = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "use_aux_hidden_state": True}
    document = outer | {"transformer_layer_config": config, "eagle_config": left}
    (nested / "config.json").write_text(json.dumps(document))
    (nested / "model.safetensors").unlink()
    tensors = head_tensors(head_config(**common | HEADS["nested"]))
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, its in files.items():
        save_file({it: tensors[it] for it in its}, nested / file)
    places = {it: file for file, its in files.items() for it in its}
    (nested / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _write_bundles(folder: Path) -> None:
    (folder / "bundles").mkdir()
    for name, quant in QUANTS.items():
        made = convert_bundle(folder / "checkpoints" / name, folder / "made" / name, quant)
        target = folder / "bundles" / name
        if name == "relu":
            train_predictors(made, pieces=made_up_pieces(), output=target)
        else:
            copy_files(made, target)
        if name != "qwen3":
            add_streams(target)
        head, bits = DRAFT_LAYERS[name]
        convert_eagle(folder / "heads" / head, target, bits)
        if name in BLOCK_HEADS:
            convert_dflash(folder / "heads" / name, target, bits)
    with pytest.MonkeyPatch.context() as patch:
        options = {name: value for name, value in SHAPE.items() if name != "intermediate_size"}
        source = write_uneven_checkpoint(patch, folder / "made" / "source", (160, 70), **options | UNEVEN)
        convert_bundle(source, folder / "bundles" / "uneven", "q4")
    for name, facts in LAYERS_AHEAD.items():
        add_random_mtp_layer(folder / "bundles" / name, **facts)
    add_mtp_layer(folder / "bundles" / "qwen3", 96)
    add_mtp_layer(folder / "bundles" / "uneven", 80, normed=True, gates=True)
    shutil.rmtree(folder / "made")
