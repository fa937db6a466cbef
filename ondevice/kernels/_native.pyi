"""Types of the native extension. Arrays are C-contiguous numpy arrays unless said otherwise."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Uint16 = NDArray[np.uint16]

def allocate(nbytes: int) -> Bytes: ...
def available_targets() -> list[str]: ...

class Engine:
    def __init__(self, threads: int, target: str = "auto") -> None: ...
    @property
    def target(self) -> str: ...
    def trim(self) -> None: ...

class Matrix:
    def __init__(self, rows: int, cols: int, bits: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    def load_rows(self, engine: Engine, row0: int, codes: Bytes, scales: Uint16, biases: Uint16) -> None: ...
    def forward(
        self,
        engine: Engine,
        x: Float32,
        bias: Float32 | None,
        out: Float32,
        norm: Float32 | None = None,
        eps: float = 0.0,
        added: Float32 | None = None,
    ) -> None: ...

class Segment:
    def __init__(self, nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...

class FeedForward:
    def __init__(self, hidden: int, bits: int, stride: int, gate: int, up: int, down: int) -> None: ...
    def segment_bytes(self, blocks: int) -> int: ...
    def pack(self, engine: Engine, segment: Segment, blocks: int, block0: int, records: Bytes) -> None: ...
    def forward(
        self,
        engine: Engine,
        x: Float32,
        segments: Sequence[Segment],
        activation: int,
        out: Float32,
        norm: Float32 | None = None,
        eps: float = 0.0,
        added: Float32 | None = None,
    ) -> None: ...
    def forward_selected(
        self,
        engine: Engine,
        x: Float32,
        scorer: Matrix,
        bias: Float32 | None,
        narrow: Matrix | None,
        slots: NDArray[np.int32],
        addresses: NDArray[np.uint64],
        whole: bool,
        activation: int,
        out: Float32,
        norm: Float32 | None = None,
        eps: float = 0.0,
        added: Float32 | None = None,
    ) -> int: ...
    def begin(self, engine: Engine, x: Float32, norm: Float32 | None = None, eps: float = 0.0) -> None: ...
    def add(self, engine: Engine, segments: Sequence[Segment], tokens: int, activation: int) -> None: ...
    def add_gathered(
        self,
        engine: Engine,
        ids: NDArray[np.int32],
        parts: NDArray[np.uint64],
        whole: bool,
        scores: Float32,
        activation: int,
    ) -> None: ...
    def finish(self, engine: Engine, out: Float32, added: Float32 | None = None) -> None: ...

def select(scores: Float32, ids: NDArray[np.int32]) -> int: ...
def largest(x: Float32, ids: NDArray[np.int32], values: Float32) -> float:
    """The len(ids) largest of x (n,), ties to the lower index; returns the sum of exp(x - largest)."""

def rms_norm(engine: Engine, x: Float32, weight: Float32, eps: float, out: Float32) -> None: ...
def head_norm(engine: Engine, x: Float32, weight: Float32, eps: float) -> None: ...
def rope(engine: Engine, x: Float32, cos: Float32, sin: Float32) -> None: ...
def kv_write(
    engine: Engine, blocks: NDArray[np.uint64], layer: int, bits: int, position: int, k: Float32, v: Float32
) -> None: ...
def attention(
    engine: Engine,
    q: Float32,
    blocks: NDArray[np.uint64],
    layer: int,
    bits: int,
    kv_heads: int,
    position: int,
    window: int,
    tree: tuple[NDArray[np.int32], NDArray[np.int32]] | None,
    out: Float32,
) -> None: ...
def attend(
    engine: Engine,
    qkv: Float32,
    blocks: NDArray[np.uint64],
    layer: int,
    bits: int,
    heads: int,
    kv_heads: int,
    position: int,
    window: int,
    cos: Float32,
    sin: Float32,
    norms: tuple[Float32, Float32, float] | None,
    tree: tuple[NDArray[np.int32], NDArray[np.int32]] | None,
    out: Float32,
) -> None: ...
def kv_move(
    engine: Engine,
    blocks: NDArray[np.uint64],
    layers: int,
    kv_heads: int,
    head_dim: int,
    bits: int,
    source: int,
    target: int,
) -> None: ...
def copy_out(addresses: NDArray[np.uint64], offset: int, out: NDArray[np.uint8]) -> None: ...
def activate(engine: Engine, activation: int, gate: Float32, up: Float32, out: Float32) -> None: ...
def quantize_rows(
    engine: Engine,
    x: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16],
    bits: int,
    codes: Bytes,
    scales: Uint16,
    biases: Uint16,
) -> bool: ...
def dequantize_rows(engine: Engine, bits: int, rows: Bytes, cols: int, out: Float32) -> None: ...

# ondevice/flash

Extents = Sequence[tuple[int, int, int]]

def crc32c(data: Bytes, units: Sequence[int], target: str = "auto") -> NDArray[np.uint32]: ...

class FileSpec:
    def __init__(
        self,
        path: bytes,
        nbytes: int,
        crc_start: int,
        units: Sequence[int],
        crcs: NDArray[np.uint32],
        halves: Sequence[tuple[int, int]],
        halves_period: int,
    ) -> None: ...

class FlashReader:
    def __init__(self, specs: Sequence[FileSpec], io: str, depth: int, ring: bool) -> None: ...
    def read_new(self, file: int, offset: int, nbytes: int) -> Bytes: ...
    def read(self, file: int, offset: int, out: Bytes) -> None: ...
    def read_records(self, file: int, ids: NDArray[np.int64], out: Bytes) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> tuple[int, float, float, int]: ...
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
        self,
        file: int,
        first_part: int,
        parts: int,
        ids: NDArray[np.int32],
        targets: NDArray[np.uint64],
        gap_bytes: int,
    ) -> None: ...
    def done(self) -> bool: ...
    def halt(self) -> int: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> tuple[int, float, float, int]: ...

class ExtentStream:
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
    def stats(self) -> tuple[tuple[int, float, float, int], float]: ...
    @property
    def nbytes(self) -> int: ...
