"""Make the pictures of the page in docs/serve.md: a server of the model that ships, and headless Chromium.

    .venv/bin/python docs/tools/screenshots.py

It needs Debian's `chromium`, and `playwright` of the extra `test`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
QUESTION = "Find me a restaurant in San Jose."


def main() -> None:
    found = shutil.which("chromium")
    if found is None:
        sys.exit("there is no chromium on the path")
    started = [sys.executable, "-m", "ondevice", "serve", "--port", "0", "--dram-budget", "95MB"]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stderr is not None
        events = (json.loads(line) for line in server.stderr if line.startswith("{"))
        url = next(event["url"] for event in events if event["event"] == "listening")
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=found, args=arguments)
        take(browser, url, PICTURES / "page.png", "light", (1000, 640))
        take(browser, url, PICTURES / "page_narrow_dark.png", "dark", (390, 640))
        browser.close()
        server.terminate()


def take(browser: Browser, url: str, picture: Path, colours: str, size: tuple[int, int]) -> None:
    """A picture of the page behind a short chat, with its panel open."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.emulate_media(color_scheme="dark" if colours == "dark" else "light")
    page.goto(url)
    expect(page.locator("#memory")).not_to_have_text("-")
    for text in (QUESTION, "I would like some Thai food."):
        page.get_by_role("textbox", name="Message").fill(text)
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("The reply is complete.", timeout=60_000)
    if page.locator("#panel").get_attribute("open") is None:
        page.locator("#panel summary").click()
    expect(page.locator("#rate")).not_to_have_text("0.0")
    page.screenshot(path=picture)
    page.close()


if __name__ == "__main__":
    main()
