"""What a pass over n nodes takes beside a plain one, and what drafting would bring at that price.

Needs no trained weights: a synthetic Llama-7B shape whose sparsity is planted (`synthetic.py`), or `--model
DIR`. Drafts are chains and best-first trees; each has a few passes in a row, and rounds of all of them are
interleaved. Their draft tokens are no part of the text: in the synthetic model they are drawn at random, as
its text is, so that together they fire the neurons that the plant says; for another model they are runs of
text that it wrote. Drafts of more than 16 nodes are wider than any that the engine grows: their scratch
memory is taken from neurons. Speed-ups are derived, not measured: tokens per pass, as `--acceptance FILE` has
them or as assumed chances give them, over the measured cost. What growing a draft takes isn't in it. Ends
with one JSON line.

FILE: {"chain": {"2": 1.6, "4": 2.1}, "tree": {"4": 2.3}}, tokens per pass by nodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.api import Model, inspect, load
from ondevice.backends.base import Float32
from ondevice.backends.token_tree import MAX_DEPTH
from ondevice.bundle.reader import Bundle
from ondevice.config import SamplingConfig, Sparsity
from ondevice.errors import UnsupportedModelError
from ondevice.runtime.engine import Engine
from ondevice.scoring import benchmark_prompt
from ondevice.speculation.drafted_text import PassOutcome
from ondevice.speculation.drafting import DraftRequest
from ondevice.speculation.tree import Draft, Proposals, Root, grow, plain
from ondevice.stats import DraftStats
from tests.benchmarks.compare.flash_versus_llama_cpp import RANDOM_TEXT, TENTH
from tests.benchmarks.lib.measure import machine, note, summary
from tests.benchmarks.lib.random_model import LLAMA_7B, SMALL, TINY, random_tokens
from tests.benchmarks.lib.synthetic import synthetic_bundle
from tests.support.paths import ROOT

SIZES = (1, 2, 4, 8, 16, 32, 64)
SHAPES = {shape.name: shape for shape in (TINY, SMALL, LLAMA_7B)}
CHANCES = (0.70, 0.62, 0.56, 0.52, 0.50)
"""Assumed acceptance rate of the first candidate by depth, where none is given; deeper as the last."""
SECOND, NEXT = 0.4, 0.5
"""Assumed rate of the second candidate as a share of what the first leaves; the next, of the one before."""
RANKS = 8
PROMPT_TOKENS, POOL_TOKENS = 64, 256
TEXT_TEMPERATURE = 0.8
"""Of a trained model's text."""
RESIDENT_MARGIN_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """share: of the bundle's bytes, which the whole process may hold; 0: all that it can use."""

    name: str
    sparsity: Sparsity
    share: float


CASES = (
    Case("resident", "dense", 0.0),
    Case("exact-resident", "exact", 0.0),
    Case("dense-50", "dense", 0.5),
    Case("predicted-50", "predicted", 0.5),
)


@dataclass(frozen=True)
class Taken:
    """What a pass over a draft took, and what it read from flash."""

    seconds: float
    flash_bytes: int


def ranked(depth: int) -> list[tuple[int, float]]:
    """Candidates of every rank at that depth, with the chances assumed."""
    first = CHANCES[min(depth, len(CHANCES) - 1)]
    return [(0, first)] + [(rank, (1 - first) * SECOND * NEXT ** (rank - 1)) for rank in range(1, RANKS)]


def shape(kind: str, nodes: int) -> Draft:
    """A chain of `nodes` nodes, or the tree of them that the assumed chances make likeliest."""

    def propose(path: Sequence[int]) -> Proposals:
        candidates = ranked(len(path))
        return candidates if kind == "tree" else candidates[:1]

    (draft,) = grow([Root(0, propose, nodes, MAX_DEPTH)], lambda count, chance: True, nodes)
    return draft


