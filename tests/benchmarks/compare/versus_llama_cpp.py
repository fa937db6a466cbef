"""ondevice against llama.cpp on a random-weight Llama-7B shape, case by case, in interleaved cold pairs.

Both hold the same shape (ours q4, theirs GGUF Q4_0), the same 8-bit KV, context and threads; caches are
dropped before every run, and "the file" is the GGUF. Ends with one JSON line; exits 0 only if every
`at least` holds. A case with a memory limit that kills llama.cpp counts as held if ondevice survives it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.flash_versus_fio import fio_in_order
from tests.benchmarks.explain.dram import dram_gigabytes_per_second
from tests.benchmarks.lib.measure import (
    KILLED,
    LLAMA_CPP_DEFAULT,
    PLAIN_MMAP,
    Result,
    drop_caches,
    machine,
    note,
    require_rig,
    run_engine,
    spread,
    summary,
)
from tests.benchmarks.lib.ondevice_bundle import bundle_folder
from tests.benchmarks.lib.random_model import LLAMA_7B, gguf_file, huggingface_folder, random_tokens
from tests.support.paths import ROOT

HEADLINE_BYTES = 4_000_000_000
# From the fastest if it survives to the leanest; each context's best survivor is found before its pairs.
HEADLINE_SETTINGS = (
    {"load_mode": "direct_io", "repack": True, "micro_batch": 0},
    {"load_mode": "direct_io", "repack": True, "micro_batch": 64},
    {"load_mode": "mmap", "repack": True, "micro_batch": 64},
    {"load_mode": "mmap", "repack": False, "micro_batch": 0},
)


@dataclass(frozen=True)
class Case:
    """One row of the table. `figure` names what is compared; ratios are above 1 where ondevice is better.

    `share` limits both to that part of the GGUF's size, `limit_bytes` to its own; neither: unlimited.
    """

    name: str
    at_least: float
    aim: float
    figure: str = "decode_tokens_per_second"
    prompt_tokens: int = 32
    max_tokens: int = 40
    context: int = 512
    warm_up: int = 4
    """Tokens made before the clock starts."""
    share: float = 0.0
    limit_bytes: int = 0
    sparsity: str = "dense"
    temperature: float = 0.0
    rival: tuple[Mapping[str, object], ...] = (LLAMA_CPP_DEFAULT,)

    @property
    def lower_is_better(self) -> bool:
        return self.figure.endswith("seconds")


def _headline(tokens: int) -> Case:
    return Case(
        f"headline-{tokens}",
        1.0,
        1.5,
        prompt_tokens=tokens,
        max_tokens=16,
        context=tokens + 32,
        warm_up=0,
        limit_bytes=HEADLINE_BYTES,
        rival=HEADLINE_SETTINGS,
    )


CASES = (
    Case("decode", 1.3, 1.7),
    Case("prefill-128", 0.9, 1.2, "prefill_tokens_per_second", prompt_tokens=128, max_tokens=1),
    Case("prefill-512", 0.9, 1.2, "prefill_tokens_per_second", prompt_tokens=512, max_tokens=1, context=576),
    Case("cold-start", 1.5, 3.0, "start_to_first_token_seconds", prompt_tokens=16, max_tokens=1, warm_up=0),
    Case("streaming-50", 1.1, 1.3, max_tokens=16, warm_up=0, share=0.5, rival=(PLAIN_MMAP,)),
    _headline(128),
    _headline(512),
    _headline(2048),
)


class Rivals:
    """Both engines on the same case."""

    def __init__(self, bundle: Path, gguf: Path, threads: int, setting: int | None = None) -> None:
        self.bundle, self.gguf, self.threads, self.setting = bundle, gguf, threads, setting

    def limit(self, case: Case) -> int | None:
        """Bytes that both are held to, by a cgroup (and ours by its budget); None: unlimited."""
        return case.limit_bytes or int(case.share * self.gguf.stat().st_size) or None

    def ours(self, case: Case) -> Result:
        limit = self.limit(case)
        spec = self._spec(case, self.bundle) | {"dram_budget": limit or "auto", "io": "auto"}
        spec |= {"sparsity": case.sparsity, "temperature": case.temperature}
        return run_engine("run_ondevice", spec, limit)

    def theirs(
        self,
        case: Case,
        setting: Mapping[str, object],
        max_tokens: int | None = None,
        timeout_seconds: float = 1800.0,
    ) -> Result:
        spec = {**self._spec(case, self.gguf), **setting}
        spec["max_tokens"] = max_tokens or case.max_tokens
        return run_engine("run_llama_cpp", spec, self.limit(case), timeout_seconds)

    def best_setting(self, case: Case) -> Mapping[str, object]:
        """The fastest of the case's settings by one short run each, or the one that was chosen."""
        if len(case.rival) == 1:
            return case.rival[0]
        if self.setting is not None:
            return case.rival[self.setting]
        best, best_rate = case.rival[-1], 0.0
        for setting in case.rival:
            result = self.theirs(case, setting, max_tokens=12, timeout_seconds=600.0)
            rate = result["decode_tokens_per_second"] if result["survived"] else 0.0
            note(f"{case.name}: llama.cpp {setting}: {f'{rate:.2f} tokens/s' if rate else result['reason']}")
            if rate > best_rate:
                best, best_rate = setting, rate
        return best

    def _spec(self, case: Case, model: Path) -> dict[str, object]:
        return {
            "model": str(model.resolve()),
            "prompt": random_tokens(case.prompt_tokens, LLAMA_7B.vocab_size),
            "max_tokens": case.max_tokens,
            "context": case.context,
            "threads": self.threads,
            "warm_up": case.warm_up,
        }


