"""The gated delta rule against float64, byte for byte between targets, threads and splits into passes."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.base import Float32, Norm
from ondevice.backends.recurrent import DeltaWeights
from ondevice.backends.reference_delta import gated_delta
from ondevice.backends.token_tree import TokenTree
from ondevice.kernels import _native
from ondevice.model_config import DeltaSpec
from tests.kernels.test_kernels import RUNNERS, TARGETS, normal, on_every_target

SPECS = [
    DeltaSpec(1, 1, 1, 1, 2),
    DeltaSpec(2, 4, 16, 24),
    DeltaSpec(3, 3, 40, 33, 3),
    DeltaSpec(1, 4, 17, 64),
    DeltaSpec(2, 2, 128, 128),
]


def case(spec: DeltaSpec, tokens: int) -> tuple[Float32, Float32, DeltaWeights, Float32]:
    """Projections, gates, weights and the state before them."""
    weights = DeltaWeights(
        normal(spec.taps, spec.channels, seed=1),
        -np.exp(normal(spec.value_heads, seed=2)),
        normal(spec.value_heads, seed=3),
        Norm(normal(spec.value_width, seed=4), 1e-6),
    )
    projected = normal(tokens, spec.channels + spec.value_size, seed=5)
    return projected, normal(tokens, 2 * spec.value_heads, seed=6), weights, normal(spec.state_floats, seed=7)


def run(
    runner: _native.Runner,
    spec: DeltaSpec,
    projected: Float32,
    gates: Float32,
    weights: DeltaWeights,
    state: Float32,
) -> tuple[Float32, Float32]:
    out, after = np.empty((len(projected), spec.value_size), np.float32), np.full_like(state, np.nan)
    _native.gated_delta(runner, projected, gates, spec.sizes, *weights, state, after, out)
    return out, after


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_gated_delta(spec: DeltaSpec, tokens: int) -> None:
    projected, gates, weights, state = case(spec, tokens)
    wanted = np.empty_like(state)
    expected = gated_delta(projected, gates, state, wanted, spec, weights)
    both = on_every_target(
        lambda runner: np.concatenate(
            [part.reshape(-1) for part in run(runner, spec, projected, gates, weights, state)]
        )
    )
    out, after = both[: expected.size].reshape(expected.shape), both[expected.size :]
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_passes_of_any_size_give_the_same_bits(spec: DeltaSpec, step: int) -> None:
    tokens = 130
    projected, gates, weights, state = case(spec, tokens)
    for runner in (RUNNERS[TARGETS[0], 2], RUNNERS[TARGETS[-1], 1]):
        whole, end = run(runner, spec, projected, gates, weights, state)
        found, held = [], state
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            out, held = run(runner, spec, projected[rows], gates[rows], weights, held)
            found.append(out)
        assert np.concatenate(found).tobytes() == whole.tobytes()
        assert held.tobytes() == end.tobytes()


TREE = [-1, 0, 1, 1, 0, 3, 4, 4, 7, 5]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("parents", [TREE, list(range(-1, 63)), [-1, -1, 1, 0, 1]])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_token_of_a_tree_is_that_of_its_path(spec: DeltaSpec, parents: list[int], outputs: int) -> None:
    count = len(parents)
    projected, gates, weights, state = case(spec, count)
    inputs, known = np.ascontiguousarray(projected[:, : spec.channels]), np.array(parents, np.int32)

    def ahead(runner: _native.Runner) -> Float32:
        out = np.empty((outputs, spec.value_size), np.float32)
        rows = projected[count - outputs :]
        _native.gated_delta_ahead(runner, inputs, gates, known, rows, spec.sizes, *weights, state, out)
        return out

    found = on_every_target(ahead)
    for node in range(count - outputs, count):
        path = TokenTree(parents).path(node)
        alone, _ = run(RUNNERS[TARGETS[0], 1], spec, projected[path], gates[path], weights, state)
        assert found[node - count].tobytes() == alone[-1].tobytes()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_a_replay_leaves_the_state_of_a_pass(spec: DeltaSpec, tokens: int) -> None:
    projected, gates, weights, state = case(spec, tokens)
    _, wanted = run(RUNNERS[TARGETS[0], 1], spec, projected, gates, weights, state)
    inputs, own = np.ascontiguousarray(projected[:, : spec.channels]), weights[:3]

    def replayed(runner: _native.Runner) -> Float32:
        after = np.full_like(state, np.nan)
        _native.replay_delta(runner, inputs, gates, spec.sizes, *own, state, after)
        return after

    assert on_every_target(replayed).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("parents", [[-1, 1], [-1, -2], [-1], [-1, 0, 0], list(range(-1, 64))])
def test_a_tree_that_is_none_is_refused(parents: list[int]) -> None:
    spec, tokens = SPECS[1], 65 if len(parents) == 65 else 2
    projected, gates, weights, state = case(spec, tokens)
    inputs = np.ascontiguousarray(projected[:, : spec.channels])
    with pytest.raises(ValueError, match=r"parent|64 tokens"):
        _native.gated_delta_ahead(
            RUNNERS[TARGETS[0], 1],
            inputs,
            gates,
            np.array(parents, np.int32),
            projected,
            spec.sizes,
            *weights,
            state,
            np.empty((tokens, spec.value_size), np.float32),
        )


def test_extreme_gates_stay_finite() -> None:
    """A decay of 0 forgets all, one of 1 nothing."""
    spec = SPECS[1]
    projected, gates, weights, state = case(spec, 3)
    for value in (-200.0, 200.0):
        gates[:] = value
        wanted = np.empty_like(state)
        expected = gated_delta(projected, gates, state, wanted, spec, weights)
        out, after = run(RUNNERS[TARGETS[0], 1], spec, projected, gates, weights, state)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-5)


def test_a_state_over_itself_is_refused() -> None:
    spec = SPECS[1]
    projected, gates, weights, state = case(spec, 2)
    out = np.empty((2, spec.value_size), np.float32)
    with pytest.raises(ValueError, match="other memory"):
        _native.gated_delta(RUNNERS[TARGETS[0], 1], projected, gates, spec.sizes, *weights, state, state, out)


@pytest.mark.parametrize("n", [1, 15, 16, 100])
def test_sigmoid_gate(n: int) -> None:
    x, gates = normal(5, n), 30.0 * normal(5, n, seed=1)

    def gated(runner: _native.Runner) -> Float32:
        out = x.copy()
        _native.sigmoid_gate(runner, gates, out)
        return out

    expected = x / (1.0 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_allclose(on_every_target(gated), expected, rtol=1e-6, atol=1e-12)
