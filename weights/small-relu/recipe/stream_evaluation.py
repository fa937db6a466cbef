"""Tokens per forward pass with streams, on held-out text that the base continues greedily.

    python -m recipe.stream_evaluation --name small-relu

takes a run's last checkpoint, finished or not.

The text is continued in two styles. `replies`: the base generates every assistant's turn of held-out chats,
and all questions are true; novels get 128 tokens after every 64 true ones. `onward`: the base generates 128
tokens after the first 64 of a document, past its end if need be.

Draft tokens are chosen in three ways. Chain: the likeliest token of each stream. Tree: any of the three
likeliest tokens of each stream. Best first: the 2 to 64 nodes, root included, of the highest product of the
streams' chances. A forward pass gives the accepted draft tokens and one token of the base's own. The cost of
a forward pass isn't measured here.
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
"""Tokens of a window, by style."""
CHATS = ("dialogue", "sql", "restaurants", "math")
DOMAINS = ("dialogue", "sql", "restaurants", "novels", "math")
PROMPT_TOKENS, FREE_TOKENS = 64, 128
ROWS = 24
TREE_TOP, TREE_NODES, CANDIDATES = 3, (2, 4, 8, 16, 32, 64), 16
RESIDENCY = 8
BATCH = 4


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of the streams of every token, compared with the base's.

    right, in_top: (n, T, G) bool, true where the base's token is a stream's likeliest, or one of its
    TREE_TOP likeliest. chain, tree: (n, T) draft tokens accepted one after another. best_first: the same for
    draft trees, by their number of nodes.
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
    """Segments of a held-out window. Every row begins with another document."""
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
    """(n, T) windows of held-out text that the base continues, and booleans: true for its own tokens."""
    marks, stream = Marks.of(build), read_stream(build, domain, "held_out")
    texts = documents(stream, marks)
    chat = domain in CHATS
    plans = [held_out_plan(texts, stream, row, marks, chat, style) for row in range(rows)]
    windows, own = continued(base, plans, min(STYLES[style], base.shape.max_position_embeddings))
    return torch.from_numpy(windows.astype(np.int64)), own


def drafts(base: Frozen, main: Frozen, streams: MultiStreams, ids: Tensor, residency: int) -> Drafts:
    """The draft tokens of the streams of all tokens of (n, T) windows, compared with the base's.

    main: the base, or the main stream of the shared mode. residency: as in `Batch`.
    """
    gamma, (_, tokens) = streams.sizes.gamma, ids.shape
    right, in_top = [], []
    best: dict[int, list[NDArray[np.int64]]] = {nodes: [] for nodes in TREE_NODES}
    for part in ids.split(BATCH):
        positions = torch.arange(tokens).expand(len(part), tokens)
        trace = main.trace(part, streams.first_layer)
        masks = residency_masks(trace, Batch(part, positions, 1, (residency,) * len(part)), base.zeros_gates)
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
    return Drafts(np.concatenate(right), np.concatenate(in_top), best_first)


def _best_first(likeliest: Tensor, true: Tensor, nodes: int) -> NDArray[np.int64]:
    """(N,) accepted draft tokens of trees of `nodes` draft tokens.

    likeliest: (N, G, C) chances of each stream's likeliest tokens, in descending order. true: (N, G) chances
    of the base's tokens.
    """
    level = torch.ones(len(true), 1)
    levels = []
    for stream in range(true.shape[1]):
        children = (level[:, :, None] * likeliest[:, stream, None, :]).flatten(1)
        # A child is no likelier than its parent, so nodes outside the best here have no children in the tree.
        level = children.topk(min(nodes, children.shape[1]), dim=-1).values
        levels.append(level)
    every = torch.cat(levels, 1)
    least = every.topk(min(nodes, every.shape[1]), dim=-1).values[:, -1:]
    kept = (true.cumprod(-1) >= least) & (true >= likeliest[:, :, -1])
    return _in_a_row(kept.numpy())


def runs(own: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of each run of the base's own tokens, except runs that begin a window."""
    for row, flags in enumerate(own):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
        for start, end in edges.reshape(-1, 2).tolist():
            if start > 0:
                yield row, start, end


