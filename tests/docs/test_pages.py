"""Pages that scripts of docs/tools/ make, compared with what those would make today."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest

import ondevice
from ondevice import errors
from tests.support.paths import ROOT
from tests.support.real_models import real_model


def tool(name: str) -> ModuleType:
    """A script of docs/tools/, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_tools_{name}", ROOT / "docs/tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_options_is_what_make_options_writes() -> None:
    options = tool("options")
    page = options.PAGE.read_text(encoding="utf-8")
    assert page == options.page(), "run `make options`"
    flags = {flag for _, command in options._commands(options.cli) for flag in options._flag_names(command)}
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in page] == []


def test_every_exit_code_has_a_meaning() -> None:
    named = (getattr(errors, name) for name in dir(errors))
    kinds = [it for it in named if isinstance(it, type) and issubclass(it, ondevice.OndeviceError)]
    assert {kind.exit_code for kind in kinds} | {0, errors.INTERRUPTED} == set(tool("options").EXIT_CODES)


@pytest.mark.slow
@pytest.mark.real
def test_the_recorded_run_is_what_comes_out() -> None:
    """Line by line, but for numbers that differ from run to run; a machine may have warnings to add."""
    real_model("smollm2")
    record = tool("record")
    match = record.example(record.PAGE.read_text(encoding="utf-8"))
    shown = "\n".join(line[4:] for line in match["output"].splitlines())
    found = record.words(record.run(match)).splitlines()
    missing = [line for line in record.words(shown).splitlines() if line not in found]
    assert missing == [], "run docs/tools/record.py"


def test_walks_know_where_they_begin() -> None:
    for path, function in tool("walks").MARKS.values():
        assert f"def {function}(" in (ROOT / "ondevice" / path).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_walks_are_as_long_as_the_page_says() -> None:
    walks = tool("walks")
    done = subprocess.run([sys.executable, walks.__file__], capture_output=True, text=True, check=True)
    page = walks.PAGE.read_text(encoding="utf-8")
    assert walks.with_counts(page, json.loads(done.stdout.splitlines()[-1])) == page, (
        "run docs/tools/walks.py --write"
    )
