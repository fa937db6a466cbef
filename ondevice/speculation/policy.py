"""How large a draft is: expected tokens per second, by what passes of its size have lately taken.

A further node is worth its place while the tokens that it is expected to add outweigh the time that it adds,
and asking for guesses is while one that is sure to be right would. `Switch` says whether to draft at all.
"""

from __future__ import annotations

from ondevice.speculation.pass_time import PassTime
from ondevice.speculation.switch import Switch

TRIAL_NODES = 4
"""Most of a draft while drafts are tried."""
FIRST_DRAFTS, STALE_PASSES = 6, 192
"""Drafts before what nodes take is taken as known, and passes without a draft after which it no longer is:
the next has a few guesses whatever they take, to find out."""
LEAST_CHANCE = 0.1
"""Of such a guess: what is less likely isn't worth any time that it could take."""
QUIET_COST, MOST_PAUSE = 0.005, 16
"""Where looking for guesses doesn't pay for itself it may cost this part of the time: it is done in one pass
of several, at most 16."""
DRAFTING_SHARE = 0.15
"""A pass without a guess counts as one with a draft where looking for guesses took this part of it."""
MOST_DRAFTING = 3.0
"""Looking for guesses counts as at most so many plain passes."""
MOST_ROW_SHARE = 0.3
"""A guess that takes more of a plain pass has neurons read."""
TIME_WEIGHT, GAIN_WEIGHT = 0.1, 0.2
"""Of the newest pass in the running means: of what looking takes, and of what it brings."""
HONESTY_DECAY, HONESTY_PRIOR = 0.98, 8.0
"""Of guesses that were right and that were to be, and how many of each are assumed at first."""
MOST_HONESTY = 2.0
"""Chances are corrected by at most this factor, either way."""


class TreePolicy:
    """One model's: sessions share what its passes take."""

    def __init__(self, most_nodes: int) -> None:
        """most_nodes: of a draft, its root included: what there is scratch memory for."""
        self._most_nodes = most_nodes
        self._pass_time = PassTime()
        self._switch = Switch()
        self._propose_seconds = self._looking_seconds = 0.0
        """What asking a drafter once has lately taken, and what looking for guesses has in a pass."""
        self._gain = 1.0
        """Speed that looking for guesses is expected to have brought lately, over plain decoding."""
        self._right = self._claimed = HONESTY_PRIOR
        """Guesses that were right, and that drafters' chances said would be, lately."""
        self._drafts = self._plain_in_a_row = self._paused = 0
        self._mean_nodes = 0.0
        """Of the last drafts."""
        self._finding_out = False
        self._expected = 1.0
        """Tokens that the draft that grows is expected to bring, its root's own included."""
        self._claims = 0.0
        """Those of them that are guesses, as drafters have it."""
        self._drafting_seconds = 0.0
        """What that draft has taken so far."""

    @property
    def plain_seconds(self) -> float:
        """What a pass without guesses has lately taken; 0 before any."""
        return self._pass_time.plain_seconds

    @property
    def row_share(self) -> float:
        """Of a plain pass, what another row in it takes, as far as it is computing and not reading."""
        plain = self._pass_time.plain_seconds
        return min(MOST_ROW_SHARE, self._pass_time.guess_seconds / plain) if plain else 0.0

    @property
    def resting(self) -> bool:
        """Whether drafts are out of the question for a while."""
        return self._switch.resting

    @property
    def quiet(self) -> bool:
        """Whether looking for guesses has lately not paid for itself."""
        return self.resting or self._gain < 1

    @property
    def decision(self) -> str:
        """Whether drafts are made, and why, for people."""
        plain = self._pass_time.plain_seconds
        if not self._drafts:
            return "no drafts: no guess was likely enough" if plain else "no drafts: no pass has been timed"
        cost = (
            f"a guess takes {100 * self._pass_time.guess_seconds / plain:.0f} % of a plain pass of "
            f"{1e3 * plain:.2f} ms"
        )
        if self.resting:
            lost = self._switch.lost
            return f"drafts rest: they gave {lost:.2f} times the tokens per second of plain decoding; {cost}"
        if self.quiet:
            return f"few drafts: what is guessed is seldom likely enough; {cost}"
        return f"drafts of {self._mean_nodes:.1f} tokens; {cost}"

    def pause(self) -> bool:
        """Whether the next pass goes without looking for guesses, and isn't recorded."""
        if not self.quiet:
            return False
        self._paused += 1
        saved = self._paused * QUIET_COST * self._pass_time.plain_seconds
        if saved >= self._looking_seconds or self._paused == MOST_PAUSE:
            self._paused = 0
            return False
        self._plain_in_a_row += 1
        self._switch.pause()
        return True

    def begin(self) -> int:
        """A pass is about to be. Returns how many nodes its draft may have, the root included."""
        self._expected, self._claims, self._drafting_seconds = 1.0, 0.0, 0.0
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
        self._expected += min(1.0, chance * self._honesty)
        self._claims += chance
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

        seconds: with drawing its tokens, and with drafting_seconds: looking for guesses and learning.
        """
        pass_seconds = self._pass_time.record(nodes, seconds - drafting_seconds)
        plain_seconds = self._pass_time.plain_seconds
        if self._pass_time.scale != 1.0:
            self._switch.rescale(self._pass_time.scale)
        # Catching up with a long text is done once: it isn't what drafting takes.
        drafting_seconds = min(drafting_seconds, MOST_DRAFTING * plain_seconds)
        self._looking_seconds += TIME_WEIGHT * (drafting_seconds - self._looking_seconds)
        gain = self._expected * plain_seconds / (self._pass_time.seconds(nodes) + drafting_seconds)
        self._gain += GAIN_WEIGHT * (gain - self._gain)
        if nodes > 1:
            self._right = HONESTY_DECAY * self._right + tokens - 1
            self._claimed = HONESTY_DECAY * self._claimed + self._claims
        if nodes > 1 or drafting_seconds > DRAFTING_SHARE * pass_seconds:
            self._switch.record_draft(tokens, pass_seconds + drafting_seconds)
        else:
            self._switch.record_plain(pass_seconds)
        if nodes > 1:
            self._drafts += 1
            self._mean_nodes += max(GAIN_WEIGHT, 1 / self._drafts) * (nodes - self._mean_nodes)
        self._plain_in_a_row = 0 if nodes > 1 else self._plain_in_a_row + 1

    @property
    def _honesty(self) -> float:
        """How much likelier guesses are than drafters say."""
        ratio = (self._right + 1) / (self._claimed + 1)
        return min(MOST_HONESTY, max(1 / MOST_HONESTY, ratio))

    @property
    def _trying(self) -> bool:
        return self._finding_out or self._switch.trial

    def _pays(self, nodes: int, chance: float, more_seconds: float) -> bool:
        if self._finding_out:
            return chance >= LEAST_CHANCE
        seconds = self._pass_time.seconds(nodes) + self._drafting_seconds
        return min(1.0, chance * self._honesty) * seconds > self._expected * more_seconds
