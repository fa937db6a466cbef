"""Where the `ondevice` command begins: quiet under an interrupt while it still imports, streams open."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from ondevice.errors import INTERRUPTED


def main() -> NoReturn:
    """The installed command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _open_closed_streams()
    from ondevice import cli

    code = cli.run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # All is done but the interpreter's own clean-up.
    sys.exit(code)


def _open_closed_streams() -> None:
    """A stream that the caller closed is empty or leads nowhere.

    Its descriptor has to be taken, or the next file opened would get it, and what is printed with it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    main()
