"""What a drafter should hold of a dense model's neurons in the memory of a share of them.

A drafter that reads nothing makes do with what is in memory. It may hold the first neurons as they are and
count the others as zero, or hold a coarser copy of more of them (SubSpec, arXiv 2509.18344). Each way is
tried with the same bytes, on the model's own greedy continuations of held-out prompts: a chain of draft
tokens starts at every fourth token, behind the model's own keys and values. Prints a Markdown table of the
tokens that a pass would give, and of the neurons that are read for each of them: a coarse copy saves the pass
that verifies no reads. Then a JSON line. Rounding is to the nearest, in groups of 64, with a float16 scale
and bias each.

    ondevice convert SOURCE --output BUNDLE --text FILE
    python -m tests.benchmarks.explain.resident_substitutes --model BUNDLE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import ondevice
from ondevice.api import open_model
from ondevice.backends.base import Float32, KVLayout
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend, ReferenceFeedForward
from ondevice.bundle.reader import Bundle
from ondevice.config import GROUP_SIZE, RuntimeConfig
from ondevice.measure.drafters import prompt_ids
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from tests.benchmarks.lib.held_out_prompts import held_out_tasks
from tests.benchmarks.lib.measure import note
from tests.support.engines import running

STORED_BITS = 4.5
"""Bits of a 4-bit weight with its share of a scale and a bias."""
COARSE = {"3 bits": 3.5, "2 bits": 2.5}
SHARES = (0.3, 0.5, 0.7)
CHAIN, EVERY = 4, 4


def rounded(rows: Float32, bits: int) -> Float32:
    """Rows (F, D) as `bits` bits hold them."""
    width = rows.shape[1]
    padded = np.pad(rows, ((0, 0), (0, -width % GROUP_SIZE)), mode="edge")
    groups = padded.reshape(len(rows), -1, GROUP_SIZE)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    scale = np.maximum((high - low) / (2**bits - 1), 1e-8).astype(np.float16).astype(np.float32)
    bias = low.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((groups - bias) / scale), 0, 2**bits - 1)
    found: Float32 = (codes * scale + bias).reshape(padded.shape)[:, :width].astype(np.float32)
    return found


def room(neurons: int, share: float, coarse: str | None) -> tuple[int, int]:
    """How many first neurons the bytes of `share` of them hold as they are, and how many in all."""
    if coarse is None:
        return round(share * neurons), round(share * neurons)
    cost = COARSE[coarse] / STORED_BITS
    # Where every neuron has room as a coarse one, the first of them stay whole.
    whole = round(neurons * max(0.0, share - cost) / (1 - cost))
    return whole, neurons if share >= cost else round(share / cost * neurons)


def held(layer: ReferenceFeedForward, share: float, coarse: str | None) -> ReferenceFeedForward:
    """A layer as the bytes of `share` of its neurons hold it: the first as they are, more of them coarser."""
    whole, rest = room(len(layer.gate), share, coarse)
    bits = 0 if coarse is None else int(coarse.split()[0])

    def matrix(rows: Float32) -> Float32:
        found = np.zeros_like(rows)
        found[:whole] = rows[:whole]
        if rest > whole:
            found[whole:rest] = rounded(rows[whole:rest], bits)
        return found

    assert layer.up is not None
    return replace(layer, gate=matrix(layer.gate), up=matrix(layer.up), down=matrix(layer.down))


def drafter(model: Transformer, share: float, coarse: str | None) -> Transformer:
    """The model with what a share of its neurons' bytes holds."""
    layers = tuple(
        replace(layer, feed_forward=held(layer.feed_forward, share, coarse)) for layer in model.weights.layers
    )
    return Transformer(model.config, ReferenceBackend(), replace(model.weights, layers=layers))


def accepted(model: Transformer, draft: Transformer, text: Sequence[int], start: int) -> list[int]:
    """Draft tokens that are right, of chains that begin at every fourth token from `start` on."""
    kv = SequenceState(KVLayout(model.config, 32))
    model.run(ForwardBatch(text[:start]), kv)
    counts = []
    for at in range(start, len(text) - CHAIN):
        if (at - start) % EVERY == 0:
            last, right = text[at], 0
            while right < CHAIN:
                hidden = draft.run(ForwardBatch([last]), kv).hidden
                last = int(draft.logits(hidden)[0].argmax())
                if last != text[at + 1 + right]:
                    break
                right += 1
            kv.truncate(at)
            counts.append(right)
        model.run(ForwardBatch([text[at]]), kv)
    return counts


def continuations(folder: Path, prompts: int, tokens: int) -> list[tuple[list[int], int]]:
    """Each prompt with the model's own greedy continuation, and the prompt's number of tokens."""
    resolved = open_model(folder, RuntimeConfig(sparsity="dense", speculation="off"))
    asked = prompt_ids(resolved, held_out_tasks(prompts), tokens)
    found = []
    with ondevice.load(folder, sparsity="dense", speculation="off") as model:
        for ids in (ids for of_task in asked.values() for ids in of_task):
            answer = model.generate(tokens=ids, max_tokens=tokens, temperature=0.0)
            found.append(([*ids, *answer.tokens], len(ids)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    if bundle.config.zeros_gates:
        raise SystemExit(
            f"{bundle.name} has {bundle.config.activation} gates: its neurons are cached one by one"
        )
    texts = continuations(args.model, args.prompts, args.max_tokens)
    if not any(len(text) - start > CHAIN for text, start in texts):
        raise SystemExit(f"no text has more than {CHAIN} tokens; raise --prompts or --max-tokens")
    ways: tuple[str | None, ...] = (None, *COARSE)
    table: dict[str, dict[str, dict[str, float]]] = {}
    with running(args.model) as model:
        for share in SHARES:
            for coarse in ways:
                draft, counts = drafter(model, share, coarse), []
                for text, start in texts:
                    counts += accepted(model, draft, text, start)
                name, tokens = coarse or "first neurons", 1 + float(np.mean(counts))
                whole, _ = room(neurons := model.config.intermediate_size, share, coarse)
                found = {"tokens_per_pass": tokens, "read_per_token": (1 - whole / neurons) / tokens}
                table.setdefault(name, {})[f"{share:g}"] = found
                note(f"{name}, {share:g}: {tokens:.2f} tokens per pass")
    print("| held | " + " | ".join(f"{share:.0%} of the bytes" for share in SHARES) + " |")
    print("|---" * (1 + len(SHARES)) + "|")
    for name, row in table.items():
        cells = [f"{of['tokens_per_pass']:.2f}, {of['read_per_token']:.1%} read" for of in row.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    ordered = bundle.manifest.provenance.ordered_tokens
    print(json.dumps({"benchmark": "resident_substitutes", "model": bundle.name, "ordered": ordered} | table))


if __name__ == "__main__":
    main()
