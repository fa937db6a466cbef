"""The function of an embedded model as a GGUF, for llama.cpp: the rival says what the large bundle says.

    python -m tests.benchmarks.lib.embedded_gguf --output DIR

It reads DIR/small and DIR/large, as `embedded_model.py` wrote them, and writes DIR/large.gguf.
`tests/benchmarks/explain/embedded_agreement.py` compares the texts.

How it is the same function:

- A group of 64 codes in our q4 becomes two blocks of 32 in Q4_1, with the codes, scale and bias that it has.
- llama.cpp's Llama knows SiLU alone. The gates are `GAIN` times as large, so that SiLU differs from `GAIN`
  times ReLU by 0.28 at most. All else that writes to the residual stream, which is the embedding and the
  attention's output, is `GAIN` times as large too. Norms take it back: their epsilon has its square.
- Rows of q and k change places within their heads: llama.cpp rotates neighbours, a bundle rotates halves.
- The down projection has its groups along the other dimension, so it is rounded once more: to Q8_0 in the
  layers of the small model. In the others it writes nothing, whatever the type, and has the 4.5 bits of Q4_0.
- The constant channel is lowered after the last norm: llama.cpp sums a block of activations in float16.
- What has no function has codes like any other, as in the bundle.

llama.cpp rounds activations by blocks of 32, and not as `cpu` does. Texts may part at a near tie.
"""

from __future__ import annotations

import argparse
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from ondevice.backends.base import Float32
from ondevice.bundle.layout import (
    RESIDENT,
    RecordLayout,
    neuron_file_name,
    neuron_layout,
)
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.rotary import base_of
from ondevice.converters.quantize import QuantizedRows, dequantize
from tests.benchmarks.lib.embedded_weights import CONSTANT, even_places
from tests.benchmarks.lib.random_model import Shape, gguf_tensors, write_gguf
from tests.benchmarks.lib.stored_model import Q4, Neurons, of_bundle, quantized_rows, taken, unpacked
from tests.support.stored_matrices import embedding_matrix

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

GAIN = 2.0**10
"""Factor of the gates and of the residual stream where the small model has ReLU; SiLU needs none."""
LOWEST = 2.0**14
"""Constant channel after the last norm, where the small model's stream has a root mean square of 1.

The channel is inversely proportional to that. A float16 holds it from 0.25 on, and up to 500 it gives ids
without tokens logits below -32. The shipped model's stream ends between 2 and 16.
"""
BLOCK = 32
"""Values of a block of llama.cpp's types."""
DOWN_TYPES = ("Q4_0", "Q5_0", "Q8_0", "F32")
"""Types of the down projections that have a function. Blocks with sums, as of Q4_1, could overflow."""


def gguf_of(folder: Path, down: str = "Q8_0") -> Path:
    """Write `folder`/large.gguf from the bundles `folder`/small and `folder`/large.

    down: the type of the down projections that have a function, one of `DOWN_TYPES`.
    """
    from gguf import GGMLQuantizationType, LlamaFileType

    source = EmbeddedGguf(folder, GGMLQuantizationType[down])
    config = source.large.config
    shape = Shape(
        "large",
        config.hidden_size,
        config.num_layers,
        config.intermediate_size,
        config.num_heads,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
    )
    path = folder / "large.gguf"
    write_gguf(
        path,
        shape,
        source.types(shape),
        source.values,
        file_type=LlamaFileType.MOSTLY_Q4_1,
        rms_norm_eps=config.norm.eps * source.gain**2,
        rope_theta=base_of(config.ropes[0]),
        tokenizer=source.large.read_small(source.large.manifest.tokenizer.files[0]),
    )
    return path


