"""Chats: kept, named, searched, exported, imported, deleted; branches of questions and replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.page import ask, open_chats, replies, send, wait_for_reply
from tests.support.page_stub import PageStub, Said

pytestmark = pytest.mark.slow


def names(page: Any) -> list[str]:
    open_chats(page)
    return [it.inner_text() for it in page.locator("#chat-list .chat-name").all()]


def begin(page: Any, text: str) -> None:
    """A new chat with one question."""
    open_chats(page)
    page.get_by_role("button", name="New chat", exact=True).click()
    ask(page, text)


def download(page: Any, press: Any) -> Path:
    with page.expect_download() as waiting:
        press()
    return Path(waiting.value.path())


def test_chats_are_named_kept_searched_and_deleted(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("About **pears**."), Said("About plums.")]
    ask(page, "Tell me about the first of all fruits that ever grew in a garden anywhere")
    begin(page, "And a second?")
    first = "Tell me about the first of all fruits that ever…"
    assert names(page) == ["And a second?", first]
    page.reload()
    page.locator("body[data-ready]").wait_for()
    # This tab's chat is shown again.
    assert replies(page) == ["About plums."]
    assert len(names(page)) == 2
    page.get_by_role("searchbox").fill("PEARS")
    assert names(page) == [first]
    page.get_by_role("button", name=first, exact=True).click()
    assert replies(page) == ["About pears."]
    open_chats(page)
    page.get_by_label(f"More about {first}").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_role("searchbox").fill("")
    assert names(page) == ["And a second?"]
    expect(page.locator("article")).to_have_count(0)


def test_an_edited_question_and_a_regenerated_reply_are_branches_that_stay(page: Any, stub: PageStub) -> None:
    stub.replies = [Said(f"Reply {index}.") for index in range(1, 6)]
    ask(page, "One?")
    page.get_by_role("button", name="Regenerate this reply").click()
    expect(page.locator("article.assistant .text")).to_have_text("Reply 2.")
    wait_for_reply(page)
    ask(page, "Two?")
    assert replies(page) == ["Reply 2.", "Reply 3."]
    page.get_by_role("button", name="Edit this question").first.click()
    field = page.get_by_role("textbox", name="The question")
    expect(field).to_be_focused()
    field.fill("Uno?")
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator("article.assistant .text")).to_have_text("Reply 4.")
    wait_for_reply(page)
    assert [it["content"] for it in stub.bodies[-1]["messages"]] == ["Uno?"]
    # Back to the first question: its newer reply, and what followed.
    page.get_by_role("button", name="Show the version before").first.click()
    assert replies(page) == ["Reply 2.", "Reply 3."]
    page.locator("article.assistant").first.get_by_role("button", name="Show the version before").click()
    assert replies(page) == ["Reply 1."]
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert replies(page) == ["Reply 1."]
    send(page, "And then?")
    expect(page.locator("article.assistant .text").last).to_have_text("Reply 5.")
    assert [it["content"] for it in stub.bodies[-1]["messages"]] == ["One?", "Reply 1.", "And then?"]


def test_exported_chats_come_back(page: Any, stub: PageStub, tmp_path: Path) -> None:
    stub.replies = [Said("First."), Said("Second.")]
    ask(page, "Question?")
    page.get_by_role("button", name="Regenerate this reply").click()
    expect(page.locator("article.assistant .text")).to_have_text("Second.")
    wait_for_reply(page)
    open_chats(page)
    path = download(page, page.get_by_role("button", name="Export all").click)
    content = json.loads(path.read_text())
    assert sorted(it["content"] for it in content["chats"][0]["messages"].values()) == [
        "First.",
        "Question?",
        "Second.",
    ]
    page.get_by_label("More about Question?").click()
    markdown = download(page, page.get_by_role("button", name="Export as Markdown").click).read_text()
    assert markdown == "# Question?\n\n## You\n\nQuestion?\n\n## Model\n\nSecond.\n"
    page.get_by_label("More about Question?").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    file = tmp_path / "chats.json"
    file.write_text(path.read_text())
    open_chats(page)
    # The second time it is there already.
    for added in (1, 0):
        page.locator("#import-file").set_input_files(file)
        expect(page.locator("#chats-fault")).to_have_text(f"{added} of chats.json added.")
    page.get_by_role("button", name="Question?", exact=True).click()
    page.get_by_role("button", name="Show the version before").click()
    assert replies(page) == ["First."]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("no json", "is no JSON"),
        ('{"chats": []}', "holds no chats"),
        ('{"format": "ondevice-chats", "version": 9, "chats": []}', "version 9"),
        ('{"format": "ondevice-chats", "version": 1, "chats": [{"id": "x"}]}', "no chat"),
        (
            '{"format": "ondevice-chats", "version": 1,"chats": [{"id": "", "messages": {"a": {}}}]}',
            "no message",
        ),
    ],
)
def test_a_file_that_holds_no_chats_is_refused_and_adds_nothing(
    page: Any, tmp_path: Path, content: str, fault: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#chats-fault")).to_contain_text(fault)
    assert names(page) == []


def test_a_chat_that_two_tabs_write_keeps_what_both_wrote(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("First."), Said("From the other tab."), Said("From this tab."), Said("Last.")]
    ask(page, "Question?")
    other = page.context.new_page()
    other.goto(stub.url)
    open_chats(other)
    other.get_by_role("button", name="Question?", exact=True).click()
    ask(other, "More?")
    other.close()
    ask(page, "And?")
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert replies(page) == ["First.", "From this tab."]
    page.locator("article.user").last.get_by_role("button", name="Show the version before").click()
    assert replies(page) == ["First.", "From the other tab."]


def test_a_reply_of_a_model_that_takes_no_chances_is_regenerated_warmer(page: Any, stub: PageStub) -> None:
    stub.temperature = 0.0
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(page.locator("#model option")).to_have_count(2, timeout=5000)
    ask(page, "Question?")
    page.get_by_role("button", name="Regenerate this reply").click()
    expect(page.locator(".branches").last).to_contain_text("2/2")
    assert [body.get("temperature") for body in stub.bodies] == [None, 0.7]
    expect(page.locator("article.assistant .facts")).to_contain_text("at temperature 0.7")


def test_settings_that_are_broken_fail_at_once(page: Any, stub: PageStub, tmp_path: Path) -> None:
    """A file can bring what the dialog wouldn't take."""
    message = {"id": "m", "parent": "", "role": "user", "content": "Question?", "made": 1}
    chat = {
        "id": "c",
        "settings": {"schema": "{", "constructor": "x"},
        "leaf": "m",
        "messages": {"m": message},
    }
    file = tmp_path / "broken.json"
    file.write_text(json.dumps({"format": "ondevice-chats", "version": 1, "chats": [chat]}))
    page.locator("#import-file").set_input_files(file)
    open_chats(page)
    page.get_by_role("button", name="Question?", exact=True).click()
    send(page, "And?")
    expect(page.locator("#status")).to_have_text("The reply failed.")
    expect(page.locator("article.assistant .wrong")).to_contain_text("JSON")
    assert stub.bodies == []
