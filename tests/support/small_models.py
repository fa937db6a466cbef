"""Small bundles of every kind of model, of random weights, made without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ondevice.bundle.writer import BundleWriter
from ondevice.config import QuantConfig
from ondevice.kernels import _native
from ondevice.model_config import (
    NO_ATTENTION,
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    ModelConfig,
    RopeSpec,
)
from tests.golden.build import Recipe, fill, golden_config
from tests.support.sources import every_block

DENSE = golden_config(num_layers=5, hidden_act="silu", tie_embeddings=False)
RELU = golden_config(num_layers=4)


def _with_layers(config: ModelConfig, *layers: LayerSpec, **changes: object) -> ModelConfig:
    return replace(config, layers=layers, **changes)  # type: ignore[arg-type]


def _experts() -> ModelConfig:
    """A first layer that is dense, as in DeepSeek's models, and shared experts beside the others."""
    plain, spec = DENSE.layers[0], ExpertsSpec(6, 2, 32, "softmax", True, 1.0)
    wide = FeedForwardSpec("silu", neurons=6 * 32 + 64)
    mixed = replace(plain, feed_forward=wide, experts=spec)
    return _with_layers(DENSE, plain, mixed, mixed, mixed)


def _recurrent() -> ModelConfig:
    plain = DENSE.layers[0]
    delta = replace(plain, attention=NO_ATTENTION, delta=DeltaSpec(2, 4, 16, 16, 4))
    return _with_layers(
        DENSE, delta, delta, replace(plain, attention=replace(plain.attention, gated=True)), delta
    )


def _convolutions() -> ModelConfig:
    plain = DENSE.layers[0]
    conv = replace(plain, attention=NO_ATTENTION, conv=ConvSpec(64, 3))
    return _with_layers(DENSE, conv, plain, conv)


def _mixers() -> ModelConfig:
    """Nemotron-H's layers: mixers and attention, some without a feed-forward behind them."""
    plain, none = DENSE.layers[0], replace(DENSE.layers[0].feed_forward, neurons=0)
    mixer = replace(plain, attention=NO_ATTENTION, mamba2=Mamba2Spec(4, 24, 2, 16, 4, True, norm_groups=2))
    alone = replace(mixer, feed_forward=none)
    return _with_layers(DENSE, mixer, alone, mixer, replace(plain, feed_forward=none), alone, plain)


def _mixers_beside() -> ModelConfig:
    """Falcon-H1's layers: a mixer and attention on one norm."""
    plain = DENSE.layers[0]
    mixer = Mamba2Spec(3, 16, 1, 40, 3, norm="none", time_factor=0.75, gate_factor=0.5, out_factor=0.375)
    both = replace(plain, attention=replace(plain.attention, out_factor=0.625), mamba2=mixer)
    normed = replace(both, mamba2=replace(mixer, norm="before", least_time=0.01, most_time=0.5))
    return _with_layers(DENSE, both, normed, plain, both)


def _latent() -> ModelConfig:
    latent = LatentSpec(rank=32, turning=8, key_dim=16, value_dim=16, query_rank=24)
    layer = replace(DENSE.layers[0], attention=AttentionSpec(0.2, latent=latent))
    rope = RopeSpec((1.0, 0.1, 0.01, 0.001))
    return _with_layers(DENSE, layer, layer, layer, ropes=(rope,))


def _narrow_values() -> ModelConfig:
    """MiMo V2's attention: values narrower than keys, and windows in layers with more keys and sinks."""
    whole = replace(DENSE.layers[0], attention=AttentionSpec(0.2, value_dim=8, out_factor=0.75))
    local = replace(
        whole, attention=replace(whole.attention, window=9, sinks=True, num_kv_heads=DENSE.num_heads)
    )
    return _with_layers(DENSE, whole, local, local, whole, local)


def _many_blocks() -> ModelConfig:
    """Copies of the residual, per-layer inputs, low-rank blocks, cutoffs, layers that share keys."""
    plain = replace(golden_config(hidden_act="gelu").layers[0], norms="both", laurel_rank=8)
    cut = replace(plain, feed_forward=FeedForwardSpec("gelu", cutoff=0.5))
    wide = replace(plain, feed_forward=FeedForwardSpec("gelu", neurons=160))
    shares = replace(plain, attention=replace(plain.attention, keys_of=2))
    return _with_layers(
        golden_config(hidden_act="gelu"),
        *(cut, plain, wide, shares, replace(shares, scaled=True)),
        per_layer_width=16,
        per_layer_multiplier=2.0,
        residual_copies=3,
    )


MODELS: dict[str, ModelConfig] = {
    "dense": DENSE,
    "relu, tied": RELU,
    "experts": _experts(),
    "delta": _recurrent(),
    "convolutions": _convolutions(),
    "mixers": _mixers(),
    "mixers beside attention": _mixers_beside(),
    "latent": _latent(),
    "narrow values": _narrow_values(),
    "many blocks": _many_blocks(),
    "every plain block": every_block(),
}
"""Kinds of models. Their layers differ, so that a slice that takes another layer's can't pass for right."""


def write_small(folder: Path, config: ModelConfig, quant: QuantConfig | None = None) -> Path:
    """A bundle of random weights in the new folder `folder`, without a tokenizer."""
    recipe = Recipe(config, quant or QuantConfig(4))
    fill(BundleWriter(folder, config, recipe.quant, _native.crc32c, fingerprint="small"), recipe)
    return folder
