"""The model in PyTorch: `transformers`' LlamaForCausalLM or OlmoeForCausalLM, with its parameter names, made
fast on a CPU.

Matrices are multiplied in `product_type()` while training and in float32 while evaluating. The residual
stream, norms and losses are always float32.

Legend: B windows, T tokens, D width, F neurons, V vocabulary, E experts, k chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ondevice.converters.quantize import dequantize, quantize
from ondevice.kernels import _native
from ondevice.units import usable_cores
from recipe.config import Shape, StoredBits
from recipe.precision import product_type

LOSS_CHUNK = 1024
"""Tokens whose logits are in memory at a time."""
QUERY_BLOCK = 128
"""Queries that attend together; keys after the block aren't multiplied."""
HIDDEN = -1e30
INITIAL_STD = 0.03


def stored(weight: Tensor, bits: StoredBits, dim: int = 1) -> Tensor:
    """The weights as a bundle of `bits` bits gives them back, in groups along `dim`. 0 bits: unchanged.

    The gradient passes straight through (Bengio and others, arXiv 1308.3432), so that the trained weights
    survive rounding. The arithmetic is the converter's own.
    """
    if not bits:
        return weight
    rows = (weight if dim == 1 else weight.t()).detach().contiguous().numpy()
    rounded = torch.from_numpy(dequantize(quantize(_runner(), rows, bits, "weights"), bits, rows.shape[1]))
    return weight + ((rounded if dim == 1 else rounded.t()) - weight).detach()


