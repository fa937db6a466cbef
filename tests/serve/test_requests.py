"""What agents send beyond what a dialect's documents ask for: taken, ignored and logged, or told."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.chat_template import ChatTemplate
from ondevice.serve.config import ServeConfig
from ondevice.serve.fields import MAX_IGNORED, SHOWN_CHARS, Fields, Ignored
from ondevice.serve.metrics import IgnoredLog
from ondevice.serve.openai_input import Namespaces
from ondevice.serve.tools import call_message, with_ids
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.chat_templates import TOOLS
from tests.support.scripted_replies import Script
from tests.support.serving import Answer, Serving, serving

Say = Callable[..., Script]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LEVELS = TOOLS + "{%- if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HELLO = {"role": "user", "content": "Hello"}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HELLO], "max_tokens": 2},
    RESPONSES: {"input": "Hello", "max_output_tokens": 2},
    MESSAGES: {"messages": [HELLO], "max_tokens": 2},
    f"{MESSAGES}/count_tokens": {"messages": [HELLO]},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/api/chat": {"messages": [HELLO], "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 2}},
    "/completion": {"prompt": "Hello", "n_predict": 2},
    "/tokenize": {"content": "Hello"},
}
"""A small request by path."""


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model whose template takes tools, and writes the level of thinking behind the prompt."""
    folder = tmp_path_factory.mktemp("requests")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", LEVELS, max_position_embeddings=4096)
    bundle = convert_bundle(checkpoint, folder / "tooled")
    with serving(load(bundle, threads=1, speculation="off")) as running:
        yield running


@pytest.fixture
def say(tooled: Serving, monkeypatch: pytest.MonkeyPatch) -> Say:
    return lambda *replies: Script(list(replies)).put_into(tooled.model, monkeypatch)