def shapes() -> dict[tuple[str, int], Draft]:
    """All that are measured, by kind and nodes: one node is plain decoding, and two are a chain."""
    kinds = [("chain", nodes) for nodes in SIZES] + [("tree", nodes) for nodes in SIZES if nodes > 2]
    return {(kind, nodes): shape(kind, nodes) for kind, nodes in kinds}


class Schedule:
    """Stands where drafting does: a block of passes over drafts of one shape, then of the next."""

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        engine: Engine,
        blocks: Sequence[tuple[str, int]],
        warm: int,
        passes: int,
        settle: int,
        pool: Sequence[int],
    ) -> None:
        """settle: plain passes first of all; warm: of a block, those that aren't counted. pool: a text."""
        self._engine, self._pool = engine, list(pool)
        self._random = np.random.default_rng(11)
        self.found: list[tuple[tuple[str, int], list[Taken]]] = [(block, []) for block in blocks]
        self._steps: list[tuple[Draft, list[Taken] | None]] = [(plain(0), None)] * settle
        every = shapes()
        for block, taken in self.found:
            self._steps += [(self._filled(every[block]), None) for _ in range(warm)]
            self._steps += [(self._filled(every[block]), taken) for _ in range(passes)]
        self._next = 0
        self._bytes = 0
        self.draft = plain(0)
        self.streamed: Sequence[int] | None = None
        """Nothing is drafted by streams here."""

    @property
    def done(self) -> bool:
        return self._next >= len(self._steps)

    def _filled(self, form: Draft) -> Draft:
        """The draft with tokens: a first child goes on in the pool where its parent is, others elsewhere."""
        places, begun = [int(self._random.integers(len(self._pool)))], set()
        for parent in form.parents[1:]:
            elsewhere = int(self._random.integers(len(self._pool)))
            places.append(elsewhere if parent in begun else (places[parent] + 1) % len(self._pool))
            begun.add(parent)
        return Draft(tuple(self._pool[place] for place in places), form.parents, form.chances)

    def begin(
        self,
        text: list[int],
        sampling: SamplingConfig,
        constrained: object = None,
        prompt_tokens: int | None = None,
    ) -> Any:
        self._bytes = self._engine.counters().flash_bytes_read
        return self

    def end(self, text: object) -> None:
        pass

    def read(self, text: object, output: object) -> None:
        pass

    def stats(self, text: object) -> DraftStats:
        return DraftStats()

    def propose(self, asked: Sequence[DraftRequest], max_nodes: int) -> list[Draft]:
        """The next one, room in the context or not: there is enough, and blocks are taken for it."""
        drafted, _ = self._steps[min(self._next, len(self._steps) - 1)]
        self.draft = Draft((asked[0].root, *drafted.tokens[1:]), drafted.parents, drafted.chances)
        return [self.draft]

    def drew(self, token: int, logits: Float32) -> None:
        pass

    def observe(self, text: object, outcome: PassOutcome) -> None:
        if outcome.seconds is None:
            return
        total = self._engine.counters().flash_bytes_read
        if self._next < len(self._steps) and (taken := self._steps[self._next][1]) is not None:
            taken.append(Taken(outcome.seconds + outcome.drawing_seconds, total - self._bytes))
        self._bytes, self._next = total, self._next + 1


def block_order(rounds: int) -> list[tuple[str, int]]:
    """Every shape once a round, one round forwards and the next one backwards."""
    every = list(shapes())
    return [block for number in range(rounds) for block in (every[::-1] if number % 2 else every)]


def budget(bundle: Path, case: Case, options: Mapping[str, Any]) -> tuple[int, str]:
    """Bytes for the whole process, and what they are in words."""
    plan = inspect(bundle, dram_budget="1TB", **options)
    if not case.share:
        # The process may have grown by the time it loads.
        return plan.full_bytes + RESIDENT_MARGIN_BYTES, "everything resident"
    wanted = int(case.share * sum(path.stat().st_size for path in bundle.glob("*.safetensors")))
    if wanted >= plan.minimum_budget_bytes:
        return wanted, f"{case.share:.0%} of the bundle"
    least = plan.minimum_budget_bytes
    return int(least + case.share * (plan.full_bytes - least)), f"{case.share:.0%} above the smallest budget"


