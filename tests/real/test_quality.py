"""How near a real model's logits are to those of its GGUF file's values in float32, on wikitext-2.

Limits are what this text measured on 28 November 2026, and a twentieth more. They say what holds today:
a bundle that rounds less than this one does gets lower ones. Kernels give equal bits on every machine, so
figures differ only by the oracle's sums.
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
    "smollm2": Divergence(0.0742, 0.847),
    "gemma3-270m": Divergence(0.0097, 0.965),
    "qwen2.5-coder-0.5b": Divergence(0.0085, 0.933),
    "qwen2.5-coder-1.5b": Divergence(0.0154, 0.949),
}
"""From the file's values to `cpu`, behind the first token."""
MARGIN, TOP1_MARGIN = 1.05, 0.01
REFERENCE_NATS = {
    "smollm2": 0.00516,
    "gemma3-270m": 0.00457,
    "qwen2.5-coder-0.5b": 0.0012,
    "qwen2.5-coder-1.5b": 0.00079,
}
"""KL divergence from plain numpy on the bundle's values to `cpu`, which rounds activations to 8 bits."""
MOST_PERPLEXITY = 1.05


def logits_of(bundle: Path, backend: Any) -> tuple[list[int], np.ndarray]:
    """The first tokens of the text, and the logits of each."""
    with load(bundle, speculation="off", backend=backend) as model:
        tokens = list(model.tokenizer.encode(wikitext()[: 16 * TOKENS]))[:TOKENS]
        return tokens, model.logits(tokens)


@pytest.mark.parametrize(
    "name", ["smollm2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MEASURED][1:])]
)
@pytest.mark.timeout(1800)
def test_logits_against_the_files_values_in_float32(name: str, bundle_of: Any) -> None:
    tokens, logits = logits_of(bundle_of(name), "cpu")
    oracle = float32_logits(real_model(name), tokens)
    measured, limit = divergence(oracle[1:], logits[1:]), MEASURED[name]
    assert measured.nats <= limit.nats * MARGIN, measured
    assert measured.top1 >= limit.top1 - TOP1_MARGIN, measured
    assert perplexity(logits, tokens) <= perplexity(oracle, tokens) * MOST_PERPLEXITY


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCE_NATS)
@pytest.mark.timeout(1800)
def test_plain_numpy_on_the_bundles_values(name: str, bundle_of: Any) -> None:
    plain, logits = (logits_of(bundle_of(name), backend)[1] for backend in ("reference", "cpu"))
    measured = divergence(plain[1:], logits[1:])
    assert measured.nats <= REFERENCE_NATS[name] * MARGIN, measured
