"""What a GGUF file's own values say in float32: hidden states by `transformers`, logits by the file's head.

Hidden states are small enough to keep; the logits of a window are one product with the head, taken when they
are needed. `run_oracle` stores the states, and `run_quality` compares an engine with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def read_head(gguf: Path) -> Float32:
    """The output matrix (V, D) of a GGUF file in float32; that of the embedding where the two are tied."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    tensor = tensors.get("output.weight") or tensors["token_embd.weight"]
    head: Float32 = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    return head


class Agreement:
    """Running sums of how an engine's next-token distributions agree with the oracle's."""

    def __init__(self) -> None:
        self.positions = self.predicted = self.same_top = 0
        self.divergence = self.loss = self.oracle_loss = 0.0

    def add(self, oracle: Float32, engine: Float32, tokens: Sequence[int]) -> None:
        """Take in the logits (n, V) of both behind n positions.

        tokens: the tokens that came next, n of them, or n - 1 where the text ends with the last position.
        """
        expected, actual = log_softmax(oracle), log_softmax(engine)
        terms = np.exp(expected) * (expected - actual)
        self.divergence += float(terms.sum(dtype=np.float64))
        self.same_top += int((oracle.argmax(axis=1) == engine.argmax(axis=1)).sum())
        self.positions += len(oracle)
        rows = np.arange(len(tokens))
        self.oracle_loss -= float(expected[rows, tokens].sum(dtype=np.float64))
        self.loss -= float(actual[rows, tokens].sum(dtype=np.float64))
        self.predicted += len(tokens)

    def figures(self) -> dict[str, float]:
        """Perplexities, the mean KL divergence in nats, and the share of positions with equal top tokens."""
        return {
            "perplexity": float(np.exp(self.loss / self.predicted)),
            "float32_perplexity": float(np.exp(self.oracle_loss / self.predicted)),
            "kl_nats": self.divergence / self.positions,
            "top1": self.same_top / self.positions,
            "positions": self.positions,
        }


def log_softmax(logits: Float32) -> Float32:
    """Log-probabilities (n, V) of logits (n, V)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    normed: Float32 = shifted - logs.astype(np.float32)
    return normed
