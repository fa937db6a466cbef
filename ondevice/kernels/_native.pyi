"""Types of the native extension. Arrays are C-contiguous numpy arrays unless said otherwise.

T tokens, R rows, G groups of columns, F neurons of a layer. Impossible arguments raise ValueError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ondevice.kernels._delta import gated_delta as gated_delta
from ondevice.kernels._delta import gated_delta_ahead as gated_delta_ahead
from ondevice.kernels._delta import replay_delta as replay_delta
from ondevice.kernels._delta import short_conv as short_conv
from ondevice.kernels._delta import short_conv_ahead as short_conv_ahead
from ondevice.kernels._delta import sigmoid_gate as sigmoid_gate
from ondevice.kernels._layer import LowRank as LowRank
from ondevice.kernels._layer import PlainLayer as PlainLayer
from ondevice.kernels._layer import SequenceRows as SequenceRows
from ondevice.kernels._layer import run_layers as run_layers
from ondevice.kernels._mamba2 import mamba2 as mamba2
from ondevice.kernels._mamba2 import mamba2_ahead as mamba2_ahead
from ondevice.kernels._mamba2 import replay_mamba2 as replay_mamba2
from ondevice.kernels._matrix import Matrix as Matrix
from ondevice.kernels._matrix import dequantize_lanes as dequantize_lanes
from ondevice.kernels._matrix import forward_stacked as forward_stacked
from ondevice.kernels._matrix import look_up as look_up
from ondevice.kernels._runner import Runner as Runner
from ondevice.kernels._runner import seconds_in_cache as seconds_in_cache
from ondevice.kernels._tokenizer import BytePairs as BytePairs

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Uint16 = NDArray[np.uint16]
Addresses = NDArray[np.uint64]
Format = int | tuple[int, int, str]
"""Bits of weights, or a RowFormat."""
Tree = tuple[Int32, Int32]
"""Parents and depths (T,) of a draft tree's tokens."""
MatrixPlace = tuple[Format, int, int | None]
"""A matrix of an expert's record: its format, its first byte, and that of its biases."""
GateForm = tuple[int, float, bool, float, float]
"""An activation, as its index in `ondevice.model_config.ACTIVATIONS`; the threshold of `fatrelu`, else 0;
whether the up projection goes through ReLU; and clamp and slope of `clamped_swish`."""
Norm = tuple[Float32, float, Float32 | None, bool]
"""Weight and epsilon of a norm, its bias, and whether the mean is taken off first."""

def available_targets() -> list[str]:
    """Instruction sets that this machine can run, the preferred one first."""

POPULATED_BYTES: int
"""Least size of an allocation whose pages are all made at once."""

def allocate(nbytes: int, populated: bool = False) -> Bytes:
    """Zeros in a mapping of their own, which is unmapped when the array is freed. Raises MemoryError.

    populated: whether its pages are made now where it is smaller than POPULATED_BYTES.
    """

# Matrices

def quantize_rows(
    runner: Runner,
    x: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    stored: Format,
    codes: Bytes,
    scales: Uint16,
    biases: Uint16,
) -> bool:
    """x (R, cols) of any strides, uint16 meaning bfloat16, into codes, scales and biases.

    False if a value isn't finite, or wouldn't be finite as float16.
    """

def copy_gguf_codes(
    type: str, data: Bytes, stored: Format, codes: Bytes, scales: Float32, biases: Float32
) -> None:
    """Blocks (R, B * bytes) of GGUF's `type` into codes, and scales and biases of groups of 32 (R, G).

    Implied biases are (R, 0). ValueError for a type or format that doesn't keep codes.
    """

def copy_gguf_codes_and_halves(
    type: str, data: Bytes, stored: Format, codes: Bytes, scales: Uint16, biases: Uint16
) -> None:
    """The same with scales and biases as blocks have them, of a type with one float16 scale in a block.

    ValueError also for other types, and for stored biases that the type implies.
    """

def copy_gguf_rows(type: str, data: Bytes, codes: Bytes, scales: Bytes) -> None:
    """Blocks (R, B * bytes) of a type whose scales only tiles hold exactly into codes (R, C * bits / 8).

    scales: bytes of headers, (R, C / 256 * header_bytes), or of IQ4_NL's float16 scales, (R, 2 * B).
    ValueError for other types.
    """

def copy_mxfp4_blocks(data: Bytes, codes: Bytes, scales: Bytes) -> None:
    """GGUF's blocks of MXFP4 (R, B * 17) into codes (R, B * 16) and scales (R, B)."""

