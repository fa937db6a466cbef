"""`/openapi.json`: the requests that the server takes, for programs that make clients or hostile requests.

It tells the fields that do something here. Fields that are accepted for other servers' sake and change
nothing aren't told, nor are the bodies of answers, which are the dialects' own.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.serve.asked import MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS, SEEDS
from ondevice.serve.exchange import Service, json_answer
from ondevice.serve.openai_common import MAX_CHOICES

Schema = dict[str, Any]


def _integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _object(required: str = "", **fields: Schema) -> Schema:
    """required: names of the fields that must be there, separated by spaces."""
    found: Schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return found | ({"required": required.split()} if required else {})


def _list(items: Schema, least: int = 0, most: int = 1000) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
STOPS: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
SEED = _integer(-(1 << 63), SEEDS - 1)
TOKENS = _integer(1, MAX_TOKENS)
STOP: Schema = {"anyOf": [STOPS, _list(STOPS, most=MAX_STOPS)]}


def _content(*kinds: str) -> Schema:
    """A message's text, whole or in parts of these types."""
    part = _object("type text", type={"type": "string", "enum": list(kinds)}, text=TEXT)
    return {"anyOf": [TEXT, _list(part)]}


def _messages(content: Schema, *roles: str) -> Schema:
    role = {"type": "string", "enum": list(roles)}
    return _list(_object("role content", role=role, content=content), 1)


def _sampling(most_temperature: float) -> dict[str, Schema]:
    return {
        "model": TEXT,
        "temperature": _number(0.0, most_temperature),
        "top_p": _number(0.0, 1.0),
        "stream": FLAG,
    }


OPENAI = _sampling(2.0) | {
    "top_k": _integer(0, MAX_TOKENS),
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(1e-3, 100.0),
    "seed": SEED,
    "stop": STOP,
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,3}$": _number(-100.0, 100.0)},
        "additionalProperties": False,
    },
    "n": _integer(1, MAX_CHOICES),
}
OLLAMA: dict[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "options": _object(
        temperature=_number(0.0, 2.0),
        top_p=_number(0.0, 1.0),
        top_k=_integer(0, MAX_TOKENS),
        min_p=_number(0.0, 1.0),
        repeat_penalty=_number(1e-3, 100.0),
        seed=SEED,
        stop=STOP,
        num_predict=_integer(-2, MAX_TOKENS),
    ),
}
ANTHROPIC = {
    "model": TEXT,
    "messages": _messages(_content("text"), "user"),
    "system": _content("text"),
}
POSTS: dict[str, Schema] = {
    "/v1/chat/completions": _object(
        "messages",
        messages=_messages(_content("text"), "system", "developer", "user", "assistant"),
        max_completion_tokens=TOKENS,
        logprobs=FLAG,
        **OPENAI,
    ),
    "/v1/completions": _object(
        "prompt",
        prompt={"anyOf": [TEXT, _list(TEXT, 1, 4), _list(_integer(0, 255), 1)]},
        max_tokens=_integer(0, MAX_TOKENS),
        **OPENAI,
    ),
    "/v1/responses": _object(
        "input",
        input={"anyOf": [TEXT, _messages(_content("input_text"), "system", "developer", "user")]},
        instructions=TEXT,
        max_output_tokens=TOKENS,
        **_sampling(2.0),
    ),
    "/v1/messages": _object(
        "messages max_tokens",
        max_tokens=TOKENS,
        top_k=_integer(0, MAX_TOKENS),
        stop_sequences=_list(STOPS, most=MAX_STOPS),
        **(_sampling(1.0) | ANTHROPIC),
    ),
    "/v1/messages/count_tokens": _object("messages", **ANTHROPIC),
    "/api/chat": _object(
        "messages",
        messages=_messages(TEXT, "system", "user", "assistant"),
        **OLLAMA,
    ),
    "/api/generate": _object("prompt", prompt=TEXT, system=TEXT, raw=FLAG, **OLLAMA),
    "/api/show": _object("model", model=TEXT),
    "/page/budget": _object("budget_bytes", budget_bytes=_integer(1, 1 << 50)),
}
GETS = ("/v1/models", "/api/tags", "/api/ps", "/api/version", "/health", "/metrics", "/openapi.json")


def routes(service: Service) -> list[Route]:
    return [Route("/openapi.json", partial(_document, document()), methods=["GET"])]


def document() -> Schema:
    """The OpenAPI document, version 3.1."""
    paths: dict[str, Schema] = {path: {"get": _operation()} for path in GETS}
    paths["/v1/models/{name}"] = {
        "get": _operation()
        | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT}]}
    }
    for path, schema in POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": _operation() | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ondevice", "version": version("ondevice")},
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
    }


def _operation() -> Schema:
    return {
        "responses": {
            "200": {"description": "An answer"},
            "default": {"description": "An error, with its reason"},
        }
    }


async def _document(content: Schema, request: Request) -> Response:
    return json_answer(content)
