"""A conversation: its transcript, and the key/value cache that follows it from turn to turn.

Every turn renders all of the transcript into token ids, so the reply depends on nothing else. Tokens in the
cache aren't computed again. When the context is full, a conversation either ends or forgets its oldest turns;
the transcript then holds the remaining turns.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, get_args

from ondevice.callbacks import OnPrompt
from ondevice.chat_template.messages import Message, all_checked, changed_strings
from ondevice.chat_template.replies import ReplyParser, ReplyPiece
from ondevice.chat_template.tools import PLAIN, CallPart, PromptOptions, Think, Tool, ToolCall, new_id
from ondevice.config import SamplingConfig, SamplingOptions, WhenFull
from ondevice.errors import OndeviceError, UsageError
from ondevice.generate import Event
from ondevice.host import Host
from ondevice.response import Response, gather
from ondevice.settings import sampling_options
from ondevice.tokenizer.base import valid_unicode

_MESSAGE_KEYS = {"role", "content", "thinking", "tool_calls", "tool_call_id", "name"}
Tools = Sequence[Tool | Mapping[str, Any]]
"""Functions that a model may call, each as `Tool` or in the shape of OpenAI's."""

FORMAT = "ondevice-session"
VERSION = 1
MAX_FILE_BYTES = 2 << 20
"""Most bytes of a saved session: about 500,000 tokens of text, and at most 25 MB in memory."""
ROLES = ("system", "user", "assistant", "tool")


