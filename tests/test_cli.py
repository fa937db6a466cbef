"""The command line: what goes to stdout and stderr, JSON shapes, exit codes, chat, interruption."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
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
    start = "import sys; from ondevice.cli import main; main()"
    return [sys.executable, "-c", start, *map(str, arguments)]


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


def test_the_help_tells_which_options_are_flags_only(ondevice: Run) -> None:
    shown = " ".join(ondevice("--help").out.split())
    listed = shown[shown.index("flag only:") :].split(".")[0]
    settable = {*RUNTIME_OPTIONS, *SAMPLING_OPTIONS, *OTHER_SETTINGS}
    options = {p for c in cli.cli.commands.values() for p in c.params if isinstance(p, click.Option)}
    for option in options:
        assert (option.name in settable) == (option.envvar is not None), option.name
        assert (option.opts[0] in re.findall(r"--[\w-]+", listed)) == (option.envvar is None), option.name


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


def test_a_piped_chat_that_outgrows_the_context_ends_with_4(ondevice: Run, chat_bundle: Path) -> None:
    result = ondevice("chat", "-m", chat_bundle, "--max-tokens", 2, stdin="x" * CONTEXT + "\nmore\n")
    assert result.code == 4


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
