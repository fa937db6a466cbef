"""An EAGLE-3 head (arXiv 2503.01840) for a model of this recipe, some minutes of a CPU.

    python -m recipe.eagle --model .. --minutes 15 --write DIR

The head learns to say what the model says: its labels are the model's own distributions, over text of the
recipe and over what the model says itself behind the beginnings of such text. As in the paper's training-time
test, every step after the first takes the head's own output for hidden states. It has the model's embeddings
and output head. `--write DIR` adds it to a bundle of the same weights; where that has one, training goes on
from it.

Legend: B windows, T tokens, D width, V vocabulary, H heads, d head_dim.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ondevice
from ondevice.backends.reference import ReferenceBackend
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.draft_layers.write import write_draft_layer
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from recipe.config import DATA, MODEL_FOLDER
from recipe.data import split_documents
from recipe.export import model_of_bundle
from recipe.model import Llama, RMSNorm, rotate
from recipe.tokenizer import Encoder

DOMAINS = {"dialogue": 0.3, "sql": 0.2, "restaurants": 0.15, "novels": 0.2, "math": 0.15}
"""Share of the windows from each domain."""
PREFIX, SAID = 32, 160
"""Tokens of a text's beginning, and of what the model says behind it."""
TAPS = (2, 4, 6)
"""The layers that the hidden states enter; the last is what leaves the model's six."""
STEPS = 4
"""Draft tokens ahead that are trained, each with the outputs of the one before for hidden states."""
STEP_WEIGHT = 0.8
"""Weight of a step's loss beside that of the step before."""
BATCH, WINDOW = 4, 192
RATE, WARM_UP = 2e-3, 20
END_TOKENS = (1, 2)
"""Tokens that end a text."""


