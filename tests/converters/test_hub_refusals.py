"""Repositories that can't be had or converted, and hubs that lie: typed errors before a weight comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice import api
from ondevice.config import RuntimeConfig
from ondevice.errors import (
    BudgetError,
    CheckpointError,
    DownloadError,
    ModelNotFoundError,
    OndeviceError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.runtime.conversion import prepare
from ondevice.tokenizer import loading_bytes
from tests.support.bundles import write_chat_checkpoint
from tests.support.hub_server import HubServer
from tests.support.models import write_checkpoint


@pytest.fixture
def repository(hub: HubServer) -> Path:
    return write_chat_checkpoint(hub.root / "some" / "model", shards=3)


def convert(tmp_path: Path) -> Path:
    return api.convert("some/model", tmp_path / "bundle")


def test_a_missing_repository_is_not_found(hub: HubServer, tmp_path: Path) -> None:
    hub.root.mkdir()
    with pytest.raises(
        ModelNotFoundError, match=r"no repository some/model, or it is private.*check the name"
    ):
        convert(tmp_path)


def test_a_gated_repository_opens_with_a_token(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.rules.gated = True
    with pytest.raises(ModelNotFoundError, match=r"some/model is gated.*hf auth login"):
        convert(tmp_path)
    monkeypatch.setenv("HF_TOKEN", hub.rules.token)
    assert convert(tmp_path).is_dir()
    assert hub.rules.leaked_tokens == 0
    assert any("/lfs/" in asked for asked in hub.rules.asked)


def test_no_network_and_the_offline_switch_are_told_apart(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids"):
        convert(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.rules.refuse = [503] * 3
    with pytest.raises(DownloadError, match="the server answers 503, 3 times in a row"):
        convert(tmp_path)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(DownloadError, match=r"isn't reached.*check the network"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin, a pickle"),
        (["README.md"], "no config.json"),
        (["config.json"], "no safetensors"),
    ],
)
def test_repositories_without_safetensors_are_refused(
    hub: HubServer, tmp_path: Path, files: list[str], message: str
) -> None:
    folder = hub.root / "some" / "model"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=message):
        convert(tmp_path)
    assert not any("resolve" in asked for asked in hub.rules.asked)


def test_an_unknown_architecture_is_refused_by_its_config_alone(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedModelError, match="model_type 'mamba'"):
        convert(tmp_path)
    assert hub.rules.sent_bytes == 0


def test_what_does_not_fit_is_refused_before_a_weight_comes(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepare("some/model", tmp_path / "bundle") as prepared:
        hub.rules.sent_bytes = 0
        small = prepared.smallest_plan(RuntimeConfig(dram_budget=1_000_000))
        with pytest.raises(BudgetError) as refused:
            prepared.require_fit(small)
        # A run refuses to read the tokenizer below this, however little it then takes.
        data = (repository / "tokenizer.json").read_bytes()
        assert small.opening_bytes > loading_bytes("tokenizers", [data])
        assert refused.value.required_bytes > small.opening_bytes
        enough = prepared.smallest_plan(RuntimeConfig(dram_budget=refused.value.required_bytes + (8 << 20)))
        prepared.require_fit(enough)
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(OndeviceError, match=r"would take .*1000 bytes.* free"):
            prepared.run()
    assert hub.rules.sent_bytes == 0
    assert not (tmp_path / "bundle.partial").exists()


def sized(nbytes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(answer: dict[str, Any]) -> Any:
        for entry in answer["siblings"]:
            if entry["rfilename"].endswith(".safetensors"):
                entry["size"] = nbytes
        return answer

    return change


def renamed(name: Any) -> Callable[[dict[str, Any]], Any]:
    """The first shard under another name, so that the index refers to what isn't there."""

    def change(answer: dict[str, Any]) -> Any:
        next(e for e in answer["siblings"] if e["rfilename"].endswith("3.safetensors"))["rfilename"] = name
        return answer

    return change


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (lambda answer: b"[" * 100_000, "isn't sound JSON"),
        (lambda answer: b" " * ((16 << 20) + 1), "larger than"),
        (lambda answer: [], "names no commit or no files"),
        (lambda answer: answer | {"sha": "../../etc"}, "names no commit"),
        (lambda answer: answer | {"siblings": {}}, "no files"),
        (lambda answer: answer | {"siblings": [{"rfilename": f"{i}"} for i in range(30_000)]}, "30000 files"),
        (sized(1 << 60), "which no file has"),
        (sized(-1), "which no file has"),
        (sized("12"), "which no file has"),
        (sized(True), "which no file has"),
        (sized(0), "shorter than the hub says|is needed"),
        (sized(1 << 41), "and .* are listed"),
        (renamed("../../model-00003-of-00003.safetensors"), "has no 'model-00001-of-00003.safetensors'"),
        (renamed("/etc/passwd"), "has no 'model-00001"),
        (renamed(7), "has no 'model-00001"),
    ],
)
def test_false_descriptions_are_refused(
    hub: HubServer, repository: Path, tmp_path: Path, describe: Callable[[Any], Any], message: str
) -> None:
    hub.rules.describe = describe
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a\\b.safetensors", "C:x.safetensors", ""]
)
def test_an_index_that_leads_elsewhere(hub: HubServer, repository: Path, tmp_path: Path, name: str) -> None:
    index = repository / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        convert(tmp_path)
    assert not any("secret" in asked or "passwd" in asked for asked in hub.rules.asked)


