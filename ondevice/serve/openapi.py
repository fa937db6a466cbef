"""`/openapi.json`: the requests that the server takes, for programs that make clients or hostile requests.

It lists the fields that have an effect. Fields that are accepted and ignored, and bodies of answers, aren't
listed. Embeddings are listed, although they are always refused.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.chat_template import SWITCHES
from ondevice.chat_template.tools import ID_CHARS, MAX_CALLS, MAX_TOOLS, NAME_CHARS
from ondevice.config import MAX_TOP_LOGPROBS
from ondevice.serve import embeddings
from ondevice.serve.content import TEXT_KINDS
from ondevice.serve.exchange import Service, json_answer
from ondevice.serve.generation_request import MAX_PENALTY, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS, SEEDS
from ondevice.serve.llama_cpp_completions import MAX_FIELDS, MAX_FILES
from ondevice.serve.openai_common import MAX_CHOICES
from ondevice.serve.openai_completions import MAX_LOGPROBS
from ondevice.serve.openai_responses import MAX_METADATA, MAX_METADATA_CHARS
from ondevice.serve.tools import LEVELS

Schema = dict[str, Any]


def _integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _object(required: str = "", **fields: Schema) -> Schema:
    """The schema of an object. required: names of required fields, separated by spaces. Others
    are ignored.
    """
    schema: Schema = {"type": "object", "properties": fields}
    return schema | ({"required": required.split()} if required else {})


def _list(items: Schema, least: int = 0, most: int = 1000) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
STOPS: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
SEED = _integer(-(1 << 63), SEEDS - 1)
TOKENS: Schema = {"anyOf": [{"type": "integer", "enum": [-1]}, _integer(1, MAX_TOKENS)]}
"""The most tokens to generate; -1: no limit."""
TOP_K = _integer(-1, MAX_TOKENS)
STOP: Schema = {"anyOf": [STOPS, _list(STOPS, most=MAX_STOPS)]}


def _content(*kinds: str) -> Schema:
    """The schema of a message's text: a string, or a list of parts of these types."""
    return {"anyOf": [TEXT, _list(_text_part(*kinds))]}


def _text_part(*kinds: str) -> Schema:
    return _object("type text", type=_word(*kinds), text=TEXT)


