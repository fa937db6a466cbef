"""The command line: what goes to stdout and stderr, JSON shapes, exit codes, chat, interruption."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from ondevice import cli
from ondevice.api import Model
from ondevice.bundle.reader import Bundle
from ondevice.config import SamplingConfig
from ondevice.scoring import Score
from ondevice.settings import OTHER_SETTINGS, RUNTIME_OPTIONS, SAMPLING_OPTIONS
from ondevice.tokenizer import HuggingFaceTokenizer
from tests.bundles import CONTEXT, write_chat_checkpoint
from tests.models import write_checkpoint

STATS = [
    "prompt_tokens", "generated_tokens", "prefill_tokens_per_second", "decode_tokens_per_second",
    "time_to_first_token_seconds", "peak_memory_bytes", "flash_bytes_read", "flash_read_seconds",
    "flash_cpu_seconds", "neuron_cache_hit_rate", "forward_passes", "accepted_tokens_per_pass",
    "backend", "sparsity", "speculation", "io",
]  # fmt: skip
PLAN = [
    "budget_bytes", "total_bytes", "resident_weights_bytes", "kv_cache_bytes", "neuron_cache_bytes",
    "predictor_bytes", "draft_bytes", "staging_bytes", "process_bytes", "sparsity", "fits",
]  # fmt: skip


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on the one line of stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def ondevice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line in this process, with an empty home and no settings of the person's own."""
    for name in [name for name in os.environ if name.startswith("ONDEVICE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("ONDEVICE_CONFIG", str(tmp_path / "config.toml"))

    def run(*arguments: object, stdin: str | bytes = "") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def command(*arguments: object) -> list[str]:
    """A command line for a process of its own."""
    return [sys.executable, "-m", "ondevice", *map(str, arguments)]


# --- the whole way --------------------------------------------------------------------------------------


def test_from_checkpoint_to_chat(ondevice: Run, shared_data: Path, tmp_path: Path) -> None:
    source, bundle = shared_data / "models" / "stories260K", tmp_path / "home" / "stories"
    converted = ondevice("convert", source, "--output", bundle, "--quant", "q8")
    assert (converted.code, converted.out) == (0, f"{bundle}\n")

    told = ondevice("generate", "--model", "stories", "--prompt", "Once upon a time", "--max-tokens", 40)
    assert told.code == 0
    assert told.out.startswith(", there was a little girl named Lily.")
    assert "plan: budget" in told.err
    assert "40 tokens," in told.err

    chatted = ondevice("chat", "--model", "stories", "--max-tokens", 5, stdin="Hello\n\nWho are you?\n")
    assert chatted.code == 0
    assert chatted.out.count("\n") == 2

    plan = ondevice("inspect", "--model", "stories", "--json").json
    assert plan["plan"]["fits"] is True
    assert plan["minimum_budget_bytes"] <= plan["plan"]["budget_bytes"]

    report = ondevice("bench", "--model", "stories", "--runs", 1, "--max-tokens", 4, "--json").json
    assert report["generated_tokens"] == 4

    story = tmp_path / "story.txt"
    story.write_text(" Once upon a time" + told.out)
    score = ondevice("eval", "--model", "stories", "--text", story, "--json").json
    assert 1.0 < score["perplexity"] < 4.0

    assert ondevice("verify", "--model", "stories").out.startswith("ok: ")


def test_convert_says_how_far_it_is_and_resumes(ondevice: Run, tmp_path: Path) -> None:
    source, output = write_chat_checkpoint(tmp_path / "hf"), tmp_path / "out"
    first = ondevice("convert", source, "-o", output, "--no-calibrate")
    assert first.code == 0
    assert "100 %" in first.err
    assert ondevice("convert", source, "-o", output).code == 2
    assert ondevice("convert", source, "-o", output, "--resume").code == 0
    assert ondevice("convert", source, "-o", output, "--force", "--quant", "f16").code == 0
    assert Bundle.open(output).quant.bits == 16
    refused = ondevice("convert", source, "-o", tmp_path / "b", "--text", "corpus.txt")
    assert refused.code == 2
    assert "calibration" in refused.err


# --- JSON -----------------------------------------------------------------------------------------------


def test_generate_json(ondevice: Run, chat_bundle: Path) -> None:
    result = ondevice("generate", "-m", chat_bundle, "-p", "Hello", "--max-tokens", 7, "--json")
    assert list(result.json) == ["text", "tokens", "finish_reason", "stats"]
    assert list(result.json["stats"]) == STATS
    assert len(result.json["tokens"]) == 7
    plain = ondevice("generate", "-m", chat_bundle, "-p", "Hello", "--max-tokens", 7)
    assert plain.out == result.json["text"] + "\n"


def test_inspect_json_and_text(ondevice: Run, chat_bundle: Path) -> None:
    shown = ondevice("inspect", "-m", chat_bundle, "--dram-budget", "4GB", "--json").json
    assert list(shown) == [
        "model", "architecture", "parameters", "bundle_bytes", "quantisation", "sparsity_modes",
        "minimum_budget_bytes", "plan",
    ]  # fmt: skip
    assert [key for key in PLAN if key not in shown["plan"]] == []
    assert shown["plan"]["budget_bytes"] == 4 * 10**9
    assert shown["sparsity_modes"] == ["dense"]
    assert shown["bundle_bytes"] == sum(path.stat().st_size for path in chat_bundle.iterdir())
    text = ondevice("inspect", "-m", chat_bundle)
    assert text.code == 0
    for part in ("tiny-chat", "exact     no: silu", str(shown["bundle_bytes"]), "fits: yes"):
        assert part in text.out


def test_inspect_shows_a_plan_that_does_not_fit(ondevice: Run, chat_bundle: Path) -> None:
    shown = ondevice("inspect", "-m", chat_bundle, "--dram-budget", "1MB", "--json").json
    assert shown["plan"]["fits"] is False
    enough = ondevice(
        "inspect", "-m", chat_bundle, "--dram-budget", shown["minimum_budget_bytes"], "--json"
    ).json
    assert enough["plan"]["fits"] is True


def test_bench_json(ondevice: Run, chat_bundle: Path) -> None:
    result = ondevice(
        "bench", "-m", chat_bundle, "--runs", 2, "--prompt-tokens", 20, "--max-tokens", 5, "--json"
    )
    shown = result.json
    assert list(shown) == [*STATS, "runs", "flash_bytes_per_token", "machine"]
    assert (shown["runs"], shown["prompt_tokens"], shown["generated_tokens"]) == (2, 20, 5)
    assert {"system", "cores", "memory_bytes", "kernel_target"} <= set(shown["machine"])
    assert result.err.count("run ") == 2


def test_bench_shows_what_reading_costs_the_processors(ondevice: Run, chat_bundle: Path) -> None:
    shown = ondevice("bench", "-m", chat_bundle, "--runs", 1, "--prompt-tokens", 5, "--max-tokens", 3)
    assert re.search(r"; flash \S+ kB/token, read in \d+\.\d\d s with \d+\.\d\d s of CPU; ", shown.out)


def test_eval_json(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A short text, scored.")
    shown = ondevice("eval", "-m", chat_bundle, "--text", tmp_path / "text", "--json").json
    assert list(shown) == ["perplexity", "nll_per_token", "tokens"]
    assert shown["tokens"] == len("A short text, scored.")
    piped = ondevice("eval", "-m", chat_bundle, "--text", "-", "--json", stdin="A short text, scored.").json
    assert piped == shown
    assert "perplexity" in ondevice("eval", "-m", chat_bundle, "--text", tmp_path / "text").out


def test_eval_json_has_no_infinity(ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "score", lambda *_, **__: Score(math.inf, 800.0, 3))
    result = ondevice("eval", "-m", chat_bundle, "--text", "-", "--json", stdin="text")
    assert result.json == {"perplexity": None, "nll_per_token": 800.0, "tokens": 3}


# --- options --------------------------------------------------------------------------------------------


def test_the_prompt_may_come_from_stdin(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 5, "--json")
    piped = ondevice("generate", *options, "-p", "-", stdin="Grüße\n").json
    assert piped["tokens"] == ondevice("generate", *options, "-p", "Grüße\n").json["tokens"]
    assert ondevice("generate", *options, "-p", "-", stdin=b"\xff\xfe").code == 2


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
        cli, "sampling_config", lambda values: seen.append(values["stop"]) or SamplingConfig()
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


def test_every_option_can_come_from_the_environment_and_a_commands_from_the_file() -> None:
    found = all_options()
    assert set(found) == {*RUNTIME_OPTIONS, *SAMPLING_OPTIONS, *OTHER_SETTINGS, "verbose"}
    for options in found.values():
        for option in options:
            flag = next(name for name in option.opts if name.startswith("--"))
            assert option.envvar == "ONDEVICE_" + flag[2:].replace("-", "_").upper()


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
    # `text` is for eval: a conversion, which can't use one yet, goes on without it.
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
    result = ondevice("inspect", "-m", chat_bundle)
    assert result.code == 2
    assert str(tmp_path / "absent.toml") in result.err


def test_every_command_has_help_that_starts_nothing(ondevice: Run) -> None:
    assert set(cli.cli.commands) == {"convert", "chat", "generate", "inspect", "bench", "eval", "verify"}
    for name in cli.cli.commands:
        result = ondevice(name, "--help")
        assert result.code == 0
        assert f"Usage: ondevice {name}" in result.out
    program = "import sys; from ondevice import cli; cli.run(['--help']); assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_shell_completion() -> None:
    environment = os.environ | {"_ONDEVICE_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    done = subprocess.run(
        command(), env=environment | {"COMP_WORDS": "ondevice in"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "plain,inspect\n"


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["frobnicate"], 2, "No such command"),
        (["generate", "-m", "{bundle}"], 2, "--prompt"),
        (["generate", "-m", "{bundle}", "-p", "x", "--backend", "cuda"], 2, "cuda"),
        (["generate", "-m", "{bundle}", "-p", "x", "--temp", "-1"], 2, "temperature"),
        (["generate", "-m", "{bundle}", "-p", "x", "--dram-budget", "lots"], 2, "lots"),
        (["generate", "-m", "{bundle}", "-p", "x", "--max-context", "100000"], 2, str(CONTEXT)),
        (["eval", "-m", "{bundle}", "--text", "no-such-file"], 2, "no-such-file"),
        (
            ["eval", "-m", "{bundle}", "--text", "{bundle}/bundle.json", "--max-context", "1"],
            2,
            "at least two",
        ),
        (["generate", "-m", "unheard-of", "-p", "x"], 3, "ondevice convert CHECKPOINT --output"),
        (["generate", "-m", "llama-7b", "-p", "x"], 3, "ondevice convert huggyllama/llama-7b --output"),
        (["generate", "-m", "{bundle}", "-p", "x", "--sparsity", "exact"], 3, "It can have: dense"),
        (["generate", "-m", "{bundle}", "-p", "x", "--speculation", "lookup"], 3, "auto, off"),
        (["convert", "nobody/nothing", "-o", "{tmp}/out", "--offline"], 3, "--offline"),
        (["generate", "-m", "{bundle}", "-p", "x" * CONTEXT], 4, "shorten"),
        (["generate", "-m", "{bundle}", "-p", "x", "--dram-budget", "0"], 5, "the smallest that works is"),
        (["chat", "-m", "{bundle}", "--dram-budget", "2MB"], 5, "the smallest that works is"),
        (["verify", "-m", "{broken}"], 6, "bundle.json"),
        (["generate", "-m", "{broken}", "-p", "x"], 6, "bundle.json"),
        (["convert", "{cut}", "-o", "{tmp}/out"], 6, "model.safetensors"),
        (["generate", "-m", "{bundle}", "-p", "x", "--backend", "mlx"], 1, "mlx"),
    ],
)
def test_every_error_has_its_exit_code_and_says_what_to_do(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "bundle.json").write_text('{"manifest": {}, "sha256": ""}')
    cut = write_checkpoint(tmp_path / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size // 2)
    places = {"bundle": chat_bundle, "broken": broken, "cut": cut.parent, "tmp": tmp_path}
    result = ondevice(*(argument.format(**places) for argument in arguments))
    assert result.code == code
    assert result.out == ""
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["generate", "chat", "eval"])
def test_text_that_is_not_utf8_is_refused_by_every_command(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "text").write_bytes(b"good\nbad \xff\n")
    source = {"generate": ("-p", "-"), "chat": (), "eval": ("--text", tmp_path / "text")}[command]
    result = ondevice(command, "-m", chat_bundle, *source, stdin=b"good\nbad \xff\n")
    assert result.code == 2
    assert "is not UTF-8 text: byte 0xff at offset 9" in result.err


def test_an_argument_that_is_not_utf8_is_refused(chat_bundle: Path) -> None:
    for option in ("--prompt", "--stop"):
        arguments = [*command("generate", "-m", chat_bundle, "-p", "x", option), b"ab\xff"]
        result = subprocess.run(arguments, capture_output=True, check=False)
        assert result.returncode == 2
        assert b"byte 0xff at offset 2" in result.stderr
        assert option.encode() in result.stderr


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["chat"], ["eval", "--text", "-"]])
def test_usage_errors_come_before_the_plan(ondevice: Run, token_bundle: Path, command: list[str]) -> None:
    result = ondevice(*command, "-m", token_bundle, stdin="text")
    assert result.code == 2
    assert "generate(tokens=[...])" in result.err
    assert "plan" not in result.err
    assert ondevice("bench", "-m", token_bundle, "--runs", 1, "--max-tokens", 2).code == 0


