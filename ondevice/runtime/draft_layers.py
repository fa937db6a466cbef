"""The draft layer of a bundle: added to it, and loaded beside its model with a cache of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ondevice.backends.base import KVLayout
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import IsCancelled
from ondevice.config import AUTO_QUANT, RuntimeConfig
from ondevice.errors import UsageError
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.kv_cache import KVCache
from ondevice.model.weights import ModelWeights
from ondevice.runtime.models import find_model
from ondevice.speculation.drafters.draft_layer import DraftLayerState


def open_draft_layer(
    bundle: Bundle,
    layer: DraftLayer,
    runtime: RuntimeConfig,
    backend: BudgetedBackend,
    target: ModelWeights,
    max_context: int,
    cancelled: IsCancelled,
) -> DraftLayerState:
    """Load a bundle's draft layer into its model's backend, with a cache of its own keys and values.

    runtime: settled. target: the model's weights. max_context: tokens of the longest text.
    Raises what `load_draft_layer` raises.
    """
    with FlashReader([bundle.added_file(layer.sidecar.tensors)], runtime.io) as reader:
        loaded = load_draft_layer(bundle, layer, reader, backend, target, 0, max_context, cancelled)
    layout = KVLayout(loaded.config, runtime.kv_bits)
    kv = KVCache(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
    return DraftLayerState(loaded, kv)


BITS: dict[str, Literal[4, 8, 16]] = {AUTO_QUANT: 8, "q4": 4, "q8": 8, "f16": 16}
"""Bits of a draft layer's codes by `--quant`."""


def add_draft_layer(source: str, model: str, quant: str = AUTO_QUANT) -> tuple[Path, DraftLayer]:
    """Add the draft layer in the folder `source` to the bundle of the model that it was trained for.

    quant: as `--quant` has it. Returns the bundle's folder and the layer.

    Raises UsageError for bits that a draft layer can't have, ModelNotFoundError, and what `convert_eagle`
    raises.
    """
    from ondevice.converters.draft_layers.eagle import convert_eagle

    if quant not in BITS:
        raise UsageError(f"--quant {quant} isn't possible with --draft-for; take {', '.join(BITS)}")
    path = find_model(model)
    return path, convert_eagle(source, path, BITS[quant])
