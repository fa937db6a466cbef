"""The loss of a batch: streams learn to draft what the main stream will say, at randomly drawn positions.

The loss of a stream is the soft cross-entropy to the main stream's own softmax at the position that it
drafts; no gradient goes through that softmax. Lossless mode: the main stream is the base, and isn't trained.
Shared mode: the main stream has the adapters too, and is also trained on the text's next token.
`stream_training.py` makes the batches and the updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.converters.training.streams.options import resident_prefix
from recipe.frozen import Frozen, Trace
from recipe.model import LOSS_CHUNK
from recipe.multi_stream import MultiStreams, recently_active

Mode = Literal["lossless", "shared"]
STREAM_WEIGHT = 0.1
"""Weight of each stream's loss in shared mode; the main stream's loss has weight 1 (arXiv 2402.11131)."""


@dataclass(frozen=True)
class Batch:
    """A training batch.

    ids: (B, T). positions: (B, S) positions with streams, ascending, the i-th in [i * stride, (i + 1) *
    stride). residency: for each window, the number of last tokens whose neurons count as resident, or, for a
    model without ReLU, the parts of `resident_prefix` of each layer that do; 0 means no mask.
    """

    ids: Tensor
    positions: Tensor
    stride: int
    residency: tuple[int, ...]


def soft_errors(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) cross-entropies of logits to targets (N, V), and the derivative of their sum by the logits."""
    wide = logits.float()
    log_sums = torch.logsumexp(wide, dim=-1)
    wanted = targets.float()
    return log_sums - (wanted * wide).sum(-1), (torch.exp(wide - log_sums[:, None]) - wanted).to(logits.dtype)


class SoftCrossEntropy(torch.autograd.Function):
    """Sum of weights (N,) times the cross-entropies of hidden (N, D), through a constant head (V, D).

    The target of row i is row `targets[i]` of `chances` (M, V). Returns the sum and the cross-entropies (N,).
    Gradients are computed in the forward pass, chunk by chunk, while the logits are in the CPU's caches.
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
    """Computes the losses of batches for one base and one set of streams.

    `compile` makes it fast for batches of equal size.
    """

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
        """The loss to minimise, and by name the cross-entropy of each stream."""
        base, ids, gamma = self.base, batch.ids, self.streams.sizes.gamma
        if self.mode == "lossless":
            with torch.no_grad():
                trace = self._trace(ids, self.streams.first_layer)
        else:
            trace = self.streams.main(base).trace(ids, self.streams.first_layer)
        chances = self._chances(trace)
        masks = residency_masks(trace, batch, base.zeros_gates)
        hidden = self._run(base, trace, batch.positions, batch.stride, masks)
        tokens = ids.shape[1]
        first = (torch.arange(len(ids)) * tokens)[:, None] + batch.positions
        targets = first[:, :, None] + torch.arange(1, gamma + 1)
        # Targets beyond the window are unknown: their weight is 0, and any row stands in for them.
        known = (batch.positions[:, :, None] + torch.arange(1, gamma + 1)) < tokens
        weight = 1 / gamma if self.mode == "lossless" else STREAM_WEIGHT
        weights = known * (weight / (known.sum() / gamma))
        rows = torch.where(known, targets, first[:, :, None]).flatten()
        total, losses = SoftCrossEntropy.apply(
            hidden.flatten(0, 2), base.head, chances, rows, weights.flatten()
        )
        by_stream = ((losses.view(known.shape) * known).sum((0, 1)) / known.sum((0, 1))).tolist()
        seen = {f"stream_{j}": value for j, value in enumerate(by_stream, 1)}
        if self.mode == "shared":
            main, seen["main"] = self._main(trace, ids)
            total = total + main
        return total, seen

    def _chances(self, trace: Trace) -> Tensor:
        """(B * T, V) softmax of the main stream for the token after each."""
        flat = trace.final.detach().flatten(0, 1)
        parts = [torch.softmax((part @ self.base.head.t()).float(), -1) for part in flat.split(LOSS_CHUNK)]
        return torch.cat([part.to(self.base.dtype) for part in parts])

    def _main(self, trace: Trace, ids: Tensor) -> tuple[Tensor, float]:
        """The main stream's loss for the text's next tokens, and its mean."""
        hidden, vocab = trace.final[:, :-1].flatten(0, 1), self.base.shape.vocab_size
        chances = functional.one_hot(ids[:, 1:].flatten(), vocab).to(self.base.dtype)
        weights = torch.full((len(hidden),), 1 / len(hidden))
        total, losses = SoftCrossEntropy.apply(
            hidden, self.base.head, chances, torch.arange(len(hidden)), weights
        )
        return total, losses.mean().item()


def residency_masks(trace: Trace, batch: Batch, zeros: bool) -> list[Tensor]:
    """By stream layer, (B, S, F) resident neurons: those active for the last tokens, a prefix, or all.

    The list is empty if no window has a mask.
    """
    if not any(batch.residency):
        return []
    rows = torch.arange(len(batch.ids))[:, None]
    masks = []
    for left in trace.layers:
        windows = [
            _resident(active, residency, zeros) if residency else torch.ones_like(active)
            for active, residency in zip(left.active, batch.residency, strict=True)
        ]
        masks.append(torch.stack(windows)[rows, batch.positions])
    return masks


def _resident(active: Tensor, residency: int, zeros: bool) -> Tensor:
    """(T, F) resident neurons of a window.

    active: (T, F), true where a neuron of a ReLU model is not zero.
    """
    if zeros:
        return recently_active(active, residency)
    neurons = active.shape[1]
    prefix = torch.arange(neurons) < resident_prefix(neurons, residency)
    return prefix.expand_as(active)
