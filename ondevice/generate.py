"""From prompt tokens to text: the only decode loop, without files, budgets, threads or chat.

The part of a prompt that the cache lacks runs in chunks of a fixed size. Then tokens are sampled, turned into
text and fed back, one at a time or with draft tokens, which the forward pass verifies.
"""

from __future__ import annotations

import operator
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypeVar

from ondevice.backends.base import Array, Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.budget.sizes import PREFILL_CHUNK
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.chat_template.tools import CallPart, ToolCall
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.errors import ContextOverflowError, OndeviceError, UsageError
from ondevice.meter import Counters, Meter
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.model.shared_passes import Drafted, PassRequest, PassResult, SharedPasses, no_pass
from ondevice.model.transformer import Transformer
from ondevice.records import dataclass
from ondevice.sampling import StopMatcher, log_probabilities, sample
from ondevice.speculation.drafted_text import DraftedText, PassOutcome
from ondevice.speculation.drafting import Drafting, DraftRequest
from ondevice.speculation.tree import LOGITS_AHEAD, Draft, plain
from ondevice.speculation.verify import verify
from ondevice.stats import DraftStats, GenerationStats, PromptUse
from ondevice.tokenizer import StreamingDetokenizer, Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """One step of a generation: a token and the text it completed. The last event says how it ended.

    `text` may be empty, since bytes of an unfinished character and beginnings of a stop string are held back.
    `thinking`: whether the text is what the model thinks before its reply in a conversation.
    `tool_call`: a complete call of a tool; its event has no text. `call_part`: a part of an incomplete call
    whose arguments are JSON. In a conversation an event may have no token, as one token can complete several
    things.
    `logprob` and `top_logprobs` are as `log_probabilities` gives them, if `top_logprobs` is set.
    `held`: how many of the newest tokens have no text shown yet, because it may begin a stop string; in the
    last event, how many tokens follow the beginning of a stop string.
    `prompt`: in the first event, the prompt's tokens, unless the first event is also the last.
    The last event has no token. It has the rest of the text, `finish_reason` and `stats`, and `stop` is the
    stop string that ended the text, if one did.
    """

    text: str
    token: int | None = None
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None
    thinking: bool = False
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    stop: str | None = None
    tool_call: ToolCall | None = None
    call_part: CallPart | None = None
    held: int = 0
    prompt: PromptUse | None = None


Steps: TypeAlias = abc.Generator[Event | PassRequest, PassResult | None, T]
"""A generation in steps: its events and the passes that it needs.

What is sent back for a pass is its result, or None if the keys and values had to go; the generation then
computes them again.
"""


