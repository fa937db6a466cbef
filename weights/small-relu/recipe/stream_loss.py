"""What streams learn from a batch: to say what the main stream will, at the positions that are drawn for it.

MultiStreams: soft cross-entropy against the main stream's own softmax there, through which no gradient goes.
Lossless: the main stream is the base, and isn't trained. Shared: it has the adapters as well, and is trained,
too, on the text's next token.
How batches are made, and what an update is, are for others to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from recipe.frozen import Frozen, Trace
from recipe.model import LOSS_CHUNK
from recipe.multi_stream import MultiStreams, recently_active

Mode = Literal["lossless", "shared"]
STREAM_WEIGHT = 0.1
"""Of each stream's loss beside the main stream's, in the shared mode (arXiv 2402.11131)."""
PRUNING_EVERY = 4
"""The pruning adapter is trained at one drawn position in so many: it is small, and learns fast."""


@dataclass(frozen=True)
class Batch:
    """ids: (B, T). positions: (B, S), ascending, the i-th in [i * stride, (i + 1) * stride).

    residency_tokens: by window, how many tokens back a neuron counts as resident; 0: no mask.
    """

    ids: Tensor
    positions: Tensor
    stride: int
    residency_tokens: tuple[int, ...]


def soft_errors(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies (N,) against (N, V) chances, and the derivative of their sum by the logits (N, V)."""
    wide = logits.float()
    log_sums = torch.logsumexp(wide, dim=-1)
    wanted = targets.float()
    return log_sums - (wanted * wide).sum(-1), (torch.exp(wide - log_sums[:, None]) - wanted).to(logits.dtype)


class SoftCrossEntropy(torch.autograd.Function):
    """Sum of weights (N,) times the cross-entropies of hidden (N, D), through a constant head (V, D).

    Row i is judged by row `targets[i]` of `chances` (M, V). Gives the sum, and the cross-entropies (N,).
    Gradients are computed on the way forward, chunk by chunk, while the logits are in the caches.
    """

    errors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = staticmethod(soft_errors)

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, chances: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        into_hidden = torch.empty_like(hidden)
        losses = torch.empty(len(hidden))
        for start in range(0, len(hidden), LOSS_CHUNK):
            part = slice(start, start + LOSS_CHUNK)
            losses[part], errors = SoftCrossEntropy.errors(hidden[part] @ head.t(), chances[targets[part]])
            into_hidden[part] = (errors @ head) * weights[part, None].to(hidden.dtype)
        ctx.save_for_backward(into_hidden)
        ctx.mark_non_differentiable(losses)
        return (weights * losses).sum(), losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (into_hidden,) = ctx.saved_tensors
        return into_hidden * gradients[0].to(into_hidden.dtype), None, None, None, None


class Judge:
    """Losses of a batch, for one base and one set of streams; `compile` makes it fast for equal sizes."""

    def __init__(self, base: Frozen, streams: MultiStreams, mode: Mode) -> None:
        self.base, self.streams, self.mode = base, streams, mode
        self._trace: Callable[..., Trace] = base.trace
        self._run: Callable[..., Tensor] = streams.forward

    def compile(self) -> None:
        if self.mode == "lossless":
            self._trace = torch.compile(self.base.trace, dynamic=False)
        self._run = torch.compile(self.streams.forward, dynamic=False)
        SoftCrossEntropy.errors = staticmethod(torch.compile(soft_errors, dynamic=False))

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """What to minimise, and the cross-entropy of each stream and of the pruning adapter."""
        base, ids, gamma = self.base, batch.ids, self.streams.sizes.gamma
        if self.mode == "lossless":
            with torch.no_grad():
                trace = self._trace(ids, self.streams.first_layer)
        else:
            trace = self.streams.main(base).trace(ids, self.streams.first_layer)
        chances = self._chances(trace)
        masks = residency_masks(trace, batch)
        hidden = self._run(base, trace, batch.positions, batch.stride, masks)
        tokens = ids.shape[1]
        first = (torch.arange(len(ids)) * tokens)[:, None] + batch.positions
        targets = first[:, :, None] + torch.arange(1, gamma + 1)
        # What lies behind the window can't be judged; the last target, which is void, stands in.
        known = (batch.positions[:, :, None] + torch.arange(1, gamma + 1)) < tokens
        weight = 1 / gamma if self.mode == "lossless" else STREAM_WEIGHT
        weights = known * (weight / (known.sum() / gamma))
        rows = torch.where(known, targets, first[:, :, None]).flatten()
        total, losses = SoftCrossEntropy.apply(
            hidden.flatten(0, 2), base.head, chances, rows, weights.flatten()
        )
        by_stream = ((losses.view(known.shape) * known).sum((0, 1)) / known.sum((0, 1))).tolist()
        seen = {f"stream_{j}": value for j, value in enumerate(by_stream, 1)}
        pruning, seen["pruning"] = self._pruning(trace, batch, chances, first)
        total = total + pruning
        if self.mode == "shared":
            main, seen["main"] = self._main(trace, ids)
            total = total + main
        return total, seen

    def _chances(self, trace: Trace) -> Tensor:
        """(B * T, V): what the main stream says of the token after each."""
        flat = trace.final.detach().flatten(0, 1)
        parts = [torch.softmax((part @ self.base.head.t()).float(), -1) for part in flat.split(LOSS_CHUNK)]
        return torch.cat([part.to(self.base.dtype) for part in parts])

    def _pruning(self, trace: Trace, batch: Batch, chances: Tensor, first: Tensor) -> tuple[Tensor, float]:
        """The early guess of the next token, against what the main stream says of it."""
        positions, rows = batch.positions[:, ::PRUNING_EVERY], torch.arange(len(batch.ids))[:, None]
        entering = trace.entering[rows, positions].detach()
        hidden = self.streams.pruned(self.base, entering).flatten(0, 1)
        targets = first[:, ::PRUNING_EVERY].flatten()
        weights = torch.full((len(hidden),), 1 / len(hidden))
        total, losses = SoftCrossEntropy.apply(hidden, self.base.head, chances, targets, weights)
        return total, losses.mean().item()

    def _main(self, trace: Trace, ids: Tensor) -> tuple[Tensor, float]:
        """The main stream's next-token loss."""
        hidden, vocab = trace.final[:, :-1].flatten(0, 1), self.base.shape.vocab_size
        chances = functional.one_hot(ids[:, 1:].flatten(), vocab).to(self.base.dtype)
        weights = torch.full((len(hidden),), 1 / len(hidden))
        total, losses = SoftCrossEntropy.apply(
            hidden, self.base.head, chances, torch.arange(len(hidden)), weights
        )
        return total, losses.mean().item()


def residency_masks(trace: Trace, batch: Batch) -> list[Tensor]:
    """By stream layer (B, S, F): neurons of the window's last tokens, or all."""
    if not any(batch.residency_tokens):
        return []
    rows = torch.arange(len(batch.ids))[:, None]
    masks = []
    for left in trace.layers:
        windows = [
            recently_active(active, tokens) if tokens else torch.ones_like(active)
            for active, tokens in zip(left.active, batch.residency_tokens, strict=True)
        ]
        masks.append(torch.stack(windows)[rows, batch.positions])
    return masks
