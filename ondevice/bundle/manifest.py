"""`bundle.json`: its dataclasses, its strict parser and its text.

Every field has a type and a range; unknown, missing or repeated keys are refused. The manifest contains the
sha256 of its canonical form. This distinguishes a damaged manifest from one that was written with a wrong
value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any, Literal, get_args

from ondevice.bundle.layout import (
    CHAT_TEMPLATE,
    CHECKSUMS,
    EMBEDDING,
    FORMAT,
    MANIFEST,
    PER_LAYER,
    RESIDENT,
    TOKENIZER_FILES,
    VERSION,
    PartLayout,
    embedding_layout,
    embedding_tiles,
    expert_file_name,
    expert_layout,
    gate_file_name,
    gate_layout,
    neuron_file_name,
    neuron_layouts,
    per_layer_layout,
)
from ondevice.bundle.model_section import model_section, parse_model
from ondevice.bundle.quantization_section import parse_quantization, quantization_section
from ondevice.bundle.strict_json import Rule, Section, canonical_json, parse_json
from ondevice.chat_template import MAX_TEMPLATE_CHARS
from ondevice.config import QuantConfig, SamplingConfig
from ondevice.errors import BundleError, UnsupportedModelError, UsageError
from ondevice.hashing import sha256_hex
from ondevice.model_config import FULL_MODEL, ModelConfig
from ondevice.records import dataclass
from ondevice.tokenizer import MAX_TOKENIZER_BYTES
from ondevice.tokenizer.infill import InfillTokens

MAX_FILE_BYTES = 1 << 48
MAX_BLOB_BYTES = {TOKENIZER_FILES[kind]: nbytes for kind, nbytes in MAX_TOKENIZER_BYTES.items()} | {
    CHAT_TEMPLATE: 4 * MAX_TEMPLATE_CHARS
}
"""Largest size in bytes of each file that is read at once, by name: as much as the runtime accepts."""
_MAX_TEXT_TOKENS = 1 << 48
_MAX_EOS = 64
_MAX_CRCS = 1 << 40
_SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_TENSOR_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

TokenizerKind = Literal["sentencepiece", "tokenizers", "byte_pairs"]


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer files of a bundle, and the token ids that begin and end a text.

    kind: None if the checkpoint has no tokenizer; the model then takes and returns token ids.
    """

    kind: TokenizerKind | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    """`chat_template.jinja`, or None."""
    infill: InfillTokens | None = None
    """Marks of fill-in-the-middle, if the source names them by their ids; None: they are found by name."""

    @property
    def file(self) -> str | None:
        return None if self.kind is None else TOKENIZER_FILES[self.kind]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(name for name in (self.file, self.chat_template) if name is not None)


@dataclass(frozen=True)
class Provenance:
    """The origin of the weights, and the error of quantizing them. Nothing here depends on time or machine.

    quantisation_error: relative root-mean-square error by kind of tensor.
    fingerprint: identifies the source and the options that decide the bytes; set by the writer.
    ordered_tokens: length of the text by which the neurons are ordered; None for the checkpoint's order.
    """

    source: str
    source_format: str
    converter_version: str
    quantisation_error: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fingerprint: str | None = None
    ordered_tokens: int | None = None


@dataclass(frozen=True)
class CrcRange:
    """Where a file's entries are in the checksum table: the index of the first, and their number."""

    offset: int
    count: int


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry of one file. crc: None for the checksum table itself."""

    nbytes: int
    sha256: str
    crc: CrcRange | None


@dataclass(frozen=True)
class Manifest:
    """The content of `bundle.json`."""

    config: ModelConfig
    quant: QuantConfig
    tokenizer: TokenizerInfo
    generation: Mapping[str, float]
    """Sampling defaults that the model's authors recommend, by `SamplingConfig` field name."""
    provenance: Provenance
    files: Mapping[str, FileEntry]
    part_of: str | None = None
    """`model_digest` of the complete model, in a slice of one."""


GENERATION_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 22),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 100.0),
}


def bundle_files(config: ModelConfig, tokenizer: TokenizerInfo) -> tuple[str, ...]:
    """All files that the manifest must list, in the order of their entries in the checksum table."""
    layers = range(config.num_layers)
    neurons = (neuron_file_name(layer) for layer in layers)
    gates = (gate_file_name(layer) for layer in layers if config.zeros_gates)
    experts = (expert_file_name(layer) for layer in config.expert_layers)
    table = (EMBEDDING,) if config.has_table else ()
    per_layer = (PER_LAYER,) if config.has_inputs_table else ()
    return (RESIDENT, *table, *neurons, *gates, *experts, *per_layer, *tokenizer.files, CHECKSUMS)


