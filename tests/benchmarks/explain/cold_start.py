"""From nothing to the first token: what a fresh process takes, part by part, with the shipped model.

Each run is a new interpreter. Its first use of the engine imports it; loading reads the weights; the prompt's
pass and the first token follow. The first run of all also compiles the sources and measures the machine's
flash, for half a second; the others find both in a temporary folder. Files are in the page
cache, or with --drop-caches (Linux, root) not. The last table says which packages the imports' time goes to.
Beside them stand the CPU time up to the end of `load`, which other processes disturb least, and on Linux the
process's private memory then: what no other process shares. Ends with one JSON line; exits 0 only if `import
ondevice` takes less than 150 ms in the median, and brings no numpy and no mlx.

    python -m tests.benchmarks.explain.cold_start [--runs 9] [--model NAME] [--dram-budget SIZE]
        [--drop-caches]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from tests.benchmarks.lib.measure import drop_caches, machine

LIMIT_SECONDS = 0.150
HEAVY = ("numpy", "mlx", "tokenizers", "sentencepiece", "torch", "asyncio")
PROMPT = "I'm looking for a cheap Italian restaurant in Oakland."
PARTS = {
    "interpreter_seconds": "the interpreter starts",
    "import_seconds": "import ondevice",
    "engine_import_seconds": "the engine is imported: ondevice.load is named",
    "load_seconds": "load()",
    "template_seconds": "the chat template is compiled, and jinja2 imported for it",
    "prefill_seconds": "the prompt is read",
    "first_token_seconds": "the first token is drawn, and handed over",
}

PROGRAM = """
import time
began = time.time(); begun = time.perf_counter()
import ondevice
imported = time.perf_counter()
import sys
heavy = [name for name in sys.argv[2].split(",") if name in sys.modules]
ondevice.load, ondevice.Model
named = time.perf_counter()
import json
model = ondevice.load(sys.argv[1] or None, dram_budget=sys.argv[4])
loaded, cpu_seconds = time.perf_counter(), time.process_time()
try:
    memory = [line.split() for line in open("/proc/self/smaps_rollup")]
except FileNotFoundError:
    memory = []
private_bytes = sum(1024 * int(line[1]) for line in memory if line[0].startswith("Private_"))
model.chat_template
compiled = time.perf_counter()
events = model.session().stream_response(sys.argv[3], max_tokens=1)
next(events)
answered = time.perf_counter()
stats = list(events)[-1].stats
model.close()
prefill = stats.prompt_tokens / stats.prefill_tokens_per_second
print(json.dumps({"began": began, "heavy": heavy, "import_seconds": imported - begun,
    "engine_import_seconds": named - imported, "load_seconds": loaded - named,
    "template_seconds": compiled - loaded, "prefill_seconds": prefill,
    "first_token_seconds": answered - compiled - prefill,
    "cpu_seconds": cpu_seconds, "private_bytes": private_bytes,
    "prompt_tokens": stats.prompt_tokens}))
"""


def run(model: str, budget: str, environment: dict[str, str], cold: bool) -> dict[str, Any]:
    """Parts of one start, in seconds, their sum, and what `import ondevice` brought of what it may not."""
    if cold:
        drop_caches()
    command = [sys.executable, "-c", PROGRAM, model, ",".join(HEAVY), PROMPT, budget]
    started = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    found["interpreter_seconds"] = found.pop("began") - started
    found["total_seconds"] = sum(found[part] for part in PARTS)
    return found


def import_times(environment: dict[str, str]) -> dict[str, float]:
    """Seconds of imports by package, from `import ondevice` to the engine's last, as Python itself says."""
    command = [sys.executable, "-X", "importtime", "-c", "import ondevice; ondevice.load"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    spent: Counter[str] = Counter()
    for own, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", lines, re.MULTILINE):
        package = module.split(".")[0]
        known = package in ("ondevice", "numpy", "safetensors", "jinja2", "tokenizers", "sentencepiece")
        spent[package if known else "the standard library and others"] += int(own)
    return {package: micros / 1e6 for package, micros in spent.most_common()}


def main() -> int:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="a name or folder; the shipped model")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dram-budget", default="auto", help="of the model")
    parser.add_argument("--drop-caches", action="store_true", help="before each run; Linux, root")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        first = run(args.model, args.dram_budget, environment, args.drop_caches)
        runs = [run(args.model, args.dram_budget, environment, args.drop_caches) for _ in range(args.runs)]
        packages = import_times(environment)
    found = {part: statistics.median(it[part] for it in runs) for part in (*PARTS, "total_seconds")}
    print(f"{'ms, median':>10} {'least':>7} {'most':>7} {'first run':>9}")
    for part, what in (PARTS | {"total_seconds": "all of it"}).items():
        values = [1e3 * it[part] for it in runs]
        row = f"{1e3 * found[part]:10.1f} {min(values):7.1f} {max(values):7.1f} {1e3 * first[part]:9.1f}"
        print(f"{row}  {what}")
    found |= {name: min(it[name] for it in runs) for name in ("cpu_seconds", "private_bytes")}
    print(f"{1e3 * found['cpu_seconds']:10.1f} ms of CPU up to the end of load(), least")
    print(f"{found['private_bytes'] / 1e6:10.1f} MB of private memory then, least")
    print("\nimports by package, own time, ms, as -X importtime has it, which itself costs some:")
    for package, seconds in packages.items():
        print(f"{1e3 * seconds:10.1f}  {package}")
    heavy = sorted({name for it in runs for name in it["heavy"]})
    found |= {"runs": args.runs, "first_run": first, "heavy": heavy, "packages": packages}
    found |= {"machine": machine(), "drop_caches": args.drop_caches, "limit_seconds": LIMIT_SECONDS}
    print(json.dumps(found))
    return int(bool(heavy) or found["import_seconds"] >= LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
