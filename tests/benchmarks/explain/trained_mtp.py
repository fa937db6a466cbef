"""A tiny hybrid with a layer that predicts one token more, trained on text: what its drafts bring.

    .venv/bin/python -m tests.benchmarks.explain.trained_mtp --workdir DIR [--minutes 20]

The model, in Qwen3.5's form, has gated delta rules in three of four layers and 2.6 million parameters; it and
the layer learn together, in PyTorch, on the packed dialogues and SQL of the recipe (`make model-tables`
packs them). The checkpoint is saved as its family's are, converted by `ondevice convert`, and its layer by
`--draft-for`. `explain.draft_layer` then measures the bundle. A folder that has a checkpoint isn't trained
again.

Legend: B windows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from tests.benchmarks.lib.measure import note
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE, bundle_folder
from tests.support.mtp_checkpoints import OF_QWEN, change_config, one_layer
from tests.support.paths import ROOT, SHIPPED

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DOMAINS = ("dialogue", "sql")
BATCH, WINDOW = 8, 192
STEPS = 3
"""Draft tokens ahead that are trained, each with the layer's own outputs before it for hidden states."""
STEP_WEIGHT = 0.5
"""Weight of a step's loss beside that of the step before; the model's own has 1."""
RATE, WARM_UP = 4e-3, 50


class LayerAhead:
    """The layer, as `transformers`' own layer of attention over a mixture of embeddings and hidden states."""

    def __init__(self, model: Any) -> None:
        width, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.one = one_layer(model).train()
        self.one.embed_tokens = None
        norm = type(self.one.norm)
        self.embedding_norm, self.hidden_norm = norm(width, eps=eps), norm(width, eps=eps)
        self.joining = nn.Linear(2 * width, width, bias=False)

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What leaves the layer's norm, (B, T, D), for tokens' embeddings and the states before them."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        found: Tensor = self.one(inputs_embeds=self.joining(both), use_cache=False).last_hidden_state
        return found

    def parameters(self) -> list[Tensor]:
        parts = self.one, self.embedding_norm, self.hidden_norm, self.joining
        return [it for part in parts for it in part.parameters()]

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by the names that checkpoints have."""
        own = self.one.state_dict()
        found = {OF_QWEN["layer"] + name[9:]: it for name, it in own.items() if name.startswith("layers.0.")}
        parts = {"embedding_norm": self.embedding_norm, "hidden_norm": self.hidden_norm}
        found |= {OF_QWEN[name]: norm.weight for name, norm in parts.items()}
        return found | {OF_QWEN["norm"]: self.one.norm.weight, OF_QWEN["joining"]: self.joining.weight}


def loss_of(model: Any, ahead: LayerAhead, ids: Tensor) -> tuple[Tensor, list[float]]:
    """The loss, and that of the model and of each step, for windows (B, T)."""
    table = model.model.embed_tokens.weight
    hidden = model.model(ids, use_cache=False).last_hidden_state
    each = [functional.cross_entropy((hidden[:, :-1] @ table.t()).flatten(0, 1), ids[:, 1:].flatten())]
    embedded = model.model.embed_tokens(ids)
    for step in range(1, STEPS + 1):
        # The row of token t has what came out a row before it, and says which token is at t + 1.
        hidden = ahead(embedded[:, step:], hidden[:, :-1])
        logits = hidden[:, :-1] @ table.t()
        each.append(functional.cross_entropy(logits.flatten(0, 1), ids[:, step + 1 :].flatten()))
    total = sum((STEP_WEIGHT**step * it for step, it in enumerate(each)), torch.zeros(()))
    return total, [it.item() for it in each]


def train(data: Path, folder: Path, minutes: float) -> None:
    """Train both for `minutes` and save the checkpoint."""
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES)).train()
    ahead, rng = LayerAhead(model), np.random.default_rng(0)
    texts = [np.memmap(data / f"{domain}.train.bin", np.uint16) for domain in DOMAINS]
    parameters = [*model.parameters(), *ahead.parameters()]
    optimizer = torch.optim.AdamW(parameters, RATE, (0.9, 0.95), weight_decay=0.1)
    begun, step = time.monotonic(), 0
    while (passed := (time.monotonic() - begun) / (60 * minutes)) < 1:
        rate = RATE * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * passed)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = []
        for row in range(BATCH):
            text = texts[row % len(texts)]
            at = rng.integers(len(text) - WINDOW)
            rows.append(text[at : at + WINDOW].astype(np.int64))
        total, each = loss_of(model, ahead, torch.from_numpy(np.stack(rows)))
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            losses = " ".join(f"{it:.2f}" for it in each)
            note(f"step {step}, {100 * passed:.0f} %: losses {losses}")
    save(model, ahead, folder)


def save(model: Any, ahead: LayerAhead, folder: Path) -> None:
    """Write the checkpoint, with the shipped model's tokenizer and chat template."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    whole = load_file(path) | {name: it.detach().contiguous() for name, it in ahead.tensors().items()}
    save_file(whole, path, {"format": "pt"})
    change_config(folder, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    for name in ("tokenizer.model", "chat_template.jinja"):
        shutil.copyfile(SHIPPED / name, folder / name)


def main() -> int:
    """Train, convert and measure; the status is that of `explain.draft_layer`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe")
    parser.add_argument("--minutes", type=float, default=20.0)
    args = parser.parse_args()
    folder = args.workdir / "trained-mtp-hf"
    if not (folder / "chat_template.jinja").is_file():
        train(args.data, folder, args.minutes)
    bundle = bundle_folder(folder, args.workdir, "q8")
    if not (bundle / "mtp.json").is_file():
        command = [ONDEVICE, "convert", str(folder), "--draft-for", str(bundle)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    measured = [sys.executable, "-m", "tests.benchmarks.explain.draft_layer", "--model", str(bundle)]
    return subprocess.run([*measured, "--drafters", "mtp,lookup"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
