"""The interface of objects that run several plain layers in one call.

A plain layer is attention with one projection of queries, keys and values, then a dense feed-forward. Both
read the residual through a norm, or as it is, and add to it, possibly through a norm of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.token_tree import TokenTree

PlainWeights: TypeAlias = Any
"""One layer's loaded weights, by the names of `model.weights.LayerWeights`."""
Adapters: TypeAlias = Any
"""A model's stream adapters, a `model.weights.MultiStreamWeights`, or None."""


class SequencePlace(Protocol):
    """Where `size` rows of one sequence belong: after `position` tokens in kv, which has room for them.

    tree: the rows' tree; None if each row follows the one before.
    """

    @property
    def kv(self) -> Any: ...
    @property
    def position(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def tree(self) -> TokenTree | None: ...


class PlainLayers(Protocol):
    """Runs layers of a model that are plain and in memory."""

    def run(
        self,
        layers: range,
        x: Any,
        batch: ForwardBatch,
        places: Sequence[SequencePlace],
        rope_tables: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]],
        adapted: int,
    ) -> int:
        """Run layers from the first of `layers` on, and return how many ran: 0 if the first isn't plain or in
        memory.

        Results and stats are the same as if the backend's ops had run.

        Args:
            layers: the layers that may run.
            x: (T, D), the first one's input, which becomes the last one's output.
            batch: the rows.
            places: where the rows belong, one for each sequence.
            rope_tables: cosine and sine, (T, Dh / 2) each, for each of the model's ropes.
            adapted: the first row to which the layers' adapters are added.
        """
