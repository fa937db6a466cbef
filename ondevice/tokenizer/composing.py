"""Unicode's normal form C as the `tokenizers` library makes it, whatever Unicode version Python has."""

from __future__ import annotations

import re
import unicodedata

# Made by tests/tokenizer/unicode_tables.py. To the library these are characters like any other: nothing moves
# past them, and they are composed with nothing.
_LATER = re.compile(
    "(["
    "\u05c8-\u05c9\u07fd\u0897-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b-\u0d3c\u0eba\u1715"
    "\u1abf-\u1af0\u1df6-\u1dfa\ua82c\U000105c9\U000105d2\U000105da\U000105e4\U00010d24-\U00010d27"
    "\U00010d69-\U00010d6d\U00010eab-\U00010eac\U00010ecb-\U00010ecf\U00010ef0-\U00010efb"
    "\U00010efd-\U00010eff\U00010f46-\U00010f50\U00010f82-\U00010f85\U00011070\U0001133b"
    "\U00011382-\U00011385\U0001138b\U0001138e\U00011390-\U00011391\U000113c2\U000113c5"
    "\U000113c7-\U000113c8\U000113ce-\U000113d0\U0001145e\U00011839-\U0001183a\U00011935\U00011938"
    "\U0001193d-\U0001193e\U00011943\U000119e0\U00011a34\U00011a47\U00011a99\U00011d42"
    "\U00011d44-\U00011d45\U00011d97\U00011f41-\U00011f42\U0001611e\U00016121-\U00016129\U0001612f"
    "\U00016d63\U00016d67-\U00016d6a\U00016ff0-\U00016ff1\U0001d127-\U0001d128\U0001d250-\U0001d252"
    "\U0001d25b-\U0001d25c\U0001d25f\U0001d280-\U0001d281\U0001e08f\U0001e130-\U0001e136\U0001e2ae"
    "\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e5ee-\U0001e5ef\U0001e6e3\U0001e6e6"
    "\U0001e6ee-\U0001e6ef\U0001e6f5"
    "])"
)


def composed(text: str) -> str:
    """`text` in form C, but for characters that are newer than Unicode 9, which keep their places."""
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return text
    return "".join(unicodedata.normalize("NFC", part) for part in _LATER.split(text))
