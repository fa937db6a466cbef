"""What the documents tell people to type exists: make targets, commands, options, API names, links."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import click
import pytest

import ondevice
from ondevice.cli import cli
from ondevice.units import parse_size
from tests.support.command_line import command
from tests.support.paths import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "weights/README.md")),
    ROOT / "weights/real/README.md",
    ROOT / "weights/small-relu/README.md",
    ROOT / "examples/macos_app/README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
README_BYTES = 9000


def code_lines(path: Path) -> list[str]:
    """Lines of code blocks, indented or fenced, without their comments."""
    lines = []
    fenced = False
    for line in path.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
    return lines


def commands(path: Path) -> list[list[str]]:
    """Every `ondevice ...` line of the code blocks, as arguments."""
    found = []
    for line in code_lines(path):
        line = line.removeprefix("$ ")
        if line.startswith("ondevice "):
            found.append(shlex.split(line, comments=True)[1:])
    return found


def make_targets() -> set[str]:
    """Every target, of included files too."""
    text = (ROOT / "Makefile").read_text()
    for names in re.findall(r"^include (.+)$", text, re.MULTILINE):
        text += "".join((ROOT / name).read_text() for name in names.split())
    return {
        name for names in re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE) for name in names.split()
    }


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def option_violations(arguments: list[str]) -> list[str]:
    """Commands and options of one line that the command line doesn't have."""
    command: click.Command | None = cli
    for name in arguments:
        if not isinstance(command, click.Group):
            break
        if (command := command.commands.get(name)) is None:
            return [name]
    assert command is not None
    known = {flag for p in command.params if isinstance(p, click.Option) for flag in p.opts}
    return [
        flag for flag in arguments if flag.startswith("--") and flag.split("=")[0] not in known | {"--help"}
    ]


def test_the_two_commands_are_documented() -> None:
    lines = [line.split("#")[0].strip() for line in code_lines(ROOT / "README.md")]
    assert "make chat" in lines
    assert "make test" in lines


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_make_targets_exist(path: Path) -> None:
    mentioned = set(re.findall(r"(?:^|`| )make ([a-z][a-z-]+)", "\n".join(code_lines(path))))
    mentioned |= set(re.findall(r"`make ([a-z][a-z-]+)", path.read_text()))
    assert mentioned <= make_targets()


