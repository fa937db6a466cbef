"""Replies as they come: reading told, stop, continue, thinking, schemas, tools, a server that goes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.serve.browser.conftest import opened
from tests.support.page import ask, replies, send, settings, wait_for_reply
from tests.support.page_stub import PROMPT_TOKENS, PageStub, Said

pytestmark = pytest.mark.slow

LONG = "".join(f"word{index} " for index in range(200))
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def cut_page(browser: Any, stub: PageStub, size: dict[str, int]) -> Iterator[Any]:
    """The page of a stub that a test kills."""
    yield from opened(browser, stub.url, size, may_complain=r"ERR_|Failed to load")


def test_reading_and_speed_are_told_in_the_quiet_line(page: Any, stub: PageStub) -> None:
    stub.replies = [Said(LONG, pace=0.05, reading=20)]
    send(page, "Hello?")
    line = page.locator("#line")
    expect(line).to_have_text(re.compile(rf"Reading [\d,]+ of {PROMPT_TOKENS:,} tokens · \d+ s left"))
    expect(page.get_by_role("progressbar", name="Prompt read")).to_be_visible()
    expect(line).to_have_text(
        re.compile(r"[\d.]+ tokens/s · \d+ tokens · 300 MB of memory, 200 MB on flash · 60 % of drafts")
    )
    page.get_by_role("button", name="Stop").click()
    expect(line).to_have_text(re.compile("^300 MB of memory"))
    page.locator("#speed > summary").press("Enter")
    for name in ("Budget", "Tokens a second", "Read from flash"):
        expect(page.get_by_role("img", name=re.compile(f"^{name} in the last two minutes"))).to_be_visible()
    for id, text in {"drafts": "60 of 100", "memory": "290 MB", "hits": re.compile(r"\d+ %")}.items():
        expect(page.locator(f"#{id}")).to_have_text(text)
    slider = page.get_by_role("slider", name="Memory budget")
    slider.press("End")
    expect(slider).to_have_attribute("aria-valuetext", "500 MB, all in memory")
    expect(line).to_have_text(re.compile("^500 MB, all in memory"))
    assert stub.budget_bytes == 500_000_000


def test_stop_keeps_what_was_written_and_continue_goes_on_behind_it(page: Any, stub: PageStub) -> None:
    stub.replies = [Said(LONG, pace=0.05), Said("and the end.")]
    send(page, "Hello?")
    text = page.locator("article.assistant .text")
    expect(text).to_contain_text("word2")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text("Stopped.")
    kept = text.inner_text()
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert text.inner_text() == kept
    page.get_by_role("button", name="Continue this reply").click()
    wait_for_reply(page)
    assert text.inner_text() == f"{kept}and the end." or text.inner_text() == f"{kept} and the end."
    body = stub.bodies[-1]
    assert body["continue_final_message"] is True
    assert [it["role"] for it in body["messages"]] == ["user", "assistant"]
    assert page.get_by_role("button", name="Continue this reply").count() == 0


def test_a_reply_that_its_length_cut_says_so(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("One two", reason="length")]
    settings(page, max_tokens="2")
    ask(page, "Hello?")
    expect(page.locator("article.assistant .facts")).to_contain_text(
        "cut at the length that the settings say"
    )
    expect(page.get_by_role("button", name="Continue this reply")).to_be_visible()


def test_a_killed_server_is_told_and_the_reply_goes_on_once_it_is_back(cut_page: Any, stub: PageStub) -> None:
    page = cut_page
    stub.replies = [Said(LONG, pace=0.05), Said("the rest.")]
    send(page, "Hello?")
    expect(page.locator("article.assistant .text")).to_contain_text("word2")
    stub.kill()
    expect(page.locator("#line")).to_contain_text("The server isn't reached.")
    expect(page.locator("#status")).to_have_text("The server isn't reached.")
    stub.start()
    wait_for_reply(page)
    assert re.fullmatch(r"(word\d+ )+(w|wo|wor|word\d*)? ?the rest\.", replies(page)[-1])
    assert stub.bodies[-1]["continue_final_message"] is True
    expect(page.locator("#line")).to_contain_text("300 MB of memory")


def test_a_question_to_a_server_that_is_gone_waits_for_it_and_can_be_stopped(
    cut_page: Any, stub: PageStub
) -> None:
    page = cut_page
    stub.kill()
    send(page, "Hello?")
    expect(page.locator("#status")).to_have_text("The server isn't reached.")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    stub.start()
    page.get_by_role("button", name="Regenerate this reply").click()
    assert wait_for_reply(page) == "Hello there."
    # Nothing came before, so there is no other version.
    assert page.locator(".branches").count() == 0


def test_thinking_is_folded_and_turned_off(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("Forty-two.", thinking="Let me **see**.")]
    ask(page, "Hello?")
    thinking = page.locator("details.thinking")
    expect(thinking.locator("div")).to_be_hidden()
    thinking.locator("summary").click()
    expect(thinking.locator("strong")).to_have_text("see")
    assert "chat_template_kwargs" not in stub.bodies[-1]
    settings(page, think="off")
    ask(page, "Again?")
    assert stub.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert stub.bodies[-1]["messages"][1]["reasoning_content"] == "Let me **see**."


def test_settings_are_the_chats_own_and_go_into_its_requests(page: Any, stub: PageStub) -> None:
    ask(page, "Hello?")
    assert not {"temperature", "max_tokens", "seed"} & set(stub.bodies[-1])
    page.get_by_role("button", name="Settings").click()
    # The model's defaults are seen.
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "0.7")
    page.get_by_role("button", name="Cancel").click()
    settings(page, system="Be brief.", temperature="0.2", top_k="5", max_tokens="40", seed="7")
    expect(page.get_by_role("button", name="Settings (5)")).to_be_visible()
    page.reload()
    page.locator("body[data-ready]").wait_for()
    ask(page, "Again?")
    body = stub.bodies[-1]
    assert {name: body[name] for name in ("temperature", "top_k", "max_tokens", "seed")} == {
        "temperature": 0.2,
        "top_k": 5,
        "max_tokens": 40,
        "seed": 7,
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_role("button", name=re.compile("^Settings")).click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_role("button", name="Save").click()
    # The browser says what is wrong with the number.
    assert page.evaluate("document.getElementById('set-temperature').validity.rangeOverflow")
    expect(page.get_by_role("dialog")).to_be_visible()


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"age": 3}', "Obeys the schema."),
        ('{"age": -1}', "Doesn't obey the schema: /age is below 0."),
        ('{"name": 1}', "Doesn't obey the schema: the reply lacks age."),
        ("three", "Doesn't obey the schema: it is no JSON."),
    ],
)
def test_a_reply_is_checked_against_its_schema(page: Any, stub: PageStub, reply: str, verdict: str) -> None:
    stub.replies = [Said(reply)]
    settings(page, schema=json.dumps(SCHEMA))
    ask(page, "How old?")
    assert stub.bodies[-1]["response_format"]["json_schema"]["schema"] == SCHEMA
    expect(page.locator("article.assistant .foot")).to_contain_text(verdict)


def test_a_faulty_schema_and_faulty_tools_are_told_before_they_are_kept(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Replies in JSON, tools").click()
    for field, text, fault in (("schema", "[1]", "no JSON object"), ("tools", "{}", "JSON list")):
        dialog.locator(f"#set-{field}").fill(text)
        dialog.get_by_role("button", name="Save").click()
        expect(dialog.get_by_role("alert")).to_contain_text(fault)
        dialog.locator(f"#set-{field}").fill("")


def test_calls_of_tools_are_cards_whose_results_are_sent(page: Any, stub: PageStub) -> None:
    stub.replies = [
        Said(
            "", calls=(("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')), reason="tool_calls"
        ),
        Said("Cold there, warm here."),
    ]
    settings(page, tools=json.dumps([TOOL]))
    ask(page, "Weather?")
    assert stub.bodies[-1]["tools"] == [TOOL]
    cards = page.get_by_role("region", name="Call of weather")
    expect(cards).to_have_count(2)
    expect(cards.first.locator("pre")).to_have_text('{\n  "city": "Oslo"\n}')
    for index, result in enumerate(("-3 C", "21 C")):
        page.get_by_role("textbox", name="Result of weather").nth(index).fill(result)
    page.get_by_role("button", name="Send results").click()
    assert wait_for_reply(page) == "Cold there, warm here."
    messages = stub.bodies[-1]["messages"]
    assert [it["id"] for it in messages[1]["tool_calls"]] == ["call0", "call1"]
    assert [(it["role"], it["content"], it["tool_call_id"]) for it in messages[2:]] == [
        ("tool", "-3 C", "call0"),
        ("tool", "21 C", "call1"),
    ]
