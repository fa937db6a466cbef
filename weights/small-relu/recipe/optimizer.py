"""Muon for the matrices inside the layers, AdamW for the rest: less loss per token than with AdamW alone.

Muon (Jordan and others, 2024) is momentum whose matrices are replaced by the nearest orthogonal ones before
they are applied. Here they are scaled so that an update's entries are as large as AdamW's (Liu and others,
arXiv 2502.16982).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipe.precision import product_type

MOMENTUM = 0.95
BETAS = (0.9, 0.95)
ITERATIONS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2
"""Root mean square of an update's entries before the learning rate is applied; AdamW's is about the same."""


class Muon:
    """Muon. Matrices of equal shape are made orthogonal together, in few large products."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self._stacks: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            rows, columns = parameter.shape
            self._stacks.setdefault((min(rows, columns), max(rows, columns)), []).append(parameter)
        self.momenta = {shape: torch.zeros(len(stack), *shape) for shape, stack in self._stacks.items()}

    def step(self, rate: float) -> None:
        for (short, long), stack in self._stacks.items():
            gradients = torch.stack([_wide(parameter.grad) for parameter in stack])
            momentum = self.momenta[short, long]
            momentum.lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonal(gradients.lerp_(momentum, MOMENTUM)) * (UPDATE_RMS * long**0.5)
            for parameter, update in zip(stack, updates, strict=True):
                parameter.mul_(1 - rate * self.weight_decay)
                _wide(parameter).add_(update, alpha=-rate)


def _wide(matrix: Tensor) -> Tensor:
    """View of the matrix or its transpose, whichever has no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()


def orthogonal(stack: Tensor) -> Tensor:
    """(n, rows, columns) with all singular values moved near 1 by Newton-Schulz; rows are at most columns."""
    first, second, third = NEWTON_SCHULZ
    x = (stack / (stack.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(product_type())
    for _ in range(ITERATIONS):
        square = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=second, alpha=third), x, beta=first)
    return x.float()


class Optimizer:
    """Muon and AdamW under one learning rate."""

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        inside: list[nn.Parameter] = []
        tables: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            group = vectors if parameter.dim() == 1 else tables if "embed" in name else inside
            group.append(parameter)
        self.muon = Muon(inside, weight_decay)
        groups = [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=BETAS, fused=True)

    def step(self, rate: float) -> None:
        """Update the parameters once. The gradients aren't cleared."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        with torch.no_grad():
            self.muon.step(rate)

    def state(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "momenta": list(self.muon.momenta.values())}

    def load(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for momentum, saved in zip(self.muon.momenta.values(), state["momenta"], strict=True):
            momentum.copy_(saved)
