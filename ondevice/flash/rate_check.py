"""Compares the reads of forward passes with the stored costs of their device, and marks wrong costs as
doubted.

Only passes that keep the device busy count, such as those of a prompt, or of a cache that fills.
"""

from __future__ import annotations

import logging

from ondevice.flash.cost_model import DIFFERENT, UNMEASURED, CostModel, doubt
from ondevice.flash.reader import FlashReader
from ondevice.units import format_bytes

log = logging.getLogger(__name__)

BUSY_READS = 4
"""Reads of a layer, per thread, from which on a pass keeps the device busy."""
CHECKED_BYTES, CHECKED_PASSES = 64 << 20, 5
"""Bytes and busy passes after which the stored costs are judged, once for each loaded model."""


class RateCheck:
    """Watches a model's reads from its first pass on, until there are enough to judge the stored costs.

    Args:
        reader: reads the model's neurons, and nothing else.
        costs: of those reads, as `device_costs` returned them.
        layers: the model's layers, each of which waits for its reads.
    """

    def __init__(self, reader: FlashReader, costs: CostModel, layers: int) -> None:
        self._reader = reader
        self._costs = costs
        self._busy_reads = BUSY_READS * reader.threads * layers
        self._before = reader.stats
        self._ratios: list[float] = []
        """Measured over stored rates of busy passes."""
        self._nbytes = 0
        self.judged = costs is UNMEASURED or costs.standing == "confirmed"
        """Whether there is nothing left to compare."""

    def end_pass(self) -> None:
        """Count what was read since the last call. Marks the costs as doubted if these reads show that they
        are wrong.
        """
        if self.judged:
            return
        before, self._before = self._before, self._reader.stats
        reads = self._before.reads - before.reads
        nbytes = self._before.bytes_read - before.bytes_read
        seconds = self._before.read_seconds - before.read_seconds
        if reads < self._busy_reads or seconds <= 0:
            return
        stored = self._costs.bytes_per_second(nbytes // reads, self._reader.threads)
        self._ratios.append(nbytes / seconds / stored)
        self._nbytes += nbytes
        if self._nbytes >= CHECKED_BYTES and len(self._ratios) >= CHECKED_PASSES:
            self._judge()

    def _judge(self) -> None:
        from statistics import median

        self.judged, ratio = True, median(self._ratios)
        if 1 / DIFFERENT < ratio < DIFFERENT:
            return
        log.info(
            "%s of reads came at %.2f times the rate measured of %s on %s: it is measured again when "
            "a model is next loaded",
            format_bytes(self._nbytes),
            ratio,
            self._costs.device,
            self._costs.measured,
        )
        doubt(self._costs)
