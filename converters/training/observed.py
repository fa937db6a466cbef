"""Backends that run a model dense and report the inputs and gates of its feed-forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ondevice.backends.base import Float32, Norm
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.errors import OndeviceError
from ondevice.model_config import FeedForwardSpec

Observer = Callable[[int, Float32, Float32], None]
"""A function of a layer's index, its gates' inputs (T, D), and the gates (T, F) before the activation.

The arrays are valid until it returns. The tokens of a layer come in order."""


class Observed:
    """A mix-in that makes a backend's feed-forward multiply every neuron and report its gates. It must be the
    first base class.
    """

    feed_forwards: list[Any]
    dense_feed_forward: Callable[..., Any]
    scores: Callable[..., Float32]
    to_numpy: Callable[[Any], Float32]
    normed: Callable[..., Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._observe_gates: Observer | None = None

    def observe_gates(self, observe: Observer) -> None:
        """Report inputs and gates from now on.

        A forward pass then raises OndeviceError for a model without selectors.
        """
        self._observe_gates = observe

    def feed_forward(
        self,
        x: Any,
        weight: Any,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Any = None,
    ) -> Any:
        inputs = x if norm is None else self.normed(x, norm)
        self._show(weight, inputs)
        return self.dense_feed_forward(inputs, weight, spec, batch, added=added)

    def _show(self, weight: Any, inputs: Any) -> None:
        if self._observe_gates is None:
            return
        if weight.selector is None:
            raise OndeviceError("only models whose gates are exactly zero have neurons that don't fire")
        layer = next(i for i, known in enumerate(self.feed_forwards) if known is weight)
        self._observe_gates(layer, self.to_numpy(inputs), self.scores(inputs, weight.selector))


class ObservedCpu(Observed, CpuBackend):
    """The CPU backend, whose feed-forward reports inputs and gates."""
