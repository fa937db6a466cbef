"""What the families share: keys of sizes and activations, and the config of a model with equal layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, ConfigReader, shown
from ondevice.converters.architectures.rotary import RopeScaling, read_rope, rope_spec
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import (
    SIZE_LIMITS,
    Activation,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelConfig,
    NormPlaces,
    NormSpec,
    RopeSpec,
    UpActivation,
)

ACTIVATION_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
MAX_LAYERS = 1024
GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`: attention to all tokens, and to those of a window."""

Tensors = Mapping[str, SourceTensor]
"""A checkpoint's tensors by name."""


def unchanged(tensors: Tensors) -> Tensors:
    """The tensors as they are, for a family that names and shapes them as `tensors.py` does."""
    return tensors


@dataclass(frozen=True)
class Description:
    """A checkpoint's model, as its `config.json` describes it.

    adapt: gives the checkpoint's tensors the names, shapes and order that `tensors.py` describes.
    notes: sentences for users on what was left out.
    stored: given the tensors, returns the description of the same model if multipliers in the config are
        already part of the tensors; None if that never happens.
    ahead: returns the layer that predicts one more token, as a one-layer model, and its tensors, as
        `layers_ahead.py` describes them; None in families without it. It raises CheckpointError for a
        checkpoint without the layer, and UnsupportedModelError for a layer of another form.
    """

    config: ModelConfig
    adapt: Callable[[Tensors], Tensors] = unchanged
    notes: tuple[str, ...] = ()
    ahead: Callable[[Tensors], tuple[ModelConfig, Tensors]] | None = None
    stored: Callable[[Tensors], Description] | None = None


@dataclass(frozen=True)
class Family:
    """A model family.

    Args:
        model_type, class_name: its names in `config.json`.
        read: reads its keys.
        other_classes: other class names for the same model.
    """

    model_type: str
    class_name: str
    read: Callable[[ConfigReader], Description]
    other_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The keys that all families share."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int


def read_sizes(
    reader: ConfigReader,
    *,
    max_context: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    heads: int | None = None,
    vocab_size: int | None = None,
    neurons: tuple[str, int | None] = ("intermediate_size", None),
) -> Sizes:
    """The sizes in `config.json`.

    Args:
        reader: reads `config.json`.
        max_context, heads, vocab_size: the family's values for missing keys; None if the key is required.
        neurons: the key for the number of neurons, and its value if it is missing.
        kv_heads, head_dim: values for missing keys. None or a null key means as many key-value heads as
            heads, and hidden_size / heads.
    """
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads", heads)
    if min(hidden_size, num_heads) < 1:
        raise CheckpointError(
            f"config.json: hidden_size is {hidden_size} and num_attention_heads {num_heads}; both must be 1 "
            "or more"
        )
    if kv_heads is None or reader.has("num_key_value_heads"):
        kv_heads = reader.integer("num_key_value_heads", num_heads)
    if head_dim is None or reader.has("head_dim"):
        head_dim = reader.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError(
            f"config.json: a head would have {head_dim} dimensions, of hidden_size {hidden_size} and "
            f"num_attention_heads {num_heads}; odd numbers aren't supported"
        )
    if not 1 <= kv_heads <= num_heads or num_heads % kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads is {kv_heads}; it must divide num_attention_heads, {num_heads}"
        )
    if not 1 <= head_dim <= SIZE_LIMITS["head_dim"]:
        # Before anything is made for each of them.
        raise CheckpointError(
            f"config.json: a head would have {head_dim} dimensions; the most is {SIZE_LIMITS['head_dim']}"
        )
    num_layers = reader.integer("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"config.json: num_hidden_layers is {num_layers}; it must be from 1 to {MAX_LAYERS}"
        )
    context = reader.integer("max_position_embeddings", max_context)
    if context < 1:
        raise CheckpointError(f"config.json: max_position_embeddings is {context}; it must be 1 or more")
    return Sizes(
        hidden_size,
        num_layers,
        num_heads,
        kv_heads,
        head_dim,
        reader.integer(*neurons),
        reader.integer("vocab_size", vocab_size),
        context,
    )


