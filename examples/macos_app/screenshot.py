"""Makes `screenshot.png`: the app as it runs here, a conversation in it, and its window as Toga sees it.

python examples/macos_app/screenshot.py [FILE]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from ondevice_chat.app import ChatApp
from ondevice_chat.folders import Folders

LINES = (
    "I'm looking for a cheap Italian restaurant in Oakland.",
    "What is their phone number?",
    "Great, please book a table for two at 6 pm.",
)


class Pictured(ChatApp):
    """The app, with somebody who moves the slider, types, takes the picture and leaves."""

    file = Path(__file__).with_name("screenshot.png")

    async def on_running(self) -> None:
        await super().on_running()
        plan = self.chat.plan
        if plan is None:
            raise SystemExit(self.chat.notice)
        self.slider.value = plan.minimum_budget_bytes
        for line in LINES:
            self.entry.value = line
            await self.send(self.entry)
        await asyncio.sleep(1)  # The window draws when the loop is idle.
        self.main_window.as_image().save(self.file)
        self.request_exit()


def main() -> None:
    """Run the app in a home of its own until the picture is taken."""
    if sys.argv[1:]:
        Pictured.file = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as home:
        Pictured(Folders(Path(home))).main_loop()


if __name__ == "__main__":
    main()
