"""Drafters by the name of `--speculation`: what each needs, what it holds, how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ondevice.config import ModelConfig
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.lookup import Lookup, index_bytes
from ondevice.speculation.drafters.recycling import Recycling, matrix_bytes

Needs = Literal["nothing", "streams"]
"""What there must be beside the model: nothing; streams in its bundle."""


@dataclass(frozen=True)
class Target:
    """The model that drafts are for; its loaded transformer, which not every drafter asks for."""

    config: ModelConfig
    max_context: int
    transformer: Transformer | None = None


@dataclass(frozen=True)
class DrafterKind:
    """A row of DRAFTERS. nbytes: memory that such a drafter may come to hold, of (config, max_context)."""

    needs: Needs
    nbytes: Callable[[ModelConfig, int], int]
    make: Callable[[Target], Drafter]


DRAFTERS: dict[str, DrafterKind] = {
    "lookup": DrafterKind("nothing", lambda config, context: index_bytes(context), lambda target: Lookup()),
    "recycling": DrafterKind(
        "nothing",
        lambda config, context: matrix_bytes(config.vocab_size),
        lambda target: Recycling(target.config.vocab_size),
    ),
}


def drafter_bytes(name: str, config: ModelConfig, max_context: int) -> int:
    """Memory that the drafter `name` may come to hold for such a model; 0 for what is none."""
    return DRAFTERS[name].nbytes(config, max_context) if name in DRAFTERS else 0


def make_drafter(name: str, target: Target) -> Drafter | None:
    """A drafter of its own for `target`; None for what is none, such as `off`."""
    return DRAFTERS[name].make(target) if name in DRAFTERS else None
