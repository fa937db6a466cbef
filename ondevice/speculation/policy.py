"""How large a draft is: expected tokens per second, by what passes of its size have lately taken.

A further node is worth its place while the tokens that it is expected to add outweigh the time that it adds,
and asking for guesses is while one that is sure to be right would. `Switch` says whether to draft at all.
"""

from __future__ import annotations

from ondevice.speculation.pass_time import PassTime
from ondevice.speculation.switch import Switch

TRIAL_NODES = 4
"""Most of a draft while drafts are tried."""
FIRST_DRAFTS, STALE_PASSES = 2, 512
"""Drafts before what nodes take is taken as known, and passes without a draft after which it no longer is:
the next has a few guesses whatever they take, to find out."""
LEAST_CHANCE = 0.1
"""Of such a guess: what is less likely isn't worth any time that it could take."""
QUIET_PASSES = 8
"""So many passes in a row without a guess: nothing is in sight."""
QUIET_COST, MOST_PAUSE = 0.01, 8
"""Then looking for guesses may cost this part of the time: it is done in one pass of several, at most 8."""
DRAFTING_SHARE = 0.05
"""A pass without a guess counts as one with a draft where looking for guesses took this part of it."""
TIME_WEIGHT = 0.1
"""Of the newest time that asking for guesses took, in its running mean."""


class TreePolicy:
    """One model's: sessions share what its passes take."""

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of a draft, its root included: what there is working memory for."""
        self._most_nodes = most_nodes
        self._pass_time = PassTime()
        self._switch = Switch()
        self._propose_seconds = 0.0
        """What asking a drafter once has lately taken."""
        self._asking_seconds = 0.0
        """What looking for guesses has lately taken in a pass."""
        self._drafts = self._plain_in_a_row = self._paused = 0
        self._finding_out = False
        self._expected = 1.0
        """Tokens that the draft that grows is expected to bring, its root's own included."""
        self._drafting_seconds = 0.0
        """What that draft has taken so far."""

    @property
    def resting(self) -> bool:
        """Whether drafts are out of the question for a while."""
        return self._switch.resting

    @property
    def quiet(self) -> bool:
        """Whether nothing has lately been worth a guess."""
        return self.resting or self._plain_in_a_row >= QUIET_PASSES

    def pause(self) -> bool:
        """Whether the next pass goes without looking for guesses, and isn't recorded: nothing is in sight.

        Around them, finding out and keeping accounts take longer than the look itself; twice that is assumed.
        """
        if not self.quiet:
            return False
        cost = 2 * self._asking_seconds
        self._paused += 1
        saved = self._paused * QUIET_COST * self._pass_time.plain_seconds
        if saved >= cost or self._paused == MOST_PAUSE:
            self._paused = 0
            return False
        self._plain_in_a_row += 1
        self._switch.pause()
        return True

    def begin(self) -> int:
        """A pass is about to be. Returns how many nodes its draft may have, the root included."""
        self._expected, self._drafting_seconds = 1.0, 0.0
        if not self._switch.on:
            return 1
        self._finding_out = self._drafts < FIRST_DRAFTS or self._plain_in_a_row >= STALE_PASSES
        return min(TRIAL_NODES, self._most_nodes) if self._trying else self._most_nodes

    def prepared(self, seconds: float) -> None:
        """Preparing the draft took so long."""
        self._drafting_seconds += seconds

    def worth(self, nodes: int, chance: float) -> bool:
        """Whether a draft of `nodes` should get another, which is accepted with that chance."""
        if not self._pays(nodes, chance, self._pass_time.guess_seconds):
            return False
        self._expected += chance
        return True

    def promising(self, nodes: int, chance: float) -> bool:
        """Whether to ask what follows a node that is accepted with that chance, in a draft of `nodes`."""
        if not self._pays(nodes, chance, self._pass_time.guess_seconds + self._propose_seconds):
            return False
        self._drafting_seconds += self._propose_seconds
        return True

    def grown(self, seconds: float, proposals: int) -> None:
        """Growing the draft, once prepared, took so long: a drafter was asked so many times."""
        if proposals:
            self._propose_seconds += TIME_WEIGHT * (seconds / proposals - self._propose_seconds)

    def record(self, nodes: int, tokens: int, seconds: float, drafting_seconds: float = 0.0) -> None:
        """A pass over so many nodes, that gave so many tokens, took so long.

        seconds: with drawing its tokens, and with drafting_seconds, what looking for guesses took.
        """
        pass_seconds = seconds - drafting_seconds
        if drafting_seconds:
            self._asking_seconds += TIME_WEIGHT * (drafting_seconds - self._asking_seconds)
        if nodes > 1 or drafting_seconds > DRAFTING_SHARE * seconds:
            expected = self._pass_time.seconds(nodes) + drafting_seconds
            self._switch.record_draft(tokens, seconds, expected)
        else:
            self._switch.record_plain(pass_seconds)
        self._pass_time.record(nodes, pass_seconds)
        self._drafts += nodes > 1
        self._plain_in_a_row = 0 if nodes > 1 else self._plain_in_a_row + 1

    @property
    def _trying(self) -> bool:
        return self._finding_out or self._switch.trial

    def _pays(self, nodes: int, chance: float, more_seconds: float) -> bool:
        if self._finding_out:
            return chance >= LEAST_CHANCE
        seconds = self._pass_time.seconds(nodes) + self._drafting_seconds
        return chance * seconds > self._expected * more_seconds
