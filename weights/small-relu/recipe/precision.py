"""The type in which matrices are multiplied while training, chosen by the processor's instructions."""

from __future__ import annotations

import torch

BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
"""Instruction sets for bfloat16 products on x86-64 and arm64, by torch's names."""


def product_type() -> torch.dtype:
    """bfloat16 if the processor can multiply it; else float32, which is then two to three times faster."""
    has = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(has.get(name, False) for name in BFLOAT16_INSTRUCTIONS) else torch.float32
