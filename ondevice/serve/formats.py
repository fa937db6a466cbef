"""Reads the fields of each dialect that ask for an answer in JSON."""

from __future__ import annotations

from typing import Any

from ondevice.constraints.constraint import Constraint
from ondevice.errors import ConstraintError
from ondevice.serve.errors import RequestError
from ondevice.serve.fields import Fields


def take_response_format(fields: Fields) -> Constraint | None:
    """The constraint of `response_format`, or of `json_schema` or vLLM's `guided_json` next to the messages.

    The schema is in an inner object or, from llama.cpp's clients, next to the type.
    """
    given = fields.object("response_format")
    constraint = None
    if given is not None:
        inner = given.object("json_schema")
        constraint = _take_kind(given, given if given.peek("schema") is not None else inner)
        given.close()
        if inner is not None:
            inner.close()
    for name in ("json_schema", "guided_json"):
        constraint = take_schema(fields, name) or constraint
    return constraint


def take_schema(fields: Fields, name: str) -> Constraint | None:
    """The constraint of a field that is a JSON schema."""
    value = fields.take(name)
    if value is None:
        return None
    return schema_constraint(fields, name, value)


def take_text_format(fields: Fields, name: str) -> Constraint | None:
    """The constraint of a format whose schema is next to its type, as in OpenAI's Responses and Anthropic's
    messages.
    """
    given = fields.object(name)
    if given is None:
        return None
    constraint = _take_kind(given, given)
    given.close()
    return constraint


def take_ollama_format(fields: Fields) -> Constraint | None:
    """The constraint of Ollama's `format`, which is `json` or a schema."""
    value = fields.take("format")
    if value is None or value == "":
        return None
    if value == "json":
        return Constraint.json_object()
    if not isinstance(value, dict | bool):
        fields.refuse("format", 'must be "json" or a JSON schema')
    return schema_constraint(fields, "format", value)


def _take_kind(given: Fields, inner: Fields | None) -> Constraint | None:
    """The constraint of the type in `given`. inner: the fields that have the schema."""
    kind = given.required_text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return (None if inner is None else take_schema(inner, "schema")) or Constraint.json_object()
    if kind != "json_schema":
        given.refuse("type", f"is {kind[:40]!r}; it must be text, json_object or json_schema")
    if inner is None:
        given.refuse("json_schema", "is missing")
    inner.text("name")
    inner.text("description")
    # Schemas are obeyed either way.
    inner.boolean("strict")
    return schema_constraint(inner, "schema", inner.take("schema"))


def schema_constraint(fields: Fields, name: str, value: Any) -> Constraint:
    """The constraint for a field's JSON schema. Raises RequestError if it isn't one."""
    if not isinstance(value, dict | bool):
        fields.refuse(name, "must be a JSON schema: an object, true or false")
    try:
        return Constraint.json_schema(value)
    except ConstraintError as error:
        raise RequestError(
            400,
            f"{fields.full(name)}: {error.for_command_line}",
            field=fields.full(name),
            code="invalid_value",
        ) from error
