"""The feed-forward of a draft layer with experts, all of which are in memory.

A model's experts are read through a cache (`sparsity/`). A draft layer runs between the model's passes, for
few rows, so its experts stay loaded as matrices. A row's experts are added in ascending order.

Legend: n rows, D width of the layer, E experts, k chosen for a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Array, Backend, Float32, Linear, Norm
from ondevice.backends.routing import route, sigmoid
from ondevice.model_config import Activation, ExpertsSpec
from ondevice.records import dataclass


class GatedMatrices(NamedTuple):
    """The matrices of a gated feed-forward of F neurons: gate and up (F, D), down (D, F)."""

    gate: Linear
    up: Linear
    down: Linear

    def product(
        self,
        backend: Backend,
        x: Array,
        activation: Activation,
        norm: Norm | None = None,
        added: Array | None = None,
    ) -> Array:
        """down(activation(gate(h)) * up(h)) + added, (n, D), with h = norm(x), for x (n, D).

        added: (n, D) or None; may be x, and may be overwritten. The result is valid until the next product.
        """
        # A copy, as the next product overwrites it.
        gate = backend.rows(backend.linear(x, self.gate, norm), range(x.shape[0]))
        up = backend.linear(x, self.up, norm)
        return backend.linear(backend.gated(gate, up, activation), self.down, added=added)


@dataclass(frozen=True)
class DraftExperts:
    """The experts of a draft layer.

    router: (E, D). each: the E experts. choice_bias: (E,), in host memory. shared: the shared expert.
    shared_gate: (1, D); the sigmoid of its product multiplies the output of `shared`.
    """

    spec: ExpertsSpec
    activation: Activation
    router: Linear
    each: tuple[GatedMatrices, ...]
    choice_bias: Float32 | None = None
    shared: GatedMatrices | None = None
    shared_gate: Linear | None = None

    def added_to(self, x: Array, backend: Backend, norm: Norm) -> Array:
        """x + shared(n) + the weighted outputs of each row's experts, (n, D), with n = norm(x), x (n, D).

        The result belongs to the caller.
        """
        normed, out = backend.normed(x, norm), x
        if self.shared is not None:
            output = self.shared.product(backend, normed, self.activation)
            if self.shared_gate is not None:
                output = backend.rows(output, range(output.shape[0]))
                gates = sigmoid(backend.to_numpy(backend.linear(normed, self.shared_gate)))
                output = output * _column(backend, gates)
            out = out + output
        logits = backend.to_numpy(backend.linear(normed, self.router))
        routing = route(logits, self.spec, self.choice_bias)
        outputs, places = self._outputs(normed, backend, routing.ids)
        for at in range(self.spec.chosen):
            weights = _column(backend, routing.weights[:, at])
            out = out + backend.rows(outputs, places[:, at].tolist()) * weights
        return out

    def _outputs(self, x: Array, backend: Backend, ids: NDArray[np.int32]) -> tuple[Array, NDArray[np.int64]]:
        """The outputs (n * k, D) of the experts `ids` (n, k) for x (n, D), and the row of each output, (n,
        k).
        """
        places, parts, first = np.empty(ids.shape, np.int64), [], 0
        for expert in np.unique(ids).tolist():
            chosen = ids == expert
            rows = np.flatnonzero(chosen.any(axis=1)).tolist()
            output = self.each[expert].product(backend, backend.rows(x, rows), self.activation)
            parts.append(backend.rows(output, range(len(rows))))
            # In the order of rows, as a row chooses an expert at most once.
            places[chosen] = range(first, first + len(rows))
            first += len(rows)
        return backend.stacked(parts), places


def _column(backend: Backend, values: Float32) -> Array:
    """The n values as an array (n, 1) of the backend."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    return backend.load_vector(flat).reshape(len(flat), 1)