@dataclass(frozen=True)
class Generator:
    """A transformer with the parts that turn its logits into text.

    `eos_ids` end a text and don't belong to it. Without a tokenizer, events have token ids and no text.
    `before_pass` runs before every forward pass and may change how much memory the model has. `restore`
    extends a cache that holds a prefix of tokens by stored keys and values, and yields between two pieces. Up
    to `most_texts` texts share passes of at most `equal_rows` rows, in which each text keeps its bits;
    `pass_seconds` limits how much of a pass prompts take. Stats get the text fields of `labels`.
    """

    transformer: Transformer
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    max_context: int
    prefill_chunk: int = PREFILL_CHUNK
    counters: Callable[[], Counters] = Counters
    before_pass: Callable[[ForwardBatch], None] = lambda batch: None
    restore: Callable[[SequenceState, Sequence[int], IsCancelled | None], Iterator[None]] = (
        lambda kv, tokens, cancelled: iter(())
    )
    drafting: Drafting | None = None
    most_texts: int = 1
    equal_rows: int = ANY_ROWS
    pass_seconds: Callable[[], float] = lambda: 0.0
    labels: GenerationStats = field(default_factory=GenerationStats)

    def stream(
        self,
        prompt: Sequence[int],
        kv: SequenceState,
        sampling: SamplingConfig,
        cancelled: IsCancelled | None = None,
        constrained: Constrained | None = None,
    ) -> Iterator[Event]:
        """Yields the events of a text that continues `prompt` (token ids): one per token, then the last one.

        constrained: follows the text if `sampling.constraint` is set.

        The part of the prompt that kv holds is reused. Afterwards kv holds the text without its newest token,
        for the next turn. The finish reason is `stop` (end of text, stop string), `length` (max_tokens, full
        context) or `cancelled`, at most a layer after `cancelled()` turns True.

        Before anything is computed, raises ContextOverflowError for a prompt longer than the context and
        UsageError for an empty one. Raises what a pass raises.
        """
        return self.answered(self.steps(prompt, kv, sampling, cancelled, constrained))

    @cached_property
    def passes(self) -> SharedPasses:
        """The object that runs the passes which `steps` yields."""
        most_rows = max(self.prefill_chunk, self.most_texts)
        draft = None if self.drafting is None else partial(_drafted, self.drafting)
        parts = self.transformer, self.before_pass
        return SharedPasses(*parts, most_rows, draft, self.equal_rows, self.pass_seconds)

    def answered(self, steps: Steps[None]) -> Iterator[Event]:
        """Yields the events of one text, with passes that no other text shares."""
        try:
            while True:
                item = next(steps)
                while isinstance(item, PassRequest):
                    item = self._after(item, steps)
                yield item
        except StopIteration:
            return
        finally:
            steps.close()

    def _after(self, request: PassRequest, steps: Steps[None]) -> Event | PassRequest:
        """The next item of `steps`, after a pass for it. The pass's result is freed before the next pass."""
        result = self.passes.alone(request)
        if isinstance(result, Exception):
            return steps.throw(result)
        return steps.send(result if isinstance(result, PassResult) else None)

    def steps(
        self,
        prompt: Sequence[int],
        kv: SequenceState,
        sampling: SamplingConfig,
        cancelled: IsCancelled | None = None,
        constrained: Constrained | None = None,
    ) -> Steps[None]:
        """The steps of `stream`. The caller runs the passes that they yield, so that texts can share them.

        `cancelled()` is checked before every pass, and within passes that aren't shared.
        """
        check_prompt(prompt, self.max_context, self.transformer.config.max_context)
        sampling = sampling.seeded()
        if sampling.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this model was converted without one")
        return self._run(list(prompt), kv, sampling, cancelled, constrained)

    def logits(
        self,
        tokens: Sequence[int],
        kv: SequenceState,
        rows: int,
        cancelled: IsCancelled | None = None,
    ) -> Iterator[Float32]:
        """Yields the logits at every token in pieces of (at most `rows`, V), and appends `tokens` to kv.

        Raises ContextOverflowError if they don't fit the context, Cancelled, and what a pass raises.
        """
        check_context(kv.length + len(tokens), self.max_context)
        step = self.prefill_chunk
        for start in range(0, len(tokens), step):
            batch = ForwardBatch(tokens[start : start + step])
            self.before_pass(batch)
            yield from self.transformer.every_logits(batch, kv, rows, cancelled)

    def _run(
        self,
        history: list[int],
        kv: SequenceState,
        sampling: SamplingConfig,
        cancelled: IsCancelled | None,
        constrained: Constrained | None,
    ) -> Steps[None]:
        meter, prompt_tokens = Meter(self.counters()), len(history)
        room = min(sampling.max_tokens, self.max_context - prompt_tokens)
        text = _Text(self.tokenizer, sampling.stop, history, constrained is not None)
        ends = self.eos_ids.union(sampling.end_tokens)
        generation = _Generation(history, room, text, sampling, ends, constrained)
        try:
            kv.truncate(common_prefix(kv.tokens, history[:-1]))
            held = kv.length
            for _ in self.restore(kv, history[:-1], cancelled):
                yield no_pass(kv, cancelled)
            meter.reused = kv.length
            kv.mark_prompt(prompt_tokens)
            meter.restored = max(0, meter.reused - held)
            prefilled = yield from self._prefill(generation, kv, meter, cancelled)
            meter.prefilled(prompt_tokens)
            generation.prompt = PromptUse(prompt_tokens, meter.reused)
            if room:
                self._draw(generation, self._last_logits(prefilled), meter, generation.drafted)
            last = plain(history[prompt_tokens - 1])
            self._observe(generation, PassOutcome(last, [0], prefilled.output, None, generation.ended))
            # The plan has no memory for its hidden states during another pass.
            del prefilled
            while True:
                yield from self._catch_up(generation, kv, meter, cancelled)
                yield from generation.events(meter)
                if generation.ended:
                    break
                yield from self._decode(generation, kv, meter, cancelled)
        except Cancelled:
            generation.reason = "cancelled"
        except OndeviceError:
            # Tokens drawn before the error belong to the text all the same.
            yield from generation.events(meter)
            raise
        finally:
            drafting = self._let_go(generation)
        labels = replace(
            self.labels,
            seed=sampling.seed if sampling.is_random else None,
            context_full=generation.reason == "length" and len(history) - prompt_tokens < sampling.max_tokens,
            drafting=drafting,
        )
        stats = meter.stats(labels, self.counters(), prompt_tokens, len(history) - prompt_tokens)
        rest, matcher = text.finish(), text.matcher
        yield Event(rest, None, generation.reason, stats, stop=matcher.matched, held=matcher.held)

    def _decode(
        self, generation: _Generation, kv: SequenceState, meter: Meter, cancelled: IsCancelled | None
    ) -> Steps[None]:
        """Run one forward pass over the newest token and a draft after it, and add the accepted tokens.

        Afterwards kv holds the text without its newest token; after an exception, what it held before.
        """
        start, root = len(generation.history) - 1, generation.history[-1]
        text, draft = self._drafted_text(generation), plain(root)
        answer: PassResult | None = None
        if kv.length == start:
            request = DraftRequest(text, root, kv, self.max_context - start, generation.room, cancelled)
            answer = yield PassRequest(ForwardBatch([root]), kv, start, cancelled, draft_request=request)
        if answer is None:
            # The keys and values made room for those of other texts.
            answer = yield from self._prefill(generation, kv, meter, cancelled)
            verified, text = draft, None
        else:
            meter.passes += 1
            verified = draft = draft if text is None else text.draft
        started, output = time.perf_counter(), answer.output
        path: list[int] = []
        logits = _Logits(self.transformer, output.hidden, verified, answer.logits)
        try:
            path = verify(verified, lambda node: self._draw(generation, logits.after(node), meter, text))
        finally:
            # A lower budget may have taken the memory of kv: the next pass computes it again.
            if kv.length > start:
                self.transformer.keep(kv, start, path)
        if len(draft) > 1:
            self.transformer.accept(answer.batch, [answer.first + node for node in path])
        if text is not None:
            drawing, ended = time.perf_counter() - started, generation.ended
            self._observe(generation, PassOutcome(verified, path, output, answer.seconds, ended, drawing))

    def _drafted_text(self, generation: _Generation) -> DraftedText | None:
        """The text as the drafters know it; None if nothing drafts."""
        if generation.drafted is None and self.drafting is not None:
            settings = (generation.sampling, generation.constrained, generation.prompt_tokens)
            generation.drafted = self.drafting.begin(generation.history, *settings)
        return generation.drafted

    def _observe(self, generation: _Generation, outcome: PassOutcome) -> None:
        if generation.drafted is not None and self.drafting is not None:
            self.drafting.observe(generation.drafted, outcome)

    def _let_go(self, generation: _Generation) -> DraftStats:
        """Free the memory of a text's drafts. Returns their stats."""
        if generation.drafted is None or self.drafting is None:
            return DraftStats()
        stats = self.drafting.stats(generation.drafted)
        self.drafting.end(generation.drafted)
        return stats

    def _last_logits(self, result: PassResult) -> Float32:
        """Logits (V,) after the last row of a pass. Raises BundleError if they aren't finite."""
        if result.logits is None:
            row: Float32 = self.transformer.checked_logits(result.output.hidden)[0]
            return row
        self.transformer.check_finite(result.logits)
        row = result.logits[0]
        return row

    def _draw(
        self, generation: _Generation, logits: Float32, meter: Meter, text: DraftedText | None
    ) -> int | None:
        """Draw the text's next token, add it and return it. Returns None if the text ends or has to wait."""
        constrained, history = generation.constrained, generation.history
        if constrained is not None and not constrained.is_ready():
            generation.waiting = logits.copy()
            if text is not None:
                text.disable()  # Drafting begins anew with the token that has to wait.
            return None
        allowed = None if constrained is None else constrained.allowed()
        token = sample(logits, generation.sampling, len(history), history, allowed, generation.prompt_tokens)
        meter.sampled += 1
        if text is not None:
            text.drew(token, logits)
        top = generation.sampling.top_logprobs
        if top is None:
            generation.add(token)
        else:
            generation.add(token, *log_probabilities(logits, token, top))
        return None if generation.ended else token

    def _catch_up(
        self, generation: _Generation, kv: SequenceState, meter: Meter, cancelled: IsCancelled | None
    ) -> Steps[None]:
        """Follow a text's constraint again if shared limits stopped its matcher, then draw the waiting token.

        Events of earlier tokens are yielded first, since this takes as long as several passes of other texts.
        """
        if generation.constrained is None or not generation.constrained.lags:
            return
        yield from generation.events(meter)
        for _ in generation.constrained.catch_up():
            yield no_pass(kv, cancelled)
        if generation.constrained.is_complete:
            generation.reason, generation.ended = "stop", True
        logits, generation.waiting = generation.waiting, None
        if logits is not None and not generation.ended:
            self._draw(generation, logits, meter, None)

    def _prefill(
        self, generation: _Generation, kv: SequenceState, meter: Meter, cancelled: IsCancelled | None
    ) -> Steps[PassResult]:
        """Run the tokens of a text that kv doesn't hold yet. Returns the result of the last pass.

        The last token always runs, because its result isn't stored. Chunks done before a cancellation stay.
        """
        self._drafted_text(generation)
        while True:
            text, start = generation.history, kv.length
            chunk = text[start : kv.end_of_chunk(self._end_of_pass(start, generation.prompt_tokens))]
            last = start + len(chunk) == len(text)
            batch = ForwardBatch(chunk, last_only=True, silent=not last)
            if not meter.sampled:
                # Reused keys and values may have gone while the prompt waited for a pass.
                meter.reused = min(meter.reused, start)
            result = yield PassRequest(batch, kv, start, cancelled, True, len(text) - start, logits=last)
            if result is None:
                continue
            meter.passes += 1
            if generation.drafted is not None and self.drafting is not None:
                self.drafting.read(generation.drafted, result.output)
            full_chunk = result.rows == self.prefill_chunk and start % self.prefill_chunk == 0
            if full_chunk and start == kv.chunked and kv.states is None:
                kv.chunked = start + self.prefill_chunk
            if last and result.rows == len(chunk):
                return result
            # The plan has no memory for its hidden states during the next pass.
            del result

    def _end_of_pass(self, start: int, prompt_tokens: int) -> int:
        """The end position, exclusive, of a pass that begins at `start`.

        If results depend on the number of rows, tokens after the prompt run in few rows, as in decoding.
        """
        stop = start + self.prefill_chunk
        if self.prefill_chunk <= self.equal_rows:
            return stop
        return min(stop, prompt_tokens) if start < prompt_tokens else min(stop, start + self.equal_rows)


