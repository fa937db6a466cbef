"""Takes a process's place among the ranks: an engine, a supervisor, or neither."""

from __future__ import annotations

import os
import sys

from ondevice.distributed.place import CHILD, COMMANDS, FRONT, find_place
from ondevice.errors import OndeviceError


def take_place() -> int | None:
    """Act as this process's place among the ranks requires.

    A supervisor runs here until the end; returns its exit code. An engine connects to its supervisor; returns
    None, as in a process that is neither.
    """
    from ondevice.distributed.supervisor import say, supervise

    try:
        if CHILD in os.environ:
            from ondevice.distributed.member import join

            join(os.environ[CHILD])
            return None
        if FRONT in os.environ:
            from ondevice.distributed.launch import launch

            return launch(os.environ[FRONT])
        command = next((each for each in sys.argv[1:] if not each.startswith("-")), "")
        if command not in COMMANDS:
            return None
        place = find_place(os.environ)
        return None if place is None else supervise(place)
    except OndeviceError as error:
        say(f"error: {error.for_command_line}")
        return error.exit_code
