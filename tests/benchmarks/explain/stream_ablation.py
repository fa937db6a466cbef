"""The choices in drafting by streams, each varied alone, through the engine, on held-out text.

The shipped model (or another with streams whose text `make model-tables` packs) continues windows of held-out
text greedily: how many streams draft, how often, how large drafts are, what the pruning adapter leaves out,
how many nodes get streams in the pass that verifies them, rather than behind it; whether streams multiply all
neurons that fire, which are then read for them, or those in memory alone; and every other drafter by itself.
Variants take turns window by window. Whatever time drafts take here, they are as large as they may be, so
that tokens per pass are the same on every machine (`--priced`: as large as pays). Times are over plain
decoding's of the same window. Texts must be those of plain decoding, token for token: the exit status says
so. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ondevice.api import Model, load
from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import Batches
from ondevice.backends.row_invariance import ANY_ROWS
from ondevice.budget.plan import REPEAT_MARGIN_BYTES
from ondevice.bundle.reader import Bundle
from ondevice.config import Speculation
from ondevice.runtime.engine import Engine
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.speculation.drafted_text import DraftedText, PassOutcome
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.streams import DEFAULT_STREAMS, MultiStreamDrafter, MultiStreamDrafting
from ondevice.speculation.drafting import Drafting, Pace
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.registry import DRAFTERS
from ondevice.speculation.tree import DRAFT_NODES
from tests.benchmarks.explain.cache_hit_rates import DOMAINS, held_out_windows
from tests.benchmarks.lib.measure import machine, note
from tests.support.paths import ROOT

PROMPT_TOKENS = 96
CANDIDATES, NODES = (1, 2, 3, 5, 8), (2, 4, 8, DRAFT_NODES)
PRUNING, ENDS = (0.0, 0.001, 0.01, 0.05), (0, 1, 2, 4)
MIN_CHANCE = 0.01
"""Chance of a draft token from which on it is drafted where drafts have no price."""
ALONE = tuple(name for name, kind in DRAFTERS.items() if kind.needs in ("nothing", "streams"))
"""Drafters that need no second model."""


@dataclass(frozen=True)
class Variant:
    """One row. drafter: `streams` as `options` say, or another; share: of the slots above the fewest."""

    group: str
    name: str
    drafter: str = "streams"
    options: MultiStreamDrafting = DEFAULT_STREAMS
    nodes: int = DRAFT_NODES
    share: float | None = None
    all_neurons: bool = False


@dataclass
class Counts:
    """What came of a variant: of its passes, and, window by window, of its time over plain decoding's."""

    passes: int = 0
    nodes: int = 0
    kept_nodes: int = 0
    streams: int = 0
    """Nodes that had streams in their own pass."""
    tokens: int = 0
    flash_bytes: int = 0
    ratios: list[float] = field(default_factory=list)


class Unpriced(TreePolicy):
    """Drafts of as many nodes as there may be, without draft tokens that are next to hopeless."""

    is_backing_off = False
    is_throttling = False

    def begin(self) -> int:
        return self._max_nodes

    def is_worth_adding(self, nodes: int, chance: float) -> bool:
        return chance >= MIN_CHANCE

    def is_worth_asking(self, nodes: int, chance: float) -> bool:
        return chance >= MIN_CHANCE


class Counting(Drafting):
    """Drafting that counts."""

    def __init__(self, drafter: Drafter, max_nodes: int, priced: bool) -> None:
        super().__init__(drafter, max_nodes)
        self.counts = Counts()
        if not priced:
            self._pace = self._paces[1] = Pace(Unpriced(max_nodes), 0.0)

    def observe(self, text: DraftedText, outcome: PassOutcome) -> None:
        if outcome.seconds is not None:
            self.counts.passes += 1
            self.counts.nodes += len(text.draft)
            self.counts.tokens += len(outcome.path)
            self.counts.kept_nodes += len(outcome.output.tokens)
            self.counts.streams += len(outcome.output.streams)
        super().observe(text, outcome)


