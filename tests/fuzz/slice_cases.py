"""Slices of a model that an attacker changed, each beside a sound one: the ranks end with typed errors, or
write one text under options that must not change it.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.units import process_memory
from tests.fuzz import bundle_cases, signing
from tests.fuzz.bases import Bases
from tests.fuzz.mutations import NUMBERS, change_json
from tests.fuzz.texts import MAX_TOKENS, ROOM_BYTES, Trial, copied
from tests.malformed.rules import manifest_of, seal
from tests.support.ranks import text_of_met

RANKS = ("rank-0", "rank-1")
PART_KEYS = ("first", "layers", "embeds", "heads", "widths", "experts", "states")
SIDECAR_KEYS = ("part_of", "begins", "first_layer")


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A model's slices in `folder`, one of them changed."""
    base = rng.choice(bases.slices)
    targets = [copied(base / rank, folder / rank) for rank in RANKS]
    target = rng.choice(targets)
    if rng.random() < 0.5:
        bundle_cases.spoil(target, rng, bases)
        return
    if rng.random() < 0.1:
        # Another rank's, or another model's.
        other = rng.choice(bases.slices) / rng.choice(RANKS)
        shutil.rmtree(target)
        copied(other, target)
        return
    for _ in range(rng.choice([1, 1, 2])):
        rng.choice([_lie_about_the_part, _lie_about_the_part, _lie_in_a_sidecar])(target, rng)


def run(folder: Path, rng: random.Random) -> int:
    """The ranks' text in two configurations."""
    return _Ranks(folder / RANKS[0], rng).run()


@dataclass
class _Ranks(Trial):
    """A trial of two ranks; `folder` is the first one's slice, and the other lies beside it."""

    def _text(self, prompt: list[int], options: dict[str, Any]) -> list[int]:
        budget = int(options["scale"] * (process_memory().current_bytes + ROOM_BYTES))
        self.allowed_bytes = max(self.allowed_bytes, budget)
        told = {name: value for name, value in options.items() if name != "scale"}
        runtime = RuntimeConfig(dram_budget=f"{budget}", memory_pressure="off", **told)
        sampling = SamplingConfig(max_tokens=MAX_TOKENS, temperature=0.8, seed=7)
        return text_of_met([self.folder.with_name(it) for it in RANKS], runtime, prompt, sampling)


def _lie_about_the_part(folder: Path, rng: random.Random) -> None:
    """Which layers of which model it says it is; all else is made to fit, if that can be."""
    manifest = manifest_of(folder)
    part, how = manifest["model"].get("part"), rng.random()
    if how < 0.2 or part is None:
        manifest["part_of"] = rng.choice(["0" * 64, "0" * 63, None, 5])
    elif how < 0.3:
        manifest.pop("part_of", None)
    elif how < 0.4:
        del manifest["model"]["part"]
    elif how < 0.8:
        part[rng.choice(PART_KEYS)] = rng.choice([True, False, [], [1, 2], None, *NUMBERS])
    else:
        change_json(part, rng)
    seal(folder, manifest)


def _lie_in_a_sidecar(folder: Path, rng: random.Random) -> None:
    """What a sidecar says of the layers that it is for."""
    names = [it for it in sorted(signing.SIDECARS) if (folder / it).is_file()]
    name = rng.choice(names or sorted(signing.SIDECARS))
    content = signing.sidecar_content(folder, name)
    if content:
        content[rng.choice(SIDECAR_KEYS)] = rng.choice(["0" * 64, True, False, None, *NUMBERS])
        signing.seal_sidecar(folder, name, content)
