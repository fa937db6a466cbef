"""A rank whose engine passes messages around in place of a model. Arguments: `generate`, a word, seconds.

Words: `around` passes messages for these seconds, then rank 0 prints stdin and ends with the exit code 7.
`another-version`: rank 1 has another release. `raises`: rank 1's engine raises what a damaged bundle does.
`stops-late`: as `around`, but rank 0's engine ends 4 seconds after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ondevice.distributed import control, member, supervisor
from ondevice.distributed.member import joined
from ondevice.distributed.ranks import take_place
from ondevice.errors import BundleError, RankError

_, _, word, seconds = sys.argv
STALL_SECONDS = 8.0
LATE_SECONDS = 4.0
control.STALL_SECONDS = member.STALL_SECONDS = supervisor.STALL_SECONDS = STALL_SECONDS


def engine() -> int:
    """What the engine does. Returns its exit code."""
    from ondevice.distributed.transport import MlxTransport

    me = joined()
    assert me is not None
    assert 5_000_000 < me.place.other_process_bytes < 100_000_000
    with me.joining():
        ring = MlxTransport("ring")
    if word == "raises" and ring.rank == 1:
        error = BundleError("neurons.bin is damaged at byte 4096")
        me.report(error.exit_code, error.for_command_line, False)
        return error.exit_code
    if ring.rank:
        while ring.receive()[0] != b"end":
            ring.send(b"", [])
        ring.send(b"end", [])
    else:
        print("running", flush=True)
        until = [time.monotonic() + float(seconds)]
        if word == "stops-late":
            signal.signal(signal.SIGTERM, lambda *_: until.append(time.monotonic() + LATE_SECONDS))
        while time.monotonic() < until[-1]:
            ring.send(b"", [])
            ring.receive()
            time.sleep(0.01)
        ring.send(b"end", [])
        ring.receive()
        print(sys.stdin.read())
    ring.close()
    return 0 if ring.rank else 7


if word == "another-version" and os.environ["MLX_RANK"] == "1":
    supervisor.version = lambda name: "0.0.1"  # type: ignore[assignment]
code = take_place()
if code is None:
    me = joined()
    assert me is not None
    try:
        code = engine()
    except RankError as error:
        code = error.exit_code
        me.report(code, error.for_command_line, True)
    me.leave()
sys.stdout.flush()
os._exit(code)
