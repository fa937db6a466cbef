"""Rotary tables against transformers and against high-precision cosines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ondevice.converters.architectures.rotary import RopeScaling
from ondevice.model.rope import Rope, cos_sin
from ondevice.model_config import ModelConfig
from tests.support.sources import tiny_config


def config(**changes: Any) -> ModelConfig:
    return tiny_config(head_dim=32, **changes)


def test_cos_sin_match_the_library_to_the_last_bits() -> None:
    generator = np.random.default_rng(0)
    angles = np.concatenate([generator.uniform(0, 1.6e6, 20000), np.arange(0, 40) * math.pi / 4])
    cos, sin = cos_sin(angles)
    np.testing.assert_allclose(cos, [math.cos(a) for a in angles], rtol=0, atol=2e-15)
    np.testing.assert_allclose(sin, [math.sin(a) for a in angles], rtol=0, atol=2e-15)


def test_tables_do_not_depend_on_how_positions_are_split() -> None:
    rope = Rope(config().ropes[0])
    cos, sin = rope.tables(np.arange(300))
    for position in (0, 1, 63, 64, 299):
        one_cos, one_sin = rope.tables(np.arange(position, position + 1))
        assert one_cos.tobytes() == cos[position].tobytes()
        assert one_sin.tobytes() == sin[position].tobytes()
    assert rope.tables(np.arange(7, 20))[0].tobytes() == cos[7:20].tobytes()


def test_position_zero_rotates_nothing() -> None:
    cos, sin = Rope(config().ropes[0]).tables(np.arange(1))
    assert (cos == 1).all()
    assert (sin == 0).all()


SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_tables_match_transformers(name: str, theta: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = SCALINGS[name]
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_context,
        }
    theirs = modeling.LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=64, num_attention_heads=2, head_dim=32, rope_theta=theta, rope_parameters=parameters
        )
    )
    expected_cos, expected_sin = theirs(torch.zeros(1), torch.arange(200)[None])
    cos, sin = Rope(config(rope_theta=theta, rope_scaling=scaling).ropes[0]).tables(np.arange(200))
    # One unit in a frequency's last place moves the angle at position 199 by 2e-5.
    np.testing.assert_allclose(cos, expected_cos[0, :, :16].numpy(), rtol=0, atol=3e-5)
    np.testing.assert_allclose(sin, expected_sin[0, :, :16].numpy(), rtol=0, atol=3e-5)


def test_llama3_scaling_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    plain = Rope(config().ropes[0]).frequencies
    scaled = Rope(config(rope_scaling=SCALINGS["llama3"]).ropes[0]).frequencies
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8, rel=1e-6)
    between = (scaled < plain) & (scaled > plain / 8 * 1.001)
    assert between.any()
