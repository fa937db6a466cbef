"""OPT's keys and tensor names; `test_families.py` compares its logits with those of `transformers`."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.architectures.tensors import tensor_shapes
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, UnsupportedModelError

PUBLISHED: dict[str, Any] = {
    "_name_or_path": "opt-6.7b", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0,
    "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 16384,
    "hidden_size": 4096, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
    "model_type": "opt", "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 1,
    "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True,
    "vocab_size": 50272, "word_embed_proj_dim": 4096,
}  # fmt: skip


def test_the_keys_of_opt_are_read() -> None:
    config = read_config(PUBLISHED)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (4096, 16384, 32)
    assert config.learned_positions
    assert config.tie_embeddings
    assert config.zeros_gates
    assert not config.feed_forward.gated
    assert config.feed_forward.bias
    assert config.feed_forward.output_bias


def test_the_size_of_350_million_is_read() -> None:
    """Its norms stand on the residual, and none before the head; its embeddings are half as wide."""
    changes = {"do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "num_attention_heads": 16}
    config = read_config({**PUBLISHED, **changes, "num_hidden_layers": 24, "word_embed_proj_dim": 512})
    assert {layer.norms for layer in config.layers} == {"residual"}
    assert not config.final_norm
    assert (config.hidden_size, config.embedding_size) == (1024, 512)
    assert tensor_shapes(config)["model.project_in"] == (1024, 512)
    parameters = sum(prod(shape) for shape in tensor_shapes(config).values())
    assert parameters == 331_196_416 - 2 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ({"activation_function": "swish7"}, "swish7"),
        ({"scale_embeddings": 2.0}, "scale_embeddings"),
    ],
)
def test_what_differs_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config({**PUBLISHED, **changes})


def test_tensors_have_either_prefix_and_the_positions_their_offset(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.support.families import OPT, write_model

    source = tmp_path / "source"
    write_model(source, "OPT", {**OPT, "num_hidden_layers": 1})
    first = convert(source, tmp_path / "first", "q4")
    tensors = load_file(source / "model.safetensors")
    short = {name.removeprefix("model."): values for name, values in tensors.items()}
    save_file(short, source / "model.safetensors")
    second = convert(source, tmp_path / "second", "q4")
    assert (first / "resident.safetensors").read_bytes() == (second / "resident.safetensors").read_bytes()
    assert Bundle.open(first).config == Bundle.open(second).config
    positions = short["decoder.embed_positions.weight"]
    positions[7, 5] = np.nan
    save_file(short, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_positions\.weight holds NaN or infinity"):
        convert(source, tmp_path / "damaged", "q4")
    short["decoder.embed_positions.weight"] = positions[2:].copy()
    save_file(short, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="66 rows"):
        convert(source, tmp_path / "third", "q4")