def variants(streams: int, shares: Sequence[float]) -> list[Variant]:
    """All of them; the first of most groups that have the default is it."""
    found = [Variant("default", "default")]
    counts = range(1, streams + 1)
    found += [Variant("streams", f"{n}", options=MultiStreamDrafting(streams=n)) for n in counts]
    found += [
        Variant("draft tokens of each", f"{n}", options=MultiStreamDrafting(candidates=n)) for n in CANDIDATES
    ]
    found += [Variant("most nodes", f"{n}", nodes=n) for n in NODES]
    found += [
        Variant("pruned below", f"{x:g}", options=MultiStreamDrafting(pruning_threshold=x)) for x in PRUNING
    ]
    found += [Variant("nodes with streams", f"{n}", options=MultiStreamDrafting(max_ends=n)) for n in ENDS]
    for share in shares:
        for everything in (False, True):
            name = f"{'all' if everything else 'held'}, {share:.0%} of the slots"
            found.append(Variant("neurons of streams", name, share=share, all_neurons=everything))
    return found + [Variant("drafter", name, drafter=name) for name in ALONE]


def hold_to(model: Model, share: float) -> None:
    """Keep the model to a share of the slots above the fewest, lending neurons nothing else."""
    segment = model.plan.segment
    # Beside a small model's neurons, the scratch memory of a long prompt is large.
    model._engine.plan = replace(model.plan, decode_activation_bytes=model.plan.activation_bytes)
    bare = model.plan.minimum_budget_bytes - REPEAT_MARGIN_BYTES
    slots = int(share * (segment.total - segment.least))
    model.set_dram_budget(bare + slots * segment.nbytes)


def read_for_streams(engine: Engine) -> None:
    """Streams multiply every neuron that fires for them, read where it isn't held, as tokens do."""
    neurons = engine._neurons
    assert isinstance(neurons, NeuronFetcher)
    select, most = neurons.select, 4 * DRAFT_NODES
    # Room for the scores of all rows of a pass that are no part of the text.
    neurons._draft_scores = [
        np.zeros((2 * most, width), np.float16) for width in engine._bundle.config.widths
    ]

    def all_exact(layer: int, scores: Float32, batch: ForwardBatch) -> Batches:
        if batch.stream_rows:
            # The cache learns nothing of streams: their rows lie behind those that are ever accepted.
            places = [*batch.draft_places, *range(most, most + batch.stream_rows)]
            rows = range(len(batch.text_rows) + len(places))
            batch = ForwardBatch(rows, drafted=rows[len(batch.text_rows) :], unpruned=places)
        return select(layer, scores, batch)

    neurons.select = all_exact  # type: ignore[method-assign]


