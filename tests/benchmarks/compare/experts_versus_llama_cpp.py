"""ondevice against llama.cpp on a mixture of experts larger than memory, in a real shape, case by case.

The weights are random, those of the GGUF file (Q4_0) and of the bundle converted from it the same, and both
models are routed as a trace of the real model says (`tests/benchmarks/lib/routed_experts.py`): the case
`routing` checks every choice of both engines, and every run its text, which is the trace's steps. 8-bit keys
and values, room for 2,048 tokens, a cgroup of the budget, caches dropped before every run, pairs in turns.
Decoding counts past its first 16 tokens, with `--later N` past N more. llama.cpp decodes fewer tokens where
it is slow.

Beside a figure stands its roofline: the bytes that ours read from flash, but for those prefetched in vain,
over what direct reads of an expert's size give, or the bytes that a token multiplies over what memory gives,
whichever takes longer. Both rates are means of one before the run and one behind it. Of a prompt and of a
start only what flash gives is counted.

`--third` adds an engine that a program drives, in rounds of its own; `run_bigmoe.cc` beside
`run_third.py` is such a program.

Rounds are kept in a file, so that a run can go on another day. Prints a table and a JSON line; exits 0 only
if every floor holds. Needs 36 GB of disk. `--layers` makes a model of fewer layers, whose budgets are as much
smaller: for tests of this script alone.

    python -m tests.benchmarks.compare.experts_versus_llama_cpp --workdir DIR [--case NAME] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from ondevice.backends.base import Int32
from ondevice.backends.kv_layout import KVLayout
from ondevice.bundle.reader import Bundle
from tests.benchmarks.explain.dram import dram_gigabytes_per_second
from tests.benchmarks.lib.direct_reads import direct_read_rate
from tests.benchmarks.lib.expert_cases import (
    ASKED,
    CASES,
    CONTEXT,
    DECODE,
    GB,
    ROUTING,
    Case,
    Round,
    differing,
    expert_pages,
    milliseconds,
    table,
    token_bytes,
    verdict,
)
from tests.benchmarks.lib.measure import PLAIN_MMAP, Result, machine, note, require_rig, run_engine
from tests.benchmarks.lib.ondevice_bundle import convert_command
from tests.benchmarks.lib.routed_experts import (
    FIRST,
    QWEN3_30B_A3B,
    RoutedShape,
    routed_gguf,
    routed_steps,
)
from tests.support.paths import ROOT

SHAPES = {shape.name: shape for shape in ASKED}
CHECKED_TOKENS = 12
FIXED_BYTES = 300_000_000
"""About what a model of no layers takes, embedding, head and the process."""
TIMEOUT_SECONDS = 3600.0
THIRD = "third"
SCRIPTS = {"ondevice": "run_ondevice", "llama.cpp": "run_llama_cpp", THIRD: "run_third"}


@dataclass(frozen=True)
class Models:
    """Both engines' files, and the experts (steps, L, k) that they are routed by."""

    shape: RoutedShape
    chosen: Int32
    gguf: Path
    bundle: Path

    @staticmethod
    def made(shape: RoutedShape, workdir: Path) -> Models:
        """Write what isn't there."""
        chosen = routed_steps(shape)
        gguf = routed_gguf(shape, workdir, chosen)
        bundle = gguf.with_suffix("")
        if not (bundle / "bundle.json").is_file():
            command = convert_command(gguf, bundle, "--resume", quant="auto")
            subprocess.run(command, check=True, stdout=sys.stderr)
        return Models(shape, chosen, gguf, bundle)

    def budget(self, nbytes: int) -> int:
        """A budget of the whole model, for as many layers as this one has."""
        share = self.shape.layers / SHAPES[self.shape.name].layers
        return round(FIXED_BYTES + (nbytes - FIXED_BYTES) * share) if nbytes else 0


def prompt_of(steps: int) -> list[int]:
    """The tokens of the first steps."""
    return [FIRST + step for step in range(steps)]


