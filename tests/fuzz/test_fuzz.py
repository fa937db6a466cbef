"""The fuzzer finds what it is there to find, and finds nothing in a few cases; `make fuzz` tries more."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ondevice.api import load, verify
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.errors import BundleError
from tests.fuzz import bundle_cases, signing, slice_cases, template_cases, tokenizer_cases
from tests.fuzz.bases import Bases, make_bases
from tests.fuzz.command import SHARES
from tests.fuzz.outcomes import SLACK_BYTES, Difference
from tests.fuzz.zygote import run_case
from tests.support.bundles import copy_files, open_sound
from tests.support.paths import ROOT
from tests.support.ranks import text_of_met


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return make_bases(tmp_path_factory.mktemp("fuzz") / "bases")


def fuzzed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--folder", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def leave() -> int:
    os._exit(0)


def sleep() -> int:
    time.sleep(60)
    return 0


def spin() -> int:
    while True:
        pass


def take_memory() -> int:
    # A process with many libraries counts their pages; a case that was forked from it doesn't.
    return len(b"x" * (8 * SLACK_BYTES)) and 0


def fail() -> int:
    raise KeyError("not one of ours")


def refuse() -> int:
    raise BundleError("damaged")


def differ() -> int:
    raise Difference("1 here, 2 there")


def panic() -> int:
    os.write(2, b"thread '<unnamed>' panicked at src/lib.rs:1")
    return 0


@pytest.mark.fast(
    *("take_memory-memory", "<lambda>-accepted", "crash-crash", "refuse-refused", "sleep-hang"),
    *("panic-panic", "differ-difference", "fail-untyped", "leave-crash"),
)
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of a process are read as Linux counts them")
@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda: 0, "accepted"),
        (refuse, "refused"),
        (crash, "crash"),
        (leave, "crash"),
        (sleep, "hang"),
        (spin, "hang"),
        (take_memory, "memory"),
        (fail, "untyped"),
        (differ, "difference"),
        (panic, "panic"),
    ],
)
def test_a_case_is_judged(tmp_path: Path, work: Callable[[], int], kind: str) -> None:
    # A busy machine may take a second to give memory: only what hangs is waited for to the limit.
    limit_seconds = 1.0 if kind == "hang" else 60.0
    outcome = run_case(work, tmp_path / "output", limit_seconds=limit_seconds)
    assert (outcome.kind, outcome.is_finding) == (kind, kind not in ("accepted", "refused"))


@pytest.mark.parametrize("index", range(3))
def test_what_is_signed_again_passes_every_check(bases: Bases, tmp_path: Path, index: int) -> None:
    """So a change isn't stopped by a checksum before it reaches what reads it."""
    folder = copy_files(bases.bundles[index], tmp_path / "bundle")
    bundle = Bundle.open(folder)
    up = DATA_OFFSET + bundle.neuron_layouts[0].part_offsets[1]
    places = {
        "neurons-00000": up,
        "embedding": DATA_OFFSET,
        "resident": -70,
        "streams": -70,
        "predictors": -70,
        "eagle": -70,
        "dflash": -70,
        "mtp": -70,
    }
    for name, at in places.items():
        path = folder / f"{name}.safetensors"
        if path.exists():
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
    with pytest.raises(BundleError):
        verify(folder)
    signing.sign(folder, bundle.config, bundle.quant)
    verify(folder)
    open_sound(folder)


@pytest.mark.fast("0", "3")
@pytest.mark.parametrize("index", range(4))
def test_sound_slices_write_the_text_of_the_whole(bases: Bases, index: int) -> None:
    """So what spoilt ones are refused for is what was spoilt."""
    folder, prompt = bases.slices[index], [7, 8, 9, 10, 11]
    sampling = SamplingConfig(max_tokens=6, temperature=0.8, seed=7)
    runtime = RuntimeConfig(dram_budget="2GB", memory_pressure="off", threads=1)
    found = text_of_met([folder / rank for rank in slice_cases.RANKS], runtime, prompt, sampling)
    with load(bases.folder / "bundles" / folder.name, dram_budget="2GB", threads=1) as model:
        whole = model.generate(tokens=prompt, max_tokens=6, temperature=0.8, seed=7)
    assert found == list(whole.tokens)


@contextmanager
def on(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    yield folder


def test_a_seed_decides_a_case(bases: Bases, tmp_path: Path) -> None:
    for cases, name in ((bundle_cases, "bundle"), (slice_cases, "rank-0"), (slice_cases, "rank-1")):
        made = []
        for copy in "ab":
            with on(tmp_path / f"{name} {copy}") as folder:
                cases.make(folder, random.Random("7"), bases)
                made.append({path.name: path.read_bytes() for path in (folder / name).iterdir()})
        assert made[0] == made[1]
    texts = {template_cases.made_up(random.Random(seed)) for seed in range(50)}
    files = {tokenizer_cases.made_up("tokenizers", random.Random(seed), bases) for seed in range(50)}
    assert min(len(texts), len(files)) > 40


@pytest.mark.skipif(sys.platform != "linux", reason="forks, as Linux does")
@pytest.mark.parametrize("cases", [sum(SHARES.values()), pytest.param(36, marks=pytest.mark.slow)])
def test_cases_of_every_kind_pass(bases: Bases, tmp_path: Path, cases: int) -> None:
    made = ("--bases", str(bases.folder), "--seconds", "120", "--seed", "5")
    result = fuzzed(tmp_path, "--cases", str(cases), *made)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    assert sum(sum(tally.values()) for tally in figures["cases"].values()) == cases
    assert set(figures["cases"]) == set(SHARES)


@pytest.mark.skipif(sys.platform != "linux", reason="forks, as Linux does")
def test_a_finding_is_kept_and_told_how_to_repeat(bases: Bases, tmp_path: Path) -> None:
    """No case ends in no time."""
    made = ("--bases", str(bases.folder), "--seed", "5", "--limit", "0")
    result = fuzzed(tmp_path, "--cases", "1", *made)
    assert result.returncode == 1
    assert "--seed 5 --only bundle:0" in result.stdout
    kept = tmp_path / "findings" / "5-bundle-0"
    assert json.loads((kept / "case.json").read_text())["found"] == "hang"
    assert (kept / "bundle" / "bundle.json").exists()
    assert fuzzed(tmp_path, "--replay", str(kept)).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, as Linux does")
def test_a_minute_of_cases_passes(tmp_path: Path) -> None:
    result = fuzzed(tmp_path, "--seconds", "60", "--seed", "6")
    assert result.returncode == 0, result.stdout + result.stderr
