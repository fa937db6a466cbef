"""The page in headless Chromium: a chat, stop, the budget while it writes, a reload, a narrow screen."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from playwright.sync_api import expect, sync_playwright

from ondevice.api import load
from ondevice.serve.config import ServeConfig
from tests.support.chat import slow_down
from tests.support.serving import Serving, serving, until

pytestmark = pytest.mark.slow

QUESTION = "Find me a restaurant in San Jose."
CHAT = "/v1/chat/completions"
MARKDOWN = """# Title
A **bold** and *leaning* text with `code`, [a link](https://example.com/a), ~~gone~~ and snake_case_words.

<img src=x onerror="document.title='broken'"> [bad](javascript:alert(1)) ![picture](https://example.com/p.png)

- one
  1. inner
- two

> quoted **text**

| a | b |
|---|--:|
| 1 | `2` |

```python
print("<b>no markup</b>")
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium: the system's, as the one that Playwright knows would have to be downloaded."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium here")
    # Its sandbox refuses to run for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """The model that ships, as its answers are text."""
    with serving(load(threads=1)) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Serving) -> Iterator[Any]:
    """The page, loaded. Whatever its scripts complain of is an error, and requests to others too."""
    context = browser.new_context(viewport={"width": 1100, "height": 700})
    page, complaints, asked = context.new_page(), [], set()
    page.on("console", lambda it: complaints.append(it.text) if it.type in ("error", "warning") else None)
    page.on("pageerror", lambda it: complaints.append(str(it)))
    page.on("request", lambda it: asked.add(re.match(r"\w+://[^/]*", it.url)[0]))
    page.route(f"**{CHAT}", greedy)
    page.goto(server.url)
    expect(page.locator("#memory")).not_to_have_text("-")
    yield page
    context.close()
    assert complaints == []
    assert asked == {server.url}


def greedy(route: Any) -> None:
    """Send the page's request without chance, so that the reply is known."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"temperature": 0}))


def send(page: Any, text: str = QUESTION) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def wait_for_reply(page: Any) -> str:
    """The last reply's text, once it is complete."""
    expect(page.get_by_role("status")).to_have_text("The reply is complete.", timeout=60_000)
    return str(page.locator("article.assistant > div").last.inner_text())


def expected_reply(server: Serving) -> str:
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0})
    return str(answer.json["choices"][0]["message"]["content"])


def drawn_markdown(page: Any, text: str) -> Any:
    """A reply that is `text`, drawn in two steps, as it would be while it comes."""
    page.evaluate(
        """async text => {
            const { render } = await import("/page/markdown.js");
            const article = document.createElement("article");
            document.getElementById("log").append(article);
            for (const part of [text.slice(0, text.length / 2), text]) render(article, part);
        }""",
        text,
    )
    return page.locator("article").last


def test_a_chat(page: Any, server: Serving) -> None:
    send(page)
    assert wait_for_reply(page).strip() == expected_reply(server).strip()
    assert re.match(r"\d+ tokens", page.locator("article .facts").last.inner_text())
    send(page, "Thanks!")
    expect(page.locator("article")).to_have_count(4)
    wait_for_reply(page)


def test_stop_keeps_what_was_written_and_frees_the_model(
    page: Any, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(server.model, monkeypatch, 0.2)
    send(page)
    expect(page.locator("article.assistant > div").last).not_to_be_empty(timeout=20_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    monkeypatch.undo()
    until(lambda: server.metric("running_requests") == 0)
    expect(page.get_by_role("textbox", name="Message")).to_be_focused()
    send(page, "Go on.")
    wait_for_reply(page)
    send(page, "And on.")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_the_slider_moves_the_budget_while_a_reply_is_written(
    page: Any, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_reply(server)
    slow_down(server.model, monkeypatch, 0.3)
    send(page)
    expect(page.locator("article.assistant > div").last).not_to_be_empty(timeout=20_000)
    slider = page.get_by_role("slider", name="Memory budget")
    slider.press("Home")
    until(lambda: server.model.plan.budget_bytes == server.model.plan.minimum_budget_bytes)
    assert server.metric("running_requests") == 1
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^[\d.]+ MB$"))
    slider.press("End")
    until(lambda: server.model.plan.budget_bytes == server.model.plan.full_bytes)
    expect(slider).to_have_attribute("aria-valuetext", re.compile("all in memory"))
    assert wait_for_reply(page).strip() == expected.strip()
    expect(page.locator("#rate")).not_to_have_text("0.0")
    expect(page.locator("#budget-error")).to_be_empty()


def test_a_reload_keeps_the_conversation_and_stops_what_runs(
    page: Any, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(page)
    reply = wait_for_reply(page)
    page.reload()
    assert page.locator("article").count() == 2
    assert page.locator("article.assistant > div").inner_text() == reply
    slow_down(server.model, monkeypatch, 0.3)
    send(page, "Go on.")
    expect(page.locator("article.assistant > div").last).not_to_be_empty(timeout=20_000)
    page.reload()
    until(lambda: server.metric("running_requests") == 0)
    monkeypatch.undo()
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    page.reload()
    assert page.locator("article").count() == 0


def test_a_narrow_screen_has_no_scrolling_aside(page: Any) -> None:
    page.set_viewport_size({"width": 340, "height": 640})
    page.reload()
    send(page)
    wait_for_reply(page)
    panel = page.locator("#panel")
    assert panel.get_attribute("open") is None
    page.locator("#panel summary").press("Enter")
    expect(page.get_by_role("slider")).to_be_visible()
    wide = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.evaluate(wide)
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()


def test_everything_is_reached_by_keyboard_and_has_a_name(page: Any) -> None:
    page.locator("body").press("Tab")
    names, seen = page.evaluate("() => document.activeElement.id"), set()
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.id"))
    assert {"model", "new", "theme", "log", "message", "send", "budget"} <= seen | {names}
    for role in ("button", "combobox", "slider", "textbox"):
        for control in page.get_by_role(role).all():
            named = control.aria_snapshot()
            assert re.search(rf'{role} "[^"]+"', named), named


def test_markdown_is_drawn_and_markup_stays_text(page: Any) -> None:
    reply = drawn_markdown(page, MARKDOWN)
    expect(reply.locator("h3")).to_have_text("Title")
    for tag, text in {
        "strong >> nth=0": "bold",
        "em": "leaning",
        "del": "gone",
        "ul > li > ol > li": "inner",
        "blockquote strong": "text",
        "td code": "2",
        "pre": 'print("<b>no markup</b>")',
        "figcaption >> nth=0": "pythonCopy",
    }.items():
        expect(reply.locator(tag)).to_have_text(text)
    links = [it.get_attribute("href") for it in reply.locator("a").all()]
    assert links == ["https://example.com/a", "https://example.com/p.png"]
    assert reply.locator("img, script, b").count() == 0
    assert "snake_case_words" in reply.inner_text()
    assert page.title() == "ondevice"


def test_without_a_clipboard_nothing_offers_to_copy(page: Any) -> None:
    """Browsers have none where the page comes by http from another machine."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    reply = drawn_markdown(page, MARKDOWN)
    expect(reply.locator("figcaption")).to_have_text("python")
    assert reply.get_by_role("button").count() == 0


@pytest.mark.parametrize(
    "piece", ["*a ", "**a", "`a``", "[a](", "> ", "- ", "|a", "``` ", "_a_", "http://h", "#"]
)
def test_no_text_takes_the_page_long(page: Any, piece: str) -> None:
    text = piece * (40_000 // len(piece))
    taken = page.evaluate(
        """async text => {
            const { render } = await import("/page/markdown.js");
            const begun = performance.now();
            render(document.createElement("div"), text);
            render(document.createElement("div"), text.replaceAll(" ", "\\n"));
            return performance.now() - begun;
        }""",
        text,
    )
    assert taken < 3000


def test_colours_follow_the_system_and_the_choice(page: Any) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.get_by_label("Colours").select_option("light")
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light


def test_a_key_is_asked_for_once(browser: Any, chat_bundle: Path) -> None:
    config = ServeConfig(port=0, api_key="secret")
    with serving(load(chat_bundle, threads=1, speculation="off"), config) as server:
        page = browser.new_page()
        page.goto(server.url)
        for key in ("wrong", "secret"):
            page.get_by_role("textbox", name="API key").fill(key)
            page.keyboard.press("Enter")
        expect(page.locator("#memory")).not_to_have_text("-")
        page.reload()
        expect(page.locator("#memory")).not_to_have_text("-")
        assert not page.get_by_role("dialog").is_visible()
        page.close()
