"""Names of repositories of the Hugging Face hub, and of GGUF files in them.

`Qwen/Qwen3-0.6B` names a repository, `Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf` a file in one.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from ondevice.records import dataclass

_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = rf"({_PART}/{_PART})"
_FILE = r"((?:[A-Za-z0-9][\w.-]{0,199}/){0,4}[A-Za-z0-9][\w.-]{0,199})"
_GIVEN = re.compile(rf"{_NAME}(?::{_FILE})?", re.ASCII)
_CONVERTED = re.compile(rf"{_NAME}@[0-9a-f]{{8}}(?::{_FILE})?", re.ASCII)
_NUMBER = re.compile(r"-\d{5}-of-\d{5}(?=\.[^.]*$|$)", re.ASCII)
"""The part number in a file's name, before the suffix."""


@dataclass(frozen=True)
class Repository:
    """A repository, or a file of it, as the source of a conversion."""

    name: str
    file: str = ""
    """The file's path in the repository; empty for all of it."""

    def __str__(self) -> str:
        return f"{self.name}:{self.file}" if self.file else self.name

    @property
    def bundle_name(self) -> str:
        """The name of the bundle that it is converted to."""
        return model_name(PurePath(self.file)) if self.file else self.name.rpartition("/")[2]

    @property
    def full_bundle_name(self) -> str:
        """A name for its bundle that no other repository's bundle has."""
        owned = self.name.replace("/", "--")
        return f"{owned}--{self.bundle_name}" if self.file else owned

    def is_same(self, other: Repository) -> bool:
        """Whether both mean the same model, whatever part they name."""
        mine, others = (_NUMBER.sub("", source.file) for source in (self, other))
        return (self.name.casefold(), mine) == (other.name.casefold(), others)


def parse_repository(text: str) -> Repository | None:
    """The repository, or file of one, named by `text`, or None."""
    match = _GIVEN.fullmatch(text)
    return None if match is None else Repository(match[1], match[2] or "")


def converted_from(source: str) -> Repository | None:
    """The repository that a bundle comes from, given its manifest's `source`, or None."""
    match = _CONVERTED.fullmatch(source)
    return None if match is None else Repository(match[1], match[2] or "")


def model_name(file: PurePath) -> str:
    """A checkpoint file's name without its suffix and part number."""
    return _NUMBER.sub("", file.stem)
