"""llama2.c `.bin` files: the legacy layout (seven int32, then float32 weights) and its tokenizer.

The header is dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative if the head has its own
weights) and seq_len. In these files rotary embedding pairs neighbouring rows; `StoredTensor` returns them in
rotate-half order.
"""

from __future__ import annotations

import logging
import struct
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path

from ondevice.bundle.layout import TOKENIZER_FILES
from ondevice.bundle.manifest import MAX_BLOB_BYTES, TokenizerInfo
from ondevice.converters.architectures.common import llama_config
from ondevice.converters.architectures.tensors import EMBEDDING, FINAL_NORM, HEAD, LayerNames
from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.converters.checkpoints.base import (
    Checkpoint,
    SourceFile,
    StoredTensor,
    TokenizerFiles,
    printable,
)
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.checkpoints.tokenizer_files import check_usable, with_table
from ondevice.errors import CheckpointError, OndeviceError
from ondevice.model_config import SIZE_LIMITS, ModelConfig

HEADER = struct.Struct("<7i")
BOS, EOS = 1, 2
_MAX_PIECE_BYTES = 1 << 16
_REMEDY = "give such a .bin file, or a Hugging Face folder"
_REPLACE = "it belongs to another model: put this model's in its place"

logger = logging.getLogger(__name__)


def is_llama2c(path: Path) -> bool:
    """True if a file has a llama2.c checkpoint's header, and exactly the size that the header implies."""
    try:
        with path.open("rb") as stream:
            header = stream.read(HEADER.size)
        config, tied = _config(path.name, header)
        return HEADER.size + 4 * _floats(config, tied) == path.stat().st_size
    except (OSError, OndeviceError):
        return False


def open_llama2c(path: Path) -> Checkpoint:
    """A `.bin` file as a Checkpoint, with the tokenizer in the same folder.

    Raises CheckpointError if the header or size is wrong, or the tokenizer belongs to another model.
    """
    with ExitStack() as refused:
        file = refused.enter_context(closing(SourceFile(path)))
        checkpoint = _opened(path, file)
        refused.pop_all()
    return checkpoint


def _opened(path: Path, file: SourceFile) -> Checkpoint:
    config, tied = _config(path.name, file.read(0, HEADER.size))
    expected = HEADER.size + 4 * _floats(config, tied)
    if file.nbytes != expected:
        raise CheckpointError(
            f"{path.name} has {file.nbytes} bytes, but its header asks for {expected}; it is truncated, or "
            "not llama2.c's legacy format"
        )
    return Checkpoint(
        name=printable(path.stem),
        source_format="llama2.c",
        config=config,
        tensors=_tensors(file, config, tied),
        tokenizer=_find_tokenizer(path.absolute(), config.vocab_size),
        generation={},
    )


def _config(name: str, header: bytes) -> tuple[ModelConfig, bool]:
    if len(header) < HEADER.size:
        raise CheckpointError(f"{name} is no llama2.c checkpoint: that starts with 28 bytes; {_REMEDY}")
    dim, hidden_dim, layers, heads, kv_heads, vocab, context = HEADER.unpack(header[: HEADER.size])
    is_sound = min(dim, hidden_dim, layers, heads, kv_heads, abs(vocab), context) >= 1 and dim % heads == 0
    # Any file may be looked at, and a config has frequencies for each of a head's dimensions.
    if not is_sound or layers > SIZE_LIMITS["num_layers"] or dim // heads > SIZE_LIMITS["head_dim"]:
        raise CheckpointError(f"{name} hasn't the header of a llama2.c checkpoint (legacy format); {_REMEDY}")
    config = llama_config(
        "llama",
        hidden_size=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim // heads,
        intermediate_size=hidden_dim,
        vocab_size=abs(vocab),
        max_context=context,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_embeddings=vocab > 0,
    )
    return config, vocab > 0


