"""What `train predictors` takes for the 7B shape: memory and seconds measured of one layer, hours projected.

On the synthetic bundle of `synthetic.py`, in a memory cgroup of the bound that docs/training.md states.
Measured: recording the activations of some tokens; all that fitting one layer with the default options does
on as many tokens as the command takes (the recorded ones, repeated), but for the epochs of gradient steps;
and some of these steps, for all ranks, as on trial, and for one. Which one is chosen depends on the model:
the middle one is taken. Steps are all alike, so those of all tokens are projected from them; a real run's
have more beside them, a byte for every gate that fires. Ends with one JSON line; exits 0 only if nothing was
killed, the peak (page cache included) stays below the bound, and all layers together take less than a night
of processor time (whoever crowds the process out stretches the wall's clock, which is printed beside it).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ondevice.config import TRAIN_TOKENS
from ondevice.converters.training.predictors.low_rank import split
from ondevice.converters.training.predictors.train import PredictorOptions
from tests.benchmarks.compare.flash_versus_llama_cpp import TENTH
from tests.benchmarks.lib.measure import machine, memory_cgroup, note, require_rig
from tests.benchmarks.lib.random_model import LLAMA_7B
from tests.benchmarks.lib.synthetic import synthetic_bundle
from tests.support.paths import ROOT

BOUND_BYTES = 3_000_000_000
NIGHT_PROCESSOR_HOURS = 12.0
LAYER = 16
STEPS = 24
"""Gradient steps that are measured."""
CLOCKS = ("wall_seconds", "processor_seconds")


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    """What a run inside the bound says, and `cgroup_peak_bytes`. Exits if it was killed or failed."""
    with memory_cgroup(BOUND_BYTES) as group:
        module = "tests.benchmarks.lib.run_train_predictors"
        command = group.command([sys.executable, "-m", module, json.dumps(spec)])
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        peak = group.read("max_usage_in_bytes")
    if done.returncode:
        killed = done.returncode == -signal.SIGKILL
        reason = "it was killed" if killed else done.stderr.strip()[-400:]
        raise SystemExit(f"{spec['part']} ended with {done.returncode}: {reason}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    note(f"{spec['part']}: {result}, {peak / 1e6:.0f} MB in the cgroup")
    return result | {"cgroup_peak_bytes": peak}


def steps_per_epoch() -> int:
    """Gradient steps of an epoch: on what neither measures nor calibrates, of `TRAIN_TOKENS` tokens."""
    options = PredictorOptions()
    ids, _ = split(TRAIN_TOKENS - round(options.measured_share * TRAIN_TOKENS), options.training)
    return -(-len(ids) // options.training.batch_samples)


def measure(bundle: Path, tokens: int, folder: Path) -> dict[str, Any]:
    """All runs, and what they come to for all layers and `TRAIN_TOKENS` tokens."""
    spec = {"model": str(bundle.resolve()), "folder": str(folder), "layer": LAYER}
    recorded = measured(spec | {"part": "record", "tokens": tokens})
    whole = measured(spec | {"part": "fit", "tokens": TRAIN_TOKENS})
    options, layers = PredictorOptions(), LLAMA_7B.num_layers
    training = options.training
    spec |= {"part": "step", "tokens": STEPS * training.batch_samples}
    trial = measured(spec | {"ranks": options.ranks})
    chosen = measured(spec | {"ranks": [options.ranks[len(options.ranks) // 2]]})
    row: dict[str, Any] = {
        "tokens": tokens,
        "record": recorded,
        "fit": whole,
        "trial": trial,
        "chosen": chosen,
    }
    for clock in CLOCKS:
        epochs = (
            training.trial_epochs * trial[clock] + (training.epochs - training.trial_epochs) * chosen[clock]
        )
        layer = whole[clock] + steps_per_epoch() * epochs / STEPS
        recording = recorded[clock] / tokens * TRAIN_TOKENS
        row[clock] = {
            "recording_per_token": recorded[clock] / tokens,
            "trial_step": trial[clock] / STEPS,
            "chosen_step": chosen[clock] / STEPS,
            "layer": layer,
            "all_hours": (recording + layers * layer) / 3600,
        }
    row["disk_bytes"] = recorded["disk_bytes"] // tokens * TRAIN_TOKENS
    row["disk_bytes_per_token_and_layer"] = recorded["disk_bytes"] // tokens // layers
    row["peak_bytes"] = max(run["cgroup_peak_bytes"] for run in (recorded, whole, trial, chosen))
    return row


def table(row: dict[str, Any]) -> str:
    """What a reader wants to know."""
    fitting = max(row[run]["peak_memory_bytes"] for run in ("fit", "trial", "chosen"))
    lines = [
        f"recording: peak {row['record']['cgroup_peak_bytes'] / 1e6:.0f} MB, "
        f"{row['disk_bytes_per_token_and_layer']} bytes per token and layer, "
        f"{row['disk_bytes'] / 1e9:.1f} GB for {TRAIN_TOKENS} tokens",
        f"a layer: peak {fitting / 1e6:.0f} MB, mapped activations included; with all that the page cache "
        f"holds, {row['fit']['cgroup_peak_bytes'] / 1e6:.0f} MB",
    ]
    for clock in CLOCKS:
        figures = row[clock]
        lines.append(
            f"{clock.replace('_', ' ')}: {figures['recording_per_token']:.3f} per token recorded, "
            f"{figures['trial_step']:.2f} per step on trial, {figures['chosen_step']:.2f} of one rank, "
            f"{figures['layer']:.0f} per layer; all {LLAMA_7B.num_layers} layers: "
            f"{figures['all_hours']:.1f} hours"
        )
    return "\n".join(lines)


def main() -> int:
    """0 if training stays within the bound, and within a night of processor time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="recorded")
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    bundle = synthetic_bundle(LLAMA_7B, TENTH, args.workdir)
    with tempfile.TemporaryDirectory(prefix="train-predictors-") as folder:
        row = measure(bundle, args.tokens, Path(folder))
    hours = row["processor_seconds"]["all_hours"]
    passed = row["peak_bytes"] < BOUND_BYTES and hours < NIGHT_PROCESSOR_HOURS
    print(table(row))
    summary = {"benchmark": "train_predictors_step", "passed": passed, "machine": machine()}
    print(json.dumps(summary | {"bound_bytes": BOUND_BYTES} | row))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
