"""A small hybrid in a larger shape says what it says alone, and its layer drafts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from ondevice.converters.draft_layers.mtp import convert_mtp
from tests.benchmarks.lib.embedded_hybrid import HYBRID_7B, PARTS, EmbeddedHybrid
from tests.support.engines import all_logits, running
from tests.support.mtp_checkpoints import mtp_logits

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The one epsilon is right for a rule's norm as well: its heads' lengths together grow as the stream's width.
SHAPE = HYBRID_7B | {
    "hidden_size": 768,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "layer_types": HYBRID_7B["layer_types"][:8],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 4160,
}
TOKENS = [5, 300, 17, 4000, 9, 2048, 77, 78, 79, 1234]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid and a layer ahead; matrices that are Q4_0 in a file have its values."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    from tests.benchmarks.explain.trained_mtp import SIZES, LayerAhead, save

    torch.manual_seed(3)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif "conv1d" not in name:
                parameter *= 4
    folder = tmp_path_factory.mktemp("hybrid") / "small"
    save(model, LayerAhead(model), folder)
    path, kind = folder / "model.safetensors", GGMLQuantizationType.Q4_0
    tensors = load_file(path)
    float32 = tuple(f"{PARTS[part]}.weight" for part in ("ssm_alpha", "ssm_beta", "ssm_conv1d"))
    for name, values in tensors.items():
        if values.ndim == 2 and not name.endswith(float32) and not name.startswith("mtp."):
            tensors[name] = dequantize(quantize(values.astype(np.float32), kind), kind)
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddedHybrid, Path, Path]:
    """The embedded model, its file and its layer's checkpoint."""
    model = EmbeddedHybrid(small, SHAPE)
    return model, *model.write(tmp_path_factory.mktemp("large"))


@pytest.mark.slow
def test_the_large_model_says_what_the_small_one_says(
    small: Path, large: tuple[EmbeddedHybrid, Path, Path], tmp_path: Path
) -> None:
    model, file, _ = large
    assert model.layers == [1, 4, 5, 7]
    found = []
    for source in (small, file):
        bundle = convert(source, tmp_path / source.name, quant="f16")
        with running(bundle, backend="reference") as engine:
            found.append(all_logits(engine, TOKENS, 32))
    alone, embedded = found
    assert np.ptp(alone, axis=1).min() > 1
    assert np.abs(embedded[:, : alone.shape[1]] - alone).max() < 1e-3 * np.abs(alone).max()
    assert (embedded[:, alone.shape[1] :] == embedded[:, :1]).all()


@pytest.mark.slow
def test_its_layer_drafts_what_the_small_ones_drafts(
    small: Path, large: tuple[EmbeddedHybrid, Path, Path]
) -> None:
    model, _, checkpoint = large
    hidden = np.random.default_rng(2).standard_normal((len(TOKENS), 192)).astype(np.float32)
    wide = np.zeros((len(TOKENS), 768), np.float32)
    channels = model.channels
    wide[:, channels] = hidden
    alone, _ = mtp_logits(small, _twin(small, model.small), TOKENS, hidden)
    table = torch.zeros(SHAPE["vocab_size"], 768)
    own = load_file(small / "model.safetensors")["model.embed_tokens.weight"]
    table[: len(own), channels] = torch.from_numpy(own.astype(np.float32))
    twin = _twin(small, model.small | model.config)
    twin.model.embed_tokens.weight = torch.nn.Parameter(table)
    embedded, _ = mtp_logits(checkpoint, twin, TOKENS, wide)
    assert np.abs(embedded[:, channels] - alone).max() < 2e-3 * np.abs(alone).max()
    assert not np.delete(embedded, channels, axis=1).any()


def _twin(small: Path, config: dict[str, Any]) -> Any:
    """A `transformers` model of these sizes, with the small one's embeddings if they are its own."""
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config)).eval()
    own = load_file(small / "model.safetensors")["model.embed_tokens.weight"]
    if own.shape == tuple(model.model.embed_tokens.weight.shape):
        model.model.embed_tokens.weight = torch.nn.Parameter(torch.from_numpy(own.astype(np.float32)))
    return model


def test_its_layer_is_one_of_its_bundle(large: tuple[EmbeddedHybrid, Path, Path], tmp_path: Path) -> None:
    _, file, checkpoint = large
    bundle = convert(file, tmp_path / "bundle")
    convert_mtp(checkpoint, bundle, bits=4)
    found = Bundle.open(bundle)
    assert found.mtp is not None
    assert found.config.tie_embeddings is False


def test_models_that_do_not_fit_are_refused(small: Path) -> None:
    with pytest.raises(ValueError, match="more or longer heads"):
        EmbeddedHybrid(small, SHAPE | {"head_dim": 32})
    kinds = {"num_hidden_layers": 4, "layer_types": ["full_attention", *["linear_attention"] * 3]}
    with pytest.raises(ValueError, match="don't fit among"):
        EmbeddedHybrid(small, SHAPE | kinds)
