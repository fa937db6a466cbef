"""Config keys that the families share: sizes, activation, rotary embedding and sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ondevice.config import Activation, ModelConfig, RopeScaling
from ondevice.converters.architectures.config_reader import ConfigReader, shown
from ondevice.errors import CheckpointError, UnsupportedModelError

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


@dataclass(frozen=True)
class Family:
    """A model family: its names in `config.json`, and the function that reads its keys into a ModelConfig."""

    model_type: str
    class_name: str
    read: Callable[[ConfigReader], ModelConfig]


def base_config(
    reader: ConfigReader,
    architecture: str,
    *,
    max_context: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """The ModelConfig fields that all families read alike.

    max_context, kv_heads, head_dim: the family's values for missing keys. For the last two, None or a null
    key means as many key-value heads as heads, and hidden_size / heads.
    """
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    if num_heads < 1:
        raise CheckpointError(f"config.json: num_attention_heads is {num_heads}")
    if kv_heads is None or reader.has("num_key_value_heads"):
        kv_heads = reader.integer("num_key_value_heads", num_heads)
    if head_dim is None or reader.has("head_dim"):
        head_dim = reader.integer("head_dim", hidden_size // num_heads)
    activation = reader.text("hidden_act", "silu")
    if activation not in ACTIVATION_NAMES:
        raise UnsupportedModelError(
            f"config.json: hidden_act {shown(activation)} is not one of {', '.join(ACTIVATION_NAMES)}"
        )
    num_layers = reader.integer("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise UnsupportedModelError(
            f"config.json: num_hidden_layers is {num_layers}; the most is {MAX_LAYERS}"
        )
    context = reader.integer("max_position_embeddings", max_context)
    theta, scaling = _rope(reader, context)
    reader.only("partial_rotary_factor", 1.0)
    return {
        "architecture": architecture,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": reader.integer("intermediate_size"),
        "vocab_size": reader.integer("vocab_size"),
        "max_context": context,
        "hidden_act": ACTIVATION_NAMES[activation],
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": reader.boolean("tie_word_embeddings", False),
    }


def windows_by_layer(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Sliding window of each layer in tokens, from the keys of Qwen2 and Qwen3; 0 for full attention.

    A missing window is 4096. A null window switches all windows off, whatever use_sliding_window says.
    """
    window = reader.integer("sliding_window", 4096)
    check_window(window)
    first = reader.integer("max_window_layers", 28)
    kinds = reader.texts("layer_types")
    enabled = reader.boolean("use_sliding_window", False) and not reader.is_null("sliding_window")
    if kinds is None:
        return tuple(window if enabled and i >= first else 0 for i in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"config.json: layer_types has {', '.join(sorted(unknown))}")
    if len(kinds) != num_layers or ("sliding_attention" in kinds and not enabled):
        raise CheckpointError(
            f"config.json: layer_types names {len(kinds)} layers of {num_layers}, or sliding layers while "
            "use_sliding_window is false or sliding_window is null; take config.json from the model's own "
            "repository"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def check_window(window: int) -> None:
    """Raises CheckpointError for a sliding window of no tokens."""
    if window < 1:
        raise CheckpointError(f"config.json: sliding_window is {window}; it must be 1 or more, or null")


def _rope(reader: ConfigReader, max_context: int) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters`."""
    older, newer = reader.section("rope_scaling"), reader.section("rope_parameters")
    if older and newer and older != newer:
        raise CheckpointError("config.json: rope_scaling and rope_parameters contradict each other")
    where = "config.json: rope_parameters" if newer else "config.json: rope_scaling"
    theta = reader.number("rope_theta", 10000.0)
    original = reader.integer("original_max_position_embeddings", max_context)
    rope = ConfigReader(newer or older or {}, where)
    older_kind = rope.text("type", rope.text("rope_type", "default"))
    kind = rope.text("rope_type", older_kind)
    if kind != older_kind:
        raise CheckpointError(f"{where}: rope_type {shown(kind)} and type {shown(older_kind)} contradict")
    theta = rope.number("rope_theta", theta)
    rope.only("partial_rotary_factor", 1.0)
    scaling = None
    if kind in ("linear", "llama3"):
        fields: dict[str, Any] = {
            "kind": kind,
            "factor": rope.number("factor"),
        }
        if kind == "llama3":
            fields["low_freq_factor"] = rope.number("low_freq_factor")
            fields["high_freq_factor"] = rope.number("high_freq_factor")
            inner = rope.integer("original_max_position_embeddings", original)
            outer_wins = reader.has("original_max_position_embeddings")
            fields["original_max_context"] = original if outer_wins else inner
        scaling = RopeScaling(**fields)
        _check_scaling(scaling, where)
    elif kind != "default":
        raise UnsupportedModelError(f"{where}: {shown(kind)} is not one of default, linear, llama3")
    unused = {"original_max_position_embeddings", *(["factor"] if kind == "default" else [])}
    rope.close(frozenset(unused))
    return theta, scaling


def _check_scaling(scaling: RopeScaling, where: str) -> None:
    if scaling.factor < 1.0 or not 0.0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise CheckpointError(
            f"{where}: factor must be 1 or more, and high_freq_factor above low_freq_factor above 0"
        )
