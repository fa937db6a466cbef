"""Names of repositories of the Hugging Face hub, and of GGUF files in them.

`Qwen/Qwen3-0.6B` is a repository, `Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf` a file of one.
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
"""What a part's name has before its suffix."""


@dataclass(frozen=True)
class Repository:
    """A repository, or a file of it, as the source of a conversion."""

    name: str
    file: str = ""
    """The file's name with its folders; empty for the repository itself."""

    def __str__(self) -> str:
        return f"{self.name}:{self.file}" if self.file else self.name

    @property
    def bundle_name(self) -> str:
        """The name that its bundle has among the models."""
        return model_name(PurePath(self.file)) if self.file else self.name.rpartition("/")[2]

    @property
    def full_bundle_name(self) -> str:
        """A name for its bundle that no other repository's would have."""
        owned = self.name.replace("/", "--")
        return f"{owned}--{self.bundle_name}" if self.file else owned

    def is_same(self, other: Repository) -> bool:
        """True if both mean one model, whichever of its parts they name."""
        mine, others = (_NUMBER.sub("", source.file) for source in (self, other))
        return (self.name.casefold(), mine) == (other.name.casefold(), others)


def parse_repository(text: str) -> Repository | None:
    """The repository or file of one that `text` names, or None for any other text."""
    found = _GIVEN.fullmatch(text)
    return None if found is None else Repository(found[1], found[2] or "")


def converted_from(source: str) -> Repository | None:
    """What a bundle was made from, by its manifest's `source`; None if that was no repository."""
    found = _CONVERTED.fullmatch(source)
    return None if found is None else Repository(found[1], found[2] or "")


def model_name(file: PurePath) -> str:
    """A checkpoint file's name without its suffix, and without the number that a part of a model has."""
    return _NUMBER.sub("", file.stem)
