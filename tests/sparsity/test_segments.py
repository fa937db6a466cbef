"""Feed-forward memory: any division of the layers into segments and a stream gives the same bits."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ondevice.backends.base import Bytes, Float32
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.cpu_neurons import CpuSlices
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget.sizes import buffer_shape, segment_shape
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import Cancelled
from ondevice.converters.convert import convert
from ondevice.errors import FlashReadError, OndeviceError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.sparsity.segments import SEGMENTS_AHEAD, SegmentPool
from tests.support.engines import every_logits
from tests.support.models import write_checkpoint

TOKENS = [3, 17, 5, 9, 44, 2]
# Four segments of at most 64 neurons in each of three layers, the last one 8 neurons short. At 4 bits each
# counts twice: its high plane, and the low one that makes it whole.
NEURONS, LAYERS, SEGMENT_NEURONS, PER_LAYER = 248, 3, 64, 4


@pytest.fixture(scope="module", params=["q4", "f16"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("segments"), request.param)


def converted(folder: Path, quant: str) -> Path:
    source = write_checkpoint(
        folder / "hf", hidden_size=96, num_hidden_layers=LAYERS, intermediate_size=NEURONS, head_dim=24
    )
    return convert(source, folder / "bundle", quant=quant)


@contextmanager
def pooled(folder: Path) -> Iterator[tuple[Transformer, SegmentPool, FlashReader]]:
    bundle = Bundle.open(folder)
    buffers = buffer_shape(bundle.config, bundle.quant)
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        backend = CpuBackend(make_runner(2), segment_neurons=SEGMENT_NEURONS, piece_neurons=buffers.neurons)
        model = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        pool = SegmentPool(
            backend.feed_forwards,
            reader,
            segment_bytes=segment_shape(bundle.config, bundle.quant).layer_bytes,
            piece_neurons=buffers.neurons,
            slot_bytes=buffers.slot_bytes,
            slots=buffers.slots,
        )
        yield model, pool, reader
        pool.close()


def assert_settles(model: Transformer, pool: SegmentPool, quota: list[int], expected: bytes) -> None:
    """Resize and run passes, each with the right logits, until the whole quota is filled."""
    pool.resize(quota)
    layers = model.backend.feed_forwards  # type: ignore[attr-defined]
    for _ in range(500):
        assert logits(model) == expected, quota
        if list(map(held, layers)) == quota:
            # One more pass, so that nothing of the old schedule is still being read ahead.
            assert logits(model) == expected, quota
            return
        time.sleep(0.01)
    pytest.fail(f"still not filled: {quota}")


def held(layer: CpuSlices) -> int:
    """What a layer holds, as quotas count it."""
    return len(layer.segments) * (2 if layer.high_bytes else 1) + len(layer.high_planes)


def held_bytes(layer: CpuSlices) -> int:
    """Bytes of a layer's segments and high planes."""
    whole, high = len(layer.segments) * layer.slices.tiles.stride, len(layer.high_planes) * layer.high_bytes
    return whole + high


def slices_of(model: Transformer) -> list[CpuSlices]:
    """The feed-forwards of all layers."""
    return model.backend.feed_forwards  # type: ignore[attr-defined, no-any-return]


def everything(model: Transformer) -> list[int]:
    """The quota that holds every neuron."""
    return [PER_LAYER * (2 if layer.high_bytes else 1) for layer in slices_of(model)]


def logits(model: Transformer, passes: int = 2) -> bytes:
    kv = SequenceState(KVLayout(model.config))
    parts = [every_logits(model, TOKENS, kv) for _ in range(passes)]
    return np.concatenate(parts).tobytes()  # type: ignore[arg-type]


