"""The tokenizer of a GGUF file, read from a `tokenizer.json` in its folder, or made from its metadata.

Metadata of the kind `llama` become a sentencepiece model, those of the kinds `gpt2` and `gemma4` a
`tokenizer.json`. Both then pass the same checks as files of other checkpoints.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np

from ondevice.bundle.layout import CHAT_TEMPLATE, TOKENIZER_FILES
from ondevice.bundle.manifest import MAX_BLOB_BYTES, TokenizerInfo, TokenizerKind
from ondevice.converters.checkpoints import sentencepiece_model as proto
from ondevice.converters.checkpoints.base import TokenizerFiles, plain
from ondevice.converters.checkpoints.bpe_json import bpe_json, byte_level
from ondevice.converters.checkpoints.end_tokens import (
    MESSAGE_END,
    MIDDLE_MARKS,
    ending_names,
    messages_go_on,
)
from ondevice.converters.checkpoints.gguf_file import GgufHeader
from ondevice.converters.checkpoints.gguf_splitting import SPLITTINGS, Splitting
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.checkpoints.template_files import DEFAULT, WITH_TOOLS, decoded, usable_template
from ondevice.converters.checkpoints.tokenizer_files import check_usable, read_tokenizer
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.tokenizer.base import MAX_TOKEN_CHARS, SPACE_MARK
from ondevice.tokenizer.infill import InfillTokens, has_known_marks

END_KEYS = (
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
)
"""Keys of tokens that end a text, a turn or a message, and of those between files."""
INFILL_KEYS = tuple(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "rep", "sep", "pad"))
"""Keys of the infill marks for prefix, suffix and middle, and of the separator between files."""
_UNDEFINED, _UNUSED = 0, 5
"""Types of tokens that only fill ids, such as `[PAD32000]`; other types are sentencepiece's."""
_FILLING = frozenset((_UNDEFINED, _UNUSED))
_KINDS = _FILLING | {proto.NORMAL, proto.UNKNOWN, proto.CONTROL, proto.USER_DEFINED, proto.BYTE}
_SPELLED = frozenset(("gemma4", "sarvam-moe", "granite-embed-multi-311m"))
"""Values of `tokenizer.ggml.pre` for vocabularies spelt as sentencepiece's, but with merges."""
_OTHER_MODELS = {
    "bert": "WordPiece",
    "t5": "unigrams",
    "rwkv": "RWKV's trie",
    "plamo2": "PLaMo's table",
    "hybriddna": "k-mers of DNA",
    "whitespace": "whole words",
}
"""Tokenizer kinds that llama.cpp knows and this converter doesn't, by value of `tokenizer.ggml.model`."""
_PREFIX = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
_PADDING = re.compile(r"\[PAD\d+\]")

logger = logging.getLogger(__name__)


def read_gguf_tokenizer(header: GgufHeader, folder: SourceFolder, vocab_size: int) -> TokenizerFiles:
    """The tokenizer of a model of `vocab_size` tokens.

    header: the header of the file with the metadata. folder: the folder of that file. Raises CheckpointError
    for a damaged tokenizer or another model's, UnsupportedModelError for unknown rules.
    """
    text = _template_text(header, _TEMPLATE)
    tokens = _tokens(header, vocab_size)
    infill = _infill(header, tokens, vocab_size)
    tokens = _steered(tokens, text, infill)
    bos_id, eos_ids = _bos_id(header, tokens, vocab_size), _eos_ids(header, tokens, text, vocab_size)
    if folder.has(TOKENIZER_FILES["tokenizers"]):
        config = {"bos_token_id": bos_id, "eos_token_id": list(eos_ids)}
        files = read_tokenizer(folder, config, {}, vocab_size)
        _check_same(files, tokens, header)
        # A template beside the file comes before the file's own, which then needn't be one that can be used.
        blob = None if CHAT_TEMPLATE in files.blobs else _template(header)
        info = replace(files.info, infill=infill)
        if blob is None:
            return TokenizerFiles(info, files.blobs)
        info = replace(info, chat_template=CHAT_TEMPLATE)
        return TokenizerFiles(info, {**files.blobs, CHAT_TEMPLATE: blob})
    blob = _template(header)
    blobs = {} if blob is None else {CHAT_TEMPLATE: blob}
    chat_template = None if blob is None else CHAT_TEMPLATE
    if not tokens:
        logger.warning("%s has no tokenizer; the bundle will work on token ids, not text", header.file)
        return TokenizerFiles(TokenizerInfo(None, bos_id, eos_ids, False, chat_template), blobs)
    kind, data, adds_bos = _converted(header, tokens, bos_id, eos_ids)
    info = TokenizerInfo(kind, bos_id, eos_ids, adds_bos and bos_id is not None, chat_template, infill)
    if len(data) > MAX_BLOB_BYTES[TOKENIZER_FILES[kind]]:
        raise CheckpointError(
            f"{header.file}: its tokenizer makes a {TOKENIZER_FILES[kind]} of {len(data)} bytes; the limit "
            f"is {MAX_BLOB_BYTES[TOKENIZER_FILES[kind]]}"
        )
    check_usable(info, kind, data, vocab_size, f"the tokenizer of {header.file}")
    return TokenizerFiles(info, {TOKENIZER_FILES[kind]: data, **blobs})


