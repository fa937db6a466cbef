"""The layer after a model's last one that predicts one more token (arXiv 2412.19437, section 2.2).

DeepSeek V3, GLM-4.5 and their relatives store it like one more layer, which `transformers` ignores. Its names
are those that vLLM (`deepseek_mtp.py`, `glm4_moe_mtp.py`) and SGLang (`deepseek_nextn.py`) read. Its
arithmetic is that of SGLang; `draft_layers/mtp.py` says where vLLM differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ondevice.converters.architectures.common import Tensors
from ondevice.converters.architectures.tensors import EMBEDDING, FINAL_NORM, HEAD, LayerNames
from ondevice.converters.checkpoints.base import SourceTensor
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig

JOINING = "mtp.fc.weight"
"""The matrix over an embedding and a hidden state, concatenated in this order."""
EMBEDDING_NORM, HIDDEN_NORM = "mtp.embedding_norm.weight", "mtp.hidden_norm.weight"
"""The norms of the embedding and of the hidden state."""
NOTE = (
    "the layer that predicts one token more (mtp) was left out; `ondevice convert CHECKPOINT --draft-for "
    "BUNDLE` adds it, for --speculation mtp, from its authors' folder"
)
NOTE_OF_SEVERAL = (
    "the layers that predict tokens ahead (mtp) were left out; `ondevice convert CHECKPOINT --draft-for "
    "BUNDLE` adds the first of them, for --speculation mtp, from its authors' folder"
)
_NAMES = {
    "eh_proj.weight": JOINING,
    "enorm.weight": EMBEDDING_NORM,
    "hnorm.weight": HIDDEN_NORM,
    "shared_head.norm.weight": FINAL_NORM,
    "final_layernorm.weight": FINAL_NORM,
}
_SHARED = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
"""Tensors that such a layer shares with the model, and that most files hold twice."""
_COMPARED_BYTES = 4 << 20
"""Bytes, as float32, of the rows of each of two tensors that are compared at once."""


def notes_of_layers_ahead(count: int) -> tuple[str, ...]:
    """The notes for users that `count` layers which predict further tokens were left out."""
    if count <= 0:
        return ()
    return (NOTE,) if count == 1 else ("the layers that predict tokens ahead are left out",)


def layer_after_last(
    tensors: Tensors, config: ModelConfig, adapt: Callable[[ModelConfig, Tensors], Tensors]
) -> tuple[ModelConfig, Tensors]:
    """The layer `model.layers.N` after the N layers of `config`, as a one-layer model, and its tensors.

    Tensors have the names of `tensors.py` and of this module. adapt: the family's function for the tensors of
    a config. Raises CheckpointError for a folder without the layer or a part of it, UnsupportedModelError for
    embeddings or a head that differ from the model's.
    """
    prefix, model_prefix = f"model.layers.{config.num_layers}.", LayerNames(0).weight("")
    of_layer = {name.removeprefix(prefix): it for name, it in tensors.items() if name.startswith(prefix)}
    if not of_layer:
        raise _missing(prefix)
    for name, of_model in _SHARED.items():
        if (copy := of_layer.pop(name, None)) is not None:
            tied = of_model == HEAD and HEAD not in tensors
            _check_same(copy, tensors.get(EMBEDDING if tied else of_model))
    # The layer is sparse wherever the model has experts.
    layer = next((it for it in config.layers if it.experts is not None), config.layers[-1])
    config = replace(config, layers=(layer,))
    return config, _adapted(of_layer, config, prefix, model_prefix, adapt)


def first_of_several(
    tensors: Tensors, config: ModelConfig, prefix: str, adapt: Callable[[ModelConfig, Tensors], Tensors]
) -> tuple[ModelConfig, Tensors]:
    """Layer 0 of the layers whose names begin with `prefix`, as `layer_after_last` returns a layer. config:
    that layer's config.

    Raises CheckpointError for a folder without it or a part of it.
    """
    first, model_prefix = f"{prefix}0.", LayerNames(0).weight("")
    layer = {name.removeprefix(first): it for name, it in tensors.items() if name.startswith(first)}
    if not layer:
        raise _missing(first)
    return config, _adapted(layer, config, first, model_prefix, adapt)


def _missing(prefix: str) -> CheckpointError:
    return CheckpointError(
        f"the folder has no tensors {prefix}*, which predict one token more; take its authors' folder"
    )


def _adapted(
    tensors: Tensors,
    config: ModelConfig,
    prefix: str,
    model_prefix: str,
    adapt: Callable[[ModelConfig, Tensors], Tensors],
) -> Tensors:
    """The tensors of a layer, renamed from names that begin with `prefix` to those of `tensors.py`.

    model_prefix: the beginning of the new names.
    """
    try:
        return adapt(config, {_NAMES.get(name, model_prefix + name): it for name, it in tensors.items()})
    except CheckpointError as error:
        # As the folder has it: its layer 0 is another one.
        raise CheckpointError(str(error).replace(model_prefix, prefix)) from error


def _check_same(copy: SourceTensor, of_model: SourceTensor | None) -> None:
    """Check a layer's copy of a tensor. Raises UnsupportedModelError unless all its values equal those of the
    model's tensor.
    """
    same = of_model is not None and (copy.shape, copy.dtype) == (of_model.shape, of_model.dtype)
    if of_model is not None and same and len(copy.shape) == 2:
        rows, cols = copy.shape
        step = max(1, _COMPARED_BYTES // max(1, 4 * cols))
        pieces = ((first, min(step, rows - first)) for first in range(0, rows, step))
        same = all(
            np.array_equal(copy.rows(first, first + count), of_model.rows(first, first + count))
            for first, count in pieces
        )
    if not same:
        raise UnsupportedModelError(
            f"{copy.name} isn't the model's; embeddings and a head of the layer's own aren't read"
        )
