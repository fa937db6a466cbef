"""Reads every byte of a bundle and checks all sizes, hashes, checksums and zero padding of the format."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.bundle.codes import MAX_POWER
from ondevice.bundle.digest import CHUNK_BYTES, Crc32c, FileDigest
from ondevice.bundle.draft_layers import SIDECAR_OF
from ondevice.bundle.expert_costs import EXPERT_COSTS_SIDECAR
from ondevice.bundle.expert_use import EXPERT_USE, EXPERT_USE_SIDECAR, expert_use_layout
from ondevice.bundle.file_layouts import FileLayout, file_layout
from ondevice.bundle.files import read_range
from ondevice.bundle.hotness import HOTNESS, HOTNESS_SIDECAR, hotness_layout
from ondevice.bundle.layout import (
    CHECKSUMS,
    PartLayout,
    RecordLayout,
    gate_file_name,
    neuron_file_name,
)
from ondevice.bundle.manifest import FileEntry
from ondevice.bundle.matrix_layout import HalfRange
from ondevice.bundle.ngrams import NGRAMS_SIDECAR
from ondevice.bundle.predictors import PREDICTORS_SIDECAR
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.bundle.sidecar import Sidecar
from ondevice.bundle.streams import STREAMS_SIDECAR
from ondevice.errors import BundleError, reading_failed
from ondevice.records import dataclass

if TYPE_CHECKING:
    from hashlib import _Hash

SIDECARS = (
    PREDICTORS_SIDECAR,
    HOTNESS_SIDECAR,
    EXPERT_COSTS_SIDECAR,
    EXPERT_USE_SIDECAR,
    NGRAMS_SIDECAR,
    STREAMS_SIDECAR,
    *SIDECAR_OF.values(),
)
FLOAT_BYTES = 1 << 20
"""Most bytes of float32 values that are checked together."""
_REMEDY = "the bundle is damaged, convert the model again"


@dataclass(frozen=True)
class Report:
    """The result of `verify`: names and sizes of the files, and the number of CRC32C units compared.

    unused: sidecars' tensor files without their JSON file, which can't be checked.
    """

    files: tuple[tuple[str, int], ...]
    checksums: int
    unused: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all these files."""
        return sum(nbytes for _, nbytes in self.files)


def verify(
    bundle_path: str | Path, crc32c: Crc32c, on_progress: Callable[[int, int], None] | None = None
) -> Report:
    """Checks the bundle, sidecars last. on_progress: called with (bytes read, bytes in total).

    Raises what `Bundle.open` raises, and BundleError at the first damage, with file, offset and record, and
    the command that makes that file again.
    """
    import hashlib

    bundle = Bundle.open(bundle_path)
    files = dict(bundle.manifest.files)
    files |= {
        name: FileEntry(sidecar_files.file.nbytes, sidecar_files.sha256, None)
        for name, sidecar_files in bundle.sidecar_files.items()
    }
    total = sum(entry.nbytes for entry in files.values())
    done = checksums = 0
    layers = range(bundle.config.num_layers if bundle.config.zeros_gates else 0)
    # A layer's gate rows are in two files; digests save a second reading for their comparison.
    pairs = [(gate_file_name(layer), neuron_file_name(layer)) for layer in layers]
    gate_rows = {name: hashlib.sha256() for pair in pairs for name in pair}
    for name, entry in files.items():
        if name != CHECKSUMS:
            file, layout = _opened(bundle, name)
            with _remedy(bundle, name):
                for read in _verify_file(file, layout, entry, crc32c, gate_rows.get(name)):
                    if on_progress is not None:
                        on_progress(done + read, total)
            checksums += file.crcs.size
        done += entry.nbytes
    for layer, (gates, neurons) in enumerate(pairs):
        if gate_rows[gates].digest() != gate_rows[neurons].digest():
            with _remedy(bundle, gates):
                raise _different_gates(bundle, layer)
    for error in bundle.damaged.values():
        raise error
    sizes = [(name, entry.nbytes) for name, entry in files.items()]
    if bundle.frequencies() is not None:
        sizes.append((HOTNESS, hotness_layout(bundle.config).nbytes or 0))
    if bundle.expert_counts() is not None:
        sizes.append((EXPERT_USE, expert_use_layout(bundle.config).nbytes or 0))
    return Report(tuple(sizes), checksums, _unused(bundle))


def _unused(bundle: Bundle) -> tuple[str, ...]:
    """Names of sidecars' tensor files whose JSON file, which would describe them, is missing."""
    folder = bundle.path
    return tuple(
        sidecar.tensors
        for sidecar in SIDECARS
        if sidecar.tensors
        and os.path.lexists(folder / sidecar.tensors)
        and not os.path.lexists(folder / sidecar.manifest)
    )


def without_damage(bundle: Bundle, sidecar: Sidecar, crc32c: Crc32c) -> Bundle:
    """The bundle as it is, or without `sidecar` if the sidecar's tensors don't match their checksums."""
    sidecar_files = bundle.sidecar_files.get(sidecar.tensors)
    if sidecar_files is None:
        return bundle
    try:
        _require_checksums(sidecar_files.file, sidecar_files.layout, crc32c)
    except BundleError as error:
        return bundle.without(sidecar, error)
    return bundle


