"""Calls of tools as models write them, in every dialect, whole and streamed: all forms, and what is no call.

The templates have the marks of published ones, and nothing else of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.chat_template import ChatTemplate
from ondevice.chat_template.call_formats import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
)
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.chat_templates import TOOLS
from tests.support.scripted_replies import Script
from tests.support.serving import Answer, Serving, serving

MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
)
"""Special tokens, which have no text of their own. Other marks are written letter by letter."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
OSLO = ("weather", {"city": "Oslo", "days": 3})
ROME = ("weather", {"city": 'Rome, "the" {city}\n', "days": 1})
USER = {"role": "user", "content": "How is it?"}


def written(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


ONE, TWO = written(*OSLO), written(*ROME)
TAG = ("weather", {"city": "<tool_call>"})
LAST_NAME = json.dumps({"arguments": TAG[1], "name": TAG[0]})
QWEN, LLAMA, MISTRAL = "<tool_call></tool_call>", '<|start_header_id|>{"name": "parameters": ', "[TOOL_CALLS]"
HARMONY = "<|start|><|channel|><|message|><|end|>"
CHANNEL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
MORE = "<|start|>assistant"

# What stands in the template, the reply, its text and its calls.
FORMS: dict[str, tuple[str, str, str, list[Any]]] = {
    "hermes": (
        QWEN,
        f"I look.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "I look.",
        [OSLO, ROME],
    ),
    "hermes, without ends": (QWEN, f"<tool_call>\n{ONE}\n<tool_call>\n{TWO}", "", [OSLO, ROME]),
    "hermes, without ends, arguments first": (
        QWEN,
        f"Look.\n<tool_call>\n{LAST_NAME}\n<tool_call>\n{LAST_NAME}\n</tool_call>",
        "Look.",
        [TAG, TAG],
    ),
    "hermes, null": (
        QWEN,
        '<tool_call>\n{"name": "now", "arguments": null}\n</tool_call>',
        "",
        [("now", {})],
    ),
    "hermes in another model": (MISTRAL, f"<tool_call>{ONE}</tool_call>", "", [OSLO]),
    "qwen coder, bare": (QWEN, ONE, "", [OSLO]),
    "qwen coder, bare behind a text": (QWEN, f"I look.\n\n{ONE}\n{TWO}\n", "I look.", [OSLO, ROME]),
    "qwen coder, indented": (QWEN, json.dumps(json.loads(TWO), indent=2), "", [ROME]),
    "qwen coder, a list": (QWEN, f"[{ONE}, {TWO}]", "", [OSLO, ROME]),
    "qwen coder, fenced": (QWEN, f"I look.\n```json\n{ONE}\n```", "I look.", [OSLO]),
    "qwen coder, fenced without a language": (QWEN, f"```\n{ONE}\n{TWO}\n```", "", [OSLO, ROME]),
    "qwen coder, fenced between texts": (
        QWEN,
        f"First:\n\n```json\n{ONE}\n```\nthen:\n```json\n{TWO}\n```Done",
        "First:\n\nthen:\nDone",
        [OSLO, ROME],
    ),
    "qwen coder, bare between texts": (QWEN, f"I look.\n{ONE}\nGood?", "I look.\n\nGood?", [OSLO]),
    "qwen coder, in tools": (QWEN, f"<tools>\n{ONE}\n</tools>", "", [OSLO]),
    "lfm2": (
        "<|tool_list_start|><|tool_list_end|>",
        '<|tool_call_start|>[weather(city="Oslo", days=3), now()]<|tool_call_end|>I look.',
        "I look.",
        [OSLO, ("now", {})],
    ),
    "lfm2, json": ("<|tool_call_start|>", f"<|tool_call_start|>[{TWO}]<|tool_call_end|>", "", [ROME]),
    "mistral": (MISTRAL, f"[TOOL_CALLS][{ONE}, {TWO}]", "", [OSLO, ROME]),
    "mistral, by name": (
        "[TOOL_CALLS][ARGS]",
        f"I look.[TOOL_CALLS]weather[ARGS]{json.dumps(OSLO[1])}[TOOL_CALLS]now[ARGS]{{}}",
        "I look.",
        [OSLO, ("now", {})],
    ),
    "llama": (LLAMA, written(*OSLO, "parameters"), "", [OSLO]),
    "llama, several": (LLAMA, "; ".join(written(*it, "parameters") for it in (OSLO, ROME)), "", [OSLO, ROME]),
    "llama, behind a tag": (LLAMA, f"<|python_tag|>{written(*OSLO, 'parameters')}", "", [OSLO]),
    "llama, a function's name": (
        LLAMA,
        json.dumps({"type": "function", "function": OSLO[0], "parameters": OSLO[1]}),
        "",
        [OSLO],
    ),
    "llama, as python": (LLAMA, '<|python_tag|>weather.call(city="Oslo", days=3)', "", [OSLO]),
    "llama, a function": (LLAMA, f"<function=weather>{json.dumps(OSLO[1])}</function>", "", [OSLO]),
    "llama 4": (LLAMA, "[weather(city='Oslo', days=3), now()]", "", [OSLO, ("now", {})]),
    "gemma, as code": ("nothing of tools", '```tool_code\nweather("Oslo", 3)\n```', "", [OSLO]),
    "deepseek": (
        DEEPSEEK_CALLS + DEEPSEEK_SEPARATOR,
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}weather{DEEPSEEK_SEPARATOR}{json.dumps(OSLO[1])}{DEEPSEEK_CALL_END}"
        f"{DEEPSEEK_CALL}now{DEEPSEEK_SEPARATOR}{{}}{DEEPSEEK_CALL_END}{DEEPSEEK_END}",
        "",
        [OSLO, ("now", {})],
    ),
    "gpt-oss": (HARMONY, CHANNEL.format("weather", json.dumps(OSLO[1])), "", [OSLO]),
    "gpt-oss, to a tool": (
        HARMONY,
        CHANNEL.replace("functions.", "").format("weather", json.dumps(OSLO[1])),
        "",
        [OSLO],
    ),
    "gpt-oss, several": (
        HARMONY,
        f"<|channel|>analysis<|message|>Hm.<|end|>{MORE}"
        f"{CHANNEL.format('weather', json.dumps(OSLO[1]))}{MORE}{CHANNEL.format('now', '{}')}",
        "",
        [OSLO, ("now", {})],
    ),
}
# What is no call of a given tool is text, to the last letter.
TEXTS: dict[str, tuple[str, str]] = {
    "another tool": (QWEN, written("other", {})),
    "another tool, fenced": (QWEN, f"```json\n{written('other', {})}\n```"),
    "another tool, as python": (LLAMA, "[other(a=1)]"),
    "another tool, named by a function": (
        LLAMA,
        '{"type": "function", "function": "other", "parameters": {}}',
    ),
    "another tool, on a channel": (HARMONY, "<|channel|>commentary to=functions.other<|message|>{}"),
    "another tool, in thoughts": (HARMONY, "<|channel|>analysis to=python code<|message|>print(1)"),
    "a person": (LLAMA, '{"name": "weather", "age": 9}'),
    "in a line": (QWEN, f"Write {ONE} to call."),
    "code": (QWEN, f"Like this:\n```python\ncall({ONE})\n```\nGood?"),
    "lists": (MISTRAL, "[1] One\n[2](a) Two\n[ ] Three"),
    "a list of objects": (QWEN, '[\n  {"name": "a"},\n  {"x": 1}\n]'),
}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("forms")
    options = {"max_position_embeddings": 4096, "vocab_size": 320}
    checkpoint = write_chat_checkpoint(folder / "checkpoint", TOOLS, MARKS, **options)
    bundle = convert_bundle(checkpoint, folder / "spoken")
    with serving(load(bundle, threads=1, speculation="off")) as running:
        yield running