def ignored(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """The names of each line of the log about what was ignored."""
    events = (json.loads(record.message) for record in caplog.records if '"ignored"' in record.message)
    return [event["fields"] for event in events]


# --- Fields that nothing here knows ---


@pytest.mark.parametrize("path", BASES)
def test_unknown_fields_are_ignored_and_logged_once(
    server: Serving, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    name = f"new_{path.replace('/', '_')}"
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        for _ in range(2):
            answer = server.post(path, BASES[path] | {name: {"deep": [1]}, "empty": None})
            assert answer.status == 200, answer.body
    assert ignored(caplog) == [[name]]


def test_unknown_fields_of_parts_are_logged_by_their_place(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [{"type": "text", "text": "a", "shade": 1}, {"type": "text", "text": "b", "shade": 2}]
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        body = {"messages": [HELLO | {"content": parts, "mood": 1}], "max_tokens": 2}
        assert server.post(CHAT, body).status == 200
    assert ignored(caplog) == [["messages[].content[].shade", "messages[].mood"]]


def test_the_log_has_a_bound_whatever_a_client_makes_up(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog()
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        log.tell([f"x{at}" for at in range(1500)])
        log.tell(["one more"])
    assert ignored(caplog) == [[f"x{at}" for at in range(20)]]


def test_what_a_request_has_too_much_takes_no_time() -> None:
    """Names of fields, results of calls and calls of groups' tools: each is looked up at once."""
    count = 20_000
    begun = time.process_time()
    ignored = Ignored()
    Fields({f"{at} {'x' * SHOWN_CHARS}": 1 for at in range(count)}, ignored=ignored).close()
    assert ignored.names[0] == f"0 {'x' * SHOWN_CHARS}"[:SHOWN_CHARS]
    assert len(ignored.names) == MAX_IGNORED
    calls = [call_message(f"{at}", "other", {}) for at in range(count)]
    results = [{"role": "tool", "content": "", "tool_call_id": f"{at}"} for at in reversed(range(count))]
    unnamed = [{"role": "tool", "content": "", "name": "nobody"}] * count
    said = with_ids([{"role": "assistant", "content": "", "tool_calls": calls}, *unnamed, *results])
    assert {it["tool_call_id"] for it in said[1 : count + 1]} == {""}
    names = Namespaces()
    for at in range(count):
        names._named({"function": {"name": f"{at}"}}, "group")
    assert [names.known("group", f"{at}") for at in range(count)] == [f"{at}" for at in range(count)]
    assert time.process_time() - begun < 2.0


def test_a_strict_server_refuses_them_by_name(chat_bundle: Any) -> None:
    config = ServeConfig(port=0, strict=True)
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        for path, base in BASES.items():
            assert server.post(path, base).status == 200
            answer = server.post(path, base | {"unheard_of": 1})
            assert (answer.status, "unheard_of is not a field" in answer.body.decode()) == (400, True)
        for more, field in (
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"text": {"verbosity": "low"}}, "text.verbosity"),
            ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
            ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ):
            answer = server.post(RESPONSES, BASES[RESPONSES] | more)
            assert (answer.status, answer.json["error"]["param"]) == (400, field)


# --- Claude Code's messages ---


def test_a_message_of_claude_code_s_kind_is_the_prompt_in_its_order(tooled: Serving, say: Say) -> None:
    script = say("Done.")
    body = {
        "system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]},
            {"role": "system", "content": [{"type": "text", "text": "D", "cache_control": {"ttl": "1h"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "compaction", "content": "E"},
                    {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "x"}, "caller": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [
                            {"type": "text", "text": "F"},
                            {"type": "tool_reference", "tool_name": "G"},
                            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
                            {
                                "type": "search_result",
                                "title": "H",
                                "content": [{"type": "text", "text": "I"}],
                            },
                        ],
                    },
                    {"type": "document", "source": {"type": "text", "data": "J"}, "title": "K"},
                ],
            },
            {"role": "system", "content": "L"},
        ],
        "max_tokens": 2048,
        "thinking": {"type": "adaptive", "display": "updates"},
        "output_config": {"effort": "xhigh", "task_budget": {"tokens": 5}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "betas": ["x-2026"],
        "mcp_servers": [{"type": "url", "url": "https://mcp.invalid"}],
        "tools": [
            {"name": "read", "input_schema": SCHEMA, "defer_loading": True, "cache_control": {}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        ],
    }
    answer = tooled.post(f"{MESSAGES}?beta=true", body, anthropic_beta="effort-2025-11-24")
    assert answer.status == 200, answer.body
    assert answer.json["context_management"] == {"applied_edits": []}
    tool = {"name": "read", "description": "", "parameters": SCHEMA}
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    told = 'F{"type": "tool_reference", "tool_name": "G"}[image: not shown, as this model takes text alone]'
    told += "H\nI\n"
    assert script.asked == [
        f"<|user|>{json.dumps({'type': 'function', 'function': tool})}<tool_call>{{}}</tool_call>"
        f"<|system|>A<|user|>BC<|system|>D<|assistant|>E{call}<|user|><tool_response>{told}</tool_response>"
        "<|user|>K\nJ\n<|system|>L<|assistant|><high>"
    ]
    stream = tooled.post(MESSAGES, body | {"stream": True}).body.decode()
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    assert next(it for it in events if it["type"] == "message_delta")["context_management"] == {
        "applied_edits": []
    }


@pytest.mark.parametrize(
    ("thinking", "effort", "end"),
    [
        ({"type": "enabled", "budget_tokens": 2047, "display": "updates"}, None, "<medium>"),
        ({"type": "disabled"}, "max", "<low>"),
        (None, "low", "<low>"),
        (None, None, ""),
    ],
)
def test_thinking_sets_the_effort(tooled: Serving, say: Say, thinking: Any, effort: Any, end: str) -> None:
    script = say("Done.")
    body = BASES[MESSAGES] | {"thinking": thinking, "output_config": {"effort": effort}}
    assert tooled.post(MESSAGES, body).status == 200
    assert script.asked[0].endswith(f"<|assistant|>{end}")


def test_a_model_that_always_thinks_does_so_where_none_is_asked_for(
    tooled: Serving, say: Say, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents ask for titles without thinking, of any model."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '</think>'[:0] }}<think>"
    template = ChatTemplate.load(source.encode(), tooled.model.tokenizer)
    monkeypatch.setitem(tooled.model._host.__dict__, "chat_template", template)
    say("Hm.</think>Hi")
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        answer = tooled.post(MESSAGES, BASES[MESSAGES] | {"thinking": {"type": "disabled"}})
    assert [block[block["type"]] for block in answer.json["content"]] == ["Hm.", "Hi"]
    assert ignored(caplog) == [[f"no thinking, which {tooled.model.name} can't be told"]]


def text_of(answer: Answer) -> str:
    """The reply's text, in any dialect."""
    body = answer.json
    parts = body.get("content") or (body["output"][0]["content"] if "output" in body else None)
    if parts is not None:
        return str(parts[0]["text"])
    message = body["message"] if "message" in body else body["choices"][0]["message"]
    return str(message["content"])


def test_effort_without_levels_changes_nothing(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        for path, more, name in (
            (MESSAGES, {"output_config": {"effort": "max"}}, "output_config.effort"),
            (CHAT, {"reasoning_effort": "minimal"}, "reasoning_effort"),
            (RESPONSES, {"reasoning": {"effort": "high", "summary": "detailed"}}, "reasoning.effort"),
            ("/api/chat", {"think": "high"}, "think"),
        ):
            options = {"temperature": 0, "num_predict": 2}
            greedy = {"options": options} if path.startswith("/api") else {"temperature": 0}
            plain, given = (server.post(path, BASES[path] | greedy | each) for each in ({}, more))
            assert (plain.status, given.status) == (200, 200), given.body
            assert text_of(plain) == text_of(given)
            assert ignored(caplog)[-1] == [name]


# --- Codex's responses ---

FUNCTION = {"type": "function", "name": "run", "strict": False, "parameters": SCHEMA}
GROUP = {
    "type": "namespace",
    "name": "agents",
    "description": "x",
    "tools": [FUNCTION, FUNCTION | {"name": "close", "defer_loading": True}],
}
CODEX = {
    "tools": [
        FUNCTION,
        GROUP,
        {"type": "web_search", "external_web_access": True},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "local_shell"},
        {"type": "image_generation"},
    ],
    "client_metadata": {"session_id": "x"},
    "text": {"verbosity": "low"},
    "reasoning": {"effort": "xhigh", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "store": True,
    "service_tier": "priority",
    "prompt_cache_key": "key",
    "truncation": "auto",
}


def test_a_response_of_codex_s_kind_names_what_it_ignored(
    tooled: Serving, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    script = say("Done.")
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        answers = [tooled.post(RESPONSES, CODEX | {"input": "Hello"}) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200], answers[0].body
    kinds = [f"tools of type {kind}" for kind in ("web_search", "custom", "local_shell", "image_generation")]
    assert answers[1].json["ignored"] == [*kinds, "text.verbosity"]
    assert ignored(caplog) == [[*kinds, "text.verbosity"]]
    names = [(tool["name"], tool.get("namespace")) for tool in answers[0].json["tools"]]
    assert names == [("run", None), ("run", "agents"), ("close", "agents")]
    assert (answers[0].json["store"], answers[0].json["prompt_cache_key"]) == (False, "key")
    assert [script.asked[0].count(f'"name": "{it}"') for it in ("run", "agents.run", "close")] == [1, 1, 1]
    assert script.asked[0].endswith("<|assistant|><high>")


@pytest.mark.parametrize(("called", "told"), [("agents.run", "run"), ("close", "close")])
def test_a_tool_of_a_namespace_is_called_and_answered_by_it(
    tooled: Serving, say: Say, called: str, told: str
) -> None:
    call = f'<tool_call>\n{{"name": "{called}", "arguments": {{"city": "x"}}}}\n</tool_call>'
    script = say(call)
    item = tooled.post(RESPONSES, CODEX | {"input": "Hello"}).json["output"][0]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", told, "agents")
    stream = tooled.post(RESPONSES, CODEX | {"input": "Hello", "stream": True}).body.decode()
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    done = next(it for it in events if it["type"] == "response.output_item.done")["item"]
    assert (done["name"], done["namespace"]) == (told, "agents")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "9 C"}
    history = [{"role": "user", "content": "Hello"}, item, result]
    assert tooled.post(RESPONSES, CODEX | {"input": history}).status == 200
    assert f"<|assistant|>{call}<|user|><tool_response>9 C</tool_response>" in script.asked[-1]


def test_items_of_other_tools_are_calls_or_left_out(tooled: Serving, say: Say) -> None:
    script = say("Done.")
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "A"},
        {"role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "C"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** D", "status": "x"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "E"},
        {"type": "local_shell_call", "call_id": "2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "F"}]},
        {"type": "function_call", "call_id": "3", "name": "view", "arguments": '{"path": "x'},
        {
            "type": "function_call_output",
            "call_id": "3",
            "output": [{"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "compaction", "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "G"}, {"type": "output_text", "text": "H"}],
        },
        {"role": "user", "content": "I"},
    ]
    answer = tooled.post(RESPONSES, {"input": items})
    assert answer.status == 200, answer.body
    told = [f"input of type {kind}" for kind in ("web_search_call", "compaction")]
    assert answer.json["ignored"] == [told[0], "output of type input_image", told[1]]

    def call(name: str, arguments: Any) -> str:
        inside = json.dumps({"name": name, "arguments": arguments}).replace('{"name"', '{"name"')
        return f"<|assistant|><tool_call>\n{inside}\n</tool_call>"

    def result(text: str) -> str:
        return f"<|user|><tool_response>{text}</tool_response>"

    assert script.asked == [
        "<|system|>A<|system|>B<|user|>C"
        + call("apply_patch", {"input": "*** D"})
        + result("E")
        + call("local_shell", {"type": "exec", "command": ["ls"]})
        + result("F")
        + call("view", '{"path": "x')
        + result("[input_image: not shown, as this model takes text alone]")
        + "<|assistant|>GH<|user|>I<|assistant|>"
    ]


# --- Histories that are broken ---

CUT = '{"city": "Os'
NAMED = {"name": "weather", "arguments": CUT}
SHOWN = '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Os"}\n</tool_call>'


@pytest.mark.parametrize(
    ("path", "history"),
    [
        (CHAT, [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": NAMED}]}]),
        (CHAT, [{"role": "assistant", "content": None, "tool_calls": [{"function": NAMED}]}]),
        (CHAT, [{"role": "assistant", "content": "", "function_call": NAMED}]),
        ("/api/chat", [{"role": "assistant", "content": "", "tool_calls": [{"function": NAMED}]}]),
        (
            MESSAGES,
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "weather", "input": CUT}]}],
        ),
        (RESPONSES, [{"type": "function_call", **NAMED}]),
        (RESPONSES, [{"type": "function_call", "call_id": "x" * 900, **NAMED}]),
    ],
)
def test_a_cut_call_and_its_result_go_to_the_template(
    tooled: Serving, say: Say, path: str, history: list[dict[str, Any]]
) -> None:
    script = say("Done.")
    result: dict[str, Any] = {"role": "tool", "content": "9 C"}
    if path == CHAT and "function_call" in history[0]:
        result = {"role": "function", "name": "weather", "content": "9 C"}
    elif path == MESSAGES:
        result = {"role": "user", "content": [{"type": "tool_result", "content": "9 C"}]}
    elif path == RESPONSES:
        result = {"type": "function_call_output", "output": "9 C"}
    name = "input" if path == RESPONSES else "messages"
    answer = tooled.post(path, BASES[path] | {name: [HELLO, *history, result, HELLO]})
    assert answer.status == 200, answer.body
    result_shown = "<|user|><tool_response>9 C</tool_response>"
    assert script.asked == [f"<|user|>Hello<|assistant|>{SHOWN}{result_shown}<|user|>Hello<|assistant|>"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (None, "{}"),
        ("", "{}"),
        ({"a": float("inf")}, '"{\\"a\\": Infinity}"'),
        ([1], '"[1]"'),
        (5, '"5"'),
        ("[1]", '"[1]"'),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_arguments_of_any_kind_are_taken(tooled: Serving, say: Say, arguments: Any, shown: str) -> None:
    script = say("Done.")
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    messages = [HELLO, {"role": "assistant", "tool_calls": [call, {"type": "function"}]}, HELLO]
    body = json.dumps(BASES[CHAT] | {"messages": messages}).replace("Infinity", "1e999")
    answer = tooled.post(CHAT, body.encode())
    assert answer.status == 200, answer.body
    assert f'"arguments": {shown}}}' in script.asked[0]
    assert '{"name": "", "arguments": {}}' in script.asked[0]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/api/chat"])
def test_results_without_calls_are_taken(tooled: Serving, say: Say, path: str) -> None:
    script = say("Done.")
    result = {
        CHAT: {"role": "tool", "tool_call_id": "lost", "content": None},
        MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "lost"}]},
        RESPONSES: {"type": "function_call_output", "call_id": "lost"},
        "/api/chat": {"role": "tool", "tool_name": "lost"},
    }[path]
    name = "input" if path == RESPONSES else "messages"
    answer = tooled.post(path, BASES[path] | {name: [result, HELLO]})
    assert answer.status == 200, answer.body
    assert script.asked == ["<|user|><tool_response></tool_response><|user|>Hello<|assistant|>"]


