"""`bench --ablation`: every row is a real run of the same text, and reads what its configuration says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.api import inspect
from ondevice.bundle.layout import EMBEDDING, RESIDENT, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.commands.bench_reports import ablation_table
from ondevice.config import RuntimeConfig
from ondevice.errors import (
    BackendUnavailableError,
    BudgetError,
    ContextOverflowError,
    FlashReadError,
    UsageError,
)
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.measure.ablation import SPARSE_ROWS, Ablation, ablation
from ondevice.measure.ablation_rows import row_checksums
from ondevice.runtime.models import find_model
from tests.support.bundles import CONTEXT, convert_bundle, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.flash_files import flip_byte

DENSE = ["naive", "hybrid", "half"]
NAMES = [*DENSE, *SPARSE_ROWS]
SHAPE = {
    "hidden_size": 1024,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 1024,
    "hidden_act": "relu",
}
FIRING = 10
"""Neurons of which one may fire."""
COUNTS = {"prompt_tokens": 20, "max_tokens": 6, "warm_up_tokens": 4}
PAGE = 4096


@pytest.fixture(scope="module")
def sparse_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 2 KiB, and gates of which nine in ten are zero whatever the text."""
    folder = tmp_path_factory.mktemp("sparse")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", **SHAPE)
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in range(2):
        gate = tensors[f"model.layers.{layer}.mlp.gate_proj.weight"]
        gate[np.arange(len(gate)) % FIRING > 0] = 0
    save_file(tensors, checkpoint / "model.safetensors")
    return convert_bundle(checkpoint, folder / "sparse", "f16")


def half_budget(bundle: Path, sparsity: str = "auto") -> int:
    """Between the smallest that works and everything resident."""
    plan = inspect(bundle, sparsity=sparsity)
    return (plan.minimum_budget_bytes + plan.full_bytes) // 2


def run(bundle: Path | None, **options: Any) -> Ablation:
    return ablation(bundle, RuntimeConfig(**options), **COUNTS)


@pytest.fixture(scope="module")
def found(sparse_bundle: Path) -> Ablation:
    return run(sparse_bundle, dram_budget=half_budget(sparse_bundle))


def test_every_row_runs_the_same_text(found: Ablation) -> None:
    assert [row.name for row in found.rows] == NAMES
    assert [row.sparsity for row in found.rows] == ["dense"] * 3 + ["exact"] * 5
    # Exact gates and dense give the same bits; so does whatever is kept, however it is read.
    assert len({row.tokens for row in found.rows}) == 1
    assert len(found.rows[0].tokens) == COUNTS["warm_up_tokens"] + COUNTS["max_tokens"]


def test_what_rows_read_is_what_they_are_for(found: Ablation, sparse_bundle: Path) -> None:
    bundle = Bundle.open(sparse_bundle)
    naive, hybrid, half, predictor, windowing, bundling, kept, overlap = found.rows
    neurons = sum(bundle.neuron_file(layer).nbytes - PAGE for layer in range(2))
    assert hybrid.feed_forward_bytes == 0
    # What is read ahead when the counting begins and ends makes a little difference.
    assert hybrid.flash_bytes == pytest.approx(neurons, rel=0.05)
    assert_all_is_read(found, sparse_bundle, [RESIDENT])
    assert half.flash_bytes == pytest.approx(neurons / 2, rel=0.1)
    assert half.feed_forward_bytes == pytest.approx(neurons / 2, rel=0.1)
    assert hybrid.flash_bytes > 2 * predictor.flash_bytes > 4 * windowing.flash_bytes
    assert predictor.flash_bytes >= bundling.flash_bytes > 2 * kept.flash_bytes
    # Filled ahead with what may never fire.
    assert overlap.feed_forward_bytes > kept.feed_forward_bytes
    # An up row and a down row each, or both at once and some neighbours with them.
    assert predictor.flash_reads > 1.9 * bundling.flash_reads
    assert kept.feed_forward_bytes > bundling.feed_forward_bytes == predictor.feed_forward_bytes
    for row in found.rows:
        assert row.resident_bytes > 0 or row is naive
        assert row.compute_seconds > 0
        assert 0 <= row.waited_seconds < row.total_seconds
        assert row.bytes_per_second > 0 or row.flash_bytes == 0
        assert (row.managed_seconds > 0) is (row.sparsity != "dense")


