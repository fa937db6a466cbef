"""Models whose layers have different numbers of neurons, which no checkpoint of a Llama's keys can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.converters.architectures import registry
from ondevice.converters.architectures.common import Description
from ondevice.converters.architectures.config_reader import ConfigReader
from ondevice.model_config import ModelConfig
from tests.support.bundles import write_chat_checkpoint

WIDTHS = (700, 150, 1030)
"""Neurons of three layers: none is a whole number of blocks, one is less than a quarter of another."""


def with_widths(config: ModelConfig, widths: Sequence[int | None]) -> ModelConfig:
    """The model with these numbers of neurons in its first layers; None: the model's `intermediate_size`."""
    own = [*widths, *[None] * config.num_layers][: config.num_layers]
    layers = zip(config.layers, own, strict=True)
    return replace(
        config,
        layers=tuple(
            replace(layer, feed_forward=replace(layer.feed_forward, neurons=neurons))
            for layer, neurons in layers
        ),
    )


def read_widths(patch: pytest.MonkeyPatch, widths: Sequence[int]) -> None:
    """Let checkpoints of Llama's keys be models whose layers have these numbers of neurons."""
    family = registry.FAMILIES["llama"]

    def read(reader: ConfigReader) -> Description:
        found = family.read(reader)
        return replace(found, config=with_widths(found.config, widths))

    patch.setitem(registry.FAMILIES, "llama", replace(family, read=read))


def write_uneven_checkpoint(
    patch: pytest.MonkeyPatch, folder: Path, widths: Sequence[int] = WIDTHS, **options: Any
) -> Path:
    """A checkpoint of Llama's keys with `widths` neurons, which converts while `patch` lasts."""
    shape = {"num_hidden_layers": len(widths), "intermediate_size": max(widths)}
    write_chat_checkpoint(folder, **(shape | options))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer, neurons in enumerate(widths):
        stem = f"model.layers.{layer}.mlp"
        for name in (f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight"):
            tensors[name] = np.ascontiguousarray(tensors[name][:neurons])
        down = f"{stem}.down_proj.weight"
        tensors[down] = np.ascontiguousarray(tensors[down][:, :neurons])
    save_file(tensors, file)
    read_widths(patch, widths)
    return folder


def uneven_transformers_model(folder: Path, weights: Mapping[str, np.ndarray]) -> Any:
    """The float32 `transformers` model of an uneven checkpoint, with these weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_proj", "up_proj", "down_proj"):
            rows, cols = weights[f"model.layers.{index}.mlp.{name}.weight"].shape
            setattr(layer.mlp, name, torch.nn.Linear(cols, rows, bias=False))
    state = {name: torch.from_numpy(np.array(held, dtype=np.float32)) for name, held in weights.items()}
    model.load_state_dict(state, strict=True)
    return model.eval()