def _converted(
    header: GgufHeader, tokens: list[tuple[str, int]], bos_id: int | None, eos_ids: tuple[int, ...]
) -> tuple[TokenizerKind, bytes, bool]:
    """The kind and the bytes of the tokenizer's file, and whether texts begin with a BOS token."""
    model = header.text(f"{_PREFIX}.model")
    explicit = header.boolean(f"{_PREFIX}.add_bos_token")
    if model == "llama":
        return "sentencepiece", _sentencepiece(header, tokens, bos_id, eos_ids), explicit is not False
    if model == "gemma4" or (model == "gpt2" and header.text(f"{_PREFIX}.pre") in _SPELLED):
        unknown = next((text for text, kind in tokens if kind == proto.UNKNOWN), None)
        # Early files of Gemma 4 say false and are wrong.
        adds_bos = model == "gemma4" or explicit is True
        return "tokenizers", _tokenizer_json(header, tokens, _spelled(unknown)), adds_bos
    if model == "gpt2":
        splitting = _splitting(header)
        adds_bos = splitting.adds_bos if explicit is None else explicit
        return "tokenizers", _tokenizer_json(header, tokens, byte_level(splitting)), adds_bos
    if model in _OTHER_MODELS:
        raise UnsupportedModelError(
            f"{header.file}: tokenizer.ggml.model is {model}, which splits texts by {_OTHER_MODELS[model]}; "
            "of llama, gpt2 and gemma4 can be converted, so take another model"
        )
    raise UnsupportedModelError(
        f"{header.file}: tokenizer.ggml.model is {_quoted(model)}, and only llama, gpt2 and gemma4 are "
        "known; put the model's tokenizer.json beside the file"
    )


def _template(header: GgufHeader) -> bytes | None:
    """The chat template, combined from the default one and the one for chats with tools."""
    keys = {DEFAULT: _TEMPLATE, WITH_TOOLS: f"{_TEMPLATE}.{WITH_TOOLS}"}
    texts = {name: _template_text(header, key) for name, key in keys.items()}
    return usable_template({name: text for name, text in texts.items() if text})


def _template_text(header: GgufHeader, key: str) -> str:
    """The text at a key; empty if the key is missing."""
    value = header.metadata.get(key)
    return decoded(value) if isinstance(value, bytes) else header.text(key) or ""


