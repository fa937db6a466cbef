"""Records what the installed agents send for one task, and rewrites it for the tests.

    python -m tests.clients.record [NAME...]

Requests as they came stay in build/clients/raw, and the rewritten ones go to tests/clients/recorded.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.programs import AGENTS, FOLDER, Agent, start_agent
from tests.clients.recorder import MODEL, Recorder
from tests.clients.rewriting import Rewriter, written

SECONDS = 120
RECORDED = Path(__file__).parent / "recorded"
KNOWN_NAME = "claude-sonnet-4-5"
"""Claude Code sends twice as much to a model whose name it knows."""


def record(agent: Agent, model: str, name: str) -> int:
    """Run the agent against the recorder and write its requests as `name`. Gives its exit status."""
    output = FOLDER / "raw" / name
    shutil.rmtree(output, ignore_errors=True)
    with TemporaryDirectory() as made, Recorder(output, Path(made) / "workplace") as server:
        folder = Path(made)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        process = start_agent(agent, folder, url, model, 32768)
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            process.kill()
            process.wait()
            shutil.copy(folder / "transcript.txt", output)
            server.shutdown()
            publish(agent, output, name, made)


def publish(agent: Agent, raw: Path, name: str, folder: str) -> None:
    """Write the requests in `raw` as files of `recorded/`."""
    RECORDED.mkdir(exist_ok=True)
    for old in RECORDED.glob(f"{name}-[0-9]*.json"):
        old.unlink()
    rewriter = Rewriter(f"{agent.name} {agent.version}", f"{folder}/workplace")
    for at, path in enumerate(sorted(raw.glob("*.json")), 1):
        request = rewriter.request(json.loads(path.read_text()))
        (RECORDED / f"{name}-{at}.json").write_text(written(request) + "\n")


def main(names: list[str]) -> None:
    for name in names or AGENTS:
        runs = [(MODEL, name)]
        if name == "claude-code":
            runs.append((KNOWN_NAME, f"{name}-known-model"))
        for model, recorded in runs:
            code = record(AGENTS[name], model, recorded)
            print(recorded, "exit", code, len(list(RECORDED.glob(f"{recorded}-[0-9]*.json"))), "requests")


if __name__ == "__main__":
    main(sys.argv[1:])
