"""Runs of one model by both engines, each in a fresh process, and the figures that are kept of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_models.cache import sha256_of
from tests.benchmarks.lib.measure import (
    LIMITED_TIMEOUT_SECONDS,
    LLAMA_CPP_DEFAULT,
    NO_CGROUP,
    PLAIN_MMAP,
    can_drop_caches,
    cgroup_version,
    drop_caches,
    run_engine,
)
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE as COMMAND
from tests.benchmarks.real.cases import DRAFTING, FIRST_TOKENS, LLAMA_CPP, ONDEVICE, Case, DraftCase

TIMEOUT_SECONDS = 1_200.0
NOT_COLD = "skipped: needs root, to drop caches"
UNCOUNTED_BYTES = 32 << 20
"""Pages of programs and libraries at most that a limit doesn't count, as another process has them mapped."""
VOID = "void: other programs hold its files in memory, which its limit didn't count"
KEPT = (
    "survived",
    "reason",
    "required_bytes",
    "load_seconds",
    "start_to_first_token_seconds",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "peak_memory_bytes",
    "plan_bytes",
    "flash_bytes_read",
)


@dataclass(frozen=True)
class RealModel:
    """A model's files, its tokens, and the number of threads that both engines get.

    tokens: what `run_tokens` prints. draft_bundle: of the model that drafts, or None.
    """

    name: str
    gguf: Path
    bundle: Path
    folder: Path
    threads: int
    tokens: Mapping[str, Any]
    draft_bundle: Path | None = None

    def limit(self, share: int | None) -> int | None:
        """Bytes of `share` per cent of the GGUF's size; None: unlimited."""
        return None if share is None else self.gguf.stat().st_size * share // 100

    def text(self, count: int) -> list[int]:
        """The first `count` tokens of the text, with what the model begins texts with."""
        text: list[int] = [*self.tokens["first"], *self.tokens["text"]]
        return text[:count]

    def run(self, case: Case, arm: str) -> dict[str, Any]:
        """One run of a case; the figures that are kept."""
        if not case.warm_up and not can_drop_caches():
            return {"survived": False, "reason": NOT_COLD}
        limit = self.limit(case.share)
        timeout = TIMEOUT_SECONDS if limit is None else LIMITED_TIMEOUT_SECONDS
        spec: dict[str, object] = {
            "prompt": self.text(case.prompt_tokens),
            "max_tokens": case.max_tokens,
            "context": case.context,
            "threads": self.threads,
            "warm_up": case.warm_up,
            "steady_tokens": case.left_out,
            "kv_bits": 16,
        }
        if arm == LLAMA_CPP:
            spec |= {"model": str(self.gguf), **(LLAMA_CPP_DEFAULT if limit is None else PLAIN_MMAP)}
            result = run_engine("run_llama_cpp", spec, limit, timeout)
        else:
            spec |= {"model": str(self.bundle), "dram_budget": limit or "auto", "io": "auto"}
            spec |= {"sparsity": "auto", "temperature": 0.0}
            spec |= {"speculation": "auto" if arm == DRAFTING else "off"}
            result = run_engine("run_ondevice", spec, limit, timeout)
        if limit and result["survived"] and result["peak_memory_bytes"] > limit + UNCOUNTED_BYTES:
            return {"survived": False, "reason": VOID}
        return kept(result, case)

    def draft(self, case: DraftCase, drafter: str, number: int, max_tokens: int) -> dict[str, Any]:
        """Prompt `number` of each kind, continued with a drafter: figures by kind and in all."""
        limit, prompts = self.limit(case.share), self.tokens["prompts"]
        chosen = {kind: ids[number] for kind, ids in prompts.items()}
        longest = max(map(len, chosen.values()))
        spec: dict[str, object] = {
            "model": str(self.bundle),
            "prompts": list(chosen.values()),
            "max_tokens": max_tokens,
            "context": -(-(longest + max_tokens) // 256) * 256,
            "threads": self.threads,
            "warm_up": 8,
            "kv_bits": 16,
            "dram_budget": limit or "auto",
            "io": "auto",
            "sparsity": "auto",
            "temperature": case.temperature,
            "speculation": drafter,
            "draft_model": str(self.draft_bundle) if drafter == "model" else "",
        }
        result = run_engine("run_ondevice", spec, limit, TIMEOUT_SECONDS)
        return draft_figures(result, list(chosen))

    def quality(self, engine: str, windows: list[list[int]]) -> dict[str, Any]:
        """How one engine agrees with the file's values in float32, over windows of text."""
        listed = json.dumps(windows)
        key = f"{sha256_of(self.gguf)[:16]}-{hashlib.sha256(listed.encode()).hexdigest()[:16]}"
        states, tokens = self.folder / f"oracle-{key}.npy", self.folder / f"windows-{key}.json"
        tokens.write_text(listed)
        spec = {
            "gguf": str(self.gguf),
            "windows": str(tokens),
            "states": str(states),
            "threads": self.threads,
        }
        if not states.exists():
            oracle = run_engine("run_oracle", spec, timeout_seconds=3 * TIMEOUT_SECONDS)
            if not oracle["survived"]:
                return {"survived": False, "reason": f"the oracle: {oracle['reason']}"}
        model = self.bundle if engine == ONDEVICE else self.gguf
        spec |= {"engine": engine, "model": str(model)}
        result = run_engine("run_quality", spec, timeout_seconds=3 * TIMEOUT_SECONDS)
        unwanted = ("failcnt", "cgroup_peak_bytes", "wall_seconds")
        return {key: value for key, value in result.items() if key not in unwanted}


def kept(result: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """Figures of a run that are stored: those of KEPT, and of a start the rate of its first tokens."""
    row = {key: result[key] for key in KEPT if key in result}
    if row["survived"] and case.left_out == FIRST_TOKENS:
        times = result["token_seconds"]
        row["first_tokens_per_second"] = (FIRST_TOKENS - 1) / (times[FIRST_TOKENS - 1] - times[0])
    # A prompt alone has no rate of decoding.
    if case.max_tokens == 1:
        row.pop("decode_tokens_per_second", None)
    return row


def draft_figures(result: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Tokens per pass and per second by kind and in all, and a digest of each kind's text."""
    row = {key: result[key] for key in ("survived", "reason", "required_bytes") if key in result}
    if not row["survived"]:
        return row
    for kind, part in zip(kinds, result["each"], strict=True):
        # A text that ended with its first token has no passes.
        if part["passes"]:
            row[f"{kind}.tokens_per_pass"] = part["tokens"] / part["passes"]
            row[f"{kind}.tokens_per_second"] = part["tokens"] / part["seconds"]
    row["tokens_per_pass"] = result["decoded_tokens"] / result["decode_passes"]
    row["tokens_per_second"] = result["decoded_tokens"] / result["decode_seconds"]
    row["peak_memory_bytes"] = result["peak_memory_bytes"]
    digests = [hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16] for text in result["texts"]]
    row["texts"] = dict(zip(kinds, digests, strict=True))
    return row


def convert(gguf: Path, bundle: Path) -> dict[str, Any]:
    """Convert from cold caches; the seconds that takes, and both sizes on disk."""
    if can_drop_caches():
        drop_caches()
    started = time.monotonic()
    command = [COMMAND, "convert", str(gguf), "--output", str(bundle), "--force", "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        return {"survived": False, "reason": last}
    nbytes = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    return {
        "survived": True,
        "convert_seconds": seconds,
        "bundle_bytes": nbytes,
        "gguf_bytes": gguf.stat().st_size,
    }


def read_tokens(bundle: Path, text: Path, prompts: Mapping[str, list[str]]) -> dict[str, Any]:
    """What `run_tokens` prints. Raises SystemExit with its last words if it fails."""
    spec = {"model": str(bundle), "text": str(text), "characters": 150_000, "prompts": prompts}
    command = [sys.executable, "-m", "tests.benchmarks.lib.run_tokens", json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{bundle.name}: {done.stderr.strip().splitlines()[-1]}")
    tokens: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def warm_llama_cpp(gguf: Path, threads: int) -> None:
    """llama.cpp's first, untimed run, as ondevice has one: it leaves compiled sources behind."""
    spec: dict[str, object] = {"model": str(gguf), "prompt": [1, 2, 3, 4], "max_tokens": 2, "context": 256}
    spec |= {"threads": threads, "warm_up": 0, "kv_bits": 16, **LLAMA_CPP_DEFAULT}
    run_engine("run_llama_cpp", spec)


class OthersClock:
    """Measures how busy other programs keep the processors, from when it is made."""

    def __init__(self) -> None:
        self._before = self._now()

    def share(self) -> float:
        """Share of all processors' time that neither this process's children nor idling took, from 0 to 1."""
        total, busy, children = (now - then for now, then in zip(self._now(), self._before, strict=True))
        return min(1.0, max(0.0, busy - children) / total) if total else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds of all processors so far: in all, not idle, and of this process's children. Linux."""
        stat = Path("/proc/stat")
        if not stat.is_file():
            return 0.0, 0.0, 0.0
        ticks = [
            int(word) / os.sysconf("SC_CLK_TCK") for word in stat.read_text().splitlines()[0].split()[1:9]
        ]
        children = os.times()
        # The fourth and fifth are idle, and idle while a disk works.
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], children.children_user + children.children_system


def skipped_limits() -> str:
    """What this machine can't measure, in words; empty where it can measure everything."""
    reasons = [] if cgroup_version() else [NO_CGROUP]
    reasons += [] if can_drop_caches() else [NOT_COLD]
    return "; ".join(reasons)
