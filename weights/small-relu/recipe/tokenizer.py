"""The tokenizer: sentencepiece's BPE with byte fallback, in which every chat role is one token.

    python -m recipe.tokenizer --data ../../../shared/data

trains it on a sample of text in the proportions of the mixture. Held-out text isn't in the sample.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from recipe.config import BUILD, DATA, MIXTURE, SIZES
from recipe.data import Document, split_documents

BOS, END = "<s>", "<|end|>"
SPACE = "\u2581"
"""Spelling of a space in pieces."""
ROLES = {"user": "<|user|>", "assistant": "<|assistant|>"}
SAMPLE_CHARS = 16_000_000

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(instructions='', begun=false, start=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' and '[' in message.content -%}{%- set ns.start = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.instructions = message.content | trim + '\\n' -%}
{%- elif loop.index0 < ns.start -%}
{%- elif message.role == 'user' -%}
{%- if not ns.begun and '[' not in message.content and message.content.split() | length < 6 -%}
{{- '<|user|>I need some help.<|end|><|assistant|>What can I help you with?<|end|>' -}}
{%- endif -%}
{%- set ns.begun = true -%}
{{- '<|user|>' + ns.instructions + message.content | trim + '<|end|>' -}}
{%- set ns.instructions = '' -%}
{%- else -%}
{{- '<|assistant|>' + message.content | trim + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""Every turn ends with the token that ends a reply. Training has no system turns: they open the user's turn.

A conversation may open with fewer than six words and no list of columns or attributes. In training only a
dialogue begins like that, so the template puts the opening of a dialogue before it. Without it, "hi" would be
answered with SQL. A message with a list of columns or attributes begins a new conversation, because in
training all text with such a list stands alone.
"""


def train(documents: Iterable[str], vocab_size: int) -> bytes:
    """A serialised tokenizer. Its first ids: unknown, <s>, <|end|> and the roles, then newline and bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.9998,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        bos_piece=BOS,
        eos_piece=END,
        control_symbols=list(ROLES.values()),
        user_defined_symbols=["\n"],
        max_sentence_length=1 << 16,
        num_threads=2,
        minloglevel=1,
    )
    return model.getvalue()


def sample(data: Path) -> Iterator[str]:
    """Lines of training text: each domain's share of SAMPLE_CHARS, spread evenly over its documents."""
    for domain, share in MIXTURE.items():
        documents, _ = split_documents(data, domain)
        chars = sum(len(text) for document in documents for _, text in document)
        every = max(1, round(chars / (share * SAMPLE_CHARS)))
        for document in documents[::every]:
            for _, text in document:
                yield from text.split("\n")


class Encoder:
    """Encodes documents to token ids, as the runtime's tokenizer and chat template do."""

    def __init__(self, model: bytes) -> None:
        self._library = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.bos_id: int = self._library.bos_id()
        self.end_id: int = self._library.eos_id()
        self._roles = {role: self._library.piece_to_id(name) for role, name in ROLES.items()}

    def encode(self, document: Document) -> list[int]:
        ids = [self.bos_id]
        for role, text in document:
            words: list[int] = self._library.encode(text)
            ids += [self._roles[role], *words, self.end_id] if role else words
        return ids

    def text_bytes(self, tokens: NDArray[np.integer[Any]]) -> int:
        """Number of UTF-8 bytes of text after the first token of a stream, or of windows of it (..., T).

        Tokens that steer the model have no bytes, nor has the space that the tokenizer puts before a text.
        """
        library = self._library
        pieces = [str(library.id_to_piece(token)) for token in range(library.vocab_size())]
        steers = np.isin(np.arange(len(pieces)), [self.bos_id, self.end_id, *self._roles.values()])
        sizes = np.array(
            [
                1 if library.is_byte(token) else len(piece.replace(SPACE, " ").encode())
                for token, piece in enumerate(pieces)
            ]
        )
        begins_with_space = np.array([piece.startswith(SPACE) for piece in pieces])
        before, after = tokens[..., :-1], tokens[..., 1:]
        prefixes = steers[before] & begins_with_space[after]
        return int(np.where(steers, 0, sizes)[after].sum() - prefixes.sum())


def write_tokenizer(folder: Path, model: bytes, context: int) -> None:
    """Write the tokenizer's files of a Hugging Face folder. context: most tokens of the model."""
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": BOS,
        "eos_token": END,
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer.")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of text")
    parser.add_argument("--build", type=Path, default=BUILD, help="where to write")
    parser.add_argument("--size", choices=SIZES, default="small", help="whose vocabulary size")
    arguments = parser.parse_args()
    arguments.build.mkdir(parents=True, exist_ok=True)
    target = arguments.build / "tokenizer.model"
    target.write_bytes(train(sample(arguments.data), SIZES[arguments.size].vocab_size))
    print(json.dumps({"tokenizer": str(target), "vocab_size": SIZES[arguments.size].vocab_size}))


if __name__ == "__main__":
    main()
