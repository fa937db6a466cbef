"""Predictors that MLX fits are those that numpy fits, but for what float32 rounds."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.reference import ReferenceBackend
from ondevice.bundle.predictors import OperatingPoint, Predictors
from ondevice.bundle.reader import Bundle
from ondevice.converters.training import activations
from ondevice.converters.training.activations import record_activations
from ondevice.converters.training.predictors import train
from ondevice.converters.training.predictors.arrays import NumpyArrays
from ondevice.converters.training.predictors.fine_tune import gradients
from ondevice.converters.training.predictors.low_rank import principal_components
from ondevice.converters.training.predictors.mlx_arrays import MlxArrays
from ondevice.errors import BackendUnavailableError
from ondevice.model.sequence_state import SequenceState
from ondevice.runtime import backend_choice
from ondevice.training import quality, train_predictors
from tests.support.bundles import convert_bundle, made_up_pieces, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.engines import running
from tests.support.planted import CONFIG, NEURONS, NUMPY, RANK, SAMPLES, WIDTH, Planted, tuning

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")
MLX = MlxArrays()
FIELDS = ("down", "up", "bias")
LAYERS, WHOLE = 2, 300
SHAPE = {"num_hidden_layers": LAYERS, "intermediate_size": WHOLE, "hidden_act": "relu"}


class DoubleArrays(NumpyArrays):
    """numpy's in float64: what float32 would be without rounding."""

    def load(self, values: np.ndarray) -> Any:
        return values.astype(np.float64) if values.dtype == np.float32 else values


@pytest.fixture(scope="module")
def noisy() -> Planted:
    return Planted(noise=0.15)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "plain")


