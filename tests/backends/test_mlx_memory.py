"""Where the MLX backend's neurons lie: as planned; flash is read into MLX's memory; no read races a kernel.

On MLX's CPU device, or on a GPU when ONDEVICE_TEST_MLX_GPU is set.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget.mlx_memory import LAYERS_READ, MLX_STAGES, MlxMemory
from ondevice.bundle.layout import DATA_OFFSET
from ondevice.bundle.matrix_layout import RowLayout, padded
from ondevice.bundle.reader import Bundle
from ondevice.errors import BackendUnavailableError, FlashReadError, OndeviceError
from ondevice.flash.read_ahead import Extent, ReadAhead
from ondevice.flash.reader import FlashReader
from ondevice.model.layer_range import SequencePart
from ondevice.model.records import record_chunk
from ondevice.sparsity.segments import SegmentPool
from ondevice.units import PAGE_BYTES, memory_total
from tests.support.bundles import convert_bundle
from tests.support.engines import random_tokens
from tests.support.mlx_models import ON_CUDA, ON_GPU, loaded, smallest
from tests.support.models import write_checkpoint
from tests.support.paths import SHIPPED

# A wheel whose shared libraries are missing fails to import too, and is as good as absent.
mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends import mlx_weights  # noqa: E402
from ondevice.backends.mlx import MlxBackend  # noqa: E402
from ondevice.backends.mlx_matrix import MlxMatrix, _multiplies_mxfp4  # noqa: E402
from ondevice.backends.mlx_memory import writable  # noqa: E402
from ondevice.backends.mlx_weights import MlxPieceMemory, RecordMemory  # noqa: E402

pytestmark = pytest.mark.usefixtures("usual_threads", "mlx_device")


@pytest.fixture
def streamed() -> Iterator[pytest.MonkeyPatch]:
    """While it lasts no segment gets memory, so that every pass reads all neurons; `undo()` ends it."""
    own = pytest.MonkeyPatch()
    own.setattr(SegmentPool, "_request", lambda self, kind, count: False)
    yield own
    own.undo()


def test_a_slice_that_no_segment_takes_has_its_bits(
    bundles: Any, streamed: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is refused while a slice is packed; the pass then multiplies it as it was read."""
    refusals = []

    def refuse(nbytes: int) -> None:
        refusals.append(nbytes)
        raise MemoryError

    with loaded(bundles("llama-tails", "q4"), sparsity="dense") as model:
        assert model.config.is_sliced
        tokens = random_tokens(model.config, 20)
        expected = model.logits(tokens)
        streamed.undo()
        monkeypatch.setattr(mlx_weights, "require_memory", refuse)
        for _ in range(20):  # The segment's memory is requested beside a pass.
            assert np.array_equal(model.logits(tokens), expected)
            if refusals:
                break
        assert refusals


def held_bytes(matrix: MlxMatrix) -> int:
    return sum(array.nbytes for array in matrix.arrays)


@pytest.mark.parametrize(
    ("variant", "quant"), [("llama-tails", "q4"), ("qwen3", "q8"), ("llama-relu", "f16")]
)
def test_what_is_planned_is_what_is_allocated(bundles: Any, variant: str, quant: str) -> None:
    """Segments to the page, and the matrices of every token."""
    with loaded(bundles(variant, quant), sparsity="dense") as model:
        layers, plan = model._engine._backend.feed_forwards, model.plan
        for _ in range(20):  # Segments are filled beside forward passes: on a busy machine it takes more.
            model.generate(tokens=random_tokens(model.config, 20), max_tokens=3)
            if all(len(layer.segments) == layer.num_segments for layer in layers):
                break
        for layer in layers:
            assert len(layer.segments) == layer.num_segments
            for segment in layer.segments[:-1] or layer.segments:
                held = sum(array.nbytes for array in segment.neurons.arrays)
                assert 0 <= plan.segment.nbytes - held < PAGE_BYTES
        weights = model._engine._generator.transformer.weights
        linears = [weights.head, *(it for layer in weights.layers for it in (layer.qkv, layer.out))]
        assert sum(held_bytes(it) for linear in linears for it in linear.matrices) <= plan.weights_bytes


