"""The sampler against plain statements of what each filter means, and against the softmax it must follow."""

from __future__ import annotations

import math
import time
import tracemalloc
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.budget.sizes import SAMPLING_BYTES
from ondevice.config import SamplingConfig
from ondevice.errors import OndeviceError, UsageError
from ondevice.sampling import (
    NOISE_ERROR,
    Candidates,
    StopMatcher,
    _exp,
    _log,
    draw,
    gumbel_noise,
    near_noise,
    process_logits,
    sample,
)

Logits = npt.NDArray[np.float32]
GOLDEN_NOISE = ["-0x1.fb66679ef6541p-3", "0x1.ff343b641a079p+1", "0x1.f56cc43a163dcp-1"]


def random_logits(size: int, seed: int = 0, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def reference_filter(logits: Logits, config: SamplingConfig) -> list[int]:
    """Surviving ids by the definitions, one token at a time."""
    scores = [float(x) / (config.temperature or 1.0) for x in logits]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = [i for i in order if scores[i] > -math.inf]
    if config.top_k:
        order = order[: config.top_k]
    if config.top_p < 1.0:
        total = math.fsum(math.exp(scores[i] - scores[order[0]]) for i in order)
        kept, mass = [], 0.0
        for i in order:
            kept.append(i)
            mass += math.exp(scores[i] - scores[order[0]])
            if mass >= config.top_p * total:
                break
        order = kept
    if config.min_p > 0.0:
        limit = scores[order[0]] + math.log(config.min_p)
        order = [i for i in order if scores[i] >= limit]
    return sorted(order)


# --- noise ---


def test_noise_is_splitmix64() -> None:
    """Published first outputs of SplitMix64 from state 1234567, through the documented key schedule."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    assert [mix((1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(4)] == expected
    seed, position = 42, 9
    state = mix((mix(seed) + position) % 2**64)
    words = [mix((state + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(100)]
    want = [-math.log(-math.log(((w >> 12) + 0.5) / 2**52)) for w in words]
    np.testing.assert_allclose(gumbel_noise(seed, position, np.arange(100)), want, rtol=1e-13, atol=1e-15)


def test_noise_bits_are_fixed() -> None:
    """Golden bits: the same seed must give the same text on every machine and in every version."""
    noise = gumbel_noise(7, 3, np.array([0, 1, 31999]))
    assert [x.hex() for x in noise.tolist()] == GOLDEN_NOISE


@settings(max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 200_000), min_size=1))
def test_noise_depends_on_its_own_key_only(seed: int, position: int, ids: list[int]) -> None:
    together = gumbel_noise(seed, position, np.array(ids))
    alone = [gumbel_noise(seed, position, np.array([i]))[0] for i in ids]
    assert together.tobytes() == np.array(alone).tobytes()
    strided = gumbel_noise(seed, position, np.repeat(np.array(ids), 3)[::-3])
    assert strided.tobytes() == together[::-1].tobytes()


def test_noise_has_the_gumbel_law() -> None:
    noise = np.sort(gumbel_noise(0, 0, np.arange(200_000)))
    law = np.exp(-np.exp(-noise))
    empirical = (np.arange(noise.size) + 0.5) / noise.size
    assert np.abs(law - empirical).max() < 1.63 / math.sqrt(noise.size)  # Kolmogorov-Smirnov, 1 %


def test_neighbouring_keys_are_unrelated() -> None:
    ids = np.arange(20_000)
    base = gumbel_noise(5, 5, ids)
    for other in (
        gumbel_noise(6, 5, ids),
        gumbel_noise(5, 6, ids),
        gumbel_noise(6, 4, ids),
        np.roll(base, 1),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(ids.size)


def test_own_log_and_exp_are_accurate() -> None:
    rng = np.random.default_rng(3)
    edges = np.concatenate(
        [2.0 ** -np.arange(1, 60), 1 - 2.0 ** -np.arange(2, 53), 1 + 2.0 ** -np.arange(2, 52)]
    )
    x = np.concatenate([edges, rng.random(50_000) + 1e-300, rng.random(10_000) * 50])
    assert (np.abs(_log(x) - np.log(x)) <= 2 * np.spacing(np.abs(np.log(x)))).all()
    y = np.concatenate([[0.0, -1e-18, -0.5], -rng.random(50_000) * 690])
    assert (np.abs(_exp(y) - np.exp(y)) <= 2 * np.spacing(np.exp(y))).all()
    assert _exp(np.array([-1e9])) == _exp(np.array([-700.0]))
    assert (_exp(y[:9000]) == np.concatenate([_exp(y[:5000]), _exp(y[5000:9000])])).all()


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
@pytest.mark.parametrize(
    "filtering",
    [{}, {"top_p": 0.9}, {"top_p": 0.999999}, {"top_k": 131_000, "top_p": 0.999999, "min_p": 1e-9}],
    ids=str,
)
def test_sampling_a_large_vocabulary_takes_no_more_than_is_planned(
    filtering: dict[str, float], scale: float
) -> None:
    logits = random_logits(1 << 17, scale=scale)
    allowed = np.arange(logits.size) > 5
    config = SamplingConfig(temperature=0.7, repetition_penalty=1.1, seed=1, **filtering)  # type: ignore[arg-type]
    sample(logits, config, 0, [1], allowed)
    tracemalloc.start()
    try:
        sample(logits, config, 1, [1], allowed)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak + logits.nbytes < SAMPLING_BYTES * logits.size


# --- greedy ---


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    assert sample(np.array([1, 5, 5, 2], np.float32), SamplingConfig(), 0) == 1
    logits = random_logits(1000)
    assert sample(logits, SamplingConfig(seed=3), 99) == int(np.argmax(logits))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN .* token 2"), (math.inf, "token 2 is infinite")]
)
def test_broken_logits_are_an_error(temperature: float, value: float, message: str) -> None:
    logits = np.array([1, 2, value, 9], np.float32)
    with pytest.raises(OndeviceError, match=message):
        sample(logits, SamplingConfig(temperature=temperature, seed=0), 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ruling_every_token_out_is_an_error(temperature: float) -> None:
    config = SamplingConfig(temperature=temperature, seed=0, logit_bias=((0, -math.inf), (1, -math.inf)))
    with pytest.raises(OndeviceError, match="ruled out"):
        sample(np.zeros(2, np.float32), config, 0)


# --- the law ---


@pytest.mark.fast("config3")
@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=1.0, seed=1),
        SamplingConfig(temperature=0.7, seed=2),
        SamplingConfig(temperature=1.5, top_k=4, seed=3),
        SamplingConfig(temperature=1.0, top_p=0.8, seed=4),
    ],
)
def test_draws_follow_the_softmax_of_the_candidates(config: SamplingConfig) -> None:
    """Chi-square over 8,000 positions; the bound is exceeded by chance once in 10,000 runs."""
    logits = np.array([0.1, 1.3, -0.4, 0.8, 0.0, -1.2, 1.1, 0.5], np.float32)
    draws = 8_000
    counts = np.bincount([sample(logits, config, p) for p in range(draws)], minlength=8)
    candidates = process_logits(logits, config)
    expected = np.zeros(8)
    expected[candidates.token_ids] = softmax(candidates.scores) * draws
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    chi_square = float(((counts - expected)[inside] ** 2 / expected[inside]).sum())
    bounds = {3: 21.11, 4: 23.51, 5: 25.74, 7: 29.88}
    assert chi_square < bounds[int(inside.sum()) - 1]


@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(0, 1000))
def test_a_token_that_wins_still_wins_among_fewer(seed: int, position: int, data: int) -> None:
    """Gumbel-max: removing losers never changes the winner, so drafters may rank any subset."""
    logits = random_logits(300, data)
    winner = sample(logits, SamplingConfig(temperature=1.0, seed=seed), position)
    rng = np.random.default_rng(data)
    subset = np.union1d(rng.choice(300, 40, replace=False), [winner])
    noisy = logits[subset].astype(np.float64) + gumbel_noise(seed, position, subset)
    assert subset[np.argmax(noisy)] == winner


def test_the_same_key_gives_the_same_token_and_others_differ() -> None:
    logits = random_logits(2000, scale=1.0)
    config = SamplingConfig(temperature=1.0, seed=11)
    first = [sample(logits, config, p) for p in range(50)]
    assert first == [sample(logits.copy(), config, p) for p in reversed(range(50))][::-1]
    assert first != [sample(logits, SamplingConfig(temperature=1.0, seed=12), p) for p in range(50)]
    assert len(set(first)) > 40


def test_history_changes_nothing_without_a_penalty() -> None:
    logits = random_logits(500)
    config = SamplingConfig(temperature=1.0, seed=0)
    assert sample(logits, config, 4, [1, 2, 3]) == sample(logits, config, 4)


# --- the winner without everybody's exact noise ---


@pytest.mark.parametrize("size", [1, 2, 50, 4096, 20_000])
def test_the_winner_is_that_of_exact_noise(size: int) -> None:
    """Over seeds, positions, filters, scales from ties to cliffs, and scores where noise is rounding."""
    rng = np.random.default_rng(size)
    filters = ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"logit_bias": ((0, -math.inf),)})
    for trial in range(400 if size < 1000 else 60):
        logits = (rng.standard_normal(size) * rng.choice([0.0, 1e-7, 1.0, 8.0, 1e15])).astype(np.float32)
        if trial % 3 == 0:
            logits = np.round(logits)
        filtering: Any = filters[trial % 5] if size > 1 else {}
        config = SamplingConfig(
            temperature=float(rng.choice([1e-6, 0.3, 1.0, 1.5, 100.0])),
            seed=int(rng.integers(2**63)),
            **filtering,
        )
        position = int(rng.integers(10_000))
        kept = process_logits(logits, config)
        noisy = kept.scores + gumbel_noise(config.seed, position, kept.token_ids)
        assert sample(logits, config, position) == kept.token_ids[np.argmax(noisy)]


def test_exact_noise_decides_between_sums_that_are_closer_than_the_approximation() -> None:
    ids, rng = np.arange(2000), np.random.default_rng(6)
    for position in range(20):
        sums = rng.permutation(2000) * (NOISE_ERROR / 1e6)
        scores = sums - gumbel_noise(5, position, ids)
        best = int(np.argmax(scores + gumbel_noise(5, position, ids)))
        assert draw(Candidates(ids, scores), 5, position) == best


def test_exact_noise_decides_between_scores_so_large_that_sums_are_rounded() -> None:
    """A token's approximate sum is a step below its exact one, which ties with that of a later token."""
    score, step, found, position = np.float64(2.0**45), 2.0**-7, 0, 0
    assert np.spacing(score) == step > 4 * NOISE_ERROR
    while not found:
        noise = gumbel_noise(5, position, np.arange(1 << 18))
        from_edge = np.abs(noise / step % 1.0 - 0.5)
        for token in np.flatnonzero(from_edge < 2e-5).tolist()[:-1]:
            ids = np.array([token, token + 1])
            if (score + near_noise(5, position, ids))[0] < score + noise[token]:
                scores = np.array([score, score + (score + noise[token] - (score + noise[token + 1]))])
                assert draw(Candidates(ids, scores), 5, position) == token
                found += 1
        position += 1


def test_approximate_noise_keeps_far_within_its_error() -> None:
    ids = np.arange(300_000)
    for position in range(3):
        error = np.abs(near_noise(9, position, ids) - gumbel_noise(9, position, ids)).max()
        assert error < NOISE_ERROR / 100


# --- filters ---

filters = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 10_000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@settings(max_examples=200)
@given(filters, st.integers(1, 80), st.integers(0, 1000), st.sampled_from([0.1, 2.0, 20.0]))
def test_filters_keep_what_their_definitions_keep(
    config: SamplingConfig, size: int, seed: int, scale: float
) -> None:
    logits = random_logits(size, seed, scale)
    candidates = process_logits(logits, config)
    assert candidates.token_ids.tolist() == reference_filter(logits, config)
    scores = logits[candidates.token_ids].astype(np.float64) / config.temperature
    assert candidates.scores.tobytes() == scores.tobytes()


@pytest.mark.parametrize("filtering", [{"top_k": 2}, {"top_p": 0.5}])
def test_ties_at_the_edge_go_to_the_lower_ids(filtering: dict[str, float]) -> None:
    config = SamplingConfig(temperature=1.0, **filtering)  # type: ignore[arg-type]
    kept = process_logits(np.zeros(4, np.float32), config)
    assert kept.token_ids.tolist() == [0, 1]


def test_top_p_keeps_the_fewest_tokens_that_reach_it_at_vocabulary_size() -> None:
    logits = random_logits(32_000, scale=2.0)
    config = SamplingConfig(temperature=1.0, top_p=0.9)
    kept = process_logits(logits, config).token_ids
    probabilities = softmax(logits.astype(np.float64))
    mass = probabilities[kept].sum()
    assert mass >= 0.9 > mass - probabilities[kept].min()
    assert probabilities[kept].min() >= np.delete(probabilities, kept).max()


def test_tokens_at_minus_infinity_are_never_candidates_of_a_filter() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -1.0], np.float32)
    assert process_logits(logits, SamplingConfig(temperature=1.0, top_k=4)).token_ids.tolist() == [1, 3, 4]


