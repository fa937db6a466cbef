"""How a run is measured: a fresh process that prints JSON, from cold caches, its memory limited from outside.

Linux, and root for dropping caches and for the limits of a cgroup, of version 1 or 2.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
UNIFIED_CGROUP = Path("/sys/fs/cgroup")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
Result = dict[str, Any]
KILLED = "killed"
"""The reason of a run that SIGKILL ended, as a cgroup does when its memory is used up."""
NO_CGROUP = "skipped: needs root and a memory cgroup"
"""The reason of a run whose limit can't be set on this machine."""
# Decode rates leave out the first tokens of both engines, when memory still fills: ours with the neurons that
# stay resident, a mapped file's with its pages.
STEADY_TOKENS = 8
LLAMA_CPP_DEFAULT = {"load_mode": "default", "repack": True, "micro_batch": 0}
PLAIN_MMAP = {"load_mode": "mmap", "repack": False, "micro_batch": 0}
"""llama.cpp with its weights in the page cache alone, as a limit below the file needs it."""
LIMITED_TIMEOUT_SECONDS = 240.0
"""Of runs in less memory than the file: what takes longer makes less than a token in seven seconds."""


def require_rig(fio: bool = False) -> None:
    """Exit with the reason if this machine can't be measured on; fio: it is needed too."""
    missing = []
    if sys.platform != "linux":
        missing.append("Linux")
    elif os.geteuid() != 0:
        missing.append("root, to drop caches and to make cgroups")
    if not (MEMORY_CGROUP / "memory.limit_in_bytes").exists():
        missing.append(f"a cgroup v1 memory controller at {MEMORY_CGROUP}")
    if fio and shutil.which("fio") is None:
        missing.append("fio")
    if missing:
        raise SystemExit("this benchmark needs " + " and ".join(missing))


def can_drop_caches() -> bool:
    """Whether `drop_caches` works here."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches() -> None:
    """Empty the page cache, so that the next run reads from the disk."""
    os.sync()
    DROP_CACHES.write_text("3\n")


def cgroup_version() -> int:
    """Version of the cgroups that can limit memory here, 1 or 2; 0 where none can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return 0
    if (MEMORY_CGROUP / "memory.limit_in_bytes").exists():
        return 1
    # Children have the controller only once their parent hands it on, which some containers forbid.
    children = UNIFIED_CGROUP / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if "memory" not in children.read_text().split():
            children.write_text("+memory")
        return 2 if "memory" in children.read_text().split() else 0
    return 0


def limit_hits(counter: Path) -> int:
    """Times that a cgroup's limit was met, from `memory.failcnt` (version 1) or `memory.events` (version 2).

    0 for a file that isn't there.
    """
    if not counter.is_file():
        return 0
    words = counter.read_text().split()
    return int(words[words.index("max") + 1] if "max" in words else words[0])


