"""How near a real model's logits are to those of its GGUF file's values in float32, on wikitext-2.

Bundles hold the files' own values, so what is measured is the rounding of activations to 8 bits. Limits are
what this text measured on 29 November 2026, and a twentieth more. Kernels give equal bits on every machine,
so figures differ only by the oracle's sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import load
from tests.support.real_models import real_model
from tests.support.real_oracles import Divergence, divergence, float32_logits, perplexity, wikitext

pytestmark = pytest.mark.real

TOKENS = 256
MEASURED = {
    "smollm2": Divergence(0.00317, 0.9647),
    "gemma3-270m": Divergence(0.00257, 0.9804),
    "qwen2.5-coder-0.5b": Divergence(0.00070, 0.9922),
    "qwen2.5-coder-1.5b": Divergence(0.00066, 0.9882),
}
"""From the file's values to `cpu`, behind the first token."""
MARGIN, TOP1_MARGIN = 1.05, 0.01
MOST_PERPLEXITY = 1.01


def logits_of(bundle: Path, backend: Any, count: int = TOKENS) -> tuple[list[int], np.ndarray]:
    """The first `count` token ids (T) of the text, and the logits of each (T, V)."""
    with load(bundle, speculation="off", backend=backend) as model:
        tokens = list(model.tokenizer.encode(wikitext()[: 16 * count]))[:count]
        return tokens, model.logits(tokens)


LIKELIEST = (
    *(
        29,
        216,
        24,
        3806,
        11459,
        280,
        198,
        216,
        198,
        198,
        21777,
        310,
        2078,
        21777,
        446,
        216,
        347,
        260,
        476,
        4353,
    ),
    *(28, 3284, 3284, 28, 314, 253, 1772, 282, 260, 391, 46, 365, 338, 260, 8464, 8464, 7357, 28, 983, 6427),
    *(284, 260, 282, 260, 3530, 6427, 30, 657, 314, 253, 2484, 288, 260, 3284, 43868, 284, 284, 30, 303, 376),
    *(3297, 198, 314, 325, 288),
)
"""SmolLM2's likeliest token behind each of the first tokens of the text, by its file's values in float32."""
FLOAT32_PERPLEXITY = 42.495
"""Of those tokens, by the same values."""
LEAST_EQUAL = 0.92
"""Share of tokens of which the likeliest next one is equal; measured: 0.9375."""


def test_the_likeliest_tokens_match_recorded_ones(smollm2: Path) -> None:
    tokens, logits = logits_of(smollm2, "cpu", len(LIKELIEST))
    assert (logits.argmax(-1) == LIKELIEST)[1:].mean() >= LEAST_EQUAL
    assert perplexity(logits, tokens) <= FLOAT32_PERPLEXITY * MOST_PERPLEXITY


@pytest.mark.slow
def test_recorded_tokens_are_those_of_the_files_values(smollm2: Path) -> None:
    tokens, _ = logits_of(smollm2, "cpu", len(LIKELIEST))
    oracle = float32_logits(real_model("smollm2"), tokens)
    assert (oracle.argmax(-1) == LIKELIEST).mean() > 0.95, "ties go either way"
    assert perplexity(oracle, tokens) == pytest.approx(FLOAT32_PERPLEXITY, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.timeout(1800)
def test_logits_stay_near_those_of_the_files_values_in_float32(name: str, bundle_of: Any) -> None:
    tokens, logits = logits_of(bundle_of(name), "cpu")
    oracle = float32_logits(real_model(name), tokens)
    measured, limit = divergence(oracle[1:], logits[1:]), MEASURED[name]
    assert measured.nats <= limit.nats * MARGIN, measured
    assert measured.top1 >= limit.top1 - TOP1_MARGIN, measured
    assert perplexity(logits, tokens) <= perplexity(oracle, tokens) * MOST_PERPLEXITY
