"""What `transformers` makes of a real model's GGUF file: float32 logits, and tokens of chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import SHARED_DATA

BYTES_PER_FILE_BYTE = 8
"""Memory that a float32 model takes while it is read from a file of 4 bits."""
ROWS = 64
"""Rows of logits that are widened to float64 at once."""


@dataclass(frozen=True)
class Divergence:
    """How far logits are from an oracle's: mean KL divergence, and the share of equal likeliest tokens."""

    nats: float
    top1: float


def divergence(oracle: np.ndarray, logits: np.ndarray) -> Divergence:
    """Mean over rows of KL(oracle || logits) and of equal likeliest tokens; both (T, V)."""
    nats, equal = 0.0, 0
    for start in range(0, len(oracle), ROWS):
        expected, given = (_log_softmax(rows[start : start + ROWS]) for rows in (oracle, logits))
        nats += float((np.exp(expected) * (expected - given)).sum())
        equal += int((expected.argmax(-1) == given.argmax(-1)).sum())
    return Divergence(nats / len(oracle), equal / len(oracle))


def perplexity(logits: np.ndarray, tokens: Sequence[int]) -> float:
    """Perplexity of tokens (T) by the logits (T, V) of all but the last."""
    rows = range(0, len(tokens) - 1, ROWS)
    total = 0.0
    for start in rows:
        following = list(tokens[start + 1 : start + 1 + ROWS])
        chances = _log_softmax(logits[start : start + len(following)])
        total -= float(chances[np.arange(len(following)), following].sum())
    return float(np.exp(total / (len(tokens) - 1)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def float32_logits(file: Path, tokens: Sequence[int]) -> np.ndarray:
    """Logits (T, V) of the values that a GGUF file's codes stand for. Skips without the memory for them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    needed, available = BYTES_PER_FILE_BYTE * file.stat().st_size, _available_bytes()
    if available is not None and available < needed:
        pytest.skip(
            f"{file.name} in float32 takes {needed >> 20} MiB, and {available >> 20} MiB are available"
        )
    with _read_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([list(tokens)])).logits[0].numpy()
    return logits


@cache
def chat_tokenizer(file: Path) -> Any:
    """The tokenizer of `transformers` for a GGUF file, with the file's chat template."""
    transformers = pytest.importorskip("transformers")
    with _read_once():
        return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def chat_prompt(file: Path, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens of a conversation up to where the model's reply begins, by `transformers`."""
    ids: list[int] = chat_tokenizer(file).apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


def wikitext() -> str:
    """The validation split of wikitext-2. Skips where it is absent."""
    file = SHARED_DATA / "corpus/wikitext2/valid.txt"
    if not file.is_file():
        pytest.skip("../shared/data/corpus/wikitext2 is absent: this test needs its text")
    return file.read_text(encoding="utf-8")


@contextmanager
def _read_once() -> Iterator[None]:
    """A GGUF file's keys are parsed once, not once for the configuration and once for the tensors.

    The map of tensor names is likewise made once, not once for each module of the model.
    """
    gguf = pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", _reader(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@cache
def _reader(kind: Any) -> Any:
    return cache(kind)


def _available_bytes() -> int | None:
    """Memory that processes can still have, where Linux tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
