"""The page of real models, made from the document of their runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from real_models.table import REAL_MODELS
from tests.benchmarks.real.cases import (
    DRAFTING,
    ENGINES,
    LIMITED_ARMS,
    LLAMA_CPP,
    MODELS,
    ONDEVICE,
    WHOLE,
)
from tests.benchmarks.real.results import LIMIT_REASONS, document, read
from tests.benchmarks.real.texts import KINDS
from tests.support.paths import ROOT

PAGE = ROOT / "docs/real-models.md"
STORED = ROOT / "tests/benchmarks/data/real_models.json"
PICTURE = ROOT / "docs/pictures/real_budgets.svg"
RATE = "decode_tokens_per_second"
DRAWN_BYTES = 400e6
Document = dict[str, Any]
QUIET = 0.05
"""Share of the processors that others may take in the median run."""
INSTRUCTION_SETS = (
    ("AVX512_VNNI", "AVX-512 with VNNI"),
    ("AVX512", "AVX-512"),
    ("AVX2", "AVX2"),
    ("NEON", "NEON"),
)

INTRODUCTION = """# Real models

Written by `make bench-real-page` from the runs of `make bench-real`; edit neither page nor figures by hand.

The same GGUF files, run by ondevice (converted to its bundles) and by llama.cpp (its Python package), one
after the other. `make models` fetches the files.
"""
METHOD = """## How it was measured

- Each run is a fresh process, with the page cache emptied before it. Runs of the two engines take turns,
  and figures are medians with the least and the most of the runs in parentheses: {pairs} runs, {long_pairs}
  of prompts of 2,048 tokens, {budget_pairs} in less memory, {depth_pairs} at depth 4,096. Drafts have
  {draft_rounds} runs; greedy ones in less memory, one. The ratio is of the medians, and above 1 where
  ondevice is better.
- Both engines have the same tokens, threads, context and float16 keys and values, and choose greedily,
  but for drafts at a temperature, whose tokens are drawn with one seed. ondevice drafts nothing except in the
  table of drafts and where a column says so; there it is as it is by default.
- With everything resident, both have their own defaults. With a limit, both run inside a memory cgroup of
  that size (everything the process takes counts, its code and the page cache of its files too); ondevice is
  given the limit as `--dram-budget`, and llama.cpp maps the file without repacking it; a run that takes four
  minutes is ended. *Killed* is what the
  kernel did to a process that needed more; *refused* is ondevice's answer to a budget that it can't keep,
  with what it would take at most. The least budget is what it takes with a context of 512 tokens once
  everything is known.
- Loading is the time of the engine's own call. A start counts from the process's birth to its first token,
  imports included. The steady rate is that of the 48 tokens behind the first 24; other rates of decoding
  leave out 8 tokens.
- The peak is of resident memory with mapped files (`VmHWM`), llama.cpp's with the pages of the file that it
  maps, which the system could take back.
- The quality is that of next-token distributions on WikiText-2's validation text, in windows of 512 tokens,
  against the file's own values in float32 by `transformers`: mean KL divergence from them, in nats, and the
  share of positions with the same likeliest token.
- Drafts: one prompt of each kind a round, in the chat template where the model has one, {tokens} tokens
  each. A cell is empty where the text ended with its first token. That no drafter changed a token is checked.
"""


class Table:
    """Looks figures up by model, case, arm and name, and writes them."""

    def __init__(self, made: Document) -> None:
        self.cases = {(row["model"], row["case"], row["arm"]): row for row in made["cases"]}

    def models(self) -> list[str]:
        """Models with any run, in the table's order."""
        return [name for name in MODELS if any(key[0] == name for key in self.cases)]

    def value(self, model: str, case: str, arm: str, figure: str) -> float | None:
        """A median."""
        row = self.cases.get((model, case, arm), {"figures": {}})
        return float(row["figures"][figure][0]) if figure in row["figures"] else None

    def cell(self, model: str, case: str, arm: str, figure: str, unit: float = 1.0) -> str:
        """A median with its spread, or why there is none. unit: what one of the column's units is."""
        row = self.cases.get((model, case, arm))
        if row is None:
            return "not measured"
        if figure not in row["figures"]:
            return str(row.get("failed", "none"))
        middle, least, most = (number(value / unit) for value in row["figures"][figure])
        spread = f" ({least} to {most})" if row["runs"] > 1 else ""
        lost = f"; one run {row['failed']}" if "failed" in row else ""
        return f"{middle}{spread}{lost}"

    def pair(self, model: str, case: str, figure: str, unit: float = 1.0, lower: bool = False) -> list[str]:
        """Cells of both engines and their ratio, above 1 where ondevice is better."""
        cells = [self.cell(model, case, engine, figure, unit) for engine in ENGINES]
        ours, theirs = (self.value(model, case, engine, figure) for engine in ENGINES)
        if not ours or not theirs:
            return [*cells, ""]
        return [*cells, f"{theirs / ours if lower else ours / theirs:.2f}"]


