"""What sampling may be asked for: biases, and seeds."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from ondevice.config import SamplingConfig
from ondevice.errors import UsageError
from ondevice.sampling import sample


@pytest.mark.parametrize("bias", [math.nan, math.inf, 1e10, -1e308, 10**400, -(1 << 20_000)], ids=range(6))
def test_a_bias_is_a_number_that_logits_can_take_or_a_ban(bias: float) -> None:
    with pytest.raises(UsageError, match=r"bias of token 7 is .*-1e\+09 to 1e\+09, or -inf, which bans"):
        SamplingConfig(logit_bias=((7, bias),))
    logits = np.float32([0.0, 3e38, 2.0])
    for most in (1e9, -1e9, 10**9):
        config = SamplingConfig(temperature=1.0, seed=0, logit_bias=((1, most),))
        with warnings.catch_warnings(action="error"):
            assert sample(logits, config, 0) == 1


def test_a_seed_is_drawn_where_one_counts() -> None:
    """0 is one like any other; greedy decoding needs none."""
    assert SamplingConfig().seeded().seed is None
    assert SamplingConfig(temperature=1.0, seed=0).seeded().seed == 0
    seeds = {SamplingConfig(temperature=1.0).seeded().seed for _ in range(8)}
    assert len(seeds) > 4
    assert all(seed is not None and 0 <= seed < 1 << 32 for seed in seeds)
    with pytest.raises(UsageError, match="no seed to draw by"):
        sample(np.zeros(4, np.float32), SamplingConfig(temperature=1.0), 0)
