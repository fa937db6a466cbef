"""App Nap held off: macOS slows an app whose window is hidden, and a reply should go on meanwhile.

It knows nothing of replies. Where there is no App Nap it does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# NSActivityUserInitiatedAllowingIdleSystemSleep: no App Nap, but the machine sleeps when its owner has said.
USER_INITIATED = 0x00FFFFFF & ~(1 << 20)


@contextmanager
def kept_awake(reason: str = "A reply is being written") -> Iterator[object | None]:
    """The system counts the app as at work while the context lasts; `reason` is what its tools show.

    Gives the system's own token of that, None where there is no App Nap.
    """
    if sys.platform != "darwin":
        yield None
        return
    from rubicon.objc import ObjCClass

    process_info = ObjCClass("NSProcessInfo")
    process_info.declare_class_property("processInfo")
    process = process_info.processInfo
    activity = process.beginActivityWithOptions(USER_INITIATED, reason=reason)
    try:
        yield activity
    finally:
        process.endActivity(activity)
