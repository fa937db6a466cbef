"""Makes the tables of Unicode that the native tokenizer needs, from what the `tokenizers` library does.

`python -m tests.tokenizer.unicode_tables` writes `ondevice/tokenizer/unicode_classes.h` and prints the
characters of `ondevice/tokenizer/byte_pairs.py`. The second needs `unicodedata2`, which knows characters that
are newer than Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from tokenizers import Regex
from tokenizers.normalizers import NFC, Replace
from tokenizers.pre_tokenizers import Digits

from tests.support.paths import ROOT

HEADER = ROOT / "ondevice" / "tokenizer" / "unicode_classes.h"
CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
CLASSES = {"kLetter": r"\p{L}", "kNumber": r"\p{N}", "kSpace": r"\s"}
"""Patterns of the library's regular expressions, by the names of their bits, from the lowest on."""
DIGIT = 8
"""Bit of what its `Digits` takes for a number."""


def classes() -> list[int]:
    """The bits of each of `CHARACTERS`."""
    text = "".join(CHARACTERS)
    bits = dict.fromkeys(CHARACTERS, 0)
    for place, pattern in enumerate(CLASSES.values()):
        others = set(Replace(Regex(pattern), "").normalize_str(text))
        bits |= {c: bits[c] | 1 << place for c in CHARACTERS if c not in others}
    digits = Digits(individual_digits=True)
    # Of a run without numbers, as all of these are, the library makes one piece.
    for piece, _ in digits.pre_tokenize_str(text):
        if len(piece) == 1 and len(digits.pre_tokenize_str(f"a{piece}")) == 2:
            bits[piece] |= DIGIT
    return list(bits.values())


def header(bits: list[int]) -> str:
    """The text of `unicode_classes.h`."""
    entries = [
        f"{{{ord(CHARACTERS[run[0]]):#x}, {value}}}"
        for value, places in groupby(range(len(bits)), key=bits.__getitem__)
        if (run := list(places))
    ]
    lines = [", ".join(entries[at : at + 8]) for at in range(0, len(entries), 8)]
    names = ", ".join(f"{name} = {1 << place}" for place, name in enumerate([*CLASSES, "kDigit"]))
    return f"""// Made by tests/tokenizer/unicode_tables.py.
#pragma once

#include <cstdint>

namespace ondevice {{

// What a character matches: \\p{{L}}, \\p{{N}} and \\s as the `tokenizers` library's patterns have them,
// and what its Digits takes for a number.
constexpr uint8_t {names};

// Characters from `first` up to the next range.
struct ClassRange {{
  uint32_t first;
  uint8_t classes;
}};

// clang-format off
constexpr ClassRange kClassRanges[] = {{
    {("," + chr(10) + "    ").join(lines)},
}};
// clang-format on

}}  // namespace ondevice
"""


def later_characters() -> Iterator[str]:
    """Characters that newer versions of Unicode reorder or compose in form C, and the library doesn't."""
    import unicodedata2

    library = NFC().normalize_str
    for character in CHARACTERS:
        if unicodedata2.combining(character):
            texts = [f"a{character}\u0316", f"a\u0301{character}", f"a{character}\u0301\u3099\u0334"]
            if any(library(text) != unicodedata2.normalize("NFC", text) for text in texts):
                yield character
        parts = unicodedata2.decomposition(character)
        if parts and "<" not in parts:
            text = "".join(chr(int(part, 16)) for part in parts.split())
            if library(text) != unicodedata2.normalize("NFC", text):
                yield from (character, text[0])


def ranges(characters: Iterable[str]) -> str:
    """The inside of a regular expression's class."""
    codes = sorted(set(map(ord, characters)))
    runs = [[c for _, c in run] for _, run in groupby(enumerate(codes), key=lambda pair: pair[1] - pair[0])]

    def shown(code: int) -> str:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    return "".join(shown(run[0]) + (f"-{shown(run[-1])}" if len(run) > 1 else "") for run in runs)


if __name__ == "__main__":
    HEADER.write_text(header(classes()))
    print(ranges(later_characters()))