class Rig:
    """Runs both engines on the models, and keeps rounds."""

    def __init__(self, models: Models, args: argparse.Namespace) -> None:
        self.models, self.args, self.rounds_file = models, args, Path(args.rounds_file)

    def case(self, case: Case) -> dict[str, Any]:
        """The rounds of a case that are missing in the file, and the row of all."""
        asked = json.loads(json.dumps({"case": asdict(case) | {"at_least": 0, "aim": 0, "share": 0}}))
        asked |= {
            "shape": self.models.shape.name,
            "layers": self.models.shape.layers,
            "threads": self.args.threads,
            "machine": machine(),
        }
        asked |= {"llama_cpp": not self.args.alone}
        if self.args.third:
            asked |= {"third": Path(self.args.third).name, "third_setting": self.args.third_setting}
        rounds = [Round(**kept) for kept in self._kept(asked)][: self.args.rounds]
        setting = case.settings[0]
        if len(rounds) < self.args.rounds and not self.args.alone:
            setting = self._best(case)
        for turn in range(len(rounds), self.args.rounds):
            rounds.append(self._round(case, setting, turn))
            self._keep(asked, asdict(rounds[-1]))
        shape = self.models.shape
        bundle = Bundle.open(self.models.bundle)
        states = KVLayout(bundle.config, 8).states.nbytes
        weights = token_bytes(shape, self.models.chosen.shape[2], states)
        resident = bundle.manifest.files["resident.safetensors"].nbytes
        return verdict(case, rounds, weights, resident)

    def routing(self) -> dict[str, Any]:
        """Whether both engines choose the trace's experts, in every layer and for every token."""
        row: dict[str, Any] = {"case": ROUTING, "passed": True}
        for engine in ("ondevice",) if self.args.alone else ("ondevice", "llama.cpp"):
            case = replace(CASES[0], tokens=CHECKED_TOKENS, their_tokens=CHECKED_TOKENS, budget=0)
            spec = self._spec(case, engine) | {"engine": engine, **PLAIN_MMAP}
            spec |= {"experts": self.models.shape.experts, "chosen": self.models.chosen.shape[2]}
            spec["dram_budget"] = self.models.budget(8 * GB)
            found = run_engine("run_chosen_experts", spec, None, TIMEOUT_SECONDS)
            if not found["survived"]:
                return row | {"passed": False, "reason": f"{engine}: {found['reason']}"}
            tokens = case.prompt + CHECKED_TOKENS - 1
            row[engine] = differing(found["chosen"], self.models.chosen, case.prompt, tokens)
            row["passed"] &= row[engine] == 0 and found["text"] == prompt_of(tokens + 1)[case.prompt :]
        if self.args.alone:
            row |= {"passed": False, "reason": "llama.cpp didn't run"}
        return row

    def _spec(self, case: Case, engine: str) -> dict[str, Any]:
        models, ours = self.models, engine == "ondevice"
        spec: dict[str, Any] = {
            "model": str((models.bundle if ours else models.gguf).resolve()),
            "prompt": prompt_of(case.prompt),
            "max_tokens": case.their_tokens if engine == "llama.cpp" else case.tokens,
            "steady_tokens": case.left_out,
            "context": CONTEXT,
            "threads": self.args.threads,
            "warm_up": int(case.warm_up > 0),
            "warm_prompt": prompt_of(case.warm_up),
            "temperature": 0.0,
        }
        if engine == THIRD:
            budget = models.budget(case.budget or self.args.all_bytes)
            spec |= {"program": self.args.third, "budget_bytes": budget}
        elif ours:
            spec["dram_budget"] = models.budget(case.budget or self.args.all_bytes)
            spec |= {"sparsity": "experts", "io": "auto"}
        return spec

    def _run(self, case: Case, engine: str, setting: Mapping[str, Any]) -> Result:
        spec = {**self._spec(case, engine), **setting}
        limit = self.models.budget(case.budget) or None
        found = run_engine(SCRIPTS[engine], spec, limit, TIMEOUT_SECONDS)
        if found["survived"] and found["text"] != prompt_of(case.prompt + len(found["text"]))[case.prompt :]:
            raise SystemExit(f"{engine} left the trace: {found['text'][:8]}...")
        found.pop("text", None)
        return found

    def _best(self, case: Case) -> Mapping[str, Any]:
        """llama.cpp's fastest setting by a short run of each; the last one where none survives."""
        if len(case.settings) == 1:
            return case.settings[0]
        given: int | None = self.args.setting
        if given is not None:
            return case.settings[given]
        short = replace(case, their_tokens=min(case.their_tokens, case.left_out + 24))
        rates = []
        for setting in case.settings:
            found = self._run(short, "llama.cpp", setting)
            rates.append(found.get(case.figure, 0.0))
            note(f"{case.name}: llama.cpp {dict(setting)}: {rates[-1]:.2f} {found.get('reason', '')}")
        return case.settings[int(np.argmax(rates))] if any(rates) else case.settings[-1]

    def _round(self, case: Case, setting: Mapping[str, Any], turn: int) -> Round:
        """One pair, who is first in turn; flash and memory are measured before ours and behind it."""
        found: dict[str, Any] = {"theirs": None}

        def ours() -> None:
            before = self._rates()
            found["ours"] = self._run(case, "ondevice", {})
            found["flash"], found["dram"] = map(mean, zip(before, self._rates(), strict=True))

        def theirs() -> None:
            if not self.args.alone:
                found["theirs"] = self._run(case, "llama.cpp", setting)

        def third() -> None:
            if self.args.third:
                found["third"] = self._run(case, THIRD, self.args.third_setting)

        steps: list[Callable[[], None]] = [third, ours, theirs]
        for step in steps if turn % 2 == 0 else steps[::-1]:
            step()
        both = (found["ours"], found["theirs"] or {"survived": False, "reason": "not run"})
        shown = " against ".join(f"{it[case.figure]:.2f}" if it["survived"] else it["reason"] for it in both)
        if found.get("third"):
            shown += f", third {found['third'].get(case.figure) or found['third']['reason']}"
        rates = f"flash {found['flash']:.2f}, DRAM {found['dram']:.0f} GB/s"
        note(f"{case.name} {turn + 1}/{self.args.rounds}: {shown} ({rates})")
        pair = Round(**found)
        if case.figure == DECODE and pair.ours["survived"]:
            spent = (f"{name} {value:.1f}" for name, value in milliseconds(case, pair).items())
            hits, lookups = (pair.ours["steady"][f"neuron_cache_{it}"] for it in ("hits", "lookups"))
            note(f"  milliseconds a token: {', '.join(spent)}; {hits / lookups:.1%} hits")
        return pair

    def _rates(self) -> tuple[float, float]:
        """GB/s that flash and memory give now."""
        # Of the GGUF file, which lies on the same device whatever a bundle's layout is.
        flash = direct_read_rate([self.models.gguf], expert_pages(self.models.shape))
        return flash, dram_gigabytes_per_second(self.args.threads, repeats=5)

    def _kept(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        lines = self.rounds_file.read_text().splitlines() if self.rounds_file.is_file() else []
        found = [json.loads(line) for line in lines]
        return [line["round"] for line in found if line["asked"] == asked]

    def _keep(self, asked: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        with self.rounds_file.open("a") as kept:
            kept.write(json.dumps({"asked": asked, "round": found}) + "\n")


def main() -> int:
    """Measure the chosen cases; 0 if all hold."""
    names = [ROUTING, *(case.name for case in CASES)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--case", action="append", choices=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rounds-file", type=Path, help="default: experts-rounds.jsonl in the workdir")
    parser.add_argument("--shape", choices=SHAPES, default=QWEN3_30B_A3B.name)
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--all-bytes", type=int, default=19 * GB, help="a budget for everything")
    parser.add_argument(
        "--later", type=int, default=0, metavar="N", help="decode N tokens more, uncounted, first"
    )
    parser.add_argument("--setting", type=int, choices=(0, 1), help="llama.cpp's where there are two")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp; then no case holds")
    parser.add_argument("--third", metavar="PROGRAM", help="a third engine; see run_third.py")
    parser.add_argument(
        "--third-setting", type=json.loads, default={}, metavar="JSON", help="added to its spec"
    )
    parser.add_argument("--make", action="store_true", help="only write the models")
    args = parser.parse_args()
    args.rounds_file = args.rounds_file or args.workdir / "experts-rounds.jsonl"
    shape = SHAPES[args.shape]
    models = Models.made(replace(shape, layers=args.layers or shape.layers), args.workdir)
    if args.make:
        print(models.gguf, models.bundle, sep="\n")
        return 0
    require_rig()
    rig, chosen, rows = Rig(models, args), args.case or names, []
    if ROUTING in chosen:
        rows.append(rig.routing())
    rows += [rig.case(case.later(args.later)) for case in ASKED[shape] if case.name in chosen]
    passed = all(row["passed"] for row in rows)
    print(f"the shape of {shape.name}, random weights, routed as in a trace\n")
    print(table(rows))
    summary = {
        "benchmark": "experts_versus_llama_cpp",
        "passed": passed,
        "shape": shape.name,
        "layers": models.shape.layers,
    }
    sizes = {
        "gguf_bytes": models.gguf.stat().st_size,
        "bundle_bytes": Bundle.open(models.bundle).bundle_bytes,
    }
    print(json.dumps(summary | sizes | {"machine": machine(), "rounds": args.rounds, "cases": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
