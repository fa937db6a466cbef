"""How large a draft is: expected tokens per second, by the time of recent passes.

A node is added while the tokens that it is expected to give outweigh the time that it takes. The drafter is
asked while they would outweigh the time of asking, too. `BackOff` says whether to draft at all.
"""

from __future__ import annotations

from ondevice.speculation.back_off import BackOff
from ondevice.speculation.pass_time import PassTime

TRIAL_NODES = 4
"""Maximum nodes of a draft on trial. Without it, short texts with dear nodes are a third slower."""
STALE_PASSES = 192
"""Passes without a draft after which the next draft measures the time of a node anew.

Without it, text is a quarter slower after a budget has changed.
"""
THROTTLE_SHARE = 0.005
"""Share of the time that looking for draft tokens may take while it doesn't pay.

Without throttling, text that is hopeless at times is a tenth slower where preparing a draft is dear.
"""
MAX_THROTTLED = 16
"""Limit of the interval between passes that look for draft tokens while it doesn't pay, in passes.

Without it, such text is 3 % slower: drafts are found too late where it is hopeful again.
"""
MAX_DRAFTING = 3.0
"""Limit of a pass's time spent on drafting, in plain passes.

Without it, catching up with a long text every 100 passes slows the others by a fifth.
"""
MAX_ROW_SHARE = 0.3
"""Limit of the time that a row computes, in plain passes: a node that takes more has neurons read.

Measured, a node takes up to 0.24 where nothing is read and 0.6 where neurons are (docs/benchmarks.md).
"""
EMA_WEIGHT = 0.1
"""EMA weight of the newest pass, in the means of what looking for draft tokens takes and brings."""
CALIBRATION_DECAY = 0.98
"""Decay of the calibration's history with every draft."""
CALIBRATION_PRIOR = 8.0
"""Accepted draft tokens that the calibration begins with, all of them expected."""


