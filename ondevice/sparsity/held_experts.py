"""Experts that a backend holds layer by layer, as long as there is room for all of them.

A backend on another device then needn't read the routers' choices back. Once memory for some experts is
lacking, all experts come from slots, until all memory is there again and stays: reading all experts again
after every wide pass would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.prefetch import PrefetchQuality
from ondevice.stats import PassTimes


class HeldExperts:
    """The neuron memory of a model with experts: either the layers hold all experts, or `fetcher` has slots
    for some.

    Experts held by layers count neither as lookups nor as hits.

    Args:
        fetcher: provides experts if layers don't hold them; owned by this object from now on.
        layers: the model's layers.
        least, total: number of segments that `fetcher` needs to work, and number that hold all experts.
    """

    def __init__(
        self, fetcher: ExpertFetcher, layers: Sequence[FeedForwardLayer], least: int, total: int
    ) -> None:
        self._fetcher = fetcher
        self._layers = layers
        self._least = least
        self._total = total
        self._may_hold = True

    @property
    def nbytes(self) -> int:
        return self._fetcher.nbytes + sum(layer.held_experts_bytes for layer in self._layers)

    @property
    def filled_bytes(self) -> int:
        return self.nbytes

    @property
    def lookups(self) -> int:
        return self._fetcher.lookups

    @property
    def hits(self) -> int:
        return self._fetcher.hits

    @property
    def times(self) -> PassTimes:
        return self._fetcher.times

    @property
    def prefetching(self) -> PrefetchQuality:
        return self._fetcher.prefetching

    def resize(self, quota: Sequence[int]) -> None:
        """Keep to sum(quota) segments: let layers hold all experts, or provide slots."""
        segments = sum(quota)
        self._may_hold = segments <= self._least or (self._may_hold and segments >= self._total)
        held = self._may_hold and segments >= self._total
        for layer in self._layers:
            layer.hold_experts(held)
        # Layers and slots share the quota: there are slots only if layers hold nothing.
        self._fetcher.resize([0] if held else quota)

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Do nothing: layers hold the neurons that belong to no expert."""

    def fill(self) -> bool:
        return False

    def close(self) -> None:
        for layer in self._layers:
            layer.hold_experts(False)
        self._fetcher.close()
