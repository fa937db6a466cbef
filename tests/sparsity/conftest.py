"""The trained mixture of experts with the use of its experts counted, for the tests that read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.training import train_expert_use
from tests.support.trained_models import MIXTURE, own_text

PIECE, PIECES = 192, 3
"""Tokens of a piece, and the number of pieces."""


@pytest.fixture(scope="session")
def pieces() -> list[list[int]]:
    """`PIECES` pieces of `PIECE` token ids: the beginning of what the trained mixture makes up."""
    text = own_text(MIXTURE, PIECES * PIECE)
    return [text[start : start + PIECE] for start in range(0, PIECES * PIECE, PIECE)]


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory: pytest.TempPathFactory, pieces: list[list[int]]) -> Path:
    """A copy of the trained mixture in which the use of experts by `pieces` is counted."""
    folder = tmp_path_factory.mktemp("mixture") / "calibrated"
    train_expert_use(MIXTURE, pieces=pieces, output=folder)
    return folder
