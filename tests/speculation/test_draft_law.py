"""Tokens that are drawn along a tree have the law that plain decoding draws from, whoever drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ondevice.api import Model, load
from ondevice.config import SamplingConfig
from ondevice.sampling import process_logits
from ondevice.speculation.tree import Proposals
from tests.api.test_sampling import softmax
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.engines import always_draft

PROMPT = [256, 10, 20, 30]
CANDIDATES = 3
SAMPLING = SamplingConfig(temperature=1.3, top_k=CANDIDATES, max_tokens=3, logit_bias=((EOS, -math.inf),))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("law")
    shape = {"num_hidden_layers": 1, "intermediate_size": 128}
    return load(convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "bundle"))


def law(model: Model) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts of two tokens, by the model's logits behind each."""
    found: dict[tuple[int, ...], float] = {}
    first = process_logits(model.logits(PROMPT)[-1], SAMPLING)
    for one, p in zip(first.token_ids.tolist(), softmax(first.scores), strict=True):
        second = process_logits(model.logits([*PROMPT, one])[-1], SAMPLING)
        for two, q in zip(second.token_ids.tolist(), softmax(second.scores), strict=True):
            found[one, two] = p * q
    return found


@pytest.mark.fast("drafters' own-400")
@pytest.mark.parametrize("draws", [400, 1000])
@pytest.mark.parametrize("drafts", ["the likeliest", "the unlikeliest", "drafters' own"])
def test_texts_drawn_with_trees_follow_the_models_law(
    model: Model, drafts: str, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square over seeds; the bound is exceeded by chance once in 10,000 runs."""
    expected = law(model)
    always_draft(monkeypatch, [8])
    drafting = model._engine._drafting
    assert drafting is not None
    # However short the passes of so small a model are.
    alone = drafting._state_for(1)
    monkeypatch.setattr(alone, "_min_pass_seconds", 0.0)
    monkeypatch.setattr(alone, "disabled", False)
    if drafts != "drafters' own":
        order = 1 if drafts == "the unlikeliest" else -1
        ranked = sorted(expected, key=lambda text: order * expected[text])

        def propose(path: Sequence[int]) -> Proposals:
            """Second tokens of the text: the first is drawn before any draft."""
            return [(token, 0.5) for token in dict.fromkeys(text[1] for text in ranked)][:4]

        monkeypatch.setattr(drafting._drafter, "propose", propose)
    counts = dict.fromkeys(expected, 0)
    passes = 0
    for seed in range(draws):
        answer = model.generate(tokens=PROMPT, sampling=SAMPLING, seed=seed)
        counts[answer.tokens[:2]] += 1
        passes += answer.stats.forward_passes
    assert passes < 2.98 * draws, "no draft token was ever accepted"
    chi_square = sum((counts[text] - draws * p) ** 2 / (draws * p) for text, p in expected.items())
    assert len(expected) == CANDIDATES**2
    assert min(expected.values()) * draws > 5
    assert chi_square < 31.83


def test_every_seed_draws_what_plain_decoding_draws(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [8])
    folder, drafts, fewest = model.bundle.path, 0, 12
    with load(folder, speculation="off") as plain, load(folder, speculation="recycling") as drafting:
        for seed in range(40):
            expected = plain.generate(tokens=PROMPT, sampling=SAMPLING, seed=seed, max_tokens=12)
            answer = drafting.generate(tokens=PROMPT, sampling=SAMPLING, seed=seed, max_tokens=12)
            assert answer.tokens == expected.tokens
            assert expected.stats.drafting.drafts == 0
            drafts += answer.stats.drafting.drafts
            fewest = min(fewest, answer.stats.forward_passes)
    # It drafted, and draft tokens were accepted: no comparison of plain decoding with itself.
    assert drafts > 200
    assert fewest < 12
