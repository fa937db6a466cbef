"""Options: where they may come from, what they do, and help."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ondevice import cli
from ondevice.config import SamplingConfig
from ondevice.settings import (
    OTHER_SETTINGS,
    PROMPT_CACHE_OPTIONS,
    RUNTIME_OPTIONS,
    SAMPLING_OPTIONS,
    SHARING_OPTIONS,
    TEMPLATE_OPTIONS,
)
from tests.support.bundles import write_chat_checkpoint
from tests.support.command_line import Run, command


def test_the_prompt_may_come_from_stdin(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 5, "--json")
    piped = ondevice("generate", *options, "-p", "-", stdin="Grüße\n").json
    assert piped["tokens"] == ondevice("generate", *options, "-p", "Grüße\n").json["tokens"]
    assert ondevice("generate", *options, "-p", "-", stdin=b"\xff\xfe").code == 2


def test_training_predictors_offers_no_backend_that_it_refuses(ondevice: Run) -> None:
    assert "reference" not in ondevice("train", "predictors", "--help").out
    refused = ondevice("train", "predictors", "--text", "x", "--backend", "reference")
    assert refused.code == 2
    assert "cpu" in refused.err


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generated(*flags: object) -> int:
        shown = ondevice("generate", "-p", "Hello", "--json", *flags).json
        return int(shown["stats"]["generated_tokens"])

    (tmp_path / "config.toml").write_text(f'model = "{chat_bundle}"\nmax-tokens = 3\nkv_bits = 8\n')
    assert generated() == 3
    monkeypatch.setenv("ONDEVICE_MAX_TOKENS", "4")
    assert generated() == 4
    assert generated("--max-tokens", 5) == 5
    monkeypatch.setenv("ONDEVICE_MAX_TOKENS", "many")
    assert ondevice("generate", "-p", "Hello").code == 2
    (tmp_path / "config.toml").write_text("modle = 1")
    wrong = ondevice("inspect", "-m", chat_bundle)
    assert wrong.code == 2
    assert "modle" in wrong.err


def test_the_seed_decides_a_sampled_text(ondevice: Run, chat_bundle: Path) -> None:
    def sampled(seed: int) -> str:
        options = ("--temp", 1.2, "--top-k", 50, "--top-p", 0.95, "--seed", seed, "--max-tokens", 20)
        return ondevice("generate", "-m", chat_bundle, "-p", "Hello", *options).out

    assert sampled(1) == sampled(1) != sampled(2)


def test_stop_strings_end_the_text(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "-p", "Hello", "--max-tokens", 30, "--json")
    whole = ondevice("generate", *options).json["text"]
    stop = whole[6:8]
    cut = ondevice("generate", *options, "--stop", "@never@", "--stop", stop).json
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole[: whole.index(stop)]


def test_a_stop_string_may_come_from_the_environment_or_the_file(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        "ondevice.commands.generate.sampling_config",
        lambda values: seen.append(values["stop"]) or SamplingConfig(),
    )

    def given(*flags: str) -> tuple[str, ...]:
        assert ondevice("generate", "-m", chat_bundle, "-p", "Hello", "--max-context", 16, *flags).code == 0
        return seen.pop()

    (tmp_path / "config.toml").write_text('stop = "abc d"')
    assert given() == ("abc d",)
    monkeypatch.setenv("ONDEVICE_STOP", "one string")
    assert given() == ("one string",)
    assert given("--stop", "x y", "--stop", "z") == ("x y", "z")


def all_options() -> dict[str, set[click.Option]]:
    """Every option of every command and of `ondevice` itself, by its name in Python."""
    found: dict[str, set[click.Option]] = {}
    for source in (cli.cli, *cli.cli.commands.values()):
        for parameter in source.params:
            if isinstance(parameter, click.Option) and parameter.name != "version":
                found.setdefault(str(parameter.name), set()).add(parameter)
    return found


def test_every_option_can_come_from_the_environment_and_from_the_file() -> None:
    found = all_options()
    runtime = (RUNTIME_OPTIONS, PROMPT_CACHE_OPTIONS, SHARING_OPTIONS, TEMPLATE_OPTIONS)
    assert set(found) == {name for table in (*runtime, SAMPLING_OPTIONS, OTHER_SETTINGS) for name in table}
    for options in found.values():
        for option in options:
            flag = next(name for name in option.opts if name.startswith("--"))
            assert option.envvar == "ONDEVICE_" + flag[2:].replace("-", "_").upper()


def test_verbose_may_be_set_anywhere(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(logging, "basicConfig", lambda level, **_: levels.append(level))

    def level(*flags: str) -> int:
        assert ondevice(*flags, "inspect", "-m", chat_bundle).code == 0
        return levels.pop()

    assert level() == logging.WARNING
    assert level("-v") == logging.INFO
    (tmp_path / "config.toml").write_text("verbose = true")
    assert level() == logging.INFO
    monkeypatch.setenv("ONDEVICE_VERBOSE", "0")
    assert level() == logging.WARNING
    assert level("--verbose") == logging.INFO


def test_options_of_one_command_come_from_everywhere_too(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text(
        f'model = "{chat_bundle}"\nprompt-tokens = 5\nruns = 1\nmax-tokens = 3\njson = true\ntext = "none"\n'
    )
    assert ondevice("bench").json["prompt_tokens"] == 5
    monkeypatch.setenv("ONDEVICE_PROMPT_TOKENS", "6")
    assert ondevice("bench").json["prompt_tokens"] == 6
    assert ondevice("bench", "--prompt-tokens", 7).json["prompt_tokens"] == 7
    monkeypatch.setenv("ONDEVICE_PROMPT", "two words")
    assert ondevice("generate").json["stats"]["prompt_tokens"] == len("<two words")
    monkeypatch.setenv("ONDEVICE_JSON", "0")
    assert ondevice("bench").out.startswith("3 tokens, ")
    # `text` set so is for eval: a conversion goes on without it.
    checkpoint = write_chat_checkpoint(tmp_path / "hf")
    assert ondevice("convert", checkpoint, "-o", tmp_path / "out", "--quant", "q8").code == 0


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("temp", "-1", 2),
        ("max-tokens", "many", 2),
        ("dram-budget", "lots", 2),
        ("dram-budget", "2MB", 5),
        ("backend", "cuda", 2),
        ("sparsity", "exact", 3),
        ("max-context", "100000", 2),
        ("model", "unheard-of", 3),
    ],
)
def test_errors_name_where_a_value_came_from(
    ondevice: Run,
    chat_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    code: int,
) -> None:
    variable, file = f"ONDEVICE_{name.replace('-', '_').upper()}", tmp_path / "config.toml"
    model = () if name == "model" else ("-m", chat_bundle)
    flagged = ondevice("generate", "-p", "x", *model, f"--{name}", value)
    monkeypatch.setenv(variable, value)
    by_variable = ondevice("generate", "-p", "x", *model)
    monkeypatch.delenv(variable)
    file.write_text(f"{name} = {value if value.strip('-').isdigit() else repr(value)}")
    by_file = ondevice("generate", "-p", "x", *model)
    assert (flagged.code, by_variable.code, by_file.code) == (code,) * 3
    assert variable in by_variable.err
    assert str(file) in by_file.err
    assert name in by_file.err
    assert variable not in flagged.err + by_file.err
    assert str(file) not in flagged.err + by_variable.err


def test_a_settings_file_that_is_not_there_is_named(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_CONFIG", str(tmp_path / "absent.toml"))
    for name in ("inspect", "verify"):
        result = ondevice(name, "-m", chat_bundle)
        assert result.code == 2
        assert str(tmp_path / "absent.toml") in result.err


@pytest.mark.parametrize("file", ["absent.toml", "config.toml"])
def test_help_and_completion_work_with_a_settings_file_that_does_not(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (tmp_path / "config.toml").write_text("modle = 1")
    monkeypatch.setenv("ONDEVICE_CONFIG", str(tmp_path / file))
    for arguments in (["--help"], ["--version"], ["bench", "--runs", "3", "--help"], ["eval", "-h"]):
        result = ondevice(*arguments)
        assert (result.code, result.err) == (0, "")
    environment = os.environ | {"_ONDEVICE_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    environment["COMP_WORDS"] = "ondevice bench --ru"
    done = subprocess.run(command(), env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "plain,--runs\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ondevice generate --model t", "plain,tale\ndir,t\n"),
        ("ondevice eval --text so", "file,so\n"),
        ("ondevice convert so", "file,so\n"),
    ],
)
def test_completion_offers_models_and_files(tmp_path: Path, words: str, offered: str) -> None:
    (tmp_path / "tale").mkdir()
    (tmp_path / "tale" / "bundle.json").touch()
    environment = os.environ | {"_ONDEVICE_COMPLETE": "bash_complete", "ONDEVICE_HOME": str(tmp_path)}
    environment |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(command(), env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == offered


@pytest.mark.parametrize("key", ["dram-budget", "dram_budget"])
def test_an_error_spells_a_key_as_the_settings_file_does(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, key: str
) -> None:
    (tmp_path / "config.toml").write_text(f'{key} = "2MB"')
    result = ondevice("generate", "-m", chat_bundle, "-p", "x")
    assert f"--dram-budget was set by {key} in {tmp_path / 'config.toml'}" in result.err


def test_every_command_has_help_that_starts_nothing(ondevice: Run) -> None:
    commands = {
        "convert",
        "chat",
        "generate",
        "list",
        "remove",
        "inspect",
        "bench",
        "eval",
        "verify",
        "train",
        "profile",
        "doctor",
        "serve",
        "split",
    }
    assert set(cli.cli.commands) == commands
    for name in cli.cli.commands:
        result = ondevice(name, "--help")
        assert result.code == 0
        assert f"Usage: ondevice {name}" in result.out
    program = "import sys; from ondevice import cli; cli.run(['--help']); assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_completion_offers_commands() -> None:
    environment = os.environ | {"_ONDEVICE_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    done = subprocess.run(
        command(), env=environment | {"COMP_WORDS": "ondevice in"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "plain,inspect\n"


def every_command(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, by what is typed for it."""
    for name, inner in group.commands.items():
        if isinstance(inner, click.Group):
            yield from every_command(inner, *names, name)
        else:
            yield (*names, name), inner


COMMANDS = dict(every_command(cli.cli))


def listed_flags(text: str) -> set[str]:
    """Long flags of the options that a help text lists."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text.partition("\nOptions:\n")[2], re.MULTILINE))


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_fits_a_screen_and_all_options_are_a_flag_away(ondevice: Run, names: tuple[str, ...]) -> None:
    flags = {next(flag for flag in it.opts if flag.startswith("--")) for it in COMMANDS[names].params
             if isinstance(it, click.Option)}  # fmt: skip
    short = listed_flags(ondevice(*names, "--help").out)
    assert len(short) <= 18
    assert short <= flags | {"--help", "--help-all"}
    if flags <= short:
        assert "--help-all" not in short
        return
    assert "--help-all" in short
    assert listed_flags(ondevice(*names, "--help-all").out) == flags | {"--help", "--help-all"}


def test_an_option_that_help_leaves_out_is_taken(ondevice: Run, chat_bundle: Path) -> None:
    assert "--kv-bits" not in ondevice("chat", "--help").out
    assert ondevice("chat", chat_bundle, "--kv-bits", 8, "--max-tokens", 2, stdin="Hi\n").code == 0
