"""`bench --speculation all`: every drafter beside plain decoding, with numbers that belong together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ondevice.api import inspect, load, open_model
from ondevice.bundle.streams import STREAMS
from ondevice.commands.bench_reports import comparison_table
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.errors import (
    BackendUnavailableError,
    BudgetError,
    BundleError,
    ContextOverflowError,
    TextChangedError,
    UsageError,
)
from ondevice.generate import Event
from ondevice.measure import drafters, plots
from ondevice.measure.drafters import ALL_TASKS, OFF, Changed, Comparison, DrafterSwitch, compare_drafters
from ondevice.measure.prompts import BUILT_IN, Task, paragraphs
from ondevice.runtime.engine import Engine
from ondevice.speculation.drafted_text import PassOutcome, _DraftCount
from ondevice.speculation.registry import DRAFTERS
from ondevice.speculation.tree import Draft, plain
from ondevice.stats import DraftStats, GenerationStats, median_stats
from tests.support.bundles import convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import budget_between
from tests.support.command_line import Run
from tests.support.engines import always_draft
from tests.support.flash_files import flip_byte
from tests.support.made_up_streams import add_streams

TASKS = (
    Task("songs", ("Row, row, row your boat, row, row, row your", "La la la la, la la la la, la la")),
    Task("talk", ("Hello there, hello there",), chat=True),
)
SAMPLING = SamplingConfig(max_tokens=10)
EAGER_NODES = 6
TREE = Draft((9, 1, 2, 3, 4), (-1, 0, 0, 1, 3))


@pytest.fixture(scope="module")
def relu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Neurons that outweigh what loading takes, half of them zero, and streams of no training."""
    folder = tmp_path_factory.mktemp("relu")
    shape = {"hidden_size": 1024, "head_dim": 64, "intermediate_size": 1024, "hidden_act": "relu"}
    checkpoint = write_chat_checkpoint(folder / "checkpoint", num_hidden_layers=2, **shape)
    bundle = convert_bundle(checkpoint, folder / "relu", "f16")
    add_streams(bundle, gamma=2)
    return bundle


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """However little they are worth: drafts in every pass."""
    with pytest.MonkeyPatch.context() as patch:
        always_draft(patch, [EAGER_NODES])
        yield


def compare(bundle: Path | None, **options: Any) -> Comparison:
    return compare_drafters(bundle, RuntimeConfig(threads=1, **options), TASKS, SAMPLING)


@pytest.fixture(scope="module")
def found(relu_bundle: Path, eager: None) -> Comparison:
    return compare(
        relu_bundle, sparsity="exact", dram_budget=budget_between(relu_bundle, 2, sparsity="exact")
    )


def test_every_drafter_is_measured_on_every_task(found: Comparison) -> None:
    drafters = [name for name in DRAFTERS if name not in missing(found)]
    assert {"lookup", "recycling", "streams", "resident"} <= set(drafters)
    assert found.tasks == ("songs", "talk", ALL_TASKS)
    assert [(row.task, row.drafter) for row in found.rows] == [
        (task, name) for task in found.tasks for name in (OFF, *drafters)
    ]
    assert [found.row(task, OFF).prompts for task in found.tasks] == [2, 1, 3]
    assert found.changed == ()
    assert found.texts == 3 * len(drafters)
    assert set(found.held_bytes) == {OFF, *drafters}
    assert found.held_bytes[OFF] == 0 < found.held_bytes["streams"]


def missing(found: Comparison) -> set[str]:
    """Drafters that a note says why there are none of."""
    return {
        note.split(":")[0].removeprefix("without ") for note in found.notes if note.startswith("without ")
    }


def test_the_numbers_belong_together(found: Comparison) -> None:
    for row in found.rows:
        drafting = row.drafting
        # Plain decoding's token, and every guess that was right.
        assert row.tokens == row.passes + sum(drafting.accepted_by_depth)
        assert row.tokens == found.row(row.task, OFF).tokens
        assert len(drafting.drafted_by_depth) == len(drafting.accepted_by_depth)
        by_depth = [*drafting.drafted_by_depth]
        assert by_depth == sorted(by_depth, reverse=True)
        for right, further in zip(drafting.accepted_by_depth, by_depth[1:], strict=False):
            assert right >= further
        assert drafting.drafts <= row.passes
        assert row.seconds > 0
        if row.drafter == OFF:
            assert (drafting, row.speed_ups, row.tokens_per_pass) == (DraftStats(), (), 1.0)
            continue
        assert drafting.drafted_by_depth[0] <= drafting.drafts
        assert drafting.drafts <= drafting.draft_tokens <= (EAGER_NODES - 1) * drafting.drafts
        assert 0 < row.drafting_seconds_per_pass < row.seconds_per_pass
        assert len(row.speed_ups) == row.prompts
    for name in found.held_bytes:
        parts = [found.row(task, name) for task in found.tasks[:-1]]
        whole = found.row(ALL_TASKS, name)
        assert whole.drafting == sum((row.drafting for row in parts), DraftStats())
        assert whole.passes == sum(row.passes for row in parts)
        assert whole.flash_bytes == sum(row.flash_bytes for row in parts)
        assert whole.speed_ups == tuple(ratio for row in parts for ratio in row.speed_ups)
    assert found.row(ALL_TASKS, OFF).flash_bytes > 0


