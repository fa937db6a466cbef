"""Which part of a model a config describes, where several machines share its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ondevice.errors import UnsupportedModelError, UsageError
from ondevice.model_config.experts import ExpertsSpec
from ondevice.records import dataclass

if TYPE_CHECKING:
    from ondevice.model_config.model import LayerSpec, ModelConfig


@dataclass(frozen=True)
class ModelPart:
    """The layers `first` on of a model of `layers` layers, and what they don't show of that model.

    Args:
        first: index in the model of the config's first layer.
        layers: number of the model's layers; 0: as many as the config has.
        embeds: whether what makes the first layer's input is there: the embedding table, learned positions,
            rows of per-layer inputs, of all the model's layers, and what makes copies of the residual.
        heads: whether what makes logits of the last layer's output is there, and what joins copies.
        experts: the model's experts, where the config's own layers may have none.
        widths: number of neurons of each of the model's layers where these differ, which decide how neurons
            are summed in segments; else empty.
        cutoffs: whether gates of some of the model's layers have a statistical cutoff.
        states: of a model with recurrent layers, the floats of all layers' states, the values of a token's
            keys and values in all layers, and its key heads, which decide where states are kept; else empty.
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
        """Raises UnsupportedModelError for a part that the layers of `config` can't be.

        What it says of the whole model decides how this part computes: it mustn't contradict these layers.
        """
        if self == WHOLE:
            return
        own = config.num_layers
        if self.first < 0 or self.first + own > self.layers or own < 1:
            raise UnsupportedModelError(
                f"a part has layers {self.first} to {self.first + own - 1} of a model of {self.layers}"
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
        if self.widths and self.widths[self.first : self.first + own] != config.widths:
            raise UnsupportedModelError("a part has other widths of its own layers than these have")
        if not self.widths and len(set(config.widths)) > 1:
            raise UnsupportedModelError("a part has layers of several widths, and no widths of the model's")
        if any(layer.feed_forward.cutoff is not None for layer in config.layers) and not self.cutoffs:
            raise UnsupportedModelError("a part has layers with cutoffs of gates, and the model none")
        experts = {layer.experts for layer in config.layers} - {None}
        if not experts <= {self.experts}:
            raise UnsupportedModelError("a part has layers with other experts than the model's")
        self._check_states(state_sizes(config), own)

    def _check_states(self, sizes: tuple[int, ...], own: int) -> None:
        """sizes: of the states of the part's `own` layers, if any of them is recurrent."""
        if not sizes and (not self.states or own < self.layers):
            return
        holds = all(whole >= each for whole, each in zip(self.states, sizes, strict=False))
        if len(self.states) != STATE_SIZES or not holds or (own == self.layers and self.states != sizes):
            raise UnsupportedModelError(
                f"a part has states of {self.states} in all layers, and of {sizes} in its own"
            )


STATE_SIZES = 3
"""Number of `ModelPart.states`."""
ALIGNED_FLOATS = 16
"""Floats to a multiple of which each recurrent layer's state is padded."""

WHOLE = ModelPart()
"""The part of a config that describes a whole model."""


def cut_places(config: ModelConfig) -> tuple[int, ...]:
    """Layers before which a model can be cut: all but those that would part keys from a layer that reads
    them. A model's own numbers of its layers, ascending, without the first layer of the config.
    """
    owners = [layer.attention.keys_of for layer in config.layers]
    reaches = [layer if owner is None else owner for layer, owner in enumerate(owners)]
    found, least = [], len(reaches)
    for layer in range(len(reaches) - 1, 0, -1):
        least = min(least, reaches[layer])
        if least >= layer:
            found.append(config.part.first + layer)
    return tuple(reversed(found))


def part_config(config: ModelConfig, first: int, stop: int, embeds: bool, heads: bool) -> ModelConfig:
    """The layers `first` to `stop` - 1 of a model, in the model's own numbers, as a config of their own.

    Args:
        config: of the whole model, or of a part that has these layers.
        first, stop: the range.
        embeds, heads: as `ModelPart` has them; what `config` lacks can't be asked for.

    Raises UsageError for a range that isn't in `config`, UnsupportedModelError for one that parts keys and
    values from a layer that reads them, or that has the embedding without the first layer.
    """
    part, own = config.part, config.num_layers
    if not part.first <= first < stop <= part.first + own:
        raise UsageError(
            f"layers {first} to {stop - 1} aren't some of the layers {part.first} to {part.first + own - 1} "
            "that this bundle has"
        )
    if (embeds, heads) == (part.embeds, part.heads) and stop - first == own:
        return config
    if (embeds and not part.embeds) or (heads and not part.heads):
        raise UsageError("this is a part without the embedding or the output head: open the whole model")
    places = {part.first, *cut_places(config), part.first + own}
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
            part.layers or own,
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
    """`ModelPart.states` of a whole model; empty without recurrent layers."""
    specs = [layer.recurrent for layer in config.layers if layer.recurrent is not None]
    if not specs:
        return ()
    floats = sum(-(-spec.state_floats // ALIGNED_FLOATS) * ALIGNED_FLOATS for spec in specs)
    heads = [config.stored_heads(layer) for layer in config.layers]
    values = sum(its.keys * its.stored_width for its in heads)
    return floats, values, sum(its.keys for its in heads)


def _moved(layer: LayerSpec, by: int) -> LayerSpec:
    """A layer whose number, and that of the layer whose keys it reads, changes by `by`."""
    owner = layer.attention.keys_of
    if owner is None:
        return layer
    return replace(layer, attention=replace(layer.attention, keys_of=owner + by))
