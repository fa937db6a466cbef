"""Trial of a finished bundle before it gets its name: a few tokens pass through, to refuse unusable models.

One layer's attention is in memory at a time, and a few MB of neurons or of the output head. So a trial takes
no more memory than the conversion did.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ondevice.backends.base import Bytes, Float32, KVLayout, RowChunk
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.neuron_source import NeuronSource
from ondevice.bundle.layout import RESIDENT, RowLayout
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import never_cancelled
from ondevice.converters.pipeline import ahead
from ondevice.errors import BundleError, CheckpointError
from ondevice.flash.reader import FlashReader
from ondevice.kernels import _native
from ondevice.model.kv_cache import KVCache
from ondevice.model.loading import (
    bundle_files,
    feed_forward_biases,
    head_part,
    layer_parts,
    layer_weights,
    loaded_norm,
    loaded_positions,
    model_weight_parts,
    norm_parts,
    position_parts,
)
from ondevice.model.parts import Part, part_tasks
from ondevice.model.records import RESIDENT_FILE, NeuronRecords, embedding_records
from ondevice.model.tensor_file import ReadAhead, TensorFile
from ondevice.model.transformer import Transformer
from ondevice.model.weights import ModelWeights
from ondevice.units import usable_cores

TRIAL_TOKENS = 64
"""Tokens tried, evenly spaced in the vocabulary. With 8, weights passed that were fuzzed to be unusable."""
PIECE_BYTES = 8 << 20
"""Bytes of neurons, or of the head's rows, that are computed together; as many are read meanwhile. Fresh
memory of this size has huge pages: with pieces of 4 MB, a 7B trial took 1.3 core seconds more."""


def check_computes(bundle: Bundle) -> None:
    """Raises CheckpointError if logits aren't finite, or are the same for every token of the vocabulary.

    Raises FlashReadError if the disk doesn't give back what was written.
    """
    config = bundle.config
    if not config.is_plain:
        # More than one residual goes from layer to layer, layers read the keys of others, or blocks need all
        # of a token's values; the first forward pass checks its logits.
        return
    try:
        logits = trial_logits(bundle, range(0, config.vocab_size, -(-config.vocab_size // TRIAL_TOKENS)))
    except BundleError as error:
        raise _refusal(bundle, str(error)) from error
    if not np.isfinite(logits).all():
        raise _refusal(bundle, "what it computes is not finite")
    if config.vocab_size > 1 and (logits == logits[:, :1]).all():
        raise _refusal(bundle, "every token is as likely as any other, whatever the text")


def trial_logits(bundle: Bundle, tokens: Sequence[int]) -> Float32:
    """(T, V) logits of a text of T tokens, equal to those of the loaded model. Raises BundleError."""
    runner = make_runner(usable_cores())
    with FlashReader(bundle_files(bundle)) as reader:
        resident = TensorFile(bundle, reader, bundle.file(RESIDENT), RESIDENT_FILE)
        x: Float32 | None = None
        for layer in range(bundle.config.num_layers):
            x = _through_layer(bundle, reader, resident, runner, layer, tokens, x)
        assert x is not None
        return np.concatenate(list(_logits(bundle, reader, resident, runner, x)), axis=1)


def _refusal(bundle: Bundle, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{bundle.manifest.provenance.source} isn't a usable model: {reason}; check its weights, or download "
        "them again"
    )


def _through_layer(
    bundle: Bundle,
    reader: FlashReader,
    resident: TensorFile,
    runner: _native.Runner,
    layer: int,
    tokens: Sequence[int],
    x: Float32 | None,
) -> Float32:
    """(T, D) output of a layer for its input x (T, D); without x, the input is the tokens' embedding."""
    config = replace(bundle.config, layers=bundle.config.layers[layer : layer + 1])
    source = NeuronRecords(bundle, reader, layer)
    stride = source.layout.stride
    neurons = max(1, PIECE_BYTES // (stride * BLOCK_NEURONS)) * BLOCK_NEURONS
    backend = CpuBackend(runner, segment_neurons=neurons, piece_neurons=neurons)
    with closing(backend):
        loaded = _loaded(backend, layer_parts(bundle, resident, layer))
        feed_forward = backend.load_feed_forward(0, source, biases=feed_forward_biases(loaded))
        feed_forward.neurons = _Pieces(source, neurons)
        weights = layer_weights(backend, config, config.layers[0], loaded, feed_forward)
        embedding = backend.load_embedding(embedding_records(bundle, reader))
        positions = project_in = None
        if x is None:
            others = [*position_parts(config, resident), *model_weight_parts(bundle, resident)]
            loaded = _loaded(backend, others)
            positions, project_in = loaded_positions(config, loaded), loaded.get("project_in")
        model_weights = ModelWeights(embedding, [weights], None, None, positions, project_in)
        model = Transformer(config, backend, model_weights)
        # The arrays that a backend returns are valid only until its next op.
        return np.array(model.hidden_states(tokens, KVCache(KVLayout(config, 16)), x=x))


class _Pieces(NeuronSource):
    """Neuron source that reads the neurons of `source` a piece at a time."""

    def __init__(self, source: NeuronRecords, piece_neurons: int) -> None:
        self._source = source
        self._piece_neurons = piece_neurons

    def offloaded(self, layer: int, batch: ForwardBatch) -> Iterator[Bytes]:
        # The next piece is read while this one is computed.
        return ahead(self._read(), 1)

    def _read(self) -> Generator[Bytes, None, None]:
        step, end = self._piece_neurons, self._source.num_neurons
        for first in range(0, end, step):
            yield self._source.read(first, min(step, end - first))


def _logits(
    bundle: Bundle, reader: FlashReader, resident: TensorFile, runner: _native.Runner, x: Float32
) -> Iterator[Float32]:
    """(T, V) logits of x (T, D), the last layer's output, as pieces of a few columns."""
    config, x = bundle.config, _narrowed(bundle, resident, runner, x)
    head = head_part(bundle, resident, embedding_records(bundle, reader))
    biases = resident.vector("head.bias") if config.head_bias else None
    count = max(1, PIECE_BYTES // RowLayout(config.embedding_size, *head.stored).nbytes)
    for first in range(0, config.vocab_size, count):

        def piece(row0: int, number: int, first: int = first) -> RowChunk:
            return head.rows(first + row0, number)._replace(row0=row0)

        backend = CpuBackend(runner, segment_neurons=BLOCK_NEURONS, piece_neurons=BLOCK_NEURONS)
        with closing(backend):
            number = min(count, config.vocab_size - first)
            bias = None if biases is None else partial(biases.__getitem__, slice(first, first + number))
            part = replace(head, num_rows=number, rows=piece, bias=bias)
            logits = backend.linear(x, _loaded(backend, [part])["head"])
            cap = config.logit_soft_cap
            yield np.array(backend.soft_cap(logits, cap) if cap else logits)


def _narrowed(bundle: Bundle, resident: TensorFile, runner: _native.Runner, x: Float32) -> Float32:
    """What the head multiplies, (T, E), of the last layer's output x (T, D): normed, and E wide."""
    config, backend = (
        bundle.config,
        CpuBackend(runner, segment_neurons=BLOCK_NEURONS, piece_neurons=BLOCK_NEURONS),
    )
    with closing(backend):
        norm = norm_parts(config, resident, "final_norm") if config.final_norm else []
        loaded = _loaded(backend, [*norm, *model_weight_parts(bundle, resident)])
        if config.final_norm:
            x = backend.normed(x, loaded_norm(config, loaded, "final_norm"))
        return np.array(backend.linear(x, loaded["project_out"])) if config.embedding_width else x


def _loaded(backend: CpuBackend, parts: Sequence[Part]) -> dict[str, Any]:
    with ReadAhead(part_tasks(parts, never_cancelled)) as ahead:
        return {part.field: part.load(backend, ahead) for part in parts}
