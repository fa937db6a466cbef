"""What drafting is worth on a model of real size: on an embedded model in the shape of a 7B, case by case.

Every drafter that the model can have continues held-out prompts of four kinds beside plain decoding, in
turns, in one process (`ondevice.measure.drafters`); all texts must be equal. A case's figure is the median
over rounds of one round's tokens per second over those of `--speculation off`. With `--draft-model`, the
small model in that bundle drafts as well: one that was trained apart, or it would always be right. It is then
the best drafter of most cases, by which they hold: an embedded model is its best case. Prints a
table, which says that the models are embedded ones, and a JSON line; exits 0 only if every `at least` of the
chosen cases holds. A full run takes hours: with `--rounds-file FILE` every round is kept as a line of FILE,
and another run with the same options measures only the rounds that are missing there.

A hybrid with a layer that predicts one token more (`embedded_hybrid.py`) has cases of its own.

    python -m tests.benchmarks.lib.embedded_model --output DIR --shape 7b
    python -m tests.benchmarks.compare.drafting_at_scale --model DIR/large [--case NAME] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig, SamplingConfig, Sparsity
from ondevice.measure.drafters import ALL_TASKS, OFF, Comparison, compare_drafters
from ondevice.measure.prompts import Task
from ondevice.stats import per_second
from tests.benchmarks.lib.held_out_prompts import held_out_tasks
from tests.benchmarks.lib.measure import machine, note

SINGLE = ("lookup", "recycling", "streams", "resident", "eagle")
AUTO, MODEL = "auto", "model"
AHEAD, AHEAD_TEXTS = ("mtp", "lookup", "recycling"), ("dialogue", "sql")
"""Drafters of a model with a layer that predicts one token more, and kinds of text that it is measured on."""
AUTO_AT_LEAST, AUTO_AIM = 0.93, 1.0
"""Speed of `auto` over that of the best drafter without a second model."""
CONTEXT = 256
RANDOM_WORDS, RANDOM_TEMPERATURE = 24, 1.5


@dataclass(frozen=True)
class Case:
    """share: of the bundle's bytes that the budget is; 0: enough for everything. predictable: whether the
    text can be drafted; otherwise it is random, and only `auto` is measured. ahead: for models with a layer
    that predicts one token more, which have learned `AHEAD_TEXTS` alone; others have the other cases.
    """

    name: str
    at_least: float
    aim: float
    sparsity: Sparsity
    share: float
    activations: tuple[str, ...] = ("relu",)
    predictable: bool = True
    ahead: bool = False


CASES = (
    Case("relu-resident", 1.35, 1.6, "exact", 0.0),
    Case("relu-dense-half", 1.8, 2.5, "dense", 0.5),
    Case("relu-predicted-half", 1.0, 1.2, "predicted", 0.5),
    Case("silu-resident", 1.25, 1.5, "dense", 0.0, ("silu",)),
    Case("silu-dense-half", 1.5, 2.2, "dense", 0.5, ("silu",)),
    Case("nothing-to-guess", 0.97, 1.0, "exact", 0.0, ("relu", "silu"), predictable=False),
    Case("mtp-resident", 1.3, 1.3, "dense", 0.0, ("silu",), ahead=True),
    Case("mtp-dense-half", 1.6, 1.6, "dense", 0.5, ("silu",), ahead=True),
)


def cases_of(activation: str, ahead: bool) -> list[Case]:
    """The cases of models with these gates. ahead: with a layer that predicts one token more."""
    return [case for case in CASES if activation in case.activations and case.ahead == ahead]


def keep_round(file: Path, asked: Mapping[str, Any], found: Round) -> None:
    """Add a round to `file`."""
    with open(file, "a") as kept:
        kept.write(json.dumps({"asked": asked, "round": asdict(found)}) + "\n")


def random_tasks(count: int) -> tuple[Task, ...]:
    """Texts of letters and digits at random, which nothing can guess."""
    random = np.random.default_rng(7)
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789")
    texts = tuple(
        " ".join("".join(random.choice(letters, 5)) for _ in range(RANDOM_WORDS)) for _ in range(count)
    )
    return (Task("random", texts),)


@dataclass(frozen=True)
class Round:
    """rates: tokens per second by task and drafter.

    Over all tasks, by drafter: tokens_per_pass; drafting_share, of the time, in which only drafts were made.
    """

    rates: Mapping[str, Mapping[str, float]]
    tokens_per_pass: Mapping[str, float]
    drafting_share: Mapping[str, float]

    @staticmethod
    def of(found: Comparison) -> Round:
        rates: dict[str, dict[str, float]] = {}
        for row in found.rows:
            rates.setdefault(row.task, {})[row.drafter] = per_second(row.tokens, row.seconds)
        whole = [row for row in found.rows if row.task == ALL_TASKS]
        return Round(
            rates,
            {row.drafter: row.tokens_per_pass for row in whole},
            {row.drafter: row.drafting_seconds_per_pass / row.seconds_per_pass for row in whole},
        )


def kept_rounds(file: Path | None, asked: Mapping[str, Any]) -> list[Round]:
    """The rounds that `file` has of runs with these options, oldest first."""
    if file is None or not file.is_file():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [Round(**line["round"]) for line in lines if line["asked"] == asked]


def what_is_asked(
    case: Case, folder: Path, drafters: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """What tells a round from others in a file. folder: of the model, as all have the same last name."""
    return {
        "case": case.name,
        "model": str(folder.resolve()),
        "drafters": list(drafters),
        "draft_model": str(args.draft_model.resolve()) if args.draft_model else "",
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "threads": args.threads,
        "machine": machine(),
    }


def measure_case(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one case, as a row of the summary."""
    bundle = Bundle.open(folder)
    sparsity: Sparsity = case.sparsity if bundle.config.zeros_gates else "dense"
    budget = int(case.share * bundle.bundle_bytes) or args.all_bytes
    runtime = RuntimeConfig(
        dram_budget=budget, backend="cpu", sparsity=sparsity, max_context=CONTEXT, threads=args.threads
    )
    if args.draft_model:
        runtime = replace(runtime, draft_model=str(args.draft_model))
    tasks = held_out_tasks(args.prompts) if case.predictable else random_tasks(args.prompts)
    sampling = SamplingConfig(
        max_tokens=args.max_tokens, temperature=0.0 if case.predictable else RANDOM_TEMPERATURE, seed=0
    )
    if case.ahead:
        tasks = tuple(task for task in tasks if task.name in AHEAD_TEXTS)
    drafters = tuple(args.drafter or (AHEAD if case.ahead else SINGLE)) if case.predictable else ()
    if args.draft_model and case.predictable:
        drafters += (MODEL,)
    drafters += (AUTO,)
    asked = what_is_asked(case, folder, drafters, args)
    rounds = kept_rounds(args.rounds_file, asked)[: args.rounds]
    for turn in range(len(rounds), args.rounds):
        found = compare_drafters(folder, runtime, tasks, sampling, drafters=drafters)
        found.require_same_texts()
        rounds.append(Round.of(found))
        if args.rounds_file:
            keep_round(args.rounds_file, asked, rounds[-1])
        shown = ", ".join(f"{name} {rate:.2f}" for name, rate in rounds[-1].rates[ALL_TASKS].items())
        note(f"{case.name} {turn + 1}/{args.rounds}: tokens/s {shown}")
        shown = ", ".join(f"{name} {share:.1%}" for name, share in rounds[-1].drafting_share.items())
        note(f"  of the time, drafting alone took: {shown}")
        for words in found.notes:
            note(f"  {words}")
    return {"case": case.name, "model": bundle.name, "budget_bytes": budget} | verdict(case, rounds)


