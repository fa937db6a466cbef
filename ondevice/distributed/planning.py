"""The division of a model among the hosts of a host file, planned on rank 0 before anything runs.

When ranks run, they report over the ring what they can do. Here they can't be contacted, so they count as
machines like this one, except for budgets in the host file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ondevice.bundle.parts import part_words
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.distributed.division import Division, RankResources, divide
from ondevice.distributed.hosts import HostEntry, named_budget, read_hosts
from ondevice.distributed.speed import measured_resources, usable_bytes
from ondevice.errors import UnsupportedModelError, system_refusals
from ondevice.model_config import FULL_MODEL, cut_places
from ondevice.records import dataclass
from ondevice.runtime.models import automatic_modes, find_model
from ondevice.runtime.resolving import ResolvedModel, resolve
from ondevice.units import parse_budget

HOP_SECONDS = 0.0003
"""Seconds from one rank to the next that plans assume: a row of 4,096 values in
`tests.benchmarks.explain.ring_hops` on one machine. A network adds its latency."""

RING_BYTES = 49_000_000
"""Memory that MLX and its ring take in a rank's process, which has neither here. Measured with MLX 0.32 on
Linux: 42 MB, most of it as the ring is joined, and 47.5 while all is freshly installed: code then lies in
large folios of the page cache, and more of it is mapped."""
SUPERVISOR_BYTES, LAUNCHER_BYTES = 25_000_000, 27_000_000
"""Memory of a rank's supervisor, and of what starts the others beside rank 0. Measured on Linux, Python 3.11:
19.3 and 24.5 MB for supervisors of ranks 1 and 0, and 22.4 MB, or 25 while freshly installed."""


@dataclass(frozen=True)
class PlannedDivision:
    """A division of a model among hosts, and where its figures come from.

    runtime: the options that it was made for. here: what was measured on this machine, rank 0.
    """

    division: Division
    runtime: RuntimeConfig
    here: RankResources
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `inspect --hosts --json` prints."""
        division = self.division
        return {
            "ranks": [share.to_json() for share in division.shares],
            "hops": division.hops,
            "hop_seconds": division.hop_seconds,
            "seconds_per_token": division.seconds_per_token,
            "compute_bytes_per_second": self.here.compute_bytes_per_second,
            "flash_bytes_per_second": self.here.flash_bytes_per_second,
            "notes": list(self.notes),
        }


def plan_model(
    model: str | None, hosts: str | Path, runtime: RuntimeConfig
) -> tuple[Bundle, PlannedDivision]:
    """The bundle of a model by name, and its division among the hosts of a host file.

    Raises ModelNotFoundError, UsageError for a wrong host file, UnsupportedModelError for a slice, and what
    `plan_hosts` raises.
    """
    listed, bundle = read_hosts(hosts), Bundle.open(find_model(model))
    if bundle.config.part != FULL_MODEL:
        raise UnsupportedModelError(
            f"{bundle.name} is {part_words(bundle.manifest)}. Only a whole model is divided among hosts: "
            "name that. Hosts that have slices run the layers of their own"
        )
    with system_refusals():
        return bundle, plan_hosts(bundle, runtime, listed)


def plan_hosts(bundle: Bundle, runtime: RuntimeConfig, hosts: Sequence[HostEntry]) -> PlannedDivision:
    """Divide a model among hosts, rank 0 on this machine, without asking the others.

    bundle: the complete model. runtime: options, whose budget counts for hosts without a budget in the host
    file. Raises what `resolve` and `divide` raise.
    """
    budgets = [str(runtime.dram_budget if it.dram_budget is None else it.dram_budget) for it in hosts]
    more_bytes = RING_BYTES + SUPERVISOR_BYTES if len(hosts) > 1 else 0
    first_bytes = more_bytes + LAUNCHER_BYTES if len(hosts) > 1 else 0
    with named_budget(hosts[0].dram_budget or ""):
        settled = settled_for(bundle, replace(runtime, dram_budget=budgets[0]), len(hosts), first_bytes)
        here = measured_resources(bundle, settled.runtime, hosts[0].ssh)
    process_bytes = here.process_bytes
    here = replace(here, process_bytes=process_bytes + first_bytes)
    # `auto` and shares of a machine's memory are taken as here.
    usable = usable_bytes()
    ranks = [
        replace(
            here,
            name=host.ssh,
            budget_bytes=parse_budget(budget, auto=usable),
            process_bytes=process_bytes + (more_bytes if rank else first_bytes),
        )
        for rank, (host, budget) in enumerate(zip(hosts, budgets, strict=True))
    ]
    draft_bytes = 0 if settled.draft is None else settled.draft.nbytes
    division = divide(bundle, settled.runtime, ranks, HOP_SECONDS if len(hosts) > 1 else 0.0, draft_bytes)
    return PlannedDivision(division, settled.runtime, here, _notes(hosts, budgets))


def settled_for(bundle: Bundle, runtime: RuntimeConfig, count: int, more_bytes: int = 0) -> ResolvedModel:
    """Rank 0's options, settled for the fewest layers that it may have next to `count` - 1 other ranks.

    more_bytes: memory that the rank's processes will take but don't take yet.

    Raises what `resolve` raises, and BudgetError if even these don't fit.
    """
    places = (*cut_places(bundle.config), bundle.config.num_layers)
    part = bundle if count == 1 else bundle.slice(0, places[0])
    resolved = resolve(part, runtime)
    if more_bytes:
        plan = resolved.plan
        plan = replace(
            plan,
            process_bytes=plan.process_bytes + more_bytes,
            opening_bytes=plan.opening_bytes + more_bytes,
        )
        budget = parse_budget(runtime.dram_budget, auto=usable_bytes())
        resolved = replace(resolved, plan=plan.with_budget(budget))
    resolved.require_fit()
    settled = resolved.runtime
    if runtime.sparsity == "auto":
        settled = replace(settled, sparsity=automatic_modes(bundle.config, settled)[0])
    return replace(resolved, runtime=settled)


def _notes(hosts: Sequence[HostEntry], budgets: Sequence[str]) -> tuple[str, ...]:
    """Sentences on what the figures are based on."""
    if len(hosts) == 1:
        return ()
    notes = [
        "speeds and the process's memory were measured on this machine, rank 0, and are taken for the other "
        f"hosts too, with {(RING_BYTES + SUPERVISOR_BYTES) // 10**6} MB for MLX's ring and a supervisor; "
        "when they run, each measures its own",
        f"{HOP_SECONDS * 1000:g} ms for each hop is assumed, as on one machine; a network adds its own",
    ]
    relative = [
        host.ssh
        for host, budget in zip(hosts[1:], budgets[1:], strict=True)
        if budget.strip().lower() == "auto" or budget.strip().endswith("%")
    ]
    if relative:
        notes.append(
            f"the budget of {', '.join(relative)} follows that machine's memory, which is taken to be this "
            "machine's; name it as dram_budget in the host file"
        )
    return tuple(notes)
