"""What people type: a model as an argument, budgets without a unit, variables with a slip, no output."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import ondevice as package
from ondevice.errors import UsageError
from ondevice.flash.throughput import measure_throughput
from ondevice.measure import profiling
from ondevice.runtime import models
from ondevice.units import parse_budget
from tests.support.bundles import write_chat_checkpoint
from tests.support.command_line import Run

COMMANDS = {
    "chat": ("--max-tokens", 2),
    "generate": ("-p", "a", "--max-tokens", 2),
    "inspect": (),
    "bench": ("--runs", 1, "--max-tokens", 2, "--prompt-tokens", 3),
    "eval": ("--text", "-"),
    "verify": (),
    "profile": ("--tokens", 16),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_is_an_argument_or_an_option(
    ondevice: Run, chat_bundle: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "measure_throughput", partial(measure_throughput, seconds=0.002))
    options = COMMANDS[name]
    assert ondevice(name, chat_bundle, *options, stdin="A text.").code == 0
    assert ondevice(name, *options, chat_bundle, "-m", chat_bundle, stdin="A text.").code == 0
    two = ondevice(name, chat_bundle, "-m", "another", *options, stdin="A text.")
    assert two.code == 2
    assert f"two models are named, {chat_bundle} and --model another; give one" in two.err
    unheard = ondevice(name, "unheard-of", *options)
    assert (unheard.code, "no model called unheard-of" in unheard.err) == (3, True)


def test_a_training_takes_it_too(ondevice: Run) -> None:
    refused = ondevice("train", "predictors", "unheard-of", "--text", "-", stdin="A text.")
    assert (refused.code, "no model called unheard-of" in refused.err) == (3, True)


def test_the_argument_beats_the_environment(
    ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_MODEL", "unheard-of")
    assert ondevice("inspect", chat_bundle).code == 0
    refused = ondevice("inspect")
    assert (refused.code, "ONDEVICE_MODEL" in refused.err) == (3, True)


@pytest.mark.parametrize(
    ("typed", "meant"), [("4", "4GB"), ("16", "16GB"), ("4096", "4096MB"), ("700000", "700000kB")]
)
def test_a_budget_without_its_unit_is_asked_about(
    ondevice: Run, chat_bundle: Path, typed: str, meant: str
) -> None:
    refused = ondevice("generate", chat_bundle, "-p", "a", "--dram-budget", typed)
    assert refused.code == 2
    assert f"did you mean {meant}?" in refused.err
    for value in (typed, int(typed)):
        with pytest.raises(UsageError, match=f"did you mean {meant}"):
            package.load(chat_bundle, dram_budget=value)
    talked = ondevice("chat", chat_bundle, "--max-tokens", 2, stdin=f"/budget {typed}\n")
    assert (talked.code, f"did you mean {meant}" in talked.err) == (2, True)


def test_budgets_in_bytes_and_units_stay() -> None:
    assert [parse_budget(value) for value in ("4000000", "4kB", 70_000_000, 0, "0")] == [
        4_000_000, 4000, 70_000_000, 0, 0,
    ]  # fmt: skip
    assert parse_budget("auto", auto=5) == 5
    for value in ("4.0", 4.0):
        with pytest.raises(UsageError, match="did you mean 4GB"):
            parse_budget(value)  # type: ignore[arg-type]


def test_a_variable_that_sets_nothing_is_named(
    ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ONDEVICE_MODEL", "ONDEVICE_REAL_MODELS", "ONDEVICE_STEPS", "ONDEVICE_TEST_MLX_GPU"):
        monkeypatch.setenv(name, str(chat_bundle) if name == "ONDEVICE_MODEL" else "1")
    assert ondevice("inspect").code == 0
    assert caplog.messages == []
    monkeypatch.setenv("ONDEVICE_DRAM_BUGDET", "4GB")
    monkeypatch.setenv("ONDEVICE_XYZZY", "1")
    assert ondevice("inspect").code == 0
    assert caplog.messages == [
        "ONDEVICE_DRAM_BUGDET sets nothing; did you mean ONDEVICE_DRAM_BUDGET?",
        "ONDEVICE_XYZZY sets nothing",
    ]


def test_a_conversion_without_output_is_found_by_its_name(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the checkpoint of that name, too, and beside a folder that is called as what ships."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small-relu").mkdir()
    source = write_chat_checkpoint(tmp_path / "my-model.v1")
    assert "is a checkpoint" in ondevice("verify", "my-model.v1").err
    done = ondevice("convert", source, "--quant", "q8")
    assert (done.code, done.out) == (0, f"{tmp_path / 'home' / 'my-model.v1'}\n")
    assert ondevice("verify", "my-model.v1").code == 0
    assert ondevice("verify", "small-relu").code == 0
    assert ondevice("inspect", "--list").code == 0
    again = ondevice("convert", source)
    assert (again.code, "exists" in again.err) == (2, True)


def test_a_bundle_is_named_after_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("ONDEVICE_HOME", str(home))
    (tmp_path / "stories.bin").touch()
    (tmp_path / "big-00002-of-00003.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for source, name in (
        (".", tmp_path.name),
        (tmp_path / "stories.bin", "stories"),
        (tmp_path / "big-00002-of-00003.gguf", "big"),
        ("llama-7b", "llama-7b"),
        ("someone/a.model-7B", "a.model-7B"),
    ):
        assert models.default_output(source) == home / name
    with pytest.raises(UsageError, match="no name to give the bundle"):
        models.default_output("/")


def test_the_lists_have_converted_models_first_and_columns_of_names(
    ondevice: Run, chat_bundle: Path, tmp_path: Path
) -> None:
    """However long a name is."""
    long = "tale-of-two-cities-" * 3
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / long).symlink_to(chat_bundle)
    shown = ondevice("inspect", "--list", "--json").json
    assert shown["models"][long] == str(tmp_path / "home" / long)
    assert next(iter(shown["models"])) == long
    assert "small-relu" in shown["models"]
    assert shown["aliases"] == models.ALIASES
    lines = ondevice("inspect", "--list").out.splitlines()
    indented = [re.split(" {2,}", line.strip()) for line in lines if line.startswith("  ")]
    assert indented == [list(row) for row in (*shown["models"].items(), *models.ALIASES.items())]
    assert str(tmp_path / "home") in lines[0]
    listed = ondevice("list").out.splitlines()[1:]
    assert listed[0].startswith(f"  {long}  ")
    assert [line.split()[0] for line in listed] == list(shown["models"])
    assert len({line.index("B  ") for line in listed}) == 1


def test_the_version_is_the_installed_ones(ondevice: Run) -> None:
    assert package.__version__ in ondevice("--version").out
    program = (
        "import sys, ondevice; assert 'importlib.metadata' not in sys.modules; print(ondevice.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == f"{package.__version__}\n"


def test_a_text_that_the_context_ends_says_so(ondevice: Run, chat_bundle: Path) -> None:
    options = ("generate", chat_bundle, "--max-context", 32, "-p", "a" * 28, "--temp", 1, "--seed", 3)
    shown = ondevice(*options, "--json")
    assert (shown.json["finish_reason"], shown.json["stats"]["context_full"]) == ("length", True)
    full = "(cut short: the context of 32 tokens is full; --max-context makes room)"
    for extra in ((), ("--json",)):
        assert full in ondevice(*options, *extra).err
    assert "cut short" not in ondevice(*options, "--max-tokens", 2).err