def _tokens(header: GgufHeader, vocab_size: int) -> list[tuple[str, int]]:
    """Each token's text and type, by id, without the padding at the end. No two texts are equal."""
    texts = header.texts(f"{_PREFIX}.tokens") or []
    kinds = header.numbers(f"{_PREFIX}.token_type")
    if kinds is None:
        kinds = np.full(len(texts), proto.NORMAL)
    sound = kinds.dtype.kind in "iu" and len(kinds) == len(texts) and _KINDS.issuperset(kinds.tolist())
    if not sound:
        raise header.wrong(
            f"{_PREFIX}.token_type", f"one of {sorted(_KINDS)} for each of {len(texts)} tokens"
        )
    tokens = list(zip(texts, kinds.tolist(), strict=True))
    while tokens and _is_padding(*tokens[-1]):
        tokens.pop()
    if len(tokens) > vocab_size:
        raise CheckpointError(
            f"{header.file} has {len(tokens)} tokens and an embedding of {vocab_size}; it is damaged"
        )
    if len({text for text, _ in tokens}) != len(tokens):
        raise header.wrong(f"{_PREFIX}.tokens", "texts of which no two are the same")
    if any(len(text) > MAX_TOKEN_CHARS for text, _ in tokens):
        raise header.wrong(f"{_PREFIX}.tokens", f"texts of at most {MAX_TOKEN_CHARS} characters")
    return tokens


def _is_padding(text: str, kind: int) -> bool:
    return kind in _FILLING and _PADDING.fullmatch(text) is not None


def _infill(header: GgufHeader, tokens: list[tuple[str, int]], vocab_size: int) -> InfillTokens | None:
    """The infill marks that keys name. None if no key does, or if the marks are recognised by their names."""
    prefix, suffix, middle, repository, file, _ = marks = [
        _token_id(header, key, vocab_size) for key in INFILL_KEYS
    ]
    if prefix is None or suffix is None or middle is None or has_known_marks({text for text, _ in tokens}):
        return None
    ends = tuple(dict.fromkeys(token for token in marks if token is not None))
    return InfillTokens(prefix, suffix, middle, repository, file, ends)


def _steered(
    tokens: list[tuple[str, int]], template: str, infill: InfillTokens | None
) -> list[tuple[str, int]]:
    """The tokens, in which those that end a turn or mark infill have the type of control tokens.

    Many files give them the type of text, so that users could type them and readers would see them.
    """
    control = {text for text, kind in tokens if kind == proto.CONTROL}
    steering = ending_names((text for text, _ in tokens), control, template) | MIDDLE_MARKS
    if infill is not None:
        steering |= {tokens[token][0] for token in infill.ends if token < len(tokens)}
    return [(text, proto.CONTROL if text in steering else kind) for text, kind in tokens]


def _sentencepiece(
    header: GgufHeader, tokens: list[tuple[str, int]], bos_id: int | None, eos_ids: tuple[int, ...]
) -> bytes:
    """The bytes of a sentencepiece model, for a tokenizer of the kind `llama`."""
    if header.metadata.get(f"{_PREFIX}.precompiled_charsmap") is not None:
        raise UnsupportedModelError(
            f"{header.file}: tokenizer.ggml.precompiled_charsmap, which changes characters, isn't known "
            "here; put the model's tokenizer.json beside the file"
        )
    scores = header.numbers(f"{_PREFIX}.scores")
    with np.errstate(over="ignore"):
        finite = scores is not None and np.isfinite(scores.astype(np.float32)).all()
    if scores is None or len(scores) < len(tokens) or not finite:
        raise header.wrong(f"{_PREFIX}.scores", f"a finite score for each of {len(tokens)} tokens")
    adds_space = header.boolean(f"{_PREFIX}.add_space_prefix")
    strips = header.boolean(f"{_PREFIX}.remove_extra_whitespaces")
    pieces = [
        (
            text if kind == proto.CONTROL else text.replace(" ", SPACE_MARK),
            float(score),
            _UNUSED if kind in _FILLING else kind,
        )
        for (text, kind), score in zip(tokens, scores.tolist(), strict=False)
    ]
    unknown = next((token for token, (_, kind) in enumerate(tokens) if kind == proto.UNKNOWN), -1)
    return proto.bpe_model(
        pieces,
        unknown,
        -1 if bos_id is None else bos_id,
        eos_ids[0] if eos_ids else -1,
        adds_space=adds_space is not False,
        strips_spaces=strips is True,
    )


