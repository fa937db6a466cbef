"""GGUF models in several parts, `NAME-00001-of-00003.gguf` and so on, each of which has a header."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ondevice.converters.checkpoints.base import SourceFile
from ondevice.converters.checkpoints.gguf_file import MAX_TENSORS, GgufHeader
from ondevice.errors import CheckpointError

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 512


@dataclass(frozen=True)
class GgufPart:
    file: SourceFile
    header: GgufHeader


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The models among GGUF files: the sorted file names of each model, by the name that they have in common.

    Encoders of images (`mmproj`) and statistics (`imatrix`) aren't models.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        part = PART.fullmatch(name)
        if name.endswith(".gguf") and not name.rpartition("/")[2].startswith(("mmproj", "imatrix")):
            models.setdefault(f"{part['stem']} of {part['count']}" if part else name, []).append(name)
    return models


def open_parts(named: str, opened: Callable[[str], GgufPart]) -> list[GgufPart]:
    """The parts of a model, in order. Only the first keeps its metadata. opened: opens a file by its name."""
    match = PART.fullmatch(named)
    if match is None:
        part = opened(named)
        if (part.header.integer("split.count") or 1) > 1:
            raise CheckpointError(
                f"{named} is one of {part.header.integer('split.count')} parts, whose names must end in "
                "-00001-of-00003.gguf and so on, all in one folder; give them their own names back"
            )
        return [part]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise CheckpointError(
            f"{named} would be part {int(match['number'])} of {count}; parts count from 1, and at most "
            f"{MAX_PARTS} are possible"
        )
    parts = []
    for number in range(1, count + 1):
        name = f"{match['stem']}-{number:05d}-of-{count:05d}.gguf"
        part = opened(name)
        header = part.header
        if (header.integer("split.no"), header.integer("split.count")) != (number - 1, count):
            raise CheckpointError(
                f"{name} says that it is part {header.integer('split.no')} (from 0) of "
                f"{header.integer('split.count')}; download the parts again"
            )
        parts.append(part if number == 1 else GgufPart(part.file, replace(header, metadata={})))
        if sum(len(part.header.tensors) for part in parts) > MAX_TENSORS:
            raise CheckpointError(f"the parts of {match['stem']} have more than {MAX_TENSORS} tensors")
    total = parts[0].header.integer("split.tensors.count")
    present = sum(len(part.header.tensors) for part in parts)
    if total is not None and total != present:
        raise CheckpointError(
            f"the parts of {match['stem']} have {present} tensors of {total}; download them again"
        )
    return parts
