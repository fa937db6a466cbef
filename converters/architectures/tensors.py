"""The names and shapes of a model's tensors in the converter.

They are those of a Llama checkpoint, and additional names for what a Llama lacks. `Description.adapt` gives
them to other families' tensors.

The rows of queries and keys are in rotate-half order: the pairs (i, i + Dh / 2) are rotated. A norm's weight
is what its input is multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ondevice.bundle.weight_shapes import layer_weight_shapes, model_weight_shapes
from ondevice.model_config import LayerSpec, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
FINAL_NORM_BIAS = "model.norm.bias"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
POSITIONS = "model.embed_positions.weight"
"""A row for each position, beginning with that of a text's first token."""
PER_LAYER = "model.embed_tokens_per_layer.weight"
"""Rows of per-layer inputs, all layers of a token in sequence."""

NormName = Literal["attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm"]
NORM_NAMES: tuple[NormName, ...] = get_args(NormName)
_NORM_NAMES: dict[NormName, str] = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "attention_output_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_output_norm": "feed_forward_output_layernorm",
}


@dataclass(frozen=True)
class LayerNames:
    """Names of one layer's tensors in a checkpoint."""

    layer: int

    def projection(self, which: str) -> str:
        """Name of the matrix of attention projection q, k, v or o."""
        return f"model.layers.{self.layer}.self_attn.{which}_proj.weight"

    def projection_bias(self, which: str) -> str:
        return f"model.layers.{self.layer}.self_attn.{which}_proj.bias"

    def head_norm(self, which: str) -> str:
        """The norm of q or k, over each head or over the complete projection."""
        return f"model.layers.{self.layer}.self_attn.{which}_norm.weight"

    def head_norm_bias(self, which: str) -> str:
        return f"model.layers.{self.layer}.self_attn.{which}_norm.bias"

    @property
    def gate(self) -> str:
        return f"model.layers.{self.layer}.mlp.gate_proj.weight"

    @property
    def up(self) -> str:
        return f"model.layers.{self.layer}.mlp.up_proj.weight"

    @property
    def down(self) -> str:
        return f"model.layers.{self.layer}.mlp.down_proj.weight"

    def neurons(self, spec: LayerSpec) -> tuple[str, ...]:
        """Names of the feed-forward's matrices, in the order of a record's rows: gate, up if it is gated,
        down.
        """
        return (self.gate, self.up, self.down) if spec.feed_forward.gated else (self.gate, self.down)

    def expert(self, expert: int, which: str) -> str:
        """Name of the matrix `gate`, `up` or `down` of an expert that is stored as matrices."""
        return f"model.layers.{self.layer}.experts.{expert}.{which}.weight"

    def expert_bias(self, expert: int, which: str) -> str:
        return f"model.layers.{self.layer}.experts.{expert}.{which}.bias"

    @property
    def gate_bias(self) -> str:
        return f"model.layers.{self.layer}.mlp.gate_proj.bias"

    @property
    def down_bias(self) -> str:
        return f"model.layers.{self.layer}.mlp.down_proj.bias"

    def norm(self, which: NormName) -> str:
        """Name of a norm's weight: of the norm on the input or the output of attention or the
        feed-forward.
        """
        return f"model.layers.{self.layer}.{_NORM_NAMES[which]}.weight"

    def norm_bias(self, which: NormName) -> str:
        return f"model.layers.{self.layer}.{_NORM_NAMES[which]}.bias"

    def weight(self, name: str) -> str:
        """Name of a weight of `layer_weight_shapes`. name: its name there."""
        return f"model.layers.{self.layer}.{name}"

    def norms(self, spec: LayerSpec) -> tuple[NormName, ...]:
        """Names of the norms that this layer has, in the order of a bundle."""
        return tuple(
            name
            for name in NORM_NAMES
            if (spec.norms_output if name.endswith("_output_norm") else spec.norms_input)
            and (spec.has_feed_forward or not name.startswith("feed_forward"))
        )


def expert_matrices(spec: LayerSpec) -> tuple[str, ...]:
    """Names of an expert's matrices, in the order of its record."""
    return ("gate", "up", "down") if spec.feed_forward.gated else ("gate", "down")


def expert_shapes(name: LayerNames, spec: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's expert tensors, stored as matrices, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    assert spec.experts is not None
    inner = spec.experts.neurons
    for expert in range(spec.experts.count):
        for which in expert_matrices(spec):
            shape = (hidden, inner) if which == "down" else (inner, hidden)
            shapes[name.expert(expert, which)] = shape
            if spec.experts.bias:
                shapes[name.expert_bias(expert, which)] = shape[:1]
    return shapes


def model_weight(name: str) -> str:
    """Name of a weight of `model_weight_shapes`."""
    return f"model.{name}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model, by name."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.embedding_size)}
    if config.learned_positions:
        shapes[POSITIONS] = (config.max_context, hidden)
    if config.per_layer_width:
        shapes[PER_LAYER] = (config.vocab_size, config.per_layer_size)
    shapes |= {model_weight(weight.name): weight.shape for weight in model_weight_shapes(config)}
    for layer, spec in enumerate(config.layers):
        name = LayerNames(layer)
        shapes |= {name.weight(weight.name): weight.shape for weight in layer_weight_shapes(config, spec)}
        for projection, rows in config.projection_sizes(spec).items():
            shapes[name.projection(projection)] = (rows, hidden)
            if spec.attention.bias:
                shapes[name.projection_bias(projection)] = (rows,)
        shapes[name.projection("o")] = (hidden, config.out_cols(spec))
        if spec.attention.output_bias:
            shapes[name.projection_bias("o")] = (hidden,)
        for which, size in zip("qk", config.head_norm_sizes(spec), strict=True):
            if size:
                shapes[name.head_norm(which)] = (size,)
                if spec.attention.head_norm_bias:
                    shapes[name.head_norm_bias(which)] = (size,)
        inner = config.records[layer]
        if inner:
            shapes |= {name.gate: (inner, hidden), name.down: (hidden, inner)}
        if inner and spec.feed_forward.gated:
            shapes[name.up] = (inner, hidden)
        if layer in config.expert_layers:
            shapes |= expert_shapes(name, spec, hidden)
        if spec.feed_forward.bias:
            shapes[name.gate_bias] = (inner,)
        if spec.feed_forward.output_bias:
            shapes[name.down_bias] = (hidden,)
        for norm in name.norms(spec):
            shapes[name.norm(norm)] = (hidden,)
            if config.norm.bias:
                shapes[name.norm_bias(norm)] = (hidden,)
    if config.final_norm:
        shapes[FINAL_NORM] = (hidden,)
        if config.norm.bias:
            shapes[FINAL_NORM_BIAS] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.embedding_size)
    if config.head_bias:
        shapes[HEAD_BIAS] = (config.vocab_size,)
    return shapes
