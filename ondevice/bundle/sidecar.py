"""Sidecars: a JSON file and a file of tensors, added to a finished bundle and removable again.

Nothing in `bundle.json` refers to them. The JSON file names the weights that the sidecar was made for, and
has its own sha256 and the checksums of the tensors' file. It is written last and deleted first.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ondevice.bundle.file_layouts import FileLayout
from ondevice.bundle.files import contained, read_file, read_range
from ondevice.bundle.layout import (
    PER_LAYER,
    RESIDENT,
    expert_file_name,
    gate_file_name,
    neuron_file_name,
)
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.strict_json import MAX_JSON_BYTES, Rule, Section, canonical_json, parse_json
from ondevice.errors import BundleError
from ondevice.hashing import sha256_hex
from ondevice.model_config import FULL_MODEL, ModelConfig
from ondevice.records import dataclass

MAX_POINTS = 16
BITS: Rule = (lambda section, key: read_bits(section, key),)
SHA256: Rule = (Section.text, 64)
TOKENS: Rule = (Section.integer, 0, 1 << 48)
CRCS: Rule = (Section.integers, 1 << 16, 0, (1 << 32) - 1)
"""Rules of values that several sidecars have."""
NO_PREDICTORS = (
    "a statistical cutoff takes all of a token's gates, so they are in memory and say themselves which "
    "neurons count"
)
"""Why models with cutoffs have no predictors."""
NO_SIDECARS = "a model with experts runs without predictors and streams"


@dataclass(frozen=True)
class Sidecar:
    """One kind of sidecar.

    key: the key of the content in the JSON file. manifest, tensors: names of the two files; the latter is
    empty for a sidecar without tensors. command: the command line that makes them for a {model}. unaffected:
    the modes that run without them. facts: values of the content that are the same in every file.
    """

    key: str
    manifest: str
    tensors: str
    command: str
    unaffected: str
    facts: Mapping[str, Any] = field(default_factory=lambda: {"version": 1})

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files, the JSON file last."""
        return (self.tensors, self.manifest) if self.tensors else (self.manifest,)

    def remedy(self, folder: Path) -> str:
        """Advice, as part of an error message, for a damaged sidecar in the bundle `folder`."""
        command = self.command.format(model=shlex.quote(str(folder)))
        if not self.tensors:
            return f"`{command}` makes it anew, and {self.unaffected} runs without it"
        return f"`{command}` makes both files anew, and {self.unaffected} runs without them"


def weights_digest(manifest: Manifest) -> str:
    """A hash of the hashes of the files with the weights that sidecars depend on."""
    layers = range(manifest.config.num_layers)
    names = [RESIDENT, *(neuron_file_name(layer) for layer in layers)]
    names += [gate_file_name(layer) for layer in layers if manifest.config.zeros_gates]
    names += [expert_file_name(layer) for layer in manifest.config.expert_layers]
    names += [PER_LAYER] if manifest.config.has_inputs_table else []
    return sha256_hex(canonical_json([manifest.files[name].sha256 for name in names]))


def no_streams(config: ModelConfig) -> str:
    """The reason why a model that isn't `ModelConfig.is_plain` has no streams, which names some of its
    blocks.
    """
    blocks = {
        "per-layer inputs": config.per_layer_width > 0,
        "copies of the residual": config.residual_copies > 1,
        "low-rank blocks beside attention": config.any_layer(lambda layer: layer.laurel_rank > 0),
        "layers that scale the residual": config.any_layer(lambda layer: layer.scaled),
        "normed values": config.any_layer(lambda layer: layer.attention.value_norm),
        "latent attention": config.any_layer(lambda layer: layer.attention.latent is not None),
        "attention sinks": config.any_layer(lambda layer: layer.attention.sinks),
        "gated attention": config.any_layer(lambda layer: layer.attention.gated),
        "recurrent layers": bool(config.recurrent_layers),
        "factors of attention's output": config.any_layer(lambda layer: layer.attention.out_factor != 1.0),
        "keys that layers share": config.num_kv_layers < config.num_layers,
        "heads of several sizes": config.any_layer(
            lambda layer: layer.attention.head_dim > 0 or layer.attention.num_kv_heads > 0
        ),
        "values narrower than keys": config.any_layer(lambda layer: layer.attention.value_dim > 0),
        "statistical cutoffs": bool(config.cut_off_layers),
        "experts": config.experts is not None,
        "no feed-forward": config.any_layer(lambda layer: not layer.has_feed_forward),
    }
    *names, last = (name for name, holds in blocks.items() if holds)
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"streams are trained through one residual and layers without {listed}, which this model has"