def tokens_per_pass(accepted: NDArray[np.int64], own: NDArray[np.bool_]) -> float:
    """Mean tokens per forward pass over all runs of the base's own tokens.

    Each run begins with a pass at the last true token. One token of each pass is the base's.
    """
    tokens = passes = 0
    for row, start, end in runs(own):
        at = start - 1
        while at < end - 1:
            at += min(1 + int(accepted[row, at]), end - 1 - at)
            passes += 1
        tokens += end - start
    return tokens / max(1, passes)


def given_before(found: NDArray[np.bool_], own: NDArray[np.bool_]) -> dict[str, list[int]]:
    """For each stream, counts of tokens for which streams are right.

    asked: all streams before it are right. right: it is right too. These are counts, not shares, so that the
    counts of several texts can be added up.
    """
    right, asked = np.zeros((2, found.shape[2]), np.int64)
    for row, start, end in runs(own):
        for stream in range(found.shape[2]):
            # Stream 1 is stream = 0 here; it drafts the second token after its own.
            part = found[row, start - 1 : max(start - 1, end - stream - 2)]
            before = part[:, :stream].all(1)
            asked[stream] += before.sum()
            right[stream] += (before & part[:, stream]).sum()
    return {"right": right.tolist(), "asked": asked.tolist()}


def shares(counts: dict[str, list[int]]) -> list[float]:
    """Acceptance rate of each stream, from the counts of `given_before`; 0 if it was never asked."""
    return [
        round(right / max(1, asked), 3) for right, asked in zip(counts["right"], counts["asked"], strict=True)
    ]


def evaluate(base: Frozen, streams: MultiStreams, shared: bool, build: Path, rows: int) -> dict[str, Any]:
    """Stats by style, domain and mask."""
    main = streams.main(base) if shared else base
    found: dict[str, Any] = {}
    for style, domain in itertools.product(STYLES, DOMAINS):
        ids, own = held_out(main, build, domain, style, rows)
        figures: dict[str, Any] = {"tokens": int(own.sum())}
        for name, residency in (("all", 0), ("resident", RESIDENCY)):
            drafted = drafts(base, main, streams, ids, residency)
            counts = given_before(drafted.right, own)
            figures[name] = {
                "counts": counts,
                "right": shares(counts),
                "in_top": shares(given_before(drafted.in_top, own)),
                "chain": round(tokens_per_pass(drafted.chain, own), 3),
                "tree": round(tokens_per_pass(drafted.tree, own), 3),
                "best_first": {
                    str(nodes): round(tokens_per_pass(accepted, own), 3)
                    for nodes, accepted in drafted.best_first.items()
                },
            }
        found.setdefault(style, {})[domain] = figures
    return found


def acceptance(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens per forward pass of the best-first trees by number of nodes, for `node_costs.py`.

    They are means over the replies of three chat domains.
    """
    chats = [found["replies"][domain]["all"]["best_first"] for domain in ("dialogue", "sql", "restaurants")]
    return {"tree": {nodes: round(sum(of[nodes] for of in chats) / len(chats), 3) for nodes in chats[0]}}


def chat_acceptance(found: dict[str, Any]) -> tuple[int, list[float]]:
    """Number of tokens of all chats' replies, and acceptance rates of the streams, for `streams.json`."""
    chats = [found["replies"][domain] for domain in CHATS]
    by_chat = [figures["all"]["counts"] for figures in chats]
    pooled = {
        kind: [sum(of) for of in zip(*(counts[kind] for counts in by_chat), strict=True)]
        for kind in ("right", "asked")
    }
    return sum(figures["tokens"] for figures in chats), shares(pooled)


def table(found: dict[str, Any]) -> str:
    """Markdown table with a row per style, domain and mask."""
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
    """A run's streams, true if they are of the shared mode, and the step of their checkpoint."""
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
