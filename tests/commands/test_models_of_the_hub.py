"""A chat with a model of the hub in one command, and the models that are here: listed, and removed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ondevice.bundle.reader import Bundle
from ondevice.commands import obtaining, terminal
from ondevice.config import RuntimeConfig
from tests.converters.test_hub_gguf import write_model as write_gguf_model
from tests.support.bundles import CONTEXT, VOCAB_SIZE, write_byte_tokenizer, write_chat_checkpoint
from tests.support.command_line import Run, command
from tests.support.hub_server import HubServer
from tests.support.mlx_folders import Scheme, write_mlx_folder
from tests.support.models import write_checkpoint

CHAT = ("chat", "--max-tokens", 3, "--temp", 0)


@pytest.fixture
def repository(hub: HubServer) -> Path:
    return write_chat_checkpoint(hub.root / "some" / "model", shards=3)


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody can answer: stdin is what a test gives."""
    for module in (terminal, obtaining):
        monkeypatch.setattr(module, "can_ask", lambda: True)


@pytest.fixture
def converted(ondevice: Run, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a bundle of a name in the model folder."""

    def make(name: str) -> Path:
        source = write_chat_checkpoint(tmp_path / "sources" / name)
        assert ondevice("convert", source).code == 0
        return tmp_path / "home" / name

    return make


def test_one_command_converts_a_model_of_the_hub_and_chats(
    ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    first = ondevice(*CHAT, "--model", "some/model", "--yes", stdin="Hello\n")
    assert first.code == 0, first.err
    weights = sum(path.stat().st_size for path in repository.glob("*.safetensors"))
    assert f"download  {weights / 1e6:.2f} MB" in first.err
    assert "none of it stored as it is" in first.err
    assert f"to {tmp_path / 'home' / 'model'}" in first.err
    assert "the smallest budget that it will run in" in first.err
    assert re.search(r"speed     about [\d.]+ tokens/s in .* which hold everything", first.err)
    assert first.out.endswith("\n")
    hub.rules.asked.clear()
    again = ondevice(*CHAT, "--model", "some/model", stdin="Hello\n")
    assert (again.code, again.out) == (0, first.out)
    assert hub.rules.asked == []


def test_one_command_converts_a_gguf_file_of_the_hub_and_chats(
    ondevice: Run, hub: HubServer, tmp_path: Path
) -> None:
    write_gguf_model(hub.root / "some" / "model-GGUF" / "Q8_0" / "tiny-Q8_0.gguf")
    listed = ondevice(*CHAT, "--model", "some/model-GGUF", "--yes", stdin="Hello\n")
    assert listed.code == 3
    name = listed.err.split("`ondevice chat ")[1].split("`")[0]
    assert name == "some/model-GGUF:Q8_0/tiny-Q8_0.gguf"
    refused = ondevice(*CHAT, "--model", name, "--yes", "--dram-budget", "2MB", stdin="Hello\n")
    assert refused.code == 5
    assert not (tmp_path / "home").exists()
    first = ondevice(*CHAT, "--model", name, "--yes", stdin="Hello\n")
    assert first.code == 0, first.err
    assert "none of it stored as it is" in first.err
    assert f"to {tmp_path / 'home' / 'tiny-Q8_0'}" in first.err
    hub.rules.asked.clear()
    for again in (name, "tiny-Q8_0"):
        done = ondevice(*CHAT, "--model", again, stdin="Hello\n")
        assert (done.code, done.out) == (0, first.out)
    assert ondevice("inspect", name, "--json").json["minimum_budget_bytes"] > 0
    assert hub.rules.asked == []
    models = {model["name"]: model["source"] for model in ondevice("list", "--json").json["models"]}
    assert models["tiny-Q8_0"].endswith(":Q8_0/tiny-Q8_0.gguf")
    # The same name in another repository is another model.
    refused = ondevice(*CHAT, "another/copy:tiny-Q8_0.gguf", "--yes", stdin="Hello\n")
    assert refused.code == 3
    assert f"was made from {name}, not from another/copy:tiny-Q8_0.gguf" in refused.err
    assert "then the model's name is another--copy--tiny-Q8_0" in refused.err
    assert ondevice("remove", "tiny-Q8_0", "--yes").code == 0
    assert list((tmp_path / "home").iterdir()) == []


def test_the_smallest_budget_that_is_said_is_enough(ondevice: Run, hub: HubServer, repository: Path) -> None:
    assert ondevice("generate", "some/model", "--yes", "--prompt", "a", "--max-tokens", 1).code == 0
    least = ondevice("inspect", "some/model", "--json").json["minimum_budget_bytes"]
    said = ondevice("convert", "some/model", "--output", "elsewhere", "--quant", "q4").err
    line = next(line for line in said.splitlines() if line.startswith("  memory"))
    assert abs(int(line.split("(")[1].split(" ")[0]) - least) < 0.1 * least


@pytest.mark.slow
def test_a_process_that_has_converted_still_keeps_the_budget_that_it_named(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    """In one process, what converts would stay in memory, and the model be refused its budget."""
    settings = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "ONDEVICE_HOME": str(tmp_path / "home"),
    }

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | settings
        return subprocess.run(
            command(*arguments), env=environment, capture_output=True, text=True, check=False
        )

    said = run("convert", "some/model").stderr
    line = next(line for line in said.splitlines() if line.startswith("  memory"))
    budget = int(line.split("(")[1].split(" ")[0])
    told = ("--prompt", "a", "--max-tokens", 2, "--dram-budget", budget)
    done = run("generate", "some/model", "--yes", *told)
    assert done.returncode == 0, done.stderr
    assert "converted: " in done.stderr
    assert done.stdout == run("generate", "some/model", *told).stdout
    # Nor is a budget refused before a conversion that would be enough behind it.
    least = json.loads(run("inspect", "model", "--json").stdout)["minimum_budget_bytes"]
    assert least <= budget < least + (6 << 20)


def test_nobody_to_ask_and_no_yes(ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path) -> None:
    for words in (CHAT, ("generate", "--prompt", "a")):
        refused = ondevice(*words, "--model", "some/model", stdin="Hello\n")
        assert refused.code == 3
        assert f"ondevice convert some/model --output {tmp_path / 'home' / 'model'}" in refused.err
        assert "at a terminal, or with --yes, this command makes it" in refused.err
    assert hub.rules.asked == []
    refused = ondevice("convert", "some/model")
    assert refused.code == 2
    assert "nothing was downloaded or written: this asks first" in refused.err
    assert "download  " in refused.err
    assert not (tmp_path / "home").exists()


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("answer", ["n\n", "\n"])
def test_an_answer_that_is_not_yes(
    ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path, answer: str
) -> None:
    for words in ((*CHAT, "some/model"), ("convert", "some/model")):
        refused = ondevice(*words, stdin=answer)
        assert (refused.code, refused.out) == (2, "")
        assert "nothing was downloaded or written, as the answer was no" in refused.err
    assert not (tmp_path / "home").exists()


@pytest.mark.usefixtures("at_a_terminal")
def test_a_yes_at_a_terminal_starts_the_download(ondevice: Run, hub: HubServer, repository: Path) -> None:
    assert ondevice("generate", "some/model", "--prompt", "a", "--max-tokens", 1, stdin="y\n").code == 0


def test_a_budget_that_cannot_be_met_is_refused_before_a_weight_comes(
    ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    refused = ondevice(*CHAT, "some/model", "--yes", "--dram-budget", "2MB", stdin="Hello\n")
    assert refused.code == 5
    assert "the smallest that works is" in refused.err
    refused = ondevice(*CHAT, "some/model", "--yes", "--sparsity", "exact", stdin="Hello\n")
    assert refused.code == 3
    assert "--sparsity exact isn't possible" in refused.err
    assert not (tmp_path / "home").exists()


def test_what_broke_goes_on_with_the_same_command(
    ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    # Three headers and the first layer, then nothing.
    hub.rules.break_after = [1 << 30] * 9 + [0] * 6
    broken = ondevice(*CHAT, "some/model", "--yes", stdin="Hello\n")
    assert broken.code == 1
    assert "what is done is kept: the same command goes on with it" in broken.err
    listed = ondevice("list", "--json").json["models"]
    found = next(model for model in listed if model["name"] == "model")
    assert (found["state"], found["path"]) == ("unfinished", str(tmp_path / "home" / "model.partial"))
    again = ondevice(*CHAT, "some/model", "--yes", stdin="Hello\n")
    assert again.code == 0
    assert "begun     " in again.err
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["model"]


def test_text_keeps_the_source_and_says_so(
    ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("There is a house on a hill, and a dog in front of it. " * 25)
    trained = ondevice("convert", "some/model", "--text", text, "--yes")
    assert trained.code == 0, trained.err
    assert "so its files are kept in the hub's cache" in trained.err
    assert list((tmp_path / "cache").rglob("snapshots/*/model-00003-of-00003.safetensors"))


def test_repositories_of_one_name(ondevice: Run, hub: HubServer, repository: Path, tmp_path: Path) -> None:
    assert ondevice("convert", "some/model", "--yes").code == 0
    write_chat_checkpoint(hub.root / "another" / "model", seed=1)
    refused = ondevice(*CHAT, "another/model", "--yes", stdin="Hello\n")
    assert refused.code == 3
    assert "was made from some/model, not from another/model" in refused.err
    line = refused.err.split("To have both: ondevice ")[1].split(";")[0].split(" ")
    assert ondevice(*line, "--yes").code == 0
    assert ondevice(*CHAT, "another--model", stdin="Hello\n").code == 0


def test_a_folder_is_converted_once(ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_chat_checkpoint(tmp_path / "sources" / "tale")
    refused = ondevice(*CHAT, source, stdin="Hello\n")
    assert refused.code == 3
    assert "is a checkpoint, not a bundle. Convert it first" in refused.err
    first = ondevice(*CHAT, source, "--yes", stdin="Hello\n")
    assert first.code == 0, first.err
    assert "converted: " in first.err
    assert "download" not in first.err
    again = ondevice(*CHAT, source, stdin="Hello\n")
    assert (again.code, again.out) == (0, first.out)
    assert "converted" not in again.err


def test_a_converted_folder_leaves_no_more_in_memory_than_its_bundles_name(
    ondevice: Run, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    converted("one")
    script = (
        "import sys, atexit; "
        "atexit.register(lambda: print('ondevice.converters' in sys.modules)); "
        "from ondevice import cli; from ondevice.errors import START_AGAIN; code = cli.run(sys.argv[1:]); "
        "sys.exit(code) if code != START_AGAIN else os.execv(sys.executable, sys.orig_argv)"
    )
    arguments = ["generate", tmp_path / "sources" / "one", "-p", "a", "--max-tokens", 1]
    found = subprocess.run(
        [sys.executable, "-c", "import os; " + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=os.environ | {"ONDEVICE_HOME": str(tmp_path / "home")},
    )
    assert found.stdout.endswith("False\n"), found.stdout


def test_two_folders_of_one_name(ondevice: Run, converted: Callable[[str], Path], tmp_path: Path) -> None:
    """The advice is a command that works, and not an option that this command lacks."""
    converted("one")
    other = write_chat_checkpoint(tmp_path / "others" / "one", seed=1)
    refused = ondevice(*CHAT, other, "--yes", stdin="Hello\n")
    assert refused.code == 2
    assert "wasn't made from" in refused.err
    assert "--force" not in refused.err
    line = refused.err.split("`ondevice ")[1].split("`")[0].split(" ")
    assert ondevice(*line).code == 0
    assert ondevice(*CHAT, "one-2", stdin="Hello\n").code == 0
    # A name that is taken isn't advised again.
    assert "one-3" in ondevice(*CHAT, other, "--yes", stdin="Hello\n").err


def test_a_name_of_two_lines_is_told_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the command that starts again would convert, find it done and start again for ever."""
    monkeypatch.setenv("_ONDEVICE_CONVERTED", f"a\nb\n{tmp_path}")
    assert obtaining.ensure_bundle("a\nb", RuntimeConfig(), yes=False) == tmp_path
    assert "_ONDEVICE_CONVERTED" not in os.environ


def test_a_folder_with_one_file_is_converted(ondevice: Run, hub: HubServer, tmp_path: Path) -> None:
    """As Hugging Face folders are; the file's own name isn't needed."""
    file = write_gguf_model(tmp_path / "folder" / "of" / "tiny" / "model.gguf")
    first = ondevice(*CHAT, file.parent, "--yes", stdin="Hello\n")
    assert first.code == 0, first.err
    assert (tmp_path / "home" / "tiny" / "bundle.json").is_file()
    stories = tmp_path / "stories"
    stories.mkdir()
    (stories / "model.bin").write_bytes(b"PK\3\4 and so on")
    refused = ondevice(*CHAT, stories, "--yes", stdin="Hello\n")
    assert refused.code == 3
    assert "is a zip archive. If PyTorch saved it, it has a pickle" in refused.err
    (stories / "model.bin").unlink()
    refused = ondevice(*CHAT, stories, "--yes", stdin="Hello\n")
    assert "holds no bundle.json" in refused.err


def test_a_checkpoint_without_a_tokenizer_is_refused_before_it_is_converted(
    ondevice: Run, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "sources" / "ids", num_hidden_layers=1)
    refused = ondevice(*CHAT, source, "--yes", stdin="Hello\n")
    assert refused.code == 2
    assert "ids has no tokenizer" in refused.err
    assert "tokenizer.json" in refused.err
    assert not (tmp_path / "home").exists()


def test_what_was_rounded_is_said_by_both_commands(ondevice: Run, hub: HubServer, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT}
    source = write_mlx_folder(tmp_path / "mlx", Scheme(4, 32), **shape).path
    write_byte_tokenizer(source)
    first = ondevice("generate", source, "--yes", "--prompt", "a", "--max-tokens", 1)
    notes = Bundle.open(tmp_path / "home" / "mlx").manifest.provenance.notes
    assert notes
    assert ondevice("remove", "mlx", "--yes").code == 0
    second = ondevice("convert", source)
    for said in (first.err, second.err):
        assert [line for line in said.splitlines() if line in notes] == list(notes)


def test_list_shows_every_model_and_remove_deletes_the_named_one(
    ondevice: Run, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    kept, gone = converted("kept"), converted("gone")
    (tmp_path / "home" / "damaged").mkdir()
    (tmp_path / "home" / "damaged" / "bundle.json").write_text("{}")
    listed = {model["name"]: model for model in ondevice("list", "--json").json["models"]}
    assert listed["gone"]["bytes"] == sum(path.stat().st_size for path in gone.iterdir())
    assert (listed["gone"]["state"], listed["gone"]["quantisation"]) == ("whole", "q4")
    assert listed["gone"]["source"] == Bundle.open(gone).manifest.provenance.source
    assert listed["damaged"]["state"] == "damaged"
    assert listed["small-relu"]["ships"] is True
    text = ondevice("list").out
    assert all(name in text for name in listed)

    refused = ondevice("remove", "gone")
    assert refused.code == 2
    assert "nothing was deleted: this asks first" in refused.err
    assert gone.is_dir()
    assert ondevice("remove", "gone", "--yes").code == 0
    assert ondevice("remove", "damaged", "--yes").code == 0
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["kept"]
    assert ondevice("remove", "gone", "--yes").code == 3
    assert kept.is_dir()


def test_what_is_not_a_converted_model_is_not_removed(
    ondevice: Run, converted: Callable[[str], Path]
) -> None:
    kept = converted("kept")
    for name in ("small-relu", "..", "../kept", "/etc", "", "a/b"):
        assert ondevice("remove", name, "--yes").code == 2, name
        assert (kept / "bundle.json").is_file(), name


def test_files_of_the_users_own_are_not_removed(ondevice: Run, converted: Callable[[str], Path]) -> None:
    folder = converted("kept")
    (folder / "thesis.txt").write_text("years of work")
    refused = ondevice("remove", "kept", "--yes")
    assert refused.code == 2
    assert "thesis.txt isn't part of a bundle" in refused.err
    assert json.loads((folder / "bundle.json").read_text())
    (folder / "thesis.txt").unlink()
    (folder / "about.txt").write_text("a tale")
    assert ondevice("remove", "kept", "--yes").code == 0
    assert not folder.exists()


def test_a_link_among_the_models_is_not_followed(
    ondevice: Run, converted: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = converted("kept").rename(tmp_path / "elsewhere")
    (tmp_path / "home" / "link").symlink_to(folder)
    assert ondevice("remove", "link", "--yes").code == 2
    assert (folder / "bundle.json").is_file()
