"""What the model says to one message, token by token, with its margins: what `ondevice doctor` compares with.

    python -m recipe.recorded_tokens --model ..

asks the bundle's `cpu` backend, greedily, and writes recorded_tokens.json beside its files. `make train` ends
with it; it is to be made anew when the model is, or when a kernel's arithmetic changes.
"""

from __future__ import annotations

import argparse
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from ondevice.doctor.generation import CONTEXT, RECORDED, RECORDED_VERSION
from recipe.config import MODEL_FOLDER

MESSAGE = "How many silver medals did Norway win? [bronze, gold, nation, silver]"
"""The model is sure of its answer: all margins are above the tolerance of every backend."""
MOST_TOKENS = 32
DIGITS = 4


def recorded(folder: Path, message: str = MESSAGE) -> dict[str, Any]:
    """The recording as JSON values: the answer to its end, or its first MOST_TOKENS tokens."""
    with ondevice.load(folder, backend="cpu", max_context=CONTEXT) as model:
        prompt = model.chat_ids([{"role": "user", "content": message}])
        response = model.generate(tokens=prompt, max_tokens=MOST_TOKENS)
        logits = model.logits([*prompt, *response.tokens])[len(prompt) - 1 : -1]
    second, best = np.partition(logits, -2, axis=1)[:, -2:].T
    return {
        "version": RECORDED_VERSION,
        "manifest_sha256": sha256((folder / "bundle.json").read_bytes()).hexdigest(),
        "message": message,
        "prompt": list(prompt),
        "tokens": list(response.tokens),
        "margins": [round(float(margin), DIGITS) for margin in best - second],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    path = arguments.model / RECORDED
    path.write_text(json.dumps(recorded(arguments.model)) + "\n", encoding="ascii")
    print(f"{path} is written")


if __name__ == "__main__":
    main()