def assert_all_is_read(found: Ablation, bundle: Path, files: list[str]) -> None:
    """The first row reads what the second does, and these files once more for every token."""
    naive, hybrid = found.rows[:2]
    nbytes = sum((bundle / name).stat().st_size for name in files)
    assert naive.resident_bytes == 0
    # Rings read ahead of the tokens that begin and end the count: of files this small, up to a token's worth.
    assert naive.flash_bytes - hybrid.flash_bytes == pytest.approx(nbytes, rel=0.25)
    assert naive.flash_reads > hybrid.flash_reads
    assert naive.waited_seconds > 0
    # It ran by itself: nothing of its times is another row's.
    assert naive.compute_seconds != hybrid.compute_seconds
    assert naive.managed_seconds == hybrid.managed_seconds == 0


def test_a_head_that_is_the_embedding_table_is_read_too(tmp_path: Path) -> None:
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=True)
    bundle = convert_bundle(checkpoint, tmp_path / "tied")
    assert_all_is_read(run(bundle), bundle, [RESIDENT, EMBEDDING])


def test_the_table_tells_the_overlap_and_each_step_s_bytes(found: Ablation) -> None:
    apart, overlap = found.row("all"), found.row("overlap")
    assert found.overlap_ratio == overlap.total_seconds / max(apart.io_seconds, apart.compute_seconds)
    lines = ablation_table(found).splitlines()
    assert [line.split()[0] for line in lines[4:12]] == NAMES
    assert len({len(line) for line in lines[2:12]}) == 1
    hybrid = lines[5].split()
    assert float(hybrid[3]) == pytest.approx(found.row("hybrid").flash_bytes / 1e6, rel=0.01)
    (line,) = [line for line in lines if line.startswith("overlap takes")]
    own = overlap.total_seconds / max(overlap.io_seconds, overlap.compute_seconds)
    assert f"{found.overlap_ratio:.2f} x the longer of I/O and compute" in line
    assert found.own_overlap_ratio == own
    assert f"{own:.2f} x that of its own" in line
    step = next(line for line in lines if line.startswith("predictor  after hybrid"))
    factor = found.row("predictor").flash_bytes / found.row("hybrid").flash_bytes
    assert float(step.split()[4]) == pytest.approx(factor, rel=0.01)


def test_predictors_select_where_a_bundle_has_them() -> None:
    shipped = find_model(None)
    found = run(None, dram_budget=half_budget(shipped, "predicted"))
    assert [row.sparsity for row in found.rows] == ["dense"] * 3 + ["predicted"] * 5
    assert len({row.tokens for row in found.rows[3:]}) == 1
    predictor, bundling = found.row("predictor"), found.row("bundling")
    # Gate, up and down rows by themselves, of which neighbouring neurons' aren't neighbours.
    assert predictor.flash_reads > 3 * bundling.flash_reads
    assert any("--sparsity predicted" in note for note in found.notes)


@pytest.mark.slow
def test_exact_rows_of_a_bundle_with_predictors_run_one_text() -> None:
    found = run(None, dram_budget=half_budget(find_model(None), "exact"), sparsity="exact")
    assert len({row.tokens for row in found.rows}) == 1


def test_where_every_neuron_counts_there_are_three_rows(chat_bundle: Path, sparse_bundle: Path) -> None:
    found = run(chat_bundle)
    assert [row.name for row in found.rows] == DENSE
    assert found.overlap_ratio is None
    assert any("silu gates are hardly ever exactly zero" in note for note in found.notes)
    assert "naive" in ablation_table(found)
    assert "overlap takes" not in ablation_table(found)
    dense = run(sparse_bundle, sparsity="dense")
    assert [row.name for row in dense.rows] == DENSE
    assert any("with --sparsity dense every neuron counts" in note for note in dense.notes)


def test_a_budget_with_room_for_everything_is_told(relu_chat_bundle: Path) -> None:
    notes = run(relu_chat_bundle, dram_budget="4GB").notes
    assert any("room for every neuron" in note for note in notes)


