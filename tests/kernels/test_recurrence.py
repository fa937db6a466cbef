"""Delta rules and Mamba-2 mixers against float64, byte for byte between targets, threads and splits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32, Norm
from ondevice.backends.cpu_recurrent import native_mixer
from ondevice.backends.recurrent import DeltaWeights, MixerWeights
from ondevice.backends.reference_recurrence import gated_delta, mamba2
from ondevice.backends.token_tree import TokenTree
from ondevice.kernels import _native
from ondevice.model_config import DeltaSpec, Mamba2Spec
from tests.kernels.test_kernels import RUNNERS, TARGETS, normal, on_every_target

DELTAS = [
    DeltaSpec(1, 1, 1, 1, 2),
    DeltaSpec(2, 4, 16, 24),
    DeltaSpec(3, 3, 40, 33, 3),
    DeltaSpec(1, 4, 17, 64),
    DeltaSpec(2, 2, 128, 128),
]
MIXERS = [
    Mamba2Spec(1, 1, 1, 1, 2, norm="none"),
    Mamba2Spec(4, 24, 2, 16, conv_bias=True, norm_groups=2, out_factor=0.75),
    Mamba2Spec(3, 33, 3, 40, 3, norm="before", norm_groups=3, gate_factor=0.3, out_factor=2.5),
    Mamba2Spec(5, 80, 1, 17, conv_bias=True, norm="none", time_factor=0.7, out_factor=0.4),
    Mamba2Spec(4, 64, 1, 128, conv_bias=True, least_time=0.05, most_time=1.5),
]
EITHER = [DELTAS[1], MIXERS[1]]


@dataclass
class Case:
    """A layer, its inputs of some tokens, and the state before them."""

    spec: Any
    tokens: int

    def __post_init__(self) -> None:
        spec = self.spec
        self.projected = normal(self.tokens, spec.channels + spec.value_size, seed=5)
        self.gates = normal(self.tokens, spec.gate_floats, seed=6)
        self.state = normal(spec.state_floats, seed=7)
        self.is_delta = isinstance(spec, DeltaSpec)
        self.sizes: Any = spec.sizes if self.is_delta else native_mixer(spec)

    @cached_property
    def weights(self) -> Any:
        spec, conv = self.spec, normal(self.spec.taps, self.spec.channels, seed=1)
        heads = spec.value_heads if self.is_delta else spec.heads
        decay, time_bias = -np.exp(normal(heads, seed=2)), normal(heads, seed=3)
        if isinstance(spec, DeltaSpec):
            return DeltaWeights(conv, decay, time_bias, Norm(normal(spec.value_width, seed=4), 1e-6))
        bias = normal(spec.channels, seed=8) if spec.conv_bias else None
        norm = None if spec.norm == "none" else Norm(normal(spec.value_size, seed=4), 1e-6)
        return MixerWeights(conv, bias, decay, time_bias, normal(heads, seed=9), norm)

    @property
    def channels(self) -> Float32:
        return np.ascontiguousarray(self.projected[:, : self.spec.channels])

    def reference(self) -> tuple[Float32, Float32]:
        """Outputs and the state behind them, by numpy."""
        after = np.empty_like(self.state)
        rule: Any = gated_delta if self.is_delta else mamba2
        return rule(self.projected, self.gates, self.state, after, self.spec, self.weights), after

    def run(
        self, runner: _native.Runner, rows: slice | list[int] = slice(None), state: Float32 | None = None
    ) -> tuple[Float32, Float32]:
        """Outputs of these tokens and the state behind them, by the kernels."""
        before = self.state if state is None else state
        projected, gates = self.projected[rows], self.gates[rows]
        out, after = (
            np.empty((len(projected), self.spec.value_size), np.float32),
            np.full_like(before, np.nan),
        )
        op: Any = _native.gated_delta if self.is_delta else _native.mamba2
        op(runner, projected, gates, self.sizes, self.weights, before, after, out)
        return out, after

    def run_ahead(self, runner: _native.Runner, parents: list[int], outputs: int) -> Float32:
        out = np.empty((outputs, self.spec.value_size), np.float32)
        rows, known = self.projected[self.tokens - outputs :], np.array(parents, np.int32)
        op: Any = _native.gated_delta_ahead if self.is_delta else _native.mamba2_ahead
        op(runner, self.channels, self.gates, known, rows, self.sizes, self.weights, self.state, out)
        return out

    def replay(self, runner: _native.Runner) -> Float32:
        after = np.full_like(self.state, np.nan)
        op: Any = _native.replay_delta if self.is_delta else _native.replay_mamba2
        op(runner, self.channels, self.gates, self.sizes, self.weights, self.state, after)
        return after


@pytest.mark.fast("[15]-*", "70-spec[123678]")
@pytest.mark.parametrize("spec", [*DELTAS, *MIXERS])
@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_outputs_and_states_match_the_reference(spec: DeltaSpec | Mamba2Spec, tokens: int) -> None:
    case = Case(spec, tokens)
    expected, wanted = case.reference()
    both = on_every_target(lambda runner: np.concatenate([part.reshape(-1) for part in case.run(runner)]))
    out, after = both[: expected.size].reshape(expected.shape), both[expected.size :]
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.fast("7-*", "64-spec2", "1-spec[17]")
@pytest.mark.parametrize("spec", [*DELTAS, *MIXERS])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_passes_of_any_size_give_the_same_bits(spec: DeltaSpec | Mamba2Spec, step: int) -> None:
    case = Case(spec, 130)
    for runner in (RUNNERS[TARGETS[0], 2], RUNNERS[TARGETS[-1], 1]):
        whole, end = case.run(runner)
        found, held = [], case.state
        for start in range(0, case.tokens, step):
            out, held = case.run(runner, slice(start, start + step), held)
            found.append(out)
        assert np.concatenate(found).tobytes() == whole.tobytes()
        assert held.tobytes() == end.tobytes()


TREE = [-1, 0, 1, 1, 0, 3, 4, 4, 7, 5]


@pytest.mark.fast("*-parents[02]-spec[123678]", "1-parents1-spec[17]")
@pytest.mark.parametrize("spec", [*DELTAS, *MIXERS])
@pytest.mark.parametrize("parents", [TREE, list(range(-1, 63)), [-1, -1, 1, 0, 1]])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_token_of_a_tree_is_that_of_its_path(
    spec: DeltaSpec | Mamba2Spec, parents: list[int], outputs: int
) -> None:
    case, count = Case(spec, len(parents)), len(parents)
    found = on_every_target(lambda runner: case.run_ahead(runner, parents, outputs))
    for node in range(count - outputs, count):
        alone, _ = case.run(RUNNERS[TARGETS[0], 1], TokenTree(parents).path(node))
        assert found[node - count].tobytes() == alone[-1].tobytes()


@pytest.mark.parametrize("spec", [*DELTAS, *MIXERS])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_a_replay_leaves_the_state_of_a_pass(spec: DeltaSpec | Mamba2Spec, tokens: int) -> None:
    case = Case(spec, tokens)
    _, wanted = case.run(RUNNERS[TARGETS[0], 1])
    assert on_every_target(case.replay).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("spec", EITHER)
@pytest.mark.parametrize("parents", [[-1, 1], [-1, -2], [-1], [-1, 0, 0], list(range(-1, 64))])
def test_a_tree_that_is_none_is_refused(spec: DeltaSpec | Mamba2Spec, parents: list[int]) -> None:
    case = Case(spec, 65 if len(parents) == 65 else 2)
    with pytest.raises(ValueError, match=r"parent|64 tokens"):
        case.run_ahead(RUNNERS[TARGETS[0], 1], parents, case.tokens)


@pytest.mark.parametrize("spec", [*EITHER, replace(MIXERS[1], most_time=2.0)])
@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_extreme_gates_stay_finite(spec: DeltaSpec | Mamba2Spec, value: float) -> None:
    """A decay of 0 forgets all, one of 1 nothing; a time step of 0 takes nothing in."""
    case = Case(spec, 3)
    case.gates[:] = value
    expected, wanted = case.reference()
    out, after = case.run(RUNNERS[TARGETS[0], 1])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-5)


def run_changed(case: Case, **changed: object) -> None:
    """A pass with some of its arguments changed."""
    given: dict[str, Any] = {
        "projected": case.projected,
        "inputs": case.gates,
        "sizes": case.sizes,
        "weights": case.weights,
        "state": case.state,
        "next_state": np.empty_like(case.state),
        "out": np.empty((case.tokens, case.spec.value_size), np.float32),
    }
    op: Any = _native.gated_delta if case.is_delta else _native.mamba2
    op(RUNNERS[TARGETS[0], 1], **{**given, **changed})


@pytest.mark.parametrize("spec", EITHER)
def test_what_doesnt_fit_together_is_refused(spec: DeltaSpec | Mamba2Spec) -> None:
    case = Case(spec, 2)
    run_changed(case)
    wrong: list[tuple[str, dict[str, object]]] = [
        ("other memory", {"next_state": case.state}),
        ("inputs are", {"inputs": case.gates[:, 1:].copy()}),
        ("projected is", {"projected": case.projected[:, 1:].copy()}),
        ("states are", {"state": case.state[1:]}),
        ("both states", {"next_state": np.empty_like(case.state)[1:]}),
        ("multiple of their groups", {"sizes": (3, 4, *case.sizes[2:])}),
        ("out is", {"out": np.empty((1, spec.value_size), np.float32)}),
        ("time_bias", {"weights": case.weights._replace(time_bias=np.zeros(3, np.float32))}),
    ]
    for message, changed in wrong:
        with pytest.raises(ValueError, match=message):
            run_changed(case, **changed)


@pytest.mark.parametrize("name", ["conv_bias", "skip"])
def test_weights_of_mixers_fit_too(name: str) -> None:
    case = Case(MIXERS[1], 2)
    with pytest.raises(ValueError, match=f"{name} is"):
        run_changed(case, weights=case.weights._replace(**{name: np.zeros(3, np.float32)}))


@pytest.mark.parametrize("n", [1, 15, 16, 100])
def test_the_sigmoid_gate_matches_float64(n: int) -> None:
    x, gates = normal(5, n), 30.0 * normal(5, n, seed=1)

    def gated(runner: _native.Runner) -> Float32:
        out = x.copy()
        _native.sigmoid_gate(runner, gates, out)
        return out

    expected = x / (1.0 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_allclose(on_every_target(gated), expected, rtol=1e-6, atol=1e-12)
