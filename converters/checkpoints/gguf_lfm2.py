"""LFM2 in GGUF files: its `config.json` values and the names of its tensors.

A layer without key heads has a short convolution. The norm after the last layer has the name that other
families' files give to a norm of embeddings.
"""

from __future__ import annotations

from typing import Any

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.config_reader import shown
from ondevice.converters.architectures.lfm2 import KINDS
from ondevice.converters.checkpoints.gguf_gemma import Values
from ondevice.converters.checkpoints.gguf_metadata import Metadata
from ondevice.errors import CheckpointError
from ondevice.model_config import ModelConfig

CONV_NAMES = {f"shortconv.{it}": f"conv.{it}" for it in ("in_proj", "conv", "out_proj")}
"""Names of a block's tensors in a checkpoint, by those in GGUF files."""
LAST_NORM = {"token_embd_norm": "model.norm"}
KEY_HEADS = "attention.head_count_kv"


def lfm2_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The keys of a model without experts. Files contain the number of neurons directly."""
    return {**conv_keys(metadata, values), "block_auto_adjust_ff_dim": False}


def conv_keys(metadata: Metadata, values: Values) -> dict[str, Any]:
    """The number of taps of convolutions, and which layers have one."""
    keys: dict[str, Any] = {
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "norm_eps": values["rms_norm_eps"],
        "rms_norm_eps": None,
    }
    if not metadata.is_array(KEY_HEADS):
        # One number for all layers: none has a convolution.
        return keys
    # Of integers all, as `GgufFamily.varied` has the first one read.
    heads = [int(count) for count in metadata.array(KEY_HEADS) or []]
    where = f"{metadata.header.file}: {metadata.prefix}{KEY_HEADS}"
    if len(heads) != values["num_hidden_layers"]:
        raise CheckpointError(f"{where} has {len(heads)} values for {values['num_hidden_layers']} layers")
    attending = sorted(set(heads) - {0})
    if len(attending) != 1:
        raise CheckpointError(
            f"{where} names {shown(attending)}; layers with attention must have one number of heads, and "
            "those with a short convolution 0"
        )
    keys["num_key_value_heads"] = attending[0]
    keys["layer_types"] = [KINDS[count > 0] for count in heads]
    return keys


def restored_lfm2(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors, unchanged. Raises CheckpointError if a convolution is missing."""
    for layer, spec in enumerate(config.layers):
        for stored, name in CONV_NAMES.items() if spec.conv is not None else ():
            if f"model.layers.{layer}.{name}.weight" not in tensors:
                raise CheckpointError(
                    f"blk.{layer}.{stored}.weight, which config.json asks for, is missing; is the download "
                    "complete?"
                )
    return tensors
