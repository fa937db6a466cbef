"""The page on a real server: the model that ships, and SmolLM2, whose replies are sensible."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

import ondevice
from ondevice.api import load
from ondevice.serve.config import ServeConfig
from tests.serve.browser.conftest import DESK, opened
from tests.support.chat import slow_down
from tests.support.page import ask, open_chats, replies, send, settings, wait_for_reply
from tests.support.real_models import real_model
from tests.support.serving import Serving, serving, until

pytestmark = pytest.mark.slow

QUESTION = "Find me a restaurant in San Jose."
CHAT = "/v1/chat/completions"
LONG_QUESTION = (
    "{}: tell me about rivers. " + "The river flows to the sea and the rain falls on the hills. " * 90
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The model that ships, as its answers are text."""
    with serving(load(threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def smollm2_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ondevice.convert(real_model("smollm2"), tmp_path_factory.mktemp("real") / "smollm2")


@pytest.fixture(scope="module")
def smollm2(smollm2_bundle: Path) -> Iterator[Serving]:
    with serving(load(smollm2_bundle, threads=2, max_context=4096)) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Serving, size: dict[str, int]) -> Iterator[Any]:
    for page in opened(browser, server.url, size):
        page.route(f"**{CHAT}", greedy)
        yield page


@pytest.fixture
def smollm2_page(browser: Any, smollm2: Serving, size: dict[str, int]) -> Iterator[Any]:
    yield from opened(browser, smollm2.url, size)


def greedy(route: Any) -> None:
    """Send the page's request without chance, so that the reply is known."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"temperature": 0}))


def expected_reply(server: Serving, question: str = QUESTION) -> str:
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": question}], "temperature": 0})
    return str(answer.json["choices"][0]["message"]["content"]).strip()


def test_the_page_shows_the_server_s_reply_and_continues_the_chat(page: Any, server: Serving) -> None:
    assert ask(page, QUESTION).strip() == expected_reply(server)
    expect(page.locator("article .facts").last).to_have_text(re.compile(r"^\d+ tokens"))
    ask(page, "Thanks!")
    expect(page.locator("article")).to_have_count(4)


def test_stop_and_a_reload_free_the_model(
    page: Any, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(server.model, monkeypatch, 0.2)
    send(page, QUESTION)
    text = page.locator("article.assistant .text")
    expect(text).not_to_be_empty(timeout=20_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    until(lambda: server.metric("running_requests") == 0)
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    page.get_by_role("button", name="Continue this reply").click()
    until(lambda: server.metric("running_requests") == 1)
    page.reload()
    until(lambda: server.metric("running_requests") == 0)
    assert text.inner_text()
    open_chats(page)
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator("article")).to_have_count(0)


def test_the_slider_moves_the_budget_while_a_reply_is_written_and_the_text_stays(
    page: Any, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_reply(server)
    slow_down(server.model, monkeypatch, 0.3)
    page.locator("#speed > summary").click()
    send(page, QUESTION)
    expect(page.locator("article.assistant .text").last).not_to_be_empty(timeout=20_000)
    slider = page.get_by_role("slider", name="Memory budget")
    slider.press("Home")
    until(lambda: server.model.plan.budget_bytes == server.model.plan.minimum_budget_bytes)
    assert server.metric("running_requests") == 1
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^[\d.]+ MB$"))
    slider.press("End")
    until(lambda: server.model.plan.budget_bytes == server.model.plan.full_bytes)
    expect(slider).to_have_attribute("aria-valuetext", re.compile("all in memory"))
    assert wait_for_reply(page).strip() == expected
    expect(page.locator("#budget-error")).to_be_empty()


def test_a_key_is_asked_for_once(browser: Any, chat_bundle: Path) -> None:
    config = ServeConfig(port=0, api_key="secret")
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        for page in opened(browser, server.url, DESK, may_complain="401"):
            for key in ("wrong", "secret"):
                page.get_by_role("textbox", name="API key").fill(key)
                page.keyboard.press("Enter")
            expect(page.locator("#line")).to_contain_text("in memory")
            page.reload()
            expect(page.locator("#line")).to_contain_text("in memory")
            assert not page.get_by_role("dialog").is_visible()


def test_without_a_clipboard_nothing_offers_to_copy(page: Any) -> None:
    """Browsers have none where the page comes by http from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    ask(page, QUESTION)
    assert page.get_by_role("button", name="Copy this reply").count() == 0


@pytest.mark.real
def test_a_long_prompt_of_a_real_model_tells_how_far_it_is_read_and_is_stopped_and_continued(
    smollm2_page: Any, smollm2: Serving
) -> None:
    page = smollm2_page
    settings(page, temperature="0", max_tokens="60")
    # Nothing of it has been read for another width.
    question = LONG_QUESTION.format(page.viewport_size["width"])
    send(page, question)
    expect(page.locator("#line")).to_have_text(
        re.compile(r"Reading [\d,]+ of 1,[\d,]+ tokens"), timeout=20_000
    )
    expect(page.locator("#line")).to_have_text(re.compile("s left"), timeout=20_000)
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Regenerate this reply").click()
    wait_for_reply(page)
    # What was read before the stop was kept.
    expect(page.locator("article .facts")).to_have_text(re.compile("of it kept"))
    open_chats(page)
    page.get_by_role("button", name="New chat", exact=True).click()
    settings(page, temperature="0", max_tokens="20")
    cut = ask(page, question)
    page.get_by_role("button", name="Continue this reply").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)
    continued = replies(page)[0]
    assert continued.startswith(cut)
    assert len(continued) > len(cut)


@pytest.mark.real
def test_a_real_models_answer_obeys_a_schema(smollm2_page: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    settings(smollm2_page, schema=json.dumps(schema), temperature="0")
    assert json.loads(ask(smollm2_page, "What is the capital of France?"))["city"] in ("Paris", "Rome")
    expect(smollm2_page.locator("article.assistant .foot")).to_contain_text("Obeys the schema.")


@contextmanager
def process(bundle: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server in a process: its address, once it listens, and the process, which the end kills."""
    options = ["--port", str(port), "--max-context", "2048"]
    command = [sys.executable, "-m", "ondevice", "serve", *options, str(bundle)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        events = (json.loads(line) for line in server.stderr if line.startswith("{"))
        yield next(event["url"] for event in events if event["event"] == "listening"), server
        server.kill()


@pytest.mark.real
@pytest.mark.parametrize("size", [DESK], ids=["desk"])
def test_a_real_server_is_killed_and_the_reply_goes_on_with_the_next(
    browser: Any, smollm2_bundle: Path, size: dict[str, int]
) -> None:
    with process(smollm2_bundle, 0) as (url, server):
        pages = opened(browser, url, size, may_complain="ERR_|Failed to load")
        page = next(pages)
        settings(page, temperature="0", max_tokens="400")
        send(page, "Write a long story about a river.")
        text = page.locator("article.assistant .text")
        page.wait_for_timeout(1000)
        expect(text).not_to_be_empty()
        server.kill()
        expect(page.locator("#line")).to_contain_text("The server isn't reached")
        written = text.inner_text()
    with process(smollm2_bundle, int(url.rsplit(":", 1)[1])):
        wait_for_reply(page, 120)
        assert text.inner_text().startswith(written)
        assert len(text.inner_text()) > len(written)
        next(pages, None)
