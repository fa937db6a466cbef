"""Experts in a cache smaller than all of them: the bits never change, and faults cost no slot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.bundle.reader import Bundle
from ondevice.commands.inspection import inspection, inspection_text
from ondevice.config import RuntimeConfig
from ondevice.converters.checkpoints.huggingface import open_huggingface
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.convert import Training, convert
from ondevice.errors import (
    BackendUnavailableError,
    CheckpointError,
    FlashReadError,
    OndeviceError,
    UnsupportedModelError,
)
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.runtime.resolving import resolve
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.pooled_cache import PooledCache
from ondevice.units import format_bytes
from tests.support.engines import every_logits, expert_fetcher
from tests.support.families import CASES, write_model
from tests.support.fault_rounds import assert_each_slot_once
from tests.support.flash_files import flip_byte
from tests.support.slow_memory import slow_memory

TOKENS = np.random.default_rng(5).integers(0, 256, 70).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts of 48 neurons, three for each token; three layers."""
    made = tmp_path_factory.mktemp("experts")
    write_model(made / "source", *CASES["olmoe"])
    return convert(made / "source", made / "bundle", "q4")


@contextmanager
def running(
    folder: Path, slots: int | None, threads: int = 1, io: str = "auto"
) -> Iterator[tuple[Transformer, ExpertFetcher]]:
    bundle = Bundle.open(folder)
    with FlashReader(bundle_files(bundle), io, 3) as reader:  # type: ignore[arg-type]
        backend = CpuBackend(make_runner(threads), segment_neurons=64, piece_neurons=64)
        model = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        fetcher = expert_fetcher(bundle, reader, backend, slots)
        yield model, fetcher
        fetcher.close()


def in_chunks(model: Transformer, chunk: int) -> np.ndarray:
    kv = SequenceState(KVLayout(model.config, 16))
    parts = [every_logits(model, TOKENS[at : at + chunk], kv) for at in range(0, len(TOKENS), chunk)]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    with running(folder, None) as (model, _):
        return in_chunks(model, len(TOKENS))


@pytest.mark.fast("1-auto-3", "2-buffered-4", "1-auto-17", "2-buffered-None")
@pytest.mark.parametrize("slots", [3, 4, 9, 17, None])
@pytest.mark.parametrize(("threads", "io"), [(1, "auto"), (2, "buffered")])
def test_bits_depend_on_nothing(
    folder: Path, expected: np.ndarray, slots: int | None, threads: int, io: str
) -> None:
    with running(folder, slots, threads, io) as (model, fetcher):
        for chunk in (1, 7, 64):
            assert in_chunks(model, chunk).tobytes() == expected.tobytes()
        assert fetcher.lookups > fetcher.hits
        if slots == 3:
            assert fetcher.hits == 0
        if slots is None:
            assert fetcher.lookups - fetcher.hits <= 3 * 8


@pytest.mark.fast("qwen2 moe-relu", "gemma4 moe-None")
@pytest.mark.parametrize(
    ("case", "act"),
    [
        ("qwen2 moe", "silu"),
        ("granite moe", "silu"),
        ("glm4 moe head norms", "silu"),
        ("qwen3 moe dense between", "silu"),
        ("gemma4 moe", None),
        ("olmoe", "relu2"),
        ("qwen2 moe", "relu"),
    ],
)
def test_bits_of_other_models_depend_on_nothing(tmp_path: Path, case: str, act: str | None) -> None:
    """72 dense neurons with a gate; experts of a stack; dense layers first, and between; experts that are
    runs of neurons, which aren't whole pages.
    """
    family, values = CASES[case]
    write_model(tmp_path / "source", family, values if act is None else {**values, "hidden_act": act})
    folder = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    found = []
    for slots, threads, chunk in ((None, 1, 70), (3, 2, 1), (5, 1, 7), (11, 2, 64)):
        with running(folder, slots, threads) as (model, _):
            found.append(in_chunks(model, chunk).tobytes())
    assert len(set(found)) == 1


