"""What a drafter may hold in given bytes: the accounts of `resident_substitutes`."""

from __future__ import annotations

import numpy as np
import pytest

from ondevice.backends.reference import ReferenceFeedForward
from tests.benchmarks.explain.resident_substitutes import COARSE, STORED_BITS, held, room, rounded

NEURONS = 1000


@pytest.mark.parametrize("share", [0.1, 0.5, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("coarse", [None, *COARSE])
def test_every_way_takes_the_same_bytes(share: float, coarse: str | None) -> None:
    whole, rest = room(NEURONS, share, coarse)
    bits = whole * STORED_BITS + (rest - whole) * COARSE.get(coarse or "", 0.0)
    assert 0 <= whole <= rest <= NEURONS
    assert bits == pytest.approx(share * NEURONS * STORED_BITS, abs=STORED_BITS)


def test_the_first_neurons_are_whole_the_next_coarse_and_the_last_missing() -> None:
    rows = np.random.default_rng(0).standard_normal((NEURONS, 100)).astype(np.float32)
    layer = ReferenceFeedForward(rows, 2 * rows, 3 * rows)
    for share, coarse in ((0.4, "2 bits"), (0.9, "3 bits"), (0.3, None)):
        whole, rest = room(NEURONS, share, coarse)
        found = held(layer, share, coarse)
        assert found.up is not None
        for mine, theirs in zip((found.gate, found.up, found.down), (rows, 2 * rows, 3 * rows), strict=True):
            np.testing.assert_array_equal(mine[:whole], theirs[:whole])
            assert (mine[whole:rest] != theirs[whole:rest]).any(axis=1).all()
            assert not mine[rest:].any()


@pytest.mark.parametrize("bits", [2, 3])
def test_rounding_is_to_the_nearest_of_a_groups_levels(bits: int) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    found = rounded(rows, bits)
    for first in (0, 64):
        group, result = rows[:, first : first + 64], found[:, first : first + 64]
        step = (group.max(axis=1) - group.min(axis=1)) / (2**bits - 1)
        assert (np.abs(result - group).max(axis=1) <= 0.51 * step + 1e-2).all()
        assert max(len(np.unique(row)) for row in result) <= 2**bits
