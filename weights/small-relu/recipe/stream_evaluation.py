"""How far streams guess right on held-out text that the base continues greedily: tokens per pass.

    python -m recipe.stream_evaluation --name small-relu

takes a run's last checkpoint, finished or not. Two ways of continuing: `replies`, where every assistant's
turn of held-out chats is the base's own and all questions are true (novels: 128 tokens after every 64 true
ones); and `onward`, 128 tokens after the first 64 of a document, past its end if need be. Three ways of
guessing: the likeliest token of each stream (chain); any of the three likeliest (tree of their products);
and the 2 to 64 nodes likeliest by the product of the streams' chances, the root among them. A pass gives the
accepted guesses and one token of the base's own. What a pass costs isn't this module's business.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from recipe.config import BUILD, MODEL_FOLDER
from recipe.continuations import Marks, Segment, Tokens, continued, documents, replies
from recipe.export import model_of_bundle
from recipe.frozen import Frozen
from recipe.multi_stream import MultiStreams
from recipe.pack import read_stream
from recipe.stream_loss import Batch, residency_masks
from recipe.stream_training import load_checkpoint, run_folder, training_of

STYLES = {"replies": 320, "onward": 192}
"""Tokens of a window."""
CHATS = ("dialogue", "sql", "restaurants", "math")
DOMAINS = ("dialogue", "sql", "restaurants", "novels", "math")
PROMPT_TOKENS, FREE_TOKENS = 64, 128
ROWS = 24
TREE_TOP, TREE_NODES, CANDIDATES = 3, (2, 4, 8, 16, 32, 64), 16
RESIDENCY_TOKENS = 8
BATCH = 4


@dataclass(frozen=True)
class Guesses:
    """(n, T) each, of the streams of every token: how many of their guesses are accepted one after another.

    right, in_top: (n, T, G) bool, whether a stream's likeliest token, or one of its likeliest, is the base's.
    best_first: by the nodes of the tree.
    """

    right: NDArray[np.bool_]
    in_top: NDArray[np.bool_]
    best_first: dict[int, NDArray[np.int64]]

    @property
    def chain(self) -> NDArray[np.int64]:
        return _in_a_row(self.right)

    @property
    def tree(self) -> NDArray[np.int64]:
        return _in_a_row(self.in_top)


def _in_a_row(found: NDArray[np.bool_]) -> NDArray[np.int64]:
    count: NDArray[np.int64] = np.cumprod(found, axis=-1).sum(-1)
    return count


def held_out_plan(
    texts: list[Tokens], stream: Tokens, row: int, marks: Marks, chat: bool, style: str
) -> Iterator[Segment]:
    """What a held-out window is made of: every row begins with another document."""
    if style == "onward":
        start = sum(len(text) for text in texts[: row % len(texts)]) + int(np.argmax(stream == marks.begin))
        yield Segment(np.array(stream[start : start + PROMPT_TOKENS]), FREE_TOKENS)
    for index in itertools.count(row * 7):
        document = texts[index % len(texts)]
        if chat:
            yield from replies(document, marks)
        else:
            for at in range(0, len(document), PROMPT_TOKENS):
                yield Segment(document[at : at + PROMPT_TOKENS], FREE_TOKENS)


def held_out(
    base: Frozen, build: Path, domain: str, style: str, rows: int
) -> tuple[Tensor, NDArray[np.bool_]]:
    """(n, T) windows of held-out text, continued by the base, and which tokens are its own."""
    marks, stream = Marks.of(build), read_stream(build, domain, "held_out")
    texts = documents(stream, marks)
    chat = domain in CHATS
    plans = [held_out_plan(texts, stream, row, marks, chat, style) for row in range(rows)]
    windows, own = continued(base, plans, min(STYLES[style], base.shape.max_position_embeddings))
    return torch.from_numpy(windows.astype(np.int64)), own


def guesses(base: Frozen, main: Frozen, streams: MultiStreams, ids: Tensor, residency_tokens: int) -> Guesses:
    """What the streams of every token of (n, T) windows guess. main: the base, or its shared mode."""
    gamma, (_, tokens) = streams.sizes.gamma, ids.shape
    right, in_top = [], []
    best: dict[int, list[NDArray[np.int64]]] = {nodes: [] for nodes in TREE_NODES}
    for part in ids.split(BATCH):
        positions = torch.arange(tokens).expand(len(part), tokens)
        trace = main.trace(part, streams.first_layer)
        masks = residency_masks(trace, Batch(part, positions, 1, (residency_tokens,) * len(part)))
        logits = functional.linear(streams(base, trace, positions, 1, masks), base.head).float()
        ahead = torch.arange(tokens)[:, None] + torch.arange(2, gamma + 2)
        targets = part[:, ahead.clamp(max=tokens - 1)]
        wanted = logits.gather(3, targets[..., None])
        rank = (logits > wanted).sum(-1).masked_fill(ahead >= tokens, 1 << 20)
        right.append((rank == 0).numpy())
        in_top.append((rank < TREE_TOP).numpy())
        chances = torch.softmax(logits, -1)
        true = chances.gather(3, targets[..., None]).squeeze(3) * (ahead < tokens)
        likeliest = chances.topk(CANDIDATES, dim=-1).values.flatten(0, 1)
        for nodes, found in best.items():
            found.append(_best_first(likeliest, true.flatten(0, 1), nodes - 1))
    best_first = {nodes: np.concatenate(found).reshape(ids.shape) for nodes, found in best.items()}
    return Guesses(np.concatenate(right), np.concatenate(in_top), best_first)


def _best_first(likeliest: Tensor, true: Tensor, nodes: int) -> NDArray[np.int64]:
    """(N,): of so many guesses, those that are accepted. Chances: likeliest (N, G, C), true (N, G)."""
    level = torch.ones(len(true), 1)
    levels = []
    for stream in range(true.shape[1]):
        children = (level[:, :, None] * likeliest[:, stream, None, :]).flatten(1)
        # A child is no likelier than its parent: what isn't among the best here has none among them.
        level = children.topk(min(nodes, children.shape[1]), dim=-1).values
        levels.append(level)
    every = torch.cat(levels, 1)
    least = every.topk(min(nodes, every.shape[1]), dim=-1).values[:, -1:]
    kept = (true.cumprod(-1) >= least) & (true >= likeliest[:, :, -1])
    return _in_a_row(kept.numpy())


def runs(own: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of the base's own tokens, but those that begin a window."""
    for row, flags in enumerate(own):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
        for start, end in edges.reshape(-1, 2).tolist():
            if start > 0:
                yield row, start, end


