"""The page from a phone to a wide screen: what fits, colours, the keyboard, screen readers, motion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.serve.browser.conftest import PHONE, opened
from tests.serve.browser.test_text import MARKDOWN
from tests.support.page import ask, open_chats, wait_for_reply
from tests.support.page_stub import PageStub, Said
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

AXE = ROOT / "build/axe/node_modules/axe-core/axe.min.js"
CALLS = Said(MARKDOWN, thinking="Let me see.", calls=(("weather", '{"city": "Oslo"}'),), reason="tool_calls")


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which finds what screen readers and keyboards can't use."""
    if not AXE.is_file():
        pytest.skip("axe-core isn't there: `make axe` has npm bring it")
    return AXE.read_text()


def violations(page: Any, axe: str) -> list[tuple[str, str]]:
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [(it["id"], node["html"][:200]) for it in result["violations"] for node in it["nodes"]]


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing(page: Any, stub: PageStub, axe: str, colours: str, tmp_path: Path) -> None:
    page.emulate_media(color_scheme=colours)
    expect(page.locator("#line")).to_contain_text("300 MB")
    assert violations(page, axe) == []
    stub.replies = [CALLS]
    file = tmp_path / "notes.txt"
    file.write_text("some text")
    page.locator("#attach-file").set_input_files(file)
    expect(page.locator("#files li")).to_have_count(1)
    ask(page, "Hello?")
    for summary in page.locator("main details > summary").all():
        summary.click()
    page.get_by_role("button", name="Edit this question").click()
    assert violations(page, axe) == []
    page.get_by_role("button", name="Settings").click()
    for summary in page.locator("dialog details > summary").all():
        summary.click()
    assert violations(page, axe) == []
    page.keyboard.press("Escape")
    open_chats(page)
    page.get_by_label("More about Hello?").click()
    assert violations(page, axe) == []


@pytest.mark.parametrize("width", [390, 768, 1280, 2560])
@pytest.mark.parametrize("size", [{"width": 390, "height": 780}], ids=["any"])
def test_nothing_scrolls_aside_from_a_phone_to_a_wide_screen(page: Any, stub: PageStub, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    stub.replies = [CALLS]
    ask(page, "a" * 300)
    page.locator("#speed > summary").click()
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not page.locator("#log").evaluate("it => it.scrollWidth > it.clientWidth")
    for name in ("Send", "Settings", "Files"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_in_viewport(ratio=1)
    expect(page.get_by_role("slider")).to_be_in_viewport()
    # Lines stay of a length that is read.
    assert page.locator("article").first.evaluate("it => it.clientWidth") <= 900


def test_everything_is_reached_by_keyboard(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("```\ncode\n```")]
    ask(page, "Hello?")
    page.locator("#speed > summary").press("Enter")
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(it => it.id || it.getAttribute('aria-label') || it.localName)(document.activeElement)"
            )
        )
    wanted = {
        "model",
        "show-settings",
        "log",
        "message",
        "attach",
        "send",
        "budget",
        "summary",
        "Code, no language",
    }
    wanted |= {"Edit this question", "Copy this reply", "Regenerate this reply"}
    is_narrow = page.viewport_size["width"] < 600
    wanted |= (
        {"show-chats"} if is_narrow else {"new", "search", "import", "export", "theme", "More about Hello?"}
    )
    assert wanted <= reached
    if is_narrow:
        page.locator("#show-chats").press("Enter")
        expect(page.locator("#new")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#show-chats")).to_be_focused()
        expect(page.locator("#chats")).to_be_hidden()


def test_colours_follow_the_system_and_the_choice(page: Any) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) != light
    open_chats(page)
    page.get_by_label("Colours").select_option("light")
    assert page.evaluate(ground) == light
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert page.evaluate(ground) == light


def test_nothing_moves_for_those_who_want_that(page: Any) -> None:
    page.locator("#speed > summary").click()
    duration = "() => getComputedStyle(document.querySelector('#bar > *')).transitionDuration"
    page.locator("#bar > *").first.wait_for(state="attached")
    assert page.evaluate(duration) != "0s"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(duration) == "0s"
    animated = "() => document.getAnimations().length"
    assert page.evaluate(animated) == 0


def test_on_a_touch_screen_enter_begins_a_line_and_no_keyboard_covers_the_reply(
    browser: Any, stub: PageStub
) -> None:
    for page in opened(browser, stub.url, PHONE, has_touch=True, is_mobile=True):
        field = page.get_by_role("textbox", name="Message")
        expect(field).not_to_be_focused()
        field.tap()
        field.press_sequentially("One")
        field.press("Enter")
        field.press_sequentially("two")
        page.get_by_role("button", name="Send").tap()
        wait_for_reply(page)
        assert stub.bodies[-1]["messages"][0]["content"] == "One\ntwo"
        expect(field).not_to_be_focused()
