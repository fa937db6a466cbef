"""Opens a bundle, and checks everything except its weights, which are not read.

Every size is computed from the manifest's model, and compared with the manifest and the disk, before anything
is allocated for it. The flash layer reads weights and checks their checksums; `verify` reads all of them.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle.draft_layers import (
    DFLASH_SIDECAR,
    EAGLE_SIDECAR,
    MTP_SIDECAR,
    SIDECAR_OF,
    DraftLayer,
    draft_layer_tensors,
    parse_draft_layer,
)
from ondevice.bundle.expert_costs import EXPERT_COSTS_SIDECAR, ExpertCosts, parse_expert_costs
from ondevice.bundle.expert_use import (
    EXPERT_USE,
    EXPERT_USE_SIDECAR,
    ExpertUse,
    expert_use_layout,
    parse_expert_counts,
    parse_expert_use,
)
from ondevice.bundle.file_layouts import (
    FileLayout,
    TensorSpec,
    file_layout,
    resident_header,
    resident_tensors,
    tensors_layout,
)
from ondevice.bundle.files import contained, read_file, read_range
from ondevice.bundle.hotness import (
    HOTNESS,
    HOTNESS_SIDECAR,
    Hotness,
    hotness_layout,
    parse_frequencies,
    parse_hotness,
)
from ondevice.bundle.layout import (
    CHECKSUMS,
    EMBEDDING,
    MANIFEST,
    RESIDENT,
    RecordLayout,
    embedding_layout,
    expert_file_name,
    expert_layout,
    gate_file_name,
    gate_layout,
    neuron_file_name,
    neuron_layouts,
    per_layer_layout,
    record_layout,
)
from ondevice.bundle.manifest import MAX_BLOB_BYTES, CrcRange, Manifest, bundle_files, parse_manifest
from ondevice.bundle.matrix_layout import HalfRange
from ondevice.bundle.ngrams import NGRAMS_SIDECAR, Ngrams, ngrams_layout, parse_ngrams
from ondevice.bundle.parts import (
    part_contents,
    part_experts,
    part_files,
    part_manifest,
    part_names,
    part_range,
)
from ondevice.bundle.predictors import (
    PREDICTORS_SIDECAR,
    Predictors,
    parse_predictors,
    predictor_tensors,
)
from ondevice.bundle.sidecar import Sidecar, check_sidecar_possible, check_tensors, read_sidecar
from ondevice.bundle.streams import (
    STREAMS_SIDECAR,
    MultiStreams,
    parse_streams,
    says_lossless,
    stream_tensors,
)
from ondevice.bundle.strict_json import MAX_JSON_BYTES
from ondevice.bundle.weight_shapes import extra_matrices, vectors_size
from ondevice.errors import BundleError, ModelNotFoundError
from ondevice.hashing import sha256_hex
from ondevice.model_config import ModelConfig, part_config
from ondevice.records import dataclass

MAX_CHECKSUM_BYTES = 1 << 28
"""Largest checksum table: 64 million record parts, about 300 GB of weights."""
PART_BYTES = 1 << 18
"""Bytes of a tokenizer file that `small_parts` reads at a time."""

Content = TypeVar(
    "Content",
    Predictors,
    MultiStreams,
    Hotness,
    ExpertCosts,
    ExpertUse,
    Ngrams,
    DraftLayer,
)


@dataclass(frozen=True, eq=False)
class CheckedFile:
    """A file, and the CRC32C table that its reads are checked against.

    nbytes: size of the file.
    crc_start: first byte that a CRC covers.
    crc_units: sizes in bytes of the units that cover the rest, repeating; the file's last unit may be short.
    crcs: (units,) uint32, the CRC32C of each unit.
    halves: ranges of float16 values, which must be finite. They repeat every `halves_period` bytes from
        `crc_start` on; if that is 0, they count once, from the start of the file.
    """

    path: Path
    nbytes: int
    crc_start: int
    crc_units: tuple[int, ...]
    crcs: np.ndarray
    halves: tuple[HalfRange, ...] = ()
    halves_period: int = 0

    @classmethod
    def of(cls, path: Path, nbytes: int, layout: FileLayout, crcs: np.ndarray) -> CheckedFile:
        """A file of `nbytes` bytes with this layout, at `path`."""
        start, units = layout.crc_start, layout.crc_units
        return cls(path, nbytes, start, units, crcs, layout.halves, layout.halves_period)


@dataclass(frozen=True, eq=False)
class SidecarFile:
    """A sidecar's file of tensors, with its layout and sha256."""

    sidecar: Sidecar
    file: CheckedFile
    layout: FileLayout
    sha256: str


