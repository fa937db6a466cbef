"""Kernels of latent attention: the bits of plain attention where keys' first dimensions are the values."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.token_tree import TokenTree
from ondevice.converters.architectures.common import score_scale
from ondevice.kernels import _native
from tests.backends.test_token_tree import PARENTS
from tests.kernels.test_kernels import on_every_target, packed
from tests.kernels.test_wide_kernels import SCALAR, normal

TREE = TokenTree(PARENTS)
PASSES = [(0, 1, None), (1, 70, None), (70, 72, None), (72, 72 + len(TREE), (TREE.parents, TREE.depths))]
TOKENS = PASSES[-1][1]


def rows(heads: int, latent: int, turning: int) -> tuple[Float32, Float32, Float32]:
    """What `attend` takes: (T, (heads + 1) * width), cosine and sine."""
    angle = normal(TOKENS, turning // 2, seed=1)
    return normal(TOKENS, (heads + 1) * (latent + turning)), np.cos(angle), np.sin(angle)


def attended(
    runner: _native.Runner, heads: int, latent: int, turning: int, bits: int
) -> tuple[Float32, Float32]:
    """What each token attends to, (T, heads * latent), and the memory of keys."""
    qkv, cos, sin = rows(heads, latent, turning)
    width, found = latent + turning, []
    memory = np.zeros((2, 64 * (width * bits // 8 + (8 if bits == 8 else 0))), dtype=np.uint8)
    blocks = np.array([block.ctypes.data for block in memory], dtype=np.uint64)
    for first, last, tree in PASSES:
        out = np.full((last - first, heads * latent), np.nan, dtype=np.float32)
        given, turn, shape = qkv[first:last].copy(), (cos[first:last], sin[first:last]), (0, bits, heads, 1)
        scale = score_scale(width)
        _native.attend(
            runner, given, blocks, *shape, first, 0, scale, 0.0, *turn, None, tree, out, latent=latent
        )
        found.append(out)
    return np.concatenate(found), memory


@pytest.mark.parametrize(("heads", "latent", "turning"), [(1, 16, 2), (6, 48, 8), (5, 64, 32), (40, 16, 6)])
def test_attention_is_that_of_keys_and_values_apart(heads: int, latent: int, turning: int) -> None:
    """At 16 bits, byte by byte, in a text and in a tree."""
    qkv, cos, sin = rows(heads, latent, turning)
    width, expected = latent + turning, []
    memory = np.zeros((2, 2 * 64 * width * 2), dtype=np.uint8)
    blocks = np.array([block.ctypes.data for block in memory], dtype=np.uint64)
    for first, last, tree in PASSES:
        parts = qkv[first:last].reshape(last - first, heads + 1, width).copy()
        turned = np.ascontiguousarray(parts[:, :, latent:])
        _native.testing.rope(SCALAR, turned, cos[first:last], sin[first:last])
        parts[:, :, latent:] = turned
        values = parts[:, heads:].copy()
        values[:, :, latent:] = 0
        out = np.full((last - first, heads * width), np.nan, dtype=np.float32)
        key, queries = np.ascontiguousarray(parts[:, heads:]), np.ascontiguousarray(parts[:, :heads])
        _native.testing.kv_write(SCALAR, blocks, 0, 16, first, key, values)
        _native.testing.attention(SCALAR, queries, blocks, 0, 16, 1, first, 0, tree, out)
        expected.append(out.reshape(last - first, heads, width)[:, :, :latent])
    found = on_every_target(lambda runner: attended(runner, heads, latent, turning, 16)[0])
    assert found.tobytes() == np.concatenate(expected).reshape(TOKENS, -1).tobytes()


@pytest.mark.parametrize(("heads", "latent", "turning"), [(2, 16, 2), (6, 48, 8), (5, 64, 32)])
def test_attention_at_8_bits_matches_float64(heads: int, latent: int, turning: int) -> None:
    """Latents and parts that turn have scales of their own: one doesn't coarsen the other."""
    found = on_every_target(lambda runner: attended(runner, heads, latent, turning, 8)[0])
    on_every_target(lambda runner: attended(runner, heads, latent, turning, 8)[1].view(np.float32))
    qkv, cos, sin = (part.astype(np.float64) for part in rows(heads, latent, turning))
    parts, half = qkv.reshape(TOKENS, heads + 1, -1), latent + turning // 2
    a, b = parts[:, :, latent:half].copy(), parts[:, :, half:].copy()
    cos, sin = cos[:, None], sin[:, None]
    parts[:, :, latent:half], parts[:, :, half:] = a * cos - b * sin, b * cos + a * sin
    keys = np.concatenate([rounded(parts[:, heads, :latent]), rounded(parts[:, heads, latent:])], axis=1)
    depths = np.concatenate([np.arange(72), 72 + TREE.depths])
    for query in range(TOKENS):
        seen = list(range(min(query + 1, 72))) + [72 + node for node in TREE.path(query - 72) if query >= 72]
        assert depths[seen[-1]] == len(seen) - 1
        scores = parts[query, :heads] @ keys[seen].T * (latent + turning) ** -0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights / weights.sum(axis=1, keepdims=True) @ keys[seen, :latent]
        assert np.abs(found[query].reshape(heads, latent) - expected).max() < 1e-4


def rounded(x: np.ndarray) -> np.ndarray:
    largest = np.abs(x).max(axis=1, keepdims=True)
    return np.rint(x * (127 / largest)) * (largest / 127)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_each_head_has_a_product_of_its_own(bits: int, tokens: int) -> None:
    heads, own, cols = 3, 32, 70
    weights, x = normal(heads * own, cols, seed=2), normal(heads, tokens, cols, seed=3)

    def run(runner: _native.Runner) -> Float32:
        out = np.full((tokens, heads * own), np.nan, dtype=np.float32)
        packed(runner, weights, bits)[0].forward_heads(runner, x, out)
        return out

    found = on_every_target(run)
    for head in range(heads):
        mine = slice(head * own, (head + 1) * own)
        out = np.full((tokens, own), np.nan, dtype=np.float32)
        packed(SCALAR, weights[mine], bits)[0].forward(SCALAR, x[head], None, out)
        assert found[:, mine].tobytes() == out.tobytes()
