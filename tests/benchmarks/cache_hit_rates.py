"""How many of the neurons that fire a cache of a part of them holds: policies on the shipped model's text.

The gates of held-out text (`make train`'s data) run through the runtime's own cache, token by token, without
reads. `equal` gives every layer as many slots, others share them by score; Belady's optimum knows the future.
Hits are counted from the 65th token of each domain on. Ends with one JSON line. `ondevice profile` has the
same figures of any text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from measure import HERE

from ondevice.bundle.reader import Bundle
from ondevice.profiling import WARM_UP_TOKENS, recorded_gates
from ondevice.sparsity.policies import POLICIES
from ondevice.sparsity.replay import Optimum, hit_rate

ROOT = HERE.parents[1]
DOMAINS = ("dialogue", "sql", "novels", "math", "restaurants")
SHARES = (0.1, 0.2, 0.4)
WINDOW = 512


def measure(bundle: Bundle, windows: list[list[int]]) -> dict[str, list[float]]:
    """By policy and division of the slots, hit rates for each of SHARES."""
    slots = [int(share * bundle.config.num_layers * bundle.config.intermediate_size) for share in SHARES]
    found: dict[str, list[float]] = {}
    with recorded_gates(bundle, windows) as gates:
        for equal in (True, False):
            divided = ", equal" if equal else ""
            for policy in POLICIES:
                rates = [hit_rate(gates, policy, count, WARM_UP_TOKENS, equal) for count in slots]
                found[policy + divided] = rates
            best = Optimum(gates, WARM_UP_TOKENS, equal)
            found["Belady" + divided] = [best.hit_rate(count) for count in slots]
    return found


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--tokens", type=int, default=2048, help="of each domain")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    rows: dict[str, list[list[float]]] = {}
    for domain in DOMAINS:
        text = np.fromfile(args.data / f"{domain}.held_out.bin", dtype=np.uint16)[: args.tokens].tolist()
        starts = range(0, len(text) - WINDOW + 1, WINDOW)
        for name, rates in measure(bundle, [text[start : start + WINDOW] for start in starts]).items():
            rows.setdefault(name, []).append(rates)
    means = {name: np.mean(rates, axis=0).round(4).tolist() for name, rates in rows.items()}
    print("| policy | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |\n|---|---|---|---|")
    for name, rates in means.items():
        print(f"| {name} | " + " | ".join(f"{100 * rate:.1f} %" for rate in rates) + " |")
    print(json.dumps({"benchmark": "cache_hit_rates", "shares": SHARES, "hit_rates": means}))


if __name__ == "__main__":
    main()
