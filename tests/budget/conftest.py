"""What tests of memory have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def as_people_run_it(usual_threads: None) -> None:
    """Processes here have as many threads as a person's."""