def test_every_division_gives_the_same_logits(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        expected = logits(model)
        quotas = [[1, 1, 1], [4, 0, 2], [0, 0, 4], everything(model), [2, 3, 4], [0, 0, 0]]
        if slices_of(model)[0].high_bytes:
            quotas += [[6, 3, 8], [5, 4, 7], [8, 6, 5], [3, 7, 6]]
        for quota in quotas:
            assert_settles(model, pool, quota, expected)


def test_a_pass_over_resident_neurons_streams_nothing(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        expected = logits(model)
        assert_settles(model, pool, [1, 1, 1], expected)
        before = pool.lookups
        some = model.run(
            ForwardBatch(TOKENS, resident_only=True), SequenceState(KVLayout(model.config))
        ).hidden
        assert pool.lookups == before
        assert np.isfinite(some).all()
        assert logits(model) == expected


def test_bytes_read_are_what_is_not_resident(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, reader):
        slices = slices_of(model)[0].slices
        for quota in [[2, 2, 2], [6, 6, 6]][: 1 + bool(slices.low_bytes)]:
            assert_settles(model, pool, quota, logits(model))
            whole, high = len(slices_of(model)[0].segments), len(slices_of(model)[0].high_planes)
            assert (whole, high) == ((2, 0) if not slices.low_bytes else (0, 2) if quota[0] == 2 else (2, 2))
            layer_bytes = high * slices.low_bytes + (PER_LAYER - whole - high) * slices.stride
            logits(model)
            before = reader.stats.bytes_read
            logits(model, passes=10)
            read = reader.stats.bytes_read - before
            # Embedding rows and what is read ahead at the end come on top.
            assert 10 * LAYERS * layer_bytes <= read <= 14 * LAYERS * layer_bytes + 10 * len(TOKENS) * 4096
        assert_settles(model, pool, everything(model), logits(model))
        before = reader.stats.bytes_read
        logits(model)
        # What is left are embedding rows, a page each.
        assert reader.stats.bytes_read - before <= 2 * len(TOKENS) * 4096


def test_memory_is_what_is_lent_and_goes_back(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        shape = segment_shape(model.config, Bundle.open(bundle).quant)
        assert pool.nbytes == 0
        expected = logits(model)
        assert_settles(model, pool, [1, 2, 3], expected)
        assert pool.nbytes == pool.filled_bytes == sum(map(held_bytes, slices_of(model))) > 0
        assert pool.nbytes <= 6 * shape.nbytes
        pool.resize([0, 0, 1])
        assert pool.nbytes == held_bytes(slices_of(model)[2]) > 0
        assert_settles(model, pool, [0, 0, 1], expected)
        pool.resize(everything(model))
        assert logits(model) == expected
        assert 0 < pool.nbytes <= shape.bytes_of(shape.total)
        assert_settles(model, pool, everything(model), expected)
        assert pool.nbytes == shape.bytes_of(shape.total)
        layer = slices_of(model)[1]
        addresses = [segment.ctypes.data for segment in layer.segments]
        assert set(np.diff(addresses)) == {len(layer.segments[0])}
        pool.resize([it - (index == 1) for index, it in enumerate(everything(model))])
        assert layer.segments == []
        assert pool.nbytes == 2 * shape.bytes_of(shape.total) // 3
        assert_settles(model, pool, everything(model), expected)
        pool.resize([0, 0, 0])
        assert pool.nbytes == 0


def test_high_planes_go_when_the_segments_before_them_change(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        layer = slices_of(model)[1]
        if not layer.high_bytes:
            pytest.skip("its codes aren't divided")
        expected = logits(model)
        assert_settles(model, pool, [0, 6, 0], expected)
        kept = list(layer.segments)
        pool.resize([0, 5, 0])
        assert (len(layer.segments), len(layer.high_planes)) == (1, 0)
        assert_settles(model, pool, [0, 5, 0], expected)
        assert (len(layer.segments), len(layer.high_planes)) == (1, 3)
        assert layer.segments[0] is kept[0]
        pool.resize([0, 3, 0])
        assert (len(layer.segments), len(layer.high_planes)) == (0, 0)
        assert_settles(model, pool, [0, 3, 0], expected)
        planes = list(layer.high_planes)
        pool.resize([0, 2, 0])
        assert list(map(id, layer.high_planes)) == list(map(id, planes[:2]))
        # All of a layer's lie in one mapping.
        assert_settles(model, pool, [0, 4, 0], expected)
        pool.resize([0, 3, 0])
        assert layer.high_planes == []
        assert_settles(model, pool, [0, 3, 0], expected)
        pool.resize([0, 4, 0])
        assert (len(layer.segments), len(layer.high_planes)) == (0, 3)
        assert_settles(model, pool, [0, 4, 0], expected)
        assert (len(layer.segments), len(layer.high_planes)) == (0, 4)
        pool.resize([0, 2, 0])
        assert (len(layer.segments), len(layer.high_planes)) == (0, 0)


def test_drafts_have_every_neuron_whose_high_plane_is_in_memory(tmp_path: Path) -> None:
    with pooled(converted(tmp_path, "q8")) as (model, pool, _):

        def drafts() -> Float32:
            batch = ForwardBatch(TOKENS, resident_only=True)
            return np.array(model.run(batch, SequenceState(KVLayout(model.config))).hidden)

        expected = logits(model)
        assert_settles(model, pool, everything(model), expected)
        exact, errors = drafts(), []
        for quota in ([PER_LAYER] * LAYERS, [2, 2, 2], [0, 0, 0]):
            assert_settles(model, pool, quota, expected)
            errors.append(float(np.square(drafts() - exact).mean() / np.square(exact).mean()))
        assert 0 < errors[0] < 0.1 < errors[1] < errors[2]


def test_estimates_have_the_high_planes_beside_rows_that_have_everything(bundle: Path) -> None:
    """As of streams, in a pass with tokens: each row has the bits that it has alone."""
    with pooled(bundle) as (model, pool, _):
        layer, spec = slices_of(model)[0], model.config.layers[0].feed_forward
        x = np.random.default_rng(1).standard_normal((5, model.config.hidden_size)).astype(np.float32)
        added = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)

        def output(rows: slice, batch: ForwardBatch) -> bytes:
            pool.begin_pass(batch)
            return np.array(
                model.backend.feed_forward(x[rows], layer, spec, batch, None, added[rows].copy())
            ).tobytes()

        expected = logits(model)
        for quota in (
            [0] * LAYERS,
            [2, 2, 2],
            [max(2, it - 1) for it in everything(model)],
            everything(model),
        ):
            assert_settles(model, pool, quota, expected)
            both = output(slice(None), ForwardBatch(TOKENS[:3], stream_rows=2))
            tokens = output(slice(3), ForwardBatch(TOKENS[:3]))
            assert both == tokens + output(slice(3, None), ForwardBatch(TOKENS[:2], resident_only=True))


def test_the_first_pass_already_allocates(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        pool.resize(everything(model))
        first = logits(model, passes=1)
        assert pool.nbytes > 0
        assert logits(model, passes=1) == first


def test_a_layer_that_a_pass_comes_to_again_gives_no_neuron_twice(bundle: Path) -> None:
    """As MLX does for the last row of a prompt; the first time has filled one of the layer's segments."""
    batch, last = ForwardBatch(TOKENS), LAYERS - 1
    with pooled(bundle) as (model, pool, _):
        layer = slices_of(model)[last]
        pool.resize([0, 0, everything(model)[last] - PER_LAYER + 1])
        pool.begin_pass(batch)
        for requested in [requested for waiting in pool._requested.values() for requested in waiting]:
            requested.memory.result()
        counts = []
        for _ in range(2):
            resident = len(layer.segments)
            counts.append((resident, len(list(pool.offloaded(last, batch)))))
        assert counts == [(0, PER_LAYER), (1, PER_LAYER - 1)]


def test_segments_that_wait_to_be_filled_go_back_too(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        shape = segment_shape(model.config, Bundle.open(bundle).quant)
        expected = logits(model)
        for kept in (0, 1, 3):
            pool.resize([4, 4, 4])
            pool.begin_pass(ForwardBatch(TOKENS))
            assert pool.nbytes == SEGMENTS_AHEAD * (shape.high_bytes[0] or shape.nbytes)
            pool.resize([kept, 0, 0])
            assert pool.nbytes <= kept * (shape.high_bytes[0] or shape.nbytes)
            assert_settles(model, pool, [kept, 0, 0], expected)
            pool.resize([0, 0, 0])


def test_a_pass_fills_its_segments_however_slowly_memory_comes(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = _native.allocate

    def slowly(nbytes: int, populated: bool = False) -> Bytes:
        time.sleep(0.01 * populated)
        return allocate(nbytes, populated)

    with pooled(bundle) as (model, pool, _):
        expected = logits(model, passes=1)
        monkeypatch.setattr(_native, "allocate", slowly)
        pool.resize(everything(model))
        assert logits(model, passes=1) == expected
        assert [len(layer.segments) for layer in slices_of(model)] == [PER_LAYER] * LAYERS


def test_a_pass_given_up_half_way_leaves_the_stream_usable(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        expected = logits(model)
        assert_settles(model, pool, [1, 0, 2], expected)
        for layers in (1, 2):
            left = iter([False] * layers + [True])
            with pytest.raises(Cancelled):
                every_logits(
                    model, TOKENS, SequenceState(KVLayout(model.config)), lambda left=left: next(left)
                )  # type: ignore[misc]
            assert logits(model) == expected


def test_a_damaged_record_is_a_typed_error_and_not_the_end(bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "bundle"
    damaged.mkdir()
    for file in bundle.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    victim = damaged / "neurons-00001.safetensors"
    good = victim.read_bytes()
    at = len(good) - 700
    with pooled(damaged) as (model, pool, _):
        expected = logits(model)
        for quota in ([0, 0, 0], [2, 2, 2], everything(model)):
            pool.resize([0, 0, 0])
            victim.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            pool.resize(quota)
            for _ in range(20):
                with pytest.raises(FlashReadError, match="neurons-00001"):
                    logits(model)
            victim.write_bytes(good)
            assert_settles(model, pool, quota, expected)


def test_closing_gives_every_byte_back_without_the_collector(bundle: Path) -> None:
    with pooled(bundle) as (model, pool, _):
        assert_settles(model, pool, everything(model), logits(model))
        layers = model.backend.feed_forwards  # type: ignore[attr-defined]
        watched = [weakref.ref(segment) for layer in layers for segment in layer.segments]
        assert len(watched) == 12
        gc.disable()
        try:
            pool.close()
            assert pool.nbytes == 0
            assert [segment() for segment in watched] == [None] * 12
        finally:
            gc.enable()
        with pytest.raises(OndeviceError, match="closed"):
            logits(model)


def test_no_memory_for_residency_is_no_error(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = _native.allocate

    def refuse(nbytes: int, populated: bool = False) -> Bytes:
        if populated:
            raise MemoryError(f"{nbytes} bytes")
        return allocate(nbytes)

    with pooled(bundle) as (model, pool, _):
        expected = logits(model)
        # Segments alone are refused.
        monkeypatch.setattr(_native, "allocate", refuse)
        pool.resize([4, 4, 4])
        assert [logits(model) for _ in range(5)] == [expected] * 5
        pool.resize([0, 0, 0])
        pool.close()
        assert pool.nbytes == 0
