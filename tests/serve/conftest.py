"""A server of the small chat bundle, on which every dialect is tested."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ondevice.api import load

if TYPE_CHECKING:
    from tests.support.serving import Serving


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """Servers log after their answers, so also between tests, where nothing captures what is printed."""
    for name in ("ondevice.serve", "uvicorn"):
        logging.getLogger(name).addHandler(logging.NullHandler())


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Serving]:
    """The chat bundle served, everything resident, one thread, a token a pass."""
    from tests.support.serving import serving

    with serving(load(chat_bundle, threads=1, speculation="off")) as running:
        yield running