def test_the_command_prints_the_ablation(ondevice: Run, relu_chat_bundle: Path, chat_bundle: Path) -> None:
    budget = half_budget(relu_chat_bundle)
    options = ("--ablation", "--prompt-tokens", 9)
    shown = ondevice("bench", "-m", relu_chat_bundle, *options, "--dram-budget", budget, "--json")
    assert shown.code == 0, shown.err
    figures = shown.json
    assert list(figures) == [
        "model", "dram_budget_bytes", "prompt_tokens", "warm_up_tokens", "max_tokens", "rows",
        "overlap_ratio", "own_overlap_ratio", "notes", "machine",
    ]  # fmt: skip
    assert list(figures["rows"][0]) == [
        "name", "sparsity", "io", "kernel_target", "feed_forward_bytes", "resident_bytes", "flash_bytes",
        "flash_reads", "io_seconds", "waited_seconds", "managed_seconds", "total_seconds", "prefetch_recall",
        "prefetch_wasted_bytes", "tokens", "compute_seconds", "bytes_per_second", "tokens_per_second",
    ]  # fmt: skip
    assert (figures["dram_budget_bytes"], figures["prompt_tokens"], figures["max_tokens"]) == (budget, 9, 16)
    assert [row["name"] for row in figures["rows"]] == NAMES
    assert {len(row["tokens"]) for row in figures["rows"]} == {16 + figures["warm_up_tokens"]}
    assert "overlap" in shown.err
    table = ondevice("bench", "-m", chat_bundle, *options, "--max-tokens", 2)
    assert table.code == 0, table.err
    assert "means of 2 tokens, behind 9 of prompt" in table.out


def test_impossible_counts_and_budgets_are_refused(ondevice: Run, sparse_bundle: Path) -> None:
    arguments = ("bench", "-m", sparse_bundle, "--ablation")
    runs = ondevice(*arguments, "--runs", 2)
    assert (runs.code, "--max-tokens" in runs.err) == (2, True)
    assert ondevice(*arguments, "--max-tokens", 0).code == 2
    small = ondevice(*arguments, "--dram-budget", "5MB")
    assert (small.code, "smallest that works" in small.err) == (5, True)
    with pytest.raises(UsageError, match="at least one of each"):
        ablation(sparse_bundle, RuntimeConfig(), **{**COUNTS, "warm_up_tokens": 0})
    with pytest.raises(ContextOverflowError):
        ablation(sparse_bundle, RuntimeConfig(), **{**COUNTS, "prompt_tokens": CONTEXT - 9})
    with pytest.raises(BackendUnavailableError, match='backend="cpu"'):
        run(sparse_bundle, backend="reference")
    with pytest.raises(BudgetError):
        run(sparse_bundle, dram_budget=1 << 20)


def test_checksums_of_rows_point_at_the_one_damaged_row(sparse_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(sparse_bundle)
    name = neuron_file_name(1)
    files = row_checksums(bundle, "auto")
    assert list(files) == [neuron_file_name(0), name]
    rows = load_file(sparse_bundle / name)["records"].reshape(-1)
    np.testing.assert_array_equal(files[name].crcs, _native.crc32c(rows, files[name].crc_units))
    assert sum(files[name].crc_units) == bundle.neuron_layouts[0].stride
    assert len(files[name].crc_units) == 3
    by_rows = bundle.with_files({name: files[name]})
    assert by_rows.neuron_file(1) is files[name]
    assert by_rows.neuron_file(0).crc_units == bundle.neuron_file(0).crc_units
    assert bundle.neuron_file(1).crc_units == bundle.neuron_layouts[0].part_bytes
    copied = tmp_path / name
    copied.write_bytes((sparse_bundle / name).read_bytes())
    flip_byte(copied, PAGE + 7 * bundle.neuron_layouts[0].stride)
    damaged = bundle.with_files({name: replace(bundle.neuron_file(1), path=copied)})
    with pytest.raises(FlashReadError, match=name):
        row_checksums(damaged, "auto")
    # A reader in these units finds the one row that is wrong.
    with FlashReader([replace(files[name], path=copied)]) as reader:
        gate, up, _ = files[name].crc_units
        start = PAGE + 7 * bundle.neuron_layouts[0].stride
        assert len(reader.read(0, start + gate, up)) == up
        with pytest.raises(FlashReadError, match=f"from {start} "):
            reader.read(0, start, gate)


def test_json_is_strict_and_whole(found: Ablation) -> None:
    """No infinity, which JSON doesn't have, and nothing that comes back as something else."""
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()
