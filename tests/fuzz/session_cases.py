"""Saved conversations that a model is asked to go on with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import ondevice
from ondevice.errors import OndeviceError
from ondevice.units import process_memory
from tests.fuzz.bases import Bases
from tests.fuzz.mutations import FRAGMENTS, change_json, changed_bytes, json_bytes, made_up_text
from tests.fuzz.outcomes import Difference
from tests.fuzz.texts import ROOM_BYTES

ROLES = ["system", "user", "assistant", "tool", "", "User", "<s>", "\x00"]


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A file in `folder`, and the path of the model that is to read it."""
    model = bases.folder / "bundles" / rng.choice(["relu", "qwen3"])
    messages = [_message(rng) for _ in range(rng.choice([0, 1, 2, 3, 5] if rng.random() < 0.95 else [300]))]
    content: Any = {"format": "ondevice-session", "version": 1, "messages": messages}
    for _ in range(rng.choice([0, 0, 1, 2])):
        change_json(content, rng)
    data = json_bytes(content, rng)
    if rng.random() < 0.15:
        data = changed_bytes(data, rng)
    (folder / "session.json").write_bytes(data)
    (folder / "model").write_text(str(model))


def _message(rng: random.Random) -> dict[str, Any]:
    role = rng.choice(["user", "assistant"]) if rng.random() < 0.9 else rng.choice(ROLES)
    long = rng.choice(FRAGMENTS) * rng.choice([100, 100_000])
    return {"role": role, "content": made_up_text(rng, 3) if rng.random() < 0.95 else long}


def run(folder: Path, rng: random.Random) -> int:
    """Load it, answer, save it and load that: the same answer."""
    model = Path((folder / "model").read_text())
    allowed = process_memory().current_bytes + ROOM_BYTES
    options: dict[str, Any] = {"memory_pressure": "off", "threads": 1, "dram_budget": allowed}
    try:
        with ondevice.load(model, **options) as loaded:
            session = loaded.session()
            session.load(folder / "session.json")
            session.save(folder / "again.json")
            other = loaded.session()
            other.load(folder / "again.json")
            if other.transcript != session.transcript:
                raise Difference("what was saved is loaded as another conversation")
            answers = [one.respond("hi", max_tokens=4, seed=1).tokens for one in (session, other)]
            if answers[0] != answers[1]:
                raise Difference(f"{answers[0]} before it was saved, {answers[1]} after")
    except OndeviceError as error:
        error.allowed_bytes = allowed  # type: ignore[attr-defined]
        raise
    return allowed