def test_a_generation_tells_the_same(relu_bundle: Path, eager: None) -> None:
    with load(relu_bundle, speculation="lookup", threads=1) as model:
        stats = model.generate(TASKS[0].prompts[0], max_tokens=40).stats
    drafting = stats.drafting
    assert drafting.drafts > 0
    per_pass = 1 + sum(drafting.accepted_by_depth) / stats.decode_passes
    assert stats.accepted_tokens_per_pass == pytest.approx(per_pass, rel=1e-12)
    rate = stats.decode_tokens_per_second * stats.decode_seconds
    assert rate == pytest.approx(per_pass * stats.decode_passes)
    assert stats.to_dict()["drafting"]["acceptance_by_depth"] == list(drafting.acceptance_by_depth)
    assert 0 < drafting.preparing_seconds + drafting.growing_seconds < stats.decode_seconds


def test_each_begins_as_it_would_by_itself(relu_bundle: Path) -> None:
    """One engine in turn under every plan: what it reads is what an engine of its own reads."""
    budget = budget_between(relu_bundle, 1, sparsity="exact")

    def resolved(name: str) -> Any:
        runtime = RuntimeConfig(sparsity="exact", speculation=name, dram_budget=budget, threads=1)  # type: ignore[arg-type]
        return open_model(relu_bundle, runtime)

    def run(engine: Engine) -> tuple[list[int], GenerationStats]:
        *events, last = engine.generate(None, list(range(20)), SAMPLING, lambda: False)
        assert isinstance(last, Event)
        assert last.stats is not None
        return [event.token for event in events if event.token is not None], last.stats

    plans, alone = {name: resolved(name) for name in (OFF, "streams")}, {}
    for name, plan in plans.items():
        # Before the other engine, not beside it: the budget is that of one.
        with closing(Engine(plan, lambda: False)) as engine:
            alone[name] = run(engine)
    with (
        closing(Engine(plans["streams"], lambda: False)) as engine,
        closing(DrafterSwitch(engine)) as switch,
    ):
        for name in (OFF, "streams", OFF):
            switch.draft_as(plans[name])
            assert engine.plan == plans[name].plan
            tokens, stats = run(engine)
            assert stats.speculation == name
            assert engine.feed_forward_bytes <= engine.plan.budget_bytes
            own_tokens, own = alone[name]
            assert tokens == own_tokens
            if name == OFF:
                # Less, if anything: which neurons fire has been learned. Never what a warm cache would read.
                assert 0.5 < stats.flash_bytes_read / own.flash_bytes_read < 1.25
        with pytest.raises(BudgetError):
            switch.draft_as(replace(plans[OFF], plan=engine.plan.with_budget(1 << 20)))
        assert engine.plan == plans[OFF].plan


def test_drafts_are_counted_as_they_are_judged() -> None:
    count = _DraftCount()

    def add(draft: Draft, path: list[int], *seconds: float, ended: bool = False) -> None:
        output: Any = None
        count.add(PassOutcome(draft, path, output, 1.0, ended), *seconds)

    add(plain(9), [0], 0.0, 0.25)
    assert count.stats("") == DraftStats(0, 0, (), (), 0.0, 0.25)
    add(TREE, [0, 1], 0.5, 0.25)
    assert count.stats("few") == DraftStats(1, 4, (1, 1), (1, 0), 0.5, 0.5, "few")
    # The end of the text, or of the tree: nothing further was judged.
    add(TREE, [0, 1], 0.0, 0.0, ended=True)
    add(TREE, [0, 1, 3, 4], 0.0, 0.0)
    add(TREE, [0, 2], 0.0, 0.0)
    add(TREE, [0], 0.0, 0.0)
    stats = count.stats("")
    assert (stats.drafts, stats.draft_tokens) == (5, 20)
    assert stats.drafted_by_depth == (5, 2, 1)
    assert stats.accepted_by_depth == (4, 1, 1)
    assert stats.acceptance_by_depth == (0.8, 0.5, 1.0)
    shallow = DraftStats(1, 2, (1,), (1,), 1.0, 2.0)
    assert (stats + shallow).drafted_by_depth == (6, 2, 1)
    runs = [GenerationStats(drafting=shallow)] * 3
    assert median_stats(runs).drafting == DraftStats(3, 6, (3,), (3,), 3.0, 6.0)


