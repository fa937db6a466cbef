"""The base model as constants: matrices in one type, and forward passes that record keys, values and gates.

Streams are trained beside it on these records. Nothing here has gradients.

Legend: B windows, T tokens, D width, H heads, d head_dim, F neurons, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from recipe.model import Llama, rotate

LENGTHS = 64
"""Keys are read in multiples of this number."""
BEYOND = 16
"""Number of positions after the context that streams may have."""


@dataclass(frozen=True)
class FrozenLayer:
    """Weights of a layer.

    attention_norm, feed_forward_norm: (D,) float32. qkv (3D, D), out (D, D), gate_up (2F, D), down (D, F).
    extra: a second feed-forward beside the first, (R, D) and (D, R) with ReLU between, or None.
    """

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor
    extra: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class LayerTrace:
    """Records of the base in one layer. keys, values: (B, H, T, d), keys rotated; active: (B, T, F) bool."""

    keys: Tensor
    values: Tensor
    active: Tensor


@dataclass(frozen=True)
class Trace:
    """Records of a forward pass over (B, T) tokens.

    entering: (B, T, D) float32 hidden states that enter the first stream layer. layers: records of the stream
    layers only. final: (B, T, D) hidden states for the head.
    """

    entering: Tensor
    layers: tuple[LayerTrace, ...]
    final: Tensor


class Frozen:
    """A Llama's weights, detached, in `dtype`; norms and the residual stream stay float32."""

    def __init__(self, model: Llama, dtype: torch.dtype) -> None:
        shape = model.shape
        self.activation = functional.relu if shape.hidden_act == "relu" else functional.silu
        self.shape, self.dtype = shape, dtype
        self.layers = []
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            self.layers.append(
                FrozenLayer(
                    block.input_layernorm.weight.detach().clone(),
                    qkv.detach().to(dtype),
                    attention.o_proj.weight.detach().to(dtype),
                    block.post_attention_layernorm.weight.detach().clone(),
                    gate_up.detach().to(dtype),
                    mlp.down_proj.weight.detach().to(dtype),
                )
            )
        self.table = model.model.embed_tokens.weight.detach().clone()
        self.head = self.table.to(dtype)
        self.final_norm = model.model.norm.weight.detach().clone()
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        turns = torch.arange(shape.max_position_embeddings + BEYOND)[:, None] / shape.rope_theta**exponents
        self.cos, self.sin = turns.cos(), turns.sin()

    @property
    def zeros_gates(self) -> bool:
        """Whether most gates are exactly zero."""
        return self.shape.hidden_act == "relu"

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of float32 (..., D), in the matrices' type."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        return (weight * (x * scale)).to(self.dtype)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, d), not rotated, of qkv (B, T, 3D)."""
        heads = self.shape.num_attention_heads
        split = qkv.unflatten(-1, (3 * heads, self.shape.head_dim)).transpose(1, 2)
        q, k, v = split.split(heads, dim=1)
        return q, k, v

    def rotated(self, x: Tensor, start: int = 0) -> Tensor:
        """x (B, H, T, d), rotated for the positions start, start + 1, ..."""
        part = slice(start, start + x.shape[2])
        return rotate(x.float(), self.cos[part], self.sin[part]).to(self.dtype)

    def layer(self, layer: FrozenLayer, x: Tensor) -> tuple[Tensor, LayerTrace]:
        """One layer over whole windows (B, T, D)."""
        q, k, v = self.heads(functional.linear(self.normed(x, layer.attention_norm), layer.qkv))
        k = self.rotated(k)
        mixed = functional.scaled_dot_product_attention(self.rotated(q), k, v, is_causal=True)
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), layer.out)
        change, active = self.feed_forward(layer, x)
        return x + change, LayerTrace(k, v, active)

    def feed_forward(self, layer: FrozenLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output (..., D) of the feed-forward, and booleans (..., F): true where a neuron is not zero."""
        g = self.normed(x, layer.feed_forward_norm)
        gate, up = functional.linear(g, layer.gate_up).chunk(2, dim=-1)
        change = functional.linear(self.activation(gate) * up, layer.down)
        if layer.extra is not None:
            into, back = layer.extra
            change = change + functional.linear(torch.relu(functional.linear(g, into)), back)
        return change, gate > 0

    def trace(self, ids: Tensor, first_layer: int) -> Trace:
        """Run one forward pass over (B, T) tokens and record the layers from `first_layer` on."""
        x = functional.embedding(ids, self.table)
        entering, traces = x, []
        for index, layer in enumerate(self.layers):
            if index == first_layer:
                entering = x
            x, trace = self.layer(layer, x)
            if index >= first_layer:
                traces.append(trace)
        return Trace(entering, tuple(traces), self.normed(x, self.final_norm))

    def step(self, ids: Tensor, at: int, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(B, V) logits after the tokens (B,) at position `at`.

        caches: keys and values (B, H, T, d) by layer; the new ones are added.
        """
        x = functional.embedding(ids[:, None], self.table)
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            q, k, v = self.heads(functional.linear(self.normed(x, layer.attention_norm), layer.qkv))
            keys[:, :, at : at + 1], values[:, :, at : at + 1] = self.rotated(k, at), v
            # Few different lengths: the library makes and keeps its own kernels for each.
            end = min(keys.shape[2], (at // LENGTHS + 1) * LENGTHS)
            scores = (self.rotated(q, at) @ keys[:, :, :end].transpose(2, 3)).float()
            scores[..., at + 1 :] = -math.inf
            chances = torch.softmax(scores / math.sqrt(self.shape.head_dim), -1).to(self.dtype)
            mixed = chances @ values[:, :, :end]
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), layer.out)
            x = x + self.feed_forward(layer, x)[0]
        return functional.linear(self.normed(x[:, 0], self.final_norm), self.head)

    def caches(self, batch: int, tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Empty keys and values (B, H, T, d) of every layer, for `step`."""
        shape = (batch, self.shape.num_attention_heads, tokens, self.shape.head_dim)
        # Positions after the last token are multiplied by zero chances, so they must be finite.
        room = torch.zeros(len(self.layers), 2, *shape, dtype=self.dtype)
        return [(keys, values) for keys, values in room]
