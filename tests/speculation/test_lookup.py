"""The index of prompt lookup against what the plan has for it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ondevice.config import SamplingConfig
from ondevice.speculation.drafters.lookup import Lookup, index_bytes


@pytest.mark.parametrize("tokens", [1300, 1370, 2048])
def test_an_index_takes_no_more_than_is_planned(tokens: int) -> None:
    # No run occurs twice. At 1370 tokens the table has just been moved to one of twice the size.
    text = np.random.default_rng(0).permutation(1 << 18)[:tokens].tolist()
    drafter = Lookup()
    tracemalloc.start()
    try:
        drafter.begin(text, SamplingConfig())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert index_bytes(tokens) / 3 < peak < index_bytes(tokens)
