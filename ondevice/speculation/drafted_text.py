"""One text and its drafter: what the drafter is told, its drafts, and statistics on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ondevice.backends.base import Float32
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.constraints.constrained import Constrained
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.tree import Draft, Proposals, plain
from ondevice.stats import DraftStats

State = Literal["listening", "throttled", "disabled"]


class PassOutcome(NamedTuple):
    """The result of a forward pass for one text, once its tokens have been drawn."""

    draft: Draft
    path: Sequence[int]
    """The nodes of `draft` that the text takes, root first. A token was drawn after each, except after the
    last one while the text waits for its constraint."""
    output: ForwardOutput
    seconds: float | None
    """Time of the pass, shared by all its texts. None: the time isn't representative."""
    ended: bool
    """Whether the text is over. The draft tokens after the path were then never judged."""
    drawing_seconds: float = 0.0
    """Time of drawing this text's tokens."""


class DraftPass:
    """A decoding pass, from drafting until all texts in it have drawn their tokens."""

    def __init__(self, texts: int, waiting: Sequence[DraftedText]) -> None:
        """texts: number of texts in the pass. waiting: the texts that have a drafter."""
        self.texts = texts
        self.nodes = texts
        """Nodes of all drafts, roots included."""
        self.tokens = texts - len(waiting)
        """Tokens that the pass gave. Each text without a drafter draws one."""
        self.timed = True
        """Whether its time is representative."""
        self.seconds = 0.0
        """Time of drafting, of the pass, and of drawing tokens."""
        self.drafting_seconds = 0.0
        self._waiting = set(waiting)
        """Texts that have yet to draw."""

    def drafted(self, seconds: float) -> None:
        """Add time that drafters have taken."""
        self.drafting_seconds += seconds
        self.seconds += seconds

    def drew(self, text: DraftedText, outcome: PassOutcome, learning_seconds: float) -> bool:
        """Count one text's part of the pass. Returns whether it was the last one."""
        if outcome.seconds is None:
            self.timed = False
        elif len(self._waiting) == 1:
            self.seconds += outcome.seconds
        self.seconds += outcome.drawing_seconds
        self.drafting_seconds += learning_seconds
        self.tokens += len(outcome.path)
        self._waiting.discard(text)
        return not self._waiting


