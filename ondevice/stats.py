"""Stats of a generation: the `stats` object of the JSON contract, one field per key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ondevice.errors import UsageError
from ondevice.records import dataclass


@dataclass(frozen=True)
class DraftStats:
    """Stats of drafting during a generation's decode passes.

    `drafts` counts passes with draft tokens, and `draft_tokens` the draft tokens of all passes.

    Both `*_by_depth` tuples begin at depth 1. `drafted_by_depth` counts the drafts with a draft token at that
    depth after accepted ones; `accepted_by_depth` counts those in which one was accepted there. Draft tokens
    after the end of the text count in neither. A pass gives one token, and one more per accepted token.

    `preparing_seconds` is the time spent computing what drafts grow from, and `growing_seconds` the time
    spent choosing their nodes. Neither has the time that a drafter adds to the passes.
    `decision` says in words whether drafts were made at the end, and why.
    """

    drafts: int = 0
    draft_tokens: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    preparing_seconds: float = 0.0
    growing_seconds: float = 0.0
    decision: str = ""

    def __add__(self, other: DraftStats) -> DraftStats:
        """The sums over two generations. `other` is the later one, whose `decision` is kept."""
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
        """The acceptance rate at each depth from 1 on: accepted draft tokens divided by drafted ones."""
        return tuple(
            accepted / drafted
            for accepted, drafted in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """The stats as an object for JSON."""
        counts = {
            key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()
        }
        return counts | {"acceptance_by_depth": list(self.acceptance_by_depth)}


@dataclass(frozen=True)
class HopStats:
    """What a rank's messages cost.

    Sending overlaps with computing. `waited_seconds` include all waiting for messages, also while another
    rank has nothing to do.
    """

    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_seconds: float = 0.0
    waited_seconds: float = 0.0

    def __sub__(self, other: HopStats) -> HopStats:
        return HopStats(
            *(getattr(self, it.name) - getattr(other, it.name) for it in dataclasses.fields(self))
        )


@dataclass(frozen=True)
class RankStats:
    """One of several machines that share a model: its layers, its budget and its costs.

    `peak_memory_bytes` is the peak of its process. `hops` describes the messages that it sent and received.
    """

    rank: int = 0
    first_layer: int = 0
    layers: int = 0
    budget_bytes: int = 0
    peak_memory_bytes: int = 0
    flash_bytes_read: int = 0
    hops: HopStats = HopStats()

    def since(self, before: RankStats) -> RankStats:
        """The same stats, with the counts since `before`."""
        read = self.flash_bytes_read - before.flash_bytes_read
        return dataclasses.replace(self, flash_bytes_read=read, hops=self.hops - before.hops)

    def to_dict(self) -> dict[str, Any]:
        """The stats as an object for JSON and for messages between ranks."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class GenerationStats:
    """Stats of one generation. Rates are per second of wall time; 0.0 if nothing was measured.

    `peak_memory_bytes` is the peak of the complete process, including the interpreter. `flash_read_seconds`
    is wall time with a read in flight. `flash_cpu_seconds` is the processor time of the threads that read and
    compare checksums.

    `neuron_cache_hit_rate` is the share of selected neurons that were already in DRAM, from 0 to 1.
    `prefetch_recall` is the share of the others that were prefetched. `prefetch_wasted_bytes` counts bytes
    that were prefetched but not used.

    `decode_passes` counts the forward passes after the prompt's, which took `decode_seconds`.
    `accepted_tokens_per_pass` is the number of tokens generated after the first, over decode passes.
    `synchronisations` counts waits for a device that computes asynchronously (`mlx`), including waits for
    logits; they took `synchronised_seconds`.

    `experts` is the number of experts per token if it is fewer than the model's, which changes the text; else
    0.

    `restored_tokens` counts the prompt's tokens whose keys and values came from a prompt cache on disk, and
    `reused_tokens` all that weren't computed: restored ones and those still in memory.

    `ranks` has an entry per machine if several share the model; the other fields are rank 0's.

    `seed` is the seed of the random numbers, or None if nothing was drawn by chance. `context_full` is True
    if the text ended because the context was full.
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
    experts: int = 0
    restored_tokens: int = 0
    reused_tokens: int = 0
    drafting: DraftStats = DraftStats()
    ranks: tuple[RankStats, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, keys in the contract's order, with `ranks` only if several machines ran."""
        record = vars(self) | {"drafting": self.drafting.to_dict()}
        record["ranks"] = [rank.to_dict() for rank in self.ranks]
        return record if self.ranks else {key: value for key, value in record.items() if key != "ranks"}


@dataclass(frozen=True)
class PromptUse:
    """The number of a prompt's tokens, and how many of them weren't computed, as in `GenerationStats`."""

    tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class PassTimes:
    """Seconds that passes spent waiting for reads and managing the cache.

    With experts, managing includes predicting the next layer's choice and beginning reads.
    """

    waited: float = 0.0
    managed: float = 0.0


def per_second(count: float, seconds: float) -> float:
    """`count / seconds`, or 0.0 for an interval too short to measure (JSON has no infinity)."""
    return count / seconds if seconds > 0.0 else 0.0


def median_stats(runs: Sequence[GenerationStats]) -> GenerationStats:
    """Field-wise median of repeated runs. Counts are rounded; fields that aren't numbers are the first run's.

    `drafting` is the sum over all runs, because its parts belong together.

    Raises UsageError if there are no runs.
    """
    if not runs:
        raise UsageError("there are no runs to take the median of")
    from statistics import median

    medians: dict[str, int | float] = {}
    for field in dataclasses.fields(GenerationStats):
        values = [getattr(run, field.name) for run in runs]
        if field.name in ("seed", "context_full"):
            continue
        if isinstance(values[0], int):
            medians[field.name] = round(median(values))
        elif isinstance(values[0], float):
            medians[field.name] = median(values)
    drafting = sum((run.drafting for run in runs), DraftStats())
    return dataclasses.replace(runs[0], drafting=drafting, **medians)  # type: ignore[arg-type]


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
