"""Where the app begins: the window, or with `--doctor` the self-test of the runtime inside this very app."""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Show the window until it is closed."""
    if "--doctor" in sys.argv[1:]:
        sys.argv = ["ondevice", "doctor", *(word for word in sys.argv[1:] if word != "--doctor")]
        runpy.run_module("ondevice", run_name="__main__")
        return
    from ondevice_chat.app import ChatApp

    ChatApp().main_loop()


if __name__ == "__main__":
    main()
