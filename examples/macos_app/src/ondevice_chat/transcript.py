"""The conversation on disk: saved after every reply, restored at the start, set aside where it can't be read.

The format is that of `Session.save`, which replaces the file in one step. Nothing here is fatal: every
function returns what went wrong in words, or nothing. It knows no model and no widget.
"""

from __future__ import annotations

import time
from pathlib import Path

import ondevice


def restore(session: ondevice.Session, path: Path) -> str:
    """Continue the conversation that the file holds, if there is one."""
    try:
        if path.exists():
            session.load(path)
    except ondevice.UsageError as error:
        return (
            set_aside(path, "damaged") or f"The last conversation can't be read and was set aside: {error}."
        )
    except (ondevice.OndeviceError, OSError) as error:
        return f"The last conversation wasn't restored: {error}."
    return ""


def save(session: ondevice.Session, path: Path) -> str:
    """Replace the file with the conversation as it stands."""
    try:
        session.save(path)
    except ondevice.OndeviceError as error:
        return f"Not saved: {error}."
    return ""


def set_aside(path: Path, reason: str) -> str:
    """Rename the file, if it is there, so that the next conversation doesn't replace it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        path.rename(path.with_name(f"{path.stem}-{reason}-{stamp}{path.suffix}"))
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{path} can't be set aside ({error.strerror})."
    return ""
