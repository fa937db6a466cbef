"""Bundles that an attacker changed and signed again: what is behind the checks must stand alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ondevice.bundle.file_layouts import file_layout
from ondevice.bundle.layout import (
    CHECKSUMS,
    DATA_OFFSET,
    EMBEDDING,
    RESIDENT,
)
from ondevice.bundle.manifest import bundle_files, model_json
from ondevice.bundle.reader import Bundle
from ondevice.config import QuantConfig
from ondevice.errors import OndeviceError
from ondevice.model_config import ModelConfig, RopeSpec
from tests.fuzz import signing, template_cases, tokenizer_cases
from tests.fuzz.bases import Bases
from tests.fuzz.mutations import VALUES, change_json, changed_bytes, changed_header, make_odd
from tests.fuzz.texts import Trial, copied
from tests.malformed.rules import manifest_of, seal
from tests.support.widths import with_widths

MOST_BYTES = 24 << 20
"""Of a bundle that is made up whole; larger ones are sparse files, and not signed."""
BAD_FLOATS = np.array([np.nan, np.inf, -np.inf, 65504, -65504, 6e-8, -6e-8, 0, -0.0, 1e-3, 8], dtype="<f2")
BAD_VECTORS = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0, -0.0, 1e20, 1e-20], dtype="<f4")
SIZES: dict[str, list[int]] = {
    "hidden_size": [2, 8, 64, 72, 128, 1000, 4096, 1 << 17],
    "num_layers": [1, 2, 3, 40, 200, 1 << 11],
    "num_heads": [1, 2, 3, 4, 64, 1 << 10],
    "num_kv_heads": [1, 2, 3, 4, 64, 1 << 10],
    "head_dim": [2, 4, 16, 24, 256, 1 << 10],
    "intermediate_size": [1, 2, 15, 16, 17, 63, 160, 5000, 1 << 20],
    "vocab_size": [1, 2, 17, 300, 384, 70000, 1 << 22],
    "max_context": [1, 2, 16, 63, 64, 256, 4096, 1 << 20, 1 << 24],
}


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A changed bundle in the new folder `folder`/bundle."""
    spoil(copied(rng.choice(bases.bundles), folder / "bundle"), rng, bases)


def spoil(target: Path, rng: random.Random, bases: Bases) -> None:
    """Change the sound bundle or slice in the folder `target`, and sign it again."""
    bundle = Bundle.open(target)
    if rng.random() < 0.15:
        _reshape(target, bundle.config, bundle.quant, rng)
        return
    count = rng.choice([1, 1, 1, 2, 3])
    # What changes values needs files that are sound otherwise.
    changes = sorted(set(rng.choices(_FILE_CHANGES, _FILE_WEIGHTS, k=count)), key=_FILE_CHANGES.index)
    for change in changes:
        change(target, rng, bases)
    if all(change is _nothing for change in changes) or rng.random() < 0.2:
        _change_manifest(target, bundle, rng)
    else:
        signing.sign(target, bundle.config, bundle.quant)
        if rng.random() < 0.25:
            _change_sidecar(target, rng)


def run(folder: Path, rng: random.Random) -> int:
    """Text in two configurations, and now and then every hash."""
    bundle = folder / "bundle"
    if rng.random() < 0.1:
        from ondevice import verify

        verify(bundle)
    return Trial(bundle, rng).run()


def _nothing(folder: Path, rng: random.Random, bases: Bases) -> None:
    """The files stay; the manifest will not."""


def _weights(folder: Path, rng: random.Random, bases: Bases) -> None:
    """Values of records: codes, scales and biases, each as an attacker would choose them."""
    names = [path.name for path in folder.glob("*-000*.safetensors")]
    names += [EMBEDDING] * (folder / EMBEDDING).exists()
    path = folder / rng.choice(sorted(names))
    data = bytearray(path.read_bytes())
    stride = json.loads(data[8:DATA_OFFSET])["records"]["shape"][1]
    count = (len(data) - DATA_OFFSET) // stride
    # A file of a slice may be without records.
    every = rng.random() < 0.3 or not count
    chosen = range(count) if every else [rng.randrange(count) for _ in range(rng.randint(1, 8))]
    value = bytes(rng.choice(BAD_FLOATS).tobytes())
    at = rng.randrange(0, stride, 2)
    for index in chosen:
        start = DATA_OFFSET + index * stride
        if rng.random() < 0.1:
            data[start : start + stride] = rng.randbytes(stride)
        else:
            data[start + at : start + at + 2] = value
    path.write_bytes(data)
    if rng.random() < 0.7:
        _agree(folder, rng.choice(["neurons", "gates"]))


