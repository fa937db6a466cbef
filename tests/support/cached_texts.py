"""Texts of the small chat bundle with all that a prompt cache could change in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ondevice.api import Model
from tests.support.bundles import EOS

PROMPT = [(7 * at * at + 3 * at) % 250 + 3 for at in range(150)]
Said = list[tuple[int | None, float | None]]


def said(model: Model, tokens: Sequence[int] = PROMPT, count: int = 12) -> tuple[Said, int]:
    """Tokens drawn by chance with their exact log-probabilities, and how many tokens were restored."""
    bias = {EOS: -math.inf}
    options: dict[str, Any] = {"max_tokens": count, "temperature": 0.9, "seed": 3, "logit_bias": bias}
    *events, last = model.stream(tokens=list(tokens), top_logprobs=0, **options)
    assert last.stats is not None
    return [(event.token, event.logprob) for event in events], last.stats.restored_tokens


def settle(model: Model) -> None:
    """Wait until everything is written that will be."""
    pool = model._engine.kv
    while model._owner.call(pool.save_next):
        pass


def written(folder: Path) -> list[Path]:
    """The files of a prompt cache."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
