"""The text of models with experts: not a token differs, whatever the cache, chunks, threads and drafters.

The engine has one policy for experts. Here others take its place in turn: what a cache keeps is none of the
text's business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.backends.base import Float32
from ondevice.budget.plan import REPEAT_MARGIN_BYTES
from ondevice.converters.convert import convert
from ondevice.sparsity.expert_prefetch import ExpertPrefetcher
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.policies import PolicyName, make_policy
from ondevice.stats import GenerationStats
from tests.support.chat import fetch_with, squeeze
from tests.support.engines import always_draft
from tests.support.families import OLMOE, QWEN3_MOE, write_model
from tests.support.slow_memory import slow_memory
from tests.support.trained_models import MIXTURE, TWIN, own_text

TRAINED = "trained"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": (
        "Olmoe",
        {
            **OLMOE,
            "intermediate_size": 100,
            "num_experts": 16,
            "num_hidden_layers": 4,
            "max_position_embeddings": 1024,
        },
    ),
    "dense between": (
        "Qwen3Moe",
        {
            **QWEN3_MOE,
            "num_experts": 24,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 6,
            "mlp_only_layers": [3],
            "max_position_embeddings": 1024,
        },
    ),
}
CHUNKS, THREADS, DRAFTERS = (1, 7, 64, 512), (1, 2), ("off", "lookup", "recycling", "auto")
SECOND = "model"
"""Another drafter: a dense model with the trained one's tokenizer."""
POLICIES = ("own", "lru", "frequency", "window")
SIZES = (8, 3, 12, 2)
"""Nodes of one draft after the other, whatever they are worth; `auto` decides for itself."""
BUDGETS, TOKENS, CHANGED_AFTER = 10, 32, 9
BEYOND_CHUNK = 20
"""Tokens that a prompt has beside a chunk's, so that there are two chunks or more."""
Texts = dict[float, tuple[int, ...]]


class OfPool:
    """A policy of single neurons, layer by layer, as one for the experts of all layers."""

    def __init__(self, name: PolicyName, layers: int, experts: int) -> None:
        self._policy, self._layers = make_policy(name, [experts] * layers), layers
        self.observe, self.scores, self.fit = self._policy.observe, self._policy.scores, self._policy.fit

    def pool_scores(self, layer: int) -> Float32:
        return np.concatenate([self._policy.scores(i) for i in range(self._layers)])


def prompt_of(chunk: int, trained: bool = False) -> list[int]:
    """A text that repeats itself with changes, so that there is something to look up."""
    if trained:
        return own_text(MIXTURE, chunk + BEYOND_CHUNK)
    rng = np.random.default_rng(chunk)
    tokens = np.resize(rng.integers(3, 256, 9), chunk + BEYOND_CHUNK)
    changed = rng.random(len(tokens)) < 0.15
    return np.where(changed, rng.integers(3, 256, len(tokens)), tokens).tolist()


def options_of(temperature: float) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "seed": 3,
        "max_tokens": TOKENS,
        "logit_bias": {1: -math.inf, 2: -math.inf},
    }


def never_resting(
    prefetcher: ExpertPrefetcher, *arguments: Any, original: Any = ExpertPrefetcher.next_pass
) -> None:
    """Reads ahead in every pass, whether it has paid or not."""
    original(prefetcher, *arguments)
    prefetcher.on = True


@contextmanager
def drafting(
    bundle: Path, prompt: list[int], drafter: str, policy: Any, prefetch: bool, late: bool, **options: Any
) -> Iterator[Model]:
    """A model with room for little more than the text: what a context doesn't need yet are slots.

    late: whether memory for them is made ahead, and comes late, as that of large experts may.
    """
    with pytest.MonkeyPatch.context() as patch:
        if late:
            slow_memory(patch, 0.002)
        fetch_with(patch, prefetch=prefetch)
        patch.setattr(ExpertPrefetcher, "next_pass", never_resting)
        if drafter in ("lookup", "recycling", SECOND):
            always_draft(patch, SIZES)
        if drafter == SECOND:
            options["draft_model"] = TWIN
        if policy != "own":
            patch.setattr(
                "ondevice.sparsity.experts.ExpertReuse",
                lambda layers, count, *_: OfPool(policy, layers, count),
            )
        context = len(prompt) + TOKENS + 16
        with load(bundle, speculation=drafter, max_context=context, **options) as model:
            yield model


