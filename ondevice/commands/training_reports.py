"""Results of training, as tables for people and as JSON. Prints nothing."""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean
from typing import Any

from ondevice.bundle.expert_costs import ExpertCost, ExpertCosts
from ondevice.bundle.expert_use import ExpertUse
from ondevice.bundle.ngrams import PAGE_BYTES, Ngrams, index_bytes
from ondevice.bundle.predictors import OperatingPoint, Predictors
from ondevice.bundle.streams import MultiStreams, medusa_parameters
from ondevice.commands.reports import percent, short
from ondevice.model_config import ModelConfig
from ondevice.speculation.datastore import READER_BYTES
from ondevice.units import format_bytes


def trained_facts(
    sidecar: Predictors | MultiStreams | ExpertCosts | ExpertUse | Ngrams,
) -> dict[str, Any]:
    """The object that `--json` prints for every training except that of streams."""
    shown = asdict(sidecar)
    return {key: value for key, value in shown.items() if key not in ("model", "tokenizer", "sha256", "crcs")}


def predictor_table(predictors: Predictors) -> str:
    """`train predictors` for people: each layer's rank, and per recall target the errors and the quality."""
    lines = [
        f"ranks by layer: {' '.join(map(str, predictors.ranks))}; {predictors.bits} bits; trained on "
        f"{predictors.trained_tokens} tokens, measured on {predictors.measured_tokens}",
        "recall  missed  most of a layer  selected  perplexity  agrees with dense",
    ]
    for point in predictors.points:
        missed, most = (100 * of(point.false_negatives) for of in (mean, max))
        selected = f"{100 * mean(point.selected):6.1f} %"
        lines.append(f"{point.recall:<8g}{missed:4.2f} %  {most:13.2f} %  {selected}  {_quality(point)}")
    dense = "" if predictors.perplexity is None else f"{predictors.perplexity:.3f}"
    lines.append(f"dense      0 %              0 %   100.0 %  {dense}")
    return "\n".join(lines)


def expert_cost_table(costs: ExpertCosts) -> str:
    """`train expert-costs` for people: by number of experts, perplexity and shares in memory."""
    lines = [
        f"fewer experts, measured token by token on {costs.measured_tokens} tokens, with room for "
        f"{costs.in_memory} experts:",
        f"{'':<28}perplexity     costs  agrees   in memory",
    ]
    for point in costs.points:
        baseline = point is costs.baseline
        name = f"the model's own {point.experts}" if baseline else f"--experts {point.experts}"
        shares = f"{percent(point.agreement):<9}{percent(point.hits)}"
        lines.append(f"{name:<28}{_perplexity(point, costs.baseline):<20}  {shares}")
    return "\n".join(lines)


def _perplexity(point: ExpertCost, baseline: ExpertCost) -> str:
    """A perplexity, and the percentage by which it exceeds the one with the model's number of experts."""
    if point.perplexity is None:
        return "not finite"
    shown = f"{point.perplexity:<10.3f}"
    if point is baseline or not baseline.perplexity:
        return shown
    return f"{shown}{100 * (point.perplexity / baseline.perplexity - 1):+8.2f} %"


def expert_use_table(use: ExpertUse) -> str:
    """`train expert-use` for people: the hit rates of caches, by the number of experts that they keep."""
    lines = [f"counted on {use.tokens:,} tokens; hits of {use.replayed_tokens:,} by experts kept:"]
    lines += [f"{point.experts:>8,}{100 * point.hits:8.1f} %" for point in use.points]
    return "\n".join(lines)


def ngrams_table(ngrams: Ngrams) -> str:
    """`train ngrams` for people: the sizes of the datastore, and of its index in memory."""
    pages = ngrams.pages + ngrams.frequent
    return "\n".join(
        [
            f"datastore of {ngrams.tokens:,} tokens: {format_bytes(pages * PAGE_BYTES)} in {pages:,} pages",
            f"{ngrams.frequent:,} frequent contexts have a page of their own",
            f"in memory while it drafts: {format_bytes(index_bytes(ngrams) + READER_BYTES)}",
        ]
    )


def stream_facts(streams: MultiStreams, config: ModelConfig) -> dict[str, Any]:
    """The object that `--json` prints for streams: `streams.json`, the parameters that streams add, and those
    of as many Medusa heads.
    """
    return {
        **trained_facts(streams),
        "adapter_parameters": streams.adapter_parameters(config),
        "embedding_parameters": streams.embedding_parameters(config),
        "medusa_parameters": medusa_parameters(config, streams.streams),
    }


def stream_table(streams: MultiStreams, config: ModelConfig) -> str:
    """`train streams` for people: the parameters added, those of as many Medusa heads, acceptance rates."""
    added = streams.adapter_parameters(config) + streams.embedding_parameters(config)
    medusa = medusa_parameters(config, streams.streams)
    lines = [
        f"{streams.mode}; layers {streams.first_layer} to {config.num_layers - 1}; ranks "
        f"{streams.attention_rank} of attention, {streams.feed_forward_rank} of the feed-forward",
        f"{streams.bits} bits; trained on {streams.trained_tokens} tokens, measured on "
        f"{streams.measured_tokens}",
        _counted("adapters", streams.adapter_parameters(config)),
        _counted("embeddings", streams.embedding_parameters(config)),
        _counted(f"{streams.streams} streams", added),
        f"{_counted(f'{streams.streams} heads of Medusa', medusa)}, {short(medusa / added)} times as many",
        "right, where all streams before were:",
    ]
    for stream, share in enumerate(streams.acceptance, 1):
        lines.append(f"{f'stream {stream}':<22}{percent(share):>12}")
    return "\n".join(lines)


def _counted(name: str, parameters: int) -> str:
    return f"{name:<22}{parameters:>15,} parameters"


def _quality(point: OperatingPoint) -> str:
    if point.perplexity is None or point.agreement is None:
        return "not measured"
    return f"{point.perplexity:<12.3f}{100 * point.agreement:.1f} %"
