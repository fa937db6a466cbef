"""Drafters by the name of `--speculation`: what each needs, what it holds, how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ondevice.config import ModelConfig
from ondevice.model.transformer import Transformer
from ondevice.speculation.draft_context import DraftModel
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.combined import Combined
from ondevice.speculation.drafters.lookup import Lookup, index_bytes
from ondevice.speculation.drafters.model import ModelDrafter
from ondevice.speculation.drafters.other_vocabulary import OtherVocabularyDrafter
from ondevice.speculation.drafters.recycling import Recycling, matrix_bytes

Needs = Literal["nothing", "streams", "draft model"]
"""What there must be beside the model: nothing; streams in its bundle; a second model."""


@dataclass(frozen=True)
class Target:
    """The model that drafts are for; its transformer and a second model, which few drafters ask for."""

    config: ModelConfig
    max_context: int
    transformer: Transformer | None = None
    draft_model: DraftModel | None = None


@dataclass(frozen=True)
class DrafterKind:
    """A row of DRAFTERS. nbytes: memory that such a drafter may come to hold, of (config, max_context)."""

    needs: Needs
    nbytes: Callable[[ModelConfig, int], int]
    make: Callable[[Target], Drafter]


AUTOMATIC: tuple[str, ...] = ("lookup", "recycling")
"""Together in `auto`: those that need nothing."""

DRAFTERS: dict[str, DrafterKind] = {
    "lookup": DrafterKind("nothing", lambda config, context: index_bytes(context), lambda target: Lookup()),
    "recycling": DrafterKind(
        "nothing",
        lambda config, context: matrix_bytes(config.vocab_size),
        lambda target: Recycling(target.config.vocab_size),
    ),
    # A second model's memory is planned with its bundle in hand.
    "model": DrafterKind("draft model", lambda config, context: 0, lambda target: _model_drafter(target)),
    "auto": DrafterKind(
        "nothing",
        lambda config, context: sum(DRAFTERS[name].nbytes(config, context) for name in AUTOMATIC),
        lambda target: Combined([DRAFTERS[name].make(target) for name in AUTOMATIC]),
    ),
}


def drafter_bytes(name: str, config: ModelConfig, max_context: int) -> int:
    """Memory that the drafter `name` may come to hold for such a model; 0 for what is none."""
    return DRAFTERS[name].nbytes(config, max_context) if name in DRAFTERS else 0


def make_drafter(name: str, target: Target) -> Drafter | None:
    """A drafter of its own for `target`; None for what is none, such as `off`."""
    return DRAFTERS[name].make(target) if name in DRAFTERS else None


def _model_drafter(target: Target) -> Drafter:
    assert target.draft_model is not None
    if target.draft_model.tokenizer is None:
        return ModelDrafter(target.draft_model, target.config.vocab_size)
    return OtherVocabularyDrafter(target.draft_model)
