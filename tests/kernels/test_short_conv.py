"""The gated short convolution against float64, byte for byte between targets, threads and passes."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.token_tree import TokenTree
from ondevice.kernels import _native
from tests.kernels.test_kernels import RUNNERS, TARGETS, normal, on_every_target

SIZES = [(1, 2), (16, 3), (100, 3), (160, 5), (2048, 3)]
"""Channels and taps."""


def case(size: tuple[int, int], tokens: int) -> tuple[Float32, Float32, Float32]:
    """Projections, the convolution's weights and the state before them."""
    channels, taps = size
    state = normal((taps - 1) * channels, seed=3)
    return normal(tokens, 3 * channels, seed=1), normal(taps, channels, seed=2), state


def run(
    runner: _native.Runner, projected: Float32, weights: Float32, state: Float32
) -> tuple[Float32, Float32]:
    out, after = np.empty((len(projected), weights.shape[1]), np.float32), np.full_like(state, np.nan)
    _native.short_conv(runner, projected.copy(), weights, state, after, out)
    return out, after


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_the_short_convolution_matches_float64(size: tuple[int, int], tokens: int) -> None:
    projected, weights, state = case(size, tokens)
    channels, taps = size
    b, c, x = (part.astype(np.float64) for part in np.split(projected, 3, axis=1))
    inputs = np.concatenate([state.reshape(-1, channels), b * x])
    expected = c * sum(weights[tap] * inputs[tap : tap + tokens] for tap in range(taps))

    def both(runner: _native.Runner) -> Float32:
        return np.concatenate([part.reshape(-1) for part in run(runner, projected, weights, state)])

    found = on_every_target(both)
    np.testing.assert_allclose(found[: expected.size].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[expected.size :], inputs[tokens:].reshape(-1), rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_passes_of_any_size_give_the_same_bits(size: tuple[int, int], step: int) -> None:
    projected, weights, state = case(size, 130)
    for runner in (RUNNERS[TARGETS[0], 2], RUNNERS[TARGETS[-1], 1]):
        whole, end = run(runner, projected, weights, state)
        found, held = [], state
        for start in range(0, 130, step):
            out, held = run(runner, projected[start : start + step], weights, held)
            found.append(out)
        assert np.concatenate(found).tobytes() == whole.tobytes()
        assert held.tobytes() == end.tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("parents", [[-1, 0, 1, 1, 0, 3, 4, 4, 7, 5], list(range(-1, 15)), [-1, -1, 1, 0, 1]])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_token_of_a_tree_is_that_of_its_path(
    size: tuple[int, int], parents: list[int], outputs: int
) -> None:
    count, (channels, _) = len(parents), size
    projected, weights, state = case(size, count)
    products, known = projected[:, :channels] * projected[:, 2 * channels :], np.array(parents, np.int32)

    def ahead(runner: _native.Runner) -> Float32:
        inputs, out = products.copy(), np.empty((outputs, channels), np.float32)
        inputs[count - outputs :] = np.nan
        _native.short_conv_ahead(runner, inputs, known, projected[count - outputs :], weights, state, out)
        assert inputs.tobytes() == products.tobytes()
        return out

    found = on_every_target(ahead)
    for node in range(count - outputs, count):
        alone, _ = run(RUNNERS[TARGETS[0], 1], projected[TokenTree(parents).path(node)], weights, state)
        assert found[node - count].tobytes() == alone[-1].tobytes()


def test_what_would_leave_its_arrays_is_refused() -> None:
    runner, (projected, weights, state) = RUNNERS[TARGETS[0], 1], case((16, 3), 2)
    out = np.empty((2, 16), np.float32)
    with pytest.raises(ValueError, match="other memory"):
        _native.short_conv(runner, projected, weights, state, state, out)
    with pytest.raises(ValueError, match="states are"):
        _native.short_conv(runner, projected, weights, state[:-1], state[:-1].copy(), out)
    with pytest.raises(ValueError, match="3 \\* channels"):
        _native.short_conv(runner, projected[:, :47].copy(), weights, state, state.copy(), out)
    with pytest.raises(ValueError, match="out is"):
        _native.short_conv(runner, projected, weights, state, state.copy(), out[:1])
    inputs = np.empty((2, 16), np.float32)
    for parents in ([-1, 1], [-1, -2], [-1]):
        known = np.array(parents, np.int32)
        with pytest.raises(ValueError, match="parent"):
            _native.short_conv_ahead(runner, inputs, known, projected, weights, state, out)
    with pytest.raises(ValueError, match="last tokens"):
        _native.short_conv_ahead(runner, inputs[:1], known, projected, weights, state, out)
