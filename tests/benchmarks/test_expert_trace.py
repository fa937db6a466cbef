"""Recorded routing is read as it stands, and the longer traces made of it are alike in what caches see."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.replay import hit_rate
from tests.benchmarks.compare.expert_replay import FLOORS, rate, source_rate
from tests.benchmarks.lib.expert_trace import ROUTING, RoutingTrace, extended, parse_trace, read_trace

recorded = pytest.mark.skipif(not ROUTING.is_dir(), reason="the shared data has no routing traces")

ROWS = """\
# route_trace v1
# model=x arch=y n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=9
# layer=1 expert_bytes=200 dense_bytes=9
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.6,0,100
0,0,0,0,1,1,0.4,0,100
0,0,1,0,0,3,0.6,1,0
0,0,1,0,1,2,0.4,0,100
0,0,1,1,0,0,0.6,0,200
0,0,1,1,1,1,0.4,0,200
0,1,2,0,0,1,0.6,1,0
0,1,2,0,1,3,0.4,1,0
0,1,2,1,0,2,0.6,0,200
0,1,2,1,1,1,0.4,1,0
"""


@pytest.fixture
def tiny(tmp_path: Path) -> RoutingTrace:
    path = tmp_path / "tiny.route.csv.xz"
    path.write_bytes(lzma.compress(ROWS.encode()))
    return parse_trace(path)


def test_a_trace_is_read_as_it_stands(tiny: RoutingTrace) -> None:
    assert tiny.chosen.tolist() == [[[3, 1], [-1, -1]], [[3, 2], [0, 1]], [[1, 3], [2, 1]]]
    assert (tiny.prompt, tiny.experts, tiny.expert_bytes.tolist()) == (2, 4, [100, 200])
    fires = [[np.flatnonzero(row > 0).tolist() for row in layer] for layer in tiny.gates]
    assert fires == [[[1, 3], [2, 3], [1, 3]], [[], [0, 1], [1, 2]]]
    assert tiny.slots(600 / 2**20) == 4


@pytest.mark.parametrize(
    ("policy", "held_bytes", "hits"),
    # The prompt reads 700 bytes, with three of the last token's four experts. At 500 layer 1 drives out layer
    # 0's 1 and 3. A share of 200 for each layer keeps all that the prompt's one pass used, above its budget.
    [("LRU", 700, 75), ("LRU", 500, 25), ("LFU", 500, 25), ("LRU by layer", 400, 75)],
)
def test_the_source_s_rules_give_the_hits_counted_by_hand(
    tiny: RoutingTrace, policy: str, held_bytes: int, hits: int
) -> None:
    assert source_rate(tiny, policy, held_bytes / 2**20) == hits


def made_up() -> RoutingTrace:
    random = np.random.default_rng(4)
    order = np.argsort(random.random((130, 3, 16)) ** 2 * np.arange(1, 17), axis=2)
    return RoutingTrace(order[:, :, :2].astype(np.int32), 10, 16, np.full(3, 1000))


def test_a_longer_trace_begins_with_its_own() -> None:
    trace = made_up()
    longer = extended(trace, 500, seed=1)
    assert longer.chosen.shape == (510, 3, 2)
    np.testing.assert_array_equal(longer.chosen[:130], trace.chosen)
    assert (longer.chosen[:, :, 0] != longer.chosen[:, :, 1]).all()
    assert 0 <= longer.chosen.min() <= longer.chosen.max() < 16
    np.testing.assert_array_equal(extended(trace, 500, seed=1).chosen, longer.chosen)
    assert (extended(trace, 500, seed=2).chosen[130:] != longer.chosen[130:]).any()


@recorded
def test_a_longer_trace_hits_a_cache_as_often() -> None:
    """Twelve of Qwen3's layers, by LRU in shares of layers; the benchmark has every size and our policy."""
    trace = read_trace("qwen")
    longer = extended(trace, 384, seed=1)
    rates = [hit_rate(list(each.gates[::4]), "lru", 100, trace.prompt) for each in (trace, longer)]
    assert abs(rates[0] - rates[1]) < 0.02


@pytest.mark.fast("4000")
@recorded
@pytest.mark.parametrize("mib", FLOORS)
def test_our_cache_hits_as_often_as_is_asked(mib: int) -> None:
    trace = read_trace("qwen")
    _, layers, chosen = trace.chosen.shape
    assert rate(trace, mib, lambda: ExpertReuse(layers, trace.experts, chosen)) >= FLOORS[mib]
