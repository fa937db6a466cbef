"""What a text teaches models with blocks that few have: Gemma 3n, Gemma 4, and the E models of Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.backends.cpu import make_runner
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.reference import ReferenceBackend, activate
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.converters.quantize import to_float32
from ondevice.converters.rounding import layers
from ondevice.converters.rounding.feedback import Inputs
from ondevice.converters.rounding.layers import LayerRounding
from ondevice.converters.training.sidecars import check_streams_possible
from ondevice.errors import UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.training import train_predictors
from tests.converters.test_rounding import by_text, logits
from tests.support.bundles import VOCAB_SIZE, made_up_pieces, write_byte_tokenizer
from tests.support.chat import squeeze
from tests.support.engines import error, random_tokens
from tests.support.trained_conversion import convert_and_train

pytest.importorskip("transformers")
pytest.importorskip("torch")

CASES = ("gemma3n", "gemma4", "gemma4 e")
TEXT = "".join(chr(97 + int(it)) for it in np.random.default_rng(2).integers(0, 20, 1500))


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `source`, which has a tokenizer, and the bundle `f16`."""
    from tests.support import families

    folder = tmp_path_factory.mktemp("blocks")
    family, options = families.CASES[request.param]
    families.write_model(folder / "source", family, {**options, "vocab_size": VOCAB_SIZE})
    write_byte_tokenizer(folder / "source")
    convert(folder / "source", folder / "f16", "f16")
    return folder


class Recording(ReferenceBackend):
    """The reference backend, which keeps what each matrix and each feed-forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, np.ndarray] = {}

    def linear(self, x: Any, weight: Any, norm: Any = None, added: Any = None) -> Any:
        self.inputs[id(weight)] = x.copy() if norm is None else self.normed(x, norm)
        return super().linear(x, weight, norm, added)

    def feed_forward(
        self, x: Any, weight: Any, spec: Any, batch: Any, norm: Any = None, added: Any = None
    ) -> Any:
        self.inputs[id(weight)] = self.normed(x, norm)
        return super().feed_forward(x, weight, spec, batch, norm, added)


@contextmanager
def recorded(folder: Path, text: list[int]) -> Iterator[tuple[Transformer, dict[int, np.ndarray]]]:
    """The model, run over the text by `reference`, and the inputs by what they were given to."""
    bundle = Bundle.open(folder)
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        backend = Recording()
        model = Transformer(bundle.config, backend, load_weights(bundle, reader, backend))
        model.hidden_states(text, SequenceState(KVLayout(bundle.config, 32)))
        yield model, backend.inputs


def values_of(inputs: Inputs) -> np.ndarray:
    return np.concatenate([codes * scales for codes, scales in inputs._chunks])[:40]


def test_a_text_meets_the_inputs_that_the_model_multiplies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every matrix of every layer: what `reference` multiplies, and for down rows a sum in float64.

    In chunks, and with another piece behind, whose keys are others. `reference` has keys of 32 bits.
    """
    monkeypatch.setattr(layers, "CHUNK_TOKENS", 16)
    checkpoint = open_checkpoint(folder / "source")
    config, text = checkpoint.config, random_tokens(checkpoint.config, 40)
    pieces = [text, text[:20][::-1]]
    rounding = LayerRounding(checkpoint, QuantConfig(), pieces, make_runner(1), lambda step: None)
    with recorded(folder / "f16", text) as (model, theirs):
        for layer, weights in enumerate(model.weights.layers):
            mine = rounding.run(layer)
            entering = theirs[id(weights.feed_forward)]
            expected = {"qkv": weights.qkv, "out": weights.out, "gate": weights.feed_forward}
            if weights.laurel is not None:
                expected["laurel.up"] = weights.laurel.up
                assert np.array_equal(theirs[id(weights.laurel.down)], theirs[id(weights.qkv)])
            if weights.per_layer is not None:
                expected |= {"per_layer.gate": weights.per_layer.gate, "per_layer.out": weights.per_layer.out}
            if not layer and model.weights.per_layer is not None:
                expected["embedded"] = model.weights.per_layer.projection
            assert mine.keys() == {*expected, "down"}
            for name, weight in expected.items():
                assert error(values_of(mine[name]), theirs[id(weight)]) < 1e-2, (layer, name)
            down = hidden_of(checkpoint.tensors, config.layers[layer].feed_forward, layer, entering)
            assert error(values_of(mine["down"]), down) < 1e-2, layer
    checkpoint.close()