class DraftedText:
    """A drafter and the text that it drafts for. It serves texts one after another.

    The state of the newest pass (`Drafting`) decides what the drafter is told.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.is_used = False
        """Whether there is a text."""
        self.draft = plain(0)
        """The newest draft."""
        self.streamed: Sequence[int] | None = None
        """Nodes of the newest draft that get streams in its pass. None: streams take no part."""
        self.state: State = "listening"
        self.draft_pass: DraftPass | None = None
        """The pass that runs; None while a prompt is read."""
        self.preparing_seconds = 0.0
        """Time of the drafter before its newest draft grew."""
        self.proposing_seconds = 0.0
        """Time of the drafter's proposals for its newest draft."""
        self.propose_calls = 0
        """How often the drafter was asked for its newest draft."""
        self.computing_seconds = 0.0
        """Time of the drafter's forward passes while its newest draft grew."""
        self.computed = 0
        """Number of these passes."""
        self._prepared = False
        """Whether the drafter was asked to prepare the newest draft."""
        self._text: list[int] = []
        self._prompt_tokens = 0
        """How many of the text's tokens are its prompt."""
        self._sampling = SamplingConfig()
        self._constrained: Constrained | None = None
        self._told = 0
        """Number of the text's tokens that the drafter knows; 0: it has yet to begin."""
        self._missed_output: tuple[ForwardOutput, Sequence[int]] | None = None
        """The newest output that the drafter hasn't been given, and the nodes of it that the text took."""
        self._learning_seconds = 0.0
        """Time of the drafter after the newest pass."""
        self._count = _DraftCount()

    def begin(
        self,
        text: list[int],
        prompt_tokens: int,
        sampling: SamplingConfig,
        constrained: Constrained | None,
        state: State,
    ) -> None:
        """Begin a text of at least one token. The caller's list grows with it."""
        self.is_used, self.state, self.draft_pass = True, state, None
        self._text, self._prompt_tokens = text, prompt_tokens
        self._sampling, self._constrained = sampling, constrained
        self._told = 0
        self._missed_output = None
        self._count = _DraftCount()
        if state == "listening":
            self._begin_drafter()

    def end(self) -> None:
        """Release the text."""
        self.is_used, self.draft_pass = False, None
        self._text, self._constrained, self._missed_output = [], None, None

    def plain(self, root: int, state: State, draft_pass: DraftPass | None = None) -> None:
        """Set the next pass to have no draft. In state `disabled`, the drafter will later begin again with
        the complete text.
        """
        self.draft, self.streamed, self.state, self.draft_pass = plain(root), None, state, draft_pass
        self.preparing_seconds = self.proposing_seconds = self.computing_seconds = 0.0
        self._learning_seconds = 0.0
        self.propose_calls, self.computed, self._prepared = 0, 0, False
        if state == "disabled":
            self.disable()

    def disable(self) -> None:
        """Tell the drafter nothing more. It will later begin again with the complete text. The present draft
        stays.
        """
        self.state, self._told, self._missed_output = "disabled", 0, None

    def catch_up(self) -> None:
        """Tell the drafter about the tokens and the output that it has missed."""
        if not self._told:
            self._begin_drafter()
        started = time.perf_counter()
        for token in self._text[self._told :]:
            self.drafter.observe(token, None)
        self._told = len(self._text)
        if self._missed_output is not None:
            self.drafter.end_pass(*self._missed_output)
            self._missed_output = None
        self.preparing_seconds = time.perf_counter() - started

    def prepare(self, kv: SequenceState, nodes: int, cancelled: IsCancelled) -> None:
        """Prepare the drafter for a draft of up to `nodes` nodes. Raises what the drafter raises."""
        started, self._prepared = time.perf_counter(), True
        self.drafter.prepare(kv, nodes, cancelled)
        self.preparing_seconds += time.perf_counter() - started

    def propose(self, path: Sequence[int]) -> Proposals:
        """Tokens that may follow the text and `path`. Raises what the drafter raises."""
        started = time.perf_counter()
        proposals = self._allowed(path, self._ask)
        self.proposing_seconds += time.perf_counter() - started
        return proposals

    def compute(self, path: Sequence[int]) -> Proposals:
        """Tokens that may follow the text and `path`, computed by a forward pass of the drafter. Raises what
        it raises.
        """
        started = time.perf_counter()
        proposals = self._allowed(path, self.drafter.compute)
        self.computing_seconds += time.perf_counter() - started
        self.computed += 1
        return proposals

    def _allowed(self, path: Sequence[int], propose: Callable[[Sequence[int]], Proposals]) -> Proposals:
        if self._constrained is None:
            return list(propose(path))
        return list(self._constrained.proposals(path, propose))

    def _ask(self, path: Sequence[int]) -> Proposals:
        self.propose_calls += 1
        return self.drafter.propose(path)

    def read(self, output: ForwardOutput) -> None:
        """Give the drafter the output of a pass over the prompt. Raises what the drafter raises."""
        if self.state == "listening":
            self.drafter.read(output)

    def drew(self, token: int, logits: Float32) -> None:
        """Tell the drafter that `token` was drawn from logits (V,) and is about to be appended to the text.

        Logits aren't part of `PassOutcome`: a row for each node, as long as the vocabulary, would be large.
        """
        if self.state == "listening":
            started = time.perf_counter()
            self.drafter.observe(token, logits)
            self._told += 1
            self._learning_seconds += time.perf_counter() - started

    def drawn(self, outcome: PassOutcome) -> bool:
        """Take the result of the finished pass. Returns whether this text was the last one in the pass.

        Raises what the drafter raises. The result then counts, but not the time of the pass.
        """
        draft_pass, self.draft_pass = self.draft_pass, None
        if self.state == "throttled":
            self._missed_output = outcome.output, outcome.path
        elif self.state == "listening":
            if draft_pass is not None and self._prepared:
                computing = self.preparing_seconds + self.computing_seconds
                self._count.add(outcome, computing, self.proposing_seconds)
            self.drafter.end_pass(outcome.output, outcome.path)
        return draft_pass is not None and draft_pass.drew(self, outcome, self._learning_seconds)

    def stats(self, decision: str) -> DraftStats:
        """Stats of the text so far. decision: a sentence on whether drafts are made, and why."""
        return self._count.stats(decision)

    def _begin_drafter(self) -> None:
        self.drafter.begin(list(self._text), self._sampling, self._prompt_tokens)
        self._told = len(self._text)
        self._missed_output = None


class _DraftCount:
    """Sums over a text's passes, as described in `DraftStats`."""

    def __init__(self) -> None:
        self._drafts = self._draft_tokens = 0
        self._preparing_seconds = self._growing_seconds = 0.0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        """Draft tokens judged and accepted, by depth from 1 on; both lists are equally long."""

    def add(self, outcome: PassOutcome, preparing_seconds: float, growing_seconds: float) -> None:
        """Count a pass."""
        nodes = len(outcome.draft)
        self._drafts += nodes > 1
        self._draft_tokens += nodes - 1
        self._preparing_seconds += preparing_seconds
        self._growing_seconds += growing_seconds
        accepted = len(outcome.path) - 1
        # A draft token after the path was judged wrong, if there was one and the text didn't end there.
        judged = accepted + (not outcome.ended and outcome.path[-1] in outcome.draft.parents[1:])
        more = [0] * (judged - len(self._drafted))
        self._drafted += more
        self._accepted += more
        for depth in range(judged):
            self._drafted[depth] += 1
            self._accepted[depth] += depth < accepted

    def stats(self, decision: str) -> DraftStats:
        return DraftStats(
            drafts=self._drafts,
            draft_tokens=self._draft_tokens,
            drafted_by_depth=tuple(self._drafted),
            accepted_by_depth=tuple(self._accepted),
            preparing_seconds=self._preparing_seconds,
            growing_seconds=self._growing_seconds,
            decision=decision,
        )
