"""How many of the neurons that fire a cache of a part of them holds: policies on the shipped model's text.

The gates of held-out text (`make model-tables` packs it) run through the runtime's own cache, token by token,
without reads. `equal` gives every layer as many slots, others share them by score; `calibrated` divides them
for good by each layer's miss-rate curve on as many tokens more of the same domain; Belady's optimum knows the
future. Hits are counted from the 65th token of each domain on. Ends with one JSON line; exits 0 only if the
default policy is as far above LRU and as near the optimum as it shall be. `ondevice profile` has the same
figures of any text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ondevice.backends.base import Float32
from ondevice.bundle.reader import Bundle
from ondevice.measure.profiling import WARM_UP_TOKENS, recorded_gates
from ondevice.sparsity.policies import DEFAULT_POLICY, POLICIES, fires
from ondevice.sparsity.replay import Optimum, hit_rate
from tests.support.paths import ROOT

DOMAINS = ("dialogue", "sql", "novels", "math", "restaurants")
SHARES = (0.1, 0.2, 0.4)
WINDOW = 512
CURVE_STEPS = 32
"""Sizes of a layer's cache that its curve has."""
ABOVE_LRU, OF_BELADY = (0.05, 0.05, 0.03), (0.0, 0.73, 0.83)
"""At least, by share: hit rate above LRU's, and share of Belady's, all with the same division of slots."""


def held_out_windows(data: Path, domain: str, tokens: int) -> list[list[int]]:
    """The first `tokens` tokens of a domain's held-out text, in whole windows."""
    text = np.fromfile(data / f"{domain}.held_out.bin", dtype=np.uint16)[:tokens].tolist()
    return [text[start : start + WINDOW] for start in range(0, len(text) - WINDOW + 1, WINDOW)]


def calibrated(gates: Sequence[Float32], others: Sequence[Float32], slots: Sequence[int]) -> list[float]:
    """The default policy's hit rates in gates for each of `slots`, by the curves of `others`.

    gates, others: (T, F) of each layer; all layers are equally wide. A step of slots at a time goes to the
    layer that `others` say it brings the most hits.
    """
    layers, neurons = len(gates), gates[0].shape[1]
    step = neurons // CURVE_STEPS
    lookups = [int(fires(layer[WARM_UP_TOKENS:]).sum()) for layer in others]
    curves = [
        [0.0]
        + [
            lookups[layer] * hit_rate(others[layer : layer + 1], DEFAULT_POLICY, size, WARM_UP_TOKENS)
            for size in range(step, neurons + 1, step)
        ]
        for layer in range(layers)
    ]
    rates = []
    for count in slots:
        steps = [0] * layers
        for _ in range(count // step):
            gains = [
                curve[taken + 1] - curve[taken] if taken < CURVE_STEPS else -1.0
                for curve, taken in zip(curves, steps, strict=True)
            ]
            steps[int(np.argmax(gains))] += 1
        hits = wanted = 0.0
        for layer, taken in enumerate(steps):
            fired = int(fires(gates[layer][WARM_UP_TOKENS:]).sum())
            rate = hit_rate(gates[layer : layer + 1], DEFAULT_POLICY, taken * step, WARM_UP_TOKENS)
            hits, wanted = hits + fired * rate, wanted + fired
        rates.append(hits / wanted)
    return rates


def measure(bundle: Bundle, windows: list[list[int]], others: list[list[int]]) -> dict[str, list[float]]:
    """By policy and division of the slots, hit rates for each of SHARES."""
    slots = [int(share * bundle.config.num_layers * bundle.config.intermediate_size) for share in SHARES]
    found: dict[str, list[float]] = {}
    with recorded_gates(bundle, windows) as gates, recorded_gates(bundle, others) as calibrating:
        found[f"{DEFAULT_POLICY}, calibrated"] = calibrated(gates, calibrating, slots)
        for equal in (True, False):
            divided = ", equal" if equal else ""
            for policy in POLICIES:
                rates = [hit_rate(gates, policy, count, WARM_UP_TOKENS, equal) for count in slots]
                found[policy + divided] = rates
            best = Optimum(gates, WARM_UP_TOKENS, equal)
            found["Belady" + divided] = [best.hit_rate(count) for count in slots]
    return found


def holds(means: dict[str, list[float]]) -> bool:
    """Whether the default policy is as far above LRU and as near the offline optimum as it shall be."""
    ours, lru, best = (np.array(means[name]) for name in (DEFAULT_POLICY, "lru", "Belady"))
    return bool((ours - lru >= ABOVE_LRU).all() and (ours >= np.array(OF_BELADY) * best).all())


def main() -> int:
    """Print the table and the JSON line; 0 if the default policy does as well as it shall."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--tokens", type=int, default=2048, help="of each domain")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    rows: dict[str, list[list[float]]] = {}
    for domain in DOMAINS:
        windows = held_out_windows(args.data, domain, 2 * args.tokens)
        count = args.tokens // WINDOW
        for name, rates in measure(bundle, windows[:count], windows[count:]).items():
            rows.setdefault(name, []).append(rates)
    means = {name: np.mean(rates, axis=0).round(4).tolist() for name, rates in rows.items()}
    print("| policy | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |\n|---|---|---|---|")
    for name, rates in means.items():
        print(f"| {name} | " + " | ".join(f"{100 * rate:.1f} %" for rate in rates) + " |")
    passed = holds(means)
    summary = {"benchmark": "cache_hit_rates", "passed": passed, "shares": SHARES, "hit_rates": means}
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