def text_pool(model: Model, synthetic: bool) -> list[int]:
    """The text of draft tokens: random tokens, or what the model writes behind random ones."""
    if synthetic:
        return random_tokens(POOL_TOKENS, model.config.vocab_size, seed=8)
    written = model.generate(
        tokens=benchmark_prompt(4, model.config.vocab_size),
        max_tokens=min(POOL_TOKENS, model.plan.max_context - 4),
        temperature=TEXT_TEMPERATURE,
        seed=0,
        logit_bias=no_end(model),
    )
    return list(written.tokens)


def no_end(model: Model) -> dict[int, float]:
    return dict.fromkeys(model.bundle.manifest.tokenizer.eos_ids, -1e9)


def measure(bundle: Path, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One case: figures of every shape, by rounds."""
    blocks = block_order(args.rounds)
    count = args.settle + len(blocks) * (args.warm + args.passes)
    limit = Bundle.open(bundle).config.max_context
    # Accidents bring tokens beside a pass's own.
    context = min(limit, PROMPT_TOKENS + max(SIZES) + count * 3 // 2)
    if count > context - PROMPT_TOKENS - max(SIZES):
        raise SystemExit(f"{count} passes don't fit a context of {limit}: ask for fewer rounds or passes")
    options = {"sparsity": case.sparsity, "threads": args.threads, "kv_bits": 8, "io": args.io}
    options["max_context"] = context
    nbytes, words = budget(bundle, case, options)
    note(f"{case.name}: {nbytes / 1e6:.0f} MB, {words}; {count} passes")
    with load(bundle, dram_budget=nbytes, speculation="off", **options) as model:
        pool, engine = text_pool(model, args.model is None), model._engine
        schedule: Any = Schedule(engine, blocks, args.warm, args.passes, args.settle, pool)
        engine._generator = dataclasses.replace(engine._generator, drafting=schedule)
        events = model.stream(
            tokens=pool[-PROMPT_TOKENS:],
            max_tokens=context - PROMPT_TOKENS - max(SIZES),
            temperature=RANDOM_TEXT if args.model is None else TEXT_TEMPERATURE,
            seed=0,
            logit_bias=no_end(model),
        )
        for _ in events:
            if schedule.done:
                break
        row = {"case": case.name, "sparsity": case.sparsity, "budget_bytes": nbytes, "budget": words}
        row["io"] = engine.io
    return row | {"shapes": figures(schedule.found, args.rounds)}


def figures(found: Sequence[tuple[tuple[str, int], list[Taken]]], rounds: int) -> list[dict[str, Any]]:
    """Of every shape: medians of each round's passes and, against plain ones of the same round, the cost."""
    each = len(found) // rounds
    by_round = [
        {block: taken for block, taken in found[start : start + each] if taken}
        for start in range(0, len(found), each)
    ]
    rows = []
    for block, form in shapes().items():
        usable = [done for done in by_round if block in done and ("chain", 1) in done]
        medians = [statistics.median(taken.seconds for taken in done[block]) for done in usable]
        plains = [statistics.median(taken.seconds for taken in done["chain", 1]) for done in usable]
        read = [taken.flash_bytes for done in usable for taken in done[block]]
        rows.append(
            {
                "shape": block[0],
                "nodes": block[1],
                "depth": int(form.tree.depths.max()),
                "seconds": summary(medians),
                "cost": summary([mine / plain for mine, plain in zip(medians, plains, strict=True)]),
                "flash_bytes": statistics.median(read),
                "passes": len(read),
            }
        )
    return rows


def tokens_per_pass(given: Mapping[str, Any] | None, kind: str, nodes: int) -> float | None:
    """What is given, or what the assumed chances come to; None where nothing is given of that size."""
    if nodes == 1:
        return 1.0
    if given is None:
        return sum(shape(kind, nodes).chances)
    found = given.get(kind, {}).get(str(nodes))
    if found is None and nodes == 2:
        found = given.get("chain", {}).get("2")
    return None if found is None else float(found)


def derive(rows: Sequence[dict[str, Any]], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add derived speed-ups to the rows of a case; the best of each kind of shape."""
    best: dict[str, Any] = {}
    for row in rows:
        tokens = tokens_per_pass(given, row["shape"], row["nodes"])
        if tokens is None:
            continue
        row["tokens_per_pass"] = tokens
        row["derived_speed_up"] = found = tokens / row["cost"]["median"]
        if found > best.get(row["shape"], {"derived_speed_up": 0.0})["derived_speed_up"]:
            best[row["shape"]] = {"nodes": row["nodes"], "derived_speed_up": found}
    return best


def read_acceptance(path: Path) -> dict[str, dict[str, float]]:
    """Tokens per pass by shape and nodes. Exits with the reason if a draft can't have as many nodes."""
    given: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    for kind, table in given.items():
        for nodes, tokens in table.items():
            if kind not in ("chain", "tree") or not 1.0 <= float(tokens) <= int(nodes):
                raise SystemExit(f"{path}: {kind} of {nodes} nodes can't give {tokens} tokens a pass")
    return given


def show(case: dict[str, Any]) -> None:
    """The table of a case."""
    print(f"\n{case['case']} ({case['sparsity']}, {case['budget']}, {case['io']} reads)\n")
    heads = ("nodes", "shape", "ms", "cost in plain passes", "MB read", "tokens per pass", "derived speed-up")
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for row in case["shapes"]:
        ms = " to ".join(f"{1e3 * row['seconds'][name]:.1f}" for name in ("min", "max"))
        cost = " to ".join(f"{row['cost'][name]:.2f}" for name in ("min", "max"))
        derived = [
            f"{row[name]:.2f}" if name in row else "" for name in ("tokens_per_pass", "derived_speed_up")
        ]
        print(
            f"| {row['nodes']} | {row['shape']} | {1e3 * row['seconds']['median']:.1f} ({ms}) "
            f"| {row['cost']['median']:.2f} ({cost}) | {row['flash_bytes'] / 1e6:.1f} "
            f"| {' | '.join(derived)} |"
        )
    for kind, found in case["derived_best"].items():
        print(f"derived, best {kind}: {found['nodes']} nodes, {found['derived_speed_up']:.2f} times plain")
    sys.stdout.flush()


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a bundle, in place of a synthetic one")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=LLAMA_7B.name, help="of the synthetic one")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--acceptance", type=Path, help="JSON of tokens per pass by nodes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=4, help="of a shape in a round")
    parser.add_argument("--warm", type=int, default=1, help="passes before them that don't count")
    parser.add_argument("--settle", type=int, default=48, help="plain passes before all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--io", choices=("auto", "direct", "buffered"), default="auto")
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    given = None if args.acceptance is None else read_acceptance(args.acceptance)
    bundle = args.model or synthetic_bundle(SHAPES[args.shape], TENTH, args.workdir)
    found = []
    for case in CASES:
        if args.case is not None and case.name not in args.case:
            continue
        try:
            found.append(measure(bundle, case, args))
        except UnsupportedModelError as error:
            note(f"{case.name}: {error}")
            continue
        found[-1]["derived_best"] = derive(found[-1]["shapes"], given)
        show(found[-1])
    line: dict[str, Any] = {
        "benchmark": "node_costs",
        "machine": machine(),
        "model": str(args.model or args.shape),
    }
    line |= {"synthetic": args.model is None, "threads": args.threads, "rounds": args.rounds}
    line["acceptance"] = "assumed" if given is None else given
    print(json.dumps(line | {"cases": found}))


if __name__ == "__main__":
    main()
