"""Fixtures that several test files use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of data that others made, beside the repository. Skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is absent: this test needs its models, tokenizers or text")
    return folder
