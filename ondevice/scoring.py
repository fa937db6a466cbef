"""Perplexity and benchmarks: pieces of text to score, tallies, benchmark prompts and reports of medians.

Pure functions over token ids, logits and stats. The caller runs the model.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from ondevice.backends.base import Float32
from ondevice.errors import UsageError
from ondevice.records import dataclass
from ondevice.runtime.resolving import ResolvedModel
from ondevice.stats import GenerationStats, median_stats
from ondevice.units import memory_total, usable_cores


@dataclass(frozen=True)
class Score:
    """The mean negative log-likelihood, in nats, of `tokens` predicted tokens, and its exponential."""

    perplexity: float
    nll_per_token: float
    tokens: int

    def to_dict(self) -> dict[str, float | int | None]:
        """The score as an object for JSON, which has no infinity: a value that isn't finite becomes None."""
        return {
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "nll_per_token": self.nll_per_token if math.isfinite(self.nll_per_token) else None,
            "tokens": self.tokens,
        }


class TokenScore(NamedTuple):
    """The log-probability of a token after the tokens before it, and the likeliest tokens with theirs.

    Logarithms are natural ones, as in `log_probabilities`.
    """

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


@dataclass
class Tally:
    """Running sum of negative log-likelihoods, in nats, and the number of tokens in it."""

    nll: float = 0.0
    tokens: int = 0

    def add(self, logits: Float32, targets: Sequence[int]) -> None:
        """Add T predicted tokens. logits: (T, V) at positions whose next tokens are targets (T,).

        Sums are float64.
        """
        for row, target in zip(logits, targets, strict=True):
            wide = row.astype(np.float64)
            highest = wide.max()
            self.nll += float(highest + math.log(np.exp(wide - highest).sum()) - wide[target])
        self.tokens += len(targets)

    def score(self) -> Score:
        """The score so far. There must be at least one token."""
        mean = self.nll / self.tokens
        return Score(math.exp(mean) if mean < 700.0 else math.inf, mean, self.tokens)


def windows(tokens: Iterable[int], context: int, bos_id: int | None) -> Iterator[list[int]]:
    """Yields a text in pieces of `context` tokens, each of which begins with bos_id if there is one.

    Every token of a piece except its first is predicted. Without bos_id, pieces overlap by one token, so that
    it is predicted too. Tokens are taken lazily, piece by piece.
    Raises UsageError, when the first piece is taken, for a context or a text with no token to predict.
    """
    if context < 2:
        raise UsageError(f"a context of {context} tokens predicts nothing; scoring takes at least two")
    first: list[int] = [] if bos_id is None else [bos_id]
    rest = iter(tokens)
    begun = list(islice(rest, 1))
    if begun != first:
        rest = chain(begun, rest)
    begin, predicted = first, False
    while following := list(islice(rest, context - len(begin))):
        piece = [*begin, *following]
        if len(piece) < 2:
            break
        yield piece
        begin, predicted = first or piece[-1:], True
    if not predicted:
        raise UsageError("the text is too short to score: it takes at least two tokens")


def scoring_windows(resolved: ResolvedModel, tokens: Iterable[int]) -> Iterator[list[int]]:
    """Yields the pieces of a text on which a model is scored.

    Raises UsageError, when the first piece is taken, if the text is too short. Raises BudgetError at once if
    the budget has shortened the context, because perplexity depends on it.
    """
    resolved.require_default_context()
    settings = resolved.bundle.manifest.tokenizer
    return windows(tokens, resolved.plan.max_context, settings.bos_id if settings.add_bos else None)


def benchmark_prompt(count: int, vocab_size: int) -> list[int]:
    """`count` token ids spread over the vocabulary. They are the same in every run and resemble no text."""
    return [(7919 * index + 101) % vocab_size for index in range(count)]


def benchmark_report(runs: Sequence[GenerationStats], kernel_target: str) -> dict[str, Any]:
    """The object that `bench --json` prints: medians of the runs, flash bytes per token, and the machine."""
    median = median_stats(runs)
    return {
        **median.to_dict(),
        "runs": len(runs),
        "flash_bytes_per_token": median.flash_bytes_read // max(1, median.generated_tokens),
        "machine": machine(kernel_target),
    }


def machine(kernel_target: str) -> dict[str, Any]:
    """The machine on which stats were measured. kernel_target: the target that multiplied."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "memory_bytes": memory_total(),
        "kernel_target": kernel_target,
    }


def _processor() -> str:
    """The processor's marketing name, if the system reports it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor()
