"""Chat: commands, saving, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from ondevice.commands import chat_input
from ondevice.commands.options import PART_BYTES
from ondevice.commands.slash_commands import is_known_command
from tests.support.bundles import CONTEXT, convert_bundle, write_chat_checkpoint
from tests.support.command_line import Run, command


def test_chat_honours_the_models_sampling_and_says_so(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 12, "--seed", 0)
    recommended = ondevice("chat", *options, stdin="Hello\n")
    assert "recommend: temperature 0.7, top_p 0.9" in recommended.err
    spelt_out = ondevice("chat", *options, "--temp", 0.7, "--top-p", 0.9, stdin="Hello\n")
    assert "recommend" not in spelt_out.err
    assert recommended.out == spelt_out.out
    greedy = ondevice("chat", *options, "--temp", 0, stdin="Hello\n")
    assert "sampl" not in greedy.err
    assert "recommend" not in greedy.err
    assert "seed" not in greedy.err
    assert greedy.out != recommended.out


def test_a_chat_says_the_seed_that_it_draws(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 12)
    drawn = [ondevice("chat", *options, stdin="Hello\n") for _ in range(2)]
    seeds = [re.search(r"^seed (\d+), drawn at random", result.err, re.MULTILINE) for result in drawn]
    assert seeds[0] is not None
    assert seeds[1] is not None
    assert seeds[0][1] != seeds[1][1]
    for seed, result in zip(seeds, drawn, strict=True):
        assert seed is not None
        again = ondevice("chat", *options, "--seed", seed[1], stdin="Hello\n")
        assert again.out == result.out
        assert "drawn at random" not in again.err


def test_chat_obeys_commands_that_begin_with_a_slash(
    ondevice: Run, chat_bundle: Path, tmp_path: Path
) -> None:
    talk = tmp_path / "talk.json"
    lines = f"Hello\n/save {talk}\n/reset\n/load {talk}\n/stats\n/budget 8GB\n/help\n/quit\nmore\n"
    options = ("-m", chat_bundle, "--temp", 0, "--max-tokens", 4, "--system-prompt", "Hi.")
    result = ondevice("chat", *options, stdin=lines)
    assert result.code == 0
    assert result.out.count("\n") >= 1
    saved = json.loads(talk.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert result.out == saved[-1]["content"] + "\n"
    for part in (
        "3 messages loaded",
        "forgotten",
        "budget 8.00 GB",
        "memory pressure: normal",
        "cut short after 4 tokens",
        "Ctrl-D",
    ):
        assert part in result.err


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("/load nowhere.json", 2, "no saved session"),
        ("/budget 1MB", 5, "too small"),
        ("/nonsense", 2, "'/nonsense' is not a command"),
        ("/save", 2, "'/save' is not a command, or lacks its argument"),
    ],
)
def test_a_command_that_fails_ends_a_piped_chat(
    ondevice: Run, chat_bundle: Path, line: str, code: int, message: str
) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 4, "--temp", 0)
    result = ondevice("chat", *options, stdin=f"Hello\n{line}\nmore\n")
    assert result.code == code
    assert message in result.err
    assert "line 2 of stdin, and what follows it, wasn't answered" in result.err
    assert result.out.count("\n") == 1


def test_a_message_may_begin_with_a_slash(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    lines = f"//etc is a folder\n/save {talk}\n"
    assert ondevice("chat", "-m", chat_bundle, "--max-tokens", 4, stdin=lines).code == 0
    assert json.loads(talk.read_text())["messages"][0]["content"] == "/etc is a folder"


def test_a_system_prompt_that_leaves_no_room_is_named(ondevice: Run, chat_bundle: Path) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 2, "--system-prompt", "x" * CONTEXT)
    result = ondevice("chat", *options, stdin="Hello\n")
    assert result.code == 4
    assert "the system prompt counts too" in result.err
    assert "/reset" not in result.err


def test_a_piped_chat_that_outgrows_the_context_says_what_was_not_answered(
    ondevice: Run, chat_bundle: Path
) -> None:
    options = ("-m", chat_bundle, "--max-tokens", 2, "--temp", 0)
    long = "x" * (CONTEXT // 2)
    stop = ("--when-full", "stop")
    result = ondevice("chat", *options, *stop, stdin=f"{long}\n\n{long}\nmore\n")
    assert result.code == 4
    assert result.out.count("\n") == 1
    assert "line 3 of stdin, and what follows it, wasn't answered" in result.err
    assert "forgotten" not in result.err
    dropping = ondevice("chat", *options, stdin=f"{long}\n\n{long}\n{long}\n")
    assert dropping.code == 0
    assert dropping.out.count("\n") == 3
    assert dropping.err.count(f"{CONTEXT} tokens is full: the oldest turns are forgotten, 1 now") == 1
    assert "--max-context" not in dropping.err  # The model has no more.
    advised = ondevice("chat", *options, stdin=f"{long}\n/reset\n{long}\n/reset\nmore\n")
    assert advised.code == 0
    assert advised.out.count("\n") == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/save {tmp}/no/where", "can't be saved to {tmp}/no/where: No such file or directory"),
        ("/save {tmp}", "can't be saved to {tmp}: Is a directory"),
        ("/save a\0b", "byte 0x00 at offset 7"),
        (f"/load {'x' * 300}", "File name too long"),
    ],
)
def test_a_conversation_that_cannot_be_saved_or_loaded(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, line: str, message: str
) -> None:
    lines = f"{line.format(tmp=tmp_path)}\nHello\n"
    result = ondevice("chat", "-m", chat_bundle, "--max-tokens", 2, stdin=lines)
    assert result.code in (1, 2)
    assert result.out == ""
    assert message.format(tmp=tmp_path) in result.err
    assert "Errno" not in result.err
    assert list(tmp_path.parent.glob("*.partial")) == []


def test_a_line_that_no_context_holds_is_refused_and_the_chat_goes_on(
    ondevice: Run, chat_bundle: Path, tmp_path: Path
) -> None:
    talk = tmp_path / "talk.json"
    long = "é" * (3 * PART_BYTES)
    for lines in (f"Hello\n{long}\nmore\n/save {talk}\n", f"Hello\n{long}\n/save {talk}\n{long}"):
        for when in ("drop", "stop"):
            options = ("-m", chat_bundle, "--max-tokens", 2, "--when-full", when)
            result = ondevice("chat", *options, stdin=lines)
            assert result.code == 4
            assert f"tokens and the context holds {CONTEXT}; shorten it" in result.err
            assert result.err.count("line 2 of stdin wasn't answered") == 1
            said = [it["content"] for it in json.loads(talk.read_text())["messages"] if it["role"] == "user"]
            assert said == (["Hello", "more"] if "more" in lines else ["Hello"])


def test_a_tilde_in_a_path_is_the_home_folder(
    ondevice: Run, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = "Hello\n/save ~/talk.json\n/reset\n/load ~/talk.json\n"
    result = ondevice("chat", "-m", chat_bundle, "--max-tokens", 2, stdin=lines)
    assert (result.code, (tmp_path / "talk.json").is_file()) == (0, True)
    assert f"saved to {tmp_path}/talk.json" in result.err
    assert "2 messages loaded" in result.err


def test_a_second_interrupt_while_the_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """People press Ctrl-C twice: at the prompt that never ends the chat."""
    typed = [signal.SIGINT, b"Hello", EOFError()]
    told: list[str] = []

    def read(prompt: str) -> bytes:
        item = typed.pop(0)
        if isinstance(item, EOFError):
            raise item
        if item is signal.SIGINT:
            signal.raise_signal(item)
        return item

    def tell(text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        told.append(text)

    monkeypatch.setattr(chat_input, "_input_bytes", read)
    monkeypatch.setattr(chat_input, "_is_waiting", lambda: False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with chat_input.Interrupts() as interrupts:
        turns = chat_input.read_turns(tell, interrupts, None, is_known_command)  # type: ignore[arg-type]
        assert [(turn.number, turn.text) for turn in turns] == [(1, "Hello")]
    assert told == ["\n(Ctrl-D quits)", ""]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Terminal:
    """A command on a pseudo-terminal, typed at and read from."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        self.master, worker = pty.openpty()
        self.process = subprocess.Popen(
            arguments,
            stdin=worker,
            stdout=worker,
            stderr=worker,
            start_new_session=True,
            env=os.environ | environment,
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

    def quiet(self) -> None:
        """Wait until nothing more is shown, and forget what was."""
        while select.select([self.master], [], [], 0.5)[0]:
            os.read(self.master, 4096)
        self.seen = ""

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C until `text` is shown: Python misses one that comes just before it waits for a key."""
        for _ in range(20):
            os.kill(self.process.pid, signal.SIGINT)
            with suppress(AssertionError):
                self.until(text, 2.0)
                return
        raise AssertionError(self.seen)

    def ask_until(self, line: str, text: str) -> None:
        """Type a line until `text` answers it: a Ctrl-C that comes late takes the line with it."""
        for _ in range(5):
            self.type(line)
            with suppress(AssertionError):
                self.until(text, 10.0)
                return
        raise AssertionError(self.seen)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_the_opening_says_what_is_on_flash(tmp_path: Path) -> None:
    """At a terminal, in two lines, in a budget below what a short text takes in memory."""
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", hidden_act="silu", intermediate_size=1 << 15)
    bundle = convert_bundle(checkpoint, tmp_path / "wide")
    shown = subprocess.run(
        command("inspect", "-m", bundle, "--json"), capture_output=True, text=True, check=True
    )
    least = json.loads(shown.stdout)["minimum_budget_bytes"]
    terminal = Terminal(command("chat", "-m", bundle, "--dram-budget", least + (7 << 20)))
    try:
        opening = terminal.until("> ")
        assert re.search(r"wide in [\d.]+ MB, where [\d.]+ MB would hold everything; context \d+", opening)
        resident = re.search(
            r"\nfeed-forward to be resident: (\d+) % at the start, (\d+) % at \d+ tokens; the rest is read",
            opening,
        )
        assert resident is not None, opening
        assert 0 < int(resident[1]) < 100
        assert "everything will be resident" not in opening
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.master)


def test_chat_on_a_terminal_survives_interrupts_and_ends_at_ctrl_d(chat_bundle: Path) -> None:
    terminal = Terminal(command("chat", "-m", chat_bundle, "--temp", 0, "--max-tokens", 200))
    try:
        opening = terminal.until("> ")
        assert re.search(
            r"tiny-chat in [\d.]+ MB, where [\d.]+ MB would hold everything; context \d+", opening
        )
        assert "everything will be resident, read from flash once" in opening
        assert "plan: " not in opening
        terminal.type("Tell me everything\r")
        terminal.until("everything")
        time.sleep(0.05)
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until("> ")
        terminal.quiet()
        terminal.interrupt_until("(Ctrl-D quits)")
        terminal.ask_until("/nonsense\r", "is not a command")
        terminal.type("/stats\r")
        terminal.until("tokens/s")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.master)


@pytest.mark.fast("xterm-*")
@pytest.mark.parametrize(("term", "begin", "end"), [("dumb", "", ""), ("xterm", "\x1b[200~", "\x1b[201~")])
def test_pasted_lines_are_one_message(
    chat_bundle: Path, tmp_path: Path, term: str, begin: str, end: str
) -> None:
    """With bracketed paste, as a terminal sends it that was asked to, and as lines that wait already."""
    talk = tmp_path / "talk.json"
    pasted = "def f():\n" + "\n".join(f"    line {number} of it" for number in range(10))
    options = ("--temp", 0, "--max-tokens", 4, "--max-context", CONTEXT)
    terminal = Terminal(command("chat", "-m", chat_bundle, *options), TERM=term)
    try:
        terminal.until("> ")
        terminal.quiet()
        terminal.type(f"{begin}{pasted}{end}\n")
        terminal.until("cut short")
        terminal.until("> ")
        # What does something by itself is no part of what was pasted before it.
        terminal.type(f"one\ntwo\n/save {talk}\n")
        terminal.until("saved to")
        terminal.type("/quit\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.master)
    said = [it["content"] for it in json.loads(talk.read_text())["messages"] if it["role"] == "user"]
    assert [text.replace("\r", "\n") for text in said] == [pasted, "one\ntwo"]
