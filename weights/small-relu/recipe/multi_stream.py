"""Multi-stream attention (Speculative Streaming, arXiv 2402.11131): adapters that draft the next tokens.

From a token's hidden state in the middle of the base, `gamma` streams go on through the last layers. Each has
its own embedding, and all have the same low-rank adapters. Stream j of the token at t drafts the token at
t + 1 + j. Streams see the base's keys and values up to t, and the earlier streams of the same t. The base
sees no streams.

Legend: B windows, T tokens, S positions with streams, G streams, D width, H heads, d head_dim, F neurons.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipe.config import Shape
from recipe.frozen import Frozen, FrozenLayer, LayerTrace, Trace
from recipe.model import HIDDEN, rotate

QUERY_BLOCK = 64
"""Positions whose streams attend together; keys after the block aren't multiplied."""
EMBEDDING_STD = 0.1


@dataclasses.dataclass(frozen=True)
class MultiStreamSizes:
    """Sizes of the streams: number of last layers with streams, streams per token, ranks of the adapters."""

    layers: int = 3
    gamma: int = 4
    attention_rank: int = 32
    feed_forward_rank: int = 80


class Adapter(nn.Module):
    """Low-rank adapter: down (R, in), up (out, R). `up` begins as zero, so it adds nothing at first."""

    def __init__(self, into: int, out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, into) / math.sqrt(into))
        self.up = nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        inner = functional.linear(x, self.down.to(x.dtype))
        return functional.linear(torch.relu(inner) if relu else inner, self.up.to(x.dtype))

    def merged(self, weight: Tensor) -> Tensor:
        """The sum of the weight and the adapter as one matrix, in the weight's type."""
        return (weight.float() + self.up @ self.down).to(weight.dtype)


class LayerAdapters(nn.Module):
    """The adapters of one stream layer."""

    def __init__(self, width: int, sizes: MultiStreamSizes) -> None:
        super().__init__()
        self.qkv = Adapter(width, 3 * width, sizes.attention_rank)
        self.out = Adapter(width, width, sizes.attention_rank)
        self.feed_forward = Adapter(width, width, sizes.feed_forward_rank)


class MultiStreams(nn.Module):
    """All trained parameters. The names of its state are those of a bundle's arrays."""

    def __init__(self, shape: Shape, sizes: MultiStreamSizes) -> None:
        super().__init__()
        width = shape.hidden_size
        self.sizes = sizes
        self.first_layer = shape.num_hidden_layers - sizes.layers
        self.embeddings = nn.Parameter(torch.randn(sizes.gamma, width) * EMBEDDING_STD)
        stream_layers = range(self.first_layer, shape.num_hidden_layers)
        self.layers = nn.ModuleDict({str(i): LayerAdapters(width, sizes) for i in stream_layers})

    def forward(
        self, base: Frozen, trace: Trace, positions: Tensor, stride: int = 1, masks: Sequence[Tensor] = ()
    ) -> Tensor:
        """(B, S, G, D) hidden states for the head, of the streams at `positions` (B, S).

        positions: ascending, the i-th below (i + 1) * stride. masks: for each stream layer (B, S, F), the
        neurons that streams may use; empty means all.
        """
        gamma = self.sizes.gamma
        rows = torch.arange(len(positions))[:, None]
        streams = trace.entering[rows, positions][:, :, None] + self.embeddings
        ahead = positions[:, :, None] + torch.arange(1, gamma + 1)
        turns = base.cos[ahead][:, None], base.sin[ahead][:, None]
        for index, left in enumerate(trace.layers):
            at = self.first_layer + index
            adapters = self.layers[str(at)]
            assert isinstance(adapters, LayerAdapters)
            layer = base.layers[at]
            at_turns = (positions, turns, stride)
            streams = streams + self._attention(base, layer, adapters, streams, left, *at_turns)
            mask = masks[index][:, :, None] if masks else None
            streams = streams + self._feed_forward(base, layer, adapters, streams, mask)
        return base.normed(streams, base.final_norm)

    def main(self, base: Frozen) -> Frozen:
        """The main stream of the shared mode: the base, with these adapters in its last layers too."""
        merged = object.__new__(Frozen)
        merged.__dict__.update(base.__dict__)
        merged.layers = list(base.layers)
        for name, adapters in self.layers.items():
            assert isinstance(adapters, LayerAdapters)
            layer, extra = base.layers[int(name)], adapters.feed_forward
            merged.layers[int(name)] = dataclasses.replace(
                layer,
                qkv=adapters.qkv.merged(layer.qkv),
                out=adapters.out.merged(layer.out),
                extra=(extra.down.to(base.dtype), extra.up.to(base.dtype)),
            )
        return merged

    def _attention(
        self,
        base: Frozen,
        layer: FrozenLayer,
        adapters: LayerAdapters,
        streams: Tensor,
        left: LayerTrace,
        positions: Tensor,
        turns: tuple[Tensor, Tensor],
        stride: int,
    ) -> Tensor:
        h = base.normed(streams, layer.attention_norm)
        qkv = functional.linear(h, layer.qkv) + adapters.qkv(h)
        heads, head_dim = base.shape.num_attention_heads, base.shape.head_dim
        split = qkv.unflatten(-1, (3 * heads, head_dim)).permute(0, 3, 1, 2, 4)
        q, k, v = split.split(heads, dim=1)
        q = rotate(q.float() / math.sqrt(head_dim), *turns).to(base.dtype)
        k = rotate(k.float(), *turns).to(base.dtype)
        mixed: Tensor = MultiStreamAttention.apply(q, k, v, left.keys, left.values, positions, stride)
        mixed = mixed.permute(0, 2, 3, 1, 4).flatten(3)
        return functional.linear(mixed, layer.out) + adapters.out(mixed)

    def _feed_forward(
        self, base: Frozen, layer: FrozenLayer, adapters: LayerAdapters, streams: Tensor, mask: Tensor | None
    ) -> Tensor:
        g = base.normed(streams, layer.feed_forward_norm)
        gate, up = functional.linear(g, layer.gate_up).chunk(2, dim=-1)
        gate = base.activation(gate)
        active = gate if mask is None else gate * mask
        return functional.linear(active * up, layer.down) + adapters.feed_forward(g, relu=True)


