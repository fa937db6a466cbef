"""Random changes of JSON values, text and bytes, decided by the generator that is handed over."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
"""Larger files are holes."""
Place = tuple[Any, ...]
"""Keys and indices that lead to a place inside a JSON value."""

NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 8, 15, 16, 63, 64, 65, 127, 128, 255, 256, 511, 512, 4095, 4096, 65535, 65536,
    1 << 20, 1 << 22, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    1 << 64, 10**400, -(1 << 31), -(1 << 63), 0.0, -0.0, 0.5, 1.5, 1e-300, 1e-45, 1e38, 1e308, -1e308,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, "", "x", "../x", "/etc/passwd", "a" * 300, "\x00", "\ud800", "é", "\u202e",
    "\U0010ffff", "1", "1e5", "nan", [], {}, [None], [[]], [0] * 70, {"a": None}, [1, 2, 3], {"": {"": []}},
    float("nan"), float("inf"), float("-inf"), *NUMBERS,
]  # fmt: skip
FRAGMENTS = [
    "a", "b", " ", "  ", "\n", "\t", "\r\n", "0", "9", ".", ",", "'", "\"", "'s", "é", "ß", "İ", "中", "文字",
    "안녕", "🙂", "👩‍👩‍👧", "\u0301", "\u200d", "\ufeff", "\ufffd", "\x00", "\x7f", "\u2581", "<s>", "</s>",
    "<|user|>", "<0x41>", "word", "Ünïcödé", "a" * 40, " " * 40, "1234567890", "\u0085", "\u3000", "ﷺ",
    "\U0010fffd",
]  # fmt: skip


def paths(value: Any, path: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value, but the whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def nearby(value: Any, rng: random.Random) -> Any:
    """Another value of the same type, so that it comes further than one of another type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        steps: list[Callable[[int], Any]] = [
            lambda v: v + 1, lambda v: v - 1, lambda v: v * 2, lambda v: v // 2, lambda v: -v,
            lambda v: v + 64, lambda v: v * rng.choice([3, 10, 1000]), lambda v: rng.choice(NUMBERS[:34]),
        ]  # fmt: skip
        return rng.choice(steps)(value)
    if isinstance(value, float):
        return rng.choice([value * 2, value / 2, -value, value * 1e6, value / 1e6, 0.0, 1.0, 1e-38, 3e38])
    if isinstance(value, str):
        return changed_text(value, rng)
    if isinstance(value, list):
        new = list(value)
        if new and rng.random() < 0.5:
            del new[rng.randrange(len(new))]
        else:
            new.insert(rng.randint(0, len(new)), copy.deepcopy(rng.choice(new)) if new else 0)
        return new
    return rng.choice(VALUES)


def change_json(value: Any, rng: random.Random, within: Place = ()) -> Place:
    """Change one place inside `value`, below `within`, and return where."""
    for key in within:
        value = value[key]
    found = list(paths(value))
    if not found:
        return within
    *way, last = rng.choice(found)
    inner = value
    for key in way:
        inner = inner[key]
    how = rng.random()
    if how < 0.1:
        del inner[last]
    elif how < 0.6:
        inner[last] = nearby(inner[last], rng)
    elif how < 0.9 or not isinstance(inner, dict):
        inner[last] = copy.deepcopy(rng.choice(VALUES))
    else:
        inner[changed_text(str(last), rng)] = inner.pop(last)
    return (*within, *way, last)


def changed_json(data: bytes, rng: random.Random, times: int = 1) -> bytes:
    """A JSON file with as many places changed; sometimes not JSON any more."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(data, rng)
    for _ in range(times):
        change_json(value, rng)
    return json_bytes(value, rng)


def json_bytes(value: Any, rng: random.Random) -> bytes:
    """As people and programs write it: a nested array and a repeated key now and then."""
    text = json.dumps(value)
    if rng.random() < 0.02:
        text = "[" * 5000 + text + "]" * 5000
    if rng.random() < 0.02 and text.startswith("{") and ":" in text:
        text = "{" + text[1 : text.find(",") if "," in text else -1] + "," + text[1:]
    return text.encode("utf-8", "surrogatepass")


def changed_text(text: str, rng: random.Random) -> str:
    """A text with something put in, taken out or repeated."""
    at = rng.randint(0, len(text))
    end = rng.randint(at, min(len(text), at + 20))
    how = rng.randrange(4)
    if how == 0:
        return text[:at] + rng.choice(FRAGMENTS) + text[at:]
    if how == 1:
        return text[:at] + text[end:]
    if how == 2:
        return text[:at] + text[at:end] * rng.choice([2, 3, 50]) + text[end:]
    return text[:at] + rng.choice(FRAGMENTS) + text[end:]


def made_up_text(rng: random.Random, pieces: int = 40) -> str:
    """Text of many scripts, with what special tokens are called in between."""
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(0, pieces)))


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes overwritten, cut off, put in, moved or added."""
    content = bytearray(data)
    if not content:
        return rng.randbytes(rng.randint(1, 50))
    how = rng.randrange(6)
    span = min(len(content), rng.choice([64, 4096, 1 << 30]))
    at = rng.randrange(span)
    if how == 0:
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(span)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    elif how == 1:
        del content[rng.randrange(len(content)) :]
    elif how == 2:
        content += rng.randbytes(rng.randint(1, 50))
    elif how == 3:
        content[at : at + rng.choice([4, 8])] = rng.choice([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 3])
    elif how == 4:
        del content[at : at + rng.randint(1, 16)]
    else:
        content[at:at] = content[at : at + rng.randint(1, 64)]
    return bytes(content)


def make_odd(path: Path, rng: random.Random) -> None:
    """Another kind of file at `path`, or none; where links lead to, nothing can be written."""
    path.unlink()
    how = rng.randrange(6)
    if how == 0:
        path.symlink_to(rng.choice(["/dev/zero", "/proc/version", path.name, "/proc/self/mem", "/proc"]))
    elif how == 1:
        os.mkfifo(path)
    elif how == 2:
        path.mkdir()
    elif how == 3:
        path.touch()
    elif how == 4:
        with path.open("wb") as file:
            file.truncate(rng.choice([1, 8, 4096, 1 << 30, 1 << 40]))


def is_plain(path: Path) -> bool:
    """Whether it is a file that may be read whole and written to."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size <= MOST_BYTES


def changed_header(data: bytes, rng: random.Random, keep_length: bool = False) -> bytes:
    """A safetensors file with another header; keep_length: padded to the old one, as far as it goes."""
    length = int.from_bytes(data[:8], "little")
    how = rng.random()
    if how < 0.15:
        wrong = rng.choice([0, 1, length + 1, length - 1, len(data), len(data) - 8, 1 << 40, (1 << 64) - 1])
        return (wrong & ((1 << 64) - 1)).to_bytes(8, "little") + data[8:]
    header = data[8 : 8 + length]
    header = changed_json(header.rstrip(), rng) if how < 0.85 else changed_bytes(header, rng)
    if keep_length:
        header = header.ljust(length)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]
