"""Hit rates of a cache of experts on a model's own routing, by size: does the policy pay beyond its traces?

The constants of `ExpertReuse` were chosen on two recorded routings (`expert_replay.py`). Here a small mixture
that was trained on text reads held-out text, in one context of each kind, and in one whose kind changes every
few hundred tokens. What its routers chose is replayed: by LRU and LFU as `expert_replay.py` has them, by our
policy in the runtime's cache, and by Belady's, which knows the future. Sizes are shares of all experts.
Prints a table for each text and one JSON line; exits 0 only if ours hits at least as often as the others
where less than half of the experts fit, and not much less above: there the slow counts of LFU can be better.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

from ondevice.backends.base import Float32, Int32
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.replay import Optimum
from tests.benchmarks.compare.expert_replay import SOURCE_POLICIES, WithoutForecast, rate, source_rate
from tests.benchmarks.lib.expert_trace import RoutingTrace
from tests.benchmarks.lib.held_out_prompts import DOMAINS, held_out_tokens
from tests.support.engines import expert_fetcher
from tests.support.trained_models import MIXTURE

SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
PROMPT_TOKENS, MIXED_TOKENS = 64, 256
CHUNK = 64
MUCH, TOLERANCE = 0.5, 1.0
"""From this share of the experts on, another policy may hit this many points more."""


def routing_of(bundle: Bundle, tokens: list[int]) -> Int32:
    """(T, L, k) experts that the model's routers chose for a text of one context."""
    config, experts = bundle.config, bundle.config.experts
    assert experts is not None
    found: list[list[Int32]] = [[] for layer in config.layers if layer.experts is not None]

    def observe(_: ExpertReuse, turn: int, gates: Float32) -> None:
        found[turn].append(np.argsort(-gates, axis=1)[:, : experts.chosen].astype(np.int32))

    with (
        FlashReader(bundle_files(bundle), "buffered", 2) as reader,
        patch.object(ExpertReuse, "observe", observe),
    ):
        cpu = CpuBackend(make_runner(threads=1), segment_neurons=64, piece_neurons=64)
        model = Transformer(config, cpu, load_weights(bundle, reader, cpu))
        # Not all in memory: such a cache would learn nothing.
        fetcher = expert_fetcher(bundle, reader, cpu, 2 * experts.count)
        kv = SequenceState(KVLayout(config, 16))
        for start in range(0, len(tokens), CHUNK):
            model.hidden_states(tokens[start : start + CHUNK], kv)
        fetcher.close()
    return np.stack([np.concatenate(parts) for parts in found], axis=1)


def texts(context: int) -> dict[str, list[int]]:
    """A context of each kind of held-out text, and one of all kinds in turn."""
    found = {name: held_out_tokens(name, context) for name in DOMAINS}
    found["all in turn"] = [token for text in found.values() for token in text[:MIXED_TOKENS]][:context]
    return found


def measure(trace: RoutingTrace) -> dict[str, list[float]]:
    """Per cent of hits by policy, for each of SHARES."""
    layers, k = trace.chosen.shape[1:]
    budgets = [share * layers * trace.experts * trace.expert_bytes[0] / 2**20 for share in SHARES]
    found = {policy: [source_rate(trace, policy, size) for size in budgets] for policy in SOURCE_POLICIES}
    for name, kind in (("ours, no forecast", WithoutForecast), ("ours", ExpertReuse)):
        policy = partial(kind, layers, trace.experts, k)
        found[name] = [rate(trace, size, policy) for size in budgets]
    best = Optimum(list(trace.gates), trace.prompt)
    found["Belady"] = [100 * best.hit_rate(trace.slots(size)) for size in budgets]
    return found


def failures(name: str, trace: RoutingTrace, found: dict[str, list[float]]) -> list[str]:
    """What other policies are better at, in words. Shares of layers below one pass's need don't count."""
    k = trace.chosen.shape[2]
    wrong = []
    for index, share in enumerate(SHARES):
        fits = share * trace.experts >= k
        rivals = [policy for policy in SOURCE_POLICIES if fits or not policy.endswith("by layer")]
        best = max(rivals, key=lambda policy: found[policy][index])
        if found["ours"][index] < found[best][index] - (TOLERANCE if share >= MUCH else 0.0):
            wrong.append(
                f"{name}, {share:.1%}: ours {found['ours'][index]:.1f}, {best} {found[best][index]:.1f}"
            )
    return wrong


def main() -> int:
    """Print the tables and the JSON line; 0 if ours is nowhere below the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MIXTURE, help="a bundle with experts")
    args = parser.parse_args()
    bundle, wrong, hits = Bundle.open(args.model), [], {}
    experts = bundle.config.experts
    if experts is None:
        parser.error(f"{args.model} has no experts")
    nbytes = experts.neurons * bundle.neuron_layouts[0].stride
    for name, tokens in texts(bundle.config.max_context).items():
        chosen = routing_of(bundle, tokens)
        trace = RoutingTrace(chosen, PROMPT_TOKENS, experts.count, np.full(chosen.shape[1], nbytes))
        hits[name] = measure(trace)
        wrong += failures(name, trace, hits[name])
        print(f"\n| {name}, {len(tokens)} tokens | " + " | ".join(f"{share:.1%}" for share in SHARES) + " |")
        print("|---|" + "---|" * len(SHARES))
        for policy, row in hits[name].items():
            print(f"| {policy} | " + " | ".join(f"{figure:.1f}" for figure in row) + " |", flush=True)
    print("\n".join(["", *wrong]))
    rounded = {
        name: {policy: np.round(row, 2).tolist() for policy, row in found.items()}
        for name, found in hits.items()
    }
    print(
        json.dumps({"benchmark": "expert_hit_rates", "passed": not wrong, "shares": SHARES, "hits": rounded})
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