def measure_case(rivals: Rivals, case: Case, pairs: int) -> dict[str, Any]:
    """Run the pairs, the first of each alternating, and compare medians."""
    setting = rivals.best_setting(case)
    ours: list[Result] = []
    theirs: list[Result] = []
    dram: list[float] = []
    turns: list[tuple[list[Result], Callable[[], Result]]] = [
        (ours, lambda: rivals.ours(case)),
        (theirs, lambda: rivals.theirs(case, setting)),
    ]
    for pair in range(pairs):
        for results, run in turns if pair % 2 == 0 else turns[::-1]:
            results.append(run())
            dram.append(dram_gigabytes_per_second(rivals.threads))
        note(
            f"{case.name} {pair + 1}/{pairs}: "
            + " against ".join(_figure_text(r[-1], case) for r in (ours, theirs))
            + f" (DRAM {dram[-2]:.0f}, {dram[-1]:.0f} GB/s)"
        )
    row: dict[str, Any] = {
        "case": case.name,
        "figure": case.figure,
        "at_least": case.at_least,
        "aim": case.aim,
        "rival_setting": dict(setting),
        "limit_bytes": rivals.limit(case),
        "dram_gigabytes_per_second": summary(dram),
    }
    return row | verdict(case, ours, theirs, rivals.limit(case))


def verdict(case: Case, ours: list[Result], theirs: list[Result], limit_bytes: int | None) -> dict[str, Any]:
    """Medians, their ratio, and whether the case holds; for a run of ours that failed it doesn't."""
    row: dict[str, Any] = {}
    lost = [r["reason"] for r in ours if not r["survived"]]
    if lost:
        return row | {"ratio": None, "passed": False, "reason": lost[0]}
    row["ours"] = _details(ours, case)
    failures = [r["reason"] for r in theirs if not r["survived"]]
    held = beaten_by_limit(failures, limit_bytes) if failures else True
    if failures:
        row["reason"] = f"llama.cpp, {len(failures)} of {len(theirs)}: {failures[0]}"
    if len(failures) == len(theirs):
        return row | {"ratio": None, "passed": held}
    # Where some of its runs survive, those are what is compared.
    row["theirs"] = _details([run for run in theirs if run["survived"]], case)
    both = [(a, b) for a, b in zip(ours, theirs, strict=True) if b["survived"]]
    ratios = [_ratio(a[case.figure], b[case.figure], case) for a, b in both]
    ratio = _ratio(row["ours"]["median"], row["theirs"]["median"], case)
    return row | {"ratio": ratio, "pair_ratios": ratios, "passed": held and ratio >= case.at_least}


def beaten_by_limit(failures: Sequence[str], limit_bytes: int | None) -> bool:
    """Whether the memory limit ended every failed run: any other failure says nothing about memory."""
    return limit_bytes is not None and all(reason == KILLED for reason in failures)


