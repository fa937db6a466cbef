"""One broken slice per rule of what slices have beside other bundles; each breaks the later layer of two."""

from __future__ import annotations

from ondevice.errors import UnsupportedModelError
from tests.malformed.rules import Rule, drop, put

PART = ("model", "part")

SLICE_RULES = [
    Rule("part gone", drop(*PART), "embedding"),
    Rule("part of no object", put(*PART, value=[0, 1]), "model.part must be an object"),
    Rule("part with another key", put(*PART, "last", value=1), "unknown key 'last'"),
    Rule("first negative", put(*PART, "first", value=-1), "part.first"),
    Rule("first as a flag", put(*PART, "first", value=True), "part.first"),
    Rule(
        "first behind", put(*PART, "first", value=2), "layers 2 to 2 of a model of 2", UnsupportedModelError
    ),
    Rule("first endless", put(*PART, "first", value=1 << 60), "part.first"),
    Rule("layers none", put(*PART, "layers", value=0), "part.layers"),
    Rule("layers gone", drop(*PART, "layers"), "of a model of 0", UnsupportedModelError),
    Rule("layers too few", put(*PART, "layers", value=1), "of a model of 1", UnsupportedModelError),
    Rule("layers endless", put(*PART, "layers", value=1 << 60), "part.layers"),
    Rule("embeds later", put(*PART, "embeds", value=True), "the model's first layer", UnsupportedModelError),
    Rule("embeds as a number", put(*PART, "embeds", value=0), "part.embeds"),
    Rule("heads without a head", put(*PART, "heads", value=True), "embedding"),
    Rule("widths of others", put(*PART, "widths", value=[96] * 3), "3 layers", UnsupportedModelError),
    Rule("widths contradict", put(*PART, "widths", value=[96, 80]), "other widths", UnsupportedModelError),
    Rule("widths endless", put(*PART, "widths", value=[96] * 5000), "part.widths"),
    Rule("states too few", put(*PART, "states", value=[1]), "1 sizes of states", UnsupportedModelError),
    Rule("states endless", put(*PART, "states", value=[1 << 60] * 3), "part.states"),
    Rule("experts of no object", put(*PART, "experts", value=4), "part.experts"),
    Rule("whole unnamed", drop("part_of"), "part_of"),
    Rule("whole named null", put("part_of", value=None), "part_of"),
    Rule("whole named short", put("part_of", value="0" * 63), "part_of"),
]