class TreePolicy:
    """One model's: what its passes take is the same for all texts."""

    def __init__(self, max_nodes: int) -> None:
        """max_nodes: of a draft, its root included: what there is scratch memory for."""
        self._max_nodes = max_nodes
        self._pass_time = PassTime()
        self._back_off = BackOff()
        self._propose_seconds = 0.0
        """Mean seconds of asking the drafter once."""
        self._drafting_mean = 0.0
        """Mean seconds of drafting in a pass."""
        self._gain = 1.0
        """Mean expected speed of recent passes that looked for draft tokens, over plain decoding's."""
        self._accepted = CALIBRATION_PRIOR
        self._claimed = CALIBRATION_PRIOR
        """Decayed sums of accepted draft tokens, and of the drafter's chances for them."""
        self._drafts = 0
        self._plain_in_a_row = 0
        self._throttled = 0
        """Consecutive throttled passes."""
        self._mean_nodes = 0.0
        """Mean nodes of recent drafts."""
        self._remeasures = False
        """Whether the growing draft is to measure the time of a node, at whatever cost."""
        self._expected = 1.0
        """Tokens that the growing draft is expected to give, its root's own included."""
        self._claims = 0.0
        """Accepted draft tokens among them, by the drafter's chances."""
        self._drafting_seconds = 0.0
        """Seconds that the growing draft has taken so far."""

    @property
    def plain_seconds(self) -> float:
        """Recent seconds of a plain pass; 0 before any."""
        return self._pass_time.plain_seconds

    @property
    def row_share(self) -> float:
        """Time that another row adds to a pass by computing, as a share of a plain pass."""
        plain = self._pass_time.plain_seconds
        return min(MAX_ROW_SHARE, self._pass_time.node_seconds / plain) if plain else 0.0

    @property
    def is_backing_off(self) -> bool:
        """Whether the next passes go without a draft."""
        return self._back_off.is_active

    @property
    def is_throttling(self) -> bool:
        """Whether looking for draft tokens has lately not paid."""
        return self.is_backing_off or self._gain < 1

    @property
    def decision(self) -> str:
        """Whether drafts are made, and why, for people."""
        plain = self._pass_time.plain_seconds
        if not self._drafts:
            return "no drafts: no draft token was likely enough" if plain else "no drafts: no pass was timed"
        share = 100 * self._pass_time.node_seconds / plain
        cost = f"a draft token takes {share:.0f} % of a plain pass of {1e3 * plain:.2f} ms"
        if self.is_backing_off:
            lost = self._back_off.lost
            return f"drafts back off: they gave {lost:.2f} times plain decoding's tokens per second; {cost}"
        if self.is_throttling:
            return f"few drafts: draft tokens are seldom likely enough; {cost}"
        return f"drafts of {self._mean_nodes:.1f} tokens; {cost}"

    def throttle(self) -> bool:
        """Whether the next pass goes without looking for draft tokens, and isn't recorded."""
        if not self.is_throttling:
            return False
        self._throttled += 1
        saved = self._throttled * THROTTLE_SHARE * self._pass_time.plain_seconds
        if saved >= self._drafting_mean or self._throttled == MAX_THROTTLED:
            self._throttled = 0
            return False
        self._plain_in_a_row += 1
        self._back_off.record_untimed()
        return True

    def begin(self) -> int:
        """A pass begins. Returns the maximum nodes of its draft, the root included."""
        self._expected = 1.0
        self._claims = 0.0
        self._drafting_seconds = 0.0
        if not self._back_off.allows_draft:
            return 1
        self._remeasures = self._plain_in_a_row >= STALE_PASSES
        is_small = self._remeasures or self._back_off.is_on_trial
        return min(TRIAL_NODES, self._max_nodes) if is_small else self._max_nodes

    def prepared(self, seconds: float) -> None:
        """Preparing the draft took `seconds`."""
        self._drafting_seconds += seconds

    def is_worth_adding(self, nodes: int, chance: float) -> bool:
        """Whether a draft of `nodes` should get another, which is reached with `chance`."""
        if not self._pays(nodes, chance, self._pass_time.node_seconds):
            return False
        self._expected += min(1.0, chance * self._calibration)
        self._claims += chance
        return True

    def is_worth_asking(self, nodes: int, chance: float) -> bool:
        """Whether, in a draft of `nodes`, to ask what follows a node that is reached with `chance`."""
        if not self._pays(nodes, chance, self._pass_time.node_seconds + self._propose_seconds):
            return False
        self._drafting_seconds += self._propose_seconds
        return True

    def grown(self, seconds: float, asked: int) -> None:
        """Growing the draft, once prepared, took `seconds`, with the drafter asked `asked` times."""
        if asked:
            self._propose_seconds += EMA_WEIGHT * (seconds / asked - self._propose_seconds)

    def record(self, nodes: int, tokens: int, seconds: float, drafting_seconds: float = 0.0) -> None:
        """A pass over `nodes` gave `tokens` in `seconds`.

        seconds: with drawing the tokens, and with drafting_seconds, which are the drafter's.
        """
        pass_seconds = self._pass_time.record(nodes, seconds - drafting_seconds)
        plain_seconds = self._pass_time.plain_seconds
        if self._pass_time.scale != 1.0:
            self._back_off.rescale(self._pass_time.scale)
        # Catching up with a long text happens once, and is no part of what drafting takes.
        drafting_seconds = min(drafting_seconds, MAX_DRAFTING * plain_seconds)
        self._drafting_mean += EMA_WEIGHT * (drafting_seconds - self._drafting_mean)
        gain = self._expected * plain_seconds / (self._pass_time.seconds(nodes) + drafting_seconds)
        self._gain += EMA_WEIGHT * (gain - self._gain)
        if nodes == 1:
            self._back_off.record_plain(pass_seconds)
            self._plain_in_a_row += 1
            return
        self._back_off.record_draft(tokens, pass_seconds + drafting_seconds)
        self._accepted = CALIBRATION_DECAY * self._accepted + tokens - 1
        self._claimed = CALIBRATION_DECAY * self._claimed + self._claims
        self._drafts += 1
        self._mean_nodes += max(EMA_WEIGHT, 1 / self._drafts) * (nodes - self._mean_nodes)
        self._plain_in_a_row = 0

    @property
    def _calibration(self) -> float:
        """Factor by which draft tokens are likelier than the drafter's chances say."""
        return (self._accepted + 1) / (self._claimed + 1)

    def _pays(self, nodes: int, chance: float, more_seconds: float) -> bool:
        """Whether a token with `chance` is worth `more_seconds` on a draft of `nodes`."""
        if self._remeasures:
            return True
        seconds = self._pass_time.seconds(nodes) + self._drafting_seconds
        return min(1.0, chance * self._calibration) * seconds > self._expected * more_seconds
