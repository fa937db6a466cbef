"""Parses and vets a `tokenizer.json` before the library that defined the format sees any of it.

A tokenizer's file is a program: its normalizers and pre-tokenizers can multiply a text, its patterns can take
for ever, its padding can need a terabyte. So only known components are accepted, within limits on their
number and cost that ordinary tokenizers keep to. Truncation, padding and the post-processor aren't passed on
to the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from ondevice.errors import BundleError, UnsupportedModelError, json_fault
from ondevice.records import dataclass
from ondevice.tokenizer.base import MAX_TOKEN_CHARS, SPACE_MARK, LeadingSpace
from ondevice.tokenizer.pattern import Cost, PatternCost, pattern_cost

Component = Mapping[str, Any]
"""A normalizer, pre-tokenizer or decoder, as the file has it."""

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

MAX_TOKEN_ID = (1 << 31) - 1
MAX_ADDED_CHARS = 1 << 17
"""Most characters in all added tokens together; public tokenizers have up to 80,000."""
MAX_COMPONENTS = 16
MAX_GROWTH = 16
"""Largest factor by which replacements may lengthen a text."""
MAX_COST = Cost(fixed=1 << 15, linear=32)
"""Largest cost of all patterns together. The costliest public tokenizers have 1,081 (fixed) and, adapted for
engines without character classes, 22 (linear); most have 30 and 6."""
_BYTES_PER_CHAR = 4
_FORMS: tuple[Form, ...] = ("NFC", "NFD", "NFKC", "NFKD")
_NORMALIZERS = frozenset({*_FORMS, "Lowercase", "Strip", "StripAccents", "Replace", "Prepend"})
_ADD_TEXT = frozenset({"ByteLevel", "Metaspace"})
"""Pre-tokenizers that lengthen text. One of each does no harm; two of a kind multiply."""
_PRE_TOKENIZERS = _ADD_TEXT | {
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Punctuation",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}


@dataclass(frozen=True)
class AddedToken:
    """A token that is recognised by its name in a text, in addition to the tokens from merging."""

    id: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


@dataclass(frozen=True)
class TokenizerFile:
    """The vetted parts of a `tokenizer.json` that are used for encoding and decoding."""

    vocabulary: dict[str, int]
    merges: list[tuple[str, str]]
    options: dict[str, Any]
    """Options of the merging model: `unk_token`, `fuse_unk`, `byte_fallback`, `ignore_merges`."""
    added: tuple[AddedToken, ...]
    normalizers: tuple[Component, ...]
    pre_tokenizers: tuple[Component, ...]
    byte_level: bool
    """Whether pieces are written in GPT-2's byte alphabet."""
    leading_space: LeadingSpace
    frames: bool
    """Whether the file's post-processor puts one token before a text."""

    @property
    def growth(self) -> int:
        """The largest factor by which a text grows before patterns are matched, not counting Unicode's normal
        forms.
        """
        growth = _replacement_growth(self.normalizers)
        kinds = [part["type"] for part in self.pre_tokenizers]
        spelt_before = "ByteLevel" in kinds[:-1]
        return growth * (_BYTES_PER_CHAR if spelt_before else 1)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The Unicode normal forms to which normalizers convert a text."""
        kinds = [part["type"] for part in self.normalizers]
        return tuple(form for form in _FORMS if form in kinds)

    def normalizer(self, first: bool, last: bool) -> Component | None:
        """The normalizers of a piece. first, last: whether the piece begins and ends the text.

        Inside a text, nothing is put before a piece and no white space is stripped.
        """
        return _sequence("normalizers", [part for p in self.normalizers if (part := _within(p, first, last))])

    def pre_tokenizer(self, first: bool) -> Component | None:
        """The pre-tokenizers of a piece. Nothing is put before a piece, unless it begins the text
        (`first`).
        """
        return _sequence("pretokenizers", [p if first else _continuing(p) for p in self.pre_tokenizers])


def read_tokenizer_file(data: bytes) -> TokenizerFile:
    """Parse and vet the bytes of a `tokenizer.json`.

    Raises BundleError if the file is damaged or hostile, UnsupportedModelError if it has components that
    ordinary tokenizers of language models don't have.
    """
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"tokenizer.json can't be used: {json_fault(error)}") from error
    document = _object(document, "tokenizer.json")
    model = _object(document.get("model"), "its model")
    vocabulary = _vocabulary(model)
    added = _added_tokens(document.get("added_tokens"), vocabulary)
    # Prepending the empty text changes nothing, but confuses the library's offsets.
    normalizers = tuple(
        part
        for part in _flattened(document.get("normalizer"), "normalizers")
        if (part["type"], part.get("prepend")) != ("Prepend", "")
    )
    pre_tokenizers = tuple(_flattened(document.get("pre_tokenizer"), "pretokenizers"))
    _check_components(normalizers, pre_tokenizers)
    byte_level, leading_space = _decoding_rules(document.get("decoder"))
    return TokenizerFile(
        vocabulary,
        _merges(model, vocabulary),
        _options(model),
        added,
        normalizers,
        pre_tokenizers,
        byte_level,
        leading_space,
        _frames(document.get("post_processor")),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object with distinct keys. Raises BundleError for equal keys, of which the library would take the
    last.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise BundleError("tokenizer.json has an object with the same key twice")
    return result


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BundleError(f"tokenizer.json can't be used: {what} isn't an object")
    return value


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BundleError(f"tokenizer.json can't be used: {what} is {value!r:.40}; it must be a string")
    return value


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Ids by piece, all different. Raises UnsupportedModelError for any algorithm but byte pairs (BPE)."""
    # Files of old versions have no type; only BPE has merges.
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedModelError(f"tokenizer model {kind!r:.40} isn't supported; BPE is")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedModelError("tokenizers with subword prefixes or word suffixes aren't supported")
    vocabulary = _object(model.get("vocab"), "its vocabulary")
    if not set(map(type, vocabulary.values())) <= {int}:
        raise BundleError("tokenizer.json can't be used: its vocabulary has ids that aren't whole numbers")
    ids = set(vocabulary.values())
    if min(ids, default=0) < 0 or max(ids, default=0) > MAX_TOKEN_ID:
        raise BundleError(f"tokenizer.json has a token id that isn't from 0 to {MAX_TOKEN_ID}")
    if len(ids) != len(vocabulary):
        raise BundleError("tokenizer.json gives two pieces the same id")
    if max(map(len, vocabulary), default=0) > MAX_TOKEN_CHARS:
        raise BundleError(f"tokenizer.json has a piece of more than {MAX_TOKEN_CHARS} characters")
    return vocabulary


