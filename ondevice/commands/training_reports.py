"""What training has made, as tables for people and as JSON. Prints nothing."""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean
from typing import Any

from ondevice.bundle.predictors import OperatingPoint, Predictors
from ondevice.bundle.streams import MultiStreams, medusa_parameters
from ondevice.bundle.thresholds import ThresholdPoint, Thresholds
from ondevice.commands.reports import percent, short
from ondevice.config import ModelConfig


def trained_facts(found: Predictors | Thresholds | MultiStreams) -> dict[str, Any]:
    """`train predictors --json` and `train thresholds --json`."""
    shown = asdict(found)
    return {key: value for key, value in shown.items() if key not in ("model", "sha256", "crcs")}


def predictor_table(found: Predictors) -> str:
    """What each recall target takes and costs, means over layers, and every layer's rank."""
    lines = [
        f"ranks by layer: {' '.join(map(str, found.ranks))}; {found.bits} bits; trained on "
        f"{found.trained_tokens} tokens, measured on {found.measured_tokens}",
        "recall  missed  most of a layer  selected  perplexity  agrees with dense",
    ]
    for point in found.points:
        missed, most = (100 * of(point.false_negatives) for of in (mean, max))
        selected = f"{100 * mean(point.selected):6.1f} %"
        lines.append(f"{point.recall:<8g}{missed:4.2f} %  {most:13.2f} %  {selected}  {_quality(point)}")
    dense = "" if found.perplexity is None else f"{found.perplexity:.3f}"
    lines.append(f"dense      0 %              0 %   100.0 %  {dense}")
    return "\n".join(lines)


def threshold_table(found: Thresholds) -> str:
    """What each sparsity target leaves out and costs: the share of neurons of the layers, and their mean."""
    lines = [
        f"calibrated on {found.calibrated_tokens} tokens, measured on {found.measured_tokens}",
        "sparsity  left out  least and most of a layer  perplexity  agrees with dense",
    ]
    for point in found.points:
        least, most = (percent(share) for share in (min(point.skipped), max(point.skipped)))
        shares = f"{percent(mean(point.skipped)):<10}{f'{least} to {most}':<27}"
        lines.append(f"{point.sparsity:<10g}{shares}{_quality(point)}")
    dense = "" if found.perplexity is None else f"{found.perplexity:.3f}"
    lines.append(f"{'dense':<10}{'0 %':<37}{dense}")
    return "\n".join(lines)


def stream_facts(found: MultiStreams, config: ModelConfig) -> dict[str, Any]:
    """What `streams.json` says, the parameters that it adds, and those of as many of Medusa's heads."""
    return {
        **trained_facts(found),
        "adapter_parameters": found.adapter_parameters(config),
        "embedding_parameters": found.embedding_parameters(config),
        "medusa_parameters": medusa_parameters(config, found.streams),
    }


def stream_table(found: MultiStreams, config: ModelConfig) -> str:
    """The parameters that streams add, beside those of Medusa's heads, and how often each guesses right."""
    added = found.adapter_parameters(config) + found.embedding_parameters(config)
    medusa = medusa_parameters(config, found.streams)
    lines = [
        f"{found.mode}; layers {found.first_layer} to {config.num_layers - 1}; ranks {found.attention_rank} "
        f"of attention, {found.feed_forward_rank} of the feed-forward, {found.pruning_rank} of pruning",
        f"{found.bits} bits; trained on {found.trained_tokens} tokens, measured on {found.measured_tokens}",
        _counted("adapters", found.adapter_parameters(config)),
        _counted("embeddings, pruning", found.embedding_parameters(config)),
        _counted(f"{found.streams} streams", added),
        f"{_counted(f'{found.streams} heads of Medusa', medusa)}, {short(medusa / added)} times as many",
        "guessed right where all streams before had:",
    ]
    for stream, share in enumerate(found.acceptance, 1):
        lines.append(f"{f'stream {stream}':<22}{percent(share):>12}")
    return "\n".join(lines)


def _counted(name: str, parameters: int) -> str:
    return f"{name:<22}{parameters:>15,} parameters"


def _quality(point: OperatingPoint | ThresholdPoint) -> str:
    if point.perplexity is None or point.agreement is None:
        return "not measured"
    return f"{point.perplexity:<12.3f}{100 * point.agreement:.1f} %"
