"""Runs the application under uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import socket
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from ondevice.bundle.layout import MANIFEST
from ondevice.bundle.manifest import manifest_text
from ondevice.config import SamplingConfig
from ondevice.errors import InfillNotSupportedError, OndeviceError
from ondevice.serve.app import make_app, make_service
from ondevice.serve.config import MAX_CONNECTIONS, STOP_SECONDS, ServeConfig
from ondevice.serve.exchange import Service
from ondevice.serve.metrics import log_event
from ondevice.serve.models import ModelFacts
from ondevice.serve.protocol import Connection
from ondevice.settings import with_model_defaults
from ondevice.tokenizer import Tokenizer
from ondevice.tokenizer.infill import InfillTokens

if TYPE_CHECKING:
    from ondevice.api import Model
    from ondevice.budget.plan import Plan
    from ondevice.bundle.reader import Bundle
    from ondevice.serve.models import Load


BACKLOG = 64
"""Connections that may wait to be accepted."""
LAST_WORDS_SECONDS = 3
"""Seconds for clients to take the ends of their answers after STOP_SECONDS."""


class Server(uvicorn.Server):
    """uvicorn's server. When it stops, answers that are being sent end in the form of their dialect.

    A signal stops it. A second signal has its default effect: the process ends at once.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(server_config(make_app(service), service.config))
        self._models = service.models

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._models.refuse()
        end = asyncio.get_running_loop().call_later(STOP_SECONDS, self._models.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()


def serve(config: ServeConfig, facts: Sequence[ModelFacts], load: Load, first: Model) -> None:
    """Serve until SIGINT or SIGTERM; the arguments are those of `make_service`.

    Raises OndeviceError if the server can't listen at the address.
    """
    if not config.is_local and not config.api_key:
        log_event("open", level=logging.WARNING, host=config.host, advice="--api-key keeps others out")
    with listening(config) as listener:
        log_event("listening", url=url(config, listener), models=[model.name for model in facts])
        Server(make_service(config, facts, load, first)).run([listener])


def listening(config: ServeConfig) -> socket.socket:
    """A listening socket at the address. Raises OndeviceError if the system refuses it."""
    try:
        address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[4][:2], family=address[0], backlog=BACKLOG)
    except OSError as error:
        raise OndeviceError(
            f"the server can't listen at {config.host}, port {config.port}: {error.strerror or error}; "
            "choose another --port or --host"
        ) from error


def url(config: ServeConfig, listener: socket.socket) -> str:
    """The URL at which the server listens."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def server_config(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    """The options for uvicorn, with this server's limits."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_SECONDS + LAST_WORDS_SECONDS,
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        ssl_keyfile_password=config.ssl_keyfile_password or None,
    )


def facts_of(
    name: str, bundle: Bundle, plan: Plan, tokenizer: Tokenizer, planned_context: int = 0
) -> ModelFacts:
    """The facts of a model that isn't loaded.

    plan: its plan under the options that need the least memory. planned_context: most tokens of a text; 0: as
    in `plan`.
    """
    try:
        fills_gaps = bool(bundle.manifest.tokenizer.infill or InfillTokens.of(tokenizer))
    except InfillNotSupportedError:
        fills_gaps = False
    manifest = bundle.manifest
    file = manifest.tokenizer.chat_template
    template = "" if file is None else bundle.read_small(file).decode("utf-8", "replace")
    stamp = bundle.path.joinpath(MANIFEST).stat().st_mtime
    return ModelFacts(
        name=name,
        architecture=bundle.config.architecture,
        parameters=bundle.parameters,
        nbytes=bundle.bundle_bytes,
        quantization=bundle.quant.name,
        max_context=bundle.config.max_context,
        planned_context=planned_context or plan.max_context,
        vocab_size=bundle.config.vocab_size,
        digest=hashlib.sha256(manifest_text(manifest)).hexdigest(),
        template=template,
        created=int(stamp),
        least_bytes=plan.minimum_budget_bytes - plan.process_bytes - plan.others_bytes,
        full_bytes=plan.full_bytes - plan.process_bytes - plan.others_bytes,
        fills_gaps=fills_gaps,
        sampling=with_model_defaults(SamplingConfig(), manifest.generation, set())[0],
    )
