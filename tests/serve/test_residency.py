"""Several models under one budget: which of them yield, which are unloaded, and what then runs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("starlette")
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.api import Model, load
from ondevice.errors import OndeviceError
from ondevice.serve.config import ServeConfig
from ondevice.serve.metrics import Metrics
from ondevice.serve.models import ModelFacts, Models, ServedModel
from ondevice.serve.residency import Resident, Room, room_for
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.serving import Serving, serving, until

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 3,
    "temperature": 0,
}
OLD = Resident("old", claim_bytes=40, least_bytes=10, at_work=False)
NEW = Resident("new", claim_bytes=30, least_bytes=10, at_work=False)
WIDE = 60_000
BUSY = Resident("busy", claim_bytes=30, least_bytes=10, at_work=True)


@pytest.mark.parametrize(
    ("least", "full", "budget", "residents", "expected"),
    [
        (5, 30, 100, [OLD, NEW], Room()),
        (5, 60, 100, [OLD, NEW], Room(("old",))),
        (5, 80, 100, [OLD, NEW], Room(("old", "new"))),
        # What is left after all have yielded is enough to run: none is unloaded for more.
        (80, 500, 100, [OLD, NEW], Room(("old", "new"))),
        (85, 500, 100, [OLD, NEW], Room(("new",), ("old",))),
        (95, 500, 100, [OLD, NEW], Room((), ("old", "new"))),
        (85, 500, 100, [BUSY, NEW], Room((), ("new",))),
        (5, 60, 100, [], Room()),
        (500, 500, 100, [OLD], Room((), ("old",))),
    ],
)
def test_idle_models_yield_and_then_go_by_least_use(
    least: int, full: int, budget: int, residents: list[Resident], expected: Room
) -> None:
    assert room_for(least, full, budget, residents) == expected


@st.composite
def _residents(draw: st.DrawFn) -> list[Resident]:
    sizes = st.integers(0, 100)
    return [
        Resident(str(index), least + draw(sizes), least, draw(st.booleans()))
        for index, least in enumerate(draw(st.lists(sizes, max_size=6)))
    ]


@settings(max_examples=80)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 500), _residents())
def test_there_is_room_wherever_idle_models_can_make_it(
    least: int, more: int, budget: int, residents: list[Resident]
) -> None:
    room = room_for(least, least + more, budget, residents)
    named = {it.name: it for it in residents}
    assert not any(named[name].at_work for name in (*room.yielding, *room.unloaded))
    assert not set(room.yielding) & set(room.unloaded)
    left = sum(
        0 if it.name in room.unloaded else it.least_bytes if it.name in room.yielding else it.claim_bytes
        for it in residents
    )
    idle = [it for it in residents if not it.at_work]
    assert budget - left >= least or set(room.unloaded) == {it.name for it in idle}
    if room.unloaded:
        # None that was used later goes before one that was used earlier.
        assert list(room.unloaded) == [it.name for it in idle[: len(room.unloaded)]]


class Loaded:
    """A server of three models of the same bundle, and those that it has loaded by name."""

    def __init__(self, server: Serving, made: dict[str, Model]) -> None:
        self.server, self.made = server, made

    def ask(self, name: str) -> Any:
        answer = self.server.post(CHAT, ASKED | {"model": name})
        assert answer.status == 200, answer.body
        return answer.json["choices"]

    def is_closed(self, name: str) -> bool:
        try:
            self.made[name].generate("x", max_tokens=1)
        except OndeviceError:
            return True
        return False


@pytest.fixture(scope="module")
def wide_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat bundle with feed-forward weights that are more than the measurement of a process is off."""
    folder = tmp_path_factory.mktemp("wide")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", intermediate_size=WIDE)
    return convert_bundle(checkpoint, folder / "wide")


@pytest.fixture
def loaded(wide_bundle: Path) -> Iterator[Loaded]:
    """The wide model thrice, under a budget with room for one at its least and another one whole."""
    made: dict[str, Model] = {}
    options: dict[str, Any] = {"threads": 1, "speculation": "off", "memory_pressure": "off"}

    def loader(name: str) -> Any:
        def again(budget: int) -> Model:
            made[name] = load(wide_bundle, dram_budget=budget, **options)
            return made[name]

        return again

    first = load(wide_bundle, **options)
    plan = first.plan
    least = plan.minimum_budget_bytes - plan.process_bytes
    spare = (plan.full_bytes - plan.minimum_budget_bytes) // 2
    first.set_dram_budget(plan.full_bytes + least + spare)
    made[first.name] = first
    with serving(
        first, ServeConfig(port=0), {"second": loader("second"), "third": loader("third")}
    ) as server:
        yield Loaded(server, made)