def read_activation(reader: ConfigReader, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation's name in this package. Raises UnsupportedModelError for an unknown one."""
    activation = reader.text(key, default)
    if activation not in ACTIVATION_NAMES:
        raise UnsupportedModelError(
            f"config.json: {key} {shown(activation)} is not one of {', '.join(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[activation]


def read_feed_forward(
    reader: ConfigReader, *, default: str = "silu", up_activation: UpActivation = "none"
) -> FeedForwardSpec:
    """The gated feed-forward in `config.json`. Its activation may be `fatrelu` with the threshold
    `hidden_act_param`.

    Raises UnsupportedModelError for an unknown activation and for a threshold below zero.
    """
    if reader.text("hidden_act", default) != "fatrelu":
        return FeedForwardSpec(read_activation(reader, default=default), up_activation=up_activation)
    least = np.float32(reader.number("hidden_act_param"))
    if least == 0:
        return FeedForwardSpec("relu", up_activation=up_activation)
    # A gate equal to the parameter counts (arXiv 2402.13516, in its authors' code); ours must exceed it.
    threshold = np.nextafter(least, -np.float32(np.inf))
    return FeedForwardSpec("fatrelu", threshold=float(threshold), up_activation=up_activation)


def score_scale(width: float) -> float:
    """1 / sqrt(width) in float32: the usual factor of attention scores, for heads of `width` dimensions."""
    return float(np.float32(1.0) / np.sqrt(np.float32(width)))


def decoder(
    architecture: str,
    sizes: Sizes,
    layers: Sequence[LayerSpec],
    ropes: Sequence[RopeSpec],
    **options: Any,
) -> ModelConfig:
    """The ModelConfig with these sizes and layers. options: its other fields."""
    return ModelConfig(
        architecture,
        sizes.hidden_size,
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        sizes.intermediate_size,
        sizes.vocab_size,
        sizes.max_context,
        ropes=tuple(ropes),
        layers=tuple(layers),
        **options,
    )


def uniform_layers(
    count: int,
    attention: AttentionSpec,
    feed_forward: Activation | FeedForwardSpec,
    windows: Sequence[int] = (),
    norms: NormPlaces = "before",
) -> list[LayerSpec]:
    """`count` layers that are equal, except for their attention windows if `windows` is given.

    feed_forward: the layers' feed-forward, or only the activation of a gated one.
    """
    if not isinstance(feed_forward, FeedForwardSpec):
        feed_forward = FeedForwardSpec(feed_forward)
    return [
        LayerSpec(replace(attention, window=window), feed_forward, norms)
        for window in windows or [attention.window] * count
    ]


def llama_config(
    architecture: str,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    vocab_size: int,
    max_context: int,
    hidden_act: Activation,
    rms_norm_eps: float,
    rope_theta: float,
    rope_scaling: RopeScaling | None = None,
    *,
    attention_bias: bool = False,
    attention_output_bias: bool = False,
    qk_norm: bool = False,
    tie_embeddings: bool = False,
    layer_windows: Sequence[int] = (),
) -> ModelConfig:
    """A model with the blocks of Llama, Mistral, Qwen2 or Qwen3, whose layers may differ in their windows.

    Args:
        architecture: the family's name.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        intermediate_size, vocab_size, max_context: sizes.
        hidden_act: activation of the feed-forward's gates.
        rms_norm_eps: epsilon of the norms.
        rope_theta: rotary base.
        rope_scaling: scaling of rotary frequencies.
        attention_bias: whether queries, keys and values have biases.
        attention_output_bias: whether the attention output has one.
        qk_norm: whether each head's queries and keys are normed.
        tie_embeddings: whether the head is the embedding table.
        layer_windows: attention window of each layer; empty for full attention.
    """
    sizes = Sizes(
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size,
        vocab_size,
        max_context,
    )
    attention = AttentionSpec(
        score_scale(head_dim),
        head_norm="head" if qk_norm else "none",
        bias=attention_bias,
        output_bias=attention_output_bias,
    )
    return decoder(
        architecture,
        sizes,
        uniform_layers(num_layers, attention, hidden_act, layer_windows),
        [rope_spec(rope_theta, head_dim, rope_scaling)],
        norm=NormSpec("rms", rms_norm_eps),
        tie_embeddings=tie_embeddings,
    )


def read_llama(
    reader: ConfigReader,
    architecture: str,
    *,
    max_context: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    attention: Mapping[str, Any] | None = None,
    windows: Callable[[int], Sequence[int]] = lambda num_layers: (),
    up_activation: UpActivation = "none",
    eps: float = 1e-6,
) -> ModelConfig:
    """The ModelConfig of a family that has the blocks of a Llama, read from the keys of a Llama.

    Args:
        reader: reads `config.json`.
        architecture: the family's name.
        max_context, kv_heads, head_dim: as in `read_sizes`.
        attention: fields of every AttentionSpec.
        windows: the attention window of each layer, given their number; empty for full attention.
        up_activation: the activation of the up projection.
        eps: the norms' epsilon if its key is missing.
    """
    sizes = read_sizes(reader, max_context=max_context, kv_heads=kv_heads, head_dim=head_dim)
    spec = AttentionSpec(score_scale(sizes.head_dim), **(attention or {}))
    feed_forward = read_feed_forward(reader, up_activation=up_activation)
    layers = uniform_layers(sizes.num_layers, spec, feed_forward, windows(sizes.num_layers))
    return decoder(
        architecture,
        sizes,
        layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", eps)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
    )


def check_code(reader: ConfigReader, module: str) -> None:
    """Check `auto_map`. Raises UnsupportedModelError if it names other code than the family's.

    The family's code is never run, because this package knows what it computes. module: the end of its files'
    names, as in `modeling_phi3`.
    """
    code = reader.section("auto_map") or {}
    module_prefixes = (f"configuration_{module}.", f"modeling_{module}.")
    for key, value in code.items():
        if key != "AutoTokenizer" and not str(value).rpartition("--")[2].startswith(module_prefixes):
            raise UnsupportedModelError(
                f"config.json: auto_map is {shown(code)}, which isn't {module}'s own code"
            )


def read_windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer in tokens, from the keys of Qwen2 and Qwen3; 0 for full attention.

    A missing window is 4096. A null window switches all windows off, whatever use_sliding_window says.
    """
    window = reader.integer("sliding_window", 4096)
    check_window(window)
    first = reader.integer("max_window_layers", 28)
    enabled = reader.boolean("use_sliding_window", False) and not reader.is_null("sliding_window")
    kinds = read_layer_types(reader, num_layers)
    if kinds is None:
        return tuple(window if enabled and i >= first else 0 for i in range(num_layers))
    require_windows(kinds, enabled)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def require_windows(kinds: Sequence[str], enabled: bool) -> None:
    """Check layers' kinds. Raises CheckpointError for sliding layers if no windows are enabled."""
    if "sliding_attention" in kinds and not enabled:
        raise CheckpointError(
            "config.json: layer_types names sliding layers while use_sliding_window is false or "
            f"sliding_window is null; {CONFIG_REMEDY}"
        )


def read_layer_types(
    reader: ConfigReader, num_layers: int, known: Sequence[str] = (GLOBAL, LOCAL)
) -> list[str] | None:
    """The `layer_types` in `config.json`, each one of the kinds `known`; None if the key is missing."""
    kinds = reader.texts("layer_types")
    if kinds is None:
        return None
    unknown = set(kinds) - set(known)
    if unknown:
        raise UnsupportedModelError(f"config.json: layer_types has {', '.join(sorted(unknown))}")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers of {num_layers}; {CONFIG_REMEDY}"
        )
    return kinds


def check_window(window: int) -> None:
    """Check a sliding window. Raises CheckpointError if it is 0 tokens."""
    if window < 1:
        raise CheckpointError(f"config.json: sliding_window is {window}; it must be 1 or more, or null")


def float32(value: float) -> float:
    """`value` rounded to float32."""
    return float(np.float32(value))
