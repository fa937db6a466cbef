"""Infinities and NaN inside a pass: the same bits on every target, and never a plausible number again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.layout import neuron_layout
from ondevice.config import QuantConfig
from ondevice.kernels import _native
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model_config import ACTIVATIONS, FeedForwardSpec
from tests.support.sources import ArrayFeedForward, RecordSource, tiny_config, with_feed_forward

TARGETS = _native.available_targets()
BROKEN = [np.nan, np.inf, -np.inf]


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_backend(target: str) -> CpuBackend:
    return CpuBackend(make_runner(1, target), segment_neurons=64, piece_neurons=64)


def one(results: list[Float32]) -> Float32:
    """The result of all targets."""
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


@pytest.mark.fast("nan-*-relu", "nan-4-*", "inf-8-silu", "-inf-5-gelu")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("value", BROKEN)
def test_only_the_token_of_a_value_not_finite_is_spoilt_in_a_feed_forward_layer(
    bits: Any, activation: Any, value: float
) -> None:
    hidden, neurons = 100, 200
    config = with_feed_forward(
        tiny_config(hidden_size=hidden, intermediate_size=neurons), FeedForwardSpec(activation)
    )
    gate, up, down = (normal(neurons, hidden, seed=seed) / 10 for seed in range(3))
    source = ArrayFeedForward(gate, up, down, neuron_layout(config, QuantConfig(bits), 0))
    x = normal(4, hidden, seed=9)
    broken = x.copy()
    broken[2, 17] = value

    def run(target: str, x: Float32) -> Float32:
        backend = make_backend(target)
        layer = backend.load_feed_forward(0, source)
        layer.neurons = RecordSource(layer)
        return backend.feed_forward(x, layer, FeedForwardSpec(activation), ForwardBatch(range(len(x)))).copy()

    out = one([run(target, broken) for target in TARGETS])
    assert np.isnan(out[2]).all()
    others = [0, 1, 3]
    assert out[others].tobytes() == one([run(target, x) for target in TARGETS])[others].tobytes()


@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", BROKEN)
def test_only_tokens_that_attend_to_a_value_not_finite_are_spoilt(
    kv_bits: Any, where: str, value: float
) -> None:
    if where == "k" and kv_bits == 16 and not np.isnan(value):
        value = np.nan  # An infinite score is a limit: it may weigh nothing, and nothing is wrong.
    config = tiny_config(num_heads=2, num_kv_heads=2, head_dim=40)
    arrays = {name: normal(20, 2, 40, seed=seed) for seed, name in enumerate("qkv")}
    arrays[where][11, 1, 3] = value  # Finite values follow in the same lane.

    def run(target: str) -> Float32:
        backend, kv = make_backend(target), SequenceState(KVLayout(config, kv_bits))
        kv.reserve(20)
        qkv = np.concatenate([arrays[name].reshape(20, -1) for name in "qkv"], axis=1)
        cos, sin = np.ones((20, 20), np.float32), np.zeros((20, 20), np.float32)
        return np.array(
            backend.attend(qkv, kv, 0, 0, cos, sin, kv.layout.config.layers[0].attention)
        ).reshape(20, 2, 40)

    out = one([run(target) for target in TARGETS])
    broken = slice(11, 12) if where == "q" else slice(11, 20)
    assert not np.isfinite(out[broken, 1]).all(axis=1).any()
    out[broken, 1] = 0.0
    assert np.isfinite(out).all()
