"""The table of mutants names code and tests that are there, so that none of them goes unnoticed."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.run import Mutant, read_table
from tests.support.paths import ROOT

MUTANTS = read_table()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda it: f"{it.subject}: {it.harm}")
def test_a_mutant_is_other_code_in_one_place_of_its_file(mutant: Mutant) -> None:
    assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    assert all((ROOT / test).is_file() for test in mutant.tests)


def test_a_text_that_is_gone_or_there_twice_is_refused() -> None:
    for old in ("no such text", "import"):
        with pytest.raises(ValueError, match=f"has this text .* times, not once: {old}"):
            Mutant("none", "tests/mutants/run.py", (), "none", old, "").source  # noqa: B018


def test_each_harm_is_told_apart_and_each_subject_has_a_dozen() -> None:
    assert max(Counter((it.subject, it.harm) for it in MUTANTS).values()) == 1
    assert min(Counter(it.subject for it in MUTANTS).values()) >= 12