def manifest_text(manifest: Manifest) -> bytes:
    """The bytes of `bundle.json`."""
    content = _to_json(manifest)
    document = {"manifest": content, "sha256": sha256_hex(canonical_json(content))}
    text = json.dumps(document, indent=1, sort_keys=True, allow_nan=False)
    return text.encode("ascii") + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """The parsed `bundle.json`.

    Raises BundleError if it is damaged or out of range, UnsupportedModelError for another version or for an
    option that this release doesn't know.
    """
    document = Section(parse_json(data, MANIFEST), MANIFEST)
    content = document.get("manifest")
    if document.get("sha256") != sha256_hex(canonical_json(content)):
        raise BundleError("bundle.json doesn't match its own sha256; it was damaged or edited")
    document.close()
    root = Section(content, "manifest")
    root.equal("format", FORMAT)
    version = root.integer("version", 1, 1 << 31)
    if version != VERSION:
        raise UnsupportedModelError(
            f"bundle format version {version}; this release reads version {VERSION}: run `ondevice convert "
            "--force` again on the model's checkpoint"
        )
    config = parse_model(root.section("model"))
    quant = parse_quantization(root.section("quantisation"), config)
    _check_records(root, "neurons", _neurons_json(config, neuron_layouts(config, quant)), config)
    root.equal("embedding", _embedding_json(config, quant))
    _check_records(root, "gates", _gates_json(config, quant), config)
    for key, value in _experts_json(config, quant).items():
        root.equal(key, value)
    if config.has_inputs_table:
        root.equal("per_layer", _layout_json(config.vocab_size, per_layer_layout(config, quant)))
    tokenizer = _parse_tokenizer(root.section("tokenizer"), config.vocab_size)
    generation = _parse_generation(root.section("generation"))
    provenance = Provenance(**root.section("provenance").values(*_PROVENANCE))
    files = _parse_files(root.section("files"), bundle_files(config, tokenizer))
    part_of = _hash(root, "part_of") if config.part != FULL_MODEL else None
    root.close()
    return Manifest(config, quant, tokenizer, generation, provenance, files, part_of)


def model_json(config: ModelConfig, quant: QuantConfig) -> dict[str, Any]:
    """The parts of the manifest, as JSON, that determine the size of everything."""
    per_layer = {}
    if config.has_inputs_table:
        per_layer["per_layer"] = _layout_json(config.vocab_size, per_layer_layout(config, quant))
    return {
        **per_layer,
        **_experts_json(config, quant),
        "format": FORMAT,
        "version": VERSION,
        "model": model_section(config),
        "quantisation": quantization_section(quant),
        "neurons": _neurons_json(config, neuron_layouts(config, quant)),
        "embedding": _embedding_json(config, quant),
        "gates": _gates_json(config, quant),
    }


def _embedding_json(config: ModelConfig, quant: QuantConfig) -> dict[str, Any] | None:
    return (
        _layout_json(embedding_tiles(config), embedding_layout(config, quant)) if config.has_table else None
    )


def _gates_json(config: ModelConfig, quant: QuantConfig) -> dict[str, Any] | None:
    if not config.zeros_gates:
        return None
    return _neurons_json(config, (gate_layout(config, quant),) * config.num_layers)


def _experts_json(config: ModelConfig, quant: QuantConfig) -> dict[str, Any]:
    """The manifest's key `experts`; empty unless the model has experts that are stored as matrices."""
    layouts = [expert_layout(config, quant, layer) for layer in config.expert_layers]
    stored = [layout for layout in layouts if layout is not None]
    if config.experts is None or not stored:
        return {}
    return {"experts": _records_json([config.experts.count] * len(stored), stored)}


def _neurons_json(config: ModelConfig, layouts: Sequence[PartLayout]) -> dict[str, Any]:
    """The manifest's description of every layer's records of neurons."""
    counts = [layout.num_records(records) for layout, records in zip(layouts, config.records, strict=True)]
    slices = {"neurons": layouts[0].neurons} if config.is_sliced else {}
    return _records_json(counts, layouts) | slices


def _check_records(root: Section, key: str, expected: dict[str, Any] | None, config: ModelConfig) -> None:
    """Check the manifest's records of neurons or gates.

    The error names a remedy, as older converters wrote other records.
    """
    try:
        root.equal(key, expected)
    except BundleError as error:
        raise BundleError(
            f"{error} (the activation is {config.activation!r}); convert the model again: "
            "`ondevice convert --force` on its checkpoint"
        ) from error


def _to_json(manifest: Manifest) -> dict[str, Any]:
    tokenizer = asdict(manifest.tokenizer) | {"file": manifest.tokenizer.file}
    if manifest.tokenizer.infill is None:
        del tokenizer["infill"]
    provenance = asdict(manifest.provenance)
    if manifest.provenance.ordered_tokens is None:
        del provenance["ordered_tokens"]
    files = {
        name: {
            "bytes": entry.nbytes,
            "sha256": entry.sha256,
            "crc": None if entry.crc is None else asdict(entry.crc),
        }
        for name, entry in manifest.files.items()
    }
    part_of = {} if manifest.part_of is None else {"part_of": manifest.part_of}
    return (
        model_json(manifest.config, manifest.quant)
        | part_of
        | {
            "tokenizer": tokenizer,
            "generation": dict(manifest.generation),
            "provenance": provenance,
            "files": files,
        }
    )


