"""A large model that says what a small one says: a trained bundle embedded in a larger Llama shape.

Speed depends on shapes, on which neurons fire and on which tokens are drafted, and these on a trained model.
The large model's text, its drafts and their acceptance are the small model's, and its cost is that of its
shape. Whatever is measured on it is to be called that: measured on an embedded model.

    python -m tests.benchmarks.lib.embedded_model --output DIR --shape 7b

It writes DIR/small, the shipped model in q4, and DIR/large, and prints how their neurons fire. With
`--head-only` it gives bundles that are there the head that the shipped model has now.

How the function stays the same is told in `embedded_weights.py`; streams, predictors and hotness come from
`embedded_sidecars.py`, an EAGLE-3 head from `embedded_eagle.py`, and neurons beside the real ones from
`filler_neurons.py`. `embedded_gguf.py` writes the same function for llama.cpp.

What it doesn't imitate: between trained layers the stream doesn't change, so a prefetch of the next layer's
neurons finds all that fire.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from ondevice.bundle.reader import Bundle
from ondevice.converters.training.activations import record_activations
from tests.benchmarks.lib.embedded_eagle import copy_eagle, embed_eagle
from tests.benchmarks.lib.embedded_sidecars import copy_sidecars, embed_sidecars, predicted_rates
from tests.benchmarks.lib.embedded_weights import EmbeddedModel
from tests.benchmarks.lib.filler_neurons import facts_line, mean_of, own_text, record, statistics
from tests.benchmarks.lib.random_model import LLAMA_7B, Shape
from tests.benchmarks.lib.stored_model import read_model, small_in_q4, write_bundle
from tests.support.paths import SHIPPED

TINY = Shape("tiny", 1024, 14, 2816, 8, vocab_size=4608, head_dim=128)
SHAPES = {"7b": LLAMA_7B, "tiny": TINY}
CALIBRATION_TOKENS, MEASURED_TOKENS = 3072, 512


def embed(source: Path, shape: Shape, folder: Path, tokens: int = CALIBRATION_TOKENS) -> EmbeddedModel:
    """Write `folder`/small, the bundle `source` in q4, and `folder`/large, the same function in `shape`.

    tokens: of the model's own text, by which fillers' thresholds are set.
    """
    head_dim = shape.head_dim or shape.hidden_size // shape.num_heads
    small = small_in_q4(source, head_dim, folder / "small")
    text = record(small, own_text(small.bundle.path, tokens, 0))
    model = EmbeddedModel(small, shape, text)
    copy_sidecars(source, small.bundle.path, model.frequencies, len(text.entering[0]))
    copy_eagle(source, small.bundle.path)
    name = small.bundle.manifest.provenance.source
    note = f"embedded model: the function of {name} in q4, in the shape {shape.name}"
    write_bundle(
        folder / "large",
        small.bundle,
        model.config,
        attention=model.attention(),
        neurons=model.neurons,
        embedding=model.embedding(),
        final_norm=model.final_norm(),
        head=model.head(),
        notes=(note,),
    )
    embed_sidecars(model, folder / "large")
    embed_eagle(model, folder / "large")
    return model


def embed_head(source: Path, shape: Shape, folder: Path) -> None:
    """Give the bundles that `embed` wrote to `folder` the EAGLE-3 head that `source` has now."""
    copy_eagle(source, folder / "small")
    small = read_model(folder / "small")
    # A text sets fillers' thresholds, and a head has no fillers: any will do.
    embed_eagle(EmbeddedModel(small, shape, record(small, [[0]])), folder / "large")


def firing(model: EmbeddedModel, folder: Path, tokens: int = MEASURED_TOKENS) -> dict[str, dict[str, float]]:
    """Mean `statistics` over layers, on text that set no threshold.

    The small model's layers count as often as there are layers like them in the large one.
    """
    pieces = own_text(folder / "small", tokens, 1)
    rows: dict[str, list[dict[str, float]]] = {"small": [], "large": [], "fillers alone": []}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        places = [Path(scratch, name) for name in ("small", "large")]
        for place in places:
            place.mkdir()
        small, large = (record_activations(Bundle.open(folder / at.name), pieces, at) for at in places)
        for layer, source in enumerate(model.sources):
            fired = np.unpackbits(large.fired(layer), axis=1, count=model.shape.intermediate_size) > 0
            own = np.unpackbits(small.fired(source), axis=1, count=model.small.config.intermediate_size) > 0
            rows["small"].append(statistics(own))
            rows["large"].append(statistics(fired))
            if not model.is_real(layer):
                rows["fillers alone"].append(statistics(fired))
    return {name: mean_of(found) for name, found in rows.items()}


def main() -> None:
    """Write both bundles and print the facts, which are of an embedded model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the bundles `small` and `large`"
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="7b")
    parser.add_argument("--source", type=Path, default=SHIPPED)
    parser.add_argument(
        "--head-only", action="store_true", help="give bundles that are there the EAGLE-3 head of --source"
    )
    args = parser.parse_args()
    if args.head_only:
        embed_head(args.source, SHAPES[args.shape], args.output)
        print_head(Bundle.open(args.output / "large"))
        return
    model = embed(args.source, SHAPES[args.shape], args.output)
    large = Bundle.open(args.output / "large")
    facts: dict[str, object] = {"embedded_model": args.shape, "layers": model.layers}
    # Where no gate is zero, every neuron counts for every token: there is nothing to imitate.
    if large.config.zeros_gates:
        facts |= sparse_facts(model, args.output)
    print_head(large)
    crossed = 0 if large.streams is None else len(large.streams.layers(large.config))
    print(f"streams of an embedded model cross {crossed} of {large.config.num_layers} layers")
    print(json.dumps(facts | {"stream_layers": crossed, "bundle_bytes": large.bundle_bytes}))


def print_head(large: Bundle) -> None:
    """Say how large the EAGLE-3 head is, if there is one."""
    if large.eagle is not None:
        nbytes = (large.path / large.eagle.sidecar.tensors).stat().st_size
        print(f"the EAGLE-3 head of an embedded model has {nbytes / 1e6:.1f} MB")


def sparse_facts(model: EmbeddedModel, folder: Path) -> dict[str, object]:
    """How the neurons fire and how well they are predicted, printed as well."""
    text = record(model.small, own_text(folder / "small", MEASURED_TOKENS, 1))
    found, rates = firing(model, folder), predicted_rates(model, text)
    print("firing, an embedded model        " + "".join(f"{name:>9}" for name in found["small"]))
    for name, row in found.items():
        print(facts_line(name, row))
    for name, rate in rates.items():
        missed, selected = rate["missed"], rate["selected"]
        print(f"predictors of an embedded model, {name}: {missed:.1%} missed, {selected:.1%} selected")
    return {"firing": found, "predictors": rates}


if __name__ == "__main__":
    main()
