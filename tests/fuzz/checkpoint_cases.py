"""Checkpoints for `convert`: configuration, headers, shards, tokenizers, weights; and what comes of them."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ondevice
from ondevice.converters.convert import convert
from ondevice.errors import OndeviceError
from ondevice.units import process_memory
from tests.fuzz import template_cases, tokenizer_cases
from tests.fuzz.bases import Bases
from tests.fuzz.mutations import (
    NUMBERS,
    change_json,
    changed_bytes,
    changed_header,
    changed_json,
    is_plain,
    json_bytes,
    make_odd,
)
from tests.fuzz.outcomes import Difference
from tests.fuzz.texts import Trial, copied
from tests.support.gguf_models import changed_gguf

CONVERT_BYTES = 128 << 20
"""Above what the process has: blocks of three stages, on every core."""
SHARD_NAMES = [
    "../model.safetensors", "/etc/passwd", "", ".", "..", "a" * 300, "\udcff.safetensors", "x\x00y",
    "config.json", "sub/model.safetensors", "model.safetensors ", "CON", "\n", "~", 5, None, [], {},
]  # fmt: skip
CONFIG_KEYS = [
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "max_position_embeddings", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window",
    "max_window_layers", "use_sliding_window", "layer_types", "hidden_act", "tie_word_embeddings",
    "attention_bias", "rope_scaling", "rope_parameters", "torch_dtype", "quantization_config", "model_type",
    "architectures", "bos_token_id", "eos_token_id", "mlp_bias", "pretraining_tp", "attention_dropout",
    "num_experts", "quantization",
]  # fmt: skip


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A changed checkpoint in the new folder `folder`/source."""
    source = copied(rng.choice(bases.checkpoints), folder / "source")
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if all(map(is_plain, source.iterdir())) and (source / "config.json").exists():
            _change_folder(source, rng, bases)
        elif is_plain(source / "model.gguf"):
            _change_gguf(source / "model.gguf", rng)
        else:
            _change_llama2c(source, rng)


def run(folder: Path, rng: random.Random) -> int:
    """Convert; what comes of it must verify and speak, alike in two configurations."""
    allowed = process_memory().current_bytes + CONVERT_BYTES
    source: Path = folder / "source"
    if source.is_dir() and rng.random() < 0.05:
        source = next(iter(sorted(source.iterdir())), source)
    try:
        # Anew, so that a case that was kept can be tried again.
        output = Path(tempfile.mkdtemp(dir=folder)) / "bundle"
        made = convert(source, output, rng.choice(["auto", "q4", "q8", "f16"]))
        ondevice.verify(made)
    except OndeviceError as error:
        error.allowed_bytes = allowed  # type: ignore[attr-defined]
        raise
    try:
        return max(allowed, Trial(made, rng).run())
    except OndeviceError as error:
        # What convert accepts must be able to say something.
        raise Difference(f"converted, but refused by load: {type(error).__name__}: {error}") from error


def _change_folder(source: Path, rng: random.Random, bases: Bases) -> None:
    how = rng.random()
    if how < 0.3:
        path = source / "config.json"
        config = _json(path)
        if isinstance(config, dict) and rng.random() < 0.6:
            value = rng.choice(NUMBERS) if rng.random() < 0.5 else config.get(rng.choice(CONFIG_KEYS))
            config[rng.choice(CONFIG_KEYS)] = value
        elif config is not None:
            change_json(config, rng)
        path.write_bytes(json_bytes(config, rng))
    elif how < 0.5:
        path = rng.choice(sorted(source.glob("*.safetensors")) or [source / "config.json"])
        change_tensors(path, rng)
    elif how < 0.65:
        _tokenizer(source, rng, bases)
    elif how < 0.75 and (source / "model.safetensors.index.json").is_file():
        change_index(source / "model.safetensors.index.json", rng)
    elif how < 0.85:
        path = rng.choice(sorted(p for p in source.iterdir() if p.is_file()))
        data = path.read_bytes()
        path.write_bytes(changed_json(data, rng) if path.suffix == ".json" else changed_bytes(data, rng))
    elif how < 0.93:
        template = template_cases.made_up(rng)
        settings = _json(source / "tokenizer_config.json")
        if isinstance(settings, dict):
            settings["chat_template"] = template
            (source / "tokenizer_config.json").write_bytes(json_bytes(settings, rng))
        else:
            (source / "chat_template.jinja").write_text(template, errors="replace")
    else:
        make_odd(rng.choice(sorted(source.iterdir())), rng)


