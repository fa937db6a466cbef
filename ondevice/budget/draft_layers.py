"""A draft layer's memory. All sizes are bytes."""

from __future__ import annotations

from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.sizes import draft_nodes, interleaved_bytes, widest_pass
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.matrix_layout import padded
from ondevice.config import GROUP_SIZE, RuntimeConfig
from ondevice.model.draft_layer import PIECE_ROWS
from ondevice.model_config import ModelConfig
from ondevice.units import PAGE_BYTES


def draft_layer_bytes(
    layer: DraftLayer, target: ModelConfig, runtime: RuntimeConfig, max_context: int
) -> int:
    """Memory of a draft layer for texts of `max_context` tokens: its weights, keys and values, and rows of
    activations.
    """
    return loaded_bytes(layer, target) + _state_bytes(layer, target, runtime, max_context)


def loaded_bytes(layer: DraftLayer, target: ModelConfig) -> int:
    """Memory of a draft layer's weights, held from the end of loading on."""
    total = 0
    for matrix in layer.matrices(target).values():
        nbytes = interleaved_bytes(matrix.rows, matrix.cols, matrix.stored(layer.bits))
        # Each expert begins on a page.
        total += nbytes if matrix.number == 1 else matrix.number * padded(nbytes, PAGE_BYTES)
    total += 4 * sum(layer.vectors(target).values())
    if layer.own_head:
        total += 8 * layer.tokens
    return total + 2 * target.vocab_size * padded(layer.table_width, GROUP_SIZE)


def _state_bytes(layer: DraftLayer, target: ModelConfig, runtime: RuntimeConfig, max_context: int) -> int:
    """Memory of a draft layer apart from weights: keys and values of a context and a draft, hidden states,
    and scratch memory.
    """
    nodes, width = draft_nodes(runtime), layer.hidden_size
    ahead = max(nodes, layer.block)
    kv = KVLayout(layer.layer_config(max_context), runtime.kv_bits).nbytes(max_context + ahead)
    # Hidden states as passes return them, and as rows that wait for their tokens.
    tapped = 4 * widest_pass(target, runtime) * (len(layer.taps) * target.hidden_size + width)
    if runtime.backend == "mlx" and target.model_layers in layer.taps:
        # The last layer's output comes in two parts, and is joined.
        tapped += 2 * 4 * widest_pass(target, runtime) * target.hidden_size
    # Of nodes; those of a block come all at once, as the head's product and a copy.
    logits = 4 * (nodes + 2 + (2 * layer.block_drafts if layer.block else 0)) * (layer.tokens + width)
    # Inputs, projections and queries, copies of gates, ups and their products, normed outputs.
    row = 4 * width + 2 * layer.qkv_rows + layer.query_size + 4 * layer.neurons
    row += len(layer.taps) * target.hidden_size + layer.embedding_width(target)
    row += layer.output_gates * layer.query_size + layer.states_normed * width
    row += (layer.out_factor != 1.0) * layer.query_size
    if layer.latent is not None:
        # Queries of latents, latents, and each head's attended values; queries before they meet keys.
        row += layer.num_heads * (2 * layer.latent.width + layer.latent.query_width) + layer.latent.width
    if (experts := layer.experts) is not None:
        # Logits, weights and ids; each expert's output, alone and stacked; the joined output, old and new.
        row += 3 * experts.count + (2 * experts.chosen + 6) * width + 4 * experts.neurons
    return kv + tapped + logits + 2 * 4 * PIECE_ROWS * row + 8 * max_context
