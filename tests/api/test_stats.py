"""The statistics object is the JSON contract."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ondevice.errors import UsageError
from ondevice.stats import GenerationStats, median_stats, per_second

CONTRACT = [
    "prompt_tokens",
    "generated_tokens",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "time_to_first_token_seconds",
    "peak_memory_bytes",
    "flash_bytes_read",
    "flash_read_seconds",
    "flash_cpu_seconds",
    "neuron_cache_hit_rate",
    "prefetch_recall",
    "prefetch_wasted_bytes",
    "forward_passes",
    "accepted_tokens_per_pass",
    "backend",
    "sparsity",
    "speculation",
    "io",
    "seed",
    "context_full",
    "decode_passes",
    "decode_seconds",
    "synchronisations",
    "synchronised_seconds",
    "experts",
    "restored_tokens",
    "reused_tokens",
    "drafting",
]


def test_keys_are_the_contracts() -> None:
    stats = GenerationStats(prompt_tokens=3, backend="cpu", io="direct")
    assert list(stats.to_dict()) == CONTRACT
    assert json.loads(json.dumps(stats.to_dict()))["io"] == "direct"


def test_a_value_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GenerationStats().prompt_tokens = 1  # type: ignore[misc]


def test_rates_are_finite() -> None:
    assert per_second(10, 2.0) == 5.0
    assert per_second(10, 0.0) == 0.0


def test_medians_are_by_field_and_keep_integers() -> None:
    runs = [
        GenerationStats(flash_bytes_read=n, decode_tokens_per_second=rate, backend="cpu")
        for n, rate in ((5, 1.0), (1, 9.0), (3, 4.0), (9, 2.0))
    ]
    median = median_stats(runs)
    assert (median.flash_bytes_read, median.decode_tokens_per_second) == (4, 3.0)
    assert type(median.flash_bytes_read) is int
    assert median.backend == "cpu"
    seeded = median_stats([GenerationStats(seed=5, context_full=True), GenerationStats(seed=9)])
    assert (seeded.seed, seeded.context_full) == (5, True)


def test_no_runs_have_no_median() -> None:
    with pytest.raises(UsageError):
        median_stats([])
