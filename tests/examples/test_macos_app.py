"""The example app: its window on Toga's dummy backend, behind it the shipped model and the real engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ondevice
from tests.support.paths import ROOT

SOURCE = ROOT / "examples/macos_app/src"
if not SOURCE.is_dir():
    pytest.skip("the examples aren't beside these tests", allow_module_level=True)
pytest.importorskip("toga_dummy", reason="the window needs toga-dummy, of the extra `test`")

from toga_dummy.utils import EventLog  # noqa: E402

from ondevice_chat import __main__, awake, chat, folders, transcript  # noqa: E402
from tests.support.chat_window import drive, endless, running, say, shown, slow_down, until  # noqa: E402

QUESTION = "I'm looking for a cheap Italian restaurant in Oakland."
ANSWER = "I found 1 restaurant in Oakland. How about Akira in Oakland?"
NEXT = "What is their phone number?"
NEXT_ANSWER = "Their phone number is 415-423-2333."


@pytest.fixture(autouse=True)
def dummy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Windows that nobody sees, every frame shown, and no error that a handler swallowed."""
    monkeypatch.setenv("TOGA_BACKEND", "toga_dummy")
    monkeypatch.setattr(chat, "FRAME_SECONDS", 0.0)
    EventLog.reset()
    before = set(threading.enumerate())
    yield
    assert "Error in" not in capsys.readouterr().err
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("ondevice-")] == []


@pytest.fixture
def home(tmp_path: Path) -> folders.Folders:
    return folders.Folders(tmp_path / "Application Support" / folders.NAME)


