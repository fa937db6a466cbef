"""What a person does on the page."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect


def send(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()


def wait_for_reply(page: Any, seconds: float = 60.0) -> str:
    """The last reply's text, once it is complete."""
    expect(page.locator("#status")).to_have_text("The reply is complete.", timeout=1000 * seconds)
    return str(page.locator("article.assistant .text").last.inner_text())


def ask(page: Any, text: str) -> str:
    send(page, text)
    return wait_for_reply(page)


def replies(page: Any) -> list[str]:
    return [it.inner_text() for it in page.locator("article.assistant .text").all()]


def open_chats(page: Any) -> None:
    """Show the list of chats, which a narrow screen hides."""
    button = page.get_by_role("button", name="Chats", exact=True)
    if button.is_visible() and button.get_attribute("aria-expanded") == "false":
        button.click()


def settings(page: Any, **fields: str) -> None:
    """Set fields of the chat's settings by their labels, spaces as underscores."""
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    for name in ("More of sampling", "Replies in JSON, tools"):
        dialog.get_by_text(name).click()
    for name, value in fields.items():
        field = dialog.locator(f"#set-{name}")
        if name == "think":
            field.select_option(value)
        else:
            field.fill(value)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_be_hidden()
