"""How much of a layer a prefetch must name to include every neuron that fires.

A prefetch scores the next layer's neurons by that layer's own gate, or predictor, on the stream before this
layer's feed-forward, as the engine does. If it surely had all that fires, MLX needn't be waited for to know
the selection. Per layer: neurons that fire for a token, the share of them with a prefetch score above zero,
and the median of how many a prefetch must name, best first, to have them all. Ends with one JSON line.

    python -m tests.benchmarks.explain.prefetch_coverage [--model DIR] [--sparsity MODE] [--tokens 80]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import ondevice
from ondevice.backends import mlx
from ondevice.measure.prompts import BUILT_IN
from tests.benchmarks.lib.measure import machine
from tests.support.paths import ROOT

Scores = NDArray[np.float32]


class Watched(mlx.MlxBackend):
    """Keeps a layer's prefetch scores and the scores that it then has, of passes over one token."""

    seen: ClassVar[dict[int, list[tuple[Scores, Scores]]]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prefetched: dict[int, Scores] = {}

    def prefetch(self, x: Any, norm: Any, weight: Any) -> None:
        self.prefetched[self.feed_forwards.index(weight)] = self._scores(x, weight, norm)
        super().prefetch(x, norm, weight)

    def feed_forward(  # type: ignore[override]
        self, x: Any, weight: Any, spec: Any, batch: Any, norm: Any = None, **more: Any
    ) -> Any:
        layer = self.feed_forwards.index(weight)
        early = self.prefetched.pop(layer, None)
        if early is not None and len(early) == 1:
            self.seen.setdefault(layer, []).append((early[0], self._scores(x, weight, norm)[0]))
        return super().feed_forward(x, weight, spec, batch, norm=norm, **more)

    def _scores(self, x: Any, weight: Any, norm: Any) -> Scores:
        scores: Scores = np.array(self._scored(x, weight.selector, norm)[0])
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "weights" / "small-relu")
    parser.add_argument("--sparsity", choices=["exact", "predicted"], default="exact")
    parser.add_argument("--tokens", type=int, default=80, help="for each of the built-in prompts")
    args = parser.parse_args()
    mlx.MlxBackend = Watched  # type: ignore[misc]
    with ondevice.load(args.model, backend="mlx", sparsity=args.sparsity, speculation="off") as model:
        for task in BUILT_IN:
            for prompt in task.prompts:
                model.generate(prompt, max_tokens=args.tokens)
        neurons = model.config.intermediate_size
    found = []
    for layer, pairs in sorted(Watched.seen.items()):
        early, scores = (np.stack(side) for side in zip(*pairs, strict=True))
        fires = scores > 0
        # The lowest prefetch score of a neuron that fires decides how far down the list one must go.
        lowest = np.where(fires, early, np.inf).min(axis=1, keepdims=True)
        it = {
            "layer": layer,
            "tokens": len(pairs),
            "fires": float(fires.sum(axis=1).mean()),
            "found": float((fires & (early > 0)).sum() / fires.sum()),
            "named_for_all": float(np.median((early >= lowest).sum(axis=1))),
        }
        found.append(it)
        print(
            f"layer {layer}: {it['fires']:.0f} of {neurons} fire, a prefetch finds {it['found']:.2f}; "
            f"to have all it must name {it['named_for_all']:.0f} ({it['named_for_all'] / neurons:.0%})"
        )
    print(json.dumps({"neurons": neurons, "sparsity": args.sparsity, "layers": found, **machine()}))


if __name__ == "__main__":
    main()
