"""The handshake of ranks: it compares what they have and divides the layers; then each rank plans its part.

All messages go around the ring. First, rank 0 sends its options, every rank adds what it has, and rank 0
compares. Then each measures its speed on a layer, rank 0 divides the layers, and every rank plans its range
and adds the context that it has room for. At last, all take the shortest of these contexts, and every rank
adds the room that it has for states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, TypeVar

from ondevice.bundle.parts import model_digest, sidecar_digest
from ondevice.bundle.reader import Bundle
from ondevice.bundle.strict_json import Rule, Section, canonical_json, parse_json
from ondevice.config import MAX_CONTEXT, RuntimeConfig
from ondevice.distributed.division import RankResources, divide, rank_bundle, slices_lack
from ondevice.distributed.layer_server import state_layout, state_room
from ondevice.distributed.place import MAX_RANKS
from ondevice.distributed.planning import settled_for
from ondevice.distributed.remote_layers import RemoteLayers, StateRoom
from ondevice.distributed.speed import measured_resources
from ondevice.distributed.transport import Transport
from ondevice.errors import BundleError, RankError, UsageError
from ondevice.records import dataclass
from ondevice.runtime.resolving import ResolvedModel, resolve
from ondevice.speculation.registry import runs_streams

T = TypeVar("T")

SHARED_OPTIONS = (
    "backend",
    "sparsity",
    "predictor_recall",
    "experts",
    "speculation",
    "kv_bits",
    "prefill_chunk",
    "parallel",
)
"""Options that every rank takes from rank 0: those that change the text, and what passes look like."""
SIDECARS = ("predictors", "streams")
"""Sidecars of layers that change texts, and sidecars that draft."""
NONE = "none"
"""Hash of a sidecar that isn't used."""
PINGS = 3
"""Number of timed trips around the ring."""
_MEASURED = ("budget_bytes", "process_bytes", "compute_bytes_per_second", "flash_bytes_per_second")
_MAX_LAYERS = 1 << 16
_MAX_BYTES = 1 << 62
_MAX_TEXT = 200


@dataclass(frozen=True)
class RankCard:
    """What a rank has: the model's hash, its first layer and one past its last, and its device.

    predictors, streams: hashes of the sidecars that rank 0's options use; `NONE` for a sidecar that isn't
    used or is missing.
    """

    digest: str
    first: int
    stop: int
    device: str
    predictors: str
    streams: str


def handshake_as_first(
    transport: Transport, bundle: Bundle, runtime: RuntimeConfig
) -> tuple[ResolvedModel, RemoteLayers]:
    """Rank 0's side of the handshake. Returns its planned layers, and the other ranks' layers as remote ones.

    Raises RankError and UsageError if ranks differ, UnsupportedModelError, and what `resolve` raises.
    """
    runtime = replace(runtime, memory_pressure="off")
    settled, draft_bytes = _settled(bundle, runtime, transport.size)
    hop_seconds = _hop_seconds(transport)
    told: dict[str, Any] = {"options": _shared(settled)}
    cards = [card(bundle, settled), *_around(transport, told, _card)]
    require_same(cards)
    here = measured_resources(bundle, settled, "")
    resources = [here, *_around(transport, {}, _resources)]
    named = [
        replace(measured, name=f"rank {rank}", layers=(one.first, one.stop))
        for rank, (one, measured) in enumerate(zip(cards, resources, strict=True))
    ]
    ranges = _divided(bundle, settled, named, hop_seconds, draft_bytes)
    runtime = replace(runtime, backend=settled.backend, sparsity=settled.sparsity)
    resolved = part(bundle, ranges[0], runtime)
    resolved.require_fit()
    told = {"options": _shared(resolved.runtime), "ranges": [list(it) for it in ranges]}
    contexts = _around(transport, told | {"max_context": runtime.max_context}, _context)
    context = min(resolved.plan.max_context, *contexts)
    if context < resolved.plan.max_context:
        del resolved  # As in `_settled`.
        resolved = part(bundle, ranges[0], replace(runtime, max_context=context))
        resolved.require_fit()
    rooms = _around(transport, {"max_context": context}, _room)
    later = RemoteLayers(transport, resolved.bundle.config, rooms)
    later.require_context(state_layout(resolved), context)
    return resolved, later


