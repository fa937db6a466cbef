"""Drafts with the model's streams: Speculative Streaming (Bhendawade et al., arXiv 2402.11131).

The pass that verifies a draft also runs streams, which are extra rows in the upper layers, for the nodes in
which the accepted path most probably ends. If the path ends elsewhere, the streams of its last token run
alone in the upper layers. Streams read no neurons. Stream j of a token drafts the token j places after the
one that the token predicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Array, Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.errors import BundleError
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput, Transformer
from ondevice.records import dataclass
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ranking import MAX_CANDIDATES, Ranking
from ondevice.speculation.tree import STREAM_ROWS, Draft, Proposals


@dataclass(frozen=True)
class MultiStreamDrafting:
    """Options of drafting with streams. They affect how many tokens passes give and take, never which.

    max_ends: most nodes of a draft that get streams in the draft's pass. Each takes a row for every stream.
    min_end_chance: a node gets streams in the draft's pass only if the chance that the accepted path ends in
        it is at least this. Streams that run later take a separate pass.
    candidates: number of draft tokens of each stream.
    """

    max_ends: int = 2
    min_end_chance: float = 0.15
    candidates: int = MAX_CANDIDATES


DEFAULT_STREAMS = MultiStreamDrafting()


class MultiStreamDrafter(Drafter):
    """Drafts with the streams of the newest token in the target's cache, for the places after the token drawn
    next.
    """

    def __init__(
        self, transformer: Transformer, max_rows: int, options: MultiStreamDrafting = DEFAULT_STREAMS
    ) -> None:
        """transformer: a model with streams.

        max_rows: most rows of a pass with streams, including its nodes; 0: no draft's pass has streams.
        """
        assert transformer.streams is not None
        self._transformer = transformer
        self._count = transformer.streams.count
        self._options = options
        self._rankings = [Ranking(options.candidates) for _ in range(self._count)]
        self._max_rows = max_rows
        self._max_ends = min(options.max_ends, STREAM_ROWS // self._count)
        self._places = 0
        """Rows for which the next pass has room, the draft's nodes included."""
        self._penalised = False
        self._text: list[int] = []
        self._forget()

    def _forget(self) -> None:
        """Drop the states of the streams, because those of another token come next."""
        self._branches: Array | None = None
        """(S, D) initial states of the newest token's streams."""
        self._states: Array | None = None
        """(S, D) final states of these streams, if they have run."""
        self._logits: Float32 | None = None
        """(S, ...) `Transformer.checked_logits` of `_states`."""
        self._ranked: list[Proposals | None] = [None] * self._count
        """Each stream's proposals, once computed. They depend on the path only by penalties."""
        self._drawn = 0
        """Tokens drawn since the streams' own token; proposals follow the first of them."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._text = list(text)
        self._places = 0
        self._penalised = sampling.penalises
        self._forget()
        for ranking in self._rankings:
            ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        stream = self._drawn
        if logits is not None and self._logits is not None and stream < self._count:
            self._rankings[stream].judge(self._logits[stream], len(self._text), token, self._text)
        self._text.append(token)
        self._drawn += 1

    def end_pass(self, output: ForwardOutput, path: Sequence[int]) -> None:
        self._forget()
        node = path[-1]
        self._states = output.streams.get(node)
        if self._states is None and output.branches is not None:
            row = node if output.tokens == output.branches.shape[0] // self._count else 0
            self._branches = output.branches[row * self._count : (row + 1) * self._count]

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        # Streams take no more blocks of keys and values than the text alone.
        if self._states is None and self._branches is not None and kv.room - kv.length >= self._count:
            self._states = self._transformer.stream_states(self._branches, kv, cancelled)
        self._places = min(self._max_rows, kv.room - kv.length)
        if self._states is not None and self._logits is None:
            self._logits = self._checked_logits(self._states)

    def _checked_logits(self, states: Array) -> Float32:
        try:
            return self._transformer.checked_logits(states)
        except BundleError:
            # The model's own logits are checked elsewhere, so the streams are at fault.
            raise BundleError("the streams compute logits that are not finite; train them again") from None

    def propose(self, path: Sequence[int]) -> Proposals:
        if self._logits is None or len(path) >= self._count:
            return []
        stream = len(path)
        ranked = self._ranked[stream]
        if ranked is None or self._penalised:
            position = len(self._text) + stream
            ranked = self._rankings[stream].rank(self._logits[stream], position, [*self._text, *path])
            self._ranked[stream] = ranked
        return ranked

    def streamed(self, draft: Draft, row_share: float) -> Sequence[int] | None:
        """The nodes in which the accepted path most probably ends. Streams in this pass save a pass later.

        The path ends in a node if it reaches the node and none of the node's children is accepted. A pass
        that has only streams takes as long as a plain pass over as many layers, plus row_share of it for
        every row after the first.
        """
        if len(draft) == 1:
            # The next pass may have no draft either; if it has one, the streams run then.
            return ()
        ends = np.array(draft.chances)
        for node in range(1, len(draft)):
            ends[draft.parents[node]] -= draft.chances[node]
        break_even = self._count * row_share / (1 + (self._count - 1) * row_share)
        least = max(break_even, self._options.min_end_chance)
        most = min(self._max_ends, (self._places - len(draft)) // self._count)
        likeliest = np.argsort(-ends, kind="stable")[: max(0, most)]
        return sorted(int(node) for node in likeliest if ends[node] >= least)
