"""Loads the draft layer of a bundle beside its model: weights from the sidecar, and a cache of its own."""

from __future__ import annotations

from ondevice.backends.base import KVLayout
from ondevice.backends.budgeted import BudgetedBackend
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import IsCancelled
from ondevice.config import RuntimeConfig
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.sequence_state import SequenceState
from ondevice.model.weights import ModelWeights
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
    with FlashReader([bundle.sidecar_file(layer.sidecar.tensors)], runtime.io) as reader:
        loaded = load_draft_layer(bundle, layer, reader, backend, target, 0, max_context, cancelled)
    layout = KVLayout(loaded.config, runtime.kv_bits)
    kv = SequenceState(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
    return DraftLayerState(loaded, kv)
