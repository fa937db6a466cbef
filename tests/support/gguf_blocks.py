"""Random blocks of GGUF's types, and mixtures of experts that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import QWEN3_MOE, write_model
from tests.support.gguf_families import write_family

HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where the float16 numbers of a block are."""


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks for values of this shape, (..., bytes): random bytes, but for their small float16 numbers."""
    gguf = pytest.importorskip("gguf")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, nbytes), dtype=np.uint8)
    # Subnormal where integers of both levels are large, else near 2^-13.
    exponent = 0x00 if kind in ("Q5_K", "Q6_K", "IQ4_XS") else 0x08
    for at in HALVES[kind]:
        blocks[..., at + 1] = blocks[..., at + 1] & 0x83 | exponent
    return blocks.reshape(*shape[:-1], -1)


def write_wide_mixture(folder: Path) -> None:
    """Qwen3-MoE whose rows are whole blocks of 256: 2 layers of 256 values, 4 experts of 512 neurons."""
    shape = {"hidden_size": 256, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 512}
    write_model(folder, "Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, **shape})


def with_experts_of(path: Path, source: Path, kind: str, *downs: str) -> dict[str, np.ndarray]:
    """Write the wide mixture `source` with random blocks as experts, Q8_0 elsewhere; the experts by name.

    kind: type of the experts' matrices. downs: those of down matrices, layer by layer, where they differ.
    """
    gguf = pytest.importorskip("gguf")
    stored: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(1)

    def change(writer: Any) -> None:
        add = writer.add_tensor

        def add_other(name: str, values: np.ndarray, raw_dtype: Any = None) -> None:
            if "_exps" in name:
                is_down = "down" in name
                own = downs[int(name.split(".")[1])] if downs and is_down else kind
                raw_dtype = gguf.GGMLQuantizationType[own]
                values = random_blocks(rng, own, (4, 256, 512) if is_down else (4, 512, 256))
                stored[name] = values
            add(name, values, raw_dtype=raw_dtype)

        writer.add_tensor = add_other

    write_family(path, source, "Q8_0", change=change)
    return stored
