"""Orders a bundle's neurons on flash by recorded activations.

If gates are exactly zero, neurons that fire together are placed side by side. Then more of the neurons that a
token misses in the cache are neighbours, and neighbours take one read.

Every neuron has one record. The order is a permutation, applied to neurons' rows and to gates' biases alike,
so the model stays the same function. The CPU kernels round the results of 64 neighbouring records to 8 bits
with one scale, and add up in the order of the records. A different order therefore rounds differently,
neither better nor worse.

"LLM in a flash" (arXiv 2312.11514, section 3.2) bundled neurons that fire together by copying them, which
read the hottest neurons many times over. "Neuralink" (arXiv 2410.19274) places them side by side instead.
Here the order is a simple chain, from each neuron to the one whose firing is most similar.

Memory: (F, F) uint16 counts of one layer, 242 MB at 7B, and about 100 MB more.
Legend: N tokens, F neurons of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.file_layouts import resident_tensors
from ondevice.bundle.layout import (
    CHECKSUMS,
    RESIDENT,
    RecordLayout,
    gate_bias_name,
    gate_file_name,
    neuron_file_name,
)
from ondevice.bundle.reader import Bundle
from ondevice.bundle.strict_json import MAX_JSON_BYTES
from ondevice.bundle.writer import BundleWriter
from ondevice.callbacks import OnProgress, ignore_progress
from ondevice.converters.output_folder import OutputFolder
from ondevice.converters.training.activations import Activations
from ondevice.errors import BundleError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.loading import bundle_files
from ondevice.model.records import RESIDENT_FILE
from ondevice.model.tensor_file import TensorFile

MAX_ORDER_TOKENS = 8192
"""Most tokens that are counted. Four times as many take four times as long, and save another 0.3 % of the
reads on the shipped model."""
COUNTED_TOKENS, COUNTED_NEURONS = 512, 1024
"""Tokens, and rows of the counts, of one matrix product."""
COPIED_BYTES = 4 << 20


def order_neurons(
    bundle: Bundle,
    activations: Activations,
    tokens: int,
    on_progress: OnProgress = ignore_progress,
) -> Bundle:
    """Put the neurons of `bundle` in the order that the first `tokens` recorded tokens suggest.

    activations: the result of `record_activations`.

    At most 8,192 of these tokens are counted, evenly spaced. The ordered bundle is written to a new folder
    and replaces the old one at the end, as in a conversion that replaces a bundle. Until then the old bundle
    stays complete; afterwards it is gone, with everything that was added to it. The recording is reordered
    too, so that it fits the ordered bundle. Returns the ordered bundle.

    Raises OndeviceError if the disk has no room or refuses, UsageError if the bundle's folder, or a folder
    needed next to it, holds files that no conversion put there, FlashReadError, BundleError.
    """
    with _claimed(bundle) as folder:
        complete = False
        try:
            orders = _write_ordered(bundle, folder.partial, activations, tokens, on_progress)
            complete = True
        finally:
            if not complete:
                # A partial ordered bundle is useless: it can't be resumed.
                folder.clear()
        folder.publish()
    for layer, order in enumerate(orders):
        activations.reorder(layer, order)
    return Bundle.open(folder.output)


def check(bundle: Bundle) -> None:
    """Check the folders and the room on the disk, before activations are recorded.

    Raises what `order_neurons` would raise about them.
    """
    with _claimed(bundle) as folder:
        folder.partial.rmdir()


def co_firing_counts(fired: NDArray[np.uint8], neurons: int) -> NDArray[np.uint16]:
    """The number of tokens that fire both of two neurons, (F, F), from bits (N, ceil(F / 8)). N is at most
    65,535.
    """
    counts = np.zeros((neurons, neurons), dtype=np.uint16)
    blocks = [slice(start, start + COUNTED_NEURONS) for start in range(0, neurons, COUNTED_NEURONS)]
    for start in range(0, len(fired), COUNTED_TOKENS):
        bits = np.unpackbits(fired[start : start + COUNTED_TOKENS], axis=1, count=neurons)
        # Whole numbers below 2^24 are exact in float32, however a library adds them up.
        values = bits.astype(np.float32)
        for rows in blocks:
            counts[rows, rows.start :] += (values[:, rows].T @ values[:, rows.start :]).astype(np.uint16)
    for rows in blocks:
        counts[rows.stop :, rows] = counts[rows, rows.stop :].T
    return counts


def nearest_neighbour_chain(counts: NDArray[np.uint16]) -> NDArray[np.int32]:
    """The neuron ids in the order of a chain, (F,), computed from `co_firing_counts` (F, F).

    The chain starts with the neuron that fires most. The most similar of the remaining neurons comes next.
    Similarity is Jaccard's: tokens for which both neurons fire over tokens for which at least one does. The
    lowest id wins a tie.
    """
    fires = np.diagonal(counts).astype(np.float32)
    left = np.ones(len(counts), dtype=np.bool_)
    chain = np.empty(len(counts), dtype=np.int32)
    neuron = int(fires.argmax())
    for place in range(len(counts)):
        chain[place] = neuron
        left[neuron] = False
        both = counts[neuron].astype(np.float32)
        likeness = both / np.maximum(fires + fires[neuron] - both, 1)
        neuron = int(np.where(left, likeness, -1).argmax())
    return chain


@contextmanager
def _claimed(bundle: Bundle) -> Iterator[OutputFolder]:
    """A context with the claimed folder for the ordered bundle, which is empty and has enough room."""
    with closing(OutputFolder(bundle.path)) as folder:
        folder.check(resume=False, force=True)
        folder.claim(resume=False)
        folder.check_space(_written_bytes(bundle))
        yield folder


def _write_ordered(
    bundle: Bundle, folder: Path, activations: Activations, tokens: int, on_progress: OnProgress
) -> list[NDArray[np.int32]]:
    """Write the ordered bundle to the empty `folder`. Returns each layer's old neuron ids in the
    new order.
    """
    manifest, layers = bundle.manifest, bundle.config.num_layers
    writer = BundleWriter(
        folder, bundle.config, bundle.quant, _native.crc32c, fingerprint=manifest.provenance.fingerprint
    )
    counted = slice(0, tokens, -(-tokens // MAX_ORDER_TOKENS))
    orders = []
    for layer in range(layers):
        on_progress(layer / layers, f"order of layer {layer + 1} of {layers}")
        counts = co_firing_counts(activations.fired(layer)[counted], bundle.config.widths[layer])
        orders.append(nearest_neighbour_chain(counts))
        for name, layout in _record_files(bundle, layer):
            writer.write_records(name, _records(bundle, name, layout, orders[layer]))
    reordered = _reordered_files(bundle)
    if RESIDENT in reordered:
        with FlashReader(bundle_files(bundle)) as reader:
            writer.write_resident(_resident(bundle, reader, orders))
    for name, entry in manifest.files.items():
        if name not in reordered and name != CHECKSUMS:
            writer.adopt(name, bundle.path / name, entry)
    provenance = replace(manifest.provenance, ordered_tokens=len(range(tokens)[counted]))
    writer.finish(manifest.tokenizer, manifest.generation, provenance)
    return orders


def _records(
    bundle: Bundle, name: str, layout: RecordLayout, order: NDArray[np.int32]
) -> Iterator[NDArray[np.uint8]]:
    """Yields the records of a file in another order, a few at a time (n, stride), checked while they are
    read.
    """
    count = max(1, COPIED_BYTES // layout.stride)
    with FlashReader([bundle.file(name)]) as reader:
        for start in range(0, len(order), count):
            ids = order[start : start + count]
            records = np.empty((len(ids), layout.stride), dtype=np.uint8)
            reader.read_records(0, ids.astype(np.int64), records)
            if any(records[:, first:stop].any() for first, stop in layout.padding):
                raise BundleError(f"{name}: record padding isn't zero; convert the model again")
            yield records


def _resident(
    bundle: Bundle, reader: FlashReader, orders: Sequence[NDArray[np.int32]]
) -> Iterator[tuple[str, Iterator[NDArray[np.generic]]]]:
    """Yields the resident tensors in small parts: gate biases in the new order, all others unchanged."""
    source = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE)
    biases = {gate_bias_name(layer): order for layer, order in enumerate(orders)}

    def chunks(name: str, dtype: np.dtype[np.generic]) -> Iterator[NDArray[np.generic]]:
        if name in biases:
            yield source.vector(name)[biases[name]]
            return
        span = bundle.tensor_span(name)
        for start in range(0, span.nbytes, COPIED_BYTES):
            yield source.read(span.offset + start, min(COPIED_BYTES, span.nbytes - start)).view(dtype)

    for name, spec in resident_tensors(bundle.config, bundle.quant).items():
        yield name, chunks(name, spec.numpy_dtype)


def _record_files(bundle: Bundle, layer: int) -> list[tuple[str, RecordLayout]]:
    """The names and layouts of those files of a layer that have one record per neuron."""
    return [(neuron_file_name(layer), bundle.record_layout), (gate_file_name(layer), bundle.gate_layout)]


def _reordered_files(bundle: Bundle) -> set[str]:
    layers = range(bundle.config.num_layers)
    names = {name for layer in layers for name, _ in _record_files(bundle, layer)}
    return names | ({RESIDENT} if bundle.config.feed_forward.bias else set())


def _written_bytes(bundle: Bundle) -> int:
    """The bytes that the ordered bundle takes in addition to the old one, if the other files can be links."""
    files = bundle.manifest.files
    return MAX_JSON_BYTES + sum(files[name].nbytes for name in (*_reordered_files(bundle), CHECKSUMS))
