"""Converting Qwen3-30B-A3B's shape, 61 GB of bfloat16 shards, inside a 1 GiB cgroup, beside the 7B's shape.

The shards exist nowhere: a hub on this machine makes each part when `ondevice convert` asks for it
(`tests/benchmarks/lib/virtual_hub.py`). Its own time isn't counted: processor seconds are those of the
conversion, user and system, for each GB of the source. Ends with one JSON line; exits 0 only if no conversion
is killed and the experts' take at most `AT_MOST` times the 7B's processor time for each GB.

    python -m tests.benchmarks.compare.convert_experts --workdir DIR [--layers 48] [--only experts]

It writes a bundle of 17 GB to the workdir, and removes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.compare.convert_versus_cp import LIMIT_BYTES, core_seconds
from tests.benchmarks.lib.measure import machine, memory_cgroup, note, require_rig
from tests.benchmarks.lib.ondevice_bundle import convert_command
from tests.benchmarks.lib.random_model import LLAMA_7B, huggingface_config, huggingface_tensors
from tests.benchmarks.lib.routed_experts import RoutedShape
from tests.benchmarks.lib.virtual_hub import REPOSITORY, Repository, serving
from tests.support.paths import ROOT

AT_MOST = 1.5
EXPERTS, DENSE = "experts", "dense"


def expert_repository(shape: RoutedShape) -> Repository:
    """Qwen3-30B-A3B's own config and tensors, in as many layers as the shape has."""
    d, f, head = shape.hidden, shape.neurons, shape.head_dim
    queries, keys = shape.heads * head, shape.kv_heads * head
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, d)}
    for layer in range(shape.layers):
        own: dict[str, tuple[int, ...]] = {f"self_attn.{p}_proj": (keys, d) for p in "kv"}
        own |= {"self_attn.q_proj": (queries, d), "self_attn.o_proj": (d, queries)}
        own |= {f"self_attn.{p}_norm": (head,) for p in "qk"}
        own |= {"mlp.gate": (shape.experts, d)}
        for expert in range(shape.experts):
            name = f"mlp.experts.{expert}"
            own |= {f"{name}.gate_proj": (f, d), f"{name}.up_proj": (f, d), f"{name}.down_proj": (d, f)}
        own |= {f"{p}_layernorm": (d,) for p in ("input", "post_attention")}
        tensors |= {f"model.layers.{layer}.{name}.weight": size for name, size in own.items()}
    tensors |= {"model.norm.weight": (d,), "lm_head.weight": (shape.vocabulary, d)}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": d,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head,
        "intermediate_size": 6144,
        "moe_intermediate_size": f,
        "num_experts": shape.experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    }
    return Repository(config, tensors)


def dense_repository() -> Repository:
    """The 7B's."""
    return Repository(huggingface_config(LLAMA_7B), huggingface_tensors(LLAMA_7B))


def converted(repository: Repository, output: Path) -> dict[str, Any]:
    """One conversion under the limit, whose bundle is removed again."""
    partial = output.with_name(output.name + ".partial")
    for leftover in (output, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    before, started = core_seconds(), time.monotonic()
    with serving(repository) as address, memory_cgroup(LIMIT_BYTES) as group:
        command = group.command([*convert_command(Path(REPOSITORY), output), "--yes"])
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1"}
        result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        seconds, failcnt = time.monotonic() - started, group.read("failcnt")
        peak = group.read("max_usage_in_bytes")
    found: dict[str, Any] = {
        "source_bytes": repository.nbytes,
        "seconds": seconds,
        "core_seconds_per_gigabyte": (core_seconds() - before) / repository.nbytes * 1e9,
        "failcnt": failcnt,
        "cgroup_peak_bytes": peak,
        "passed": result.returncode == 0,
    }
    if result.returncode:
        found["reason"] = f"exit {result.returncode}: {result.stderr.strip()[-400:]}"
    for leftover in (output, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    return found


def judged(found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether both conversions ended, and the experts' for the price of the 7B's."""
    if {EXPERTS, DENSE} - set(found) or not all(run["passed"] for run in found.values()):
        return False
    costs = {name: run["core_seconds_per_gigabyte"] for name, run in found.items()}
    return bool(costs[EXPERTS] <= AT_MOST * costs[DENSE])


def main() -> int:
    """Convert and report; 0 if all holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=RoutedShape().layers, help="of the model with experts")
    parser.add_argument("--only", choices=(EXPERTS, DENSE), help="then the comparison doesn't hold")
    parser.add_argument("--workdir", type=Path, default=ROOT / "build/bench")
    args = parser.parse_args()
    require_rig()
    args.workdir.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name in (DENSE, EXPERTS) if args.only is None else (args.only,):
        made = dense_repository() if name == DENSE else expert_repository(RoutedShape(layers=args.layers))
        found[name] = run = converted(made, args.workdir / f"{name}-converted")
        note(
            f"{name}: {run['source_bytes'] / 1e9:.1f} GB in {run['seconds']:.0f} s, "
            f"{run['core_seconds_per_gigabyte']:.2f} core seconds a GB, failcnt {run['failcnt']}"
            f"{' ' + run['reason'] if 'reason' in run else ''}"
        )
    passed = judged(found)
    print(f"convert_experts: {'held' if passed else 'MISSED'}")
    report = {"benchmark": "convert_experts", "machine": machine(), "limit_bytes": LIMIT_BYTES}
    print(json.dumps(report | {"layers": args.layers, "conversions": found, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