def hidden_of(tensors: Any, spec: Any, layer: int, x: np.ndarray) -> np.ndarray:
    """What the down projection multiplies, for inputs x of the gates."""
    name = LayerNames(layer)
    found = [tensors[matrix] for matrix in (name.gate, name.up)]
    gate, up = (to_float32(tensor.rows(0, tensor.shape[0])).astype(np.float64) for tensor in found)
    gates = x @ gate.T
    if spec.cutoff is not None:
        least = gates.mean(axis=1, keepdims=True) + spec.cutoff * gates.std(axis=1, keepdims=True)
        gates = np.maximum(gates - least, 0)
    return activate(gates, spec.activation) * (x @ up.T)


@pytest.mark.slow
def test_other_text_loses_less_than_by_least_squares(folder: Path) -> None:
    """In logits, and in the KL divergence of what the rounded model says from what the model says.

    Random models of many blocks turn small errors into large ones, so half of the errors stays half of
    them only in each product.
    """
    exact, squares, divergences = logits(folder / "f16"), [], []
    by_a_text = by_text(folder / "source", folder / "by text")
    for bundle in (by_a_text, convert(folder / "source", folder / "plain", "q4")):
        found, shares = logits(bundle), log_softmax(exact)
        squares.append(np.square(found - exact).mean())
        divergences.append((np.exp(shares) * (shares - log_softmax(found))).sum(axis=1).mean())
    assert squares[0] < 0.95 * squares[1]
    assert divergences[0] < 0.95 * divergences[1]


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    found: np.ndarray = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return found


@pytest.mark.fast("gemma4")
def test_a_conversion_with_a_text_rounds(folder: Path) -> None:
    found = Bundle.open(convert_and_train(folder / "source", folder / "text", TEXT, "q4"))
    provenance = found.manifest.provenance
    assert provenance.notes[-1] == "weights are rounded with error feedback (GPTQ) on 1024 tokens of a text"
    assert provenance.ordered_tokens is None


def test_streams_say_which_blocks_stand_in_the_way(folder: Path) -> None:
    bundle = Bundle.open(folder / "f16")
    with pytest.raises(UnsupportedModelError, match=r"layers without .*(keys that|normed values)"):
        check_streams_possible(bundle)
    with pytest.raises(UnsupportedModelError, match="streams are trained through one residual"):
        ondevice.load(folder / "f16", backend="cpu", speculation="streams")


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An E model of Gemma 4, but for its activation, with predictors. No published one has ReLU gates."""
    from tests.support import families

    folder = tmp_path_factory.mktemp("predicted")
    family, options = families.CASES["gemma4 e"]
    families.write_model(folder / "source", family, {**options, "hidden_activation": "relu"})
    convert(folder / "source", folder / "bundle", "q4")
    train_predictors(folder / "bundle", pieces=made_up_pieces(5), measured_tokens=64, backend="cpu")
    return folder / "bundle"


@pytest.mark.slow
def test_predictors_find_the_neurons_that_fire(predicted: Path) -> None:
    bundle = Bundle.open(predicted)
    found, text = bundle.predictors, random_tokens(bundle.config, 40)
    assert found is not None
    for point in found.points:
        assert max(point.false_negatives) < 1 - point.recall + 0.1
    texts, logits = [], []
    for settings in ({}, {"prefill_chunk": 7}):
        with ondevice.load(predicted, backend="cpu", sparsity="predicted", **settings) as model:
            for segments in (model.plan.segment.total, 0):
                squeeze(model, segments)
                logits.append(model.logits(text).tobytes())
                texts.append(model.generate(tokens=text[:9], max_tokens=12, temperature=0.0).tokens)
    assert len(set(logits)) == len(set(texts)) == 1


def test_predictors_say_why_a_model_needs_none(folder: Path) -> None:
    """Gates of Gemma 3n's cutoffs are in memory; the others' are never zero."""
    bundle = Bundle.open(folder / "f16")
    why = "a statistical cutoff" if bundle.config.cut_off_layers else "hardly ever exactly zero"
    with pytest.raises(UnsupportedModelError, match=why):
        train_predictors(folder / "f16", pieces=made_up_pieces(), output=folder / "predictors", backend="cpu")
    assert not (folder / "predictors").exists()
