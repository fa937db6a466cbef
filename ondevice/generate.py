"""From prompt tokens to text: the only decode loop.

A prompt runs in fixed chunks, after the part of it that the cache already holds; then one token at a time
is sampled, turned into text and fed back. It knows nothing of files, budgets, threads or chat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ondevice.backends.base import Float32
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.errors import ContextOverflowError, UsageError
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import Cancelled, Transformer
from ondevice.sampling import StopMatcher, sample
from ondevice.stats import GenerationStats, per_second
from ondevice.tokenizer import StreamingDetokenizer, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Event:
    """One step of a generation: a token and the text it completed, or, last of all, how it ended.

    `text` may be empty: bytes of an unfinished character and beginnings of a stop string are held back.
    The last event has no token, the rest of the text, and `finish_reason` and `stats`.
    """

    text: str
    token: int | None = None
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class Counters:
    """Running totals of an engine. A generation reports how much they rose, and the peak as it stands."""

    flash_bytes_read: int = 0
    flash_read_seconds: float = 0.0
    flash_cpu_seconds: float = 0.0
    neuron_cache_hits: int = 0
    neuron_cache_lookups: int = 0
    guesses_used: int = 0
    guess_wasted_bytes: int = 0
    peak_memory_bytes: int = 0
    flash_reads: int = 0
    waited_seconds: float = 0.0
    managed_seconds: float = 0.0


@dataclass(frozen=True)
class Generator:
    """A model with what turns its logits into text.

    `eos_ids` end a text and are no part of it. Without a tokenizer events carry token ids and no text.
    `before_pass` is told how many tokens are about to go through the model together. `labels` is a
    GenerationStats whose words (backend, sparsity, ...) every result repeats.
    """

    transformer: Transformer
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_context: int
    prefill_chunk: int = RuntimeConfig.prefill_chunk
    counters: Callable[[], Counters] = Counters
    before_pass: Callable[[int], None] = lambda tokens: None
    labels: GenerationStats = field(default_factory=GenerationStats)

    def stream(
        self,
        prompt: Sequence[int],
        kv: KVCache,
        sampling: SamplingConfig,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        """Continue `prompt` (token ids), reusing what kv holds of it: one event per token, then the last.

        kv is left holding the prompt and all but the newest token, so that the next turn can reuse them.
        Ends with `stop` (end of text, stop string), `length` (max_tokens, full context) or, within a layer
        of `cancelled()` holding, `cancelled`. Raises ContextOverflowError for a prompt longer than the
        context and UsageError for an empty one, both before anything is computed, and what a pass raises.
        """
        check_prompt(prompt, self.max_context, self.transformer.config.max_context)
        if sampling.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this model was converted without one")
        return self._run(list(prompt), kv, sampling, cancelled)

    def logits(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        rows: int,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Float32]:
        """Logits of every token, (at most rows, V) at a time: `tokens` follow what kv holds, and stay there.

        Raises ContextOverflowError if they don't fit, Cancelled, and what a pass raises.
        """
        check_context(kv.length + len(tokens), self.max_context)
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            self.before_pass(len(chunk))
            yield from self.transformer.every_logits(chunk, kv, rows, cancelled)

    def _run(
        self,
        history: list[int],
        kv: KVCache,
        sampling: SamplingConfig,
        cancelled: Callable[[], bool] | None,
    ) -> Iterator[Event]:
        meter = _Meter(self.counters())
        text = _Text(self.tokenizer, sampling.stop, history)
        prompt_tokens = len(history)
        room = min(sampling.max_tokens, self.max_context - prompt_tokens)
        reason: FinishReason = "length"
        try:
            logits = self._prefill(history, kv, meter, cancelled)
            for index in range(room):
                if index:
                    logits = self._next_logits(history[-1:], kv, meter, cancelled)
                token = sample(logits[0], sampling, len(history), history)
                meter.sampled += 1
                if token in self.eos_ids:
                    reason = "stop"
                    break
                history.append(token)
                piece, stopped = text.add(token)
                meter.pause()
                yield Event(piece, token)
                meter.resume()
                if stopped:
                    reason = "stop"
                    break
        except Cancelled:
            reason = "cancelled"
        stats = meter.stats(self.labels, self.counters(), prompt_tokens, len(history) - prompt_tokens)
        yield Event(text.finish(), None, reason, stats)

    def _prefill(
        self, prompt: list[int], kv: KVCache, meter: _Meter, cancelled: Callable[[], bool] | None
    ) -> Float32:
        """Bring kv to hold exactly the prompt, and return the last token's logits (1, V).

        The last token always runs: its logits aren't stored. Chunks done before a cancellation stay.
        """
        kept = common_prefix(kv.tokens, prompt[:-1])
        kv.truncate(kept)
        last_chunk = kept + (len(prompt) - 1 - kept) // self.prefill_chunk * self.prefill_chunk
        for start in range(kept, last_chunk, self.prefill_chunk):
            self.before_pass(self.prefill_chunk)
            self.transformer.forward(prompt[start : start + self.prefill_chunk], kv, "none", cancelled)
            meter.passes += 1
        logits = self._next_logits(prompt[last_chunk:], kv, meter, cancelled)
        meter.prefilled(len(prompt) - kept)
        return logits

    def _next_logits(
        self, tokens: list[int], kv: KVCache, meter: _Meter, cancelled: Callable[[], bool] | None
    ) -> Float32:
        """One pass over tokens; the logits (1, V) of what follows the last."""
        self.before_pass(len(tokens))
        logits = self.transformer.forward(tokens, kv, "last", cancelled)
        assert logits is not None
        meter.passes += 1
        return logits


def check_prompt(prompt: Sequence[int], max_context: int, limit: int, wanted: int = 0) -> None:
    """Raises UsageError for no tokens, ContextOverflowError for more than max_context.

    limit: the model's own; wanted: tokens that there must be room for behind the prompt.
    """
    if not len(prompt):
        raise UsageError("the prompt has no tokens; give at least one")
    if len(prompt) > max_context:
        remedy = f" or raise --max-context (this model's limit is {limit})" if max_context < limit else ""
        raise ContextOverflowError(
            f"the prompt, with what was said before, has {len(prompt)} tokens and the context holds "
            f"{max_context}; shorten it{remedy}"
        )
    if len(prompt) + wanted > max_context:
        raise ContextOverflowError(
            f"{len(prompt)} tokens of prompt and {wanted} of text don't fit the context of {max_context}; "
            "ask for fewer"
        )


def check_context(tokens: int, max_context: int) -> None:
    """Raises ContextOverflowError if there are more tokens to score than the context holds."""
    if tokens > max_context:
        raise ContextOverflowError(
            f"{tokens} tokens don't fit the context of {max_context}; score the text in shorter pieces or "
            "raise --max-context"
        )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements a and b share."""
    shortest = min(len(a), len(b))
    return next((index for index in range(shortest) if a[index] != b[index]), shortest)


