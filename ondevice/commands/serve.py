"""`ondevice serve`: models over HTTP, in the dialects of OpenAI, Anthropic, Ollama and llama.cpp."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from ondevice.commands.opening import CONTEXT_SHARE, loaded_model, resolved_model, runtime_of
from ondevice.commands.options import Command, Text, add_options, hosts_option, model_flag, option, yes_option
from ondevice.commands.sharing import require_alone
from ondevice.commands.terminal import say
from ondevice.config import RuntimeConfig
from ondevice.errors import BackendUnavailableError, UsageError
from ondevice.serve.config import ServeConfig
from ondevice.settings import PROMPT_CACHE_OPTIONS, RUNTIME_OPTIONS, SHARING_OPTIONS, TEMPLATE_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ondevice.api import Model
    from ondevice.runtime.resolving import ResolvedModel
    from ondevice.serve.models import ModelFacts

PACKAGES = ("starlette", "uvicorn")


@click.command(cls=Command)
@click.argument("models", metavar="[NAME|DIR]...", nargs=-1)
@model_flag
@option("--host", type=Text(), default=ServeConfig.host, help="Name or address to listen at.")
@option("--port", type=int, default=ServeConfig.port, help="0: a free port, which the log names.")
@option(
    "--api-key", type=Text(), default=ServeConfig.api_key, show_default=False, help="What requests must have."
)
@option(
    "--queue",
    type=int,
    default=ServeConfig.queue,
    help="Requests that may wait; more are refused.",
    rare=True,
)
@option(
    "--parallel",
    type=int,
    default=ServeConfig.parallel,
    help="Requests that generate at once and share forward passes.",
)
@option(
    "--allow-host",
    type=Text(),
    multiple=True,
    help="A name of this machine by which it may be called, beside localhost and addresses.",
    rare=True,
)
@option(
    "--allow-origin", type=Text(), multiple=True, help="An origin whose pages may call the server.", rare=True
)
@option(
    "--alias",
    type=Text(),
    multiple=True,
    metavar="PATTERN=NAME",
    help="Another name of a model, which may be a pattern: claude-*=NAME.",
)
@option("--strict", is_flag=True, help="Refuse fields of requests that the server doesn't know.", rare=True)
@option(
    "--warm",
    type=Text(),
    multiple=True,
    help="JSON of a request whose prompt, or system prompt and tools, are read at the start.",
    rare=True,
)
@option(
    "--ssl-certfile",
    type=Text(),
    default="",
    show_default=False,
    help="TLS certificate; serves https.",
    rare=True,
)
@option(
    "--ssl-keyfile", type=Text(), default="", show_default=False, help="The certificate's key.", rare=True
)
@option(
    "--ssl-keyfile-password",
    type=Text(),
    default="",
    show_default=False,
    help="The key's password.",
    rare=True,
)
@add_options(RUNTIME_OPTIONS, PROMPT_CACHE_OPTIONS, SHARING_OPTIONS, TEMPLATE_OPTIONS)
@hosts_option()
@yes_option
def serve(models: tuple[str, ...], model: str | None, yes: bool, **values: Any) -> None:
    """Serve models over HTTP, in the dialects of OpenAI, Anthropic, Ollama and llama.cpp.

    The first model is loaded at once and answers requests that name none; the others when a request asks for
    them, all under one budget. Each is known by its folder's name. Ctrl-C stops the server.
    """
    require_packages()
    names = {field.name for field in fields(ServeConfig)}
    given: dict[str, Any] = {name: value for name, value in values.items() if name in names}
    config = ServeConfig(**given)
    # Imported before models are resolved, so that plans count the server's packages.
    from ondevice.serve.server import serve as serve_until_stopped
    from ondevice.serve.warm import read_warm

    for file in config.warm:
        read_warm(file)
    named: list[str | None] = list(models) or [model]
    if len(named) > 1:
        require_alone(values, "a server of several models")
    if len(named) > 1 and values["dram_budget"] == RuntimeConfig.dram_budget:
        values["dram_budget"] = _budget_of_all()
    # The first model is resolved last, so that its plan counts the memory that resolving the others leaves.
    facts: list[ModelFacts] = []
    known: dict[str, tuple[Path, RuntimeConfig]] = {}
    for each in reversed(named):
        resolved = resolved_model(each, values, yes, config.parallel, CONTEXT_SHARE)
        facts.insert(0, _facts(resolved))
        path = resolved.bundle.path
        known[resolved.bundle.name] = path, runtime_of(path, values, config.parallel, CONTEXT_SHARE)
    _require_different(facts)
    config.aliases([fact.name for fact in facts])

    def load(name: str, budget_bytes: int | None) -> Model:
        from ondevice import api

        path, runtime = known[name]
        if budget_bytes is not None:
            runtime = replace(runtime, dram_budget=budget_bytes)
        return api.Model(api.open_model(path, runtime))

    with _logging(), loaded_model(resolved, _log_plan) as first:
        del resolved
        serve_until_stopped(config, facts, load, first)


def require_packages() -> None:
    """Check that the extra `serve` is installed. Raises BackendUnavailableError if not."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(
            f"the server needs {' and '.join(missing)}: pip install {' '.join(missing)}, or ondevice[serve]"
        )


def _log_plan(resolved: ResolvedModel) -> None:
    """Log the plan, and what the options change about the text."""
    from ondevice.commands import reports
    from ondevice.serve.metrics import log_event

    log_event("plan", model=reports.model_words(resolved.bundle), plan=resolved.plan.to_json())
    for line in reports.lossy_lines(resolved):
        log_event("lossy", message=line)


def _facts(resolved: ResolvedModel) -> ModelFacts:
    from ondevice.chat_template import decoded, read_template
    from ondevice.host import text_tokenizer
    from ondevice.serve.server import facts_of

    tokenizer, file = text_tokenizer(resolved), resolved.runtime.chat_template
    context = resolved.plan.max_context
    facts = facts_of(resolved.bundle.name, resolved.bundle, resolved.smallest_plan.plan, tokenizer, context)
    return replace(facts, template=decoded(read_template(file))) if file else facts


def _budget_of_all() -> int:
    """The budget that `auto` means if several models share it."""
    from ondevice.budget.limits import allowance
    from ondevice.units import memory_rooms, process_memory

    return allowance(process_memory().current_bytes, memory_rooms()).usable_bytes


def _require_different(facts: list[ModelFacts]) -> None:
    names = [fact.name for fact in facts]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"two models are called {twice[0]}; requests couldn't tell them apart")


class _Log(logging.Handler):
    """Writes the server's log to stderr, with or without --verbose."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


class _PlainLog(_Log):
    """Writes the plain messages of uvicorn and the runtime as JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"event": record.name, "message": super().format(record).strip()})


@contextmanager
def _logging() -> Iterator[None]:
    """A context in which the server's log is written to stderr."""
    kept = []
    for name, level, handler in (
        ("ondevice", logging.NOTSET, _PlainLog()),
        ("ondevice.serve", logging.INFO, _Log()),
        ("uvicorn", logging.WARNING, _PlainLog()),
    ):
        log = logging.getLogger(name)
        kept.append((log, log.level, log.propagate, log.handlers))
        log.setLevel(level)
        log.propagate = False
        log.handlers = [handler]
    try:
        yield
    finally:
        for log, level, propagate, handlers in kept:
            log.setLevel(level)
            log.propagate = propagate
            log.handlers = handlers