def tokens_per_pass(accepted: NDArray[np.int64], own: NDArray[np.bool_]) -> float:
    """Passes from the last true token to the end of every run; one token of each pass is the base's."""
    tokens = passes = 0
    for row, start, end in runs(own):
        at = start - 1
        while at < end - 1:
            at += min(1 + int(accepted[row, at]), end - 1 - at)
            passes += 1
        tokens += end - start
    return tokens / max(1, passes)


def given_before(found: NDArray[np.bool_], own: NDArray[np.bool_]) -> dict[str, list[int]]:
    """By stream, how often all streams before it are right (`asked`), and how often it is then (`right`).

    Counts, not shares: those of several texts are added up.
    """
    right, asked = np.zeros((2, found.shape[2]), np.int64)
    for row, start, end in runs(own):
        for stream in range(found.shape[2]):
            # Stream 1 is stream = 0 here; it guesses the second token after its own.
            part = found[row, start - 1 : max(start - 1, end - stream - 2)]
            before = part[:, :stream].all(1)
            asked[stream] += before.sum()
            right[stream] += (before & part[:, stream]).sum()
    return {"right": right.tolist(), "asked": asked.tolist()}


def shares(counts: dict[str, list[int]]) -> list[float]:
    """Of counts by `given_before`: 0 for a stream that was never asked."""
    return [
        round(right / max(1, asked), 3) for right, asked in zip(counts["right"], counts["asked"], strict=True)
    ]


def pruning_figures(
    main: Frozen, streams: MultiStreams, ids: Tensor, own: NDArray[np.bool_]
) -> dict[str, float]:
    """How often the base's token is the early guess's likeliest, or among its 3 or 8 likeliest."""
    ranks = []
    for part in ids.split(BATCH):
        entering = main.trace(part, streams.first_layer).entering
        logits = functional.linear(streams.pruned(main, entering)[:, :-1], main.head).float()
        ranks.append((logits > logits.gather(2, part[:, 1:, None])).sum(-1))
    rank = torch.cat(ranks).numpy()[own[:, 1:]]
    return {f"top_{top}": round(float((rank < top).mean()), 3) for top in (1, 3, 8)}


