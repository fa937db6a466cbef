"""Finds tokens that end a text or a turn, by their names and by how a chat template uses them.

Files often name only one such token, the text's end, or mark the end of a turn as if it were text.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>", "<|tool_response>",
    "<end_of_utterance>", "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's own bars
))  # fmt: skip
"""Names that no plain text contains: such a token ends a turn, whatever its type."""
PLAIN_ENDS = frozenset(("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["))
"""Names that plain text may contain, such as HTML's `</s>`: they end a turn if they are control tokens or in
a template."""
FILE_ENDS = frozenset((
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>",
    "<|file_sep|>",
))  # fmt: skip
"""Names of separators between files in a code model's training; after them another file begins."""
MIDDLE_MARKS = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<|code_prefix|>",  # noqa: RUF001
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<|code_suffix|>",  # noqa: RUF001
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<|code_middle|>",  # noqa: RUF001
))  # fmt: skip
"""Names of infill marks: they control a model, whatever type a file gives them."""
MESSAGE_END = "<|end|>"
_GOING_ON = (("<|return|>", "<|call|>"), ("<|flush|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
"""Pairs of names in vocabularies where `<|end|>` ends a message and other messages of the turn may follow."""


def ending_names(names: Iterable[str], control: Container[str], template: str) -> set[str]:
    """The names of those tokens of a vocabulary that end a text or a turn.

    control: the names of control tokens. template: the chat template; empty if there is none.
    """
    ends = {
        name
        for name in names
        if name in ENDS or name in FILE_ENDS or (name in PLAIN_ENDS and (name in control or name in template))
    }
    return ends - {MESSAGE_END} if messages_go_on(ends) else ends


def template_ends(template: str, lookup: Callable[[str], int | None]) -> list[int]:
    """The ids of the tokens with which a chat template ends a turn. lookup: returns the id of a
    token's name.
    """
    used = [name for name in sorted(ENDS | PLAIN_ENDS) if name in template]
    ids = {name: token for name in used if (token := lookup(name)) is not None}
    if messages_go_on(ids):
        ids.pop(MESSAGE_END, None)
    return list(ids.values())


def messages_go_on(names: Container[str]) -> bool:
    """Whether `<|end|>` ends only a message, not the turn, in a vocabulary with these names."""
    return any(first in names and second in names for first, second in _GOING_ON)
