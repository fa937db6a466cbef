"""Drafts with a second, smaller model that has the same tokens as the target (Leviathan et al., arXiv
2211.17192).

Each pass of the draft model continues the likeliest draft token, so a draft is a chain where the model is
confident and a small tree where it isn't. A draft ends when further tokens aren't worth a pass of the draft
model (SVIP, arXiv 2411.18462, also ends drafts by the draft model's confidence).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.recurrent import AHEAD_TOKENS
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.model.transformer import Transformer
from ondevice.records import dataclass
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals
from ondevice.tokenizer import Tokenizer

BRANCHES = 3
"""Maximum draft tokens after a node, as going back to another one costs a pass over its path."""


@dataclass(frozen=True)
class DraftModel:
    """A loaded second model.

    max_context: most tokens that `kv` may hold.
    chunk: most tokens of a pass.
    close: releases the model's resources.
    tokenizer, target_tokenizer: those of the draft model and of the target; None if their vocabulary is the
        same.
    """

    transformer: Transformer
    kv: SequenceState
    max_context: int
    chunk: int
    close: Callable[[], None]
    tokenizer: Tokenizer | None = None
    target_tokenizer: Tokenizer | None = None


class DraftContext:
    """Computes the logits of a second model after any tokens. Tokens that are in its cache aren't
    run again.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def logits(
        self, tokens: Sequence[int], text: int, cancelled: IsCancelled | None = None
    ) -> Float32 | None:
        """Logits (V,) after `tokens`. None if `tokens` is empty, or exceeds context or vocabulary.

        text: number of leading tokens that will hardly change. A model with recurrent layers drops up to
        `AHEAD_TOKENS` tokens after these at no cost. Raises as a forward pass does.
        """
        transformer, kv = self._model.transformer, self._model.kv
        if not 0 < len(tokens) <= self._model.max_context:
            return None
        kept = common_prefix(kv.tokens, tokens, len(tokens) - 1)
        if max(tokens[kept:]) >= transformer.config.vocab_size:
            return None
        kv.truncate(kept)
        transformer.commit(kv, min(kv.length, text))
        while True:
            output = transformer.run(self._next(tokens, text), kv, cancelled)
            if kv.length == len(tokens):
                last: Float32 = transformer.checked_logits(output.hidden)[0]
                return last

    def _next(self, tokens: Sequence[int], text: int) -> ForwardBatch:
        """The next pass over those of `tokens` that aren't in the cache."""
        kv = self._model.kv
        rest = tokens[kv.length : kv.end_of_chunk(kv.length + self._model.chunk)]
        if kv.states is None:
            return ForwardBatch(rest, last_only=True)
        if kv.length < text:
            return ForwardBatch(rest[: text - kv.length], last_only=True)
        rest = rest[:AHEAD_TOKENS]
        if kv.states.tokens_ahead + len(rest) > AHEAD_TOKENS:
            self._model.transformer.commit(kv, kv.length)
        return ForwardBatch(rest, last_only=True, drafted=range(len(rest)))


class ModelDrafter(Drafter):
    """Drafts the likeliest tokens of a second model. With sampling, ranks them with the text's
    noise added.
    """

    def __init__(self, model: DraftModel, vocab_size: int) -> None:
        """model: has the same vocabulary as the target. vocab_size: number of rows of the target's head,
        which may be fewer.
        """
        self._model = model
        self._context = DraftContext(model)
        self._vocab_size = vocab_size
        self._ranking = Ranking(BRANCHES)
        self._cancelled: IsCancelled | None = None
        """Cancels the growing draft."""
        self._text: list[int] = []
        self._path: tuple[int, ...] = ()
        """Tokens that were drawn since the draft began."""
        self._logits: dict[tuple[int, ...], Float32] = {}
        """The draft model's logits by path, as far as proposals were asked for."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._text = list(text)
        self._forget()
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        drafted = self._logits.get(self._path)
        if logits is not None and drafted is not None:
            self._ranking.judge(drafted, len(self._text), token, self._text)
        self._text.append(token)
        self._path = (*self._path, token)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._cancelled = cancelled
        self._forget()

    def propose(self, path: Sequence[int]) -> Proposals:
        tokens = [*self._text, *path]
        logits = self._context.logits(tokens, len(self._text), self._cancelled)
        if logits is None:
            return []
        logits = logits[: self._vocab_size]
        self._logits[tuple(path)] = logits
        return self._ranking.rank(logits, len(tokens), tokens)

    def close(self) -> None:
        self._forget()
        self._model.close()

    def _forget(self) -> None:
        self._path = ()
        self._logits.clear()
