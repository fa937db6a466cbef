"""`thresholds.json` and `thresholds.safetensors`: gate thresholds, above which a neuron counts for a token.

A sidecar (`sidecar.py`), added to a finished bundle by `ondevice train thresholds`. `weights/README.md` is
the specification. A neuron counts for a token if |act(gate)| * importance exceeds its layer's threshold. CATS
(arXiv 2404.08763) cuts at a percentile of |act(gate)|. A neuron's importance, the size of the output per unit
of |act(gate)|, turns that into a threshold per channel, as in CHESS (arXiv 2409.01366).

Legend: F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ondevice.bundle.layout import FileLayout, TensorSpec, tensors_layout
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import (
    Sidecar,
    check_sidecar,
    parse_part_of,
    parse_points,
    parse_sidecar,
    per_layer,
    point_at,
    sidecar_text,
)
from ondevice.bundle.strict_json import Section
from ondevice.model_config import ModelConfig

THRESHOLDS = "thresholds.safetensors"
THRESHOLDS_MANIFEST = "thresholds.json"
THRESHOLDS_VERSION = 1
THRESHOLDS_SIDECAR = Sidecar(
    "thresholds",
    THRESHOLDS_MANIFEST,
    THRESHOLDS,
    "ondevice train thresholds --model {model} --text FILE",
    "every --sparsity but `threshold`",
)


@dataclass(frozen=True)
class ThresholdPoint:
    """Settings for one sparsity target, and their effect on text that wasn't used for calibration.

    sparsity: requested share of a layer's neurons that don't count for a token; inside experts, of those that
        fire.
    thresholds: one per layer, which |act(gate)| * importance must exceed.
    skipped: measured share of neurons that don't count, per layer.
    perplexity: None until measured.
    agreement: share of tokens whose likeliest successor is that of the dense model; None until measured.
    """

    sparsity: float
    thresholds: tuple[float, ...]
    skipped: tuple[float, ...]
    perplexity: float | None
    agreement: float | None


@dataclass(frozen=True)
class Thresholds:
    """The calibrated thresholds of one model.

    model: `weights_digest` of the weights that they belong to. calibrated_tokens, measured_tokens: lengths of
    the texts. perplexity: of the dense model on the measured text. crcs: CRC32C of each MiB of the file with
    the tensors. part_of: in a slice, `parts.sidecar_digest` of the whole model's.
    """

    model: str
    calibrated_tokens: int
    measured_tokens: int
    perplexity: float | None
    points: tuple[ThresholdPoint, ...]
    sha256: str
    crcs: tuple[int, ...]
    part_of: str = ""

    def point(self, sparsity: float) -> ThresholdPoint:
        """The operating point of a sparsity target. Raises UnsupportedModelError if there is none."""
        return point_at(self.points, "sparsity", sparsity, "--threshold-sparsity")


def threshold_tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """The exact tensors of the file, in the order of their bytes: the importance of every layer's neurons."""
    specs = (TensorSpec("F32", (neurons,)) for neurons in config.widths)
    return {importance_name(layer): spec for layer, spec in enumerate(specs)}


def importance_name(layer: int) -> str:
    """Name of the tensor with the importance of a layer's neurons."""
    return f"layers.{layer}.importance"


def thresholds_layout(config: ModelConfig) -> FileLayout:
    """Size, header and checksum units of `thresholds.safetensors`."""
    return tensors_layout(threshold_tensors(config))


def thresholds_text(thresholds: Thresholds) -> bytes:
    """The bytes of `thresholds.json`."""
    return sidecar_text(THRESHOLDS_SIDECAR, {"version": THRESHOLDS_VERSION, **asdict(thresholds)})


def parse_thresholds(data: bytes, manifest: Manifest) -> Thresholds:
    """`thresholds.json` parsed. Raises BundleError if damaged, out of range, or made for other weights."""
    thresholds = _parse(parse_sidecar(THRESHOLDS_SIDECAR, data), manifest.config)
    layout = thresholds_layout(manifest.config)
    check_sidecar(THRESHOLDS_SIDECAR, manifest, thresholds.model, layout, thresholds.crcs)
    return thresholds


def _parse(section: Section, config: ModelConfig) -> Thresholds:
    section.equal("version", THRESHOLDS_VERSION)
    thresholds = Thresholds(
        model=section.text("model", 64),
        calibrated_tokens=section.integer("calibrated_tokens", 0, 1 << 48),
        measured_tokens=section.integer("measured_tokens", 0, 1 << 48),
        perplexity=section.optional_number("perplexity", 0.0, 1e30),
        points=parse_points(section, "sparsity", lambda point: _parse_point(point, config)),
        sha256=section.text("sha256", 64),
        crcs=section.integers("crcs", 1 << 16, 0, (1 << 32) - 1),
        part_of=parse_part_of(section, config),
    )
    section.close()
    return thresholds


def _parse_point(section: Section, config: ModelConfig) -> ThresholdPoint:
    point = ThresholdPoint(
        sparsity=section.number("sparsity", 0.0, 1.0),
        # Below zero every neuron would count; float32 holds up to 3e38.
        thresholds=per_layer(section, "thresholds", config, 0.0, 1e38),
        skipped=per_layer(section, "skipped", config, 0.0, 1.0),
        perplexity=section.optional_number("perplexity", 0.0, 1e30),
        agreement=section.optional_number("agreement", 0.0, 1.0),
    )
    section.close()
    return point
