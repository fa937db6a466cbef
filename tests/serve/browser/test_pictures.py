"""The pictures of docs/serve.md: Qwen2.5-Coder-0.5B in less memory than it has weights.

PYTHONPATH=weights/real python -m tests.serve.browser.test_pictures     # into docs/pictures
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("playwright")

from playwright.sync_api import expect

import ondevice
from ondevice.api import load
from tests.serve.browser.conftest import PHONE, chromium, opened
from tests.support.page import send, settings, wait_for_reply
from tests.support.paths import ROOT
from tests.support.real_models import real_model
from tests.support.serving import serving

pytestmark = [pytest.mark.slow, pytest.mark.real]

MAX_PICTURE_BYTES = 100_000
QUESTION = (
    "Compare lists and tuples of Python in a table of three rows, then show one line of each. Be brief."
)
STORY = "The river ran from the hills to the sea, and every village on its way had a mill. " * 150


def desk(page: Any) -> None:
    """A reply with code in it, and what the line opens to."""
    send(page, QUESTION)
    wait_for_reply(page, 300)
    page.locator("#speed > summary").click()
    expect(page.get_by_role("img").first).to_be_visible()
    page.wait_for_timeout(1000)
    page.locator("#message").blur()


def phone(page: Any) -> None:
    """A file that is read."""
    page.locator("#attach-file").set_input_files(
        {"name": "story.txt", "mimeType": "text/plain", "buffer": STORY.encode()}
    )
    expect(page.locator("#files li")).to_have_count(1)
    send(page, "What had every village?")
    expect(page.locator("#line")).to_contain_text("s left", timeout=60_000)


PICTURES: dict[str, tuple[Callable[[Any], None], dict[str, int], str]] = {
    "page.png": (desk, {"width": 1000, "height": 680}, "light"),
    "page_narrow_dark.png": (phone, PHONE, "dark"),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served(tmp_path_factory.mktemp("pictures"))


def served(folder: Path) -> Iterator[str]:
    """The address of a server with three quarters of what the model's weights want."""
    bundle = ondevice.convert(real_model("qwen2.5-coder-0.5b"), folder / "qwen2.5-coder-0.5b")
    plan = ondevice.inspect(bundle, max_context=4096)
    budget = (plan.minimum_budget_bytes + plan.full_bytes) // 2
    with serving(load(bundle, dram_budget=budget, max_context=4096)) as server:
        yield server.url


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_made_and_small(browser: Any, url: str, name: str, tmp_path: Path) -> None:
    take(browser, url, name, tmp_path)
    assert 10_000 < (tmp_path / name).stat().st_size < MAX_PICTURE_BYTES
    assert (ROOT / "docs" / "pictures" / name).stat().st_size < MAX_PICTURE_BYTES


def take(browser: Any, url: str, name: str, folder: Path) -> None:
    act, size, colours = PICTURES[name]
    for page in opened(browser, url, size):
        page.emulate_media(color_scheme=colours)
        settings(page, temperature="0", max_tokens="300")
        act(page)
        page.screenshot(path=folder / name)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for url in served(Path(folder)):
            for browser in chromium():
                for name in PICTURES:
                    take(browser, url, name, ROOT / "docs" / "pictures")


if __name__ == "__main__":
    main()
