"""Options of a streams' training: their ranges and defaults. Imports without MLX."""

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
    """Number of first neurons in `parts` of a layer's RESIDENT_PARTS; at least one."""
    return max(1, neurons * parts // RESIDENT_PARTS)


def longest_run(streams: int) -> int:
    """Most tokens of a run: the run and a token's streams form one path of the forward pass's tree."""
    return MAX_DEPTH + 1 - streams


@dataclass(frozen=True)
class MultiStreamOptions:
    """The shape of the streams, and how they are trained.

    Args: mode: `lossless`, or `shared` if adapters also apply to the text's own tokens. gamma: streams per
        token. layers: number of last layers that have streams. 0 means half of the layers, MAX_STREAM_LAYERS
        at most. attention_rank: rank of the attention's adapters. It is reduced, as `feed_forward_rank` is,
        if the adapters would exceed `most_of_model`. feed_forward_rank: rank of the feed-forward's adapters.
        most_of_model: largest number of adapter parameters, as a share of the model's parameters. bits: bits
        of the stored matrices. tokens: most tokens of the text to use. learning_rate: the highest learning
        rate of the schedule. batch_tokens: tokens whose streams a step trains, about: run_tokens of each
        window. run_tokens: tokens of a window whose streams are trained; the other tokens are their context.
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
        """Raises UsageError for a value out of range."""
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
