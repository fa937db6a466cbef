"""Reads the parts of a bundle that planning needs: sidecars, checked for damage, and the tokenizer."""

from __future__ import annotations

from ondevice.backends.row_invariance import RowInvariance
from ondevice.bundle.draft_layers import SIDECAR_OF
from ondevice.bundle.ngrams import NGRAMS, NGRAMS_SIDECAR
from ondevice.bundle.predictors import PREDICTORS_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.bundle.streams import STREAMS_SIDECAR
from ondevice.bundle.verify import without_damage
from ondevice.config import RuntimeConfig, Speculation
from ondevice.errors import BundleError, FlashReadError
from ondevice.kernels import _native
from ondevice.speculation.datastore import Datastore
from ondevice.speculation.registry import drafts_with_ngrams, runs_streams, used_draft_layer
from ondevice.tokenizer import Tokenizer, load_tokenizer, loading_bytes
from ondevice.units import trim_heap


def without_damaged_sidecars(bundle: Bundle, runtime: RuntimeConfig) -> Bundle:
    """The bundle without those damaged sidecars that the options would use. Reads the tensors of these
    sidecars.
    """
    for sidecar, used in (
        (PREDICTORS_SIDECAR, runtime.sparsity == "predicted"),
        (STREAMS_SIDECAR, runs_streams(runtime.speculation, bundle.streams)),
    ):
        if used:
            bundle = without_damage(bundle, sidecar, _native.crc32c)
    last = None
    # Without a damaged layer, `auto` takes another one.
    while bundle is not last and (layer := used_draft_layer(runtime.speculation, bundle.draft_layers)):
        last, bundle = bundle, without_damage(bundle, layer.sidecar, _native.crc32c)
    if drafts_with_ngrams(runtime.speculation, bundle.ngrams):
        try:
            open_datastore(bundle, runtime).close()
        except (FlashReadError, BundleError) as error:
            bundle = bundle.without(NGRAMS_SIDECAR, BundleError(str(error)))
    return bundle


def open_datastore(bundle: Bundle, runtime: RuntimeConfig) -> Datastore:
    """The bundle's datastore, with its index read. Raises FlashReadError or BundleError."""
    assert bundle.ngrams is not None
    return Datastore(bundle.sidecar_file(NGRAMS), bundle.ngrams, bundle.config.vocab_size, runtime.io)


def damage_warnings(bundle: Bundle, runtime: RuntimeConfig) -> tuple[str, ...]:
    """Warnings about damaged sidecars that the options would otherwise use."""
    may_use = {
        "predictors": runtime.sparsity == "auto",
        "hotness": runtime.sparsity != "dense",
        "streams": runtime.speculation == "auto",
        "ngrams": runtime.speculation == "auto",
        **dict.fromkeys(SIDECAR_OF, runtime.speculation == "auto"),
        "expert_costs": False,
        "expert_use": True,
    }
    return tuple(error.for_command_line for key, error in bundle.damaged.items() if may_use[key])


def resolved_speculation(runtime: RuntimeConfig, rows: RowInvariance) -> Speculation:
    """The speculation mode, with `auto` replaced by what it means, as far as that is known.

    `auto` becomes `off` if drafts could change texts, and `model` if a draft model is named.
    """
    if runtime.speculation != "auto":
        return runtime.speculation
    if rows.widths.nodes < 2:
        return "off"
    return "model" if runtime.draft_model else "auto"


def tokenizer_bytes(bundle: Bundle) -> int:
    """An upper bound of `open_tokenizer`'s peak memory in bytes. Raises BundleError for a missing file."""
    info = bundle.manifest.tokenizer
    if info.kind is None or info.file is None:
        return 0
    return loading_bytes(info.kind, bundle.small_parts(info.file))


def open_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The bundle's tokenizer; None if it has none. Raises BundleError for a damaged or hostile file."""
    info = bundle.manifest.tokenizer
    if info.kind is None or info.file is None:
        return None
    data = bundle.read_small(info.file)
    tokenizer = load_tokenizer(
        info.kind, data, info.bos_id, info.eos_ids, info.add_bos, vocab_size=bundle.config.vocab_size
    )
    del data
    # The parser's freed memory would count as the process's.
    trim_heap()
    return tokenizer
