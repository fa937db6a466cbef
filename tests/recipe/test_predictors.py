"""Which text the recipe's predictors are trained and measured on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.converters.training import sidecars
from recipe import predictors
from recipe.config import MIXTURE

CONTEXT = 16


def test_held_out_text_of_every_domain_measures_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictors, "CONTEXT", CONTEXT)
    for index, domain in enumerate(MIXTURE):
        # Token ids that say what they come from.
        for offset, split in ((0, "train"), (100, "held_out")):
            np.full(5000, offset + index, np.uint16).tofile(tmp_path / f"{domain}.{split}.bin")
    measured = predictors.held_out(tmp_path)
    counts = np.bincount([window[0] - 100 for window in measured])
    assert counts.tolist() == [7, 5, 10, 1, 1]
    trained = predictors.trained(tmp_path, len(measured))
    shares = np.bincount([window[0] for window in trained]) / len(trained)
    assert shares == pytest.approx(list(MIXTURE.values()), abs=0.01)
    assert sidecars.held_out([*trained, *measured]) == measured
