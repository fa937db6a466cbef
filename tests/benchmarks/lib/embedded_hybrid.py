"""A trained hybrid in the shape of a 7B: a GGUF file in Q4_0, and the layer that predicts one token more.

What `embedded_model.py` does for a Llama. The large model says what the small one in Q4_0 says, and its layer
drafts the same; the cost is that of the large shape, whose layers are all dense. Whatever is measured on it
is to be called that: measured on an embedded model. How the function stays the same:

- The small model's channels are some of the large one's, in whole groups. The others hold zero, as no row
  writes to them. Norms have the root of the widths' ratio for a factor, and the epsilon is as much smaller.
- The small layers stand evenly among the large ones, each as one of its kind. All others have random weights,
  and matrices that write nothing: codes like any other, and scales of zero.
- Heads are the large model's, with zeros behind the small one's values, and norms over them are weighted as
  those over the stream are. For them the epsilon is not quite right, as a model has one for all.
- Rotary pairs stand where the frequencies are equal.
- Ids without tokens have the head's row of id 0, which texts never have.

    python -m tests.benchmarks.explain.trained_mtp --workdir DIR
    python -m tests.benchmarks.lib.embedded_hybrid --source DIR/trained-mtp-hf --output DIR

It writes the bundle DIR/large, by `ondevice convert`, and the files that this reads.

Legend: D the small model's width.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ondevice.backends.base import Float32
from ondevice.bundle.reader import Bundle
from ondevice.config import GROUP_SIZE
from ondevice.converters.checkpoints.gguf_delta import DELTA_NAMES
from ondevice.converters.checkpoints.gguf_families import BLOCK_NAMES
from tests.benchmarks.lib.embedded_weights import even_places
from tests.benchmarks.lib.hybrid_gguf import (
    BLOCK,
    BLOCK_BYTES,
    HYBRID_4B,
    is_quantised,
    plain_values,
    random_blocks,
    write_hybrid,
)
from tests.benchmarks.lib.ondevice_bundle import ONDEVICE, convert_command
from tests.benchmarks.lib.random_model import quantise_q4_0
from tests.support.mtp_checkpoints import OF_QWEN

HYBRID_7B: dict[str, Any] = HYBRID_4B | {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
WEIGHTS = "model.safetensors"
WRITERS = ("attn_output", "ssm_out", "ffn_down")
"""Matrices whose outputs are added to the residual stream."""
PARTS = BLOCK_NAMES | DELTA_NAMES
"""A layer's tensors: in files, and in checkpoints."""


