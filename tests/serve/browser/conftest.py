"""A headless Chromium, the page in it at a phone's and a desk's width, and what stands behind it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from playwright.sync_api import sync_playwright

from tests.support.page_stub import PageStub

PHONE, DESK = {"width": 390, "height": 780}, {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. While Playwright runs, no test of the process can run an event loop of its own."""
    yield from chromium()


def chromium() -> Iterator[Any]:
    """The system's Chromium, as the one that Playwright knows would have to be downloaded."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    # Its sandbox refuses to run for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[PageStub]:
    stub = PageStub()
    stub.start()
    yield stub
    stub.kill()


@pytest.fixture(params=[PHONE, DESK], ids=["phone", "desk"])
def size(request: pytest.FixtureRequest) -> dict[str, int]:
    return dict(request.param)


@pytest.fixture
def page(browser: Any, stub: PageStub, size: dict[str, int]) -> Iterator[Any]:
    """The page of the stub."""
    yield from opened(browser, stub.url, size)


def opened(
    browser: Any, url: str, size: dict[str, int], may_complain: str = r"(?!)", **device: Any
) -> Iterator[Any]:
    """The page, loaded. Whatever its scripts complain of is an error, and so are requests to others.

    may_complain: a pattern of complaints that a test brings about. device: of the browser's context.
    """
    context = browser.new_context(viewport=size, permissions=["clipboard-read", "clipboard-write"], **device)
    page, complaints, origins = context.new_page(), [], set()
    page.set_default_timeout(6_000)
    page.on("console", lambda it: complaints.append(it.text) if it.type in ("error", "warning") else None)
    page.on("pageerror", lambda it: complaints.append(str(it)))
    page.on("request", lambda it: origins.add(re.match(r"(\w+:)(//[^/]*)?", it.url)[0]))
    page.goto(url)
    page.locator("body[data-ready]").wait_for()
    yield page
    context.close()
    assert [it for it in complaints if not re.search(may_complain, it)] == []
    assert origins - {"blob:"} == {url}
