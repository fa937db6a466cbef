"""A reply that was cut is continued, as vLLM's clients ask for it: `continue_final_message`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from tests.support.bundles import EOS
from tests.support.serving import Serving, serving

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "Hello"}
GREEDY: dict[str, Any] = {"temperature": 0, "logit_bias": {str(EOS): -100}}
CALL = {"id": "a", "type": "function", "function": {"name": "x", "arguments": "{}"}}


def continued(server: Serving, text: str, tokens: int, **fields: Any) -> Any:
    messages = [QUESTION, {"role": "assistant", "content": text}]
    body = GREEDY | {"messages": messages, "continue_final_message": True, "max_tokens": tokens} | fields
    return server.post(CHAT, body)


def test_a_cut_reply_goes_on_as_it_would_have() -> None:
    """Of the model that ships, whose replies are text."""
    with serving(load(threads=1, speculation="off")) as server:
        uncut = server.post(CHAT, GREEDY | {"messages": [QUESTION], "max_tokens": 10}).json
        text = uncut["choices"][0]["message"]["content"]
        for words in (1, 3):
            cut = " ".join(text.split(" ")[:words])
            answer = continued(server, cut, 20, add_generation_prompt=False).json
            assert (cut + answer["choices"][0]["message"]["content"]).startswith(text)
            # The beginning is a part of the prompt.
            assert answer["usage"]["prompt_tokens"] >= uncut["usage"]["prompt_tokens"] + words


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [QUESTION]},
        {"messages": [QUESTION, {"role": "assistant", "content": ""}]},
        {"messages": [QUESTION, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]},
    ],
    ids=["question", "empty", "calls"],
)
def test_what_is_no_cut_reply_is_refused(server: Serving, fields: dict[str, Any]) -> None:
    answer = continued(server, "x", 1, **fields)
    assert answer.status == 400
    assert answer.json["error"]["param"] == "continue_final_message"


def test_a_reply_that_obeys_a_schema_is_not_continued(server: Serving) -> None:
    answer = continued(server, "{", 1, response_format={"type": "json_object"})
    assert answer.status == 400
    assert "can't be continued" in answer.json["error"]["message"]
