"""Exact sparsity: only the neurons that fire are read and multiplied, and not one bit of the text changes."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.bundle.layout import DATA_OFFSET, gate_file_name, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.config import SamplingConfig
from ondevice.errors import BackendUnavailableError, FlashReadError, UnsupportedModelError
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.policies import POLICIES, PolicyName
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT, fetch_with, squeeze
from tests.support.flash_files import flip_byte

SHAPE = {"num_hidden_layers": 6, "intermediate_size": 3000, "hidden_act": "relu"}
TOKENS = 48


@pytest.fixture(scope="module")
def relu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "relu")


@pytest.fixture(scope="module")
def dense(relu_bundle: Path) -> Iterator[Model]:
    with load(relu_bundle, sparsity="dense") as model:
        yield model


def text(model: Model, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf}, **options).tokens


def hold(model: Model, ninths: int) -> None:
    """Keep the model to a part of the slots: from the fewest (0) to all of them (9)."""
    segment = model.plan.segment
    squeeze(model, (segment.total - segment.least) * ninths // 9)


def fetcher(model: Model) -> NeuronFetcher:
    neurons = model._engine._neurons
    assert isinstance(neurons, NeuronFetcher)
    return neurons


@pytest.mark.fast("relu-q4", "relu2-f16")
@pytest.mark.parametrize("quant", ["q4", "q8", "f16"])
@pytest.mark.parametrize("hidden_act", ["relu", "relu2"])
def test_logits_have_the_dense_bits(tmp_path: Path, quant: str, hidden_act: str) -> None:
    shape = {"hidden_act": hidden_act, "num_hidden_layers": 2}
    bundle = convert_bundle(
        write_chat_checkpoint(tmp_path / "checkpoint", **shape), tmp_path / "bundle", quant
    )
    tokens = np.random.default_rng(0).integers(0, 250, 100).tolist()
    with load(bundle, sparsity="dense") as model:
        expected = model.logits(tokens)
    for options in ({}, {"prefill_chunk": 1}, {"prefill_chunk": 7}, {"threads": 2}, {"io": "buffered"}):
        with load(bundle, sparsity="exact", **options) as model:
            assert model.logits(tokens).tobytes() == expected.tobytes(), options


@pytest.mark.parametrize(
    ("policies", "budgets", "others"),
    [
        (POLICIES[:2], (0, 9), (5,)),
        pytest.param(POLICIES, tuple(range(10)), (0, 5), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_no_budget_or_policy_changes_the_text(
    relu_bundle: Path,
    dense: Model,
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[PolicyName, ...],
    budgets: tuple[int, ...],
    others: tuple[int, ...],
) -> None:
    expected, sampled = text(dense), text(dense, temperature=0.9, seed=3)
    rates: dict[str, list[float]] = {}
    for policy in policies:
        fetch_with(monkeypatch, policy=policy)
        for ninths in budgets if policy == POLICIES[0] else others:
            with load(relu_bundle, sparsity="exact") as model:
                hold(model, ninths)
                response = model.generate(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf})
                assert response.tokens == expected, (policy, ninths)
                assert text(model, temperature=0.9, seed=3) == sampled, (policy, ninths)
                assert response.stats.sparsity == "exact"
                rates.setdefault(policy, []).append(response.stats.neuron_cache_hit_rate)
    # Residency really differs, lest the same pass be compared with itself.
    assert rates[POLICIES[0]][0] < 0.5
    assert rates[POLICIES[0]][-1] > 0.8
    assert rates[POLICIES[0]] == pytest.approx(sorted(rates[POLICIES[0]]), abs=0.02)


def test_a_budget_changed_while_running_changes_no_text(relu_bundle: Path, dense: Model) -> None:
    expected = text(dense)
    with load(relu_bundle, sparsity="exact") as model:
        tokens, held = [], []
        for index, event in enumerate(model.stream(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf})):
            tokens.append(event.token)
            if index % 10 == 5:
                hold(model, (0, 3, 9)[index // 10 % 3])
                held.append(fetcher(model).nbytes)
        assert tuple(token for token in tokens if token is not None) == expected
        assert len(set(held)) > 1


def test_only_what_fires_is_read(relu_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages for a record's up and down rows, and no record that was there."""
    fetch_with(monkeypatch, prefetch=False)
    with load(relu_bundle, sparsity="exact") as model:
        hold(model, 0)
        cache = fetcher(model)._cache
        text(model)
        before, lookups, hits = model._engine._reader.stats.bytes_read, cache.lookups, cache.hits
        text(model)
        read = model._engine._reader.stats.bytes_read - before
        missed = (cache.lookups - lookups) - (cache.hits - hits)
        stride = Bundle.open(relu_bundle).neuron_layouts[0].stride
    assert 0 < missed < cache.lookups - lookups
    assert read < missed * (stride + 2 * 4096)


