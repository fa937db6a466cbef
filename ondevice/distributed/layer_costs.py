"""What a token costs in some of a model's layers: bytes that are multiplied, and bytes read from flash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.budget.plan import Plan
from ondevice.budget.sizes import DECODE_TOKENS
from ondevice.bundle.expert_use import ExpertUse
from ondevice.bundle.layout import expert_bytes, neuron_layouts, record_layout
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.model_config import ModelConfig


@dataclass(frozen=True)
class TokenBytes:
    """Bytes for one token that is decoded: of weights that are multiplied, and that are read from flash."""

    computed: float
    read: float


def token_bytes(
    config: ModelConfig,
    quant: QuantConfig,
    plan: Plan,
    active: Sequence[float],
    use: ExpertUse | None = None,
) -> TokenBytes:
    """The bytes of a token in the layers of `config` under a plan, with a full context.

    Args:
        config: of the layers.
        quant: how their weights are quantised.
        plan: their plan.
        active: share of each layer's neurons that a token multiplies; 1 where all are.
        use: what caches of these layers' experts hit, if that was measured; else an expert is found in memory
            as often as another.
    """
    always = plan.weights_bytes + plan.predictor_bytes
    always += 0 if plan.matrices is None else plan.matrices.total_bytes
    segments = plan.segments_for(plan.kv_cache_bytes, DECODE_TOKENS)
    if config.experts is None:
        neurons = sum(
            share * layout.nbytes(count)
            for share, count, layout in zip(active, config.widths, neuron_layouts(config, quant), strict=True)
        )
        kept = segments / max(1, plan.segment.total)
        if plan.selects_neurons:
            kept = min(1.0, plan.kept_slots / config.num_neurons)
        return TokenBytes(always + neurons, neurons * (1 - kept) if plan.offloads_weights else 0.0)
    layers = sum(layer.experts is not None for layer in config.layers)
    experts, total = (
        layers * config.experts.chosen * expert_bytes(config, quant),
        layers * config.experts.count,
    )
    kept_experts = min(total, plan.kept_slots)
    hits = kept_experts / max(1, total) if use is None else use.expected_hits(kept_experts, total)
    dense = held = 0
    if plan.dense is not None:
        dense = record_layout(config, quant).stride * sum(map(config.dense_neurons, config.layers))
        held = dense * plan.dense_segments // max(1, plan.dense.total)
    read = experts * (1 - hits) + dense - held if plan.offloads_weights else 0.0
    return TokenBytes(always + experts + dense, read)


def active_shares(bundle: Bundle, runtime: RuntimeConfig) -> list[float]:
    """For each layer, the share of its neurons that a token multiplies, as far as the bundle knows it.

    That is by the point of `predicted`, and in `exact` by the hotness of its neurons; else 1.
    Raises BundleError for damaged hotness, UnsupportedModelError for a point that the bundle doesn't have.
    """
    found = [1.0] * bundle.config.num_layers
    if runtime.sparsity == "predicted" and bundle.predictors is not None:
        return list(bundle.predictors.point(runtime.predictor_recall).selected)
    if bundle.config.experts is not None:
        return found
    shares = bundle.frequencies() if runtime.sparsity == "exact" else None
    return found if shares is None else [float(layer.mean()) for layer in shares]
