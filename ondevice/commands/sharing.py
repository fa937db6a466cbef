"""What a command does if several machines share one model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from click import get_current_context
from click.core import ParameterSource
from click.exceptions import Exit

from ondevice.commands.terminal import say
from ondevice.distributed.place import CHILD
from ondevice.errors import OndeviceError, RankError, StartAgainError, UsageError
from ondevice.settings import RUNTIME_OPTIONS

if TYPE_CHECKING:
    from ondevice.config import RuntimeConfig
    from ondevice.distributed.member import Member
    from ondevice.distributed.remote_layers import RemoteLayers
    from ondevice.distributed.transport import MlxTransport
    from ondevice.model.layer_range import LaterLayers
    from ondevice.runtime.resolving import ResolvedModel

_later: RemoteLayers | None = None
_transport: MlxTransport | None = None


def joined() -> Member | None:
    """This process's membership in the run, as a rank's engine; None if it isn't one."""
    # Importing the ranks' modules takes a quarter of a command's start.
    if CHILD not in os.environ:
        return None
    from ondevice.distributed.member import joined as member

    return member()


def start(model: str | None, values: dict[str, Any]) -> None:
    """Start this command again under a supervisor, if `--hosts` is given and this process has none.

    Removes `hosts` from the options' values, and sets this host's budget. Must be called before a command
    reads stdin, which can be read only once. Raises UsageError for options that need a single machine.
    """
    if values.get("prompt_cache"):
        require_alone(values, "--prompt-cache")
    hosts = values.pop("hosts", None)
    member = joined()
    if member is not None:
        if member.place.dram_budget:
            values["dram_budget"] = member.place.dram_budget
    elif hosts:
        from ondevice.distributed.launch import start_ranks

        start_ranks(hosts, _arguments(model))
        raise StartAgainError


def _arguments(model: str | None) -> list[str]:
    """The command line of ranks other than 0, which only serve layers: the model, and the options of running
    it.
    """
    context = get_current_context()
    given = {
        RUNTIME_OPTIONS[name].flag: context.params[name]
        for name in RUNTIME_OPTIONS
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    named = {} if model is None else {"--model": model}
    return ["generate", "--prompt=", *(f"{flag}={value}" for flag, value in (named | given).items())]


def require_alone(values: dict[str, Any], what: str) -> None:
    """Check that one machine runs the model. Raises UsageError if several do. what: the feature that needs a
    single one.
    """
    if joined() is not None or values.get("hosts"):
        raise UsageError(f"{what} runs on one machine only: leave it out, or run without --hosts")


def resolved_part(model: str | None, runtime: RuntimeConfig) -> ResolvedModel | None:
    """This rank's part of the model; None on a single machine.

    Ranks other than 0 serve layers here, and raise Exit at the end.
    """
    member = joined()
    if member is None:
        return None
    from ondevice.budget.claims import count_other_processes
    from ondevice.distributed.hosts import RING, named_budget
    from ondevice.distributed.transport import MlxTransport

    count_other_processes(member.place.other_process_bytes)
    with member.joining():
        transport = MlxTransport(RING)
    with named_budget(member.place.dram_budget):
        return _part(transport, model, runtime)


def _part(transport: MlxTransport, model: str | None, runtime: RuntimeConfig) -> ResolvedModel:
    global _later, _transport
    from ondevice.bundle.reader import Bundle
    from ondevice.distributed.handshake import handshake_as_first, handshake_as_other
    from ondevice.distributed.layer_server import serve_layers
    from ondevice.runtime.models import find_model

    if transport.rank:
        resolved = handshake_as_other(transport, lambda: Bundle.open(find_model(model)), runtime)
        transport.plan(resolved.plan.activation_bytes)
        serve_layers(resolved, transport)
        transport.close()
        raise Exit(0)
    _transport = transport
    _warn_of_pressure(runtime)
    resolved, _later = handshake_as_first(transport, Bundle.open(find_model(model)), runtime)
    _later.on_failure = _report
    transport.plan(resolved.plan.activation_bytes)
    return resolved


def _warn_of_pressure(runtime: RuntimeConfig) -> None:
    """Warn that budgets stay as they are, if `--memory-pressure auto` is given."""
    context = get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source("memory_pressure")
    if runtime.memory_pressure == "auto" and source not in (None, ParameterSource.DEFAULT):
        say("warning: --memory-pressure auto does nothing where several machines share a model")


def _report(error: Exception) -> None:
    """Print the error that ends the run on every rank, and let the supervisor end the run."""
    member = joined()
    assert member is not None
    code, text = OndeviceError.exit_code, f"{type(error).__name__}: {error}"
    if isinstance(error, OndeviceError):
        code, text = error.exit_code, error.for_command_line
    member.report(code, text, broken=isinstance(error, RankError))


def later_layers() -> LaterLayers | None:
    """The layers that other ranks run, for the model of `resolved_part`; None on a single machine."""
    return _later


def leave() -> None:
    """Close the transport after its last messages, when the model is closed."""
    if _transport is not None:
        _transport.close()