def measure_flash(rivals: Rivals, pairs: int) -> dict[str, Any]:
    """Reads while streaming against fio on the same disk, and the share of the time that they are under way.

    `flash_read_seconds` is wall time with a read in flight: nearly all of it, if compute hides behind reads.
    `flash_cpu_seconds` is what reading and comparing checksums takes from the compute, over all cores.
    """
    case = next(case for case in CASES if case.name == "streaming-50")
    ours, theirs, shares, cpu = [], [], [], []
    for pair in range(pairs):
        result = rivals.ours(case)
        if not result["survived"]:
            return {"case": "flash", "passed": False, "reason": result["reason"]}
        ours.append(result["flash_bytes_read"] / result["flash_read_seconds"] / 1e9)
        shares.append(result["flash_read_seconds"] / (result["last_token_at"] - result["prompt_at"]))
        cpu.append(result["flash_cpu_seconds"] / result["flash_bytes_read"] * 1e9)
        drop_caches()
        theirs.append(max(fio_in_order(rivals.gguf, 1 << 20, depth) for depth in (1, 4, 16)))
        note(
            f"flash {pair + 1}/{pairs}: {ours[-1]:.2f} of {theirs[-1]:.2f} GB/s, {shares[-1]:.0%} of the time"
        )
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "case": "flash",
        "figure": "gigabytes_per_second",
        "at_least": 0.9,
        "aim": 1.0,
        "ours": summary(ours) | {"text": spread(ours)},
        "theirs": summary(theirs) | {"text": f"fio {spread(theirs)}"},
        "ratio": ratio,
        "read_share_of_time": summary(shares),
        "cpu_seconds_per_gigabyte": summary(cpu),
        "passed": ratio >= 0.9 and statistics.median(shares) >= 0.9,
    }


def _ratio(ours: float, theirs: float, case: Case) -> float:
    return theirs / ours if case.lower_is_better else ours / theirs


def _figure_text(result: Result, case: Case) -> str:
    return f"{result[case.figure]:.2f}" if result["survived"] else str(result["reason"])


def _details(results: list[Result], case: Case) -> dict[str, Any]:
    values = [r[case.figure] for r in results]
    return summary(values) | {
        "text": spread(values),
        "peak_bytes": max(r["peak_memory_bytes"] for r in results),
    }


def report_synthetic(benchmark: str, rows: list[dict[str, Any]], pairs: int) -> int:
    """Print the cases of synthetic models, as a table and as one JSON line; 0 if all hold."""
    passed = all(row["passed"] for row in rows)
    print("synthetic models: sparsity planted in random weights\n")
    print(table(rows))
    summary = {"benchmark": benchmark, "passed": passed, "models": "synthetic", "machine": machine()}
    print(json.dumps(summary | {"pairs": pairs, "cases": rows}))
    return 0 if passed else 1


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: medians with their spread, ratio, and what was asked."""
    lines = ["| case | ondevice | llama.cpp | ratio | at least | aim | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sides = [row[side]["text"] if side in row else "" for side in ("ours", "theirs")]
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") else row.get("reason", "")
        verdict = "held" if row["passed"] else "MISSED"
        limits = f"{row.get('at_least', '')} | {row.get('aim', '')}"
        lines.append(f"| {row['case']} | {sides[0]} | {sides[1]} | {ratio} | {limits} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    """Run the chosen cases; 0 if all hold."""
    names = [case.name for case in CASES] + ["flash"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=names, help="default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--headline-setting",
        type=int,
        choices=range(len(HEADLINE_SETTINGS)),
        help="llama.cpp's setting for the headline, where an earlier run has found the best",
    )
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig(fio="flash" in (args.case or names))
    gguf = gguf_file(LLAMA_7B, args.workdir)
    bundle = bundle_folder(huggingface_folder(LLAMA_7B, args.workdir), args.workdir)
    rivals = Rivals(bundle, gguf, args.threads, args.headline_setting)
    chosen = args.case or names
    rows = [measure_case(rivals, case, args.pairs) for case in CASES if case.name in chosen]
    if "flash" in chosen:
        rows.append(measure_flash(rivals, args.pairs))
    passed = all(row["passed"] for row in rows)
    print(table(rows))
    summary_line = {
        "benchmark": "versus_llama_cpp",
        "passed": passed,
        "machine": machine(),
        "pairs": args.pairs,
    }
    print(json.dumps(summary_line | {"file_bytes": gguf.stat().st_size, "cases": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