@dataclass(frozen=True)
class TensorSpan:
    """The place of one tensor: `nbytes` bytes from `offset` on in `file`."""

    file: str
    offset: int
    nbytes: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


class Bundle:
    """An opened bundle. Its attributes are read-only facts; nothing is held open."""

    def __init__(self, path: Path, manifest: Manifest, manifest_bytes: int) -> None:
        """Use `Bundle.open`."""
        self.path = path
        self.manifest = manifest
        self.config = manifest.config
        self.quant = manifest.quant
        self.neuron_layouts = neuron_layouts(self.config, self.quant)
        """The record of each layer's neurons or slices."""
        self.embedding_layout = embedding_layout(self.config, self.quant)
        self.per_layer_layout = per_layer_layout(self.config, self.quant)
        self.gate_layout = gate_layout(self.config, self.quant)
        self.expert_layouts = tuple(
            expert_layout(self.config, self.quant, layer) for layer in range(self.config.num_layers)
        )
        """The record of each layer's experts; None unless the model's are stored as matrices."""
        self.bundle_bytes: int = manifest_bytes + sum(entry.nbytes for entry in manifest.files.values())
        self._folder = path.resolve()
        self._check_headers(self._check_sizes())
        self._spans = tensor_spans(RESIDENT, resident_tensors(self.config, self.quant))
        self._crcs = self._read_checksums()
        self._files: dict[str, CheckedFile] = {}
        self._sliced_from: Bundle | None = None
        """The bundle that this one is a slice of."""
        self.sidecar_files: dict[str, SidecarFile] = {}
        """Files of sidecars' tensors, which `bundle.json` doesn't list, by name."""
        self.damaged: dict[str, BundleError] = {}
        """The errors of damaged sidecars, hotness included, by key. Damaged sidecars count as absent."""
        self.incomplete: BundleError | None = None
        """Set if the model can't be used: its damaged streams may be part of the model."""
        self.predictors = self._sidecar_content(PREDICTORS_SIDECAR, self._read_predictors)
        """Predictors of which neurons will fire; None if the bundle has none."""
        self.streams = self._sidecar_content(STREAMS_SIDECAR, self._read_streams)
        """Adapters that draft the tokens after the next one; None if the bundle has none."""
        self.hotness = self._sidecar_content(HOTNESS_SIDECAR, self._read_hotness)
        """Metadata of the counts of how often neurons fire; None if the bundle has none."""
        self.expert_costs = self._sidecar_content(
            EXPERT_COSTS_SIDECAR, lambda data: parse_expert_costs(data, manifest)
        )
        """Costs of lossy options of a model with experts; None if the bundle has none."""
        self.expert_use = self._sidecar_content(EXPERT_USE_SIDECAR, self._read_expert_use)
        """Metadata of the counts of experts' choices, and hit rates of caches; None if the bundle has
        none."""
        self.ngrams = self._sidecar_content(NGRAMS_SIDECAR, self._read_ngrams)
        """The datastore of continuations to draft from; None if the bundle has none."""
        self.eagle = self._sidecar_content(EAGLE_SIDECAR, partial(self._read_draft_layer, EAGLE_SIDECAR))
        self.dflash = self._sidecar_content(DFLASH_SIDECAR, partial(self._read_draft_layer, DFLASH_SIDECAR))
        self.mtp = self._sidecar_content(MTP_SIDECAR, partial(self._read_draft_layer, MTP_SIDECAR))
        """Draft layers: an EAGLE-3 head, layers that draft blocks, and the checkpoint's own; None without."""

    @staticmethod
    def open(path: str | Path) -> Bundle:
        """Opens the bundle in the folder `path`.

        Raises ModelNotFoundError if there is none, BundleError if anything but a sidecar is damaged or out of
        bounds, UnsupportedModelError if this release doesn't know its version or a model option.
        """
        folder = Path(path)
        if not os.path.lexists(folder / MANIFEST):
            raise ModelNotFoundError(
                f"no bundle at {folder} (it has no {MANIFEST}); "
                f"make one with: ondevice convert SOURCE --output {folder}"
            )
        data = read_file(contained(folder.resolve(), MANIFEST), MAX_JSON_BYTES)
        return Bundle(folder, parse_manifest(data), len(data))

    @property
    def name(self) -> str:
        """The name of the bundle's folder."""
        return self._folder.name

    @property
    def draft_layers(self) -> dict[str, DraftLayer]:
        """The draft layers that the bundle has, by kind, in the order in which `auto` prefers them."""
        return {kind: layer for kind in SIDECAR_OF if (layer := getattr(self, kind)) is not None}

    @property
    def record_layout(self) -> RecordLayout:
        """The record of one neuron. Raises BundleError if feed-forwards are stored in slices."""
        if self.config.is_sliced:
            raise BundleError(f"{self.name} stores its feed-forwards in slices, not neuron by neuron")
        return record_layout(self.config, self.quant)

    @property
    def parameters(self) -> int:
        """Number of the model's logical parameters; tied embeddings count once."""
        config = self.config
        hidden = config.hidden_size
        layers = hidden * sum(config.qkv_rows(it) + config.out_cols(it) for it in config.layers)
        layers += hidden * config.feed_forward.num_rows * config.num_neurons
        others = sum(prod(weight.shape) for weight in extra_matrices(config)) + vectors_size(config)
        heads = config.part.heads and not config.tie_embeddings
        tables = config.embedding_size * (config.has_table + heads)
        tables += config.per_layer_size * config.has_inputs_table
        biases = 0
        if config.experts is not None and config.experts.bias:
            each = (config.feed_forward.num_rows - 1) * config.experts.neurons + hidden
            biases = len(config.expert_layers) * config.experts.count * each
        return layers + others + biases + config.vocab_size * tables

    @property
    def embedding_file(self) -> CheckedFile:
        return self.file(EMBEDDING)

    def neuron_file(self, layer: int) -> CheckedFile:
        return self.file(neuron_file_name(layer))

    def expert_file(self, layer: int) -> CheckedFile:
        """The experts of `layer`. Raises BundleError if none are stored as matrices."""
        return self.file(expert_file_name(layer))

    def gate_file(self, layer: int) -> CheckedFile:
        """The gate file of `layer`. Raises BundleError if the model's gates are never exactly zero."""
        return self.file(gate_file_name(layer))

    def file(self, name: str) -> CheckedFile:
        """The file `name` with its checksums. Raises BundleError if the bundle has no such file."""
        if name in self._files:
            return self._files[name]
        entry = self.manifest.files.get(name)
        if entry is None or entry.crc is None:
            raise BundleError(f"{name!r} is not a file with checksums in the bundle {self.path}")
        layout = file_layout(name, self.config, self.quant)
        crcs = self._crcs[entry.crc.offset : entry.crc.offset + entry.crc.count]
        return CheckedFile.of(self._folder / name, entry.nbytes, layout, crcs)

    def with_files(self, files: Mapping[str, CheckedFile]) -> Bundle:
        """The same bundle, in which `files` are checked differently: each is replaced by the given
        `CheckedFile`.
        """
        other = copy.copy(self)
        other._files = {**self._files, **files}
        return other

    def with_config(self, config: ModelConfig) -> Bundle:
        """The same bundle with another config, which must imply the same files."""
        other = copy.copy(self)
        other.config = config
        return other

    def slice(
        self, first: int, stop: int, *, embeds: bool | None = None, heads: bool | None = None
    ) -> Bundle:
        """The layers `first` to `stop` - 1 of the model, as a bundle over the same files.

        Its layers, files and tensors are numbered from 0 on.

        Args:
            first, stop: layers in the complete model's numbers.
            embeds: whether the slice has the embedding, and everything else that precedes the first layer or
                drafts; by default if it has the first layer.
            heads: whether it has the output head; by default if it has the embedding.

        Raises UsageError for layers that aren't here, UnsupportedModelError for an impossible cut.
        """
        embeds = (self.config.part.embeds and first == 0) if embeds is None else embeds
        heads = embeds if heads is None else heads
        config = part_config(self.config, first, stop, embeds, heads)
        if config is self.config:
            return self
        other, layers = copy.copy(self), part_range(self.config, config)
        other._sliced_from, other.config = self, config
        manifest_config = part_config(self.manifest.config, first, stop, embeds, heads)
        other.manifest = part_manifest(self.manifest, manifest_config)
        names = part_files(config, other.manifest.tokenizer, layers.start)
        other._files = {
            name: self.file(stored) for name, stored in names if self.manifest.files[stored].crc is not None
        }
        contents = part_contents(vars(self), self.config, config)
        vars(other).update(contents)
        other.sidecar_files = {
            name: it for name, it in self.sidecar_files.items() if contents[it.sidecar.key] is not None
        }
        kept = {name: it for name, it in self._spans.items() if it.file in (RESIDENT, *other.sidecar_files)}
        other._spans = part_names(kept, layers)
        other.bundle_bytes = sum(file.nbytes for file in other._files.values())
        return other

    def without(self, sidecar: Sidecar, error: BundleError) -> Bundle:
        """The same bundle without `sidecar`, whose file of tensors is damaged. error: describes the
        damage.
        """
        other = copy.copy(self)
        lossless = self.streams is None or self.streams.mode == "lossless"
        other.damaged, other.sidecar_files = dict(self.damaged), dict(self.sidecar_files)
        del other.sidecar_files[sidecar.tensors]
        setattr(other, sidecar.key, None)
        other._note_damage(sidecar, error, lossless)
        return other

    def sidecar_file(self, name: str) -> CheckedFile:
        """The file `name` with a sidecar's tensors. Raises BundleError if the bundle has no such sidecar."""
        if name not in self.sidecar_files:
            raise BundleError(f"the bundle {self.path} has no {name}")
        return self.sidecar_files[name].file

    def frequencies(self) -> list[NDArray[np.float32]] | None:
        """For each layer, (F,) share of a text's tokens for which each neuron fires; None without hotness.

        Raises BundleError if the file has been damaged since the bundle was opened.
        """
        if self.hotness is None:
            return None
        if self._sliced_from is not None:
            shares = self._sliced_from.frequencies()
            return None if shares is None else shares[part_range(self._sliced_from.config, self.config)]
        try:
            return parse_frequencies(self._read_frequencies(), self.hotness, self.config)
        except BundleError as error:
            raise self._with_remedy(HOTNESS_SIDECAR, error) from error

    def expert_counts(self) -> NDArray[np.uint32] | None:
        """For each layer with experts, (E,) the number of tokens of the calibration text that chose each
        expert. None without a calibration.

        Raises BundleError if the file has been damaged since the bundle was opened.
        """
        if self.expert_use is None:
            return None
        if self._sliced_from is not None:
            counts = self._sliced_from.expert_counts()
            return None if counts is None else counts[part_experts(self._sliced_from.config, self.config)]
        try:
            data = self._read_expert_counts()
            return parse_expert_counts(data, self.expert_use, self.manifest.config)
        except BundleError as error:
            raise self._with_remedy(EXPERT_USE_SIDECAR, error) from error

    def tensor_span(self, name: str) -> TensorSpan:
        """The place of a tensor in the resident file or in a sidecar's file.

        Raises BundleError if the model has no such tensor.
        """
        if name not in self._spans:
            raise BundleError(f"the bundle {self.path} has no tensor {name!r}")
        return self._spans[name]

    def small_parts(self, name: str) -> Iterator[bytes]:
        """The bytes of a tokenizer file or chat template, in parts of at most `PART_BYTES`. The hash isn't
        checked.
        """
        path = contained(self._folder, name)
        for start in range(0, self.manifest.files[name].nbytes, PART_BYTES):
            yield read_range(path, start, min(PART_BYTES, self.manifest.files[name].nbytes - start))

    def read_small(self, name: str) -> bytes:
        """All bytes of a tokenizer file or chat template. Raises BundleError if their sha256 differs."""
        entry = self.manifest.files.get(name)
        if entry is None or name not in self.manifest.tokenizer.files:
            raise BundleError(f"the bundle {self.path} has no tokenizer file {name!r}")
        data = read_file(contained(self._folder, name), entry.nbytes)
        if sha256_hex(data) != entry.sha256:
            raise BundleError(f"{name} doesn't match its sha256; the bundle is damaged, convert it again")
        return data

    def _check_sizes(self) -> dict[str, FileLayout]:
        """Check that sizes in the manifest and on disk are those that the model implies, and that CRC ranges
        leave no gaps.

        Returns the layouts of all files except the checksums, by name.
        """
        next_crc, layouts = 0, {}
        for name in bundle_files(self.config, self.manifest.tokenizer):
            entry = self.manifest.files[name]
            if name == CHECKSUMS:
                expected, crc = 4 * next_crc, None
            else:
                layouts[name] = layout = file_layout(name, self.config, self.quant)
                expected = entry.nbytes if layout.nbytes is None else layout.nbytes
                crc = CrcRange(next_crc, layout.crc_count(expected))
                next_crc += crc.count
                if layout.nbytes is None and not 1 <= expected <= MAX_BLOB_BYTES[name]:
                    raise BundleError(f"{name} has {expected} bytes; the limit is {MAX_BLOB_BYTES[name]}")
            if entry.nbytes != expected:
                raise BundleError(f"manifest: {name} has {entry.nbytes} bytes; this model needs {expected}")
            if entry.crc != crc:
                raise BundleError(f"{name} has checksum range {entry.crc}, not {crc}: convert the model anew")
            actual = contained(self._folder, name).stat().st_size
            if actual != expected:
                raise BundleError(f"{name} has {actual} bytes on disk; the manifest says {expected}")
        if 4 * next_crc > MAX_CHECKSUM_BYTES:
            raise BundleError(f"{CHECKSUMS} has {4 * next_crc} bytes; the limit is {MAX_CHECKSUM_BYTES}")
        return layouts

    def _check_headers(self, layouts: Mapping[str, FileLayout]) -> None:
        """Checks that the safetensors headers are the canonical ones, so that offsets can be computed."""
        for name, layout in layouts.items():
            if read_range(self._folder / name, 0, len(layout.header)) != layout.header:
                raise BundleError(f"{name}: its safetensors header isn't the one this model implies")

    def _sidecar_content(self, sidecar: Sidecar, read: Callable[[bytes], Content]) -> Content | None:
        """A sidecar's content, as `read` parses it; None if the sidecar is absent or damaged."""
        data = b""
        try:
            content = read_sidecar(sidecar, self._folder)
            if content is None:
                return None
            data = content
            check_sidecar_possible(sidecar, self.config)
            parsed = read(data)
            self.bundle_bytes += len(data)
            return parsed
        except BundleError as error:
            self._note_damage(sidecar, error, says_lossless(data))
            return None

    def _note_damage(self, sidecar: Sidecar, error: BundleError, lossless: bool) -> None:
        self.damaged[sidecar.key] = self._with_remedy(sidecar, error)
        if sidecar is STREAMS_SIDECAR and not lossless:
            train = f"ondevice train streams --model {shlex.quote(str(self.path))} --text FILE --mode shared"
            self.damaged[sidecar.key] = self.incomplete = BundleError(
                f"{error}; these streams may be part of the model itself, which can't do without. Delete "
                f"{sidecar.manifest}, which leaves the model that they were trained for; then `{train}` "
                "makes them anew"
            )

    def _with_remedy(self, sidecar: Sidecar, error: BundleError) -> BundleError:
        return BundleError(f"{error}; {sidecar.remedy(self.path)}")

    def _read_predictors(self, data: bytes) -> Predictors:
        predictors = parse_predictors(data, self.manifest)
        tensors = predictor_tensors(self.config, predictors.bits, predictors.ranks)
        self._add_tensors(PREDICTORS_SIDECAR, tensors, predictors.crcs, predictors.sha256)
        return predictors

    def _read_streams(self, data: bytes) -> MultiStreams:
        streams = parse_streams(data, self.manifest)
        tensors = stream_tensors(self.config, streams)
        self._add_tensors(STREAMS_SIDECAR, tensors, streams.crcs, streams.sha256)
        return streams

    def _read_draft_layer(self, sidecar: Sidecar, data: bytes) -> DraftLayer:
        layer = parse_draft_layer(sidecar, data, self.manifest)
        tensors = draft_layer_tensors(layer, self.config)
        self._add_tensors(sidecar, tensors, layer.crcs, layer.sha256)
        return layer

    def _read_ngrams(self, data: bytes) -> Ngrams:
        ngrams, crcs = parse_ngrams(data, self.manifest)
        layout = ngrams_layout(ngrams.pages, ngrams.frequent)
        self._add(NGRAMS_SIDECAR, layout, crcs, ngrams.sha256)
        return ngrams

    def _add_tensors(
        self, sidecar: Sidecar, tensors: Mapping[str, TensorSpec], crcs: Sequence[int], sha256: str
    ) -> None:
        """Add a sidecar whose tensors are read by name."""
        self._add(sidecar, tensors_layout(tensors), crcs, sha256)
        self._spans |= tensor_spans(sidecar.tensors, tensors)

    def _add(self, sidecar: Sidecar, layout: FileLayout, crcs: Sequence[int], sha256: str) -> None:
        name = sidecar.tensors
        nbytes = check_tensors(sidecar, self._folder, layout)
        file = CheckedFile.of(self._folder / name, nbytes, layout, np.array(crcs, dtype=np.uint32))
        self.sidecar_files[name] = SidecarFile(sidecar, file, layout, sha256)
        self.bundle_bytes += nbytes

    def _read_hotness(self, data: bytes) -> Hotness:
        hotness = parse_hotness(data, self.manifest)
        frequencies = self._read_frequencies()
        # Checked now, as they are few bytes: damaged hotness counts as absent.
        parse_frequencies(frequencies, hotness, self.config)
        self.bundle_bytes += len(frequencies)
        return hotness

    def _read_frequencies(self) -> bytes:
        return read_file(contained(self._folder, HOTNESS), hotness_layout(self.config).nbytes or 0)

    def _read_expert_use(self, data: bytes) -> ExpertUse:
        use = parse_expert_use(data, self.manifest)
        counts = self._read_expert_counts()
        # Checked now, as hotness is.
        parse_expert_counts(counts, use, self.manifest.config)
        self.bundle_bytes += len(counts)
        return use

    def _read_expert_counts(self) -> bytes:
        nbytes = expert_use_layout(self.manifest.config).nbytes or 0
        return read_file(contained(self._folder, EXPERT_USE), nbytes)

    def _read_checksums(self) -> np.ndarray:
        entry = self.manifest.files[CHECKSUMS]
        data = read_file(contained(self._folder, CHECKSUMS), entry.nbytes)
        if sha256_hex(data) != entry.sha256:
            raise BundleError(
                f"{CHECKSUMS} doesn't match its sha256; the bundle is damaged, convert it again"
            )
        return np.frombuffer(data, dtype="<u4")


def tensor_spans(file: str, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpan]:
    """The places of a file's tensors, by name."""
    offset = len(resident_header(tensors))
    spans = {}
    for name, spec in tensors.items():
        spans[name] = TensorSpan(file, offset, spec.nbytes, spec.numpy_dtype, spec.shape)
        offset += spec.nbytes
    return spans
