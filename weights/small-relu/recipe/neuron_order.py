"""The order of a SwiGLU twin's neurons: on training text, those that add most come first.

    python -m recipe.neuron_order --model DIR

Do this before streams are trained: they learn to draft with the first neurons of each layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ondevice.converters.training.neuron_order import MOST_TOKENS, order_by_contributions
from recipe.config import BUILD, CONTEXT, MIXTURE
from recipe.pack import Batches, read_stream

SEED = 23


def main() -> None:
    parser = argparse.ArgumentParser(description="Order a bundle's neurons by what they add.")
    parser.add_argument("--model", type=Path, required=True, help="the bundle's folder")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the token streams are")
    arguments = parser.parse_args()
    streams = {domain: read_stream(arguments.build, domain, "train") for domain in MIXTURE}
    windows = Batches(streams, MIXTURE, CONTEXT, SEED).draw(MOST_TOKENS // CONTEXT)
    order_by_contributions(arguments.model, windows[:, :CONTEXT].tolist())


if __name__ == "__main__":
    main()
