"""GGUF files and MLX folders of the hub: the bytes of those on a disk, typed errors for what can't work."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice import api
from ondevice.bundle.reader import Bundle
from ondevice.converters import reading
from ondevice.converters.checkpoints import gguf_file
from ondevice.converters.hub.remote_file import Spool
from ondevice.errors import (
    CheckpointError,
    DownloadError,
    ModelNotFoundError,
    OndeviceError,
    UnsupportedModelError,
)
from ondevice.runtime.conversion import prepare
from tests.converters.test_hub import kill_and_resume, weights
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, write_gguf
from tests.support.hub_server import HubServer
from tests.support.mlx_folders import MXFP4, Scheme, write_mlx_folder
from tests.support.models import write_checkpoint

pytest.importorskip("gguf")

FILE = "tiny-Q8_0.gguf"
NAME = f"some/model:{FILE}"
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": BYTE_LEVEL_TOKENS}
"""Heads of 24 rows, which don't fit into blocks of 16."""


def write_model(path: Path, **options: Any) -> Path:
    """A GGUF file with a tokenizer, or its parts. Returns the first of them."""
    source = write_checkpoint(path.parents[3] / "source", **SHAPE)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, source, "Q8_0", change=add_byte_level, **options)
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


@pytest.fixture
def model(hub: HubServer) -> Path:
    return write_model(hub.root / "some" / "model" / FILE)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices come in several blocks, and columns of down projections through the disk."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 13)
    monkeypatch.setattr(reading, "DOWN_BLOCK_BYTES", 1 << 13)


def convert(tmp_path: Path, name: str = NAME, **options: Any) -> Path:
    return api.convert(name, tmp_path / "bundle", **options)


@pytest.mark.fast("Q8_0/-options1")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("folder", "options"), [("", {}), ("Q8_0/", {"split_max_tensors": 9})])
def test_the_bytes_are_those_of_a_file_and_come_once(
    hub: HubServer, tmp_path: Path, folder: str, options: dict[str, Any]
) -> None:
    first = write_model(hub.root / "some" / "model" / f"{folder}{FILE}", **options)
    with prepare(f"some/model:{folder}{first.name}", tmp_path / "bundle") as prepared:
        hub.rules.sent_bytes = 0
        hub.rules.break_after = [5, 1000, 3000, 1 << 30, 0, 1 << 30, 12]
        estimate = prepared.estimate()
        assert hub.rules.sent_bytes == 0
        prepared.run()
    assert hub.rules.break_after == []
    assert hub.rules.sent_bytes == estimate.download_bytes
    assert 0 <= estimate.passing_bytes < estimate.download_bytes
    assert weights(tmp_path / "bundle") == weights(api.convert(first, tmp_path / "expected"))
    provenance = Bundle.open(tmp_path / "bundle").manifest.provenance
    commit = provenance.source.split("@")[1][:8]
    assert provenance.source == f"some/model@{commit}:{folder}{FILE}"
    assert provenance.source_format == "gguf"
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("model")
def test_encoded_columns_that_fit_in_memory_pass_through_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A down projection has 96 x 160 values: 16,320 bytes as they are encoded, and 61,440 as float32."""
    monkeypatch.setattr(reading, "DOWN_BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(Spool, "matrix", lambda *_: pytest.fail("a matrix was spooled"))
    with prepare(NAME, tmp_path / "bundle") as prepared:
        assert prepared.estimate().passing_bytes == 0
        prepared.run()


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_mlx_folders_come_once(hub: HubServer, tmp_path: Path) -> None:
    def scheme(module: str) -> Scheme:
        return MXFP4 if "layers.1" in module else Scheme(4, 32, "BF16")

    folder = write_mlx_folder(hub.root / "some" / "model", exceptions=scheme, shards=3)
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.sent_bytes = 0
        estimate = prepared.estimate()
        prepared.run()
    assert weights(tmp_path / "bundle") == weights(api.convert(folder.path, tmp_path / "expected"))
    assert Bundle.open(tmp_path / "bundle").manifest.provenance.source_format == "mlx"
    assert hub.rules.sent_bytes == estimate.download_bytes


def test_a_kept_file_serves_without_the_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_model(hub.root / "some" / "model" / f"Q8_0/{FILE}", split_max_tensors=9)
    name = f"some/model:Q8_0/{first.name}"
    (first.parent / "other.gguf").write_bytes(b"another quantisation")
    bundle = convert(tmp_path, name, keep_source=True)
    expected = weights(bundle)
    kept = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/Q8_0/*")}
    assert kept == {path.name for path in first.parent.iterdir()} - {"other.gguf"}
    source = Bundle.open(bundle).manifest.provenance.source
    assert source == f"some/model@{source.split('@')[1][:8]}:Q8_0/{FILE}"
    with prepare(name, tmp_path / "again") as prepared:
        assert prepared.estimate().download_bytes == 0
    hub.rules.asked.clear()
    assert weights(api.convert(name, tmp_path / "offline", offline=True)) == expected
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with prepare(name, tmp_path / "switched") as prepared:
        assert prepared.estimate().download_bytes == 0
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids"):
        convert(tmp_path, "some/model:Q8_0/other.gguf", force=True)
    with pytest.raises(ModelNotFoundError, match="isn't here, and offline=True forbids"):
        convert(tmp_path, "some/model:Q8_0/other.gguf", force=True, offline=True)
    assert hub.rules.asked == []


def test_a_newer_commit_is_not_downloaded_beside_the_kept_one(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch is asked only for its commit's name, as its file may be another by now."""
    opening = pytest.importorskip("ondevice.converters.hub.opening")
    monkeypatch.setattr(opening, "_newest_commit", lambda listing: "0" * 40)
    convert(tmp_path, keep_source=True)
    assert not any("/resolve/main/" in asked for asked in hub.rules.asked)


