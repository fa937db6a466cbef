"""The experts of a draft layer on every backend, against plain numpy: each expert of each row by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Norm
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.reference import ReferenceBackend
from ondevice.model.draft_experts import DraftExperts, GatedMatrices
from ondevice.model_config import ExpertsSpec
from tests.support.sources import ArrayLinear

WIDTH, NEURONS, EXPERTS, CHOSEN, EPS = 72, 40, 8, 3, 1e-5
SPECS = {
    "softmax": ExpertsSpec(EXPERTS, CHOSEN, NEURONS, renormalised=True, shared_gate=True),
    "softmax of all": ExpertsSpec(EXPERTS, CHOSEN, NEURONS),
    "sigmoid": ExpertsSpec(
        EXPERTS, CHOSEN, NEURONS, "sigmoid", True, 2.5, choice_bias=True, groups=4, chosen_groups=2
    ),
}
Matrices = tuple[np.ndarray, np.ndarray, np.ndarray]


def matrices(rng: np.random.Generator, neurons: int) -> Matrices:
    """gate, up and down, with values that float16 holds."""
    shapes = (neurons, WIDTH), (neurons, WIDTH), (WIDTH, neurons)
    gate, up, down = ((rng.standard_normal(it) / it[1] ** 0.5).astype(np.float16) for it in shapes)
    return gate.astype(np.float32), up.astype(np.float32), down.astype(np.float32)


def silu_product(x: np.ndarray, own: Matrices) -> np.ndarray:
    gate, up, down = own
    gates = gate @ x
    found: np.ndarray = down @ (gates / (1 + np.exp(-gates)) * (up @ x))
    return found


def expected_row(
    x: np.ndarray, norm: np.ndarray, spec: ExpertsSpec, of: dict[str, Any], each: list[Matrices]
) -> np.ndarray:
    """x + shared + experts for one row, in float64."""
    n = x / np.sqrt((x * x).mean() + EPS) * norm
    found = x.copy()
    if "shared" in of:
        gate = 1 / (1 + np.exp(-(of["shared_gate"] @ n))) if spec.shared_gate else 1.0
        found += gate * silu_product(n, of["shared"])
    logits = of["router"] @ n
    scores = 1 / (1 + np.exp(-logits)) if spec.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores + of.get("bias", 0.0)
    if spec.groups > 1:
        grouped = np.sort(choice.reshape(spec.groups, -1), axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-grouped)[: spec.chosen_groups]
        choice = np.where(np.isin(np.arange(EXPERTS) // (EXPERTS // spec.groups), kept), choice, -np.inf)
    chosen = np.argsort(-choice)[: spec.chosen]
    weights = scores[chosen] / (scores[chosen].sum() if spec.renormalised else 1.0) * spec.factor
    return found + sum(w * silu_product(n, each[it]) for w, it in zip(weights, chosen, strict=True))


def opened(name: str, request: pytest.FixtureRequest) -> Any:
    if name == "reference":
        return ReferenceBackend()
    if name == "cpu":
        return CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
    pytest.importorskip("mlx.core", exc_type=ImportError)
    request.getfixturevalue("mlx_on_cpu")
    from ondevice.backends.mlx import MlxBackend

    return MlxBackend(segment_neurons=64)


@pytest.mark.parametrize("backend_name", ["reference", "cpu", "mlx"])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_those_of_plain_numpy(name: str, backend_name: str, request: pytest.FixtureRequest) -> None:
    rng, spec, backend = np.random.default_rng(3), SPECS[name], opened(backend_name, request)
    each = [matrices(rng, NEURONS) for _ in range(EXPERTS)]
    of: dict[str, Any] = {"router": rng.standard_normal((EXPERTS, WIDTH)).astype(np.float16) / 8}
    if spec.choice_bias:
        of["bias"] = (0.2 * rng.standard_normal(EXPERTS)).astype(np.float32)
    if spec.shared_gate:
        of |= {"shared": matrices(rng, 56), "shared_gate": np.float16(rng.standard_normal((1, WIDTH)) / 8)}
    norm = (1 + 0.2 * rng.standard_normal(WIDTH)).astype(np.float32)

    def linear(values: np.ndarray) -> Any:
        return backend.load_linear(ArrayLinear(values.astype(np.float32), 16))

    def gated(own: Matrices) -> GatedMatrices:
        return GatedMatrices(*map(linear, own))

    experts = DraftExperts(
        spec,
        "silu",
        linear(of["router"]),
        tuple(map(gated, each)),
        of.get("bias"),
        gated(of["shared"]) if "shared" in of else None,
        linear(of["shared_gate"]) if spec.shared_gate else None,
    )
    loaded = Norm(backend.load_vector(norm), EPS)
    for count in (1, 9):
        rows = rng.standard_normal((count, WIDTH)).astype(np.float32)
        entering = backend.load_vector(rows.reshape(-1)).reshape(rows.shape)
        found = backend.to_numpy(experts.added_to(entering, backend, loaded))
        wanted = np.stack([expected_row(row.astype(np.float64), norm, spec, of, each) for row in rows])
        assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()
        np.testing.assert_array_equal(backend.to_numpy(entering), rows)
