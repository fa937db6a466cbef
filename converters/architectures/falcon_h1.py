"""Falcon-H1: attention and a Mamba-2 mixer in parallel in every layer, and many constant multipliers.

Multipliers become factors in the specs, or are multiplied into norms and convolutions, which are float32.
Only the down projection is multiplied directly. In folders that MLX has written, most multipliers are already
part of the weights (mlx-lm 0.32, `falcon_h1.py`). The key's multiplier and, for values, that of attention
aren't, and mlx-lm ignores these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ondevice.converters.architectures.adapting import logits_scaled, renamed, written_by_mlx
from ondevice.converters.architectures.common import (
    Description,
    Family,
    Tensors,
    decoder,
    float32,
    read_activation,
    read_sizes,
    score_scale,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, ConfigReader, shown
from ondevice.converters.architectures.granite import read_factor, read_multiplier
from ondevice.converters.architectures.mamba2 import CONVOLUTION, mixer_tensors, read_mixer, require_silu
from ondevice.converters.architectures.rotary import read_rope
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.views import Scaled
from ondevice.errors import CheckpointError
from ondevice.model_config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec

NAMES = {
    "pre_ff_layernorm.weight": "post_attention_layernorm.weight",
    **{f"feed_forward.{which}_proj.weight": f"mlp.{which}_proj.weight" for which in ("gate", "up", "down")},
}
PARTS = ("z", "x", "b", "c", "dt")
"""What the numbers of `ssm_multipliers` multiply, in order."""


IN_WEIGHTS = ("ssm_in_multiplier", "ssm_out_multiplier", "attention_out_multiplier", "embedding_multiplier")
LISTS_IN_WEIGHTS = ("ssm_multipliers", "mlp_multipliers")
"""Multipliers that MLX's folders have already applied to their weights."""


def _read(reader: ConfigReader) -> Description:
    """The model of a checkpoint. Its `stored` is the model of a folder that MLX has written."""
    described = _described(reader, 1.0)

    def stored(tensors: Tensors) -> Description:
        return _by_mlx(reader) if written_by_mlx(tensors, CONVOLUTION) else described

    return replace(described, stored=stored)


def _by_mlx(reader: ConfigReader) -> Description:
    """The model of a folder that MLX has written."""
    embedding, logits = (
        read_multiplier(reader, key) for key in ("embedding_multiplier", "lm_head_multiplier")
    )
    for key in IN_WEIGHTS:
        reader = reader.with_value(key, 1.0)
    for key in LISTS_IN_WEIGHTS:
        reader = reader.with_value(key, None)
    # A head that is the embedding has the embedding's multiplier.
    tied = reader.boolean("tie_word_embeddings", False)
    reader = reader.with_value("lm_head_multiplier", logits / embedding if tied else 1.0)
    return _described(reader, read_multiplier(reader, "attention_in_multiplier"))


def _described(reader: ConfigReader, attended_in_weights: float) -> Description:
    """The model.

    attended_in_weights: the part of attention's input multiplier that query and key weights already contain.
    """
    sizes = read_sizes(reader, max_context=8192, kv_heads=8)
    for key in ("attention_bias", "mlp_bias", "projectors_bias"):
        reader.only(key, False)
    reader.only("mamba_use_mlp", True)
    # How many logits of a prompt are wanted.
    reader.integer("num_logits_to_keep", 1)
    activation = read_activation(reader)
    require_silu(activation, "hidden_act")
    parts = dict(zip(PARTS, _factors(reader, "ssm_multipliers", len(PARTS)), strict=True))
    input_factor = read_multiplier(reader, "ssm_in_multiplier")
    width = None if reader.is_null("mamba_d_ssm") else reader.integer("mamba_d_ssm", 1024)
    mixer = replace(
        read_mixer(reader, sizes, width),
        gate_factor=float32(input_factor * parts["z"]),
        time_factor=float32(input_factor * parts["dt"]),
        out_factor=read_factor(reader, "ssm_out_multiplier"),
    )
    before = reader.boolean("mamba_norm_before_gate", True)
    if not reader.boolean("mamba_rms_norm", False):
        mixer = replace(mixer, norm="none", norm_groups=1)
    elif before:
        mixer = replace(mixer, norm="before")
    attended, keys = (read_multiplier(reader, key) for key in ("attention_in_multiplier", "key_multiplier"))
    attention = AttentionSpec(
        float32(score_scale(sizes.head_dim) * (attended / attended_in_weights) ** 2 * keys),
        out_factor=float32(attended * read_multiplier(reader, "attention_out_multiplier")),
    )
    config = decoder(
        "falcon_h1",
        sizes,
        [LayerSpec(attention, FeedForwardSpec(activation), mamba2=mixer)] * sizes.num_layers,
        [read_rope(reader, sizes.head_dim, sizes.max_context)],
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-5)),
        tie_embeddings=reader.boolean("tie_word_embeddings", False),
        embedding_multiplier=read_factor(reader, "embedding_multiplier"),
    )
    adapt = partial(
        _adapt,
        config=config,
        channels={which: input_factor * parts[which] for which in "xbc"},
        neurons=_factors(reader, "mlp_multipliers", 2),
        logits=read_multiplier(reader, "lm_head_multiplier"),
    )
    return Description(config, adapt)


def _factors(reader: ConfigReader, key: str, count: int) -> list[float]:
    """The `count` multipliers at a key; all of them are 1 if the key is missing or null."""
    factors = reader.numbers(key) or [1.0] * count
    if len(factors) != count or not all(1e-6 <= factor <= 1e6 for factor in factors):
        raise CheckpointError(
            f"config.json: {key} is {shown(factors)}; it must be {count} numbers from 1e-6 to 1e6; "
            f"{CONFIG_REMEDY}"
        )
    return factors


def _adapt(
    tensors: Tensors,
    config: ModelConfig,
    channels: Mapping[str, float],
    neurons: Sequence[float],
    logits: float,
) -> Tensors:
    """The tensors under the names of `tensors.py`.

    channels: factors of x, b and c. neurons: factors of gates, and of the feed-forward's output. logits: the
    factor of logits.
    """
    adapted = dict(renamed(tensors, NAMES))
    if (norm := adapted.pop("model.final_layernorm.weight", None)) is not None:
        adapted[FINAL_NORM] = norm
    gates, outputs = neurons
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        # The norm before them scales gates and ups alike.
        for tensor, factor in ((name.norm("feed_forward_norm"), gates), (name.down, outputs / gates)):
            if tensor in adapted and factor != 1.0:
                adapted[tensor] = Scaled(tensor, adapted[tensor], factor)
    return logits_scaled(mixer_tensors(adapted, config, channels), logits)


FALCON_H1 = Family("falcon_h1", "FalconH1ForCausalLM", _read)
