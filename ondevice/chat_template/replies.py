"""Separates thinking, tool calls and the reply in a model's output, piece by piece.

Marks such as `<think>` or `<tool_call>` may span several tokens, and no part of one is ever shown. The text
that is held back for this is bounded: beginnings of marks, some spaces, and one call. A call is reported when
its arguments are complete and can be read; arguments in JSON are also reported while they are written. Text
that can't be read as a call of a given tool stays text, exactly as the model wrote it, even if a part of it
has already been reported as a call.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping
from typing import Literal, Protocol

from ondevice.chat_template.call_formats import SEPARATORS, Call, CallFormat, Tools, checked_call
from ondevice.chat_template.known_formats import FENCE, LINE_FORMS, LOOSE
from ondevice.chat_template.partial_json import JsonScan
from ondevice.chat_template.tools import MAX_CALLS
from ondevice.records import dataclass

Kind = Literal["reply", "thinking", "call", "header"]
"""What a token belongs to. Headers, such as a channel's name, aren't shown."""
THINKING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Pairs of marks around thinking."""
MAX_CALL_CHARS = 1 << 18
"""Most characters of a call; a longer one is text."""
MAX_RETRIES = 16
"""Most ends of a call that may be part of an argument."""
MAX_HELD_SPACES = 256
"""Most spaces held back because a mark might follow, before which they are dropped."""
_LINE_OPENER = re.compile(r"(?:\A|(?<=\n))[ \t]*(```|(?=\{|\[\s{0,8}\{)|\[(?=\s{0,8}[A-Za-z_]))")
"""How a line with a call without a mark begins: a key of LINE_FORMS."""
_LINE_OPENER_BEGUN = re.compile(r"(?:\A|(?<=\n))[ \t]*(`{1,2}|\[\s{0,8})\Z")


@dataclass(frozen=True)
class ReplyPiece:
    """A part of a reply: text of the reply or of thinking, a call, or a part of a call being written.

    begins: the name of a tool whose arguments begin here. arguments: the next part of their JSON. All parts
    up to the piece with the call make up its arguments as the model wrote them.
    """

    kind: Literal["reply", "thinking"]
    text: str
    call: Call | None = None
    begins: str = ""
    arguments: str = ""


class CallScan:
    """Follows the arguments of one tool call, which are a JSON object."""

    def __init__(self, name: str, at: int) -> None:
        """name: the tool's name. at: the position where the arguments begin in the text passed to `take`."""
        self.name, self.start, self.at = name, at, at
        self._json = JsonScan()

    @property
    def ended(self) -> bool:
        return self._json.ended

    @property
    def broken(self) -> bool:
        return self._json.broken

    def take(self, text: str) -> str:
        """The further text of the arguments that is certain now. text: everything written so far."""
        before, self.at = self.at, self._json.take(text, self.at)
        return text[before : self.at]


class ReplyParser(Protocol):
    """Follows one reply, token by token, and divides it into pieces."""

    @property
    def kind(self) -> Kind:
        """The kind of text that the next token belongs to, as far as that is known."""
        ...

    @property
    def openers(self) -> frozenset[int]:
        """Ids of tokens that may come in place of the reply's first token and begin something else, such as
        thinking.
        """
        ...

    def take(self, token: int | None, text: str) -> list[ReplyPiece]:
        """The pieces that are certain now. text: the reply's text up to the one before `token`, which is
        taken too.
        """
        ...

    def finish(self) -> list[ReplyPiece]:
        """The remaining pieces, at the end of the reply."""
        ...


class PlainReply:
    """The parser for models without thinking and calls: everything is the reply."""

    kind: Kind = "reply"
    openers: frozenset[int] = frozenset()

    def take(self, token: int | None, text: str) -> list[ReplyPiece]:
        return [ReplyPiece("reply", text)] if text else []

    def finish(self) -> list[ReplyPiece]:
        return []