def test_a_reply_is_shown_as_it_is_written(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            await say(app, QUESTION)
            await say(app, NEXT)
            frames = EventLog.values(app.conversation, "value")
            first = [text for text in frames if text.startswith("You: I'm") and NEXT not in text]
            assert len(set(first)) > 5
            assert all(later.startswith(sooner) for sooner, later in pairwise(first))
            assert shown(app) == (
                f"You: {QUESTION}\n\nModel: {ANSWER}\n\nYou: {NEXT}\n\nModel: {NEXT_ANSWER}"
            )
            assert app.entry.value == ""
            assert " a second, the first after " in app.figures_label.text
            assert "memory at most" in app.figures_label.text
            assert "flash" in app.figures_label.text
            assert "neurons" in app.division_label.text

    drive(scenario)


def test_stop_ends_a_reply_and_keeps_what_was_said(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home, sampling=endless()) as app:
            assert not app.stop_button.enabled
            slow_down(app)
            app.entry.value = QUESTION
            app.entry._impl.simulate_confirm()
            await until(lambda: "Model: I found 1" in shown(app))
            assert app.stop_button.enabled
            assert not app.send_button.enabled
            app.stop_button._impl.simulate_press()
            await until(lambda: app.chat.ready)
            said = json.loads(home.transcript.read_text())["messages"]
            assert [message["role"] for message in said] == ["user", "assistant"]
            assert said[1]["content"].startswith(ANSWER[:8])
            assert shown(app) == f"You: {QUESTION}\n\nModel: {said[1]['content']}"
            assert app.chat._model.stats.generated_tokens < 400
            assert not app.stop_button.enabled

    drive(scenario)


def test_the_slider_moves_the_budget_while_a_reply_is_written(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home, sampling=endless()) as app:
            slow_down(app)
            plan = app.chat.plan
            assert app.slider.max == plan.full_bytes
            assert app.slider.value == plan.budget_bytes == plan.full_bytes
            middle = (plan.minimum_budget_bytes + plan.full_bytes) // 2
            app.entry.value = QUESTION
            app.send_button._impl.simulate_press()
            await until(lambda: "Model: I" in shown(app))
            before = app.division_label.text
            app.slider.value = middle
            await until(lambda: app.chat._model.plan.budget_bytes == middle)
            await until(lambda: not app.chat._following)
            assert app.chat.answering
            assert app.division_label.text != before
            app.slider.value = app.slider.min
            await until(lambda: "isn't enough: the smallest budget that works is" in app.chat.notice)
            await until(lambda: app.slider.value == plan.minimum_budget_bytes)
            await until(lambda: app.chat._model.plan.budget_bytes == plan.minimum_budget_bytes)
            app.stop_button._impl.simulate_press()
            await until(lambda: app.chat.ready)

    drive(scenario)


def test_a_budget_that_yields_to_other_programs_is_shown(
    home: folders.Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            model, least = app.chat._model, app.chat.plan.minimum_budget_bytes
            await asyncio.to_thread(model._owner.call, lambda: model._engine.set_budget(least))
            await until(lambda: app.slider.value == least)
            assert "while other programs need the rest" in app.budget_label.text
            assert model.memory_pressure.user_budget_bytes == app.slider.max

    monkeypatch.setattr(chat, "LOOK_SECONDS", 0.01)
    drive(scenario)


@pytest.mark.slow
def test_of_many_budgets_the_newest_counts(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            least, full = app.chat.plan.minimum_budget_bytes, app.chat.plan.full_bytes
            for step in range(50):
                app.slider.value = full - step * (full - least) / 49
            await until(lambda: app.chat._model.plan.budget_bytes == least)
            await until(lambda: not app.chat._following)
            assert app.chat.plan.budget_bytes == app.slider.value == least
            assert app.chat.notice == ""

    drive(scenario)


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_moves_the_slider_and_then_loads(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            await app.chat.open(folders.BUILT_IN, "1MB")
            assert "isn't loaded" in shown(app)
            assert not app.send_button.enabled
            assert app.slider.enabled
            assert app.slider.value == app.chat.plan.budget_bytes
            assert app.chat.plan.fits
            app.slider.value = app.slider.value + 1_000_000
            await until(lambda: app.chat.ready)
            await say(app, QUESTION)
            assert shown(app).endswith(ANSWER)

    drive(scenario)


def test_the_conversation_goes_on_where_it_ended(home: folders.Folders) -> None:
    async def first() -> None:
        async with running(home) as app:
            await say(app, QUESTION)

    async def second() -> None:
        async with running(home) as app:
            assert shown(app) == f"You: {QUESTION}\n\nModel: {ANSWER}"
            await say(app, NEXT)
            assert shown(app).endswith(NEXT_ANSWER)
            app.new_button._impl.simulate_press()
            await until(lambda: shown(app) == "")
            assert not home.transcript.exists()
            (ended,) = home.data.glob("transcript-ended-*.json")
            assert len(json.loads(ended.read_text())["messages"]) == 4

    drive(first)
    EventLog.reset()
    drive(second)


@pytest.mark.fast("{*")
@pytest.mark.parametrize("content", [b"", b'{"format": "ondevice-session", "ver', b"\xff\xfe\x00", b"[1]"])
def test_a_damaged_transcript_is_set_aside(home: folders.Folders, content: bytes) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            assert "was set aside" in shown(app)
            (aside,) = home.data.glob("transcript-damaged-*.json")
            assert aside.read_bytes() == content
            assert app.send_button.enabled

    home.prepare()
    home.transcript.write_bytes(content)
    drive(scenario)


def test_a_home_that_cannot_be_written_is_no_hindrance(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            assert "Nothing will be saved" in shown(app)
            await say(app, QUESTION)
            assert f"Model: {ANSWER}\n\n(Not saved: " in shown(app)
            await say(app, NEXT)
            assert f"Model: {NEXT_ANSWER}\n\n(Not saved: " in shown(app)

    # In place of permissions, which the superuser has all of.
    home.data.parent.parent.mkdir(exist_ok=True)
    home.data.parent.write_text("a file where the folder would be")
    drive(scenario)


def test_a_model_of_the_persons_own_is_offered_and_never_written_to(home: folders.Folders) -> None:
    async def scenario() -> None:
        async with running(home) as app:
            assert [row.value for row in app.models.items] == [folders.BUILT_IN, "broken", "mine"]
            app.models.value = "broken"
            await until(lambda: "broken isn't loaded" in app.chat.notice)
            assert not app.send_button.enabled
            app.models.value = "mine"
            await until(lambda: app.chat.ready)
            assert app.chat._model.bundle.path == home.models / "mine"
            await say(app, QUESTION)
            assert shown(app).endswith(ANSWER)

    shipped = Path(ondevice.inspect.__code__.co_filename).parents[1] / "weights/small-relu"
    bundle = home.models / "mine"
    bundle.mkdir(parents=True)
    for file in shipped.glob("*.*"):
        if file.is_file() and not file.name.startswith("."):
            shutil.copy2(file, bundle)
    (home.models / "broken").mkdir()
    (home.models / "broken" / "bundle.json").write_text("{}")
    before = {path: path.stat().st_mtime_ns for path in [bundle, *bundle.iterdir()]}
    drive(scenario)
    assert {path: path.stat().st_mtime_ns for path in [bundle, *bundle.iterdir()]} == before


def test_closing_the_window_stops_the_reply_and_gives_everything_back(home: folders.Folders) -> None:
    before = set(threading.enumerate())

    async def scenario() -> None:
        async with running(home, sampling=endless()) as app:
            model = app.chat._model
            slow_down(app)
            app.entry.value = QUESTION
            app.send_button._impl.simulate_press()
            await until(lambda: "Model: I found" in shown(app))
            app.main_window._impl.interface.on_close()
            await until(lambda: any(entry.context.get("action") == "exit" for entry in EventLog._log))
            with pytest.raises(ondevice.OndeviceError, match="closed"):
                model.generate("x")
            assert "ondevice-small-relu" not in {
                thread.name for thread in set(threading.enumerate()) - before
            }
            assert model.stats.generated_tokens < 400
            said = json.loads(home.transcript.read_text())["messages"]
            assert said[1]["content"].startswith("I found")

    drive(scenario)


@pytest.mark.slow
def test_a_full_context_is_told_and_the_message_comes_back(
    home: folders.Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(home, sampling=endless()) as app:
            await say(app, QUESTION)
            assert "cut short" in shown(app)
            app.entry.value = NEXT
            app.send_button._impl.simulate_press()
            await until(lambda: "A new chat begins with an empty context" in shown(app))
            await until(lambda: app.entry.value == NEXT)
            assert app.chat.ready

    monkeypatch.setattr(chat, "FRAME_SECONDS", 1.0)
    drive(scenario)


@pytest.mark.slow
def test_app_nap_is_held_off_while_a_reply_is_written(home: folders.Folders) -> None:
    seen: list[str] = []

    @contextmanager
    def recorded() -> Iterator[None]:
        seen.append("begun")
        yield
        seen.append("ended")

    async def scenario() -> None:
        async with running(home, awake=recorded) as app:
            assert seen == []
            await say(app, QUESTION)
            assert seen == ["begun", "ended"]

    drive(scenario)


def test_what_macos_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Process:
        def beginActivityWithOptions(self, options: int, reason: str) -> str:  # noqa: N802
            calls.append(("begin", options, reason))
            return "activity"

        def endActivity(self, activity: str) -> None:  # noqa: N802
            calls.append(("end", activity))

    process_info = types.SimpleNamespace(declare_class_property=lambda name: None, processInfo=Process())
    rubicon = types.ModuleType("rubicon.objc")
    rubicon.ObjCClass = lambda name: process_info  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rubicon", types.ModuleType("rubicon"))
    monkeypatch.setitem(sys.modules, "rubicon.objc", rubicon)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(KeyError), awake.kept_awake("because") as given:
            raise KeyError(given)
    assert given == "activity"
    assert calls == [("begin", 0x00EFFFFF, "because"), ("end", "activity")]


@pytest.mark.skipif(sys.platform != "darwin", reason="App Nap is of macOS")
def test_app_nap_is_held_off_for_real() -> None:
    pytest.importorskip("rubicon.objc", reason="rubicon-objc comes with toga-cocoa")
    with awake.kept_awake("because") as activity:
        assert activity is not None, "the system gave nothing to hold"


@pytest.mark.skipif(sys.platform == "darwin", reason="there is App Nap")
def test_where_there_is_no_app_nap_nothing_is_asked_for() -> None:
    with awake.kept_awake() as activity:
        assert activity is None


def test_the_doctor_runs_inside_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["app", "--doctor", "--json"])
    monkeypatch.setattr(
        __main__.runpy, "run_module", lambda name, run_name: seen.append([name, run_name, *sys.argv])
    )
    __main__.main()
    assert seen == [["ondevice", "__main__", "ondevice", "doctor", "--json"]]


def test_nothing_but_this_folder_is_written(home: folders.Folders) -> None:
    assert home.prepare() == ""
    assert transcript.set_aside(home.transcript, "ended") == ""
    assert sorted(path.name for path in home.data.iterdir()) == ["models"]
    assert folders.Folders.of_this_user().data.name == folders.NAME