def _drafted(drafting: Drafting, requests: Sequence[PassRequest], rows: int) -> list[Drafted | Cancelled]:
    """The token and the draft of each text in a pass. Together they have at most `rows` rows."""
    drafts: list[Drafted | Cancelled] = []
    draft_requests = [request.draft_request for request in requests]
    for draft, (text, *_) in zip(drafting.propose(draft_requests, rows), draft_requests, strict=True):
        if isinstance(draft, Cancelled):
            drafts.append(draft)
            continue
        tree = draft.tree if len(draft) > 1 else None
        batch = ForwardBatch(draft.tokens, tree, drafted=range(1, len(draft)))
        drafts.append(Drafted(batch, None if text is None else text.streamed))
    return drafts


def watched(steps: Steps[None], see: Callable[[Any], None], kind: type = Event) -> Steps[None]:
    """Yields the items of `steps`, after calling `see` with each item of type `kind`."""
    answer: PassResult | None = None
    error: OndeviceError | Cancelled | None = None
    with closing(steps):
        while True:
            try:
                item = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration:
                return
            if isinstance(item, kind):
                see(item)
            answer = error = None
            try:
                answer = yield item
            except (OndeviceError, Cancelled) as raised:
                error = raised


def require_one(text: str | None, tokens: Iterable[int] | None) -> None:
    """Check that exactly one of the two is given, and that the text is a str. Raises UsageError if not."""
    if (text is None) == (tokens is None):
        raise UsageError("give either a text or tokens")
    if text is not None and not isinstance(text, str):
        raise UsageError(f"the text is of type {type(text).__name__}; it must be a str")


