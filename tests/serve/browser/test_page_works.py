"""The page works: the one browser test that is fast."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.support.page import ask
from tests.support.page_stub import PageStub, Said


def test_a_question_is_answered_and_both_are_kept(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("Some **bold** text.", thinking="Hm.", reading=2)]
    assert ask(page, "Hello?") == "Some bold text."
    expect(page.locator("article.assistant strong")).to_have_text("bold")
    page.reload()
    expect(page.locator("article.user .text")).to_have_text("Hello?")
    expect(page.locator("article.assistant .text")).to_have_text("Some bold text.")