@pytest.mark.skipif(ON_CUDA, reason="on CUDA nothing is read into MLX's memory")
def test_slots_are_what_is_planned_until_nothing_streams(streamed: pytest.MonkeyPatch) -> None:
    with loaded(SHIPPED, sparsity="dense", dram_budget=smallest(SHIPPED, sparsity="dense")) as model:
        tokens, buffers = random_tokens(model.config, 20), model.plan.buffers
        memory = model._engine._backend.feed_forwards[0].piece_memory
        model.generate(tokens=tokens, max_tokens=3)
        assert memory.records.view.nbytes == buffers.slots * buffers.slot_bytes
        streamed.undo()
        model.set_dram_budget(memory_total())
        for _ in range(20):  # Segments are filled beside forward passes: on a busy machine it takes more.
            model.generate(tokens=tokens, max_tokens=30)
            if memory.records is None:
                break
        assert memory.records is None


@pytest.mark.parametrize("sparsity", ["exact", "predicted"])
def test_stages_are_what_is_planned(sparsity: str) -> None:
    with loaded(SHIPPED, sparsity=sparsity, dram_budget=smallest(SHIPPED, sparsity=sparsity)) as model:
        model.logits(random_tokens(model.config, 20))
        sizes = [
            sum(view.nbytes for _, view in stage.room._views) for stage in model._engine._backend._stages
        ]
        assert 1 <= len(sizes) <= MLX_STAGES
        assert MLX_STAGES * sizes[0] <= model.plan.buffers.packed_bytes


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_is_written_through_a_view_is_what_is_multiplied() -> None:
    """No copy: the view's address is the array's, and a matrix sees what a view got after it was made."""
    array, view = writable((4, 8), mx.float32)
    assert address(np.array(array, copy=False)) == address(view)
    half = array[1:3]
    mx.eval(half)
    view[1] = 7
    assert half[0].tolist() == [7] * 8
    row = RowLayout(64, 16)
    memory = RecordMemory(3 * 2 * row.nbytes)
    records = memory.view.reshape(3, -1)
    assert address(memory.view) % PAGE_BYTES == 0
    matrix = memory.matrix(records, row.nbytes, row, mx.float32)
    mx.eval(matrix.arrays)
    (codes,) = matrix.arrays
    assert address(np.array(codes, copy=False)) == address(memory.view) + row.nbytes
    records[1, row.nbytes :].view(np.float16)[:] = 1
    assert matrix.rows_product(mx.ones((1, 64))).tolist() == [[0, 64, 0]]


@pytest.mark.parametrize("quant", ["q4", "q8", "f16"])
def test_flash_is_read_into_the_memory_of_an_mlx_array(bundles: Any, quant: str) -> None:
    """What a stream's threads read is what MLX multiplies, at the same address."""
    bundle = Bundle.open(bundles("llama-relu", quant))
    layout, count = bundle.neuron_layouts[0], 64
    extent = Extent(0, DATA_OFFSET, count * layout.stride)
    slot = padded(extent.nbytes, PAGE_BYTES) + PAGE_BYTES
    memory = RecordMemory(2 * slot)
    with (
        FlashReader([bundle.neuron_file(0)], "auto", 2) as reader,
        ReadAhead(reader, [extent], slot, 2, cyclic=False, memory=memory.view) as ahead,
    ):
        records = ahead.next().reshape(count, layout.stride)
        assert memory.view.ctypes.data <= records.ctypes.data < memory.view.ctypes.data + slot
        row = RowLayout(bundle.config.hidden_size, bundle.quant.bits)
        found = memory.matrix(records, layout.part_offsets[1], row, mx.float32).copy()
        mx.eval(found.arrays)
        plain = reader.read(0, extent.offset, extent.nbytes).reshape(count, layout.stride)
    chunk = record_chunk(plain, layout.part_offsets[1], row, 0)
    codes = np.array(found.arrays[0])
    if quant == "f16":
        assert (codes == np.ascontiguousarray(chunk.codes).view(np.float16)).all()
        return
    assert (codes.view(np.uint8) == chunk.codes).all()
    for array, values in zip(found.arrays[1:], (chunk.scales, chunk.biases), strict=True):
        assert (np.array(array) == values).all()


NO_COPIES = pytest.mark.skipif(
    ON_CUDA, reason="on CUDA pieces are copied before their place is written again"
)


