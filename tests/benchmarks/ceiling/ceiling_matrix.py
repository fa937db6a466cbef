"""The budget is a ceiling whatever is asked: runs drawn from a seed, over shapes, widths, texts and backends.

A run is a command: `generate -p -` with a prompt that fits, or `generate`, `eval` or a piped `chat` that is
fed 1 to 50 MB. Its model is random, of 4, 8 or 16 bits; its context, the bits of keys and values, the backend
and the budget (the minimum that `inspect` names, or a little above) are drawn too. It is run twice: in a
memory cgroup of the budget, where it may not be killed, and without a limit, where the peak of its resident
memory (anonymous and mapped) may not pass the budget. `failcnt` stands beside: how often the limit was met,
most of it by the page cache of the program's own files. A prompt must be answered, an input refused or read
to its end. Where cgroups or root are missing, the second run is all. Ends with one JSON line; exits 0 only if
all held.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.benchmarks.lib.measure import KILLED, MEMORY_CGROUP, machine, memory_cgroup, note
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE, bundle_folder
from tests.benchmarks.lib.random_model import QWEN3, TINY, Shape, huggingface_folder
from tests.support.paths import ROOT

LONGEST_TOKEN = 512
"""Letters of the longest piece of the tokenizer, so that 50 MB of them are scored in seconds."""
REPLY_TOKENS = 8
TIMEOUT_SECONDS = 600.0
# A vocabulary of 32,064: with 32,000 the checkpoint would get Llama's tokenizer.
WIDE = replace(QWEN3, name="matrix-wide", num_layers=3, vocab_size=32_064)
SHAPES = {
    "micro": Shape("matrix-micro", 64, 2, 192, 4, vocab_size=320, max_context=8192),
    "tiny": replace(TINY, name="matrix-tiny", vocab_size=2048, max_context=8192),
    "wide": WIDE,
    "qwen3": replace(WIDE, name="matrix-qwen3", num_layers=QWEN3.num_layers),
}
MLX_TOKENS = {"micro": 4000, "tiny": 500}
"""Longest prompts on MLX, whose CPU device multiplies slowly; a shape that isn't here runs on the kernels."""
# The command line, with the peak of its resident memory as the last line of stderr.
PROGRAM = """
import sys
from ondevice.cli import run
code = run(sys.argv[1:])
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Run:
    """One drawn run. fed: bytes of its input; a prompt's are its tokens."""

    shape: str
    quant: str
    context: int
    kv_bits: int
    backend: str
    factor: float
    command: str
    fed: int

    @property
    def options(self) -> list[str]:
        """What `inspect` and the command are told alike."""
        options = ["--max-context", str(self.context), "--kv-bits", str(self.kv_bits)]
        return [*options, "--backend", self.backend, "--threads", "2"]

    @property
    def allowed_codes(self) -> tuple[int, ...]:
        """A prompt is answered; an input that is too long is refused, a text that is scored has an end."""
        return {"prompt": (0,), "generate": (4,), "eval": (0,), "chat": (0, 4)}[self.command]


def drawn(seed: int, count: int) -> list[Run]:
    """So many runs; the same for the same seed."""
    chance = random.Random(seed)
    runs: list[Run] = []
    while len(runs) < count:
        shape = chance.choices(list(SHAPES), (30, 30, 30, 10))[0]
        backend = "mlx" if shape in MLX_TOKENS and chance.random() < 0.3 else "cpu"
        quant = chance.choice(("q4", "q8") if shape == "qwen3" else ("q4", "q8", "f16"))
        command = chance.choices(("prompt", "generate", "eval", "chat"), (60, 14, 13, 13))[0]
        context = chance.choice((512, 1024, 2048, 4096, 8192))
        if command == "prompt":
            longest = min(4000, context - REPLY_TOKENS - 4, MLX_TOKENS[shape] if backend == "mlx" else 4000)
            fed = chance.choice((longest, chance.randint(1, longest)))
        else:
            fed = chance.randint(1, 50) * 1_000_000
        if command == "eval":
            # Every token of it is computed.
            shape, fed = "micro", fed // 20 if backend == "mlx" else fed
        factor = chance.choice((1.0, 1.05, 1.2, 1.5))
        runs.append(Run(shape, quant, context, chance.choice((8, 16)), backend, factor, command, fed))
    return runs


def write_tokenizer(folder: Path) -> None:
    """A token per byte, and for doubled letters e up to LONGEST_TOKEN; a template for chats."""
    pieces = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges, run = [], "e"
    while len(run) < LONGEST_TOKEN:
        merges.append((run, run))
        run += run
        pieces[run] = len(pieces)
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def model_folder(run: Run, workdir: Path) -> Path:
    """The run's bundle, made on the first call."""
    checkpoint = huggingface_folder(SHAPES[run.shape], workdir)
    if not (checkpoint / "tokenizer.json").is_file():
        write_tokenizer(checkpoint)
    return bundle_folder(checkpoint, workdir, run.quant)


def minimum(run: Run, model: Path) -> int:
    """The smallest budget, as `inspect` names it."""
    command = [ONDEVICE, "inspect", "--model", str(model), "--json", *run.options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"inspect said nothing: {done.stderr.strip()}")
    return int(json.loads(done.stdout)["minimum_budget_bytes"])


