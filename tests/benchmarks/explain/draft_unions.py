"""Whether drafting on a mixture gains by knowing that tokens share experts: traces, and a simulated clock.

Prints how many experts of a layer 1 to 16 tokens in a row choose together, over those that one chooses, as
two traces of real models have it. Then decodes by the drafting policy, whose pass takes that number, at a
place of the trace drawn for it, times the experts' share of a plain pass, the rest being the same for any
number of tokens: with the policy's own line through measured times; with one through the traces' mean unions
instead of the number of nodes; and with one through the pass's own unions, known beforehand, which is more
than routers' scores could tell. Draft tokens are right as often as their drafter says. Ends with one JSON
line.

    python -m tests.benchmarks.explain.draft_unions [--seeds 4]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ondevice.speculation.pass_time import PassTime
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import DRAFT_NODES
from tests.benchmarks.explain.drafting_constants import Clock
from tests.benchmarks.lib.expert_trace import read_trace

Float64 = NDArray[np.float64]
SHARES = (0.5, 0.8, 0.95)
"""Of a plain pass, what its experts take."""
CHANCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RULES = ("nodes", "mean unions", "own unions")
"""What a pass's time is taken to depend on."""
PASSES = 800
ASKING = 0.01


def unions(name: str) -> Float64:
    """(places, DRAFT_NODES + 1) experts that tokens from a place on choose together, over those of one token:
    the mean of all layers, for each place of the trace's decoding.
    """
    trace = read_trace(name)
    chosen = trace.chosen[trace.prompt :]
    tokens, layers, k = chosen.shape
    found = np.zeros((tokens - DRAFT_NODES, DRAFT_NODES + 1))
    for at, count in product(range(len(found)), range(1, DRAFT_NODES + 1)):
        own = [len(np.unique(chosen[at : at + count, layer])) for layer in range(layers)]
        found[at, count] = np.mean(own) / k
    return found


class UnionTime:
    """As `PassTime`, by the experts that nodes choose together in place of nodes. work: of the next pass."""

    def __init__(self, work: Float64) -> None:
        self.work, self._line = work, PassTime()

    def seconds(self, nodes: int) -> float:
        return self._line.seconds(self.work[nodes])

    def record(self, nodes: int, seconds: float) -> float:
        return self._line.record(self.work[nodes], seconds)

    def __getattr__(self, name: str) -> float:
        found: float = getattr(self._line, name)
        return found


class UnionPolicy(TreePolicy):
    """A policy that takes a node's own time, which is less the more nodes there are."""

    def __init__(self, work: Float64) -> None:
        super().__init__(DRAFT_NODES)
        self._pass_time: Any = UnionTime(work)

    def know(self, work: Float64) -> None:
        """The unions of the next pass."""
        self._pass_time.work = work

    def _pays(self, nodes: int, chance: float, more_seconds: float) -> bool:
        line = self._pass_time
        if nodes < DRAFT_NODES:
            more_seconds += line.seconds(nodes + 1) - line.seconds(nodes) - line.node_seconds
        return super()._pays(nodes, chance, more_seconds)


class UnionClock(Clock):
    """Passes that take the time of the experts that their nodes choose together."""

    def __init__(self, seed: int, policy: TreePolicy, tells: bool) -> None:
        """tells: whether the policy, a `UnionPolicy`, knows what a pass's nodes choose."""
        super().__init__(seed)
        self._policy = policy
        self._tells = tells

    def decode(self, chance: float, share: float, places: Float64) -> float:
        """Tokens per plain pass's time."""
        for _ in range(PASSES):
            work = places[self.random.integers(len(places))]
            if self._tells:
                assert isinstance(self._policy, UnionPolicy)
                self._policy.know(work)
            factor = math.exp(0.2 * self.random.standard_normal())
            if self._policy.throttle():
                self.tokens, self.seconds = self.tokens + 1, self.seconds + factor
                continue
            nodes, asked = self._drafted(chance, ASKING, 0.0)
            tokens = 1
            while tokens < nodes and self.random.random() < chance:
                tokens += 1
            seconds = (1 + share * float(work[nodes] - 1)) * factor + asked * ASKING
            self._policy.record(nodes, tokens, seconds, asked * ASKING)
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        return self.tokens / self.seconds


def mean_speed(places: Float64, chance: float, share: float, seeds: int, by: str) -> float:
    """Tokens per plain pass's time, the geometric mean over seeds. by: one of RULES."""
    rates = []
    for seed in range(seeds):
        policy = TreePolicy(DRAFT_NODES) if by == "nodes" else UnionPolicy(places.mean(axis=0))
        rates.append(UnionClock(seed, policy, by == "own unions").decode(chance, share, places))
    return statistics.geometric_mean(rates)


def main() -> int:
    """Print the unions, a line for each case and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("qwen", "gptoss"):
        places = unions(name)
        work = places.mean(axis=0)
        print(f"{name}: experts of 1 to {DRAFT_NODES} tokens:", " ".join(f"{it:.2f}" for it in work[1:]))
        for share, chance in product(SHARES, CHANCES):
            speeds = {by: mean_speed(places, chance, share, args.seeds, by) for by in RULES}
            rows.append({"trace": name, "share": share, "chance": chance, "speeds": speeds})
            found = ", ".join(f"by {by} {speed:.3f}" for by, speed in speeds.items())
            print(f"  {share:.0%} experts, {chance:.0%} right: {found}")
    means = {}
    for by in RULES[1:]:
        ratios = [row["speeds"][by] / row["speeds"]["nodes"] for row in rows]
        means[by] = statistics.geometric_mean(ratios)
        print(f"by {by} over by nodes: {means[by]:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(json.dumps({"benchmark": "draft_unions", "means": means, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
