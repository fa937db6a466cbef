"""Hubs whose descriptions and answers are changed at random: a bundle or a typed error, nothing else."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.errors import CheckpointError, OndeviceError
from ondevice.runtime.conversion import prepare
from tests.converters.test_hub_gguf import NAME, write_model
from tests.fuzz.mutations import change_json, changed_bytes, json_bytes
from tests.support.bundles import write_chat_checkpoint
from tests.support.hub_server import HubServer

STATUSES = [200, 204, 206, 299, 301, 302, 304, 307, 400, 401, 403, 404, 416, 418, 429, 500, 503]
HEADERS = [
    "Content-Range", "ETag", "X-Linked-ETag", "X-Repo-Commit", "Location", "Content-Encoding", "Retry-After",
    "RateLimit", "X-Error-Code", "Transfer-Encoding", "X-Linked-Size", "Set-Cookie", "Content-Type",
]  # fmt: skip
VALUES = [
    "", "0", "-1", "1", "9" * 20, "bytes 0-0/1", "bytes 5-1/9", "bytes */100",
    "bytes 0-99999999999/99999999999",
    "gzip", "identity", '"x"', 'W/"y"', "0" * 40, "0" * 64, "a" * 3000, "r=0;t=99999", "\u00b2",
]  # fmt: skip
NAMES = [NAME, "some/folder"]


@pytest.fixture
def models(hub: HubServer) -> None:
    write_model(hub.root / "some" / "model" / NAME.partition(":")[2])
    write_chat_checkpoint(hub.root / "some" / "folder", shards=2, num_hidden_layers=1)


def changed_description(rng: random.Random) -> Callable[[dict[str, Any]], Any]:
    def describe(answer: dict[str, Any]) -> Any:
        for _ in range(rng.choice([1, 1, 2])):
            change_json(answer, rng)
        data = json_bytes(answer, rng)
        return changed_bytes(data, rng) if rng.random() < 0.1 else data

    return describe


def changed_answer(
    rng: random.Random, share: float
) -> Callable[[int, dict[str, str], int], tuple[int, dict[str, str], int]]:
    """share: of the answers that are changed."""

    def change(status: int, headers: dict[str, str], nbytes: int) -> tuple[int, dict[str, str], int]:
        if rng.random() >= share:
            return status, headers, nbytes
        match rng.randrange(4):
            case 0:
                return rng.choice(STATUSES), headers, nbytes
            case 1:
                return status, headers | {rng.choice(HEADERS): rng.choice(VALUES)}, nbytes
            case 2:
                return status, headers, rng.choice([0, 1, nbytes + 1, max(0, nbytes - 1), 10**9])
        return status, {name: value for name, value in headers.items() if rng.random() < 0.5}, nbytes

    return change


@pytest.mark.usefixtures("models")
def test_changed_descriptions_open_or_raise_errors_of_ondevice(hub: HubServer, tmp_path: Path) -> None:
    rng, found = random.Random(1), Counter[str]()
    hub.rules.describe = changed_description(rng)
    for number in range(16):
        try:
            with prepare(NAMES[number % 2], tmp_path / "bundle"):
                found["opened"] += 1
        except OndeviceError as error:
            found[type(error).__name__] += 1
    assert found["opened"] > 0
    assert found[CheckpointError.__name__] > 4


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_changed_answers_convert_or_raise_errors_of_ondevice(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("ondevice.converters.hub.client")
    monkeypatch.setattr(client, "MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.0)
    rng, found = random.Random(2), Counter[str]()
    for number in range(200):
        hub.rules.describe = changed_description(rng) if number % 4 == 0 else lambda answer: answer
        hub.rules.change = changed_answer(rng, rng.choice([0.05, 0.1, 0.3]))
        folder = tmp_path / "bundles" / str(number)
        try:
            with prepare(NAMES[number % 2], folder, keep_source=number % 10 == 0) as prepared:
                found["opened"] += 1
                prepared.run()
                found["converted"] += 1
        except OndeviceError as error:
            found[type(error).__name__] += 1
    assert found["converted"] > 10
    assert found["CheckpointError"] > 10
    assert found["DownloadError"] > 10
