"""The place of every byte of a bundle's records, and the names of its files.

Pure arithmetic over ModelConfig and QuantConfig; it opens no file. `weights/README.md` is the specification.
Legend: D hidden size, N fused qkv rows, V vocabulary, G groups of 32 or 64 along a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from functools import cached_property, lru_cache

from ondevice.bundle.matrix_layout import TILE_ROWS, HalfRange, RowLayout, TiledMatrix, padded
from ondevice.config import GROUP_SIZE, SUPER_SIZE, QuantConfig, RowFormat
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

FORMAT = "ondevice-bundle"
VERSION = 3
DATA_OFFSET = 4096
"""First byte of the records in a record file, and the alignment of the data in the resident file."""
PLANE_ALIGNMENT = 64
"""Alignment of a matrix in a slice's planes, in bytes."""
CRC_BLOCK_BYTES = 1 << 20
"""Bytes that one CRC32C covers in files without records."""
RESIDENT_BLOCK_BYTES = 16 << 10
"""The same in the resident file, whose matrices may be read one by one in every pass."""
SLICE_BYTES = 2 << 20
"""Target size of a slice: from 1 MiB on, flash is at its full rate."""
SLICE_UNIT = 256
"""Neurons whose multiples slices have: the columns of every format's scales divide them."""
SLICES_PER_LAYER = 8
"""Slices of a small layer, so that a budget can hold some of them."""

MANIFEST = "bundle.json"
PARTIAL = ".partial"
"""Suffix of the name of a bundle's folder until it is complete."""
RESIDENT = "resident.safetensors"
EMBEDDING = "embedding.safetensors"
PER_LAYER = "per_layer_embedding.safetensors"
CHECKSUMS = "checksums.bin"
TOKENIZER_FILES = {
    "sentencepiece": "tokenizer.model",
    "tokenizers": "tokenizer.json",
    "byte_pairs": "tokenizer.bin",
}
CHAT_TEMPLATE = "chat_template.jinja"
RECORDS_TENSOR = "records"
POSITIONS = "positions"
"""The resident tensor of learned positions, one row each."""


def neuron_file_name(layer: int) -> str:
    """Name of the file that holds the neuron records of `layer`."""
    return f"neurons-{layer:05d}.safetensors"


def gate_file_name(layer: int) -> str:
    """Name of the file with a second copy of `layer`'s gate rows, for models whose gates select neurons."""
    return f"gates-{layer:05d}.safetensors"


def expert_file_name(layer: int) -> str:
    """Name of the file that holds the experts of `layer`, if they are stored as matrices."""
    return f"experts-{layer:05d}.safetensors"


def gate_bias_name(layer: int) -> str:
    """Name of the resident tensor with the biases of `layer`'s gates, in the order of neurons."""
    return f"layers.{layer}.feed_forward.gate.bias"


