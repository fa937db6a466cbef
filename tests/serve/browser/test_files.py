"""Files dropped into the prompt: their size in tokens, what goes into the request, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.page import send, wait_for_reply
from tests.support.page_stub import PageStub

pytestmark = pytest.mark.slow

DROP = """(text) => {
    const data = new DataTransfer();
    data.items.add(new File([text], "notes.md"));
    for (const kind of ["dragover", "drop"]) {
        const event = new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
        document.querySelector("main").dispatchEvent(event);
    }
}"""


def test_a_dropped_file_goes_into_the_prompt_with_its_size(page: Any, stub: PageStub) -> None:
    page.evaluate(DROP, "Some ```fenced``` text.\n")
    chip = page.locator("#files li")
    expect(chip).to_contain_text("notes.md 10 tokens")
    expect(page.locator("#size")).to_have_text("10 of 8,192 tokens of context")
    send(page, "What does it say?")
    wait_for_reply(page)
    content = stub.bodies[-1]["messages"][0]["content"]
    assert content == "notes.md:\n````\nSome ```fenced``` text.\n````\n\nWhat does it say?"
    expect(chip).to_have_count(0)
    file = page.locator("article.user details.file")
    expect(file.locator("summary")).to_have_text("notes.md (10 tokens)")
    file.locator("summary").click()
    expect(file.locator("pre")).to_have_text("Some ```fenced``` text.\n")


def test_what_is_too_large_says_by_how_much_and_is_not_sent(page: Any, stub: PageStub) -> None:
    stub.context = 1000
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(page.locator("#line")).to_contain_text("300 MB")
    page.evaluate(DROP, "x" * 8000)
    expect(page.locator("#files li")).to_contain_text("2,004 tokens, 1,004 too many")
    send(page, "Read it.")
    expect(page.locator("#ask-error")).to_contain_text("tokens more than the context of 1,000 has room for")
    assert stub.bodies == []
    page.get_by_role("button", name="Leave out notes.md").click()
    send(page, "Never mind.")
    assert wait_for_reply(page)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"\x89PNG\x00\x01", "no text"), (b"x" * 1_600_000, "100 kB more than a request holds")],
    ids=["binary", "large"],
)
def test_files_that_no_request_can_hold_are_refused(
    page: Any, stub: PageStub, tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    page.locator("#attach-file").set_input_files(path)
    expect(page.locator("#ask-error")).to_contain_text(fault)
    expect(page.locator("#files li")).to_have_count(0)
