"""What a generation cost: the `stats` object of the JSON contract, one field per key."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.errors import UsageError


@dataclass(frozen=True)
class GenerationStats:
    """Figures of one generation. Rates are per second of wall time, 0.0 where nothing was measured.

    `accepted_tokens_per_pass` is the tokens generated after the first, over decode passes.
    `neuron_cache_hit_rate` is the share of selected neurons that were already in DRAM, from 0 to 1;
    `guess_recall` the share of the others whose read had begun from a guess, `guess_wasted_bytes` what was
    read from guesses for nothing. `flash_read_seconds` is wall time with a read in flight,
    `flash_cpu_seconds` the processor time of the threads that read and compared checksums.
    `peak_memory_bytes` is the whole process's peak, interpreter included.
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
    guess_recall: float = 0.0
    guess_wasted_bytes: int = 0
    forward_passes: int = 0
    accepted_tokens_per_pass: float = 1.0
    backend: str = ""
    sparsity: str = ""
    speculation: str = ""
    io: str = ""

    def to_dict(self) -> dict[str, int | float | str]:
        """The JSON object, keys in the contract's order."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class PassTimes:
    """Where passes spent time beside computing, in seconds: waiting for reads, and managing the cache."""

    waited: float = 0.0
    managed: float = 0.0


def per_second(count: float, seconds: float) -> float:
    """`count / seconds`, and 0.0 for an interval too short to measure (JSON has no infinity)."""
    return count / seconds if seconds > 0.0 else 0.0


def median_stats(runs: Sequence[GenerationStats]) -> GenerationStats:
    """Field-wise median of repeated runs; counts are rounded to whole ones, words come from the first.

    Raises UsageError for no runs.
    """
    if not runs:
        raise UsageError("there are no runs to take the median of")
    medians: dict[str, int | float] = {}
    for field in dataclasses.fields(GenerationStats):
        values = [getattr(run, field.name) for run in runs]
        if isinstance(values[0], int):
            medians[field.name] = round(statistics.median(values))
        elif isinstance(values[0], float):
            medians[field.name] = statistics.median(values)
    return dataclasses.replace(runs[0], **medians)  # type: ignore[arg-type]
