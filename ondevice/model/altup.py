"""Copies of the residual, of which one goes through each layer: alternating updates (arXiv 2301.13310).

    copies = spread(embedding)
    for each layer:  predicted = predict(copies);  copies = correct(predicted, layer(predicted[0]))
    x = gather(copies)

A router looks at the copy that went through a layer, and mixes the copies by it. Legend: T tokens, D model
width, C copies, each (T, D).
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Array, Backend
from ondevice.model.weights import CopiesOfLayer, CopiesOfModel

Copies = list[Array]


def spread(backend: Backend, weights: CopiesOfModel, x: Array) -> Copies:
    """The copies that enter the first layer: x (T, D), and products of it that are as large as x."""
    return [x, *(backend.match_rms(backend.linear(x, matrix), x) for matrix in weights.spread)]


def gather(backend: Backend, weights: CopiesOfModel, copies: Copies) -> Array:
    """What leaves the last layer, (T, D): the mean of the first copy and of products of the others."""
    total = first = copies[0]
    for copy, matrix in zip(copies[1:], weights.gather, strict=True):
        total = total + backend.match_rms(backend.linear(copy, matrix), first)
    return total * (1.0 / len(copies))


def predict(backend: Backend, weights: CopiesOfLayer, copies: Copies) -> Copies:
    """Each copy plus a mix of all of them, by coefficients that the router gives for each token."""
    count = len(copies)
    mix = backend.small_linear(_routed(backend, weights, copies[0]), weights.predict)
    return [_mixed(copies, mix[:, at * count : (at + 1) * count]) + copy for at, copy in enumerate(copies)]


def correct(backend: Backend, weights: CopiesOfLayer, predicted: Copies, x: Array) -> Copies:
    """The predicted copies, each moved by a share of what the layer added: its output x less the first."""
    shares = backend.small_linear(_routed(backend, weights, x), weights.correct) + 1.0
    added = x - predicted[0]
    return [added * shares[:, at : at + 1] + copy for at, copy in enumerate(predicted)]


def _routed(backend: Backend, weights: CopiesOfLayer, x: Array) -> Array:
    """The router's answer to x (T, D): (T, C), from -1 to 1."""
    return backend.soft_cap(backend.small_linear(backend.normed(x, weights.norm), weights.router), 1.0)


def _mixed(copies: Sequence[Array], mix: Array) -> Array:
    """The sum of the copies times the columns of mix (T, C): (T, D)."""
    total = copies[0] * mix[:, :1]
    for at, copy in enumerate(copies[1:], 1):
        total = total + copy * mix[:, at : at + 1]
    return total
