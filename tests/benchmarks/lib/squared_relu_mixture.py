"""The small trained mixture with squared ReLU experts: its weights, trained on with that activation.

A mixture whose neurons fire seldom, and whose text is real. Squared ReLU is another function, so a part of
what the model had learnt is lost: compare it with itself alone. Needs PyTorch and the shared text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.lib.held_out_prompts import DOMAINS
from tests.support.paths import SHARED_DATA, SHIPPED
from tests.support.trained_models import write_mixture

KINDS = ("dialogue", "meaning")
WINDOW, BATCH = 128, 4
RATE = 2e-3
"""Highest learning rate; it falls to zero in a straight line."""


def training_tokens(count: int) -> list[int]:
    """Tokens of documents that the model may learn from, the kinds in turn."""
    if str(SHIPPED) not in sys.path:
        sys.path.insert(0, str(SHIPPED))
    from recipe.data import split_documents
    from recipe.tokenizer import Encoder

    encoder = Encoder((SHIPPED / "tokenizer.model").read_bytes())
    rng = np.random.default_rng(3)
    found: list[int] = []
    kinds = [split_documents(SHARED_DATA, DOMAINS[kind])[0] for kind in KINDS]
    while len(found) < count:
        for documents in kinds:
            found += [int(it) for it in encoder.encode(documents[int(rng.integers(len(documents)))])]
    return found[:count]


def write_relu2_mixture(folder: Path, tokens: int) -> Path:
    """Write the Hugging Face folder, trained on `tokens` tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    write_mixture(folder)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, hidden_act="relu2", dtype=torch.float32)
    steps = tokens // (WINDOW * BATCH)
    text = torch.tensor(training_tokens(steps * WINDOW * BATCH)).reshape(steps, BATCH, WINDOW)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    model.train()
    for step, batch in enumerate(text):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    model.half().save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    arguments = parser.parse_args()
    write_relu2_mixture(arguments.folder, arguments.tokens)


if __name__ == "__main__":
    main()
