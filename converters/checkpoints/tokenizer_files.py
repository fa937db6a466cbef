"""Tokenizer, special tokens and chat template of a Hugging Face folder.

`tokenizer.json` is preferred, because it contains the added tokens. They are added here to a
`tokenizer.model`, which lacks them. `vocab.json` and `merges.txt` become a `tokenizer.json`. Apart from this,
files are copied as they are, and opened only to check that they belong to the model.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ondevice.bundle.layout import CHAT_TEMPLATE, TOKENIZER_FILES
from ondevice.bundle.manifest import MAX_BLOB_BYTES, TokenizerInfo, TokenizerKind
from ondevice.converters.architectures.config_reader import shown
from ondevice.converters.checkpoints.added_tokens import declared_tokens, special_texts, with_added_tokens
from ondevice.converters.checkpoints.base import TokenizerFiles
from ondevice.converters.checkpoints.bpe_json import bpe_json, byte_level
from ondevice.converters.checkpoints.byte_pair_table import byte_pair_table
from ondevice.converters.checkpoints.end_tokens import template_ends
from ondevice.converters.checkpoints.gguf_splitting import SPLITTINGS
from ondevice.converters.checkpoints.piece_table import piece_table
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.checkpoints.template_files import folder_template
from ondevice.errors import BundleError, CheckpointError, UnsupportedModelError
from ondevice.tokenizer import Tokenizer, load_tokenizer
from ondevice.tokenizer.base import library_errors, valid_unicode
from ondevice.tokenizer.sentencepiece_file import read_sentencepiece_file
from ondevice.tokenizer.tokenizer_file import read_tokenizer_file

MAX_ENDS = 32
PROBE = string.ascii_letters + string.digits
PROBED_TOKENS = 4096
"""Tokens whose text is tried if a vocabulary knows none of PROBE."""

VOCABULARY, MERGES = "vocab.json", "merges.txt"
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast")
"""Tokenizer classes that split a text as GPT-2 does; others with these two files don't."""
_MAX_BPE_BYTES = MAX_BLOB_BYTES[TOKENIZER_FILES["tokenizers"]]

logger = logging.getLogger(__name__)

TokenLookup = Callable[[str], int | None]


def read_tokenizer(
    folder: SourceFolder, config: dict[str, Any], generation: dict[str, Any], vocab_size: int
) -> TokenizerFiles:
    """The tokenizer of a folder. Without tokenizer files, logs a warning, and the bundle takes token ids
    only.

    config, generation: the parsed `config.json` and `generation_config.json`. Raises CheckpointError if a
    file is damaged, or has tokens that a model of `vocab_size` can't have, UnsupportedModelError if the
    runtime can't use that kind of tokenizer.
    """
    settings = folder.optional_json("tokenizer_config.json")
    kind = _kind(folder, settings, config)
    blobs: dict[str, bytes] = {}
    vocabulary = _Vocabulary()
    if kind is not None:
        file = TOKENIZER_FILES[kind]
        inspect = _inspect_tokenizers if kind == "tokenizers" else _inspect_sentencepiece
        in_two = kind == "tokenizers" and not folder.has(file)
        blobs[file] = bpe_files_json(folder, settings) if in_two else folder.read(file, MAX_BLOB_BYTES[file])
        shown_file = f"{VOCABULARY} and {MERGES}" if in_two else file
        with _refusals(shown_file):
            vocabulary = inspect(blobs[file])
        _check_size(vocabulary.size, vocab_size, shown_file)
        if kind == "sentencepiece":
            blobs[file] = with_added_tokens(blobs[file], vocabulary.pieces, folder, settings, vocab_size)
            with _refusals(file):
                vocabulary = inspect(blobs[file])
    template = folder_template(folder, settings)
    if template is not None:
        blobs[CHAT_TEMPLATE] = template
    bos_id = _bos_id(settings, config, vocabulary.lookup, vocab_size)
    explicit = settings.get("add_bos_token")
    adds_bos = explicit if isinstance(explicit, bool) else vocabulary.adds_bos
    named = _eos_ids(settings, config, generation, vocabulary.lookup, vocab_size)
    used = [] if template is None else template_ends(template.decode(), vocabulary.lookup)
    info = TokenizerInfo(
        kind=kind,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys((*named, *(token for token in used if token < vocab_size)))),
        add_bos=adds_bos and bos_id is not None,
        chat_template=None if template is None else CHAT_TEMPLATE,
    )
    if kind is not None:
        check_usable(info, kind, blobs[file], vocab_size, shown_file)
    return TokenizerFiles(info, blobs)


