"""Neurons that aren't an expert's, from flash where they don't fit: dense layers and shared experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.api import load
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.budget.sizes import buffer_shape, dense_shape, expert_shape
from ondevice.bundle.layout import neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.errors import FlashReadError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.sparsity.experts import ExpertFetcher
from ondevice.sparsity.segments import SegmentPool
from tests.support.engines import every_logits
from tests.support.families import CASES, write_model
from tests.support.flash_files import flip_byte

TOKENS = np.random.default_rng(5).integers(0, 250, 40).tolist()
PROMPT = TOKENS[:12]


def logits(folder: Path, held: int | None, chunk: int, threads: int = 1, change: bool = False) -> bytes:
    """All logits with `held` segments of dense neurons in memory; None: the layers hold them.

    change: the number goes up and down between passes.
    """
    bundle = Bundle.open(folder)
    config, shape = bundle.config, dense_shape(bundle.config, bundle.quant)
    assert shape is not None
    widths = tuple(map(config.dense_neurons, config.layers))
    buffers = buffer_shape(config, bundle.quant, widths)
    own = 0 if held is None else shape.neurons
    with FlashReader(bundle_files(bundle), "auto", 3) as reader:
        cpu = CpuBackend(
            make_runner(threads), segment_neurons=64, piece_neurons=buffers.neurons, dense_neurons=own
        )
        model = Transformer(config, cpu, load_weights(bundle, reader, cpu))
        pool = None
        if held is not None:
            pool = SegmentPool(
                cpu.feed_forwards,
                reader,
                segment_bytes=shape.nbytes,
                piece_neurons=buffers.neurons,
                slot_bytes=buffers.slot_bytes,
                slots=buffers.slots,
            )
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


def test_a_budget_below_the_dense_neurons(large: Path) -> None:
    options = {"speculation": "off", "max_context": 256, "threads": 1, "memory_pressure": "off"}
    with load(large, **options) as model:
        expected, whole = model.generate(tokens=PROMPT, max_tokens=12).tokens, model.plan
        assert whole.dense is not None
        assert whole.dense_segments == whole.dense.total
        dense = whole.dense.total * whole.dense.nbytes
    least = whole.minimum_budget_bytes
    with load(large, dram_budget=least + dense // 2, **options) as model:
        assert 0 < model.plan.dense_segments < whole.dense.total
        assert model.plan.total_bytes <= model.plan.budget_bytes
        for budget in (
            least + dense // 2,
            least + (2 << 20),
            least + dense,
            whole.full_bytes,
            least + dense // 4,
        ):
            model.set_dram_budget(budget)
            made = model.generate(tokens=PROMPT, max_tokens=12)
            assert made.tokens == expected
            parts = model.plan.to_json()
            assert model.plan.total_bytes == sum(int(parts[name]) for name in PARTS)


PARTS = (
    "resident_weights_bytes",
    "kv_cache_bytes",
    "neuron_cache_bytes",
    "predictor_bytes",
    "draft_bytes",
    "constraint_bytes",
    "staging_bytes",
    "activation_bytes",
    "process_bytes",
    "other_models_bytes",
)


def test_damage_is_found_when_it_is_read(large: Path, tmp_path: Path) -> None:
    for file in large.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / neuron_file_name(0)
    flip_byte(path, path.stat().st_size - 5000)
    options = {"speculation": "off", "max_context": 256, "threads": 1, "memory_pressure": "off"}
    with load(large, **options) as model:
        least = model.plan.minimum_budget_bytes
    with load(tmp_path, dram_budget=least + (2 << 20), **options) as model, pytest.raises(FlashReadError):
        model.generate(tokens=PROMPT, max_tokens=2)
