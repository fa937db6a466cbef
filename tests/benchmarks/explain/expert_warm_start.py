"""What knowing the use of experts beforehand gains a text's first tokens: by replay, no reads.

The mixture that was trained on text reads held-out documents of each kind. The first part calibrates: it
counts how often each expert is chosen. Then short texts begin anew, each with a prompt and 32 tokens more, in
a cache that is empty, one that is empty but whose policy begins with the calibrated shares, and one that is
filled with the hottest experts before the prompt comes, as an idle model could be. Prints hits of the prompt,
one lookup for each expert that it chooses, and of the 32 tokens, by the share of all experts that the cache
holds, and one JSON line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np

from ondevice.backends.base import Float32, Int32
from ondevice.bundle.reader import Bundle
from ondevice.sparsity.expert_reuse import ExpertReuse
from ondevice.sparsity.pooled_cache import PooledCache
from ondevice.sparsity.replay import SLOT_BYTES
from tests.benchmarks.explain.expert_hit_rates import routing_of
from tests.benchmarks.lib.held_out_prompts import DOMAINS, held_out_tokens
from tests.support.trained_models import MIXTURE

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
CALIBRATED_TOKENS, TEXTS, PROMPT, DECODED = 1024, 6, 16, 32
STARTS = ("empty", "shares known", "filled")


def hits(
    chosen: Int32, experts: int, size: int, start: str, shares: Sequence[Float32]
) -> tuple[float, float]:
    """Shares of hits of the prompt, the first PROMPT tokens of chosen (T, L, k), and of the others."""
    layers, k = chosen.shape[1:]
    policy = ExpertReuse(layers, experts, k, None if start == "empty" else shares)
    cache = PooledCache([experts] * layers, SLOT_BYTES, size + experts, experts, policy)
    cache.resize(1)
    if start == "filled":
        hottest = np.argsort(-policy.pool_scores(layers - 1), kind="stable")[:size]
        for layer in range(layers):
            own = hottest[hottest // experts == layer] % experts
            cache.acquire(layer, np.sort(own).astype(np.int32))
    found = []
    for first, last in ((0, PROMPT), *((token, token + 1) for token in range(PROMPT, len(chosen)))):
        if first in (0, PROMPT):
            found.append((cache.hits, cache.lookups))
            cache.hits = cache.lookups = 0
        cache.divide(last - first)
        for layer in range(layers):
            gates = np.full((last - first, experts), -1, dtype=np.float32)
            gates[np.arange(last - first)[:, None], chosen[first:last, layer]] = 1
            cache.observe(layer, gates)
            cache.acquire(layer, np.unique(chosen[first:last, layer]))
            cache.evict_to_share(layer)
    prompt, decoded = found[1], (cache.hits, cache.lookups)
    cache.close()
    return prompt[0] / prompt[1], decoded[0] / decoded[1]


def main() -> int:
    """Print the table and the JSON line; always 0."""
    bundle = Bundle.open(MIXTURE)
    experts = bundle.config.experts
    assert experts is not None
    step = PROMPT + DECODED
    counts, texts, tokens = None, [], 0
    for kind in DOMAINS:
        read = held_out_tokens(kind, CALIBRATED_TOKENS + TEXTS * step)
        first = routing_of(bundle, read[:CALIBRATED_TOKENS])
        used = np.stack(
            [np.bincount(layer.ravel(), minlength=experts.count) for layer in first.swapaxes(0, 1)]
        )
        counts = used if counts is None else counts + used
        tokens += len(first)
        starts = range(CALIBRATED_TOKENS, len(read) - step + 1, step)
        texts += [routing_of(bundle, read[start : start + step]) for start in starts]
    assert counts is not None
    shares, total = list((counts / tokens).astype(np.float32)), counts.size
    figures: dict[str, list[tuple[float, float]]] = {}
    print(f"{len(texts)} texts | " + " | ".join(f"{share:.1%}" for share in SHARES))
    for start in STARTS:
        figures[start] = []
        for share in SHARES:
            size = int(share * total)
            means = np.mean([hits(text, experts.count, size, start, shares) for text in texts], axis=0)
            figures[start].append((round(100 * float(means[0]), 2), round(100 * float(means[1]), 2)))
        print(f"| {start} | " + " | ".join(f"{a:.1f}, {b:.1f}" for a, b in figures[start]) + " |", flush=True)
    print(json.dumps({"benchmark": "expert_warm_start", "shares": SHARES, "hits": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