def test_memory_that_comes_late_changes_no_bit(
    folder: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are evicted before all slots exist, as what is still being made isn't waited for."""
    slow_memory(monkeypatch, 0.05)
    early, evict = [0], PooledCache._evict_least

    def spied(cache: PooledCache, *args: Any) -> None:
        early[0] += len(cache._segments) < cache._quota
        evict(cache, *args)

    monkeypatch.setattr(PooledCache, "_evict_least", spied)
    for chunk in (1, 7, 64):
        before = early[0]
        with running(folder, 17, threads=2) as (model, fetcher):
            assert in_chunks(model, chunk).tobytes() == expected.tobytes()
            assert fetcher.nbytes <= 17 * fetcher._cache.slot_bytes
        assert early[0] > before


def test_slots_may_come_and_go_between_passes(folder: Path, expected: np.ndarray) -> None:
    with running(folder, 24) as (model, fetcher):
        kv = SequenceState(KVLayout(model.config, 16))
        for at, token in enumerate(TOKENS):
            fetcher.resize([(3, 10, 27, 5)[at % 4]])
            assert every_logits(model, [token], kv).tobytes() == expected[at : at + 1].tobytes()


@pytest.mark.parametrize("slots", [3, 12, None])
def test_draft_trees_change_no_bit(folder: Path, expected: np.ndarray, slots: int | None) -> None:
    with running(folder, slots) as (model, _):
        assert in_trees(model).tobytes() == expected.tobytes()


def test_draft_trees_beside_dense_layers_change_no_bit(tmp_path: Path) -> None:
    write_model(tmp_path / "source", *CASES["qwen3 moe dense between"])
    folder = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with running(folder, None) as (model, _):
        expected = in_chunks(model, 64)
    with running(folder, 5) as (model, _):
        assert in_trees(model).tobytes() == expected.tobytes()


def in_trees(model: Transformer) -> np.ndarray:
    """Logits of the text, two tokens a pass, with wrong ones beside them, of which none stays."""
    rng, kv, found = np.random.default_rng(3), SequenceState(KVLayout(model.config, 16)), []
    for at in range(0, len(TOKENS), 2):
        wrong = rng.integers(0, 256, 3).tolist()
        tokens = [TOKENS[at], wrong[0], TOKENS[at + 1], wrong[1], wrong[2]]
        batch = ForwardBatch(tokens, TokenTree([-1, 0, 0, 1, 2]), drafted=[1, 2, 3, 4])
        found.append(np.array(model.logits(model.run(batch, kv).hidden))[[0, 2]])
        kv.keep(at, [0, 2], partial(model.backend.kv_move, kv))
        model.accept(batch, [0, 2])
    return np.concatenate(found)


def test_damage_is_an_error_and_costs_no_slot(folder: Path, tmp_path: Path, expected: np.ndarray) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in folder.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    layout, file = Bundle.open(folder).expert_layouts[-1], damaged / "experts-00001.safetensors"
    assert layout is not None
    # A byte of another matrix of each.
    places = [DATA_OFFSET + e * layout.stride + layout.part_offsets[e % 3] + 5 for e in range(8)]
    for slots in (3, 12, None):
        for chunk in (1, 64):
            with running(damaged, slots) as (model, fetcher):
                for place in places:
                    flip_byte(file, place)
                with pytest.raises(FlashReadError, match="experts-00001"):
                    in_chunks(model, chunk)
                for place in places:
                    flip_byte(file, place)
                assert in_chunks(model, chunk).tobytes() == expected.tobytes()
                fetcher._prefetcher.drop()
                assert_each_slot_once(fetcher._cache, np.zeros(0, np.int32))


def test_estimates_are_refused(folder: Path) -> None:
    with running(folder, None) as (model, _), pytest.raises(OndeviceError, match="can't be estimated"):
        model.run(ForwardBatch(TOKENS[:2], resident_only=True), SequenceState(KVLayout(model.config, 16)))


def test_a_closed_cache_refuses(folder: Path) -> None:
    with running(folder, None) as (model, fetcher):
        fetcher.close()
        with pytest.raises(OndeviceError, match="closed"):
            in_chunks(model, 7)


def test_inspect_knows_a_tokens_cycle(folder: Path) -> None:
    resolved = resolve(Bundle.open(folder), RuntimeConfig(backend="cpu"))
    text, facts = inspection_text(resolved), inspection(resolved)["experts"]
    layout = resolved.bundle.expert_layouts[-1]
    assert layout is not None
    nbytes = layout.stride
    assert facts["cycle_bytes"] == 3 * 3 * nbytes
    assert (facts["count"], facts["chosen"], facts["in_memory"]) == (8, 3, 24)
    assert f"a token's cycle is 9 of them, {format_bytes(9 * nbytes)}" in text
    assert "with a full context the budget keeps 24 of 24" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparsity": "dense"}, "dense.* isn't possible"),
        ({"sparsity": "exact"}, "exact.* isn't possible"),
        ({"speculation": "resident"}, "resident.* isn't possible.*: off, lookup, recycling, model, auto$"),
        ({"speculation": "ngrams"}, "ngrams.* isn't possible.*: off, lookup, recycling, model, auto$"),
        ({"speculation": "streams"}, "streams.* isn't possible"),
    ],
)
def test_what_experts_cant_have_is_refused_by_name(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((UnsupportedModelError, BackendUnavailableError), match=words):
        resolve(Bundle.open(folder), RuntimeConfig(**options))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": 1 << 40}, "num_experts is 1099511627776"),
        ({"num_experts": 5}, "router has shape"),
        ({"num_experts": 9}, "tensors of experts that config.json asks for are missing"),
        ({"num_experts_per_tok": 9}, "chosen is 9"),
        ({"num_local_experts": 7}, "num_experts and num_local_experts differ"),
        ({"intermediate_size": 47}, "config.json asks for"),
        ({"clip_qkv": 3.0}, "clip_qkv"),
    ],
)
def test_configs_that_lie_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    values = json.loads((folder.parent / "source" / "config.json").read_text())
    values["num_experts"] = values.pop("num_local_experts", values.get("num_experts"))
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    (tmp_path / "model.safetensors").hardlink_to(folder.parent / "source" / "model.safetensors")
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        open_huggingface(SourceFolder(tmp_path))


def test_experts_of_several_types_are_refused(folder: Path, tmp_path: Path) -> None:
    source = folder.parent / "source"
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({**tensors, name: tensors[name].astype(np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"experts\.3.* type F16"):
        open_huggingface(SourceFolder(tmp_path))


def test_a_text_rounds_no_experts(folder: Path, tmp_path: Path) -> None:
    def converted(is_random: bool) -> Path:
        training = Training("a text", None, [TOKENS], is_random)
        source = folder.parent / "source"
        return convert(source, tmp_path / "bundle", "q4", begin_training=lambda checkpoint: training)

    with pytest.raises(UnsupportedModelError, match="rounded by random tokens yet, as its layers have exp"):
        converted(is_random=True)
    assert not any(tmp_path.iterdir())
    found, plain = (Bundle.open(path).manifest for path in (converted(is_random=False), folder))
    assert found.files == plain.files
    assert not any("by a text" in note for note in found.provenance.notes)