def test_false_answers_are_refused(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    hub.rules.lie_of_total = 1
    with pytest.raises(CheckpointError, match="the hub contradicts itself"):
        convert(tmp_path)
    hub.rules.lie_of_total, hub.rules.ignore_ranges = 0, True
    with pytest.raises(DownloadError, match="ignores which bytes are asked for"):
        convert(tmp_path)
    hub.rules.ignore_ranges = False
    for target in (
        f"{hub.address}/some/model/resolve/0/x",
        "file:///etc/passwd",
        "http://127.0.0.1:9/x",
        "http://[",
        f"http://{'a' * 70}.example/x",
        "http://a..b/x",
        "http://" + "a" * 70_000,
    ):
        hub.rules.redirect_to = target
        with pytest.raises((DownloadError, CheckpointError)):
            convert(tmp_path)


def test_every_hop_is_encrypted_if_the_first_one_is(hub: HubServer) -> None:
    client = pytest.importorskip("ondevice.converters.hub.client").HubClient()
    source = client.file("some/model", "config.json", "0" * 40)
    answers = [
        SimpleNamespace(url=SimpleNamespace(scheme=scheme), headers={}) for scheme in ("https", "http")
    ]
    client.endpoint = "https://hub"
    for history, last in (answers[1:], answers[0]), (answers[:1], answers[1]):
        response = SimpleNamespace(history=history, status_code=200, **vars(last))
        with pytest.raises(DownloadError, match="redirected to where nothing is encrypted"):
            client._check_answer(source, response)


@pytest.mark.parametrize("endpoint", ["hub.example", "ftp://hub.example", "http://", "", "http://["])
def test_an_endpoint_that_is_no_address(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    with pytest.raises(UsageError, match=r"HF_ENDPOINT is .*; it must be an address"):
        convert(tmp_path)


def test_a_token_that_cannot_be_sent(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_\u00fcber")
    with pytest.raises(UsageError, match="is the token in HF_TOKEN whole"):
        convert(tmp_path)


@pytest.mark.slow
def test_a_kept_source_over_a_connection_that_breaks(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub tries again a few times, and then lets the error of its HTTP library through."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    expected = sorted(path.name for path in repository.iterdir())
    with prepare("some/model", tmp_path / "bundle", keep_source=True) as prepared:
        hub.rules.break_after = [1 << 30, *[5_000] * 6]
        with pytest.raises(DownloadError, match=r"couldn't be downloaded: .*check the network"):
            prepared.run()
    assert hub.rules.break_after == []
    bundle = api.convert("some/model", tmp_path / "bundle", keep_source=True)
    assert bundle.is_dir()
    assert sorted(path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")) == expected


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_errors_of_the_hub_s_library_become_download_errors(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error("something")

    monkeypatch.setattr("ondevice.converters.hub.opening.hf_hub_download", fail)
    with pytest.raises(DownloadError, match="something; check the network"):
        api.convert("some/model", tmp_path / "bundle", keep_source=True)


def test_headers_are_not_kept(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    """A repository may have thousands of files, whose beginnings are read together with more."""
    with prepare("some/model", tmp_path / "bundle") as prepared:
        files = prepared._checkpoint.source_files
        assert len(files) == 3
        assert not any(file._head for file in files)


def test_headers_of_any_size_are_bounded(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    shard = repository / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    for length in (1 << 62, len(data) + 1, 0):
        shard.write_bytes(length.to_bytes(8, "little") + data[8:])
        with pytest.raises(CheckpointError):
            convert(tmp_path)


def test_a_file_without_the_tensors_that_it_lists(hub: HubServer, tmp_path: Path) -> None:
    """Cut short after its header, on a hub that tells the true size of what is left."""
    source = write_checkpoint(hub.root / "some" / "model")
    weights_file = source / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="truncated"):
        convert(tmp_path)