def quantize_gguf_columns(
    runner: Runner,
    type: str,
    data: Bytes,
    first: int,
    stored: Format,
    codes: Bytes,
    scales: Uint16,
    biases: Uint16,
) -> bool:
    """Columns of blocks (R, B * bytes) as rows from `first`, a multiple of 16; False as for quantize_rows."""

def decode_gguf_column(type: str, data: Bytes, column: int, out: Float32) -> None:
    """One column of blocks (R, B * bytes) into out (R,)."""

def feedback_factor(runner: Runner, h: Float64, factor: Float32) -> bool:
    """Strictly upper U of the symmetric h (n, n) = (U + 1) D (U + 1)^T into factor (n, n); overwrites h.

    False if h isn't positive definite.
    """

def round_columns(
    runner: Runner, w: Float32, stored: Format, factor: Float32, codes: Bytes, scales: Uint16, biases: Uint16
) -> bool:
    """w (R, C) at 4 to 6 bits with stored biases, column by column with error feedback by factor (C, C).

    False if a value isn't finite, or wouldn't be finite as float16.
    """

def round_rows(
    runner: Runner, w: Float32, stored: Format, factor: Float32, codes: Bytes, scales: Uint16, biases: Uint16
) -> bool:
    """w (n, C) at 4 to 6 bits in groups of 64, row by row with error feedback by factor (n, n).

    False as for round_columns.
    """

def dequantize_rows(runner: Runner, stored: Format, rows: Bytes, cols: int, out: Float32) -> None:
    """rows (R, nbytes), each [codes | scales | biases], into out (R, padded cols)."""

# Feed-forward layers

class Segment:
    """Memory for some of a layer's neurons."""

    def __init__(self, nbytes: int) -> None: ...

