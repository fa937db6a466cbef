"""How near a real model's logits are to those of its GGUF file's values in float32, on wikitext-2.

Limits are what was measured of this text, and a twentieth more: they say what holds today, and come down with
what bundles round away. Kernels give equal bits on every machine, so figures differ only by the oracle's sums.
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
REFERENCE_TOKENS = 64
"""Plain numpy takes its time."""
MEASURED = {
    "smollm2": Divergence(0.0, 1.0),
    "gemma3-270m": Divergence(0.0, 1.0),
    "qwen2.5-coder-0.5b": Divergence(0.0, 1.0),
    "qwen2.5-coder-1.5b": Divergence(0.0, 1.0),
}
"""Of `cpu` to the file's values."""
MARGIN, TOP1_MARGIN = 1.05, 0.01
REFERENCE_NATS = {"smollm2": 0.0, "gemma3-270m": 0.0, "qwen2.5-coder-0.5b": 0.0}
"""Measured KL divergence of `cpu`, which rounds activations to 8 bits, to plain numpy on the same values."""


def by_size(names: Any) -> list[Any]:
    """Names of models as parameters, of which all but the smallest are slow."""
    return [name if name == "smollm2" else pytest.param(name, marks=pytest.mark.slow) for name in names]


def logits_of(bundle: Path, count: int, **options: Any) -> tuple[list[int], np.ndarray]:
    """The first tokens of the text, and the logits of each."""
    with load(bundle, speculation="off", **options) as model:
        tokens = list(model.tokenizer.encode(wikitext()[: 16 * count]))[:count]
        return tokens, model.logits(tokens)


@pytest.mark.parametrize("name", by_size(MEASURED))
@pytest.mark.timeout(1200)
def test_logits_against_the_files_values_in_float32(name: str, bundle_of: Any) -> None:
    tokens, logits = logits_of(bundle_of(name), TOKENS)
    oracle = float32_logits(real_model(name), tokens)
    measured = divergence(oracle, logits)
    limit = MEASURED[name]
    assert measured.nats <= limit.nats * MARGIN, measured
    assert measured.top1 >= limit.top1 - TOP1_MARGIN, measured
    assert perplexity(logits, tokens) == pytest.approx(perplexity(oracle, tokens), rel=0.05)


@pytest.mark.parametrize("name", by_size(REFERENCE_NATS))
@pytest.mark.timeout(1200)
def test_plain_numpy_on_the_bundles_values(name: str, bundle_of: Any) -> None:
    plain, logits = (
        logits_of(bundle_of(name), REFERENCE_TOKENS, backend=backend)[1] for backend in ("reference", "cpu")
    )
    measured = divergence(plain, logits)
    assert measured.nats <= REFERENCE_NATS[name] * MARGIN, measured