def test_a_kept_file_is_converted_though_the_hub_is_gone_by_then(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = pytest.importorskip("ondevice.converters.hub.opening")

    def gone(*arguments: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(opening, "get_hf_file_metadata", gone)
    assert convert(tmp_path, keep_source=True).is_dir()


def test_a_gated_repository_needs_a_token(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.rules.gated = True
    with pytest.raises(ModelNotFoundError, match=r"some/model is gated.*hf auth login"):
        convert(tmp_path)
    monkeypatch.setenv("HF_TOKEN", hub.rules.token)
    with prepare(NAME, tmp_path / "bundle") as prepared:
        assert prepared.estimate().download_bytes > 0
    assert hub.rules.leaked_tokens == 0


def test_files_of_one_name_in_two_folders_are_two_sources(
    hub: HubServer, model: Path, tmp_path: Path
) -> None:
    """Also where the hub tells no hashes: an interrupted conversion of one isn't gone on with the other."""

    def without_hashes(answer: dict[str, Any]) -> Any:
        for entry in answer["siblings"]:
            entry |= {"lfs": None, "blobId": None}
        return answer

    hub.rules.describe = without_hashes
    (model.parent / "other").mkdir()
    (model.parent / "other" / FILE).write_bytes(model.read_bytes())
    with prepare(NAME, tmp_path / "bundle") as prepared:
        hub.rules.break_after = [1 << 30] * 9 + [0] * 6
        with pytest.raises(DownloadError):
            prepared.run()
    with pytest.raises(OndeviceError, match=r"another source|has changed"):
        convert(tmp_path, f"some/model:other/{FILE}", resume=True)


def touch(folder: Path, sizes: dict[str, int]) -> None:
    for name, nbytes in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(nbytes))


def test_a_repository_of_gguf_files_lists_them(hub: HubServer, tmp_path: Path) -> None:
    parts = {f"BF16/a-BF16-0000{number}-of-00002.gguf": 6_000 for number in (1, 2)}
    others = {"mmproj-F16.gguf": 5, "imatrix.gguf": 5, "README.md": 5, "config.json": 2}
    touch(hub.root / "some" / "model", {"a-IQ1_S.gguf": 1_500, "a-Q4_K_M.gguf": 2_000} | parts | others)
    with pytest.raises(UnsupportedModelError) as refused:
        convert(tmp_path, "some/model")
    lines = str(refused.value).splitlines()
    assert lines[0] == (
        "some/model holds GGUF files; name the one to take, as in `ondevice chat some/model:a-Q4_K_M.gguf`"
    )
    assert [line.split() for line in lines[1:]] == [
        ["12.0", "kB", "some/model:BF16/a-BF16-00001-of-00002.gguf", "in", "2", "parts"],
        ["1.50", "kB", "some/model:a-IQ1_S.gguf"],
        ["2.00", "kB", "some/model:a-Q4_K_M.gguf"],
    ]
    with pytest.raises(ModelNotFoundError, match=r"(?s)has no b.gguf; name one that it has.*a-IQ1_S"):
        convert(tmp_path, "some/model:b.gguf")
    touch(hub.root / "some" / "model", {f"more-{number:02d}.gguf": 1 for number in range(50)})
    with pytest.raises(UnsupportedModelError, match=r"and 13 more$"):
        convert(tmp_path, "some/model")
    assert not any("resolve" in asked for asked in hub.rules.asked)


def test_a_file_missing_from_its_repository_is_not_found(hub: HubServer, tmp_path: Path) -> None:
    touch(hub.root / "some" / "model", {"config.json": 2})
    with pytest.raises(ModelNotFoundError, match=r"has no b.gguf, nor any other GGUF file"):
        convert(tmp_path, "some/model:b.gguf")


def resized(change: Callable[[int], Any]) -> Callable[[dict[str, Any]], Any]:
    def describe(answer: dict[str, Any]) -> Any:
        for entry in answer["siblings"]:
            entry["size"] = change(entry["size"])
        return answer

    return describe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nbytes: nbytes + 1, "and .* are listed; the hub contradicts itself"),
        (lambda nbytes: nbytes - 1, "and .* are listed; the hub contradicts itself"),
        (lambda nbytes: 1 << 41, "and .* are listed; the hub contradicts itself"),
        (lambda nbytes: 0, "isn't a sound GGUF file"),
        (lambda nbytes: 1 << 43, "which no file has"),
        (lambda nbytes: None, "which no file has"),
    ],
)
def test_wrong_sizes_are_refused(
    hub: HubServer, model: Path, tmp_path: Path, change: Callable[[int], Any], message: str
) -> None:
    hub.rules.describe = resized(change)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path)
    assert not (tmp_path / "bundle.partial").exists()