@dataclass(frozen=True)
class _Vocabulary:
    """The vocabulary of a tokenizer file.

    size: all ids are below it. lookup: returns the id of a token's text. adds_bos: whether a text gets a BOS
    token first. pieces: texts by id, only for a sentencepiece model.
    """

    size: int = 0
    lookup: TokenLookup = field(default=lambda text: None)
    adds_bos: bool = False
    pieces: tuple[str, ...] = ()


@contextmanager
def _refusals(file: str) -> Iterator[None]:
    """A context that turns errors about a tokenizer's file into errors about the checkpoint."""
    try:
        with library_errors(file):
            yield
    except BundleError as error:
        raise CheckpointError(f"{file}: {error}; download it again") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{file}: {error}; without that file the model converts for use with token ids"
        ) from error


def with_table(files: TokenizerFiles) -> TokenizerFiles:
    """The tokenizer with a `tokenizer.bin` in place of its file, if the file's rules allow it."""
    info, blobs = files.info, dict(files.blobs)
    if info.kind is None or info.file is None:
        return files
    data = blobs.pop(info.file)
    table = piece_table(data) if info.kind == "sentencepiece" else byte_pair_table(read_tokenizer_file(data))
    file = TOKENIZER_FILES["byte_pairs"]
    if table is None or len(table) > MAX_BLOB_BYTES[file]:
        return files
    return TokenizerFiles(replace(info, kind="byte_pairs"), {file: table, **blobs})


def check_usable(info: TokenizerInfo, kind: TokenizerKind, data: bytes, vocab_size: int, file: str) -> None:
    """Check that the runtime can use a tokenizer's file and spell a text. Raises what `read_tokenizer`
    raises.
    """
    with _refusals(file):
        tokenizer = load_tokenizer(kind, data, info.bos_id, info.eos_ids, info.add_bos, vocab_size=vocab_size)
        if not _spells(tokenizer):
            raise CheckpointError(
                f"{file} can't spell a text: of {PROBE} nothing comes back from its tokens, nor of what its "
                "own tokens stand for; it lacks pieces for bytes or single letters. Put the model's own in "
                "its place, or remove it to convert for use with token ids"
            )


def _spells(tokenizer: Tokenizer) -> bool:
    """Whether some letter of a plain text, or of the first tokens' texts, survives encoding and decoding."""

    def comes_back(text: str) -> bool:
        decoded = tokenizer.decode(tokenizer.encode(text, add_bos=False))
        return not set(text).isdisjoint(set(decoded) - {" ", "\N{REPLACEMENT CHARACTER}"})

    if comes_back(PROBE):
        return True
    return any(
        comes_back(tokenizer.decode([token])) for token in range(min(PROBED_TOKENS, tokenizer.vocab_size))
    )


def _kind(folder: SourceFolder, settings: dict[str, Any], config: dict[str, Any]) -> TokenizerKind | None:
    kinds: tuple[TokenizerKind, ...] = ("tokenizers", "sentencepiece")
    for kind in kinds:
        if folder.has(TOKENIZER_FILES[kind]):
            return kind
    if has_bpe_files(folder, settings, config):
        return "tokenizers"
    logger.warning(
        "%s has neither tokenizer.json nor tokenizer.model, nor vocab.json and merges.txt as GPT-2 has them; "
        "the bundle will work on token ids, not text",
        folder.path,
    )
    return None


def _check_size(size: int, vocab_size: int, file: str) -> None:
    """Check the number of tokens. Raises CheckpointError if there are more than the model has; warns if there
    are far fewer.

    Models pad their vocabulary, so it may be larger than the tokenizer's, but never smaller.
    """
    if size > vocab_size:
        raise CheckpointError(
            f"{file} has {size} tokens, but config.json says vocab_size {vocab_size}; it is another model's: "
            "put this model's in its place, or remove it to convert for use with token ids"
        )
    if 2 * size < vocab_size:
        logger.warning("%s has %d tokens for a vocabulary of %d; is it this model's?", file, size, vocab_size)


def _inspect_tokenizers(data: bytes) -> _Vocabulary:
    file = read_tokenizer_file(data)
    ids = file.vocabulary | {token.content: token.id for token in file.added}
    return _Vocabulary(max(ids.values(), default=-1) + 1, ids.get, file.frames)


