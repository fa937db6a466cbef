"""A model whose routers follow a trace does, and what the benchmark makes of rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from ondevice.api import convert
from ondevice.backends.base import Int32
from ondevice.bundle.reader import Bundle
from ondevice.sparsity.expert_reuse import ExpertReuse
from tests.benchmarks.compare import convert_experts
from tests.benchmarks.compare import experts_versus_llama_cpp as versus
from tests.benchmarks.compare.expert_replay import rate
from tests.benchmarks.lib import expert_cases as cases
from tests.benchmarks.lib.direct_reads import direct_read_rate
from tests.benchmarks.lib.expert_trace import ROUTING, RoutingTrace
from tests.benchmarks.lib.ondevice_bundle import convert_command
from tests.benchmarks.lib.routed_experts import (
    QWEN3_30B_A3B,
    QWEN36_35B_A3B,
    RoutedShape,
    joined_layers,
    routed_gguf,
    routed_steps,
    router,
    step_rows,
)
from tests.benchmarks.lib.run_chosen_experts import ours
from tests.benchmarks.lib.virtual_hub import REPOSITORY, serving
from tests.support.paths import ROOT

SHAPE = RoutedShape("tiny", 2, 128, 8, 64, 4, 2, 32, 96, 64)
HYBRID = replace(SHAPE, layers=4, hybrid=True)
PROMPT, TOKENS = 5, 30
CASE = next(it for it in cases.CASES if it.name == "decode-8")
LOST: dict[str, Any] = {"survived": False, "reason": "killed"}
WEIGHTS = 1_000_000_000
"""Bytes that a token multiplies: 20 a second at 20 GB/s."""


def random_steps(seed: int, shape: RoutedShape = SHAPE) -> Int32:
    random = np.random.default_rng(seed)
    steps = [[random.permutation(shape.experts)[:3] for _ in range(shape.layers)] for _ in range(shape.steps)]
    return np.array(steps, dtype=np.int32)


def test_layers_of_a_trace_join_into_one() -> None:
    shape = replace(SHAPE, layers=2, experts=4, joined=2)
    chosen = np.array([[[0, 5], [2, 3], [4, 6]]], dtype=np.int32)
    # Of layers 0 and 2: 0, 1, and 0 again, which is 2 as 1 is taken, and 2, which is 3. Of 1 and 0: all four.
    assert joined_layers(chosen, shape, 8).tolist() == [[[0, 1, 2, 3], [2, 3, 0, 1]]]


def test_the_best_choices_of_joined_layers_have_numbers_of_their_own() -> None:
    shape = replace(SHAPE, layers=2, experts=16, steps=4, joined=2, taken=1)
    trace = RoutingTrace(np.array([[[0, 5], [2, 3], [4, 6]]] * 3, dtype=np.int32), 1, 8, np.array([1] * 3))
    # Layers 0 and 2, of which the second's experts are the shape's last 8; then 1 and 0.
    assert routed_steps(shape, trace)[0].tolist() == [[0, 12], [2, 8]]


@pytest.mark.slow
@pytest.mark.skipif(not ROUTING.is_dir(), reason="the shared data has no routing traces")
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_joined_layers_use_experts_again_as_the_trace_does(share: float) -> None:
    """Hits of our cache, by the share of all experts that it holds."""
    found = []
    for shape in (QWEN3_30B_A3B, QWEN36_35B_A3B):
        chosen = np.ascontiguousarray(routed_steps(shape)[:156])
        trace = RoutingTrace(chosen, cases.TRACE_PROMPT, shape.experts, np.full(shape.layers, 1 << 20))
        reuse = partial(ExpertReuse, shape.layers, shape.experts, chosen.shape[2])
        found.append(rate(trace, share * shape.layers * shape.experts, reuse))
    assert chosen.shape[1:] == (40, 8)
    assert abs(found[0] - found[1]) < 4


@pytest.mark.fast("hybrid")
@pytest.mark.parametrize("shape", [SHAPE, HYBRID], ids=["attention", "hybrid"])
def test_greedy_text_and_routers_follow_the_trace(tmp_path: Path, shape: RoutedShape) -> None:
    pytest.importorskip("gguf")
    chosen = random_steps(1, shape)
    bundle = convert(routed_gguf(shape, tmp_path, chosen), tmp_path / "bundle")
    kinds = [layer.delta is not None for layer in Bundle.open(bundle).config.layers]
    assert kinds == ([True, True, True, False] if shape.hybrid else [False] * shape.layers)
    spec = {
        "model": str(bundle),
        "dram_budget": "auto",
        "sparsity": "experts",
        "threads": 1,
        "context": 512,
        "io": "auto",
        "prompt": versus.prompt_of(PROMPT),
        "max_tokens": TOKENS,
    }
    found, text = ours(spec)
    assert text == versus.prompt_of(PROMPT + TOKENS)[PROMPT:]
    computed = PROMPT + TOKENS - 1
    assert cases.differing(found, chosen, PROMPT, computed) == 0
    assert cases.differing(found, random_steps(2, shape), PROMPT, computed) > TOKENS
    assert cases.differing(found[:-1], chosen, PROMPT, computed) == 1
    assert cases.differing([*found[:-1], found[-1][3:]], chosen, PROMPT, computed) == computed


def test_steps_are_heard_by_their_experts_alone() -> None:
    rows, chosen = step_rows(SHAPE.steps), random_steps(3)[:, 0]
    assert (rows @ rows.T == SHAPE.steps * np.eye(SHAPE.steps)).all()
    matrix = router(SHAPE, chosen)
    assert not matrix[:, : SHAPE.free].any()
    scores = matrix[:, SHAPE.free :] @ rows.T
    wanted = np.zeros_like(scores)
    np.put_along_axis(wanted.T, chosen, 8.0, axis=1)
    assert np.allclose(scores, wanted, atol=1e-5)


def test_every_step_has_experts() -> None:
    """Those of the prompt's last token where a token didn't reach a layer."""
    chosen = np.array([[[3, 1], [-1, -1]], [[3, 2], [0, 1]], [[1, 3], [2, 1]]], np.int32)
    trace = RoutingTrace(chosen, 2, 4, np.array([1, 1]))
    shape = replace(SHAPE, experts=4, steps=8)
    found = routed_steps(shape, trace)
    assert found.shape == (8, 2, 2)
    assert found[0].tolist() == [[3, 1], [0, 1]]
    assert found[1:3].tolist() == chosen[1:].tolist()
    assert (found >= 0).all()


def test_a_token_reads_the_bytes_of_its_weights_and_states() -> None:
    """4.5 bits for each weight of attention, head and three of eight experts; 16 of routers. States twice."""
    attention, expert, head = (128 + 64 + 64 + 128) * 128, 3 * 64 * 128, 96 * 128
    weights = 2 * (attention + 3 * expert) + head
    assert cases.expert_pages(SHAPE) == expert * 9 // 16 // 4096 * 4096
    assert cases.token_bytes(SHAPE, 3, 0) == weights * 9 // 16 + 2 * 2 * 8 * 128
    assert cases.token_bytes(SHAPE, 3, 1000) - cases.token_bytes(SHAPE, 3, 0) == 2000
    # A layer with a delta rule has other products than attention, and every layer a fourth, shared expert.
    one = replace(HYBRID, layers=1)
    rule = (8192 + 4096) * 128 + 128 * 4096
    parts = 2 * 32 * 128 + 8192 * 4 + 8 * 128
    assert cases.token_bytes(one, 3, 0) == (rule + 4 * expert + head) * 9 // 16 + 2 * parts


def a_round(rate: float, theirs: float | None, gigabytes: float) -> cases.Round:
    """Ours read so much from flash past the first tokens, in 128 seconds, and 64 GB more in vain."""
    steady = dict.fromkeys(("waited_seconds", "managed_seconds", "flash_cpu_seconds"), 1.28)
    steady |= {"flash_bytes_read": (gigabytes + 64) * 1e9, "prefetch_wasted_bytes": 64e9}
    steady["flash_read_seconds"] = 128.0
    ours = {"survived": True, CASE.figure: rate, "steady": steady}
    rival = LOST if theirs is None else {"survived": True, CASE.figure: theirs}
    return cases.Round(ours, rival, flash=2.0, dram=20.0)


@pytest.mark.parametrize(
    ("rates", "theirs", "gigabytes", "share", "passed"),
    [
        # 128 GB are half a second of flash for each of 128 tokens; without any it is memory's 0.05.
        ([1.6, 1.5, 0.1], [0.1, 0.1, 0.1], 128, 0.75, True),
        ([1.6, 1.5, 0.1], [0.1, 0.2, 0.2], 128, 0.75, False),
        ([1.3, 1.3, 1.3], [0.1, 0.1, 0.1], 128, 0.65, False),
        ([16.0, 15.0, 14.0], [1.0, 1.0, 1.0], 0, 0.75, True),
        ([16.0, 15.0, 14.0], [1.0, None, 1.0], 0, 0.75, False),
    ],
)
def test_a_case_holds_by_medians(
    rates: list[float], theirs: list[float | None], gigabytes: float, share: float, passed: bool
) -> None:
    rounds = [a_round(rate, other, gigabytes) for rate, other in zip(rates, theirs, strict=True)]
    row = cases.verdict(CASE, rounds, WEIGHTS, 0)
    assert (row["share"], row["passed"]) == (pytest.approx(share), passed)
    assert row["milliseconds"][0] == pytest.approx(
        {"all": 1000 / rates[0], "reading": 1000, "waited": 10, "managed": 10, "flash_cpu": 10}, abs=0.01
    )
    assert ("held |" if passed else "MISSED |") in cases.table([row])


def test_starts_are_better_when_shorter() -> None:
    case = next(case for case in cases.CASES if case.name == "start-8")
    ours = {"survived": True, case.figure: 2.0, "flash_bytes_read": 1e9, "flash_read_seconds": 1.0}
    found = cases.Round(ours, {"survived": True, case.figure: 8.0}, flash=2.0, dram=20.0)
    row = cases.verdict(case, [found], WEIGHTS, 1_000_000_000)
    assert (row["ratio"], row["share"], row["passed"]) == (4.0, 0.5, True)
    alone = cases.verdict(case, [replace(found, theirs=None)], WEIGHTS, 0)
    assert (alone["passed"], alone["reason"]) == (False, "llama.cpp didn't run")


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 0.5), (1.0, 0.5), (0.25, 0.25)])
def test_a_roofline_has_the_better_of_both_rates(seconds: float, share: float) -> None:
    """Of what flash gave beside the run, 2 GB/s, and of what the run got while it read."""
    case = next(case for case in cases.CASES if case.name == "start-8")
    ours = {"survived": True, case.figure: 1.0, "flash_bytes_read": 1e9, "flash_read_seconds": seconds}
    found = cases.Round(ours, None, flash=2.0, dram=20.0)
    assert cases.share_of_roofline(case, found, WEIGHTS, 0) == pytest.approx(share)


def test_later_tokens_are_a_case_of_their_own() -> None:
    later = CASE.later(256)
    assert (later.name, later.at_least, later.share) == (f"{CASE.name}, 256 later", 0, CASE.share)
    assert later.tokens - later.left_out == CASE.tokens - CASE.left_out
    assert CASE.later(0) is CASE


@pytest.mark.parametrize(
    ("rates", "case", "held"),
    [
        ([1.25, 1.0], CASE, True),
        ([1.3, 1.3], CASE, False),
        ([None, 0.1], CASE, False),
        # Its speed is asked for in decoding at equal memory alone.
        ([9.0, 9.0], replace(CASE, budget=0, share=(0.0, 0.0)), True),
    ],
)
def test_a_third_engine_is_a_condition(rates: list[float | None], case: cases.Case, held: bool) -> None:
    rounds = [a_round(1.5, 0.1, 128), a_round(1.3, 0.1, 128)]
    ran: list[dict[str, Any]] = [
        LOST if rate is None else {"survived": True, case.figure: rate} for rate in rates
    ]
    rounds = [replace(pair, third=third) for pair, third in zip(rounds, ran, strict=True)]
    row = cases.verdict(case, rounds, WEIGHTS, 0)
    assert (row["third_held"], row["passed"]) == (held, held)
    assert ("held |" if held else "MISSED |") in cases.table([row])
    assert all(line.count("|") == 14 for line in cases.table([row]).splitlines())


def test_a_third_engine_is_any_program(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text('#!/bin/sh\necho "$1"\n')
    program.chmod(0o755)
    spec = json.dumps({"program": str(program), "prompt": [1, 2]})
    command = [sys.executable, "-m", "tests.benchmarks.lib.run_third", spec]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert found.stdout == spec + "\n"


def test_direct_reads_have_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    try:
        assert direct_read_rate([file], 1 << 16, seconds=0.01) > 0
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")


def test_a_shard_that_exists_nowhere_is_read_in_any_parts(tmp_path: Path) -> None:
    shape = replace(SHAPE, layers=1)
    repository = convert_experts.expert_repository(shape)
    ((name, shard),) = repository.shards.items()
    whole = b"".join(repository.pieces(name, 0, shard.nbytes))
    path = tmp_path / name
    path.write_bytes(whole)
    with safe_open(path, "np") as file:
        assert len(file.keys()) == 3 + 9 + 3 * shape.experts
    assert b"".join(repository.pieces(name, 7, 100_001)) == whole[7:100_001]


@pytest.mark.slow
def test_a_conversion_reads_what_exists_nowhere(tmp_path: Path) -> None:
    shape = replace(SHAPE, layers=1)
    with serving(convert_experts.expert_repository(shape)) as address:
        command = [*convert_command(Path(REPOSITORY), tmp_path / "bundle"), "--yes"]
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache")}
        subprocess.run(command, check=True, env=environment, capture_output=True)
    experts = Bundle.open(tmp_path / "bundle").config.experts
    assert experts is not None
    assert experts.count == shape.experts


def test_experts_may_cost_what_a_7b_does() -> None:
    def run(cost: float, ended: bool = True) -> dict[str, Any]:
        return {"core_seconds_per_gigabyte": cost, "passed": ended}

    assert convert_experts.judged({"dense": run(2.0), "experts": run(3.0)})
    assert not convert_experts.judged({"dense": run(2.0), "experts": run(3.1)})
    assert not convert_experts.judged({"dense": run(2.0), "experts": run(2.0, ended=False)})
    assert not convert_experts.judged({"experts": run(2.0)})