def error(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest, in root mean squares of what is exact."""
    return float(np.abs(found - exact).max() / np.sqrt(np.mean(np.square(exact))))


def test_gradients_are_those_of_numpy() -> None:
    rng = np.random.default_rng(4)
    shapes = (RANK, WIDTH), (NEURONS, RANK), (NEURONS,), (50, WIDTH)
    down, up, bias, x = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    bias[:3] = 100, -100, 1e30
    y, weights = rng.random((50, NEURONS)) < 0.3, rng.uniform(0.5, 5, (50, NEURONS)).astype(np.float32)
    double, found = (
        gradients(arrays, *_loaded(arrays, down, up, bias, x, y, weights)) for arrays in (DoubleArrays(), MLX)
    )
    for exact, slope in zip(double, found, strict=True):
        assert error(np.array(slope), exact) < 1e-5


def _loaded(arrays: Any, *values: np.ndarray) -> tuple[Any, ...]:
    down, up, bias, *samples = (arrays.load(value) for value in values)
    return (down, up, bias), *samples


def test_principal_components_are_those_of_numpy(noisy: Planted) -> None:
    """But for the signs of a direction, which cancel in the scores."""
    found, expected = (
        principal_components(
            noisy.inputs, np.arange(SAMPLES), noisy.gate, [2, RANK], np.random.default_rng(0), arrays
        )
        for arrays in (MLX, NUMPY)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.up.dtype == one.down.dtype == one.bias.dtype == np.float32
        assert error(one.scores(noisy.fresh), other.scores(noisy.fresh)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("weigh_magnitude", [True, False])
def test_steps_from_one_beginning_go_where_numpy_goes(noisy: Planted, weigh_magnitude: bool) -> None:
    """Four epochs of 43 steps, after which either is as far from float64 as the other."""
    config = replace(CONFIG, weigh_magnitude=weigh_magnitude)
    ran = []
    for arrays in (DoubleArrays(), NUMPY, MLX):
        run = tuning(noisy, [2, RANK], config, arrays)
        before = [predictor.up.copy() for predictor in run.predictors]
        for epoch in range(4):
            run.epoch()
            if epoch == 2:
                run.keep(RANK)
        ran.append(run.predictors)
        assert error(before[-1], run.predictors[-1].up) > 0.1
    for exact, ours, theirs in zip(*ran, strict=True):
        assert exact.rank == RANK
        for field in FIELDS:
            rounded = error(getattr(ours, field), getattr(exact, field))
            assert error(getattr(theirs, field), getattr(exact, field)) < max(1e-5, 4 * rounded) < 1e-4


@pytest.mark.slow
def test_a_planted_rule_is_found_as_well(noisy: Planted) -> None:
    ours, theirs = (noisy.train(RANK, arrays=arrays) for arrays in (NUMPY, MLX))
    assert theirs.rank == ours.rank
    for one, other in zip(ours.points, theirs.points, strict=True):
        assert other.false_negatives == pytest.approx(one.false_negatives, abs=0.002)
        assert other.selected == pytest.approx(one.selected, rel=0.01)


@pytest.mark.parametrize("piece_neurons", [pytest.param(None, marks=pytest.mark.slow), 128])
def test_what_is_observed_is_that_of_the_oracle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_neurons: int | None
) -> None:
    """Pieces of text longer than a chunk, and neurons that come whole or in parts."""
    opened, pieces = Bundle.open(bundle), np.random.default_rng(3).integers(0, 250, (2, 300)).tolist()
    if piece_neurons is not None:
        monkeypatch.setitem(activations.STREAM_BYTES, "mlx", piece_neurons * opened.neuron_layouts[0].stride)
    record = record_activations(opened, pieces, tmp_path, backend="mlx")
    assert record.tokens == 600
    for layer, (x, gates) in enumerate(expected_of(bundle, pieces, monkeypatch)):
        found = np.array(record.inputs(layer), np.float32)
        assert found.shape == x.shape
        assert np.abs(found - x).max() < 5e-3
        fired = np.unpackbits(record.fired(layer), axis=1, count=WHOLE).view(np.bool_)
        assert 0.3 < fired.mean() < 0.7
        assert np.abs(gates[fired != (gates > 0)]).max(initial=0) < 5e-3
        assert (fired == (gates > 0)).mean() > 0.998


def expected_of(
    bundle: Path, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Layer by layer, what plain numpy makes of the pieces: what gates multiply (N, D), and gates (N, F)."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def feed_forward(
        self: ReferenceBackend, x: Any, weight: Any, activation: Any, batch: Any, norm: Any, added: Any
    ) -> Any:
        normed = self.normed(x, norm)
        seen.append((normed, normed @ weight.gate.T))
        return plain(self, x, weight, activation, batch, norm, added)

    plain = ReferenceBackend.feed_forward
    monkeypatch.setattr(ReferenceBackend, "feed_forward", feed_forward)
    with running(bundle) as model:
        for piece in pieces:
            model.hidden_states(piece, SequenceState(KVLayout(model.config, 16)))
    for layer in range(LAYERS):
        parts = seen[layer::LAYERS]
        yield np.concatenate([x for x, _ in parts]), np.concatenate([gates for _, gates in parts])


def cost(found: Predictors, point: OperatingPoint) -> float:
    """In nats per token, beside the dense model on the same backend."""
    assert found.perplexity is not None
    assert point.perplexity is not None
    return math.log(point.perplexity / found.perplexity)


@pytest.mark.slow
def test_a_whole_training_ends_at_the_same_held_out_figures(bundle: Path, tmp_path: Path) -> None:
    ours, theirs = (
        train_predictors(bundle, pieces=made_up_pieces(), output=tmp_path / name, backend=name)
        for name in ("cpu", "mlx")
    )
    assert theirs.ranks == ours.ranks
    assert theirs.sha256 != ours.sha256
    for one, other in zip(ours.points, theirs.points, strict=True):
        assert mean(other.false_negatives) == pytest.approx(mean(one.false_negatives), abs=0.01)
        assert mean(other.selected) == pytest.approx(mean(one.selected), rel=0.02)
        # Perplexities of a random model on a few tokens: single neurons move them by a few hundredths.
        assert cost(theirs, other) == pytest.approx(cost(ours, one), abs=0.05)


def test_the_backend_that_is_asked_for_runs_fits_and_measures(
    ondevice: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def noted(name: str, called: Any, *given: Any, **options: Any) -> Any:
        asked.append((name, options.get("backend") or given[0]))
        return called(*given, **options)

    for module, name in ((activations, "record_activations"), (train, "arrays_of"), (quality, "load")):
        monkeypatch.setattr(module, name, partial(noted, name, getattr(module, name)))
    (tmp_path / "text").write_text(400 * "the quick fox ")
    command = ("train", "predictors", "-m", bundle, "--text", tmp_path / "text", "--tokens", "600")
    shown = ondevice(*command, "-o", tmp_path / "made", "--backend", "mlx", "--json")
    assert shown.code == 0, shown.err
    assert set(asked) == {("record_activations", "mlx"), ("arrays_of", "mlx"), ("load", "mlx")}
    refused = ondevice(*command, "-o", tmp_path / "other", "--backend", "cuda")
    assert refused.code == 2
    assert "'auto', 'cpu', 'mlx'." in refused.err


def test_what_cannot_train_is_refused_before_anything_is_written(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"pieces": made_up_pieces(), "output": tmp_path / "a"}
    with pytest.raises(BackendUnavailableError, match="cpu or mlx"):
        train_predictors(bundle, **given, backend="reference")
    monkeypatch.setattr(backend_choice, "has_mlx", lambda: False)
    with pytest.raises(BackendUnavailableError, match=r"ondevice\[mlx\]"):
        train_predictors(bundle, **given, backend="mlx")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_on_the_cpu_nothing_imports_mlx(bundle: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from ondevice.training import train_predictors\n"
        "from tests.support.bundles import made_up_pieces\n"
        f"train_predictors({str(bundle)!r}, pieces=made_up_pieces(), output={str(tmp_path / 'a')!r}, "
        "backend='cpu')\n"
        "assert 'ondevice.converters.training.predictors.arrays' in sys.modules\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'mlx']\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