def test_every_public_make_target_is_in_the_help() -> None:
    text = (ROOT / "Makefile").read_text()
    head = text[: text.index("SHELL :=")]
    public = {"chat", "models", "test", "test-slow", "check", "format", "docs", "options", "bench", "clean"}
    public |= {"test-native", "test-neon", "test-sanitize", "test-tsan"}
    assert public <= make_targets()
    assert [name for name in sorted(public) if not re.search(rf"\b{name}\b", head)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_and_options_exist(path: Path) -> None:
    assert [wrong for line in commands(path) for wrong in option_violations(line)] == []


def test_the_readme_shows_the_main_job() -> None:
    assert {"convert", "inspect", "chat"} <= {line[0] for line in commands(ROOT / "README.md")}


def test_the_readme_is_read_in_minutes() -> None:
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


def test_an_undocumented_option_is_seen() -> None:
    assert option_violations(["chat", "--model", "m", "--no-such-option"]) == ["--no-such-option"]
    assert option_violations(["train", "predictors", "--mode", "shared"]) == ["--mode"]
    assert option_violations(["train", "streams", "--mode", "shared"]) == []
    assert option_violations(["sing"]) == ["sing"]
    assert option_violations(["train", "songs"]) == ["songs"]


def test_python_examples_use_names_that_exist() -> None:
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {"ondevice": ondevice, "model": ondevice.Model}.get(node.value.id)
                assert owner is None or hasattr(owner, node.attr), ast.unparse(node)


def test_the_first_python_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    example = python_blocks(ROOT / "README.md")[0]
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 3


def anchors(text: str) -> set[str]:
    """What a link may name of a page: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """Links of a page to files that aren't there, or to headings that those don't have."""
    found = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        target = path.parent / link if link else path
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(f"{link}#{anchor}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    assert dead_links(path, path.read_text()) == []


def test_a_dead_link_is_seen() -> None:
    page = "[a](docs/none.md) [b](docs/api.md#nothing) [c](docs/api.md#errors) [d](https://example.org)"
    assert dead_links(ROOT / "README.md", page) == ["docs/none.md#", "docs/api.md#nothing"]


def small_budgets() -> list[tuple[str, list[str]]]:
    """Documents, and their commands that run the shipped model under a budget, inline ones too."""
    found = []
    for path in DOCUMENTS:
        inline = re.findall(r"`(ondevice [^`]*)`", path.read_text())
        for line in [*commands(path), *(shlex.split(text)[1:] for text in inline)]:
            if "--dram-budget" in line and not {"-m", "--model"} & set(line):
                found.append((path.name, line))
    return found


@cache
def smallest_budget(*options: str) -> int:
    """What a process of its own needs for the shipped model, in bytes."""
    with tempfile.TemporaryDirectory() as home:
        shown = subprocess.run(
            command("inspect", "--json", *options),
            env=os.environ | {"ONDEVICE_HOME": home},
            capture_output=True,
            text=True,
            check=True,
        )
    return int(json.loads(shown.stdout)["minimum_budget_bytes"])


def test_budgets_of_the_examples_hold_on_any_machine() -> None:
    """What a process takes before it loads anything differs: a fifth more than the smallest here is room."""
    assert ("README.md", "4GB") in [(name, line[-1]) for name, line in small_budgets()]
    for name, line in small_budgets():
        budget = parse_size(line[line.index("--dram-budget") + 1])
        kept = [f"{flag}={line[line.index(flag) + 1]}" for flag in ("--sparsity",) if flag in line]
        least = smallest_budget(*kept)
        assert budget >= 1.2 * least, f"{name}: {shlex.join(line)}: {least} bytes are the smallest here"


PARTS = ("ondevice", "converters", "weights", "tests", "docs", "examples")


def missing_files(text: str) -> list[str]:
    """Paths and benchmark modules in code spans and code blocks that aren't in the source tree."""
    paths = re.findall(rf"(?<![\w/.-])(?:{'|'.join(PARTS)})/[\w./-]*\w/?", text)
    modules = re.findall(r"python -m (tests\.benchmarks\.[a-z_]+\.[a-z_]+)", " ".join(text.split()))
    paths += [f"{name.replace('.', '/')}.py" for name in modules]
    # In diagrams a path begins below `ondevice/`.
    below = re.findall(r"^ {4,}[|\\ ]*([a-z_]+/[a-z_]+\.(?:py|cc))", text, re.MULTILINE)
    paths += [f"ondevice/{name}" for name in below if not name.startswith(PARTS)]
    return [name for name in paths if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_documents_name_exist(path: Path) -> None:
    code = re.findall(r"`([^`\n]+)`", path.read_text())
    assert missing_files("\n".join([*code, "    " + "\n    ".join(code_lines(path))])) == []


def test_a_missing_file_is_seen() -> None:
    assert missing_files("    ondevice/none.py\n      |  flash/none.cc") == [
        "ondevice/none.py",
        "ondevice/flash/none.cc",
    ]
    assert missing_files("python -m tests.benchmarks.explain.none") == ["tests/benchmarks/explain/none.py"]


def test_results_of_the_readme_are_those_of_the_page_of_real_models() -> None:
    rows = re.findall(
        r"^\| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.M
    )
    known = set(re.findall(r"[\d.]*\d", (ROOT / "docs/real-models.md").read_text()))
    assert len(rows) == 6
    for case, *numbers in rows:
        assert [number for number in numbers if number not in known] == [], case