@pytest.mark.parametrize("sparsity", [pytest.param("dense", marks=NO_COPIES), "exact"])
def test_neurons_are_multiplied_before_their_place_is_written_again(
    sparsity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait that guards its place, what is multiplied late finds other neurons there."""
    with loaded(SHIPPED, sparsity=sparsity) as model:
        tokens = random_tokens(model.config, 10)
        expected = model.logits(tokens)

    def streamed() -> np.ndarray:
        with loaded(SHIPPED, sparsity=sparsity, dram_budget=smallest(SHIPPED, sparsity=sparsity)) as model:
            logits: np.ndarray = model.logits(tokens)
            return logits

    # Nothing is computed before somebody waits for it, and a layer takes more than there are stages.
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)
    monkeypatch.setattr(MlxMemory, "stage_neurons", 128)
    assert (streamed() == expected).all()
    next_stage = MlxBackend._next_stage

    def unguarded(self: Any, weight: Any) -> Any:
        for stage in self._stages:
            stage.pending = None
        return next_stage(self, weight)

    monkeypatch.setattr(MlxBackend, "_next_stage", unguarded)
    monkeypatch.setattr(MlxPieceMemory, "wait", lambda self, asked: None)
    assert (streamed() != expected).any()


@pytest.mark.usefixtures("streamed")
def test_a_pass_given_up_halfway_leaves_no_read_racing_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass rewinds the stream: what was asked for of its slots is computed first."""
    with loaded(SHIPPED, sparsity="dense", dram_budget=smallest(SHIPPED, sparsity="dense")) as model:
        tokens = random_tokens(model.config, 30)
        expected = model.logits(tokens)
        monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)
        memory = model._engine._backend.feed_forwards[0].piece_memory
        waited, restarts, wait, next_piece = [], [], memory.wait, ReadAhead.next

        def failing(self: Any) -> Any:
            if len(waited) == 3:
                raise FlashReadError("made up")
            return next_piece(self)

        monkeypatch.setattr(memory, "wait", lambda asked: (waited.append(len(asked)), wait(asked)))
        monkeypatch.setattr(ReadAhead, "next", failing)
        with pytest.raises(FlashReadError, match="made up"):
            model.logits(tokens)
        monkeypatch.setattr(ReadAhead, "next", next_piece)

        def watched(restart: Any) -> Any:
            return lambda self, *extents: (restarts.append(len(waited)), restart(self, *extents))

        for name in ("rewind", "reschedule"):
            monkeypatch.setattr(ReadAhead, name, watched(getattr(ReadAhead, name)))
        assert len(waited) == 3
        assert (model.logits(tokens) == expected).all()
        assert [count > 3 for count in restarts] == [True], "what was under way has been waited for"


@pytest.mark.parametrize("name", ["eval", "async_eval"])
def test_memory_that_mlx_is_refused_is_a_typed_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arrays: Any) -> None:
        raise RuntimeError("[malloc_or_wait] Unable to allocate 5 bytes.")

    with loaded(SHIPPED, sparsity="exact") as model:
        monkeypatch.setattr(mx, name, refused)
        with pytest.raises(OndeviceError, match="memory"):
            model.generate(tokens=[1, 2, 3], max_tokens=3)
        monkeypatch.undo()
        assert len(model.generate(tokens=[1, 2, 3], max_tokens=3).tokens) <= 3


@pytest.mark.parametrize("name", ["eval", "async_eval"])
def test_kernels_that_mlx_cannot_compile_are_a_typed_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's headers are missing: the message has the compiler's first error, and the remedy."""

    def refused(*arrays: Any) -> None:
        raise RuntimeError(
            "Failed to compile kernel: /a/mma.h(7): warning: a macro is redefined\n"
            '/a/mma.h(55): catastrophic error: cannot open source file "crt/mma.h"\n  #include "crt/mma.h"\n'
        )

    said = r'\(cannot open source .*mma.h"\).*nvidia-cuda-crt'
    with loaded(SHIPPED, sparsity="exact") as model:
        monkeypatch.setattr(mx, name, refused)
        with pytest.raises(BackendUnavailableError, match=said):
            model.generate(tokens=[1, 2, 3], max_tokens=3)
    monkeypatch.setattr(mx, "eval", refused)
    with pytest.raises(BackendUnavailableError, match=said):
        _multiplies_mxfp4.__wrapped__()


REFUSED = """
import resource, sys
import mlx.core as mx, numpy as np
from pathlib import Path
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.mlx_kv import MlxKV
from ondevice.backends.mlx_memory import Synchronisations, writable
from ondevice.backends.mlx_weights import MlxFeedForward, MlxPieceMemory
from ondevice.bundle.reader import Bundle
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files
from ondevice.model.records import FIRST_NEURON_FILE, NeuronRecords

