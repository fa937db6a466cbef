"""The constants of the drafting policy: tokens per second with and without each, on a simulated clock.

Scenarios are chains of draft tokens of one claimed chance, another of being right, and times of passes, nodes
and drafting in plain passes. Each constant is put out of action, or set to another value, alone. Prints the
geometric mean over all scenarios, and the scenarios that change by more than 1 %. Ends with one JSON line.

    python -m tests.benchmarks.explain.drafting_constants [--seeds 6]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from ondevice.speculation import back_off, pass_time, policy
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import DRAFT_NODES, Proposals, Root, grow

NEVER = 10**9
Noise = Callable[[np.random.Generator], float]
Scenario = Callable[["Clock"], None]


def spread(random: np.random.Generator) -> float:
    """Pass times vary by a fifth."""
    return math.exp(0.2 * random.standard_normal())


def outliers(random: np.random.Generator) -> float:
    """One pass in fifty takes thirty times as long."""
    return 30.0 if random.random() < 0.02 else 1.0


class Clock:
    """Passes by a policy, and the tokens and seconds that they gave."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.tokens = 0
        self.seconds = 0.0
        self._policy = TreePolicy(DRAFT_NODES)

    def run(
        self,
        passes: int,
        *,
        claimed: float,
        right: float | None = None,
        plain: float = 1.0,
        node: float = 0.1,
        ask: float = 0.02,
        prepare: float = 0.0,
        noise: Noise = spread,
    ) -> None:
        """Decode.

        Args:
            passes: number of passes.
            claimed: chance of every draft token, by the drafter.
            right: chance that it is right; as claimed where None.
            plain: seconds of a plain pass.
            node: seconds that another node adds.
            ask: seconds of asking the drafter once.
            prepare: seconds of preparing a draft.
            noise: factor of a pass's seconds.
        """
        for _ in range(passes):
            factor = noise(self.random)
            if self._policy.throttle():
                self.tokens += 1
                self.seconds += plain * factor
                continue
            nodes, asked = self._drafted(claimed, ask, prepare)
            tokens = 1
            while tokens < nodes and self.random.random() < (claimed if right is None else right):
                tokens += 1
            drafting = asked * ask + (prepare if asked else 0.0)
            seconds = (plain + node * (nodes - 1)) * factor + drafting
            self._policy.record(nodes, tokens, seconds, drafting)
            self.tokens += tokens
            self.seconds += seconds

    def _drafted(self, claimed: float, ask: float, prepare: float) -> tuple[int, int]:
        """Nodes of the next draft, and how often the drafter was asked."""
        asked = 0

        def propose(path: object) -> Proposals:
            nonlocal asked
            asked += 1
            return [(1, claimed)]

        most = self._policy.begin()
        if most == 1:
            return 1, 0
        self._policy.prepared(prepare)
        adding, asking = self._policy.is_worth_adding, self._policy.is_worth_asking
        (draft,) = grow([Root(0, propose, most, DRAFT_NODES)], adding, most, asking)
        nodes = len(draft)
        self._policy.grown(asked * ask, asked)
        return nodes, asked


def steady(passes: int = 1500, cold: bool = False, **options: Any) -> Scenario:
    """cold: the first pass takes ten times as long."""

    def run(clock: Clock) -> None:
        if cold:
            clock.run(1, **{**options, "plain": 10.0})
        clock.run(passes, **options)

    return run


def filling(passes: int = 300, **options: Any) -> Scenario:
    """The first passes are slower, as memory fills: ten times at first."""

    def run(clock: Clock) -> None:
        for plain in (10.0, 7.0, 4.5, 3.0, 2.0, 1.5):
            clock.run(1, **options, plain=plain)
        clock.run(passes, **options)

    return run


def alternating(one: dict[str, Any], other: dict[str, Any], passes: int = 300) -> Scenario:
    def run(clock: Clock) -> None:
        for _ in range(4):
            for options in (one, other):
                clock.run(int(passes * clock.random.uniform(0.5, 1.5)), **options)

    return run


def catching_up(clock: Clock) -> None:
    """Every hundredth draft takes thirty passes to prepare."""
    for _ in range(8):
        clock.run(99, claimed=0.7)
        clock.run(1, claimed=0.7, prepare=30.0)


