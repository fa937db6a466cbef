"""An error says Python's parameters to Python, and flags to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import ondevice as package
from ondevice.config import BackendName, Sparsity, Speculation
from ondevice.errors import BudgetError, OndeviceError, UsageError
from tests.support.bundles import CONTEXT
from tests.support.command_line import Run


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        ("raise --max-context (the limit is 9)", "raise max_context (the limit is 9)"),
        ("--max-context 512 would fit.", "max_context=512 would fit."),
        ("or lower --max-context or --kv-bits, or load", "or lower max_context or kv_bits, or load"),
        ("load with --sparsity dense, or", 'load with sparsity="dense", or'),
        ("--speculation model needs --draft-model", 'speculation="model" needs draft_model'),
        ("every --sparsity but `predicted`", "every sparsity but `predicted`"),
        ("lower --temp; --resume, or --force", "lower temperature; resume=True, or force=True"),
        ("take --dram-budget 4000 or less", "take dram_budget=4000 or less"),
        ("--predictor-recall 0.95.", "predictor_recall=0.95."),
        (
            "To make it: ondevice convert a --output /b/c. Give another --output",
            "To make it: ondevice convert a --output /b/c. Give another output",
        ),
        (
            "`ondevice train streams --model DIR --text FILE` makes them; --model is needed",
            "`ondevice train streams --model DIR --text FILE` makes them; model is needed",
        ),
        ("a -- b, x--y, ---z and --", "a -- b, x--y, ---z and --"),
    ],
)
def test_flags_become_parameters(flags: str, parameters: str) -> None:
    for error in (OndeviceError(flags), UsageError(flags), BudgetError(flags, 1)):
        assert str(error) == parameters
        assert error.for_command_line == flags
    # As it comes out where one error has another's words.
    assert str(OndeviceError(str(OndeviceError(flags)))) == parameters


@pytest.mark.parametrize(
    ("option", "values"), [("speculation", Speculation), ("sparsity", Sparsity), ("backend", BackendName)]
)
def test_every_value_of_an_option_becomes_a_parameter(option: str, values: object) -> None:
    for value in get_args(values):
        assert str(OndeviceError(f"--{option} {value} needs")) == f'{option}="{value}" needs'


def test_each_gets_its_own(ondevice: Run, chat_bundle: Path) -> None:
    with pytest.raises(BudgetError) as small:
        package.load(chat_bundle, dram_budget="1MB")
    assert "Raise dram_budget." in str(small.value)
    assert "--" not in str(small.value)
    shown = ondevice("generate", chat_bundle, "-p", "a", "--dram-budget", "1MB").err
    assert "Raise --dram-budget." in shown

    with package.load(chat_bundle, max_context=64) as model, pytest.raises(OndeviceError) as long:
        model.generate("x" * 80)
    assert f"or raise max_context (this model's limit is {CONTEXT})" in str(long.value)
    shown = ondevice("generate", chat_bundle, "-p", "x" * 80, "--max-context", 64).err
    assert "or raise --max-context (this" in shown
    shown = ondevice("chat", chat_bundle, "--max-context", 64, stdin="x" * 80).err
    assert "or raise --max-context (this" in shown

    with pytest.raises(UsageError, match=r'predictor_recall has no meaning without sparsity="predicted"'):
        package.load(chat_bundle, predictor_recall=0.9)
    shown = ondevice("inspect", chat_bundle, "--predictor-recall", 0.9).err
    assert "--predictor-recall has no meaning without --sparsity predicted" in shown
