"""Where things lie in the source tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "weights/small-relu"
SHARED_DATA = ROOT.parent / "shared/data"
"""Data of other makers, beside the repository. It may be absent."""