def _merges(model: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces that merge into one. The file has each as two strings, or as one with a space in
    it.
    """
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise BundleError("tokenizer.json can't be used: its merges aren't a list")
    kinds = set(map(type, merges))
    if not (kinds <= {str} or kinds <= {list}):
        raise BundleError("tokenizer.json can't be used: its merges aren't all spelt alike")
    pairs = [tuple(merge.split(" ")) for merge in merges] if kinds == {str} else list(map(tuple, merges))
    if not (set(map(len, pairs)) <= {2} and set(map(type, chain.from_iterable(pairs))) <= {str}):
        raise BundleError("tokenizer.json can't be used: a merge isn't a pair of pieces")
    if not set(map("".join, pairs)) <= vocabulary.keys():
        raise BundleError(
            "tokenizer.json can't be used: a merge makes a piece that its vocabulary hasn't got"
        )
    return pairs


def _options(model: dict[str, Any]) -> dict[str, Any]:
    unknown = model.get("unk_token")
    options: dict[str, Any] = {
        name: model.get(name) is True for name in ("fuse_unk", "byte_fallback", "ignore_merges")
    }
    return options | {"unk_token": None if unknown is None else _string(unknown, "unk_token")}


def _added_tokens(value: object, vocabulary: dict[str, int]) -> tuple[AddedToken, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BundleError("tokenizer.json can't be used: its added tokens aren't a list")
    tokens = []
    by_id = {token: piece for piece, token in vocabulary.items()} if value else {}
    for entry in value:
        entry = _object(entry, "an added token")
        content, token = _string(entry.get("content"), "an added token's content"), entry.get("id")
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise BundleError(f"tokenizer.json can't be used: {content!r:.40} has the id {token!r:.40}")
        if not 0 < len(content) <= MAX_TOKEN_CHARS:
            raise BundleError(
                f"tokenizer.json has an added token of {len(content)} characters; it must have 1 to "
                f"{MAX_TOKEN_CHARS}"
            )
        if by_id.setdefault(token, content) != content or vocabulary.get(content, token) != token:
            raise BundleError("tokenizer.json gives two pieces the same id")
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        tokens.append(AddedToken(token, content, *(entry.get(name) is True for name in names)))
    if len({token.content for token in tokens}) != len(tokens):
        raise BundleError("tokenizer.json has the same added token twice")
    chars = sum(len(token.content) for token in tokens)
    if chars > MAX_ADDED_CHARS:
        raise BundleError(
            f"tokenizer.json's added tokens have {chars} characters; the limit is {MAX_ADDED_CHARS}"
        )
    return tuple(tokens)


def _flattened(value: object, key: str, depth: int = 0) -> Iterator[Component]:
    """Yields the components of a single component or of nested sequences, in order."""
    if value is None:
        return
    component = _object(value, "a component")
    if component.get("type") != "Sequence":
        yield component | {"type": _string(component.get("type"), "a component's type")}
        return
    inner = component.get(key)
    if not isinstance(inner, list) or depth == MAX_COMPONENTS:
        raise BundleError(f"tokenizer.json can't be used: a sequence has no {key}, or nests too deep")
    for part in inner:
        yield from _flattened(part, key, depth + 1)


def _check_components(normalizers: Sequence[Component], pre_tokenizers: Sequence[Component]) -> None:
    """Check that the components together can't multiply a text or take too long for it. Raises BundleError if
    they could.

    Raises UnsupportedModelError for an unknown component.
    """
    for what, parts, known in (
        ("normalizer", normalizers, _NORMALIZERS),
        ("pre-tokenizer", pre_tokenizers, _PRE_TOKENIZERS),
    ):
        if len(parts) > MAX_COMPONENTS:
            raise BundleError(f"the tokenizer has {len(parts)} {what}s; the limit is {MAX_COMPONENTS}")
        for part in parts:
            if part["type"] not in known:
                raise UnsupportedModelError(f"tokenizer {what} {part['type'][:40]} isn't supported")
            if part["type"] == "FixedLength" and (type(part.get("length")) is not int or part["length"] < 1):
                raise BundleError(
                    f"the tokenizer cuts text in pieces of {part.get('length')!r:.40} characters"
                )
    kinds = [part["type"] for part in pre_tokenizers]
    for kind in _ADD_TEXT:
        if kinds.count(kind) > 1:
            raise BundleError(f"the tokenizer spells text anew more than once: two pre-tokenizers are {kind}")
    growth = _replacement_growth(normalizers)
    if growth > MAX_GROWTH:
        raise BundleError(
            f"the tokenizer's replacements make text {growth} times longer; {MAX_GROWTH} times is the limit"
        )
    cost = sum((_cost(part) for part in (*normalizers, *pre_tokenizers)), Cost())
    if cost.fixed > MAX_COST.fixed or cost.linear > MAX_COST.linear:
        raise BundleError(
            f"the tokenizer's patterns take up to {cost.fixed} steps at a place of a text, and {cost.linear} "
            f"for every character; the limits are {MAX_COST.fixed} and {MAX_COST.linear}"
        )


def _replacement_growth(normalizers: Sequence[Component]) -> int:
    growth = 1
    for part in normalizers:
        if part["type"] == "Replace":
            growth *= max(1, len(_string(part.get("content"), "a replacement")))
        elif part["type"] == "Prepend":
            # Prepended to every stretch between added tokens: at most to every other character.
            growth *= max(1, len(_string(part.get("prepend"), "what is put before a text")))
    return growth


def _cost(part: Component) -> Cost:
    """The cost of matching a component's pattern. Raises BundleError if the component replaces
    empty matches.
    """
    if part["type"] not in ("Split", "Replace"):
        return Cost()
    pattern = _object(part.get("pattern"), "a pattern")
    if set(pattern) == {"String"}:
        text = _string(pattern["String"], "a pattern")
        cost = PatternCost(fixed=len(text), matches_empty=not text)
    elif set(pattern) == {"Regex"}:
        cost = pattern_cost(_string(pattern["Regex"], "a pattern"))
    else:
        raise BundleError("tokenizer.json can't be used: a pattern is neither a String nor a Regex")
    if cost.matches_empty and part["type"] == "Replace":
        raise BundleError("the tokenizer replaces the empty text, which is everywhere in a text")
    return cost


def _sequence(key: str, parts: list[Component]) -> Component | None:
    return {"type": "Sequence", key: parts} if parts else None


def _within(part: Component, first: bool, last: bool) -> Component | None:
    if part["type"] == "Prepend":
        return part if first else None
    if part["type"] == "Strip":
        ends = {
            side: part.get(side) is True and at for side, at in (("strip_left", first), ("strip_right", last))
        }
        return {**part, **ends}
    return part


def _continuing(part: Component) -> Component:
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if part["type"] == "Metaspace":
        rest = {name: value for name, value in part.items() if name != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    return part


def _decoding_rules(decoder: object) -> tuple[bool, LeadingSpace]:
    """Whether pieces are written in GPT-2's byte alphabet, and the rule for a leading space."""
    parts = list(_flattened(decoder, "decoders"))
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return True, "keep"
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaced = [(part.get("pattern"), part.get("content")) for part in parts if part["type"] == "Replace"]
        strips = [(p.get("content"), p.get("start"), p.get("stop")) for p in parts if p["type"] == "Strip"]
        spaces = [p.get("replacement") for p in parts if p["type"] == "Metaspace"]
        marks = all(rule == ({"String": SPACE_MARK}, " ") for rule in replaced) and spaces in (
            [],
            [SPACE_MARK],
        )
        if marks and strips in ([], [(" ", 1, 0)]) and (replaced or spaces):
            dropping = bool(strips) or any(p["type"] == "Metaspace" and _prepends(p) for p in parts)
            return False, "one" if dropping else "keep"
    raise UnsupportedModelError(f"tokenizer decoder {json.dumps(decoder)[:200]} isn't supported")


def _prepends(metaspace: Component) -> bool:
    """Whether a Metaspace decoder drops the first space: by `add_prefix_space` in old files, by a scheme in
    new ones.
    """
    scheme = metaspace.get("prepend_scheme", "always")
    return scheme in ("always", "first") and metaspace.get("add_prefix_space") is not False


def _frames(post_processor: object) -> bool:
    """Whether the post-processor puts exactly one token before a text."""
    for part in _flattened(post_processor, "processors"):
        if part["type"] in ("BertProcessing", "RobertaProcessing"):
            return True
        if part["type"] == "TemplateProcessing":
            single = part.get("single")
            begun = [next(iter(piece), "") for piece in single[:2]] if isinstance(single, list) else []
            if begun == ["SpecialToken", "Sequence"]:
                return True
    return False
