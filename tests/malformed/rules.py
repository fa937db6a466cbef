"""One broken bundle per rule of the format: how to break a sound one, and what the reader must say."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.errors import BundleError, ModelNotFoundError, OndeviceError, UnsupportedModelError
from ondevice.kernels import _native

RESIDENT = "resident.safetensors"
EMBEDDING = "embedding.safetensors"
NEURONS = "neurons-00001.safetensors"
STORED = {"bits": 4, "group_size": 32, "bias": "stored"}
TILED = {"bits": 4, "group_size": 32, "scales": "two_level"}


@dataclass(frozen=True)
class Rule:
    """`break_bundle` spoils the bundle in a folder; opening it must raise `error` matching `message`."""

    name: str
    break_bundle: Callable[[Path], None]
    message: str
    error: type[OndeviceError] = BundleError


def canonical(manifest: object) -> bytes:
    """The canonical form, spelt out here a second time on purpose."""
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def sealed(manifest: object) -> bytes:
    """A `bundle.json` whose sha256 matches."""
    document = {"manifest": manifest, "sha256": hashlib.sha256(canonical(manifest)).hexdigest()}
    return json.dumps(document).encode()


def seal(folder: Path, manifest: object) -> None:
    """Writes `bundle.json` with a sha256 that matches."""
    (folder / "bundle.json").write_bytes(sealed(manifest))


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / "bundle.json").read_text())["manifest"]


def _block_bytes(name: str) -> int:
    """Bytes that a checksum covers in a file without records."""
    return 16 << 10 if name == "resident.safetensors" else 1 << 20


def reseal(folder: Path, *names: str) -> None:
    """Makes the hashes of these files, of the checksum table and of the manifest true again."""
    manifest = manifest_of(folder)
    table = np.fromfile(folder / "checksums.bin", "<u4")
    for name in names:
        entry = manifest["files"][name]
        layout = manifest.get(name.split("-")[0].removesuffix(".safetensors"))
        data = np.fromfile(folder / name, np.uint8)
        checked, units = (
            (data, (_block_bytes(name),)) if layout is None else (data[4096:], tuple(layout["part_bytes"]))
        )
        first = entry["crc"]["offset"]
        table[first : first + entry["crc"]["count"]] = _native.crc32c(checked, units)
        entry["sha256"] = hashlib.sha256(data.tobytes()).hexdigest()
    (folder / "checksums.bin").write_bytes(table.tobytes())
    manifest["files"]["checksums.bin"]["sha256"] = hashlib.sha256(table.tobytes()).hexdigest()
    seal(folder, manifest)


LAYER = ("model", "layers", 0)
DELTA = {"key_heads": 2, "value_heads": 4, "key_width": 16, "value_width": 16, "taps": 4}
CONV = {"channels": 16, "taps": 3}
EXPERTS: dict[str, Any] = {
    "count": 4, "chosen": 2, "neurons": 8, "scoring": "softmax", "renormalised": False, "factor": 1.0,
}  # fmt: skip
INFILL = {"prefix": 1, "suffix": 2, "repository": None, "file": None, "ends": [1, 2]}
NEURON_COUNT = (*LAYER, "feed_forward", "neurons")
FREQUENCIES = ("model", "ropes", 0, "frequencies")


def put(*path: str | int, value: Any) -> Callable[[Path], None]:
    """Sets one value of the manifest and seals it."""

    def break_bundle(folder: Path) -> None:
        manifest = manifest_of(folder)
        target = manifest
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        seal(folder, manifest)

    return break_bundle


def with_neurons(count: int) -> Callable[[Path], None]:
    """Says everywhere but in the files' own entries that the first layer has `count` neurons."""

    def break_bundle(folder: Path) -> None:
        manifest = manifest_of(folder)
        manifest["model"]["layers"][0]["feed_forward"]["neurons"] = count
        for records in ("neurons", "gates"):
            manifest[records]["num_records"] = [count, 96]
        seal(folder, manifest)

    return break_bundle


def grow_layers(folder: Path) -> None:
    """Adds a layer for which there are no files."""
    manifest = manifest_of(folder)
    manifest["model"]["layers"].append(manifest["model"]["layers"][0])
    seal(folder, manifest)


def with_silu(folder: Path) -> None:
    """Names another activation for all layers."""
    manifest = manifest_of(folder)
    for layer in manifest["model"]["layers"]:
        layer["feed_forward"]["activation"] = "silu"
    seal(folder, manifest)


