"""`/v1/models` in OpenAI's form, or in Anthropic's for clients that send its version header.

`/api/v0/models` is LM Studio's form. All forms include the context, under the names that known servers use.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.serve.exchange import Service, json_answer
from ondevice.serve.models import ModelFacts


def routes(service: Service) -> list[Route]:
    return [
        Route("/v1/models", partial(_list, service), methods=["GET"]),
        Route("/v1/models/{name:path}", partial(_one, service), methods=["GET"]),
        Route("/api/v0/models", partial(_studio_list, service), methods=["GET"]),
        Route("/api/v0/models/{name:path}", partial(_studio_one, service), methods=["GET"]),
    ]


async def _list(service: Service, request: Request) -> Response:
    listed = service.models.listed
    models = [_shown(service, request, name, facts) for name, facts in listed]
    if _is_anthropic(request):
        return json_answer(
            {"data": models, "has_more": False, "first_id": listed[0][0], "last_id": listed[-1][0]},
        )
    return json_answer({"object": "list", "data": models})


async def _one(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    return json_answer(_shown(service, request, name, service.models.find(name)))


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _shown(service: Service, request: Request, name: str, facts: ModelFacts) -> dict[str, Any]:
    context = service.models.context_tokens(facts)
    if _is_anthropic(request):
        created = datetime.fromtimestamp(facts.created, UTC).isoformat().replace("+00:00", "Z")
        named = {"type": "model", "id": name, "display_name": facts.name, "created_at": created}
        return named | {"max_input_tokens": context, "max_tokens": context}
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "ondevice",
        # vLLM's name, that of hubs of many models, and llama.cpp's.
        "max_model_len": context,
        "context_length": context,
        "meta": {
            "n_ctx": context,
            "n_ctx_train": facts.max_context,
            "n_vocab": facts.vocab_size,
            "n_params": facts.parameters,
            "size": facts.nbytes,
        },
    }


async def _studio_list(service: Service, request: Request) -> Response:
    models = [_studio_shown(service, facts) for facts in service.models.facts.values()]
    return json_answer({"object": "list", "data": models})


async def _studio_one(service: Service, request: Request) -> Response:
    return json_answer(_studio_shown(service, service.models.find(request.path_params["name"])))


def _studio_shown(service: Service, facts: ModelFacts) -> dict[str, Any]:
    """A model in the form of LM Studio's REST API. Only a loaded model has a loaded context."""
    context = service.models.context_tokens(facts)
    is_loaded = service.models.loaded_as(facts) is not None
    shown = {
        "id": facts.name,
        "object": "model",
        "type": "llm",
        "publisher": "ondevice",
        "arch": facts.architecture,
        "compatibility_type": "ondevice",
        "quantization": facts.quantization,
        "state": "loaded" if is_loaded else "not-loaded",
        "max_context_length": facts.max_context,
    }
    return shown | ({"loaded_context_length": context} if is_loaded else {})
