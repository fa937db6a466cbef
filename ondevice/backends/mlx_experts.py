"""Experts on MLX: routing on the device, and the products of the chosen experts.

`route` decides as `routing.route` does, in float32, without reading back. Its sums have one order, and all
other ops are elementwise or on integers, so a row's result doesn't depend on other rows.
Legend: T tokens, E experts, k chosen for a token, D model width, F neurons of an expert, R/C rows/columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ondevice.backends import mlx_memory
from ondevice.backends.expert_records import ROWS_AT_ONCE
from ondevice.backends.mlx_ops import hidden
from ondevice.backends.mlx_sums import in_lanes, sums
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.model_config import ExpertsSpec, FeedForwardSpec
from ondevice.records import dataclass

CUDA_PRODUCTS = 8
"""Minimum number of products by experts' matrices: below it, another CUDA kernel sums in another order."""


class Chosen(NamedTuple):
    """The experts of T tokens, as in `routing.Routing`: ids and weights (T, k)."""

    ids: mx.array
    weights: mx.array


def route(
    logits: mx.array, spec: ExpertsSpec, choice_bias: mx.array | None = None, scales: mx.array | None = None
) -> Chosen:
    """The experts of each token of logits (T, E). choice_bias, scales: as for `routing.route`."""
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, spec)
    scores = logits if spec.scoring == "softmax" else mx.sigmoid(in_lanes(logits, -math.inf))[:, : spec.count]
    choice = scores if choice_bias is None else scores + choice_bias
    among = choice if spec.groups == 1 else _of_best_groups(choice, spec)
    ids = _numbers(_highest(among, spec.chosen), spec.chosen)
    if spec.scoring == "softmax":
        shares = _exp(logits - mx.max(logits, axis=1, keepdims=True))
        weights = mx.take_along_axis(shares, ids, axis=1)
        weights = weights if spec.renormalised else weights / sums(shares)
    else:
        weights = mx.take_along_axis(scores, ids, axis=1)
    if spec.renormalised:
        weights = weights / (sums(weights) + (1e-20 if spec.scoring == "sigmoid" else 0.0))
    weights = weights * spec.factor
    return Chosen(ids, weights if scales is None else weights * scales[ids])


def _sparsemixer(logits: mx.array, spec: ExpertsSpec) -> Chosen:
    """Two experts, one after the other (arXiv 2409.12136, in its authors' code)."""
    left, ids, weights = logits, [], []
    for _ in range(spec.chosen):
        first = _highest(left, 1)
        highest = mx.max(left, axis=1, keepdims=True)
        distance = (highest - logits) / mx.maximum(mx.abs(logits), highest)
        near = ~(distance > 2.0 * spec.jitter) & (left > -mx.inf)
        ids.append(_numbers(first, 1))
        weights.append(1.0 / sums(_exp(mx.where(near, left - highest, -mx.inf))))
        left = mx.where(first, -mx.inf, left)
    chosen, shares = mx.concatenate(ids, axis=1), mx.concatenate(weights, axis=1)
    order = mx.argsort(chosen, axis=1)
    shares = mx.take_along_axis(shares, order, axis=1) * spec.factor
    return Chosen(mx.take_along_axis(chosen, order, axis=1), shares)


def _of_best_groups(choice: mx.array, spec: ExpertsSpec) -> mx.array:
    """Scores (T, E) with -inf outside a token's best groups of experts."""
    grouped = choice.reshape(choice.shape[0], spec.groups, -1)
    two = mx.sort(grouped, axis=2)[:, :, -2:]
    worth = two[:, :, 1] if spec.group_best == 1 else two[:, :, 1] + two[:, :, 0]
    best = _highest(worth, spec.chosen_groups)
    return mx.where(best[:, :, None], grouped, -mx.inf).reshape(choice.shape)


def _highest(scores: mx.array, count: int) -> mx.array:
    """(T, n) booleans, whether a score is among the `count` highest of its row. Among equal scores the first
    ones win.
    """
    threshold = mx.sort(scores, axis=1)[:, scores.shape[1] - count, None]
    above, level = scores > threshold, scores == threshold
    left = count - mx.sum(above, axis=1, keepdims=True)
    return above | (level & (mx.cumsum(level.astype(mx.int32), axis=1) <= left))


def _numbers(chosen: mx.array, count: int) -> mx.array:
    """(T, count): the indices of the true columns in each row of chosen (T, n), ascending."""
    width = chosen.shape[1]
    numbers = mx.sort(mx.where(chosen, mx.arange(width), width), axis=1)[:, :count]
    # Where scores are NaN, none is chosen.
    return mx.minimum(numbers, width - 1)