def test_the_table_and_the_json_tell_the_same_rates(found: Comparison) -> None:
    table = comparison_table(found)
    row = found.row(ALL_TASKS, "lookup")
    line = next(
        line for line in table[table.index("\nall ") :].splitlines() if line.startswith(" " * 13 + "lookup")
    )
    cells = line.split()
    assert cells[1] == f"{row.tokens_per_pass:.2f}"
    assert f"{median(row.speed_ups):.2f} ({min(row.speed_ups):.2f} to {max(row.speed_ups):.2f})" in line
    share, reached = row.drafting.acceptance_by_depth[0], row.drafting.drafted_by_depth[0]
    assert f"{100 * share:.0f} % of {reached}" in line
    assert f"all {found.texts} texts of drafters are those of plain decoding" in table
    numbers = found.to_dict()
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    assert numbers["rows"][0]["speed_up"] is None


def test_a_text_that_changes_is_an_error(
    ondevice: Run, chat_bundle: Path, found: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.require_same_texts()
    continued = drafters._continued

    def tampered(engine: Engine, prompt: Any, sampling: SamplingConfig) -> Any:
        text = continued(engine, prompt, sampling)
        wrong = engine._generator.labels.speculation == "lookup"
        return replace(text, tokens=(*text.tokens[:-1], 0)) if wrong else text

    monkeypatch.setattr(drafters, "_continued", tampered)
    result = ondevice("bench", "-m", chat_bundle, "--speculation", "all", "--prompts", 1, "--max-tokens", 3)
    assert result.code == 1
    tasks = len(BUILT_IN)
    assert f"{tasks} of " in result.err
    assert "by lookup on prompt 1 of dialogue" in result.err
    assert "NOT those of plain decoding" in result.out
    with pytest.raises(TextChangedError, match="by streams on prompt 2 of songs"):
        replace(found, changed=(Changed("songs", 1, "streams"),)).require_same_texts()


def test_the_command_prints_the_comparison(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    songs, talk = tmp_path / "songs.txt", tmp_path / "talk.txt"
    songs.write_text("La la la, la la la\n\n\nDo re mi,\ndo re\n \nSo fa")
    talk.write_text("Hello\n\nGoodbye")
    shown = ondevice(
        "bench", "-m", chat_bundle, "--speculation", "all", "--text", songs, "--text", talk, "--chat",
        "--prompts", 2, "--max-tokens", 5, "--temp", 0.8, "--seed", 3, "--json",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    figures = shown.json
    assert list(figures) == [
        "model", "dram_budget_bytes", "sparsity", "io", "sampling", "held_bytes", "rows", "changed", "notes",
        "machine",
    ]  # fmt: skip
    assert list(figures["rows"][1]) == [
        "task", "drafter", "prompts", "tokens", "passes", "tokens_per_pass", "tokens_per_second",
        "seconds_per_pass", "drafting_seconds_per_pass", "flash_bytes_per_token", "tokens_per_draft",
        "drafting", "speed_up", "speed_up_least", "speed_up_most",
    ]  # fmt: skip
    assert list(figures["rows"][1]["drafting"]) == [
        "drafts", "draft_tokens", "drafted_by_depth", "accepted_by_depth", "preparing_seconds",
        "growing_seconds", "decision", "acceptance_by_depth",
    ]  # fmt: skip
    assert [row["prompts"] for row in figures["rows"] if row["drafter"] == OFF] == [2, 2, 4]
    assert (figures["sampling"]["temperature"], figures["sampling"]["max_tokens"]) == (0.8, 5)
    assert figures["changed"] == []
    assert "100 %  done" in shown.err


@pytest.mark.slow
def test_the_shipped_model_is_compared_on_the_prompts_that_ship(ondevice: Run) -> None:
    shown = ondevice("bench", "--speculation", "all", "--prompts", 1, "--max-tokens", 6)
    assert shown.code == 0, shown.err
    assert "small-relu: a budget of" in shown.out
    for name in (*(task.name for task in BUILT_IN), "lookup", "resident", "token for token"):
        assert name in shown.out


def test_a_comparison_is_drawn_into_an_empty_folder(found: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plots.draw_comparison(tmp_path / "a", lambda: found) is found
    assert (tmp_path / "a" / plots.SPECULATION).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "a" / plots.SPECULATION_NUMBERS).read_text()) == found.to_dict()
    with pytest.raises(UsageError, match="isn't an empty folder"):
        plots.draw_comparison(tmp_path / "a", lambda: found)


@pytest.mark.slow
def test_equal_numbers_are_drawn_alike(found: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        plots.draw_comparison(tmp_path / folder, lambda: found)
    drawn = [(tmp_path / folder / plots.SPECULATION).read_bytes() for folder in ("a", "b")]
    assert drawn[0] == drawn[1]
    alone = replace(found, rows=tuple(row for row in found.rows if row.drafter == OFF))
    plots.draw_comparison(tmp_path / "off", lambda: alone)


def test_options_without_meaning_and_unusable_texts_are_refused(
    ondevice: Run, relu_bundle: Path, token_bundle: Path, tmp_path: Path
) -> None:
    bench, compared = ("bench", "-m", relu_bundle), ("bench", "-m", relu_bundle, "--speculation", "all")
    text = tmp_path / "text.txt"
    text.write_text("One.\n\nTwo.")
    for option in (("--text", text), ("--prompts", 3), ("--chat",), ("--output", tmp_path), ("--temp", 1.0)):
        result = ondevice(*bench, *option)
        assert (result.code, f"{option[0]} has no meaning without --speculation all" in result.err) == (
            2,
            True,
        )
    for option in (("--ablation",), ("--runs", 2), ("--prompt-tokens", 9)):
        result = ondevice(*compared, *option)
        assert (result.code, f"{option[0]} has no meaning with --speculation all" in result.err) == (2, True)
    assert ondevice(*compared, "--max-tokens", 1).code == 2
    assert ondevice(*compared, "--chat").code == 2
    assert ondevice(*compared, "--text", text, "--text", text).code == 2
    assert ondevice(*compared, "--text", tmp_path / "none").code == 2
    text.write_text("\n \n")
    assert ondevice(*compared, "--text", text).code == 2
    text.write_text("Short.\n\n" + 400 * "long ")
    long = ondevice(*compared, "--text", text)
    assert (long.code, "it is prompt 2 of text" in long.err) == (4, True)
    assert ondevice(*compared, "--dram-budget", "5MB").code == 5
    assert ondevice("bench", "-m", token_bundle, "--speculation", "all").code == 2
    with pytest.raises(BackendUnavailableError, match='backend="cpu"'):
        compare(relu_bundle, backend="reference")
    with pytest.raises(UsageError, match="no prompts"):
        compare_drafters(relu_bundle, RuntimeConfig(), (), SAMPLING)
    with pytest.raises(ContextOverflowError):
        compare_drafters(relu_bundle, RuntimeConfig(max_context=20), TASKS, SAMPLING)


def test_what_a_model_cannot_have_is_left_out(chat_bundle: Path, eager: None) -> None:
    found = compare(chat_bundle)
    assert {"streams", "model"} <= missing(found)
    assert not {"streams", "model"} & set(found.held_bytes)
    for reason in ("its bundle has no streams", "name its bundle with --draft-model"):
        assert any(reason in note for note in found.notes)
    with_second = compare(chat_bundle, draft_model=chat_bundle)
    assert with_second.changed == ()
    # The model itself is as good a drafter as can be.
    assert (
        with_second.row(ALL_TASKS, "model").tokens_per_pass > found.row(ALL_TASKS, "lookup").tokens_per_pass
    )
    assert with_second.held_bytes["model"] > with_second.held_bytes["lookup"]
    # A budget that has room for plain decoding alone.
    budget = inspect(chat_bundle, speculation=OFF).minimum_budget_bytes
    held = inspect(chat_bundle, speculation="recycling").draft_bytes
    assert held > 0
    tight = compare(chat_bundle, dram_budget=budget)
    assert OFF in tight.held_bytes
    assert tight.changed == ()


def test_damaged_streams_are_left_out_but_those_that_are_part_of_the_model(
    chat_bundle: Path, tmp_path: Path
) -> None:
    damaged, part = (copy_files(chat_bundle, tmp_path / name) for name in ("damaged", "part"))
    for folder, mode in ((damaged, "lossless"), (part, "shared")):
        add_streams(folder, mode=mode)  # type: ignore[arg-type]
        flip_byte(folder / STREAMS, 9000)
    found = compare(damaged)
    assert "streams" in missing(found)
    assert {OFF, "lookup", "auto"} <= set(found.held_bytes)
    assert any(note.startswith("without streams: ") and "CRC32C" in note for note in found.notes)
    assert found.changed == ()
    with pytest.raises(BundleError, match="part of the model itself"):
        compare(part)


def test_prompts_are_paragraphs_spread_over_a_text() -> None:
    parts = paragraphs("a\n\nb\n \n\tc\nd\n\n\n\ne\n")
    assert parts == ("a", "b", "c\nd", "e")
    assert Task("t", parts).at_most(2).prompts == ("a", "c\nd")
    assert Task("t", parts, chat=True).at_most(9) == Task("t", parts, chat=True)
    assert all(task.prompts and len(set(task.prompts)) == len(task.prompts) for task in BUILT_IN)