bundle = Bundle.open(Path(sys.argv[1]))
arrays, stream = MlxKV(KVLayout(bundle.config, 16)), MlxPieceMemory(Synchronisations())
with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
    records = NeuronRecords(bundle, reader, 0)
    layer = MlxFeedForward(0, records, 1024, mx.float32, stream)
    piece = stream.allocate(1024 * records.layout.stride).reshape(1024, -1)
    piece[:] = records.read(0, 1024)
    arrays.resize(1)
    fork, (segment,) = arrays.fork(1), layer.new_segments(1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken, before[1]))
    big = 1 << 14
    for refused in (
        lambda: writable((1 << 14, 1 << 14), mx.uint32),
        lambda: arrays.resize(big),
        lambda: arrays.fork(big),
        lambda: layer.pack(segment, 0, 0, piece),
    ):
        try:
            refused()
        except MemoryError:
            print("refused")
    resource.setrlimit(resource.RLIMIT_AS, before)
    arrays.resize(2)
    layer.pack(segment, 0, 0, piece)
    mx.eval(segment.neurons.arrays)
    print("and then had")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits an address space, which macOS doesn't")
@pytest.mark.skipif(ON_GPU, reason="a GPU's memory isn't a process's")
def test_memory_that_the_system_refuses_is_a_typed_error() -> None:
    """In a process of its own: MLX's CPU device doesn't ask whether it got its memory, and would crash."""
    found = subprocess.run(
        [sys.executable, "-c", REFUSED, str(SHIPPED)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout.splitlines()) == (0, ["refused"] * 4 + ["and then had"]), found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads that Python doesn't know")
def test_models_that_come_and_go_leave_no_threads_behind() -> None:
    """MLX keeps one for every thread that ever computed; so models run on those that others left."""
    counts = []
    for _ in range(3):
        with loaded(SHIPPED, sparsity="dense") as model:
            model.generate(tokens=[1, 2, 3], max_tokens=2)
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert counts[2] <= counts[0]


@pytest.mark.fast("mlx")
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_closing_gives_memory_back_at_once(backend: str) -> None:
    """Without the collector of cycles, whose time is anybody's guess."""
    model = loaded(SHIPPED, backend, speculation="auto")
    model.generate("Once upon a time", max_tokens=8)
    engine = model._engine
    held = [weakref.ref(it) for it in (engine._backend, engine._generator.transformer, engine._neurons)]
    gc.collect()
    gc.disable()
    try:
        model.close()
        assert [it() for it in held] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="a GPU reads keys and values as they are stored")
def test_texts_that_share_a_pass_are_read_back_as_few_at_once_as_layers_of_one(tmp_path: Path) -> None:
    """Keys and values in float32 take a part of the plan that doesn't grow with the number of texts."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    source = write_checkpoint(tmp_path / "source", max_position_embeddings=2048, **sizes)
    options: dict[str, Any] = {"sparsity": "dense", "prefill_chunk": 16, "max_context": 2048}
    length = 1984
    with loaded(
        convert_bundle(source, tmp_path / "bundle"), parallel=4, dram_budget="1GB", **options
    ) as model:
        engine = model._engine
        transformer, pool = engine._generator.transformer, engine.kv

        def peak(texts: int) -> int:
            with ExitStack() as used:
                kvs = [used.enter_context(pool.use(None)) for _ in range(texts)]
                for kv in kvs:
                    kv.reserve(length + 64)
                    kv.extend([5] * length)
                most = 0
                for _ in range(3):
                    mx.clear_cache()
                    mx.reset_peak_memory()
                    before = mx.get_active_memory()
                    parts = [SequencePart(ForwardBatch([7]), kv) for kv in kvs]
                    engine._backend.to_numpy(transformer.logits(transformer.run_each(parts)))
                    most = mx.get_peak_memory() - before
                return most

        one, four = (model._owner.call(lambda texts=texts: peak(texts)) for texts in (1, 4))  # type: ignore[misc]
        copied = 2 * 4 * model.config.kv_size * length
        assert one > copied
        assert four < LAYERS_READ * copied + (1 << 20) < model.plan.decode_activation_bytes
