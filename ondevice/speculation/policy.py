"""Chooses the sizes of drafts so that all texts together get the most tokens per second, judged by recent
passes.

A node is added as long as the tokens expected from it are worth its time. The drafter is called as long as
they are also worth the time of the call. `BackOff` decides whether to draft at all.
"""

from __future__ import annotations

from ondevice.speculation.back_off import BackOff
from ondevice.speculation.pass_time import PassTime

TRIAL_NODES = 4
"""Maximum nodes of a draft on trial. Without it, short texts with expensive nodes are 41 % slower."""
STALE_PASSES = 192
"""Passes without a draft after which the next draft measures the time of a node anew.

Without it, text is up to 38 % slower after a change of the budget.
"""
THROTTLE_SHARE = 0.005
"""Largest share of the time spent on looking for draft tokens while that doesn't pay.

Without throttling, text that is unpredictable at times is 9 % slower if preparing a draft is expensive.
"""
MAX_THROTTLED = 16
"""Longest interval between passes that look for draft tokens while that doesn't pay, in passes.

Without it, such text is 3 % slower, as drafts begin too late once it is predictable again.
"""
MAX_DRAFTING = 3.0
"""Largest drafting time of a pass that counts, in plain passes.

Without it, catching up with a long text every 100 passes slows the others by 23 %.
"""
MAX_ROW_SHARE = 0.3
"""Largest computing time of a row, in plain passes. A node that takes more time causes reads of neurons.

Measured, a node takes up to 0.24 if nothing is read, and 0.6 if neurons are (docs/benchmarks.md).
"""
EMA_WEIGHT = 0.1
"""EMA weight of the newest pass, in the means of the time and gain of looking for draft tokens."""
CALIBRATION_DECAY = 0.98
"""Decay of the calibration's history with every draft."""
CALIBRATION_PRIOR = 8.0
"""Prior of the calibration: accepted draft tokens, and as many expected ones."""


