"""When the system refuses memory or threads that the plan allows: a typed error, and a model that goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.backends.cpu import CpuBackend
from ondevice.errors import OndeviceError
from ondevice.kernels import _native
from ondevice.runtime.owner import OwnerThread
from tests.support.chat import PROMPT

MESSAGE = "the system refuses memory"
TOKENS = list(range(3, 90))


def refuse_call(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def refuse_array(*arguments: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("owner", "name", "refuse"),
    [(_native, "allocate", refuse_array), (CpuBackend, "attend", refuse_call)],
    ids=["a block", "an array"],
)
@pytest.mark.parametrize(
    "use",
    [lambda model: model.generate(PROMPT, max_tokens=4), lambda model: model.logits(TOKENS)],
    ids=["generate", "logits"],
)
def test_a_refusal_at_work_is_typed_and_leaves_the_model_usable(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    refuse: Callable[..., None],
    use: Callable[[Model], Any],
) -> None:
    expected = model.logits(TOKENS)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        with pytest.raises(OndeviceError, match=MESSAGE):
            use(model)
    np.testing.assert_array_equal(model.logits(TOKENS), expected)


def test_a_refusal_while_loading_is_typed(chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "load_tiles", refuse_array)
    with pytest.raises(OndeviceError, match=MESSAGE):
        load(chat_bundle, threads=1).generate(PROMPT)


def test_what_is_no_refusal_of_memory_keeps_its_type(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_native, "allocate", broken)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        model.logits(TOKENS)


def refuse_thread(*arguments: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("owner", [(threading.Thread, "start"), (ThreadPoolExecutor, "submit")])
def test_a_refused_thread_while_loading_is_typed(
    chat_bundle: Path, monkeypatch: pytest.MonkeyPatch, owner: tuple[type, str]
) -> None:
    monkeypatch.setattr(*owner, refuse_thread)
    with pytest.raises(OndeviceError, match="the system refuses a thread"):
        load(chat_bundle, threads=1).generate(PROMPT)


def test_an_owner_thread_that_was_refused_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    owner: OwnerThread[int] = OwnerThread("later")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(OndeviceError, match="the system refuses a thread"):
            owner.call(lambda: 1)
    assert owner.call(lambda: 2) == 2
    owner.close()


def test_no_thread_for_residency_is_no_error(
    chat_bundle: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.generate(PROMPT, max_tokens=6).tokens
    with load(chat_bundle, threads=1) as fresh:
        monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse_thread)
        assert fresh.generate(PROMPT, max_tokens=6).tokens == expected
        assert fresh.generate(PROMPT, max_tokens=6).stats.neuron_cache_hit_rate == 0
        monkeypatch.undo()
        fresh.generate(PROMPT, max_tokens=30)
        assert fresh.generate(PROMPT, max_tokens=6).stats.neuron_cache_hit_rate == 1


UNDER_A_LIMIT = """
import resource, sys
import ondevice
from ondevice.kernels import _native

def under_limit(call, left=0):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
    try:
        call()
    except ondevice.OndeviceError as error:
        print(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

with ondevice.load(sys.argv[1], threads=1) as model:
    expected = model.generate("hello", max_tokens=40).tokens
    under_limit(lambda: model.logits(list(range(3, 90))))
    under_limit(lambda: model.generate("hello " * 20, max_tokens=4))
    assert model.generate("hello", max_tokens=40).tokens == expected
under_limit(lambda: _native.Runner(32))
# Without it a thread may start with no memory for its first lines: Python's own start() then waits for ever.
under_limit(lambda: ondevice.load(sys.argv[1], threads=1), 1 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS doesn't bind mappings elsewhere")
def test_a_process_at_its_limit_gets_typed_errors_alone(chat_bundle: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, str(chat_bundle)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 4, result.stdout
    assert all(line.startswith(MESSAGE) for line in lines[:2])
    assert all(line.startswith("the system refuses") for line in lines[2:])
