"""Converting the 7B shape inside a 1 GiB cgroup, against a cold `cp` and `sync` of the same files.

With `--gguf` the source is a GGUF file in Q4_0, whose codes are all copied. Wall time follows what else runs
on the machine, so the core seconds (user and system) of copies and conversions are reported too.

Then a small model is converted again and again, each time killed (SIGKILL) at a random moment and resumed:
the bytes must be those of an uninterrupted conversion. Ends with one JSON line; exits 0 only if the
conversion takes at most 3 times the copy (1.5 times of a GGUF file), isn't killed, and all resumes agree.
Whether 1.5 times is reached depends on the machine: docs/benchmarks.md says where the core seconds go.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.lib.measure import (
    drop_caches,
    machine,
    memory_cgroup,
    note,
    require_rig,
    spread,
    summary,
)
from tests.benchmarks.lib.ondevice_bundle import convert_command
from tests.benchmarks.lib.q4_0_gguf import q4_0_file
from tests.benchmarks.lib.random_model import LLAMA_7B, TINY, huggingface_folder
from tests.support.paths import ROOT

LIMIT_BYTES = 1 << 30
AT_MOST, GGUF_AT_MOST = 3.0, 1.5


def core_seconds() -> float:
    """User and system seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copy_seconds(source: Path, workdir: Path) -> float:
    """A cold `cp -r` and `sync`; the copy is removed again."""
    target = workdir / "copy"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    drop_caches()
    started = time.monotonic()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    os.sync()
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return seconds


def convert_seconds(source: Path, workdir: Path) -> tuple[float, int]:
    """A cold conversion and `sync` under the limit: seconds, and the cgroup's failcnt."""
    output = workdir / "converted"
    for leftover in (output, output.with_name(output.name + ".partial")):
        shutil.rmtree(leftover, ignore_errors=True)
    drop_caches()
    with memory_cgroup(LIMIT_BYTES) as group:
        started = time.monotonic()
        quant = "auto" if source.suffix == ".gguf" else "q4"
        command = group.command(convert_command(source, output, quant=quant))
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        os.sync()
        seconds = time.monotonic() - started
        failcnt = group.read("failcnt")
    if result.returncode:
        raise SystemExit(f"convert ended with {result.returncode}: {result.stderr.strip()[-400:]}")
    shutil.rmtree(output)
    return seconds, failcnt


def folder_digest(folder: Path) -> str:
    """SHA-256 over every file's name and bytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kill_and_resume(source: Path, workdir: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill `kills` conversions at random moments of their run, resume each, and compare the bytes."""
    output = workdir / "resumed"
    command = convert_command(source, output, "--resume")
    for leftover in (output, output.with_name(output.name + ".partial")):
        shutil.rmtree(leftover, ignore_errors=True)
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - started
    expected = folder_digest(output)
    moments = random.Random(seed)
    killed = different = 0
    for number in range(kills):
        shutil.rmtree(output)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.0, whole))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        # A folder under its final name is a whole bundle, however late the kill came.
        if not output.exists():
            subprocess.run(command, check=True, capture_output=True)
        different += folder_digest(output) != expected
        note(f"kill {number + 1}/{kills}: {killed} in mid-run, {different} different")
    shutil.rmtree(output)
    return {"rounds": kills, "killed_mid_run": killed, "different": different}


def main() -> int:
    """Copies and conversions in interleaved pairs, then the kills; 0 if all holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--gguf", action="store_true", help="a GGUF file in Q4_0 instead of a folder")
    parser.add_argument("--layers", type=int, default=32, help="of the GGUF file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    copies: list[float] = []
    conversions: list[float] = []
    copy_cores: list[float] = []
    convert_cores: list[float] = []
    failcnts: list[int] = []
    if args.pairs:
        source = huggingface_folder(LLAMA_7B, args.workdir) if not args.gguf else None
        source = source or q4_0_file(LLAMA_7B, args.workdir, args.layers)
        for pair in range(args.pairs):
            started = core_seconds()
            copies.append(copy_seconds(source, args.workdir))
            copied = core_seconds()
            seconds, failcnt = convert_seconds(source, args.workdir)
            conversions.append(seconds)
            failcnts.append(failcnt)
            copy_cores.append(copied - started)
            convert_cores.append(core_seconds() - copied)
            note(
                f"pair {pair + 1}/{args.pairs}: cp {copies[-1]:.1f} s ({copy_cores[-1]:.1f} core seconds), "
                f"convert {seconds:.1f} s ({convert_cores[-1]:.1f})"
            )
    report: dict[str, Any] = {
        "benchmark": "convert_versus_cp",
        "machine": machine(),
        "limit_bytes": LIMIT_BYTES,
        "gguf_layers": args.layers if args.gguf else None,
    }
    passed = True
    if args.pairs:
        ratio = summary(conversions)["median"] / summary(copies)["median"]
        at_most = GGUF_AT_MOST if args.gguf else AT_MOST
        passed = ratio <= at_most
        print(f"cp {spread(copies, 1)} s, convert {spread(conversions, 1)} s: {ratio:.2f} times")
        report |= {"cp_seconds": summary(copies), "convert_seconds": summary(conversions), "ratio": ratio}
        report |= {"at_most": at_most, "failcnt": failcnts}
        report |= {"cp_core_seconds": copy_cores, "convert_core_seconds": convert_cores}
    if args.kills:
        resumed = kill_and_resume(huggingface_folder(TINY, args.workdir), args.workdir, args.kills, args.seed)
        passed = passed and not resumed["different"]
        print(f"kills: {resumed}")
        report["kills"] = resumed
    print(json.dumps(report | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
