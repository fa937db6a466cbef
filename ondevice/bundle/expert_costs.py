"""`expert_costs.json`: the cost of fewer experts per token in a mixture of experts, measured on text.

A sidecar (`sidecar.py`) without tensors, added to a finished bundle by `ondevice train expert-costs`, and
shown by `inspect`; no text depends on it. `weights/README.md` is the specification.
"""

from __future__ import annotations

from dataclasses import asdict

from ondevice.bundle.manifest import Manifest
from ondevice.bundle.sidecar import SHA256, Sidecar, parse_sidecar, require_weights, sidecar_text
from ondevice.bundle.strict_json import Section
from ondevice.errors import BundleError
from ondevice.model_config import MAX_CHOSEN
from ondevice.records import dataclass

EXPERT_COSTS_SIDECAR = Sidecar(
    "expert_costs",
    "expert_costs.json",
    "",
    "ondevice train expert-costs --model {model} --text FILE",
    "everything",
)


@dataclass(frozen=True)
class ExpertCost:
    """The effect of one number of chosen experts on a text.

    experts: number of experts that each token chose in a layer.
    perplexity: None if it isn't finite.
    agreement: share of tokens whose likeliest successor is the same as with the model's number of experts.
    hits: share of experts that were in memory when a token came to their layer.
    """

    experts: int
    perplexity: float | None
    agreement: float
    hits: float


@dataclass(frozen=True)
class ExpertCosts:
    """The costs of fewer experts in one model, measured token by token.

    model: `weights_digest` of the weights that they belong to. measured_tokens: length of the text.
    in_memory: number of experts, of all layers together, that had room in memory. points: one for each number
        of experts, the model's number first.
    """

    model: str
    measured_tokens: int
    in_memory: int
    points: tuple[ExpertCost, ...]

    @property
    def baseline(self) -> ExpertCost:
        """The run with the model's number of experts."""
        return self.points[0]


def expert_costs_text(costs: ExpertCosts) -> bytes:
    """The bytes of `expert_costs.json`."""
    return sidecar_text(EXPERT_COSTS_SIDECAR, {**EXPERT_COSTS_SIDECAR.facts, **asdict(costs)})


def parse_expert_costs(data: bytes, manifest: Manifest) -> ExpertCosts:
    """`expert_costs.json` parsed. Raises BundleError if damaged, out of range, or made for other weights."""
    section, config = parse_sidecar(EXPERT_COSTS_SIDECAR, data), manifest.config
    experts = config.experts
    assert experts is not None
    layers = sum(layer.experts is not None for layer in config.layers)
    point = {
        "experts": (Section.integer, 1, experts.chosen),
        "perplexity": (Section.nullable, Section.number, 0.0, 1e30),
        **dict.fromkeys(("agreement", "hits"), (Section.number, 0.0, 1.0)),
    }
    values = section.values(
        {
            "model": SHA256,
            "measured_tokens": (Section.integer, 1, 1 << 48),
            "in_memory": (Section.integer, 0, layers * experts.count),
            "points": (Section.entries, MAX_CHOSEN, ExpertCost, point),
        }
    )
    costs = ExpertCosts(**values)
    require_weights(EXPERT_COSTS_SIDECAR, manifest, costs.model)
    counts = [point.experts for point in costs.points]
    if not counts or counts[0] != experts.chosen or len(set(counts)) < len(counts):
        raise BundleError(
            f"{EXPERT_COSTS_SIDECAR.key}.points must begin with the model's own {experts.chosen} experts, "
            "and name no number twice"
        )
    return costs