# --- Limits, formats and penalties ---


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_minus_one_is_no_limit(server: Serving, field: str) -> None:
    body = {"messages": [HELLO], "logit_bias": {str(EOS): -100}, "temperature": 0, "top_k": -1}
    answer = server.post(CHAT, body | {field: -1})
    assert answer.json["usage"]["total_tokens"] == server.model.plan.max_context
    both = server.post(CHAT, body | {"max_tokens": 9, "max_completion_tokens": 5}).json
    assert both["usage"]["completion_tokens"] == 5
    for value in (0, -2, 1.5):
        error = server.post(CHAT, body | {field: value}).json["error"]
        assert (error["param"], "-1 for no limit" in error["message"]) == (field, True)


def test_negative_limits_mean_none_in_every_dialect(server: Serving) -> None:
    ids = server.model.tokenizer.encode("abc", add_bos=False)
    bias = {str(token): 100 for token in ids}
    answer = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": -1, "logit_bias": bias}).json
    assert answer["usage"]["total_tokens"] == server.model.plan.max_context
    for path, more in (
        (MESSAGES, {"max_tokens": -1, "top_k": -1}),
        (RESPONSES, {"max_output_tokens": -1}),
        ("/api/chat", {"options": {"num_predict": -1, "top_k": -1}}),
        ("/api/chat", {"options": {"num_predict": -2}}),
    ):
        answer = server.post(path, BASES[path] | more)
        assert answer.status == 200, answer.body


