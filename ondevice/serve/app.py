"""The ASGI application: the routes of all dialects behind the guard, and the models' lifetime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ondevice.errors import OndeviceError
from ondevice.serve import (
    anthropic,
    embeddings,
    llama_cpp,
    llama_cpp_completions,
    ollama,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    openapi,
)
from ondevice.serve.config import ServeConfig
from ondevice.serve.errors import RequestError, error_body
from ondevice.serve.exchange import Service, json_answer
from ondevice.serve.guard import Guard, json_bytes
from ondevice.serve.metrics import Metrics
from ondevice.serve.models import ModelFacts, Models
from ondevice.serve.page import routes as page
from ondevice.serve.warm import read_warm, warm

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.serve.models import Load

HEALTH = "/health"
DIALECTS = (
    openai_models,
    openai_chat,
    openai_completions,
    openai_responses,
    embeddings,
    anthropic,
    ollama,
    llama_cpp,
    llama_cpp_completions,
)


def make_service(
    config: ServeConfig,
    facts: Sequence[ModelFacts],
    load: Load,
    first: Model | None = None,
) -> Service:
    """The service that a server's routes share.

    Args:
        config: the server's options.
        facts: the models, the first being the default.
        load: loads a model by name, under a budget.
        first: the default model, if it is loaded already. The application closes it at its end.
    """
    metrics = Metrics()
    aliases = config.aliases([it.name for it in facts])
    return Service(config, Models(facts, load, first, config.queue, metrics, aliases), metrics)


def make_app(service: Service) -> ASGIApp:
    """The server as an ASGI application. Raises UsageError if a file in `config.warm` contains no request."""
    warmed = [read_warm(file) for file in service.config.warm]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Runs with the first requests, which reuse what has been read by then.
        warming = asyncio.create_task(warm(app, service.models, warmed))
        try:
            yield
        finally:
            warming.cancel()
            with suppress(asyncio.CancelledError):
                await warming
            await service.models.close()

    routes = [
        Route(HEALTH, partial(_health, service), methods=["GET"]),
        Route("/metrics", partial(_metrics, service), methods=["GET"]),
        *page.routes(service),
        *openapi.routes(service),
        *(route for dialect in DIALECTS for route in dialect.routes(service)),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            RequestError: _refused,
            OndeviceError: _failed,
            HTTPException: _not_served,
            500: _broken,
        },
    )
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in routes if "{" not in route.path)
    return Guard(app, service.config, service.metrics, paths, frozenset({HEALTH}) | page.OPEN_PATHS)


async def _health(service: Service, request: Request) -> Response:
    loaded = service.models.loaded
    return json_answer({"status": "ok", "model": loaded.facts.name if loaded else None})


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _answer(request: Request, error: RequestError) -> Response:
    content = json_bytes(error_body(request.url.path, error))
    return Response(content, error.status, error.headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _answer(request, error)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, OndeviceError)
    return _answer(request, RequestError.of(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:100]}"
    return _answer(request, RequestError(error.status_code, f"{what}: {error.detail}"))


async def _broken(request: Request, error: Exception) -> Response:
    return _answer(request, RequestError(500, "the server failed; its log says more", code="internal_error"))