class MemoryCgroup:
    """A limit of memory and swap for the processes that `command` starts. `limit_bytes` None: unlimited."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.version = cgroup_version()
        parent = UNIFIED_CGROUP if self.version == 2 else MEMORY_CGROUP
        # A process may have several.
        self.path = Path(tempfile.mkdtemp(prefix="ondevice-bench-", dir=parent))
        if self.version == 2:
            limits = {"max": limit_bytes or "max", "swap.max": 0}
        else:
            limits = dict.fromkeys(("limit_in_bytes", "memsw.limit_in_bytes"), limit_bytes or -1)
        for name, limit in limits.items():
            # Kernels without accounting of swap have no file for it.
            if (file := self.path / f"memory.{name}").exists():
                file.write_text(str(limit))

    @property
    def hits_file(self) -> Path:
        """The file that `limit_hits` reads."""
        return self.path / ("memory.events" if self.version == 2 else "memory.failcnt")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """`arguments` as started from inside the cgroup."""
        return ["sh", "-c", f'echo $$ > "{self.path}/cgroup.procs"; exec "$@"', "sh", *arguments]

    def read(self, counter: str) -> int:
        """A counter such as `failcnt` (times the limit was hit) or `max_usage_in_bytes` (cache included).

        Of version 2 only these two can be read; the peak is 0 where the kernel doesn't count it.
        """
        if self.version != 2:
            return int((self.path / f"memory.{counter}").read_text())
        if counter == "failcnt":
            return limit_hits(self.hits_file)
        peak = self.path / {"max_usage_in_bytes": "memory.peak"}[counter]
        return int(peak.read_text()) if peak.exists() else 0

    def close(self) -> None:
        """Remove the cgroup; whatever is left in it dies first, and its cache with it."""
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for _ in range(100):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.05)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int | None) -> Iterator[MemoryCgroup]:
    """A `MemoryCgroup` for the length of a block."""
    group = MemoryCgroup(limit_bytes)
    try:
        yield group
    finally:
        group.close()


def run_engine(
    script: str,
    spec: Mapping[str, object],
    limit_bytes: int | None = None,
    timeout_seconds: float = 900.0,
    interpreter: str = sys.executable,
) -> Result:
    """One cold run of `script`, a module beside this one, with `spec` as JSON; returns the JSON it printed.

    Added to it: `wall_seconds`, `start_to_first_token_seconds`, `failcnt`. A run that was killed, failed,
    was refused its budget, or took longer than `timeout_seconds` returns `{"survived": False, "reason":
    ...}`. Where caches can't be dropped they aren't, and where no cgroup can be made only a limit needs one.
    """
    if can_drop_caches():
        drop_caches()
    if limit_bytes is not None and not cgroup_version():
        return {"survived": False, "reason": NO_CGROUP}
    with memory_cgroup(limit_bytes) if cgroup_version() else contextlib.nullcontext() as group:
        spec = {**spec, "failcnt_file": str(group.hits_file) if group else "/dev/null"}
        command = [interpreter, "-m", f"tests.benchmarks.lib.{script}", json.dumps(spec)]
        command = group.command(command) if group else command
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"survived": False, "reason": f"no end after {timeout_seconds:.0f} s"}
        wall = time.monotonic() - started
        failcnt = group.read("failcnt") if group else 0
        peak_with_cache = group.read("max_usage_in_bytes") if group else 0
    if process.returncode != 0:
        last = (stderr.strip().splitlines() or [f"exit {process.returncode}"])[-1]
        # What a signal ends has no last words: its last line says nothing about the end.
        reason = signal_name(-process.returncode) if process.returncode < 0 else last
        return {"survived": False, "reason": reason}
    result: Result = json.loads(stdout.strip().splitlines()[-1])
    if "required_bytes" in result:
        reason = f"refused: needs {math.ceil(result['required_bytes'] / 1e6):,} MB"
        return {"survived": False, "reason": reason, **result}
    result |= {
        "survived": True,
        "wall_seconds": wall,
        "failcnt": failcnt,
        "cgroup_peak_bytes": peak_with_cache,
    }
    if "first_token_at" in result:
        result["start_to_first_token_seconds"] = result["first_token_at"] - started
    return result


def signal_name(number: int) -> str:
    """The reason of a run that a signal ended."""
    return KILLED if number == signal.SIGKILL else f"ended by {signal.Signals(number).name}"


def peak_memory_bytes() -> int:
    """Peak of this process's resident memory, mapped files included (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def texts_result(
    started: float, texts: list[list[int]], decoded: int, seconds: float, passes: int
) -> dict[str, object]:
    """What a run that continues texts prints.

    Args:
        started: when it began, as `time.monotonic` has it.
        texts: token ids, without ends of text.
        decoded: tokens that decode passes gave, ends of text included.
        seconds: time of these passes.
        passes: their number.
    """
    return {
        "first_token_at": started,
        "texts": texts,
        "decoded_tokens": decoded,
        "decode_seconds": seconds,
        "decode_passes": passes,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def decode_rate(times: Sequence[float], left_out: int = STEADY_TOKENS) -> float:
    """Tokens per second from the moments at which tokens came, the first `left_out` not counted."""
    steady = times[left_out - 1 :]
    return (len(steady) - 1) / (steady[-1] - steady[0]) if len(steady) > 1 else 0.0


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (min to max)`."""
    s = summary(values)
    return f"{s['median']:.{digits}f} ({s['min']:.{digits}f} to {s['max']:.{digits}f})"


def machine() -> dict[str, object]:
    """What the figures belong to."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": pages, "system": platform.system()}


def note(message: str) -> None:
    """Progress, to stderr: stdout is for the table and the JSON line."""
    print(message, file=sys.stderr, flush=True)
