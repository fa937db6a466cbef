"""A model with experts, in a control group of its budget: nothing is killed, and the peak stays below.

The long text is held to all that `long_ceiling.py` holds others to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.convert import convert
from tests.benchmarks.ceiling.long_ceiling import TIMEOUT_SECONDS, TOPICS, row_of, topics
from tests.benchmarks.lib.measure import MEMORY_CGROUP, memory_cgroup, run_engine
from tests.support.models import save_safetensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cgroup,
    pytest.mark.skipif(
        not (MEMORY_CGROUP / "memory.limit_in_bytes").exists() or os.geteuid() != 0,
        reason="needs root and a cgroup v1 memory controller",
    ),
]
HIDDEN, NEURONS, EXPERTS, LAYERS, VOCABULARY = 1024, 512, 24, 6, 16384
CONFIG = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": HIDDEN,
    "intermediate_size": NEURONS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LONG_BUDGETS, LONG_TOKENS, LONG_PROMPT = 10, 1000, 512
"""Tokens of each of two topics, made and given: as many as go through the model together."""
OPTIONS: dict[str, Any] = {"threads": 1, "max_context": 1024, "speculation": "off"}
BUDGETS = """
import json, sys, ondevice
found = ondevice.inspect(sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps((found.minimum_budget_bytes, found.full_bytes)))
"""
PROGRAM = """
import json, sys, ondevice
with ondevice.load(sys.argv[1], dram_budget=int(sys.argv[3]), **json.loads(sys.argv[2])) as model:
    for prompt in (4, 950, 300, 16):
        stats = model.measure(prompt, 40)
    print(json.dumps((stats.peak_memory_bytes, model.plan.total_bytes, stats.neuron_cache_hit_rate)))
"""


def tensors() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32) / 32
    square, up, router = (
        np.resize(noise, shape) for shape in ((HIDDEN, HIDDEN), (NEURONS, HIDDEN), (EXPERTS, HIDDEN))
    )
    table, down, ones = np.resize(noise, (VOCABULARY, HIDDEN)), up.reshape(HIDDEN, NEURONS), np.ones(HIDDEN)
    found = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"{prefix}.self_attn.{name}.weight"] = square
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{name}.weight"] = ones
        found[f"{prefix}.mlp.gate.weight"] = np.roll(router, layer)
        for expert in range(EXPERTS):
            for name, values in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
                found[f"{prefix}.mlp.experts.{expert}.{name}.weight"] = values
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """290 MB, of which experts are 240."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG))
    save_safetensors(folder / "hf" / "model.safetensors", tensors(), "F16")
    return convert(folder / "hf", folder / "bundle", "q8")


def said(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return json.loads(done.stdout)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_experts_keep_to_the_budget(bundle: Path, share: float) -> None:
    """The smallest budget, and half of the way from there to the whole model."""
    arguments = [str(bundle), json.dumps(OPTIONS)]
    smallest, full = said([sys.executable, "-c", BUDGETS, *arguments])
    budget = int(smallest + share * (full - smallest))
    with memory_cgroup(budget) as group:
        peak, total, hit_rate = said(group.command([sys.executable, "-c", PROGRAM, *arguments, str(budget)]))
        print(f"{share}: peak {peak} of {budget}, hits {hit_rate:.3f}, failcnt {group.read('failcnt')}")
    assert 0.8 * total <= peak <= total <= budget
    assert hit_rate < 1.0


def test_a_long_text_that_changes_its_topic_keeps_to_ten_budgets(bundle: Path) -> None:
    """Even steps from the smallest towards the whole: 2,000 tokens, in a cgroup of it and without a limit."""
    context = TOPICS * (LONG_PROMPT + LONG_TOKENS)
    options = OPTIONS | {"max_context": context, "kv_bits": 8}
    smallest, full = said([sys.executable, "-c", BUDGETS, str(bundle), json.dumps(options)])
    spec: dict[str, Any] = {
        "model": str(bundle),
        "topics": topics(VOCABULARY),
        "prompt_tokens": LONG_PROMPT,
        "max_tokens": LONG_TOKENS,
        "context": context,
        "threads": 1,
        "io": "auto",
        "sparsity": "experts",
    }
    rows = []
    for step in range(LONG_BUDGETS):
        budget = smallest + (full - smallest) * step // LONG_BUDGETS
        own = spec | {"dram_budget": budget}
        limited = run_engine("run_two_topics", own | {"limited": True}, budget, TIMEOUT_SECONDS)
        free = run_engine("run_two_topics", own | {"limited": False}, None, TIMEOUT_SECONDS)
        rows.append(row_of("experts", own, limited, free))
        print(json.dumps(rows[-1]), flush=True)
    assert [row["wrong"] for row in rows] == [[]] * LONG_BUDGETS
    hits = [row["topics"][1]["neuron_cache_hit_rate"] for row in rows]
    assert hits[0] < 0.5 < hits[LONG_BUDGETS // 2] < hits[-1]