@pytest.mark.slow
def test_models_share_the_budget_and_go_by_least_use(loaded: Loaded) -> None:
    first = loaded.server.model
    expected = loaded.ask(first.name)
    assert loaded.ask("second") == expected
    # The idle one made room for all of the second, and goes on from there when it is asked again.
    assert first.plan.budget_bytes <= first.plan.minimum_budget_bytes
    assert loaded.ask(first.name) == expected
    plan = first.plan
    own = plan.minimum_budget_bytes - plan.process_bytes - plan.others_bytes
    # The process has grown a little since this plan measured it, and a third one at its least doesn't fit.
    budget = {"budget_bytes": plan.process_bytes + own * 5 // 2}
    assert loaded.server.post("/page/budget", budget).status == 200
    assert not loaded.is_closed("second")
    assert loaded.ask("third") == expected
    assert loaded.is_closed("second")
    assert not loaded.is_closed(first.name)
    assert loaded.ask("second") == expected
    assert loaded.is_closed(first.name)
    names = {it["name"] for it in loaded.server.request("GET", "/api/ps").json["models"]}
    assert names == {"second", "third"}


@pytest.mark.slow
def test_the_page_s_budget_is_all_models(loaded: Loaded) -> None:
    """A budget with room for one alone unloads the idle one."""
    first = loaded.server.model
    loaded.ask("second")
    plan = loaded.made["second"].plan
    least = plan.minimum_budget_bytes - plan.others_bytes
    assert loaded.server.post("/page/budget", {"budget_bytes": least + (2 << 20)}).status == 200
    assert loaded.is_closed(first.name)
    until(lambda: loaded.server.request("GET", "/health").json["model"] == "second")
    loaded.ask("second")


def test_another_model_is_loaded_when_it_is_asked_for(chat_bundle: Path) -> None:
    """Where the budget has room for both, both stay."""
    made: dict[str, Model] = {}

    def again(budget: int) -> Model:
        made["second"] = load(chat_bundle, threads=1, speculation="off", dram_budget=budget)
        return made["second"]

    first = load(chat_bundle, threads=1, speculation="off", dram_budget="2GB")
    with serving(first, others={"second": again}) as server:
        both = Loaded(server, made | {first.name: first})
        expected = both.ask(first.name)
        assert both.ask("second:latest") == expected
        assert server.request("GET", "/health").json["model"] == "second"
        assert not both.is_closed(first.name)
        assert both.ask(first.name) == expected
        names = [it["name"] for it in server.request("GET", "/api/ps").json["models"]]
        assert names == [f"{first.name}", "second"]
    assert both.is_closed(first.name)
    both.made |= made
    assert both.is_closed("second")


@pytest.mark.parametrize("stream", [False, True])
def test_a_keep_alive_of_zero_unloads_a_model_behind_the_answer(chat_bundle: Path, stream: bool) -> None:
    again: list[Model] = []

    def loader(budget: int) -> Model:
        again.append(load(chat_bundle, threads=1, speculation="off", dram_budget=budget))
        return again[-1]

    first = load(chat_bundle, threads=1, speculation="off", dram_budget="2GB")
    with serving(first, others={first.name: loader}) as server:

        def names() -> list[str]:
            return [it["name"] for it in server.request("GET", "/api/ps").json["models"]]

        hello: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
        asked = hello | {"stream": stream, "options": {"num_predict": 2, "temperature": 0}}
        expected = server.post("/api/chat", asked).body
        assert names() == [first.name]
        assert server.post("/api/chat", asked | {"keep_alive": 0}).status == 200
        until(lambda: names() == [])
        # It is loaded again for whoever asks, and unloaded by a request without a text.
        got = server.post("/api/chat", asked).body
        texts = [json.loads(body.splitlines()[0])["message"] for body in (expected, got)]
        assert texts[0] == texts[1]
        assert (len(again), names()) == (1, [first.name])
        answer = server.post("/api/generate", {"keep_alive": "0s"}).json
        assert answer["done_reason"] == "unload"
        until(lambda: names() == [])
        assert server.post("/api/generate", {"keep_alive": "5m"}).json["done_reason"] == "load"
        assert names() == [first.name]
    assert len(again) == 2


def test_a_model_that_a_client_keeps_goes_behind_the_others(chat_bundle: Path) -> None:
    """Least use decides among those that nobody keeps, and then among those that somebody does."""
    facts = [cast(ModelFacts, SimpleNamespace(name=name)) for name in "abc"]
    made = {it.name: ServedModel(it, cast(Any, None)) for it in facts}
    models = Models(facts, cast(Any, None), None, 1, Metrics())
    models.residents += made.values()

    def order() -> str:
        return "".join(it.facts.name for it in models._by_need())

    assert order() == "abc"
    models.keep(made["a"].facts, math.inf)
    models.keep(made["b"].facts, 300)
    assert order() == "cab"
    models.keep(made["c"].facts, None)
    assert order() == "cab"
    made["b"].kept_until = time.monotonic() - 1
    assert order() == "bca"
