"""The server against its own OpenAPI document: what it tells is accepted, and all others are answered."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ondevice.serve.openapi import POSTS, document
from tests.serve.test_guard import FIELDS, WRONG
from tests.support.serving import Answer, Serving

MOST_SECONDS = 20.0
"""Longest time for an answer to a request that means nothing. They are small, as is the model."""
SHORT = {
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "max_output_tokens": 2,
    "num_predict": 2,
}


def example(schema: dict[str, Any]) -> Any:
    """A small value that a schema allows."""
    if "anyOf" in schema:
        return example(schema["anyOf"][-1])
    if "enum" in schema:
        return schema["enum"][0]
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


@pytest.mark.parametrize("path", POSTS)
def test_every_field_that_it_tells_is_accepted(server: Serving, path: str) -> None:
    """Alone beside those that are required, and again within objects."""
    schema = POSTS[path]
    base = short(path, example(schema))
    fields: list[dict[str, Any]] = [{name: example(it)} for name, it in schema["properties"].items()]
    inner = schema["properties"].get("options", {}).get("properties", {})
    fields += [{"options": {name: example(it)}} for name, it in inner.items()]
    for field in fields:
        if "model" in field:
            field = {"model": server.model.name}
        elif path == "/page/budget":
            field = {"budget_bytes": server.model.plan.budget_bytes}
        elif path == "/api/show":
            base["model"] = server.model.name
        answer = check(server, path, short(path, base | field))
        assert answer.status == 200, (field, answer.body)


@pytest.mark.parametrize("path", sorted(set(POSTS) - set(FIELDS)))
def test_every_field_refuses_other_types(server: Serving, path: str) -> None:
    schema = POSTS[path]
    base = short(path, example(schema)) | {"model": server.model.name}
    for name in schema["properties"]:
        for value in WRONG:
            # Neither may make it a long text.
            if name not in SHORT or not isinstance(value, int) or value <= 1:
                check(server, path, base | {name: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A path, and a body that is nearly right: some fields have other values, are gone, or are new."""
    path = draw(st.sampled_from(sorted(POSTS)))
    schema = POSTS[path]["properties"]
    body = short(path, example(POSTS[path]))
    for name in draw(st.lists(st.sampled_from(sorted(schema)), max_size=4)):
        if name not in SHORT and name != "options":
            body[name] = draw(JSON | st.just(example(schema[name])))
    if draw(st.booleans()):
        body[draw(st.text(max_size=12))] = draw(JSON)
    return path, body


@seed(0)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(asked=requests())
def test_what_is_nearly_a_request_is_answered(server: Serving, asked: tuple[str, Any]) -> None:
    check(server, *asked)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck), database=None)
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

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
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