GOOD: dict[str, Any] = {"claimed": 0.8, "node": 0.2}
SCENARIOS: dict[str, Scenario] = {
    "good": steady(claimed=0.8),
    "good, outliers": steady(claimed=0.8, noise=outliers),
    "good, 100 passes": steady(100, claimed=0.8),
    "good, 100 passes, cold": steady(100, cold=True, claimed=0.8),
    "fair": steady(claimed=0.5, node=0.25),
    "dear nodes, 100 passes": steady(100, claimed=0.5, node=0.9),
    "dear nodes, 100 passes, cold": steady(100, cold=True, claimed=0.5, node=0.9),
    "overconfident": steady(claimed=0.9, right=0.35, node=0.3),
    "underconfident": steady(claimed=0.2, right=0.8, node=0.3),
    "hopeless, known": steady(claimed=0.05, node=0.3, ask=0.05),
    "hopeless, known, dear nodes": steady(claimed=0.05, node=1.0),
    "hopeless, known, dear asking": steady(claimed=0.05, node=0.3, ask=0.4),
    "hopeless": steady(claimed=0.8, right=0.0, node=0.3),
    "hopeless, 100 passes": steady(100, claimed=0.8, right=0.0, node=0.3),
    "a model drafts": steady(claimed=0.75, ask=0.2),
    "dear preparing": steady(claimed=0.75, ask=0.0, prepare=0.5),
    "dear preparing, hopeless": steady(claimed=0.4, node=0.3, ask=0.0, prepare=0.6),
    "hopeless, known, dear preparing": steady(claimed=0.05, node=0.3, prepare=0.5),
    "text alternates": alternating(GOOD, GOOD | {"right": 0.05}),
    "text alternates, known": alternating(GOOD, GOOD | {"claimed": 0.05}),
    "text alternates, known, dear preparing": alternating(
        GOOD | {"prepare": 0.3}, GOOD | {"claimed": 0.05, "prepare": 0.3}
    ),
    "budget alternates": alternating(GOOD | {"node": 1.0}, GOOD | {"plain": 10.0}, 600),
    "nodes' price alternates": alternating(GOOD | {"node": 0.05}, GOOD | {"node": 1.2}, 600),
    "long catch-ups": catching_up,
    "memory fills": filling(claimed=0.5, node=0.25),
    "memory fills, dear nodes": filling(claimed=0.5, node=0.6),
    "memory fills, good": filling(claimed=0.8),
    "memory fills, overconfident": filling(claimed=0.35, right=0.2, node=0.15),
}
CHANGES: dict[str, tuple[Any, str, float]] = {
    "all of a draft's nodes on trial": (policy, "TRIAL_NODES", DRAFT_NODES),
    "node times never stale": (policy, "STALE_PASSES", NEVER),
    "no throttling": (policy, "MAX_THROTTLED", 1),
    "throttling without limit": (policy, "MAX_THROTTLED", NEVER),
    "drafting's time without limit": (policy, "MAX_DRAFTING", NEVER),
    "EMA weight 0.2": (policy, "EMA_WEIGHT", 0.2),
    "calibration decays by 0.9": (policy, "CALIBRATION_DECAY", 0.9),
    "no calibration": (policy, "CALIBRATION_DECAY", 0.0),
    "back-offs don't double": (back_off, "MAX_BACK_OFF", back_off.MIN_BACK_OFF),
    "back-offs begin with 1,536": (back_off, "MIN_BACK_OFF", back_off.MAX_BACK_OFF),
    "one plain pass at first": (back_off, "FIRST_PLAIN", 1),
    "no plain passes while drafting": (back_off, "FIRST_PLAIN_EVERY", NEVER),
    "plain passes while drafting at long intervals only": (
        back_off,
        "FIRST_PLAIN_EVERY",
        back_off.PLAIN_EVERY,
    ),
    "no slack": (back_off, "SLACK", 0.0),
    "twice the slack": (back_off, "SLACK", 1.0),
    "outliers count": (pass_time, "OUTLIER", NEVER),
    "no rescaling": (pass_time, "IN_A_ROW", NEVER),
    "rescaling after 2": (pass_time, "IN_A_ROW", 2),
    "pass times decay by 0.9": (pass_time, "DECAY", 0.9),
}


def speeds(seeds: int) -> dict[str, float]:
    """Tokens per second by scenario: the geometric mean over seeds."""
    found = {}
    for name, scenario in SCENARIOS.items():
        logs = []
        for seed in range(seeds):
            clock = Clock(seed)
            scenario(clock)
            logs.append(math.log(clock.tokens / clock.seconds))
        found[name] = math.exp(statistics.fmean(logs))
    return found


def main() -> int:
    """Print a line for each change and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    base = speeds(args.seeds)
    rows = {}
    for name, (module, constant, value) in CHANGES.items():
        with ExitStack() as undo:
            undo.enter_context(patch.object(module, constant, value))
            found = speeds(args.seeds)
        ratios = {scenario: found[scenario] / base[scenario] for scenario in SCENARIOS}
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        large = {key: value for key, value in ratios.items() if abs(value - 1) > 0.01}
        shown = ", ".join(f"{key} {large[key]:.2f}" for key in sorted(large, key=lambda key: large[key]))
        print(f"{name} ({constant}): {mean:.3f}; {shown}", flush=True)
        rows[name] = {"constant": constant, "mean": mean, "ratios": ratios}
    print(json.dumps({"benchmark": "drafting_constants", "seeds": args.seeds, "base": base, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
