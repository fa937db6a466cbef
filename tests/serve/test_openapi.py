"""The server against its own OpenAPI document: what it tells is accepted, and all others are answered."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ondevice.api import load
from ondevice.serve import embeddings
from ondevice.serve.openapi import POSTS, document
from tests.serve.test_guard import FIELDS, WRONG
from tests.support.bundles import INFILL_MARKS, convert_bundle, write_chat_checkpoint
from tests.support.chat_templates import TOOLS
from tests.support.serving import Answer, Serving, serving

MOST_SECONDS = 20.0
"""Longest time for an answer to a request that means nothing. They are small, as is the model."""
SHORT = {
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "max_output_tokens": 2,
    "num_predict": 2,
    "n_predict": 2,
}
LEVELS = TOOLS + "{% if reasoning_effort %}{% endif %}"
TOOL = {"name": "x"}
NESTED = {"tools": [{"type": "function", "function": TOOL}]}
NEEDED: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "stream_options"): {"stream": True},
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "tool_choice"): NESTED,
    ("/v1/completions", "stream_options"): {"stream": True},
    ("/v1/completions", "suffix"): {"prompt": "x"},
    ("/v1/responses", "tool_choice"): {"tools": [TOOL]},
    ("/v1/messages", "tool_choice"): {"tools": [TOOL]},
    ("/v1/messages/count_tokens", "tool_choice"): {"tools": [TOOL]},
}
"""What a field needs beside it, by path and name."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model whose template takes tools and levels of thinking, resident, one thread, a token a pass."""
    folder = tmp_path_factory.mktemp("tools")
    checkpoint = write_chat_checkpoint(
        folder / "checkpoint", LEVELS, INFILL_MARKS, max_position_embeddings=4096
    )
    bundle = convert_bundle(checkpoint, folder / "tooled")
    with serving(load(bundle, threads=1, speculation="off")) as running:
        yield running


def example(schema: dict[str, Any]) -> Any:
    """A small value that a schema allows."""
    if "anyOf" in schema:
        return example(schema["anyOf"][-1])
    if "enum" in schema:
        return schema["enum"][0]
    if "examples" in schema:
        return schema["examples"][0]
    kind = schema["type"]
    if kind == "object":
        required = schema.get("required", ())
        return {name: example(schema["properties"][name]) for name in required}
    if kind == "array":
        return [example(schema["items"])]
    if kind == "string":
        return "x"
    if kind == "boolean":
        return False
    return schema["minimum"] if schema["minimum"] > 0 else 1


def examples(schema: dict[str, Any]) -> Iterator[Any]:
    """Small values that a schema allows: each branch, and each field alone beside those that are required."""
    if "anyOf" in schema:
        for branch in schema["anyOf"]:
            yield from examples(branch)
    elif "enum" in schema:
        yield from schema["enum"]
    elif schema["type"] == "object":
        base = example(schema)
        yield base
        for name, inner in schema.get("properties", {}).items():
            yield from (base | {name: value} for value in examples(inner))
    elif schema["type"] == "array":
        # A conversation ends with the user's message, which is the last branch.
        last = [example(schema["items"])] if "anyOf" in schema["items"] else []
        yield from ([value, *last] for value in examples(schema["items"]))
    else:
        yield example(schema)


