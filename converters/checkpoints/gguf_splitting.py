"""How byte-level tokenizers split a text before merging, by the names that GGUF gives to the ways.

A GGUF file contains tokens and merges, but only a name for the splitting, `tokenizer.ggml.pre`. Each rule
here is taken from the `tokenizer.json` of the models for which the name was made, or from llama.cpp if these
have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_DEEPSEEK3_WORD = rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_THREES_FROM_LEFT = r"\p{N}{1,3}"
_CHINESE_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_OR_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)


def _cased(upper: str, lower: str) -> str:
    """A pattern for words that begin with capital letters, with contractions."""
    start, end = r"[^\r\n\p{L}\p{N}]?", f"{_CONTRACTIONS}?"
    return rf"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"


_GPT_4O = rf"{_cased(_UPPER, _LOWER)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_YOUTU = rf"{_cased(_UPPER, _LOWER)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_NO_CHINESE = r"&&[^\p{Han}]]"
_KIMI_WORD = _cased(_UPPER[:-1] + _NO_CHINESE, _LOWER[:-1] + _NO_CHINESE)
_KIMI_K2 = rf"\p{{Han}}+|{_KIMI_WORD}|\p{{N}}{{1,3}}|{_REST}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001 - wide marks are meant
"""A pattern for words up to the marks of many scripts, brackets and bars."""
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""DeepSeek's list of cased letters, as the inside of a character class."""
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_THREES_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_FEWER_BLANKS = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)


@dataclass(frozen=True)
class Splitting:
    """How one kind of tokenizer splits a text.

    Args:
        pattern: splits a text; None for GPT-2's pattern, which is part of the `ByteLevel` component.
        first: patterns that split a text before `pattern`, each applied to the parts that the one before
            left.
        punctuation: whether runs of punctuation are separate parts; decided before everything else.
        digits: whether every digit is a separate part; decided before `pattern`.
        threes: whether numbers are cut into groups of three digits; decided last, on spelled bytes.
        composes: whether text is converted to Unicode's form C first. keeps_tokens: whether a part that is a
            token is used as it is, without merging.
        adds_bos: whether a text gets a BOS token if the file doesn't say.
    """

    pattern: str | None = None
    first: tuple[str, ...] = ()
    punctuation: bool = False
    digits: bool = False
    threes: bool = False
    composes: bool = False
    keeps_tokens: bool = False
    adds_bos: bool = False

    @property
    def normalizer(self) -> dict[str, Any] | None:
        """The component `normalizer` for a `tokenizer.json`; None if there is none."""
        return {"type": "NFC"} if self.composes else None

    @property
    def pre_tokenizer(self) -> dict[str, Any]:
        """The component `pre_tokenizer` for a `tokenizer.json`."""
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
    """A component that makes each match of `pattern` a separate part."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2 = Splitting()
_SINGLE_DIGITS = Splitting(digits=True)
_LLAMA_BPE = Splitting(_LLAMA3, keeps_tokens=True, adds_bos=True)
_GLM = Splitting(_LLAMA3, keeps_tokens=True)
_DEEPSEEK_V3 = Splitting(_DEEPSEEK3, (_THREES_FROM_LEFT, _CHINESE_OR_KANA))
_BAILING = Splitting(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_AYA = Splitting(_GPT_4O, (r"\d{1,3}(?=(?:\d{3})*\b)",))

SPLITTINGS = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code"), _GPT2),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), _GPT2),
    "falcon": Splitting(punctuation=True, threes=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Splitting(_GPT_4O)),
    "granite-embed-multi-97m": Splitting(_GPT_4O, keeps_tokens=True),
    "chatglm-bpe": Splitting(_LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), _GLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1"), _LLAMA_BPE),
    **dict.fromkeys(("pixtral", "midm-2.0", "jina-v5-nano"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting(_LLAMA3)),
    "jais-2": Splitting(
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|\s*[\r\n]+|{_FEWER_BLANKS}|\s{{1}}"
    ),
    "minicpm5": Splitting(
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_REST}", (_THREES_FROM_LEFT,), keeps_tokens=True
    ),
    "qwen2": Splitting(_QWEN2, composes=True),
    "qwen35": Splitting(_QWEN35, composes=True),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), Splitting(_QWEN2)),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), Splitting(_QWEN2)),
    "ufakzeka": Splitting(rf"{_WORD}|\p{{N}}|{_REST}"),
    "laguna": Splitting(_QWEN2, (r"[^\n]+|[\n]+",)),
    "seed-coder": Splitting(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "exaone-moe": Splitting(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "spark2_5": Splitting(
        r"\p{N}",
        (
            _THREES_FROM_LEFT,
            _CHINESE_OR_KANA,
            rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    "afmoe": Splitting(_DEEPSEEK3, (_THREES_FROM_RIGHT, _ASIAN)),
    "deepseek-llm": Splitting(
        r"\p{N}+",
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CHINESE_OR_KOREAN,
        ),
    ),
    "deepseek-coder": Splitting(r"\p{N}", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_OR_KOREAN)),
    "youtu": Splitting(_YOUTU, (_YOUTU_SCRIPTS,), keeps_tokens=True),
    "tekken": Splitting(_TEKKEN, keeps_tokens=True, adds_bos=True),
    "kimi-k2": Splitting(_KIMI_K2),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _AYA),
    "superbpe": Splitting(r"(?=(\d{3})+(?!\d))", (r"\p{N}+",)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Splitting(_BLOOM)),
    "viking": Splitting(r"\p{N}", (_BLOOM,)),
    "chameleon": Splitting(
        GPT2_PATTERN,
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
        ),
        adds_bos=True,
    ),
    "default": Splitting(r"[0-9][0-9][0-9]", (r"[\p{P}$+<=>^~|]+", GPT2_PATTERN, r"\p{N}+")),
}
"""Splittings by value of `tokenizer.ggml.pre`."""
