"""The part of a model that a config describes, if several machines share the model's layers."""

from __future__ import annotations

from dataclasses import replace
from operator import ge
from typing import TYPE_CHECKING

from ondevice.errors import UnsupportedModelError, UsageError
from ondevice.model_config.experts import ExpertsSpec
from ondevice.records import dataclass

if TYPE_CHECKING:
    from ondevice.model_config.model import LayerSpec, ModelConfig


@dataclass(frozen=True)
class ModelPart:
    """The layers of a model that a config describes, and facts about the model's other layers.

    Args:
        first: index in the model of the config's first layer.
        layers: number of the model's layers; 0: as many as the config has.
        embeds: whether the weights before the first layer are there: the embedding table, learned positions,
            per-layer inputs of all layers, and those that spread residual streams.
        heads: whether the weights after the last layer are there: the output head, and those that gather
            residual streams.
        experts: the model's experts, if any layer has some.
        widths: number of neurons of each of the model's layers, if they differ; else empty. They decide how
            neurons are summed in segments.
        cutoffs: whether gates of some of the model's layers have a statistical cutoff.
        states: floats of all layers' recurrent states, floats of a token's keys and values in all layers, and
            key heads in all layers, which decide where checkpoints are; empty without recurrent layers.
    """

    first: int = 0
    layers: int = 0
    embeds: bool = True
    heads: bool = True
    experts: ExpertsSpec | None = None
    widths: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    cutoffs: bool = False

    def check(self, config: ModelConfig) -> None:
        """Check this against the layers of `config`. Raises UnsupportedModelError for contradictions."""
        if self == FULL_MODEL:
            return
        num_layers = config.num_layers
        if self.first < 0 or self.first + num_layers > self.layers or num_layers < 1:
            raise UnsupportedModelError(
                f"a part has layers {self.first} to {self.first + num_layers - 1} of a model of {self.layers}"
            )
        if self.embeds and (self.first or not self.heads):
            raise UnsupportedModelError(
                "a part with the embedding has the model's first layer and its output head too"
            )
        if self.states and len(self.states) != STATE_SIZES:
            raise UnsupportedModelError(
                f"a part has {len(self.states)} sizes of states; it must have {STATE_SIZES}"
            )
        if self.widths and len(self.widths) != self.layers:
            raise UnsupportedModelError(
                f"a part has the widths of {len(self.widths)} layers of a model of {self.layers}"
            )
        if self.widths and self.widths[self.first : self.first + num_layers] != config.widths:
            raise UnsupportedModelError("a part has other widths of its own layers than these have")
        if not self.widths and len(set(config.widths)) > 1:
            raise UnsupportedModelError("a part has layers of several widths, and no widths of the model's")
        if any(layer.feed_forward.cutoff is not None for layer in config.layers) and not self.cutoffs:
            raise UnsupportedModelError("a part has layers with cutoffs of gates, and the model none")
        experts = {layer.experts for layer in config.layers} - {None}
        if not experts <= {self.experts}:
            raise UnsupportedModelError("a part has layers with other experts than the model's")
        self._check_states(state_sizes(config), num_layers)

    def _check_states(self, sizes: tuple[int, ...], num_layers: int) -> None:
        """Check `states`. sizes: `state_sizes` of the part's num_layers layers. Raises UnsupportedModelError
        for contradictions.
        """
        if not sizes and (not self.states or num_layers < self.layers):
            return
        holds = len(self.states) == STATE_SIZES and all(map(ge, self.states, sizes))
        if not holds or (num_layers == self.layers and self.states != sizes):
            raise UnsupportedModelError(
                f"a part has states of {self.states} in all layers, and of {sizes} in its own"
            )


STATE_SIZES = 3
"""Length of `ModelPart.states`."""
ALIGNED_FLOATS = 16
"""Multiple, in floats, to which each recurrent layer's state is padded."""

FULL_MODEL = ModelPart()
"""The part of a config that describes all of a model."""


def cut_places(config: ModelConfig) -> tuple[int, ...]:
    """The layers before which the model can be cut without parting keys from a layer that reads them.

    Ascending, without the first layer of the config.
    """
    owners = [layer.attention.keys_of for layer in config.layers]
    reaches = [layer if owner is None else owner for layer, owner in enumerate(owners)]
    places, first_read = [], len(reaches)
    for layer in range(len(reaches) - 1, 0, -1):
        first_read = min(first_read, reaches[layer])
        if first_read >= layer:
            places.append(config.part.first + layer)
    return tuple(reversed(places))


def part_config(config: ModelConfig, first: int, stop: int, embeds: bool, heads: bool) -> ModelConfig:
    """The config of a model's layers `first` to `stop` - 1.

    Args:
        config: the config of the model, or of a part that has these layers.
        first, stop: the range, in the model's numbers.
        embeds, heads: as in `ModelPart`.

    Raises UsageError for layers or weights that aren't in `config`, UnsupportedModelError for a range that
    parts keys and values from a layer that reads them, or that has the embedding without the first layer.
    """
    part, num_layers = config.part, config.num_layers
    end = part.first + num_layers
    if not part.first <= first < stop <= end:
        raise UsageError(
            f"layers {first} to {stop - 1} aren't some of the layers {part.first} to {end - 1} "
            "that this bundle has"
        )
    if (embeds, heads) == (part.embeds, part.heads) and stop - first == num_layers:
        return config
    if (embeds and not part.embeds) or (heads and not part.heads):
        raise UsageError("this is a part without the embedding or the output head: open the whole model")
    places = {part.first, *cut_places(config), end}
    if not {first, stop} <= places:
        raise UnsupportedModelError(
            f"layers {first} to {stop - 1} can't be cut out of this model, whose last layers read keys and "
            f"values of earlier ones: cut before one of {', '.join(map(str, sorted(places)))}"
        )
    widths = part.widths or (config.widths if len(set(config.widths)) > 1 else ())
    layers = config.layers[first - part.first : stop - part.first]
    return replace(
        config,
        layers=tuple(_moved(layer, part.first - first) for layer in layers),
        part=ModelPart(
            first,
            part.layers or num_layers,
            embeds,
            heads,
            config.experts,
            widths,
            part.states or state_sizes(config),
            config.has_cutoffs,
        ),
        embedding_width=config.embedding_width if embeds or heads else 0,
        learned_positions=config.learned_positions and embeds,
        head_bias=config.head_bias and heads,
        final_norm=config.final_norm and heads,
    )


def state_sizes(config: ModelConfig) -> tuple[int, ...]:
    """The value of `ModelPart.states` for the layers of `config`; empty without recurrent layers."""
    specs = [layer.recurrent for layer in config.layers if layer.recurrent is not None]
    if not specs:
        return ()
    floats = sum(-(-spec.state_floats // ALIGNED_FLOATS) * ALIGNED_FLOATS for spec in specs)
    heads = [config.stored_heads(layer) for layer in config.layers]
    values = sum(it.keys * it.stored_width for it in heads)
    return floats, values, sum(it.keys for it in heads)


def _moved(layer: LayerSpec, by: int) -> LayerSpec:
    """A copy of a layer, moved by `by` places: the number of the layer whose keys it reads
    changes by that.
    """
    owner = layer.attention.keys_of
    if owner is None:
        return layer
    return replace(layer, attention=replace(layer.attention, keys_of=owner + by))
