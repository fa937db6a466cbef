"""The first token of a prompt behind a restart, with and without a prompt cache, of a model with delta rules.

    .venv/bin/python -m tests.benchmarks.explain.recurrent_restart [--tokens 2000] [--rounds 3]

A random model of eight layers, whose states and keys are those of Qwen3.5-35B-A3B's layers and which is
narrower else. Checkpoints lie 3,264 tokens apart, so that shorter prompts come from the states near their
end. Prints medians, and fails if tokens or their log-probabilities differ.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from ondevice.model_config import NO_ATTENTION, DeltaSpec, ModelConfig
from tests.golden.build import golden_config
from tests.support.small_models import write_small

HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 256}
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 4096, "max_context": 8192}


def model_config() -> ModelConfig:
    """Three layers of four with a delta rule."""
    base = golden_config(num_layers=1, hidden_act="silu", **HEADS, **SIZES)
    plain = base.layers[0]
    delta = replace(plain, attention=NO_ATTENTION, delta=DeltaSpec(16, 32, 128, 128, 4))
    return replace(base, layers=(delta, delta, delta, plain) * 2)


def answered(bundle: Path, tokens: int, **options: Any) -> tuple[float, int, list[tuple[Any, ...]]]:
    """Seconds to the first token, tokens that were restored, and the text with log-probabilities."""
    prompt = np.random.default_rng(1).integers(3, SIZES["vocab_size"], tokens).tolist()
    with ondevice.load(bundle, speculation="off", max_context=tokens + 64, **options) as model:
        begun = time.perf_counter()
        events = model.stream(tokens=prompt, max_tokens=8, top_logprobs=0)
        first = next(events)
        seconds = time.perf_counter() - begun
        *rest, last = events
        assert last.stats is not None
        said = [(event.token, event.logprob) for event in (first, *rest)]
        return seconds, last.stats.restored_tokens, said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    computed, restored, found = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_small(Path(folder) / "model", model_config())
        for each in range(args.rounds):
            cache = Path(folder) / f"cache-{each}"
            seconds, _, said = answered(bundle, args.tokens, prompt_cache=cache)
            computed.append(seconds)
            seconds, found, again = answered(bundle, args.tokens, prompt_cache=cache)
            restored.append(seconds)
            if again != said:
                raise SystemExit("the texts differ")
    print(f"computed: {statistics.median(computed):.2f} s to the first of {args.tokens} tokens' answer")
    print(f"restored: {statistics.median(restored):.2f} s, {found} of {args.tokens} tokens")


if __name__ == "__main__":
    main()