def verdict(case: Case, rounds: Sequence[Round]) -> dict[str, Any]:
    """Each drafter's speed over plain decoding, and that of `auto` over the best without a second model."""
    ratios: dict[str, list[float]] = {}
    for found in rounds:
        of_round = found.rates[ALL_TASKS]
        for name, rate in of_round.items():
            if name != OFF:
                ratios.setdefault(name, []).append(rate / of_round[OFF])
    speeds = {name: median(values) for name, values in ratios.items()}
    single = {name: speed for name, speed in speeds.items() if name != AUTO}
    best = max(single, key=lambda name: single[name], default=AUTO)
    last = rounds[-1]
    row: dict[str, Any] = {
        "at_least": case.at_least,
        "aim": case.aim,
        "speeds": speeds,
        "ratios": ratios,
        "best": best,
        "tokens_per_pass": last.tokens_per_pass,
        "drafting_share": last.drafting_share,
        "by_task": last.rates,
        "passed": speeds[best] >= case.at_least,
    }
    alone = [speed for name, speed in single.items() if name != MODEL]
    if alone:
        row["auto_over_best"] = speeds[AUTO] / max(alone)
        row["passed"] &= row["auto_over_best"] >= AUTO_AT_LEAST
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | best drafter | over plain | at least | aim | auto over the best without a second model | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of_best = row["ratios"][row["best"]]
        auto = f"{row['auto_over_best']:.2f}" if "auto_over_best" in row else ""
        figure = f"{row['speeds'][row['best']]:.2f} ({min(of_best):.2f} to {max(of_best):.2f})"
        asked = f"{row['at_least']} | {row['aim']}"
        held = "held" if row["passed"] else "MISSED"
        lines.append(f"| {row['case']} | {row['best']} | {figure} | {asked} | {auto} | {held} |")
    return "\n".join(lines)


def main() -> int:
    """Measure the chosen cases; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="bundle of an embedded model")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    known = (*SINGLE, "mtp")
    parser.add_argument("--drafter", action="append", choices=known, help="default: all of the case")
    parser.add_argument("--draft-model", type=Path, help="bundle of a second model, which drafts as well")
    parser.add_argument("--prompts", type=int, default=6, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rounds-file", type=Path, help="keeps rounds, so that a run can go on another day")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--all-bytes", type=int, default=16_000_000_000, help="a budget for everything")
    args = parser.parse_args()
    bundle = Bundle.open(args.model)
    activation, ahead = bundle.config.activation, bundle.mtp is not None
    chosen = [it for it in cases_of(activation, ahead) if args.case is None or it.name in args.case]
    if not chosen:
        what = " and a layer that predicts one token more" if ahead else ""
        raise SystemExit(f"no case chosen is for a model with {activation}{what}")
    rows = [measure_case(case, args.model, args) for case in chosen]
    passed = all(row["passed"] for row in rows)
    print("embedded models: the function of a small trained model in a large shape\n")
    print(table(rows))
    asked = {name: getattr(args, name) for name in ("prompts", "max_tokens", "rounds", "threads")}
    found = {"benchmark": "drafting_at_scale", "passed": passed, "models": "embedded", "cases": rows}
    print(json.dumps(found | asked | {"machine": machine()}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
