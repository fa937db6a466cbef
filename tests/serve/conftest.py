"""A server of the small chat bundle, on which every dialect is tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice.api import load
from tests.support.serving import Serving, serving


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Serving]:
    """The chat bundle served, everything resident, one thread, a token a pass."""
    with serving(load(chat_bundle, threads=1, speculation="off")) as running:
        yield running
