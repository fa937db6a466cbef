"""A drafter's logits become draft tokens: by probability, or with the noise that the draw will have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.config import SamplingConfig
from ondevice.sampling import sample
from ondevice.speculation.ranking import MAX_CANDIDATES, Ranking, largest
from tests.api.test_sampling import Logits, random_logits


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 300), st.integers(0, 100), st.booleans())
def test_the_largest_are_those_of_a_sort(size: int, count: int, seed: int, ties: bool) -> None:
    values = random_logits(size, seed)
    values = np.round(values) if ties else values
    ids, found, level = largest(values, count)
    assert ids.tolist() == np.argsort(-values, kind="stable")[:count].tolist()
    assert found.tolist() == values[ids].tolist()
    assert level == pytest.approx(np.log(np.exp(values.astype(np.float64)).sum()), rel=1e-5, abs=1e-5)


def test_greedy_candidates_are_by_probability() -> None:
    logits = random_logits(1000)
    candidates = Ranking().rank(logits, 5)
    assert [token for token, _ in candidates] == np.argsort(-logits)[:MAX_CANDIDATES].tolist()
    weights = np.exp(logits.astype(np.float64))
    np.testing.assert_allclose(
        [p for _, p in candidates], np.sort(weights / weights.sum())[::-1][:8], rtol=1e-5
    )
    assert len(Ranking(max_candidates=3).rank(logits, 5)) == 3
    assert [token for token, _ in Ranking().rank(logits[:2], 5)] == np.argsort(-logits[:2]).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "penalties",
    [
        {},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.4, "frequency_penalty": 1.5, "repeat_last_n": 2},
        {"repetition_penalty": 1.4, "presence_penalty": 1.5, "repeat_last_n": 6},
    ],
    ids=["none", "repetition", "counts", "newest", "newest of the prompt"],
)
def test_equal_logits_rank_first_what_the_target_draws(
    temperature: float, penalties: dict[str, float]
) -> None:
    config = SamplingConfig(temperature=temperature, seed=4, **penalties)  # type: ignore[arg-type]
    ranking = Ranking()
    ranking.begin(config, prompt_tokens=3)
    drawn, ranked = [], []
    for position in range(100):
        logits = random_logits(1000, position)
        # Of the likeliest tokens, the prompt has some, and the text others, one of them more than once.
        likely = np.argsort(-logits)[:8].tolist()
        history = [*likely[1:4], *likely[::2], likely[0]]
        drawn.append(sample(logits, config, position, history, prompt_tokens=3))
        ranked.append(ranking.rank(logits, position, history)[0][0])
    # Noise may lift a token that isn't among the likeliest, for which none is computed.
    assert np.mean(np.array(drawn) == np.array(ranked)) >= (1.0 if temperature == 0 else 0.9)


def test_chances_of_sampled_candidates_are_measured_acceptance_rates() -> None:
    """A drafter that is somewhat off: its claims agree with how often it is right, by lead and rank."""
    config = SamplingConfig(temperature=1.0, seed=8)
    ranking = Ranking()
    ranking.begin(config)
    claims: list[tuple[float, bool]] = []
    for position in range(2500):
        logits = random_logits(200, position)
        drafted: Logits = logits + random_logits(200, position + 10_000, scale=0.5)
        token = sample(logits, config, position)
        candidates = ranking.rank(drafted, position)
        if position >= 500:
            claims += [(chance, candidate == token) for candidate, chance in candidates]
        ranking.judge(drafted, position, token)
    for low, high in ((0.0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.0)):
        group = [(chance, right) for chance, right in claims if low <= chance < high]
        claimed, right = np.mean(np.array(group, dtype=float), axis=0)
        assert len(group) > 100
        assert right == pytest.approx(claimed, abs=0.07)
    assert max(chance for chance, _ in claims) > 0.85