def text_of(run: Run) -> Iterator[bytes]:
    """What the command is fed: letters that are a token each, or those of which hundreds are."""
    if run.command == "prompt":
        words = bytes(random.Random(run.fed).choices(b"abcdfghijklmnop qrstuvwxyz", k=run.fed))
        yield words.strip() or b"a"
        return
    for _ in range(run.fed // 1_000_000 or 1):
        yield b"e" * min(run.fed, 1_000_000)
    yield b"\nhi\n" if run.command == "chat" else b""


def arguments(run: Run, model: Path, budget: int) -> list[str]:
    """Of the command line."""
    first = {"prompt": ["generate", "-p", "-"], "generate": ["generate", "-p", "-"], "eval": ["eval"]}
    command = [
        *first.get(run.command, ["chat"]),
        "-m",
        str(model),
        "--dram-budget",
        str(budget),
        *run.options,
    ]
    if run.command == "eval":
        return [*command, "--text", "-"]
    return [*command, "--max-tokens", str(REPLY_TOKENS)]


def measured(run: Run, model: Path, budget: int, limited: bool) -> dict[str, Any]:
    """One process: its exit code, its peak, how often a limit was met, and the last line that it said."""
    with memory_cgroup(budget if limited else None) if has_cgroups() else nullcontext() as group:
        command = [sys.executable, "-c", PROGRAM, *arguments(run, model, budget)]
        process = subprocess.Popen(
            command if group is None else group.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        try:
            for part in text_of(run):
                process.stdin.write(part)
            process.stdin.close()
        except BrokenPipeError:
            pass
        process.stdin = None
        try:
            said = process.communicate(timeout=TIMEOUT_SECONDS)[1].decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"code": None, "said": f"no end after {TIMEOUT_SECONDS:.0f} s"}
        failcnt = 0 if group is None else group.read("failcnt")
    if process.returncode == -signal.SIGKILL:
        return {"code": process.returncode, "said": KILLED, "failcnt": failcnt}
    peak = 1024 * int(said[-1]) if said and said[-1].isdigit() else None
    rest = [line for line in (said[:-1] if peak else said) if line.strip()]
    last = rest[-1] if rest else ""
    return {"code": process.returncode, "said": last, "peak_bytes": peak, "failcnt": failcnt}


def has_cgroups() -> bool:
    """Whether memory can be limited here."""
    return os.geteuid() == 0 and (MEMORY_CGROUP / "memory.limit_in_bytes").exists()


def row_of(run: Run, model: Path) -> dict[str, Any]:
    """Both processes of a run, and what was wrong with them."""
    budget, wrong, started = int(run.factor * minimum(run, model)), [], time.monotonic()
    free = measured(run, model, budget, limited=False)
    results = {"unlimited": free}
    if has_cgroups():
        results["in a cgroup of the budget"] = measured(run, model, budget, limited=True)
    for where, result in results.items():
        if result["code"] not in run.allowed_codes:
            wrong.append(f"{where}: exit {result['code']}, {result['said'][:160]}")
        elif result["peak_bytes"] > budget:
            wrong.append(f"{where}: {(result['peak_bytes'] - budget) / 1e6:.1f} MB above the budget")
    limited = results.get("in a cgroup of the budget", {})
    return {
        **vars(run),
        "budget_bytes": budget,
        "peak_bytes": free.get("peak_bytes") or 0,
        "failcnt": limited.get("failcnt"),
        "seconds": time.monotonic() - started,
        "wrong": wrong,
    }


def line(number: int, row: dict[str, Any]) -> str:
    """One row of the table."""
    fed = row["fed"] if row["command"] == "prompt" else f"{row['fed'] / 1e6:.1f} MB"
    drawn_cells = [
        number,
        *(row[key] for key in ("shape", "quant", "context", "kv_bits", "backend", "command")),
    ]
    sizes = [f"{row[key] / 1e6:.1f}" for key in ("budget_bytes", "peak_bytes")]
    cells = [*drawn_cells, fed, row["factor"], *sizes, row["failcnt"], f"{row['seconds']:.0f}"]
    return "| " + " | ".join(map(str, cells)) + f" | {'; '.join(row['wrong']) or 'held'} |"


def main() -> int:
    """All runs; 0 if every ceiling held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="leave out the runs before this one")
    parser.add_argument("--quick", action="store_true", help="20 runs, none of the largest shape")
    parser.add_argument("--command", help="only runs of this kind: prompt, generate, eval or chat")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("this benchmark reads Linux's /proc")
    runs = list(enumerate(drawn(args.seed, args.runs)))[args.first :]
    runs = [(number, run) for number, run in runs if args.command in (None, run.command)]
    if args.quick:
        runs = [(number, run) for number, run in runs if run.shape != "qwen3"][:20]
    if not has_cgroups():
        note("no cgroups here: peaks of unlimited runs alone are measured")
    print(
        "| | shape | quant | context | kv | backend | command | fed | times | budget MB | peak MB | failcnt "
        "| s | |\n" + "|---" * 14 + "|"
    )
    rows = []
    for number, run in runs:
        rows.append(row_of(run, model_folder(run, args.workdir)))
        print(line(number, rows[-1]), flush=True)
    broken = [row for row in rows if row["wrong"]]
    print(
        json.dumps(
            {
                "benchmark": "ceiling_matrix",
                "passed": not broken,
                "machine": machine(),
                "seed": args.seed,
                "runs": len(rows),
                "largest_share_of_budget": max(row["peak_bytes"] / row["budget_bytes"] for row in rows),
                "broken": broken,
            }
        )
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
