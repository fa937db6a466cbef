"""From prompt tokens to text: the only decode loop.

A prompt runs in fixed chunks, after the part of it that the cache already holds; then tokens are sampled,
turned into text and fed back, one at a time or with draft tokens, which a pass verifies. It knows
nothing of files, budgets, threads or chat.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ondevice.backends.base import Array, Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.callbacks import IsCancelled
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.errors import ContextOverflowError, OndeviceError, UsageError
from ondevice.meter import Counters, Meter
from ondevice.model.kv_cache import KVCache, common_prefix
from ondevice.model.transformer import Cancelled, ForwardOutput, Transformer
from ondevice.sampling import StopMatcher, sample
from ondevice.speculation.drafting import Drafting, PassOutcome
from ondevice.speculation.tree import LOGITS_AHEAD, Draft, plain
from ondevice.speculation.verify import verify
from ondevice.stats import DraftStats, GenerationStats
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
class Generator:
    """A model with what turns its logits into text.

    `eos_ids` end a text and are no part of it. Without a tokenizer events carry token ids and no text.
    `before_pass` may change how much memory the model has. `labels` is a GenerationStats whose words
    (backend, sparsity, ...) every result repeats.
    """

    transformer: Transformer
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_context: int
    prefill_chunk: int = RuntimeConfig.prefill_chunk
    counters: Callable[[], Counters] = Counters
    before_pass: Callable[[ForwardBatch], None] = lambda batch: None
    drafting: Drafting | None = None
    labels: GenerationStats = field(default_factory=GenerationStats)

    def stream(
        self,
        prompt: Sequence[int],
        kv: KVCache,
        sampling: SamplingConfig,
        cancelled: IsCancelled | None = None,
    ) -> Iterator[Event]:
        """Continue `prompt` (token ids), reusing what kv holds of it: one event per token, then the last.

        kv is left holding the prompt and all but the newest token, so that the next turn can reuse them.
        Ends with `stop` (end of text, stop string), `length` (max_tokens, full context) or, within a layer
        of `cancelled()` holding, `cancelled`. Raises ContextOverflowError for a prompt longer than the
        context and UsageError for an empty one, both before anything is computed, and what a pass raises.
        """
        check_prompt(prompt, self.max_context, self.transformer.config.max_context)
        sampling = sampling.seeded()
        if sampling.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this model was converted without one")
        return self._run(list(prompt), kv, sampling, cancelled)

    def logits(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        rows: int,
        cancelled: IsCancelled | None = None,
    ) -> Iterator[Float32]:
        """Logits of every token, (at most rows, V) at a time: `tokens` follow what kv holds, and stay there.

        Raises ContextOverflowError if they don't fit, Cancelled, and what a pass raises.
        """
        check_context(kv.length + len(tokens), self.max_context)
        for start in range(0, len(tokens), self.prefill_chunk):
            batch = ForwardBatch(tokens[start : start + self.prefill_chunk])
            self.before_pass(batch)
            yield from self.transformer.every_logits(batch, kv, rows, cancelled)

    def _run(
        self,
        history: list[int],
        kv: KVCache,
        sampling: SamplingConfig,
        cancelled: IsCancelled | None,
    ) -> Iterator[Event]:
        meter = Meter(self.counters())
        prompt_tokens = len(history)
        room = min(sampling.max_tokens, self.max_context - prompt_tokens)
        text = _Text(self.tokenizer, sampling.stop, history)
        written = _Continuation(history, room, text, sampling, self.eos_ids)
        drafting = self.drafting
        if drafting is not None:
            drafting.begin(history, sampling)
        try:
            prefilled = self._prefill(history, kv, meter, cancelled)
            if room:
                self._draw(written, self.transformer.checked_logits(prefilled.hidden)[0], meter)
            if drafting is not None:
                drafting.observe(
                    PassOutcome(plain(history[prompt_tokens - 1]), [0], prefilled, None, written.ended)
                )
            while True:
                meter.pause()
                yield from written.events()
                meter.resume()
                if written.ended:
                    break
                self._decode(written, kv, meter, cancelled)
        except Cancelled:
            written.reason = "cancelled"
        except OndeviceError:
            # What was drawn before it is the text all the same.
            yield from written.events()
            raise
        labels = replace(
            self.labels,
            seed=sampling.seed if sampling.is_random else None,
            context_full=written.reason == "length" and len(history) - prompt_tokens < sampling.max_tokens,
            drafting=DraftStats() if drafting is None else drafting.stats,
        )
        stats = meter.stats(labels, self.counters(), prompt_tokens, len(history) - prompt_tokens)
        yield Event(text.finish(), None, written.reason, stats)

    def _decode(
        self,
        written: _Continuation,
        kv: KVCache,
        meter: Meter,
        cancelled: IsCancelled | None,
    ) -> None:
        """One pass over the newest token and a draft behind it; the tokens that it gives are written.

        kv then holds the text but for its newest token, or, whatever is raised, what it held before.
        """
        started, start, root = time.perf_counter(), kv.length, written.history[-1]
        drafting = self.drafting
        if drafting is None:
            draft, prune = plain(root), None
        else:
            draft = drafting.propose(root, kv, self.max_context - start, written.room, cancelled)
            prune = drafting.prune
        tree = draft.tree if len(draft) > 1 else None
        batch = ForwardBatch(draft.tokens, tree, draft_rows=len(draft) - 1)
        self.before_pass(batch)
        found = self.transformer.run(batch, kv, cancelled, prune=prune)
        meter.passes += 1
        verified = draft if len(found.tokens) == len(draft) else draft.only(found.tokens)
        path: list[int] = []
        logits = _Logits(self.transformer, found.hidden, verified)
        try:
            path = verify(
                verified,
                lambda node: self._draw(written, logits.behind(node), meter),
            )
        finally:
            kv.keep(start, path, partial(self.transformer.backend.kv_move, kv))
        if len(draft) > 1:
            self.transformer.accept(batch, [found.tokens[node] for node in path])
        if drafting is not None:
            seconds = time.perf_counter() - started
            drafting.observe(PassOutcome(verified, path, found, seconds, written.ended))

    def _draw(self, written: _Continuation, logits: Float32, meter: Meter) -> int | None:
        """The text's next token, written, or None where it ends here."""
        token = sample(logits, written.sampling, len(written.history), written.history)
        meter.sampled += 1
        if self.drafting is not None:
            self.drafting.drew(token, logits)
        written.add(token)
        return None if written.ended else token

    def _prefill(
        self, prompt: list[int], kv: KVCache, meter: Meter, cancelled: IsCancelled | None
    ) -> ForwardOutput:
        """Bring kv to hold exactly the prompt, and return what its last token became.

        It always runs: that isn't stored. Chunks done before a cancellation stay.
        """
        kept = common_prefix(kv.tokens, prompt[:-1])
        kv.truncate(kept)
        last_chunk = kept + (len(prompt) - 1 - kept) // self.prefill_chunk * self.prefill_chunk
        for start in range(kept, last_chunk, self.prefill_chunk):
            batch = ForwardBatch(prompt[start : start + self.prefill_chunk], last_only=True)
            self.before_pass(batch)
            self.transformer.run(batch, kv, cancelled)
            meter.passes += 1
        batch = ForwardBatch(prompt[last_chunk:], last_only=True)
        self.before_pass(batch)
        found = self.transformer.run(batch, kv, cancelled)
        meter.passes += 1
        meter.prefilled(len(prompt) - kept)
        return found