class FeedForward:
    """A layer's shape: hidden size, format of gate and up rows, a record's bytes and the offsets of its rows.

    Down rows have as many bits, groups of 64 and stored biases. up: None in an ungated layer. bias: of its
    gates, (F,).
    """

    def __init__(
        self,
        hidden: int,
        rows: Format,
        stride: int,
        gate: int,
        up: int | None,
        down: int,
        bias: Float32 | None = None,
    ) -> None: ...
    def segment_bytes(self, blocks: int) -> int:
        """Bytes of a segment of `blocks` blocks of 64 neurons."""

    def pack(self, runner: Runner, segment: Segment, blocks: int, block0: int, records: Bytes) -> None:
        """Neuron records (n, stride) into a segment of `blocks` blocks, from block `block0` on."""

    def forward(
        self,
        runner: Runner,
        x: Float32,
        segments: Sequence[Segment],
        form: GateForm,
        out: Float32,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> None:
        """out (T, hidden) = the layer's output for norm(x) + added; the segments hold every neuron."""

    def forward_selected(
        self,
        runner: Runner,
        x: Float32,
        scorer: Matrix,
        bias: Float32 | None,
        low_rank: Matrix | None,
        slots: Int32,
        addresses: Addresses,
        whole: bool,
        form: GateForm,
        out: Float32,
        norm: Norm | None = None,
        added: Float32 | None = None,
    ) -> int:
        """`forward` over the neurons that score above zero for any token; returns their number.

        scorer: the gates, or a predictor's last matrix behind its `low_rank` first one; bias (F,).
        slots: (F,), each neuron's slot; addresses: each slot's; `whole` as in FeedForwardPass.add_selected.
        """

    def forward_records(
        self, runner: Runner, x: Float32, address: int, count: int, form: GateForm, out: Float32
    ) -> None:
        """out (T, hidden) = the output of `count` neurons alone, whose records begin at `address`."""

class Expert:
    """The shape of a layer's experts, whose matrices lie whole in one record each.

    gate and up (neurons, hidden), of one format, and down (hidden, neurons): each the format, the byte where
    its tiles of 16 rows begin in a record, and the one where its float32 biases do, or None. up: None in an
    ungated layer. planes: of slices, `SliceLayout.places` of these matrices.
    """

    def __init__(
        self,
        hidden: int,
        neurons: int,
        gate: MatrixPlace,
        up: MatrixPlace | None,
        down: MatrixPlace,
        planes: Sequence[tuple[int, int | None]] = (),
    ) -> None: ...
    @property
    def record_bytes(self) -> int:
        """Bytes of a record, but for what pads it."""

    def join(self, runner: Runner, high: Bytes, low: Bytes, record: Bytes) -> None:
        """Write the record of tiles (record_bytes,) of a slice's planes, (bytes,) each."""

    def forward(self, runner: Runner, x: Float32, address: int, form: GateForm, out: Float32) -> None:
        """out (T, hidden) = the output, for x (T, hidden), of the expert whose record is at `address`."""

class ReuseScores:
    """What `sparsity.expert_reuse.ExpertReuse` computes for a layer. ahead: its AHEAD_WEIGHTS."""

    def __init__(
        self,
        experts: int,
        chosen: int,
        remembered: int,
        similar: int,
        slow_decay: float,
        fast_decay: float,
        fast_weight: float,
        fade: float,
        sharpness: float,
        ahead: Sequence[float],
    ) -> None: ...
    def observe(
        self,
        gates: Float32,
        slow: Float32,
        fast: Float32,
        scores: Float32,
        past: Int32,
        seen: int,
        alike: Float32,
    ) -> int:
        """Learn from gates (T, E): slow, fast and scores (E,), past (k, W) and alike (W,) change in place.

        seen: tokens that the layer remembers. Returns how many it remembers now.
        """

def worth_least(slots: Int32, worth: Float32, first: int, keep: Int32, count: int) -> list[int]:
    """Ids, in no order, of the neurons worth least: `count`, or all that may go where those are fewer.

    slots and worth: (N,); a slot of -1 is none. keep: (K,) neurons that stay, by their distance from `first`.
    """

class Router:
    """What a router chooses by: the fields of an ExpertsSpec, scoring as its index in `Scoring`."""

    def __init__(
        self,
        scoring: int,
        experts: int,
        chosen: int,
        renormalised: bool,
        factor: float,
        groups: int,
        chosen_groups: int,
        jitter: float,
        group_best: int = 2,
    ) -> None: ...
    def route(
        self,
        logits: Float32,
        choice_bias: Float32 | None,
        scales: Float32 | None,
        ids: Int32,
        weights: Float32,
    ) -> None:
        """Logits (T, E) -> ids and weights (T, k), as `backends.routing.route` computes them."""

class ExpertPass:
    """The chosen experts of one forward pass through a layer, multiplied as they arrive.

    Outputs are added to `total` (T, hidden) in the order of experts. They are in the runner's scratch memory
    until `finish`, so no other op of a feed-forward may run on it meanwhile.
    """

    def __init__(
        self,
        runner: Runner,
        layer: FeedForward,
        expert: Expert | None,
        neurons: int,
        x: Float32,
        ids: Int32,
        weights: Float32,
        form: GateForm,
        in_order: bool,
        total: Float32,
    ) -> None:
        """expert: what experts are; None: runs of `neurons` neurons of the layer's. x: (T, hidden).

        ids, weights: (T, k), what each row chose. in_order: experts are added in ascending order.
        """

    def add(self, expert: int, address: int) -> None:
        """Multiply the rows that chose `expert`, whose record is at `address`, by it.

        Raises ValueError for one that no row chose, that was added before, or that is out of order.
        """

    def finish(self) -> None:
        """Add what is left to the total. Raises ValueError unless all experts were added."""

class SlicePass:
    """One pass through a feed-forward in slices, which another op that multiplies ends.

    x: (T, hidden). bias: of the gates, for all neurons of whole slices.
    """

    def __init__(
        self,
        runner: Runner,
        slice: Expert,
        x: Float32,
        form: GateForm,
        norm: Norm | None = None,
        bias: Float32 | None = None,
    ) -> None: ...
    def add(
        self, records: Sequence[Bytes], tokens: int | None, out: Float32, base: Float32 | None = None
    ) -> None:
        """out (T, hidden) = base, or zeros, + the next slices' outputs, for the first `tokens` or all."""

    def add_planes(
        self,
        planes: Sequence[tuple[Bytes, Bytes | None]],
        tokens: int | None,
        out: Float32,
        base: Float32 | None = None,
    ) -> None:
        """`add` of slices in planes. Without its low one, codes are in the middle of what its bits may be."""

def split_tiles(stored: Format, tiles: Bytes, high: Bytes, low: Bytes) -> None:
    """Write both planes of tiles (n, bytes): (n, high_tile_bytes) and (n, low_tile_bytes)."""

def tile_rows(
    runner: Runner, stored: Format, codes: Bytes, scales: Bytes, biases: Bytes, tiles: Bytes
) -> None:
    """Write rows as a bundle stores them, codes (R, bytes), scales and biases (R, 2 G) bytes, as tiles.

    With two levels of scales these are headers, (R, C / 256 * header_bytes).
    tiles: (bytes,) of tiles of 16 rows, or of whole rows at 16 bits; zeros follow the last row.
    """

class FeedForwardPass:
    """One forward pass through a layer, neurons added piece by piece in ascending order.

    Its sums are in the runner's scratch memory: it ends when the runner multiplies anything else, and
    raises ValueError from then on. Either segments are added to a pass or selected neurons, never both.
    """

    def __init__(
        self, runner: Runner, layer: FeedForward, x: Float32, form: GateForm, norm: Norm | None = None
    ) -> None: ...
    def add(
        self, segments: Sequence[Segment], tokens: int | None = None, gates: Float32 | None = None
    ) -> None:
        """Add the segments' neurons to the first `tokens` tokens, or to all.

        For the other tokens they count as zero. The segments of a pass hold the layer's neurons from the
        first one on, without gaps. gates: (T, F), used as the neurons' gates instead of the products of their
        gate rows.
        """

    def add_selected(self, ids: Int32, parts: Addresses, whole: bool, scores: Float32) -> None:
        """Neurons that any token selects: those with scores (T, F) above zero.

        ids, parts: (n,), ascending ids, and where the rest of each neuron's record lies, behind its gate row;
        or its whole record, if `whole`. Gates are computed from whole records, otherwise `scores` are the
        gates, which count above the threshold. A block of 64 stored ids must not be split between calls.
        """

    def finish(self, out: Float32, added: Float32 | None = None) -> None:
        """out (T, hidden) = the sums + added; added may be out."""

def select(scores: Float32, ids: Int32) -> int:
    """Ascending ids of the columns of scores (T, F) above zero in any row, into ids; returns their number."""

# Attention

def attend(
    runner: Runner,
    qkv: Float32,
    blocks: Addresses,
    offset: int,
    bits: int,
    heads: int,
    kv_heads: int,
    position: int,
    window: int,
    scale: float,
    soft_cap: float,
    cos: Float32,
    sin: Float32,
    norms: tuple[Norm, Norm | None, bool, Norm | None] | None,
    tree: Tree | None,
    out: Float32,
    stores: bool = True,
    sinks: Float32 | None = None,
    latent: int = 0,
    value_dim: int = 0,
) -> None:
    """Norm and rotate queries and keys in place, store keys and values, attend.

    qkv: (T, (heads + 2 * kv_heads) * head_dim), each row a token's queries, keys and values; or, unless it
    `stores`, (T, heads * head_dim), queries alone, whose tokens' keys and values are stored already.
    blocks: addresses of the KV blocks; offset: bytes from a block's start to the layer's keys and values;
    position: the first token's; window: 0 means all positions.
    scale, soft_cap: of scores; 0 means no cap.
    cos, sin: (T, head_dim / 2); norms: of queries, of keys, whether all heads are normed as one vector, and
    of each head's values or None. Queries alone need no norm of keys: it isn't used.
    out: (T, heads * head_dim). sinks: (heads,) scores that take part in the softmax, and weigh no value.
    latent: if not 0, qkv is (T, (heads + 1) * head_dim): values are the first `latent` dimensions of keys,
    which don't turn, and out is (T, heads * latent). cos, sin: (T, (head_dim - latent) / 2).
    value_dim: if not 0, values are so wide, at most head_dim: qkv is (T, (heads + kv_heads) * head_dim +
    kv_heads * value_dim), and out is (T, heads * value_dim).
    """

def kv_move(
    runner: Runner,
    blocks: Addresses,
    offset: int,
    kv_heads: int,
    head_dim: int,
    bits: int,
    source: int,
    target: int,
    latent: int = 0,
    value_dim: int = 0,
) -> None:
    """Copy one layer's key and value at position `source` to position `target`.

    offset: bytes from a block's start to the layer's keys and values.
    """

# Vectors

def norm(runner: Runner, x: Float32, norm: Norm, out: Float32) -> None:
    """out (T, n) = norm(x) for each row of x (T, n)."""

def add_normed(runner: Runner, x: Float32, y: Float32, norm: Norm) -> None:
    """x (T, n) += norm(y)."""

def soft_cap(runner: Runner, x: Float32, cap: float) -> None:
    """x (T, n) = cap * tanh(x / cap)."""

def activate(runner: Runner, form: GateForm, gate: Float32, up: Float32 | None, out: Float32) -> None:
    """out (n,) = activation(gate) * up, or activation(gate)."""

def largest(x: Float32, ids: Int32, values: Float32) -> float:
    """The len(ids) largest of x (n,), ties to the lower index; returns the sum of exp(x - largest)."""

def all_finite(x: Float32) -> bool:
    """Whether all values of x (T, n) are finite."""

def copy_out(addresses: Addresses, offset: int, out: Bytes) -> None:
    """out (n, nbytes) = the bytes from `offset` on behind each address."""

# Reading from flash; ondevice/flash wraps these

Extents = Sequence[tuple[int, int, int]]
"""Files' indices, offsets and lengths."""
ReadStats = tuple[int, float, float, int]
"""Bytes read, seconds under way, CPU seconds, reads."""

def crc32c(data: Bytes, units: Sequence[int]) -> NDArray[np.uint32]:
    """The CRC-32C of each piece of data; piece lengths are those of `units`, over and over."""

class FileSpec:
    def __init__(
        self,
        path: bytes,
        nbytes: int,
        crc_start: int,
        units: Sequence[int],
        crcs: NDArray[np.uint32],
        halves: Sequence[tuple[int, ...]],
        halves_period: int,
    ) -> None: ...

class FlashReader:
    def __init__(self, specs: Sequence[FileSpec], io: str, depth: int, ring: bool) -> None: ...
    def read_new(self, file: int, offset: int, nbytes: int) -> Bytes: ...
    def read(self, file: int, offset: int, out: Bytes) -> None: ...
    def read_records(self, file: int, ids: NDArray[np.int64], out: Bytes) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> ReadStats: ...
    @property
    def staging_bytes(self) -> int: ...
    def trim(self) -> None: ...
    @property
    def direct(self) -> bool: ...
    @property
    def has_ring(self) -> bool: ...
    @property
    def fallback_reason(self) -> str: ...

class RecordBatch:
    def __init__(self, reader: FlashReader, urgent: bool) -> None: ...
    def start(
        self, file: int, first_part: int, parts: int, ids: Int32, targets: Addresses, gap_bytes: int
    ) -> None: ...
    def done(self) -> bool: ...
    def halt(self) -> int: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> ReadStats: ...

class RangeReads:
    """Ranges of whole checked units, read straight to given addresses; see flash/range_reads.h."""

    def __init__(self, reader: FlashReader) -> None: ...
    def begin(self, file: int, offset: int, nbytes: int, target: int, ahead: bool = False) -> int: ...
    def hurry(self, ticket: int) -> None: ...
    def drop(self, ticket: int) -> bool: ...
    def arrived(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...

class ReadAhead:
    def __init__(
        self,
        reader: FlashReader,
        extents: Extents,
        slot_bytes: int,
        slots: int,
        cyclic: bool,
        memory: Bytes | None,
    ) -> None: ...
    def next(self) -> Bytes: ...
    def release(self) -> None: ...
    def rewind(self) -> None: ...
    def reschedule(self, extents: Extents) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> tuple[ReadStats, float]: ...
    @property
    def nbytes(self) -> int: ...

class _Testing:
    """Single steps of fused ops, and chosen code paths."""

    def head_norm(self, runner: Runner, x: Float32, weight: Float32, eps: float) -> None: ...
    def rope(self, runner: Runner, x: Float32, cos: Float32, sin: Float32) -> None: ...
    def multiply_tiles(
        self, runner: Runner, stored: Format, tiles: Bytes, x: Float32, bias: Float32 | None, out: Float32
    ) -> None: ...
    def multiply_high(
        self, runner: Runner, stored: Format, planes: Bytes, x: Float32, out: Float32
    ) -> None: ...
    def kv_write(
        self, runner: Runner, blocks: Addresses, layer: int, bits: int, position: int, k: Float32, v: Float32
    ) -> None: ...
    def attention(
        self,
        runner: Runner,
        q: Float32,
        blocks: Addresses,
        layer: int,
        bits: int,
        kv_heads: int,
        position: int,
        window: int,
        tree: Tree | None,
        out: Float32,
    ) -> None: ...
    def crc32c_on(self, data: Bytes, units: Sequence[int], target: str) -> NDArray[np.uint32]: ...

testing: _Testing
"""A submodule for tests only."""
