"""One layer's attention block: norm and fused qkv projection, attention, output projection, residual.

A `DeltaSpec` replaces attention by the gated delta rule, a `ConvSpec` by a short convolution, a `Mamba2Spec`
by a Mamba-2 mixer, or adds the mixer in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ondevice.backends.base import Array, Backend, Float32
from ondevice.backends.recurrent import StateStore
from ondevice.backends.token_tree import TokenTree
from ondevice.model.residual import joined
from ondevice.model.sequence_state import SequenceState
from ondevice.model.weights import LayerWeights, MultiStreamLayer
from ondevice.model_config import LayerSpec

HALF_ROOT = 0.5**0.5


class Place(NamedTuple):
    """Where rows of one sequence belong, as in `SequencePlace` of `backends/plain_layers.py`."""

    kv: SequenceState
    position: int
    size: int
    tree: TokenTree | None = None


class Rows(NamedTuple):
    """The places of a batch's R rows, one for each sequence.

    rope_tables: for each of the model's ropes, the cosine and sine of the rows' positions, (R, Dh / 2) each.
    adapted: the first row to which adapters are added.
    """

    places: tuple[Place, ...]
    rope_tables: tuple[tuple[Float32, Float32], ...]
    adapted: int


def attention(
    backend: Backend,
    spec: LayerSpec,
    weights: LayerWeights,
    layer: int,
    x: Array,
    rows: Rows,
    adapters: MultiStreamLayer | None = None,
) -> Array:
    """x + attention(norm(x)), (R, D), for x (R, D), with the norms that `spec` has; may overwrite x.

    Stores the rows' keys and values, unless the layer reads those of another. A recurrent layer stores the
    next state of each sequence, or the rows' inputs if they run ahead. With a parallel mixer both are stored,
    and the mixer's output is added too.
    """
    mixed = None if spec.parallel_mixer is None else _mixed(backend, spec, weights, layer, x, rows)
    laurel = None if weights.laurel is None else _laurel(backend, weights, x)
    norm, adapted = weights.attention_norm, rows.adapted
    gates = None if mixed is not None else _gates(backend, weights, x)
    qkv = backend.linear(x, weights.qkv, norm)
    if adapters is not None:
        low = adapters.qkv
        qkv = backend.add_low_rank(qkv, x[adapted:], low.down, low.up, adapted, norm=norm)
    latent, latent_weights = spec.attention.latent, weights.latent
    if latent is not None and latent_weights is not None:
        qkv = backend.latent_rows(qkv, latent, latent_weights)
    if spec.attends:
        context = _attended(backend, spec, weights, layer, qkv, rows)
    else:
        context = _recurrent(backend, spec, weights, layer, qkv, gates, rows)
    if latent is not None and latent_weights is not None:
        context = backend.linear_heads(context, latent_weights.values, context.shape[1] // latent.rank)
    if spec.attention.gated:
        context = backend.sigmoid_gated(context, gates)
    if spec.attention.out_factor != 1.0:
        context = context * spec.attention.out_factor
    y = backend.linear(context, weights.out, added=x if spec.plain_residual else None)
    if mixed is not None:
        y = backend.linear(mixed, weights.mixer_out, added=y)
    if adapters is not None:
        y = backend.add_low_rank(y, context[adapted:], adapters.out.down, adapters.out.up, adapted)
    out = joined(backend, spec, x, y, weights.attention_output_norm)
    return out if laurel is None else (out + laurel) * HALF_ROOT


def _gates(backend: Backend, weights: LayerWeights, x: Array) -> Array | None:
    if weights.gates is None:
        return None
    # A copy, as the next product overwrites it.
    return backend.rows(backend.linear(x, weights.gates, weights.attention_norm), range(x.shape[0]))


def _attended(
    backend: Backend, spec: LayerSpec, weights: LayerWeights, layer: int, qkv: Array, rows: Rows
) -> Array:
    """The output of attention, (R, H * value width), for qkv (R, ...). Rows attend only within their
    sequence.

    In latent attention the output is latents, (R, H * rank).
    """
    attend = spec.attention
    kv_layer = layer if attend.keys_of is None else attend.keys_of
    norms, sinks = weights.head_norms, weights.sinks
    cos, sin = rows.rope_tables[attend.rope]

    def of_place(place: Place, it: slice) -> Array:
        kv, position, _, tree = place
        return backend.attend(qkv[it], kv, kv_layer, position, cos[it], sin[it], attend, norms, tree, sinks)

    return _together(backend, [(place.size, partial(of_place, place)) for place in rows.places])


def _recurrent(
    backend: Backend,
    spec: LayerSpec,
    weights: LayerWeights,
    layer: int,
    projected: Array,
    gates: Array | None,
    rows: Rows,
) -> Array:
    """The recurrent layer's output for each row, from its projection and its gates or steps."""

    def of_states(states: StateStore, span: slice) -> Array:
        if spec.conv is not None:
            return backend.short_conv(projected[span], states, layer, spec.conv, weights.conv)
        assert gates is not None
        if spec.mamba2 is not None:
            assert weights.mixer is not None
            return backend.mamba2(projected[span], gates[span], states, layer, spec.mamba2, weights.mixer)
        assert spec.delta is not None
        assert weights.delta is not None
        return backend.gated_delta(projected[span], gates[span], states, layer, spec.delta, weights.delta)

    pieces = []
    for place in rows.places:
        assert place.kv.states is not None
        stretches = place.kv.states.stretches(place.size)
        pieces += [(size, partial(of_states, states)) for states, size in stretches]
    return _together(backend, pieces)


def _mixed(
    backend: Backend, spec: LayerSpec, weights: LayerWeights, layer: int, x: Array, rows: Rows
) -> Array:
    """The parallel mixer's output for each row, (R, I), before its output projection."""
    gates = _gates(backend, weights, x)
    projected = backend.linear(x, weights.mixer_in, weights.attention_norm)
    mixed = _recurrent(backend, spec, weights, layer, projected, gates, rows)
    # A copy, as attention's result overwrites it.
    return backend.rows(mixed, range(x.shape[0]))


def _together(backend: Backend, pieces: Sequence[tuple[int, Callable[[slice], Array]]]) -> Array:
    """The results of all pieces, stacked. A piece is a number of rows, and a function that takes the slice of
    these rows.
    """
    if len(pieces) == 1:
        return pieces[0][1](slice(None))
    results, first = [], 0
    for size, of_rows in pieces:
        result = of_rows(slice(first, first + size))
        # A copy, as the next result overwrites it.
        results.append(backend.rows(result, range(size)))
        first += size
    return backend.stacked(results)


def _laurel(backend: Backend, weights: LayerWeights, x: Array) -> Array:
    """The output of low-rank LAuReL (arXiv 2411.07501): n + norm(up @ down @ n), (R, D), with n = norm(x)."""
    low, norm = weights.laurel, weights.attention_norm
    assert low is not None
    assert norm is not None
    normed = backend.normed(x, norm)
    narrow = backend.linear(normed, low.down)
    # A copy, as a product can't be the next product's input.
    wide = backend.linear(backend.rows(narrow, range(narrow.shape[0])), low.up)
    return backend.add_normed(normed, wide, low.norm)
