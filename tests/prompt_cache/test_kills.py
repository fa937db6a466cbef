"""A process that is killed while it writes leaves nothing that another one takes for a sound file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def kill_while_caching(bundle: Path, cache: Path, kills: int, seed: int) -> Any:
    command = [sys.executable, "-m", "tests.support.kill_while_caching"]
    arguments = [str(bundle), str(cache), str(kills), str(seed)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kill_while_writing_leaves_the_cache_sound(chat_bundle: Path, tmp_path: Path) -> None:
    found = kill_while_caching(chat_bundle, tmp_path, kills=1, seed=1)
    assert found["kills"] == 1


@pytest.mark.slow
def test_a_hundred_kills_while_writing(chat_bundle: Path, tmp_path: Path) -> None:
    found = kill_while_caching(chat_bundle, tmp_path, kills=100, seed=2)
    assert found["kills"] == 100
    assert found["restored_tokens"] > 5000
    assert len(found["left"]) <= 1