class Head(nn.Module):
    """The decoder layer, by the names of `bundle/draft_layers.py`."""

    def __init__(self, width: int, heads: int, neurons: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.fc = nn.Linear(len(TAPS) * width, width, bias=False)
        self.qkv = nn.Linear(2 * width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, neurons, bias=False)
        self.up = nn.Linear(width, neurons, bias=False)
        self.down = nn.Linear(neurons, width, bias=False)
        names = ("embedding_norm", "hidden_norm", "feed_forward_norm", "final_norm")
        self.norms = nn.ModuleDict({name: RMSNorm(width, eps) for name in names})
        with torch.no_grad():
            # Begin with the model's last hidden state, which its own output head reads.
            self.fc.weight.mul_(0.1)
            self.fc.weight[:, -width:] += torch.eye(width)
            self.out.weight.mul_(0.1)
            self.down.weight.mul_(0.1)

    def projected(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Queries, keys and values, (B, H, T, d) each, for embeddings and hidden states (B, T, D)."""
        batch, tokens, _ = hidden.shape
        x = torch.cat([self.norms["embedding_norm"](embedded), self.norms["hidden_norm"](hidden)], -1)
        qkv = self.qkv(x).view(batch, tokens, 3 * self.heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        return [rotate(q, cos, sin) / math.sqrt(self.head_dim), rotate(k, cos, sin), v]

    def finished(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """(B, T, D) outputs, for hidden states and what the rows attend to, (B, H, T, d)."""
        batch, _, tokens, _ = seen.shape
        x = hidden + self.out(seen.transpose(1, 2).reshape(batch, tokens, -1))
        inner = self.norms["feed_forward_norm"](x)
        found: Tensor = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return found


def rotary(tokens: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (T, d / 2)."""
    angles = torch.arange(tokens)[:, None] / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.cos(angles), torch.sin(angles)


def shifted(x: Tensor, by: int) -> Tensor:
    """x (..., T, n) with each row `by` places later, zeros before them."""
    return functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def attended(step: int, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """What the rows of a step see, (B, H, T, d): rows of the text up to `step` before them, then a row of
    each step since, which are those of the draft that leads to them.
    """
    tokens = q.shape[-2]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1 - step)
    scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(hidden, -1e30)]
    for past in range(1, step + 1):
        scores.append((q * shifted(keys[past], step - past)).sum(-1, keepdim=True))
    weights = torch.softmax(torch.cat(scores, -1), -1)
    found = weights[..., :tokens] @ values[0]
    for past in range(1, step + 1):
        found = found + weights[..., tokens + past - 1, None] * shifted(values[past], step - past)
    return found


class Base:
    """The model whose hidden states the head reads, without gradients."""

    def __init__(self, model: Llama, theta: float) -> None:
        self.model, self.theta = model.eval().requires_grad_(False), theta
        self.embeddings = model.model.embed_tokens.weight.detach()

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, 3 D) tapped hidden states, and (B, T, V) logarithms of what the model would say."""
        x, tapped = self.embeddings[ids], []
        cos, sin = rotary(ids.shape[1], self.model.shape.head_dim, self.theta)
        layers = self.model.model.layers
        for index, layer in enumerate(layers):
            tapped += [x] if index in TAPS else []
            inner = layer.input_layernorm(x)
            x = x + layer.self_attn(inner, cos, sin, torch.float32, 0)
            x = x + layer.mlp(layer.post_attention_layernorm(x), torch.float32, 0)[0]
        tapped.append(x)
        logits = self.model.model.norm(x) @ self.embeddings.t()
        return torch.cat(tapped, -1), torch.log_softmax(logits, -1)


def losses(head: Head, base: Base, ids: Tensor, steps: int) -> tuple[Tensor, list[float]]:
    """The loss, and the share of rows in which the head says what the model would, for each step."""
    tapped, said = base.states(ids)
    # The row at t has the token at t + 1 and the hidden state at t; it says what follows that token.
    embedded, hidden, labels = base.embeddings[ids[:, 1:]], head.fc(tapped[:, :-1]), said[:, 1:]
    cos, sin = rotary(hidden.shape[1], head.head_dim, base.theta)
    keys, values, total, right = list[Tensor](), list[Tensor](), torch.zeros(()), list[float]()
    for step in range(steps):
        q, k, v = head.projected(embedded, hidden, cos, sin)
        keys.append(k)
        values.append(v)
        after = head.finished(hidden, attended(step, q, keys, values))
        logits = (head.norms["final_norm"](after) @ base.embeddings.t())[:, step:]
        wanted = labels[:, step:]
        total = total - STEP_WEIGHT**step * (wanted.exp() * torch.log_softmax(logits, -1)).sum(-1).mean()
        right.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean().item())
        hidden = shifted(after, 1)
    return total, right


def windows(data: Path, encoder: Encoder, count: int, seed: int) -> Tensor:
    """(count, WINDOW) token ids, of documents that are drawn by their domain's share."""
    rng, rows = np.random.default_rng(seed), list[list[int]]()
    for domain, share in DOMAINS.items():
        documents, _ = split_documents(data, domain)
        wanted, row = round(share * count), list[int]()
        for index in rng.permutation(len(documents)):
            row += encoder.encode(documents[index])
            while len(row) >= WINDOW and wanted:
                rows.append(row[:WINDOW])
                row, wanted = row[WINDOW:], wanted - 1
            if not wanted:
                break
    return torch.tensor(rows)[torch.from_numpy(rng.permutation(len(rows)))]


def continuations(model: Path, text: Tensor, count: int) -> Tensor:
    """(count, PREFIX + SAID) tokens: the beginnings of windows, and what the model says, mostly greedily."""
    found = list[list[int]]()
    with ondevice.load(model) as loaded:
        for index, row in enumerate(text[:count].tolist()):
            prompt, temperature = row[:PREFIX], 0.0 if index % 4 else 0.7
            bias = {token: -math.inf for token in END_TOKENS}
            said = loaded.generate(
                tokens=prompt, max_tokens=SAID, temperature=temperature, seed=index, logit_bias=bias
            )
            found.append([*prompt, *said.tokens])
    return torch.tensor([row for row in found if len(row) == WINDOW])


