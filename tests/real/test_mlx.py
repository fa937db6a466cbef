"""A real model on MLX's CPU device, beside our own kernels and plain numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.api import load
from ondevice.runtime.backend_choice import has_mlx
from tests.support.real_oracles import divergence

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not has_mlx(), reason="mlx isn't installed"),
    pytest.mark.usefixtures("mlx_on_cpu"),
]

PROMPT = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
"""Its first TOKENS tokens lead by 0.76 at least: far more than backends differ by."""
TOKENS = 5
NATS = 0.01
"""Most KL divergence between backends; measured: 0.0073, as `cpu` rounds activations to 8 bits."""
LARGEST_SHARE = 1e-3
"""Most difference to plain numpy, of the largest logit; measured: 0.00018."""


def test_mlx_stays_near_the_reference_s_logits_and_gives_its_text(smollm2: Path) -> None:
    logits, texts = {}, {}
    for backend in ("reference", "cpu", "mlx"):
        with load(smollm2, backend=backend, speculation="off") as model:
            tokens = model.tokenizer.encode(PROMPT)
            logits[backend] = model.logits(tokens)
            texts[backend] = model.generate(tokens=tokens, max_tokens=TOKENS).tokens
            assert model.stats.backend == backend
    difference = np.abs(logits["mlx"] - logits["reference"]).max()
    assert difference <= LARGEST_SHARE * np.abs(logits["reference"]).max()
    assert 0 < divergence(logits["mlx"], logits["cpu"]).nats <= NATS
    assert texts["mlx"] == texts["cpu"] == texts["reference"]
