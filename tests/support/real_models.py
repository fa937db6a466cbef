"""The real models' GGUF files, where `make models` has fetched them. Tests download nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

try:
    from real_models.cache import cached_file, models_folder
    from real_models.table import REAL_MODELS
except ImportError:  # Tests of an installed wheel have no source tree beside them.
    FOLDER: Path | None = None
else:
    # Tests get a cache folder of their own later.
    FOLDER = models_folder()


@cache
def cached_model(name: str) -> Path | None:
    """The GGUF file of a real model, or None where it isn't in the folder of real models.

    name: smollm2, gemma3-270m, qwen2.5-coder-0.5b or qwen2.5-coder-1.5b.
    """
    return None if FOLDER is None else cached_file(REAL_MODELS[name], FOLDER)


def real_model(name: str) -> Path:
    """The GGUF file of a real model, by the names of `cached_model`. Skips where it isn't there."""
    path = cached_model(name)
    if path is None:
        pytest.skip(f"{name} isn't in the folder of real models: `make models MODELS={name}` fetches it")
    return path
