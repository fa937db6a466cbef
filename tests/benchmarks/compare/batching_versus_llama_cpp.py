"""Clients at once: llama.cpp's server beside `ondevice serve`, with the same GGUF in the same cgroup.

    python -m tests.benchmarks.lib.llama_server --output build/llama-server
    python -m tests.benchmarks.compare.batching_versus_llama_cpp --workdir DIR

`--engines "llama.cpp's batches"` drives its library without a server (`run_llama_cpp_batch.py`): what any
server of it could do at most.

Random weights of a Llama-7B shape in Q4_0, 3.8 GB, and a bundle converted from that file: made on the first
call, with as much disk again. The memory of both is limited to half of the file, where every pass reads
weights from flash, and to one and a half times the file, where all is resident. 8-bit keys and values, no
drafts unless `--speculation` says otherwise, room for 512 tokens a client, as many slots as clients at most.
llama.cpp maps the file and copies nothing in the half, and has its defaults where all is resident. Clients
of both stream over HTTP. Every round has prompts of its own, so that no server finds one in its cache.

Both servers run in turns, each from cold caches, `--rounds` times over all numbers of clients. Tokens count
from when all have their first until one has its last. Ends with a table and a JSON line; exits 0 if all runs
gave all their tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.lib.measure import (
    drop_caches,
    machine,
    memory_cgroup,
    note,
    require_rig,
    run_engine,
    spread,
)
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE, convert_command
from tests.benchmarks.lib.random_model import LLAMA_7B, TINY, gguf_file, random_tokens
from tests.benchmarks.lib.streaming_clients import Client, at_once, free_port, rate, wait_until_ready
from tests.support.paths import ROOT

SHAPES = {shape.name: shape for shape in (LLAMA_7B, TINY)}
SHARES = {"half": 0.5, "resident": 1.5}
"""Of the GGUF's size, the memory of a server."""
TINY_BYTES = 600_000_000
"""Added for a tiny shape, whose file says nothing of what a process takes."""
CONTEXT = 512
PROMPT_TOKENS = 16
END_OF_TEXT = 2
WARM_TOKENS = 4
TIMEOUT_SECONDS = 7200.0
OURS, THEIRS, BATCHES = "ondevice", "llama.cpp", "llama.cpp's batches"


@dataclass(frozen=True)
class Row:
    """What a server gave with a number of clients. Rates are tokens of all per second, one for each round."""

    memory: str
    limit_bytes: int
    engine: str
    clients: int
    rates: tuple[float, ...]
    peak_bytes: int
    """Of the cgroup, page cache included, over all its numbers of clients."""


class Rig:
    """Both servers' command lines, and the clients."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = SHAPES[args.shape]
        self.args, self.vocab_size = args, shape.vocab_size
        self.gguf = gguf_file(shape, args.workdir)
        self.bundle = self.gguf.with_suffix("")
        self.extra_bytes = TINY_BYTES if shape is TINY else 0
        if not (self.bundle / "bundle.json").is_file():
            command = convert_command(self.gguf, self.bundle, "--resume", quant="auto")
            subprocess.run(command, check=True, stdout=sys.stderr)

    def limit(self, memory: str) -> int:
        """Bytes of the cgroup."""
        return int(SHARES[memory] * self.gguf.stat().st_size) + self.extra_bytes

    def command(self, engine: str, memory: str, port: int) -> list[str]:
        """A server of the model at a port."""
        most = max(self.args.clients)
        threads = str(self.args.threads)
        if engine == OURS:
            options = {
                "dram-budget": self.limit(memory),
                "backend": "cpu",
                "threads": threads,
                "sparsity": "dense",
                "speculation": self.args.speculation,
                "kv-bits": 8,
                "max-context": CONTEXT,
                "parallel": most,
                "port": port,
                "memory-pressure": "off",
            }
            return [ONDEVICE, "serve", str(self.bundle), *_options(options)]
        options = {
            "model": self.gguf,
            "parallel": most,
            "ctx-size": CONTEXT * most,
            "threads": threads,
            "threads-batch": threads,
            "cache-type-k": "q8_0",
            "cache-type-v": "q8_0",
            "flash-attn": "on",
            "cache-ram": 0,
            "fit": "off",
            "port": port,
        }
        lean = ["--load-mode", "mmap", "--no-repack"] if memory == "half" else []
        return [str(self.args.server), *_options(options), *lean]

    def run(self, engine: str, memory: str, turn: int) -> tuple[dict[int, float], int]:
        """One engine, from cold caches: the rate with each number of clients, and the cgroup's peak."""
        return self._batches(memory, turn) if engine == BATCHES else self._served(engine, memory, turn)

    def _batches(self, memory: str, turn: int) -> tuple[dict[int, float], int]:
        counts, most = self.args.clients, max(self.args.clients)
        spec = {
            "model": str(self.gguf.resolve()),
            "context": CONTEXT * most,
            "sequences": most,
            "threads": self.args.threads,
            "max_tokens": self.args.tokens,
            "prompts": [self._prompts(turn, number) for number in range(len(counts))],
            "micro_batch": 0,
        }
        spec |= {"load_mode": "mmap", "repack": False} if memory == "half" else {"load_mode": "default"}
        result = run_engine(
            "run_llama_cpp_batch", {"repack": True} | spec, self.limit(memory), TIMEOUT_SECONDS
        )
        if not result["survived"]:
            raise SystemExit(f"{memory}, {BATCHES}: {result['reason']}")
        found = dict(zip(counts, result["rates"], strict=True))
        note(f"{memory}, {BATCHES}: {found} tokens/s")
        return found, result["cgroup_peak_bytes"]

    def _served(self, engine: str, memory: str, turn: int) -> tuple[dict[int, float], int]:
        port, found = free_port(), {}
        log_file = self.args.workdir / f"batching-{engine}-{memory}.log"
        drop_caches()
        with memory_cgroup(self.limit(memory)) as group, log_file.open("wb") as log:
            command = group.command(self.command(engine, memory, port))
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)
            try:
                wait_until_ready(port, server)
                warm = random_tokens(PROMPT_TOKENS, self.vocab_size, 0)
                at_once([Client(port, warm, WARM_TOKENS, END_OF_TEXT)])
                for number, count in enumerate(self.args.clients):
                    prompts = self._prompts(turn, number)
                    clients = [Client(port, prompt, self.args.tokens, END_OF_TEXT) for prompt in prompts]
                    at_once(clients)
                    found[count] = round(rate(clients), 3)
                    note(f"{memory}, {engine}, {count} clients: {found[count]} tokens/s")
                return found, group.read("max_usage_in_bytes")
            finally:
                server.send_signal(signal.SIGTERM)
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    server.kill()
                    server.wait()

    def _prompts(self, turn: int, number: int) -> list[list[int]]:
        """Prompts of the number of clients at `number` in a round, none of which comes twice."""
        seed = 1000 * (1 + turn * len(self.args.clients) + number)
        count = self.args.clients[number]
        return [random_tokens(PROMPT_TOKENS, self.vocab_size, seed + at) for at in range(count)]


