"""What a token costs: bytes of weights that are multiplied, bytes read from flash, and the rate of these
reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.budget.plan import Plan
from ondevice.budget.sizes import DECODE_TOKENS, STREAM_SLOT_BYTES, SegmentShape
from ondevice.bundle.expert_use import ExpertUse
from ondevice.bundle.layout import expert_bytes, largest_neuron_layout, neuron_layouts, record_layout
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.flash.cost_model import CostModel
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per decoded token: of weights that are multiplied, and that are read from flash."""

    computed: float
    read: float


def token_bytes(
    config: ModelConfig,
    quant: QuantConfig,
    plan: Plan,
    active: Sequence[float],
    use: ExpertUse | None = None,
    kv_bytes: int | None = None,
) -> TokenBytes:
    """The bytes of weights that a token multiplies, and that it reads from flash, in the layers of `config`
    under a plan. Drafts aren't counted.

    Args:
        config: the layers.
        quant: how their weights are quantized.
        plan: their plan.
        active: share of each layer's neurons that a token multiplies, up to 1.
        use: measured hit rates of these layers' experts; None: all experts are equally likely to be in
            memory.
        kv_bytes: keys and values that are in memory; by default those of a full context.
    """
    kv_bytes = plan.kv_cache_bytes if kv_bytes is None else kv_bytes
    units, segments = plan.held_weights(kv_bytes, DECODE_TOKENS)
    always, read = float(plan.weights_bytes + plan.predictor_bytes), 0.0
    if plan.matrices is not None:
        always += plan.matrices.total_bytes
        read += plan.matrices.total_bytes - plan.matrices.held_bytes(units)
    if config.experts is None:
        if isinstance(plan.segment, SegmentShape):
            layouts = zip(neuron_layouts(config, quant), config.widths, strict=True)
            sizes = [layout.nbytes(count) for layout, count in layouts]
            kept = _held_share(plan.segment, segments)
        else:
            # Gate rows that select neurons are among the weights of every token.
            sizes = [count * plan.segment.slot_bytes for count in config.widths]
            kept = min(1.0, plan.kept_slots_for(kv_bytes) / config.num_neurons)
        neurons = sum(share * nbytes for share, nbytes in zip(active, sizes, strict=True))
        read += neurons * (1 - kept)
        return TokenBytes(always + neurons, read if plan.offloads_weights else 0.0)
    layers = sum(layer.experts is not None for layer in config.layers)
    experts = layers * config.experts.chosen * expert_bytes(config, quant)
    total = layers * config.experts.count
    kept_experts = min(total, plan.kept_slots_for(kv_bytes))
    hits = kept_experts / max(1, total) if use is None else use.expected_hits(kept_experts, total)
    read += experts * (1 - hits)
    dense = 0
    if plan.dense is not None:
        dense = record_layout(config, quant).stride * sum(map(config.dense_neurons, config.layers))
        read += dense * (1 - _held_share(plan.dense, plan.dense_segments))
    return TokenBytes(always + experts + dense, read if plan.offloads_weights else 0.0)


def _held_share(shape: SegmentShape, segments: int) -> float:
    """The share of all neurons' bytes that the first `segments` segments hold, from 0 to 1."""
    return shape.bytes_of(segments) / max(1, shape.bytes_of(shape.total))


def active_shares(bundle: Bundle, runtime: RuntimeConfig) -> list[float]:
    """For each layer, the share of its neurons that a token multiplies, as far as the bundle knows it.

    In mode `predicted` it comes from the operating point, in `exact` from the hotness of neurons; otherwise
    it is 1. Raises BundleError for damaged hotness, UnsupportedModelError for a point that the bundle doesn't
    have.
    """
    everything = [1.0] * bundle.config.num_layers
    if runtime.sparsity == "predicted" and bundle.predictors is not None:
        return list(bundle.predictors.point(runtime.predictor_recall).selected)
    if bundle.config.experts is not None:
        return everything
    shares = bundle.frequencies() if runtime.sparsity == "exact" else None
    return everything if shares is None else [float(layer.mean()) for layer in shares]


def flash_rate(config: ModelConfig, quant: QuantConfig, sparsity: str, costs: CostModel) -> float:
    """The rate in bytes per second at which passes read flash: by experts, by neurons, or by many neurons in
    a row.
    """
    nbytes = STREAM_SLOT_BYTES
    if config.experts is not None:
        nbytes = min(nbytes, expert_bytes(config, quant))
    elif sparsity != "dense":
        nbytes = largest_neuron_layout(config, quant).stride
    return costs.bytes_per_second(nbytes, costs.threads(nbytes))
