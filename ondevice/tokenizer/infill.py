"""Fill-in-the-middle: the tokens with which code models mark a prefix, a suffix and the middle
between them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Protocol

from ondevice.errors import InfillNotSupportedError
from ondevice.records import dataclass
from ondevice.tokenizer.base import Tokenizer

REPOSITORY, CURRENT_FILE = "myproject", "filename"
"""Stand-ins for the names of the repository and of the file with the gap, which no request has."""


@dataclass(frozen=True)
class _Names:
    """The marks of one family of models, by name.

    middle: empty if the prefix comes last, so that the middle follows without a mark. repository, file:
    alternative names; a model has one of them or none. ends: other tokens that end a middle.
    """

    prefix: str
    suffix: str
    middle: str
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The names of marks that a tokenizer of this family must have."""
        return tuple(name for name in (self.prefix, self.suffix, self.middle) if name)


_FAMILIES = (
    # Qwen Coder, and CodeGemma, which has another mark of files.
    _Names(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|repo_name|>", "<|fim_repo|>"),
        ("<|file_sep|>", "<|file_separator|>"),
        ("<|fim_pad|>", "<|endoftext|>"),
    ),
    # StarCoder and Granite.
    _Names(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<repo_name>", "<reponame>"),
        ("<file_sep>", "<filename>"),
        ("<fim_pad>", "<|endoftext|>"),
    ),
    # SantaCoder.
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # CodeLlama.
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    _Names("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    # DeepSeek Coder. The bars are U+FF5C.
    _Names(
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
        ends=("<\uff5cend▁of▁sentence\uff5c>",),
    ),
    # GLM.
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
    # Falcon H1 Coder.
    _Names("<|prefix|>", "<|suffix|>", "<|middle|>", ends=("<|endoftext|>",)),
    # Codestral.
    _Names("[PREFIX]", "[SUFFIX]", "", ends=("[MIDDLE]",)),
)


def has_known_marks(names: Container[str]) -> bool:
    """Whether a vocabulary has all marks of a known family. names: the names of the vocabulary's tokens."""
    return any(all(name in names for name in family.marks) for family in _FAMILIES)


class _Encoder(Protocol):
    """Encodes one part of a prompt as plain text."""

    def __call__(self, text: str, *, at_start: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class SourceFile:
    """Another file of the repository, which gives the model context."""

    name: str
    text: str


@dataclass(frozen=True)
class InfillTokens:
    """The ids of a model's marks. repository, file: None if the model has no such mark.

    middle: None if the prefix comes last, so that the middle follows without a mark.
    """

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]
    """Ids that end a middle, the marks included."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> InfillTokens:
        """The marks of a tokenizer. Raises InfillNotSupportedError, which names the missing ones."""

        def first_of(names: Sequence[str]) -> int | None:
            return next((token for token in map(tokenizer.token_id, names) if token is not None), None)

        for names in _FAMILIES:
            marks = [tokenizer.token_id(name) for name in names.marks]
            known = [token for token in marks if token is not None]
            if len(known) < len(marks):
                continue
            repository, file = first_of(names.repository), first_of(names.file)
            others = (repository, file, *map(tokenizer.token_id, names.ends))
            ends = (*known, *(token for token in others if token is not None))
            middle = known[2] if names.middle else None
            return InfillTokens(known[0], known[1], middle, repository, file, tuple(dict.fromkeys(ends)))
        raise InfillNotSupportedError(
            "this model can't fill in the middle: its tokenizer has no "
            f"{' and no '.join(_lacking(tokenizer))}; take a model that was trained to, such as Qwen2.5-Coder"
        )

    def prompt(
        self,
        tokenizer: Tokenizer,
        prefix: str,
        suffix: str,
        files: Sequence[SourceFile] = (),
        most: int | None = None,
        reserved: int = 0,
    ) -> list[int]:
        """Ids of the prompt after which a model writes what belongs between `prefix` and `suffix`.

        Special tokens' names in any text stay plain text.

        files: other files, the most important one last. The first ones are left out if they don't fit.
        most: number of ids that the caller can use, as in `encode`; prefix and suffix may exceed it even
            without other files.
        reserved: how many of `most` other files leave free for the middle.
        """

        def encode(text: str, *, at_start: bool = True) -> list[int]:
            return tokenizer.encode(text, add_bos=False, at_start=at_start, most=most)

        begun = [] if not tokenizer.add_bos or tokenizer.bos_id is None else [tokenizer.bos_id]
        before, after = [self.prefix, *encode(prefix)], [self.suffix, *encode(suffix, at_start=False)]
        gap = [*after, *before] if self.middle is None else [*before, *after, self.middle]
        room = None if most is None else most - reserved - len(begun) - len(gap)
        return [*begun, *self._context(encode, files, room), *gap]

    def _context(self, encode: _Encoder, files: Sequence[SourceFile], room: int | None) -> list[int]:
        """The ids of those other files that fit into `room`, followed by the mark and the name of the file
        with the gap.
        """
        if not files:
            return []
        head = [] if self.repository is None else [self.repository, *encode(f"{REPOSITORY}\n")]
        tail = [] if self.file is None else [self.file, *encode(f"{CURRENT_FILE}\n", at_start=False)]
        context: list[int] = []
        for text in self._texts(encode, reversed(files)):
            if room is not None and len(head) + len(text) + len(context) + len(tail) > room:
                break
            context = text + context
        return [*head, *context, *tail] if context else []

    def _texts(self, encode: _Encoder, files: Iterator[SourceFile]) -> Iterator[list[int]]:
        """Yields the ids of each file, with its name if the model has a mark for files."""
        for file in files:
            if self.file is None:
                yield encode(f"{file.text}\n\n")
            else:
                yield [self.file, *encode(f"{file.name}\n{file.text}", at_start=False)]


def _lacking(tokenizer: Tokenizer) -> list[str]:
    """The names of missing marks, for the family of which the tokenizer has the most marks."""

    def lacking(names: _Names) -> list[str]:
        return [name for name in names.marks if tokenizer.token_id(name) is None]

    return lacking(min(_FAMILIES, key=lambda names: len(lacking(names)) / len(names.marks)))
