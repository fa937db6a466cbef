"""Gate rows lie in a bundle twice, and whichever copy is read must be the one: no text may depend on which.

The manifest has the sha256 of a layer's gate file. What mode `exact` loads is that file; what `dense` reads
are the gate rows of the neuron records, from which the very bytes of the gate file follow. So each mode
hashes the copy that it multiplies with, the first time that it reads it, and reads nothing more for it:
`exact` as it loads, `dense` in its first pass, before a token has come out. Checksums alone wouldn't do: a
bundle's maker can make both copies pass theirs. `predicted` is lossy, and takes the records' gates whatever
its budget.
"""

from __future__ import annotations

import hashlib
import threading

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.layout import file_layout, gate_file_name
from ondevice.bundle.reader import Bundle
from ondevice.errors import BundleError

BLOCK_BYTES = 1 << 18
"""Bytes of gate rows that are gathered to be hashed together: no plan counts them."""


class GateDigest:
    """Compares the gate rows of one layer with its gate file's sha256, as they come by.

    The bundle's model must be one that has gate files. Any thread may call it.
    """

    def __init__(self, bundle: Bundle, layer: int) -> None:
        self._name = gate_file_name(layer)
        self._expected = bundle.manifest.files[self._name].sha256
        self._layout = bundle.gate_layout
        self._num_rows = bundle.config.intermediate_size
        self._sha256 = hashlib.sha256(file_layout(self._name, bundle.config, bundle.quant).header)
        self._rows = 0
        self._early: dict[int, NDArray[np.uint8]] = {}
        """Records that came before those in front of them, by the first one's id."""
        self._matches = False
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Rows that have been hashed: the first ones."""
        return self._rows

    def take(self, first: int, records: NDArray[np.uint8]) -> None:
        """Records (n, stride) from id `first` on, each with its gate row in front: of either kind of file.

        Rows that were hashed already are passed over. Records that come early are kept until their turn; so
        whoever hands them over doesn't write to them again, and hands over those between in the end.
        Raises BundleError if these complete the layer, or it is complete, and its gates aren't those hashed.
        """
        if self._matches:
            return
        with self._lock:
            seen = self._rows - first
            if seen < len(records):
                self._early[max(first, self._rows)] = records[max(0, seen) :]
            while (turn := self._early.pop(self._rows, None)) is not None:
                self._hash(turn)
                self._rows += len(turn)
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
