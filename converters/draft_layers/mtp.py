"""Adds the layer of a checkpoint that predicts one more token than the model to a bundle of that model.

In Qwen3-Next, Qwen3.5 and 3.6 its names begin with `mtp.`. In GLM-4.5, GLM-4.7-Flash and DeepSeek V3 it is
one more layer after the last one. Families describe it (`Description.ahead`). `transformers` ignores the
layer: names are those that vLLM reads (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`, `deepseek_mtp.py`,
`glm4_moe_mtp.py`), and arithmetic is that of SGLang. A matrix joins the embedding and the hidden state, both
normed and side by side in this order. A layer with the model's kind of attention and feed-forward follows,
and a norm. Hidden states come from the output of the model's last norm; when a draft continues, from the
output of the layer's norm. Embeddings and head are the model's. In DeepSeek V3 and GLM-4.5 vLLM differs: a
draft continues from before that norm, the embedding of a text's first row is zero, and the layer's copies of
embeddings and head are read.

MiMo V2 Flash has up to three such layers, `model.mtp.layers.N`, the first of which is read. Hidden states
come from before the model's last norm and before the layer's norm, as in llama.cpp and in SGLang's drafting
with several layers; vLLM (`mimo_v2_mtp.py`) takes them from after these norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.layers_ahead import EMBEDDING_NORM, HIDDEN_NORM, JOINING
from ondevice.converters.architectures.mimo_v2 import MIMO_V2_FLASH
from ondevice.converters.architectures.multimodal import MULTIMODAL
from ondevice.converters.architectures.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from ondevice.converters.architectures.tensors import FINAL_NORM, LayerNames
from ondevice.converters.checkpoints.base import SourceTensor, plain, some_of
from ondevice.converters.checkpoints.huggingface import MAX_CONFIG_BYTES, describe_model, stored_tensors
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.draft_layers.write import (
    Pieces,
    check_draft_layers_possible,
    checked,
    write_draft_layer,
)
from ondevice.converters.quantize import Weights, to_float32
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

LAYER_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
"""Keys by which several families' configs count the layers that predict tokens ahead."""
TYPES_AHEAD = tuple(family.model_type for family in (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, MIMO_V2_FLASH))
"""Families whose published checkpoints have such layers, even if their configs don't say so."""
SEVERAL_LAYERS = (MIMO_V2_FLASH.model_type,)
"""Families with several such layers, of which the first drafts again and again; their hidden states are those
that no norm has seen."""
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
"""Fields in which a bundle and its model's checkpoint agree, however it was converted."""


def has_layers_ahead(source: str | Path) -> bool:
    """Whether a folder contains a model with layers that predict further tokens; otherwise it is a draft
    head.

    Raises ModelNotFoundError if it isn't a folder, CheckpointError if its config can't be read.
    """
    config = _text_config(SourceFolder(Path(source)).json("config.json", MAX_CONFIG_BYTES))
    return config.get("model_type") in TYPES_AHEAD or any(config.get(key) for key in LAYER_COUNTS)


def convert_mtp(source: str | Path, bundle_path: str | Path, bits: Any = 8) -> DraftLayer:
    """Add a checkpoint's layer that predicts one more token to a bundle of the same model.

    bits: bits of its matrices' codes, 4, 8 or 16.

    Raises ModelNotFoundError if `source` isn't a folder, CheckpointError if it is damaged or belongs to
    another model, UnsupportedModelError for layers of other families and for weights in a pickle, and what
    `write_draft_layer` raises.
    """
    bundle = Bundle.open(bundle_path)
    check_draft_layers_possible(bundle)
    folder = SourceFolder(Path(source))
    values = folder.json("config.json", MAX_CONFIG_BYTES)
    _check_one_layer(_text_config(values))
    model = describe_model(values)
    if model.ahead is None:
        raise UnsupportedModelError(
            f"config.json: model_type is {plain(str(_text_config(values).get('model_type')))}; layers that "
            "predict tokens ahead are read from Qwen3-Next, Qwen3.5 and 3.6, GLM-4.5, GLM-4.7-Flash, "
            "DeepSeek V3 and MiMo V2 Flash"
        )
    _check_same_model(model.config, bundle.config)
    with ExitStack() as opened:
        config, tensors = model.ahead(stored_tensors(folder, values, opened))
        layer = checked(_described(config, bits, bundle.config), bundle.config)
        # Experts are read as they are written.
        return write_draft_layer(bundle.path, layer, _arrays(layer, config, tensors, bundle.config))


