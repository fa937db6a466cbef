"""Whether drafting on a mixture gains by knowing that tokens share experts: traces, and a simulated clock.

Prints how many experts of a layer 1 to 16 tokens in a row choose together, over those that one chooses, as
two traces of real models have it. Then decodes by the drafting policy, whose pass takes that number times the
experts' share of a plain pass, the rest being the same for any number of tokens: with the policy's own line
through measured times, and with one through the traces' unions instead of the number of nodes. Draft tokens
are right as often as their drafter says. Ends with one JSON line.

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
PASSES = 800
ASKING = 0.01


def unions(name: str) -> Float64:
    """(DRAFT_NODES + 1,) experts that as many tokens choose together over those of one, from decoding."""
    trace = read_trace(name)
    chosen = trace.chosen[trace.prompt :]
    tokens, layers, k = chosen.shape
    found = np.zeros(DRAFT_NODES + 1)
    for count in range(1, DRAFT_NODES + 1):
        starts = product(range(tokens - count), range(layers))
        found[count] = np.mean([len(np.unique(chosen[at : at + count, layer])) for at, layer in starts]) / k
    return found


class UnionTime:
    """As `PassTime`, by the experts that nodes choose together in place of nodes."""

    def __init__(self, work: Float64) -> None:
        self._work, self._line = work, PassTime()

    def seconds(self, nodes: int) -> float:
        return self._line.seconds(self._work[nodes])

    def record(self, nodes: int, seconds: float) -> float:
        return self._line.record(self._work[nodes], seconds)

    def __getattr__(self, name: str) -> float:
        found: float = getattr(self._line, name)
        return found


class UnionPolicy(TreePolicy):
    """A policy that takes a node's own time, which is less the more nodes there are."""

    def __init__(self, work: Float64) -> None:
        super().__init__(DRAFT_NODES)
        self._pass_time: Any = UnionTime(work)

    def _pays(self, nodes: int, chance: float, more_seconds: float) -> bool:
        line = self._pass_time
        if nodes < DRAFT_NODES:
            more_seconds += line.seconds(nodes + 1) - line.seconds(nodes) - line.node_seconds
        return super()._pays(nodes, chance, more_seconds)


class UnionClock(Clock):
    """Passes that take the time of the experts that their nodes choose together."""

    def __init__(self, seed: int, policy: TreePolicy) -> None:
        super().__init__(seed)
        self._policy = policy

    def decode(self, chance: float, share: float, work: Float64) -> float:
        """Tokens per plain pass's time."""
        for _ in range(PASSES):
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


def main() -> int:
    """Print the unions, a line for each case and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    rows = []
    for name in ("qwen", "gptoss"):
        work = unions(name)
        print(f"{name}: experts of 1 to {DRAFT_NODES} tokens:", " ".join(f"{it:.2f}" for it in work[1:]))
        for share, chance in product(SHARES, CHANCES):
            speeds = []
            for policy in (lambda: TreePolicy(DRAFT_NODES), lambda work=work: UnionPolicy(work)):
                clocks = [UnionClock(seed, policy()) for seed in range(args.seeds)]
                rates = [clock.decode(chance, share, work) for clock in clocks]
                speeds.append(statistics.geometric_mean(rates))
            rows.append({"trace": name, "share": share, "chance": chance, "speeds": speeds})
            print(f"  {share:.0%} experts, {chance:.0%} right: {speeds[0]:.3f}, by unions {speeds[1]:.3f}")
    ratios = [row["speeds"][1] / row["speeds"][0] for row in rows]
    mean = statistics.geometric_mean(ratios)
    print(f"by unions over by nodes: {mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    print(json.dumps({"benchmark": "draft_unions", "mean": mean, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
