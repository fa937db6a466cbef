"""The beginning of a reply that was cut: as the model wrote it, and as the token ids that it continues."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ondevice.records import dataclass
from ondevice.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplyPrefix:
    """Thinking and text with which a reply begins. Without a text the model was still thinking."""

    text: str
    thinking: str = ""

    def thought(self, marks: Sequence[str], is_open: bool = False) -> str:
        """What stands before the text: the thinking between its marks.

        marks: the two marks of thinking; empty for a model that doesn't think.
        is_open: whether the prompt ends with the first mark, which then isn't repeated.
        """
        if not marks or not (self.thinking or is_open):
            return ""
        begin, end = marks
        thought = ("" if is_open else f"{begin}\n") + self.thinking
        return f"{thought}\n{end}\n\n" if self.text else thought

    def encode(self, tokenizer: Tokenizer, marks: Sequence[str], prompt_end: str) -> list[int]:
        """Token ids behind a prompt that ends with `prompt_end`. Special tokens in it are the marks alone.

        Behind a prompt that doesn't end with a space a text begins as texts do: where tokenizers put a space
        before them, the model's own begins with one, which replies are told without.
        """
        is_open = prompt_end.rstrip().endswith(tuple(marks[:1]))
        thought, ids = self.thought(marks, is_open), list[int]()
        at_start = not prompt_end[-1:].isspace()
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", thought) if marks else [thought]
        # A mark's name inside the thinking is text: marks stand only at its beginning and its end.
        places = {*(() if is_open else (1,)), *((len(parts) - 2,) if self.text else ())}
        for at, part in enumerate([*parts, self.text]):
            special = at in places and part in marks
            ids += tokenizer.encode(part, add_bos=False, special=special, at_start=at_start and not ids)
        return ids