def _sections(config: ModelConfig, tied: bool) -> list[tuple[str, tuple[int, ...]]]:
    """The name and the shape of each array in the file, in order. An array stacks all layers' tensors of one
    kind.

    An empty name marks an array that isn't used.
    """
    layers, dim, inner = config.num_layers, config.hidden_size, config.intermediate_size
    sections: list[tuple[str, tuple[int, ...]]] = [
        ("embedding", (config.vocab_size, dim)),
        ("attention_norm", (layers, dim)),
        ("q", (layers, config.query_size, dim)),
        ("k", (layers, config.kv_size, dim)),
        ("v", (layers, config.kv_size, dim)),
        ("o", (layers, dim, config.query_size)),
        ("feed_forward_norm", (layers, dim)),
        ("gate", (layers, inner, dim)),
        ("down", (layers, dim, inner)),
        ("up", (layers, inner, dim)),
        ("final_norm", (dim,)),
        (
            "",
            (2, config.max_context, config.head_dim // 2),
        ),  # rotary cosines and sines, which follow from theta
    ]
    return sections if tied else [*sections, ("head", (config.vocab_size, dim))]


def _floats(config: ModelConfig, tied: bool) -> int:
    return sum(prod(shape) for _, shape in _sections(config, tied))


def _tensors(file: SourceFile, config: ModelConfig, tied: bool) -> dict[str, StoredTensor]:
    model_names = {"embedding": EMBEDDING, "final_norm": FINAL_NORM, "head": HEAD}
    tensors: dict[str, StoredTensor] = {}
    offset = HEADER.size
    for section, shape in _sections(config, tied):
        if section in model_names:
            tensors[model_names[section]] = StoredTensor(model_names[section], "F32", shape, file, offset)
        elif section:
            pairs = config.head_dim if section in ("q", "k") else 0
            for layer in range(config.num_layers):
                name = _layer_name(LayerNames(layer), section)
                start = offset + 4 * layer * prod(shape[1:])
                tensors[name] = StoredTensor(name, "F32", shape[1:], file, start, pairs)
        offset += 4 * prod(shape)
    return tensors


def _layer_name(names: LayerNames, section: str) -> str:
    match section:
        case "q" | "k" | "v" | "o":
            return names.projection(section)
        case "attention_norm" | "feed_forward_norm":
            return names.norm(section)
    return {"gate": names.gate, "up": names.up, "down": names.down}[section]


def _find_tokenizer(path: Path, vocab_size: int) -> TokenizerFiles:
    """The tokenizer `tok<vocabulary>.bin` or `tokenizer.bin` in the checkpoint's folder. Without one, the
    bundle takes token ids only.

    BOS ends a text too: training joins stories with only BOS between them, and llama2.c's own loop stops at
    it. EOS is the tokenizer's end token, for models that were trained with one.
    """
    folder = SourceFolder(path.parent)
    for name in (f"tok{vocab_size}.bin", "tokenizer.bin"):
        if folder.has(name):
            file = TOKENIZER_FILES["sentencepiece"]
            limit = MAX_BLOB_BYTES[file]
            model = convert_tokenizer(folder.read(name, limit), vocab_size, name)
            if len(model) > limit:
                raise CheckpointError(
                    f"{name} makes a {file} of {len(model)} bytes; the limit is {limit}, so remove it to "
                    "convert for use with token ids"
                )
            info = TokenizerInfo("sentencepiece", bos_id=BOS, eos_ids=(BOS, EOS), add_bos=True)
            check_usable(info, "sentencepiece", model, vocab_size, name)
            return with_table(TokenizerFiles(info, {file: model}))
    logger.warning(
        "no tok%d.bin or tokenizer.bin beside %s; the bundle will take and give token ids, not text",
        vocab_size,
        path,
    )
    return TokenizerFiles(TokenizerInfo(bos_id=BOS if vocab_size > BOS else None))


def convert_tokenizer(data: bytes, vocab_size: int, name: str) -> bytes:
    """The bytes of a sentencepiece model that tokenises as a llama2.c tokenizer file does.

    The file is an int32 (length of the longest piece), then per token a float32 score, an int32 length and
    the bytes. Raises CheckpointError if it doesn't hold exactly `vocab_size` tokens.
    """
    pieces: list[tuple[str, float, int]] = []
    offset = 4
    try:
        for token in range(vocab_size):
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8
            if not 0 <= length <= min(_MAX_PIECE_BYTES, len(data) - offset):
                raise CheckpointError(f"{name}: token {token} has a length of {length} bytes; it is damaged")
            text = data[offset : offset + length].decode("utf-8")
            offset += length
            pieces.append(_piece(token, text, score))
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{name} doesn't hold the model's {vocab_size} tokens ({error}); {_REPLACE}"
        ) from error
    if offset != len(data):
        raise CheckpointError(f"{name} has more than the model's {vocab_size} tokens; {_REPLACE}")
    if len({text for text, _, _ in pieces}) != len(pieces):
        raise CheckpointError(f"{name} has the same token twice; it is damaged")
    return proto.bpe_model(pieces, unk_id=0, bos_id=BOS, eos_id=EOS)


def _piece(token: int, text: str, score: float) -> tuple[str, float, int]:
    """The text, score and type of a token, in sentencepiece's spelling.

    llama2.c spells special tokens on separate lines, and U+2581 as a space.
    """
    if token == 0:
        return "<unk>", score, proto.UNKNOWN
    if token in (BOS, EOS):
        return "<s>" if token == BOS else "</s>", score, proto.CONTROL
    if 3 <= token < 259:
        return f"<0x{token - 3:02X}>", score, proto.BYTE
    return text.replace(" ", "\u2581"), score, proto.NORMAL
