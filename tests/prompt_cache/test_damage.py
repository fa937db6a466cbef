"""Damaged, foreign and hostile files in a prompt cache cost a computation: no error, no other text."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import load
from ondevice.errors import UsageError
from ondevice.prompt_cache import entry, folder
from ondevice.settings import runtime_config
from tests.support.cached_texts import PROMPT, said, settle, written
from tests.support.damaged_caches import DAMAGES, bend

PARTIAL = "12-0.unfinished"


def damaged_texts(bundle: Path, cache: Path, rounds: int, seed: int) -> int:
    """Damage files at random and say the same text again, many times. Returns the tokens restored in all."""
    chance, restored = random.Random(seed), 0
    with load(bundle, threads=1, speculation="off") as model:
        expected = said(model, count=4)[0]
    with load(bundle, prompt_cache=cache, threads=1, speculation="off") as model:
        for _ in range(rounds):
            settle(model)
            damages = chance.sample(written(cache), chance.choice((1, 1, 2)))
            names = []
            for path in damages:
                damage = chance.choice(DAMAGES)
                names.append(damage.__name__)
                if path.is_file():
                    damage(path, chance)
            text, found = said(model, count=4)
            assert text == expected, (seed, names)
            restored += found
            settle(model)
            for path in cache.glob("elsewhere*"):
                path.unlink()
            for path in cache.glob("*/*"):
                if not path.is_file():
                    path.rmdir() if path.is_dir() else path.unlink()
            said(model, count=4)
    return restored


def test_damage_costs_a_computation_alone(chat_bundle: Path, tmp_path: Path) -> None:
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        said(model)
    assert 0 < damaged_texts(chat_bundle, tmp_path, 30, seed=1) < 30 * 149


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_damage_costs_a_computation_alone_at_length(chat_bundle: Path, tmp_path: Path, seed: int) -> None:
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        said(model)
    assert damaged_texts(chat_bundle, tmp_path, 500, seed=seed + 2) > 0


def test_what_is_damaged_is_written_again(chat_bundle: Path, tmp_path: Path) -> None:
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        said(model)
        settle(model)
        sound = {path: path.read_bytes() for path in written(tmp_path)}
        for path in sound:
            bend(path, random.Random(3))
        assert said(model)[1] == 0
        settle(model)
        assert said(model)[1] == 149
        settle(model)
        assert {path: path.read_bytes() for path in written(tmp_path)}.keys() == sound.keys()


def test_files_of_others_stay(chat_bundle: Path, tmp_path: Path) -> None:
    foreign = {
        tmp_path / "notes.txt": b"mine",
        tmp_path / "photos" / f"{'0' * 32}-{'0' * 32}-5.kv": b"no binding's folder",
        tmp_path / ("0" * 32) / "readme": b"no run's name",
    }
    for path, data in foreign.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    with load(chat_bundle, prompt_cache=tmp_path, prompt_cache_bytes=200_000) as model:
        for first in range(4):
            said(model, [first + 3, *PROMPT])
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_what_a_killed_process_left_is_removed(chat_bundle: Path, tmp_path: Path) -> None:
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        said(model)
        settle(model)
        (left := written(tmp_path)[0].with_name(PARTIAL)).write_bytes(b"half")
        living = left.with_name("13-0.unfinished")
        with living.open("wb") as file:
            folder.fcntl.flock(file, folder.fcntl.LOCK_EX)
            file.write(b"more to come")
            file.flush()
            said(model, PROMPT[:60])
            settle(model)
            assert (left.exists(), living.exists()) == (False, True)


@pytest.mark.fast("28")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_costs_no_text(
    chat_bundle: Path, tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pwrite, []

    def full(file: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) % 3 == 0:
            raise OSError(error, os.strerror(error))
        return real(file, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(entry.os, "pwrite", full)
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        texts = [said(model)[0] for _ in range(3)]
        settle(model)
    assert len(calls) > 3
    assert texts[0] == texts[1] == texts[2]
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_folder_that_cannot_be_made_costs_no_text(chat_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with load(chat_bundle, prompt_cache=tmp_path / "file" / "cache") as model:
        assert said(model) == said(model)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800", 7])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UsageError, match="prompt_cache is"):
        load(prompt_cache=path)
    with pytest.raises(UsageError, match="size 'much' is not one"):
        runtime_config({"prompt_cache_bytes": "much"})


def test_two_models_share_a_folder(chat_bundle: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prompt_cache": tmp_path, "threads": 1}
    with load(chat_bundle, **options) as one, load(chat_bundle, **options) as two:
        expected = said(one)[0]
        settle(one)
        assert said(two) == (expected, 149)
        settle(two)
        shutil.rmtree(tmp_path)
        assert said(two) == (expected, 0)
        settle(two)
        assert said(one) == (expected, 149)
