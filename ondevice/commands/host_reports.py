"""The report of `inspect --hosts`: each machine's layers and plan, the predicted time of a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ondevice.bundle.parts import layer_words
from ondevice.bundle.reader import Bundle
from ondevice.commands.reports import harmless, parts, size
from ondevice.distributed.division import Division, RankShare
from ondevice.distributed.planning import PlannedDivision
from ondevice.units import format_bytes


def division_json(bundle: Bundle, planned: PlannedDivision) -> dict[str, Any]:
    """The object that `inspect --hosts --json` prints."""
    return {"model": bundle.name, "layers": bundle.config.num_layers, **planned.to_json()}


def division_text(bundle: Bundle, planned: PlannedDivision) -> str:
    """`inspect --hosts` for people."""
    division, here = planned.division, planned.here
    lines = [
        f"{bundle.name}: {bundle.config.num_layers} layers over {len(division.shares)} "
        f"host{'s' if len(division.shares) > 1 else ''}",
        *(line for rank, share in enumerate(division.shares) for line in _share_lines(rank, share)),
        *_time_lines(division),
        f"this machine multiplies {format_bytes(round(here.compute_bytes_per_second))} of weights in memory "
        f"in a second, and reads {format_bytes(round(here.flash_bytes_per_second))} from flash",
        *(f"note: {note}" for note in planned.notes),
    ]
    return harmless("\n".join(lines).replace("\t", " "))


def _share_lines(rank: int, share: RankShare) -> list[str]:
    plan, layers = share.plan, layer_words(share.first, share.stop)
    more = ", the embedding and the output head" if rank == 0 else ""
    return [
        f"rank {rank}, {share.name}: {layers}{more}; {_milliseconds(share.seconds)} a token, in which it "
        f"multiplies {format_bytes(round(share.bytes.computed))} and reads "
        f"{format_bytes(round(share.bytes.read))}",
        f"  memory for a budget of {size(plan.budget_bytes)}, context {plan.max_context} tokens; "
        f"smallest budget that works: {size(plan.minimum_budget_bytes)}",
        *(
            f"    {what:<24}{format_bytes(nbytes):>9}{nbytes:>16}"
            for what, nbytes in [*parts(plan), ("total", plan.total_bytes)]
        ),
    ]


def _time_lines(division: Division) -> list[str]:
    seconds, hops = division.seconds_per_token, division.hops
    line = f"predicted: {_milliseconds(seconds)} a token without drafts, {1 / seconds:.2f} tokens/s"
    if hops:
        line += f"; {hops} hops take {_milliseconds(hops * division.hop_seconds)} of it"
    return [line]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def slices_text(planned: PlannedDivision, paths: Sequence[Path]) -> str:
    """The slices that `split` wrote, for people: a line for each, with its path."""
    lines = [
        f"{path}: {layer_words(share.first, share.stop)}, for {share.name}"
        for share, path in zip(planned.division.shares, paths, strict=True)
    ]
    return harmless("\n".join(lines))
