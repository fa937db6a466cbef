"""Four agents at once for half an hour: what they send is played again and again, and nothing may be lost.

    python -m tests.clients.soak [--minutes 30] [--model smollm2] [--budget 1GB]

Each agent goes through its recorded turns, shortened to fit the model's context. One request in eight is
abandoned while it is read or answered. Every other answer must be complete, and the same whenever the same is
asked. Ends with one JSON line; the exit status is 1 where something was lost or the peak exceeds the budget.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ondevice
from ondevice.units import parse_size
from tests.clients.process import Served, served
from tests.clients.rewriting import RECORDED, load_requests
from tests.clients.shapes import read_answer
from tests.support.real_models import cached_model

AGENTS = ("claude-code", "codex", "opencode", "qwen-code")
CONTEXT = 8192
SHARE = 0.15
"""Of the lengths of recorded texts: the longest prompt fits CONTEXT then."""
MOST_TOKENS = 32
SECONDS = 600.0
ABANDONED = 8
"""One request in so many is abandoned."""


@dataclass
class Agent:
    """An agent's turns, and what came of them."""

    name: str
    served: Served
    model: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    def run(self, until: float) -> None:
        """Play the turns until that time."""
        turns = [load_requests(path, SHARE)[0] for path in sorted(RECORDED.glob(f"{self.name}-[0-9].json"))]
        dice = random.Random(self.name)
        for at, request in itertools.cycle(enumerate(turns)):
            if time.monotonic() > until:
                return
            patience = dice.uniform(0.1, 10) if dice.randrange(ABANDONED) == 0 else None
            try:
                self._play(at, request, patience)
            except (OSError, http.client.HTTPException, AssertionError, ValueError) as error:
                self.counts["lost"] += 1
                self.faults.append(f"{self.name} {at}: {error!r}"[:500])

    def _play(self, at: int, request: dict[str, Any], patience: float | None) -> None:
        body = request["body"] | {"model": self.model, "stream": True, "temperature": 0}
        body["max_output_tokens" if request["path"] == "/v1/responses" else "max_tokens"] = MOST_TOKENS
        host = self.served.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=patience or SECONDS)
        try:
            connection.request("POST", request["path"], json.dumps(body), request["headers"])
            try:
                answer = connection.getresponse()
                data = answer.read()
            except TimeoutError:
                if patience is None:
                    raise
                self.counts["abandoned"] += 1
                return
        finally:
            connection.close()
        assert answer.status == 200, data[:300]
        reply = read_answer(request["path"], data, True)
        said = f"{reply.text} {reply.calls}"
        assert self.texts.setdefault(at, said) == said, "another answer than the first time"
        self.counts["answered"] += 1
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["new_tokens"] += reply.new_tokens


def soak(bundle: Path, budget: str, minutes: float, log: Path, context: int = CONTEXT) -> dict[str, Any]:
    """Run the agents on a server of the bundle. What came of it, as the last line says it."""
    options = ("--dram-budget", budget, "--max-context", context, "--parallel", len(AGENTS))
    begun = time.monotonic()
    with served(bundle, log, *options) as running:
        agents = [Agent(name, running, bundle.name) for name in AGENTS]
        until = time.monotonic() + 60 * minutes
        threads = [threading.Thread(target=agent.run, args=(until,)) for agent in agents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        died = running.process.poll() is not None
        peak = 0 if died else running.peak_bytes()
    counts = sum((agent.counts for agent in agents), Counter())
    faults = [fault for agent in agents for fault in agent.faults]
    return {
        "benchmark": "soak",
        "model": bundle.name,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "answered": counts["answered"],
        "abandoned": counts["abandoned"],
        "lost": counts["lost"],
        "prompt_tokens": counts["prompt_tokens"],
        "new_tokens": counts["new_tokens"],
        "by_agent": {agent.name: dict(agent.counts) for agent in agents},
        "peak_bytes": peak,
        "budget_bytes": parse_size(budget),
        "faults": faults[:10],
        "server_died": died,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--budget", default="1GB")
    given = parser.parse_args()
    source = cached_model(given.model)
    if source is None:
        print(f"{given.model} isn't there: make models MODELS={given.model} fetches it", file=sys.stderr)
        return 1
    with TemporaryDirectory() as made:
        bundle = ondevice.convert(source, Path(made) / given.model)
        result = soak(bundle, given.budget, given.minutes, Path(made) / "log.jsonl")
    print(json.dumps(result))
    lost = result["lost"] or result["server_died"] or not result["answered"]
    return int(bool(lost) or result["peak_bytes"] > result["budget_bytes"])


if __name__ == "__main__":
    sys.exit(main())
