"""Ranks meet: whole bundles and slices, and what happens to the layers that no rank has."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.slices import write_slice
from ondevice.distributed import handshake
from ondevice.distributed.handshake import handshake_as_first, handshake_as_other, part
from ondevice.errors import BudgetError, OndeviceError, RankError, UsageError
from ondevice.runtime.resolving import ResolvedModel
from tests.support.paths import SHIPPED
from tests.support.ranks import end_ring, ring_of

RUNTIME = RuntimeConfig(dram_budget="4GB", max_context=64, threads=1)


def met(bundles: Sequence[Bundle], runtime: RuntimeConfig = RUNTIME) -> list[tuple[int, int]]:
    """The layers of each rank, in the model's numbers, of ranks with these bundles."""
    transports, errors = ring_of(len(bundles)), list[BaseException]()
    found: dict[int, ResolvedModel] = {}

    def join(rank: int) -> None:
        with end_ring(transports[rank], errors):
            found[rank] = handshake_as_other(transports[rank], lambda: bundles[rank], runtime)

    threads = [threading.Thread(target=partial(join, rank), daemon=True) for rank in range(1, len(bundles))]
    for thread in threads:
        thread.start()
    try:
        found[0], _ = handshake_as_first(transports[0], bundles[0], runtime)
    except OndeviceError as error:
        transports[0].after.put(error)
        raise
    finally:
        for thread in threads:
            thread.join(60)
    assert not errors
    parts = [found[rank].bundle.config for rank in range(len(bundles))]
    return [(it.part.first, it.part.first + it.num_layers) for it in parts]


@pytest.fixture
def whole() -> Bundle:
    return Bundle.open(SHIPPED)


def test_whole_bundles_are_divided(whole: Bundle) -> None:
    (first, cut), (again, last) = met([whole, whole])
    assert (first, last) == (0, 6)
    assert cut == again


@pytest.mark.fast("cuts2")
@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 5)])
def test_slices_decide_what_each_rank_runs(whole: Bundle, cuts: tuple[int, ...]) -> None:
    """However fast ranks are. Where the first has all layers, others may run fewer than their slices have."""
    ranges = list(pairwise([0, *cuts, 6]))
    slices = [whole.slice(first, stop) for first, stop in ranges]
    assert met(slices) == ranges
    found = met([whole, *slices[1:]])
    assert [first for first, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert all(own[0] <= it[0] < it[1] <= own[1] for own, it in zip(ranges[1:], found[1:], strict=True))


@pytest.mark.parametrize("layers", [((0, 2), (0, 2)), ((0, 2), (3, 6)), ((0, 2), (2, 5)), ((0, 6), (2, 5))])
def test_layers_that_no_rank_has_are_refused(whole: Bundle, layers: Sequence[tuple[int, int]]) -> None:
    slices = [whole.slice(first, stop, embeds=first == 0) for first, stop in layers]
    with pytest.raises(UsageError, match=r"don't make the 6 layers .* rank 1 has .* `ondevice split`"):
        met(slices)


@pytest.mark.parametrize(
    ("key", "sparsity", "speculation"),
    [("predictors", "predicted", "off"), ("streams", "dense", "streams")],
)
def test_other_sidecars_are_refused(
    key: str, sparsity: str, speculation: str, whole: Bundle, tmp_path: Path
) -> None:
    """Those of layers that the first rank hasn't either. A slice that was written says what it is of."""
    runtime = replace(RUNTIME, sparsity=sparsity, speculation=speculation)  # type: ignore[arg-type]
    first = whole.slice(0, 3)
    own = Bundle.open(write_slice(whole.slice(3, 6), tmp_path / "own"))
    assert met([first, own], runtime) == [(0, 3), (3, 6)]
    other = copy.copy(whole)
    setattr(other, key, replace(getattr(whole, key), trained_tokens=1))
    later = Bundle.open(write_slice(other.slice(3, 6), tmp_path / "other"))
    for bundles in ([whole, other], [first, later]):
        with pytest.raises(RankError, match=rf"rank 1 has other {key} than rank 0"):
            met(bundles, runtime)
    # What the options don't use may differ.
    assert met([first, later], replace(RUNTIME, sparsity="dense", speculation="off")) == [(0, 3), (3, 6)]


def test_another_shape_is_another_model(whole: Bundle) -> None:
    """With the same weights."""
    other = copy.copy(whole)
    other.config = replace(whole.config, logit_soft_cap=30.0)
    other.manifest = replace(whole.manifest, config=other.config)
    with pytest.raises(RankError, match="rank 1 has another model than rank 0"):
        met([whole, other])


@pytest.mark.usefixtures("steady_process")
def test_other_ranks_draft_as_the_first_says(whole: Bundle) -> None:
    """Under any budget: with less memory than drafts take, theirs doesn't fit."""
    runtime = replace(RUNTIME, sparsity="dense", speculation="auto")
    first, later = part(whole, (0, 3), runtime), part(whole, (3, 6), runtime)
    assert {it.runtime.speculation for it in first.alternatives} == {"auto", "off"}
    assert later.runtime.speculation == "auto"
    assert {it.runtime.speculation for it in later.alternatives} == {"auto"}
    plain = part(whole, (3, 6), replace(runtime, speculation="off"))
    between = (plain.plan.least_budget_bytes + later.plan.least_budget_bytes) // 2
    assert plain.plan.least_budget_bytes + (1 << 19) < later.plan.least_budget_bytes
    tight = part(whole, (3, 6), replace(runtime, dram_budget=f"{between}"))
    assert tight.runtime.speculation == "auto"
    with pytest.raises(BudgetError):
        tight.require_fit()


def test_a_rank_has_its_tokenizer_once(whole: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the shortest context of all ranks has it resolved anew: a budget has room for one."""
    read: list[weakref.ref[Any]] = []
    left: list[int] = []
    own, settle = handshake.resolve, handshake.settled_for

    def settled(*given: Any) -> ResolvedModel:
        found = settle(*given)
        read.append(weakref.ref(found.tokenizer))
        return found

    def resolved(bundle: Bundle, runtime: RuntimeConfig) -> ResolvedModel:
        if bundle.config.part.embeds:
            left.append(sum(each() is not None for each in read))
        found = own(bundle, runtime)
        if found.tokenizer is not None:
            read.append(weakref.ref(found.tokenizer))
        return found

    monkeypatch.setattr(handshake, "settled_for", settled)
    monkeypatch.setattr(handshake, "resolve", resolved)
    contexts = iter((48, 64))
    monkeypatch.setattr(handshake, "_context", lambda found: next(contexts))
    assert len(met([whole, whole])) == 2
    assert left == [0, 0]


def test_what_differs_is_said_before_a_layer_is_measured(
    whole: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("a layer was measured")

    own = handshake.card
    monkeypatch.setattr(handshake, "measured_resources", measured)
    devices = iter(("mlx 1 on a CPU", "mlx 2 on a CPU"))
    monkeypatch.setattr(handshake, "card", lambda *given: replace(own(*given), device=next(devices)))
    with pytest.raises(RankError, match=r"mlx \d on a CPU and rank 0 with mlx \d on a CPU.*one release"):
        met([whole, whole])


def test_mlx_says_its_release() -> None:
    core = pytest.importorskip("mlx.core")
    assert handshake.device("mlx").startswith(f"mlx {core.__version__} on ")
    assert handshake.device("cpu") == "cpu"