def _agree(folder: Path, master: str) -> None:
    """Gates stand in two places: those of `master` go into the other, so that only values are odd."""
    for gates in sorted(folder.glob("gates-*.safetensors")):
        neurons = folder / gates.name.replace("gates", "neurons")
        files = {"gates": bytearray(gates.read_bytes()), "neurons": bytearray(neurons.read_bytes())}
        shapes = {name: json.loads(data[8:DATA_OFFSET])["records"]["shape"] for name, data in files.items()}
        tables = {
            name: np.frombuffer(data, np.uint8, offset=DATA_OFFSET).reshape(shapes[name])
            for name, data in files.items()
        }
        width = shapes["gates"][1]
        if master == "gates":
            tables["neurons"][:, :width] = tables["gates"]
        else:
            tables["gates"][:] = tables["neurons"][:, :width]
        gates.write_bytes(files["gates"])
        neurons.write_bytes(files["neurons"])


def _resident(folder: Path, rng: random.Random, bases: Bases) -> None:
    """Norms, biases, scales and codes of what is always in memory."""
    path = folder / rng.choice([RESIDENT, *_tensor_sidecars(folder)])
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if not header:
        # Slices behind the streams' last layer have streams without tensors.
        return
    entry = header[rng.choice(sorted(header))]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    kind = {"F32": BAD_VECTORS, "F16": BAD_FLOATS}.get(entry["dtype"])
    width = 4 if kind is None else kind.itemsize
    value = rng.randbytes(width) if kind is None else bytes(rng.choice(kind).tobytes())
    if rng.random() < 0.4:
        data[begin:end] = value * ((end - begin) // width)
    else:
        for _ in range(rng.randint(1, 4)):
            at = begin + width * rng.randrange((end - begin) // width)
            data[at : at + width] = value
    path.write_bytes(data)


def _header(folder: Path, rng: random.Random, bases: Bases) -> None:
    path = folder / rng.choice(sorted(p.name for p in folder.glob("*.safetensors")))
    path.write_bytes(changed_header(path.read_bytes(), rng, keep_length=rng.random() < 0.8))


def _bytes(folder: Path, rng: random.Random, bases: Bases) -> None:
    path = folder / rng.choice(sorted(p.name for p in folder.iterdir() if p.name != "bundle.json"))
    path.write_bytes(changed_bytes(path.read_bytes(), rng))


def _tokenizer(folder: Path, rng: random.Random, bases: Bases) -> None:
    for kind, name in tokenizer_cases.FILES.items():
        if (folder / name).exists():
            (folder / name).write_bytes(tokenizer_cases.made_up(kind, rng, bases))


def _template(folder: Path, rng: random.Random, bases: Bases) -> None:
    if (folder / "chat_template.jinja").exists():
        source = template_cases.made_up(rng).encode("utf-8", "surrogatepass")
        (folder / "chat_template.jinja").write_bytes(source)


def _swap(folder: Path, rng: random.Random, bases: Bases) -> None:
    """One file's content under another's name."""
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    first, second = rng.choice(names), rng.choice(names)
    (folder / first).write_bytes((folder / second).read_bytes())


def _odd_file(folder: Path, rng: random.Random, bases: Bases) -> None:
    """What isn't a file, or isn't here."""
    make_odd(folder / rng.choice(sorted(p.name for p in folder.iterdir() if p.name != "bundle.json")), rng)


_FILE_CHANGES: list[Callable[[Path, random.Random, Bases], None]] = [
    _nothing, _weights, _resident, _tokenizer, _template, _swap, _header, _bytes, _odd_file,
]  # fmt: skip
_FILE_WEIGHTS = [25, 20, 20, 8, 4, 4, 8, 6, 4]


def _tensor_sidecars(folder: Path) -> list[str]:
    names = [name.replace(".json", ".safetensors") for name in signing.SIDECARS]
    return [name for name in names if (folder / name).is_file()]


def _change_manifest(folder: Path, bundle: Bundle, rng: random.Random) -> None:
    """Values of the manifest; what follows from the model's shape is made to follow, more often than not."""
    try:
        manifest = signing.sign_files(folder, bundle.config, bundle.quant)
    except (OSError, ValueError):
        manifest = manifest_of(folder)
    for _ in range(rng.choice([1, 1, 2, 4])):
        section = rng.choice(
            ["model", "model", "model", "tokenizer", "generation", "files", "provenance", ""]
        )
        change_json(manifest, rng, (section,) if section in manifest else ())
    if rng.random() < 0.1 and isinstance(manifest.get("files"), dict):
        _overlap(manifest["files"], rng)
    document = {"manifest": manifest, "sha256": signing.sha256(signing.canonical(manifest))}
    if rng.random() < 0.05:
        change_json(document, rng)
    (folder / "bundle.json").write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))


def _overlap(files: dict[str, Any], rng: random.Random) -> None:
    """Checksums that lie elsewhere in the table, or beyond it."""
    entry = rng.choice([value for value in files.values() if isinstance(value, dict)] or [{}])
    crc = entry.get("crc")
    if isinstance(crc, dict):
        crc[rng.choice(["offset", "count"])] = rng.choice([0, 1, 5, 1 << 20, 1 << 27, 1 << 40])


