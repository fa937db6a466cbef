"""Several residual streams, one of which goes through each layer: alternating updates (arXiv 2301.13310).

    streams = spread(embedding)
    for each layer:  predicted = predict(streams);  streams = correct(predicted, layer(predicted[0]))
    x = gather(streams)

A router, which reads the stream that went through the layer, gives the coefficients that mix all streams.
Legend: T tokens, D model width, C residual streams, (T, D) each.
"""

from __future__ import annotations

from ondevice.backends.base import Array, Backend
from ondevice.model.weights import AltUpLayer, AltUpModel

ResidualStreams = list[Array]


def spread(backend: Backend, weights: AltUpModel, x: Array) -> ResidualStreams:
    """The input streams of the first layer: x (T, D), and its products with matrices, scaled to the root mean
    square of x.
    """
    return [x, *(backend.match_rms(backend.linear(x, matrix), x) for matrix in weights.spread)]


def gather(backend: Backend, weights: AltUpModel, streams: ResidualStreams) -> Array:
    """The model's output, (T, D): the mean of the first stream and of the other streams' scaled products."""
    total = first = streams[0]
    for stream, matrix in zip(streams[1:], weights.gather, strict=True):
        total = total + backend.match_rms(backend.linear(stream, matrix), first)
    return total * (1.0 / len(streams))


def predict(backend: Backend, weights: AltUpLayer, streams: ResidualStreams) -> ResidualStreams:
    """The predicted streams: each stream plus a mix of all streams, by the router's coefficients for each
    token.
    """
    count = len(streams)
    mix = backend.small_linear(_routed(backend, weights, streams[0]), weights.predict)
    return [_mixed(streams, mix[:, at * count : (at + 1) * count]) + x for at, x in enumerate(streams)]


def correct(backend: Backend, weights: AltUpLayer, predicted: ResidualStreams, x: Array) -> ResidualStreams:
    """The corrected streams: each predicted stream plus a share of the layer's change, x - predicted[0]."""
    shares = backend.small_linear(_routed(backend, weights, x), weights.correct) + 1.0
    added = x - predicted[0]
    return [added * shares[:, at : at + 1] + stream for at, stream in enumerate(predicted)]


def _routed(backend: Backend, weights: AltUpLayer, x: Array) -> Array:
    """The router's output for x (T, D): (T, C), from -1 to 1."""
    return backend.soft_cap(backend.small_linear(backend.normed(x, weights.norm), weights.router), 1.0)


def _mixed(streams: ResidualStreams, mix: Array) -> Array:
    """The mix of the streams, (T, D): their sum, each multiplied by its column of mix (T, C)."""
    total = streams[0] * mix[:, :1]
    for at, stream in enumerate(streams[1:], 1):
        total = total + stream * mix[:, at : at + 1]
    return total
