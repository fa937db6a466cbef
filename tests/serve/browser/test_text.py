"""What replies look like: Markdown, code, formulas, other scripts; hostile and long text; its speed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.serve.browser.hostile import cases
from tests.support.page import ask, open_chats, send, wait_for_reply
from tests.support.page_stub import PageStub, Said
from tests.support.serving import until

pytestmark = pytest.mark.slow

MARKDOWN = r"""# Title
A **bold**, *leaning* and ***strong*** text with `code`, [a link](https://example.com/a_(b)), ~~gone~~,
snake_case_words, $5 and $10, and <b>no markup</b> [bad](javascript:alert(1)) ![picture](https://example.com/p.png)

- one
  1. inner
- [x] two

> quoted **text**

| a | b |
|:-:|--:|
| 1 | `2|3` |
| Donaudampfschifffahrtsgesellschaftskapitän internationalisation incomprehensibilities | x<br>y |

```python
def add(a):  # sums
    return a + 1
```

The root is $x_1 = \frac{-b \pm \sqrt{b^2-4ac}}{2a}$.

\[
\sum_{k=1}^n k = \begin{cases} 1 & \text{if } n = 1 \\ \dots \end{cases}
\]

مرحبا **بالعالم** و English.

这是一个**重要**的句子。
"""
DRAW = """async ([text, step]) => {
    const { render } = await import("/page/markdown.js");
    const article = document.createElement("article");
    const target = document.createElement("div");
    target.className = "text";
    article.append(target);
    document.getElementById("log").append(article);
    for (let at = 0; step && at < text.length; at += step) render(target, text.slice(0, at), true);
    render(target, text);
    return target.outerHTML;
}"""


def chat_file(folder: Path, turns: int, words: int) -> Path:
    """An exported chat of so many questions and replies, each of so many words."""
    messages, parent = {}, ""
    for at in range(2 * turns):
        text = f"**Turn {at}.** " + " ".join(f"word{index}" for index in range(words)) + "\n\n- a\n- b\n"
        role = "assistant" if at % 2 else "user"
        messages[f"m{at}"] = {
            "id": f"m{at}",
            "parent": parent,
            "role": role,
            "content": text,
            "made": at,
            "reason": "stop",
        }
        parent = f"m{at}"
    chat = {"id": "long", "changed": 1, "settings": {}, "leaf": parent, "messages": messages}
    path = folder / "long.json"
    path.write_text(json.dumps({"format": "ondevice-chats", "version": 1, "chats": [chat]}))
    return path


def import_chat(page: Any, path: Path) -> None:
    page.locator("#import-file").set_input_files(path)
    expect(page.locator("#chats-fault")).to_contain_text("1 of")
    open_chats(page)
    page.locator("#chat-list .chat-name").first.click()


@pytest.mark.parametrize("step", [0, 3])
def test_markdown_is_drawn_and_markup_stays_text(page: Any, step: int) -> None:
    """At once, and as it comes, which ends the same."""
    page.evaluate(DRAW, [MARKDOWN, step])
    text = page.locator("article .text").last
    for place, shown in {
        "h4": "Title",
        "strong >> nth=0": "bold",
        "strong em": "strong",
        "del": "gone",
        "ul > li > ol > li": "inner",
        "li.task": "☑ two",
        "blockquote strong": "text",
        "td code": "2|3",
        "pre": "def add(a):  # sums\n    return a + 1",
        ".code-keyword >> nth=0": "def",
        ".code-name": "add",
        ".code-comment": "# sums",
        "figcaption >> nth=0": "pythonCopy",
        "msqrt": "b2\u22124ac",
        "mtd >> nth=1": "if\u00a0n=1",
    }.items():
        expect(text.locator(place)).to_have_text(shown)
    links = [it.get_attribute("href") for it in text.locator("a").all()]
    assert links == ["https://example.com/a_(b)", "https://example.com/p.png"]
    assert text.locator("img, script, b").count() == 0
    words = text.inner_text()
    assert "snake_case_words" in words
    assert "$5 and $10" in words
    arabic = text.locator("p", has_text="مرحبا")
    assert arabic.evaluate("it => getComputedStyle(it).direction") == "rtl"
    expect(arabic.locator("strong")).to_have_text("بالعالم")
    expect(text.locator("p", has_text="这是").locator("strong")).to_have_text("重要")


def test_tables_scroll_and_words_stay_whole(page: Any) -> None:
    page.evaluate(DRAW, [MARKDOWN, 0])
    scroller = page.get_by_role("group", name="Table")
    is_wide = "it => it.scrollWidth > it.clientWidth"
    assert scroller.evaluate(is_wide) == (page.viewport_size["width"] < 600)
    lines = """it => {
        const range = document.createRange();
        const node = it.firstChild;
        range.setStart(node, 0);
        range.setEnd(node, node.data.indexOf(" "));
        return range.getClientRects().length;
    }"""
    assert scroller.locator("td", has_text="Donau").evaluate(lines) == 1
    assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_code_and_replies_are_copied(page: Any, stub: PageStub) -> None:
    stub.replies = [Said(MARKDOWN)]
    ask(page, "Hello?")
    page.get_by_role("button", name="Copy this python").click()
    assert page.evaluate("navigator.clipboard.readText()") == "def add(a):  # sums\n    return a + 1"
    page.get_by_role("button", name="Copy this reply").click()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    page.get_by_role("button", name="Copy this question").click()
    assert page.evaluate("navigator.clipboard.readText()") == "Hello?"


def test_a_hostile_reply_of_500_cases_runs_no_script(page: Any, stub: PageStub, tmp_path: Path) -> None:
    """Nor does a question, a file's name or a chat's title. The fixture sees requests and blocks."""
    page.on("dialog", lambda it: pytest.fail(f"a dialog: {it.message}"))
    hostile = "\n\n".join(case.encode("utf-8", "replace").decode() for case in cases())
    stub.replies = [Said(hostile, thinking=hostile, piece_chars=997)]
    file = tmp_path / "<img src=x onerror=window.ran=1>.txt"
    file.write_text(hostile.replace("\0", ""))
    stub.context = 10**6
    page.locator("#attach-file").set_input_files(file)
    expect(page.locator("#files li")).to_have_count(1)
    ask(page, hostile[:30_000])
    # One by one too, at once and in steps, so that no case hides another.
    for case in cases():
        for step in (0, 40) if len(case) < 400 else (0,):
            page.evaluate(DRAW, [case.encode("utf-8", "replace").decode(), step])
    assert page.evaluate("window.ran") is None
    faults = page.evaluate(
        """() => [...document.querySelectorAll("main *, nav *")].filter((it) =>
            it.closest(".text, .thinking, nav, #files") && (
                /^(script|img|iframe|svg|style|link|meta|base|object|embed|form|input|video|template)$/i.test(it.localName)
                    && !it.closest("nav")
                || [...it.attributes].some((at) => /^on|^style$|^srcdoc$/.test(at.name))
                || (it.localName === "a" && !/^(https?|mailto):/.test(it.protocol + ":"))
            )).map((it) => it.outerHTML.slice(0, 100))"""
    )
    assert faults == []


@pytest.mark.parametrize(
    "piece",
    [
        "*a ",
        "**a",
        "`a``",
        "[a](",
        "> ",
        "- ",
        "|a",
        "``` ",
        "_a_",
        "http://h",
        "#",
        "$a ",
        "$$",
        "\\[",
        "\\frac{",
        "<br",
        "a|`\n",
    ],
)
def test_no_text_takes_the_page_long(page: Any, piece: str) -> None:
    text = piece * (40_000 // len(piece))
    taken = page.evaluate(
        """async text => {
            const { render } = await import("/page/markdown.js");
            const begun = performance.now();
            render(document.createElement("div"), text);
            render(document.createElement("div"), text, true);
            render(document.createElement("div"), text.replaceAll(" ", "\\n"));
            return performance.now() - begun;
        }""",
        text,
    )
    assert taken < 3000


def test_text_comes_without_flicker_at_100_tokens_a_second_in_20000_tokens(
    page: Any, stub: PageStub, tmp_path: Path
) -> None:
    """No frame is late, text shrinks by no more than a mark, and blocks that are complete stay."""
    import_chat(page, chat_file(tmp_path, turns=20, words=400))
    stub.replies = [Said(MARKDOWN.replace("[bad](javascript:alert(1))", "") * 3, pace=0.01)]
    page.evaluate(
        """() => {
            window.frames_ = [];
            window.shrunk = 0;
            let before = performance.now();
            let length = 0;
            let article = null;
            const frame = (now) => {
                window.frames_.push(now - before);
                before = now;
                const text = document.querySelector('article[aria-busy="true"] .text');
                if (text && text === article) {
                    window.shrunk = Math.max(window.shrunk, length - text.textContent.length);
                    window.first ||= text.children[1] && text.firstChild;
                    window.stays = window.first === undefined || window.first === text.firstChild;
                }
                article = text;
                length = text ? text.textContent.length : 0;
                requestAnimationFrame(frame);
            };
            requestAnimationFrame(frame);
        }"""
    )
    send(page, "Hello?")
    wait_for_reply(page)
    frames = page.evaluate("window.frames_")
    assert statistics.quantiles(frames, n=20)[-1] < 100
    assert page.evaluate("window.stays")
    # A mark of two characters, or an address that turns into its link.
    assert page.evaluate("window.shrunk") <= 30
    assert (
        page.evaluate(
            "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))"
        )
        < 60
    )


def test_a_reader_who_scrolls_up_is_left_there(page: Any, stub: PageStub) -> None:
    stub.replies = [Said("word and\n\n" * 300, pace=0.01, piece_chars=20)]
    send(page, "Hello?")
    log = page.locator("#log")
    until(lambda: log.evaluate("it => it.scrollTop") > 200)
    log.evaluate("it => { it.scrollTop = 50; }")
    page.wait_for_timeout(500)
    assert log.evaluate("it => it.scrollTop") == 50
    page.get_by_role("button", name="To the end").click()
    page.wait_for_timeout(300)
    assert log.evaluate("it => it.scrollHeight - it.scrollTop - it.clientHeight") < 60


def test_a_key_takes_less_than_100_ms_in_a_chat_of_200_turns(page: Any, tmp_path: Path) -> None:
    import_chat(page, chat_file(tmp_path, turns=200, words=60))
    expect(page.locator("article")).to_have_count(400)
    page.evaluate(
        """() => {
            window.keys = [];
            document.addEventListener("keydown", () => {
                const begun = performance.now();
                requestAnimationFrame(() => setTimeout(() => window.keys.push(performance.now() - begun)));
            }, true);
        }"""
    )
    field = page.get_by_role("textbox", name="Message")
    field.press_sequentially("How long does a key take?", delay=30)
    until(lambda: page.evaluate("window.keys.length") >= 25)
    assert statistics.quantiles(page.evaluate("window.keys"), n=20)[-1] < 100