def drop(*path: str) -> Callable[[Path], None]:
    """Removes one key of the manifest and seals it."""

    def break_bundle(folder: Path) -> None:
        manifest = manifest_of(folder)
        target = manifest
        for key in path[:-1]:
            target = target[key]
        del target[path[-1]]
        seal(folder, manifest)

    return break_bundle


def text(content: bytes) -> Callable[[Path], None]:
    """Replaces `bundle.json`."""
    return lambda folder: (folder / "bundle.json").write_bytes(content) and None


def replace_in_manifest(old: bytes, new: bytes) -> Callable[[Path], None]:
    def break_bundle(folder: Path) -> None:
        content = (folder / "bundle.json").read_bytes()
        assert old in content
        (folder / "bundle.json").write_bytes(content.replace(old, new, 1))

    return break_bundle


def overwrite(name: str, offset: int, data: bytes) -> Callable[[Path], None]:
    def break_bundle(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return break_bundle


def resize(name: str, change: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size + change)


def replace_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def break_bundle(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return break_bundle


def link_outside(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_bytes(bytes(22528))
    path.symlink_to(outside)


def resident_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Rewrites the resident file's header at the same length."""

    def break_bundle(folder: Path) -> None:
        with (folder / RESIDENT).open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            change(header)
            file.seek(8)
            file.write(json.dumps(header, separators=(",", ":")).encode().ljust(length))

    return break_bundle


def resized_consistently(folder: Path) -> None:
    """A file that disk and manifest agree about, but which the model doesn't need at that size."""
    with (folder / NEURONS).open("ab") as file:
        file.write(bytes(192))
    put("files", NEURONS, "bytes", value=22528 + 192)(folder)


QUERIES = "layers.0.attention.q"
MODEL_BYTES = b'"hidden_size": 64'
CONVERT_AGAIN = "convert the model again"

RULES = (
    Rule("no manifest", lambda f: (f / "bundle.json").unlink(), "ondevice convert", ModelNotFoundError),
    Rule("manifest is a folder", replace_file("bundle.json", lambda p: p.mkdir()), "isn't a regular file"),
    Rule("manifest is a pipe", replace_file("bundle.json", os.mkfifo), "isn't a regular file"),
    Rule("manifest too long", text(b" " * ((1 << 20) + 1)), "limit is 1048576"),
    Rule("manifest endless", resize("bundle.json", 1 << 26), "limit is 1048576"),
    Rule("manifest empty", text(b""), "isn't valid JSON"),
    Rule("manifest long number", text(b'{"manifest": 1' + b"0" * 5000 + b"}"), "a number has thousands"),
    Rule("manifest cut", text(b'{"manifest": {'), "isn't valid JSON"),
    Rule("manifest not UTF-8", text(b'{"manifest": "\xff"}'), "isn't valid JSON"),
    Rule("manifest in UTF-16", text('{"manifest": 1}'.encode("utf-16")), "isn't valid JSON"),
    Rule("nesting", text(b"[" * 17 + b"]" * 17), "nests deeper"),
    Rule("deep nesting", text(b"[" * 900_000), "nests deeper"),
    Rule("NaN", replace_in_manifest(b"1e-05", b"NaN"), "not a number"),
    Rule("infinity", replace_in_manifest(b"1e-05", b"-Infinity"), "not a number"),
    Rule("float overflow", replace_in_manifest(b"1e-05", b"1e999"), "not a finite number"),
    Rule(
        "integer of 5000 digits", replace_in_manifest(MODEL_BYTES, b'"hidden_size": ' + b"9" * 5000), "JSON"
    ),
    Rule("repeated key", replace_in_manifest(MODEL_BYTES, MODEL_BYTES + b", " + MODEL_BYTES), "twice"),
    Rule("not an object", text(b"[1]"), "must be an object"),
    Rule("no sha256", text(b'{"manifest": {}}'), "lacks 'sha256'"),
    Rule(
        "edited without a new sha256",
        replace_in_manifest(MODEL_BYTES, b'"hidden_size": 65'),
        "its own sha256",
    ),
    Rule("unknown key beside the manifest", replace_in_manifest(b"{", b'{"x": 1,'), "unknown key 'x'"),
    Rule("another format", put("format", value="gguf"), "manifest.format"),
    Rule("version 2", put("version", value=2), "version 2; .*convert --force", UnsupportedModelError),
    Rule("version 4", put("version", value=4), "version 4", UnsupportedModelError),
    Rule("version true", put("version", value=True), "manifest.version"),
    Rule("unknown key", put("extra", value=1), "unknown key 'extra'"),
    Rule("missing key", drop("provenance"), "lacks 'provenance'"),
    Rule("unknown model key", put("model", "num_experts", value=8), "unknown key 'num_experts'"),
    Rule("missing model key", drop("model", "norm"), "lacks 'norm'"),
    Rule("size as text", put("model", "hidden_size", value="64"), "model.hidden_size"),
    Rule("size as float", put("model", "hidden_size", value=64.0), "model.hidden_size"),
    Rule("size as bool", put("model", "num_kv_heads", value=True), "model.num_kv_heads"),
    Rule("size zero", put("model", "num_heads", value=0), "model.num_heads"),
    Rule("size negative", put("model", "vocab_size", value=-1), "model.vocab_size"),
    Rule("size huge", put("model", "hidden_size", value=1 << 70), "model.hidden_size"),
    Rule(
        "size above the limit",
        put("model", "hidden_size", value=1 << 20),
        "hidden_size",
        UnsupportedModelError,
    ),
    Rule("another size", put("model", "intermediate_size", value=97), "manifest.neurons"),
    Rule("more heads", put("model", "num_heads", value=8), f"{RESIDENT} has 19200 bytes"),
    Rule("untied", put("model", "tie_embeddings", value=False), f"{RESIDENT} has 19200 bytes"),
    Rule("flag as number", put("model", "tie_embeddings", value=1), "model.tie_embeddings"),
    Rule(
        "activation",
        put(*LAYER, "feed_forward", "activation", value="swish"),
        "activation",
        UnsupportedModelError,
    ),
    Rule("gated as number", put(*LAYER, "feed_forward", "gated", value=0), "feed_forward.gated"),
    Rule("threshold infinite", put(*LAYER, "feed_forward", "threshold", value=1e300), "threshold"),
    Rule(
        "threshold of relu",
        put(*LAYER, "feed_forward", "threshold", value=0.5),
        "has no threshold",
        UnsupportedModelError,
    ),
    Rule(
        "activation of ups",
        put(*LAYER, "feed_forward", "up_activation", value="silu"),
        "up_activation 'silu'",
        UnsupportedModelError,
    ),
    Rule(
        "bias of gated neurons",
        put(*LAYER, "feed_forward", "bias", value=True),
        "gates have biases",
        UnsupportedModelError,
    ),
    Rule(
        "neurons zero",
        put(*NEURON_COUNT, value=0),
        "neurons.num_records",
    ),
    Rule("neurons negative", put(*NEURON_COUNT, value=-96), "feed_forward.neurons"),
    Rule("neurons as bool", put(*NEURON_COUNT, value=True), "feed_forward.neurons"),
    Rule("neurons as text", put(*NEURON_COUNT, value="96"), "feed_forward.neurons"),
    Rule("neurons as float", put(*NEURON_COUNT, value=96.0), "feed_forward.neurons"),
    Rule("neurons null", put(*NEURON_COUNT, value=None), "feed_forward.neurons"),
    Rule("neurons huge", put(*NEURON_COUNT, value=1 << 40), "feed_forward.neurons"),
    Rule("neurons other than records", put(*NEURON_COUNT, value=95), "neurons.num_records"),
    Rule("records listed where equal", put("neurons", "num_records", value=[96, 96]), "num_records"),
    Rule("neurons and records of no file", with_neurons(95), "neurons-00000.safetensors has .* bytes"),
    Rule("more neurons than are there", with_neurons(1 << 20), "neurons-00000.safetensors has .* bytes"),
    Rule(
        "feed-forward key unknown",
        put(*LAYER, "feed_forward", "experts", value=8),
        "unknown key 'experts'",
    ),
    Rule("odd head_dim", put("model", "head_dim", value=15), "head_dim", UnsupportedModelError),
    Rule("epsilon zero", put("model", "norm", "eps", value=0.0), "eps", UnsupportedModelError),
    Rule("epsilon above 1", put("model", "norm", "eps", value=1.5), "model.norm.eps"),
    Rule("norm kind", put("model", "norm", "kind", value="batch"), "batch", UnsupportedModelError),
    Rule("frequency as text", put(*FREQUENCIES, 1, value="1e-4"), "ropes.0..frequencies"),
    Rule("frequency above 1", put(*FREQUENCIES, 1, value=1.5), "ropes.0..frequencies"),
    Rule("frequency of no number", put(*FREQUENCIES, value=[None] * 8), "frequencies"),
    Rule(
        "frequencies too few",
        put(*FREQUENCIES, value=[1.0] * 7),
        "7 frequencies for 8 pairs",
        UnsupportedModelError,
    ),
    Rule("delta unknown key", put(*LAYER, "delta", value={**DELTA, "x": 1}), "delta.*x"),
    Rule("delta without heads", put(*LAYER, "delta", value={**DELTA, "key_heads": 0}), "delta.key_heads"),
    Rule("delta endless", put(*LAYER, "delta", value={**DELTA, "key_width": 1 << 40}), "delta.key_width"),
    Rule("delta of one tap", put(*LAYER, "delta", value={**DELTA, "taps": 1}), "delta.taps"),
    Rule("delta beside attention", put(*LAYER, "delta", value=DELTA), "no attention", UnsupportedModelError),
    Rule(
        "delta heads apart",
        put(*LAYER, "delta", value={**DELTA, "value_heads": 3}),
        "multiple of key_heads",
        UnsupportedModelError,
    ),
    Rule("conv unknown key", put(*LAYER, "conv", value={**CONV, "x": 1}), "conv.*x"),
    Rule("conv of one tap", put(*LAYER, "conv", value={**CONV, "taps": 1}), "conv.taps"),
    Rule("conv endless", put(*LAYER, "conv", value={**CONV, "channels": 1 << 40}), "conv.channels"),
    Rule("conv beside attention", put(*LAYER, "conv", value=CONV), "no attention", UnsupportedModelError),
    Rule("experts unknown key", put(*LAYER, "experts", value={**EXPERTS, "x": 1}), "experts.*x"),
    Rule("experts none", put(*LAYER, "experts", value={**EXPERTS, "count": 0}), "experts.count"),
    Rule("experts endless", put(*LAYER, "experts", value={**EXPERTS, "count": 1 << 40}), "experts.count"),
    Rule("experts factor", put(*LAYER, "experts", value={**EXPERTS, "factor": 1e9}), "experts.factor"),
    *(
        Rule(f"experts {name}", put(*LAYER, "experts", value=EXPERTS | values), says, UnsupportedModelError)
        for name, values, says in (
            ("chosen beyond", {"chosen": 5}, "chosen is 5"),
            ("scoring", {"scoring": "random"}, "scoring 'random'"),
            ("of uneven groups", {"groups": 3, "chosen_groups": 2}, "groups"),
            ("of too few groups", {"groups": 2, "chosen": 3}, "groups"),
            ("layout", {"layout": "rows"}, "layout 'rows'"),
            ("of relu as matrices", {"count": 1, "chosen": 1, "neurons": 96}, "are stored as 'neurons'"),
            ("biases of neurons", {"layout": "neurons", "bias": True}, "only those stored as matrices"),
            ("jitter", {"jitter": 0.1}, "has no jitter"),
            ("sparsemixer", {"scoring": "sparsemixer", "chosen": 3}, "sparsemixer chooses 2"),
            ("wider than the layer", {"count": 4096, "neurons": 1 << 20}, "a layer's experts have"),
            (
                "shared gate alone",
                {"count": 1, "chosen": 1, "neurons": 96, "shared_gate": True},
                "gate or a norm of shared",
            ),
        )
    ),
    Rule("ropes none", put("model", "ropes", value=[]), "at least one rope", UnsupportedModelError),
    Rule(
        "original context without long frequencies",
        put("model", "ropes", 0, "original_context", value=8),
        "original_context is 8",
        UnsupportedModelError,
    ),
    Rule(
        "long frequencies of other pairs",
        put("model", "ropes", 0, "long_frequencies", value=[0.0] * 8),
        "turn other pairs",
        UnsupportedModelError,
    ),
    Rule(
        "original context beyond the model's",
        put(
            "model",
            "ropes",
            0,
            value={"frequencies": [0.5] * 8, "magnitude": 1.0}
            | {"original_context": 1 << 20, "long_frequencies": [0.1] * 8},
        ),
        "below max_context",
        UnsupportedModelError,
    ),
    Rule(
        "rope that isn't there",
        put("model", "layers", 1, "attention", "rope", value=1),
        "rope is 1",
        UnsupportedModelError,
    ),
    Rule("architecture unprintable", put("model", "architecture", value="a\nb"), "model.architecture"),
    Rule("architecture empty", put("model", "architecture", value=""), "model.architecture"),
    Rule("layers none", put("model", "layers", value=[]), "num_layers is 0", UnsupportedModelError),
    Rule("layers too many", put("model", "layers", value=[{}] * 1025), "model.layers"),
    Rule("layer of no object", put("model", "layers", 1, value=5), "layers.1. must be an object"),
    Rule("layers more than files", grow_layers, "files lacks .neurons-00002"),
    Rule("window negative", put(*LAYER, "attention", "window", value=-1), "attention.window"),
    Rule(
        "head norm",
        put(*LAYER, "attention", "head_norm", value="all"),
        "'all'",
        UnsupportedModelError,
    ),
    Rule("scale zero", put(*LAYER, "attention", "scale", value=0), "scale", UnsupportedModelError),
    Rule("scale huge", put(*LAYER, "attention", "scale", value=1e300), "attention.scale"),
    Rule("soft cap negative", put("model", "logit_soft_cap", value=-1.0), "logit_soft_cap"),
    Rule("norm places", put(*LAYER, "norms", value="none"), "norms 'none'", UnsupportedModelError),
    Rule("norm of the residual", put(*LAYER, "norms", value="residual"), "resident"),
    Rule("no norm in the end", put("model", "final_norm", value=False), "resident"),
    Rule("embedding width", put("model", "embedding_width", value=1 << 18), "262144", UnsupportedModelError),
    Rule("embedding width negative", put("model", "embedding_width", value=-1), "embedding_width"),
    Rule("embedding of another width", put("model", "embedding_width", value=64), "manifest"),
    Rule("parallel as number", put(*LAYER, "parallel", value=1), "parallel"),
    Rule(
        "layers with other activations",
        put(*LAYER, "feed_forward", "activation", value="silu"),
        "different feed-forwards",
        UnsupportedModelError,
    ),
    Rule("bits 3", put("quantisation", "bits", value=3), "3 bits", UnsupportedModelError),
    Rule("bits 8", put("quantisation", "bits", value=8), "manifest.neurons"),
    *(
        Rule(f"matrices {name}", put("quantisation", "matrices", value=value), message, error)
        for name, value, message, error in (
            ("empty", {}, "matrices is empty", BundleError),
            ("unknown kind", {"down": STORED}, "matrices", BundleError),
            ("bits", {"out": STORED | {"bits": 3}}, "3 bits", UnsupportedModelError),
            ("bits 16", {"out": STORED | {"bits": 16}}, "16 bits", UnsupportedModelError),
            ("group", {"out": STORED | {"group_size": 48}}, "groups of 48", UnsupportedModelError),
            ("bias", {"out": STORED | {"bias": "shared"}}, "'shared'", UnsupportedModelError),
            ("MXFP4 of 8 bits", {"out": STORED | {"bias": "none", "bits": 8}}, "MXFP4", BundleError),
            ("MXFP4 in 64s", {"out": STORED | {"bias": "none", "group_size": 64}}, "MXFP4", BundleError),
            ("bias type", {"out": STORED | {"bias": 1}}, "bias", BundleError),
            ("key", {"out": STORED | {"zero": 8}}, "zero", BundleError),
            (
                "scales unknown",
                {"out": TILED | {"scales": "three_level"}},
                "three_level",
                UnsupportedModelError,
            ),
            ("scales of other bits", {"out": TILED | {"bits": 8}}, "8 bits", UnsupportedModelError),
            ("scales type", {"out": TILED | {"scales": 2}}, "scales", BundleError),
            ("scales and bias", {"out": TILED | {"bias": "stored"}}, "bias", BundleError),
            ("tile format of rows", {"feed_forward": TILED}, "only tiles may", BundleError),
            ("columns of attention", {"qkv": TILED}, "qkv has two levels of scales for 64", BundleError),
            (
                "columns of a part",
                {"layers.1.qkv.v": TILED},
                "v has two levels of scales for 64",
                BundleError,
            ),
            ("columns of an output", {"out": TILED}, "out has two levels of scales for 64", BundleError),
            ("columns of an embedding", {"embedding": TILED}, "two levels of scales for 64", BundleError),
            ("needless", {"out": STORED | {"group_size": 64}}, "out is needless", BundleError),
            (
                "needless of a layer",
                {"out": STORED, "layers.1.out": STORED},
                "1.out is needless",
                BundleError,
            ),
            ("no name", {"layers.01.out": STORED}, "names no matrices", BundleError),
            ("of no layer", {"layers.2.out": STORED}, "stores no such matrices", BundleError),
            ("head of a layer", {"layers.1.head": STORED}, "stores no such matrices", BundleError),
            ("part of no projection", {"qkv.z": STORED}, "stores no such matrices", BundleError),
            ("part of another kind", {"out.v": STORED}, "stores no such matrices", BundleError),
            ("neurons of a layer", {"layers.1.feed_forward": STORED}, "in every layer", BundleError),
            (
                "implied in groups of 64",
                {"out": STORED | {"group_size": 64, "bias": "implied"}},
                "only groups of 32",
                BundleError,
            ),
            ("other bits of neurons", {"feed_forward": STORED | {"bits": 8}}, "has 8 bits", BundleError),
            ("embedding", {"embedding": STORED | {"bits": 8}}, "manifest.embedding", BundleError),
            ("resident", {"out": STORED}, "resident.safetensors", BundleError),
            ("no object", [], "must be an object", BundleError),
        )
    ),
    Rule("group size", put("quantisation", "group_size", value=32), "quantisation.group_size"),
    Rule("stride", put("neurons", "stride", value=256), "manifest.neurons"),
    Rule("alignment", put("embedding", "alignment", value=512), "manifest.embedding"),
    Rule("gates missing", drop("gates"), f"manifest lacks 'gates'.*{CONVERT_AGAIN}"),
    Rule(
        "gates null for gates that become zero",
        put("gates", value=None),
        f"gates is None; it must be an object of 4.*'relu'.*{CONVERT_AGAIN}",
    ),
    Rule("records where slices are", with_silu, "manifest.neurons.num_records is 96; it must be 2"),
    Rule("gates stride", put("gates", "stride", value=128), f"manifest.gates.*{CONVERT_AGAIN}"),
    Rule("tokenizer kind", put("tokenizer", "kind", value="bpe"), "tokenizer kind", UnsupportedModelError),
    Rule("tokenizer file", put("tokenizer", "file", value="../tokenizer.model"), "tokenizer.file"),
    Rule(
        "tokenizer not listed", put("tokenizer", "chat_template", value="chat_template.jinja"), "lacks 'chat"
    ),
    Rule(
        "template elsewhere",
        put("tokenizer", "chat_template", value="/etc/passwd"),
        "tokenizer.chat_template",
    ),
    Rule("bos outside the vocabulary", put("tokenizer", "bos_id", value=64), "tokenizer.bos_id"),
    Rule("eos outside the vocabulary", put("tokenizer", "eos_ids", value=[2, 64]), "tokenizer.eos_ids"),
    Rule("too many eos", put("tokenizer", "eos_ids", value=[2] * 65), "tokenizer.eos_ids"),
    Rule("infill without middle", put("tokenizer", "infill", value=INFILL), "infill lacks 'middle'"),
    Rule(
        "infill outside the vocabulary",
        put("tokenizer", "infill", value=INFILL | {"middle": 64}),
        "infill.middle",
    ),
    Rule("infill key", put("tokenizer", "infill", value=INFILL | {"middle": 3, "x": 1}), "unknown key 'x'"),
    Rule("add_bos without bos", put("tokenizer", "bos_id", value=None), "no bos_id"),
    Rule("generation key", put("generation", "num_beams", value=4), "unknown key 'num_beams'"),
    Rule("temperature", put("generation", "temperature", value=-1.0), "generation.temperature"),
    Rule("temperature near 0", put("generation", "temperature", value=1e-9), "can't be sampled with"),
    Rule("top_k as float", put("generation", "top_k", value=1.5), "generation.top_k"),
    Rule("provenance source", put("provenance", "source", value=7), "provenance.source"),
    Rule("provenance error name", put("provenance", "quantisation_error", value={"\x1b[": 0.1}), "the name"),
    Rule("provenance error", put("provenance", "quantisation_error", value={"head": -1}), "error.head"),
    Rule("provenance notes", put("provenance", "notes", value=["x"] * 65), "provenance.notes"),
    Rule("ordered on no text", put("provenance", "ordered_tokens", value=0), "ordered_tokens is 0"),
    Rule("ordered on null", put("provenance", "ordered_tokens", value=None), "ordered_tokens is None"),
    Rule("ordered on a flag", put("provenance", "ordered_tokens", value=True), "ordered_tokens is True"),
    Rule("ordered on huge text", put("provenance", "ordered_tokens", value=1 << 60), "ordered_tokens"),
    Rule("file name climbs out", put("files", "../x", value={}), "unsafe name"),
    Rule("file name absolute", put("files", "/etc/passwd", value={}), "unsafe name"),
    Rule("file name in a folder", put("files", "a/b", value={}), "unsafe name"),
    Rule("file name hidden", put("files", ".x", value={}), "unsafe name"),
    Rule("file name of a code file", put("files", "model.py", value={}), "unknown key 'model.py'"),
    Rule("file not listed", drop("files", NEURONS), "lacks 'neurons-00001"),
    Rule("sha256 too short", put("files", NEURONS, "sha256", value="00"), "sha256"),
    Rule("sha256 in capitals", put("files", NEURONS, "sha256", value="A" * 64), "sha256"),
    Rule("size in the manifest", put("files", NEURONS, "bytes", value=22529), "this model needs 22528"),
    Rule("size in manifest and on disk", resized_consistently, "this model needs 22528"),
    Rule("size of a file huge", put("files", NEURONS, "bytes", value=1 << 60), "bytes"),
    Rule("crc absent", put("files", NEURONS, "crc", value=None), "checksum range None"),
    Rule("crc count", put("files", NEURONS, "crc", value={"offset": 257, "count": 191}), "checksum range"),
    Rule("crc offset", put("files", NEURONS, "crc", value={"offset": 65, "count": 192}), "checksum range"),
    Rule("crc of the table", put("files", "checksums.bin", "crc", value={"offset": 0, "count": 1}), "range"),
    Rule("file cut", resize(NEURONS, -1), "22527 bytes on disk"),
    Rule("file longer", resize(RESIDENT, 1), "19201 bytes on disk"),
    Rule("file missing", lambda f: (f / EMBEDDING).unlink(), "missing"),
    Rule("file is a folder", replace_file(EMBEDDING, lambda p: p.mkdir()), "isn't a regular file"),
    Rule("file is a pipe", replace_file(EMBEDDING, os.mkfifo), "isn't a regular file"),
    Rule("link leaves the bundle", replace_file(NEURONS, link_outside), "leaves the bundle"),
    Rule("link to nothing", replace_file(NEURONS, lambda p: p.symlink_to("nothing")), "missing"),
    Rule("link to itself", replace_file(NEURONS, lambda p: p.symlink_to(p.name)), "can't be reached"),
    Rule("checksums cut", resize("checksums.bin", -4), "2324 bytes on disk"),
    Rule("checksums changed", overwrite("checksums.bin", 9, b"\xaa\xaa"), "checksums.bin doesn't match"),
    Rule("record header length", overwrite(NEURONS, 0, b"\x00\x10"), "safetensors header"),
    Rule("record header huge", overwrite(NEURONS, 0, b"\xff" * 8), "safetensors header"),
    Rule("record header shape", overwrite(NEURONS, 40, b"[48,384"), "safetensors header"),
    Rule("record header padding", overwrite(NEURONS, 4095, b"\n"), "safetensors header"),
    Rule("resident header length", overwrite(RESIDENT, 0, b"\xff" * 8), "safetensors header"),
    Rule("resident header not JSON", overwrite(RESIDENT, 8, b"\x00"), "safetensors header"),
    Rule("tensor missing", resident_header(lambda h: h.pop(QUERIES)), "safetensors header"),
    Rule("tensor renamed", resident_header(lambda h: h.update(x=h.pop(QUERIES))), "safetensors header"),
    Rule("tensor type", resident_header(lambda h: h[QUERIES].update(dtype="I32")), "safetensors header"),
    Rule("tensor shape", resident_header(lambda h: h[QUERIES].update(shape=[8, 288])), "safetensors header"),
    Rule("tensor offsets", resident_header(lambda h: h[QUERIES].update(data_offsets=[0, 4096])), "header"),
    Rule(
        "tensor beyond the file",
        resident_header(lambda h: h[QUERIES].update(data_offsets=[0, 1 << 60])),
        "header",
    ),
)
