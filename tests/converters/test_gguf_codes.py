"""GGUF files whose codes are copied: the values of a bundle are the file's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.bundle.verify import verify
from ondevice.config import MXFP4, RowFormat
from ondevice.converters.checkpoints.gguf_codecs import TILE_FORMATS
from ondevice.converters.convert import convert
from ondevice.kernels._native import crc32c
from tests.support.engines import all_logits, bundle_weights, error, running
from tests.support.gguf_models import write_gguf
from tests.support.mlx_models import loaded
from tests.support.models import transformers_logits, transformers_model, write_checkpoint
from tests.support.stored_matrices import resident_matrix

gguf = pytest.importorskip("gguf")

EXACT = {
    "Q4_0": RowFormat(4, 32, "symmetric"),
    "Q4_1": RowFormat(4, 32),
    "Q5_0": RowFormat(5, 32, "symmetric"),
    "Q5_1": RowFormat(5, 32),
    "Q8_0": RowFormat(8, 32, "symmetric"),
    "MXFP4": MXFP4,
    **TILE_FORMATS,
}
"""The format that holds every value of a type."""


def converted(tmp_path: Path, kind: str, hidden: int, quant: str = "auto") -> tuple[Bundle, dict[str, Any]]:
    """A tiny model as a GGUF file of this type, converted; and the values that the file stands for."""
    folder = write_checkpoint(
        tmp_path / "hf",
        hidden_size=hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=hidden,
    )
    exact = write_gguf(tmp_path / "model.gguf", folder, kind)
    return Bundle.open(convert(tmp_path / "model.gguf", tmp_path / "bundle", quant)), exact


def notes(bundle: Bundle) -> dict[str, str]:
    return dict(note.split(": ", 1) for note in bundle.manifest.provenance.notes if ": " in note)


@pytest.mark.fast("Q4_0-*", "Q4_1-*", "Q5_1-*", "MXFP4-*")
@pytest.mark.parametrize(("kind", "stored"), EXACT.items())
def test_values_are_those_of_the_file(tmp_path: Path, kind: str, stored: RowFormat) -> None:
    bundle, exact = converted(tmp_path, kind, 256 if stored.two_levels else 96)
    assert {found for _, found in bundle.quant.formats} == {stored}
    for name, values in bundle_weights(bundle.path).items():
        assert np.array_equal(values, exact[name]), name
    said = notes(bundle)
    kinds = ("attention", "embedding", "gate", "up", "down")
    assert all(said[kind] == "codes and scales copied" for kind in kinds)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4"])
def test_codes_are_those_of_the_file_byte_for_byte(tmp_path: Path, kind: str) -> None:
    bundle, _ = converted(tmp_path, kind, 64)
    stored = next(
        tensor
        for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
        if tensor.name.endswith("0.attn_output.weight")
    ).data
    blocks = np.asarray(stored).view(np.uint8).reshape(64, 2, -1)
    at = 1 if kind == "MXFP4" else 2
    if kind != "Q8_0":
        nibbles = np.concatenate([blocks[:, :, at:] & 15, blocks[:, :, at:] >> 4], axis=2).reshape(64, -1)
        codes = nibbles[:, 0::2] + 16 * nibbles[:, 1::2]
    else:
        codes = (blocks[:, :, 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8).reshape(64, -1)
    found = resident_matrix(bundle, "layers.0.attention.out")
    assert found.codes.tobytes() == codes.tobytes()
    assert found.scales.tobytes() == blocks[:, :, :at].tobytes()
    assert not found.biases.size


@pytest.mark.fast("Q5_1", "MXFP4", "Q4_K", "Q3_K")
@pytest.mark.parametrize("kind", EXACT)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    bundle, _ = converted(tmp_path, kind, 256 if EXACT[kind].two_levels else 96)
    tokens = list(range(20))
    theirs = transformers_model(tmp_path / "hf", bundle_weights(bundle.path))
    with running(bundle.path) as model:
        reference = all_logits(model, tokens, 32)
    assert error(reference, transformers_logits(theirs, tokens)) < 1e-4
    with running(bundle.path, "cpu") as model:
        assert error(all_logits(model, tokens), reference) < 0.1


@pytest.mark.fast("Q5_0")
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "MXFP4"])
def test_mlx_multiplies_copied_codes(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("mlx.core", exc_type=ImportError)
    bundle, _ = converted(tmp_path, kind, 128)
    found = []
    for backend in ("mlx", "reference"):
        with loaded(bundle.path, backend) as model:
            found.append(model.score(tokens=range(2, 40)).perplexity)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_each_layer_has_the_formats_of_its_own_matrices(tmp_path: Path) -> None:
    """As mixes of types have them: down matrices and values of some layers in Q6_K, the rest in Q4_K, and the
    embedding in a type of its own.
    """

    def kind(name: str) -> str:
        if name == "token_embd.weight":
            return "Q5_K"
        return "Q6_K" if re.fullmatch(r"blk\.[12]\.(ffn_down|attn_v)\.weight", name) else "Q4_K"

    folder = write_checkpoint(
        tmp_path / "hf",
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        num_hidden_layers=5,
    )
    exact = write_gguf(tmp_path / "model.gguf", folder, kind)
    bundle = Bundle.open(convert(tmp_path / "model.gguf", tmp_path / "bundle"))
    formats = [bundle.quant.of("down", layer) for layer in range(5)]
    q4_k, q6_k = TILE_FORMATS["Q4_K"], TILE_FORMATS["Q6_K"]
    assert formats == [q4_k, q6_k, q6_k, q4_k, q4_k]
    assert [bundle.quant.of("qkv", layer, "v") for layer in range(5)] == formats
    assert bundle.quant.of("feed_forward") == bundle.quant.of("qkv", 1, "k") == q4_k
    assert bundle.quant.of("embedding") == TILE_FORMATS["Q5_K"]
    assert len({layout.stride for layout in bundle.neuron_layouts}) == 2
    verify(bundle.path, crc32c)
    for name, values in bundle_weights(bundle.path).items():
        assert np.array_equal(values, exact[name]), name
    assert set(notes(bundle).values()) == {"codes and scales copied"}
    tokens = list(range(20))
    with running(bundle.path) as model, running(bundle.path, "cpu") as mine:
        assert error(all_logits(mine, tokens), all_logits(model, tokens, 32)) < 0.1


def test_a_plain_quantisation_rounds_anew(tmp_path: Path) -> None:
    bundle, _ = converted(tmp_path, "Q4_0", 64, "q4")
    assert not bundle.quant.formats
    assert notes(bundle)["gate"].startswith("rounded to 4 bits")
