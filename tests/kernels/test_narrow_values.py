"""Values narrower than keys: the bits of attention over values that zeros make as wide as keys."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.kernels import _native
from tests.kernels.test_kernels import on_every_target
from tests.kernels.test_latent_kernels import PASSES, TOKENS
from tests.kernels.test_wide_kernels import SCALAR, normal

SHAPES = [(1, 1, 8, 2), (4, 2, 24, 16), (6, 1, 192, 128), (5, 5, 40, 38), (8, 4, 96, 80)]
"""Query heads, key heads, width of a key, width of a value."""


def attended(
    runner: _native.Runner, shape: tuple[int, int, int, int], bits: int, padded: bool
) -> tuple[Float32, Float32]:
    """What each token attends to, (T, heads, value width), in texts and in a tree with a window, sinks and a
    place that moves; and the memory of keys and values. padded: whether values are as wide as keys.
    """
    heads, keys, width, narrow = shape
    value = width if padded else narrow
    angle, sinks, found = normal(TOKENS, width // 2, seed=1), normal(heads, seed=4), []
    values = np.zeros((TOKENS, keys, value), np.float32)
    values[:, :, :narrow] = normal(TOKENS, keys, narrow, seed=2)
    qkv = np.concatenate([normal(TOKENS, (heads + keys) * width), values.reshape(TOKENS, -1)], axis=1)
    of_head = (width + value) * bits // 8 + (8 if bits == 8 else 0)
    memory = np.zeros((2, 64 * keys * of_head), dtype=np.uint8)
    blocks = np.array([block.ctypes.data for block in memory], dtype=np.uint64)
    own = 0 if padded else narrow
    for first, last, tree in PASSES:
        out = np.full((last - first, heads * value), np.nan, dtype=np.float32)
        turn = np.cos(angle[first:last]), np.sin(angle[first:last])
        given, places = qkv[first:last].copy(), (blocks, 0, bits, heads, keys)
        rules = (first, 40, 0.2, 0.0, *turn, None, tree, out, True, sinks, 0, own)
        _native.attend(runner, given, *places, *rules)
        _native.kv_move(runner, blocks, 0, keys, width, bits, last - 1, first, 0, own)
        found.append(out.reshape(last - first, heads, value)[:, :, :narrow])
    return np.concatenate(found), memory


@pytest.mark.fast("shape[013]-*", "shape2-8", "shape4-16")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_padded_values(shape: tuple[int, int, int, int], bits: int) -> None:
    found = on_every_target(lambda runner: attended(runner, shape, bits, False)[0])
    expected, padded = attended(SCALAR, shape, bits, True)
    assert np.isfinite(expected).all()
    assert found.tobytes() == expected.tobytes()
    # Its memory is smaller by what pads values.
    _, _, width, narrow = shape
    stored = attended(SCALAR, shape, bits, False)[1]
    assert padded.nbytes - stored.nbytes == 2 * 64 * shape[1] * (width - narrow) * bits // 8


@pytest.mark.parametrize(
    ("value_dim", "message"), [(-1, "queries alone"), (26, "queries alone"), (34, "out is")]
)
def test_other_widths_are_refused(value_dim: int, message: str) -> None:
    """A row of 4 heads of 24, of 2 keys and of their values, 16 wide each."""
    qkv, out = np.zeros((1, 6 * 24 + 2 * 16), np.float32), np.zeros((1, 64), np.float32)
    turn = np.zeros((2, 1, 12), np.float32)
    memory = np.zeros(64 * 2 * 40 * 2, np.uint8)
    blocks = np.array([memory.ctypes.data], np.uint64)
    given = (blocks, 0, 16, 4, 2, 0, 0, 0.2, 0.0, *turn, None, None, out, True, None, 0)
    with pytest.raises(ValueError, match=message):
        _native.attend(SCALAR, qkv, *given, value_dim)