def change_tensors(path: Path, rng: random.Random) -> None:
    """Change a safetensors file's header, or values of a tensor as an attacker would choose them."""
    data = path.read_bytes()
    if rng.random() < 0.5 or len(data) < 100:
        path.write_bytes(changed_header(data, rng))
        return
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        entry = header[rng.choice(sorted(name for name in header if name != "__metadata__"))]
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        path.write_bytes(changed_bytes(data, rng))
        return
    # Numbers of the file's own type: not finite, huge, tiny, all equal.
    single = np.array([np.nan, np.inf, -np.inf, 3e38, 1e-45, 0.0, 1e10, 1.0], "<f4")
    value = {
        "F32": single, "F16": np.array([np.nan, np.inf, 65504, 6e-8, 0], "<f2"),
        "BF16": (single.view("<u4") >> 16).astype("<u2"), "U8": np.arange(256, dtype="u1"),
        "I64": np.array([-(1 << 63), (1 << 63) - 1, -1, 0, 1, 100, 1 << 32], "<i8"),
        "BOOL": np.arange(3, dtype="u1"),
    }.get(entry["dtype"], single)  # fmt: skip
    unit = bytes(rng.choice(value).tobytes())
    content = bytearray(data)
    if rng.random() < 0.5:
        content[begin:end] = unit * ((end - begin) // len(unit))
    else:
        content[begin : begin + len(unit)] = unit
    path.write_bytes(content)


def _tokenizer(source: Path, rng: random.Random, bases: Bases) -> None:
    for kind, name in tokenizer_cases.FILES.items():
        if (source / name).is_file() or rng.random() < 0.2:
            (source / name).write_bytes(tokenizer_cases.made_up(kind, rng, bases))
    if rng.random() < 0.3:
        names = [
            "tokenizer_config.json",
            "generation_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
        ]
        path = source / rng.choice(names)
        value = _json(path) or {"<extra>": 5, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
        change_json(value, rng)
        path.write_bytes(json_bytes(value, rng))


def change_index(path: Path, rng: random.Random) -> None:
    """Other names of files beside tensors."""
    index = _json(path)
    if (
        not isinstance(index, dict)
        or not isinstance(index.get("weight_map"), dict)
        or not index["weight_map"]
    ):
        return
    names = sorted(index["weight_map"])
    if rng.random() < 0.7:
        for name in names if rng.random() < 0.3 else [rng.choice(names)]:
            index["weight_map"][name] = rng.choice(SHARD_NAMES)
    else:
        change_json(index, rng)
    # Lone surrogates stay escaped, as an attacker would write them.
    path.write_text(json.dumps(index))


def _change_gguf(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    if rng.random() < 0.1 or len(data) < 100:
        path.write_bytes(changed_bytes(data, rng))
        return
    # The header ends with a matrix's entry; changes beyond it are changes of values.
    end = max(100, data.rfind(b".weight") + 50)
    path.write_bytes(changed_gguf(data, len(data) if rng.random() < 0.2 else min(end, len(data)), rng))


def _change_llama2c(source: Path, rng: random.Random) -> None:
    path = source / "model.bin"
    if not is_plain(path):
        return
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5 and len(data) >= 28:
        at = 4 * rng.randrange(7)
        value = rng.choice(
            [-1, 0, 1, 2, 3, 63, 64, 65, 1 << 20, (1 << 31) - 1, -(1 << 31), rng.randrange(1 << 16)]
        )
        data[at : at + 4] = value.to_bytes(4, "little", signed=True)
        path.write_bytes(data)
    elif rng.random() < 0.1:
        path.write_bytes(rng.choice([b"GGUF", b"PK\x03\x04", b"24ka", b"\x80\x04"]) + bytes(data[4:]))
    else:
        path.write_bytes(changed_bytes(bytes(data), rng))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