def test_repetition_penalty_divides_above_zero_and_multiplies_below() -> None:
    logits = np.array([2.0, -2.0, 2.0, 0.0], np.float32)
    config = SamplingConfig(temperature=1.0, repetition_penalty=2.0)
    scores = process_logits(logits, config, [0, 1, 0, 3]).scores
    assert scores.tolist() == [1.0, -4.0, 2.0, 0.0]
    assert logits.tolist() == [2.0, -2.0, 2.0, 0.0], "the caller's logits were changed"
    assert sample(logits, SamplingConfig(repetition_penalty=2.0), 0, np.array([0])) == 2


@given(
    st.integers(0, 1000),
    st.floats(-2.0, 2.0),
    st.floats(-2.0, 2.0),
    st.lists(st.integers(0, 19), max_size=30),
    st.integers(0, 10),
)
def test_count_penalties_are_those_of_a_plain_count(
    seed: int, frequency: float, presence: float, history: list[int], prompt_tokens: int
) -> None:
    """`logit - n * frequency - (n > 0) * presence`, where n counts what was generated, as OpenAI has it."""
    logits, generated = random_logits(20, seed), history[prompt_tokens:]
    config = SamplingConfig(temperature=1.0, frequency_penalty=frequency, presence_penalty=presence)
    expected = [
        logit - generated.count(token) * frequency - (presence if token in generated else 0.0)
        for token, logit in enumerate(logits.tolist())
    ]
    found = process_logits(logits, config, history, prompt_tokens=prompt_tokens)
    assert found.token_ids.tolist() == list(range(20))
    np.testing.assert_allclose(found.scores, expected, rtol=1e-6, atol=1e-5)
    untouched = [token not in generated for token in range(20)]
    assert (found.scores[untouched] == logits[untouched]).all()


