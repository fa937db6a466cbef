"""Engines that run a model dense and show what its feed-forwards get, and what their gates are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ondevice.backends.base import Float32, Norm
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.config import Activation
from ondevice.errors import OndeviceError
from ondevice.kernels import _native

Observer = Callable[[int, Float32, Float32], None]
"""Gets a layer, what its gates multiply (T, D), and the gates (T, F) before the activation; valid until it
returns. The tokens of a layer come in order."""
InputObserver = Callable[[int, Float32], None]
"""The same without the gates."""


class Observed:
    """To be derived from before a backend, whose feed-forward it overrides: every neuron is multiplied."""

    feed_forwards: list[Any]
    dense_feed_forward: Callable[..., Any]
    scores: Callable[..., Float32]
    to_numpy: Callable[[Any], Float32]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._observe_inputs: InputObserver | None = None
        self._observe_gates: Observer | None = None

    def observe_inputs(self, observe: InputObserver) -> None:
        """From now on show what gates multiply."""
        self._observe_inputs = observe

    def observe_gates(self, observe: Observer) -> None:
        """From now on show the gates too. Raises OndeviceError, in a pass, for a model without selectors."""
        self._observe_gates = observe

    def feed_forward(
        self,
        x: Any,
        weight: Any,
        activation: Activation,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Any = None,
    ) -> Any:
        entering = x if norm is None else self.normed(x, norm)
        self._show(weight, entering)
        return self.dense_feed_forward(entering, weight, activation, batch, added=added)

    def _show(self, weight: Any, entering: Any) -> None:
        layer = next(i for i, known in enumerate(self.feed_forwards) if known is weight)
        known = self.to_numpy(entering)
        if self._observe_inputs is not None:
            self._observe_inputs(layer, known)
        if self._observe_gates is not None:
            if weight.selector is None:
                raise OndeviceError("only models whose gates are exactly zero have neurons that don't fire")
            self._observe_gates(layer, known, self.scores(entering, weight.selector))

    def normed(self, x: Any, norm: Norm) -> Any:
        """x (T, D) as the norm leaves it."""
        raise NotImplementedError


class ObservedCpu(Observed, CpuBackend):
    """Our own kernels, observed."""

    def normed(self, x: Float32, norm: Norm) -> Float32:
        found = np.empty_like(x)
        _native.rms_norm(self.engine, x, *norm, found)
        return found
