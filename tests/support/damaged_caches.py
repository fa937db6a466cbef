"""Ways in which a file of a prompt cache can be damaged, foreign or hostile."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ondevice.kernels import _native
from tests.support.cached_texts import written

MOST_BYTES = 64 << 20
"""Larger files are holes."""
Damage = Callable[[Path, random.Random], None]


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size or 1))


def lengthen(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(bytes(chance.randrange(1, 5000)))


def bend(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    # Half of the time in the header, which is small beside the state.
    most = min(4096, len(data)) if chance.random() < 0.5 else len(data)
    for _ in range(chance.choice((1, 3, 100)) if data else 0):
        data[chance.randrange(most)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def exchange(path: Path, chance: random.Random) -> None:
    plain = [it for it in written(path.parent) if not it.is_symlink() and it.stat().st_size <= MOST_BYTES]
    other = chance.choice(plain or [path])
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def link(path: Path, chance: random.Random) -> None:
    """A link to a sound file, to nothing, or to a device without an end."""
    elsewhere = path.parent.parent / f"elsewhere-{chance.random()}"
    path.rename(elsewhere)
    path.symlink_to(chance.choice((elsewhere, Path("/nowhere"), Path("/dev/zero"))))


def pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path, chance: random.Random) -> None:
    path.chmod(0)


def lie(path: Path, chance: random.Random) -> None:
    """A header that is sound by its own checksum, and doesn't say what is there."""
    data = path.read_bytes()
    nbytes = int.from_bytes(data[8:12], "little")
    try:
        header = json.loads(data[16 : 16 + nbytes])
    except ValueError:
        return  # Damaged already.
    change = chance.choice(
        (
            {"tokens": [*header["tokens"], 7]},
            {"tokens": [5] * len(header["tokens"])},
            {"tokens": []},
            {"tokens": [-1] * 3},
            {"tokens": "no"},
            {"parts": [1 << 60]},
            {"parts": []},
            {"parts": [1] * 5000},
            {"parts": [4096, *header["parts"]]},
            {"crcs": "00" * (len(header["crcs"]) // 2)},
            {"crcs": "zz"},
            {"crcs": 7},
            {"parent": "0" * 32},
            {"binding": {}},
            {"binding": {**header["binding"], "release": "0.0"}},
            {"more": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]},
        )
    )
    text = json.dumps(header | change).encode()
    crc = _native.crc32c(np.frombuffer(text, np.uint8), [len(text)]).astype("<u4").tobytes()
    size = chance.choice((len(text), len(text), 0, 1 << 30))
    start = data[:8] + size.to_bytes(4, "little") + crc + text
    path.write_bytes(start.ljust(-(-len(start) // 4096) * 4096, b"\0") + data[4096:])


DAMAGES: tuple[Damage, ...] = (
    cut, lengthen, bend, bend, empty, exchange, link, pipe, directory, unreadable, lie, lie, lie,
)  # fmt: skip
