"""Threshold sparsity: small gates are left out, the rest is multiplied as ever; what that costs is told."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, inspect, load, verify
from ondevice.backends.base import Float32, Norm
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend, ReferenceFeedForward, activate
from ondevice.bundle.layout import DATA_OFFSET, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.bundle.thresholds import THRESHOLDS, Thresholds, importance_name
from ondevice.converters.training.thresholds import LayerThresholds, write_thresholds
from ondevice.errors import (
    BackendUnavailableError,
    BundleError,
    FlashReadError,
    OndeviceError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import FeedForwardSpec
from ondevice.sparsity import fetch
from ondevice.sparsity.fetch import NeuronFetcher
from ondevice.sparsity.policies import POLICIES
from ondevice.sparsity.prefetch import Prefetcher
from ondevice.training import train_thresholds
from tests.support.bundles import EOS, convert_bundle, copy_files, made_up_pieces, write_chat_checkpoint
from tests.support.chat import PROMPT, fetch_with, squeeze
from tests.support.command_line import Run
from tests.support.engines import every_logits
from tests.support.flash_files import flip_byte

SHAPE = {"num_hidden_layers": 3, "intermediate_size": 1000}
TOKENS = 40
PASSAGE = np.random.default_rng(1).integers(0, 250, 90).tolist()


@pytest.fixture(scope="module")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "plain")


@pytest.fixture(scope="module")
def bundle(plain_bundle: Path) -> Path:
    output = plain_bundle.with_name("thresholds")
    train_thresholds(plain_bundle, pieces=made_up_pieces(), output=output)
    return output


@pytest.fixture
def copied(bundle: Path, tmp_path: Path) -> Path:
    return copy_files(bundle, tmp_path / "copied")


def found_in(bundle: Path) -> Thresholds:
    found = Bundle.open(bundle).thresholds
    assert found is not None
    return found


def text(model: Model, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf}, **options).tokens


def with_thresholds(folder: Path, *values: float) -> None:
    """Write thresholds for every layer of the bundle in `folder`, one point each."""
    bundle = Bundle.open(folder)
    importance = np.random.default_rng(2).uniform(0.5, 1.5, bundle.config.intermediate_size)
    layer = LayerThresholds(importance.astype(np.float32), values, (0.5,) * len(values))
    targets = [(index + 1) / 10 for index in range(len(values))]
    write_thresholds(bundle, [layer] * bundle.config.num_layers, folder, targets, 0, 0)


def test_what_calibration_reports(bundle: Path, plain_bundle: Path) -> None:
    found = found_in(bundle)
    assert Bundle.open(plain_bundle).thresholds is None
    assert found.calibrated_tokens + found.measured_tokens == 8 * 128
    assert {0.25, 0.4, 0.5} < {point.sparsity for point in found.points}
    for point in found.points:
        assert len(point.thresholds) == SHAPE["num_hidden_layers"]
        assert point.skipped == pytest.approx([point.sparsity] * len(point.skipped), abs=0.03)
        assert point.perplexity is not None
    for layer in zip(*(point.thresholds for point in found.points), strict=True):
        assert list(layer) == sorted(set(layer))
    # Of random weights, thresholds can't cost perplexity; that they cost agreement is seen.
    assert found.perplexity is not None
    first, last = found.points[0], found.points[-1]
    assert (first.agreement or 0) > 0.5 > (last.agreement or 0)


@pytest.mark.parametrize("quant", ["q4", "q8", "f16"])
@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_where_everything_counts_logits_have_the_dense_bits(
    tmp_path: Path, quant: str, hidden_act: str
) -> None:
    shape = {"hidden_act": hidden_act, "num_hidden_layers": 2}
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", **shape)
    bundle = convert_bundle(checkpoint, tmp_path / "bundle", quant)
    with_thresholds(bundle, 0.0, 0.3)
    with load(bundle, sparsity="dense") as model:
        expected = model.logits(PASSAGE)
    for options in ({}, {"prefill_chunk": 1}, {"prefill_chunk": 7}):
        with load(bundle, sparsity="threshold", threshold_sparsity=0.1, **options) as model:
            assert model.logits(PASSAGE).tobytes() == expected.tobytes(), options
    with load(bundle, sparsity="threshold", threshold_sparsity=0.2) as model:
        assert model.logits(PASSAGE).tobytes() != expected.tobytes()


class MaskedReference(ReferenceBackend):
    """Multiplies every neuron, with zeros for gates that don't reach the threshold."""

    def __init__(self, importance: list[Float32], thresholds: tuple[float, ...]) -> None:
        self._cutoffs = list(zip(importance, thresholds, strict=True))
        self._layers: list[ReferenceFeedForward] = []

    def load_feed_forward(self, *arguments: Any) -> ReferenceFeedForward:
        self._layers.append(super().load_feed_forward(*arguments))
        return self._layers[-1]

    def feed_forward(
        self,
        x: Float32,
        weight: ReferenceFeedForward,
        spec: FeedForwardSpec,
        batch: ForwardBatch,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> Float32:
        assert norm is not None
        assert added is not None
        x = self.normed(x, norm)
        importance, threshold = self._cutoffs[next(i for i, w in enumerate(self._layers) if w is weight)]
        active = activate(x @ weight.gate.T, spec.activation)
        counts = np.abs(active) * importance > threshold
        self.share = counts.mean()
        product: Float32 = (np.where(counts, active, np.float32(0)) * (x @ weight.up.T)) @ weight.down
        return added + product


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_logits_are_those_of_masked_gates_in_float(tmp_path: Path, hidden_act: str) -> None:
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", hidden_act=hidden_act)
    folder = convert_bundle(checkpoint, tmp_path / "bundle", "f16")
    with_thresholds(folder, 0.3)
    bundle = Bundle.open(folder)
    with FlashReader(bundle_files(bundle, "threshold"), "buffered", 2) as reader:
        importance = []
        for layer in range(bundle.config.num_layers):
            span = bundle.tensor_span(importance_name(layer))
            data = (folder / THRESHOLDS).read_bytes()[span.offset : span.offset + span.nbytes]
            importance.append(np.frombuffer(data, np.float32))
        oracle = MaskedReference(importance, found_in(folder).points[0].thresholds)
        model = Transformer(bundle.config, oracle, load_weights(bundle, reader, oracle))
        expected = every_logits(model, PASSAGE, SequenceState(KVLayout(bundle.config, 16)))
    assert 0.2 < oracle.share < 0.8
    with load(folder, sparsity="threshold", threshold_sparsity=0.1) as cpu:
        logits = cpu.logits(PASSAGE)
    # A gate that lies within rounding of its threshold falls on either side, and later tokens see that.
    error = np.abs(logits - expected) / np.abs(expected).max()
    assert np.median(error) < 1e-5
    assert error.max() < 0.05


def test_what_does_not_count_adds_not_one_bit(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle, sparsity="threshold") as model:
        expected = model.logits(PASSAGE)

    def everything(scores: Float32) -> np.ndarray:
        return np.arange(scores.shape[1], dtype=np.int32)

    monkeypatch.setattr(fetch, "selected", everything)
    with load(bundle, sparsity="threshold") as model:
        assert model.logits(PASSAGE).tobytes() == expected.tobytes()


def test_so_many_neurons_are_multiplied(bundle: Path) -> None:
    """One token at a time, as a pass of several multiplies what any of them selects."""
    shares = []
    for sparsity in (0.25, 0.5, 0.9):
        with load(bundle, sparsity="threshold", threshold_sparsity=sparsity) as model:
            ends = {EOS: -math.inf}
            model.generate(tokens=PASSAGE[:1], max_tokens=100, temperature=1.0, seed=0, logit_bias=ends)
            neurons = model._engine._neurons
            assert isinstance(neurons, NeuronFetcher)
            shares.append(neurons.lookups / (100 * 3 * SHAPE["intermediate_size"]))
    assert shares == pytest.approx([0.75, 0.5, 0.1], abs=0.05)


def test_prefetches_know_the_thresholds(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth counts, where half of the gates are above zero."""
    shares: list[float] = []

    def seen(prefetcher: Prefetcher, layer: int, tokens: int, scores: Callable[[], Float32]) -> None:
        shares.append(float(np.mean(scores() > 0)))

    monkeypatch.setattr(Prefetcher, "prefetch", seen)
    with load(bundle, sparsity="threshold", threshold_sparsity=0.9) as model:
        text(model)
    assert len(shares) > TOKENS
    assert np.mean(shares) == pytest.approx(0.1, abs=0.06)


def test_one_text_however_the_prompt_is_split_and_whatever_the_budget(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(bundle, sparsity="threshold") as model:
        expected, sampled = text(model), text(model, temperature=0.9, seed=3)
        logits = model.logits(PASSAGE)
    for options in ({"prefill_chunk": 1}, {"prefill_chunk": 7}, {"prefill_chunk": 31}, {"threads": 2}):
        with load(bundle, sparsity="threshold", **options) as model:
            assert model.logits(PASSAGE).tobytes() == logits.tobytes(), options
    with load(bundle, sparsity="threshold", prefill_chunk=1) as model:
        assert text(model) == expected
    rates = []
    for policy in POLICIES:
        fetch_with(monkeypatch, policy=policy)
        for quarters in range(5) if policy == POLICIES[0] else (1,):
            with load(bundle, sparsity="threshold") as model:
                segment = model.plan.segment
                squeeze(model, (segment.total - segment.least) * quarters // 4)
                assert text(model) == expected, (policy, quarters)
                assert text(model, temperature=0.9, seed=3) == sampled, (policy, quarters)
                assert model.stats.sparsity == "threshold"
                rates.append(model.stats.neuron_cache_hit_rate)
    assert rates[0] < 0.7 < 0.95 < rates[4]


def test_auto_never_picks_it_and_what_is_not_there_is_refused(
    bundle: Path, plain_bundle: Path, tmp_path: Path
) -> None:
    assert inspect(bundle).sparsity == "dense"
    assert inspect(bundle, sparsity="threshold").sparsity == "threshold"
    with pytest.raises(UnsupportedModelError, match="ondevice train thresholds --model DIR --text FILE"):
        load(plain_bundle, sparsity="threshold")
    with pytest.raises(UnsupportedModelError, match=r"0\.42.*0\.25, 0\.4, 0\.5"):
        load(bundle, sparsity="threshold", threshold_sparsity=0.42)
    with pytest.raises(UsageError, match="threshold_sparsity"):
        load(bundle, sparsity="threshold", threshold_sparsity=0.0)
    with pytest.raises(BackendUnavailableError, match='sparsity="dense"'):
        load(bundle, sparsity="threshold", backend="reference")
    relu = write_chat_checkpoint(tmp_path / "checkpoint", hidden_act="relu")
    relu_bundle = convert_bundle(relu, tmp_path / "relu")
    with pytest.raises(UnsupportedModelError, match="exact"):
        load(relu_bundle, sparsity="threshold")
    with pytest.raises(UnsupportedModelError, match="exact"):
        train_thresholds(relu_bundle, pieces=made_up_pieces(), output=tmp_path / "a")
    with pytest.raises(UsageError, match="128 tokens in 1 pieces"):
        train_thresholds(plain_bundle, pieces=made_up_pieces(1), output=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_damage_is_found(copied: Path) -> None:
    flip_byte(copied / THRESHOLDS, 9000)
    for refused in (lambda: load(copied, sparsity="threshold"), lambda: verify(copied)):
        with pytest.raises(BundleError, match=f"{THRESHOLDS}.*CRC32C; `ondevice train thresholds"):
            refused()
    with load(copied) as model:
        assert len(text(model)) == TOKENS
    flip_byte(copied / THRESHOLDS, 9000)
    assert THRESHOLDS in dict(verify(copied).files)
    flip_byte(copied / THRESHOLDS, 100)
    with pytest.raises(BundleError, match=THRESHOLDS):
        load(copied, sparsity="threshold")
    flip_byte(copied / THRESHOLDS, 100)
    os.truncate(copied / THRESHOLDS, 5000)
    with pytest.raises(BundleError, match="every sparsity but `threshold` runs without"):
        load(copied, sparsity="threshold")
    (copied / THRESHOLDS).unlink()
    with pytest.raises(BundleError, match="missing"):
        load(copied, sparsity="threshold")


def test_a_damaged_gate_is_found_when_it_is_loaded(copied: Path) -> None:
    flip_byte(copied / neuron_file_name(2), DATA_OFFSET + 70)
    with pytest.raises(FlashReadError, match=neuron_file_name(2)):
        load(copied, sparsity="threshold")


@pytest.fixture
def failing(copied: Path) -> Iterator[tuple[Model, Path]]:
    with load(copied, sparsity="threshold") as model:
        squeeze(model, 0)
        yield model, copied / neuron_file_name(1)


def test_reads_that_fail_are_errors_and_the_session_goes_on(failing: tuple[Model, Path]) -> None:
    model, path = failing
    expected = text(model)
    sound = path.read_bytes()
    path.write_bytes(sound[:4096] + bytes(len(sound) - 4096))
    with pytest.raises(FlashReadError, match=path.name):
        text(model)
    path.write_bytes(sound)
    assert text(model) == expected


def test_the_command_trains_and_the_mode_runs(ondevice: Run, plain_bundle: Path, tmp_path: Path) -> None:
    words = np.random.default_rng(2).integers(97, 122, 4000).astype(np.uint8).tobytes()
    (tmp_path / "text").write_bytes(words.replace(b"e", b" "))
    output = tmp_path / "trained"
    arguments = ("train", "thresholds", "-m", plain_bundle, "--text", tmp_path / "text")
    shown = ondevice(*arguments, "-o", output, "--tokens", 2000, "--json")
    assert shown.code == 0, shown.err
    assert shown.json["points"][2]["sparsity"] == 0.5
    assert shown.json["points"][2]["skipped"] == list(found_in(output).points[2].skipped)
    assert not {"crcs", "sha256", "model"} & shown.json.keys()
    options = ("-m", output, "--sparsity", "threshold", "--threshold-sparsity", 0.4)
    made = ondevice("generate", *options, "-p", "hello", "--max-tokens", 4, "--json")
    assert made.code == 0, made.err
    assert made.json["stats"]["sparsity"] == "threshold"
    assert "threshold yes: " in ondevice("inspect", *options).out
    again = ondevice(*arguments, "-o", output)
    assert again.code == 2
    assert "exists" in again.err
    table = ondevice(*arguments, "-o", tmp_path / "other", "--tokens", 2000).out
    assert "dense" in table.splitlines()[-1]
    assert len(table.splitlines()) == 3 + len(found_in(output).points)


def test_a_failure_leaves_no_half_made_copy(
    plain_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ondevice.converters.training import thresholds

    def refuse(*arguments: object) -> None:
        raise OndeviceError("no disk today")

    monkeypatch.setattr(thresholds, "record_inputs", refuse)
    with pytest.raises(OndeviceError, match="today"):
        train_thresholds(plain_bundle, pieces=made_up_pieces(), output=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_a_trained_model_loses(stories_bundle: Path, tmp_path: Path) -> None:
    """stories260K on text of its own. Its neurons are few, and all at work: a 7B loses less."""
    with load(stories_bundle) as model:
        pieces = [
            [1, *model.generate(tokens=[1], max_tokens=255, temperature=1.0, seed=seed).tokens]
            for seed in range(10)
        ]
    found = train_thresholds(stories_bundle, pieces=pieces, output=tmp_path / "trained")
    dense = found.perplexity or math.inf
    costs = {point.sparsity: (point.perplexity or math.inf) / dense - 1 for point in found.points}
    assert costs[0.25] < 0.06
    assert costs[0.4] < 0.15
    assert costs[0.5] < 0.35
    assert min(point.agreement or 0 for point in found.points if point.sparsity <= 0.4) > 0.75
