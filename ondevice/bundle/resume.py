"""The progress of a conversion: a small state file among the bundle's files, from which a later run resumes.

An entry is only a claim: the size and sha256 of a finished file are checked again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import TypeVar

from ondevice.bundle.digest import Crc32c, FileDigest, digest_prefix
from ondevice.bundle.file_layouts import FileLayout
from ondevice.bundle.files import read_file, temporary_path, write_durably
from ondevice.bundle.layout import MANIFEST, RESIDENT
from ondevice.bundle.manifest import MAX_FILE_BYTES, Manifest, model_json, parse_manifest
from ondevice.bundle.strict_json import MAX_JSON_BYTES, Rule, Section, canonical_json, parse_json
from ondevice.config import QuantConfig
from ondevice.errors import BundleError, UnsupportedModelError, UsageError
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass

T = TypeVar("T")

STATE_FILE = "resume.json"
_MAX_TENSORS = 1 << 20
_MAX_OPTION_CHARS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileClaim:
    """The claim that a file's first `nbytes` bytes are durable and have this sha256."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class ResidentClaim(FileClaim):
    """The claim that the first `tensors` tensors of the unfinished resident file are durable."""

    tensors: int


@dataclass(frozen=True)
class SourceStamp:
    """The state of a source file when it was read: its size, and when it was last changed, in ns
    since 1970.
    """

    nbytes: int
    modified_ns: int


@dataclass
class ResumeState:
    """The claims of an unfinished conversion.

    origin: identifies source, options and format. sources: stamps of the source files by name; these files
    must not change until the conversion is finished. options: the values of options that are part of the
    origin, in words, for the error message of a run with other options.
    """

    folder: Path
    origin: str
    sources: Mapping[str, SourceStamp]
    files: dict[str, FileClaim] = field(default_factory=dict)
    resident: ResidentClaim | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def save(self) -> None:
        """Writes the state durably. Raises OSError."""
        content = {
            "origin": self.origin,
            "options": dict(self.options),
            "sources": {name: asdict(stamp) for name, stamp in self.sources.items()},
            "files": {name: asdict(claim) for name, claim in sorted(self.files.items())},
            "resident": None if self.resident is None else asdict(self.resident),
        }
        write_durably(self.folder / STATE_FILE, canonical_json(content))

    def remove(self) -> None:
        """Delete the state file, once the manifest is written and replaces it."""
        (self.folder / STATE_FILE).unlink(missing_ok=True)

    def finished(self, name: str, layout: FileLayout, crc32c: Crc32c) -> FileDigest | None:
        """Digest of the file `name` if it is finished and intact, else None."""
        claim = self.files.get(name)
        path = self.folder / name
        if claim is None or not path.is_file() or path.stat().st_size != claim.nbytes:
            return None
        return _checked(path, claim, layout, crc32c)

    def resident_prefix(self, layout: FileLayout, crc32c: Crc32c) -> FileDigest | None:
        """The digest of those tensors of the unfinished resident file that are claimed. None if there is no
        claim, and if the bytes are damaged, which also drops the claim.
        """
        if self.resident is None:
            return None
        digest = _checked(temporary_path(self.folder / RESIDENT), self.resident, layout, crc32c)
        if digest is None:
            self.resident = None
        return digest


def load_state(
    folder: Path,
    config: ModelConfig,
    quant: QuantConfig,
    fingerprint: str | None,
    sources: Mapping[str, SourceStamp],
    options: Mapping[str, str],
) -> ResumeState:
    """The state in `folder`, or an empty one.

    A state or manifest that can't be parsed is dropped, and the manifest is removed. Raises UsageError if the
    state belongs to another source, to other options or to another format, or if a file of `sources` has
    changed since.
    """
    origin = _origin(config, quant, fingerprint)
    try:
        if (folder / STATE_FILE).exists():
            state = _parse(folder, read_file(folder / STATE_FILE, MAX_JSON_BYTES))
        elif (folder / MANIFEST).exists():
            manifest = parse_manifest(read_file(folder / MANIFEST, MAX_JSON_BYTES))
            state = _from_manifest(folder, manifest, sources)
        else:
            return ResumeState(folder, origin, sources, options=options)
    except (BundleError, UnsupportedModelError) as error:
        logger.warning("%s can't be resumed and is made again: %s", folder, error)
        (folder / MANIFEST).unlink(missing_ok=True)
        return ResumeState(folder, origin, sources, options=options)
    if state.origin != origin:
        raise UsageError(
            f"{folder} was begun {_difference(state.options, options)}, or delete it to start again"
        )
    changed = sorted(name for name, _ in set(state.sources.items()) ^ set(sources.items()))
    if changed:
        raise UsageError(
            f"{changed[0]!a} has changed since {folder} was begun, which would mix the old with the new; "
            "start again with --force"
        )
    return state


def _difference(begun: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A sentence for an error: the options of the run that began the folder, and those to repeat."""
    differing = [name for name in now if name in begun and begun[name] != now[name]]
    if not differing:
        return "from another source or with other options; repeat those"
    before = " and ".join(f"{name} {begun[name]}" for name in differing)
    after = " and ".join(f"{name} {now[name]}" for name in differing)
    return f"with {before}, and this run has {after}; repeat the first"


def _origin(config: ModelConfig, quant: QuantConfig, fingerprint: str | None) -> str:
    return hashlib.sha256(canonical_json([model_json(config, quant), fingerprint])).hexdigest()


def _from_manifest(folder: Path, manifest: Manifest, sources: Mapping[str, SourceStamp]) -> ResumeState:
    """The state of a conversion that stopped after writing its manifest: all files are finished."""
    origin = _origin(manifest.config, manifest.quant, manifest.provenance.fingerprint)
    claims = {name: FileClaim(entry.nbytes, entry.sha256) for name, entry in manifest.files.items()}
    return ResumeState(folder, origin, sources, claims)


def _parse(folder: Path, data: bytes) -> ResumeState:
    root = Section(parse_json(data, STATE_FILE), STATE_FILE)
    options, most = root.section("options"), (1 << 63) - 1
    claim: dict[str, Rule] = {"nbytes": (Section.integer, 0, MAX_FILE_BYTES), "sha256": (Section.text, 64)}
    resident = claim | {"tensors": (Section.integer, 0, _MAX_TENSORS)}
    stamp: dict[str, Rule] = {
        "nbytes": (Section.integer, 0, most),
        "modified_ns": (Section.integer, ~most, most),
    }
    state = ResumeState(
        folder,
        root.text("origin", 64),
        _claims(root, "sources", SourceStamp, stamp),
        _claims(root, "files", FileClaim, claim),
        root.nullable("resident", Section.entry, ResidentClaim, resident),
        {name: options.text(name, _MAX_OPTION_CHARS) for name in options.names},
    )
    root.close()
    return state


def _claims(root: Section, key: str, kind: type[T], rules: dict[str, Rule]) -> dict[str, T]:
    section = root.section(key)
    return {name: section.entry(name, kind, rules) for name in section.names}


def _checked(path: Path, claim: FileClaim, layout: FileLayout, crc32c: Crc32c) -> FileDigest | None:
    digest = digest_prefix(path, claim.nbytes, layout, crc32c)
    if digest is not None and digest.sha256() == claim.sha256:
        return digest
    logger.warning("%s isn't what was written and is made again", path.name)
    return None