class PartLayout(ABC):
    """A record in parts, each of which can be read alone and has its own checksum."""

    @property
    def neurons(self) -> int:
        """Neurons that a record holds."""
        return 1

    @property
    def piece_neurons(self) -> int:
        """Neurons in the smallest piece that is read and multiplied: a block of 64, or a slice."""
        return max(GROUP_SIZE, self.neurons)

    def num_records(self, neurons: int) -> int:
        """Records that hold `neurons` neurons."""
        return -(-neurons // self.neurons)

    def nbytes(self, neurons: int) -> int:
        """Bytes of the records that hold `neurons` neurons."""
        return self.num_records(neurons) * self.stride

    def neurons_in(self, nbytes: int) -> int:
        """The number of neurons in as many pieces as fit into `nbytes` bytes; at least one piece."""
        return max(1, nbytes // self.nbytes(self.piece_neurons)) * self.piece_neurons

    @property
    @abstractmethod
    def row_bytes(self) -> tuple[int, ...]:
        """Unpadded bytes of each part."""

    @property
    @abstractmethod
    def alignment(self) -> int:
        """Alignment of the parts in bytes."""

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Padded bytes of each part."""
        return tuple(padded(nbytes, self.alignment) for nbytes in self.row_bytes)

    @cached_property
    def part_offsets(self) -> tuple[int, ...]:
        """First byte of each part, from the start of the record."""
        return tuple(sum(self.part_bytes[:part]) for part in range(len(self.part_bytes)))

    @cached_property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return sum(self.part_bytes)

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) byte ranges of a record that hold no data and must be zero."""
        pairs = zip(self.part_offsets, self.row_bytes, self.part_bytes, strict=True)
        return tuple((start + used, start + full) for start, used, full in pairs if used < full)


@dataclass(frozen=True)
class RecordLayout(PartLayout):
    """The rows of one record, grouped in parts."""

    parts: tuple[tuple[RowLayout, ...], ...]

    @cached_property
    def rows(self) -> tuple[RowLayout, ...]:
        """The rows of all parts, in order."""
        return tuple(row for part in self.parts for row in part)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Unpadded bytes of each part."""
        return tuple(sum(row.nbytes for row in part) for part in self.parts)

    @cached_property
    def alignment(self) -> int:
        """Alignment of the parts in bytes: 512 if padding to it costs at most an eighth, else 64."""
        at_512 = sum(padded(nbytes, 512) for nbytes in self.row_bytes)
        return 512 if 8 * at_512 <= 9 * sum(self.row_bytes) else 64

    @cached_property
    def row_offsets(self) -> tuple[int, ...]:
        """First byte of each row, in order, from the start of the record."""
        offsets = []
        for offset, part in zip(self.part_offsets, self.parts, strict=True):
            for row in part:
                offsets.append(offset)
                offset += row.nbytes
        return tuple(offsets)

    @cached_property
    def halves(self) -> tuple[HalfRange, ...]:
        """The bytes of a record that hold float16 values."""
        rows = zip(self.row_offsets, self.rows, strict=True)
        return tuple(row.halves.shifted(offset) for offset, row in rows)


@dataclass(frozen=True)
class TileLayout(PartLayout):
    """The record of 16 neighbouring rows of a table, which are one tile."""

    row: RowLayout

    @property
    def matrix(self) -> TiledMatrix:
        return TiledMatrix(TILE_ROWS, self.row)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Unpadded bytes of the tile."""
        return (self.matrix.nbytes,)

    @property
    def alignment(self) -> int:
        """Alignment in bytes. It is small: a tile is several pages long, so it needn't begin at a page."""
        return 64

    @cached_property
    def halves(self) -> tuple[HalfRange, ...]:
        """The bytes of a record that hold float16 values."""
        return (self.matrix.halves,)


@dataclass(frozen=True)
class ExpertLayout(PartLayout):
    """The record of an expert, or of a slice with joined planes: one part per matrix.

    matrices: gate (F, D), up (F, D) if there is one, down (D, F), for the F neurons of an expert or a slice.
    """

    matrices: tuple[TiledMatrix, ...]

    @property
    def neurons(self) -> int:
        return self.matrices[0].rows

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Unpadded bytes of each part."""
        return tuple(matrix.nbytes for matrix in self.matrices)

    @property
    def alignment(self) -> int:
        """Alignment in bytes: a page, because records are read directly into the start of a slot, without the
        page cache.
        """
        return DATA_OFFSET

    @cached_property
    def halves(self) -> tuple[HalfRange, ...]:
        """The bytes of a record that hold float16 values."""
        parts = zip(self.part_offsets, self.matrices, strict=True)
        return tuple(matrix.halves.shifted(offset) for offset, matrix in parts)

    @cached_property
    def floats(self) -> tuple[tuple[int, int], ...]:
        """The bytes of a record that hold float32 values, [start, stop): matrices' biases."""
        parts = zip(self.part_offsets, self.matrices, strict=True)
        return tuple((at + it.rows_bytes, at + it.nbytes) for at, it in parts if it.has_bias)

    @cached_property
    def places(self) -> tuple[tuple[RowFormat, int, int | None], ...]:
        """For each matrix: its format, its first byte in a record, and the first byte of its biases,
        or None.
        """
        parts = zip(self.part_offsets, self.matrices, strict=True)
        return tuple(
            (matrix.row.stored, offset, offset + matrix.rows_bytes if matrix.has_bias else None)
            for offset, matrix in parts
        )


@dataclass(frozen=True)
class SliceLayout(PartLayout):
    """The record of a slice of a dense feed-forward: the high plane of its matrices, then their low plane.

    If no matrix has divided codes, the record has one part.

    tiles: the layout of the slice once its planes are joined, in which it is multiplied.
    """

    tiles: ExpertLayout

    @property
    def neurons(self) -> int:
        return self.tiles.neurons

    @cached_property
    def _planes(self) -> tuple[list[tuple[int, int]], ...]:
        """[start, stop) of each matrix in the high plane, and in the low one, from the plane's start."""
        high, low = list[tuple[int, int]](), list[tuple[int, int]]()
        for matrix in self.tiles.matrices:
            for plane, tile_bytes in ((high, matrix.high_tile_bytes), (low, matrix.low_tile_bytes)):
                start = padded(plane[-1][1], PLANE_ALIGNMENT) if plane else 0
                plane.append((start, start + matrix.tiles * tile_bytes))
        return (high, low) if low[-1][1] else (high,)

    @cached_property
    def places(self) -> tuple[tuple[int, int | None], ...]:
        """For each matrix, its first byte in the high plane and in the low plane; the latter is None if its
        codes aren't divided.
        """
        high, *low = self._planes
        lower = [start if start < stop else None for start, stop in low[0]] if low else [None] * len(high)
        return tuple((start, below) for (start, _), below in zip(high, lower, strict=True))

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Unpadded bytes of the high plane, and of the low one, if there is one."""
        return tuple(plane[-1][1] for plane in self._planes)

    @property
    def alignment(self) -> int:
        """Alignment in bytes: a page, as for experts, because planes are read without the page cache."""
        return DATA_OFFSET

    @property
    def high_bytes(self) -> int:
        """Bytes of the high plane, its padding included."""
        return self.part_bytes[0]

    @property
    def low_bytes(self) -> int:
        """Bytes of the low plane, its padding included; 0 without one."""
        return self.stride - self.high_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes that a slice takes in memory with only its high plane; 0 if it has no low plane."""
        return self.high_bytes if self.low_bytes else 0

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) byte ranges of a record that hold no data and must be zero."""
        gaps = []
        for offset, nbytes, plane in zip(self.part_offsets, self.part_bytes, self._planes, strict=True):
            starts = [*(start for start, _ in plane[1:]), nbytes]
            for (_, stop), start in zip(plane, starts, strict=True):
                gaps.append((offset + stop, offset + start))
        return tuple((stop, start) for stop, start in gaps if stop < start)

    @cached_property
    def halves(self) -> tuple[HalfRange, ...]:
        """The bytes of a record that hold float16 values."""
        matrices = zip(self.places, self.tiles.matrices, strict=True)
        return tuple(matrix.high_halves.shifted(high) for (high, _), matrix in matrices)


def neuron_layout(config: ModelConfig, quant: QuantConfig, layer: int) -> RecordLayout | SliceLayout:
    """Layout of the record of one feed-forward neuron, or of a slice of neighbouring ones if
    `config.is_sliced`.

    A neuron's record has two parts: [gate row] and [up row | down column], each row D long. Without gating
    there is no up row.
    """
    if config.is_sliced:
        return slice_layout(config, quant, layer)
    return record_layout(config, quant)


def record_layout(config: ModelConfig, quant: QuantConfig) -> RecordLayout:
    """Layout of the record of one neuron, the same in every layer."""
    row, down = (RowLayout(config.hidden_size, *stored) for stored in (quant.of("feed_forward"), quant.plain))
    return RecordLayout(((row,), (*(row,) * (config.feed_forward.num_rows - 2), down)))


def slice_layout(config: ModelConfig, quant: QuantConfig, layer: int) -> SliceLayout:
    """Layout of a slice of a layer: the record of `slice_neurons` neighbouring neurons of its
    feed-forward.
    """
    formats = quant.of("feed_forward", layer), quant.of("down", layer)
    return _slice_layout(config, slice_neurons(config, quant), *formats)


def _slice_layout(config: ModelConfig, neurons: int, gate: RowFormat, down: RowFormat) -> SliceLayout:
    """Layout of a slice of `neurons` neurons. gate: the format of gate and up rows. down: that of
    down rows.
    """
    by_rows = TiledMatrix(neurons, RowLayout(config.hidden_size, *gate))
    by_columns = TiledMatrix(config.hidden_size, RowLayout(neurons, *down))
    return SliceLayout(ExpertLayout((*(by_rows,) * (config.feed_forward.num_rows - 1), by_columns)))


def slice_neurons(config: ModelConfig, quant: QuantConfig) -> int:
    """Number of neurons in a slice, the same in every layer: as many as take about SLICE_BYTES.

    It is at most about an eighth of the widest layer, and chosen so that few neurons are padding.
    """
    gate, down = quant.of("feed_forward"), quant.of("down")
    widths = [neurons for neurons in config.model_widths if neurons]
    unit = slice_unit(config)
    by_rows = RowLayout(config.hidden_size, *gate).nbytes * (config.feed_forward.num_rows - 1)
    by_columns = config.hidden_size * RowLayout(SUPER_SIZE, *down).nbytes * unit // SUPER_SIZE
    units = tuple(sorted(-(-neurons // unit) for neurons in widths)) or (1,)
    return slice_units(units, unit * by_rows + by_columns) * unit


@lru_cache
def slice_units(units: tuple[int, ...], unit_bytes: int) -> int:
    """Number of units of neurons in a slice: near SLICE_BYTES, with as little padding over all layers as
    possible.

    units: number of units in each layer, at least one. unit_bytes: bytes of a slice that is one unit.
    """
    aim = max(1, min(SLICE_BYTES // unit_bytes, max(units) // SLICES_PER_LAYER))
    layers = Counter(units)

    def cost(size: int) -> tuple[int, int, int]:
        """The rank of a slice size, best lowest: units in all layers including padding, then distance from
        the aim.
        """
        stored = sum(-(-count // size) * size * times for count, times in layers.items())
        return stored, abs(size - aim), size

    return min(range(max(1, aim // 2), 2 * aim + 1), key=cost)


def slice_unit(config: ModelConfig) -> int:
    """Number of neurons in a unit, which divides every slice: 256 if that divides all layers' numbers of
    neurons, else 64.
    """
    return SLICE_UNIT if all(neurons % SLICE_UNIT == 0 for neurons in config.model_widths) else GROUP_SIZE


def expert_layout(config: ModelConfig, quant: QuantConfig, layer: int) -> ExpertLayout | None:
    """Layout of the record of one expert of a layer. None if the model has no experts that are stored as
    matrices.
    """
    experts, hidden = config.experts, config.hidden_size
    if experts is None or experts.layout != "matrices":
        return None
    row = RowLayout(hidden, *quant.of("experts", layer))
    by_rows = TiledMatrix(experts.neurons, row, experts.bias)
    down = RowLayout(experts.neurons, *quant.of("experts_down", layer))
    return ExpertLayout(
        (*(by_rows,) * (config.feed_forward.num_rows - 1), TiledMatrix(hidden, down, experts.bias))
    )


def record_counts(config: ModelConfig, quant: QuantConfig) -> tuple[int, ...]:
    """Records in each layer's file of neurons."""
    neurons = slice_neurons(config, quant) if config.is_sliced else 1
    return tuple(-(-records // neurons) for records in config.records)


def neuron_layouts(config: ModelConfig, quant: QuantConfig) -> tuple[RecordLayout | SliceLayout, ...]:
    """`neuron_layout` of every layer."""
    if not config.is_sliced:
        return (record_layout(config, quant),) * config.num_layers
    neurons = slice_neurons(config, quant)
    formats = [(quant.of("feed_forward", it), quant.of("down", it)) for it in range(config.num_layers)]
    layouts = {pair: _slice_layout(config, neurons, *pair) for pair in set(formats)}
    return tuple(layouts[pair] for pair in formats)


def largest_neuron_layout(config: ModelConfig, quant: QuantConfig) -> RecordLayout | SliceLayout:
    """The layout of the largest record of neurons of all layers."""
    return max(neuron_layouts(config, quant), key=lambda layout: layout.stride)


def largest_expert_layout(config: ModelConfig, quant: QuantConfig) -> ExpertLayout | None:
    """The layout of the largest record of an expert of all layers; None as for `expert_layout`."""
    layouts = (expert_layout(config, quant, layer) for layer in range(config.num_layers))
    return max(filter(None, layouts), key=lambda layout: layout.stride, default=None)


def expert_bytes(config: ModelConfig, quant: QuantConfig) -> int:
    """Bytes of the largest expert on flash, stored in either way; 0 in a model without experts."""
    largest = largest_expert_layout(config, quant)
    if largest is not None:
        return largest.stride
    return 0 if config.experts is None else config.experts.neurons * record_layout(config, quant).stride


def gate_layout(config: ModelConfig, quant: QuantConfig) -> RecordLayout:
    """Layout of the record of one neuron's gate row."""
    return RecordLayout(((RowLayout(config.hidden_size, *quant.of("feed_forward")),),))


def embedding_layout(config: ModelConfig, quant: QuantConfig) -> TileLayout:
    """Layout of the record that holds the embedding rows of 16 tokens."""
    return TileLayout(RowLayout(config.embedding_size, *quant.of("embedding")))


def embedding_tiles(config: ModelConfig) -> int:
    """Number of records of the embedding table."""
    return padded(config.vocab_size, TILE_ROWS) // TILE_ROWS


def projection_matrices(config: ModelConfig, quant: QuantConfig, layer: int) -> dict[str, TiledMatrix]:
    """The matrices of a layer's fused projection, by the parts of `ModelConfig.projection_sizes`."""
    sizes = config.projection_sizes(config.layers[layer])
    return {
        part: TiledMatrix(rows, RowLayout(config.hidden_size, *quant.of("qkv", layer, part)))
        for part, rows in sizes.items()
    }


def out_matrix(config: ModelConfig, quant: QuantConfig, layer: int) -> TiledMatrix:
    """The output projection of a layer's attention."""
    cols = config.out_cols(config.layers[layer])
    return TiledMatrix(config.hidden_size, RowLayout(cols, *quant.of("out", layer)))


def head_matrix(config: ModelConfig, quant: QuantConfig) -> TiledMatrix:
    """The output head; with tied embeddings, the embedding's tiles."""
    stored = quant.head(config.tie_embeddings)
    return TiledMatrix(config.vocab_size, RowLayout(config.embedding_size, *stored))


def per_layer_layout(config: ModelConfig, quant: QuantConfig) -> RecordLayout:
    """Layout of the record of one token's per-layer inputs, those of all layers in one row."""
    return RecordLayout(((RowLayout(config.per_layer_size, *quant.plain),),))