def _change_sidecar(folder: Path, rng: random.Random) -> None:
    """Values of a sidecar's JSON file, sealed again."""
    name = rng.choice(sorted(signing.SIDECARS))
    content = signing.sidecar_content(folder, name)
    if not content:
        return
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.8:
            change_json(content, rng)
        else:
            content[rng.choice(sorted(content))] = rng.choice(VALUES)
    signing.seal_sidecar(folder, name, content)


def _reshape(folder: Path, config: ModelConfig, quant: QuantConfig, rng: random.Random) -> None:
    """A model of another shape, everything about it made to fit."""
    tokenizer = Bundle.open(folder).manifest.tokenizer
    try:
        for _ in range(rng.choice([1, 1, 2, 3])):
            name = rng.choice(sorted(SIZES))
            config = _resized(config, name, rng.choice(SIZES[name]), rng)
        if rng.random() < 0.3:
            sizes = [None, *SIZES["intermediate_size"]]
            config = with_widths(config, [rng.choice(sizes) for _ in config.layers[:3]])
        if rng.random() < 0.3:
            quant = QuantConfig(cast(Any, rng.choice([4, 8, 16])))
        layouts = {
            name: file_layout(name, config, quant)
            for name in bundle_files(config, tokenizer)
            if name not in (CHECKSUMS, *tokenizer.files)
        }
    except OndeviceError:
        # Beyond the limits: so the manifest says it, and nothing more.
        manifest = manifest_of(folder)
        name = rng.choice(sorted(SIZES))
        manifest["model"][name] = rng.choice(SIZES[name])
        seal(folder, manifest)
        return
    for path in folder.glob("*.safetensors"):
        path.unlink()
    total = sum(layout.nbytes or 0 for layout in layouts.values())
    whole = total <= MOST_BYTES
    for name, layout in layouts.items():
        with (folder / name).open("wb") as file:
            file.write(layout.header)
            nbytes = (layout.nbytes or 0) - len(layout.header)
            if whole:
                # Halves of small size: their high bytes are those of numbers near 0.01.
                content = np.random.default_rng(rng.randrange(1 << 32)).integers(0, 256, nbytes, np.uint8)
                content[1::2] = 0x20
                file.write(content.tobytes())
            else:
                file.truncate(layout.nbytes or 0)
    if whole and config.zeros_gates:
        _agree(folder, "neurons")
    manifest = manifest_of(folder)
    manifest |= model_json(config, quant)
    manifest["tokenizer"] |= {"eos_ids": [], "bos_id": None, "add_bos": False}
    wanted = (*layouts, *tokenizer.files)
    manifest["files"] = {name: manifest["files"].get(name) for name in (*wanted, CHECKSUMS)}
    if whole:
        _sign_reshaped(folder, manifest, config, quant)
    else:
        _claim_sizes(folder, manifest, layouts)
    for name in signing.SIDECARS:
        (folder / name).unlink(missing_ok=True)


def _resized(config: ModelConfig, name: str, size: int, rng: random.Random) -> ModelConfig:
    if name == "num_layers":
        layer = config.layers[0]
        window = rng.choice([0, 0, 1, 7, 1 << 20])
        return replace(
            config, layers=(replace(layer, attention=replace(layer.attention, window=window)),) * size
        )
    changes: dict[str, Any] = {name: size}
    if name == "head_dim":
        changes["ropes"] = (RopeSpec((0.5,) * (size // 2)),)
    if name == "num_heads" and size % config.num_kv_heads:
        changes["num_kv_heads"] = 1
    if name == "num_kv_heads":
        changes["num_heads"] = size * rng.choice([1, 1, 2])
    return replace(config, **changes)


def _sign_reshaped(folder: Path, manifest: Any, config: ModelConfig, quant: QuantConfig) -> None:
    placeholder = {"bytes": 0, "sha256": "0" * 64, "crc": {"offset": 0, "count": 0}}
    manifest["files"] = {name: entry or placeholder for name, entry in manifest["files"].items()}
    seal(folder, manifest)
    signing.sign(folder, config, quant)


def _claim_sizes(folder: Path, manifest: Any, layouts: dict[str, Any]) -> None:
    """Sizes and counts that fit; the hashes and checksums don't, which only reading would show."""
    offset = 0
    for name in [*layouts, *[n for n in manifest["files"] if n not in layouts and n != CHECKSUMS]]:
        nbytes = (folder / name).stat().st_size
        layout = layouts.get(name)
        count = 1 if layout is None else layout.crc_count(nbytes)
        manifest["files"][name] = {
            "bytes": nbytes, "sha256": "0" * 64, "crc": {"offset": offset, "count": count},
        }  # fmt: skip
        offset += count
    with (folder / CHECKSUMS).open("wb") as file:
        file.truncate(4 * offset)
    # As long as the reader itself would read it; beyond that, any hash does.
    digest = signing.sha256(bytes(4 * offset)) if offset < 1 << 24 else "0" * 64
    manifest["files"][CHECKSUMS] = {"bytes": 4 * offset, "sha256": digest, "crc": None}
    seal(folder, manifest)
