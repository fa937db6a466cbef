"""Neurons that aren't an expert's, from flash where they don't fit: dense layers and shared experts."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, inspect, load
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget.sizes import buffer_shape, dense_shape, expert_shape
from ondevice.bundle.layout import neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import Cancelled
from ondevice.config import RuntimeConfig
from ondevice.converters.convert import convert
from ondevice.errors import FlashReadError
from ondevice.flash.cost_model import UNMEASURED
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.runtime import resolving
from ondevice.runtime.backend_choice import make_backend
from ondevice.runtime.neuron_memory import open_neuron_memory, segment_pool
from ondevice.runtime.resolving import resolve
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.fetch import DEFAULT_FETCH
from ondevice.sparsity.segments import SegmentPool
from ondevice.training import train_expert_use
from ondevice.units import process_memory
from tests.support.bundles import copy_files, made_up_pieces
from tests.support.engines import every_logits
from tests.support.families import CASES, write_model
from tests.support.flash_files import flip_byte

TOKENS = np.random.default_rng(5).integers(0, 250, 40).tolist()
PROMPT = TOKENS[:12]
OPTIONS: dict[str, Any] = {"speculation": "off", "max_context": 256, "threads": 1, "memory_pressure": "off"}


def logits(folder: Path, held: int | None, chunk: int, threads: int = 1, change: bool = False) -> bytes:
    """All logits with `held` segments of dense neurons in memory; None: the layers hold them.

    change: the number goes up and down between passes.
    """
    bundle = Bundle.open(folder)
    config, shape = bundle.config, dense_shape(bundle.config, bundle.quant)
    assert shape is not None
    widths = tuple(map(config.dense_neurons, config.layers))
    buffers = buffer_shape(config, bundle.quant, widths, shape.neurons)
    own = 0 if held is None else shape.neurons
    with FlashReader(bundle_files(bundle), "auto", 3) as reader:
        cpu = CpuBackend(
            make_runner(threads), segment_neurons=64, piece_neurons=buffers.neurons, dense_neurons=own
        )
        model = Transformer(config, cpu, load_weights(bundle, reader, cpu))
        pool = None
        if held is not None:
            pool = segment_pool(cpu, reader, shape, buffers)
            pool.resize(shape.quota(held))
            pool.hold()
            assert pool.filled_bytes == min(held, shape.total) * shape.nbytes
        assert config.experts is not None
        slots = expert_shape(config, bundle.quant, config.experts)
        specs = [layer.experts for layer in config.layers]
        fetcher = ExpertFetcher(
            cpu.feed_forwards, reader, specs, slots.slot_bytes, 1, slots.reserve, dense=pool
        )
        fetcher.resize([slots.reserve + 2])
        kv, found = SequenceState(KVLayout(config, 16)), []
        for at in range(0, len(TOKENS), chunk):
            found.append(every_logits(model, TOKENS[at : at + chunk], kv))
            if change:
                fetcher.keep_dense(shape.quota((at // chunk * 3) % (shape.total + 1)))
        fetcher.close()
        assert fetcher.nbytes == 0
    return np.concatenate(found).tobytes()


@pytest.mark.fast("qwen2 moe-relu2")
@pytest.mark.parametrize(
    ("case", "act"),
    [("glm4 moe head norms", None), ("qwen2 moe", None), ("gemma4 moe", None), ("qwen2 moe", "relu2")],
)
def test_bits_dont_depend_on_what_is_held(tmp_path: Path, case: str, act: str | None) -> None:
    family, values = CASES[case]
    write_model(tmp_path / "source", family, values if act is None else {**values, "hidden_act": act})
    folder = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    expected = logits(folder, None, len(TOKENS))
    for held, chunk, threads in ((0, 1, 1), (1, 7, 2), (2, 16, 1), (99, 40, 1)):
        assert logits(folder, held, chunk, threads) == expected, (held, chunk)
    assert logits(folder, 1, 1, change=True) == expected


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer of 7 MB first, then layers with experts of a few kB and shared ones."""
    made = tmp_path_factory.mktemp("dense")
    family, values = CASES["glm4 moe head norms"]
    sizes = {"hidden_size": 256, "intermediate_size": 16384, "num_hidden_layers": 3}
    write_model(made / "source", family, {**values, **sizes})
    return convert(made / "source", made / "bundle", "q4")