def _text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text model, if a config describes several models; otherwise all keys."""
    kind, inner = values.get("model_type"), values.get("text_config")
    if not isinstance(kind, str) or kind not in MULTIMODAL or not isinstance(inner, dict):
        return values
    return {"model_type": MULTIMODAL[kind].text_type, **inner}


def _check_one_layer(config: Mapping[str, Any]) -> None:
    """Check the layers that predict further tokens. Raises UnsupportedModelError for several, and for one
    with separate embeddings.
    """
    for key in LAYER_COUNTS:
        if (count := config.get(key, 1)) != 1 and config.get("model_type") not in SEVERAL_LAYERS:
            raise UnsupportedModelError(
                f"config.json: {key} is {plain(str(count))}; a draft layer is one layer"
            )
    if config.get("mtp_use_dedicated_embeddings"):
        raise UnsupportedModelError(
            "config.json: mtp_use_dedicated_embeddings is true; embeddings of the layer's own aren't read"
        )


def _check_same_model(config: ModelConfig, target: ModelConfig) -> None:
    """Check a checkpoint's shape. Raises CheckpointError unless it is that of the bundle."""
    for name in SAME_SIZES:
        value, wanted = getattr(config, name), getattr(target, name)
        if value != wanted:
            raise CheckpointError(
                f"config.json: {name} is {value}, and the bundle's is {wanted}; take the checkpoint that the "
                "bundle was made from"
            )


def _described(config: ModelConfig, bits: Any, target: ModelConfig) -> DraftLayer:
    """The description of the layer. config: that of the layer as a one-layer model."""
    spec = config.layers[0]
    attention, rope = spec.attention, config.ropes[spec.attention.rope]
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
        neurons=config.dense_neurons(spec),
        activation=config.activation,
        eps=config.norm.eps,
        frequencies=rope.frequencies,
        magnitude=rope.magnitude,
        qkv_bias=attention.bias,
        head_norm=attention.head_norm == "head",
        output_gates=attention.gated,
        states_normed=config.architecture not in SEVERAL_LAYERS,
        tokens=target.vocab_size,
        latent=attention.latent,
        scale=None if attention.latent is None else attention.scale,
        experts=spec.experts,
        window=attention.window,
        sinks=attention.sinks,
        value_dim=attention.value_dim,
        out_factor=attention.out_factor,
    )


