"""What tests of shared passes share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ondevice.backends.base import Array
from ondevice.converters.convert import convert
from ondevice.model.layer_range import SequencePart
from ondevice.model.transformer import Transformer
from tests.support.families import CASES, write_model
from tests.support.shared_texts import Parts


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """The rows of the shared passes of this test."""
    found: Parts = []
    own = Transformer.run_each

    def run_each(self: Transformer, given: Sequence[SequencePart], *rest: Any) -> Array:
        found.append([(len(batch.tokens), len(batch.drafted)) for batch, _ in given])
        return own(self, given, *rest)

    monkeypatch.setattr(Transformer, "run_each", run_each)
    return found


@pytest.fixture(scope="module")
def expert_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    write_model(made / "source", *CASES["olmoe"])
    return convert(made / "source", made / "bundle", "q4")
