"""One case, one process: forked from this one, which has imported everything, with limits, and judged.

Forking is what makes thousands of cases affordable; so this process starts no thread.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from ondevice.errors import OndeviceError
from ondevice.units import process_memory
from tests.fuzz.outcomes import LIMIT_SECONDS, SLACK_BYTES, Difference, Outcome

ADDRESS_SPACE_BYTES = 6 << 30
"""More than any case needs, less than would trouble the machine."""
MOST_SPANS, LEAST_SHARE = 6, 0.05
"""How often a case that computes is given its time, and what of it counts as computing."""
DETAIL_CHARS = 1500
PANIC = b"panicked at"

Work = Callable[[], int]
"""Tries a case and returns the bytes that its plan allowed; 0 where nothing was planned."""


def only_thread() -> bool:
    """Whether this process may be forked from."""
    return len(os.listdir("/proc/self/task")) == 1


def run_case(work: Work, output: Path, limit_seconds: float = LIMIT_SECONDS) -> Outcome:
    """Run `work` in a process of its own. What it prints goes to the file `output`."""
    gc.freeze()
    baseline = process_memory().current_bytes
    receiver, sender = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        _child(work, output, sender, limit_seconds)
    os.close(sender)
    report, timed_out = _read(receiver, child, limit_seconds)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - started
    # The child counts what it shares with this process.
    peak = usage.ru_maxrss * 1024
    answer = json.loads(report) if report else {}
    allowed = max(baseline, int(answer.get("allowed", 0))) + SLACK_BYTES
    kind, detail = answer.get("kind", "crash"), answer.get("detail", "")
    if timed_out:
        kind, detail = "hang", f"still running after {limit_seconds:g} s: {_tail(output)}"
    elif not report or status:
        kind, detail = "crash", f"{_status(status)}: {_tail(output)}"
    elif peak > allowed:
        kind, detail = "memory", f"peak {peak:,} of {allowed:,} bytes; {kind}: {detail}"
    elif output.exists() and PANIC in output.read_bytes():
        text = output.read_bytes()
        kind, detail = "panic", text[text.index(PANIC) :][:300].decode("utf-8", "replace")
    return Outcome(kind, detail, seconds, peak, allowed)


def _child(work: Work, output: Path, sender: int, limit_seconds: float) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        # Where it is when it crashes, and shortly before it is killed for being slow.
        faulthandler.enable(2)
        faulthandler.dump_traceback_later(max(0.1, limit_seconds - 0.5), file=2)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        answer = _answer(work)
        os.write(sender, json.dumps(answer).encode())
        code = 0
    finally:
        # Not sys.exit: what the parent has registered for its end is the parent's.
        os._exit(code)


def _answer(work: Work) -> dict[str, object]:
    allowed: int = 0
    try:
        allowed = work()
        kind, detail = "accepted", ""
    except OndeviceError as error:
        kind, detail = "refused", f"{type(error).__name__}: {error}"
        allowed = getattr(error, "allowed_bytes", 0)
    except Difference as error:
        kind, detail = "difference", str(error)
        allowed = 1 << 62
    except BaseException as error:
        kind, detail = "untyped", f"{type(error).__name__}: {error}\n{traceback.format_exc()[-DETAIL_CHARS:]}"
    detail = detail.encode("utf-8", "backslashreplace").decode()
    return {"kind": kind, "detail": detail[-DETAIL_CHARS:], "allowed": allowed}


def _read(receiver: int, child: int, limit_seconds: float) -> tuple[bytes, bool]:
    """What the child reports, and whether it had to be killed first.

    It is given its time again, a few times, where it computes and hasn't for so long yet: a busy machine
    is no hang.
    """
    parts: list[bytes] = []
    deadline, spans, computed = time.monotonic() + limit_seconds, 1, 0.0
    with os.fdopen(receiver, "rb", buffering=0) as stream:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                before, computed = computed, _computed_seconds(child)
                if spans < MOST_SPANS and before + LEAST_SHARE * limit_seconds < computed < limit_seconds:
                    deadline, spans = time.monotonic() + limit_seconds, spans + 1
                    continue
                os.kill(child, signal.SIGKILL)
                return b"", True
            part = stream.read(1 << 16)
            if not part:
                return b"".join(parts), False
            parts.append(part)


def _computed_seconds(process: int) -> float:
    """Processor time of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.waitstatus_to_exitcode(status)} without a report"


def _tail(output: Path) -> str:
    return output.read_bytes()[-1500:].decode("utf-8", "replace") if output.exists() else ""
