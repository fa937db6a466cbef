"""Bundles of models with Mamba-2 mixers: what their sections say, and what they may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ondevice.bundle.model_section import model_section, parse_model
from ondevice.bundle.strict_json import Section
from ondevice.errors import OndeviceError, UnsupportedModelError
from ondevice.model_config import (
    NO_ATTENTION,
    AttentionSpec,
    ConvSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    ModelConfig,
)
from tests.support.small_models import MODELS

PLAIN = FeedForwardSpec("silu")
NONE = FeedForwardSpec("silu", neurons=0)
MIXER = Mamba2Spec(4, 16, 2, 16)


@pytest.mark.parametrize("kind", ["mixers", "mixers beside attention", "narrow values"])
def test_a_section_says_all_of_a_config(kind: str) -> None:
    section = json.loads(json.dumps(model_section(MODELS[kind])))
    assert parse_model(Section(section, "model")) == MODELS[kind]
    # What stands for itself isn't written.
    assert "gate_factor" not in json.dumps(model_section(MODELS["mixers"]))


DAMAGE: dict[str, tuple[Any, str]] = {
    "heads": (3, "multiple of its groups"),
    "head_width": (0, "head_width"),
    "state_width": (1 << 20, "state_width"),
    "taps": (1, "taps"),
    "conv_bias": (1, "conv_bias"),
    "norm": ("behind", "norm"),
    "norm_groups": (7, "norm_groups"),
    "least_time": (-1.0, "least_time"),
    "most_time": (1e9, "most_time"),
    "gate_factor": (0.0, "gate_factor"),
    "other": (1, "other"),
}


@pytest.mark.parametrize("key", DAMAGE)
def test_a_damaged_section_is_refused(key: str) -> None:
    section = json.loads(json.dumps(model_section(MODELS["mixers"])))
    value, message = DAMAGE[key]
    section["layers"][0]["mamba2"][key] = value
    with pytest.raises(OndeviceError, match=message):
        parse_model(Section(section, "model"))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: replace(MIXER, norm="none", norm_groups=2), "norm_groups is 2"),
    (lambda: replace(MIXER, least_time=0.5, most_time=0.1), "the first not above the second"),
    (lambda: replace(MIXER, out_factor=float("nan")), "out_factor"),
    (lambda: LayerSpec(NO_ATTENTION, PLAIN, mamba2=MIXER, conv=ConvSpec(16, 3)), "one of the three"),
    (lambda: LayerSpec(AttentionSpec(0.25), PLAIN, conv=ConvSpec(16, 3)), "no attention beside"),
    (lambda: LayerSpec(NO_ATTENTION, PLAIN, parallel=True, mamba2=MIXER), "no parallel blocks"),
    (lambda: LayerSpec(NO_ATTENTION, PLAIN, "after", mamba2=MIXER), "need a norm before"),
    (lambda: LayerSpec(AttentionSpec(0.25), PLAIN, "both", mamba2=MIXER), "a norm before it alone"),
    (lambda: LayerSpec(AttentionSpec(0.25, gated=True), PLAIN, mamba2=MIXER), "neither gated nor latent"),
    (
        lambda: LayerSpec(AttentionSpec(0.25, latent=LatentSpec(32, 8, 16, 16)), PLAIN, mamba2=MIXER),
        "neither gated nor latent",
    ),
    (lambda: AttentionSpec(0.25, out_factor=0.0), "out_factor"),
    (lambda: AttentionSpec(0.25, value_dim=-1), "value_dim"),
    (lambda: AttentionSpec(0.25, value_dim=8, head_norm="head", value_norm=True), "beside latent attention"),
    (lambda: AttentionSpec(0.25, value_dim=8, latent=LatentSpec(32, 8, 16, 16)), "beside latent attention"),
    (lambda: with_values(MODELS["dense"].head_dim), "it must be below a key's"),
    (lambda: replace(NONE, output_bias=True), "without a feed-forward"),
    (lambda: replace(NONE, cutoff=0.5), "without a feed-forward"),
    (lambda: LayerSpec(AttentionSpec(0.25), NONE, parallel=True), "without a feed-forward"),
    (
        lambda: replace(MODELS["mixers"], layers=MODELS["mixers"].layers[1:2]).check_neurons(),
        "no layer has a feed-forward",
    ),
]


def with_values(width: int) -> ModelConfig:
    """A dense model whose values are so wide."""
    dense = MODELS["dense"]
    layer = replace(dense.layers[0], attention=replace(dense.layers[0].attention, value_dim=width))
    return replace(dense, layers=(layer,) * dense.num_layers)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_no_layer_can_be_is_refused(case: int) -> None:
    made, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        made()
