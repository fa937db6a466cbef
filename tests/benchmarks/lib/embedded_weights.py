"""The weights of a large model that computes what a small one computes, bit for bit on the `cpu` backend.

How it is the same function:

- The residual stream has the small model's values first, and zeros. The widths' ratio is a power of 4, so
  norms differ by a power of 2 and nothing is rounded: weights and epsilon take it back.
- The small model is rounded to q4 with heads as wide as the large model's (`stored_model.small_in_q4`);
  its codes are then copied. Added columns, rows, heads, neurons and layers have codes of their own, with
  scales of zero where they would write.
- The real neurons stay in their aligned blocks of 64, within which the down projection rounds activations.
- One channel is a constant, 2^-24: too small to change a norm's sum of squares, which the norms' weights
  make large where it is wanted. Through it the ids that no token has get a logit below all that the model
  can give, and fillers their thresholds.

Layers of the small model stand evenly among the others, which add nothing to the stream, so that streams
cross many. Fillers (`filler_neurons.py`) fire like the trained neurons.

Legend: D the small model's width, F its neurons a layer, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.config import GROUP_SIZE
from ondevice.converters.quantize import QuantizedRows, dequantize
from ondevice.model_config import ModelConfig
from tests.benchmarks.lib.filler_neurons import (
    Fillers,
    Recorded,
    make_fillers,
    source_layers,
)
from tests.benchmarks.lib.random_model import Shape
from tests.benchmarks.lib.stored_model import (
    Q4,
    AttentionRows,
    Neurons,
    StoredModel,
    place_groups,
    random_codes,
    taken,
)

CONSTANT = np.float32(2.0**-24)
"""Value of the constant channel in the stream, the least that a float16 scale gives."""
HEAD_ROWS = 4096
"""Rows of the head and the embedding that are made at a time."""


class EmbeddedModel:
    """The large model's weights, layer by layer.

    Raises ValueError for a shape that can't hold the small model bit for bit.
    """

    def __init__(self, small: StoredModel, shape: Shape, text: Recorded) -> None:
        own = small.config
        ratio = shape.hidden_size / own.hidden_size
        if ratio < 4 or np.log2(ratio) % 2:
            raise ValueError(f"the width {shape.hidden_size} isn't {own.hidden_size} times 4, 16, 64 ...")
        head_dim = shape.head_dim or shape.hidden_size // shape.num_heads
        if head_dim != own.head_dim or shape.num_heads < own.num_heads:
            raise ValueError(
                f"{shape.num_heads} heads of {head_dim} can't hold {own.num_heads} of {own.head_dim}"
            )
        if any(n % GROUP_SIZE for n in (own.hidden_size, own.intermediate_size, shape.intermediate_size)):
            raise ValueError(f"widths and neurons are to be multiples of {GROUP_SIZE}")
        if shape.num_layers < own.num_layers or shape.vocab_size < own.vocab_size:
            raise ValueError(f"{shape.name} has fewer layers or tokens than the small model")
        self.small, self.shape, self.text = small, shape, text
        self._root = np.float32(ratio**0.5)
        self.channel = own.hidden_size // GROUP_SIZE
        """The group of columns of which the first is the constant channel."""
        self.columns = np.arange(self.channel)
        self.groups = shape.hidden_size // GROUP_SIZE
        self.layers = even_places(own.num_layers, shape.num_layers)
        self.heads = even_places(own.num_heads, shape.num_heads)
        self.blocks = even_places(own.intermediate_size // GROUP_SIZE, shape.intermediate_size // GROUP_SIZE)
        self.sources = source_layers(own, self.layers, shape.num_layers)
        self._newest: tuple[int, Fillers] | None = None
        self.lowest = _bound_of_logits(small)
        self.frequencies = []
        for layer, (neurons, rows) in enumerate(zip(small.neurons, small.attention, strict=True)):
            gate = dequantize(neurons[0], Q4.bits, own.hidden_size)
            gates = gate @ text.fed(layer, rows.feed_forward_norm, own.norm.eps).T
            self.frequencies.append((gates > 0).mean(axis=1))

    @property
    def config(self) -> ModelConfig:
        own, shape = self.small.config, self.shape
        return replace(
            own,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            norm=replace(own.norm, eps=own.norm.eps / float(self._root) ** 2),
            tie_embeddings=False,
            layers=own.layers[:1] * shape.num_layers,
        )

    def norm(self, weights: Float32, constant: float = 0.0) -> Float32:
        """A norm's weights. The constant channel becomes `constant` / root mean square of the stream."""
        found = np.zeros(self.shape.hidden_size, np.float32)
        found[: len(weights)] = weights / self._root
        found[len(weights)] = constant / float(self._root) / float(CONSTANT)
        return found

    def is_real(self, layer: int) -> bool:
        return layer in self.layers

    def attention(self) -> Iterator[AttentionRows]:
        """Every layer's attention; heads that aren't the small model's attend, and write nothing."""
        own = self.small.config
        for layer, source in enumerate(self.sources):
            random, rows = np.random.default_rng([31, layer]), self.small.attention[source]
            qkv = self._made_up(rows.qkv, 3 * self.shape.num_heads * own.head_dim, random)
            out = silent_rows(self.shape.hidden_size, self.shape.num_heads * own.head_dim, Q4.bits, random)
            if self.is_real(layer):
                put(qkv, self.qkv_rows(), place_groups(rows.qkv, Q4.bits, self.groups, self.columns, random))
                found = place_groups(rows.out, Q4.bits, out.scales.shape[1], self.context_groups(), random)
                put(out, np.arange(len(rows.out.codes)), found)
            yield AttentionRows(
                self.norm(rows.attention_norm), qkv, out, self.norm(rows.feed_forward_norm, constant=1.0)
            )

    def qkv_rows(self) -> NDArray[np.int64]:
        """Where the small model's rows of q, k and v are."""
        width = self.small.config.head_dim
        heads = np.concatenate([np.array(self.heads) + part * self.shape.num_heads for part in range(3)])
        return np.asarray((heads[:, None] * width + np.arange(width)).ravel(), np.int64)

    def context_groups(self) -> NDArray[np.int64]:
        """The groups of columns that meet the contexts of the small model's heads."""
        groups = self.small.config.head_dim // GROUP_SIZE
        return np.asarray((np.array(self.heads)[:, None] * groups + np.arange(groups)).ravel(), np.int64)

    def neuron_places(self, layer: int) -> NDArray[np.int64]:
        """Where the small model's neurons are, if the layer has them."""
        blocks = np.array(self.blocks if self.is_real(layer) else [], np.int64)
        return (blocks[:, None] * GROUP_SIZE + np.arange(GROUP_SIZE)).ravel()

    def filler_places(self, layer: int) -> NDArray[np.int64]:
        """Where the fillers are."""
        return np.setdiff1d(np.arange(self.shape.intermediate_size), self.neuron_places(layer))

    def fillers(self, layer: int) -> Fillers:
        """A layer's fillers, which read what the layer reads. Those of one layer are kept."""
        if self._newest is None or self._newest[0] != layer:
            self._newest = layer, self._made(layer)
        return self._newest[1]

    def _made(self, layer: int) -> Fillers:
        source, own, random = self.sources[layer], self.small.config, np.random.default_rng([32, layer])
        count, blocks = len(self.filler_places(layer)) // GROUP_SIZE, own.intermediate_size // GROUP_SIZE
        like = np.concatenate([random.permutation(blocks) for _ in range(-(-count // blocks))])[:count]
        gate = dequantize(self.small.neurons[source][0], Q4.bits, own.hidden_size)
        norm = self.small.attention[source].feed_forward_norm, own.norm.eps
        return make_fillers(gate, self.frequencies[source], self.states(layer, self.text), norm, like, random)

    def states(self, layer: int, text: Recorded) -> Float32:
        """(T, D) the stream that enters the layer's feed-forward on a text, in the small model's width."""
        if self.is_real(layer):
            return text.before[self.layers.index(layer)]
        return text.entering[sum(place < layer for place in self.layers)]

    def neurons(self, layer: int) -> Neurons:
        """A layer's neurons: the small model's, if it has any there, among fillers."""
        random, source = np.random.default_rng([33, layer]), self.sources[layer]
        found, places = self.fillers(layer), self.filler_places(layer)
        neurons = self.small.neurons[source]
        gate = self._rows_of(found.gate, random)
        gate.scales[:, self.channel] = found.offset
        gate.codes[:, self.channel * GROUP_SIZE * Q4.bits // 8] = 1
        up = self._rows_of(recoded(neurons[1], found.first, random), random)
        down = silent_rows(len(found.first), self.shape.hidden_size, Q4.bits, random)
        whole = []
        for fillers, real in zip((gate, up, down), neurons, strict=True):
            rows = silent_rows(self.shape.intermediate_size, self.shape.hidden_size, Q4.bits, random)
            put(rows, places, fillers)
            if self.is_real(layer):
                put(rows, self.neuron_places(layer), self._rows_of(real, random))
            whole.append(rows)
        return whole[0], whole[1], whole[2]

    def embedding(self) -> Iterator[QuantizedRows]:
        """The embedding, whose rows all have the constant channel."""
        for start, random, rows in self._vocabulary(34):
            if start >= self.small.config.vocab_size:
                rows = recoded(rows, np.arange(len(rows.codes)), random)
            found = self._rows_of(rows, random)
            self._set_channel(found, float(CONSTANT))
            yield found

    def head(self) -> Iterator[QuantizedRows]:
        """The head. Rows of ids without tokens multiply the constant channel alone, by -1."""
        for start, random, rows in self._vocabulary(35):
            found = self._rows_of(rows, random)
            if start >= self.small.config.vocab_size:
                found = silent_rows(len(rows.codes), self.shape.hidden_size, Q4.bits, random)
                self._set_channel(found, -1.0)
            yield found

    def final_norm(self) -> Float32:
        """The last norm, after which the constant channel is larger than any logit of the model."""
        return self.norm(self.small.final_norm, constant=self.lowest)

    def _vocabulary(self, seed: int) -> Iterator[tuple[int, np.random.Generator, QuantizedRows]]:
        """(first id, generator, rows) of pieces; ids without tokens have rows of others."""
        real, table = self.small.config.vocab_size, self.small.embedding
        starts = [*range(0, real, HEAD_ROWS), *range(real, self.shape.vocab_size, HEAD_ROWS)]
        for start in starts:
            stop = min(start + HEAD_ROWS, real if start < real else self.shape.vocab_size)
            yield start, np.random.default_rng([seed, start]), taken(table, np.arange(start, stop) % real)

    def _rows_of(self, rows: QuantizedRows, random: np.random.Generator) -> QuantizedRows:
        return place_groups(rows, Q4.bits, self.groups, self.columns, random)

    def _set_channel(self, rows: QuantizedRows, value: float) -> None:
        """Give all rows `value` in the constant channel and zeros beside it."""
        first = self.channel * GROUP_SIZE * Q4.bits // 8
        rows.codes[:, first : first + GROUP_SIZE * Q4.bits // 8] = 0
        rows.codes[:, first] = 1
        rows.scales[:, self.channel] = value

    def _made_up(self, like: QuantizedRows, rows: int, random: np.random.Generator) -> QuantizedRows:
        """Rows of the scales of `like`, with codes of their own."""
        picked = random.integers(0, len(like.codes), rows)
        return self._rows_of(recoded(like, picked, random), random)


def even_places(count: int, among: int) -> list[int]:
    """`count` of `among` places, evenly."""
    return [(2 * i + 1) * among // (2 * count) for i in range(count)]


def silent_rows(rows: int, cols: int, bits: int, random: np.random.Generator) -> QuantizedRows:
    """Rows with codes and without a function: scales and biases are zero, as are the codes of padding."""
    groups = -(-cols // GROUP_SIZE)
    scales, codes = np.zeros((rows, groups), np.float16), random_codes(random, rows, groups * 8 * bits)
    codes[:, cols * bits // 8 :] = 0
    return QuantizedRows(codes, scales, scales.copy())


def recoded(rows: QuantizedRows, ids: NDArray[np.int64], random: np.random.Generator) -> QuantizedRows:
    """The rows `ids` with other codes."""
    codes = random_codes(random, len(ids), rows.codes.shape[1])
    return QuantizedRows(codes, rows.scales[ids], rows.biases[ids])


def put(rows: QuantizedRows, places: NDArray[np.int64], found: QuantizedRows) -> None:
    """Replace the rows at `places`."""
    rows.codes[places], rows.scales[places], rows.biases[places] = found.codes, found.scales, found.biases


def _bound_of_logits(small: StoredModel) -> float:
    """A power of 2 above |logit| times the root mean square of the last stream, whatever the text.

    A normed stream is at most the root of D long, an attention's context is a mean of values, and a product
    is at most its matrices' norms long. Streams' rows and rounded activations have the factor of 16.
    """
    config, width = small.config, float(np.sqrt(small.config.hidden_size))

    def length(rows: QuantizedRows, cols: int) -> float:
        return float(np.linalg.norm(dequantize(rows, Q4.bits, cols)))

    reach = float(np.linalg.norm(dequantize(small.embedding, Q4.bits, config.hidden_size), axis=1).max())
    for rows, (gate, up, down) in zip(small.attention, small.neurons, strict=True):
        first, second = (
            float(np.abs(w).max()) * width for w in (rows.attention_norm, rows.feed_forward_norm)
        )
        reach += length(rows.qkv, config.hidden_size) * first * length(rows.out, config.query_size)
        gates = length(gate, config.hidden_size) * length(up, config.hidden_size) * second**2
        reach += gates * length(down, config.hidden_size)
    head = dequantize(small.embedding, Q4.bits, config.hidden_size) * small.final_norm
    logit = float(np.linalg.norm(head, axis=1).max()) * width
    return float(2.0 ** np.ceil(np.log2(16 * logit * reach / width)))