def answers(
    server: Serving, monkeypatch: pytest.MonkeyPatch, marks: str, reply: str, reason: Any = "stop"
) -> Script:
    """Let the model have a template with these marks, and give this reply."""
    place = "" if marks == "nothing of tools" else "{{ tools | tojson if tools }}"
    source = f"{place}{{% for m in messages %}}<|user|>{{{{ m.content }}}}{{% endfor %}}<|assistant|>"
    template = ChatTemplate.load(
        f"{source}{{% if 0 %}}{{% raw %}}{marks}{{% endraw %}}{{% endif %}}".encode(), server.model.tokenizer
    )
    monkeypatch.setitem(server.model._host.__dict__, "chat_template", template)
    return Script([reply], finish_reason=reason).put_into(server.model, monkeypatch)


def events(answer: Answer) -> list[Any]:
    """The JSON of a stream's events."""
    lines = answer.body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in data]


Found = tuple[str, list[Any], str]


def chat(server: Serving, stream: bool) -> Found:
    tools = [{"type": "function", "function": each} for each in (WEATHER, NOW)]
    answer = server.post("/v1/chat/completions", {"messages": [USER], "tools": tools, "stream": stream})
    assert answer.status == 200, answer.body
    if not stream:
        choice = answer.json["choices"][0]
        calls = [it["function"] for it in choice["message"].get("tool_calls") or ()]
        told = [(it["name"], json.loads(it["arguments"])) for it in calls]
        return choice["message"]["content"] or "", told, choice["finish_reason"]
    choices = [each["choices"][0] for each in events(answer) if each["choices"]]
    text = "".join(each["delta"].get("content") or "" for each in choices)
    parts: dict[int, list[str]] = {}
    for each in choices:
        for call in each["delta"].get("tool_calls") or ():
            made = parts.setdefault(call["index"], ["", ""])
            made[0] += call["function"].get("name") or ""
            made[1] += call["function"].get("arguments") or ""
    reason = next(each["finish_reason"] for each in choices if each["finish_reason"])
    return text, [(name, read(arguments)) for name, arguments in parts.values()], reason


