"""Entry point of the `ondevice` command. Ctrl-C during the imports ends it quietly, with no traceback."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from ondevice.errors import INTERRUPTED, START_AGAIN


def main() -> NoReturn:
    """Run the installed command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _open_closed_streams()
    code = _as_rank()
    if code is None:
        from ondevice import cli

        code = cli.run(sys.argv[1:])
        if code != START_AGAIN:
            cli.leave_ranks(code)
    if code == START_AGAIN:
        os.execv(sys.executable, sys.orig_argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the interpreter's clean-up is left.
    sys.exit(code)


def _as_rank() -> int | None:
    """Run this process as one of several ranks, if its options or environment say so.

    Returns the exit code of a supervisor, None in a process that runs the command.
    """
    from ondevice.distributed.place import VARIABLES

    if not VARIABLES & os.environ.keys():
        return None
    from ondevice.distributed.ranks import take_place

    return take_place()


def _open_closed_streams() -> None:
    """Point each standard stream that the caller closed at the null device.

    Otherwise the next file opened would get its descriptor, and receive what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    main()