def require_one(text: str | None, tokens: Iterable[int] | None) -> None:
    """Raises UsageError if there are both or neither, or the text is none."""
    if (text is None) == (tokens is None):
        raise UsageError("give either a text or tokens")
    if text is not None and not isinstance(text, str):
        raise UsageError(f"the text is of type {type(text).__name__}; it must be a str")


def token_ids(tokens: Iterable[int]) -> list[int]:
    """Tokens as plain integers; an array's will do. Raises UsageError if they are anything else."""
    return list(token_stream(tokens))


def token_stream(tokens: Iterable[int]) -> Iterator[int]:
    """`token_ids`, one by one as they are taken."""
    try:
        for token in tokens:
            yield operator.index(token)
    except TypeError as error:
        raise UsageError(f"tokens must be a sequence of integers: {error}") from error


def check_prompt(prompt: Sequence[int], max_context: int, limit: int, wanted: int = 0) -> None:
    """Raises UsageError for no tokens, ContextOverflowError for more than max_context.

    limit: the model's own; wanted: tokens that there must be room for behind the prompt.
    """
    if not len(prompt):
        raise UsageError("the prompt has no tokens; give at least one")
    if len(prompt) > max_context:
        remedy = f" or raise --max-context (this model's limit is {limit})" if max_context < limit else ""
        raise ContextOverflowError(
            f"the prompt (in a conversation with all that was said before) has at least {len(prompt)} tokens "
            f"and the context holds {max_context}; shorten it{remedy}"
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


class _Logits:
    """What a pass says behind the nodes of its draft.

    The head is a large matrix: it is multiplied by what will likely be asked for next at the same time.
    """

    def __init__(self, transformer: Transformer, hidden: Array, draft: Draft) -> None:
        """hidden: (n, D), a row for each node."""
        self._transformer, self._hidden, self._draft = transformer, hidden, draft
        self._rows: dict[int, Float32] = {}

    def behind(self, node: int) -> Float32:
        """(V,) Raises BundleError if they aren't finite."""
        if node not in self._rows:
            nodes, hidden, backend = [node], self._hidden, self._transformer.backend
            if len(self._draft) > 1:
                nodes = self._draft.likely_path(node, LOGITS_AHEAD)
                hidden = backend.rows(hidden, nodes)
            logits = backend.to_numpy(self._transformer.logits(hidden))
            self._rows = {each: logits[row : row + 1] for row, each in enumerate(nodes)}
        rows = self._rows[node]
        # Only of what the text takes: what is wrong with another is never seen in plain decoding.
        self._transformer.check_finite(rows)
        row: Float32 = rows[0]
        return row


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


class _Continuation:
    """A text that grows: its tokens, what became printable with each, and whether it has ended."""

    def __init__(
        self,
        history: list[int],
        room: int,
        text: _Text,
        sampling: SamplingConfig,
        eos_ids: frozenset[int],
    ) -> None:
        """history: the prompt, which grows. room: tokens that may still be written."""
        self.history = history
        self.room = room
        self.sampling = sampling
        self.reason: FinishReason = "length"
        self.ended = room == 0
        self._text = text
        self._eos_ids = eos_ids
        self._events: list[Event] = []

    def add(self, token: int) -> None:
        """`token` was drawn: it is the text's next, or ends it."""
        if token in self._eos_ids:
            self.reason, self.ended = "stop", True
            return
        self.history.append(token)
        self.room -= 1
        piece, stopped = self._text.add(token)
        self._events.append(Event(piece, token))
        if stopped:
            self.reason = "stop"
        self.ended = stopped or self.room == 0

    def events(self) -> Iterator[Event]:
        """Those since the last time."""
        events, self._events = self._events, []
        yield from events
