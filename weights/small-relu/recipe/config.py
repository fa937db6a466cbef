"""All choices of the recipe in one place: text, sizes and schedule. No step has defaults of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "recipe"
"""Folder of everything that the recipe makes; git ignores it."""
DATA = ROOT.parent / "shared" / "data"
MODEL_FOLDER = Path(__file__).resolve().parents[1]

StoredBits = Literal[0, 4, 8, 16]
"""Bits of stored weights; 0 for weights that aren't rounded."""
CONTEXT = 512
"""Tokens of a training window, and of the model's context."""

MIXTURE = {
    "dialogue": 0.30,
    "sql": 0.21,
    "novels": 0.40,
    "math": 0.06,
    "restaurants": 0.03,
}
"""Share of the training tokens from each domain, regardless of how many tokens the domain has."""

Activation = Literal["relu", "silu"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, or of an OLMoE if there are experts, by `transformers`' names where it has them."""

    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    vocab_size: int = 4096
    max_position_embeddings: int = CONTEXT
    hidden_act: Activation = "relu"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    num_experts: int = 0
    """Experts of a layer, each of `intermediate_size` neurons; 0 for a dense model."""
    num_experts_per_tok: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def parameters(self) -> int:
        """Number of parameters. Embeddings are tied, so they count once."""
        width, neurons = self.hidden_size, self.intermediate_size
        experts, norms = max(1, self.num_experts), 4 if self.num_experts else 2
        router = self.num_experts * width
        layer = 4 * width * width + 3 * width * neurons * experts + router + norms * width
        return self.vocab_size * width + self.num_hidden_layers * layer + width


SIZES = {
    "small": Shape(),
    "twin": Shape(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768),
    "large": Shape(hidden_size=384, num_attention_heads=6, intermediate_size=1536),
    "mixture": Shape(
        hidden_size=192,
        num_attention_heads=6,
        intermediate_size=64,
        max_position_embeddings=2 * CONTEXT,
        hidden_act="silu",
        num_experts=32,
        num_experts_per_tok=4,
    ),
    "tiny": Shape(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        vocab_size=512,
        max_position_embeddings=64,
    ),
}
"""`small` ships; `twin` is for comparisons; `mixture` is for proofs of experts; `large` is for a machine with
a GPU; `tiny` is for tests."""


@dataclass(frozen=True)
class Training:
    """Settings of one training run. Equal settings and seed give equal models."""

    shape: Shape = field(default_factory=Shape)
    tokens: int = 20_000_000
    batch_windows: int = 16
    micro_windows: int = 4
    """Windows per forward and backward pass: as many as fit the processor's caches."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay_share: float = 0.2
    """Share of the run, at its end, in which the learning rate falls to zero."""
    clip_norm: float = 1.0
    penalty: bool = True
    target_zeros: float = 0.92
    """Target share of zero gate activations, mean over layers, from `target_share` of the run on."""
    target_share: float = 0.5
    balance: float = 0.01
    """Weight of the loss that makes a mixture's router use all experts (OLMoE, arXiv 2409.02060)."""
    stored_bits: StoredBits = 4
    """Bits to which weights are rounded, as in a bundle, while the learning rate falls; 0: no rounding."""
    seed: int = 1

    @property
    def batch_tokens(self) -> int:
        return self.batch_windows * self.shape.max_position_embeddings

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch_tokens)
