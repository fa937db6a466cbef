"""Share of zero gates, and overlap of the active neurons of neighbouring tokens, on held-out text.

    python -m recipe.sparsity --model ..

reads a bundle (by default the shipped one) and prints Markdown tables and one JSON line. `--name` takes a
run's checkpoint instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe.config import BUILD, MIXTURE, MODEL_FOLDER
from recipe.export import model_of_bundle, model_of_checkpoint
from recipe.model import Llama
from recipe.pack import held_out_windows

WINDOWS = 16
SPANS = (1, 2, 4, 8, 16, 32)
"""Numbers of neighbouring tokens whose active neurons are counted together."""


def active_neurons(model: Llama, ids: Tensor) -> list[Tensor]:
    """For each layer, (n, T, F) booleans: true where a gate of the (n, T) windows is not zero."""
    found: list[Tensor] = []

    def keep(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found.append(module.activation(module.gate_proj(inputs[0])) != 0)

    hooks = [layer.mlp.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model.logits_and_gates(ids)
    for hook in hooks:
        hook.remove()
    return found


def distinct_share(active: Tensor, span: int) -> float:
    """Mean share of neurons that are active at least once in a span of `span` tokens. active: (n, T, F)."""
    windows, tokens, neurons = active.shape
    spans = active[:, : tokens // span * span].view(windows, -1, span, neurons)
    return float(spans.any(2).float().mean())


def also_before(active: Tensor) -> float:
    """Share of active neurons that were also active for the previous token."""
    again = int((active[:, 1:] & active[:, :-1]).sum())
    return again / max(1, int(active[:, 1:].sum()))


def measure(model: Llama, build: Path, limit: int) -> dict[str, dict[str, list[Any]]]:
    """For each domain, lists by layer: zeros, also_before, and distinct shares for each of SPANS."""
    found = {}
    for domain in MIXTURE:
        windows = held_out_windows(build, domain, model.shape.max_position_embeddings, limit)
        layers = active_neurons(model, torch.from_numpy(windows))
        found[domain] = {
            "zeros": [1 - layer.float().mean().item() for layer in layers],
            "also_before": [also_before(layer) for layer in layers],
            "distinct": [[distinct_share(layer, span) for span in SPANS] for layer in layers],
        }
    return found


def layer_table(found: dict[str, dict[str, list[Any]]], key: str) -> str:
    """Markdown table: a row per domain, a column per layer, and the mean."""
    layers = range(len(next(iter(found.values()))[key]))
    return _table(
        ["held-out text", *(f"layer {layer}" for layer in layers), "mean"],
        [[domain, *values[key], sum(values[key]) / len(layers)] for domain, values in found.items()],
    )


def distinct_table(values: dict[str, list[Any]]) -> str:
    """Markdown table of one domain's distinct shares: a row per layer, a column per span."""
    columns = list(zip(*values["distinct"], strict=True))
    mean = ["mean", *(sum(column) / len(column) for column in columns)]
    rows = [[f"layer {layer}", *shares] for layer, shares in enumerate(values["distinct"])]
    return _table(["tokens", *map(str, SPANS)], [*rows, mean])


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, *shares in rows:
        lines.append(f"| {name} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |")
    return "\n".join(lines)


def report(found: dict[str, dict[str, list[Any]]]) -> str:
    parts = [
        "Gate activations that are exactly zero:",
        layer_table(found, "zeros"),
        "Of the active neurons, those that were active for the token before:",
        layer_table(found, "also_before"),
    ]
    for domain, values in found.items():
        parts += [f"Distinct active neurons over neighbouring tokens, {domain}:", distinct_table(values)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure activation sparsity on held-out text.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a bundle of this recipe")
    parser.add_argument("--name", help="a run's checkpoint instead")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the token streams are")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows per domain")
    arguments = parser.parse_args()
    if arguments.name:
        model = model_of_checkpoint(arguments.build / "runs" / arguments.name)
    else:
        model = model_of_bundle(arguments.model)
    found = measure(model, arguments.build, arguments.windows)
    print(report(found))
    print(json.dumps({"spans": SPANS, "domains": found}))


if __name__ == "__main__":
    main()
