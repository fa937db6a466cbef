"""A thousand bad reads while single neurons are fetched: right tokens or a typed error, and nothing leaks.

The rounds themselves are in `fault_rounds.py`, and run in a process of their own under the shim.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.convert import convert
from ondevice.training import train_predictors
from tests.support.bundles import convert_bundle, write_byte_tokenizer, write_chat_checkpoint
from tests.support.fault_rounds import KINDS, Table
from tests.support.faults import output_under

SHAPE = {"num_hidden_layers": 3, "intermediate_size": 1000, "hidden_act": "relu"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "plain")


@pytest.fixture(scope="module")
def predicted_bundle(bundle: Path) -> Path:
    pieces = np.random.default_rng(5).integers(0, 250, (4, 128)).tolist()
    output = bundle.with_name("predicted")
    train_predictors(bundle, pieces=pieces, output=output)
    return output


@pytest.fixture(scope="module")
def expert_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    families = pytest.importorskip("tests.support.families")
    folder = tmp_path_factory.mktemp("experts")
    options = {**families.OLMOE, "vocab_size": 384, "intermediate_size": 100, "num_experts": 12}
    families.write_model(folder / "checkpoint", "Olmoe", options)
    write_byte_tokenizer(folder / "checkpoint")
    return convert(folder / "checkpoint", folder / "plain", "q4")


@pytest.fixture(params=["ring", "threads"])
def way(request: pytest.FixtureRequest) -> str:
    """How a model's reader makes its reads: through io_uring, or by threads that call pread."""
    if request.param == "ring":
        request.getfixturevalue("io_uring")
    return str(request.param)


def run_rounds(
    shim: Path,
    folder: Path,
    bundle: Path,
    way: str,
    sparsity: str,
    rounds: int,
    seed: int = 0,
    minutes: float = 4,
) -> dict[str, Any]:
    """How many faults of each kind the rounds met by each way of reading, and how they ended."""
    table = folder / "table"
    table.write_bytes(bytes(ctypes.sizeof(Table)))
    options = f"--sparsity {sparsity} --rounds {rounds} --seed {seed}"
    printed = output_under(
        shim,
        folder,
        ["-m", "tests.support.fault_rounds", str(bundle), *options.split()],
        timeout_seconds=60 * minutes,
        fault_table=table,
        fault_files="*.safetensors",
        **({"fault_ring": "also"} if way == "ring" else {}),
    )
    sys.stdout.write(printed)  # of interest with `-s`
    return json.loads(printed)


@pytest.mark.fast("threads")
def test_some_faults_end_in_the_right_text_or_an_error(
    shim: Path, tmp_path: Path, bundle: Path, way: str
) -> None:
    # In the ring a read must fail twice before it is an error: eight rounds may see none.
    errors = 0
    for seed in range(4):
        counts = run_rounds(shim, tmp_path, bundle, way, "exact", rounds=8, seed=seed)
        spoilt = counts["faults"]["ring" if way == "ring" else "pread"]
        assert sum(spoilt[kind] for kind in KINDS) >= 30
        errors += counts.get("errors", 0)
        if errors:
            break
    assert errors > 0


@pytest.mark.slow
def test_some_faults_of_experts_end_in_the_right_text_or_an_error(
    shim: Path, tmp_path: Path, expert_bundle: Path
) -> None:
    counts = run_rounds(shim, tmp_path, expert_bundle, "threads", "experts", rounds=12)
    assert sum(counts["faults"]["pread"][kind] for kind in KINDS) >= 30
    assert counts["errors"] > 0


@pytest.mark.slow
def test_a_thousand_faults_of_experts_end_in_the_right_text_or_an_error(
    shim: Path, tmp_path: Path, expert_bundle: Path, way: str
) -> None:
    counts = run_rounds(shim, tmp_path, expert_bundle, way, "experts", rounds=1000, minutes=30)
    spoilt = counts["faults"]["ring" if way == "ring" else "pread"]
    assert sum(spoilt[kind] for kind in KINDS) >= 1000
    assert all(spoilt[kind] >= 10 for kind in KINDS), counts
    assert min(counts[ending] for ending in ("right", "errors", "cancelled")) >= 50, counts
    assert spoilt["late"] >= 20, counts  # few, as the cache spares most reads


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["exact", "predicted"])
def test_a_thousand_faults_end_in_the_right_text_or_an_error(
    shim: Path, tmp_path: Path, way: str, sparsity: str, request: pytest.FixtureRequest
) -> None:
    bundle = request.getfixturevalue("bundle" if sparsity == "exact" else "predicted_bundle")
    counts = run_rounds(shim, tmp_path, bundle, way, sparsity, rounds=400, minutes=30)
    by_pread, by_ring = counts["faults"]["pread"], counts["faults"]["ring"]
    spoilt = by_ring if way == "ring" else by_pread
    assert sum(spoilt[kind] for kind in KINDS) >= 1000
    assert all(spoilt[kind] >= 10 for kind in KINDS), counts
    assert counts["rounds with faults"] >= 300
    assert min(spoilt["late"], *(counts[ending] for ending in ("right", "errors", "cancelled"))) >= 50, counts
    if way == "ring":
        assert counts["right, some read again"] >= 20, counts
        assert by_pread["error"] + by_pread["end"] >= 20, counts
    else:
        assert counts["ahead"] > 0, counts  # in the ring, where a read must fail twice, there are few
        assert not any(by_ring.values())