def short(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The request for a few tokens, where it is one for tokens."""
    known = POSTS[path]["properties"]
    body = body | {name: most for name, most in SHORT.items() if name in known}
    if isinstance(body.get("n"), int) and not isinstance(body["n"], bool):
        body["n"] = min(body["n"], 2)
    if "options" in known and isinstance(body.get("options", {}), dict):
        body["options"] = body.get("options", {}) | {"num_predict": 2}
    return body


def check(server: Serving, path: str, body: Any) -> Answer:
    """An answer or a refusal, in time and in the form of the dialect."""
    begun = time.monotonic()
    answer = server.post(path, body)
    assert answer.status < 500 or answer.status == 503, (path, body, answer)
    assert time.monotonic() - begun < MOST_SECONDS, (path, body)
    if answer.status != 200:
        assert "error" in answer.json, (path, body, answer)
    return answer


def test_the_document_is_served(server: Serving) -> None:
    assert server.request("GET", "/openapi.json").json == document()


@pytest.mark.fast("/completion", "/[!c]*")
@pytest.mark.parametrize("path", POSTS)
def test_every_field_that_it_tells_is_accepted(server: Serving, path: str) -> None:
    """Alone beside those that are required, and again within objects. Embeddings are refused as such."""
    schema = POSTS[path]
    known = {"model": server.model.name, "budget_bytes": server.model.plan.budget_bytes}
    base = example(schema) | {name: known[name] for name in schema.get("required", ()) if name in known}
    if path == "/api/generate":
        base["prompt"] = "x"
    for name, inner in schema["properties"].items():
        for value in [known[name]] if name in known else examples(inner):
            field = {name: value}
            answer = check(server, path, short(path, base | NEEDED.get((path, name), {}) | field))
            if path in embeddings.PATHS:
                assert answer.status == 400
                assert "embeddings" in answer.body.decode()
            else:
                assert answer.status == 200, (field, answer.body)


@pytest.mark.fast("/completion", "/[!ci]*")
@pytest.mark.parametrize("path", sorted(set(POSTS) - set(FIELDS)))
def test_every_field_refuses_other_types(server: Serving, path: str) -> None:
    schema = POSTS[path]
    base = short(path, example(schema)) | {"model": server.model.name}
    for name in schema["properties"]:
        for value in WRONG:
            # Neither may make it a long text, as -1 does where it asks for no limit.
            if name in SHORT and isinstance(value, int) and value not in (0, 1):
                continue
            body = base | {name: value}
            check(server, path, short(path, body) if name == "options" else body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def near(draw: st.DrawFn, schema: dict[str, Any]) -> Any:
    """A value that a schema allows, with something within it that may be of another kind."""
    root = value = copy.deepcopy(draw(st.sampled_from(list(examples(schema)))))
    while isinstance(value, dict | list) and value:
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner:
            value[key] = draw(JSON | st.just(inner))
        value = inner
    return root


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A path, and a body that is nearly right: some fields have other values, are gone, or are new."""
    path = draw(st.sampled_from(sorted(POSTS)))
    schema = POSTS[path]["properties"]
    body = short(path, example(POSTS[path]))
    for name in draw(st.lists(st.sampled_from(sorted(schema)), max_size=4)):
        if name not in SHORT and name != "options":
            body[name] = draw(JSON | near(schema[name]))
    if draw(st.booleans()):
        body[draw(st.text(max_size=12))] = draw(JSON)
    return path, body


@seed(0)
@settings(max_examples=15, suppress_health_check=list(HealthCheck), database=None)
@given(asked=requests())
def test_what_is_nearly_a_request_is_answered(server: Serving, asked: tuple[str, Any]) -> None:
    check(server, *asked)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=list(HealthCheck), database=None)
@given(asked=requests())
def test_thousands_of_near_requests_are_answered(server: Serving, asked: tuple[str, Any]) -> None:
    check(server, *asked)
    assert server.request("GET", "/health").status == 200


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server: Serving) -> None:
    """Its own requests from the document, right and wrong ones, among them headers and paths."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(document())
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=25, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy() | operation.as_strategy(schemathesis.GenerationMode.NEGATIVE))
        def attempt(case: Any) -> None:
            nonlocal tried
            if isinstance(case.body, dict) and case.path in POSTS:
                case.body = short(case.path, case.body)
            answer = case.call(base_url=server.url, timeout=60)
            assert answer.status_code < 500 or answer.status_code == 503, (
                case.path,
                case.body,
                answer.content,
            )
            tried += 1

        attempt()
    assert tried > 300
    assert server.request("GET", "/health").status == 200