def test_a_header_is_read_no_further_than_its_limit(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<IQ", 8, 60_000)
    model.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 9) + key + bytes(900_000))
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 50_000)
    hub.rules.sent_bytes = 0
    with pytest.raises(CheckpointError, match="which ends at 50000 or before"):
        convert(tmp_path)
    # What the connection has taken up meanwhile is sent too, but the file isn't.
    assert hub.rules.sent_bytes < 600_000


def test_long_headers_come_in_few_requests(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_READ_BYTES", 1 << 8)
    hub.rules.asked.clear()
    with prepare(NAME, tmp_path / "bundle"):
        asked = [line for line in hub.rules.asked if "/lfs/" in line]
    assert model.stat().st_size > 1 << 14
    assert len(asked) < 12


def test_false_answers_are_refused(hub: HubServer, model: Path, tmp_path: Path) -> None:
    hub.rules.lie_of_total = 1
    with pytest.raises(CheckpointError, match="the hub contradicts itself"):
        convert(tmp_path)
    hub.rules.lie_of_total, hub.rules.ignore_ranges = 0, True
    with pytest.raises(DownloadError, match="ignores which bytes are asked for"):
        convert(tmp_path)
    hub.rules.ignore_ranges = False
    for target in (f"{hub.address}/some/model/resolve/0/x", "file:///etc/passwd", "http://127.0.0.1:9/x"):
        hub.rules.redirect_to = target
        with pytest.raises((DownloadError, CheckpointError)):
            convert(tmp_path, force=True)


@pytest.mark.parametrize("redirects", [True, False])
def test_a_file_that_is_replaced_after_its_header_was_read(
    hub: HubServer, model: Path, tmp_path: Path, redirects: bool
) -> None:
    hub.rules.redirects = redirects
    with prepare(NAME, tmp_path / "bundle") as prepared:
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
        with pytest.raises(CheckpointError, match="isn't the file that the hub listed: it has been replaced"):
            prepared.run()


def test_another_file_under_the_same_commit_is_refused(hub: HubServer, model: Path, tmp_path: Path) -> None:
    with prepare(NAME, tmp_path / "bundle") as prepared:
        hub.rules.tag = "0" * 64
        with pytest.raises(CheckpointError, match="isn't the file that the hub listed"):
            prepared.run()


def test_what_is_not_supported_is_refused_by_the_header_alone(
    hub: HubServer, model: Path, tmp_path: Path
) -> None:
    header = model.read_bytes()
    model.write_bytes(header.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(UnsupportedModelError, match=r"is a recurrent model without attention: general"):
        convert(tmp_path)
    model.write_bytes(b"PK\3\4" + header)
    with pytest.raises(CheckpointError, match="doesn't begin with GGUF"):
        convert(tmp_path)
    assert not (tmp_path / "bundle.partial").exists()


def test_parts_that_are_missing(hub: HubServer, tmp_path: Path) -> None:
    first = write_model(hub.root / "some" / "model" / FILE, split_max_tensors=9)
    sorted(first.parent.iterdir())[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-0000\d\.gguf.* isn't complete"):
        convert(tmp_path, f"some/model:{first.name}")


def test_a_tokenizer_beside_the_file_is_taken_as_on_a_disk(
    hub: HubServer, model: Path, tmp_path: Path
) -> None:
    (model.parent / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"tokenizer\.json"):
        convert(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_download_killed_ten_times_resumes_to_the_same_bundle(hub: HubServer, tmp_path: Path) -> None:
    first = write_model(hub.root / "some" / "model" / FILE, split_max_tensors=9)
    hub.rules.break_after = [70_000, 5, 3_000] * 8
    report = kill_and_resume(tmp_path, hub, kills=10, seed=3, name=f"some/model:{first.name}")
    assert report["killed"] >= 10
    assert (report["different"], report["left"]) == (0, 0)
