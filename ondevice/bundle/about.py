"""Documents in a bundle's folder, such as `about.txt`, which describes the model. They are untrusted."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from ondevice.bundle.files import contained, read_file
from ondevice.errors import BundleError

ABOUT = "about.txt"
DOCUMENTS = (ABOUT, "LICENSE", "NOTICE", "README.md")
"""Files for people to read, which are copied with a bundle."""
MAX_BYTES = 2048
MAX_LINES = 16
MAX_LINE_CHARS = 160


def read_about(folder: Path) -> str:
    """The printable characters of `about.txt`, in short lines; empty if there is no readable text."""
    try:
        text = read_file(contained(folder.resolve(), ABOUT), MAX_BYTES).decode("utf-8")
    except (BundleError, UnicodeDecodeError):
        return ""
    lines = [_printable(line)[:MAX_LINE_CHARS] for line in text.strip().split("\n")]
    return "\n".join(lines[:MAX_LINES])


def _printable(line: str) -> str:
    """The line without characters that could control a terminal, reverse the text, or end a line."""
    kept = (char for char in line if unicodedata.category(char)[0] != "C" and char not in "\u2028\u2029")
    return "".join(kept).rstrip()
