"""A layer's mixture of experts (arXiv 1701.06538): the experts, and how a router chooses among them.

Legend: E experts of a layer, k chosen for a token.
"""

from __future__ import annotations

from typing import Literal, get_args

from ondevice.errors import UnsupportedModelError
from ondevice.model_config.checks import check_choice, check_integer
from ondevice.records import dataclass

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
"""How a router's logits become the weights of the chosen experts.

`softmax` of all logits, or `sigmoid` of each; the highest are chosen. `sparsemixer` (arXiv 2409.12136): the
two highest one after the other, each weighted by a softmax of the logits near it.
"""
ExpertStorage = Literal["matrices", "neurons"]
"""How an expert is stored: as matrices, or neuron by neuron."""
MAX_EXPERTS = 1 << 12
MAX_CHOSEN = 1 << 8
"""Largest numbers of experts of a layer, and of a token's experts."""
MAX_EXPERT_NEURONS = 1 << 20
MAX_WEIGHT_FACTOR = 1e4
MAX_JITTER = 1.0


@dataclass(frozen=True)
class ExpertsSpec:
    """A layer's experts: each is a feed-forward of `neurons` neurons, with the layer's arithmetic.

    A layer's neurons are those of its dense feed-forward ("shared experts"), if it has one, then those of
    expert 0, expert 1 and so on. A token's output is the dense feed-forward's plus the weighted outputs of
    its k experts, added in ascending order. Of equal scores the lower-numbered expert's is chosen.

    Args:
        count: E.
        chosen: k.
        neurons: neurons of one expert.
        scoring: how logits become weights.
        renormalised: whether a token's weights are divided by their sum.
        factor: multiplies the weights, a float32 value.
        choice_bias: whether each expert's score gets a bias when experts are chosen, which doesn't change
            weights.
        router_bias: whether the router's product has a bias, which is part of the logits.
        groups: number of equal groups of experts. A token chooses among the experts of its `chosen_groups`
            best groups; a group's score is the sum of its `group_best` best scores.
        chosen_groups: see `groups`.
        group_best: 1 or 2.
        jitter: for `sparsemixer`: logits count as near the highest within twice this share of it.
        shared_gate: whether the dense feed-forward's output is multiplied by the sigmoid of a product.
        apart: whether experts and dense feed-forward are parallel blocks, as in Gemma 4, with separate norms
            of the router's input, the experts' input and both outputs, and a factor of each expert's weights.
        layout: how experts are stored. With `neurons`, their neurons can be read and multiplied one by one,
            which pays if many of them add nothing.
        bias: whether an expert's matrices have biases. Only with `matrices`.
    """

    count: int
    chosen: int
    neurons: int
    scoring: Scoring = "softmax"
    renormalised: bool = False
    factor: float = 1.0
    choice_bias: bool = False
    router_bias: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
    shared_gate: bool = False
    apart: bool = False
    layout: ExpertStorage = "matrices"
    bias: bool = False

    def __post_init__(self) -> None:
        for name, limit in (
            ("count", MAX_EXPERTS),
            ("chosen", min(self.count, MAX_CHOSEN)),
            ("neurons", MAX_EXPERT_NEURONS),
            ("groups", self.count),
            ("chosen_groups", self.groups),
            ("group_best", 2),
        ):
            check_integer(f"experts: {name}", getattr(self, name), 1, limit)
        check_choice("experts: scoring", self.scoring, get_args(Scoring))
        check_choice("experts: layout", self.layout, get_args(ExpertStorage))
        if self.bias and self.layout != "matrices":
            raise UnsupportedModelError("experts: only those stored as matrices have biases")
        if not 1 / MAX_WEIGHT_FACTOR <= self.factor <= MAX_WEIGHT_FACTOR:
            raise UnsupportedModelError(
                f"experts: factor is {self.factor}; it must be from {1 / MAX_WEIGHT_FACTOR:g} to "
                f"{MAX_WEIGHT_FACTOR:g}"
            )
        if not 0.0 <= self.jitter <= MAX_JITTER:
            raise UnsupportedModelError(
                f"experts: jitter is {self.jitter}; it must be from 0 to {MAX_JITTER:g}"
            )
        self._check_groups()
        if self.scoring == "sparsemixer" and (self.chosen != 2 or self.renormalised or self.choice_bias):
            raise UnsupportedModelError(
                "experts: sparsemixer chooses 2 experts, by logits alone, and renormalises nothing"
            )
        if self.apart and (self.shared_gate or self.scoring == "sparsemixer"):
            raise UnsupportedModelError(
                "experts: those that stand apart have no shared gate, nor sparsemixer"
            )
        if self.scoring != "sparsemixer" and self.jitter:
            raise UnsupportedModelError(f"experts: {self.scoring} has no jitter; sparsemixer has")

    def _check_groups(self) -> None:
        if self.groups == 1:
            return
        size = self.count // self.groups
        if self.count % self.groups or size < 2 or self.chosen > self.chosen_groups * size:
            raise UnsupportedModelError(
                f"experts: {self.chosen} of {self.count} can't be chosen from {self.chosen_groups} of "
                f"{self.groups} groups, which must be of equal size, 2 experts or more"
            )
        if self.scoring == "sparsemixer":
            raise UnsupportedModelError("experts: sparsemixer knows no groups")

    @property
    def num_neurons(self) -> int:
        """Number of neurons of all experts of a layer."""
        return self.count * self.neurons
