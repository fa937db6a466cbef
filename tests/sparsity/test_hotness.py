"""Hotness: what is counted, that it changes reads and no text, and what damaged or foreign files give."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load, verify
from ondevice.backends.base import Float32, Int32
from ondevice.bundle.files import write_durably
from ondevice.bundle.hotness import HOTNESS, HOTNESS_MANIFEST, Hotness, hotness_layout, hotness_text
from ondevice.bundle.layout import DATA_OFFSET, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.converters.training.activations import observe_gates, record_activations
from ondevice.converters.training.hotness import firing_frequencies, write_hotness
from ondevice.errors import BundleError, FlashReadError
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.neuron_cache import Addresses
from ondevice.sparsity.record_reads import RecordReads
from ondevice.sparsity.reserved_reads import Reservation, ReservedReads
from tests.support.bundles import EOS, convert_bundle, copy_files, open_sound, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.flash_files import flip_byte

LAYERS, NEURONS, TOKENS = 3, 1000, 40
SHAPE = {"num_hidden_layers": LAYERS, "intermediate_size": NEURONS, "hidden_act": "relu"}
PIECES = np.random.default_rng(5).integers(0, 250, (3, 100)).tolist()
COUNTED = 250


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "plain")


@pytest.fixture(scope="module")
def hot_bundle(plain_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with hotness."""
    folder = copy_files(plain_bundle, plain_bundle.with_name("hot"))
    opened = Bundle.open(folder)
    recorded = tmp_path_factory.mktemp("recorded")
    frequencies = firing_frequencies(record_activations(opened, PIECES, recorded), opened.config, COUNTED)
    write_hotness(opened, frequencies, COUNTED, folder)
    return folder


@pytest.fixture
def bundle(hot_bundle: Path, tmp_path: Path) -> Path:
    """A copy with hotness, which a test may change."""
    return copy_files(hot_bundle, tmp_path / "hot")


def text(model: Model) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf}).tokens


def known(folder: Path) -> Hotness:
    hotness = Bundle.open(folder).hotness
    assert hotness is not None
    return hotness


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def fetcher(model: Model) -> NeuronFetcher:
    neurons = model._engine._neurons
    assert isinstance(neurons, NeuronFetcher)
    return neurons


def is_full(model: Model) -> bool:
    """Whether every layer has its share, asked on the thread that fills."""
    cache = fetcher(model)._cache
    return model._owner.call(lambda: cache._counts == cache._shares)


def test_it_is_the_share_of_tokens_that_fire(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    fired = [np.zeros((0, NEURONS), dtype=bool)] * LAYERS

    def observe(layer: int, x: Float32, gates: Float32) -> None:
        fired[layer] = np.concatenate([fired[layer], gates > 0])

    observe_gates(opened, PIECES, observe)
    expected = np.stack([layer[:COUNTED].mean(axis=0) for layer in fired])
    assert known(bundle).tokens == COUNTED
    found = opened.frequencies()
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=5e-4)
    assert (HOTNESS, (bundle / HOTNESS).stat().st_size) in verify(bundle).files