def number(value: float) -> str:
    """Three digits that count, or all of those before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def files(table: Table) -> str:
    rows = []
    for model in table.models():
        known = REAL_MODELS[model]
        sizes = [table.cell(model, "convert", ONDEVICE, f"{name}_bytes", 1e6) for name in ("gguf", "bundle")]
        seconds = table.cell(model, "convert", ONDEVICE, "convert_seconds")
        least = table.cell(model, "facts", ONDEVICE, "least_budget_bytes", 1e6)
        rows.append([f"`{model}`", known.title, known.licence, *sizes, seconds, least])
    heads = ["name", "model", "licence", "GGUF, MB", "bundle, MB", "converting, s", "least budget, MB"]
    return "## The files\n\n" + markdown(heads, rows)


RESIDENT = (
    ("loading, s", "start", "load_seconds", 1.0, True),
    ("start to first token, prompt of 256, s", "start", "start_to_first_token_seconds", 1.0, True),
    ("first 24 tokens, tokens/s", "start", "first_tokens_per_second", 1.0, False),
    ("steady behind them, tokens/s", "start", "decode_tokens_per_second", 1.0, False),
    ("prompt of 256, tokens/s", "prompt-256", "prefill_tokens_per_second", 1.0, False),
    ("prompt of 2,048, tokens/s", "prompt-2048", "prefill_tokens_per_second", 1.0, False),
    ("decoding at depth 128, tokens/s", "depth-128", "decode_tokens_per_second", 1.0, False),
    ("decoding at depth 2,048, tokens/s", "prompt-2048", "decode_tokens_per_second", 1.0, False),
    ("decoding at depth 4,096, tokens/s", "depth-4096", "decode_tokens_per_second", 1.0, False),
    ("peak memory, prompt of 256, MB", "start", "peak_memory_bytes", 1e6, True),
    ("peak memory, prompt of 2,048, MB", "prompt-2048", "peak_memory_bytes", 1e6, True),
)


def resident(table: Table) -> str:
    rows = []
    for model in table.models():
        for what, case, figure, unit, lower in RESIDENT:
            if any((model, case, engine) in table.cases for engine in ENGINES):
                rows.append([f"`{model}`", what, *table.pair(model, case, figure, unit, lower)])
    return "## Everything resident\n\n" + markdown(["model", "", ONDEVICE, LLAMA_CPP, "ratio"], rows)


def budgets(table: Table) -> str:
    rows = []
    for model in table.models():
        for share in WHOLE.shares:
            case = f"budget-{share}"
            if any((model, case, arm) in table.cases for arm in LIMITED_ARMS):
                limit = number(REAL_MODELS[model].nbytes * share // 100 / 1e6)
                rates = [table.cell(model, case, arm, RATE) for arm in LIMITED_ARMS]
                best, theirs = (table.value(model, case, arm, RATE) for arm in (DRAFTING, LLAMA_CPP))
                start = table.pair(model, case, "start_to_first_token_seconds", lower=True)[:2]
                cells = [
                    *rates,
                    f"{best / theirs:.2f}" if best and theirs else "",
                    *("" if cell.startswith(LIMIT_REASONS) else cell for cell in start),
                ]
                rows.append([f"`{model}`", f"{share} %, {limit} MB", *cells])
    heads = [
        "model",
        "of the file",
        *(f"{arm}, tokens/s" for arm in LIMITED_ARMS),
        f"drafts over {LLAMA_CPP}",
    ]
    heads += [f"{ONDEVICE}, first token, s", f"{LLAMA_CPP}, first token, s"]
    text = "Prompt of 128 tokens. The limit holds the process, its code, its buffers and its page cache.\n\n"
    picture = f"![tokens per second over memory](pictures/{PICTURE.name})\n\n"
    return "## In less memory than the file\n\n" + text + picture + markdown(heads, rows)


def draw_budgets(made: Document, path: Path) -> None:
    """Tokens/s over memory of the models that are larger than a small process, as an SVG of two plots."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    table = Table(made)
    models = [model for model in table.models() if REAL_MODELS[model].nbytes > DRAWN_BYTES]
    figure, axes = pyplot.subplots(
        1, max(1, len(models)), figsize=(4.5 * max(1, len(models)), 3.6), squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=False):
        for arm in LIMITED_ARMS:
            points = [(share, table.value(model, f"budget-{share}", arm, RATE)) for share in WHOLE.shares]
            # Where everything is resident, drafts are measured on other texts.
            points.insert(0, (100, None if arm == DRAFTING else table.value(model, "depth-128", arm, RATE)))
            drawn = [(share, rate) for share, rate in points if rate]
            if drawn:
                axis.plot(*zip(*drawn, strict=True), marker="o", label=arm)
        axis.set(title=model, xlabel="memory, % of the file", ylabel="tokens/s", yscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def drafts(table: Table) -> str:
    rows = []
    for model in table.models():
        for case in (*WHOLE.draft_cases(has_model=True), *WHOLE.sampled_cases()):
            memory = "resident" if case.share is None else f"{case.share} %"
            memory += f", temperature {case.temperature}" if case.temperature else ""
            for drafter in case.drafters:
                row = table.cases.get((model, case.name, drafter))
                if row is None:
                    continue
                cells = [
                    draft_cell(table, model, case.name, drafter, prefix)
                    for prefix in ("", *(f"{kind}." for kind in KINDS))
                ]
                plain = table.value(model, case.name, "off", "tokens_per_second")
                rate = table.value(model, case.name, drafter, "tokens_per_second")
                ratio = f"{rate / plain:.2f}" if rate and plain else ""
                rows.append([f"`{model}`", memory, drafter, *cells, ratio])
    kinds = [f"{kind} ({source})" for kind, source in KINDS.items()]
    heads = ["model", "memory", "drafts", "all", *kinds, "over off"]
    return "## Drafts\n\nTokens per pass, tokens/s.\n\n" + markdown(heads, rows)


def draft_cell(table: Table, model: str, case: str, drafter: str, prefix: str) -> str:
    """Tokens per pass and per second of one kind of text, or why there are none."""
    per_pass = table.value(model, case, drafter, f"{prefix}tokens_per_pass")
    rate = table.value(model, case, drafter, f"{prefix}tokens_per_second")
    if per_pass is None or rate is None:
        return str(table.cases[model, case, drafter].get("failed", "")) if not prefix else ""
    return f"{per_pass:.2f}, {number(rate)}"


def quality(table: Table) -> str:
    rows = []
    for model in table.models():
        for engine in ENGINES:
            row = table.cases.get((model, "quality", engine))
            if row is None:
                continue
            of: Callable[[str], float | None] = lambda name: table.value(model, "quality", engine, name)  # noqa: B023, E731
            top, plain, engines = of("top1"), of("float32_perplexity"), of("perplexity")
            if top is None or plain is None or engines is None:
                rows.append([f"`{model}`", engine, str(row.get("failed", "")), "", "", "", ""])
                continue
            cells = [f"{plain:.3f}", f"{engines:.3f} ({100 * (engines / plain - 1):+.1f} %)"]
            cells += [f"{of('kl_nats'):.4f}", f"{100 * top:.1f} %", f"{of('positions'):,.0f}"]
            rows.append([f"`{model}`", engine, *cells])
    heads = ["model", "engine", "perplexity in float32", "perplexity", "KL, nats", "same top token", "tokens"]
    return "## Quality\n\n" + markdown(heads, rows)


def machine_text(made: Document) -> str:
    """Machine, date and versions in sentences."""
    machine, versions = made["machine"], made["versions"]
    flags = versions["llama.cpp flags"].replace(" ", "")
    instructions = next(
        (name for flag, name in INSTRUCTION_SETS if f"{flag}=1" in flags), "no vector instructions"
    )
    kind = (
        ""
        if made["size"] == WHOLE.name
        else " `QUICK=1`: fewer models, cases, pairs and tokens than the whole."
    )
    skipped = f" On this machine: {made['skipped']}." if made["skipped"] else ""
    memory = machine["memory_bytes"] / 1e9
    sentences = (
        f"{machine['cpu']}, {machine['cores']} cores, {instructions}, {memory:.0f} GB of memory,",
        f"{machine['system']}; {made['threads']} threads; {made['date'][:10]}. {noise(made)}",
        f"ondevice {versions['ondevice']} at commit {versions['commit']},",
        f"llama-cpp-python {versions['llama-cpp-python']}, transformers {versions['transformers']}.",
    )
    return f"{' '.join(sentences)}{earlier_commits(made)}{kind}{skipped}\n"


def noise(made: Document) -> str:
    """How busy other programs kept the machine, in a sentence."""
    middle, most = (f"{100 * made['others'][key]:.0f} %" for key in ("median", "max"))
    text = f"Other programs took {middle} of the processors in the median run and {most} in the worst."
    if made["others"]["median"] <= QUIET:
        return text
    return f"{text} **That is too much: no speed on this page can be trusted.**"


def tables(made: Document) -> str:
    """All tables."""
    table = Table(made)
    parts = [part(table) for part in (files, resident, budgets, drafts, quality)]
    wrong = [
        f"- {text}\n" for text in (*made["crashes"], *(f"{it}: CHANGED TEXT" for it in made["changed_texts"]))
    ]
    if wrong:
        parts.append("## What went wrong\n\n" + "".join(wrong))
    return "\n".join(parts)


def page(made: Document) -> str:
    """The whole page."""
    method = METHOD.format(tokens=WHOLE.draft_tokens, **vars(WHOLE))
    return "\n".join((INTRODUCTION, machine_text(made), tables(made), method)).rstrip() + "\n"


def part_of(case: str) -> str:
    """The part of the runs that a case belongs to; every run of a model measures its files."""
    parts = {
        "quality": "quality",
        "drafts": "drafts",
        "sampled": "sampled drafts",
        "budget": "budgets",
        "convert": "files",
        "facts": "files",
    }
    return next((part for begin, part in parts.items() if case.startswith(begin)), "speed")


def with_stored_parts(made: Document, stored: Document) -> Document:
    """The document with the stored figures of each model's parts that weren't run, which say their commit."""
    parts = {(row["model"], part_of(row["case"])) for row in made["cases"]}
    origin = {
        "commit": stored["versions"]["commit"],
        "date": stored["date"][:10],
        "cpu": stored["machine"]["cpu"],
    }
    kept = [origin | row for row in stored["cases"] if (row["model"], part_of(row["case"])) not in parts]
    return made | {"cases": [*made["cases"], *kept]}


def earlier_commits(made: Document) -> str:
    """Which figures are of earlier commits or other machines, in sentences; empty if none are."""
    earlier: dict[str, list[str]] = {}
    for row in made["cases"]:
        if "commit" in row:
            cpu = row.get("cpu", made["machine"]["cpu"])
            machine = "" if cpu == made["machine"]["cpu"] else f", {cpu}"
            names = earlier.setdefault(f"{row['commit']} ({row['date']}{machine})", [])
            name = f"{part_of(row['case'])} of `{row['model']}`"
            names += [name] if name not in names else []
    sentences = [f"Of commit {commit}: {', '.join(names)}." for commit, names in earlier.items()]
    return f" {' '.join(sentences)}" if sentences else ""


def write_page(runs: Path) -> int:
    """Store the document of a file of runs, and write the page from it."""
    if not runs.exists():
        raise SystemExit(f"there are no runs in {runs}; `make bench-real` makes them")
    made = with_stored_parts(document(*read(runs)), json.loads(STORED.read_text(encoding="utf-8")))
    STORED.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(made), encoding="utf-8")
    draw_budgets(made, PICTURE)
    print(f"{PAGE}, {PICTURE} and {STORED}", file=sys.stderr)
    return 0