def begun(head: Head, folder: Path) -> bool:
    """Take the weights of the bundle's head. Returns False if it has none."""
    bundle = Bundle.open(folder)
    layer = bundle.eagle
    if layer is None:
        return False
    with FlashReader([bundle.sidecar_file(layer.sidecar.tensors)]) as reader:
        backend = ReferenceBackend()
        model_weights: Any = SimpleNamespace(embedding=None, head=None, final_norm=None)
        loaded = load_draft_layer(bundle, layer, reader, backend, model_weights, 1).weights
    with torch.no_grad():
        for name, norm in head.norms.items():
            norm.weight.copy_(torch.from_numpy(loaded[name]))
        of = {name: torch.from_numpy(np.array(loaded[name].weight)) for name in layer.matrices(bundle.config)}
        head.fc.weight.copy_(torch.cat([of[f"fc.{tap}"] for tap in range(len(TAPS))], 1))
        head.qkv.weight.copy_(torch.cat([of["qkv.embedding"], of["qkv.hidden"]], 1))
        for name in ("out", "gate", "up", "down"):
            getattr(head, name).weight.copy_(of[name])
    return True


def trained(head: Head, base: Base, text: Tensor, minutes: float) -> list[float]:
    """Train for `minutes`, on windows of the text over and over. Returns the shares of held-out rows."""
    held, text = text[:8], text[8:]
    optimizer = torch.optim.AdamW(head.parameters(), RATE, (0.9, 0.95), weight_decay=0.01)
    begun, step = time.monotonic(), 0
    while (passed := (time.monotonic() - begun) / (60 * minutes)) < 1:
        rate = RATE * min(1.0, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * passed)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = step * BATCH % (len(text) - BATCH)
        loss, right = losses(head, base, text[at : at + BATCH], STEPS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            shares = " ".join(f"{share:.3f}" for share in right)
            print(f"step {step}, {100 * passed:.0f} %: loss {loss.item():.3f}, right {shares}", flush=True)
    with torch.no_grad():
        return losses(head, base, held, STEPS)[1]


def arrays(head: Head) -> dict[str, np.ndarray]:
    """The arrays of `write_draft_layer`."""
    found = {f"fc.{tap}": part for tap, part in enumerate(head.fc.weight.chunk(len(TAPS), 1))}
    found |= dict(zip(("qkv.embedding", "qkv.hidden"), head.qkv.weight.chunk(2, 1), strict=True))
    found |= {name: getattr(head, name).weight for name in ("out", "gate", "up", "down")}
    found |= {name: norm.weight for name, norm in head.norms.items()}
    return {name: np.ascontiguousarray(it.detach().numpy()) for name, it in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--windows", type=int, default=3000)
    parser.add_argument("--continuations", type=int, default=600)
    parser.add_argument("--neurons", type=int, default=768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    bundle = Bundle.open(arguments.model)
    config, rope = bundle.config, bundle.config.ropes[0]
    model = model_of_bundle(arguments.model)
    base = Base(model, model.shape.rope_theta)
    head = Head(config.hidden_size, config.num_heads, arguments.neurons, config.norm.eps)
    with torch.no_grad():
        head.norms["final_norm"].weight.copy_(model.model.norm.weight)
    encoder = Encoder((arguments.model / "tokenizer.model").read_bytes())
    text = windows(arguments.data, encoder, arguments.windows, arguments.seed)
    own = continuations(arguments.model, text, arguments.continuations)
    text = torch.cat([text, own])
    text = text[torch.randperm(len(text))]
    goes_on = begun(head, arguments.write)
    print(f"{len(text)} windows of {WINDOW} tokens; goes on: {goes_on}", flush=True)
    right = trained(head, base, text, arguments.minutes)
    layer = DraftLayer(
        kind="eagle",
        model="0" * 64,
        bits=8,
        taps=TAPS,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        neurons=arguments.neurons,
        activation="silu",
        eps=config.norm.eps,
        frequencies=rope.frequencies,
        magnitude=rope.magnitude,
        tokens=config.vocab_size,
    )
    write_draft_layer(arguments.write, layer, arrays(head))
    print(json.dumps({"held_out_right": right, "parameters": sum(p.numel() for p in head.parameters())}))


if __name__ == "__main__":
    main()