def test_a_schema_beside_json_object_is_enforced(server: Serving) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    body = {"messages": [HELLO], "max_tokens": 40}
    for more in (
        {"response_format": {"type": "json_object", "schema": schema}},
        {"response_format": {"type": "json_schema", "schema": schema}},
        {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": schema}}},
        {"json_schema": schema},
        {"guided_json": schema},
    ):
        answer = server.post(CHAT, body | more)
        assert answer.status == 200, answer.body
        assert set(json.loads(answer.json["choices"][0]["message"]["content"])) == {"ok"}
    bad = server.post(CHAT, body | {"response_format": {"type": "json_object", "schema": 5}})
    assert (bad.status, bad.json["error"]["param"]) == (400, "response_format.schema")
    text = {"format": {"type": "json_object", "schema": schema}}
    answer = server.post(RESPONSES, {"input": "Hello", "text": text, "max_output_tokens": 40})
    assert set(json.loads(answer.json["output"][0]["content"][0]["text"])) == {"ok"}


def test_penalties_are_the_engine_s(server: Serving) -> None:
    penalties = {"frequency_penalty": 1.5, "presence_penalty": -0.5}
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "repetition_penalty": 1.25} | penalties
    expected = server.model.session().respond("Hello", **options, top_p=0.9).text
    plain = server.model.session().respond("Hello", temperature=0.0, max_tokens=24, top_p=0.9).text
    assert expected != plain
    greedy = {"messages": [HELLO], "temperature": 0, **penalties}
    for name in ("repeat_penalty", "repetition_penalty"):
        chat = server.post(CHAT, greedy | {"max_tokens": 24, name: 1.25}).json
        assert chat["choices"][0]["message"]["content"] == expected
    ollama = {"temperature": 0, "num_predict": 24, "repeat_penalty": 1.25, **penalties}
    body = {"messages": [HELLO], "stream": False, "options": ollama}
    assert server.post("/api/chat", body).json["message"]["content"] == expected
    response = server.post(
        RESPONSES, {"input": "Hello", "temperature": 0, "max_output_tokens": 24} | penalties
    )
    without = server.model.session().respond("Hello", **(options | {"repetition_penalty": 1.0}), top_p=0.9)
    assert response.json["output"][0]["content"][0]["text"] == without.text
    assert (response.json["frequency_penalty"], response.json["presence_penalty"]) == (1.5, -0.5)
    raw = {"prompt": "Hello", "n_predict": 24, "repeat_penalty": 1.25, **penalties}
    got = server.post("/completion", raw).json
    assert got["content"] == server.model.generate("Hello", **options).text
    assert got["generation_settings"]["frequency_penalty"] == 1.5


