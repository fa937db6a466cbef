"""What every drafter is, and how often its guesses have lately been right."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ondevice.backends.base import Array, Float32
from ondevice.config import SamplingConfig
from ondevice.model.kv_cache import KVCache
from ondevice.model.transformer import ForwardOutput, PrunedDraft
from ondevice.speculation.tree import Draft, Proposals

IsCancelled = Callable[[], bool]

SURENESS_DECAY = 0.97
"""Of what is known about a kind of guess, per guess of its kind."""
PRIOR_GUESSES = 4
"""So many guesses are what is assumed at first worth."""


class Drafter(ABC):
    """Guesses tokens behind a text, which it is told as it grows.

    Only `propose` must be there: what else a drafter hears of, it may ignore. Nothing of it changes a text.
    """

    def begin(self, text: list[int], sampling: SamplingConfig) -> None:  # noqa: B027
        """From here on the text is `text`, token ids: the last one's continuation, or another.

        sampling: how its next tokens will be drawn. Noise is keyed by position, so it is known ahead.
        """

    def add(self, token: int) -> None:  # noqa: B027
        """`token` came behind the text."""

    def prepare(self, kv: KVCache, most_nodes: int, cancelled: IsCancelled) -> None:  # noqa: B027
        """A draft is about to grow: run here what it takes. Its time counts against drafting.

        kv: the target's keys and values, which hold the text but for its last token. most_nodes: of the
        draft, its root included. cancelled: what takes a model's pass asks it in every layer, here and in
        `propose`, and raises Cancelled.
        """

    @abstractmethod
    def propose(self, path: Sequence[int]) -> Proposals:
        """What may follow the text and the guesses `path` behind it, likeliest first.

        Asked only for what a draft has room for, after `prepare`, and without it by `judge`'s like.
        """

    def judge(self, token: int) -> None:  # noqa: B027
        """`token` follows the text: learn how good `propose(())` was."""

    def learn(self, token: int, logits: Float32) -> None:  # noqa: B027
        """logits (V,): what the model says may follow `token`, at the end of the text.

        Where nothing is worth a guess, it isn't told of every token.
        """

    @property
    def wants_streams(self) -> bool:
        """Whether the model's streams are any use in the next pass, which is then pruned by `prune`."""
        return False

    def prune(self, draft: Draft, entering: Array, row_share: float) -> PrunedDraft:
        """Which nodes of `draft` go on into a model's stream layers, and which of them get streams there.

        entering: (n, D) what enters those layers. row_share: of a plain pass, what another row takes.
        """
        return PrunedDraft(range(len(draft)))

    def entered(self, found: ForwardOutput, node: int) -> None:  # noqa: B027
        """A pass is over: `node` of those in `found` is the newest token that the target's cache holds.

        One more has been drawn behind it, which `add` has been told of.
        """

    def close(self) -> None:  # noqa: B027
        """Give back what it holds. Idempotent."""


class Sureness:
    """How often guesses of one kind are right: a decayed mean that begins with `prior`."""

    def __init__(self, prior: float) -> None:
        self.chance = prior
        self._weight = 1 / PRIOR_GUESSES
        """Of the next guess: the first few count alike."""

    def count(self, right: bool) -> None:
        self._weight = max(1 - SURENESS_DECAY, self._weight / (1 + self._weight))
        self.chance += self._weight * (right - self.chance)