def _splitting(header: GgufHeader) -> Splitting:
    name = header.text(f"{_PREFIX}.pre")
    if name is None:
        logger.warning(
            "%s doesn't say how text is split (tokenizer.ggml.pre), as files before May 2024; the usual way "
            "is taken, which may be another than the model's: a newer file of the model is better",
            header.file,
        )
    if name is not None and name not in SPLITTINGS:
        raise UnsupportedModelError(
            f"{header.file}: tokenizer.ggml.pre is {_quoted(name)}, which says how text is split, and isn't "
            "one of the names known here; put the model's tokenizer.json beside the file"
        )
    return SPLITTINGS[name or "default"]


def _spelled(unknown: str | None) -> dict[str, Any]:
    """The rules of Gemma 4's BPE.

    A text is merged without splitting, spaces are marks, and unknown characters become bytes.
    """
    back = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
    }


def _tokenizer_json(header: GgufHeader, tokens: list[tuple[str, int]], rules: dict[str, Any]) -> bytes:
    """The bytes of a BPE `tokenizer.json`, made from the file's tokens and merges, and the rules
    of its kind.
    """
    merges = header.texts(f"{_PREFIX}.merges")
    if merges is None:
        raise header.wrong(f"{_PREFIX}.merges", "there")
    added = [
        (token, text, kind != proto.USER_DEFINED)
        for token, (text, kind) in enumerate(tokens)
        if kind in (proto.CONTROL, proto.UNKNOWN, proto.USER_DEFINED)
    ]
    vocabulary = {text: i for i, (text, kind) in enumerate(tokens) if kind not in _FILLING}
    filling = {text for text, kind in tokens if kind in _FILLING}
    kept = [merge for merge in merges if merge.replace(" ", "") not in filling] if filling else merges
    return bpe_json(vocabulary, kept, added, rules)


def _check_same(files: TokenizerFiles, tokens: list[tuple[str, int]], header: GgufHeader) -> None:
    """Check a `tokenizer.json` in the file's folder. Raises CheckpointError if its tokens differ from the
    file's metadata.
    """
    document = json.loads(files.blobs[TOKENIZER_FILES["tokenizers"]])
    vocabulary: dict[str, int] = document["model"]["vocab"]
    for token, (text, kind) in enumerate(tokens):
        if kind == proto.NORMAL and vocabulary.get(text, token) != token:
            raise CheckpointError(
                f"the tokenizer.json beside {header.file} gives {plain(text)} the id {vocabulary[text]}, and "
                f"the file {token}; it is another model's, so move it away or put this model's in its place"
            )


def _token_id(header: GgufHeader, key: str, vocab_size: int) -> int | None:
    token = header.integer(f"{_PREFIX}.{key}")
    if token is not None and not 0 <= token < vocab_size:
        raise header.wrong(f"{_PREFIX}.{key}", f"an id below {vocab_size}, not {token}")
    return token


def _bos_id(header: GgufHeader, tokens: list[tuple[str, int]], vocab_size: int) -> int | None:
    """The BOS id in the metadata. If they name none, Llama's, for a vocabulary of that kind."""
    named = _token_id(header, "bos_token_id", vocab_size)
    usual = header.text(f"{_PREFIX}.model") == "llama" and tokens[1:2] == [("<s>", proto.CONTROL)]
    return 1 if named is None and usual else named


def _eos_ids(
    header: GgufHeader, tokens: list[tuple[str, int]], template: str, vocab_size: int
) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those that keys name, then those recognised by their text."""
    named = [_token_id(header, key, vocab_size) for key in END_KEYS]
    control = {text for text, kind in tokens if kind == proto.CONTROL}
    ids = {text: token for token, (text, _) in enumerate(tokens)}
    ends = ending_names(ids, control, template)
    goes_on = ids.get(MESSAGE_END) if messages_go_on(ids) else None
    candidates = (*named, *(token for text, token in ids.items() if text in ends))
    return tuple(dict.fromkeys(token for token in candidates if token not in (None, goes_on)))


def _quoted(name: str | None) -> str:
    return "missing" if name is None else plain(name)