def _options(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def rows(rig: Rig, memory: str, engines: Sequence[str], rounds: int) -> list[Row]:
    """The rows of one limit of memory. Who begins changes from round to round."""
    rates: dict[str, list[dict[int, float]]] = {engine: [] for engine in engines}
    peaks = dict.fromkeys(engines, 0)
    for turn in range(rounds):
        for engine in engines if turn % 2 == 0 else engines[::-1]:
            found, peak = rig.run(engine, memory, turn)
            rates[engine].append(found)
            peaks[engine] = max(peaks[engine], peak)
    return [
        Row(memory, rig.limit(memory), engine, count, tuple(it[count] for it in of_engine), peaks[engine])
        for engine, of_engine in rates.items()
        for count in rig.args.clients
    ]


def table(found: Sequence[Row], clients: Sequence[int]) -> str:
    """Markdown: medians with their spread, and how many times the one client's rate they are."""
    lines = ["| memory | server |" + "".join(f" {count} |" for count in clients)]
    lines.append("|---|---|" + "---|" * len(clients))
    groups: dict[tuple[str, str], dict[int, Row]] = {}
    for row in found:
        groups.setdefault((row.memory, row.engine), {})[row.clients] = row
    for (memory, engine), group in groups.items():
        one = statistics.median(group[clients[0]].rates)
        cells = [f"{spread(group[it].rates)}, x {_over(group[it], one)}" for it in clients]
        lines.append(f"| {memory} | {engine} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over(row: Row, one: float) -> str:
    return f"{statistics.median(row.rates) / one:.2f}" if one else "-"


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    parser.add_argument(
        "--server", type=Path, default=ROOT / "build/llama-server/server/llama-server", help="llama.cpp's"
    )
    parser.add_argument("--shape", choices=SHAPES, default=LLAMA_7B.name)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=16, help="of each client, 4 or more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", nargs="+", choices=tuple(SHARES), default=list(SHARES))
    parser.add_argument("--engines", nargs="+", choices=(OURS, THEIRS, BATCHES), default=[OURS, THEIRS])
    parser.add_argument("--speculation", choices=("off", "auto"), default="off", help="of ondevice")
    args = parser.parse_args()
    if THEIRS in args.engines and not args.server.is_file():
        parser.error(f"{args.server} isn't there; make it by python -m tests.benchmarks.lib.llama_server")
    if args.tokens < 4 or min(args.clients) < 1 or args.rounds < 1:
        parser.error("--tokens must be 4 or more, --clients and --rounds 1 or more")
    require_rig()
    rig = Rig(args)
    found: list[Row] = []
    for memory in args.memory:
        found += rows(rig, memory, args.engines, args.rounds)
    print(table(found, args.clients))
    facts = {"benchmark": "batching_versus_llama_cpp", "shape": args.shape, "tokens": args.tokens}
    facts |= {"threads": args.threads, "speculation": args.speculation, "machine": machine()}
    print(json.dumps(facts | {"gguf_bytes": rig.gguf.stat().st_size, "rows": list(map(asdict, found))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
