"""What a model can do, in its maker's words: `about.txt` beside a bundle. It is as hostile as all of it."""

from __future__ import annotations

import unicodedata
from pathlib import Path

from ondevice.bundle.files import contained, read_whole
from ondevice.errors import BundleError

ABOUT = "about.txt"
MAX_BYTES = 2048
MAX_LINES = 16
MAX_LINE_CHARS = 160


def read_about(folder: Path) -> str:
    """The text, of printable characters and short lines; empty where there is none that could be shown."""
    try:
        text = read_whole(contained(folder.resolve(), ABOUT), MAX_BYTES).decode("utf-8")
    except (BundleError, UnicodeDecodeError):
        return ""
    lines = [_printable(line)[:MAX_LINE_CHARS] for line in text.strip().split("\n")]
    return "\n".join(lines[:MAX_LINES])


def _printable(line: str) -> str:
    """Without what could steer a terminal, turn its text around, or end a line."""
    kept = (char for char in line if unicodedata.category(char)[0] != "C" and char not in "\u2028\u2029")
    return "".join(kept).rstrip()
