"""Records what the installed programs send for one task or question, and rewrites it for the tests.

    python -m tests.clients.record [NAME...]

Requests as they came stay in build/clients/raw, and the rewritten ones go to tests/clients/recorded.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.agents import AGENTS, start_agent
from tests.clients.chats import CHATS
from tests.clients.programs import FOLDER, PROGRAMS, start_chat
from tests.clients.recorder import MODEL, Recorder
from tests.clients.rewriting import RECORDED, Rewriter, written

SECONDS = 120
ASKED = ("answer", "streamed")
"""Features of clients that are recorded."""
KNOWN_NAME = "claude-sonnet-4-5"
"""Claude Code sends twice as much to a model whose name it knows."""


def record(name: str, model: str, recorded: str) -> int:
    """Run a program against the recorder and write its requests as `recorded`. Gives its exit status."""
    output = FOLDER / "raw" / recorded
    shutil.rmtree(output, ignore_errors=True)
    with TemporaryDirectory() as made:
        folder = Path(made) / "run"
        with Recorder(output, folder / "workplace") as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_address[1]}"
            if name in AGENTS:
                process = start_agent(name, folder, url, model, 32768)
            else:
                features = [each for each in ASKED if each in CHATS[name].features]
                process = start_chat(name, folder, url, model, *features)
            try:
                return process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return -1
            finally:
                server.shutdown()
                shutil.copy(folder / "transcript.txt", output)
                publish(name, output, recorded, folder)


def publish(name: str, raw: Path, recorded: str, folder: Path) -> None:
    """Write the requests in `raw`: an agent's as a file each, a client's as one."""
    RECORDED.mkdir(exist_ok=True)
    for old in RECORDED.glob(f"{recorded}-[0-9]*.json"):
        old.unlink()
    rewriter = Rewriter(f"{name} {PROGRAMS[name].version}", str(folder / "workplace"))
    requests = [rewriter.request(json.loads(path.read_text())) for path in sorted(raw.glob("*.json"))]
    if name in AGENTS:
        for at, request in enumerate(requests, 1):
            (RECORDED / f"{recorded}-{at}.json").write_text(written(request) + "\n")
    else:
        unique = [request for at, request in enumerate(requests) if request not in requests[:at]]
        (RECORDED / f"{recorded}.json").write_text(written(unique, 1) + "\n")


def main(names: list[str]) -> None:
    for name in names or (*AGENTS, *CHATS):
        runs = [(MODEL, name)]
        if name == "claude-code":
            runs.append((KNOWN_NAME, f"{name}-known-model"))
        for model, recorded in runs:
            code = record(name, model, recorded)
            print(recorded, "exit", code, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