def test_count_penalties_come_after_the_repetition_penalty_and_before_bias_and_masks() -> None:
    logits = np.array([8.0, 7.0, 6.0, 5.0], np.float32)
    config = SamplingConfig(
        repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5, logit_bias=((3, 4.0),)
    )
    history = [1, 0, 0, 2]
    scores = process_logits(logits, config, history, prompt_tokens=1).scores
    assert scores.tolist() == [8.0 / 2 - 2.5, 7.0 / 2, 6.0 / 2 - 1.5, 9.0]
    allowed = np.array([True, True, True, False])
    assert sample(logits, config, 4, history, prompt_tokens=1) == 3
    assert sample(logits, config, 4, history, allowed, prompt_tokens=1) == 1


@pytest.mark.parametrize("last", [-1, 0, 1, 3, 5, 9])
def test_penalties_look_at_the_newest_tokens_alone(last: int) -> None:
    """As they look at a history that has no others."""
    logits, history, prompt_tokens = random_logits(8, 3), [1, 1, 2, 3, 3, 3, 4], 4
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    found = process_logits(
        logits,
        SamplingConfig(temperature=1.0, repeat_last_n=last, **penalties),  # type: ignore[arg-type]
        history,
        prompt_tokens=prompt_tokens,
    )
    seen = len(history) if last < 0 else min(last, len(history))
    expected = process_logits(
        logits,
        SamplingConfig(temperature=1.0, **penalties),  # type: ignore[arg-type]
        history[len(history) - seen :],
        prompt_tokens=max(0, prompt_tokens - len(history) + seen),
    )
    assert found.scores.tolist() == expected.scores.tolist()
    assert (found.scores == logits).all() == (last == 0)
    with pytest.raises(UsageError, match="repeat_last_n is -2; it must be 0"):
        SamplingConfig(repeat_last_n=-2)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_count_penalties_lie_between_minus_2_and_2(name: str) -> None:
    for value in (-2, 2.0):
        assert getattr(SamplingConfig(**{name: value}), name) == value  # type: ignore[arg-type]
    for value in (-2.1, 2.0000001, math.inf, math.nan):
        with pytest.raises(UsageError, match=f"{name} is .*; it must be from -2 to 2"):
            SamplingConfig(**{name: value})  # type: ignore[arg-type]


