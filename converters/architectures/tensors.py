"""Names and shapes of a checkpoint's tensors. The families share them; some biases and norms are optional."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class LayerNames:
    """Names of one layer's tensors in a checkpoint."""

    layer: int

    def projection(self, which: str) -> str:
        """Matrix of attention projection q, k, v or o."""
        return f"model.layers.{self.layer}.self_attn.{which}_proj.weight"

    def projection_bias(self, which: str) -> str:
        return f"model.layers.{self.layer}.self_attn.{which}_proj.bias"

    def head_norm(self, which: str) -> str:
        """Norm over one head of q or k."""
        return f"model.layers.{self.layer}.self_attn.{which}_norm.weight"

    @property
    def gate(self) -> str:
        return f"model.layers.{self.layer}.mlp.gate_proj.weight"

    @property
    def up(self) -> str:
        return f"model.layers.{self.layer}.mlp.up_proj.weight"

    @property
    def down(self) -> str:
        return f"model.layers.{self.layer}.mlp.down_proj.weight"

    @property
    def attention_norm(self) -> str:
        return f"model.layers.{self.layer}.input_layernorm.weight"

    @property
    def feed_forward_norm(self) -> str:
        return f"model.layers.{self.layer}.post_attention_layernorm.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model, by the names that all families share."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        name = LayerNames(layer)
        for projection, rows in zip("qkv", (config.query_size, config.kv_size, config.kv_size), strict=True):
            shapes[name.projection(projection)] = (rows, hidden)
            if config.attention_bias:
                shapes[name.projection_bias(projection)] = (rows,)
        shapes[name.projection("o")] = (hidden, config.query_size)
        if config.attention_output_bias:
            shapes[name.projection_bias("o")] = (hidden,)
        if config.qk_norm:
            shapes[name.head_norm("q")] = shapes[name.head_norm("k")] = (config.head_dim,)
        shapes |= {name.gate: (inner, hidden), name.up: (inner, hidden), name.down: (hidden, inner)}
        shapes |= {name.attention_norm: (hidden,), name.feed_forward_norm: (hidden,)}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes
