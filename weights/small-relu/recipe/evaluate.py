"""Held-out bits per byte and perplexity of PyTorch, `transformers` and our runtime, on the same windows.

    python -m recipe.evaluate

takes the dequantised weights of the shipped bundle, exports them as a run is exported, converts the export at
three widths, and prints a table and one JSON line. It exits 0 only if perplexity agrees with the training
framework's in every domain: `transformers`, f16, q8 and the shipped bundle within 0.5 %, q4 within 3 %. With
`--name small-relu` it takes a run's own float weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import ondevice
from recipe.config import BUILD, MIXTURE, MODEL_FOLDER
from recipe.export import export, model_of_bundle, model_of_checkpoint
from recipe.model import Llama
from recipe.pack import held_out_windows
from recipe.tokenizer import Encoder
from recipe.train import held_out_losses

WINDOWS = 40
LIMITS = {"transformers": 0.005, "f16": 0.005, "q8": 0.005, "shipped": 0.005, "q4": 0.03}
"""Largest relative difference of perplexity from the training framework's."""

Windows = NDArray[np.int64]
Judge = Callable[[Windows], float]
"""Function from (n, T) windows to the summed loss, in nats, of all tokens but each window's first."""


@dataclass(frozen=True)
class Text:
    """Held-out windows of one domain, and the number of tokens and bytes that are predicted."""

    windows: Windows
    tokens: int
    nbytes: int

    def figures(self, nats: float) -> dict[str, float]:
        return {
            "bits_per_byte": nats / math.log(2) / self.nbytes,
            "perplexity": math.exp(nats / self.tokens),
        }


def held_out(build: Path, encoder: Encoder, context: int, limit: int) -> dict[str, Text]:
    texts = {}
    for domain in MIXTURE:
        windows = held_out_windows(build, domain, context, limit)
        texts[domain] = Text(windows, windows[:, 1:].size, encoder.text_bytes(windows))
    return texts


def judge_by_torch(model: Llama) -> Judge:
    return lambda windows: held_out_losses(model, torch.from_numpy(windows))[0].double().sum().item()


def judge_by_transformers(folder: Path) -> Judge:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def judge(windows: Windows) -> float:
        total = 0.0
        with torch.no_grad():
            for ids in torch.from_numpy(windows).split(8):
                chances = model(ids).logits[:, :-1].log_softmax(-1)
                total -= chances.gather(2, ids[:, 1:, None]).double().sum().item()
        return total

    return judge


def judge_by_runtime(model: ondevice.Model) -> Judge:
    def judge(windows: Windows) -> float:
        total = 0.0
        for window in windows:
            logits = model.logits(window[:-1].tolist()).astype(np.float64)
            highest = logits.max(axis=1)
            sums = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
            total += float((sums - logits[np.arange(len(logits)), window[1:]]).sum())
        return total

    return judge


def evaluate(build: Path, name: str | None, limit: int) -> dict[str, dict[str, dict[str, float]]]:
    """Stats by framework and domain, of a run or of the shipped bundle. Bundles go to BUILD/bundles."""
    folder = build / "export" / (name or "shipped")
    if name is None:
        model = model_of_bundle(MODEL_FOLDER)
        export(model, (build / "tokenizer.model").read_bytes(), folder)
    else:
        model = model_of_checkpoint(build / "runs" / name)
    encoder = Encoder((folder / "tokenizer.model").read_bytes())
    texts = held_out(build, encoder, model.shape.max_position_embeddings, limit)

    def figures(judge: Judge) -> dict[str, dict[str, float]]:
        return {domain: text.figures(judge(text.windows)) for domain, text in texts.items()}

    found = {"pytorch": figures(judge_by_torch(model))}
    found["transformers"] = figures(judge_by_transformers(folder))
    bundles = {
        quant: ondevice.convert(folder, build / "bundles" / f"{folder.name}-{quant}", quant, force=True)
        for quant in ("f16", "q8", "q4")
    }
    for column, bundle in (bundles | ({} if name else {"shipped": MODEL_FOLDER})).items():
        with ondevice.load(bundle) as loaded:
            found[column] = figures(judge_by_runtime(loaded))
    return found


def differences(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Each framework's largest relative difference of perplexity from PyTorch's, over all domains."""
    ours = found["pytorch"]
    return {
        name: max(abs(values[d]["perplexity"] / ours[d]["perplexity"] - 1) for d in ours)
        for name, values in found.items()
        if name != "pytorch"
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown table: a row per domain, and `bits per byte / perplexity` per framework."""
    lines = [f"| held-out text | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for domain in next(iter(found.values())):
        cells = [f"{v[domain]['bits_per_byte']:.4f} / {v[domain]['perplexity']:.3f}" for v in found.values()]
        lines.append(f"| {domain} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare frameworks on held-out text.")
    parser.add_argument("--name", help="a run that was exported; without it, the bundle that ships")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows per domain")
    arguments = parser.parse_args()
    found = evaluate(arguments.build, arguments.name, arguments.windows)
    worst = differences(found)
    passed = all(worst[name] <= LIMITS[name] for name in worst)
    result: dict[str, Any] = {"figures": found, "differences": worst, "limits": LIMITS, "passed": passed}
    print(table(found))
    print(json.dumps(result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
