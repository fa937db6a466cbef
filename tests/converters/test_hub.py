"""Checkpoints of the hub: the bytes of a folder's, over connections that break and answers that lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ondevice import api
from ondevice.bundle.reader import Bundle
from ondevice.converters import reading
from ondevice.errors import (
    DownloadError,
    OndeviceError,
)
from ondevice.runtime.conversion import prepare
from tests.support.bundles import write_chat_checkpoint
from tests.support.hub_server import HubServer, content_hash
from tests.support.paths import ROOT


@pytest.fixture
def repository(hub: HubServer) -> Path:
    return write_chat_checkpoint(hub.root / "some" / "model", shards=3)


def weights(bundle: Path) -> dict[str, bytes]:
    """What must not depend on where the checkpoint was: everything but the manifest, which names it."""
    return {path.name: path.read_bytes() for path in sorted(bundle.iterdir()) if path.name != "bundle.json"}


def convert(tmp_path: Path, **options: Any) -> Path:
    return api.convert("some/model", tmp_path / "bundle", **options)


@pytest.mark.fast("falcon newer")
@pytest.mark.parametrize("case", ["falcon newer", "persimmon"])
def test_what_comes_more_than_once_is_foreseen(hub: HubServer, tmp_path: Path, case: str) -> None:
    """Queries, keys and values that lie side by side, head by head."""
    pytest.importorskip("transformers")
    from tests.support.families import CASES, write_model

    family, options = CASES[case]
    source = hub.root / "some" / "model"
    write_model(source, family, {**options, "num_hidden_layers": 1})
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.sent_bytes = 0
        estimate = prepared.estimate()
        prepared.run()
    assert estimate.download_bytes > sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert hub.rules.sent_bytes == estimate.download_bytes


@pytest.mark.fast("True-3")
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("redirects", [True, False])
def test_the_bytes_are_those_of_a_folder(
    hub: HubServer, tmp_path: Path, shards: int, redirects: bool
) -> None:
    source = write_chat_checkpoint(hub.root / "some" / "model", shards=shards)
    hub.rules.redirects = redirects
    bundle = convert(tmp_path)
    assert weights(bundle) == weights(api.convert(source, tmp_path / "expected"))
    assert Bundle.open(bundle).manifest.provenance.source.startswith("some/model@")
    assert not (tmp_path / "cache").exists()


def test_every_weight_comes_once(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    """Each shard is smaller here than what is read of it for its header, so that comes twice."""
    with prepare("some/model", tmp_path / "bundle") as prepared:
        headers, hub.rules.sent_bytes = hub.rules.sent_bytes, 0
        estimate = prepared.estimate()
        assert hub.rules.sent_bytes == 0
        prepared.run()
    total = sum(path.stat().st_size for path in repository.glob("*.safetensors"))
    assert headers <= total
    assert hub.rules.sent_bytes == estimate.download_bytes
    assert 0.99 * total < estimate.download_bytes < total
    written = sum(path.stat().st_size for path in (tmp_path / "bundle").iterdir())
    assert written <= estimate.bundle_bytes <= written + (1 << 20)


def test_connections_that_break_go_on_where_they_broke(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    expected = weights(api.convert(repository, tmp_path / "expected"))
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.sent_bytes = 0
        hub.rules.break_after = [5, 1000, 30000, 1 << 30, 0, 16384, 1 << 30, 12, 1 << 30, 40000]
        hub.rules.refuse = [503, 429]
        estimate = prepared.estimate()
        prepared.run()
    assert hub.rules.break_after == []
    assert hub.rules.refuse == []
    assert weights(tmp_path / "bundle") == expected
    assert hub.rules.sent_bytes == estimate.download_bytes


@pytest.mark.parametrize("header", [("Retry-After", "1"), ("RateLimit", '"resolvers";r=0;t=1')])
def test_a_server_that_asks_to_wait_is_given_its_time(
    hub: HubServer, repository: Path, tmp_path: Path, header: tuple[str, str]
) -> None:
    hub.rules.refuse, hub.rules.refusal_headers = [429], dict([header])
    begun = time.monotonic()
    with prepare("some/model", tmp_path / "bundle"):
        assert time.monotonic() - begun >= 1.0


def test_a_connection_that_keeps_breaking_is_given_up_and_goes_on_later(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    expected = weights(api.convert(repository, tmp_path / "expected"))
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.break_after = [1 << 30] * 14 + [0] * 6
        with pytest.raises(DownloadError, match=r"6 times in a row; check the network"):
            prepared.run()
    assert (tmp_path / "bundle.partial" / "neurons-00000.safetensors").is_file()
    convert(tmp_path, resume=True)
    assert weights(tmp_path / "bundle") == expected


@pytest.mark.slow
def test_columns_of_large_matrices_pass_through_a_file_without_a_name(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(reading, "DOWN_BLOCK_BYTES", 1 << 15)
    expected = weights(api.convert(repository, tmp_path / "expected"))
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.sent_bytes = 0
        estimate = prepared.estimate()
        assert estimate.passing_bytes == 64 * 700 * 4
        prepared.run()
    assert weights(tmp_path / "bundle") == expected
    assert hub.rules.sent_bytes == estimate.download_bytes


def files_of_this_process(*folders: Path) -> int:
    """Bytes of the folders' files, and of open files that have no name."""
    found = 0
    # Folders may vanish meanwhile, which ends neither of these.
    for folder, _, files in chain.from_iterable(map(os.walk, folders)):
        for path in (Path(folder) / name for name in files):
            try:
                found += path.lstat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue
    for link in Path("/proc/self/fd").iterdir():
        try:
            status = os.fstat(int(link.name))
            named = os.readlink(link)
        except OSError:
            continue
        found += status.st_size if status.st_nlink == 0 and str(folders[0].parent) in named else 0
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_the_disk_holds_the_bundle_and_less_than_a_shard(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(reading, "DOWN_BLOCK_BYTES", 1 << 15)
    hub.rules.piece_seconds = 0.001
    folders, peaks, done = (tmp_path / "models", tmp_path / "cache"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(files_of_this_process(*folders))

    watcher = threading.Thread(target=watch)
    watcher.start()
    bundle = api.convert("some/model", tmp_path / "models" / "bundle")
    done.set()
    watcher.join()
    written = sum(path.stat().st_size for path in bundle.iterdir())
    shard = max(path.stat().st_size for path in repository.glob("*.safetensors"))
    assert 0.5 * written < max(peaks) <= 1.05 * (written + shard)
    assert not (tmp_path / "cache").exists()
    # A watcher that sees nothing would prove nothing: it must have seen a matrix pass.
    assert len(peaks) > 50


def test_a_kept_source_is_whole_and_serves_without_the_hub(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(api.convert(repository, tmp_path / "expected", "q8"))
    # The same weights in a form that isn't needed, as some repositories have them.
    (repository / "consolidated.safetensors").write_bytes(b"no safetensors at all")
    with prepare("some/model", tmp_path / "bundle", keep_source=True) as prepared:
        estimate = prepared.estimate()
        assert estimate.kept_bytes == estimate.download_bytes
        prepared.run()
    kept = {path.name: path for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert set(kept) == {path.name for path in repository.iterdir()} - {"consolidated.safetensors"}
    assert all(content_hash(kept[name]) == content_hash(repository / name) for name in kept)
    hub.rules.sent_bytes = 0
    with prepare("some/model", tmp_path / "again", "q8") as prepared:
        assert prepared.estimate().download_bytes == 0
        headers = hub.rules.sent_bytes
        prepared.run()
        assert hub.rules.sent_bytes == headers
    assert weights(tmp_path / "again") == expected
    hub.rules.asked.clear()
    assert weights(api.convert("some/model", tmp_path / "offline", "q8", offline=True)) == expected
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert weights(api.convert("some/model", tmp_path / "switched", "q8")) == expected
    assert hub.rules.asked == []


class StopError(Exception):
    """Raised from a progress callback, as Ctrl-C is from anywhere."""


def test_an_interrupt_does_not_wait_for_the_network(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer would take twenty seconds or more; the reading thread is in the middle of one of its pieces."""
    monkeypatch.setattr("ondevice.converters.progress.REPORT_SECONDS", 0.0)
    stopped: list[float] = []

    def on_progress(_: object) -> None:
        hub.rules.piece_seconds = 1.0
        time.sleep(0.1)
        stopped.append(time.monotonic())
        raise StopError

    with prepare("some/model", tmp_path / "bundle") as prepared, pytest.raises(StopError):
        prepared.run(on_progress)
    assert time.monotonic() - stopped[0] < 10.0


def test_a_changed_repository_is_not_mixed_in(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.break_after = [1 << 30] * 14 + [0] * 6
        with pytest.raises(DownloadError):
            prepared.run()
    write_chat_checkpoint(repository, shards=3, seed=1)
    with pytest.raises(OndeviceError, match=r"another source|has changed"):
        convert(tmp_path, resume=True)
    assert weights(convert(tmp_path, force=True)) == weights(api.convert(repository, tmp_path / "expected"))


def kill_and_resume(
    tmp_path: Path, hub: HubServer, kills: int, seed: int, name: str = "some/model"
) -> dict[str, int]:
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "tests.support.kill_while_downloading", name, str(work)]
    result = subprocess.run(
        [*command, str(kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=3000,
        cwd=ROOT,
        env=os.environ
        | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"},
    )
    assert result.returncode == 0, result.stderr
    report: dict[str, int] = json.loads(result.stdout)
    return report


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    report = kill_and_resume(tmp_path, hub, kills=3, seed=1)
    assert report["killed"] >= 3
    assert (report["different"], report["left"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_download_killed_fifty_times_resumes_to_the_same_bundle(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    hub.rules.break_after = [70_000, 5, 3_000] * 20
    report = kill_and_resume(tmp_path, hub, kills=50, seed=2)
    assert report["killed"] >= 50
    assert (report["different"], report["left"]) == (0, 0)
