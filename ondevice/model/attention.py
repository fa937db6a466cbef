"""One layer's attention block: norm and fused qkv projection, attention, output projection, residual.

The gated delta rule stands in attention's place in layers with a `DeltaSpec`, a short convolution in
those with a `ConvSpec`, a Mamba-2 mixer in those with a `Mamba2Spec`; or the mixer stands beside attention.
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
    """Where `size` rows of one sequence are: behind `position` tokens in kv, which has room for them.

    tree: how the rows follow each other; None: each follows the one before.
    """

    kv: SequenceState
    position: int
    size: int
    tree: TokenTree | None = None


class Rows(NamedTuple):
    """The places of a batch's R rows, those of one sequence after those of another.

    turns: the rotary tables of the rows' positions, cosine and sine, (R, Dh / 2) both, of each of the model's
    ropes. adapted: first row to which adapters are added.
    """

    places: tuple[Place, ...]
    turns: tuple[tuple[Float32, Float32], ...]
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
    """x + attention(norm(x)), (R, D), for x (R, D), with norms where `spec` has them; may overwrite x.

    Stores the rows' keys and values. A layer that reads those of another stores none. One with a state in
    attention's place stores the next state of each sequence, or the rows' inputs if they run ahead. With a
    mixer beside attention there are both, and the mixer's output joins x too.
    """
    mixed = None if spec.mixer_beside is None else _mixed_beside(backend, spec, weights, layer, x, rows)
    beside = None if weights.laurel is None else _laurel(backend, weights, x)
    norm, adapted = weights.attention_norm, rows.adapted
    gates = None if mixed is not None else _gates(backend, weights, x)
    qkv = backend.linear(x, weights.qkv, norm)
    if adapters is not None:
        low = adapters.qkv
        qkv = backend.add_low_rank(qkv, x[adapted:], low.down, low.up, adapted, norm=norm)
    latent, own = spec.attention.latent, weights.latent
    if latent is not None and own is not None:
        qkv = backend.latent_rows(qkv, latent, own)
    if spec.attends:
        context = _attended(backend, spec, weights, layer, qkv, rows)
    else:
        context = _recurrent(backend, spec, weights, layer, qkv, gates, rows)
    if latent is not None and own is not None:
        context = backend.linear_heads(context, own.values, context.shape[1] // latent.rank)
    if spec.attention.gated:
        context = backend.sigmoid_gated(context, gates)
    if spec.attention.out_factor != 1.0:
        context = context * spec.attention.out_factor
    y = backend.linear(context, weights.out, added=x if spec.joins_plainly else None)
    if mixed is not None:
        y = backend.linear(mixed, weights.mixer_out, added=y)
    if adapters is not None:
        y = backend.add_low_rank(y, context[adapted:], adapters.out.down, adapters.out.up, adapted)
    found = joined(backend, spec, x, y, weights.attention_output_norm)
    return found if beside is None else (found + beside) * HALF_ROOT


def _gates(backend: Backend, weights: LayerWeights, x: Array) -> Array | None:
    if weights.gates is None:
        return None
    # A copy, as the next product takes its place.
    return backend.rows(backend.linear(x, weights.gates, weights.attention_norm), range(x.shape[0]))


def _attended(
    backend: Backend, spec: LayerSpec, weights: LayerWeights, layer: int, qkv: Array, rows: Rows
) -> Array:
    """What each row attends to, (R, H * value width), for qkv (R, ...): rows see their own sequence alone.

    In latent attention these are latents, (R, H * rank).
    """
    own = spec.attention
    owner = layer if own.keys_of is None else own.keys_of
    norms, sinks = weights.head_norms, weights.sinks
    cos, sin = rows.turns[own.rope]

    def of_place(place: Place, its: slice) -> Array:
        kv, position, _, tree = place
        return backend.attend(qkv[its], kv, owner, position, cos[its], sin[its], own, norms, tree, sinks)

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
    """What the layer's states give each row, of its projection and of what gates or steps are made of."""

    def of_states(states: StateStore, its: slice) -> Array:
        if spec.conv is not None:
            return backend.short_conv(projected[its], states, layer, spec.conv, weights.conv)
        assert gates is not None
        if spec.mamba2 is not None:
            assert weights.mixer is not None
            return backend.mamba2(projected[its], gates[its], states, layer, spec.mamba2, weights.mixer)
        assert spec.delta is not None
        assert weights.delta is not None
        return backend.gated_delta(projected[its], gates[its], states, layer, spec.delta, weights.delta)

    pieces = []
    for place in rows.places:
        assert place.kv.states is not None
        stretches = place.kv.states.stretches(place.size)
        pieces += [(size, partial(of_states, states)) for states, size in stretches]
    return _together(backend, pieces)


def _mixed_beside(
    backend: Backend, spec: LayerSpec, weights: LayerWeights, layer: int, x: Array, rows: Rows
) -> Array:
    """What the mixer beside attention gives each row, (R, I), before its output projection."""
    gates = _gates(backend, weights, x)
    projected = backend.linear(x, weights.mixer_in, weights.attention_norm)
    found = _recurrent(backend, spec, weights, layer, projected, gates, rows)
    # A copy, as attention's result takes its place.
    return backend.rows(found, range(x.shape[0]))


def _together(backend: Backend, pieces: Sequence[tuple[int, Callable[[slice], Array]]]) -> Array:
    """What each piece's function gives for its rows, which are as many as it says, one behind the other."""
    if len(pieces) == 1:
        return pieces[0][1](slice(None))
    found, first = [], 0
    for size, of_rows in pieces:
        own_rows = of_rows(slice(first, first + size))
        # A copy, as the next result takes its place.
        found.append(backend.rows(own_rows, range(size)))
        first += size
    return backend.stacked(found)


def _laurel(backend: Backend, weights: LayerWeights, x: Array) -> Array:
    """n + norm(up @ down @ n), (R, D), with n = norm(x) (LAuReL, arXiv 2411.07501, its low-rank form)."""
    low, norm = weights.laurel, weights.attention_norm
    assert low is not None
    assert norm is not None
    entering = backend.normed(x, norm)
    narrow = backend.linear(entering, low.down)
    # A copy, as one product is the next one's input.
    wide = backend.linear(backend.rows(narrow, range(narrow.shape[0])), low.up)
    return backend.add_normed(entering, wide, low.norm)