class Session:
    """A conversation with one model, one reply at a time. Made by `Model.session`."""

    def __init__(
        self,
        host: Host,
        instructions: str | None = None,
        when_full: WhenFull = "stop",
        cache_prompt: bool = False,
    ) -> None:
        """cache_prompt: as in `Model.session`."""
        if when_full not in get_args(WhenFull):
            raise UsageError(f"when_full is {when_full!r}; it must be one of {', '.join(get_args(WhenFull))}")
        self.when_full: WhenFull = when_full
        self.dropped_turns = 0
        """Number of turns forgotten so far, oldest first."""
        self._host = host
        self._key = host.new_key()
        self._answering = threading.Lock()
        self._instructions = instructions
        self._messages: list[dict[str, Any]] = []
        self.reset()
        weakref.finalize(self, host.retire, self._key, cache_prompt)

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """A copy of the messages that the model sees, instructions first."""
        return deepcopy(self._messages)

    def respond(
        self,
        text: str | Sequence[Message],
        *,
        tools: Tools = (),
        think: Think = None,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Response:
        """Answer `text`. options: fields of SamplingConfig. The default is greedy decoding.

        Args:
            text: what the user says, or messages to add, such as results of the calls in the last reply.
            tools: functions that the model may call in this turn. Calls are reported, never made.
            think: whether to think before the reply, or how much, if the chat template supports it.
            sampling: the options in one object.

        Raises ContextOverflowError, and leaves the transcript as it was, if the conversation is longer than
        the context. If the session drops its oldest turns, only a `text` that is too long alone raises it.
        """
        return gather(self.stream_response(text, tools=tools, think=think, sampling=sampling, **options))

    def stream_response(
        self,
        text: str | Sequence[Message],
        *,
        tools: Tools = (),
        think: Think = None,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Event]:
        """`respond`, event by event. Closing the iterator cancels; the text generated so far is kept."""
        prompt = PromptOptions.checked(tools, think)
        config, prompt = self._sampling(sampling, options, prompt)
        with self._silent():
            messages, ids, dropped = self._within_context(self._continued(text), config.max_tokens, prompt)
            with self._reply(messages, dropped, prompt, ids) as reply:
                gate = self._host.chat_template.gate(prompt, ids)
                for event in self._host.stream_ids(self._key, ids, config, gate):
                    yield from reply.take(event)

    async def arespond(
        self,
        text: str | Sequence[Message],
        *,
        tools: Tools = (),
        think: Think = None,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Response:
        """`respond` for asyncio; cancelling the task cancels the work."""
        stream = self.astream_response(text, tools=tools, think=think, sampling=sampling, **options)
        async with aclosing(stream) as events:
            return gather([event async for event in events])

    async def astream_response(
        self,
        text: str | Sequence[Message],
        *,
        tools: Tools = (),
        think: Think = None,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Event, None]:
        """`stream_response` for asyncio."""
        prompt = PromptOptions.checked(tools, think)
        stream = self.astream_messages(self._continued(text), prompt=prompt, sampling=sampling, **options)
        async with aclosing(stream) as events:
            async for event in events:
                yield event

    async def astream_messages(
        self,
        messages: Sequence[Message],
        *,
        prompt: PromptOptions = PLAIN,
        on_prompt: OnPrompt | None = None,
        sampling: SamplingConfig | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Event, None]:
        """Answer the last of `messages`, which replace the session's transcript, as `astream_response`
        answers a text.

        Keys and values of the part that both transcripts begin with stay. on_prompt: called on the model's
        thread as the transcript is read.
        """
        import asyncio  # Slow to import, and callers of this have imported it.

        transcript = list(messages)
        config, prompt = self._sampling(sampling, options, prompt)
        with self._silent():
            # On another thread, because the event loop can't wait for a long text to be encoded.
            kept, ids, dropped = await asyncio.to_thread(
                self._within_context, transcript, config.max_tokens, prompt
            )
            with self._reply(kept, dropped, prompt, ids) as reply:
                gate = self._host.chat_template.gate(prompt, ids)
                reading = self._host.astream_ids(self._key, ids, config, gate, on_prompt=on_prompt)
                async with aclosing(reading) as events:
                    async for event in events:
                        for shown in reply.take(event):
                            yield shown

    def fork(self) -> Session:
        """An independent conversation that continues from here."""
        other = Session(self._host, self._instructions, self.when_full)
        other._messages, other.dropped_turns = self.transcript, self.dropped_turns
        self._host.copy_cache(self._key, other._key)
        return other

    def reset(self) -> None:
        """Forget everything except the instructions. Raises UsageError while a reply is under way."""
        first = {"role": "system", "content": self._instructions or ""}
        with self._silent():
            self._messages = [] if self._instructions is None else [first]
            self.dropped_turns = 0

    def save(self, path: str | os.PathLike[str], *, state: bool = True) -> None:
        """Write the transcript to a file, and its state (keys and values) to the folder `<file>.state`.

        state: whether to write the state, which takes as much disk as the conversation takes memory. Without
        it, as on a full disk or with a closed model, `load` computes it again.

        Raises OndeviceError, and leaves an existing file as it was, if the file can't be written or would be
        larger than `load` accepts.
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
        if state:
            with suppress(OndeviceError):
                self._host.save_state(self._key, state_folder(target))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the conversation with a saved one, including its state.

        A state that is damaged, or belongs to another model or other options, is computed again.

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
            if state_folder(source).is_dir():
                with suppress(OndeviceError):
                    self._host.load_state(self._key, messages, state_folder(source))

    def _sampling(
        self, sampling: SamplingConfig | None, options: SamplingOptions, prompt: PromptOptions
    ) -> tuple[SamplingConfig, PromptOptions]:
        """The sampling options of a reply, with its constraint, and the options by which its
        calls are read.
        """
        config, template = sampling_options(sampling, options), self._host.chat_template
        if prompt.reply_prefix is not None and (prompt.must_call or config.constraint is not None):
            raise UsageError("a reply that has to obey a schema can't be continued; ask for a new one")
        if prompt.must_call:
            if config.constraint is not None:
                raise UsageError("a reply that must call a tool obeys the tool's schema; give no constraint")
            config = replace(config, constraint=template.forced_call(prompt))
        elif prompt.tools and config.constraint is not None:
            config = replace(config, constraint=template.call_or_json(prompt, config.constraint))
            prompt = replace(prompt, calls_alone=True)
        return replace(config, stop=(*config.stop, *template.stop)), prompt

    def _continued(self, text: str | Sequence[Message]) -> list[Message]:
        """The transcript with a user's text, or further messages, appended."""
        added = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        return [*self._messages, *added]

    @contextmanager
    def _reply(
        self, messages: list[Message], dropped: int, prompt: PromptOptions, ids: list[int]
    ) -> Iterator[_Reply]:
        """A context whose value collects the reply to `messages`. At its end, messages and reply become the
        transcript.
        """
        reply = _Reply(self._host.chat_template.reply_parser(prompt, ids), prompt, ids)
        try:
            yield reply
        finally:
            if reply.begun:
                self._messages = [*all_checked(messages), reply.message]
                self.dropped_turns += dropped

    def _within_context(
        self, messages: list[Message], max_tokens: int, prompt: PromptOptions
    ) -> tuple[list[Message], list[int], int]:
        """The messages that the model sees, their ids, and the number of turns dropped.

        Turns are dropped when less than a quarter of the context is left for the reply, until half of it is
        left, so that the recomputed keys and values serve several turns. Instructions and the newest message
        stay.
        """
        context, ids = self._host.plan.max_context, self._host.chat_ids(messages, prompt)
        if self.when_full == "stop" or len(ids) + min(max_tokens, context // 4) <= context:
            return messages, ids, 0
        head = messages[: messages[0]["role"] == "system"]
        begins = [at for at in range(len(head), len(messages)) if messages[at]["role"] == "user"]

        def ids_from(index: int) -> list[int]:
            return self._host.chat_ids([*head, *messages[begins[index] :]], prompt)

        older = range(len(begins) - 1)
        first = bisect_left(older, True, key=lambda index: len(ids_from(index)) <= context // 2)
        return [*head, *messages[begins[first] :]], ids_from(first), first

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """A context with exclusive access to the transcript. Raises UsageError while a reply is under way."""
        if not self._answering.acquire(blocking=False):
            raise UsageError("this session is already answering; finish or close that reply, or fork()")
        try:
            yield
        finally:
            self._answering.release()


def state_folder(path: Path) -> Path:
    """The folder with the state of a saved session."""
    return path.with_name(f"{path.name}.state")


@contextmanager
def _file_errors(what: str, path: Path) -> Iterator[None]:
    """A context that turns the system's errors about a path into OndeviceError."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError) as error:  # A path with a null byte is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else error
        raise OndeviceError(f"the conversation can't be {what} {path}: {reason}") from error


def _messages(content: Any, source: Path) -> list[dict[str, Any]]:
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
            or not {"role", "content"} <= set(message) <= _MESSAGE_KEYS
            or message["role"] not in ROLES
            or not isinstance(message["content"], str)
        ):
            raise UsageError(f"{source} holds no message of a known role, but {str(message)[:80]}")
    try:
        return _encodable(all_checked(messages))
    except UsageError as error:
        raise UsageError(f"{source} is not a saved session: {error}") from error


def _encodable(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without lone surrogates, which tokenizers and files can't hold."""
    return [changed_strings(said, valid_unicode) for said in messages]


class _Reply:
    """Turns the events of a model's text into the events of a reply, and collects its message."""

    def __init__(self, parser: ReplyParser, prompt: PromptOptions, ids: list[int]) -> None:
        """ids: the ids of the prompt, from which the ids of calls are derived."""
        self.begun = False
        self._parser, self._prompt, self._ids = parser, prompt, ids
        prefix = prompt.reply_prefix
        self._texts: list[str] = [] if prefix is None else [prefix.text]
        self._thoughts: list[str] = [] if prefix is None else [prefix.thinking]
        self._calls: list[ToolCall] = []
        self._written: list[str] | None = None
        """Parts of the arguments of the call that has begun; None outside a call."""
        self._name = ""

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message of the transcript. Thinking is included only if it led to calls."""
        said: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._calls:
            said["tool_calls"] = [call.to_dict() for call in self._calls]
            said |= {"thinking": "".join(self._thoughts)} if self._thoughts else {}
        return said

    def take(self, event: Event) -> list[Event]:
        """The events that result from one event of the model's text, with thinking, calls and reply
        separated.
        """
        self.begun = True
        before = self._parser.kind
        pieces = self._parser.take(event.token, event.text)
        if event.finish_reason is not None:
            pieces += self._parser.finish()
        shown = [shown_event for piece in pieces if (shown_event := self._shown(piece)) is not None]
        token_event = replace(event, text="", thinking="thinking" in (before, self._parser.kind))
        if event.finish_reason is not None:
            # The event that ends the text comes last.
            return [*shown, replace(token_event, thinking=False)]
        if not shown:
            return [token_event]
        first = shown[0]
        token_event = replace(token_event, text=first.text, thinking=first.thinking)
        return [replace(token_event, tool_call=first.tool_call, call_part=first.call_part), *shown[1:]]

    def _shown(self, piece: ReplyPiece) -> Event | None:
        """The event for a piece of the reply; None if there is nothing to show. Spaces before a reply aren't
        shown.
        """
        if piece.call is not None or piece.begins or piece.arguments:
            return None if self._calls and not self._prompt.parallel_calls else self._called(piece)
        self._written = None
        if piece.kind == "thinking":
            self._thoughts.append(piece.text)
            return Event(piece.text, thinking=True)
        text = piece.text if any(self._texts) else piece.text.lstrip(" ")
        self._texts.append(text)
        return Event(text)

    def _called(self, piece: ReplyPiece) -> Event:
        """The event for a call or for a part of one."""
        call_id = new_id(self._ids, len(self._calls))
        if piece.call is not None:
            call = ToolCall(*piece.call, call_id, "".join(self._written or ()))
            self._calls.append(call)
            self._written = None
            return Event("", tool_call=call)
        if piece.begins:
            self._name, self._written = piece.begins, []
        elif self._written is not None:
            self._written.append(piece.arguments)
        return Event("", call_part=CallPart(self._name, call_id, piece.arguments))