def test_the_hottest_are_read_before_anything_is_asked(bundle: Path, plain_bundle: Path) -> None:
    frequencies = Bundle.open(bundle).frequencies()
    assert frequencies is not None
    with load(bundle, sparsity="exact") as model:
        squeeze(model, model.plan.segment.total // 3)
        wait_until(lambda: is_full(model))
        cache = fetcher(model)._cache
        assert 0 < cache.nbytes <= model.plan.segments_for(0) * model.plan.segment.nbytes
        shares = cache._shares
        assert len(set(shares)) == LAYERS
        for layer in range(LAYERS):
            held = np.flatnonzero(cache._slot_of[layer] >= 0)
            coldest_held = np.sort(frequencies[layer])[::-1][shares[layer] - 1]
            assert len(held) == shares[layer]
            assert frequencies[layer][held].min() == coldest_held
        # What is full reads no more.
        read = model._engine._reader.stats.bytes_read
        time.sleep(0.1)
        assert model._engine._reader.stats.bytes_read == read
    with load(plain_bundle, sparsity="exact") as model:
        read = model._engine._reader.stats.bytes_read
        time.sleep(0.1)
        assert model._engine._reader.stats.bytes_read == read


def test_no_text_depends_on_it(bundle: Path, plain_bundle: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 250, 90).tolist()
    with load(plain_bundle, sparsity="dense") as model:
        expected, logits = text(model), model.logits(tokens).tobytes()
    for folder in (bundle, plain_bundle):
        for quarters in (0, 1, 3):
            with load(folder, sparsity="exact") as model:
                segment = model.plan.segment
                squeeze(model, (segment.total - segment.least) * quarters // 4)
                if folder is bundle and quarters % 2:
                    wait_until(lambda: is_full(model))
                assert text(model) == expected, (folder, quarters)
                assert model.logits(tokens).tobytes() == logits, (folder, quarters)


def test_more_of_the_first_pass_is_in_memory(bundle: Path, plain_bundle: Path) -> None:
    rates = []
    for folder in (plain_bundle, bundle):
        with load(folder, sparsity="exact") as model:
            squeeze(model, model.plan.segment.total // 2)
            if folder is bundle:
                wait_until(lambda: is_full(model))
            rates.append(model.generate(PROMPT, max_tokens=1).stats.neuron_cache_hit_rate)
    assert rates[0] == 0
    assert rates[1] > 0.3


def test_a_long_chunk_reads_no_record_twice(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does what is filled ahead read one that the chunk reads."""
    read: list[tuple[int, int]] = []

    def ahead(
        self: ReservedReads, file: int, layer: int, ids: Int32, once: Any = ReservedReads.begin
    ) -> Reservation | None:
        read.extend((file, int(record)) for record in ids)
        reservation: Reservation | None = once(self, file, layer, ids)
        return reservation

    def asked(
        self: RecordReads, file: int, ids: Int32, addresses: Addresses, once: Any = RecordReads.start
    ) -> None:
        read.extend((file, int(record)) for record in ids)
        once(self, file, ids, addresses)

    monkeypatch.setattr(ReservedReads, "begin", ahead)
    monkeypatch.setattr(RecordReads, "start", asked)
    monkeypatch.setattr(NeuronFetcher, "fill", lambda self: False)
    tokens = np.random.default_rng(1).integers(0, 250, 90).tolist()
    for cached in (0.1, 0.5):
        with load(bundle, sparsity="exact") as model:
            squeeze(model, int(model.plan.segment.total * cached))
            for chunk in (tokens, tokens[::-1]):
                read.clear()
                model.generate(tokens=chunk, max_tokens=1)
                assert len(read) > 100
                assert len(read) == len(set(read))


def test_reads_that_fail_end_the_filling_and_are_told_to_who_asks(bundle: Path) -> None:
    with load(bundle, sparsity="dense") as model:
        expected = text(model)
    stride = Bundle.open(bundle).neuron_layouts[0].stride
    places = [DATA_OFFSET + (record + 1) * stride - 70 for record in range(0, NEURONS, 2)]
    for layer in range(LAYERS):
        for place in places:
            flip_byte(bundle / neuron_file_name(layer), place)
    with load(bundle, sparsity="exact") as model:
        before = model._engine._reader.stats.bytes_read
        wait_until(lambda: model._engine._reader.stats.bytes_read > before)
        wait_until(lambda: not fetcher(model)._warm_up.under_way)
        read = model._engine._reader.stats.bytes_read
        time.sleep(0.1)
        assert model._engine._reader.stats.bytes_read == read
        with pytest.raises(FlashReadError, match="neurons-"):
            text(model)
        for layer in range(LAYERS):
            for place in places:
                flip_byte(bundle / neuron_file_name(layer), place)
        assert text(model) == expected


def test_damage_is_told_and_gone_without(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_byte(bundle / HOTNESS, DATA_OFFSET + 100)
    with pytest.raises(BundleError, match=f"{HOTNESS} doesn't match its sha256.*train predictors"):
        verify(bundle)
    for damage in (lambda: None, lambda: os.truncate(bundle / HOTNESS, 5000)):
        damage()
        with load(bundle, sparsity="exact") as model:
            assert len(text(model)) == TOKENS
        assert HOTNESS in caplog.text
        caplog.clear()
        with load(bundle, sparsity="dense") as model:
            assert len(text(model)) == TOKENS
        assert caplog.text == ""
    (bundle / HOTNESS).unlink()
    with pytest.raises(BundleError, match=f"{HOTNESS} is missing"):
        open_sound(bundle)
    (bundle / HOTNESS_MANIFEST).unlink()
    assert Bundle.open(bundle).hotness is None


@pytest.mark.parametrize("value", [-0.01, 1.01, np.nan, np.inf])
def test_values_that_are_no_shares_are_refused(bundle: Path, value: float) -> None:
    frequencies = np.zeros((LAYERS, NEURONS), "<f2")
    frequencies[1, 7] = value
    data = hotness_layout(Bundle.open(bundle).config).header + frequencies.tobytes()
    hotness = replace(known(bundle), sha256=hashlib.sha256(data).hexdigest())
    write_durably(bundle / HOTNESS, data)
    write_durably(bundle / HOTNESS_MANIFEST, hotness_text(hotness))
    with pytest.raises(BundleError, match="share from 0 to 1"):
        open_sound(bundle)
    with pytest.raises(ValueError, match="shares"):
        write_hotness(Bundle.open(bundle), frequencies.astype(np.float32), 1, bundle)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"model": "0" * 64}, "other weights"), ({"tokens": 0}, "tokens"), ({"sha256": ""}, "sha256")],
)
def test_what_the_json_file_may_not_say(bundle: Path, changes: dict[str, object], match: str) -> None:
    write_durably(bundle / HOTNESS_MANIFEST, hotness_text(replace(known(bundle), **changes)))
    with pytest.raises(BundleError, match=match):
        open_sound(bundle)


def test_an_edit_without_its_hash_is_refused(bundle: Path) -> None:
    path = bundle / HOTNESS_MANIFEST
    document = json.loads(path.read_text())
    document["hotness"]["tokens"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(BundleError, match="damaged or edited"):
        open_sound(bundle)