def _inspect_sentencepiece(data: bytes) -> _Vocabulary:
    """The vocabulary of a sentencepiece model. Texts get a BOS token if it has one, as in Llama's."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(read_sentencepiece_file(data).data)

    def lookup(text: str) -> int | None:
        with _refusals(TOKENIZER_FILES["sentencepiece"]):
            token = processor.PieceToId(text)
            return None if processor.IsUnknown(token) else token

    pieces = tuple(processor.IdToPiece(list(range(processor.GetPieceSize()))))
    return _Vocabulary(len(pieces), lookup, processor.bos_id() >= 0, pieces)


def with_template(files: TokenizerFiles, template: bytes) -> TokenizerFiles:
    """The tokenizer with another chat template. Tokens with which the template ends a turn end a text too."""
    info, lookup = files.info, _Vocabulary().lookup
    if info.kind is not None and info.file is not None:
        blob = files.blobs[info.file]
        lookup = load_tokenizer(info.kind, blob, info.bos_id, info.eos_ids, info.add_bos).token_id
    used = template_ends(template.decode(), lookup)
    info = replace(info, eos_ids=tuple(dict.fromkeys((*info.eos_ids, *used))), chat_template=CHAT_TEMPLATE)
    return TokenizerFiles(info, {**files.blobs, CHAT_TEMPLATE: template})


def _bos_id(
    settings: dict[str, Any], config: dict[str, Any], lookup: TokenLookup, vocab_size: int
) -> int | None:
    """The id of the token that begins a text. The tokenizer's settings take precedence over the config."""
    if "bos_token" in settings:
        text = _token_text(settings["bos_token"])
        return None if text is None else lookup(text)
    ids = _token_ids(config.get("bos_token_id"), "config.json: bos_token_id", vocab_size)
    return ids[0] if ids else None


def _eos_ids(
    settings: dict[str, Any],
    config: dict[str, Any],
    generation: dict[str, Any],
    lookup: TokenLookup,
    vocab_size: int,
) -> tuple[int, ...]:
    """The ids of the tokens that end a text.

    They are named by the generation config, or else by the config, or else by the tokenizer's settings.
    """
    if generation.get("eos_token_id") is not None:
        where, value = "generation_config.json: eos_token_id", generation["eos_token_id"]
    else:
        where, value = "config.json: eos_token_id", config.get("eos_token_id")
    ids = _token_ids(value, where, vocab_size)
    text = _token_text(settings.get("eos_token"))
    token = None if text is None else lookup(text)
    return tuple(dict.fromkeys([*ids, *([] if token is None else [token])]))


def _token_text(value: object) -> str | None:
    """The text of a special token, which is given directly, or as `content` of an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return valid_unicode(value) if isinstance(value, str) else None


def _token_ids(value: object, where: str, vocab_size: int) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids) or len(ids) > MAX_ENDS:
        raise CheckpointError(f"{where} is {shown(value)}; it must be ids below vocab_size {vocab_size}")
    return ids


def has_bpe_files(folder: SourceFolder, settings: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether the folder has `vocab.json` and `merges.txt`, and its tokenizer is known to split a text as
    GPT-2's does.

    settings, config: the content of `tokenizer_config.json` and `config.json`.
    """
    tokenizer_class = settings.get("tokenizer_class") or (
        GPT2_CLASSES[0] if config.get("model_type") == "opt" else None
    )
    return tokenizer_class in GPT2_CLASSES and folder.has(VOCABULARY) and folder.has(MERGES)


def bpe_files_json(folder: SourceFolder, settings: dict[str, Any]) -> bytes:
    """The bytes of a `tokenizer.json`, made from `vocab.json`, `merges.txt` and the added tokens.

    Raises CheckpointError for files that are damaged.
    """
    vocabulary = folder.json(VOCABULARY, _MAX_BPE_BYTES)
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in vocabulary.values()):
        raise CheckpointError(f"{VOCABULARY} has ids that are no numbers below 2^31; download it again")
    try:
        lines = folder.read(MERGES, _MAX_BPE_BYTES).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{MERGES} isn't UTF-8 text: {error}; download it again") from error
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    special = special_texts(folder, settings)
    added = {text: token for token, text in declared_tokens(folder, settings) if valid_unicode(text) == text}
    added |= {text: vocabulary[text] for text in special if text in vocabulary}
    rules = byte_level(SPLITTINGS["gpt-2"])
    if settings.get("add_prefix_space") is True:
        rules["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    entries = sorted((token, text, text in special) for text, token in added.items() if text)
    return bpe_json(vocabulary, merges, entries, rules)
