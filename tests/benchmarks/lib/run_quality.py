"""How one engine's distributions agree with a GGUF file's own values in float32. JSON in, JSON out.

Spec: engine (ondevice or llama.cpp), model (its file or folder), gguf, windows (a JSON file of lists of token
ids), states (what `run_oracle` stored), threads. Keys and values are float16 in both engines; each window is
one prompt from an empty context.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.lib.oracle import Agreement, Float32, read_head

ROWS = 64
"""Rows whose logits are compared at once."""


def ondevice_logits(spec: dict[str, Any], windows: list[list[int]]) -> Iterator[Float32]:
    """Logits (T, V) of each window."""
    from tests.benchmarks.lib.run_ondevice import load

    context = max(map(len, windows))
    options = {"dram_budget": "auto", "sparsity": "auto", "io": "auto", "kv_bits": 16, "context": context}
    with load(spec | options) as model:
        for window in windows:
            yield model.logits(window)


def llama_cpp_logits(spec: dict[str, Any], windows: list[list[int]]) -> Iterator[Float32]:
    """Logits (T, V) of each window."""
    from tests.benchmarks.lib.run_llama_cpp import Engine

    context = max(map(len, windows))
    options = {"load_mode": "default", "repack": True, "micro_batch": 0, "kv_bits": 16, "context": context}
    engine = Engine(spec | options)
    for window in windows:
        engine.clear()
        rows = [(token, position, 0) for position, token in enumerate(window)]
        yield np.stack(list(engine.every_logits(rows)))


def run(spec: dict[str, Any]) -> dict[str, object]:
    """The figures of `Agreement` over all windows."""
    windows: list[list[int]] = json.loads(Path(spec["windows"]).read_text())
    states, head = np.load(spec["states"], mmap_mode="r"), read_head(Path(spec["gguf"]))
    logits = ondevice_logits if spec["engine"] == "ondevice" else llama_cpp_logits
    agreement, start = Agreement(), 0
    for window, actual in zip(windows, logits(spec, windows), strict=True):
        for first in range(0, len(window), ROWS):
            last = min(first + ROWS, len(window))
            expected = np.asarray(states[start + first : start + last]) @ head.T
            agreement.add(expected, actual[first:last], window[first + 1 : last + 1])
        start += len(window)
    return dict(agreement.figures())


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