def test_penalties_look_at_as_many_tokens_as_the_request_says(server: Serving) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "repetition_penalty": 1.5}
    raw = server.model.generate("Hello", repeat_last_n=3, **options).text
    assert raw != server.model.generate("Hello", **options).text
    asked = {"repeat_penalty": 1.5, "repeat_last_n": 3}
    got = server.post("/completion", {"prompt": "Hello", "n_predict": 24, **asked}).json
    assert (got["content"], got["generation_settings"]["repeat_last_n"]) == (raw, 3)
    ollama = {"temperature": 0, "num_predict": 24, **asked}
    body: dict[str, Any] = {"prompt": "Hello", "raw": True, "stream": False, "options": ollama}
    assert server.post("/api/generate", body).json["response"] == raw
    completion = {"prompt": "Hello", "temperature": 0, "max_tokens": 24, **asked}
    assert server.post("/v1/completions", completion).json["choices"][0]["text"] == raw
    wrong = server.post("/v1/completions", completion | {"repeat_last_n": -2})
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "repeat_last_n")


# --- Prompts beyond the context ---


def events(answer: Answer) -> list[dict[str, Any]]:
    lines = answer.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_a_streamed_response_tells_an_overflow_as_an_event(server: Serving) -> None:
    """Where Codex looks for it before it shortens a conversation."""
    body = {"input": "a" * 5000, "stream": True}
    begun, going, failed = events(server.post(RESPONSES, body))
    assert [it["type"] for it in (begun, going)] == ["response.created", "response.in_progress"]
    assert failed["type"] == "response.failed"
    error = failed["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    most = server.model.plan.max_context
    assert error["message"].startswith(f"This model's maximum context length is {most} tokens. However, ")
    assert error["message"].endswith("(context_length_exceeded)")
    answer = server.post(RESPONSES, {"input": "a" * 5000})
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert (answer.json["error"]["message"], answer.json["error"]["param"]) == (error["message"], "input")
    for path in (CHAT, MESSAGES):
        long = BASES[path] | {"messages": [HELLO | {"content": "a" * 5000}], "stream": True}
        assert server.post(path, long).status == 400


def test_a_text_beyond_the_context_is_told_with_all_of_its_tokens(server: Serving) -> None:
    text = "a long text " * 4000
    count = len(server.model.tokenizer.encode(text, special=True))
    message = server.post("/v1/completions", {"prompt": text}).json["error"]["message"]
    assert f"{count} tokens" in message, message


def test_a_num_ctx_beyond_the_context_is_told_in_the_log(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    most = server.model.plan.max_context
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        for context in (most, most + 1, most + 2):
            body = BASES["/api/chat"] | {"options": {"num_predict": 2, "num_ctx": context}}
            assert server.post("/api/chat", body).status == 200
    assert ignored(caplog) == [[f"num_ctx above the context of {most}, {server.model.name}"]]
