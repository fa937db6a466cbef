"""What the command line says and returns when things go wrong: exit codes, streams, interruption."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.api import Model
from ondevice.commands import convert, obtaining
from ondevice.errors import DownloadError, OndeviceError, UsageError
from ondevice.tokenizer.byte_pairs import BytePairTokenizer
from tests.support.bundles import CONTEXT, write_chat_checkpoint
from tests.support.command_line import Run, command
from tests.support.models import write_checkpoint


def test_a_message_cannot_steer_the_terminal(ondevice: Run, tmp_path: Path) -> None:
    for arguments in (("verify", "-m", tmp_path / "\x1b[2J\x9b2J"), ("convert", tmp_path / "\x1b[2J")):
        refused = ondevice(*arguments)
        assert refused.code == 3
        assert "\ufffd[2J" in refused.err
        assert not {"\x1b", "\x9b"} & set(refused.err)


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
        (["generate", "-m", "unheard-of.gguf", "-p", "x"], 3, "no file unheard-of.gguf here"),
        (["convert", "{tmp}/noise.gguf", "-o", "{tmp}/out"], 6, "doesn't begin as a GGUF file does"),
        (["generate", "-m", "llama-7b", "-p", "x"], 3, "ondevice convert huggyllama/llama-7b --output"),
        (["generate", "-m", "{bundle}", "-p", "x", "--sparsity", "exact"], 3, "It can have: dense"),
        (["generate", "-m", "{bundle}", "-p", "x", "--speculation", "streams"], 3, "ondevice train streams"),
        (["convert", "nobody/nothing", "-o", "{tmp}/out", "--offline"], 3, "--offline"),
        (["generate", "-m", "{bundle}", "-p", "x" * CONTEXT], 4, "shorten"),
        (["generate", "-m", "{bundle}", "-p", "x", "--dram-budget", "0"], 5, "the smallest that works is"),
        (["chat", "-m", "{bundle}", "--dram-budget", "2MB"], 5, "the smallest that works is"),
        (["verify", "-m", "{broken}"], 6, "bundle.json"),
        (["generate", "-m", "{broken}", "-p", "x"], 6, "bundle.json"),
        (["convert", "{cut}", "-o", "{tmp}/out"], 6, "model.safetensors"),
        (
            ["generate", "-m", "{bundle}", "-p", "x", "--backend", "reference", "--speculation", "lookup"],
            1,
            "--backend cpu",
        ),
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
    (tmp_path / "noise.gguf").write_bytes(bytes(range(256)))
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


@pytest.mark.fast("--prompt")
@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_an_argument_that_is_not_utf8_is_refused(chat_bundle: Path, option: str) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "-p", "x", "--stop", ""], 2, "stop is ('',); it must be strings that aren't empty"),
        (["chat", "--stop", "a", "--stop", ""], 2, "strings that aren't empty"),
        (["eval", "--text", "-"], 2, "too short to score"),
        (["eval", "--text", "-", "--max-context", 1], 2, "a context of 1 tokens predicts nothing"),
        (["bench", "--prompt-tokens", CONTEXT + 1], 4, f"the context holds {CONTEXT}; shorten"),
        (["bench", "--prompt-tokens", CONTEXT - 1, "--max-tokens", 2], 4, "don't fit the context"),
        (["bench", "--prompt-tokens", 10**30], 2, "--prompt-tokens"),
    ],
)
def test_what_no_model_could_do_is_refused_before_anything_is_loaded(
    ondevice: Run,
    chat_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[object],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(Model, "__init__", lambda *_: pytest.fail("loaded"))
    result = ondevice(*arguments, "-m", chat_bundle)
    assert result.code == code
    assert message in result.err
    assert "plan" not in result.err


def test_a_prompt_that_cannot_run_is_refused_before_anything_is_loaded(
    ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "__init__", lambda *_: pytest.fail("loaded"))
    result = ondevice("generate", "-m", chat_bundle, "-p", "x" * CONTEXT)
    assert result.code == 4
    assert "plan" not in result.err
    monkeypatch.setattr(BytePairTokenizer, "encode_within", lambda *_, **__: [])
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


@pytest.mark.fast("chat-<&-", "generate-<&- >&- 2>&-")
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


def test_an_interrupted_conversion_says_how_it_goes_on(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "run_conversion", interrupted)
    stopped = ondevice("convert", write_checkpoint(tmp_path / "source"), "-o", tmp_path / "out")
    assert stopped.code == 130
    assert "--resume goes on" in stopped.err


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [(UsageError("begun with other options"), False), (DownloadError("the connection broke"), True)],
)
def test_a_conversion_that_the_same_command_cannot_go_on_with(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OndeviceError, goes_on: bool
) -> None:
    def failed(*arguments: object, **options: object) -> Path:
        raise error

    monkeypatch.setattr(obtaining, "run_conversion", failed)
    source = write_chat_checkpoint(tmp_path / "source")
    refused = ondevice("generate", source, "-p", "x", "--yes")
    assert str(error) in refused.err
    assert ("the same command goes on" in refused.err) == goes_on


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