def _word(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _sampling(most_temperature: float) -> dict[str, Schema]:
    return {
        "model": TEXT,
        "temperature": _number(0.0, most_temperature),
        "top_p": _number(0.0, 1.0),
        "stream": FLAG,
    }


ANY_OBJECT: Schema = {"type": "object"}
ANY_SCHEMA = _any(ANY_OBJECT, {"type": "boolean", "enum": [True]})
NAME: Schema = {"type": "string", "pattern": rf"^[A-Za-z0-9_.-]{{1,{NAME_CHARS}}}$"}
ID: Schema = {"type": "string", "minLength": 1, "maxLength": ID_CHARS}
ARGUMENTS: Schema = TEXT | {"contentMediaType": "application/json", "examples": ["{}"]}
"""An object's JSON."""
EFFORT = _word(*LEVELS)
FUNCTION = {"type": _word("function")}
DEFINITION = {"name": NAME, "description": TEXT, "parameters": ANY_OBJECT}


def _calls(arguments: Schema) -> Schema:
    """The schema of the calls in an assistant's message."""
    function = _object("name", name=NAME, arguments=arguments)
    return _list(_object("function", id=ID, function=function, **FUNCTION), most=MAX_CALLS)


def _tools(tool: Schema) -> Schema:
    return _list(tool, most=MAX_TOOLS)


def _choice(function: Schema, allowed: str = "") -> Schema:
    """The schema of OpenAI's `tool_choice`. allowed: the field that holds a choice among some of
    the tools.
    """
    some = {"mode": _word("auto", "required"), "tools": _tools(function)}
    nested = {allowed: _object("mode tools", **some)} if allowed else some
    several = _object(f"type {' '.join(nested)}", type=_word("allowed_tools"), **nested)
    return _any(several, function, _word("auto", "none", "required"))


NESTED_TOOL = _object("function", function=_object("name", **DEFINITION), **FUNCTION)
FLAT_TOOL = _object("name", **DEFINITION, **FUNCTION)
ANTHROPIC_TOOL = _object("name", type=_word("custom"), name=NAME, description=TEXT, input_schema=ANY_OBJECT)
SCHEMA_FIELDS = {"name": TEXT, "description": TEXT, "strict": FLAG, "schema": ANY_SCHEMA}
PLAIN_FORMAT = _object("type", type=_word("text", "json_object"))
TEXT_FORMAT = _any(_object("type schema", type=_word("json_schema"), **SCHEMA_FIELDS), PLAIN_FORMAT)
PENALTIES = dict.fromkeys(("frequency_penalty", "presence_penalty"), _number(-MAX_PENALTY, MAX_PENALTY))
REPEAT_LAST_N = _integer(-1, MAX_TOKENS)
SAMPLING = _sampling(2.0) | {
    "top_k": TOP_K,
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(1e-3, 100.0),
    "repeat_penalty": _number(1e-3, 100.0),
    "repeat_last_n": REPEAT_LAST_N,
    **PENALTIES,
    "seed": SEED,
    "stop": STOP,
    "logit_bias": {
        "type": "object",
        "patternProperties": {"^[0-9]{1,3}$": _number(-100.0, 100.0)},
        "additionalProperties": False,
    },
}
OPENAI = SAMPLING | {"n": _integer(1, MAX_CHOICES), "stream_options": _object(include_usage=FLAG)}
CHAT_MESSAGE = _any(
    _object("role", role=_word("tool"), content=_content("text"), tool_call_id=ID, name=TEXT),
    _object(
        "role",
        role=_word("assistant"),
        content=_content("text"),
        reasoning_content=TEXT,
        tool_calls=_calls(_any(ANY_OBJECT, ARGUMENTS)),
    ),
    _object("role content", role=_word("user", "system", "developer"), content=_content("text")),
)
CHAT = OPENAI | {
    "messages": _list(CHAT_MESSAGE, 1),
    "max_tokens": TOKENS,
    "max_completion_tokens": TOKENS,
    "logprobs": FLAG,
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "tools": _tools(NESTED_TOOL),
    "tool_choice": _choice(
        _object("type function", function=_object("name", name=NAME), **FUNCTION), "allowed_tools"
    ),
    "parallel_tool_calls": FLAG,
    "response_format": _any(
        _object(
            "type json_schema", type=_word("json_schema"), json_schema=_object("schema", **SCHEMA_FIELDS)
        ),
        _object("type", type=_word("text", "json_object"), schema=ANY_SCHEMA),
    ),
    "json_schema": ANY_SCHEMA,
    "reasoning_effort": EFFORT,
    "chat_template_kwargs": _object("", **dict.fromkeys(SWITCHES, FLAG)),
    "return_progress": FLAG,
    "continue_final_message": FLAG,
}
THOUGHT = _object("type text", type=_word("reasoning_text"), text=TEXT)
INPUT_ITEM = _any(
    _object("type", type=_word("reasoning"), summary=_list(ANY_OBJECT), content=_list(THOUGHT)),
    _object("type call_id name", type=_word("function_call"), call_id=ID, name=NAME, arguments=ARGUMENTS),
    _object(
        "type call_id output", type=_word("function_call_output"), call_id=ID, output=_content(*TEXT_KINDS)
    ),
    _object(
        "role content",
        type=_word("message"),
        role=_word("user", "system", "developer", "assistant"),
        content=_content(*TEXT_KINDS),
    ),
)
RESPONSES = SAMPLING | {
    "input": _any(TEXT, _list(INPUT_ITEM, 1)),
    "instructions": TEXT,
    "max_output_tokens": TOKENS,
    "tools": _tools(FLAT_TOOL),
    "tool_choice": _choice(_object("type name", name=NAME, **FUNCTION)),
    "parallel_tool_calls": FLAG,
    "text": _object(format=TEXT_FORMAT),
    "reasoning": _object(effort=EFFORT),
    "metadata": {
        "type": "object",
        "propertyNames": {"maxLength": MAX_METADATA_CHARS},
        "additionalProperties": TEXT,
        "maxProperties": MAX_METADATA,
    },
}
BLOCK = _text_part("text")
RESULT_BLOCK = _object(
    "type tool_use_id",
    type=_word("tool_result"),
    tool_use_id=ID,
    content=_content("text"),
    is_error=FLAG,
)
CALL_BLOCK = _object("type id name", type=_word("tool_use"), id=ID, name=NAME, input=ANY_OBJECT)
THINKING_BLOCK = _object("type thinking", type=_word("thinking"), thinking=TEXT, signature=TEXT)
ANTHROPIC_MESSAGE = _any(
    _object(
        "role content",
        role=_word("assistant"),
        content=_any(TEXT, _list(_any(THINKING_BLOCK, CALL_BLOCK, BLOCK))),
    ),
    _object("role content", role=_word("system"), content=_content("text")),
    _object("role content", role=_word("user"), content=_any(TEXT, _list(_any(RESULT_BLOCK, BLOCK)))),
)
ANTHROPIC = {
    "model": TEXT,
    "messages": _list(ANTHROPIC_MESSAGE, 1),
    "system": _content("text"),
    "tools": _tools(ANTHROPIC_TOOL),
    "tool_choice": _any(
        _object("type name", type=_word("tool"), name=NAME, disable_parallel_tool_use=FLAG),
        _object("type", type=_word("auto", "any", "none"), disable_parallel_tool_use=FLAG),
    ),
    "thinking": _object(
        "type", type=_word("enabled", "adaptive", "disabled"), budget_tokens=_integer(0, MAX_TOKENS)
    ),
    "output_config": _object(format=TEXT_FORMAT, effort=EFFORT),
}
OLLAMA: dict[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "think": _any(EFFORT, FLAG),
    "keep_alive": _any(_word("5m", "-1"), _number(0.0, 1e9)),
    "format": _any(_word("json"), ANY_SCHEMA),
    "options": _object(
        "",
        temperature=_number(0.0, 2.0),
        top_p=_number(0.0, 1.0),
        top_k=TOP_K,
        min_p=_number(0.0, 1.0),
        repeat_penalty=_number(1e-3, 100.0),
        repeat_last_n=REPEAT_LAST_N,
        num_ctx=_integer(0, MAX_TOKENS),
        **PENALTIES,
        seed=SEED,
        stop=STOP,
        num_predict=_integer(-2, MAX_TOKENS),
    ),
}
OLLAMA_MESSAGE = _any(
    _object("role", role=_word("tool"), content=TEXT, tool_name=NAME, tool_call_id=ID),
    _object("role", role=_word("assistant"), content=TEXT, thinking=TEXT, tool_calls=_calls(ANY_OBJECT)),
    _object("role", role=_word("user", "system"), content=TEXT),
)
LLAMA_CPP = {
    "model": TEXT,
    "n_predict": _integer(-2, MAX_TOKENS),
    "temperature": _number(-1.0, 2.0),
    "top_k": _integer(0, MAX_TOKENS),
    "top_p": _number(0.0, 1.0),
    "min_p": _number(0.0, 1.0),
    "repeat_penalty": _number(1e-3, 100.0),
    "repeat_last_n": REPEAT_LAST_N,
    **PENALTIES,
    "seed": SEED,
    "stop": STOP,
    "json_schema": ANY_SCHEMA,
    "logit_bias": OPENAI["logit_bias"],
    "ignore_eos": FLAG,
    "n_probs": _integer(0, MAX_TOP_LOGPROBS),
    "n_cmpl": _integer(1, MAX_CHOICES),
    "return_progress": FLAG,
    "return_tokens": FLAG,
    "response_fields": _list(STOPS, most=MAX_FIELDS),
    "stream": FLAG,
}
LLAMA_CPP_PROMPT = _any(_list(_any(TEXT, _integer(0, 255)), 1, 4), TEXT)
TEXTS = _any(_list(TEXT), TEXT)
POSTS: dict[str, Schema] = {
    "/v1/chat/completions": _object("messages", **CHAT),
    "/v1/completions": _object(
        "prompt",
        prompt=_any(TEXT, _list(TEXT, 1, 4), _list(_integer(0, 255), 1)),
        max_tokens=_integer(-1, MAX_TOKENS),
        logprobs=_integer(0, MAX_LOGPROBS),
        echo=FLAG,
        suffix=TEXT,
        **OPENAI,
    ),
    "/v1/responses": _object("input", **RESPONSES),
    "/v1/messages": _object(
        "messages max_tokens",
        max_tokens=TOKENS,
        top_k=TOP_K,
        stop_sequences=_list(STOPS, most=MAX_STOPS),
        **(_sampling(1.0) | ANTHROPIC),
    ),
    "/v1/messages/count_tokens": _object("messages", **ANTHROPIC),
    "/api/chat": _object("messages", messages=_list(OLLAMA_MESSAGE, 1), tools=_tools(NESTED_TOOL), **OLLAMA),
    "/api/generate": _object("", prompt=TEXT, suffix=TEXT, system=TEXT, raw=FLAG, **OLLAMA),
    "/completion": _object("prompt", prompt=LLAMA_CPP_PROMPT, **LLAMA_CPP),
    "/completions": _object("prompt", prompt=LLAMA_CPP_PROMPT, **LLAMA_CPP),
    "/infill": _object(
        "",
        input_prefix=TEXT,
        input_suffix=TEXT,
        input_extra=_list(_object("text", filename=TEXT, text=TEXT), most=MAX_FILES),
        prompt=TEXT,
        **LLAMA_CPP,
    ),
    "/tokenize": _object(
        "content",
        model=TEXT,
        content=TEXT,
        count=FLAG,
        **dict.fromkeys(("add_special", "parse_special", "with_pieces"), FLAG),
    ),
    "/detokenize": _object("tokens", model=TEXT, tokens=_list(_integer(0, 255))),
    "/apply-template": _object(
        "messages",
        model=TEXT,
        messages=_list(CHAT_MESSAGE, 1),
        add_generation_prompt=FLAG,
        **{name: CHAT[name] for name in ("tools", "reasoning_effort", "chat_template_kwargs")},
    ),
    "/api/show": _object("model", model=TEXT),
    "/page/budget": _object("budget_bytes", budget_bytes=_integer(1, 1 << 50)),
    "/v1/embeddings": _object(model=TEXT, input=TEXTS),
    "/api/embed": _object(model=TEXT, input=TEXTS),
    "/api/embeddings": _object(model=TEXT, prompt=TEXT),
}
GETS = (
    "/v1/models",
    "/api/v0/models",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/props",
    "/slots",
    "/health",
    "/metrics",
    "/openapi.json",
)


def routes(service: Service) -> list[Route]:
    return [Route("/openapi.json", partial(_document, document()), methods=["GET"])]


def document() -> Schema:
    """The OpenAPI document, version 3.1."""
    paths: dict[str, Schema] = {path: {"get": _operation()} for path in GETS}
    for path in ("/v1/models/{name}", "/api/v0/models/{name}"):
        name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
        paths[path] = {"get": _operation() | {"parameters": [name]}}
    for path, schema in POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": _operation(path not in embeddings.PATHS) | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ondevice", "version": version("ondevice")},
        "paths": paths,
        # A key is needed only where the server has one.
        "security": [{}, {"bearer": []}, {"key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
    }


def _operation(answers: bool = True) -> Schema:
    """The description of one operation. answers: whether any request isn't refused."""
    answer = {"200": {"description": "An answer"}} if answers else {}
    return {"responses": answer | {"default": {"description": "An error, with its reason"}}}


async def _document(content: Schema, request: Request) -> Response:
    return json_answer(content)
