"""A conversation: its transcript, and the key/value cache that follows it from turn to turn.

Every turn renders the whole transcript into token ids, so the reply depends on nothing else. Tokens that the
cache already holds aren't computed again. When the context is full, a conversation either ends or forgets its
oldest turns; the transcript then holds the remaining turns.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, get_args

from ondevice.chat_template.channels import ReplyParser
from ondevice.config import SamplingConfig, SamplingOptions, WhenFull
from ondevice.errors import OndeviceError, UsageError
from ondevice.generate import Event
from ondevice.host import Host
from ondevice.response import Response, gather
from ondevice.settings import sampling_options
from ondevice.tokenizer.base import valid_unicode

FORMAT = "ondevice-session"
VERSION = 1
MAX_FILE_BYTES = 2 << 20
"""Most bytes of a saved session: about 500,000 tokens of text, and at most 25 MB in memory."""
ROLES = ("system", "user", "assistant")

Message = dict[str, str]
"""One message, with the keys `role` and `content`."""


class Session:
    """A conversation with one model, one reply at a time. Made by `Model.session`."""

    def __init__(self, host: Host, instructions: str | None = None, when_full: WhenFull = "stop") -> None:
        if when_full not in get_args(WhenFull):
            raise UsageError(f"when_full is {when_full!r}; it must be one of {', '.join(get_args(WhenFull))}")
        self.when_full: WhenFull = when_full
        self.dropped_turns = 0
        """Number of turns forgotten so far, oldest first."""
        self._host = host
        self._key = host.new_key()
        self._answering = threading.Lock()
        self._instructions = instructions
        self._messages: list[Message] = []
        self.reset()
        weakref.finalize(self, host.retire, self._key)

    @property
    def transcript(self) -> list[Message]:
        """A copy of the messages that the model sees, instructions first."""
        return [dict(message) for message in self._messages]

    def respond(
        self, text: str, *, sampling: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Response:
        """Answer `text`. options: fields of SamplingConfig. The default is greedy decoding.

        Raises ContextOverflowError, and leaves the transcript as it was, when the conversation has outgrown
        the context. If the session drops its oldest turns, only a `text` too long by itself raises it.
        """
        return gather(self.stream_response(text, sampling=sampling, **options))

    def stream_response(
        self, text: str, *, sampling: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Iterator[Event]:
        """`respond`, event by event. Closing the iterator cancels; the text generated so far is kept."""
        config = self._sampling(sampling, options)
        with self._silent():
            messages, ids, dropped = self._within_context(self._asked(text), config.max_tokens)
            parser = self._host.chat_template.reply_parser()
            with self._reply(messages, dropped) as said:
                for event in self._host.stream_ids(self._key, ids, config):
                    yield _say(event, said, parser)

    async def arespond(
        self, text: str, *, sampling: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> Response:
        """`respond` for asyncio; cancelling the task cancels the work."""
        async with aclosing(self.astream_response(text, sampling=sampling, **options)) as events:
            return gather([event async for event in events])

    async def astream_response(
        self, text: str, *, sampling: SamplingConfig | None = None, **options: Unpack[SamplingOptions]
    ) -> AsyncGenerator[Event, None]:
        """`stream_response` for asyncio."""
        async with aclosing(self.astream_messages(self._asked(text), sampling=sampling, **options)) as events:
            async for event in events:
                yield event

    async def astream_messages(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Event, None]:
        """Answer a whole transcript, which replaces the session's own, as `astream_response` answers a text.

        Keys and values are kept for what both begin with.
        """
        import asyncio  # Slow to import, and callers of this have imported it.

        config, asked = self._sampling(sampling, options), list(messages)
        with self._silent():
            # On another thread, because the event loop can't wait for a long text to be encoded.
            kept, ids, dropped = await asyncio.to_thread(self._within_context, asked, config.max_tokens)
            parser = self._host.chat_template.reply_parser()
            with self._reply(kept, dropped) as said:
                async with aclosing(self._host.astream_ids(self._key, ids, config)) as events:
                    async for event in events:
                        yield _say(event, said, parser)

    def fork(self) -> Session:
        """An independent conversation that continues from here."""
        other = Session(self._host, self._instructions, self.when_full)
        other._messages, other.dropped_turns = self.transcript, self.dropped_turns
        self._host.copy_cache(self._key, other._key)
        return other

    def reset(self) -> None:
        """Forget everything but the instructions. Raises UsageError while a reply is under way."""
        first = {"role": "system", "content": self._instructions or ""}
        with self._silent():
            self._messages = [] if self._instructions is None else [first]
            self.dropped_turns = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the transcript to a file. Keys and values aren't saved; they are computed again after `load`.

        Raises OndeviceError, and leaves an existing file of that name as it was, if the file can't be written
        or would be larger than `load` accepts.
        """
        target = Path(path)
        content = {"format": FORMAT, "version": VERSION, "messages": _encodable(self._messages)}
        data = (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
        if len(data) > MAX_FILE_BYTES:
            raise OndeviceError(
                f"the conversation has {len(data)} bytes; a saved one has at most {MAX_FILE_BYTES}"
            )
        with _file_errors("saved to", target):
            partial = target.with_name(f"{target.name}.partial")
            try:
                partial.write_bytes(data)
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the conversation with the one in a file.

        Raises UsageError if the file holds no conversation or a reply is under way, OndeviceError if the file
        can't be read.
        """
        source = Path(path)
        with _file_errors("loaded from", source):
            if not source.is_file():
                raise UsageError(f"there is no saved session at {source}")
            with source.open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{source} is not a saved session: it has more than {MAX_FILE_BYTES} bytes")
        try:
            content = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source} is not a saved session: {error}") from error
        messages = _messages(content, source)
        first = messages[0] if messages else {}
        with self._silent():
            self._messages, self.dropped_turns = messages, 0
            self._instructions = first["content"] if first.get("role") == "system" else None

    def _sampling(self, sampling: SamplingConfig | None, options: SamplingOptions) -> SamplingConfig:
        config = sampling_options(sampling, options)
        return replace(config, stop=(*config.stop, *self._host.chat_template.stop))

    def _asked(self, text: str) -> list[Message]:
        """The transcript with a user's message behind it."""
        return [*self._messages, {"role": "user", "content": text}]

    @contextmanager
    def _reply(self, messages: list[Message], dropped: int) -> Iterator[list[str]]:
        """A list that collects the reply to `messages`, which together become the transcript at the end."""
        said: list[str] = []
        try:
            yield said
        finally:
            if said:
                self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]
                self.dropped_turns += dropped

    def _within_context(
        self, messages: list[Message], max_tokens: int
    ) -> tuple[list[Message], list[int], int]:
        """The messages that the model sees, their ids, and the number of turns dropped.

        Turns are dropped when less than a quarter of the context is left for the reply. Then they are dropped
        until half of it is left, so that the recomputed keys and values serve several turns. Instructions and
        the newest message stay.
        """
        context, ids = self._host.plan.max_context, self._host.chat_ids(messages)
        if self.when_full == "stop" or len(ids) + min(max_tokens, context // 4) <= context:
            return messages, ids, 0
        head = messages[: messages[0]["role"] == "system"]
        begins = [at for at in range(len(head), len(messages)) if messages[at]["role"] == "user"]

        def ids_from(turn: int) -> list[int]:
            return self._host.chat_ids([*head, *messages[begins[turn] :]])

        older = range(len(begins) - 1)
        first = bisect_left(older, True, key=lambda turn: len(ids_from(turn)) <= context // 2)
        return [*head, *messages[begins[first] :]], ids_from(first), first

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """Exclusive access to the transcript. Raises UsageError while a reply is under way."""
        if not self._answering.acquire(blocking=False):
            raise UsageError("this session is already answering; finish or close that reply, or fork()")
        try:
            yield
        finally:
            self._answering.release()


@contextmanager
def _file_errors(what: str, path: Path) -> Iterator[None]:
    """Turn the system's errors about a path into OndeviceError."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # A path with a null byte is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise OndeviceError(f"the conversation can't be {what} {path}: {reason}") from error


def _messages(content: Any, source: Path) -> list[Message]:
    """The messages of a saved session, checked. Raises UsageError."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{source} is not a saved session")
    if content.get("version") != VERSION:
        raise UsageError(f"{source} has version {content.get('version')!r}; this release reads {VERSION}")
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise UsageError(f"{source} holds no list of messages")
    for message in messages:
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or message["role"] not in ROLES
            or not isinstance(message["content"], str)
        ):
            raise UsageError(f"{source} holds no message of a known role, but {str(message)[:80]}")
    return _encodable(messages)


def _encodable(messages: Sequence[Message]) -> list[Message]:
    """The messages without lone surrogates, which neither tokenizers nor files can hold."""
    return [{"role": said["role"], "content": valid_unicode(said["content"])} for said in messages]


def _say(event: Event, said: list[str], parser: ReplyParser) -> Event:
    """Add the event's text to the reply, unless it is thinking, and return the event as it is shown.

    Spaces at the start of a reply are removed: they belong to the prompt.
    """
    kind = parser.take(event.token, event.text)
    if kind != "reply":
        said.append("")
        return replace(event, text=event.text if kind == "thinking" else "", thinking=kind == "thinking")
    if not any(said):
        event = replace(event, text=event.text.lstrip(" "))
    said.append(event.text)
    return event
