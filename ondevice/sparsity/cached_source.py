"""The common part of each `NeuronSource` over a `NeuronCache`: its size, its lookups, and its time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.backends.neuron_source import ClosedNeurons, NeuronSource
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.stats import PassTimes


class CachedSource(NeuronSource):
    """Provides the neurons of a model's layers from a cache, which it owns.

    Args:
        layers: the model's layers, in order; each gets this object as its `neurons`.
        cache: owned by this object from now on.
    """

    def __init__(self, layers: Sequence[FeedForwardLayer], cache: NeuronCache) -> None:
        self._layers = layers
        self._cache = cache
        self._since = 0.0
        self._waited = self._managed = 0.0
        for layer in layers:
            layer.neurons = self

    @property
    def nbytes(self) -> int:
        """Bytes of the slots that exist."""
        return self._cache.nbytes

    @property
    def filled_bytes(self) -> int:
        """The same as `nbytes`, because slots are made only when needed. Safe from any thread."""
        return self._cache.nbytes

    @property
    def lookups(self) -> int:
        """Number of neurons or experts that passes have multiplied, counted once per pass and layer."""
        return self._cache.lookups

    @property
    def times(self) -> PassTimes:
        return PassTimes(self._waited, self._managed)

    def keep_dense(self, quota: Sequence[int]) -> None:
        """Do nothing: there are no neurons outside the cache."""

    def _close_cache(self) -> None:
        """Free the slots, which nothing may read into any more. Layers then raise if they are multiplied."""
        self._cache.close()
        for layer in self._layers:
            layer.neurons = ClosedNeurons()

    def _lap(self) -> float:
        """Seconds since the last call."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before
