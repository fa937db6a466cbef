"""An embedded model as a GGUF: the bundle's weights in llama.cpp's layout, and the same next tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.api import load
from ondevice.backends.base import Float32
from ondevice.converters.quantize import QuantizedRows, dequantize
from ondevice.measure.prompts import BUILT_IN
from tests.benchmarks.lib.embedded_gguf import BLOCK, GAIN, gguf_of, neighbours, q4_1_blocks, with_codes
from tests.benchmarks.lib.embedded_model import TINY, embed
from tests.benchmarks.lib.embedded_weights import EmbeddedModel
from tests.benchmarks.lib.stored_model import Q4, taken
from tests.support.paths import SHIPPED
from tests.support.quantize_reference import quantize_reference

TOKENS = 512
"""Tokens of text by which the fillers' thresholds are set; they add nothing here."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddedModel, Path]:
    """The embedded model, and the folder of both bundles and the GGUF."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("embedded")
    model = embed(SHIPPED, TINY, folder, TOKENS)
    gguf_of(folder)
    return model, folder


def q4_1_values(blocks: NDArray[np.uint8]) -> Float32:
    """The values of rows of Q4_1, from its definition."""
    found = blocks.reshape(len(blocks), -1, 20)
    scale, bias = (found[..., at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    codes = np.concatenate([found[..., 4:] & 15, found[..., 4:] >> 4], axis=-1)
    return (scale * codes.astype(np.float32) + bias).reshape(len(blocks), -1)


def test_blocks_have_the_values_of_the_groups() -> None:
    random = np.random.default_rng(1)
    rows = quantize_reference(random.standard_normal((6, 192), np.float32), Q4.bits)
    assert (rows.scales < 0).any()
    assert (rows.scales > 0).any()
    for factor in (1.0, GAIN):
        expected = dequantize(rows, Q4.bits, 192) * np.float32(factor)
        assert np.array_equal(q4_1_values(q4_1_blocks(rows, factor)), expected)


@pytest.mark.parametrize("scale", [64.0, 2.0**-24])
def test_no_scale_is_rounded(scale: float) -> None:
    """Too large at one factor, or nothing at the other."""
    scales = np.full((1, 1), scale, np.float16)
    rows = QuantizedRows(np.full((1, 32), 0x21, np.uint8), scales, np.zeros((1, 1), np.float16))
    factor = GAIN if scale > 1 else 1 / GAIN
    with pytest.raises(ValueError, match="isn't a float16"):
        q4_1_blocks(rows, factor)
    assert np.array_equal(
        q4_1_values(q4_1_blocks(rows, 1 / factor)), dequantize(rows, Q4.bits, 64) * np.float32(1 / factor)
    )


def test_neighbours_turn_as_halves_do() -> None:
    """Scores of queries and keys, rotated by either layout, are equal."""
    heads, width = 3, 8
    random = np.random.default_rng(2)
    x = random.standard_normal((2, heads * width))
    order = neighbours(np.arange(heads * width), width)
    angles = np.array([[1.0], [4.0]]) * 10_000.0 ** (-np.arange(width // 2) / (width // 2))
    turns = np.exp(1j * angles)[:, None]

    def scores(real: NDArray[Any], imaginary: NDArray[Any]) -> NDArray[Any]:
        turned = (real + 1j * imaginary) * turns
        return np.asarray((turned[0] * turned[1].conj()).real.sum(axis=-1))

    halves = x.reshape(2, heads, 2, -1)
    pairs = x[:, order].reshape(2, heads, -1, 2)
    expected = scores(halves[:, :, 0], halves[:, :, 1])
    assert np.allclose(scores(pairs[..., 0], pairs[..., 1]), expected, rtol=1e-12)
    assert not np.array_equal(order, np.arange(heads * width))


def test_blocks_of_zeros_get_codes_and_no_others_do() -> None:
    blocks = np.random.default_rng(3).integers(1, 100, (4, 2 * 18), np.uint8)
    before = blocks.reshape(-1, 18)
    before[1:4, :2] = 0
    before[3, 1] = 128
    before[2:4, 2:] = 0
    found = with_codes(blocks.copy(), 2 * BLOCK, np.random.default_rng(4)).reshape(-1, 18)
    assert np.array_equal(found[:, :2], before[:, :2])
    changed = (found != before).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [1, 2, 3]


@pytest.mark.slow
def test_the_file_has_the_weights_of_the_bundle(made: tuple[EmbeddedModel, Path]) -> None:
    model, folder = made
    from gguf import GGUFReader
    from gguf.quants import dequantize as values_of

    reader = GGUFReader(folder / "large.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    epsilon = reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()
    assert epsilon == np.float32(model.config.norm.eps * GAIN**2)

    def values(name: str) -> Float32:
        return np.asarray(values_of(tensors[name].data, tensors[name].tensor_type), np.float32)

    def stored(rows: QuantizedRows) -> Float32:
        return dequantize(rows, Q4.bits, TINY.hidden_size)

    attention = list(model.attention())
    for layer in (0, model.layers[0]):
        gate, up, down = model.neurons(layer)
        rows, name = attention[layer], f"blk.{layer}."
        assert np.array_equal(values(f"{name}ffn_gate.weight"), stored(gate) * np.float32(GAIN))
        assert np.array_equal(values(f"{name}ffn_up.weight"), stored(up))
        assert np.array_equal(values(f"{name}attn_output.weight"), stored(rows.out) * np.float32(GAIN))
        size = TINY.hidden_size
        for part, which in enumerate("qkv"):
            places = np.arange(size) + part * size
            places = places if which == "v" else neighbours(places, model.config.head_dim)
            assert np.array_equal(values(f"{name}attn_{which}.weight"), stored(taken(rows.qkv, places)))
        exact = stored(down).T
        error = np.abs(values(f"{name}ffn_down.weight") - exact)
        assert error.max() <= np.abs(exact).max() / 127
        assert bool(exact.any()) == model.is_real(layer)
        codes = tensors[f"{name}ffn_down.weight"].data.reshape(-1, 34 if model.is_real(layer) else 18)[:, 2:]
        assert codes.any(axis=1).all()
    head = np.concatenate([stored(rows) for rows in model.head()])
    assert np.array_equal(values("output.weight"), head)


@pytest.mark.slow
def test_llama_cpp_names_the_same_tokens(made: tuple[EmbeddedModel, Path]) -> None:
    """But at near ties. Nothing overflows, and ids without tokens are far from winning."""
    pytest.importorskip("llama_cpp")
    from tests.benchmarks.explain.embedded_agreement import compare, engine_of, summary

    tasks = [task for task in BUILT_IN if task.name in ("dialogue", "sql", "story")]
    engine = engine_of(made[1], threads=1)
    with load(made[1] / "small", kv_bits=8, speculation="off", threads=1) as model:
        found = summary([compare(model, engine, task, task.prompts[0], 24) for task in tasks])
    assert found["equal_tokens"] > 0.9
    assert found["logit_error"] < 0.05
    assert found["largest_logit_without_token"] < -500