def test_decoding_takes_no_memory(relu_bundle: Path) -> None:
    """Neurons come and go in slots that exist; what bookkeeping takes for a token, it gives back."""
    ours = [tracemalloc.Filter(True, f"*/ondevice/{folder}/*") for folder in ("sparsity", "flash", "kernels")]

    def held() -> int:
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)

    sampling = SamplingConfig(max_tokens=TOKENS, logit_bias=((EOS, -math.inf),))
    missed: list[int] = []
    slots, found = [], []
    with load(relu_bundle, sparsity="exact", speculation="off") as model:
        hold(model, 1)
        text(model)
        cache, prompt = fetcher(model)._cache, model.tokenizer.encode(PROMPT)

        def decode() -> None:
            # Where the work is done: between two tokens, nothing of a pass is there.
            for index, _ in enumerate(model._engine.generate(None, prompt, sampling, lambda: False)):
                if index in (10, 40):
                    missed.append(cache.lookups - cache.hits)
                    slots.append(cache._address)
                    found.append(held())

        tracemalloc.start()
        try:
            model._owner.call(decode)
        finally:
            tracemalloc.stop()
    grown = found[1] - found[0]
    assert missed[1] - missed[0] > TOKENS
    assert slots[0] is slots[1]
    # Lists of what is being read are longer at one time than at another; 30 rows of scores are 360,000 bytes.
    assert grown < 150_000, found


def test_auto_is_exact_where_it_fits_and_dense_below(relu_bundle: Path, chat_bundle: Path) -> None:
    exact, dense = (ondevice.inspect(relu_bundle, sparsity=mode) for mode in ("exact", "dense"))
    assert dense.minimum_budget_bytes < exact.minimum_budget_bytes
    assert ondevice.inspect(relu_bundle).sparsity == "exact"
    between = (dense.minimum_budget_bytes + exact.minimum_budget_bytes) // 2
    assert ondevice.inspect(relu_bundle, dram_budget=between).sparsity == "dense"
    assert ondevice.inspect(chat_bundle).sparsity == "dense"
    # Where all of the dense form fits, and not all of the other, no flash is better than little.
    assert dense.full_bytes < exact.full_bytes
    whole = max(dense.full_bytes, exact.minimum_budget_bytes) + (1 << 20)
    assert not ondevice.inspect(relu_bundle, dram_budget=whole).offloads_weights


def test_models_and_backends_that_cannot_are_refused(relu_bundle: Path, chat_bundle: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"silu gates.*It can have: dense"):
        load(chat_bundle, sparsity="exact")
    with pytest.raises(BackendUnavailableError, match='sparsity="dense"'):
        load(relu_bundle, sparsity="exact", backend="reference")
    with load(relu_bundle, backend="reference") as model:
        assert model.generate(PROMPT, max_tokens=1).stats.sparsity == "dense"


def test_damage_on_the_way_is_an_error_and_the_session_goes_on(
    relu_bundle: Path, dense: Model, tmp_path: Path
) -> None:
    bundle = copy_files(relu_bundle, tmp_path / "bundle")
    expected = text(dense)
    layout = Bundle.open(bundle).neuron_layouts[0]
    second_part = DATA_OFFSET + layout.part_offsets[1]
    with load(bundle, sparsity="exact") as model:
        hold(model, 2)
        cache = fetcher(model)._cache
        for record in range(0, 3000, 3):
            flip_byte(bundle / neuron_file_name(3), second_part + record * layout.stride)
        for _ in range(3):
            with pytest.raises(FlashReadError, match=neuron_file_name(3)):
                text(model)
            held = (cache._slots >= 0).sum() + sum(cache._reserved)
            assert held + cache._num_free == len(cache._owner)
        for record in range(0, 3000, 3):
            flip_byte(bundle / neuron_file_name(3), second_part + record * layout.stride)
        assert text(model) == expected


def test_a_damaged_gate_is_found_when_it_is_loaded(relu_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_files(relu_bundle, tmp_path / "bundle")
    flip_byte(bundle / gate_file_name(2), DATA_OFFSET + 70)
    with pytest.raises(FlashReadError, match=gate_file_name(2)):
        load(bundle, sparsity="exact")
    with load(bundle, sparsity="dense") as model:
        assert len(text(model)) == TOKENS


def test_closing_gives_everything_back(relu_bundle: Path) -> None:
    model = load(relu_bundle, sparsity="exact")
    text(model)
    neurons = fetcher(model)
    assert neurons.nbytes > 0
    model.close()
    assert neurons.nbytes == 0
