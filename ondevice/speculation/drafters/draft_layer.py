"""A draft layer drafts: EAGLE-3 (arXiv 2503.01840), or the multi-token-prediction layer of a checkpoint.

Each token of the text gives the layer a row, of its embedding and the target's hidden state behind the token
before it, as a pass computed it. A draft goes on from the newest row: a draft token's row takes the layer's
own output for a hidden state. Such rows go again when the next draft begins.

Rows may be missing: of tokens that went through the model in a pass with other texts, that a prompt cache
brought, or that a conversation holds from before another text was drafted for, as `begin` keeps the rows of
what both texts begin with and the model doesn't run the others again. The layer sees the rows that it has as
if they stood side by side. That makes worse drafts, never another text.
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
    """A loaded draft layer, and the cache of its own keys and values."""

    layer: LoadedDraftLayer
    kv: SequenceState


class _Behind(NamedTuple):
    """What the layer computes behind a path: its hidden state (1, D), and logits (N,)."""

    hidden: Array
    logits: Float32


class DraftLayerDrafter(Drafter):
    """Drafts the likeliest tokens of a draft layer; with sampling, those that win with the same noise."""

    def __init__(self, state: DraftLayerState) -> None:
        self._layer = state.layer
        self._kv = state.kv
        self._ranking = Ranking(tokens=state.layer.tokens)
        self._text: list[int] = []
        self._positions: list[int] = []
        """The position of the hidden state in each row of the text, ascending. The cache has these rows, and
        behind them those of a path of the newest draft."""
        self._waiting: list[tuple[int, Array]] = []
        """Hidden states (1, D) that no row has yet, by position."""
        self._newest: Array | None = None
        """(1, D) the layer's output in the last row of the text."""
        self._branch: tuple[int, ...] = ()
        """Draft tokens whose rows the cache has."""
        self._behind: dict[tuple[int, ...], _Behind] = {}
        """What was computed behind each path of the newest draft that was asked for."""
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
        # A row has the hidden state at its position and the token behind that.
        kept = bisect_right(self._positions, same - 2)
        if kept < len(self._positions):
            self._newest = None
        del self._positions[kept:]
        self._kv.truncate(kept)
        self._waiting = [(position, row) for position, row in self._waiting if position < same]
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        own = self._behind.get(self._drawn)
        if logits is not None and own is not None:
            self._ranking.judge(own.logits, len(self._text), token, self._text)
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
        # The state behind the token before the last one is what a draft goes on from.
        if self._newest is not None and self._positions[-1] == len(self._text) - 2:
            self._behind[()] = _Behind(self._newest, self._layer.logits(self._newest)[0])

    def propose(self, path: Sequence[int]) -> Proposals:
        if () not in self._behind:
            return []
        # Those before it have been asked for, but for tokens that a constraint forces.
        for depth in range(1, len(path) + 1):
            part = tuple(path[:depth])
            if part not in self._behind:
                if self._cancelled is not None and self._cancelled():
                    raise Cancelled
                self._behind[part] = self._run(part)
        position = len(self._text) + len(path)
        return self._ranking.rank(self._behind[tuple(path)].logits, position, [*self._text, *path])

    def _run(self, path: tuple[int, ...]) -> _Behind:
        """Run the rows of a path that the cache lacks; what is behind each of its beginnings is known."""
        kept, backend = common_prefix(self._branch, path), self._layer.backend
        self._truncate(kept)
        before = [self._behind[path[:depth]].hidden for depth in range(kept, len(path))]
        # A copy, as rows may be overwritten.
        found = self._layer.run(path[kept:], backend.stacked(before), self._kv)
        self._branch = path
        last = backend.rows(found, [len(before) - 1])
        return _Behind(last, self._layer.logits(last)[0])

    def _take(self, output: ForwardOutput, path: Sequence[int]) -> None:
        """Take the hidden states of the tokens of a path through a pass, but for those that are known."""
        if not output.tapped:
            return
        position = self._waiting[-1][0] if self._waiting else self._positions[-1] if self._positions else -1
        new = [(output.position + at, node) for at, node in enumerate(path)]
        new = [(at, node) for at, node in new if at > position]
        for first in range(0, len(new), PIECE_ROWS):
            piece = new[first : first + PIECE_ROWS]
            nodes = [node for _, node in piece]
            mixed = self._layer.mixed([self._layer.backend.rows(it, nodes) for it in output.tapped])
            self._waiting += [(at, mixed[row : row + 1]) for row, (at, _) in enumerate(piece)]

    def _catch_up(self) -> None:
        """Run the rows whose tokens are known, as the text has them."""
        self._truncate(0)
        backend = self._layer.backend
        while self._waiting and self._waiting[0][0] + 1 < len(self._text):
            piece = [it for it in self._waiting[:PIECE_ROWS] if it[0] + 1 < len(self._text)]
            tokens = [self._text[position + 1] for position, _ in piece]
            found = self._layer.run(tokens, backend.stacked([row for _, row in piece]), self._kv)
            self._newest = backend.rows(found, [len(piece) - 1])
            self._positions += [position for position, _ in piece]
            del self._waiting[: len(piece)]

    def _truncate(self, depth: int) -> None:
        """Drop the rows of the newest draft but for the first `depth` of them."""
        self._kv.truncate(len(self._positions) + depth)
        self._branch = self._branch[:depth]

    def _forget(self) -> None:
        self._drawn = ()
        self._behind.clear()
        self._truncate(0)
