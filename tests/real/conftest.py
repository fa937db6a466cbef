"""Bundles of the real models, made once for a run of tests and removed after it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import ondevice
from tests.support.real_models import real_model

BundleOf = Callable[[str], Path]


@pytest.fixture(scope="session")
def bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BundleOf]:
    """bundle_of(name) -> the folder of a real model's bundle. Skips where its GGUF file is absent."""
    folder = tmp_path_factory.mktemp("real-bundles")

    @cache
    def converted(name: str) -> Path:
        return ondevice.convert(real_model(name), folder / name)

    yield converted
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def smollm2(bundle_of: BundleOf) -> Path:
    """The bundle of SmolLM2-135M-Instruct."""
    return bundle_of("smollm2")
