"""The options for training streams, with ranges and defaults. Can be imported without MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ondevice.backends.token_tree import MAX_DEPTH
from ondevice.bundle.streams import MAX_ADAPTER_RANK, MultiStreamMode
from ondevice.config import MAX_STREAMS, TRAIN_TOKENS
from ondevice.errors import UsageError

MAX_STREAM_LAYERS = 8


RESIDENT_PARTS = 16
"""Parts of a layer in which the resident neurons of a model without ReLU are drawn."""


def resident_prefix(neurons: int, parts: int) -> int:
    """The number of neurons in the first `parts` out of a layer's RESIDENT_PARTS parts; at least one."""
    return max(1, neurons * parts // RESIDENT_PARTS)


def longest_run(streams: int) -> int:
    """The most tokens of a run. A run and a token's streams form one path in the tree of a forward pass."""
    return MAX_DEPTH + 1 - streams


@dataclass(frozen=True)
class MultiStreamOptions:
    """The shape of the streams, and how they are trained.

    Args:
        token. layers: number of last layers that have streams. 0 means half of the layers, MAX_STREAM_LAYERS
        at most. attention_rank: rank of the attention's adapters. It is reduced, as `feed_forward_rank` is,
        if the adapters would exceed `most_of_model`. feed_forward_rank: rank of the feed-forward's adapters.
        most_of_model: largest number of adapter parameters, as a share of the model's parameters. bits: bits
        of the stored matrices. tokens: most tokens of the text to use. learning_rate: the highest learning
        rate of the schedule. batch_tokens: about the number of tokens whose streams a step trains: run_tokens
            of each window. run_tokens: number of tokens of a window whose streams are trained; the other
            tokens are their context.
        steps: number of steps. seed: seed of all random numbers.
    """

    mode: MultiStreamMode = "lossless"
    gamma: int = 4
    layers: int = 0
    attention_rank: int = 32
    feed_forward_rank: int = 80
    most_of_model: float = 0.04
    bits: Literal[4, 8, 16] = 8
    tokens: int = TRAIN_TOKENS
    learning_rate: float = 4e-3
    batch_tokens: int = 960
    run_tokens: int = 60
    steps: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all values. Raises UsageError for one out of range."""
        longest, most_rank = longest_run(self.gamma), f"1 to {MAX_ADAPTER_RANK}"
        checks = (
            ("mode", self.mode in ("lossless", "shared"), "'lossless' or 'shared'"),
            ("gamma", 1 <= self.gamma <= MAX_STREAMS, f"from 1 to {MAX_STREAMS}"),
            ("layers", self.layers >= 0, "0 (half of them) or more"),
            ("attention_rank", 1 <= self.attention_rank <= MAX_ADAPTER_RANK, most_rank),
            ("feed_forward_rank", 1 <= self.feed_forward_rank <= MAX_ADAPTER_RANK, most_rank),
            ("most_of_model", 0.0 < self.most_of_model <= 1.0, "above 0 and at most 1"),
            ("bits", self.bits in (4, 8, 16), "4, 8 or 16"),
            ("learning_rate", 0.0 < self.learning_rate <= 1.0, "above 0 and at most 1"),
            ("batch_tokens", self.batch_tokens >= 1, "1 or more"),
            ("run_tokens", 1 <= self.run_tokens <= longest, f"1 to {longest}"),
            ("steps", self.steps >= 1, "1 or more"),
            ("seed", self.seed >= 0, "0 or more"),
        )
        for name, valid, range_text in checks:
            if not valid:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {range_text}")

    @property
    def windows(self) -> int:
        """Number of windows of a step."""
        return -(-self.batch_tokens // self.run_tokens)