class _Text:
    """Token ids in, printable text out, cut before the first stop string. Without a tokenizer: no text."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], prompt: Sequence[int]) -> None:
        self._detokenizer = None
        if tokenizer is not None:
            # What continues a text keeps its leading space; a prompt of special tokens alone is no text.
            opens_text = not any(tokenizer.token_bytes(token) for token in prompt)
            self._detokenizer = StreamingDetokenizer(tokenizer, at_start=opens_text)
        self._matcher = StopMatcher(stops)

    def add(self, token: int) -> tuple[str, bool]:
        """The text that this token completed, and whether a stop string ended it."""
        if self._detokenizer is None:
            return "", False
        return self._matcher.add(self._detokenizer.add(token)), self._matcher.stopped

    def finish(self) -> str:
        """What was held back for a continuation that didn't come."""
        if self._detokenizer is None:
            return ""
        return self._matcher.add(self._detokenizer.finish()) + self._matcher.finish()


class _Meter:
    """Counts and times one generation; time that its consumer takes between events isn't counted."""

    def __init__(self, counters: Counters) -> None:
        self.passes = 0
        self.sampled = 0
        self._before = counters
        self._started = self._paused = time.perf_counter()
        self._prefill_seconds = 0.0
        self._prefill_tokens = 0
        self._prefill_passes = 0

    def elapsed(self) -> float:
        """Seconds of work so far."""
        return time.perf_counter() - self._started

    def pause(self) -> None:
        """The consumer has the event now."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        self._started += time.perf_counter() - self._paused

    def prefilled(self, tokens: int) -> None:
        """The prompt is done; `tokens` of it had to be computed."""
        self._prefill_seconds, self._prefill_tokens = self.elapsed(), tokens
        self._prefill_passes = self.passes

    def stats(
        self, labels: GenerationStats, after: Counters, prompt_tokens: int, generated_tokens: int
    ) -> GenerationStats:
        decode_passes = self.passes - self._prefill_passes if self.sampled else 0
        later = max(0, self.sampled - 1)
        lookups = after.neuron_cache_lookups - self._before.neuron_cache_lookups
        hits = after.neuron_cache_hits - self._before.neuron_cache_hits
        guessed = after.guesses_used - self._before.guesses_used
        return replace(
            labels,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            prefill_tokens_per_second=per_second(self._prefill_tokens, self._prefill_seconds),
            decode_tokens_per_second=per_second(later, self.elapsed() - self._prefill_seconds),
            time_to_first_token_seconds=self._prefill_seconds,
            peak_memory_bytes=after.peak_memory_bytes,
            flash_bytes_read=after.flash_bytes_read - self._before.flash_bytes_read,
            flash_read_seconds=after.flash_read_seconds - self._before.flash_read_seconds,
            flash_cpu_seconds=after.flash_cpu_seconds - self._before.flash_cpu_seconds,
            neuron_cache_hit_rate=hits / lookups if lookups else 0.0,
            guess_recall=guessed / (lookups - hits) if lookups > hits else 0.0,
            guess_wasted_bytes=after.guess_wasted_bytes - self._before.guess_wasted_bytes,
            forward_passes=self.passes,
            accepted_tokens_per_pass=later / decode_passes if decode_passes else 1.0,
        )