def budgets_of(model: Model) -> list[int]:
    """From the smallest with a full context to one that holds all experts."""
    squeeze(model)
    segment = model.plan.segment
    bare = model.plan.minimum_budget_bytes - REPEAT_MARGIN_BYTES
    return [bare + segment.total * at // (BUDGETS - 1) * segment.nbytes for at in range(BUDGETS)]


def counted(model: Model, budgets: list[int], expected: Texts, prompt: list[int]) -> Iterator[Counter[str]]:
    """One generation for each budget, which another replaces while it runs; greedy and sampled in turn."""
    fetcher = model._engine._neurons
    assert isinstance(fetcher, ExpertFetcher)
    for at, budget in enumerate(budgets):
        model.set_dram_budget(budget)
        looked_up, hits, temperature = fetcher.lookups, fetcher.hits, 0.9 * (at % 2)
        made: list[int] = []
        stats = GenerationStats()
        for event in model.stream(tokens=prompt, **options_of(temperature)):
            stats = event.stats or stats
            if event.token is not None:
                made.append(event.token)
            if len(made) == CHANGED_AFTER:
                model.set_dram_budget(budgets[(at + BUDGETS // 2) % BUDGETS])
        differing = sum(mine != theirs for mine, theirs in zip(made, expected[temperature], strict=True))
        yield Counter(
            tokens=len(made),
            differing=differing,
            lookups=fetcher.lookups - looked_up,
            hits=fetcher.hits - hits,
            drafted=stats.drafting.draft_tokens,
            accepted=sum(stats.drafting.accepted_by_depth),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, TRAINED])
def test_no_setting_changes_ten_thousand_tokens(tmp_path: Path, name: str) -> None:
    bundle, drafters = MIXTURE, (*DRAFTERS, SECOND)
    if name != TRAINED:
        write_model(tmp_path / "source", *MODELS[name])
        bundle, drafters = convert(tmp_path / "source", tmp_path / "bundle", "q4"), DRAFTERS
    totals: Counter[str] = Counter()
    turns = count()
    for chunk in CHUNKS:
        prompt, expected = prompt_of(chunk, name == TRAINED), {}
        with load(bundle, speculation="off", threads=1) as model:
            for temperature in (0.0, 0.9):
                expected[temperature] = model.generate(tokens=prompt, **options_of(temperature)).tokens
            logits = model.logits(prompt).tobytes()
        assert len(set(expected[0.9])) > 5, "the text says nothing"
        for threads in THREADS:
            turn = next(turns)
            for at, drafter in enumerate(drafters):
                settings: dict[str, Any] = {"drafter": drafter, "threads": threads, "prefill_chunk": chunk}
                # Every drafter meets every policy, and both of these what is read ahead and what isn't, and
                # memory that comes at once and late.
                settings["policy"] = POLICIES[(turn + at) % len(POLICIES)]
                settings["prefetch"] = (turn // len(POLICIES) + at) % 2 == 0
                settings["late"] = (turn // 2 + at) % 2 == 1
                with drafting(bundle, prompt, **settings) as model:
                    for counts in counted(model, budgets_of(model), expected, prompt):
                        assert counts["differing"] == 0, (settings, counts)
                        totals += counts
                    assert model.logits(prompt).tobytes() == logits, settings
                    begun = model._engine._neurons.prefetching.begun
                    assert bool(begun) == settings["prefetch"]
                    totals["ahead"] += begun
    print(f"{name}: {totals['differing']} differing of {dict(totals)}")
    assert totals["tokens"] >= 10_000
    assert totals["drafted"] > totals["accepted"] > 500
    assert 0.2 * totals["lookups"] < totals["hits"] < 0.9 * totals["lookups"]
