"""The fuzzer's command line: which cases, for how long, what became of them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.fuzz import (
    bundle_cases,
    cache_cases,
    checkpoint_cases,
    head_cases,
    session_cases,
    slice_cases,
    template_cases,
    tokenizer_cases,
)
from tests.fuzz.bases import Bases, make_bases
from tests.fuzz.outcomes import FINDINGS, LIMIT_SECONDS, Outcome
from tests.fuzz.zygote import only_thread, run_case

KINDS: dict[str, ModuleType] = {
    "bundle": bundle_cases,
    "slice": slice_cases,
    "checkpoint": checkpoint_cases,
    "tokenizer": tokenizer_cases,
    "template": template_cases,
    "session": session_cases,
    "cache": cache_cases,
    "head": head_cases,
}
SHARES = {
    "bundle": 4,
    "slice": 1,
    "checkpoint": 2,
    "tokenizer": 2,
    "template": 1,
    "session": 1,
    "cache": 1,
    "head": 1,
}
"""Cases of each kind in every round."""
ORDER = [kind for kind, share in SHARES.items() for _ in range(share)]


def main() -> int:
    """The exit status: 1 for any finding."""
    options = _options()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ondevice-fuzz-") as scratch:
        if not only_thread():
            raise SystemExit("importing has started a thread; a process with threads can't be forked from")
        if options.replay:
            return _replay(options.replay, Path(scratch), options.limit)
        made = options.bases or Path(scratch) / "bases"
        if not options.bases:
            # In a process of its own, which may start threads.
            _in_child(lambda: _make_bases(made, options.families))
        return _fuzz(options, Bases(made), Path(scratch))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--cases", type=int, default=1 << 40, help="how many, if that is reached first")
    parser.add_argument("--seed", type=int, default=0, help="what decides all cases")
    parser.add_argument(
        "--kind", action="append", choices=list(KINDS), help="only this kind; may be repeated"
    )
    parser.add_argument(
        "--families", action="store_true", help="also spoil models of all families, which transformers makes"
    )
    parser.add_argument("--bases", type=Path, help="sound models that `make_bases` has made already")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one case, as a finding names it")
    parser.add_argument("--replay", type=Path, help="a finding's folder, as it was kept")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where findings are kept")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that a case may take")
    return parser.parse_args()


def _make_bases(folder: Path, families: bool) -> None:
    make_bases(folder)
    if families:
        # It imports PyTorch.
        from tests.fuzz.families import add_families

        add_families(folder)


def _in_child(work: object) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()  # type: ignore[operator]
            code = 0
        except BaseException as error:
            print(f"making sound models failed: {error!r}", file=sys.stderr)
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the sound models that cases begin with couldn't be made")


def _cases(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(kind, number), without end or the one that was asked for."""
    if options.only:
        kind, _, number = options.only.partition(":")
        yield kind, int(number)
        return
    order = [kind for kind in ORDER if not options.kind or kind in options.kind]
    numbers: Counter[str] = Counter()
    while True:
        for kind in order:
            yield kind, numbers[kind]
            numbers[kind] += 1


def _fuzz(options: argparse.Namespace, bases: Bases, scratch: Path) -> int:
    tallies: dict[str, Counter[str]] = defaultdict(Counter)
    findings = 0
    worst = (0.0, "")
    started = time.monotonic()
    try:
        for done, (kind, number) in enumerate(_cases(options)):
            if done >= options.cases or time.monotonic() > started + options.seconds:
                break
            folder = scratch / "case"
            folder.mkdir()
            seed = f"{options.seed}:{kind}:{number}"
            KINDS[kind].make(folder, random.Random(seed), bases)
            outcome = _tried(kind, seed, folder, scratch, options.limit)
            tallies[kind][outcome.kind] += 1
            worst = max(worst, (outcome.seconds, f"{kind}:{number}"))
            if outcome.is_finding:
                findings += 1
                _keep(outcome, kind, seed, options, number, folder)
            elif options.only:
                print(f"{kind}:{number} {outcome.kind}: {outcome.detail}")
            _remove(folder)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    _report(tallies, findings, worst, time.monotonic() - started, options.seed)
    return 1 if findings else 0


def _tried(kind: str, seed: str, folder: Path, scratch: Path, limit: float) -> Outcome:
    return run_case(lambda: KINDS[kind].run(folder, random.Random(f"{seed}:run")), scratch / "output", limit)


def _keep(
    outcome: Outcome, kind: str, seed: str, options: argparse.Namespace, number: int, folder: Path
) -> None:
    """The case, what was found, and how to see it again."""
    kept = options.folder / "findings" / f"{options.seed}-{kind}-{number}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    # cp, because it copies pipes and links as they are, and holes as holes.
    subprocess.run(["cp", "-a", "--sparse=always", str(folder), str(kept)], check=False)
    repeat = f"{sys.executable} -m tests.fuzz --seed {options.seed} --only {kind}:{number}"
    repeat += " --families" if options.families else ""
    case = {"kind": kind, "seed": seed, "found": outcome.kind, "detail": outcome.detail, "repeat": repeat}
    (kept / "case.json").write_text(json.dumps(case, indent=1))
    print(
        f"FINDING {outcome.kind} in {kind}:{number}: {outcome.detail}\n  again: {repeat}\n  kept: {kept}",
        flush=True,
    )


def _replay(kept: Path, scratch: Path, limit: float) -> int:
    case = json.loads((kept / "case.json").read_text())
    subprocess.run(["cp", "-a", "--sparse=always", str(kept), str(scratch / "case")], check=True)
    outcome = _tried(case["kind"], case["seed"], scratch / "case", scratch, limit)
    print(f"{outcome.kind}: {outcome.detail}")
    return 1 if outcome.is_finding else 0


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise SystemExit(f"{folder} can't be removed")


def _report(
    tallies: dict[str, Counter[str]], findings: int, worst: tuple[float, str], seconds: float, seed: int
) -> None:
    for kind, tally in tallies.items():
        found = ", ".join(f"{tally[name]} {name}" for name in FINDINGS if tally[name]) or "no findings"
        ended = f"{tally['accepted']} accepted, {tally['refused']} refused"
        print(f"{kind}: {tally.total()} cases, {ended}, {found}")
    total = sum(tally.total() for tally in tallies.values())
    print(f"{total} cases in {seconds:.0f} s, the slowest {worst[0]:.1f} s ({worst[1]}); {findings} findings")
    cases = {kind: dict(tally) for kind, tally in tallies.items()}
    print(json.dumps({"seed": seed, "seconds": round(seconds), "cases": cases, "findings": findings}))
