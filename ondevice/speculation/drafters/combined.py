"""Several drafters in one: a pass verifies draft tokens of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.tree import Draft, Proposals

MAX_PROPOSALS = 8
"""Maximum draft tokens after a node; less likely ones are never reached."""
CHEAP_ROW_SHARE = 0.05
"""Largest time of a row, in plain passes, with which `auto` drafts with streams.

At the shape of a 7B a row takes 0.01 to 0.03 where dense passes wait for flash, and streams gain; 0.1 to 0.3
where everything is in memory or every token reads neurons, and they lose.
"""


class Combined(Drafter):
    """Drafts the likeliest tokens that any of `members` proposes.

    If several members propose a token, it gets the highest of their chances: they see the same text, so a
    second proposal adds little evidence.
    """

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        for member in self.members:
            member.begin(text, sampling, prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        for member in self.members:
            member.observe(token, logits)

    def read(self, output: ForwardOutput) -> None:
        for member in self.members:
            member.read(output)

    def end_pass(self, output: ForwardOutput, path: Sequence[int]) -> None:
        for member in self.members:
            member.end_pass(output, path)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        for member in self.members:
            member.prepare(kv, max_nodes, cancelled)

    def spawn(self) -> Combined | None:
        """A drafter made of those members that can be spawned; None if none can."""
        drafters = [drafter for member in self.members if (drafter := member.spawn()) is not None]
        return Combined(drafters) if drafters else None

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps of the first member that has any. Only one drafter reads hidden states."""
        return next((member.taps for member in self.members if member.taps), ())

    def propose(self, path: Sequence[int]) -> Proposals:
        chances: dict[int, float] = {}
        for member in self.members:
            for token, chance in member.propose(path):
                if chance > chances.get(token, 0.0):
                    chances[token] = chance
        return sorted(chances.items(), key=lambda proposal: -proposal[1])[:MAX_PROPOSALS]

    @property
    def computed_chance(self) -> float:
        return max(member.computed_chance for member in self.members)

    def compute(self, path: Sequence[int]) -> Proposals:
        """The proposals of the member with the highest `computed_chance`. Only one member runs forward passes
        for a draft.
        """
        return max(self.members, key=lambda member: member.computed_chance).compute(path)

    def grown(self) -> None:
        for member in self.members:
            member.grown()

    def streamed(self, draft: Draft, row_share: float) -> Sequence[int] | None:
        """The nodes that the first member with streams wants. Only one drafter uses the streams."""
        nodes = (member.streamed(draft, row_share) for member in self.members)
        return next((each for each in nodes if each is not None), None)

    def close(self) -> None:
        for member in self.members:
            member.close()


class WhileRowsAreCheap(Drafter):
    """A drafter that is used only while one more row takes little of a plain pass's time.

    Streams add rows to the upper layers for every token. If dense passes wait for flash, rows cost almost
    nothing; otherwise their time depends on the machine, so recent passes decide.
    """

    def __init__(self, drafter: Drafter) -> None:
        """drafter: the drafter to use."""
        self._drafter = drafter
        self._row_share = 0.0
        """Time of a row in plain passes, as last measured."""
        self._is_active = False
        """Whether `drafter` takes part in the newest draft."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._drafter.begin(text, sampling, prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        self._drafter.observe(token, logits if self._is_active else None)

    def end_pass(self, output: ForwardOutput, path: Sequence[int]) -> None:
        self._drafter.end_pass(output, path)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._is_active = self._is_cheap
        if self._is_active:
            self._drafter.prepare(kv, max_nodes, cancelled)

    def propose(self, path: Sequence[int]) -> Proposals:
        return self._drafter.propose(path) if self._is_active else []

    def streamed(self, draft: Draft, row_share: float) -> Sequence[int] | None:
        self._row_share = row_share
        return self._drafter.streamed(draft, row_share) if self._is_cheap else None

    def close(self) -> None:
        self._drafter.close()

    @property
    def _is_cheap(self) -> bool:
        return self._row_share <= CHEAP_ROW_SHARE