def evaluate(base: Frozen, streams: MultiStreams, shared: bool, build: Path, rows: int) -> dict[str, Any]:
    """Figures by style, domain and mask."""
    main = streams.main(base) if shared else base
    found: dict[str, Any] = {}
    for style, domain in itertools.product(STYLES, DOMAINS):
        ids, own = held_out(main, build, domain, style, rows)
        figures: dict[str, Any] = {"tokens": int(own.sum())}
        for name, residency in (("all", 0), ("resident", RESIDENCY_TOKENS)):
            guessed = guesses(base, main, streams, ids, residency)
            counts = given_before(guessed.right, own)
            figures[name] = {
                "counts": counts,
                "right": shares(counts),
                "in_top": shares(given_before(guessed.in_top, own)),
                "chain": round(tokens_per_pass(guessed.chain, own), 3),
                "tree": round(tokens_per_pass(guessed.tree, own), 3),
                "best_first": {
                    str(nodes): round(tokens_per_pass(accepted, own), 3)
                    for nodes, accepted in guessed.best_first.items()
                },
            }
        figures["pruning"] = pruning_figures(main, streams, ids, own)
        found.setdefault(style, {})[domain] = figures
    return found


def acceptance(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For `node_costs.py`: tokens per pass of the best trees by their nodes, a mean over replies of chats."""
    chats = [found["replies"][domain]["all"]["best_first"] for domain in ("dialogue", "sql", "restaurants")]
    return {"tree": {nodes: round(sum(of[nodes] for of in chats) / len(chats), 3) for nodes in chats[0]}}


def chat_acceptance(found: dict[str, Any]) -> tuple[int, list[float]]:
    """For `streams.json`: the tokens of all chats' replies, and by stream, `acceptance` over all of them."""
    chats = [found["replies"][domain] for domain in CHATS]
    by_chat = [figures["all"]["counts"] for figures in chats]
    pooled = {
        kind: [sum(of) for of in zip(*(counts[kind] for counts in by_chat), strict=True)]
        for kind in ("right", "asked")
    }
    return sum(figures["tokens"] for figures in chats), shares(pooled)


def table(found: dict[str, Any]) -> str:
    """Markdown, a row per style, domain and mask."""
    sizes = " ".join(map(str, TREE_NODES))
    lines = [
        f"| text | neurons | right, given those before | any of top 3 | chain | top-3 tree | best {sizes} |",
        "|---" * 7 + "|",
    ]
    for style, domains in found.items():
        for domain, figures in domains.items():
            for name in ("all", "resident"):
                values = figures[name]
                shares = [" ".join(f"{share:.2f}" for share in values[kind]) for kind in ("right", "in_top")]
                cells = [f"{values['chain']:.2f}", f"{values['tree']:.2f}"]
                cells.append(" ".join(f"{of:.2f}" for of in values["best_first"].values()))
                lines.append(f"| {style}: {domain} | {name} | {' | '.join([*shares, *cells])} |")
    return "\n".join(lines)


def load_streams(folder: Path, base: Frozen) -> tuple[MultiStreams, bool, int]:
    """A run's streams, whether they are of the shared mode, and the step they are from."""
    state = load_checkpoint(folder)
    training = training_of(state)
    streams = MultiStreams(base.shape, training.sizes)
    streams.load_state_dict(state["streams"])
    streams.requires_grad_(False)
    return streams, training.mode == "shared", state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count tokens per pass on held-out text.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="a bundle of this recipe")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--name", default="small-relu", help="the run's folder under BUILD/multi-stream")
    parser.add_argument("--rows", type=int, default=ROWS, help="windows per domain and style")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base = Frozen(model_of_bundle(arguments.model), torch.float32)
    streams, shared, step = load_streams(run_folder(arguments.build, arguments.name), base)
    found = evaluate(base, streams, shared, arguments.build, arguments.rows)
    print(table(found))
    print(json.dumps({"step": step, "acceptance": acceptance(found), "figures": found}))


if __name__ == "__main__":
    main()
