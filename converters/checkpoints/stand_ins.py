"""Refuses files left by failed downloads: pointers, web pages, empty files."""

from __future__ import annotations

import re

from ondevice.converters.checkpoints.base import plain
from ondevice.errors import CheckpointError

START_BYTES = 512
"""Bytes of a file's start that are examined."""
_POINTER = b"version https://git-lfs."
_POINTED_SIZE = re.compile(rb"^size (\d{1,15})$", re.MULTILINE)
_PAGES = (b"<!doctype html", b"<!--", b"<html", b"<head", b"<body", b"<?xml")
_NEVER_EMPTY = (".json", ".model", ".safetensors", ".gguf", ".bin", ".txt")
_NEVER_TEXT = (".safetensors", ".gguf", ".bin", ".model")
_LARGEST_ANSWER_BYTES = 4096


def refuse_stand_in(name: str, start: bytes, nbytes: int) -> None:
    """Check a file. Raises CheckpointError if it is a git-LFS pointer, a web page, a server's answer, zeros
    or empty.

    name: the file's name. start: its first START_BYTES bytes. nbytes: its size.
    """
    why = _stand_in(name, start, nbytes)
    if why:
        raise CheckpointError(f"{name} {why}")


def _stand_in(name: str, start: bytes, nbytes: int) -> str:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(_POINTER):
        size = _POINTED_SIZE.search(start)
        target = f"the file of {size[1].decode()} bytes" if size else "the file"
        return (
            f"is a git-LFS pointer of {nbytes} bytes, not {target} that it stands for: run `git lfs pull` in "
            "the repository's folder, or download the file itself"
        )
    if text.lower().startswith(_PAGES):
        return (
            "is a web page that was saved under the file's name, not the file: download the file itself, by "
            "the link on that page, with a login if it asks for one"
        )
    if not nbytes:
        return "is empty; download it again" if name.endswith(_NEVER_EMPTY) else ""
    if not name.endswith(_NEVER_TEXT):
        return ""
    if len(start) >= 8 and not any(start):
        return "begins with zeros, as a download does that was begun and never filled; download it again"
    said = " ".join(text.decode("ascii", "replace").split())
    if nbytes <= _LARGEST_ANSWER_BYTES and text.isascii() and said.isprintable():
        said = plain(said)
        return f"is a text, '{said}', as a server answers in a file's place; download it again"
    return ""
