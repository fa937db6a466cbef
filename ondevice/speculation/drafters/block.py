"""Layers that draft a block of tokens at once: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

The layers see the text through the target's hidden states, and draft a block after the last of these: one run
gives the logits of every place in the block. In a draft tree, the likely tokens of a place follow each token
of the place before. DSpark's logits depend on that token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Array, Float32
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.model.draft_block import DraftBlock
from ondevice.model.sequence_state import SequenceState
from ondevice.speculation.drafters.draft_layer import DraftLayerDrafter, DraftLayerState, LayerOutput
from ondevice.speculation.tree import Proposals


class BlockDrafter(DraftLayerDrafter):
    """Drafts the likeliest tokens of each place of a block. With sampling, ranks them with the text's noise
    added.
    """

    _tokens_ahead = 0

    def __init__(self, state: DraftLayerState) -> None:
        super().__init__(state)
        self._block = DraftBlock(state.layer)
        self._places = 0
        """Places of the newest draft that get logits."""
        self._logits: Float32 = np.empty((0, 0), np.float32)
        """(places, V) of the newest draft."""

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._places = min(self._layer.layer.block_drafts, max_nodes - 1)
        super().prepare(kv, max_nodes, cancelled)

    def propose(self, path: Sequence[int]) -> Proposals:
        return super().propose(path) if len(path) < self._places else []

    def _first(self, newest: Array) -> LayerOutput:
        if self._cancelled is not None and self._cancelled():
            raise Cancelled
        self._logits = self._block.logits(self._text[-1], self._places, self._kv)
        return self._run(())

    def _run(self, path: tuple[int, ...]) -> LayerOutput:
        token = path[-1] if path else self._text[-1]
        return LayerOutput(self._newest, self._block.after(token, self._logits[len(path)]))

    def _add_rows(self, tokens: Sequence[int], hidden: Array) -> Array:
        self._block.add_rows(tokens, hidden, self._kv)
        return hidden