class MultiStreamAttention(torch.autograd.Function):
    """Softmax attention of streams over the base's tokens and the earlier streams, block by block.

    q (scaled), k, v: (B, H, S, G, d) of the streams. keys, values: (B, H, T, d) of the base. It is computed
    like `CausalAttention`, for the same reasons. Keys and values get gradients only if they need them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        stride: int,
    ) -> Tensor:
        tokens, gamma = keys.shape[2], q.shape[3]
        later = torch.full((gamma, gamma), HIDDEN).triu(1)
        mixed, weights = [], []
        for block, seen in _blocks(q.shape[2], tokens, stride):
            hidden = torch.arange(seen) > positions[:, block, None]
            scores = (q[:, :, block].flatten(2, 3) @ keys[:, :, :seen].transpose(2, 3)).float()
            scores = scores.unflatten(2, (-1, gamma)).masked_fill(hidden[:, None, :, None], HIDDEN)
            own = (q[:, :, block] @ k[:, :, block].transpose(3, 4)).float() + later
            weight = torch.softmax(torch.cat([scores, own], -1), dim=-1).to(v.dtype)
            weights.append(weight)
            from_base = weight[..., :seen].flatten(2, 3) @ values[:, :, :seen]
            mixed.append(from_base.unflatten(2, (-1, gamma)) + weight[..., seen:] @ v[:, :, block])
        out = torch.cat(mixed, dim=2)
        ctx.save_for_backward(q, k, v, keys, values, out, *weights)
        ctx.stride = stride
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys, values, out, *weights = ctx.saved_tensors
        (into_out,) = gradients
        into_out = into_out.to(q.dtype)
        inner = (into_out.float() * out.float()).sum(-1, keepdim=True)
        into_q, into_k, into_v = [], [], []
        shared = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        into_keys, into_values = torch.zeros(keys.shape), torch.zeros(values.shape)
        gamma = q.shape[3]
        blocks = _blocks(q.shape[2], keys.shape[2], ctx.stride)
        for weight, (block, seen) in zip(weights, blocks, strict=True):
            from_out = into_out[:, :, block]
            flat = from_out.flatten(2, 3)
            into_base = (flat @ values[:, :, :seen].transpose(2, 3)).unflatten(2, (-1, gamma))
            into_weight = torch.cat([into_base, from_out @ v[:, :, block].transpose(3, 4)], -1).float()
            into_scores = (weight.float() * (into_weight - inner[:, :, block])).to(q.dtype)
            main, own = into_scores[..., :seen].flatten(2, 3), into_scores[..., seen:]
            from_base = (main @ keys[:, :, :seen]).unflatten(2, (-1, gamma))
            into_q.append(from_base + own @ k[:, :, block])
            into_k.append(own.transpose(3, 4) @ q[:, :, block])
            into_v.append(weight[..., seen:].transpose(3, 4) @ from_out)
            if shared:
                into_keys[:, :, :seen] += main.transpose(2, 3) @ q[:, :, block].flatten(2, 3)
                into_values[:, :, :seen] += weight[..., :seen].flatten(2, 3).transpose(2, 3) @ flat
        base = (into_keys.to(keys.dtype), into_values.to(values.dtype)) if shared else (None, None)
        return torch.cat(into_q, 2), torch.cat(into_k, 2), torch.cat(into_v, 2), *base, None, None


def _blocks(positions: int, tokens: int, stride: int) -> list[tuple[slice, int]]:
    """Slices of positions that attend together, and the number of the base's tokens that each may see."""
    ends = [min(positions, start + QUERY_BLOCK) for start in range(0, positions, QUERY_BLOCK)]
    return [
        (slice(start, end), min(tokens, end * stride))
        for start, end in zip(range(0, positions, QUERY_BLOCK), ends, strict=True)
    ]


def recently_active(active: Tensor, tokens: int) -> Tensor:
    """(T, F) booleans: true if a neuron was active for any of the last `tokens` tokens, this one included."""
    reach = 1
    while reach < tokens:
        shift = min(reach, tokens - reach)
        active = active | functional.pad(active[:-shift], (0, 0, shift, 0))
        reach += shift
    return active
