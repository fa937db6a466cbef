"""The guide for embedders: every block of Python in it runs, alone, and prints what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ondevice
from tests.support.paths import ROOT

GUIDE = ROOT / "docs/embedding.md"
if not GUIDE.is_file():
    pytest.skip("the documents aren't beside these tests", allow_module_level=True)
TEXT = GUIDE.read_text(encoding="utf-8")


def snippets() -> list[tuple[str, str, str]]:
    """(heading, program, what it prints) of every block; the lines indented behind one are its output."""
    found, heading = [], ""
    pattern = r"^## (?P<heading>.+)$|^```python\n(?P<program>[\s\S]*?)^```\n(?:\n(?P<output>(?:    .*\n?)+))?"
    for match in re.finditer(pattern, TEXT, re.MULTILINE):
        heading = match["heading"] or heading
        if match["program"] is not None:
            found.append((heading, match["program"], re.sub(r"^    ", "", match["output"] or "", flags=re.M)))
    return found


SNIPPETS = snippets()


ELSEWHERE = [it for it in SNIPPETS if it[0] != "Budgets"]
"""Those that count no memory of the process that they run in."""


@pytest.mark.fast("budgets0")
@pytest.mark.parametrize(
    ("program", "output"), [it[1:] for it in SNIPPETS], ids=[it[0].lower() for it in SNIPPETS]
)
def test_a_snippet_runs_and_prints_what_is_said(program: str, output: str, tmp_path: Path) -> None:
    assert "assert" in program or output, "a snippet that shows nothing proves nothing"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip() == output.strip()


@pytest.mark.parametrize(
    ("program", "output"), [it[1:] for it in ELSEWHERE], ids=[it[0].lower() for it in ELSEWHERE]
)
def test_a_snippet_runs_in_a_process_that_does_more(
    program: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(GUIDE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == output.strip()


def test_every_block_of_the_guide_is_found() -> None:
    assert len(SNIPPETS) == TEXT.count("```python") >= 8
    headings = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert [heading for heading in headings if heading not in {it[0] for it in SNIPPETS}] == []


def test_every_error_that_is_public_is_in_the_guide() -> None:
    errors = [name for name in ondevice.__all__ if name.endswith("Error")]
    assert errors
    assert [name for name in errors if f"`{name}`" not in TEXT] == []
