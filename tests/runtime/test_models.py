"""Names to folders, the `convert` line for what isn't there, and the modes a model can have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ondevice.bundle.layout
from ondevice import converters
from ondevice.api import load
from ondevice.config import RuntimeConfig
from ondevice.converters.architectures.common import llama_config
from ondevice.errors import (
    BackendUnavailableError,
    BundleError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.model_config import ModelConfig
from ondevice.runtime import backend_choice, models
from ondevice.runtime.repository import Repository, converted_from, parse_repository
from tests.support.paths import SHIPPED


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("ONDEVICE_HOME", str(folder))
    monkeypatch.setattr(models, "shipped_folder", lambda: tmp_path / "weights")
    return folder


def make_bundle(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "bundle.json").write_text("{}")
    return folder


def test_a_path_a_name_and_a_repository_id_find_their_bundle(home: Path, tmp_path: Path) -> None:
    inside = make_bundle(home / "tale")
    outside = make_bundle(tmp_path / "elsewhere" / "story")
    assert models.find_model("tale") == inside
    assert models.find_model(str(outside)) == outside
    assert models.find_model(outside) == outside
    assert models.find_model("someone/tale") == inside


def test_the_model_folder_comes_before_what_ships(home: Path, tmp_path: Path) -> None:
    shipped = make_bundle(tmp_path / "weights" / "tiny")
    assert models.find_model("tiny") == shipped
    assert models.find_model() == shipped
    own = make_bundle(home / "tiny")
    assert models.find_model("tiny") == own
    assert models.find_model() == shipped


def test_without_a_shipped_model_the_message_says_what_to_do(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"ondevice convert CHECKPOINT --output .*NAME"):
        models.find_model()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("llama-7b", "ondevice convert huggyllama/llama-7b --output {home}/llama-7b"),
        ("Qwen/Qwen3-8B", "ondevice convert Qwen/Qwen3-8B --output {home}/Qwen3-8B"),
        ("unheard-of", "ondevice convert CHECKPOINT --output {home}/unheard-of"),
        ("./nowhere/model", "ondevice convert CHECKPOINT --output nowhere/model"),
        ("two words", "ondevice convert CHECKPOINT --output '{home}/two words'"),
    ],
)
def test_a_missing_model_gets_the_line_that_makes_it(home: Path, name: str, line: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        models.find_model(name)
    assert line.format(home=home) in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", [".", "..", "../..", "/"])
def test_names_that_are_no_names_find_nothing(home: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        models.find_model(name)


@pytest.mark.parametrize("name", ["", 3, b"tiny"])
def test_what_can_be_no_name_is_refused(home: Path, name: Any) -> None:
    with pytest.raises(UsageError):
        models.find_model(name)


def test_a_file_is_no_bundle_and_is_told_what_it_may_be(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "tale.bin"
    checkpoint.write_bytes(bytes(range(1, 9)))
    with pytest.raises(ModelNotFoundError, match=f"ondevice convert {checkpoint} --output {home}/tale$"):
        models.find_model(str(checkpoint))
    bundle = make_bundle(tmp_path / "tale")
    with pytest.raises(ModelNotFoundError, match=f"give its folder, {bundle}$"):
        models.find_model(str(bundle / "bundle.json"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        models.find_model("tale.bin")


def test_known_models_are_those_of_both_folders(home: Path, tmp_path: Path) -> None:
    assert models.known_models() == {}
    make_bundle(home / "tale")
    make_bundle(tmp_path / "weights" / "tiny")
    (home / "unfinished").mkdir()
    assert list(models.known_models()) == ["tale", "tiny"]


def test_a_checkpoint_is_told_from_a_bundle(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ModelNotFoundError, match="isn't a"):
        models.find_model(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=f"ondevice convert {folder} --output {home}/hf"):
        models.find_model(str(folder))


def test_every_alias_names_a_repository() -> None:
    assert all(parse_repository(name) == Repository(name) for name in models.ALIASES.values())
    assert not any("/" in alias for alias in models.ALIASES)


def test_a_source_is_a_path_or_a_repository(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    assert models.find_source(str(tmp_path)) == tmp_path
    assert models.find_source("llama-7b") == Repository("huggyllama/llama-7b")
    assert models.find_source("some/model") == Repository("some/model")
    with pytest.raises(ModelNotFoundError, match="no checkpoint at"):
        models.find_source("./not/here.bin")
    assert models.find_source("some/model:Q8_0/a.gguf") == Repository("some/model", "Q8_0/a.gguf")
    for name in ("some/model:../a.gguf", "some/model:/a.gguf", "some/model:", "some/model:a.gguf:b"):
        with pytest.raises(ModelNotFoundError, match="no checkpoint at"):
            models.find_source(name)
    with pytest.raises(UnsupportedModelError, match=r"with \.gguf at the end; some/model names all of it"):
        models.find_source("some/model:Q4_K_M")


def test_the_name_of_a_bundle_of_a_repositorys_file(home: Path) -> None:
    names = {
        "some/model": "model",
        "some/model:Q8_0/tiny-Q8_0.gguf": "tiny-Q8_0",
        "some/model:tiny.v1-00002-of-00003.gguf": "tiny.v1",
    }
    for source, name in names.items():
        assert models.default_output(source) == home / name
    with pytest.raises(ModelNotFoundError, match=f"convert some/model:tiny.gguf --output {home}/tiny"):
        models.find_model("some/model:tiny.gguf")
    parts = [Repository("some/model", f"tiny-0000{number}-of-00003.gguf") for number in (1, 2)]
    assert parts[0].is_same(parts[1])
    assert not parts[0].is_same(Repository("some/model"))
    assert converted_from("Some/model@0123abcd:tiny.gguf") == Repository("Some/model", "tiny.gguf")
    assert converted_from("tiny") is None


def test_nothing_is_downloaded_that_no_conversion_reads() -> None:
    repository = pytest.importorskip("ondevice.converters.hub.repository")
    assert not [name for name in repository.FILES if name.endswith((".py", ".bin", ".pt", "*"))]
    sources = Path(converters.__file__).parent.rglob("*.py")
    layout = Path(ondevice.bundle.layout.__file__)
    read = "".join(path.read_text() for path in (layout, *sources) if path.parent.name != "hub")
    named = [name for name in repository.FILES if "*" not in name]
    assert [name for name in named if f'"{name}"' not in read] == []


def test_offline_and_a_missing_extra_forbid_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="offline=True"):
        models.find_source("llama-7b", offline=True)
    monkeypatch.setattr(models.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install 'ondevice\[hub\]'"):
        models.find_source("llama-7b")


@pytest.fixture
def config_for() -> Callable[[str], ModelConfig]:
    def make(hidden_act: str) -> ModelConfig:
        return llama_config("llama", 64, 2, 4, 4, 16, 128, 256, 512, hidden_act, 1e-5, 1e4)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "relu", "relu2"])
def test_the_modes_that_are_possible_and_why_the_others_are_not(
    config_for: Callable[[str], ModelConfig], hidden_act: str
) -> None:
    config = config_for(hidden_act)
    modes = {mode.name: mode for mode in models.sparsity_modes(config, None)}
    possible = ["dense", "exact"] if hidden_act.startswith("relu") else ["dense"]
    assert [name for name, mode in modes.items() if mode.available] == possible
    for name in modes.keys() - possible:
        with pytest.raises(UnsupportedModelError, match=f"It can have: {', '.join(possible)}") as caught:
            models.check_runtime(config, RuntimeConfig(sparsity=name), None)
        assert modes[name].reason in str(caught.value)
    for name in ("auto", *possible):
        models.check_runtime(config, RuntimeConfig(sparsity=name), None)
    assert models.automatic_modes(config, RuntimeConfig()) == possible[::-1]


def test_speculation_and_backends_that_are_not_there_are_refused(
    config_for: Callable[[str], ModelConfig],
) -> None:
    config = config_for("silu")
    for speculation in ("streams",):
        with pytest.raises(UnsupportedModelError, match=f'speculation="{speculation}"'):
            models.check_runtime(config, RuntimeConfig(speculation=speculation), None)
    for speculation in ("lookup", "recycling", "resident"):
        models.check_runtime(config, RuntimeConfig(speculation=speculation), None)
        with pytest.raises(BackendUnavailableError, match='backend="cpu"'):
            load(SHIPPED, speculation=speculation, backend="reference")


def test_mlx_that_is_not_there_is_said_with_how_to_get_it(
    config_for: Callable[[str], ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_choice, "has_mlx", lambda: False)
    with pytest.raises(BackendUnavailableError, match="pip install"):
        models.check_runtime(config_for("silu"), RuntimeConfig(backend="mlx"), None)


def test_a_bundle_without_its_manifest_is_damaged_not_a_checkpoint(tmp_path: Path) -> None:
    for name in ("resident.safetensors", "checksums.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(BundleError, match=r"bundle\.json is missing"):
        models.find_model(str(tmp_path))
