"""Training for feed-forwards that aren't gated or have a threshold: order, predictors, and what the modes
then make of them."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load, verify
from ondevice.bundle.layout import gate_bias_name
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.converters.training.predictors.train import save_predictors
from ondevice.training import train_predictors
from tests.converters.test_relu_families import FatRelu, activations
from tests.sparsity.test_predicted import with_offsets
from tests.support.bundles import copy_files, made_up_pieces
from tests.support.chat import squeeze
from tests.support.families import OPT, write_model

pytest.importorskip("transformers")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPT", {**OPT, "ffn_dim": 700, "max_position_embeddings": 256}),
    "gelu": (
        "OPT",
        {**OPT, "ffn_dim": 700, "max_position_embeddings": 256, "activation_function": "gelu"},
    ),
    "prosparse": ("Llama", {"hidden_act": "fatrelu", "hidden_act_param": 0.2, "intermediate_size": 700}),
}
TEXT = np.random.default_rng(0).integers(0, 250, 60).tolist()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ungated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(activations.ACT2FN, "fatrelu", (FatRelu, {"least": 0.2}))
        for name, (family, options) in MODELS.items():
            write_model(folder / "source" / name, family, options)
    return {name: convert(folder / "source" / name, folder / name, "q8") for name in MODELS}


def predictors_of(folder: Path) -> Predictors:
    found = Bundle.open(folder).predictors
    assert found is not None
    return found


def biases(folder: Path) -> np.ndarray:
    bundle = Bundle.open(folder)
    span = bundle.tensor_span(gate_bias_name(1))
    return np.fromfile(folder / "resident.safetensors", np.float32, span.nbytes // 4, offset=span.offset)


def logits(folder: Path, **options: Any) -> np.ndarray:
    with load(folder, **options) as model:
        return model.logits(TEXT)


def check_same_function(folder: Path, expected: np.ndarray) -> None:
    found = logits(folder, backend="reference")
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def check_modes(model: Model, expected: np.ndarray) -> None:
    """However little memory there is, and however the text is split."""
    assert model.logits(TEXT).tobytes() == expected.tobytes()
    squeeze(model)
    assert model.logits(TEXT).tobytes() == expected.tobytes()


@pytest.mark.fast("opt")
@pytest.mark.parametrize("name", ["opt", "prosparse"])
def test_predictors_and_neuron_order_work_without_gates(
    bundles: dict[str, Path], tmp_path: Path, name: str
) -> None:
    plain, folder = logits(bundles[name], backend="reference"), copy_files(bundles[name], tmp_path / "b")
    trained = train_predictors(folder, pieces=made_up_pieces(6), order=True)
    assert verify(folder)
    if name == "opt":
        before, after = biases(bundles[name]), biases(folder)
        assert (before != after).any()
        np.testing.assert_array_equal(np.sort(before), np.sort(after))
    check_same_function(folder, plain)
    best = trained.points[-1]
    assert 0 < mean(best.false_negatives) < 1.5 * (1 - best.recall)
    assert mean(best.selected) < 0.95
    assert best.perplexity == pytest.approx(trained.perplexity, rel=0.2)
    dense = logits(folder, sparsity="dense")
    assert logits(folder, sparsity="exact").tobytes() == dense.tobytes()
    with load(folder, sparsity="predicted", predictor_recall=0.9) as model:
        assert model.logits(TEXT).tobytes() != dense.tobytes()
        check_modes(model, model.logits(TEXT))
    # Everything selected: rows of whole records, and biases by neuron.
    save_predictors(with_offsets(trained, 1e6), folder)
    with load(folder, sparsity="predicted", predictor_recall=0.9) as model:
        check_modes(model, dense)


@pytest.mark.fast("opt")
@pytest.mark.parametrize("name", ["opt", "prosparse"])
def test_mlx_has_the_same_modes(bundles: dict[str, Path], name: str) -> None:
    """Exact mode has the bits of dense, whatever is in memory; both are near the reference."""
    pytest.importorskip("mlx.core")
    expected = logits(bundles[name], backend="reference")
    plain: dict[str, Any] = {"backend": "mlx", "speculation": "off"}
    dense = logits(bundles[name], sparsity="dense", **plain)
    # With fatrelu, a gate that rounding moves over the threshold adds a step.
    assert np.abs(dense - expected).max() < (1e-3 if name == "opt" else 0.05) * np.abs(expected).max()
    for mode in ("dense", "exact"):
        with load(bundles[name], sparsity=mode, **plain) as model:
            check_modes(model, dense)
