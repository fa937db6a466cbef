"""Follows one text under a constraint: computes which tokens may come next, and which must.

The grammar's state depends only on the text. Drafts are tested on a copy of it, so the masks, and with them
the text, are the same with and without drafts. Once a grammar's limits are reached, drafts aren't tested, so
a text reaches the limits at the same token as without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ondevice.constraints.digits import DigitBound
from ondevice.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher

PIECE_SECONDS = 0.02
"""Seconds after which `catch_up` yields. Reading the grammar is one step, and so is each token."""
Mask = npt.NDArray[np.bool_]
Proposals = Iterable[tuple[int, float]]


class Gate(Protocol):
    """Separates the reply, to which the constraint applies, from thinking, as in
    `chat_template/replies.py`.
    """

    @property
    def kind(self) -> str:
        """`reply` if the next token belongs to the reply, otherwise another kind."""

    @property
    def openers(self) -> frozenset[int]:
        """Ids of tokens that may come in place of the reply's first token and begin something else."""

    def take(self, token: int | None, text: str) -> object:
        """Follow the reply: first the text up to `token`, then `token` itself."""


class Constrained:
    """One text under a constraint. `eos_ids` aren't part of it: they may come once the constraint is
    satisfied.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_ids: frozenset[int],
        gate: Gate | None = None,
        unshared: Callable[[], LLMatcher] | None = None,
        digits: DigitBound | None = None,
    ) -> None:
        """matcher: follows the text that has to obey, from its beginning. gate: None if all text has to obey.

        unshared: makes a new matcher that shares no limits with other texts. It replaces `matcher` if other
        texts and drafts have used up the grammar's limits (`catch_up`), so that every text has the full
        limits.

        digits: limits the digits of numbers in the same text.
        """
        self._matcher = matcher
        self._unshared = unshared
        self._looks_ahead = True
        """Whether drafts may use up the grammar's limits."""
        self._taken: list[int] = []
        """Tokens that the matcher has consumed, or that its replacement has to."""
        self._bits: bytes | None = None
        """The next mask, packed, once it is computed."""
        self._vocab_size = vocab_size
        self._gate = gate
        self._digits = digits
        self._openers = [] if gate is None else sorted(gate.openers)
        self._obeys = gate is None or gate.kind == "reply"
        """Whether the constraint applies to the next token."""
        self._begun = self._obeys and not self._openers
        """Whether the constrained text has begun for good."""
        self._unfinished = np.ones(vocab_size, dtype=np.bool_)
        """Tokens that may come where the constraint doesn't apply yet: those that don't end the text."""
        self._unfinished[[token for token in eos_ids if token < vocab_size]] = False
        self._ahead: _Ahead | None = None

    def allowed(self) -> Mask:
        """(V,) booleans: whether each token may come next. Call `catch_up` first if `is_ready` is false.

        Raises ConstraintError if none may, or if the grammar takes more than its limits allow.
        """
        if not self._obeys:
            return self._unfinished
        ready = self.is_ready()
        assert ready
        self._check()
        assert self._bits is not None
        bits = np.frombuffer(self._bits, dtype=np.uint8)
        mask: Mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)
        if self._digits is not None:
            mask = self._digits.bounded(mask)
        if not self._begun:
            mask[self._openers] = True
        if not mask.any():
            raise ConstraintError("no token of this model continues the text as its constraint wants it")
        return mask

    def is_ready(self) -> bool:
        """Compute the next mask. Returns False if `catch_up` must run before that is possible."""
        if self._obeys and self._bits is None and not self.lags:
            self._bits = self._matcher.compute_bitmask()
        return not self.lags

    @property
    def lags(self) -> bool:
        """Whether limits shared with other texts stopped the matcher, so that `catch_up` has to run."""
        return self._unshared is not None and self._matcher.is_error()

    def catch_up(self) -> Iterator[None]:
        """Follow the text from its beginning with an unshared matcher. Yields between pieces, so that other
        texts may go on.

        Raises ConstraintError if the grammar takes more than its limits allow for this text alone.
        """
        if not self.lags:
            return
        unshared, self._unshared, begun = self._unshared, None, time.monotonic()
        assert unshared is not None
        self._matcher, self._bits, self._ahead, self._looks_ahead = unshared(), None, None, False
        for token in self._taken:
            # With the masks, as the text had them: what a step takes of the limits depends on those before.
            self._matcher.compute_bitmask()
            self._matcher.consume_token(token)
            if self._matcher.is_error():
                break
            if time.monotonic() - begun >= PIECE_SECONDS:
                yield
                begun = time.monotonic()
        self._check()

    def take(self, token: int, text: str) -> None:
        """Follow `token`, which was appended to the text. text: the text that this token completed."""
        self._ahead = self._bits = None
        if self._begun or (self._obeys and token not in self._openers):
            self._begun = True
            self._matcher.consume_token(token)
            self._taken.append(token)
            if self._digits is not None:
                self._digits.take(token)
            if not self.lags:
                self._check()
        elif self._gate is not None:
            self._gate.take(token, text)
            self._obeys = self._gate.kind == "reply"
            self._begun = self._obeys
            if self._gate.kind == "call":
                # A reply may be calls of tools instead, and then ends with them.
                self._unfinished[:] = True

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the text; False if it `lags`, as that is then unknown."""
        return self._begun and not self.lags and self._matcher.is_stopped()

    def proposals(self, path: Sequence[int], propose: Callable[[Sequence[int]], Proposals]) -> Proposals:
        """Draft tokens that may follow the text and the draft tokens `path`.

        If only one token may follow, it is the only proposal, and certain. Otherwise the proposals are those
        of `propose(path)` that are allowed there, or all of them once the grammar's limits are reached.
        """
        if not self._begun or not self._looks_ahead:
            return propose(path)
        if self._ahead is None:
            self._ahead = _Ahead(self._matcher.deep_copy())
        forced = self._ahead.forced(path)
        if forced is not None:
            return [(forced, 1.0)]
        return [(token, chance) for token, chance in propose(path) if self._ahead.allows(path, token)]

    def _check(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error().partition("\n<state>")[0].strip()[:300]
            raise ConstraintError(f"the constraint can't be followed any further: {message}")


class _Ahead:
    """Tests drafts beyond the end of the text with a separate matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._path: list[int] = []
        """Tokens that the matcher has consumed beyond the text."""
        self._forced: dict[tuple[int, ...], int] = {}

    def forced(self, path: Sequence[int]) -> int | None:
        """The only token that may follow `path`, or None."""
        place = tuple(path)
        if place not in self._forced and self._go_to(path):
            for token in self._matcher.compute_ff_tokens():
                self._forced[place] = token
                place = (*place, token)
        return self._forced.get(tuple(path))

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `path`."""
        return self._go_to(path) and self._matcher.validate_tokens([token]) == 1

    def _go_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of `path`. Returns False if the grammar doesn't allow `path`."""
        common = 0
        for taken, wanted in zip(self._path, path, strict=False):
            if taken != wanted:
                break
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        more = list(path[common:])
        self._path += more[: self._matcher.try_consume_tokens(more)]
        return len(self._path) == len(path) and not self._matcher.is_error()
