"""What the parts of a model take in memory under the MLX backend. Pure functions, in bytes.

operand_bytes: of what matrices multiply in, 4 or 2: scales, biases and 16-bit values are held in it.
"""

from __future__ import annotations

from ondevice.backends.base import BLOCK_TOKENS, KVLayout
from ondevice.budget.sizes import (
    SegmentShape,
    StreamShape,
    context_tokens,
    fetch_neurons,
    logits_rows,
    segment_shape,
    widest_pass,
)
from ondevice.bundle.layout import neuron_layout, padded
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.streams import MultiStreams
from ondevice.config import GROUP_SIZE, ModelConfig, QuantConfig, RuntimeConfig
from ondevice.units import PAGE_BYTES

MLX_CACHE_BYTES = 16 << 20
"""Freed arrays that MLX keeps for the next ones, at most."""
MLX_SEGMENT_BYTES = 16 << 20
MLX_STAGES = 2
"""Of gathered neurons that are multiplied (`backends/mlx.py`)."""
MLX_STREAM_SLOTS = 4
"""Segments of records: two that are multiplied, two on their way from flash."""
MLX_PIECES = 2
"""Streamed segments under way together: MLX takes their records apart while it multiplies."""
LAYERS_READ = 2
"""Whose keys and values are there as they were read, at once: MLX begins a layer before the last one ends."""


def held_bytes(elements: int, bits: int, operand_bytes: int) -> int:
    """So many elements of matrices whose rows are whole groups."""
    if bits == 16:
        return elements * operand_bytes
    return elements * bits // 8 + elements // GROUP_SIZE * 2 * operand_bytes


def mlx_segment_shape(config: ModelConfig, quant: QuantConfig, operand_bytes: int) -> SegmentShape:
    """Ranges that are summed by themselves: fewer, larger ones than the kernels have, as each is launched."""
    block = _neurons_bytes(config, quant, operand_bytes, GROUP_SIZE)
    return segment_shape(config, quant, block, MLX_SEGMENT_BYTES)


def mlx_stream_shape(config: ModelConfig, quant: QuantConfig, operand_bytes: int) -> StreamShape:
    """A piece is a whole segment: pieces are summed one by one, and mustn't depend on what is resident."""
    neurons = mlx_segment_shape(config, quant, operand_bytes).neurons
    records = neurons * neuron_layout(config, quant).stride
    return StreamShape(
        neurons=neurons,
        slot_bytes=padded(records, PAGE_BYTES) + PAGE_BYTES,
        slots=MLX_STREAM_SLOTS,
        packed_bytes=PAGE_BYTES + MLX_PIECES * _neurons_bytes(config, quant, operand_bytes, neurons),
    )


def mlx_stage_neurons(config: ModelConfig, quant: QuantConfig, operand_bytes: int) -> int:
    """Neurons in one stage: a token's of a layer, ranges in whole blocks each, and at least a segment's."""
    segment = mlx_segment_shape(config, quant, operand_bytes)
    return max(segment.neurons, padded(fetch_neurons(config), GROUP_SIZE) + segment.per_layer * GROUP_SIZE)


def mlx_stage_bytes(config: ModelConfig, quant: QuantConfig, operand_bytes: int) -> int:
    """Room in which gathered neurons are multiplied, and their values in the operands' type meanwhile."""
    neurons = mlx_stage_neurons(config, quant, operand_bytes)
    stage = neurons * neuron_layout(config, quant).stride
    return MLX_STAGES * stage + _neurons_bytes(config, quant, operand_bytes, neurons)


def mlx_weights_bytes(
    config: ModelConfig, quant: QuantConfig, predictors: Predictors | None, gates: bool, operand_bytes: int
) -> int:
    """What operands wider than a bundle's float16 add to the matrices of every token."""
    hidden, neurons = padded(config.hidden_size, GROUP_SIZE), config.intermediate_size
    queries = padded(config.query_size, GROUP_SIZE)
    layer = config.qkv_size * hidden + config.hidden_size * queries + (neurons * hidden if gates else 0)
    elements = config.num_layers * layer + config.vocab_size * hidden
    more = held_bytes(elements, quant.bits, operand_bytes) - held_bytes(elements, quant.bits, 2)
    if predictors is not None:
        low = sum(padded(rank, GROUP_SIZE) * (hidden + neurons) for rank in predictors.ranks)
        more += held_bytes(low, predictors.bits, operand_bytes) - held_bytes(low, predictors.bits, 2)
    return more


def mlx_stream_bytes(config: ModelConfig, streams: MultiStreams | None, operand_bytes: int) -> int:
    """What operands wider than float16 add to the streams' adapters."""
    if streams is None:
        return 0
    elements = sum(rows * padded(cols, GROUP_SIZE) for rows, cols in streams.matrices(config).values())
    return held_bytes(elements, streams.bits, operand_bytes) - held_bytes(elements, streams.bits, 2)


def mlx_activation_bytes(config: ModelConfig, runtime: RuntimeConfig, tokens: int, operand_bytes: int) -> int:
    """Scratch memory of a pass over so many tokens: what a layer computes, before MLX lets it go.

    Scores of attention exist whole, with what hides some of them.
    """
    context = context_tokens(config, runtime)
    neurons = max(fetch_neurons(config), config.intermediate_size)
    per_token = 8 * config.hidden_size + 3 * config.qkv_size + 4 * config.query_size + 4 * neurons
    scores = (config.num_heads + 1) * context
    rows = min(widest_pass(config, runtime), logits_rows(config))
    logits = max(8 * 8, 3 * 4 * rows) * config.vocab_size
    stored = _stored_bytes(config, runtime, context, operand_bytes)
    return 4 * tokens * (per_token + scores) + stored + logits + MLX_CACHE_BYTES


def _stored_bytes(config: ModelConfig, runtime: RuntimeConfig, context: int, operand_bytes: int) -> int:
    """What keys and values of a full context take beside what they are stored in (`backends/mlx_kv.py`).

    A layer's are there twice where they grow, and read in the operands' type, of which no copy is made where
    they are stored in it; by a layer, while the next one is begun.
    """
    layout = KVLayout(config, runtime.kv_bits)
    grown = layout.head_bytes * config.num_kv_heads * context // BLOCK_TOKENS
    copied = 2 * operand_bytes * config.kv_size * context if runtime.kv_bits != 8 * operand_bytes else 0
    return LAYERS_READ * max(grown, copied)


def _neurons_bytes(config: ModelConfig, quant: QuantConfig, operand_bytes: int, neurons: int) -> int:
    row = padded(config.hidden_size, GROUP_SIZE)
    return 3 * held_bytes(neurons * row, quant.bits, operand_bytes)
