"""`/v1/models`, as OpenAI has it, and as Anthropic does for clients that send its version header."""

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
    ]


async def _list(service: Service, request: Request) -> Response:
    found = [_shown(request, facts) for facts in service.models.facts.values()]
    if _is_anthropic(request):
        names = list(service.models.facts)
        return json_answer(
            {"data": found, "has_more": False, "first_id": names[0], "last_id": names[-1]},
        )
    return json_answer({"object": "list", "data": found})


async def _one(service: Service, request: Request) -> Response:
    return json_answer(_shown(request, service.models.find(request.path_params["name"])))


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _shown(request: Request, facts: ModelFacts) -> dict[str, Any]:
    if _is_anthropic(request):
        made = datetime.fromtimestamp(facts.created, UTC).isoformat().replace("+00:00", "Z")
        return {"type": "model", "id": facts.name, "display_name": facts.name, "created_at": made}
    return {"id": facts.name, "object": "model", "created": facts.created, "owned_by": "ondevice"}