def _exp(x: mx.array) -> mx.array:
    """e^x for x (T, n). The result is padded with zeros to a multiple of LANES."""
    return mx.exp(in_lanes(x, -math.inf))


def with_biases(layout: RowLayout, arrays: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """Codes, scales and biases of a matrix. Biases that aren't stored are computed: the scales times a power
    of two.
    """
    if len(arrays) == 3 or layout.mxfp4:
        return arrays
    codes, scales = arrays
    return codes, scales, scales * -layout.stored.zero


def format_options(layout: RowLayout) -> dict[str, Any]:
    """The options of MLX's quantised products for a format of 4 to 8 bits."""
    options = {"group_size": layout.group_size, "bits": layout.bits}
    return options | {"mode": "mxfp4"} if layout.mxfp4 else options


@dataclass(frozen=True)
class MlxExpertMatrix:
    """One matrix for each of n experts, (n, R, C), in a bundle's codes; products are float32.

    arrays: codes (n, R, C bits / 32) uint32, scales (n, R, G), and biases (n, R, G) unless the scales imply
    them; at 16 bits values (n, R, C). Scales of MXFP4 are uint8. added: (n, R) float32 biases of the
    products, or None.
    """

    layout: RowLayout
    dtype: mx.Dtype
    arrays: tuple[mx.array, ...]
    added: mx.array | None = None

    def product(self, x: mx.array, experts: mx.array) -> mx.array:
        """x (T, 1 or k, 1, C) @ W^T of experts (T, k): (T, k, 1, R)."""
        more = self.layout.padded_cols - x.shape[-1]
        x = mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, more)]) if more else x
        x = x.astype(self.dtype)
        if self.layout.bits == 16:
            values = self.arrays[0].astype(self.dtype).swapaxes(-1, -2)
            out = mx.gather_mm(x, values, rhs_indices=experts)
        else:
            codes, *pairs = self.arrays
            if not self.layout.mxfp4:
                pairs = [it.astype(self.dtype) for it in pairs]
            affine = with_biases(self.layout, (codes, *pairs))
            options = format_options(self.layout)
            out = mx.gather_qmm(x, *affine, rhs_indices=experts, transpose=True, **options)
        out = out.astype(mx.float32)
        return out if self.added is None else out + self.added[experts][:, :, None]


@dataclass(frozen=True)
class MlxExperts:
    """The matrices of n experts. up: None in an ungated feed-forward."""

    gate: MlxExpertMatrix
    up: MlxExpertMatrix | None
    down: MlxExpertMatrix

    @classmethod
    def of(cls, matrices: Sequence[MlxExpertMatrix]) -> MlxExperts:
        """The experts made of `matrices`, which are in the order of an expert's record."""
        gate, *up, down = matrices
        return cls(gate, up[0] if up else None, down)

    @property
    def arrays(self) -> list[mx.array]:
        matrices = [it for it in (self.gate, self.up, self.down) if it is not None]
        return [it for matrix in matrices for it in (*matrix.arrays, matrix.added) if it is not None]

    def outputs(self, x: mx.array, experts: mx.array, spec: FeedForwardSpec) -> mx.array:
        """(T, k, D) the output of each of a token's experts (T, k), for x (T, D)."""
        rows, chosen = experts.shape
        if mlx_memory.on_cuda() and rows * chosen < CUDA_PRODUCTS:
            # So that held experts, multiplied for all tokens at once, and single ones give equal bits.
            more = [(0, -(-CUDA_PRODUCTS // chosen) - rows), (0, 0)]
            x, experts = mx.pad(x, more), mx.pad(experts, more)
        x = x[:, None, None]
        gates = self.gate.product(x, experts)
        ups = None if self.up is None else self.up.product(x, experts)
        return self.down.product(hidden(gates, ups, spec), experts)[:rows, :, 0]

    def added_to(self, total: mx.array, x: mx.array, chosen: Chosen, spec: FeedForwardSpec) -> mx.array:
        """total (T, D) plus the weighted outputs of each token's experts, in ascending order."""
        chunks = []
        for start in range(0, x.shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            ids, weights, sums = chosen.ids[rows], chosen.weights[rows], total[rows]
            outputs = self.outputs(x[rows], ids, spec) * weights[:, :, None]
            for place in range(ids.shape[1]):
                sums = sums + outputs[:, place]
            chunks.append(sums)
        return chunks[0] if len(chunks) == 1 else mx.concatenate(chunks)
