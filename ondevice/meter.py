"""Cost of one generation: its time, and how much the engine's running totals rose."""

from __future__ import annotations

import time
from dataclasses import replace

from ondevice.records import dataclass
from ondevice.stats import GenerationStats, RankStats, per_second


@dataclass(frozen=True)
class Counters:
    """Running totals of an engine. A generation reports how much each rose; only the peak is reported as it
    is.
    """

    flash_bytes_read: int = 0
    flash_read_seconds: float = 0.0
    flash_cpu_seconds: float = 0.0
    neuron_cache_hits: int = 0
    neuron_cache_lookups: int = 0
    prefetched_used: int = 0
    prefetch_wasted_bytes: int = 0
    peak_memory_bytes: int = 0
    flash_reads: int = 0
    waited_seconds: float = 0.0
    managed_seconds: float = 0.0
    synchronisations: int = 0
    synchronised_seconds: float = 0.0
    ranks: tuple[RankStats, ...] = ()
    """Totals of each machine, if several share the model."""


class Meter:
    """Counts and times one generation. Time that the consumer spends between events isn't counted."""

    def __init__(self, counters: Counters) -> None:
        self.passes = 0
        self.sampled = 0
        self.restored = 0
        """Tokens of the prompt whose state came from a prompt cache."""
        self.reused = 0
        """Tokens of the prompt that weren't computed."""
        self._before = counters
        self._started = self._paused = time.perf_counter()
        self._prefill_seconds = 0.0
        self._prefill_tokens = 0
        self._prefill_passes = 0

    def elapsed(self) -> float:
        """Seconds of work so far."""
        return time.perf_counter() - self._started

    def pause(self) -> None:
        """Stop the clock, because the consumer now has the event."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        self._started += time.perf_counter() - self._paused

    def prefilled(self, tokens: int) -> None:
        """Record that the prompt, of `tokens` tokens, is done."""
        self._prefill_seconds, self._prefill_tokens = self.elapsed(), tokens - self.reused
        self._prefill_passes = self.passes

    def stats(
        self, labels: GenerationStats, after: Counters, prompt_tokens: int, generated_tokens: int
    ) -> GenerationStats:
        decode_passes = self.passes - self._prefill_passes if self.sampled else 0
        later = max(0, self.sampled - 1)
        decode_seconds = self.elapsed() - self._prefill_seconds
        lookups = after.neuron_cache_lookups - self._before.neuron_cache_lookups
        hits = after.neuron_cache_hits - self._before.neuron_cache_hits
        prefetched = after.prefetched_used - self._before.prefetched_used
        return replace(
            labels,
            prompt_tokens=prompt_tokens,
            restored_tokens=self.restored,
            reused_tokens=self.reused,
            generated_tokens=generated_tokens,
            prefill_tokens_per_second=per_second(self._prefill_tokens, self._prefill_seconds),
            decode_tokens_per_second=per_second(later, decode_seconds),
            time_to_first_token_seconds=self._prefill_seconds,
            peak_memory_bytes=after.peak_memory_bytes,
            ranks=tuple(it.since(old) for it, old in zip(after.ranks, self._before.ranks, strict=False)),
            flash_bytes_read=after.flash_bytes_read - self._before.flash_bytes_read,
            flash_read_seconds=after.flash_read_seconds - self._before.flash_read_seconds,
            flash_cpu_seconds=after.flash_cpu_seconds - self._before.flash_cpu_seconds,
            neuron_cache_hit_rate=hits / lookups if lookups else 0.0,
            prefetch_recall=prefetched / (lookups - hits) if lookups > hits else 0.0,
            prefetch_wasted_bytes=after.prefetch_wasted_bytes - self._before.prefetch_wasted_bytes,
            forward_passes=self.passes,
            accepted_tokens_per_pass=later / decode_passes if decode_passes else 1.0,
            decode_passes=decode_passes,
            decode_seconds=decode_seconds if decode_passes else 0.0,
            synchronisations=after.synchronisations - self._before.synchronisations,
            synchronised_seconds=after.synchronised_seconds - self._before.synchronised_seconds,
        )
