"""Experts whose matrices have biases, from a checkpoint to what both backends compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.reference import ReferenceBackend
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.tensors import LayerNames
from ondevice.converters.checkpoints.base import Checkpoint, SourceFile, SourceTensor, StoredTensor
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from tests.support.engines import all_logits, random_tokens, running
from tests.support.families import OLMOE, write_model

NEURONS, EXPERTS = OLMOE["intermediate_size"], OLMOE["num_experts"]


def with_biases(checkpoint: Checkpoint, path: Path, biases: dict[str, np.ndarray]) -> Checkpoint:
    """The checkpoint with biases of its experts, which are written to a file of their own."""
    tensors: dict[str, SourceTensor] = dict(checkpoint.tensors)
    path.write_bytes(b"".join(values.tobytes() for values in biases.values()))
    file, offset = SourceFile(path), 0
    for name, values in biases.items():
        tensors[name] = StoredTensor(name, "F32", values.shape, file, offset)
        offset += values.nbytes
    layers = tuple(
        replace(layer, experts=layer.experts and replace(layer.experts, bias=True))
        for layer in checkpoint.config.layers
    )
    return replace(checkpoint, config=replace(checkpoint.config, layers=layers), tensors=tensors)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder, rng = tmp_path_factory.mktemp("biases"), np.random.default_rng(3)
    write_model(folder / "source", "Olmoe", OLMOE)
    checkpoint, biases = open_checkpoint(folder / "source"), {}
    for layer in range(checkpoint.config.num_layers):
        for expert in range(EXPERTS):
            for which in ("gate", "up", "down"):
                size = checkpoint.config.hidden_size if which == "down" else NEURONS
                name = LayerNames(layer).expert_bias(expert, which)
                biases[name] = rng.standard_normal(size).astype(np.float32)
    for quant in ("f16", "q8"):
        source = with_biases(open_checkpoint(folder / "source"), folder / "biases.bin", biases)
        convert(source, folder / quant, quant)
    return folder, biases


def test_an_expert_adds_them_to_its_products(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    """A token that goes to all experts with equal weights: their mean, in float64."""
    folder, biases = made
    bundle, backend = Bundle.open(folder / "f16"), ReferenceBackend()
    stored = load_file(folder / "source" / "model.safetensors")
    with FlashReader(bundle_files(bundle)) as reader:
        weights = load_weights(bundle, reader, backend).layers[1]
    x = np.random.default_rng(4).standard_normal((3, bundle.config.hidden_size)).astype(np.float32)
    expected = np.zeros(x.shape)
    for expert in range(EXPERTS):
        matrices = [
            stored[f"model.layers.1.mlp.experts.{expert}.{which}_proj.weight"].astype(np.float64)
            for which in ("gate", "up", "down")
        ]
        own = [biases[LayerNames(1).expert_bias(expert, which)] for which in ("gate", "up", "down")]
        gate, up = (x @ matrix.T + bias for matrix, bias in zip(matrices[:2], own[:2], strict=True))
        expected += gate / (1 + np.exp(-gate)) * up @ matrices[2].T + own[2]
    spec = bundle.config.layers[1]
    assert spec.experts is not None
    spec = replace(spec, experts=replace(spec.experts, chosen=EXPERTS, renormalised=True))
    assert weights.router is not None
    router = weights.router._replace(matrix=replace(weights.router.matrix, weight=np.zeros((EXPERTS, 64))))
    found = backend.mixture(x, weights.feed_forward, router, spec, ForwardBatch([1, 2, 3]))
    np.testing.assert_allclose(found, expected / EXPERTS, rtol=1e-3, atol=2e-3)


@pytest.mark.fast("q8-*")
@pytest.mark.parametrize(("quant", "near"), [("f16", 1e-3), ("q8", 2e-2)])
def test_both_backends_compute_them(
    made: tuple[Path, dict[str, np.ndarray]], quant: str, near: float
) -> None:
    bundle = made[0] / quant
    tokens = random_tokens(Bundle.open(bundle).config, 20)
    found = []
    for backend in ("reference", "cpu"):
        with running(bundle, backend) as model:
            found.append(all_logits(model, tokens))
    assert np.abs(found[0] - found[1]).max() < near * np.abs(found[0]).max()
    convert(made[0] / "source", made[0] / f"{quant} plain", quant)
    with running(made[0] / f"{quant} plain", "cpu") as model:
        plain = all_logits(model, tokens)
    assert np.abs(found[1] - plain).max() > 0.1 * np.abs(plain).max()


def test_both_backends_hold_them_where_they_lie(made: tuple[Path, dict[str, np.ndarray]]) -> None:
    """The record's biases are the checkpoint's, behind each matrix, and zeros pad them."""
    bundle = Bundle.open(made[0] / "q8")
    layout = bundle.expert_layouts[-1]
    assert layout is not None
    with FlashReader([bundle.expert_file(2)]) as reader:
        record = reader.read(0, 4096 + 5 * layout.stride, layout.stride)
    for which, (_, _, at), matrix in zip(("gate", "up", "down"), layout.places, layout.matrices, strict=True):
        values = record[at : at + 4 * matrix.padded_rows].view(np.float32)
        assert (values[: matrix.rows] == made[1][LayerNames(2).expert_bias(5, which)]).all()
        assert not values[matrix.rows :].any()
