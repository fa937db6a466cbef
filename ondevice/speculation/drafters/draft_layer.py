"""Drafts with a draft layer: EAGLE-3 (arXiv 2503.01840), or the multi-token-prediction layer of a checkpoint.

Each token of the text gives the layer a row: its embedding, and the target's hidden state after the token
before it. A draft continues from the newest row: a draft token's row takes the layer's output as its hidden
state, and is dropped when the next draft begins.

There are no rows for tokens whose hidden states this drafter didn't get: those of a pass with other texts,
from a prompt cache, or from before another text used the drafter (`begin` keeps the common prefix). The layer
sees the remaining rows as if they were adjacent. That makes drafts worse, but never changes the text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ondevice.backends.base import Array, Float32
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.draft_layer import PIECE_ROWS, LoadedDraftLayer
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.model.transformer import ForwardOutput
from ondevice.records import dataclass
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals


@dataclass(frozen=True)
class DraftLayerState:
    """A loaded draft layer, and the cache of the layer's keys and values."""

    layer: LoadedDraftLayer
    kv: SequenceState


class LayerOutput(NamedTuple):
    """The output of the layer after a path: its hidden state (1, D), and logits (N,)."""

    hidden: Array
    logits: Float32


class DraftLayerDrafter(Drafter):
    """Drafts the likeliest tokens of a draft layer. With sampling, ranks them with the text's noise added."""

    _tokens_ahead = 1
    """Tokens after a hidden state's own that its row has."""

    def __init__(self, state: DraftLayerState) -> None:
        self._layer = state.layer
        self._kv = state.kv
        self._ranking = Ranking(tokens=state.layer.tokens)
        self._text: list[int] = []
        self._positions: list[int] = []
        """The position of the hidden state in each row of the text, ascending. The cache has these rows, then
        those of a path of the newest draft."""
        self._waiting: list[tuple[int, Array]] = []
        """Hidden states (1, D) that no row has yet, by position."""
        self._newest: Array | None = None
        """(1, D) the layer's output in the last row of the text."""
        self._branch: tuple[int, ...] = ()
        """Draft tokens whose rows the cache has."""
        self._outputs: dict[tuple[int, ...], LayerOutput] = {}
        """By path of the newest draft, as far as proposals were asked for."""
        self._drawn: tuple[int, ...] = ()
        """Tokens that were drawn since the draft began."""
        self._cancelled: IsCancelled | None = None
        """Cancels the growing draft."""

    @property
    def taps(self) -> tuple[int, ...]:
        return self._layer.taps

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        same = common_prefix(self._text, text)
        self._text = list(text)
        self._forget()
        # Most rows have the hidden state at their position and the token after that.
        kept = bisect_right(self._positions, same - 1 - self._tokens_ahead)
        if kept < len(self._positions):
            self._newest = None
        del self._positions[kept:]
        self._kv.truncate(kept)
        self._waiting = [(position, row) for position, row in self._waiting if position < same]
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        drafted = self._outputs.get(self._drawn)
        if logits is not None and drafted is not None:
            self._ranking.judge(drafted.logits, len(self._text), token, self._text)
        self._text.append(token)
        self._drawn = (*self._drawn, token)

    def read(self, output: ForwardOutput) -> None:
        self._take(output, range(output.tokens))
        self._catch_up()

    def end_pass(self, output: ForwardOutput, path: Sequence[int]) -> None:
        self._take(output, path)
        if len(self._waiting) > PIECE_ROWS:
            self._catch_up()

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._cancelled = cancelled
        self._forget()
        self._catch_up()
        # A draft continues from the state after the last token but one.
        if self._newest is not None and self._positions[-1] == len(self._text) - 2:
            self._outputs[()] = self._first(self._newest)

    def propose(self, path: Sequence[int]) -> Proposals:
        if () not in self._outputs:
            return []
        # Shorter paths have been asked for, except where a constraint forces tokens.
        for depth in range(1, len(path) + 1):
            part = tuple(path[:depth])
            if part not in self._outputs:
                if self._cancelled is not None and self._cancelled():
                    raise Cancelled
                self._outputs[part] = self._run(part)
        position = len(self._text) + len(path)
        return self._ranking.rank(self._outputs[tuple(path)].logits, position, [*self._text, *path])

    def _first(self, newest: Array) -> LayerOutput:
        """The output from which the token after the text is drafted. newest: (1, D), the layer's output in
        the text's last row.
        """
        return LayerOutput(newest, self._layer.logits(newest)[0])

    def _run(self, path: tuple[int, ...]) -> LayerOutput:
        """Run those rows of a path that aren't in the cache. All shorter paths must have outputs."""
        kept, backend = common_prefix(self._branch, path), self._layer.backend
        self._truncate(kept)
        before = [self._outputs[path[:depth]].hidden for depth in range(kept, len(path))]
        # A copy, as rows may be overwritten.
        hidden = self._layer.run(path[kept:], backend.stacked(before), self._kv)
        self._branch = path
        last = backend.rows(hidden, [len(before) - 1])
        return LayerOutput(last, self._layer.logits(last)[0])

    def _take(self, output: ForwardOutput, path: Sequence[int]) -> None:
        """Take the hidden states of the tokens on a path through a pass, except those already known."""
        if not output.tapped:
            return
        position = self._waiting[-1][0] if self._waiting else self._positions[-1] if self._positions else -1
        new = [(output.position + at, node) for at, node in enumerate(path)]
        new = [(at, node) for at, node in new if at > position]
        for first in range(0, len(new), PIECE_ROWS):
            piece = new[first : first + PIECE_ROWS]
            nodes = [node for _, node in piece]
            mixed = self._layer.mixed([self._layer.backend.rows(pair, nodes) for pair in output.tapped])
            self._waiting += [(at, mixed[row : row + 1]) for row, (at, _) in enumerate(piece)]

    def _catch_up(self) -> None:
        """Run the waiting rows of tokens whose next token is already in the text."""
        self._truncate(0)
        backend = self._layer.backend
        stop = len(self._text) - self._tokens_ahead
        while self._waiting and self._waiting[0][0] < stop:
            piece = [pair for pair in self._waiting[:PIECE_ROWS] if pair[0] < stop]
            tokens = [self._text[position + self._tokens_ahead] for position, _ in piece]
            hidden = self._add_rows(tokens, backend.stacked([row for _, row in piece]))
            self._newest = backend.rows(hidden, [len(piece) - 1])
            self._positions += [position for position, _ in piece]
            del self._waiting[: len(piece)]

    def _add_rows(self, tokens: Sequence[int], hidden: Array) -> Array:
        """Add rows of the text and return the layer's output in them, (n, D). hidden: (n, D or T)."""
        return self._layer.run(tokens, hidden, self._kv)

    def _truncate(self, depth: int) -> None:
        """Drop all rows of the newest draft except the first `depth`."""
        self._kv.truncate(len(self._positions) + depth)
        self._branch = self._branch[:depth]

    def _forget(self) -> None:
        self._drawn = ()
        self._outputs.clear()
        self._truncate(0)