class Runner:
    """The models of all variants, open, and what has been counted of each."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self._args, self._stack = args, stack
        self._options = {"sparsity": "exact", "threads": args.threads}
        self._plain: dict[float | None, Model] = {}
        self._plain_counts: dict[float | None, Counts] = {}
        self._shared: dict[str, Model] = {}
        ends = Bundle.open(args.model).manifest.tokenizer.eos_ids
        self._sampling = {"temperature": args.temp, "seed": 0, "max_tokens": args.max_tokens}
        self._sampling["logit_bias"] = dict.fromkeys(ends, -math.inf)
        self._draftings: dict[Variant, tuple[Model, Counting]] = {}
        self.changed = 0

    def add(self, variant: Variant) -> None:
        """Open what the variant needs; everything resident but where it says otherwise."""
        if variant.share not in self._plain:
            self._plain[variant.share] = self._open("off", variant.share)
            self._plain_counts[variant.share] = Counts()
        if variant.share is not None:
            # What is in memory is its own.
            model = self._open(variant.drafter, variant.share)
        else:
            if variant.drafter not in self._shared:
                self._shared[variant.drafter] = self._open(variant.drafter, None)
            model = self._shared[variant.drafter]
        engine = model._engine
        if variant.all_neurons:
            model._owner.call(lambda: read_for_streams(engine))
        assert engine._drafting is not None
        drafter = engine._drafting._drafter
        if variant.drafter == "streams":
            drafter = MultiStreamDrafter(engine._generator.transformer, ANY_ROWS, variant.options)
        self._draftings[variant] = model, Counting(drafter, variant.nodes, self._args.priced)

    def _open(self, drafter: str, share: float | None) -> Model:
        model = load(
            self._args.model, dram_budget="8GB", speculation=cast(Speculation, drafter), **self._options
        )
        self._stack.enter_context(model)
        if share is not None:
            hold_to(model, share)
        return model

    def run(self, prompt: list[int]) -> None:
        """One window, by plain decoding and by every variant."""
        plain = {
            share: model.generate(tokens=prompt, **self._sampling) for share, model in self._plain.items()
        }
        for share, written in plain.items():
            counts, tokens = self._plain_counts[share], len(written.tokens) - 1
            counts.passes, counts.nodes = counts.passes + tokens, counts.nodes + tokens
            counts.kept_nodes, counts.tokens = counts.kept_nodes + tokens, counts.tokens + tokens
            counts.flash_bytes += written.stats.flash_bytes_read
            counts.ratios.append(1.0)
        for variant, (model, drafting) in self._draftings.items():
            engine, expected = model._engine, plain[variant.share]
            engine._drafting = drafting
            engine._generator = replace(engine._generator, drafting=drafting)
            found = model.generate(tokens=prompt, **self._sampling)
            self.changed += found.tokens != expected.tokens
            drafting.counts.flash_bytes += found.stats.flash_bytes_read
            speeds = found.stats.decode_tokens_per_second, expected.stats.decode_tokens_per_second
            drafting.counts.ratios.append(speeds[1] / speeds[0])

    def rows(self) -> list[dict[str, Any]]:
        """A row of figures for plain decoding, and for each variant."""
        plain = [
            row(Variant("plain", "resident" if share is None else f"{share:.0%} of the slots", "off"), counts)
            for share, counts in self._plain_counts.items()
        ]
        return plain + [row(variant, drafting.counts) for variant, (_, drafting) in self._draftings.items()]


def row(variant: Variant, counts: Counts) -> dict[str, Any]:
    low, median, high = np.quantile(counts.ratios, (0.25, 0.5, 0.75)).tolist()
    found: dict[str, Any] = {"group": variant.group, "name": variant.name, "drafter": variant.drafter}
    found |= {"options": asdict(variant.options), "most_nodes": variant.nodes, "passes": counts.passes}
    found |= {
        name: getattr(counts, key) / counts.passes
        for name, key in (
            ("tokens_per_pass", "tokens"),
            ("nodes_per_pass", "nodes"),
            ("kept_nodes_per_pass", "kept_nodes"),
            ("nodes_with_streams_per_pass", "streams"),
        )
    }
    found["flash_bytes_per_token"] = counts.flash_bytes / counts.tokens
    return found | {"time_over_plain": {"low": low, "median": median, "high": high}}


def show(rows: Sequence[dict[str, Any]]) -> None:
    heads = (
        "",
        "",
        "tokens per pass",
        "nodes",
        "kept",
        "with streams",
        "KB read per token",
        "time over plain",
    )
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    names = ("tokens_per_pass", "nodes_per_pass", "kept_nodes_per_pass", "nodes_with_streams_per_pass")
    for found in rows:
        time = found["time_over_plain"]
        figures = " | ".join(f"{found[name]:.2f}" for name in names)
        print(
            f"| {found['group']} | {found['name']} | {figures} | {found['flash_bytes_per_token'] / 1e3:.0f} "
            f"| {time['median']:.2f} ({time['low']:.2f} to {time['high']:.2f}) |"
        )


def main() -> int:
    """Print the table and the JSON line; 0 if no variant changed a token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "weights/small-relu", help="with streams")
    parser.add_argument("--data", type=Path, default=ROOT / "build/recipe", help="where text is packed")
    parser.add_argument("--windows", type=int, default=4, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temp", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--priced", action="store_true", help="drafts are as large as pays here")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.25], help="of the slots")
    parser.add_argument("--group", action="append", help="of the table: default: all")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    streams = Bundle.open(args.model).streams
    if streams is None:
        raise SystemExit(f"{args.model} has no streams: `ondevice train streams` makes them")
    wanted = variants(streams.streams, args.shares)
    if args.group:
        wanted = [variant for variant in wanted if variant.group in args.group]
    with ExitStack() as stack:
        runner = Runner(args, stack)
        for variant in wanted:
            runner.add(variant)
        for domain in DOMAINS:
            windows = held_out_windows(args.data, domain, 512 * args.windows)
            for number, window in enumerate(windows, 1):
                note(f"{domain}: window {number} of {len(windows)}")
                runner.run(window[:PROMPT_TOKENS])
        rows = runner.rows()
    show(rows)
    line = {"benchmark": "stream_ablation", "changed": runner.changed, "machine": machine()}
    line |= {name: getattr(args, name) for name in ("windows", "max_tokens", "temp", "priced", "threads")}
    print(json.dumps(line | {"model": args.model.name, "streams": streams.streams, "rows": rows}))
    return 0 if runner.changed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
