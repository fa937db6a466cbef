"""The budget bounds what comes in as well: prompts and texts of any length, and tokenizers' files."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

import ondevice as package
from ondevice.commands.options import PART_BYTES, TextParts
from ondevice.errors import BudgetError, UsageError
from ondevice.flash.throughput import measure_throughput
from ondevice.measure import profiling
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.command_line import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
WORDS = b"It was a cold morning, and the rain had come. "
# The command line, with its own account of the peak as the last line of stderr.
PROGRAM = """
import sys
from ondevice.cli import run
code = run(sys.argv[1:])
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


def peak(arguments: list[object], fed: Iterator[bytes]) -> tuple[int, int, str]:
    """(exit code, peak resident bytes, stderr) of a command that is fed with what it takes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        for part in fed:
            process.stdin.write(part)
        process.stdin.close()
    except BrokenPipeError:
        pass
    *said, kilobytes = process.stderr.read().decode().splitlines()
    return process.wait(timeout=200), 1024 * int(kilobytes), "\n".join(said)


def endless(text: bytes) -> Iterator[bytes]:
    while True:
        yield text * 1000


def smallest_and_a_bit(model: Path) -> int:
    return package.inspect(model).minimum_budget_bytes + (12 << 20)


@pytest.mark.fast("abcdefgh")
@pytest.mark.parametrize("text", [WORDS, b" " * 64, "天地玄黄宇宙洪荒".encode(), b"abcdefgh"])
def test_a_prompt_without_end_is_refused_within_the_budget(chat_bundle: Path, text: bytes) -> None:
    budget = smallest_and_a_bit(chat_bundle)
    arguments = ["generate", "-m", chat_bundle, "-p", "-", "--dram-budget", budget]
    code, peak_bytes, said = peak(arguments, endless(text))
    assert code == 4
    assert "shorten it" in said
    assert peak_bytes <= budget


@pytest.mark.fast("It was*")
@pytest.mark.parametrize("text", [WORDS, "天地玄黄宇宙洪荒".encode()])
def test_a_chat_refuses_a_line_of_50_mb_within_the_budget(chat_bundle: Path, text: bytes) -> None:
    budget = smallest_and_a_bit(chat_bundle)
    lines = chain([b"Hello\n"], [text * 1000] * (50_000_000 // (1000 * len(text))), [b"\nmore\n"])
    arguments = ["chat", "-m", chat_bundle, "--max-tokens", 2, "--dram-budget", budget]
    code, peak_bytes, said = peak(arguments, lines)
    assert code == 4
    assert "shorten it; line 2 of stdin wasn't answered" in said
    assert "line 3" not in said
    assert peak_bytes <= budget


def test_a_text_of_any_length_is_scored_within_the_budget(chat_bundle: Path) -> None:
    budget = smallest_and_a_bit(chat_bundle)
    arguments = ["eval", "-m", chat_bundle, "--text", "-", "--dram-budget", budget]
    code, peak_bytes, _ = peak(arguments, iter([WORDS * 250] * 2))
    assert code == 0
    assert peak_bytes <= budget


def test_of_a_text_to_measure_on_no_more_is_read_than_is_used(
    relu_chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "measure_throughput", partial(measure_throughput, seconds=0.002))
    text = (part.decode() for part in endless(WORDS))
    assert profiling.profile(relu_chat_bundle, text, tokens=64).tokens == 64


@pytest.mark.fast("/dev/zero*")
@pytest.mark.parametrize(
    ("path", "message"),
    [("/dev/zero", "byte 0x00 at offset 0"), ("/dev/urandom", "is not"), ("/dev/null", "too short")],
)
def test_a_device_is_no_text(chat_bundle: Path, path: str, message: str) -> None:
    code, peak_bytes, said = peak(["eval", "-m", chat_bundle, "--text", path], iter([]))
    assert code == 2
    assert message in said
    assert peak_bytes < smallest_and_a_bit(chat_bundle)


def test_a_device_is_no_settings_file(
    ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_CONFIG", "/dev/zero")
    refused = ondevice("generate", "-m", chat_bundle, "-p", "a")
    assert refused.code == 2
    assert "has more than 1048576 bytes" in refused.err


def test_parts_of_a_text_are_the_text(tmp_path: Path) -> None:
    """Characters that lie across two parts included; what isn't text is named where it lies."""
    file = tmp_path / "text"
    for text in ("", "a", "é" * PART_BYTES, "x" + "天" * PART_BYTES, "a" * (3 * PART_BYTES - 1) + "é"):
        file.write_text(text, encoding="utf-8")
        parts = TextParts(str(file))
        assert "".join(parts) == text
        assert parts.share == (1.0 if text else 0.0)
    for data, at in ((b"a\xff", 1), (b"x" * PART_BYTES + b"\xe5\xa4", PART_BYTES), (b"\xe5" * 2, 0)):
        file.write_bytes(data)
        with pytest.raises(UsageError, match=f"not UTF-8 text: byte 0x{data[at]:02x} at offset {at}$"):
            list(TextParts(str(file)))
    file.write_bytes(b"x" * PART_BYTES + b"abc\0")
    with pytest.raises(UsageError, match=f"byte 0x00 at offset {PART_BYTES + 3}"):
        list(TextParts(str(file)))


def heavy_tokenizer(checkpoint: Path) -> None:
    """A `tokenizer.json` of 5 MB, which takes 100 MB to read: all the same few merges.

    A space before each text is no rule of native code, which would make a small table of them.
    """
    path = checkpoint / "tokenizer.json"
    document: dict[str, Any] = json.loads(path.read_text())
    letters = [*string.ascii_letters][:3]
    document["model"]["vocab"] |= {a + b: 256 + i for i, (a, b) in enumerate(product(letters, letters))}
    document["model"]["merges"] = [[a, b] for a, b in product(letters, letters)] * 50_000
    document["pre_tokenizer"]["add_prefix_space"] = True
    document["added_tokens"] = [token | {"id": token["id"] + 9} for token in document["added_tokens"]]
    path.write_text(json.dumps(document))


@pytest.mark.slow
def test_a_tokenizer_that_takes_more_than_the_budget_is_not_read(tmp_path: Path) -> None:
    checkpoint = write_chat_checkpoint(
        tmp_path / "checkpoint", vocab_size=320, bos_token_id=265, eos_token_id=266
    )
    heavy_tokenizer(checkpoint)
    bundle = convert_bundle(checkpoint, tmp_path / "heavy")
    plan = package.inspect(bundle, dram_budget="120MB")
    assert not plan.fits
    assert plan.minimum_parts["the tokenizer, not read yet, at most"] > 50_000_000
    with pytest.raises(BudgetError) as refused:
        package.load(bundle, dram_budget="120MB")
    arguments = ["generate", "-m", bundle, "-p", "a", "--max-tokens", 2, "--dram-budget"]
    code, peak_bytes, said = peak([*arguments, 100_000_000], iter([]))
    assert code == 5
    assert "the tokenizer, not read yet, at most" in said
    assert peak_bytes < 100_000_000
    # The smallest that is named does, and is kept to.
    code, peak_bytes, _ = peak([*arguments, refused.value.required_bytes], iter([]))
    assert code == 0
    assert 100_000_000 < peak_bytes <= refused.value.required_bytes