def token_ids(tokens: Iterable[int]) -> list[int]:
    """Tokens as Python integers. Integers of any kind, such as an array's, are accepted.

    Raises UsageError for anything else.
    """
    return list(token_stream(tokens))


def token_stream(tokens: Iterable[int]) -> Iterator[int]:
    """Yields the tokens as `token_ids` converts them, each when it is needed."""
    try:
        for token in tokens:
            yield operator.index(token)
    except TypeError as error:
        raise UsageError(f"tokens must be a sequence of integers: {error}") from error


def check_prompt(prompt: Sequence[int], max_context: int, limit: int, wanted: int = 0) -> None:
    """Check a prompt's length. Raises UsageError if it is 0, ContextOverflowError if it exceeds max_context.

    limit: the model's longest context, for the message. wanted: tokens that must fit after the prompt.
    """
    tokens = len(prompt)
    if not tokens:
        raise UsageError("the prompt has no tokens; give at least one")
    if tokens > max_context:
        remedy = f" or raise --max-context (this model's limit is {limit})" if max_context < limit else ""
        message = (
            f"the prompt (in a conversation with all that was said before) has at least {tokens} tokens and "
            f"the context holds {max_context}; shorten it{remedy}"
        )
        raise ContextOverflowError(message, tokens, max_context)
    if tokens + wanted > max_context:
        message = f"{tokens} tokens of prompt and {wanted} of text don't fit the context of {max_context}"
        raise ContextOverflowError(f"{message}; ask for fewer", tokens + wanted, max_context)