def read(arguments: str) -> Any:
    """Arguments, or their text where they broke off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def respond(server: Serving, stream: bool) -> Found:
    tools = [{"type": "function"} | each for each in (WEATHER, NOW)]
    answer = server.post("/v1/responses", {"input": [USER], "tools": tools, "stream": stream})
    assert answer.status == 200, answer.body
    response = events(answer)[-1]["response"] if stream else answer.json
    output = response["output"]
    texts = [part["text"] for it in output if it["type"] == "message" for part in it["content"]]
    told = [(it["name"], read(it["arguments"])) for it in output if it["type"] == "function_call"]
    return "".join(texts), told, response["status"]


def message(server: Serving, stream: bool) -> Found:
    tools = [
        {key: value for key, value in each.items() if key != "parameters"}
        | {"input_schema": each["parameters"]}
        for each in (WEATHER, NOW)
    ]
    asked = {"max_tokens": 999, "messages": [USER], "tools": tools, "stream": stream}
    answer = server.post("/v1/messages", asked)
    assert answer.status == 200, answer.body
    if not stream:
        blocks, reason = answer.json["content"], answer.json["stop_reason"]
    else:
        blocks, reason = [], ""
        for event in events(answer):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[-1]["text"] = blocks[-1].get("text", "") + delta.get("text", "")
                blocks[-1]["json"] += delta.get("partial_json", "")
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
        for block in blocks:
            block["input"] = read(block["json"] or "{}")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, [(it["name"], it["input"]) for it in blocks if it["type"] == "tool_use"], reason


def ollama(server: Serving, stream: bool) -> Found:
    tools = [{"type": "function", "function": each} for each in (WEATHER, NOW)]
    asked = {"model": server.model.name, "messages": [USER], "tools": tools, "stream": stream}
    answer = server.post("/api/chat", asked)
    assert answer.status == 200, answer.body
    parts = events(answer) if stream else [answer.json]
    calls = [call["function"] for part in parts for call in part["message"].get("tool_calls") or ()]
    text = "".join(part["message"]["content"] for part in parts)
    return text, [(it["name"], it["arguments"]) for it in calls], parts[-1]["done_reason"]


DIALECTS: dict[str, tuple[Callable[[Serving, bool], Found], str, str, str]] = {
    "chat": (chat, "tool_calls", "stop", "length"),
    "responses": (respond, "completed", "completed", "incomplete"),
    "anthropic": (message, "tool_use", "end_turn", "max_tokens"),
    "ollama": (ollama, "stop", "stop", "length"),
}
"""How each is asked, and its reasons: calls, an end, a cut."""


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_told_in_every_dialect(
    spoken: Serving, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    marks, reply, said, calls = FORMS[form]
    script = answers(spoken, monkeypatch, marks, reply)
    for name, (ask, reason, _, _) in DIALECTS.items():
        for stream in (False, True):
            assert ask(spoken, stream) == (said, calls, reason), (name, stream)
    assert all("The weather of a city" in prompt for prompt in script.asked)


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_call_of_a_given_tool_stays_text(
    spoken: Serving, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    marks, reply = TEXTS[name]
    answers(spoken, monkeypatch, marks, reply)
    for dialect, (ask, _, reason, _) in DIALECTS.items():
        for stream in (False, True):
            assert ask(spoken, stream) == (reply.rpartition("<|message|>")[2], [], reason), (dialect, stream)


CUT = {
    "hermes": (QWEN, '<tool_call>\n{"name": "weather", "arguments": {"city": "Os'),
    "bare": (QWEN, '{"name": "weather", "arguments": {"city": "Os'),
    "fenced": (QWEN, '```json\n{"name": "weather", "arguments": {"city": "Os'),
    "lfm2": ("<|tool_call_start|>", '<|tool_call_start|>[weather(city="Os'),
    "mistral": (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Os'),
    "llama": (LLAMA, '{"name": "weather", "parameters": {"city": "Os'),
    "gpt-oss": (HARMONY, '<|channel|>commentary to=functions.weather json<|message|>{"city": "Os'),
}


@pytest.mark.parametrize("form", CUT)
def test_a_call_that_is_cut_is_text_and_the_reason_says_so(
    spoken: Serving, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    marks, reply = CUT[form]
    answers(spoken, monkeypatch, marks, reply, "length")
    text = reply.partition("<|message|>")[2] or reply
    for dialect, (ask, _, _, reason) in DIALECTS.items():
        assert ask(spoken, False) == (text, [], reason), dialect
        said, begun, streamed = ask(spoken, True)
        assert (said, streamed) == (text, reason), dialect
        # A stream has told the call's name and the arguments as far as they came, where these are JSON.
        is_told = form != "lfm2" and dialect != "ollama"
        assert begun == ([("weather", '{"city": "Os')] if is_told else []), dialect


def test_a_template_that_fails_is_an_error_with_its_line_and_the_remedy(
    spoken: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate.load(b"\n{{ messages[0].content.rjust(40) }}", spoken.model.tokenizer)
    monkeypatch.setitem(spoken.model._host.__dict__, "chat_template", template)
    requests: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/responses": {"input": [USER]},
        "/v1/messages": {"messages": [USER], "max_tokens": 9},
        "/api/chat": {"model": spoken.model.name, "messages": [USER]},
    }
    for path, asked in requests.items():
        for stream in (False, True):
            answer = spoken.post(path, asked | {"stream": stream})
            error = answer.json["error"]
            said = error["message"] if isinstance(error, dict) else error
            assert answer.status == 500
            assert "attribute 'rjust' of 'str' isn't allowed in a chat template (line 2)" in said
            assert "give another with --chat-template FILE" in said


def test_the_template_may_be_given_and_the_day_fixed(tmp_path: Path, spoken: Serving) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}")
    with load(spoken.model.bundle.path, threads=1, chat_template=file, date="2026-07-31") as model:
        assert model.chat_template.render([USER]) == "31 July 2026: How is it?"
