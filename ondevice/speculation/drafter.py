"""The interface of a drafter, and the running estimate of an acceptance rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput
from ondevice.speculation.tree import Draft, Proposals

ACCEPTANCE_DECAY = 0.97
"""Decay of an acceptance rate's history with every judged draft token."""
PRIOR_TOKENS = 4
"""Weight of an acceptance rate's prior, in judged draft tokens."""


class Drafter(ABC):
    """Proposes draft tokens that may follow a text. It is told each token that the text gets.

    Only `propose` is required; the other methods do nothing by default. A drafter affects how many tokens a
    forward pass gives, never which.

    A draft calls `prepare`, then `propose` and `compute` as it grows, then `grown`.
    """

    def begin(  # noqa: B027
        self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None
    ) -> None:
        """Begin with `text`, token ids: a continuation of the last text, or another one.

        sampling: settings with which the next tokens are drawn. The noise of a position is fixed, so it is
            known in advance.
        prompt_tokens: how many tokens of `text` are its prompt, which count penalties leave out; None: all.
        """

    def observe(self, token: int, logits: Float32 | None) -> None:  # noqa: B027
        """Take `token`, which was just drawn, as part of the text, and learn from comparing it with the
        drafter's proposals.

        logits: (V,), from which the token was drawn. None if it was drawn while drafting was throttled; then
        there is nothing to learn.
        """

    def read(self, output: ForwardOutput) -> None:  # noqa: B027
        """Take the output of a pass over tokens of the text's prompt."""

    def end_pass(self, output: ForwardOutput, path: Sequence[int]) -> None:  # noqa: B027
        """Take the output of a finished forward pass.

        path: indices in `output` of the tokens that were accepted. The last of them is the newest token in
        the target's cache. The token drawn after it has already been observed.
        """

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:  # noqa: B027
        """Do the computations that the next draft needs. Their time counts as drafting's.

        kv: the target's keys and values, which hold the text except its last token.
        max_nodes: most nodes of the draft, its root included.
        cancelled: checked in every layer of a drafter's forward pass, here and until `grown`. If it returns
            True, Cancelled is raised.
        """

    def spawn(self) -> Drafter | None:
        """A second drafter of this kind, for another text. It shares everything that doesn't depend on the
        text.

        It needn't be closed. None if drafters of this kind draft for only one text at a time.
        """
        return None

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states the outputs must include, as in `Transformer.taps`."""
        return ()

    @abstractmethod
    def propose(self, path: Sequence[int]) -> Proposals:
        """Tokens that may follow the text and the draft tokens `path`, likeliest first.

        Called after `prepare`, and only while the draft has room.
        """

    @property
    def computed_chance(self) -> float:
        """The expected chance of the likeliest token that `compute` would give; 0 if there is nothing to
        compute.
        """
        return 0.0

    def compute(self, path: Sequence[int]) -> Proposals:
        """Like `propose`, but with a forward pass. Called if the gain in chances is worth the time."""
        return ()

    def grown(self) -> None:  # noqa: B027
        """Take note that the draft is complete. The target's keys and values must be as `prepare`
        got them.
        """

    def streamed(self, draft: Draft, row_share: float) -> Sequence[int] | None:
        """The nodes of `draft` that get streams in its pass, ascending; None if the pass has no streams.

        row_share: the time that one more row adds to a pass, as a share of a plain pass.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Release the drafter's resources. Idempotent."""


class AcceptanceRate:
    """The acceptance rate of one kind of draft token, as a decayed mean."""

    def __init__(self, prior: float) -> None:
        self.value = prior
        self._weight = 1 / PRIOR_TOKENS
        """Weight of the next judgement. The first few have equal weight in the mean."""

    def observe(self, right: bool) -> None:
        self._weight = max(1 - ACCEPTANCE_DECAY, self._weight / (1 + self._weight))
        self.value += self._weight * (right - self.value)
