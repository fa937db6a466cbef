"""Perplexity windows, sums and benchmark reports."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.errors import UsageError
from ondevice.scoring import Tally, benchmark_prompt, benchmark_report, windows
from ondevice.stats import GenerationStats


@given(st.integers(2, 300), st.integers(2, 50), st.booleans())
def test_windows_predict_every_token_once(count: int, context: int, with_bos: bool) -> None:
    tokens = list(range(1000, 1000 + count))
    pieces = list(windows(iter(tokens), context, 1 if with_bos else None))
    assert all(len(piece) <= context for piece in pieces)
    predicted = [token for piece in pieces for token in piece[1:]]
    assert predicted == (tokens if with_bos else tokens[1:])
    if with_bos:
        assert all(piece[0] == 1 for piece in pieces)
        assert list(windows([1, *tokens], context, 1)) == pieces


@pytest.mark.parametrize("bos_id", [None, 1])
def test_a_context_without_room_to_predict_is_refused(bos_id: int | None) -> None:
    with pytest.raises(UsageError, match="at least two"):
        next(windows([5, 6, 7], 1, bos_id))


@pytest.mark.parametrize(("tokens", "bos_id"), [([], None), ([5], None), ([], 1), ([1], 1)])
def test_a_text_with_nothing_to_predict_is_refused(tokens: list[int], bos_id: int | None) -> None:
    with pytest.raises(UsageError, match="too short"):
        next(windows(tokens, 10, bos_id))
    assert next(windows([*tokens, 7, 8], 10, bos_id))[-2:] == [7, 8]


def test_the_tally_is_the_negative_log_likelihood() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((7, 11)) * 30).astype(np.float32)
    targets = rng.integers(0, 11, 7).tolist()
    tally = Tally()
    tally.add(logits[:3], targets[:3])
    tally.add(logits[3:], targets[3:])
    wide = logits.astype(np.float64)
    probabilities = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    expected = -np.log(probabilities[np.arange(7), targets]).mean()
    score = tally.score()
    assert score.nll_per_token == pytest.approx(expected, rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(expected))
    assert score.tokens == 7


def test_extremes_neither_overflow_nor_divide_by_zero() -> None:
    tally = Tally()
    tally.add(np.array([[3e38, -3e38]], dtype=np.float32), [1])
    assert tally.score().perplexity == math.inf
    shown = json.loads(json.dumps(tally.score().to_dict(), allow_nan=False))
    assert shown["perplexity"] is None
    assert shown["tokens"] == 1


def test_the_benchmark_prompt_is_fixed_and_inside_the_vocabulary() -> None:
    assert benchmark_prompt(3, 32000) == [101, 8020, 15939]
    assert max(benchmark_prompt(5000, 257)) == 256
    assert len(set(benchmark_prompt(512, 32000))) == 512


def test_a_report_has_medians_and_flash_traffic_per_token() -> None:
    runs = [
        GenerationStats(generated_tokens=4, flash_bytes_read=nbytes, decode_tokens_per_second=rate)
        for nbytes, rate in ((400, 1.0), (800, 3.0), (4000, 2.0))
    ]
    report = benchmark_report(runs, "avx2")
    assert (report["runs"], report["decode_tokens_per_second"], report["flash_bytes_per_token"]) == (
        3,
        2.0,
        200,
    )
    assert report["machine"]["kernel_target"] == "avx2"
    assert report["machine"]["cores"] >= 1
