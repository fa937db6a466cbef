"""`ondevice doctor` on models: damage is found, and backends that write other tokens, margins considered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ondevice import doctor
from ondevice.api import Model, load
from ondevice.doctor import generation
from ondevice.doctor.check import attempt
from ondevice.errors import BackendUnavailableError, BudgetError, BundleError
from ondevice.runtime.models import shipped_folder
from tests.support.bundles import copy_files

SHIPPED = shipped_folder() / "small-relu"
LATE = 5
"""A token that isn't the first one, nor the last."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found here doesn't depend on what else the machine does."""
    monkeypatch.setattr(generation, "GENERATION_SECONDS", 600.0)


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    """The model that ships, by backend, all of it in memory."""
    with (
        load(SHIPPED, backend="cpu", sparsity="dense", max_context=generation.CONTEXT) as cpu,
        load(SHIPPED, backend="reference", max_context=generation.CONTEXT) as reference,
    ):
        yield {"cpu": cpu, "reference": reference}


@pytest.fixture(scope="module")
def recorded() -> generation.Recorded:
    return generation.read_recorded(SHIPPED)


def changed(recorded: generation.Recorded, margins: dict[int, float]) -> generation.Recorded:
    """The recording with wrong tokens that won by the given margins."""
    tokens, all_margins = list(recorded.tokens), list(recorded.margins)
    for index, margin in margins.items():
        tokens[index], all_margins[index] = tokens[index] + 1, margin
    return replace(recorded, tokens=tuple(tokens), margins=tuple(all_margins))


def test_a_damaged_model_fails(tmp_path: Path) -> None:
    folder = copy_files(SHIPPED, tmp_path / "model")
    path = folder / "neurons-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)
    check = attempt("shipped model", lambda: generation.shipped_model(folder))
    assert check.status == "failed"
    assert "neurons-00003" in check.value


def test_an_app_may_leave_the_model_out() -> None:
    assert generation.shipped_model(None).status == "warning"
    assert generation.generation("cpu", None).status == "skipped"


def test_a_named_model_is_opened_and_planned(chat_bundle: Path) -> None:
    check = generation.named_model(chat_bundle)
    assert (check.status, check.figures["path"]) == ("ok", str(chat_bundle))
    assert attempt("model", lambda: generation.named_model("no-such-model")).status == "failed"
    steps = [name for name, _ in doctor._steps(chat_bundle)]
    assert "model" in steps
    assert "model" not in [name for name, _ in doctor._steps(None)]


def test_every_backend_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BackendUnavailableError("no such device")

    assert doctor.backends() == ("cpu", "mlx", "reference")
    monkeypatch.setattr("ondevice.api.load", refuse)
    check = generation.generation("mlx", SHIPPED)
    assert (check.status, check.value) == ("skipped", "no such device")


def test_memory_too_small_for_the_reference_alone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Model:
        raise BudgetError("too small", required_bytes=155_000_000)

    monkeypatch.setattr("ondevice.api.load", refuse)
    found = generation.generation("reference", SHIPPED)
    assert (found.status, "it takes 155 MB" in found.value) == ("skipped", True)
    with pytest.raises(BudgetError):
        generation.generation("cpu", SHIPPED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: None, "is missing"),
        (lambda content: content | {"manifest_sha256": "0" * 64}, "another model"),
        (lambda content: content | {"margins": content["margins"][1:]}, "16 tokens and 15 margins"),
        (lambda content: content | {"tokens": [], "margins": []}, "0 tokens"),
        (lambda content: content | {"version": 2}, "version is 2"),
        (lambda content: content | {"more": 1}, "unknown key"),
    ],
)
def test_a_recording_that_cannot_be_used(tmp_path: Path, change: Any, message: str) -> None:
    (tmp_path / "bundle.json").write_bytes((SHIPPED / "bundle.json").read_bytes())
    content = change(json.loads((SHIPPED / generation.RECORDED).read_text()))
    if content is not None:
        (tmp_path / generation.RECORDED).write_text(json.dumps(content))
    with pytest.raises(BundleError, match=message):
        generation.read_recorded(tmp_path)


def test_the_recording_is_what_its_maker_makes(recorded: generation.Recorded) -> None:
    maker = pytest.importorskip("recipe.recorded_tokens")
    assert maker.recorded(SHIPPED) == json.loads((SHIPPED / generation.RECORDED).read_text())
    assert min(recorded.margins) > generation.OTHER_TOLERANCE


def compared(models: dict[str, Model], backend: str, recorded: generation.Recorded) -> doctor.Check:
    tolerance = generation.TOLERANCES.get(backend, generation.OTHER_TOLERANCE)
    return generation.compare(backend, models[backend], recorded, tolerance)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_recorded_tokens_are_written(
    models: dict[str, Model], recorded: generation.Recorded, backend: str
) -> None:
    check = compared(models, backend, recorded)
    assert (check.status, check.figures["different_tokens"]) == ("ok", [])
    assert f"{len(recorded.tokens)} tokens as recorded" in check.value


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_token_that_won_clearly_must_be_written(
    models: dict[str, Model], recorded: generation.Recorded, backend: str
) -> None:
    check = compared(models, backend, changed(recorded, {LATE: generation.OTHER_TOLERANCE}))
    assert (check.status, check.figures["different_tokens"][0]) == ("failed", LATE)
    assert f"token {LATE + 1} of {len(recorded.tokens)} isn't the recorded one" in check.value
    assert check.remedy


def test_a_token_that_barely_won_is_forgiven_but_not_to_cpu(
    models: dict[str, Model], recorded: generation.Recorded
) -> None:
    """The last one, so that nothing follows from what is made up."""
    last = len(recorded.tokens) - 1
    barely = changed(recorded, {last: generation.OTHER_TOLERANCE - 0.01})
    assert compared(models, "cpu", barely).status == "failed"
    forgiven = compared(models, "reference", barely)
    assert (forgiven.status, forgiven.figures["different_tokens"]) == ("ok", [last])
    assert "but for 1 with margins below 0.25 logits" in forgiven.value
    assert compared(models, "cpu", changed(recorded, {last: 0.0})).status == "failed"


def test_after_a_forgiven_token_the_recorded_ones_lead(
    models: dict[str, Model], recorded: generation.Recorded
) -> None:
    last = len(recorded.tokens) - 1
    check = compared(models, "reference", changed(recorded, {last - 1: 0.1, last: 4.0}))
    assert (check.status, check.figures["different_tokens"][0]) == ("failed", last - 1)
    assert f"token {last + 1} of" in check.value


def test_an_answer_that_ends_early_is_another_one(
    models: dict[str, Model], recorded: generation.Recorded
) -> None:
    longer = replace(recorded, tokens=(*recorded.tokens, 5), margins=(*recorded.margins, 1.0))
    check = compared(models, "reference", longer)
    assert (check.status, check.figures["different_tokens"]) == ("failed", [len(recorded.tokens)])


def test_another_tokenizer_fails(models: dict[str, Model], recorded: generation.Recorded) -> None:
    check = compared(models, "cpu", replace(recorded, prompt=recorded.prompt[1:]))
    assert (check.status, check.value) == ("failed", "the prompt's token ids aren't the recorded ones")


def test_a_slow_machine_is_told_so(
    models: dict[str, Model], recorded: generation.Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "GENERATION_SECONDS", -1.0)
    check = compared(models, "cpu", recorded)
    assert (check.status, check.figures["written_tokens"]) == ("warning", 1)
    wrong = compared(models, "cpu", changed(recorded, {0: 1.0}))
    assert wrong.status == "failed"
