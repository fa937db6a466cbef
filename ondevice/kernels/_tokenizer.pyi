"""The types of what `_native` has for byte-level BPE (`ondevice/tokenizer/bindings.cc`)."""

class BytePairs:
    """The table of a `tokenizer.bin`, read where it lies."""

    def __init__(self, file: bytes, ends: list[int]) -> None:
        """ends: tokens that begin or end a text. They count as special."""

    @property
    def size(self) -> int: ...
    @property
    def composes(self) -> bool:
        """Whether texts are brought to form C."""

    def added_tokens(self, flags: int) -> list[int]:
        """Ids of the added tokens with just these flags. Those of `ends` have the flag of special ones."""

    def encode(self, text: str, special: bool, composed: bool = False) -> list[int]:
        """composed: whether the text is a stretch of one that `cut` gave, in form C."""

    def cut(self, text: str, special: bool) -> list[tuple[int, str]]:
        """Tokens that are matched before form C, and with -1 the stretches of text between them."""

    def token_bytes(self, token: int) -> bytes: ...
    def is_added(self, token: int) -> bool: ...
    def added_token(self, text: bytes) -> int:
        """The added token with this text; -1 if there is none."""

    def merged_token(self, spelled: bytes) -> int:
        """The token with these bytes that merging may make; -1 if there is none."""
