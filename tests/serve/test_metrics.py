"""What `/metrics` says of generations."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve.metrics import Metrics
from ondevice.stats import GenerationStats
from tests.support.paths import SHIPPED
from tests.support.serving import serving

ASKED = {"messages": [{"role": "user", "content": "Tell me more."}], "max_tokens": 24}


def test_hits_and_memory_are_those_of_the_last_generation() -> None:
    with serving(load(SHIPPED, sparsity="exact", speculation="off")) as server:
        assert "\nondevice_neuron_cache_hit_ratio" not in server.request("GET", "/metrics").body.decode()
        tokens = [
            server.post("/v1/chat/completions", ASKED).json["usage"]["completion_tokens"] for _ in range(2)
        ]
        assert server.metric("generated_tokens_total") == sum(tokens) > 0
        assert 0 < server.metric("neuron_cache_hit_ratio") <= 1
        assert server.metric("peak_memory_bytes") > 1e7


def test_a_generation_that_looked_nothing_up_leaves_the_hits_as_they_were() -> None:
    metrics = Metrics()
    for hit_rate in (0.75, 0.0):
        metrics.generated(GenerationStats(neuron_cache_hit_rate=hit_rate), "length")
    assert metrics.value("neuron_cache_hit_ratio") == 0.75
