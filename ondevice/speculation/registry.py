"""The drafters by their name in `--speculation`: what they need, their memory, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from ondevice.bundle.draft_layers import DraftLayer, DraftLayerKind
from ondevice.bundle.ngrams import Ngrams
from ondevice.bundle.ngrams import index_bytes as ngram_index_bytes
from ondevice.bundle.streams import MultiStreams
from ondevice.config import MAX_STREAMS
from ondevice.model.transformer import Transformer
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass
from ondevice.speculation.datastore import READER_BYTES, Datastore
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.drafters.block import BlockDrafter
from ondevice.speculation.drafters.combined import Combined, WhileRowsAreCheap
from ondevice.speculation.drafters.draft_layer import DraftLayerDrafter, DraftLayerState
from ondevice.speculation.drafters.intersection import (
    FINDING_BYTES,
    TABLE_BYTES,
    IntersectionDrafter,
    SharedTokens,
)
from ondevice.speculation.drafters.lookup import Lookup, index_bytes
from ondevice.speculation.drafters.model import DraftModel, ModelDrafter
from ondevice.speculation.drafters.ngrams import CHEAP_LOOKUP_SHARE, NgramDrafter
from ondevice.speculation.drafters.other_vocabulary import OtherVocabularyDrafter
from ondevice.speculation.drafters.recycling import Recycling, matrix_bytes
from ondevice.speculation.drafters.resident import ResidentDrafter
from ondevice.speculation.drafters.streams import MultiStreamDrafter
from ondevice.speculation.tree import STREAM_ROWS

Needs = Literal["nothing", "streams", "ngrams", "draft model"] | DraftLayerKind
"""A drafter's requirement in addition to the model: a sidecar of its bundle, or a second model."""


@dataclass(frozen=True)
class Target:
    """The model that drafts are for.

    max_rows: most rows of a pass with streams in which each row has the same bits as alone; 0: passes with
    drafts have no streams. is_partial: whether every token needs all neurons, and some of them are on flash.
    """

    config: ModelConfig
    transformer: Transformer
    max_rows: int
    is_partial: Callable[[], bool]
    draft_model: DraftModel | None = None
    datastore: Datastore | None = None
    draft_layer: DraftLayerState | None = None


@dataclass(frozen=True)
class DrafterKind:
    """An entry of DRAFTERS.

    nbytes: most bytes of the drafter, given (config, context, nodes). spawned_nbytes: most bytes of each
    further drafter that it spawns (`Drafter.spawn`), given the same; 0 if it can't spawn any.
    """

    needs: Needs
    nbytes: Callable[[ModelConfig, int, int], int]
    spawned_nbytes: Callable[[ModelConfig, int, int], int]
    make: Callable[[Target], Drafter]


def _stream_drafter_bytes(config: ModelConfig, context: int, nodes: int) -> int:
    """Bytes of drafting with streams: the text, all streams' logits twice, and hidden states.

    The hidden states are those of nodes, of their streams' initial states, and of streams that ran in the
    pass.
    """
    rows = (nodes * (1 + MAX_STREAMS) + STREAM_ROWS) * config.hidden_size
    return 8 * context + 4 * (2 * MAX_STREAMS * config.vocab_size + rows)


def _nothing(config: ModelConfig, context: int, nodes: int) -> int:
    return 0


def _resident_drafter_bytes(config: ModelConfig, context: int, nodes: int) -> int:
    """Bytes of drafting with the weights in memory: the text, and logits."""
    return 8 * context + 2 * 4 * config.vocab_size


def _model_drafter_bytes(config: ModelConfig, context: int, nodes: int) -> int:
    """Bytes of drafting with a second model: each node's logits and the tables of shared tokens, or the
    search for these tokens.
    """
    return max(4 * nodes + TABLE_BYTES, FINDING_BYTES) * config.vocab_size


MIN_PASS_SECONDS = 0.001
"""Seconds of a plain pass below which `auto` is disabled. Looking for draft tokens takes a tenth of them."""
AUTOMATIC: tuple[str, ...] = ("lookup", "recycling", "resident")
"""Drafters that `auto` combines. It adds streams and n-grams of the model, and may add a draft layer."""


