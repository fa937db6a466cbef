"""How many of the neurons that fire a cache of a part of them holds: policies on the shipped model's text.

The gates of held-out text (`make train`'s data) run through the runtime's own cache, token by token, without
reads. `equal` gives every layer as many slots, others divide them by score; Belady's optimum knows the future
and has equal slots. Hits are counted from the 65th token of each domain on. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measure import HERE

from ondevice.backends.base import Float32, Int32, KVLayout
from ondevice.backends.cpu import CpuBackend, CpuFeedForward, make_engine
from ondevice.bundle.layout import neuron_layout
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from ondevice.model.kv_cache import KVCache
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.transformer import Transformer
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import POLICIES, PolicyName, fires, make_policy

ROOT = HERE.parents[1]
DOMAINS = ("dialogue", "sql", "novels", "math", "restaurants")
SHARES = (0.1, 0.2, 0.4)
WINDOW, WARM_UP = 512, 64


def gates_of(bundle: Bundle, tokens: npt.NDArray[np.uint16]) -> Float32:
    """(L, T, F) gate products of windows of 512 tokens, one after the other."""
    config = bundle.config
    seen: list[list[Float32]] = [[] for _ in range(config.num_layers)]
    layers, neurons = config.num_layers, config.intermediate_size
    with FlashReader(bundle_files(bundle, gates=True), threads=8) as reader:
        cpu = CpuBackend(make_engine(2), segment_neurons=64, stream_neurons=64)
        weights = load_weights(bundle, reader, cpu, gates=True)
        slot_bytes = neuron_layout(config, bundle.quant).part_bytes[1]
        cache = NeuronCache(
            layers, neurons, slot_bytes, layers * neurons, 0, make_policy("lru", layers, neurons)
        )
        cache.resize(1)
        fetcher = NeuronFetcher(cpu.feed_forwards, reader, cache, neurons)
        for layer, record in zip(cpu.feed_forwards, seen, strict=True):
            _keep_gates(layer, record)
        model = Transformer(config, cpu, weights)
        for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
            window = [int(token) for token in tokens[start : start + WINDOW]]
            # Logits of every token, so that the last layer sees every token.
            list(model.every_logits(window, KVCache(KVLayout(config, 16)), WINDOW))
        fetcher.close()
    return np.stack([np.concatenate(record) for record in seen])


def _keep_gates(layer: CpuFeedForward, record: list[Float32]) -> None:
    fired = layer.fired

    def keeping(gates: Float32) -> Iterator[tuple[Int32, npt.NDArray[np.uint64]]]:
        record.append(gates.copy())
        return fired(gates)

    layer.fired = keeping


def hit_rate(gates: Float32, policy: PolicyName, slots: int, equal: bool) -> float:
    """Of what fires in (L, T, F), the share that a cache of `slots` neurons in all has."""
    layers, tokens, neurons = gates.shape
    groups = [[layer] for layer in range(layers)] if equal else [list(range(layers))]
    hits = lookups = 0
    for group in groups:
        count = len(group)
        most = slots * count // layers + neurons
        cache = NeuronCache(count, neurons, 64, most, neurons, make_policy(policy, count, neurons))
        cache.resize(1)
        for token in range(tokens):
            if token == WARM_UP:
                cache.hits = cache.lookups = 0
            cache.divide(1)
            for index, layer in enumerate(group):
                row = gates[layer, token : token + 1]
                cache.observe(index, row)
                cache.place(index, np.flatnonzero(fires(row[0])).astype(np.int32))
                cache.settle(index)
        hits, lookups = hits + cache.hits, lookups + cache.lookups
    return hits / lookups


def optimum(gates: Float32, slots: int) -> float:
    """The same of Belady's cache, which keeps what fires again soonest."""
    layers, tokens, neurons = gates.shape
    hits = lookups = 0
    for layer in range(layers):
        active = fires(gates[layer])
        following = np.full((tokens + 1, neurons), tokens, dtype=np.int32)
        for token in range(tokens - 1, -1, -1):
            following[token] = np.where(active[token], token, following[token + 1])
        held = np.zeros(neurons, dtype=bool)
        for token in range(tokens):
            if token >= WARM_UP:
                hits, lookups = hits + int((held & active[token]).sum()), lookups + int(active[token].sum())
            held |= active[token]
            worst = np.flatnonzero(held)
            over = len(worst) - slots // layers
            if over > 0:
                order = np.argpartition(-following[token + 1][worst], over - 1)
                held[worst[order[:over]]] = False
    return hits / lookups


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--tokens", type=int, default=2048, help="of each domain")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    total = bundle.config.num_layers * bundle.config.intermediate_size
    rows: dict[str, list[list[float]]] = {}
    for domain in DOMAINS:
        text = np.fromfile(args.data / f"{domain}.held_out.bin", dtype=np.uint16)[: args.tokens]
        gates = gates_of(bundle, text)
        for policy in POLICIES:
            for equal in (False, True):
                name = f"{policy}, equal" if equal else policy
                rates = [hit_rate(gates, policy, int(share * total), equal) for share in SHARES]
                rows.setdefault(name, []).append(rates)
        rows.setdefault("Belady, equal", []).append([optimum(gates, int(share * total)) for share in SHARES])
    means = {name: np.mean(rates, axis=0).round(4).tolist() for name, rates in rows.items()}
    print("| policy | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |\n|---|---|---|---|")
    for name, rates in means.items():
        print(f"| {name} | " + " | ".join(f"{100 * rate:.1f} %" for rate in rates) + " |")
    print(json.dumps({"benchmark": "cache_hit_rates", "shares": SHARES, "hit_rates": means}))


if __name__ == "__main__":
    main()