def _layout_json(num_records: int, layout: PartLayout) -> dict[str, Any]:
    return {
        "num_records": num_records,
        "stride": layout.stride,
        "alignment": layout.alignment,
        "part_bytes": list(layout.part_bytes),
    }


def _records_json(counts: Sequence[int], layouts: Sequence[PartLayout]) -> dict[str, Any]:
    """The manifest's description of several layers' records. Values that differ between layers are lists."""
    layers = [_layout_json(count, layout) for count, layout in zip(counts, layouts, strict=True)]
    equal = {key: value for key, value in layers[0].items() if all(it[key] == value for it in layers)}
    return {key: equal.get(key, [it[key] for it in layers]) for key in layers[0]}


def _parse_tokenizer(section: Section, vocab_size: int) -> TokenizerInfo:
    kind = section.get("kind")
    if kind is not None and section.text("kind", 32) not in get_args(TokenizerKind):
        raise UnsupportedModelError(f"tokenizer kind {kind!r} is not one of {', '.join(TOKENIZER_FILES)}")
    section.equal("file", None if kind is None else TOKENIZER_FILES[kind])
    if section.get("chat_template") is not None:
        section.equal("chat_template", CHAT_TEMPLATE)
    token: Rule = (Section.integer, 0, vocab_size - 1)
    tokens: Rule = (Section.integers, _MAX_EOS, 0, vocab_size - 1)
    marks: dict[str, Rule] = {
        **dict.fromkeys(("prefix", "suffix"), token),
        **dict.fromkeys(("middle", "repository", "file"), (Section.nullable, *token)),
        "ends": tokens,
    }
    rules: dict[str, Rule] = {
        **dict.fromkeys(("kind", "chat_template", "file"), (Section.get,)),
        "bos_id": (Section.nullable, *token),
        "eos_ids": tokens,
        "add_bos": (Section.boolean,),
    }
    values = section.values(rules, {"infill": (Section.entry, InfillTokens, marks)})
    del values["file"]
    info = TokenizerInfo(**values)
    if info.add_bos and info.bos_id is None:
        raise BundleError("manifest.tokenizer.add_bos is true, but there is no bos_id")
    return info


def _parse_generation(section: Section) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, (low, high) in GENERATION_RANGES.items():
        if name in section.names:
            read = section.integer if isinstance(high, int) else section.number
            values[name] = read(name, low, high)  # type: ignore[arg-type]
    section.close()
    try:
        SamplingConfig(**values)  # type: ignore[arg-type]
    except UsageError as error:
        raise BundleError(f"manifest.generation can't be sampled with: {error}") from error
    return values


def _errors(root: Section, key: str) -> dict[str, float]:
    section = root.section(key)
    for name in section.names:
        if len(section.names) > 64 or not _TENSOR_KIND.fullmatch(name):
            raise BundleError(f"{section.where} has the name {name[:40]!a} among {len(section.names)}")
    return {name: section.number(name, 0.0, 1e6) for name in section.names}


def _parse_files(section: Section, expected: tuple[str, ...]) -> dict[str, FileEntry]:
    for name in section.names:
        if not _SAFE_NAME.fullmatch(name):
            raise BundleError(f"manifest.files has the unsafe name {name[:80]!a}")
    entries = section.values({name: (Section.section,) for name in expected})
    return {name: _parse_file(entry) for name, entry in entries.items()}


def _parse_file(section: Section) -> FileEntry:
    crc_range: dict[str, Rule] = dict.fromkeys(("offset", "count"), (Section.integer, 0, _MAX_CRCS))
    values = section.values(
        {
            "sha256": (_hash,),
            "bytes": (Section.integer, 0, MAX_FILE_BYTES),
            "crc": (Section.nullable, Section.entry, CrcRange, crc_range),
        }
    )
    return FileEntry(nbytes=values.pop("bytes"), **values)


def _hash(section: Section, name: str) -> str:
    digest = section.text(name, 64)
    if not _SHA256.fullmatch(digest):
        raise BundleError(f"{section.where}.{name} is {digest!a}; it must be 64 lower-case hex digits")
    return digest


_PROVENANCE: tuple[dict[str, Rule], dict[str, Rule]] = (
    {
        "source": (Section.text, 1024),
        "source_format": (Section.text, 64),
        "converter_version": (Section.text, 64),
        "quantisation_error": (_errors,),
        "notes": (Section.texts, 64, 1024),
        "fingerprint": (Section.nullable, Section.text, 128),
    },
    {"ordered_tokens": (Section.integer, 1, _MAX_TEXT_TOKENS)},
)
"""Rules of the key `provenance`. Some bundles are older than its last key."""