DRAFTERS: dict[str, DrafterKind] = {
    "lookup": DrafterKind(
        "nothing",
        lambda config, context, nodes: index_bytes(context),
        lambda config, context, nodes: index_bytes(context),
        lambda target: Lookup(),
    ),
    "recycling": DrafterKind(
        "nothing",
        lambda config, context, nodes: matrix_bytes(config.vocab_size),
        _nothing,
        lambda target: Recycling(target.config.vocab_size),
    ),
    "streams": DrafterKind(
        "streams",
        _stream_drafter_bytes,
        _nothing,
        lambda target: MultiStreamDrafter(target.transformer, target.max_rows),
    ),
    "resident": DrafterKind(
        "nothing",
        _resident_drafter_bytes,
        _resident_drafter_bytes,
        lambda target: ResidentDrafter(target.transformer),
    ),
    # The memory of a datastore's index is planned from the bundle.
    "ngrams": DrafterKind(
        "ngrams",
        _nothing,
        _nothing,
        lambda target: _ngram_drafter(target),
    ),
    # A second model's own memory is planned from its bundle.
    "model": DrafterKind(
        "draft model",
        _model_drafter_bytes,
        _nothing,
        lambda target: _model_drafter(target),
    ),
    # A draft layer's memory is planned from its sidecar.
    **{
        kind: DrafterKind(kind, _nothing, _nothing, lambda target: _layer_drafter(target))
        for kind in get_args(DraftLayerKind)
    },
    "auto": DrafterKind(
        "nothing",
        lambda config, context, nodes: sum(
            DRAFTERS[name].nbytes(config, context, nodes) for name in AUTOMATIC
        ),
        lambda config, context, nodes: sum(
            DRAFTERS[name].spawned_nbytes(config, context, nodes) for name in AUTOMATIC
        ),
        lambda target: _automatic(target),
    ),
}


def drafter_bytes(name: str, config: ModelConfig, max_context: int, max_nodes: int, texts: int = 1) -> int:
    """The most bytes that the drafter `name` takes for `texts` texts at once; 0 if there is no drafter of
    this name.
    """
    if name not in DRAFTERS:
        return 0
    kind = DRAFTERS[name]
    more = (texts - 1) * kind.spawned_nbytes(config, max_context, max_nodes)
    return kind.nbytes(config, max_context, max_nodes) + more


def is_drafter(name: str) -> bool:
    """Whether `name`, a value of `--speculation`, names a drafter."""
    return name in DRAFTERS


def runs_streams(name: str, streams: MultiStreams | None) -> bool:
    """Whether a model's streams are loaded: either to draft, or because they are part of the model."""
    return drafts_with_streams(name, streams) or (streams is not None and streams.mode == "shared")


def drafts_with_streams(name: str, streams: MultiStreams | None) -> bool:
    """Whether the drafter `name` drafts with a model's streams."""
    return streams is not None and name in ("streams", "auto")


def drafts_with_ngrams(name: str, ngrams: Ngrams | None) -> bool:
    """Whether the drafter `name` drafts with a model's datastore of continuations."""
    return ngrams is not None and name in ("ngrams", "auto")


def used_draft_layer(name: str, layers: Mapping[str, DraftLayer]) -> DraftLayer | None:
    """The draft layer that the drafter `name` uses; `auto` uses the first.

    layers: the draft layers of a bundle, as in `Bundle.draft_layers`.
    """
    return next(iter(layers.values()), None) if name == "auto" else layers.get(name)


def datastore_bytes(name: str, ngrams: Ngrams | None) -> int:
    """Bytes of an open datastore's index and reader for the drafter `name`; 0 if it uses none."""
    if ngrams is None or not drafts_with_ngrams(name, ngrams):
        return 0
    return ngram_index_bytes(ngrams) + READER_BYTES


def needs(name: str) -> Needs:
    """What the drafter `name` requires in addition to the model."""
    return DRAFTERS[name].needs if name in DRAFTERS else "nothing"


def make_drafter(name: str, target: Target) -> Drafter | None:
    """A new drafter for `target`; None if `name`, such as `off`, names no drafter."""
    return DRAFTERS[name].make(target) if name in DRAFTERS else None


def _automatic(target: Target) -> Drafter:
    members: list[Drafter] = [DRAFTERS[name].make(target) for name in ("lookup", "recycling")]
    members.append(ResidentDrafter(target.transformer, target.is_partial))
    if target.transformer.streams is not None:
        members.append(WhileRowsAreCheap(DRAFTERS["streams"].make(target)))
    if target.datastore is not None:
        members.append(NgramDrafter(target.datastore, CHEAP_LOOKUP_SHARE))
    if target.draft_layer is not None:
        members.append(_layer_drafter(target))
    return Combined(members)


def _layer_drafter(target: Target) -> Drafter:
    assert target.draft_layer is not None
    drafter = BlockDrafter if target.draft_layer.layer.layer.block else DraftLayerDrafter
    return drafter(target.draft_layer)


def _ngram_drafter(target: Target) -> Drafter:
    assert target.datastore is not None
    return NgramDrafter(target.datastore)


def _model_drafter(target: Target) -> Drafter:
    assert target.draft_model is not None
    if target.draft_model.tokenizer is None:
        return ModelDrafter(target.draft_model, target.config.vocab_size)
    shares = SharedTokens.of(target.draft_model)
    if shares.are_enough:
        return IntersectionDrafter(target.draft_model, shares)
    return OtherVocabularyDrafter(target.draft_model)
