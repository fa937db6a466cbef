"""OPT shapes whose neurons fire as rarely as is asked, and a GGUF of an ungated shape of as many bytes.

Sparsity is planted as in `synthetic.py`, with two differences. A neuron's threshold is the bias of its `fc1`
row. Without rotary embedding, distances between tokens come from the table of positions: a few channels have
cosines and sines of the position, which queries and keys read, so that a score depends on the distance alone.
"""

from __future__ import annotations

import json
import os
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.benchmarks.lib.random_model import BLOCK_VALUES, Shape, quantise_q4_0, write_shards
from tests.benchmarks.lib.synthetic import QUIET, ROTARY_PAIRS, SCORE, STD, Float32, PlantedModel

OPT_6_7B = Shape("opt-6.7b", 4096, 32, 16384, 32, vocab_size=50_272, max_context=2048, family="opt")
OPT_SMALL = Shape("opt-small", 1024, 8, 4096, 16, vocab_size=50_272, max_context=2048, family="opt")
POSITION = np.float32(2.0)
"""Amplitude of the position channels after the norm, where others have a variance of one."""
_FREQUENCIES = 10_000.0 ** (-2 * np.array(ROTARY_PAIRS) / 128)
_OFFSET = 2
"""Rows of the table before that of the first position."""


class PlantedOpt(PlantedModel):
    """The tensors of one OPT model. fixed: channels of positions, a cosine and a sine of each frequency."""

    fixed = 2 * len(_FREQUENCIES)

    def rows(self, number: int, name: str, start: int, stop: int, cols: int) -> Float32:
        rows = self._drawn(number, start, stop, cols)
        layer = int(name.split(".")[3]) if ".layers." in name else -1
        kind = name.split(".")[-2]
        if kind == "embed_tokens":
            rows[:, : self.fixed] = rows[:, self._slow :] = 0
        elif kind == "embed_positions":
            rows[:] = 0
            angles = (np.arange(start, stop) - _OFFSET)[:, None] * _FREQUENCIES
            waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
            rows[:, : self.fixed] = POSITION * STD * waves.astype(np.float32)
        elif kind in ("q_proj", "k_proj"):
            self._read_positions(rows, start, stop)
        elif kind == "v_proj":
            rows[:, : self.fixed] = rows[:, self._slow :] = 0
        elif kind == "out_proj":
            self._write_slow(rows, start, np.float32(1) if layer == 0 else QUIET)
        elif kind == "fc1":
            self._gate(rows, layer, start, stop)
            rows[:, 0] = 0
        else:
            self._down(rows, start, stop, cols)
        return rows

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        write_shards(folder, _tensors(self._shape), self.pieces, self._vector)
        (folder / "config.json").write_text(json.dumps(_config(self._shape), indent=2))
        os.sync()

    def _vector(self, name: str, length: int) -> npt.NDArray[Any]:
        if name.endswith("fc1.bias"):
            return -self.thresholds(int(name.split(".")[3])) * self.deviation
        return np.full(length, name.endswith("norm.weight"), np.float16)

    def _read_positions(self, rows: Float32, start: int, stop: int) -> None:
        """The first rows of each head read one position channel each."""
        head_dim = self._shape.hidden_size // self._shape.num_heads
        value = sqrt(SCORE * sqrt(head_dim) / len(_FREQUENCIES)) / float(POSITION)
        within = np.arange(start, stop) % head_dim
        rows[:] = 0
        reading = np.flatnonzero(within < self.fixed)
        rows[reading, within[reading]] = value


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "hidden_size": shape.hidden_size,
        "ffn_dim": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context,
        "word_embed_proj_dim": shape.hidden_size,
        "bos_token_id": 2,
        "eos_token_id": 2,
    }


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    d, f = shape.hidden_size, shape.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (shape.vocab_size, d),
        "model.decoder.embed_positions.weight": (shape.max_context + _OFFSET, d),
    }
    for i in range(shape.num_layers):
        layer = f"model.decoder.layers.{i}."
        for name, size in {
            **{f"self_attn.{which}_proj": (d, d) for which in ("q", "k", "v", "out")},
            "fc1": (f, d),
            "fc2": (d, f),
        }.items():
            tensors |= {f"{layer}{name}.weight": size, f"{layer}{name}.bias": size[:1]}
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            tensors |= {f"{layer}{norm}.{end}": (d,) for end in ("weight", "bias")}
    return tensors | {f"model.decoder.final_layer_norm.{end}": (d,) for end in ("weight", "bias")}


def ungated_gguf(shape: Shape, workdir: Path) -> Path:
    """GGUF of StarCoder 2's blocks in the shape of an OPT model, matrices in Q4_0. Re-used when present.

    llama.cpp has no OPT. StarCoder 2 is what it has of the same matrices: ungated, one after the other, tied.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quant_shape_to_byte_shape

    path = workdir / f"{shape.name}-ungated-q4_0.gguf"
    if path.is_file():
        return path
    workdir.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(str(partial), "starcoder2")
    writer.add_file_type(int(LlamaFileType.MOSTLY_Q4_0))
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_heads)
    writer.add_rope_dimension_count(shape.hidden_size // shape.num_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    q4_0, sizes = GGMLQuantizationType.Q4_0, _gguf_tensors(shape)
    for name, size in sizes.items():
        if len(size) == 1:
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * size[0])
        else:
            stored = quant_shape_to_byte_shape(size, q4_0)
            nbytes = int(np.prod(stored))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_dtype=q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    values = STD * np.random.default_rng(20).standard_normal(BLOCK_VALUES, np.float32)
    blocks = quantise_q4_0(values)
    for number, (name, size) in enumerate(sizes.items()):
        if len(size) == 1:
            writer.write_tensor_data(np.full(size, name.endswith("norm.weight"), np.float32))
            continue
        count = int(np.prod(size)) // 32
        writer.write_tensor_data(np.take(blocks, np.arange(count) + 4099 * number, axis=0, mode="wrap"))
    writer.close()
    os.sync()
    partial.rename(path)
    return path


def _gguf_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    d, f = shape.hidden_size, shape.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab_size, d)}
    for i in range(shape.num_layers):
        matrices = {f"attn_{which}": (d, d) for which in ("q", "k", "v", "output")}
        for name, size in {**matrices, "ffn_up": (f, d), "ffn_down": (d, f)}.items():
            tensors |= {f"blk.{i}.{name}.weight": size, f"blk.{i}.{name}.bias": size[:1]}
        for norm in ("attn_norm", "ffn_norm"):
            tensors |= {f"blk.{i}.{norm}.{end}": (d,) for end in ("weight", "bias")}
    return tensors | {f"output_norm.{end}": (d,) for end in ("weight", "bias")}
