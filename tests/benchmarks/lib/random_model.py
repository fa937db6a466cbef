"""Random-weight Llama and Qwen3 shapes on disk: Hugging Face float16 shards, and Llama's GGUF in pure Q4_0.

Speed doesn't depend on the values, so one block of gaussian values (std 0.02) is drawn once and every
tensor is a stretch of it from another offset: 13.5 GB are written about as fast as the disk takes them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.support.paths import SHARED_DATA

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

BLOCK_VALUES = 1 << 24
SHARD_BYTES = 5_000_000_000
SHARED_TOKENIZER = SHARED_DATA / "tokenizers/llama2/tokenizer.model"


MatrixPieces = Callable[[int, str, tuple[int, ...]], Iterator[npt.NDArray[Any]]]
"""(its number in its shard, name, shape) of a matrix -> its elements in order, in pieces."""


Vector = Callable[[str, int], npt.NDArray[Any]]
"""(name, length) of a vector -> its elements."""


def _ones(name: str, length: int) -> npt.NDArray[Any]:
    return np.ones(length, np.float16)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model, or of a Qwen3 model where `family` says so."""

    name: str
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    vocab_size: int = 32_000
    max_context: int = 4096
    num_kv_heads: int = 0
    """0: as many as `num_heads`."""
    head_dim: int = 0
    """0: the width divided by the heads."""
    family: str = "llama"

    @property
    def projected(self) -> tuple[int, int]:
        """What all queries take of a token, and all keys."""
        head = self.head_dim or self.hidden_size // self.num_heads
        return self.num_heads * head, (self.num_kv_heads or self.num_heads) * head


LLAMA_7B = Shape("llama-7b", 4096, 32, 11008, 32)
SMALL = Shape("small", 1024, 16, 2816, 16)
TINY = Shape("tiny", 256, 6, 704, 4)
QWEN3 = Shape("qwen3", 1024, 28, 3072, 16, max_context=8192, num_kv_heads=8, head_dim=128, family="qwen3")
"""Of 0.47 billion parameters."""


def random_tokens(count: int, vocab_size: int, seed: int = 7) -> list[int]:
    """A prompt of token ids, away from the special ones at the table's start."""
    return [int(t) for t in np.random.default_rng(seed).integers(300, vocab_size, count)]


def huggingface_folder(shape: Shape, workdir: Path) -> Path:
    """Folder with config.json, float16 safetensors shards, their index and Llama 2's tokenizer.

    The tokenizer comes from the shared data and is left out where that is absent. Re-used when present.
    """
    folder = workdir / f"{shape.name}-hf"
    if (folder / "config.json").is_file():
        return folder
    partial = workdir / f"{shape.name}-hf.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    values = _gaussian_block().astype(np.float16)
    write_checkpoint(
        partial,
        shape,
        "silu",
        lambda number, name, size: _stretches(values, int(np.prod(size)), number * 65_537),
    )
    partial.rename(folder)
    return folder


def write_checkpoint(folder: Path, shape: Shape, hidden_act: str, matrix: MatrixPieces) -> None:
    """Fill `folder` with a Hugging Face checkpoint whose norms are ones and whose matrices are drawn."""
    write_shards(folder, huggingface_tensors(shape), matrix)
    if _is_llama_2(shape):
        shutil.copyfile(SHARED_TOKENIZER, folder / "tokenizer.model")
    config = huggingface_config(shape) | {"hidden_act": hidden_act}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    os.sync()


