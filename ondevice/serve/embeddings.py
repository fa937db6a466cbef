"""Answers requests for embeddings, which this server's chat models don't have, with an error in
each dialect.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from starlette.requests import Request
from starlette.routing import Route

from ondevice.serve.errors import RequestError
from ondevice.serve.exchange import Service, read_object

PATHS = ("/v1/embeddings", "/api/embed", "/api/embeddings")


def routes(service: Service) -> list[Route]:
    return [Route(path, partial(_refuse, service), methods=["POST"]) for path in PATHS]


async def _refuse(service: Service, request: Request) -> NoReturn:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    raise RequestError(
        400,
        f"model {model.name} has no embeddings: it is trained to continue texts, and its hidden states can't "
        "be compared as vectors; use a model that is trained for embeddings, with another server",
        field="model",
        code="embeddings_not_supported",
    )
