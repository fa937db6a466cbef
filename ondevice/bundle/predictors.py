"""`predictors.json` and `predictors.safetensors`: small low-rank predictors of neurons that will fire.

A sidecar (`sidecar.py`), added to a finished bundle by `ondevice train predictors`. `weights/README.md` is
the specification.

Legend: D hidden size, F neurons of a layer, R rank of its predictor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

from ondevice.bundle.file_layouts import TensorSpec, linear_tensors, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import (
    BITS,
    CRCS,
    MAX_POINTS,
    SHA256,
    TOKENS,
    Sidecar,
    check_sidecar,
    parse_sidecar,
    part_rule,
    sidecar_text,
)
from ondevice.bundle.strict_json import Section
from ondevice.config import GROUP_SIZE, TARGET_RANGE, RowFormat, is_target
from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

PREDICTORS = "predictors.safetensors"
PREDICTORS_MANIFEST = "predictors.json"
MAX_RANK = 1 << 13
PREDICTORS_SIDECAR = Sidecar(
    "predictors",
    PREDICTORS_MANIFEST,
    PREDICTORS,
    "ondevice train predictors --model {model} --text FILE",
    "every --sparsity but `predicted`",
    {"version": 1, "group_size": GROUP_SIZE},
)


@dataclass(frozen=True)
class OperatingPoint:
    """The settings for one recall target, and their effect on text that wasn't used for training or for
    setting thresholds.

    recall: requested share of the firing neurons that is selected.
    offsets: one per layer, added to every score of the layer.
    false_negatives: share of the firing neurons that is missed, per layer.
    false_positives: share of the neurons that don't fire that is selected, per layer.
    selected: share of all neurons that is selected, per layer.
    perplexity: None until measured.
    agreement: share of tokens whose likeliest successor is that of the dense model; None until measured.
    """

    recall: float
    offsets: tuple[float, ...]
    false_negatives: tuple[float, ...]
    false_positives: tuple[float, ...]
    selected: tuple[float, ...]
    perplexity: float | None
    agreement: float | None


@dataclass(frozen=True)
class Predictors:
    """Low-rank predictors of one model: `score = up @ (down @ x) + bias + offset`, with x the normed input.

    model: `weights_digest` of the weights that they belong to. trained_tokens, measured_tokens: lengths of
    the texts. perplexity: that of the dense model on the measured text. crcs: CRC32C of each MiB of the file
    with the tensors. part_of: in a slice, the `parts.sidecar_digest` of the complete model's predictors.
    """

    model: str
    bits: Literal[4, 8, 16]
    ranks: tuple[int, ...]
    trained_tokens: int
    measured_tokens: int
    perplexity: float | None
    points: tuple[OperatingPoint, ...]
    sha256: str
    crcs: tuple[int, ...]
    part_of: str = ""

    def point(self, recall: float) -> OperatingPoint:
        """The operating point of a recall target. Raises UnsupportedModelError if there is none."""
        for point in self.points:
            if point.recall == recall:
                return point
        raise UnsupportedModelError(
            f"--predictor-recall {recall:g} isn't one of those that this model has: {self.listed_recalls}"
        )

    @property
    def listed_recalls(self) -> str:
        """The recall target of every point, as text for messages."""
        return ", ".join(f"{point.recall:g}" for point in self.points)


def predictor_tensors(
    config: ModelConfig, bits: Literal[4, 8, 16], ranks: tuple[int, ...]
) -> Mapping[str, TensorSpec]:
    """The exact tensors of the file, in the order of their bytes: per layer down (R, D), up (F, R), bias."""
    tensors: dict[str, TensorSpec] = {}
    stored = RowFormat(bits)
    for layer, rank in enumerate(ranks):
        tensors |= linear_tensors(f"layers.{layer}.down", rank, config.hidden_size, stored)
        tensors |= linear_tensors(f"layers.{layer}.up", config.widths[layer], rank, stored)
        tensors[f"layers.{layer}.bias"] = TensorSpec("F32", (config.widths[layer],))
    return tensors


def predictors_text(predictors: Predictors) -> bytes:
    """The bytes of `predictors.json`."""
    return sidecar_text(PREDICTORS_SIDECAR, {**PREDICTORS_SIDECAR.facts, **asdict(predictors)})


def parse_predictors(data: bytes, manifest: Manifest) -> Predictors:
    """The parsed `predictors.json`. Raises BundleError if damaged, out of range, or made for other
    weights."""
    predictors = _parse(parse_sidecar(PREDICTORS_SIDECAR, data), manifest.config)
    layout = tensors_layout(predictor_tensors(manifest.config, predictors.bits, predictors.ranks))
    check_sidecar(PREDICTORS_SIDECAR, manifest, predictors.model, layout, predictors.crcs)
    return predictors


def _parse(section: Section, config: ModelConfig) -> Predictors:
    values = section.values(
        {
            "ranks": (Section.integers, config.num_layers, GROUP_SIZE, MAX_RANK),
            "model": SHA256,
            "bits": BITS,
            "trained_tokens": TOKENS,
            "measured_tokens": TOKENS,
            "perplexity": (Section.nullable, Section.number, 0.0, 1e30),
            "points": (_parse_points, config),
            "sha256": SHA256,
            "crcs": CRCS,
            **part_rule(config),
        }
    )
    predictors = Predictors(**values)
    if len(predictors.ranks) != config.num_layers or any(rank % GROUP_SIZE for rank in predictors.ranks):
        raise BundleError(
            f"predictors.ranks must hold {config.num_layers} multiples of {GROUP_SIZE}, one per layer"
        )
    return predictors


def _parse_points(section: Section, key: str, config: ModelConfig) -> tuple[OperatingPoint, ...]:
    rules = {
        "recall": (Section.number, 0.0, 1.0),
        "offsets": (_per_layer, config, -1e9, 1e9),
        **dict.fromkeys(("false_negatives", "false_positives", "selected"), (_per_layer, config, 0.0, 1.0)),
        "perplexity": (Section.nullable, Section.number, 0.0, 1e30),
        "agreement": (Section.nullable, Section.number, 0.0, 1.0),
    }
    points: tuple[OperatingPoint, ...] = section.entries(key, MAX_POINTS, OperatingPoint, rules)
    recalls = [point.recall for point in points]
    if not recalls or recalls != sorted(set(recalls)):
        raise BundleError(f"{section.where}.points must be one or more, of ascending recall")
    for recall in recalls:
        if not is_target(recall):
            raise BundleError(f"{section.where}.points: recall is {recall:g}; it must be {TARGET_RANGE}")
    return points


def _per_layer(
    section: Section, name: str, config: ModelConfig, low: float, high: float
) -> tuple[float, ...]:
    """A list with one finite number from `low` to `high` for each layer. Raises BundleError for anything
    else.
    """
    values = section.numbers(name, config.num_layers, low, high)
    if len(values) != config.num_layers:
        raise BundleError(f"{section.where}.{name} has {len(values)} values for {config.num_layers} layers")
    return values
