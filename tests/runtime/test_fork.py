"""A child of fork() that uses its parent's model: a typed error, and an end without waiting for anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# The parent forks in the middle of a generation: its threads read, compute and wait.
CHILD = """
import asyncio, gc, os, sys, threading
import ondevice

path, sparsity = sys.argv[1:]
model = ondevice.load(path, threads=2, sparsity=sparsity, speculation="off")
expected = model.generate("hello", max_tokens=8).tokens
session = model.session()
session.respond("hello", max_tokens=2)
left = model.stream("hello", max_tokens=200)
next(left)
fresh = model.stream("hello", max_tokens=8)

async def ask():
    await model.agenerate("hello", max_tokens=2)

def raises(use):
    try:
        use()
    except ondevice.OndeviceError as error:
        assert "this is a fork of it" in str(error), error
    else:
        raise AssertionError("no error")

child = os.fork()
if child == 0:
    for use in (
        lambda: model.generate("hello", max_tokens=2),
        lambda: next(left),
        lambda: next(fresh),
        lambda: model.logits([3, 4]),
        lambda: model.set_dram_budget("2GB"),
        lambda: session.respond("again", max_tokens=2),
        lambda: session.fork(),
        lambda: model.stats,
        lambda: asyncio.run(ask()),
    ):
        raises(use)
    own = ondevice.load(path, threads=2, sparsity=sparsity, speculation="off")
    assert own.generate("hello", max_tokens=8).tokens == expected
    own.close()
    model.close()
    del model, session, left, fresh, own
    gc.collect()
    print("child ends", flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
left.close()
assert model.generate("hello", max_tokens=8).tokens == expected
model.close()
print("parent ends")
"""


@pytest.mark.fast("exact")
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_a_forked_child_gets_an_error_and_ends(relu_chat_bundle: Path, sparsity: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(relu_chat_bundle), sparsity],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["child ends", "parent ends"]
    assert result.stderr == ""
