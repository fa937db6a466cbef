"""The beginning of a reply that was cut off: as the model wrote it, and as token ids for it to continue."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ondevice.records import dataclass
from ondevice.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplyPrefix:
    """The thinking and the text that a reply begins with. An empty text means that the model was still
    thinking.
    """

    text: str
    thinking: str = ""

    def thought(self, marks: Sequence[str], is_open: bool = False) -> str:
        """The text that precedes the reply: the thinking between its marks.

        marks: the two marks of thinking; empty for a model that doesn't think.
        is_open: whether the prompt ends with the first mark, which then isn't repeated.
        """
        if not marks or not (self.thinking or is_open):
            return ""
        begin, end = marks
        thought = ("" if is_open else f"{begin}\n") + self.thinking
        return f"{thought}\n{end}\n\n" if self.text else thought

    def encode(self, tokenizer: Tokenizer, marks: Sequence[str], prompt_end: str) -> list[int]:
        """Token ids to append to a prompt that ends with `prompt_end`. The only special tokens among them are
        the marks.

        After a prompt that doesn't end with a space, the text is encoded like the beginning of a text. Some
        tokenizers put a space before it: then the model's own text begins with that space, although replies
        are shown without it.
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