def check_context(tokens: int, max_context: int) -> None:
    """Check a number of tokens to score. Raises ContextOverflowError if the context can't hold them."""
    if tokens > max_context:
        raise ContextOverflowError(
            f"{tokens} tokens don't fit the context of {max_context}; score the text in shorter pieces or "
            "raise --max-context"
        )


class _Logits:
    """Logits after each node of a pass's draft, computed when they are needed.

    The head is a large matrix, so one product also covers nodes that will probably be needed next.
    """

    def __init__(
        self, transformer: Transformer, hidden: Array, draft: Draft, known: Float32 | None = None
    ) -> None:
        """hidden: (n, D) hidden states, one row per node. known: (1, V) logits after the root, if known."""
        self._transformer, self._hidden, self._draft = transformer, hidden, draft
        self._rows: dict[int, Float32] = {} if known is None else {0: known}

    def after(self, node: int) -> Float32:
        """(V,) logits of the token after `node`. Raises BundleError if they aren't finite."""
        if node not in self._rows:
            nodes, hidden, backend = [node], self._hidden, self._transformer.backend
            if len(self._draft) > 1:
                nodes = self._draft.likely_path(node, LOGITS_AHEAD)
                hidden = backend.rows(hidden, nodes)
            logits = backend.to_numpy(self._transformer.logits(hidden))
            self._rows = {each: logits[row : row + 1] for row, each in enumerate(nodes)}
        rows = self._rows[node]
        # Only rows that the text uses are checked; plain decoding never computes the others.
        self._transformer.check_finite(rows)
        row: Float32 = rows[0]
        return row


