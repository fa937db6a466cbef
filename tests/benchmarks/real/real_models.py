"""Four real models, by ondevice and by llama.cpp, from the same GGUF files: the project's yardstick.

Every run is a fresh process behind dropped caches; the engines take turns, run by run. Runs are stored as
they end (`real/runs.jsonl` in the work folder), and with --resume those that are there aren't repeated. A
limit that kills or refuses a run is a figure, and so is a crash. Ends with one JSON line; exits 0 only if no
drafter changed a greedy text and nothing crashed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import ondevice
from real_models.cache import cached_file, models_folder
from real_models.table import REAL_MODELS
from tests.benchmarks.lib.measure import machine, note
from tests.benchmarks.real import engines
from tests.benchmarks.real.cases import (
    DRAFT_MODELS,
    ENGINES,
    MODELS,
    ONDEVICE,
    SIZES,
    DraftCase,
    Size,
    quality_windows,
)
from tests.benchmarks.real.engines import RealModel
from tests.benchmarks.real.page import tables, write_page
from tests.benchmarks.real.results import Results, RunId, document, put_aside
from tests.benchmarks.real.texts import prompts
from tests.support.paths import ROOT, SHARED_DATA

PARTS = ("speed", "drafts", "sampled", "quality")
DISTRIBUTIONS = ("llama-cpp-python", "transformers", "torch", "numpy")


class Bench:
    """All runs of one size, stored as they end."""

    def __init__(self, size: Size, results: Results, folder: Path, threads: int) -> None:
        self.size, self.results, self.folder, self.threads = size, results, folder, threads

    def bundle(self, name: str, gguf: Path) -> Path | None:
        """The model's bundle, converted and timed by these runs; None if that fails."""
        bundle, of = self.folder / f"{name}-bundle", RunId(name, "convert", ONDEVICE, 0)
        if not (bundle / "bundle.json").is_file():
            self.results.rows.pop(of, None)
        self.once(of, lambda: engines.convert(gguf, bundle))
        return bundle if self.results.rows[of]["survived"] else None

    def once(self, of: RunId, run: Callable[[], dict[str, Any]]) -> None:
        """Run and store what isn't stored yet, unless an earlier pair of it failed."""
        if of in self.results.rows or self.results.failed(of):
            return
        clock = engines.OthersClock()
        row = self.results.add(of, run() | {"others": clock.share()})
        note(f"{datetime.now():%H:%M:%S} {of.model} {of.case} {of.arm} {of.pair + 1}: {brief(row)}")

    def speed(self, model: RealModel) -> None:
        """The cases of both engines, in interleaved pairs."""
        for case in self.size.cases(model.tokens["context"]):
            for pair in range(case.pairs):
                for arm in case.arms:
                    self.once(RunId(model.name, case.name, arm, pair), lambda: model.run(case, arm))  # noqa: B023

    def drafts(self, model: RealModel) -> None:
        """Every drafter on prompts of each kind, one after another in each round, greedily."""
        self._draft(model, self.size.draft_cases(model.draft_bundle is not None))

    def sampled(self, model: RealModel) -> None:
        """Plain decoding and `auto` on the same prompts, with tokens that are drawn."""
        self._draft(model, self.size.sampled_cases())

    def _draft(self, model: RealModel, cases: Sequence[DraftCase]) -> None:
        for case in cases:
            for number in range(case.rounds):
                for drafter in case.drafters:
                    of = RunId(model.name, case.name, drafter, number)
                    self.once(of, lambda: model.draft(case, drafter, number, self.size.draft_tokens))  # noqa: B023

    def quality(self, model: RealModel) -> None:
        """Both engines against the file's own values in float32."""
        windows = quality_windows(model.tokens["first"], model.tokens["text"], self.size.quality_tokens)
        for engine in ENGINES:
            self.once(RunId(model.name, "quality", engine, 0), lambda: model.quality(engine, windows))  # noqa: B023


def brief(row: dict[str, Any]) -> str:
    """A run's figures in a line of progress."""
    if not row.get("survived", True):
        return str(row["reason"])
    figures = {key: value for key, value in row.items() if isinstance(value, float) and "." not in key}
    return ", ".join(f"{key} {value:.4g}" for key, value in figures.items())


def header(size: Size, threads: int) -> dict[str, Any]:
    """What all figures belong to: no host's name and no path."""
    # In a process of its own: what this one maps, the limits of later runs wouldn't count.
    flags_of = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
    command = [sys.executable, "-c", flags_of]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    flags = output.strip().splitlines()[-1].strip("| ")
    versions = {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}
    versions |= {"ondevice": ondevice.__version__, "commit": commit or "unknown", "llama.cpp flags": flags}
    return {
        "benchmark": "real_models",
        "size": size.name,
        "date": f"{date.today().isoformat()} {datetime.now():%H:%M:%S}",
        "machine": machine(),
        "threads": threads,
        "versions": versions,
        "skipped": engines.skipped_limits(),
    }


def measure(bench: Bench, names: list[str], parts: list[str]) -> None:
    """All parts of every model whose file is here; the others are said."""
    for name in names:
        gguf = cached_file(REAL_MODELS[name], models_folder())
        if gguf is None:
            note(f"{name}: its file isn't here; `make models MODELS={name}` fetches it")
            continue
        bundle = bench.bundle(name, gguf)
        draft_bundle = None
        if (draft := DRAFT_MODELS.get(name)) and (
            draft_gguf := cached_file(REAL_MODELS[draft], models_folder())
        ):
            draft_bundle = bench.bundle(draft, draft_gguf)
        if bundle is None:
            continue
        texts = prompts(SHARED_DATA, bench.size.draft_rounds)
        tokens = engines.read_tokens(bundle, SHARED_DATA / "corpus/wikitext2/valid.txt", texts)
        facts = {"survived": True, "least_budget_bytes": tokens["least_budget_bytes"]}
        bench.once(RunId(name, "facts", ONDEVICE, 0), lambda: facts)  # noqa: B023
        engines.warm_llama_cpp(gguf, bench.threads)
        model = RealModel(name, gguf, bundle, bench.folder, bench.threads, tokens, draft_bundle)
        for part in parts:
            getattr(bench, part)(model)


def main() -> int:
    """Run what isn't stored, print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="whole")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: those of the size")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are stored")
    parser.add_argument("--page", action="store_true", help="only write the page, from the stored runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    folder = args.workdir.resolve() / "real"
    runs = folder / "runs.jsonl"
    if args.page:
        return write_page(runs)
    if not SHARED_DATA.is_dir():
        raise SystemExit(f"prompts and text are read from {SHARED_DATA}, which isn't there")
    # Sources that no process may compile once and for all would be compiled at each cold start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    size = SIZES[args.size]
    if not args.resume:
        put_aside(runs)
    results = Results(runs, header(size, args.threads))
    if results.header["skipped"]:
        note(results.header["skipped"])
    measure(
        Bench(size, results, folder, args.threads), args.model or list(size.models), args.part or list(PARTS)
    )
    if not results.rows:
        raise SystemExit("none of the models' files is here; `make models` fetches them")
    made = document(results.header, list(results.rows.values()))
    print(tables(made))
    print(json.dumps(made | {"passed": not made["changed_texts"] and not made["crashes"]}))
    return 1 if made["changed_texts"] or made["crashes"] else 0


if __name__ == "__main__":
    sys.exit(main())