def check_sidecar_possible(sidecar: Sidecar, config: ModelConfig) -> None:
    """Check that the model can have a sidecar. Raises BundleError if its blocks rule it out."""
    if sidecar.key in ("ngrams", "eagle", "dflash", "mtp"):
        return
    of_experts = sidecar.key in ("expert_costs", "expert_use")
    if config.experts is None and of_experts:
        raise BundleError(f"{sidecar.manifest} is there, but this model has no experts: delete it")
    if config.experts is not None and not of_experts:
        raise BundleError(f"{sidecar.manifest} is there, but {NO_SIDECARS}: delete it")
    if sidecar.key == "streams" and not config.is_plain:
        raise BundleError(f"{sidecar.manifest} is there, but {no_streams(config)}: delete it")
    if sidecar.key == "predictors" and config.cut_off_layers:
        raise BundleError(f"{sidecar.manifest} is there, but {NO_PREDICTORS}: delete it")


def sidecar_text(sidecar: Sidecar, content: Mapping[str, Any]) -> bytes:
    """The bytes of the JSON file. `part_of` is written only in slices."""
    content = {name: it for name, it in content.items() if name != "part_of" or it}
    document = {sidecar.key: content, "sha256": sha256_hex(canonical_json(content))}
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"


def read_sidecar(sidecar: Sidecar, folder: Path) -> bytes | None:
    """The JSON file's bytes, None if there is none. Raises BundleError if it can't be read or is too big."""
    if not os.path.lexists(folder / sidecar.manifest):
        return None
    return read_file(contained(folder, sidecar.manifest), MAX_JSON_BYTES)


def parse_sidecar(sidecar: Sidecar, data: bytes) -> Section:
    """The content of the JSON file, without the facts.

    Raises BundleError if it doesn't match its own sha256, or has other facts.
    """
    document = Section(parse_json(data, sidecar.manifest), sidecar.manifest)
    content = document.get(sidecar.key)
    if document.get("sha256") != sha256_hex(canonical_json(content)):
        raise BundleError(f"{sidecar.manifest} doesn't match its own sha256: it was damaged or edited")
    document.close()
    section = Section(content, sidecar.key)
    for name, value in sidecar.facts.items():
        section.equal(name, value)
    return section


def part_rule(config: ModelConfig) -> dict[str, Rule]:
    """The rule for the field `part_of`, the hash of the complete model's sidecar. Empty unless the config is
    a slice.
    """
    return {"part_of": SHA256} if config.part != FULL_MODEL else {}


def read_bits(section: Section, key: str) -> int:
    """The number of bits of a sidecar's codes; 16 stands for plain float16. Raises BundleError."""
    bits = section.integer(key, 1, 64)
    if bits not in (4, 8, 16):
        raise BundleError(f"{section.where}.{key} is {bits}; it must be 4, 8 or 16")
    return bits


def require_weights(sidecar: Sidecar, manifest: Manifest, model: str) -> None:
    """Check which weights a sidecar was made for. Raises BundleError if they aren't this bundle's."""
    if model != weights_digest(manifest):
        raise BundleError(f"{sidecar.manifest} was made for other weights than these")


def check_sidecar(
    sidecar: Sidecar, manifest: Manifest, model: str, layout: FileLayout, crcs: Sequence[int]
) -> None:
    """Check a sidecar. Raises BundleError if it is for other weights or has the wrong number of checksums."""
    require_weights(sidecar, manifest, model)
    expected = layout.crc_count(layout.nbytes or 0)
    if len(crcs) != expected:
        raise BundleError(f"{sidecar.manifest} has {len(crcs)} checksums; it needs {expected}")


def check_tensors(sidecar: Sidecar, folder: Path, layout: FileLayout) -> int:
    """Size in bytes of the file of tensors. Raises BundleError if size or header differ from `layout`."""
    path = contained(folder, sidecar.tensors)
    nbytes = path.stat().st_size
    if nbytes != layout.nbytes or read_range(path, 0, len(layout.header)) != layout.header:
        raise BundleError(
            f"{sidecar.tensors} isn't the {layout.nbytes} bytes that {sidecar.manifest} describes"
        )
    return nbytes
