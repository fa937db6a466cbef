"""What a generation cost: the `stats` object of the JSON contract, one field per key."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ondevice.errors import UsageError


@dataclass(frozen=True)
class DraftStats:
    """Drafting beside a generation's decode passes.

    `drafts` counts passes with draft tokens, and `draft_tokens` the draft tokens of all passes.
    `drafted_by_depth` counts, from depth 1 on, drafts with a draft token there behind accepted ones, and
    `accepted_by_depth` those in which one was accepted there. Draft tokens behind the end of the text count
    for neither. Every accepted token is one that its pass gave beside the first. `preparing_seconds` is time
    spent computing what drafts grow from, `growing_seconds` time spent choosing their nodes. The time that a
    drafter adds to the passes themselves is in neither. `decision` says in words whether drafts were made at
    the end, and why.
    """

    drafts: int = 0
    draft_tokens: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    preparing_seconds: float = 0.0
    growing_seconds: float = 0.0
    decision: str = ""

    def __add__(self, other: DraftStats) -> DraftStats:
        """Sums over both generations, of which `other` is the later."""
        return DraftStats(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            _sums(self.drafted_by_depth, other.drafted_by_depth),
            _sums(self.accepted_by_depth, other.accepted_by_depth),
            self.preparing_seconds + other.preparing_seconds,
            self.growing_seconds + other.growing_seconds,
            other.decision or self.decision,
        )

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """By depth, accepted over drafted."""
        return tuple(
            accepted / drafted
            for accepted, drafted in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = {
            key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()
        }
        return counts | {"acceptance_by_depth": list(self.acceptance_by_depth)}


@dataclass(frozen=True)
class GenerationStats:
    """Figures of one generation. Rates are per second of wall time, 0.0 where nothing was measured.

    `accepted_tokens_per_pass` is the tokens generated after the first, over decode passes.
    `neuron_cache_hit_rate` is the share of selected neurons that were already in DRAM, from 0 to 1;
    `prefetch_recall` the share of the others that were prefetched, `prefetch_wasted_bytes` what was
    prefetched in vain. `flash_read_seconds` is wall time with a read in flight,
    `flash_cpu_seconds` the processor time of the threads that read and compared checksums.
    `peak_memory_bytes` is the whole process's peak, interpreter included. `decode_passes` are those behind
    the prompt's, and took `decode_seconds`. `synchronisations` are those with a device that computes by
    itself (`mlx`), logits' included; they took `synchronised_seconds` of waiting. `seed` is what random
    numbers came from, None where nothing was drawn by chance; `context_full` whether the text ended for want
    of room.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    time_to_first_token_seconds: float = 0.0
    peak_memory_bytes: int = 0
    flash_bytes_read: int = 0
    flash_read_seconds: float = 0.0
    flash_cpu_seconds: float = 0.0
    neuron_cache_hit_rate: float = 0.0
    prefetch_recall: float = 0.0
    prefetch_wasted_bytes: int = 0
    forward_passes: int = 0
    accepted_tokens_per_pass: float = 1.0
    backend: str = ""
    sparsity: str = ""
    speculation: str = ""
    io: str = ""
    seed: int | None = None
    context_full: bool = False
    decode_passes: int = 0
    decode_seconds: float = 0.0
    synchronisations: int = 0
    synchronised_seconds: float = 0.0
    drafting: DraftStats = DraftStats()

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, keys in the contract's order."""
        return vars(self) | {"drafting": self.drafting.to_dict()}


@dataclass(frozen=True)
class PassTimes:
    """Where passes spent time beside computing, in seconds: waiting for reads, and managing the cache."""

    waited: float = 0.0
    managed: float = 0.0


def per_second(count: float, seconds: float) -> float:
    """`count / seconds`, and 0.0 for an interval too short to measure (JSON has no infinity)."""
    return count / seconds if seconds > 0.0 else 0.0


def median_stats(runs: Sequence[GenerationStats]) -> GenerationStats:
    """Field-wise median of repeated runs; counts are rounded, what isn't a figure is the first's.

    `drafting` is that of all runs together: its parts belong to each other.

    Raises UsageError for no runs.
    """
    if not runs:
        raise UsageError("there are no runs to take the median of")
    medians: dict[str, int | float] = {}
    for field in dataclasses.fields(GenerationStats):
        values = [getattr(run, field.name) for run in runs]
        if field.name in ("seed", "context_full"):
            continue
        if isinstance(values[0], int):
            medians[field.name] = round(statistics.median(values))
        elif isinstance(values[0], float):
            medians[field.name] = statistics.median(values)
    drafting = sum((run.drafting for run in runs), DraftStats())
    return dataclasses.replace(runs[0], drafting=drafting, **medians)  # type: ignore[arg-type]


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