def _require_checksums(file: CheckedFile, layout: FileLayout, crc32c: Crc32c) -> None:
    """Check a file. Raises BundleError at the first CRC unit that doesn't match. All units have the same
    size.
    """
    (unit,) = file.crc_units
    # A separate mapping, as the allocator would keep a freed large array's memory for good.
    buffer = np.frombuffer(mmap.mmap(-1, unit), np.uint8)
    try:
        with file.path.open("rb", buffering=0) as stream:
            stream.seek(file.crc_start)
            for index, expected in enumerate(file.crcs):
                block = buffer[: min(unit, file.nbytes - file.crc_start - index * unit)]
                if stream.readinto(block.data) != block.size or crc32c(block, file.crc_units)[0] != expected:
                    raise BundleError(f"{file.path.name}: {_unit(index, layout)} doesn't match its CRC32C")
    except OSError as error:
        raise reading_failed(error, BundleError(f"{file.path.name} can't be read: {error}")) from error


@contextmanager
def _remedy(bundle: Bundle, name: str) -> Iterator[None]:
    """A context that adds the remedy to a BundleError about the file `name`."""
    try:
        yield
    except BundleError as error:
        if name not in bundle.sidecar_files:
            raise BundleError(f"{error}; {_REMEDY}") from error
        sidecar = bundle.sidecar_files[name].sidecar
        raise bundle.without(sidecar, error).damaged[sidecar.key] from error


def _opened(bundle: Bundle, name: str) -> tuple[CheckedFile, FileLayout]:
    if name in bundle.sidecar_files:
        return bundle.sidecar_files[name].file, bundle.sidecar_files[name].layout
    return bundle.file(name), file_layout(name, bundle.config, bundle.quant)


def _verify_file(
    file: CheckedFile,
    layout: FileLayout,
    entry: FileEntry,
    crc32c: Crc32c,
    gate_rows: _Hash | None,
) -> Iterator[int]:
    """Yields the number of bytes read so far. Adds the records' gate rows, without padding, to `gate_rows`.

    Raises BundleError at the end if anything is wrong.
    """
    digest = FileDigest(layout, crc32c)
    stain: int | None = None
    broken: int | None = None
    for chunk in _chunks(file, layout):
        if broken is None:
            broken = _broken_half(chunk, layout, digest.nbytes)
        if layout.record is not None and digest.nbytes >= layout.crc_start:
            records = chunk.reshape(-1, layout.record.stride)
            if stain is None:
                stain = _padding_stain(records, layout.record, digest.nbytes)
            if gate_rows is not None and isinstance(layout.record, RecordLayout):
                gate_rows.update(np.ascontiguousarray(records[:, : layout.record.row_bytes[0]]).data)
        digest.update(chunk)
        yield digest.nbytes
    wrong = np.flatnonzero(digest.crcs() != file.crcs)
    name = file.path.name
    if wrong.size:
        raise BundleError(f"{name}: {_unit(int(wrong[0]), layout)} doesn't match its CRC32C")
    if digest.sha256() != entry.sha256:
        raise BundleError(f"{name} doesn't match its sha256")
    if stain is not None:
        raise BundleError(f"{name}: byte {stain} is padding and not zero")
    if broken is not None:
        raise BundleError(f"{name}: the scale or weight at byte {broken} is not finite")
    broken = _broken_float(file, layout)
    if broken is not None:
        raise BundleError(f"{name}: the float at byte {broken} is not finite")