class MarkedReply:
    """The parser for models that mark thinking and calls in their text.

    Thinking comes before the reply. Spaces around it, and between a text and calls, are dropped; two texts
    with calls between them keep a line break. Calls are read in the format of the model's template. Unless
    `calls_alone`, they are also read in other formats that models use even if their template has another one.
    """

    def __init__(
        self,
        marks: tuple[str, str] | None,
        thinks: bool,
        calls: CallFormat | None,
        tools: Tools,
        special: Mapping[str, int],
        openers: frozenset[int] = frozenset(),
        calls_alone: bool = False,
    ) -> None:
        """Args:
        marks: the two marks around thinking; None if the model doesn't think.
        thinks: whether the prompt ends with the first of them.
        calls: the format of calls; None if there are none.
        tools: the tools that may be called, by name.
        special: ids of the special tokens, which aren't part of the text, by name.
        openers: the id of the first of the marks, if it is a token.
        calls_alone: whether a reply is either calls or a text: marks of calls after a text are text, and so
            are calls in another format.
        """
        self._marks, self._calls, self._tools = marks, calls, tools
        self._calls_alone = calls_alone
        self.openers = openers
        is_loose = calls is not None and not calls_alone
        forms = (*((calls,) if calls else ()), *(LOOSE if is_loose else ()))
        self._forms = {mark: form for form in reversed(forms) for mark in form.opens}
        self._line_forms = LINE_FORMS if is_loose else {}
        self._form: CallFormat | None = None
        """The format of the call being read."""
        self._at_line = True
        """Whether the held text begins a line."""
        self._in_code = False
        """Whether the text is inside a fence that is no call."""
        texts = (*(marks or ()), *(text for form in forms for text in form.texts))
        self._names = {token: name for name, token in special.items() if any(name in text for text in texts)}
        self._held = ""
        self._searched = self._retries = 0
        self._opened = ""
        self._reported_call = False
        """Whether a call has been reported since the last mark that began calls."""
        self._scan: CallScan | None = None
        self._drop_spaces = False
        self._replied = False
        """Whether text of the reply has been reported."""
        self._break = ""
        """What replaces the spaces dropped after that text."""
        self._part_begun = False
        """Whether the current part, thinking or the reply, has begun."""
        self._called = 0
        self._state: Literal["start", "thinking", "text", "call"] = (
            "thinking" if thinks else "start" if marks else "text"
        )

    @property
    def kind(self) -> Kind:
        kinds: dict[str, Kind] = {"thinking": "thinking", "call": "call"}
        return kinds.get(self._state, "reply")

    def take(self, token: int | None, text: str) -> list[ReplyPiece]:
        self._held += text
        if token is not None:
            self._held += self._names.get(token, "")
        return list(self._pieces(False))

    def finish(self) -> list[ReplyPiece]:
        return list(self._pieces(True))

    def _pieces(self, final: bool) -> Iterator[ReplyPiece]:
        going = True
        while going:
            state = self._state
            if state == "start":
                going = self._start(final)
            elif state == "thinking":
                going = yield from self._think(final)
            elif state == "text":
                going = yield from self._text(final)
            else:
                going = yield from self._call(final)

    def _start(self, final: bool) -> bool:
        """Whether the reply's first mark has been read, or can't come any more."""
        assert self._marks is not None
        begin = self._marks[0]
        bare = self._held[:MAX_HELD_SPACES].lstrip()
        if bare.startswith(begin):
            self._held, self._state = self._held.lstrip()[len(begin) :], "thinking"
            return True
        if begin.startswith(bare) and len(self._held) < MAX_HELD_SPACES and not final:
            return False
        self._state = "text"
        return True

    def _think(self, final: bool) -> Generator[ReplyPiece, None, bool]:
        assert self._marks is not None
        text, mark = self._before((self._marks[1],), final)
        if text and not self._part_begun:
            text = text.lstrip()
        if text:
            self._part_begun = True
            yield ReplyPiece("thinking", text)
        if not mark:
            return False
        self._state, self._part_begun = "text", False
        self._drop_spaces = True
        return True

    def _text(self, final: bool) -> Generator[ReplyPiece, None, bool]:
        if self._drop_spaces:
            self._add_break(_spaces(self._held))
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._drop_spaces, self._at_line = False, True
        if self._calls is None or not self._may_call():
            text, self._held = self._held, ""
            yield from self._reply(text)
            return False
        text, form, mark = self._to_call(final)
        yield from self._reply(text)
        if form is not None:
            self._open(form, mark)
        return bool(form or mark)

    def _to_call(self, final: bool) -> tuple[str, CallFormat | None, str]:
        """The text that is certain before the first call, and the call's format and opening mark if one
        begins.

        Spaces before a mark belong to it. A mark without a format ends a fence, and is part of the text.
        """
        held = self._held
        places = [(at, mark, form) for mark, form in self._forms.items() if (at := held.find(mark)) >= 0]
        for match in _LINE_OPENER.finditer(held) if self._line_forms else ():
            if (match.start() or self._at_line) and (match[1] == FENCE or not self._in_code):
                places.append((match.start(1), match[1], self._line_forms[match[1]]))
                break
        kept = 0 if final else max(_beginning(held, tuple(self._forms)), self._line_kept())
        if places:
            at, mark, form = min(places, key=lambda place: (place[0], -len(place[1])))
            if mark == FENCE and self._in_code:
                self._held, self._in_code = held[at + len(mark) :], False
                return held[: at + len(mark)], None, mark
            if mark in self._forms or at + kept < len(held):
                text = held[:at].rstrip()
                self._held = held[at + len(mark) :]
                return text, form, held[len(text) : at + len(mark)]
        text = held[: len(held) - kept]
        if not final:
            bare = text.rstrip()
            text = bare if len(text) - len(bare) <= MAX_HELD_SPACES else text
        self._held = held[len(text) :]
        return text, None, ""

    def _line_kept(self) -> int:
        """Number of held characters, at the end, that may be the beginning of a call without a mark."""
        match = _LINE_OPENER_BEGUN.search(self._held) if self._line_forms else None
        return len(match[1]) if match is not None and (match.start() or self._at_line) else 0

    def _may_call(self) -> bool:
        """Whether a call may begin here or later."""
        assert self._calls is not None
        if not self._calls_alone or self._called:
            return True
        bare = self._held.lstrip()
        begins = any(bare.startswith(mark) or mark.startswith(bare) for mark in self._calls.opens)
        return begins and not self._part_begun

    def _open(self, form: CallFormat, mark: str) -> None:
        self._form, self._opened, self._state = form, mark, "call"
        self._reported_call = False
        self._searched = self._retries = 0

    def _call(self, final: bool) -> Generator[ReplyPiece, None, bool]:
        """Yields the calls after an opening mark; first those whose arguments are reported while they are
        written.
        """
        assert self._form is not None
        form = self._form
        if (yield from self._stream(final)):
            return True
        if self._scan is not None:
            return False
        closes, held = form.closes, self._held
        # Models leave ends out where another call follows. Only in JSON it is certain that one does.
        marks = () if closes is None else (closes, *(form.opens if form.streaming else ()))
        places = [(at, mark) for mark in marks if (at := held.find(mark, self._searched)) >= 0]
        at, mark = min(places, default=(-1, ""))
        if at < 0 and not final:
            self._searched = max(0, len(held) - max(map(len, marks), default=0))
            is_text = (
                form.could is not None
                and (closes is None or not self._reported_call)
                and not form.could(held[self._end_of_reported() :], self._tools)
            )
            if len(held) > MAX_CALL_CHARS or is_text:
                yield from self._give_up(len(held))
                return True
            return False
        end = len(held) if at < 0 else at
        rest = held[self._end_of_reported() : end]
        if self._reported_call:
            # The list that it belongs to has been opened before.
            rest = rest.rstrip().removesuffix("]").lstrip(SEPARATORS)
        calls = [] if self._reported_call and not rest.strip() else form.read(rest, self._tools)
        retry = calls is None and at >= 0 and self._retries < MAX_RETRIES
        if retry and form.inside(held[:at], self._tools):
            # The mark stands in an argument.
            self._searched = at + 1
            self._retries += 1
            return True
        call_end = end + (len(mark) if mark == closes else 0)
        if calls is None:
            yield from self._give_up(call_end)
            return True
        self._held = held[call_end:]
        self._state, self._part_begun, self._drop_spaces = "text", True, True
        self._add_break(_spaces(self._opened))
        for call in calls:
            yield from self._report(ReplyPiece("reply", "", call))
            self._called += 1
        return True

    def _stream(self, final: bool) -> Generator[ReplyPiece, None, bool]:
        """Yields pieces of calls with JSON arguments while they are written. Returns True if a call broke off
        and is text.
        """
        while True:
            if self._scan is None:
                self._scan = self._begun()
                if self._scan is None:
                    return False
                yield from self._report(ReplyPiece("reply", "", begins=self._scan.name))
            scan = self._scan
            if certain := scan.take(self._held):
                yield from self._report(ReplyPiece("reply", "", arguments=certain))
            if scan.ended:
                call = checked_call(scan.name, self._held[scan.start : scan.at], self._tools)
                if call is None:
                    yield from self._give_up(scan.at)
                    return True
                yield from self._report(ReplyPiece("reply", "", call))
                self._called += 1
                self._held, self._scan, self._reported_call = self._held[scan.at :], None, True
                self._searched = self._retries = 0
            elif scan.broken or final or len(self._held) > MAX_CALL_CHARS:
                yield from self._give_up(scan.at if scan.broken else len(self._held))
                return True
            else:
                return False

    def _begun(self) -> CallScan | None:
        """The call whose arguments begin next, or None if they can't be reported while they are written."""
        assert self._form is not None
        streaming = self._form.streaming
        head = None if streaming is None else streaming.head.match(self._held, self._end_of_reported())
        name = "" if head is None else next(group for group in head.groups() if group)
        return CallScan(name, head.end()) if head is not None and name in self._tools else None

    def _end_of_reported(self) -> int:
        """The position in the held text after everything that belongs to the call reported last; 0 without
        one.
        """
        assert self._form is not None
        if not self._reported_call or self._form.streaming is None:
            return 0
        tail = self._form.streaming.tail.match(self._held)
        return 0 if tail is None else tail.end()

    def _report(self, piece: ReplyPiece) -> Iterator[ReplyPiece]:
        """Yields a part of a call, unless there have been too many calls."""
        if self._called < MAX_CALLS:
            yield piece

    def _reply(self, text: str) -> Iterator[ReplyPiece]:
        """Yields text of the reply, after the line break that calls before it left."""
        if not text:
            return
        self._part_begun, self._at_line = True, _ends_line(text, self._at_line)
        if not text[0].isspace():
            text = self._break + text
        self._replied, self._break = True, ""
        yield ReplyPiece("reply", text)

    def _add_break(self, spaces: str) -> None:
        """Remember the spaces that are dropped after a text, as a break of at most two line feeds."""
        if self._replied and spaces:
            self._break = "\n" * min(2, (self._break + spaces).count("\n")) or " "

    def _give_up(self, length: int) -> Iterator[ReplyPiece]:
        """Turn a supposed call back into text. If calls of its format have no mark, only its opening becomes
        text.

        length: number of held characters that belong to it.
        """
        assert self._form is not None
        begin = 0 if self._scan is not None else self._end_of_reported()
        opened = "" if self._reported_call else self._opened
        if self._form.could is not None and self._scan is None:
            length = begin + (not self._reported_call and not opened.strip())
        text, self._held = opened + self._held[begin:length], self._held[length:]
        self._in_code = opened.strip() == FENCE
        self._drop_spaces = self._reported_call and not text
        if self._reported_call:
            self._add_break(_spaces(self._opened))
        self._state, self._part_begun, self._scan = "text", True, None
        yield from self._reply(text)

    def _before(self, marks: tuple[str, ...], final: bool) -> tuple[str, str]:
        """The text that is certain before the first of the marks, and that mark, or '' if there is none.

        Spaces before a mark belong to it.
        """
        places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            end, text = at + len(mark), self._held[:at].rstrip()
            separator, self._held = self._held[len(text) : end], self._held[end:]
            return text, separator
        kept = 0 if final else _beginning(self._held, marks)
        text = self._held[: len(self._held) - kept]
        if not final:
            bare = text.rstrip()
            text = bare if len(text) - len(bare) <= MAX_HELD_SPACES else text
        self._held = self._held[len(text) :]
        return text, ""


def _spaces(text: str) -> str:
    """The spaces and line feeds at the beginning of a text."""
    return text[: len(text) - len(text.lstrip())]


def _ends_line(text: str, at_line: bool) -> bool:
    """Whether what follows a text begins a line, apart from spaces. at_line: whether the text itself begins
    one.
    """
    _, line_feed, rest = text.rpartition("\n")
    return not rest.strip(" \t") and (bool(line_feed) or at_line)


def _beginning(text: str, marks: tuple[str, ...]) -> int:
    """Number of characters at the end of a text that are the beginning of a mark."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
