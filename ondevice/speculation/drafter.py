"""The interface of a drafter, and the running estimate of how often its draft tokens are accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, Prune
from ondevice.speculation.tree import Draft, Proposals

ACCEPTANCE_DECAY = 0.97
"""Decay of an acceptance rate's history with every judged draft token."""
PRIOR_TOKENS = 4
"""Weight of an acceptance rate's prior, in judged draft tokens."""


class Drafter(ABC):
    """Proposes draft tokens behind a text, which it is told of as the text grows.

    Only `propose` is required; a drafter ignores what it has no use for. It decides how many tokens a
    forward pass gives, never which.
    """

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:  # noqa: B027
        """Begin with `text`, token ids: a continuation of the last text, or another one.

        sampling: how the next tokens will be drawn. Its noise is keyed by position, so it is known ahead.
        """

    def observe(self, token: int, logits: Float32 | None) -> None:  # noqa: B027
        """`token` follows the text: judge what would have been proposed, learn, and add it to the text.

        logits: (V,) from which it was drawn. None for a token that was drawn while drafting was throttled,
        which is added to the text only.
        """

    def end_pass(self, output: ForwardOutput, node: int) -> None:  # noqa: B027
        """A forward pass is over, and `node` of `output` is the newest token in the target's cache.

        The token drawn behind it has been observed already.
        """

    def prepare(self, kv: KVCache, max_nodes: int, cancelled: IsCancelled) -> None:  # noqa: B027
        """Compute what the next draft grows from. The time counts as drafting's.

        kv: the target's keys and values, which hold the text except its last token. max_nodes: nodes of the
        draft, its root included. cancelled: checked in every layer of a drafter's forward pass, here and in
        `propose`, which then raise Cancelled.
        """

    @abstractmethod
    def propose(self, path: Sequence[int]) -> Proposals:
        """Tokens that may follow the text and the draft tokens `path`, likeliest first.

        Called after `prepare`, and only while the draft has room.
        """

    def pruner(self, draft: Draft, row_share: float) -> Prune | None:
        """Called between the lower layers and the stream layers of the pass over `draft`. None: no pruning.

        row_share: time that another row adds to a pass, as a share of a plain pass.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Release what it holds. Idempotent."""


class AcceptanceRate:
    """How often draft tokens of one kind are right: a decayed mean."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._weight = 1 / PRIOR_TOKENS
        """Weight of the next judgement. The first few weigh alike."""

    def observe(self, right: bool) -> None:
        self._weight = max(1 - ACCEPTANCE_DECAY, self._weight / (1 + self._weight))
        self.value += self._weight * (right - self.value)
