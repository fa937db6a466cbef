"""Recorded routing of a mixture of experts: which experts every layer chose for every token.

The files are those of Helldez/BigMoeOnEdge (docs/bench-data/2026-07-15-route-trace): a row for each chosen
expert, above it a comment for each layer with the bytes of one of its experts.

Legend: L layers, T tokens, E experts of a layer, k chosen for a token.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32, Int32
from tests.support.paths import SHARED_DATA

ROUTING = SHARED_DATA / "routing"
RELABELLED_SHARE = 0.5
"""Share of a layer's experts that change their names from one segment to the next."""
SEGMENT_TOKENS = (32, 96)
"""Least and most tokens of a segment."""


@dataclass(frozen=True)
class RoutingTrace:
    """chosen: (T, L, k) experts; -1 where a prompt's token didn't reach a layer.

    prompt: tokens of the prompt, which come first. experts: E. expert_bytes: (L,) bytes of one expert.
    """

    chosen: Int32
    prompt: int
    experts: int
    expert_bytes: NDArray[np.int64]

    @property
    def gates(self) -> Float32:
        """(L, T, E): 1 for a chosen expert, -1 for another."""
        tokens, layers, _ = self.chosen.shape
        gates = np.full((layers, tokens, self.experts), -1, dtype=np.float32)
        token, layer, place = np.nonzero(self.chosen >= 0)
        gates[layer, token, self.chosen[token, layer, place]] = 1
        return gates

    def slots(self, budget_mib: float, largest: bool = False) -> int:
        """Experts of mean size that a budget holds, or of the largest layers' size."""
        each = self.expert_bytes.max() if largest else self.expert_bytes.mean()
        return int(budget_mib * 2**20 / each)


def read_trace(name: str) -> RoutingTrace:
    """The trace `name` of the shared data: `qwen` or `gptoss`. Raises FileNotFoundError without it."""
    return parse_trace(ROUTING / f"{name}.route.csv.xz")


def parse_trace(path: Path) -> RoutingTrace:
    """The trace of an xz-compressed file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    comments = "\n".join(line for line in lines if line.startswith("#"))
    shape = re.search(r"n_layer=(\d+) n_expert=(\d+) n_expert_used=(\d+)", comments)
    sizes = {int(layer): int(size) for layer, size in re.findall(r"layer=(\d+) expert_bytes=(\d+)", comments)}
    if shape is None:
        raise ValueError(f"{path} doesn't say how many layers and experts there are")
    layers, experts, k = map(int, shape.groups())
    rows = [line.split(",")[1:6] for line in lines if line[:1].isdigit()]
    phase, token, layer, place, expert = np.array(rows, dtype=np.int32).T
    chosen = np.full((token.max() + 1, layers, k), -1, dtype=np.int32)
    chosen[token, layer, place] = expert
    prompt = int(token[phase == 0].max()) + 1
    return RoutingTrace(chosen, prompt, experts, np.array([sizes[i] for i in range(layers)]))


def extended(trace: RoutingTrace, tokens: int, seed: int) -> RoutingTrace:
    """A trace with the same prompt, and `tokens` of decoding in the manner of the trace's own.

    Its decoding comes first as it is. Then come pieces of it, each from a random place and of random length.
    In every piece and layer a share of the experts has changed names among each other since the piece before,
    so that some experts are as hot as before, and a cache meets a new topic.
    """
    random = np.random.default_rng(seed)
    decoded = trace.chosen[trace.prompt :]
    layers, experts = decoded.shape[1], trace.experts
    names = np.tile(np.arange(experts, dtype=np.int32), (layers, 1))
    parts, count = [decoded], len(decoded)
    while count < tokens:
        length = min(int(random.integers(*SEGMENT_TOKENS, endpoint=True)), len(decoded))
        start = int(random.integers(len(decoded) - length, endpoint=True))
        for layer in range(layers):
            moved = random.choice(experts, round(RELABELLED_SHARE * experts), replace=False)
            names[layer, moved] = names[layer, random.permutation(moved)]
        piece = decoded[start : start + length]
        parts.append(names[np.arange(layers)[:, None], piece])
        count += length
    chosen = np.concatenate([trace.chosen[: trace.prompt], *parts])[: trace.prompt + tokens]
    return RoutingTrace(chosen, trace.prompt, experts, trace.expert_bytes)