def _arrays(
    layer: DraftLayer, config: ModelConfig, tensors: Tensors, target: ModelConfig
) -> dict[str, Weights | Pieces]:
    """The arrays that `write_draft_layer` takes, under the names of the specification.

    layer: the description of the layer. config: that of the layer as a one-layer model. tensors: the layer's
    tensors, under the names of `tensors.py` and `layers_ahead.py`. target: the config of the model that it
    drafts for.

    Raises CheckpointError for missing tensors and other shapes, UnsupportedModelError for further ones.
    """
    names, width = LayerNames(0), layer.hidden_size
    projections = config.projection_sizes(config.layers[0])
    matrices, vectors = _matrix_names(names), _vector_names(names)
    sizes, lengths = layer.matrices(target), layer.vectors(target)
    shapes: dict[str, tuple[int, ...]] = {JOINING: (width, 2 * width)}
    shapes |= {names.projection(which): (rows, width) for which, rows in projections.items()}
    if layer.qkv_bias:
        shapes |= {names.projection_bias(which): (rows,) for which, rows in projections.items()}
    shapes |= {it: sizes[name].shape for name, it in matrices.items() if name in sizes}
    shapes |= {it: (lengths[name],) for name, it in vectors.items() if name in lengths}
    experts = {}
    for which in ("gate", "up", "down") if layer.experts is not None else ():
        size = sizes[f"experts.{which}"]
        experts[which] = [names.expert(expert, which) for expert in range(size.number)]
        shapes |= dict.fromkeys(experts[which], (size.rows, size.cols))
    _check_tensors(tensors, shapes)
    joined = _rows(tensors[JOINING])
    qkv = [to_float32(_rows(tensors[names.projection(which)])) for which in projections]
    arrays: dict[str, Weights | Pieces] = {
        "joined.embedding": joined[:, :width],
        "joined.hidden": joined[:, width:],
        "qkv": np.concatenate(qkv),
    }
    if layer.qkv_bias:
        arrays["qkv.bias"] = np.concatenate(
            [tensors[names.projection_bias(it)].vector() for it in projections]
        )
    arrays |= {name: _rows(tensors[it]) for name, it in matrices.items() if name in sizes}
    arrays |= {name: tensors[it].vector() for name, it in vectors.items() if name in lengths}
    for which, each in experts.items():
        reads = tuple(partial(_rows, tensors[it]) for it in each)
        arrays[f"experts.{which}"] = Pieces(sizes[f"experts.{which}"].shape, reads)
    return arrays


def _matrix_names(names: LayerNames) -> dict[str, str]:
    """The names in a checkpoint of matrices, by their names in the draft layer. Joined matrices and experts'
    are left out.
    """
    return {
        "output_gates": names.weight("attention.gate"),
        "queries": names.weight("attention.queries"),
        "latent_keys": names.weight("attention.latent_keys"),
        "latent_values": names.weight("attention.latent_values"),
        "out": names.projection("o"),
        "gate": names.gate,
        "up": names.up,
        "down": names.down,
        "router": names.weight("router"),
        "shared_gate": names.weight("shared_gate"),
    }


def _vector_names(names: LayerNames) -> dict[str, str]:
    """The names in a checkpoint of vectors, by their names in the draft layer. Biases are left out."""
    return {
        "embedding_norm": EMBEDDING_NORM,
        "hidden_norm": HIDDEN_NORM,
        "attention_norm": names.norm("attention_norm"),
        "feed_forward_norm": names.norm("feed_forward_norm"),
        "q_norm": names.head_norm("q"),
        "k_norm": names.head_norm("k"),
        "final_norm": FINAL_NORM,
        "latent_norm": names.weight("attention.latent_norm.weight"),
        "query_norm": names.weight("attention.query_norm.weight"),
        "choice_bias": names.weight("router.choice_bias"),
        "sinks": names.weight("attention.sinks"),
    }


def _rows(tensor: SourceTensor) -> Weights:
    return tensor.rows(0, tensor.shape[0])


def _check_tensors(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check tensors. Raises CheckpointError for missing ones and wrong shapes, UnsupportedModelError for
    further ones.

    Errors name existing tensors as the folder does, unless a family computes them, and missing ones as
    `tensors.py` does.
    """
    # Without the number that the layer has as a model of its own: the folder's layer 0 is another one.
    missing = sorted(it.removeprefix(LayerNames(0).weight("")) for it in set(shapes) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the layer that predicts one token more are missing, "
            f"{some_of(missing)}; is the download complete?"
        )
    extra = sorted({it.name for name, it in tensors.items() if name not in shapes})
    if extra:
        raise UnsupportedModelError(
            f"{len(extra)} tensors are no part of one layer that predicts one token more, {some_of(extra)}"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{plain(tensors[name].name)} has shape {list(tensors[name].shape)}; config.json asks for "
                f"{list(shape)}; is the folder whole and of one model?"
            )
