"""What an attacker does after changing a bundle: every size, hash and checksum is made right again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.bundle.file_layouts import FileLayout, file_layout
from ondevice.bundle.layout import (
    CHECKSUMS,
    DATA_OFFSET,
    RESIDENT,
    gate_file_name,
    neuron_file_name,
)
from ondevice.bundle.manifest import bundle_files, parse_manifest
from ondevice.bundle.ngrams import PAGE_BYTES
from ondevice.config import QuantConfig
from ondevice.kernels import _native
from ondevice.model_config import ModelConfig
from tests.fuzz.mutations import is_plain
from tests.malformed.rules import manifest_of, seal

SIDECARS = {
    "predictors.json": "predictors",
    "streams.json": "streams",
    "hotness.json": "hotness",
    "expert_costs.json": "expert_costs",
    "expert_use.json": "expert_use",
    "ngrams.json": "ngrams",
    "eagle.json": "eagle",
    "dflash.json": "dflash",
    "mtp.json": "mtp",
}
"""The key of each one's content."""
CRC_BLOCK = 1 << 20


def canonical(value: object) -> bytes:
    """The form that is hashed; NaN and lone surrogates too, which a reader must refuse."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def crcs(data: bytes, start: int, units: tuple[int, ...]) -> np.ndarray:
    """CRC32C of every unit from `start` on, the last one perhaps short."""
    covered = np.frombuffer(data, np.uint8)[start:]
    return np.asarray(_native.crc32c(covered, units), dtype="<u4") if covered.size else np.empty(0, "<u4")


def file_crcs(data: bytes, layout: FileLayout) -> np.ndarray:
    """The entries of the table that a file of this layout has."""
    return crcs(data, layout.crc_start, layout.crc_units)


def sign_files(folder: Path, config: ModelConfig, quant: QuantConfig) -> Any:
    """Make the checksum table anew and return a manifest that fits what lies in `folder`. Not yet sealed.

    Files that aren't regular, or are gone, keep what the manifest had of them.
    """
    manifest = manifest_of(folder)
    tables: list[np.ndarray] = []
    offset = 0
    tokenizer = parse_manifest((folder / "bundle.json").read_bytes()).tokenizer
    for name in bundle_files(config, tokenizer):
        path = folder / name
        if name == CHECKSUMS:
            continue
        if not is_plain(path):
            if path.exists():
                manifest["files"][name]["bytes"] = path.stat().st_size
            continue
        data = path.read_bytes()
        table = file_crcs(data, file_layout(name, config, quant))
        tables.append(table)
        crc = {"offset": offset, "count": len(table)}
        manifest["files"][name] = {"bytes": len(data), "sha256": sha256(data), "crc": crc}
        offset += len(table)
    table_bytes = np.concatenate(tables).astype("<u4").tobytes()
    if is_plain(folder / CHECKSUMS):
        (folder / CHECKSUMS).write_bytes(table_bytes)
    entry = {"bytes": len(table_bytes), "sha256": sha256(table_bytes), "crc": None}
    manifest["files"][CHECKSUMS] = entry
    return manifest


def weights_digest(manifest: Any) -> str:
    """What sidecars name their weights by, spelt out a second time."""
    layers = range(len(manifest["model"]["layers"]))
    names = [RESIDENT, *map(neuron_file_name, layers)]
    names += [gate_file_name(layer) for layer in layers if gate_file_name(layer) in manifest["files"]]
    return sha256(canonical([manifest["files"][name]["sha256"] for name in names]))


def sidecar_content(folder: Path, name: str) -> dict[str, Any] | None:
    """What a sidecar's JSON file says; None where it is no such file any more."""
    path = folder / name
    if not is_plain(path):
        return None
    try:
        content = json.loads(path.read_bytes())[SIDECARS[name]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def seal_sidecar(folder: Path, name: str, content: Any) -> None:
    """Write a sidecar's JSON file with a hash that fits."""
    document = {SIDECARS[name]: content, "sha256": sha256(canonical(content))}
    (folder / name).write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))


def sign_sidecars(folder: Path, manifest: Any) -> None:
    """Make every sidecar name these weights, and its own file of tensors as it is."""
    digest = weights_digest(manifest)
    for name in SIDECARS:
        content = sidecar_content(folder, name)
        if content is None:
            continue
        units = (0, (CRC_BLOCK,))
        if name == "ngrams.json":
            # It belongs to the tokenizer, and each of its pages has a checksum.
            units = (DATA_OFFSET, (PAGE_BYTES,))
        else:
            content["model"] = digest
        tensors = folder / name.replace(".json", ".safetensors")
        if is_plain(tensors):
            data = tensors.read_bytes()
            content["sha256"] = sha256(data)
            if "crcs" in content:
                content["crcs"] = [int(crc) for crc in crcs(data, *units)]
        seal_sidecar(folder, name, content)


def sign(folder: Path, config: ModelConfig, quant: QuantConfig) -> Any:
    """All of it; returns the manifest as it was sealed."""
    manifest = sign_files(folder, config, quant)
    seal(folder, manifest)
    sign_sidecars(folder, manifest)
    return manifest