def test_logit_bias_is_added_after_the_penalty_and_before_temperature() -> None:
    logits = np.array([2.0, 1.0], np.float32)
    config = SamplingConfig(temperature=0.5, repetition_penalty=2.0, logit_bias=((0, 3.0),))
    assert process_logits(logits, config, [0]).scores.tolist() == [8.0, 2.0]
    banned = SamplingConfig(logit_bias=((0, -math.inf),))
    assert sample(logits, banned, 0) == 1


@pytest.mark.parametrize(
    ("config", "history", "message"),
    [
        (SamplingConfig(logit_bias=((4, 1.0),)), [], "token 4; .* 0 to 3"),
        (SamplingConfig(logit_bias=((-1, 1.0),)), [], "token -1"),
        (SamplingConfig(repetition_penalty=1.1), [2, 4], "history names token 4; .* 0 to 3"),
        (SamplingConfig(repetition_penalty=1.1), [2, -1], "history names token -1"),
    ],
)
def test_ids_and_biases_that_cannot_be_right_are_refused(
    config: SamplingConfig, history: Sequence[int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sample(np.zeros(4, np.float32), config, 0, history)


@pytest.mark.parametrize(
    ("name", "least"),
    [("temperature", 1e-6), ("repetition_penalty", 1e-3), ("top_p", 5e-324), ("min_p", 5e-324)],
)
def test_the_smallest_values_sample_and_smaller_ones_are_refused(name: str, least: float) -> None:
    """Nothing overflows, so no warning comes and no logits are called damaged."""
    logits = np.float32([-3e4, 3e4, 1.0, 0.0])
    config = SamplingConfig(**({"temperature": 1.0, "seed": 0} | {name: least}))  # type: ignore[arg-type]
    with warnings.catch_warnings(action="error"):
        assert sample(logits, config, 0, [0, 1]) == 1
    if least > 5e-324:
        with pytest.raises(UsageError, match=f"{name} is 1e-308; it must be .*1"):
            SamplingConfig(**{name: 1e-308})  # type: ignore[arg-type]


def test_sampling_is_fast_enough_not_to_matter() -> None:
    """Aims are 50 us greedy and 2 ms drawn at 32,000 logits; the bounds leave room for a busy machine."""
    logits = random_logits(32_000)

    def best_of(config: SamplingConfig, runs: int = 30) -> float:
        times = []
        for position in range(runs):
            start = time.perf_counter()
            sample(logits, config, position)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best_of(SamplingConfig()) < 200e-6
    assert best_of(SamplingConfig(temperature=1.0, seed=0)) < 8e-3
    assert best_of(SamplingConfig(temperature=0.8, seed=0, top_k=40, top_p=0.95, min_p=0.05)) < 8e-3


# --- stop strings ---


def cut_by_characters(text: str, stops: Sequence[str]) -> str:
    """The definition: the text grows by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def stream(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    return [*(matcher.add(piece) for piece in pieces), matcher.finish()], matcher


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stopping_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    emitted, matcher = stream(pieces, stops)
    assert "".join(emitted) == cut_by_characters(text, stops)
    assert matcher.stopped == any(stop in text for stop in stops)
    # What is held at the end are the pieces that were taken and lie wholly behind the cut.
    begins = [len("".join(pieces[:at])) for at in range(len(pieces))]
    taken = [at for at in begins if not any(stop in text[:at] for stop in stops)]
    cut = len("".join(emitted))
    assert matcher.held == (sum(at >= cut for at in taken) if matcher.stopped else 0)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    emitted, matcher = stream(["Hello", " <", "b> ", "</", "s", ">tail", "more"], ["</s>"])
    assert emitted == ["Hello", " ", "<b> ", "", "", "", "", ""]
    assert matcher.stopped


def test_held_text_is_given_out_at_the_end() -> None:
    emitted, matcher = stream(["answer \nUs"], ["\nUser:"])
    assert emitted == ["answer ", "\nUs"]
    assert not matcher.stopped


@pytest.mark.parametrize("stops", [("",), ("a", ""), "stop", (3,)])
def test_stop_strings_that_cannot_be_right_are_refused(stops: Any) -> None:
    with pytest.raises(UsageError, match="stop is"):
        SamplingConfig(stop=stops)