@cache
def _runner() -> _native.Runner:
    return _native.Runner(usable_cores())


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads, self.head_dim = shape.num_attention_heads, shape.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        # OLMoE's norms, over all heads together.
        self.q_norm = RMSNorm(width, shape.rms_norm_eps) if shape.num_experts else None
        self.k_norm = RMSNorm(width, shape.rms_norm_eps) if shape.num_experts else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, bits: StoredBits) -> Tensor:
        batch, tokens, width = x.shape
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        weight = stored(weight, bits).to(dtype)
        qkv = functional.linear(x.to(dtype), weight)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.chunk(3, dim=-1)
            qkv = torch.cat([self.q_norm(q.float()).to(dtype), self.k_norm(k.float()).to(dtype), v], dim=-1)
        qkv = qkv.view(batch, tokens, 3 * self.heads, self.head_dim)
        q, k, v = qkv.transpose(1, 2).split(self.heads, dim=1)
        scale = 1 / math.sqrt(self.head_dim)
        q = rotate(q.float() * scale, cos, sin).to(dtype)
        mixed: Tensor = CausalAttention.apply(q, rotate(k.float(), cos, sin).to(dtype), v)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        return functional.linear(mixed, stored(self.o_proj.weight, bits).to(dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, T, head_dim), pairing element j with j + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class CausalAttention(torch.autograd.Function):
    """Softmax attention of (B, heads, T, head_dim) with scaled queries, computed block by block.

    It takes 0.4 of the time of torch's own kernel here, whose backward pass is slow on CPUs. Blocks skip most
    of the masked scores, and only the attention weights, in the matrices' type, are kept for the backward
    pass.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        mask = torch.full((tokens, tokens), HIDDEN).triu(1)
        mixed, weights = [], []
        for start in range(0, tokens, QUERY_BLOCK):
            end = min(tokens, start + QUERY_BLOCK)
            scores = (q[:, :, start:end] @ k[:, :, :end].transpose(2, 3)).float() + mask[start:end, :end]
            weights.append(torch.softmax(scores, dim=-1).to(v.dtype))
            mixed.append(weights[-1] @ v[:, :, :end])
        out = torch.cat(mixed, dim=2)
        ctx.save_for_backward(q, k, v, out, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, *weights = ctx.saved_tensors
        (into_out,) = gradients
        inner = (into_out.float() * out.float()).sum(-1, keepdim=True)
        into_q = []
        into_k = torch.zeros(k.shape)
        into_v = torch.zeros(v.shape)
        start = 0
        for weight in weights:
            end = start + weight.shape[2]
            from_out, rest = into_out[:, :, start:end], inner[:, :, start:end]
            into_weight = (from_out @ v[:, :, :end].transpose(2, 3)).float()
            into_scores = (weight.float() * (into_weight - rest)).to(q.dtype)
            into_q.append(into_scores @ k[:, :, :end])
            into_k[:, :, :end] += into_scores.transpose(2, 3) @ q[:, :, start:end]
            into_v[:, :, :end] += weight.transpose(2, 3) @ from_out
            start = end
        return torch.cat(into_q, dim=2), into_k.to(k.dtype), into_v.to(v.dtype)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.activation = functional.relu if shape.hidden_act == "relu" else functional.silu

    def gate(self, x: Tensor) -> Tensor:
        """(B, T, F) gate activations."""
        return self.activation(self.gate_proj(x))

    def forward(self, x: Tensor, dtype: torch.dtype, bits: StoredBits) -> tuple[Tensor, Tensor]:
        """The feed-forward's output, and the gates' (share of zeros, mean magnitude)."""
        weight = stored(torch.cat([self.gate_proj.weight, self.up_proj.weight]), bits).to(dtype)
        gate, up = functional.linear(x.to(dtype), weight).chunk(2, dim=-1)
        active = self.activation(gate.float())
        seen = torch.stack([(active == 0).float().mean(), active.abs().mean()])
        down = stored(self.down_proj.weight, bits, dim=0).to(dtype)
        return functional.linear((active * up).to(dtype), down), seen


class Experts(nn.Module):
    """OLMoE's mixture: softmax of all the router's logits, the k largest as weights, not renormalised."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chosen = shape.num_experts_per_tok
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape) for _ in range(shape.num_experts))

    def forward(self, x: Tensor, dtype: torch.dtype, bits: StoredBits) -> tuple[Tensor, Tensor]:
        """The mixture's output, and the gates' share of zeros with the balance loss, which is 1 at best.

        The loss is the Switch Transformer's (arXiv 2101.03961): E times the sum over experts of the share of
        choices times the mean score.
        """
        flat = x.flatten(0, -2)
        scores = torch.softmax(self.gate(flat), dim=-1)
        weights, ids = scores.topk(self.chosen, dim=-1)
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
        tokens = order // self.chosen
        parts = flat[tokens].split(counts.tolist())
        # Those that nothing chose too, so that they have gradients, of zeros.
        found = [expert(part, dtype, bits) for expert, part in zip(self.experts, parts, strict=True)]
        made = torch.cat([out for out, _ in found]).float() * weights.flatten()[order, None]
        used = counts > 0
        zeros = torch.stack([seen[0] for _, seen in found])[used].mean()
        balance = len(self.experts) * (counts / counts.sum() * scores.mean(dim=0)).sum()
        change = torch.zeros_like(flat).index_add(0, tokens, made)
        return change.view_as(x), torch.stack([zeros, balance])


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Experts(shape) if shape.num_experts else FeedForward(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, bits: StoredBits
    ) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, dtype, bits)
        change, seen = self.mlp(self.post_attention_layernorm(x), dtype, bits)
        return x + change, seen


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, ids: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, bits: StoredBits
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states for the head (B, T, D), gate stats by layer (L, 2), and the table, also the head."""
        table = stored(self.embed_tokens.weight, bits)
        x = functional.embedding(ids, table)
        seen = []
        for layer in self.layers:
            x, gates = layer(x, cos, sin, dtype, bits)
            seen.append(gates)
        return self.norm(x).to(dtype), torch.stack(seen), table


class Llama(nn.Module):
    """The whole model; its head is the embedding table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        turns = torch.arange(shape.max_position_embeddings)[:, None] * _frequencies(shape)
        self._cos, self._sin = turns.cos(), turns.sin()
        self._run: Callable[..., tuple[Tensor, Tensor, Tensor]] = self.model.forward
        self._initialise()

    def compile(self) -> None:
        """Compile the functions that training runs, for the first sizes that they get."""
        self._run = torch.compile(self.model.forward, dynamic=False)
        LinearCrossEntropy.softmax_errors = torch.compile(softmax_errors, dynamic=False)

    def loss(self, windows: Tensor, bits: StoredBits = 0) -> tuple[Tensor, Tensor]:
        """Training loss of (B, T + 1) windows, and gate stats (L, 2): share of zeros, mean magnitude.

        Of a mixture the second is the balance loss.

        bits: bits of every matrix, as for `stored`.
        """
        ids, targets = windows[:, :-1], windows[:, 1:]
        hidden, seen, head = self._run(ids, *self._turns(ids), product_type(), bits)
        loss: Tensor = LinearCrossEntropy.apply(hidden.flatten(0, 1), head, targets.flatten())
        return loss, seen

    def logits_and_gates(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, V) logits in float32, as `transformers` computes them, and gate stats as in `loss`."""
        hidden, seen, _ = self.model(ids, *self._turns(ids), torch.float32, 0)
        return functional.linear(hidden, self.model.embed_tokens.weight), seen

    def _turns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        tokens = ids.shape[1]
        return self._cos[:tokens], self._sin[:tokens]

    def _initialise(self) -> None:
        depth = math.sqrt(2 * self.shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_block = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=INITIAL_STD / (depth if ends_block else 1.0))


def _frequencies(shape: Shape) -> Tensor:
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    return 1.0 / shape.rope_theta**exponents


def softmax_errors(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) losses, and the derivative of their sum by the logits, (N, V) in the logits' type."""
    wide = logits.float()
    log_sums = torch.logsumexp(wide, dim=-1)
    hit = torch.arange(logits.shape[1])[None, :] == targets[:, None]
    losses = log_sums - wide.masked_fill(~hit, 0.0).sum(-1)
    return losses, (torch.exp(wide - log_sums[:, None]) - hit.float()).to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of hidden (N, D) through a head (V, D). It never holds all logits.

    Gradients are computed in the forward pass, chunk by chunk, while the logits are in the CPU's caches.
    """

    softmax_errors = softmax_errors

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        head = weight.to(hidden.dtype)
        into_hidden = torch.empty_like(hidden)
        into_weight = torch.zeros_like(weight)
        total = torch.zeros(())
        for start in range(0, len(hidden), LOSS_CHUNK):
            part = slice(start, start + LOSS_CHUNK)
            losses, errors = LinearCrossEntropy.softmax_errors(hidden[part] @ head.t(), targets[part])
            total += losses.sum()
            errors = errors / len(hidden)
            into_hidden[part] = errors @ head
            into_weight += errors.t() @ hidden[part]
        ctx.save_for_backward(into_hidden, into_weight)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        into_hidden, into_weight = ctx.saved_tensors
        return into_hidden * gradients[0].to(into_hidden.dtype), into_weight * gradients[0], None