class EmbeddedHybrid:
    """The checkpoint `source` of a small hybrid in the shape of `shape`, keys of a `config.json`.

    Raises ValueError where the small one has more heads, longer ones or more layers than fit.
    """

    def __init__(self, source: Path, shape: Mapping[str, Any]) -> None:
        self._source = source
        self.small: dict[str, Any] = json.loads((source / "config.json").read_text())
        self._tensors = {name: it.astype(np.float32) for name, it in load_file(source / WEIGHTS).items()}
        self.config = dict(shape)
        self.config["rope_parameters"] = self.small["rope_parameters"]
        self.config["rms_norm_eps"] = self.small["rms_norm_eps"] / self._ratio("hidden_size")
        self._random = np.random.default_rng(0)
        self.layers = self._layers()
        self.channels = self._groups("hidden_size")
        self._neurons = self._groups("intermediate_size")
        self._check()

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The GGUF file, and the checkpoint whose layer predicts one token more. Re-used when present."""
        file, checkpoint = folder / "embedded-q4_0.gguf", folder / "embedded-mtp-hf"
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file():
            tokenizer = (self._source / "tokenizer.model").read_bytes()
            template = (self._source / "chat_template.jinja").read_text()
            write_hybrid(file, self.config, self.values, tokenizer, template)
        if not (checkpoint / "config.json").is_file():
            checkpoint.mkdir(exist_ok=True)
            save_file(self.layer_ahead(), checkpoint / WEIGHTS, {"format": "pt"})
            (checkpoint / "config.json").write_text(json.dumps(self.small | self.config))
        return file, checkpoint

    def values(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A tensor of the file: float32, or blocks."""
        parts = name.split(".")
        part = parts[0] if parts[0] != "blk" else parts[2]
        layer = self.layers.index(int(parts[1])) if parts[0] == "blk" and int(parts[1]) in self.layers else -1
        if parts[0] == "blk" and layer < 0:
            return self._without_function(name, shape)
        if part in ("token_embd", "output"):
            return self._ids(part, shape)
        if part == "output_norm":
            return self._stream_norm(self._tensors["model.norm.weight"])
        return self._layer_values(part, name, shape, f"model.layers.{layer}.")

    def layer_ahead(self) -> dict[str, NDArray[np.float16]]:
        """The layer's tensors by the names of checkpoints, where norms are stored less one."""
        found: dict[str, Float32] = {}
        for part in ("norm", "embedding_norm", "hidden_norm"):
            found[OF_QWEN[part]] = self._stream_norm(self._tensors[OF_QWEN[part]]) - 1
        width = self.config["hidden_size"]
        both = np.concatenate([self.channels, self.channels + width])
        joining = self._tensors[OF_QWEN["joining"]]
        found[OF_QWEN["joining"]] = _placed(joining, (width, 2 * width), self.channels, both)
        prefix = OF_QWEN["layer"]
        for part, own in PARTS.items():
            name = f"{prefix}{own}.weight"
            if name not in self._tensors:
                continue
            values = self._tensors[name]
            if values.ndim == 1:
                found[name] = self._norm(part, values) - 1
                continue
            rows, columns = self._places(part)
            found[name] = _placed(values, self._size(part), rows, columns)
            if part in ("ffn_gate", "ffn_up"):
                others = np.setdiff1d(np.arange(len(found[name])), rows)
                drawn = self._random.standard_normal((len(others), width), dtype=np.float32)
                found[name][others] = drawn / math.sqrt(width)
        return {name: np.ascontiguousarray(values.astype(np.float16)) for name, values in found.items()}

    def _layers(self) -> list[int]:
        """Where each small layer stands: the first of its kind from an even place on."""
        kinds, own = self.config["layer_types"], self.small["layer_types"]
        places = zip(own, even_places(len(own), len(kinds)), strict=True)
        found = [at + [*kinds[at:], kind].index(kind) for kind, at in places]
        if sorted(set(found)) != found or found[-1] == len(kinds):
            raise ValueError(f"layers {own} don't fit among {kinds}")
        return found

    def _check(self) -> None:
        queries = self._each("num_attention_heads", "num_key_value_heads")
        values = self._each("linear_num_value_heads", "linear_num_key_heads")
        counts = ("num_key_value_heads", "linear_num_key_heads", "vocab_size")
        widths = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
        longer = any(self._ratio(key) < 1 for key in (*counts, *widths))
        if queries[0] > queries[1] or values[0] > values[1] or longer:
            raise ValueError("the small model has more or longer heads than the large shape")

    def _each(self, heads: str, keys: str) -> tuple[int, int]:
        """Heads that share a key, in the small model and in the large one."""
        own, wide = (int(it[heads] // it[keys]) for it in (self.small, self.config))
        return own, wide

    def _ratio(self, key: str) -> float:
        """Of the large size to the small one."""
        return float(self.config[key] / self.small[key])

    def _groups(self, key: str) -> NDArray[np.int64]:
        """Places of the small model's channels or neurons: whole groups, evenly."""
        own, wide = (it[key] // GROUP_SIZE for it in (self.small, self.config))
        return _repeated(np.array(even_places(own, wide)), GROUP_SIZE, np.arange(GROUP_SIZE))

    def _stream_norm(self, stored: Float32) -> Float32:
        """(D,) weights less one -> the large norm's weights."""
        found = np.ones(self.config["hidden_size"], np.float32)
        found[self.channels] = (1 + stored) / math.sqrt(self._ratio("hidden_size"))
        return found

    def _norm(self, part: str, stored: Float32) -> Float32:
        """Weights of one of a layer's norms."""
        if part == "ssm_norm":
            # It alone isn't stored less one.
            found = np.ones(self.config["linear_value_head_dim"], np.float32)
            found[: len(stored)] = stored / math.sqrt(self._ratio("linear_value_head_dim"))
            return found
        if part not in ("attn_q_norm", "attn_k_norm"):
            return self._stream_norm(stored)
        found = np.ones(self.config["head_dim"], np.float32)
        # Scores are divided by the root of the head's length: queries make up for that as well.
        root = 1.0 if part == "attn_q_norm" else math.sqrt(self._ratio("head_dim"))
        found[self._turned()] = (1 + stored) / root
        return found

    def _turned(self) -> NDArray[np.int64]:
        """Places of a query's or key's values in a large head: pairs where their frequencies are."""
        share = self.config["rope_parameters"]["partial_rotary_factor"]
        own, wide = (int(it["head_dim"] * share) for it in (self.small, self.config))
        pairs = np.arange(own // 2) * (wide // own)
        rest = wide + np.arange(self.small["head_dim"] - own)
        return np.concatenate([pairs, wide // 2 + pairs, rest])

    def _heads(self) -> NDArray[np.int64]:
        """Where the small model's query heads are."""
        own, wide = self._each("num_attention_heads", "num_key_value_heads")
        heads = np.arange(int(self.small["num_attention_heads"]))
        return heads // own * wide + heads % own

    def _value_heads(self) -> NDArray[np.int64]:
        """Where a rule's value heads are: in files the first of every key head, then the second of each."""
        own, _ = self._each("linear_num_value_heads", "linear_num_key_heads")
        heads = np.arange(int(self.small["linear_num_value_heads"]))
        return heads % own * int(self.config["linear_num_key_heads"]) + heads // own

    def _places(self, part: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of the large matrix that are the small one's, and the columns."""
        stream, neurons = self.channels, self._neurons
        head, own = self.config["head_dim"], np.arange(self.small["head_dim"])
        keys = np.arange(self.small["num_key_value_heads"])
        value = np.arange(self.small["linear_value_head_dim"])
        values = _repeated(self._value_heads(), self.config["linear_value_head_dim"], value)
        match part:
            case "attn_q":
                # Each query has a gate beside it.
                both = np.concatenate([self._turned(), head + own])
                return _repeated(self._heads(), 2 * head, both), stream
            case "attn_k":
                return _repeated(keys, head, self._turned()), stream
            case "attn_v":
                return _repeated(keys, head, own), stream
            case "attn_output":
                return stream, _repeated(self._heads(), head, own)
            case "attn_qkv":
                return self._convolved(values), stream
            case "ssm_conv1d":
                return self._convolved(values), np.arange(self.small["linear_conv_kernel_dim"])
            case "attn_gate":
                return values, stream
            case "ssm_out":
                return stream, values
            case "ssm_alpha" | "ssm_beta":
                return self._value_heads(), stream
            case "ffn_gate" | "ffn_up":
                return neurons, stream
            case "ffn_down":
                return stream, neurons
        raise KeyError(part)

    def _convolved(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of a rule's queries, keys and values, which stand one behind another."""
        count, width = self.config["linear_num_key_heads"], self.config["linear_key_head_dim"]
        heads, own = (self.small[f"linear_{it}"] for it in ("num_key_heads", "key_head_dim"))
        keys = _repeated(np.arange(heads), width, np.arange(own))
        return np.concatenate([keys, count * width + keys, 2 * count * width + values])

    def _size(self, part: str) -> tuple[int, int]:
        """Of a matrix of attention or of a feed-forward."""
        width, head, neurons = (self.config[it] for it in ("hidden_size", "head_dim", "intermediate_size"))
        queries, keys = (self.config[f"num_{it}_heads"] * head for it in ("attention", "key_value"))
        return {
            "attn_q": (2 * queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "ffn_gate": (neurons, width),
            "ffn_up": (neurons, width),
            "ffn_down": (width, neurons),
        }[part]

    def _layer_values(self, part: str, name: str, shape: tuple[int, ...], prefix: str) -> NDArray[Any]:
        """A tensor of a layer that has a function."""
        if part in ("ssm_a", "ssm_dt"):
            found = plain_values(name, shape, self._random)
            own = self._tensors[f"{prefix}linear_attn.{'A_log' if part == 'ssm_a' else 'dt_bias'}"]
            found[self._value_heads()] = -np.exp(own) if part == "ssm_a" else own
            return found
        values = self._tensors[f"{prefix}{PARTS[part]}.weight"]
        if values.ndim == 1:
            return self._norm(part, values)
        rows, columns = self._places(part)
        if not is_quantised(name, shape):
            return _placed(values.reshape(len(values), -1), shape, rows, columns)
        blocks = random_blocks(shape, self._random)
        if part not in ("ffn_gate", "ffn_up"):
            _silence(blocks)
        _plant(blocks, values, rows, columns)
        return blocks

    def _without_function(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A tensor of another layer."""
        if not is_quantised(name, shape):
            return plain_values(name, shape, self._random)
        found = random_blocks(shape, self._random)
        if name.split(".")[2] in WRITERS:
            _silence(found)
        return found

    def _ids(self, part: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """The rows of embedding or head."""
        table = self._tensors["model.embed_tokens.weight"]
        rows = table if part == "token_embd" else self._tensors.get("lm_head.weight", table)
        found = random_blocks(shape, self._random)
        _silence(found)
        more = np.broadcast_to(rows[0], (shape[0] - len(rows), rows.shape[1]))
        rows = np.concatenate([rows, more]) if part == "output" else rows
        _plant(found, rows, np.arange(len(rows)), self.channels)
        return found


def _repeated(heads: NDArray[np.int64], width: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the same values of several heads, or groups, of a width."""
    return (heads[:, None] * width + values).ravel()


def _placed(
    values: Float32, size: tuple[int, ...], rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> Float32:
    """A matrix of `size` with `values` at rows and columns; zero elsewhere."""
    found = np.zeros(size, np.float32)
    found[np.ix_(rows, columns)] = values
    return found


def _silence(blocks: NDArray[np.uint8]) -> None:
    """Give all blocks a scale of zero. blocks: (rows, bytes)."""
    blocks.reshape(len(blocks), -1, BLOCK_BYTES)[:, :, :2] = 0


def _plant(
    blocks: NDArray[np.uint8], values: Float32, rows: NDArray[np.int64], columns: NDArray[np.int64]
) -> None:
    """Write values, rounded to Q4_0, at rows and columns; columns are whole blocks."""
    places = columns[::BLOCK] // BLOCK
    if not (columns.reshape(-1, BLOCK) == places[:, None] * BLOCK + np.arange(BLOCK)).all():
        raise ValueError("columns aren't whole blocks")
    whole = blocks.reshape(len(blocks), -1, BLOCK_BYTES)
    own = quantise_q4_0(np.ascontiguousarray(values))
    whole[rows[:, None], places] = own.reshape(len(rows), len(places), BLOCK_BYTES)


def main() -> None:
    """Write the bundle and print its layers and sizes, which are of an embedded model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="checkpoint of the small model")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    model, folder = EmbeddedHybrid(args.source, HYBRID_7B), args.output / "large"
    file, checkpoint = model.write(args.output)
    if not (folder / "mtp.json").is_file():
        subprocess.run(convert_command(file, folder, "--resume", quant="auto"), check=True, stdout=sys.stderr)
        command = [ONDEVICE, "convert", str(checkpoint), "--draft-for", str(folder), "--quant", "q4"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    bundle = Bundle.open(folder)
    assert bundle.mtp is not None
    layer = (folder / bundle.mtp.sidecar.tensors).stat().st_size
    facts = {"embedded_model": "hybrid-7b", "layers": model.layers, "parameters": bundle.parameters}
    print(json.dumps(facts | {"bundle_bytes": bundle.bundle_bytes, "layer_ahead_bytes": layer}))


if __name__ == "__main__":
    main()
