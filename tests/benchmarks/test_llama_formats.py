"""llama.cpp's rounding as the comparison uses it: its mixes, and that its blocks are read back right."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
from tests.benchmarks.lib.llama_formats import MIXES, Rounder, Type, uses_more  # noqa: E402


def test_a_mix_gives_more_bits_to_some_layers_and_falls_back_for_short_rows() -> None:
    """By hand from llama.cpp's rules: 32 layers, and rows of 256, 64 and 172."""
    more = [layer for layer in range(32) if uses_more(layer, 32)]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    mix = MIXES["Q4_K_M"]
    assert [mix.of("down", 3, 32, cols) for cols in (256, 64, 172)] == [Type.Q6_K, Type.Q8_0, Type.F16]
    assert [mix.of("down", 4, 32, cols) for cols in (256, 64, 172)] == [Type.Q4_K, Type.Q5_0, Type.F16]
    assert mix.of("gate", 3, 32, 256) == Type.Q4_K
    assert mix.of("embedding", 0, 32, 256) == Type.Q6_K


@pytest.mark.parametrize(
    ("form", "bits", "most"),
    [(Type.Q4_0, 4.5, 0.1), (Type.Q4_K, 4.5, 0.08), (Type.Q5_K, 5.5, 0.04), (Type.Q6_K, 6.5625, 0.02)],
)
def test_blocks_are_read_back_near_their_weights(form: Type, bits: float, most: float) -> None:
    """Relative errors of normal weights, with and without energies, which move error off what they weigh."""
    weight = np.random.default_rng(1).normal(size=(8, 512)).astype(np.float32)
    rounder = Rounder()
    energies = np.where(np.arange(512) % 8 == 0, 100.0, 0.01)
    plain, weighed = rounder.round(weight, form, None), rounder.round(weight, form, energies)
    assert rounder.weight_bits == bits
    assert np.linalg.norm(plain - weight) < most * np.linalg.norm(weight)
    heavy = energies > 1
    assert np.square(weighed - weight)[:, heavy].sum() < np.square(plain - weight)[:, heavy].sum()