class _Text:
    """Turns token ids into text, cut before the first stop string. Without a tokenizer there is no text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        prompt: Sequence[int],
        keep_leading_space: bool,
    ) -> None:
        self._detokenizer = None
        if tokenizer is not None:
            # Text that continues a prompt keeps its leading space; special tokens alone are no such prompt.
            opens_text = not keep_leading_space and not any(tokenizer.token_bytes(token) for token in prompt)
            self._detokenizer = StreamingDetokenizer(tokenizer, at_start=opens_text)
        self.matcher = StopMatcher(stops)
        """Has the stop string that ended the text, and the number of tokens whose text is held back."""

    def add(self, token: int) -> tuple[str, bool]:
        """The text that this token completes, and whether a stop string ended the text."""
        if self._detokenizer is None:
            return "", False
        return self.matcher.add(self._detokenizer.add(token)), self.matcher.stopped

    def finish(self) -> str:
        """The remaining text, which was held back because later tokens could have changed it."""
        if self._detokenizer is None:
            return ""
        return self.matcher.add(self._detokenizer.finish()) + self.matcher.finish()


class _Generation:
    """A text that is being generated: its tokens, their events, and whether and why it has ended."""

    def __init__(
        self,
        history: list[int],
        room: int,
        text: _Text,
        sampling: SamplingConfig,
        eos_ids: frozenset[int],
        constrained: Constrained | None = None,
    ) -> None:
        """history: the prompt's ids; the list grows. room: number of tokens that may still be written."""
        self.constrained = constrained
        self.history = history
        self.prompt_tokens = len(history)
        self.room = room
        self.sampling = sampling
        self.reason: FinishReason = "length"
        self.ended = room == 0
        self.prompt: PromptUse | None = None
        """The prompt's tokens, until the first event has them."""
        self.drafted: DraftedText | None = None
        """What the drafters know of the text; None if nothing drafts."""
        self.waiting: Float32 | None = None
        """(V,) logits from which a token is drawn once the constraint has caught up."""
        self._text = text
        self._eos_ids = eos_ids
        self._events: list[Event] = []

    def add(
        self,
        token: int,
        logprob: float | None = None,
        top_logprobs: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Append a drawn token to the text, or end the text if it is an end-of-text id."""
        if token in self._eos_ids:
            self.reason, self.ended = "stop", True
            return
        self.history.append(token)
        self.room -= 1
        piece, stopped = self._text.add(token)
        held = self._text.matcher.held
        self._events.append(Event(piece, token, logprob=logprob, top_logprobs=top_logprobs, held=held))
        if self.constrained is not None:
            self.constrained.take(token, piece)
            stopped = stopped or self.constrained.is_complete
        if stopped:
            self.reason = "stop"
        self.ended = stopped or self.room == 0

    def events(self, meter: Meter) -> Iterator[Event]:
        """Yields the events since the last call. The time that their reader takes isn't measured."""
        events, self._events = self._events, []
        if events and self.prompt is not None:
            events[0], self.prompt = replace(events[0], prompt=self.prompt), None
        meter.pause()
        yield from events
        meter.resume()
