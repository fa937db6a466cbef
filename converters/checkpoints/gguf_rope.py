"""Llama 3's scaling of rotary frequencies, which GGUF files hold as a tensor of factors, folded back to its
rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.config import ModelConfig
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.errors import CheckpointError, UnsupportedModelError

ROPE_FACTORS = "rope_freqs.weight"
LOW, HIGH = 1.0, 4.0
"""The limits of Llama 3.1 and 3.2, in rotations over the original context, between which factors change."""
ORIGINAL_CONTEXTS = (8192, *(1 << power for power in range(5, 21)))
"""Original contexts that are tried, in tokens; that of Llama 3 first."""
_TOLERANCE = 1e-5


def scaling_of_factors(tensor: SourceTensor, config: ModelConfig, file: str) -> dict[str, Any] | None:
    """The section `rope_scaling` of a `config.json` for which llama.cpp's converter writes these factors.

    tensor: (head_dim / 2,) factors that frequencies are divided by. None if all are 1.
    Raises UnsupportedModelError if no such rule gives them.
    """
    if tensor.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"{file}: {tensor.name} has shape {list(tensor.shape)}, not [{config.head_dim // 2}]"
        )
    factors = tensor.vector()
    if (factors == 1.0).all():
        return None
    factor = float(str(factors.max()))
    for original in ORIGINAL_CONTEXTS if factor > 1.0 else ():
        expected = llama3_factors(config.rope_theta, config.head_dim, factor, original)
        if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModelError(
        f"{file}: {tensor.name} has factors from {factors.min()} to {factors.max()} that aren't those of "
        "Llama 3's scaling, and others aren't known here; start from the model's safetensors files"
    )


def llama3_factors(theta: float, head_dim: int, factor: float, original_context: int) -> NDArray[np.float64]:
    """(head_dim / 2,) numbers that Llama 3's rule divides the rotary frequencies by, highest frequency
    first."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    rotations = original_context * frequencies / (2 * np.pi)
    smooth = np.clip((rotations - LOW) / (HIGH - LOW), 0.0, 1.0)
    factors: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return factors