def handshake_as_other(
    transport: Transport, open_bundle: Callable[[], Bundle], runtime: RuntimeConfig
) -> ResolvedModel:
    """The side of every other rank in the handshake. Returns its planned layers. runtime: this machine's
    options.

    Raises RankError for messages that break a rule, what `open_bundle` and `resolve` raise, and BudgetError.
    """
    runtime = replace(runtime, memory_pressure="off")
    for _ in range(PINGS):
        _pass_on(transport, _received(transport), {})
    message, bundle = _received(transport), open_bundle()
    with _peer():
        runtime = _with_options(runtime, message.section("options"))
    _pass_on(transport, message, asdict(card(bundle, runtime)))
    message = _received(transport)
    measured = measured_resources(bundle, runtime, "")
    _pass_on(transport, message, {name: getattr(measured, name) for name in _MEASURED})
    message = _received(transport)
    with _peer():
        runtime = _with_options(runtime, message.section("options"))
        layers = _ranges(message.get("ranges"), transport.size)[transport.rank]
        runtime = replace(runtime, max_context=message.integer("max_context", 0, MAX_CONTEXT))
    resolved = part(bundle, layers, runtime)
    resolved.require_fit()
    _pass_on(transport, message, {"max_context": resolved.plan.max_context})
    message = _received(transport)
    with _peer():
        context = message.integer("max_context", 1, MAX_CONTEXT)
    if context != resolved.plan.max_context:
        del resolved
        resolved = part(bundle, layers, replace(runtime, max_context=context))
        resolved.require_fit()
    _pass_on(transport, message, asdict(state_room(resolved)))
    return resolved


def _settled(bundle: Bundle, runtime: RuntimeConfig, count: int) -> tuple[RuntimeConfig, int]:
    """Rank 0's options with all defaults settled, and the memory of a draft model in bytes.

    Nothing else of the resolved model is kept: its tokenizer would take memory in addition to that of this
    rank's part, and count against the budget.
    """
    settled = settled_for(bundle, runtime, count)
    return settled.runtime, 0 if settled.draft is None else settled.draft.nbytes


def part(bundle: Bundle, layers: tuple[int, int], runtime: RuntimeConfig) -> ResolvedModel:
    """The resolved model of layers `layers[0]` to `layers[1]` - 1."""
    return resolve(rank_bundle(bundle, *layers), runtime)


def card(bundle: Bundle, runtime: RuntimeConfig) -> RankCard:
    """What this rank has, to be compared with other ranks. runtime: rank 0's settled options."""
    first = bundle.config.part.first
    return RankCard(
        model_digest(bundle.manifest),
        first,
        first + bundle.config.num_layers,
        device(runtime.backend),
        **_used_sidecars(bundle, runtime),
    )


def _used_sidecars(bundle: Bundle, runtime: RuntimeConfig) -> dict[str, str]:
    used = {
        "predictors": bundle.predictors if runtime.sparsity == "predicted" else None,
        "streams": bundle.streams if runs_streams(runtime.speculation, bundle.streams) else None,
    }
    return {key: NONE if content is None else sidecar_digest(content) for key, content in used.items()}


def device(backend: str) -> str:
    """The name of the device that multiplies, equal for devices that write the same text.

    All instruction sets give the same bits. MLX's results differ by its release and by the GPU.
    """
    if backend != "mlx":
        return backend
    import mlx.core as core

    if core.default_device() != core.gpu:
        return f"mlx {core.__version__} on a CPU"
    # MLX before 0.30 has `device_info` in `metal` only.
    describe = core.device_info if "device_info" in dir(core) else core.metal.device_info
    return f"mlx {core.__version__} on {describe()['device_name']}"


def require_same(cards: list[RankCard]) -> None:
    """Check the ranks. Raises RankError unless all have the same model, the same sidecars and the same kind
    of device.
    """
    first = cards[0]
    for rank, it in enumerate(cards):
        if it.digest != first.digest:
            raise RankError(
                f"rank {rank} has another model than rank 0: the models' hashes are {it.digest[:16]} and "
                f"{first.digest[:16]}; copy the same bundle, or slices of it, to every machine"
            )
        for what in SIDECARS:
            theirs, reference = getattr(it, what), getattr(first, what)
            if theirs != reference:
                raise RankError(
                    f"rank {rank} has other {what} than rank 0: their hashes are {theirs[:16]} and "
                    f"{reference[:16]}; copy the same bundle, or slices of it, to every machine"
                )
        if it.device != first.device:
            raise RankError(
                f"rank {rank} multiplies with {it.device} and rank 0 with {first.device}, which would change "
                "the text; choose one --backend, and one release of MLX, that all machines have"
            )