def _different_gates(bundle: Bundle, layer: int) -> BundleError:
    """The error for gate rows whose two copies differ. It names the first such record, after reading both
    copies again.
    """
    gates, neurons = bundle.gate_file(layer), bundle.neuron_file(layer)
    strides = bundle.gate_layout.stride, bundle.record_layout.stride
    used, step = bundle.gate_layout.row_bytes[0], max(1, CHUNK_BYTES // bundle.record_layout.stride)
    num_neurons = bundle.config.widths[layer]
    for first in range(0, num_neurons, step):
        count = min(step, num_neurons - first)
        rows, records = (
            np.frombuffer(
                read_range(file.path, file.crc_start + first * stride, count * stride), np.uint8
            ).reshape(count, stride)[:, :used]
            for file, stride in zip((gates, neurons), strides, strict=True)
        )
        different = np.flatnonzero((rows != records).any(axis=1))
        if different.size:
            return BundleError(
                f"{gates.path.name}: record {first + int(different[0])} isn't the gate row that "
                f"{neurons.path.name} has"
            )
    return BundleError(f"{gates.path.name} or {neurons.path.name} changed while it was read")


def _chunks(file: CheckedFile, layout: FileLayout) -> Iterator[np.ndarray]:
    """Yields the bytes before the CRC units, then runs of full unit cycles. Each array overwrites the one
    before.
    """
    cycle = sum(layout.crc_units)
    step = max(CHUNK_BYTES // cycle, 1) * cycle
    buffer = np.empty(min(max(step, layout.crc_start), file.nbytes), np.uint8)
    start = 0
    try:
        with file.path.open("rb") as stream:
            while start < file.nbytes:
                end = layout.crc_start if start < layout.crc_start else min(start + step, file.nbytes)
                chunk = buffer[: end - start]
                if stream.readinto(chunk.data) != chunk.size:
                    raise BundleError(f"{file.path.name} ends before byte {end}")
                yield chunk
                start = end
    except OSError as error:
        raise reading_failed(error, BundleError(f"{file.path.name} can't be read: {error}")) from error


def _padding_stain(records: np.ndarray, record: PartLayout, offset: int) -> int | None:
    """File offset of a nonzero padding byte in records (n, stride), which begin at `offset`; or None."""
    for start, stop in record.padding:
        stains = np.argwhere(records[:, start:stop])
        if stains.size:
            row, column = stains[0]
            return offset + int(row) * record.stride + start + int(column)
    return None


def _broken_half(chunk: np.ndarray, layout: FileLayout, offset: int) -> int | None:
    """File offset of the first float16 in `chunk` that isn't finite, or MXFP4 scale that is too large; or
    None.

    offset: the chunk's offset in the file. In a record file a chunk begins with a record.
    """
    period = layout.halves_period
    if period and offset < layout.crc_start:
        return None
    rows = chunk.reshape(-1, period or chunk.size)
    first = 0 if period else offset
    for halves in layout.halves:
        if halves.times > 1 and not period:
            at = _broken_repeat(chunk, halves.shifted(-offset))
            if at is not None:
                return offset + at
            continue
        if halves.times > 1:
            broken = _broken(_repeated(rows, halves), halves)
            if broken.size:
                row, place, at = broken[0].tolist()
                return offset + int(row * period + halves.start + place * halves.step + at)
            continue
        start, stop = max(halves.start - first, 0), min(halves.stop - first, rows.shape[1])
        if start < stop:
            broken = _broken(rows[:, start:stop], halves)
            if broken.size:
                row, at = broken[0]
                return offset + int(row) * (period or 0) + start + int(at)
    return None


def _broken_repeat(chunk: np.ndarray, halves: HalfRange) -> int | None:
    """Place in `chunk` of the first invalid number, if its numbers lie in repeated ranges; or None.

    halves: the ranges, counted from the chunk's first byte. They may lie partly or fully outside the chunk.
    """
    size, step = halves.stop - halves.start, halves.step
    # Ranges low .. high are inside; the two next to them may be cut off.
    low = min(max(0, -(halves.start // step)), halves.times)
    high = min(max(low, (chunk.size - size - halves.start) // step + 1), halves.times)
    if low < high:
        begin = halves.start + low * step
        broken = _broken(_repeated(chunk[None, begin:], HalfRange(0, size, step, high - low)), halves)
        if broken.size:
            _, place, at = broken[0].tolist()
            return int(begin + place * step + at)
    for index in (low - 1, high):
        start, stop = (edge + index * step for edge in (halves.start, halves.stop))
        start, stop = max(0, start), min(chunk.size, stop)
        if 0 <= index < halves.times and start < stop:
            broken = _broken(chunk[start:stop], halves)
            if broken.size:
                return start + int(broken[0][0])
    return None


def _broken_float(file: CheckedFile, layout: FileLayout) -> int | None:
    """File offset of a float32 that isn't finite; or None."""
    period = layout.halves_period
    for base in range(layout.crc_start, file.nbytes, period) if period else (0,):
        for start, stop in layout.floats:
            for at in range(base + start, base + stop, FLOAT_BYTES):
                values = read_range(file.path, at, min(FLOAT_BYTES, base + stop - at))
                broken = np.flatnonzero(~np.isfinite(np.frombuffer(values, "<f4")))
                if broken.size:
                    return at + 4 * int(broken[0])
    return None


def _broken(values: np.ndarray, halves: HalfRange) -> np.ndarray:
    """Places (n, dimensions) of the invalid numbers in `values`, which are the bytes of the
    ranges `halves`.
    """
    if halves.mxfp4:
        return np.argwhere(values > MAX_POWER)
    places = np.argwhere(~np.isfinite(values.view("<f2")))
    places[:, -1] *= 2
    return places


def _repeated(records: np.ndarray, halves: HalfRange) -> np.ndarray:
    """The bytes (n, count, bytes) of the ranges `halves` in each of the records (n, stride)."""
    size, end = halves.stop - halves.start, halves.start + halves.step * (halves.times - 1)
    # The last range may have fewer bytes after it than a step.
    first = records[:, halves.start : end].reshape(len(records), halves.times - 1, halves.step)[:, :, :size]
    last = records[:, None, end : end + size]
    return np.ascontiguousarray(np.concatenate([first, last], axis=1))


def _unit(index: int, layout: FileLayout) -> str:
    """A description of CRC unit `index` for messages, with its byte offset."""
    cycle, part = divmod(index, len(layout.crc_units))
    offset = layout.crc_start + cycle * sum(layout.crc_units) + sum(layout.crc_units[:part])
    place = f"the block at byte {offset}"
    return place if layout.record is None else f"record {cycle}, part {part}, at byte {offset}"
