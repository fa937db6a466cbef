"""How far a text's checkpoints are apart in models with recurrent layers, and what one takes.

    .venv/bin/python -m tests.benchmarks.explain.checkpoints

Shapes of published models; no weights are needed, and nothing is run. Prints a table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ondevice.backends.kv_layout import KVLayout
from ondevice.model_config import NO_ATTENTION, DeltaSpec, LayerSpec, Mamba2Spec, ModelConfig
from tests.golden.build import golden_config

QWEN = DeltaSpec(key_heads=16, value_heads=32, key_width=128, value_width=128)


class Shape(NamedTuple):
    """What counts of a model: layers with attention, their heads of keys, the width of one, and layers with
    states. beside: these are those with attention.
    """

    attention: int
    keys: int
    width: int
    recurrent: int
    spec: DeltaSpec | Mamba2Spec
    beside: bool = False


SHAPES = {
    "Qwen3.6-35B-A3B": Shape(10, 2, 256, 30, QWEN),
    "Qwen3.5-4B": Shape(8, 4, 256, 24, QWEN),
    "Granite 4.0 H Tiny": Shape(4, 4, 128, 36, Mamba2Spec(48, 64, 1, 128, 4, True)),
    "Nemotron 3 Nano": Shape(6, 2, 128, 23, Mamba2Spec(64, 64, 8, 128, 4, True)),
    "Falcon-H1 0.5B": Shape(36, 2, 64, 36, Mamba2Spec(24, 64, 1, 128, 4, True), beside=True),
}


def config_of(shape: Shape) -> ModelConfig:
    """A model of this shape, as far as its texts' memory goes."""
    heads = {"num_heads": shape.keys, "num_kv_heads": shape.keys, "head_dim": shape.width}
    model = golden_config(num_layers=1, **heads)
    plain = model.layers[0]
    rule = {"delta" if isinstance(shape.spec, DeltaSpec) else "mamba2": shape.spec}
    if shape.beside:
        layers: list[LayerSpec] = [replace(plain, **rule)] * shape.attention  # type: ignore[arg-type]
    else:
        recurrent = replace(plain, attention=NO_ATTENTION, **rule)  # type: ignore[arg-type]
        layers = [plain] * shape.attention + [recurrent] * shape.recurrent
    return replace(model, layers=tuple(layers))


def main() -> None:
    print("| model | states | distance at 16 bits | at 8 bits |\n|---|---|---|---|")
    for name, shape in SHAPES.items():
        wide, narrow = (KVLayout(config_of(shape), bits).states for bits in (16, 8))
        print(f"| {name} | {wide.nbytes / 1e6:.0f} MB | {wide.spacing:,} | {narrow.spacing:,} |")


if __name__ == "__main__":
    main()
