"""Small bundles to run: random weights, a byte tokenizer, a chat template, all made here and offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ondevice.bundle.reader import Bundle
from tests.support.models import write_checkpoint

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB_SIZE = 272
CONTEXT = 256
INFILL_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
"""Marks of a model that writes what belongs between two texts; their ids begin at FIRST_MARK."""
FIRST_MARK = 260
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_byte_tokenizer(folder: Path, template: str | None = TEMPLATE, marks: Sequence[str] = ()) -> None:
    """`tokenizer.json` with one token per byte (in ByteLevel's order), four special ones, and `marks`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>", *marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_chat_checkpoint(
    folder: Path, template: str = TEMPLATE, marks: Sequence[str] = (), **options: Any
) -> Path:
    """A Hugging Face folder with random weights, a tokenizer, a template and recommended sampling."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 3,
        "intermediate_size": 700,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    write_checkpoint(folder, **(shape | options))
    write_byte_tokenizer(folder, template, marks)
    recommended = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    return folder


def convert_bundle(checkpoint: Path, output: Path, quant: str = "q4") -> Path:
    """The checkpoint's bundle."""
    from ondevice.converters.convert import convert

    return convert(checkpoint, output, quant)


def copy_files(bundle: Path, folder: Path) -> Path:
    """A copy in the new folder `folder`, that a test may change."""
    return Path(shutil.copytree(bundle, folder))


def open_sound(folder: Path) -> Bundle:
    """The opened bundle. Raises BundleError for what is damaged of its additions."""
    bundle = Bundle.open(folder)
    for error in bundle.damaged.values():
        raise error
    return bundle


def made_up_pieces(count: int = 8) -> list[list[int]]:
    """Token ids to train on, of no meaning."""
    pieces: list[list[int]] = np.random.default_rng(5).integers(0, 250, (count, 128)).tolist()
    return pieces
