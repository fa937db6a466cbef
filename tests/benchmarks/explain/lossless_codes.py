"""What lossless coding of stored weights would save at most, by the entropies of codes and exponents.

"DFloat11" (arXiv 2504.11651) codes the exponents of bfloat16 weights by their frequency, and leaves signs and
mantissas as they are, which saves 30 %. Here every matrix, embeddings and neurons included, is counted as a
bundle stores it: codes of 4 and 8 bits with one table for the whole model and with one for each kind of
matrix, scales and biases by their exponents, and float16 weights by theirs. Entropy is the least that a code
of one symbol after another takes; a Huffman code takes up to a tenth of a bit more. `normal` are random
weights of the normal distribution, in groups of 64. Models that aren't there are left out.

    python -m tests.benchmarks.explain.lossless_codes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.cpu import make_runner
from ondevice.bundle.codes import unpack
from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.layout import RecordLayout
from ondevice.bundle.matrix_layout import RowLayout
from ondevice.bundle.reader import Bundle, CheckedFile
from ondevice.bundle.tiles import StoredMatrix
from ondevice.converters.convert import convert
from ondevice.converters.quantize import quantize
from tests.benchmarks.lib.measure import machine
from tests.support.paths import ROOT, SHARED_DATA
from tests.support.stored_matrices import embedding_matrix, resident_matrix

KNOWN = [ROOT / "weights/small-relu"]
STORIES = "models/stories260K"
WIDTHS: dict[str, int] = {"q4": 4, "q8": 8, "f16": 16}
NORMAL_ROWS, NORMAL_COLUMNS = 2048, 2048

Bytes = NDArray[np.uint8]


class Matrix(NamedTuple):
    """A matrix as it is stored. codes: packed (R, bytes); halves: float16 scales and biases, any shape."""

    kind: str
    row: RowLayout
    codes: Bytes
    halves: NDArray[np.float16]


def entropy(counts: NDArray[np.integer]) -> float:
    """Bits per symbol."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def exponents(halves: NDArray[np.float16]) -> NDArray[np.uint16]:
    found: NDArray[np.uint16] = (halves.view(np.uint16) >> np.uint16(10)) & np.uint16(31)
    return found


def matrices(bundle: Bundle) -> Iterator[Matrix]:
    """Every matrix of the bundle: the resident ones, the embedding table, the neurons."""
    for name, spec in resident_tensors(bundle.config, bundle.quant).items():
        if spec.matrix is not None:
            yield _matrix(name.split(".")[-1], spec.matrix.row, resident_matrix(bundle, name))
    yield _matrix("embedding", bundle.embedding_layout.row, embedding_matrix(bundle))
    for layer in range(bundle.config.num_layers):
        yield from _records("neurons", bundle.neuron_file(layer), bundle.record_layout)


def _matrix(kind: str, row: RowLayout, stored: StoredMatrix) -> Matrix:
    halves = np.concatenate([stored.scales.view(np.float16).ravel(), stored.biases.ravel()])
    return Matrix(kind, row, stored.codes, halves)


def _records(kind: str, file: CheckedFile, layout: RecordLayout) -> Iterator[Matrix]:
    records = np.fromfile(file.path, np.uint8, offset=file.crc_start).reshape(-1, layout.stride)
    for at, (offset, row) in enumerate(zip(layout.row_offsets, layout.rows, strict=True)):
        codes = np.ascontiguousarray(records[:, offset : offset + row.codes_bytes])
        tail = np.ascontiguousarray(records[:, offset + row.codes_bytes : offset + row.nbytes])
        name = kind if kind == "embedding" else f"{kind}.{at}"
        yield Matrix(name, row, codes, tail.view(np.float16).ravel())


def normal(bits: int) -> Iterator[Matrix]:
    weights = np.random.default_rng(1).normal(0, 0.02, (NORMAL_ROWS, NORMAL_COLUMNS)).astype(np.float32)
    rows = quantize(make_runner(1), weights, bits, "normal")  # type: ignore[arg-type]
    halves = np.concatenate([rows.scales.ravel(), rows.biases.ravel()]).astype(np.float16)
    yield Matrix("normal", RowLayout(NORMAL_COLUMNS, bits), rows.codes, halves)  # type: ignore[arg-type]


class Found(NamedTuple):
    """Of one model. bits: of its codes. Entropies are bits per symbol; shares are of all bytes."""

    name: str
    bits: int
    whole: float
    """Of codes, or exponents of float16 weights, with one table for all of them."""
    by_kind: float
    """With a table for each kind of matrix."""
    halves: float
    """Of the five exponent bits of scales and biases; 0 without any."""
    saved: float
    """Share of all bytes that the tables by kind would save."""


def measured(name: str, found: Iterator[Matrix]) -> Found:
    counts: dict[str, NDArray[np.int64]] = {}
    half_counts, bits = np.zeros(32, np.int64), 0
    for matrix in found:
        bits = matrix.row.bits
        if bits == 16:
            symbols = exponents(matrix.codes.view(np.float16)).ravel()
        else:
            symbols = unpack(matrix.codes, bits).ravel().astype(np.uint16)
        more = np.bincount(symbols, minlength=256)
        counts[matrix.kind] = counts.get(matrix.kind, 0) + more
        half_counts += np.bincount(exponents(matrix.halves), minlength=32)
    total = sum(counts.values(), np.zeros(256, np.int64))
    number, halves = int(total.sum()), int(half_counts.sum())
    by_kind = sum(entropy(it) * int(it.sum()) for it in counts.values()) / number
    of_halves = entropy(half_counts) if halves else 0.0
    spared = number * ((5 if bits == 16 else bits) - by_kind) + halves * (5 - of_halves)
    return Found(name, bits, entropy(total), by_kind, of_halves, spared / (number * bits + 16 * halves))


def main() -> int:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="with models/stories260K")
    args = parser.parse_args()
    found = [measured(path.name, matrices(Bundle.open(path))) for path in KNOWN if path.is_dir()]
    if (args.data / STORIES).is_dir():
        with tempfile.TemporaryDirectory() as folder:
            for quant in WIDTHS:
                convert(args.data / STORIES, Path(folder) / quant, quant)
                found.append(measured("stories260K", matrices(Bundle.open(Path(folder) / quant))))
    found += [measured("normal", normal(bits)) for bits in WIDTHS.values()]
    print("| weights | bits | entropy, one table | a table per kind | scales' exponents, of 5 | saves |")
    print("|---|---|---|---|---|---|")
    for it in found:
        what = f"{it.bits}, exponents of 5" if it.bits == 16 else str(it.bits)
        halves = f"{it.halves:.2f}" if it.halves else ""
        entropies = f"{it.whole:.2f} | {it.by_kind:.2f}"
        print(f"| {it.name} | {what} | {entropies} | {halves} | {100 * it.saved:.1f} % |")
    rows = [it._asdict() for it in found]
    print(json.dumps({"benchmark": "lossless_codes", "machine": machine(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
