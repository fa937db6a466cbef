"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from ondevice.converters.architectures.common import (
    Description,
    Family,
    check_window,
    decoder,
    read_activation,
    read_layer_types,
    read_sizes,
    require_windows,
    score_scale,
    uniform_layers,
)
from ondevice.converters.architectures.config_reader import CONFIG_REMEDY, ConfigReader
from ondevice.converters.architectures.rotary import no_rope, read_rope
from ondevice.errors import CheckpointError
from ondevice.model_config import AttentionSpec, NormSpec


def _read(reader: ConfigReader) -> Description:
    sizes = read_sizes(reader, max_context=32768, kv_heads=4)
    count = sizes.num_layers
    interval = reader.integer("no_rope_layer_interval", 4)
    named = reader.numbers("no_rope_layers")
    if interval < 1 or (named is not None and (len(named) < count or not set(named) <= {0.0, 1.0})):
        raise CheckpointError(
            "config.json: no_rope_layers must hold 0 or 1 for each layer, and no_rope_layer_interval be 1 or "
            f"more; {CONFIG_REMEDY}"
        )
    rotates = (
        [bool(value) for value in named[:count]]
        if named
        else [bool((i + 1) % interval) for i in range(count)]
    )
    # Keys of the files that the architecture doesn't use.
    reader.integer("max_window_layers", 28)
    reader.integer("pretraining_tp", 1)
    window = 0
    enabled = reader.boolean("use_sliding_window", False)
    if reader.has("sliding_window") and not reader.is_null("sliding_window"):
        window = reader.integer("sliding_window")
        check_window(window)
    enabled = enabled and window > 0
    kinds = read_layer_types(reader, count)
    if kinds is None:
        kinds = ["sliding_attention" if enabled and not rotary else "full_attention" for rotary in rotates]
    require_windows(kinds, enabled)
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    bias = reader.boolean("attention_bias", False)
    reader.only("mlp_bias", False)
    attention = AttentionSpec(score_scale(sizes.head_dim), bias=bias, output_bias=bias)
    layers = [
        replace(layer, attention=replace(layer.attention, rope=int(not rotary)))
        for layer, rotary in zip(
            uniform_layers(count, attention, read_activation(reader), windows), rotates, strict=True
        )
    ]
    ropes = [
        read_rope(reader, sizes.head_dim, sizes.max_context, theta=2_000_000.0),
        no_rope(sizes.head_dim),
    ]
    config = decoder(
        "smollm3",
        sizes,
        layers,
        ropes,
        norm=NormSpec("rms", reader.number("rms_norm_eps", 1e-6)),
        tie_embeddings=reader.boolean("tie_word_embeddings", True),
    )
    return Description(config)


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read)
