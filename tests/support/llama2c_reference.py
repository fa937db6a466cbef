"""llama2.c's files, tokenizer and arithmetic, written again from their description, as an oracle."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Vocabulary(NamedTuple):
    """Tokens of a llama2.c tokenizer file: their bytes and scores, by id."""

    pieces: list[bytes]
    scores: list[float]


def read_vocabulary(path: Path, size: int) -> Vocabulary:
    data = path.read_bytes()
    pieces, scores, offset = [], [], 4
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, offset)
        pieces.append(data[offset + 8 : offset + 8 + length])
        scores.append(score)
        offset += 8 + length
    return Vocabulary(pieces, scores)


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    longest = max(len(piece) for piece in vocabulary.pieces)
    records = zip(vocabulary.scores, vocabulary.pieces, strict=True)
    body = b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in records)
    path.write_bytes(struct.pack("<i", longest) + body)


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    """BOS, a space, each character (or its bytes); then the best pair merges, the leftmost of equals."""
    ids = {piece: token for token, piece in reversed(list(enumerate(vocabulary.pieces)))}
    tokens = [1] + ([ids[b" "]] if text else [])
    for character in text:
        encoded = character.encode()
        tokens += [ids[encoded]] if encoded in ids else [byte + 3 for byte in encoded]
    while True:
        merged = [ids.get(vocabulary.pieces[a] + vocabulary.pieces[b], -1) for a, b in pairwise(tokens)]
        scores = [vocabulary.scores[token] if token >= 0 else -1e10 for token in merged]
        if not scores or max(scores) <= -1e10:
            return tokens
        best = int(np.argmax(scores))
        tokens[best : best + 2] = [merged[best]]


class Shape(NamedTuple):
    """The header of a checkpoint, in its order."""

    dim: int = 24
    hidden_dim: int = 40
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 300
    context: int = 32


def sections(shape: Shape, tied: bool) -> dict[str, tuple[int, ...]]:
    """Arrays of a checkpoint file in order; `freqs` are rotary tables that nothing needs."""
    head = shape.dim // shape.heads
    n, d, h, kv = shape.layers, shape.dim, shape.hidden_dim, shape.kv_heads * head
    found: dict[str, tuple[int, ...]] = {
        "embedding": (shape.vocab, d), "attention_norm": (n, d), "wq": (n, d, d), "wk": (n, kv, d),
        "wv": (n, kv, d), "wo": (n, d, d), "ffn_norm": (n, d), "w1": (n, h, d), "w2": (n, d, h),
        "w3": (n, h, d), "final_norm": (d,), "freqs": (2, shape.context, head // 2),
    }  # fmt: skip
    return found if tied else found | {"head": (shape.vocab, d)}


def write_checkpoint(path: Path, shape: Shape, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights in the legacy layout; returns them by section."""
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.standard_normal(size, dtype=np.float32) / np.float32(np.sqrt(size[-1])) + ("norm" in name)
        for name, size in sections(shape, tied).items()
    }
    header = struct.pack("<7i", *shape._replace(vocab=shape.vocab if tied else -shape.vocab))
    path.write_bytes(header + b"".join(values.tobytes() for values in weights.values()))
    return weights


def forward(shape: Shape, weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits (T, V) in float64, with rotary embedding over neighbouring pairs, as llama2.c computes them."""
    head, group = shape.dim // shape.heads, shape.heads // shape.kv_heads
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    positions = np.arange(len(tokens))
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, head, 2) / head)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    x = w["embedding"][tokens]
    for i in range(shape.layers):
        a = norm(x, w["attention_norm"][i])
        q = rotate((a @ w["wq"][i].T).reshape(len(tokens), shape.heads, head))
        k = rotate((a @ w["wk"][i].T).reshape(len(tokens), shape.kv_heads, head)).repeat(group, 1)
        v = (a @ w["wv"][i].T).reshape(len(tokens), shape.kv_heads, head).repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head)
        scores[:, positions[:, None] < positions] = -np.inf
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", probabilities, v).reshape(len(tokens), -1) @ w["wo"][i].T
        a = norm(x, w["ffn_norm"][i])
        gate = a @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (a @ w["w3"][i].T)) @ w["w2"][i].T
    return np.asarray(norm(x, w["final_norm"]) @ w.get("head", w["embedding"]).T)