@pytest.fixture(scope="module")
def damaged(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`large` with a flipped byte near the end of the dense layer."""
    folder = copy_files(large, tmp_path_factory.mktemp("damaged") / "bundle")
    path = folder / neuron_file_name(0)
    flip_byte(path, path.stat().st_size - 5000)
    return folder


def test_a_budget_below_the_dense_neurons_changes_no_text(large: Path) -> None:
    with load(large, **OPTIONS) as model:
        expected, whole = model.generate(tokens=PROMPT, max_tokens=6).tokens, model.plan
        assert whole.dense is not None
        assert whole.dense_segments == whole.dense.total
        dense = whole.dense.total * whole.dense.nbytes
    least = whole.minimum_budget_bytes
    with load(large, dram_budget=least + dense // 2, **OPTIONS) as model:
        assert 0 < model.plan.dense_segments < whole.dense.total
        for budget in (
            least + dense // 2,
            least + (2 << 20),
            least + dense,
            whole.full_bytes,
            least + dense // 4,
        ):
            model.set_dram_budget(budget)
            made = model.generate(tokens=PROMPT, max_tokens=6)
            assert made.tokens == expected
            held, plan, pool = model._engine._neurons, model.plan, pool_of(model)
            assert plan.dense is not None
            kept = pool.nbytes
            assert kept == plan.dense_segments * plan.dense.nbytes
            assert held.nbytes - kept <= plan.segments_for(plan.kv_block_bytes, 1) * plan.segment.nbytes
            assert buffers_of(pool) <= plan.staging_bytes
            assert (buffers_of(pool) > 0) == (plan.dense_segments < plan.dense.total)


def pool_of(model: Model) -> SegmentPool:
    """What holds and reads a loaded model's dense neurons."""
    fetcher = model._engine._neurons
    assert isinstance(fetcher, ExpertFetcher)
    assert fetcher._dense is not None
    return fetcher._dense


def buffers_of(pool: SegmentPool) -> int:
    """Bytes of a pool's read-ahead buffers."""
    return 0 if pool._ahead is None else pool._slots * pool._slot_bytes


def test_a_piece_lies_within_a_segment(large: Path) -> None:
    plan = inspect(large, backend="cpu")
    assert plan.dense is not None
    assert plan.buffers.neurons <= plan.dense.neurons
    assert plan.buffers.packed_bytes <= plan.dense.nbytes


def test_scratch_memory_is_that_of_segments(large: Path) -> None:
    """Of a dense layer's 16,384 neurons a pass has one segment's hidden values at once, and is planned so."""
    bundle, tokens = Bundle.open(large), 512
    shape = dense_shape(bundle.config, bundle.quant)
    assert shape is not None
    whole, own = 4 * tokens * bundle.config.widths[0], 4 * tokens * shape.neurons
    spec = bundle.config.layers[0].feed_forward
    with FlashReader(bundle_files(bundle)) as reader:
        cpu = CpuBackend(make_runner(1), segment_neurons=64, piece_neurons=64, dense_neurons=shape.neurons)
        load_weights(bundle, reader, cpu)
        sizes = {"segment_bytes": shape.layer_bytes, "piece_neurons": 64, "slot_bytes": 1 << 17, "slots": 2}
        with closing(SegmentPool(cpu.feed_forwards, reader, **sizes)) as pool:
            pool.resize(shape.quota(shape.total))
            pool.hold()
            x = np.random.default_rng(1).standard_normal((tokens, bundle.config.hidden_size), np.float32)
            batch = ForwardBatch(list(range(tokens)))
            cpu.dense_feed_forward(x[:1], cpu.feed_forwards[0], spec, ForwardBatch([0]))
            before = process_memory().current_bytes
            cpu.dense_feed_forward(x, cpu.feed_forwards[0], spec, batch)
            taken = process_memory().current_bytes - before
        cpu.close()
    assert own <= taken < whole // 2
    plan = inspect(large, backend="cpu", max_context=tokens, prefill_chunk=tokens)
    assert taken <= plan.activation_bytes < whole


def test_the_reference_counts_neurons_once(large: Path) -> None:
    plan = inspect(large, backend="reference")
    plan = plan.with_budget(plan.minimum_budget_bytes)
    assert plan.dense is None
    assert not plan.offloads_weights
    assert plan.resident_weights_bytes == plan.weights_bytes
    assert plan.total_bytes <= plan.minimum_budget_bytes


def test_a_load_that_fails_frees_what_it_held(damaged: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(FlashReadError) as caught:
            load(damaged, **OPTIONS).close()
        # The error's frames hold the segment that was being filled, out of ten.
        del caught
        assert len([it for it in gc.get_objects() if isinstance(it, _native.Segment)]) <= 1
    finally:
        gc.enable()


def test_a_load_that_is_cancelled_reads_no_more(large: Path) -> None:
    resolved = resolve(Bundle.open(large), RuntimeConfig(backend="cpu", speculation="off", max_context=256))
    bundle, plan = resolved.bundle, resolved.plan.with_budget(resolved.plan.full_bytes)
    with FlashReader(bundle_files(bundle)) as reader:
        cpu = make_backend(bundle.config, bundle.quant, resolved.runtime, plan)
        load_weights(bundle, reader, cpu)
        before, asked = reader.stats.bytes_read, iter([False, True])
        with pytest.raises(Cancelled):
            open_neuron_memory(
                bundle, plan, cpu, reader, UNMEASURED, DEFAULT_FETCH, cancelled=lambda: next(asked)
            )
        assert reader.stats.bytes_read - before <= plan.buffers.slot_bytes
        assert not any(layer.segments for layer in cpu.feed_forwards)
        cpu.close()


@pytest.fixture(scope="module")
def large_shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared experts of 1 MB in each layer, and squared ReLU."""
    made = tmp_path_factory.mktemp("shared")
    family, values = CASES["qwen2 moe"]
    sizes = {"shared_expert_intermediate_size": 8192, "hidden_act": "relu2"}
    write_model(made / "source", family, {**values, **sizes})
    return convert(made / "source", made / "bundle", "q4")


def test_training_holds_what_the_plan_has(
    large_shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = made_up_pieces()[:4]
    whole = train_expert_use(large_shared, pieces=pieces, output=tmp_path / "whole")
    process = resolving.held_bytes()
    # Training plans again, and a process that it measured smaller would leave room for more.
    monkeypatch.setattr(resolving, "held_bytes", lambda: process)
    plan = inspect(large_shared, backend="cpu")
    budget = plan.minimum_budget_bytes + (1 << 20)
    under, held = plan.with_budget(budget), []
    assert under.dense is not None
    assert 0 < under.dense_segments < under.dense.total
    begin = ExpertFetcher.begin_pass

    def spy(self: ExpertFetcher, batch: ForwardBatch) -> None:
        begin(self, batch)
        layers = self._layers
        held.append(
            sum(len(it.segments) * it.native.segment_bytes(it.segment_neurons // 64) for it in layers)
        )

    monkeypatch.setattr(ExpertFetcher, "begin_pass", spy)
    found = train_expert_use(large_shared, pieces=pieces, output=tmp_path / "found", dram_budget=budget)
    assert found == whole
    assert 0 < max(held) <= under.dense.bytes_of(under.dense_segments)


def test_damage_is_found_when_it_is_read(large: Path, damaged: Path) -> None:
    with load(large, **OPTIONS) as model:
        least = model.plan.minimum_budget_bytes
    with load(damaged, dram_budget=least + (2 << 20), **OPTIONS) as model, pytest.raises(FlashReadError):
        model.generate(tokens=PROMPT, max_tokens=2)
