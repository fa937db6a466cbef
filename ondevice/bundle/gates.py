"""Checks that the two copies of gate rows in a bundle are equal, as no text may depend on which is read.

A layer's gate rows are in its gate file, which mode `exact` loads, and in its neuron records, which `dense`
reads. Each mode hashes the copy that it multiplies, without extra reads, and compares the sha256 with that of
the gate file in the manifest: `exact` while it loads, `dense` in its first pass, before the first token is
given out. CRCs aren't enough, as a bundle's author can make both copies match theirs. `predicted` is lossy,
and uses the records' gates at every budget.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import file_layout
from ondevice.bundle.layout import gate_file_name
from ondevice.bundle.reader import Bundle
from ondevice.errors import BundleError
from ondevice.hashing import sha256_of

BLOCK_BYTES = 1 << 18
"""Bytes of gate rows that are gathered and hashed at a time; too few for plans to count."""


class GateDigest:
    """Compares the gate rows of one layer, as they are read, with its gate file's sha256.

    Requires a bundle with gate files. Any thread may call it.
    """

    def __init__(self, bundle: Bundle, layer: int) -> None:
        self._name = gate_file_name(layer)
        self._expected = bundle.manifest.files[self._name].sha256
        self._layout = bundle.gate_layout
        self._num_rows = bundle.config.widths[layer]
        self._sha256 = sha256_of(bundle.manifest.files[self._name].nbytes)
        self._sha256.update(file_layout(self._name, bundle.config, bundle.quant).header)
        self._rows = 0
        self._early: dict[int, NDArray[np.uint8]] = {}
        """Records that arrived before their predecessors, by the first one's id."""
        self._matches = False
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Number of the layer's leading rows that have been hashed."""
        return self._rows

    def take(self, first: int, records: NDArray[np.uint8]) -> None:
        """Hash the gate rows at the start of each of records (n, stride): those of neuron `first` and the
        next ones. The records are from a file of neurons or one of gates.

        Hashed rows are skipped. Records that arrive early are kept, so the caller must not overwrite them,
        and must pass the records before them later. Raises BundleError once the layer is complete and its
        gate rows don't match the sha256.
        """
        if self._matches:
            return
        with self._lock:
            seen = self._rows - first
            if seen < len(records):
                self._early[max(first, self._rows)] = records[max(0, seen) :]
            while (ready := self._early.pop(self._rows, None)) is not None:
                self._hash(ready)
                self._rows += len(ready)
            if self._rows == self._num_rows:
                self._compare()

    def _compare(self) -> None:
        if self._sha256.hexdigest() != self._expected:
            raise BundleError(
                f"{self._name} is not the gate rows that were read: they don't match its sha256 in the "
                "manifest; the bundle is damaged, convert the model again"
            )
        self._matches = True

    def _hash(self, records: NDArray[np.uint8]) -> None:
        stride, used = self._layout.stride, self._layout.row_bytes[0]
        if records.shape[1] == stride:
            self._sha256.update(records.data)
            return
        step = max(1, BLOCK_BYTES // stride)
        rows = np.zeros((min(step, len(records)), stride), np.uint8)
        for start in range(0, len(records), step):
            block = rows[: len(records) - start]
            block[:, :used] = records[start : start + step, :used]
            self._sha256.update(block.data)