def test_a_prompt_that_cannot_run_is_refused_before_anything_is_loaded(
    ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "__init__", lambda *_: pytest.fail("loaded"))
    result = ondevice("generate", "-m", chat_bundle, "-p", "x" * CONTEXT)
    assert result.code == 4
    assert "plan" not in result.err
    monkeypatch.setattr(HuggingFaceTokenizer, "encode", lambda *_: [])
    result = ondevice("generate", "-m", chat_bundle, "-p", "")
    assert result.code == 2
    assert "no tokens" in result.err
    assert "plan" not in result.err


def test_a_full_disk_under_stdout_is_an_error_without_a_traceback(chat_bundle: Path) -> None:
    with Path("/dev/full").open("w") as full:
        arguments = command("inspect", "-m", chat_bundle)
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("name", ["chat", "generate"])
def test_closed_streams_are_empty_or_lead_nowhere(chat_bundle: Path, closed: str, name: str) -> None:
    arguments = command(name, "-m", chat_bundle, "--max-tokens", 3, *(("-p", "x") * (name == "generate")))
    result = subprocess.run(
        ["sh", "-c", f"exec {shlex.join(arguments)} {closed}"],
        input=b"Hello\n",
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr
    assert (result.stdout == b"") == (">&-" in closed.split() or (name, closed) == ("chat", "<&-"))
    assert (b"plan" in result.stderr) == ("2>&-" not in closed)


def test_a_reader_that_goes_away_ends_the_command_quietly(chat_bundle: Path) -> None:
    arguments = command("generate", "-m", chat_bundle, "-p", "Hello", "--max-tokens", 200)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        message = process.stderr.read().decode()
        assert process.wait(60) == 141
    assert "Traceback" not in message
    assert "BrokenPipe" not in message


def test_an_interrupt_ends_with_130(chat_bundle: Path) -> None:
    arguments = command("bench", "-m", chat_bundle, "--runs", 100_000)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("run 1"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in message


def test_an_interrupt_while_it_imports_is_quiet(chat_bundle: Path) -> None:
    # The interpreter's own start isn't ours: the first import of ours tells when it is over.
    start = (
        "import os, sys, threading, time\n"
        "from ondevice.__main__ import main\n"
        "def interrupt():\n"
        "    time.sleep(float(sys.argv.pop()))\n"
        "    os.kill(os.getpid(), 2)\n"
        "threading.Thread(target=interrupt).start()\n"
        "main()\n"
    )
    for delay in (0.005, 0.02, 0.05, 0.1, 0.2):
        arguments = ["bench", "-m", str(chat_bundle), "--runs", "100000", str(delay)]
        result = subprocess.run([sys.executable, "-c", start, *arguments], capture_output=True, check=False)
        assert result.returncode == 130, delay
        assert b"Traceback" not in result.stderr, delay
        assert b"Interrupt" not in result.stderr, delay


# --- chat -----------------------------------------------------------------------------------------------


def test_chat_honours_the_models_sampling_and_says_so(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 12)
    recommended = ondevice("chat", *options, stdin="Hello\n")
    assert "recommend: temperature 0.7, top_p 0.9" in recommended.err
    spelt_out = ondevice("chat", *options, "--temp", 0.7, "--top-p", 0.9, stdin="Hello\n")
    assert "recommend" not in spelt_out.err
    assert recommended.out == spelt_out.out
    greedy = ondevice("chat", *options, "--temp", 0, stdin="Hello\n")
    assert "recommend: top_p 0.9" in greedy.err
    assert greedy.out != recommended.out


def test_chat_commands(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    lines = f"Hello\n/save {talk}\n/reset\n/load {talk}\n/stats\n/budget 8GB\n/budget 1MB\n/help\n"
    lines += "/nonsense\n/save\n"
    result = ondevice("chat", "-m", chat_bundle, "--max-tokens", 4, "--system-prompt", "Hi.", stdin=lines)
    assert result.code == 0
    assert result.out.count("\n") >= 1
    saved = json.loads(talk.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert result.out == saved[-1]["content"] + "\n"
    for part in ("3 messages loaded", "forgotten", "budget 8.00 GB", "too small", "Ctrl-D quits"):
        assert part in result.err
    for wrong in ("'/nonsense'", "'/save'"):
        assert wrong in result.err


def test_a_piped_chat_that_outgrows_the_context_says_what_was_not_answered(
    ondevice: Run, chat_bundle: Path
) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 2)
    long = "x" * (CONTEXT // 2)
    result = ondevice("chat", *options, stdin=f"{long}\n\n{long}\nmore\n")
    assert result.code == 4
    assert result.out.count("\n") == 1
    assert "line 3 of stdin, and what follows it, wasn't answered" in result.err
    advised = ondevice("chat", *options, stdin=f"{long}\n/reset\n{long}\n/reset\nmore\n")
    assert advised.code == 0
    assert advised.out.count("\n") == 3


def test_a_conversation_that_cannot_be_saved_goes_on(
    ondevice: Run, chat_bundle: Path, tmp_path: Path
) -> None:
    lines = f"/save {tmp_path}/no/where\n/save {tmp_path}\n/load {'x' * 300}\n/save a\0b\nHello\n"
    result = ondevice("chat", "-m", chat_bundle, "--max-tokens", 2, stdin=lines)
    assert result.code == 0
    assert result.out.count("\n") == 1
    assert f"can't be saved to {tmp_path}/no/where: No such file or directory" in result.err
    assert f"can't be saved to {tmp_path}: Is a directory" in result.err
    assert "null byte" in result.err
    assert "File name too long" in result.err
    assert "Errno" not in result.err
    assert list(tmp_path.parent.glob("*.partial")) == []


class Terminal:
    """A command on a pseudo-terminal, typed at and read from."""

    def __init__(self, arguments: list[str]) -> None:
        self.master, worker = pty.openpty()
        self.process = subprocess.Popen(
            arguments, stdin=worker, stdout=worker, stderr=worker, start_new_session=True, close_fds=True
        )
        os.close(worker)
        self.seen = ""

    def until(self, text: str, seconds: float = 120.0) -> str:
        """What was shown since the last call, up to and including `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < deadline:
            if not select.select([self.master], [], [], 0.1)[0]:
                continue
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError:
                break
        assert text in self.seen, self.seen
        shown, _, self.seen = self.seen.partition(text)
        return shown + text

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C until `text` is shown: Python misses one that comes just before it waits for a key."""
        for _ in range(20):
            os.kill(self.process.pid, signal.SIGINT)
            with suppress(AssertionError):
                self.until(text, 2.0)
                return
        raise AssertionError(self.seen)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_chat_on_a_terminal(chat_bundle: Path) -> None:
    terminal = Terminal(command("chat", "-m", chat_bundle, "--temp", 0, "--max-tokens", 200))
    try:
        terminal.until("> ")
        terminal.type("Tell me everything\r")
        terminal.until("everything")
        time.sleep(0.05)
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until("> ")
        terminal.interrupt_until("(Ctrl-D quits)")
        terminal.type("/stats\r")
        terminal.until("tokens/s")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.master)
