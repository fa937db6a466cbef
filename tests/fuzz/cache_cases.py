"""Prompt caches with damaged, foreign and hostile files: every text is the one without a cache."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import ondevice
from ondevice.api import Model
from ondevice.errors import OndeviceError
from ondevice.units import process_memory
from tests.fuzz.bases import CACHED, CACHED_PROMPT, CACHED_WAYS, Bases
from tests.fuzz.mutations import changed_bytes, is_plain, make_odd
from tests.fuzz.outcomes import Difference
from tests.fuzz.texts import ROOM_BYTES
from tests.support.cached_texts import said, settle, written
from tests.support.damaged_caches import DAMAGES

LIMITS = [10_000_000_000, 10_000_000_000, 200_000, 50_000, 1]
FOREIGN = ["notes.txt", f"{'0' * 32}-{'1' * 32}-64.kv", f"{'0' * 32}-{'1' * 32}-999999.kv", "7-0.unfinished"]


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A cache in `folder` that something happened to, and what it is to be used with."""
    model = rng.choice(CACHED)
    cache = folder / "cache"
    shutil.copytree(bases.folder / "caches" / model, cache)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        _damage(cache, rng)
    if rng.random() < 0.2:
        bindings = sorted(it for it in cache.iterdir() if it.is_dir())
        path = rng.choice(bindings) / rng.choice(FOREIGN)
        if not path.exists():
            path.write_bytes(rng.randbytes(rng.choice([0, 16, 5000])))
    if rng.random() < 0.05:
        _spoil_folder(rng.choice(sorted(cache.iterdir())), rng)
    case = {
        "model": str(bases.folder / "bundles" / model),
        "way": rng.randrange(len(CACHED_WAYS)),
        "limit": rng.choice(LIMITS),
        "common": rng.randrange(len(CACHED_PROMPT)),
    }
    (folder / "use.json").write_text(json.dumps(case))


def run(folder: Path, rng: random.Random) -> int:
    """Say two texts without the cache, and several times with it. Raises Difference, for any error too."""
    case = json.loads((folder / "use.json").read_text())
    allowed = process_memory().current_bytes + ROOM_BYTES
    options: dict[str, Any] = {"memory_pressure": "off", "threads": 1, "dram_budget": allowed}
    options |= CACHED_WAYS[case["way"]]
    other = [*CACHED_PROMPT[: case["common"]], 9, 8, 7]
    try:
        with ondevice.load(case["model"], **options) as model:
            expected = [said(model, prompt, 4)[0] for prompt in (CACHED_PROMPT, other)]
        cached = {"prompt_cache": folder / "cache", "prompt_cache_bytes": case["limit"]}
        with ondevice.load(case["model"], **options, **cached) as model:
            _compare(model, expected, other)
            settle(model)
            for _ in range(rng.choice([0, 1, 2])):
                # While it is in use.
                _damage(folder / "cache", rng)
            _compare(model, expected, other)
    except OndeviceError as error:
        raise Difference(f"a damaged cache is an error: {type(error).__name__}: {error}") from error
    return allowed


def _compare(model: Model, expected: list[Any], other: list[int]) -> None:
    for prompt, text in zip((CACHED_PROMPT, other), expected, strict=True):
        found, restored = said(model, prompt, 4)
        if found != text:
            raise Difference(f"{found} with the cache, of which {restored} tokens came, {text} without")


def _damage(cache: Path, rng: random.Random) -> None:
    """Damage a file, as it happens on disks or as someone does who can write there."""
    files = [path for path in written(cache) if is_plain(path)]
    if not files:
        return
    path, how = rng.choice(files), rng.random()
    if how < 0.6:
        rng.choice(DAMAGES)(path, rng)
    elif how < 0.8:
        path.write_bytes(changed_bytes(path.read_bytes(), rng))
    elif how < 0.9:
        make_odd(path, rng)
    else:
        name = rng.choice(files).name
        path.rename(path.with_name(name[: rng.randrange(len(name))] + path.name[-rng.randrange(1, 40) :]))


def _spoil_folder(binding: Path, rng: random.Random) -> None:
    """Another kind of file in place of a binding's folder, or a folder that is closed."""
    how = rng.randrange(4)
    if how == 0:
        shutil.rmtree(binding)
        binding.write_bytes(b"no folder")
    elif how == 1:
        elsewhere = binding.with_name("elsewhere")
        binding.rename(elsewhere)
        binding.symlink_to(elsewhere.name)
    elif how == 2:
        shutil.rmtree(binding)
        binding.symlink_to(binding.name)
    elif how == 3:
        binding.chmod(0o500)