def write_shards(
    folder: Path, tensors: dict[str, tuple[int, ...]], matrix: MatrixPieces, vector: Vector = _ones
) -> None:
    """Write float16 safetensors shards and their index, never a whole matrix in memory."""
    shards = _shards(tensors)
    weight_map: dict[str, str] = {}
    for number, own in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(own, file)
        _write_safetensors(folder / file, own, matrix, vector)
    index = {"metadata": {"total_size": _total_bytes(shards)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def gguf_file(shape: Shape, workdir: Path) -> Path:
    """GGUF with every matrix in Q4_0 (3.79 GB for the 7B shape), and Llama 2's vocabulary where it is found.

    Re-used when present.
    """
    from gguf import GGMLQuantizationType, LlamaFileType

    path = workdir / f"{shape.name}-q4_0.gguf"
    if path.is_file():
        return path
    workdir.mkdir(parents=True, exist_ok=True)
    sizes, blocks = gguf_tensors(shape), quantise_q4_0(_gaussian_block()).reshape(-1)

    def values(number: int, name: str) -> npt.NDArray[Any]:
        size = sizes[name]
        if len(size) == 1:
            return np.ones(size, np.float32)
        return np.concatenate(list(_stretches(blocks, size[0] * size[1] // 32 * 18, number * 18 * 4099)))

    write_gguf(
        path,
        shape,
        {name: GGMLQuantizationType.Q4_0 for name, size in sizes.items() if len(size) > 1},
        values,
        file_type=LlamaFileType.MOSTLY_Q4_0,
        tokenizer=SHARED_TOKENIZER.read_bytes() if _is_llama_2(shape) else b"",
    )
    return path


def write_gguf(
    path: Path,
    shape: Shape,
    types: Mapping[str, GGMLQuantizationType],
    values: Callable[[int, str], npt.NDArray[Any]],
    *,
    file_type: LlamaFileType,
    rms_norm_eps: float = 1e-5,
    rope_theta: float = 10_000.0,
    tokenizer: bytes = b"",
) -> None:
    """Write a Llama model's GGUF, one tensor in memory at a time. The file appears when it is whole.

    Args:
        path: the file.
        shape: the model's sizes.
        types: the types of matrices, by name; others are float32.
        values: (a tensor's number and name) -> its float32 values, or the bytes of its blocks.
        file_type: what the file says of its types.
        rms_norm_eps: epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        tokenizer: a sentencepiece model; without one the file has no vocabulary.
    """
    from gguf import GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape

    partial = path.with_suffix(".partial")
    writer = GGUFWriter(str(partial), "llama")
    writer.add_file_type(int(file_type))
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_heads)
    writer.add_rope_dimension_count(shape.hidden_size // shape.num_heads)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    add_vocabulary(writer, tokenizer, shape.vocab_size)
    sizes = gguf_tensors(shape)
    for name, size in sizes.items():
        if name in types:
            stored = quant_shape_to_byte_shape(size, types[name])
            nbytes = int(np.prod(stored))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), nbytes, raw_dtype=types[name])
        else:
            writer.add_tensor_info(name, size, np.dtype(np.float32), 4 * int(np.prod(size)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, name in enumerate(sizes):
        writer.write_tensor_data(values(number, name))
    writer.close()
    os.sync()
    partial.rename(path)


def add_vocabulary(writer: GGUFWriter, tokenizer: bytes, size: int) -> None:
    """The pieces of a sentencepiece model. Ids that it lacks are padding, named as llama.cpp does it."""
    if not tokenizer:
        writer.add_tokenizer_model("no_vocab")
        return
    from gguf import TokenType
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_proto=tokenizer)
    ids = range(len(pieces))
    unused = range(len(pieces), size)
    kinds = [
        TokenType.UNKNOWN
        if pieces.is_unknown(i)
        else TokenType.CONTROL
        if pieces.is_control(i)
        else TokenType.BYTE
        if pieces.is_byte(i)
        else TokenType.NORMAL
        for i in ids
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids] + [f"[PAD{i}]" for i in unused])
    writer.add_token_scores([pieces.get_score(i) for i in ids] + [0.0] * len(unused))
    writer.add_token_types(kinds + [TokenType.UNUSED] * len(unused))
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())


def quantise_q4_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """llama.cpp's Q4_0: per 32 values a float16 scale and 16 bytes, value i beside value i + 16."""
    x = values.reshape(-1, 32)
    extreme = x[np.arange(len(x)), np.abs(x).argmax(axis=1)]
    scale = extreme / -8.0
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.clip(np.floor(x * inverse[:, None] + 8.5), 0, 15).astype(np.uint8)
    out = np.empty((len(x), 18), np.uint8)
    out[:, :2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = codes[:, :16] | codes[:, 16:] << 4
    return out


def _is_llama_2(shape: Shape) -> bool:
    """True if the shape has the vocabulary of Llama 2's tokenizer, and that is found."""
    return SHARED_TOKENIZER.is_file() and shape.vocab_size == 32_000


def _gaussian_block() -> npt.NDArray[np.float32]:
    return np.random.default_rng(20).standard_normal(BLOCK_VALUES, np.float32) * np.float32(0.02)


def _stretches(block: npt.NDArray[np.generic], count: int, offset: int) -> Iterator[npt.NDArray[np.generic]]:
    """`count` items of the endlessly repeated block, from `offset` on, in pieces."""
    offset %= len(block)
    while count:
        piece = block[offset : offset + count]
        count -= len(piece)
        offset = 0
        yield piece


def huggingface_config(shape: Shape) -> dict[str, object]:
    names = {"llama": "Llama", "qwen3": "Qwen3"}
    return {
        "architectures": [f"{names[shape.family]}ForCausalLM"],
        "model_type": shape.family,
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads or shape.num_heads,
        "head_dim": shape.head_dim or shape.hidden_size // shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def huggingface_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    d, f = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.projected
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, d)}
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}."
        rows = {"q": queries, "k": keys, "v": keys}
        tensors |= {f"{layer}self_attn.{p}_proj.weight": (size, d) for p, size in rows.items()}
        tensors[f"{layer}self_attn.o_proj.weight"] = (d, queries)
        if shape.family == "qwen3":
            tensors |= {f"{layer}self_attn.{p}_norm.weight": (queries // shape.num_heads,) for p in "qk"}
        tensors |= {f"{layer}mlp.{p}_proj.weight": (f, d) for p in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = (d, f)
        tensors |= {f"{layer}{p}_layernorm.weight": (d,) for p in ("input", "post_attention")}
    return tensors | {"model.norm.weight": (d,), "lm_head.weight": (shape.vocab_size, d)}


def gguf_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama model's tensors, in the order that they have in a GGUF."""
    d, f = shape.hidden_size, shape.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab_size, d)}
    for i in range(shape.num_layers):
        tensors |= {f"blk.{i}.attn_{p}.weight": (d, d) for p in ("q", "k", "v", "output")}
        tensors |= {f"blk.{i}.ffn_{p}.weight": (f, d) for p in ("gate", "up")}
        tensors[f"blk.{i}.ffn_down.weight"] = (d, f)
        tensors |= {f"blk.{i}.{p}_norm.weight": (d,) for p in ("attn", "ffn")}
    return tensors | {"output_norm.weight": (d,), "output.weight": (shape.vocab_size, d)}


def _shards(tensors: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, size in tensors.items():
        nbytes = 2 * int(np.prod(size))
        if used and used + nbytes > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = size
        used += nbytes
    return shards


def _total_bytes(shards: list[dict[str, tuple[int, ...]]]) -> int:
    return sum(2 * int(np.prod(size)) for shard in shards for size in shard.values())


def _write_safetensors(
    path: Path, tensors: dict[str, tuple[int, ...]], matrix: MatrixPieces, vector: Vector
) -> None:
    """Written in order, never held whole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in tensors.items():
        end = offset + 2 * int(np.prod(size))
        header[name] = {"dtype": "F16", "shape": size, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for number, (name, size) in enumerate(tensors.items()):
            pieces = iter([vector(name, size[0])]) if len(size) == 1 else matrix(number, name, size)
            for piece in pieces:
                piece.astype(np.float16, copy=False).tofile(file)
