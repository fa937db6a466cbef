"""The layer of a checkpoint that predicts one token more than the model, for a bundle of that model.

Qwen3.5's and 3.6's, of dense models: `mtp.*`. Names and arithmetic are those of vLLM (`qwen3_5_mtp.py`) and
SGLang, as `transformers` leaves the layer out. The embedding and the hidden state, both normed, stand side by
side in this order before `mtp.fc`; a layer with the model's own attention and feed-forward follows, and
`mtp.norm`. Hidden states come from behind the model's last norm; where a draft goes on, from behind
`mtp.norm`. Embeddings and head are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.multimodal import MULTIMODAL
from ondevice.converters.architectures.qwen3_next import (
    AHEAD,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    layer_ahead,
)
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.base import SourceTensor, plain, some_of
from ondevice.converters.checkpoints.huggingface import MAX_CONFIG_BYTES, describe_model, stored_tensors
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.draft_layers.write import check_draft_layers_possible, checked, write_draft_layer
from ondevice.converters.quantize import Weights, to_float32
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

LAYER_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Keys by which configs of several families say how many layers predict tokens ahead."""
TYPES_AHEAD = tuple(family.model_type for family in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE))
"""Families whose published checkpoints have such layers, whether their configs say so or not."""
SAME_SIZES = (
    "architecture",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
"""What a bundle and the checkpoint of its model have in common, however it was converted."""


def has_layers_ahead(source: str | Path) -> bool:
    """Whether a folder is a model's that has layers that predict tokens ahead, and no draft head's.

    Raises ModelNotFoundError for no folder, CheckpointError for one whose config can't be read.
    """
    own = _own(SourceFolder(Path(source)).json("config.json", MAX_CONFIG_BYTES))
    return own.get("model_type") in TYPES_AHEAD or any(own.get(key) for key in LAYER_COUNTS)


def convert_mtp(source: str | Path, bundle_path: str | Path, bits: Any = 8) -> DraftLayer:
    """Add the layer that predicts one token more of the checkpoint in the folder `source` to a bundle of it.

    bits: of its matrices' codes, 4, 8 or 16.

    Raises ModelNotFoundError for no folder, CheckpointError for a damaged one or one of another model's,
    UnsupportedModelError for layers of other families and for weights in a pickle, and what
    `write_draft_layer` raises.
    """
    bundle = Bundle.open(bundle_path)
    check_draft_layers_possible(bundle)
    folder = SourceFolder(Path(source))
    values = folder.json("config.json", MAX_CONFIG_BYTES)
    _check_family(_own(values))
    config = describe_model(values).config
    _check_same_model(config, bundle.config)
    with ExitStack() as opened:
        config, tensors = layer_ahead(stored_tensors(folder, values, opened), config)
        layer = checked(_described(config, bits, bundle.config), bundle.config)
        arrays = _arrays(layer, tensors, bundle.config)
    return write_draft_layer(bundle.path, layer, arrays)


def _own(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text model, where a config has several models'."""
    kind, inner = values.get("model_type"), values.get("text_config")
    if not isinstance(kind, str) or kind not in MULTIMODAL or not isinstance(inner, dict):
        return values
    return {"model_type": MULTIMODAL[kind].text_type, **inner}


def _check_family(own: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for layers that aren't read."""
    model_type = own.get("model_type")
    if model_type != QWEN3_5.model_type:
        raise UnsupportedModelError(
            f"config.json: model_type is {plain(str(model_type))}; layers that predict tokens ahead are read "
            "from dense Qwen3.5 and 3.6 alone: draft layers have neither experts nor latent attention, which "
            "those of Qwen3-Next, GLM-4.5, DeepSeek V3 and their relatives have"
        )
    if (count := own.get(LAYER_COUNTS[0], 1)) != 1:
        raise UnsupportedModelError(
            f"config.json: {LAYER_COUNTS[0]} is {plain(str(count))}; a draft layer is one layer"
        )
    if own.get("mtp_use_dedicated_embeddings"):
        raise UnsupportedModelError(
            "config.json: mtp_use_dedicated_embeddings is true; embeddings of the layer's own aren't read"
        )


def _check_same_model(config: ModelConfig, target: ModelConfig) -> None:
    """Raises CheckpointError for a checkpoint whose shape isn't the bundle's."""
    for name in SAME_SIZES:
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise CheckpointError(
                f"config.json: {name} is {own}, and the bundle's is {wanted}; take the checkpoint that the "
                "bundle was made from"
            )


def _described(config: ModelConfig, bits: Any, target: ModelConfig) -> DraftLayer:
    """config: of the layer as a model of its own."""
    spec = config.layers[0]
    rope = config.ropes[spec.attention.rope]
    if rope.long_frequencies:
        raise UnsupportedModelError(
            "config.json: draft layers with two sets of rotary frequencies aren't supported"
        )
    return DraftLayer(
        kind="mtp",
        model="0" * 64,
        bits=bits,
        taps=(target.num_layers,),
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        neurons=config.intermediate_size,
        activation=config.activation,
        eps=config.norm.eps,
        frequencies=rope.frequencies,
        magnitude=rope.magnitude,
        qkv_bias=False,
        output_bias=False,
        head_norm=True,
        output_gates=spec.attention.gated,
        residual_normed=False,
        states_normed=True,
        own_head=False,
        own_embeddings=False,
        tokens=target.vocab_size,
    )


def _arrays(layer: DraftLayer, tensors: Tensors, target: ModelConfig) -> dict[str, Weights]:
    """The arrays that `write_draft_layer` takes. Raises CheckpointError for missing and other tensors."""
    names, width, keys = LayerNames(0), layer.hidden_size, layer.num_kv_heads * layer.head_dim
    matrices: dict[str, tuple[str, tuple[int, int]]] = {
        "joined": (f"{AHEAD}fc.weight", (width, 2 * width)),
        "q": (names.projection("q"), (layer.query_size, width)),
        "k": (names.projection("k"), (keys, width)),
        "v": (names.projection("v"), (keys, width)),
        "output_gates": (names.weight("attention.gate"), (layer.query_size, width)),
        "out": (names.projection("o"), (width, layer.query_size)),
        "gate": (names.gate, (layer.neurons, width)),
        "up": (names.up, (layer.neurons, width)),
        "down": (names.down, (width, layer.neurons)),
    }
    vectors = {
        "embedding_norm": f"{AHEAD}embedding_norm.weight",
        "hidden_norm": f"{AHEAD}hidden_norm.weight",
        "attention_norm": names.norm("attention_norm"),
        "feed_forward_norm": names.norm("feed_forward_norm"),
        "q_norm": names.head_norm("q"),
        "k_norm": names.head_norm("k"),
        "final_norm": FINAL_NORM,
    }
    lengths = layer.vectors(target)
    shapes: dict[str, tuple[int, ...]] = dict(matrices.values())
    shapes |= {it: (lengths[name],) for name, it in vectors.items()}
    _check_tensors(tensors, shapes)
    found = {name: _rows(tensors[it]) for name, (it, _) in matrices.items()}
    joined = found.pop("joined")
    found |= {"joined.embedding": joined[:, :width], "joined.hidden": joined[:, width:]}
    found["qkv"] = np.concatenate([to_float32(found.pop(it)) for it in "qkv"])
    return found | {name: tensors[it].vector() for name, it in vectors.items()}


def _rows(tensor: SourceTensor) -> Weights:
    return tensor.rows(0, tensor.shape[0])


def _check_tensors(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError for missing tensors and other shapes, UnsupportedModelError for further ones."""
    missing = sorted(set(shapes) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the layer that predicts one token more are missing, "
            f"{some_of(missing)}; is the download complete?"
        )
    extra = sorted(set(tensors) - set(shapes))
    if extra:
        raise UnsupportedModelError(
            f"{len(extra)} tensors are no part of one layer that predicts one token more, {some_of(extra)}"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(tensors[name].shape)}; config.json asks for {list(shape)}; is the "
                "folder whole and of one model?"
            )