class EmbeddedGguf:
    """The tensors of an embedded model, by llama.cpp's names.

    Raises ValueError for a model that isn't a plain Llama in q4, or whose scales are too large for float16.
    """

    def __init__(self, folder: Path, down: GGMLQuantizationType) -> None:
        self.small, self.large = Bundle.open(folder / "small"), Bundle.open(folder / "large")
        config = self.large.config
        if self.large.quant != Q4 or config.query_size != config.hidden_size:
            raise ValueError(f"{self.large.path} isn't an embedded Llama in q4")
        self.down = down
        self.gain = {"relu": GAIN, "silu": 1.0}[config.activation]
        self.layers = even_places(self.small.config.num_layers, config.num_layers)
        self._resident = load_file(self.large.path / RESIDENT)
        self._neurons = lru_cache(1)(self._read_neurons)

    def types(self, shape: Shape) -> dict[str, GGMLQuantizationType]:
        """The type of every matrix, but for those in float32."""
        from gguf import GGMLQuantizationType as Type

        found = {name: Type.Q4_1 for name, size in gguf_tensors(shape).items() if len(size) == 2}
        for layer in range(shape.num_layers):
            found[f"blk.{layer}.ffn_down.weight"] = self.down if layer in self.layers else Type.Q4_0
        return {name: kind for name, kind in found.items() if kind != Type.F32}

    def values(self, _number: int, name: str) -> NDArray[Any]:
        """The float32 values of a tensor, or the bytes of its blocks."""
        match name.split("."):
            case ["token_embd", _]:
                return q4_1_blocks(quantized_rows(embedding_matrix(self.large)), self.gain)
            case ["output", _]:
                return q4_1_blocks(of_bundle(self.large, "head"))
            case ["output_norm", _]:
                return self._final_norm()
            case ["blk", layer, part, _]:
                return self._layer_values(int(layer), part)
        raise KeyError(name)

    def _layer_values(self, layer: int, part: str) -> NDArray[Any]:
        prefix = f"layers.{layer}"
        match part.split("_"):
            case ["attn", "norm"]:
                return self._resident[f"{prefix}.attention_norm.weight"]
            case ["ffn", "norm"]:
                return self._resident[f"{prefix}.feed_forward_norm.weight"]
            case ["attn", "output"]:
                return q4_1_blocks(of_bundle(self.large, f"{prefix}.attention.out"), self.gain)
            case ["attn", which]:
                return self._attention_rows(of_bundle(self.large, f"{prefix}.attention.{which}"), which)
            case ["ffn", "gate"]:
                return q4_1_blocks(self._neurons(layer)[0], self.gain)
            case ["ffn", "up"]:
                return q4_1_blocks(self._neurons(layer)[1])
            case ["ffn", "down"]:
                return self._down(layer)
        raise KeyError(part)

    def _attention_rows(self, stored: QuantizedRows, which: str) -> NDArray[np.uint8]:
        """The rows of q, k or v."""
        rows = np.arange(len(stored.codes))
        if which != "v":
            rows = neighbours(rows, self.large.config.head_dim)
        return q4_1_blocks(taken(stored, rows))

    def _read_neurons(self, layer: int) -> Neurons:
        layout = neuron_layout(self.large.config, Q4, 0)
        assert isinstance(layout, RecordLayout)
        gate, up, down = unpacked(self.large.path / neuron_file_name(layer), layout)
        return gate, up, down

    def _down(self, layer: int) -> NDArray[Any]:
        from gguf import GGMLQuantizationType as Type
        from gguf.quants import quant_shape_to_byte_shape, quantize

        config, rows = self.large.config, self._neurons(layer)[2]
        kind, random = self.down, np.random.default_rng([38, layer])
        if layer in self.layers:
            matrix = np.ascontiguousarray(dequantize(rows, Q4.bits, config.hidden_size).T)
            blocks = quantize(matrix, kind)
            return matrix if kind == Type.F32 else with_codes(blocks, config.intermediate_size, random)
        if rows.scales.any() or rows.biases.any():
            raise ValueError(f"layer {layer} isn't one of the small model's, but writes")
        size = config.hidden_size, config.intermediate_size
        return with_codes(np.zeros(quant_shape_to_byte_shape(size, Type.Q4_0), np.uint8), size[1], random)

    def _final_norm(self) -> Float32:
        small, large = self.small.config, self.large.config
        found = self._resident["final_norm.weight"].copy()
        root = (large.hidden_size / small.hidden_size) ** 0.5
        channel = small.hidden_size
        found[channel] = min(found[channel], LOWEST / root / float(CONSTANT))
        return found


def q4_1_blocks(rows: QuantizedRows, factor: float = 1.0) -> NDArray[np.uint8]:
    """Rows of q4, times a power of 2, as llama.cpp's Q4_1.

    A block is a float16 scale, a float16 bias and 16 bytes. Byte i has the code of value i in its low half
    and that of value i + 16 in its high one. Raises ValueError where a scale or a bias would be rounded.
    """
    count, groups = rows.scales.shape
    codes = np.stack([rows.codes & 15, rows.codes >> 4], axis=-1).reshape(count, groups, 2, 2, BLOCK // 2)
    blocks = np.empty((count, groups, 2, 4 + BLOCK // 2), np.uint8)
    halves = np.stack([rows.scales, rows.biases], axis=-1).astype(np.float32) * np.float32(factor)
    with np.errstate(over="ignore"):
        rounded = halves.astype(np.float16)
    if not (rounded.astype(np.float32) == halves).all():
        raise ValueError(f"a scale or a bias times {factor} isn't a float16")
    blocks[..., :4] = rounded.view(np.uint8).reshape(count, groups, 1, 4)
    blocks[..., 4:] = codes[..., 0, :] | codes[..., 1, :] << 4
    return blocks.reshape(count, -1)


def neighbours(rows: NDArray[np.int64], head_dim: int) -> NDArray[np.int64]:
    """Rows of heads whose pairs are halves apart, in the order in which pairs are neighbours."""
    return rows.reshape(-1, 2, head_dim // 2).swapaxes(1, 2).ravel()


def with_codes(blocks: NDArray[np.uint8], columns: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of blocks that begin with a float16 scale, where those of zero have random codes behind it."""
    found = blocks.reshape(-1, blocks.shape[1] // (columns // BLOCK))
    silent = (found[:, 0] == 0) & (found[:, 1] & 127 == 0)
    codes = np.frombuffer(random.bytes(found[silent, 2:].size), np.uint8)
    found[silent, 2:] = codes.reshape(-1, found.shape[1] - 2)
    return found.reshape(blocks.shape)


def main() -> None:
    """Write the GGUF and print its size beside the bundle's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the bundles `small` and `large`"
    )
    parser.add_argument("--down", choices=DOWN_TYPES, default="Q8_0")
    args = parser.parse_args()
    path, bundle = gguf_of(args.output, args.down), Bundle.open(args.output / "large")
    sizes = {"gguf_bytes": path.stat().st_size, "bundle_bytes": bundle.bundle_bytes}
    print(json.dumps(sizes | {"gguf_bits_per_weight": 8 * path.stat().st_size / bundle.parameters}))


if __name__ == "__main__":
    main()
