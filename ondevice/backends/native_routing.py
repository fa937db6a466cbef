"""`routing.route` in the native library, with the same bits: what the `cpu` backend routes by."""

from __future__ import annotations

from functools import lru_cache
from typing import get_args

import numpy as np

from ondevice.backends.base import Float32
from ondevice.backends.routing import Routing
from ondevice.kernels import _native
from ondevice.model_config import ExpertsSpec
from ondevice.model_config.experts import Scoring


def route(
    logits: Float32,
    spec: ExpertsSpec,
    choice_bias: Float32 | None = None,
    scales: Float32 | None = None,
) -> Routing:
    """The experts of each token of logits (T, E), which stay as they are.

    choice_bias: (E,). scales: (E,), factors of weights.
    """
    shape = len(logits), spec.chosen
    ids, weights = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)
    _router(spec).route(logits, choice_bias, scales, ids, weights)
    return Routing(ids, weights, spec.count)


@lru_cache
def _router(spec: ExpertsSpec) -> _native.Router:
    return _native.Router(
        get_args(Scoring).index(spec.scoring),
        spec.count,
        spec.chosen,
        spec.renormalised,
        spec.factor,
        spec.groups,
        spec.chosen_groups,
        spec.jitter,
        spec.group_best,
    )
