"""How byte-level tokenizers split a text before they merge, by the names that GGUF files have for it.

A GGUF file holds tokens and merges, but of the splitting only a name, `tokenizer.ggml.pre`. Each rule here is
the one in the `tokenizer.json` of the models that the name was made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """One rule.

    Args:
        pattern: splits a text; None for GPT-2's, which is part of the `ByteLevel` component.
        first: patterns that split a text before that one, each of them what those before it left.
        punctuation: whether runs of punctuation stand apart, which is decided first of all.
        digits: whether every digit stands alone, which is decided before the pattern.
        threes: whether numbers are cut into threes of digits, which is decided last, on bytes as spelt.
        composes: whether text is brought to Unicode's form C first.
        whole_tokens: whether a part that is a token is never merged from smaller ones.
        adds_bos: whether a text gets a BOS token if the file doesn't say.
    """

    pattern: str | None = None
    first: tuple[str, ...] = ()
    punctuation: bool = False
    digits: bool = False
    threes: bool = False
    composes: bool = False
    whole_tokens: bool = False
    adds_bos: bool = False

    @property
    def normalizer(self) -> dict[str, Any] | None:
        """The normalizer of a `tokenizer.json`."""
        return {"type": "NFC"} if self.composes else None

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """The pre-tokenizer of a `tokenizer.json`."""
        parts: list[dict[str, Any]] = []
        if self.punctuation:
            parts.append({"type": "Punctuation", "behavior": "Contiguous"})
        if self.digits:
            parts.append({"type": "Digits", "individual_digits": True})
        parts += map(_split, self.first)
        if self.pattern is not None:
            parts.append(_split(self.pattern))
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        parts.append({**byte_level, "use_regex": self.pattern is None})
        if self.threes:
            parts += [{"type": "Digits", "individual_digits": False}, _split("[0-9][0-9][0-9]")]
        return {"type": "Sequence", "pretokenizers": parts}


def _split(pattern: str) -> dict[str, Any]:
    """The component that gives each match of `pattern` a part of its own."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2 = Splitting()
_SINGLE_DIGITS = Splitting(digits=True)
_LLAMA_BPE = Splitting(_LLAMA3, whole_tokens=True, adds_bos=True)

SPLITTINGS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "falcon": Splitting(punctuation=True, threes=True),
    "gpt-4o": Splitting(_GPT_4O),
    "chatglm-bpe": Splitting(_LLAMA3),
    "glm4": Splitting(_LLAMA3),
    "stablelm2": Splitting(_QWEN2),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "dbrx": Splitting(_LLAMA3),
    "smaug-bpe": Splitting(_LLAMA3),
    "qwen2": Splitting(_QWEN2, composes=True),
    "qwen35": Splitting(_QWEN35, composes=True),
    "deepseek-r1-qwen": Splitting(_QWEN2),
    "deepseek-v3": Splitting(_DEEPSEEK3, (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")),
    "tekken": Splitting(_TEKKEN, whole_tokens=True, adds_bos=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
}
"""By the value of `tokenizer.ggml.pre`."""