def _divided(
    bundle: Bundle,
    settled: RuntimeConfig,
    ranks: Sequence[RankResources],
    hop_seconds: float,
    draft_bytes: int,
) -> Sequence[tuple[int, int]]:
    """Each rank's range of layers, in the fastest division that the ranks' bundles allow.

    If rank 0 has only a slice, it can't plan other layers, so every rank runs the layers of its slice. Raises
    what `divide` raises, and UsageError for slices that together don't make the model.
    """
    num_layers = bundle.config.model_layers
    if bundle.config.num_layers == num_layers:
        return divide(bundle, settled, ranks, hop_seconds, draft_bytes).ranges
    ranges = [it.layers or (0, num_layers) for it in ranks]
    edges = [0, *(stop for _, stop in ranges)]
    if ranges != list(pairwise(edges)) or edges != sorted(set(edges)) or edges[-1] != num_layers:
        raise UsageError(slices_lack(bundle.name, num_layers, ranks))
    return ranges


def _hop_seconds(transport: Transport) -> float:
    """Seconds that a message takes from one rank to the next: the fastest trip around the ring divided by its
    hops.
    """
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        _around(transport, {}, lambda section: None)
        trips.append(time.perf_counter() - began)
    return min(trips) / transport.size


def _shared(runtime: RuntimeConfig) -> dict[str, Any]:
    return {name: getattr(runtime, name) for name in SHARED_OPTIONS}


def _with_options(runtime: RuntimeConfig, section: Section) -> RuntimeConfig:
    """`runtime` with the options that rank 0 sent. RuntimeConfig checks them."""
    chosen = {name: section.get(name) for name in SHARED_OPTIONS}
    section.close()
    try:
        return replace(runtime, **chosen)
    except UsageError as error:
        raise RankError(f"rank 0 sent an option that none can have: {error.for_command_line}") from error


_HASH: Rule = (Section.text, _MAX_TEXT)
_CARD: dict[str, Rule] = {
    **dict.fromkeys(("digest", "device", *SIDECARS), _HASH),
    **dict.fromkeys(("first", "stop"), (Section.integer, 0, _MAX_LAYERS)),
}


def _card(section: Section) -> RankCard:
    return RankCard(**section.values(_CARD))


def _resources(section: Section) -> RankResources:
    *sizes, compute, flash = _MEASURED
    rates: dict[str, Rule] = dict.fromkeys((compute, flash), (Section.number, 1, _MAX_BYTES))
    return RankResources("", **section.values(dict.fromkeys(sizes, (Section.integer, 0, _MAX_BYTES)) | rates))


def _context(section: Section) -> int:
    return section.integer("max_context", 0, MAX_CONTEXT)


def _room(section: Section) -> StateRoom:
    return StateRoom(
        **section.values(dict.fromkeys(StateRoom.__annotations__, (Section.integer, 0, _MAX_BYTES)))
    )


def _ranges(value: object, ranks: int) -> list[tuple[int, int]]:
    if not isinstance(value, list) or len(value) != ranks:
        raise RankError(f"rank 0 divides the layers otherwise than among {ranks} ranks")
    pairs = Section({str(rank): it for rank, it in enumerate(value)}, "ranges")
    ranges = []
    for rank in range(ranks):
        pair = pairs.integers(str(rank), 2, 0, _MAX_LAYERS)
        if len(pair) != 2:
            raise RankError("a range of layers has a first and a last")
        ranges.append((pair[0], pair[1]))
    return ranges


def _around(transport: Transport, message: dict[str, Any], read: Callable[[Section], T]) -> list[T]:
    """Rank 0's step: send a message around the ring, and return what each other rank added, in order."""
    transport.send(canonical_json(message | {"added": []}), [])
    answer = _received(transport)
    with _peer():
        added = answer.sections("added", MAX_RANKS)
        if len(added) != transport.size - 1:
            raise RankError(f"{len(added)} of {transport.size - 1} ranks have answered")
        return [read(it) for it in added]


def _received(transport: Transport) -> Section:
    header, arrays = transport.receive()
    with _peer():
        if arrays:
            raise RankError("the rank before sent arrays where ranks meet")
        return Section(parse_json(header, "a message"), "a message")


def _pass_on(transport: Transport, message: Section, added_here: dict[str, Any]) -> None:
    with _peer():
        values = {name: message.get(name) for name in message.names}
        added = [value for value in values.get("added", []) if isinstance(value, dict)]
    transport.send(canonical_json(values | {"added": [*added, added_here]}), [])


@contextmanager
def _peer() -> Iterator[None]:
    """A context that turns errors into RankErrors about what another rank sent."""
    try:
        yield
    except BundleError as error:
        raise RankError(f"the rank before sent a false message: {error.for_command_line}") from error
