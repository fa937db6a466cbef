"""A damaged bundle, run: the text and the logits of the sound one, or a typed error that names damage."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.api import load
from ondevice.errors import (
    BundleError,
    FlashReadError,
    ModelNotFoundError,
    OndeviceError,
    UnsupportedModelError,
)
from tests.support.chat import PROMPT, squeeze

Said = tuple[tuple[int, ...], tuple[int, ...], bytes]
DAMAGE = (BundleError, FlashReadError, ModelNotFoundError, UnsupportedModelError)
MANIFEST = "bundle.json"
few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def said(bundle: Path, full: bool = True) -> Said:
    """What the runtime makes of a bundle: tokens of a text and of a chat, and bits of logits."""
    with load(bundle, threads=1) as model:
        if not full:
            squeeze(model)
        assert model.plan.offloads_weights != full
        text = model.generate(PROMPT, max_tokens=4).tokens
        reply = model.session("Be brief.").respond("Hello", max_tokens=3).tokens
        return text, reply, model.logits(range(0, model.config.vocab_size, 3)).tobytes()


class Victim:
    """A copy of a bundle to be damaged, run and mended."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(bundle, folder)
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.sound = said(folder)

    def outcomes(self, name: str, data: bytes) -> list[Said | OndeviceError]:
        """What the bundle says or raises with these bytes in a file, at either end of its budgets."""
        (self.folder / name).write_bytes(data)
        outcomes: list[Said | OndeviceError] = []
        threads = threading.active_count()
        try:
            for full in (True, False):
                try:
                    outcomes.append(said(self.folder, full))
                except DAMAGE as error:
                    outcomes.append(error)
            assert threading.active_count() <= threads
        finally:
            (self.folder / name).write_bytes(self.files[name])
        return outcomes


@pytest.fixture(scope="module")
def victim(chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    victim = Victim(chat_bundle, tmp_path_factory.mktemp("damage") / "bundle")
    yield victim
    assert said(victim.folder) == victim.sound


names = st.sampled_from(
    (
        MANIFEST,
        "checksums.bin",
        "chat_template.jinja",
        "embedding.safetensors",
        "neurons-00000.safetensors",
        "neurons-00002.safetensors",
        "resident.safetensors",
        "tokenizer.bin",
    )
)


flips = given(name=names, where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))


@few
@flips
def test_a_flipped_byte_raises_an_error_of_ondevice(
    name: str, where: float, mask: int, victim: Victim
) -> None:
    check_flipped(victim, name, where, mask)


@pytest.mark.slow
@settings(few, max_examples=80)
@flips
def test_each_of_many_flipped_bytes_raises_an_error_of_ondevice(
    name: str, where: float, mask: int, victim: Victim
) -> None:
    check_flipped(victim, name, where, mask)


def check_flipped(victim: Victim, name: str, where: float, mask: int) -> None:
    data = bytearray(victim.files[name])
    data[int(where * len(data))] ^= mask
    for outcome in victim.outcomes(name, data):
        assert isinstance(outcome, DAMAGE) or outcome == victim.sound


@few
@given(name=names, keep=st.floats(0, 1, exclude_max=True))
def test_a_cut_file_raises_an_error_of_ondevice(name: str, keep: float, victim: Victim) -> None:
    data = victim.files[name]
    kept = data[: int(keep * len(data))]
    # White space after the manifest is no content.
    harmless = not data[len(kept) :].strip()
    for outcome in victim.outcomes(name, kept):
        assert isinstance(outcome, DAMAGE) or (harmless and outcome == victim.sound)


@few
@given(name=names, extra=st.binary(min_size=1, max_size=300))
def test_an_extended_file_raises_an_error_of_ondevice(name: str, extra: bytes, victim: Victim) -> None:
    harmless = name == MANIFEST and not extra.strip()
    for outcome in victim.outcomes(name, victim.files[name] + extra):
        assert isinstance(outcome, DAMAGE) or (harmless and outcome == victim.sound)