class TreePolicy:
    """Decides how large drafts are, in passes of one model over a given number of texts.

    The drafts of a pass count as one: the likeliest node of any text is added, as long as that gives all
    texts together more tokens per second.
    """

    def __init__(self, max_nodes: int, texts: int = 1) -> None:
        """max_nodes: most nodes of a pass for which there is scratch memory, roots included.

        texts: number of texts that share the passes.
        """
        self._max_nodes = max_nodes
        self._texts = texts
        self._pass_time = PassTime(texts)
        self._back_off = BackOff()
        self._propose_seconds = 0.0
        """Mean seconds of one question to the drafter."""
        self._compute_seconds = 0.0
        """Mean seconds of one forward pass of the drafter's."""
        self._drafting_mean = 0.0
        """Mean seconds of drafting in a pass."""
        self._gain = 1.0
        """Mean expected speed of recent passes that looked for draft tokens, relative to plain decoding."""
        self._accepted = CALIBRATION_PRIOR
        self._claimed = CALIBRATION_PRIOR
        """Decayed sums: of accepted draft tokens, and of the chances that the drafter gave draft tokens."""
        self._drafts = 0
        self._plain_in_a_row = 0
        self._throttled = 0
        """Consecutive throttled passes."""
        self._mean_nodes = 0.0
        """Mean nodes of recent passes with drafts."""
        self._remeasures = False
        """Whether the growing draft must measure the time of a node, even if it doesn't pay."""
        self._expected = float(texts)
        """Number of tokens that the growing draft is expected to give, with those drawn after its roots."""
        self._claims = 0.0
        """Number of accepted draft tokens that the drafter's chances promise for the growing draft."""
        self._drafting_seconds = 0.0
        """Seconds spent on the growing draft so far."""

    @property
    def plain_seconds(self) -> float:
        """Expected seconds of a plain pass; 0 before any pass."""
        return self._pass_time.plain_seconds

    @property
    def row_share(self) -> float:
        """The computing time that one more row adds to a pass, as a share of a plain pass."""
        plain = self._pass_time.plain_seconds
        return min(MAX_ROW_SHARE, self._pass_time.node_seconds / plain) if plain else 0.0

    @property
    def is_backing_off(self) -> bool:
        """Whether the next passes go without a draft."""
        return self._back_off.is_active

    @property
    def is_throttling(self) -> bool:
        """Whether looking for draft tokens hasn't paid recently."""
        return self.is_backing_off or self._gain < 1

    @property
    def decision(self) -> str:
        """A sentence on whether drafts are made, and why."""
        plain = self._pass_time.plain_seconds
        if not self._drafts:
            return "no drafts: no draft token was likely enough" if plain else "no drafts: no pass was timed"
        share = 100 * self._pass_time.node_seconds / plain
        cost = f"a draft token takes {share:.0f} % of a plain pass of {1e3 * plain:.2f} ms"
        if self._texts > 1:
            cost += f" over {self._texts} texts"
        if self.is_backing_off:
            lost = self._back_off.lost
            return f"drafts back off: they gave {lost:.2f} times plain decoding's tokens per second; {cost}"
        if self.is_throttling:
            return f"few drafts: draft tokens are seldom likely enough; {cost}"
        return f"drafts of {self._mean_nodes / self._texts:.1f} tokens; {cost}"

    def throttle(self) -> bool:
        """Whether the next pass runs without looking for draft tokens. Such a pass isn't recorded."""
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
        """Begin a pass. Returns the most nodes that it may have, including roots."""
        self._expected = float(self._texts)
        self._claims = 0.0
        self._drafting_seconds = 0.0
        if not self._back_off.allows_draft:
            return self._texts
        self._remeasures = self._plain_in_a_row >= STALE_PASSES
        is_small = self._remeasures or self._back_off.is_on_trial
        return min(self._texts - 1 + TRIAL_NODES, self._max_nodes) if is_small else self._max_nodes

    def prepared(self, seconds: float) -> None:
        """Record that preparing the draft took `seconds`."""
        self._drafting_seconds += seconds

    def is_worth_adding(self, nodes: int, chance: float) -> bool:
        """Whether a pass of `nodes` nodes should get another, which is reached with probability `chance`."""
        if not self._pays(nodes, chance, self._pass_time.node_seconds):
            return False
        self._expected += min(1.0, chance * self._calibration)
        self._claims += chance
        return True

    def is_worth_asking(self, nodes: int, chance: float) -> bool:
        """Whether the drafter should be called for a node that is reached with probability `chance`.

        nodes: number of nodes in the pass so far.
        """
        return self._may_take(self._propose_seconds, nodes, chance)

    def is_worth_computing(self, nodes: int, chance: float) -> bool:
        """Whether the drafter should run a forward pass, which would add `chance` to the probability of
        reaching a further token.

        nodes: number of nodes in the pass so far.
        """
        return self._may_take(self._compute_seconds, nodes, chance)

    def _may_take(self, seconds: float, nodes: int, chance: float) -> bool:
        """Whether `seconds` of drafting pay for a node that is reached with `chance`. If so, they count as
        spent.
        """
        if not self._pays(nodes, chance, self._pass_time.node_seconds + seconds):
            return False
        self._drafting_seconds += seconds
        return True

    def grown(self, seconds: float, propose_calls: int) -> None:
        """Record that growing the draft took `seconds`, with `propose_calls` calls of the drafter."""
        if propose_calls:
            self._propose_seconds += EMA_WEIGHT * (seconds / propose_calls - self._propose_seconds)

    def computed(self, seconds: float, passes: int) -> None:
        """Record that the drafter ran `passes` forward passes for the draft, in `seconds`."""
        if passes:
            weight = EMA_WEIGHT if self._compute_seconds else 1.0
            self._compute_seconds += weight * (seconds / passes - self._compute_seconds)

    def record(self, nodes: int, tokens: int, seconds: float, drafting_seconds: float = 0.0) -> None:
        """Record a pass over `nodes` nodes, which gave all texts together `tokens` tokens.

        seconds: time of the pass, including the drawing of tokens and `drafting_seconds`.
        drafting_seconds: time of the drafter.
        """
        pass_seconds = self._pass_time.record(nodes, seconds - drafting_seconds)
        plain_seconds = self._pass_time.plain_seconds
        if self._pass_time.scale != 1.0:
            self._back_off.rescale(self._pass_time.scale)
        # Catching up with a long text happens once, so most of its time doesn't count as drafting's.
        drafting_seconds = min(drafting_seconds, MAX_DRAFTING * plain_seconds)
        self._drafting_mean += EMA_WEIGHT * (drafting_seconds - self._drafting_mean)
        seconds = self._pass_time.seconds(nodes) + drafting_seconds
        gain = self._expected / self._texts * plain_seconds / seconds
        self._gain += EMA_WEIGHT * (gain - self._gain)
        if nodes == self._texts:
            self._back_off.record_plain(pass_seconds)
            self._plain_in_a_row += 1
            return
        self._back_off.record_draft(tokens / self._texts, pass_seconds + drafting_seconds)
        self._accepted = CALIBRATION_DECAY * self._accepted + tokens - self._texts
        self._claimed = CALIBRATION_DECAY * self._claimed + self._claims
        self._drafts += 1
        self._mean_nodes += max(EMA_WEIGHT, 1 / self._drafts) * (nodes - self._mean_nodes)
        self._plain_in_a_row = 0

    @property
    def _calibration(self) -> float:
        """How many times likelier draft tokens are than the drafter's chances say."""
        return (self._accepted + 1) / (self._claimed + 1)

    def _pays(self, nodes: int, chance: float, more_seconds: float) -> bool:
        """Whether a draft token with probability `chance` is worth `more_seconds`, added to a draft of
        `nodes` nodes.
        """
        if self._remeasures:
            return True
        seconds = self._pass_time.seconds(nodes) + self._drafting_seconds
        return min(1.0, chance * self._calibration) * seconds > self._expected * more_seconds
