"""A server that answers every dialect with scripted replies and keeps the requests that programs send to it.

    python -m tests.clients.recorder FOLDER

A reply is a call of the reading tool that the request gives, then of the editing one, then a sentence, by how
many results of tools the conversation has. Requests go into FOLDER as they came: `rewriting.py` makes of them
what may be published. Nothing here knows ondevice.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "recorded"
DONE = "The word is changed."
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
STEPS = (
    {"Read", "read", "read_file", "exec_command", "shell_command"},
    {"Edit", "edit", "replace", "exec_command", "shell_command"},
)
"""Names of tools that can do each step of the task."""
SHELL = ("cat notes.txt", "sed -i s/apple/pear/ notes.txt")
MOST_REQUESTS = 20
"""A program that asks more often is told that all is done."""


class Recorder(ThreadingHTTPServer):
    """The server. workplace: the folder whose file the scripted calls name."""

    daemon_threads = True

    def __init__(self, output: Path, workplace: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.output = output
        self.workplace = workplace
        self._lock = threading.Lock()
        self._count = 0
        output.mkdir(parents=True, exist_ok=True)

    def keep(self, request: dict[str, Any]) -> None:
        """Write a request under the next number."""
        with self._lock:
            self._count += 1
            name = f"{self._count:02}.json"
        (self.output / name).write_text(json.dumps(request, indent=1))

    def scripted(self, asked: Any, messages: list[Any]) -> tuple[str, dict[str, Any]] | None:
        """The tool to call and its arguments, or None for a sentence."""
        results = _results(messages)
        if results >= len(STEPS) or self._count > MOST_REQUESTS:
            return None
        path = str(self.workplace / "notes.txt")
        known = {"file_path": path, "filePath": path, "absolute_path": path}
        known |= dict.fromkeys(("cmd", "command"), SHELL[results])
        if results:
            known |= {"old_string": "apple", "new_string": "pear", "oldString": "apple", "newString": "pear"}
        for given in asked.get("tools") or ():
            tool = given.get("function", given)
            if tool.get("name") in STEPS[results]:
                schema = tool.get("input_schema") or tool.get("parameters") or {}
                names = [name for name in schema.get("properties", {}) if name in known]
                return tool["name"], {name: known[name] for name in names}
        return None


class _Handler(BaseHTTPRequestHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._keep(b"")
        self._json({})

    def do_GET(self) -> None:
        self._keep(b"")
        path = self.path.partition("?")[0]
        if path.endswith("/models"):
            one = {"id": MODEL, "object": "model", "type": "model", "display_name": MODEL, "created": 1}
            self._json({"object": "list", "data": [one], "has_more": False})
        elif path == "/api/tags":
            self._json(
                {
                    "models": [
                        {
                            "name": f"{MODEL}:latest",
                            "model": f"{MODEL}:latest",
                            "digest": "0",
                            "details": {},
                            "size": 1,
                        }
                    ]
                }
            )
        elif path == "/api/version":
            self._json({"version": "0.12.0"})
        else:
            self._json({"error": {"message": "not found", "type": "not_found_error"}}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        value = self._keep(body)
        path = self.path.partition("?")[0]
        answers = {
            "/messages": _anthropic,
            "/chat/completions": _chat,
            "/responses": _responses,
            "/api/chat": _ollama,
            "/completions": _completions,
        }
        if path.endswith("/count_tokens"):
            self._json({"input_tokens": 100})
            return
        for end, answer in answers.items():
            if path.endswith(end):
                kind = "application/x-ndjson" if end == "/api/chat" else "text/event-stream"
                whole, parts = answer(self.server, value)
                streams = value.get("stream", end == "/api/chat")
                self._stream(parts, kind) if streams else self._json(whole)
                return
        self._json({"context_length": 8192, "model_info": {}, "capabilities": ["completion", "tools"]})

    def _keep(self, body: bytes) -> Any:
        try:
            value = json.loads(body) if body else None
        except ValueError:
            value = {"not_json": body.decode(errors="replace")}
        headers = {name.lower(): text for name, text in self.headers.items()}
        self.server.keep({"method": self.command, "path": self.path, "headers": headers, "body": value})
        return value

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _stream(self, parts: Iterator[bytes], kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for part in parts:
            self.wfile.write(part)


def _event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def _results(messages: list[Any]) -> int:
    """How many results of tools a conversation has, in any dialect."""
    count = 0
    for message in messages:
        content = message.get("content")
        blocks = [it for it in content if isinstance(it, dict)] if isinstance(content, list) else []
        count += sum(block.get("type") == "tool_result" for block in blocks)
        count += message.get("role") == "tool" or str(message.get("type")).endswith("_call_output")
    return count


def _anthropic(server: Recorder, asked: Any) -> tuple[Any, Iterator[bytes]]:
    call, results = server.scripted(asked, asked["messages"]), _results(asked["messages"])
    block: dict[str, Any] = {"type": "text", "text": DONE}
    if call:
        block = {"type": "tool_use", "id": f"toolu_{results}", "name": call[0], "input": call[1]}
    usage = {"input_tokens": 100, "output_tokens": 10}
    head = {"id": f"msg_{results}", "type": "message", "role": "assistant", "model": asked["model"]}
    head["usage"] = usage
    end = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}

    def parts() -> Iterator[bytes]:
        first = head | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event({"type": "message_start", "message": first}, "message_start")
        empty = block | ({"input": {}} if call else {"text": ""})
        begin = {"type": "content_block_start", "index": 0, "content_block": empty}
        yield _event(begin, begin["type"])
        delta = {"type": "text_delta", "text": DONE}
        if call:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
        yield _event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
        yield _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        yield _event({"type": "message_delta", "delta": end, "usage": usage}, "message_delta")
        yield _event({"type": "message_stop"}, "message_stop")

    return head | {"content": [block]} | end, parts()


def _chat(server: Recorder, asked: Any) -> tuple[Any, Iterator[bytes]]:
    results = _results(asked["messages"])
    call = server.scripted(asked, asked["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": DONE}
    if call:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        called = {"id": f"call_{results}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [called]}
    reason = "tool_calls" if call else "stop"
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": asked["model"]}

    def parts() -> Iterator[bytes]:
        piece = head | {"object": "chat.completion.chunk"}
        delta = dict(message)
        if call:
            delta["tool_calls"] = [{"index": 0} | called]
        yield _event(piece | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield _event(
            piece | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": USAGE}
        )
        yield b"data: [DONE]\n\n"

    choice = {"index": 0, "message": message, "finish_reason": reason}
    return head | {"choices": [choice], "usage": USAGE}, parts()


def _responses(server: Recorder, asked: Any) -> tuple[Any, Iterator[bytes]]:
    given = asked.get("input")
    items = given if isinstance(given, list) else []
    call, results = server.scripted(asked, items), _results(items)
    text = {"type": "output_text", "text": DONE, "annotations": []}
    item: dict[str, Any] = {"type": "message", "id": f"msg_{results}", "role": "assistant", "content": [text]}
    if call:
        item = {"type": "function_call", "id": f"fc_{results}", "call_id": f"call_{results}"}
        item |= {"name": call[0], "arguments": json.dumps(call[1])}
    item["status"] = "completed"
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 10}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 110}
    whole = {"id": f"resp_{results}", "object": "response", "created_at": 1, "status": "completed"}
    whole |= {"model": asked["model"], "output": [item], "usage": usage, "tools": [], "tool_choice": "auto"}
    whole |= {"parallel_tool_calls": True, "metadata": {}, "temperature": 1.0, "top_p": 1.0}
    whole |= dict.fromkeys(("error", "incomplete_details", "instructions"))

    def parts() -> Iterator[bytes]:
        begun = whole | {"status": "in_progress", "output": [], "usage": None}
        steps = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
            (
                "response.output_item.added",
                {"output_index": 0, "item": item | ({} if call else {"content": []})},
            ),
            *(() if call else _text_steps(item["id"], text)),
            ("response.output_item.done", {"output_index": 0, "item": item}),
            ("response.completed", {"response": whole}),
        ]
        for number, (kind, more) in enumerate(steps):
            yield _event({"type": kind, "sequence_number": number} | more, kind)

    return whole, parts()


def _text_steps(item: str, text: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What Responses' stream tells of a text."""
    where = {"item_id": item, "output_index": 0, "content_index": 0}
    return [
        ("response.content_part.added", where | {"part": text | {"text": ""}}),
        ("response.output_text.delta", where | {"delta": DONE, "logprobs": []}),
        ("response.output_text.done", where | {"text": DONE, "logprobs": []}),
        ("response.content_part.done", where | {"part": text}),
    ]


def _completions(server: Recorder, asked: Any) -> tuple[Any, Iterator[bytes]]:
    choice = {"index": 0, "text": DONE, "finish_reason": "stop", "logprobs": None}
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": asked.get("model")}
    whole |= {"choices": [choice], "usage": USAGE}
    return whole, iter((_event(whole), b"data: [DONE]\n\n"))


def _ollama(server: Recorder, asked: Any) -> tuple[Any, Iterator[bytes]]:
    call = server.scripted(asked, asked["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "" if call else DONE}
    if call:
        message["tool_calls"] = [{"function": {"name": call[0], "arguments": call[1]}}]
    whole = {"model": asked["model"], "created_at": "2026-01-01T00:00:00Z", "message": message}
    whole |= {"done": True, "done_reason": "stop", "prompt_eval_count": 100, "eval_count": 10}
    whole |= dict.fromkeys(("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"), 1)
    return whole, iter((json.dumps(whole).encode() + b"\n",))


def main(folder: str) -> None:
    """Record until the process is stopped; the first line printed is the port."""
    output = Path(folder)
    with Recorder(output / "requests", output / "workplace") as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
