"""What `inspect` says: which modes are taken, what they need, and numbers that add up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ondevice import api
from ondevice.commands.reports import residency, stats_line
from ondevice.errors import UsageError
from ondevice.measure import plots
from ondevice.runtime.models import shipped_folder
from ondevice.stats import GenerationStats
from tests.support.command_line import Run

pytestmark = pytest.mark.usefixtures("steady_process")

SHIPPED = shipped_folder() / "small-relu"


def listed(text: str, before: str) -> dict[str, int]:
    """The indented lines behind the one that starts with `before`, by name."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(before))
    found = {}
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        found[re.split(r"  +", line.strip())[0]] = int(line.split()[-1])
    return found


@pytest.mark.parametrize(
    ("options", "ample_modes", "least_modes", "taken"),
    [
        ((), ("exact", "auto"), ("dense", "off"), "off"),
        # There `auto` leaves streams. What else it drafts with takes less than the margin of that budget.
        (("--sparsity", "exact"), ("exact", "auto"), ("exact", "off"), "auto"),
        (("--speculation", "lookup"), ("exact", "lookup"), ("dense", "lookup"), "lookup"),
    ],
)
def test_the_smallest_budget_is_that_of_the_modes_that_need_least(
    ondevice: Run,
    options: tuple[str, ...],
    ample_modes: tuple[str, str],
    least_modes: tuple[str, str],
    taken: str,
) -> None:
    ample = ondevice("inspect", "-m", SHIPPED, *options, "--json").json
    assert (ample["plan"]["sparsity"], ample["speculation"]) == ample_modes
    assert (ample["minimum_budget_sparsity"], ample["minimum_budget_speculation"]) == least_modes
    assert ample["minimum_budget_bytes"] < ample["plan"]["minimum_budget_bytes"]
    # It is what works, and what takes those modes.
    budget = ("--dram-budget", ample["minimum_budget_bytes"])
    small = ondevice("inspect", "-m", SHIPPED, *options, *budget, "--json").json
    assert small["plan"]["fits"] is True
    assert (small["plan"]["sparsity"], small["speculation"]) == (least_modes[0], taken)
    assert (small["minimum_budget_bytes"] == small["plan"]["minimum_budget_bytes"]) == (
        taken == least_modes[1]
    )


def test_the_text_names_the_modes_of_both_budgets(ondevice: Run) -> None:
    text = ondevice("inspect", "-m", SHIPPED).out
    assert re.search(r"^memory for .* with --sparsity exact --speculation auto:$", text, re.MULTILINE)
    assert re.search(r"^smallest budget for these: ", text, re.MULTILINE)
    assert re.search(
        r"^smallest budget that works: .* with --sparsity dense --speculation off:$", text, re.MULTILINE
    )
    small = ondevice("inspect", "-m", SHIPPED, "--dram-budget", "1MB").out
    assert "smallest budget for these" not in small


def test_it_names_the_budget_below_which_auto_takes_other_modes(ondevice: Run) -> None:
    named = re.search(
        r"^below a budget of .*\((\d+) bytes\), auto takes --sparsity (\w+) --speculation (\w+)$",
        ondevice("inspect", "-m", SHIPPED).out,
        re.MULTILINE,
    )
    assert named is not None
    change = ondevice("inspect", "-m", SHIPPED, "--json").json["mode_change"]
    assert (change["sparsity"], change["speculation"]) == (named[2], named[3])
    assert (named[2], named[3]) != ("exact", "auto")
    chosen = ("--sparsity", "dense", "--speculation", "off")
    assert ondevice("inspect", "-m", SHIPPED, *chosen, "--json").json["mode_change"] is None


def test_a_budget_that_does_not_fit_is_told_whole_and_exits_as_elsewhere(ondevice: Run) -> None:
    for options in ((), ("--json",)):
        shown = ondevice("inspect", "-m", SHIPPED, "--dram-budget", "1MB", *options)
        assert (shown.code, "smallest that works" in shown.err) == (5, True)
        assert shown.out
    assert shown.json["plan"]["fits"] is False


def test_a_refusal_names_the_smallest_budget_of_all(ondevice: Run) -> None:
    refused = ondevice("generate", "-m", SHIPPED, "-p", "a", "--dram-budget", "1MB")
    assert refused.code == 5
    assert "drafting" not in refused.err
    named = re.search(r"smallest that works is (\d+) bytes", refused.err)
    assert named is not None
    enough = ondevice("inspect", "-m", SHIPPED, "--dram-budget", named[1], "--json").json
    assert (enough["plan"]["fits"], enough["plan"]["sparsity"]) == (True, "dense")


def test_every_part_of_what_is_needed_is_listed(ondevice: Run) -> None:
    text = ondevice("inspect", "-m", SHIPPED).out
    parts = listed(text, "memory for")
    assert sum(parts.values()) == 2 * parts["total"]
    smallest = re.search(r"smallest budget that works: .*\((\d+) bytes\)", text)
    assert smallest is not None
    needs = listed(text, "smallest budget that works")
    assert sum(needs.values()) == int(smallest[1])
    assert any(name.startswith("a margin") for name in needs)


def test_the_plan_and_the_closing_line_agree_on_what_is_read(ondevice: Run) -> None:
    plan = api.inspect(SHIPPED, sparsity="exact")
    stats = GenerationStats(generated_tokens=10, flash_bytes_read=50_000, prefetch_wasted_bytes=2_000)
    for budget, says, read, wasted in (
        (
            plan.full_bytes,
            "everything will be resident, read from flash once",
            "50.0 kB to fill",
            "2.00 kB in",
        ),
        # Its embedding is its head, which is always in memory.
        (plan.full_bytes - 1, "those that are selected are read", "5.00 kB/token", "200 B/token in"),
        (plan.minimum_budget_bytes, "those that are selected are read", "5.00 kB/token", "200 B/token in"),
    ):
        under = plan.with_budget(budget)
        assert says in residency(under)
        assert f"; flash {read}" in stats_line(stats, under)
        assert f" {wasted} vain" in stats_line(stats, under)
    told = ondevice("generate", "-m", SHIPPED, "-p", "One", "--max-tokens", 3)
    assert "everything will be resident, read from flash once" in told.err
    assert re.search(r"flash \S+ MB to fill memory, ", told.err)
    assert "everything will be resident, read from flash once" in ondevice("inspect", "-m", SHIPPED).out


def test_a_plan_without_an_embedding_table_reads_a_row_for_every_token(ondevice: Run) -> None:
    text = ondevice("inspect", "-m", SHIPPED, "--backend", "reference").out
    assert "a row of the embedding is read" in text


def test_the_targets_that_a_model_has_are_listed(ondevice: Run) -> None:
    shown = ondevice("inspect", "-m", SHIPPED, "--json").json
    assert shown["predictor_recalls"] == [0.9, 0.95, 0.97, 0.98, 0.99, 0.995]
    listed = "0.9, 0.95, 0.97, 0.98, 0.99, 0.995"
    assert f"--predictor-recall {listed}" in ondevice("inspect", "-m", SHIPPED).out
    refused = ondevice("inspect", "-m", SHIPPED, "--sparsity", "predicted", "--predictor-recall", 0.8)
    assert refused.code == 3
    assert f"0.8 isn't one of those that this model has: {listed}" in refused.err


@pytest.mark.parametrize("recall", [1.5, 1.0, 0.0, -1])
def test_what_is_no_recall_is_refused_with_one_range(ondevice: Run, recall: float) -> None:
    refused = ondevice("inspect", "-m", SHIPPED, "--sparsity", "predicted", "--predictor-recall", recall)
    assert refused.code == 2
    assert "above 0 and below 1, one of those that `ondevice inspect` lists" in refused.err


def test_an_option_of_another_drafter_is_refused(ondevice: Run) -> None:
    refused = ondevice("inspect", "-m", SHIPPED, "--speculation", "lookup", "--draft-model", SHIPPED)
    assert refused.code == 2
    assert "--draft-model has no meaning without --speculation model" in refused.err
    with pytest.raises(UsageError, match='draft_model has no meaning without speculation="model"'):
        api.inspect(SHIPPED, speculation="off", draft_model=SHIPPED)
    # A model that drafts is what `auto` then means.
    assert "has no meaning" not in ondevice("inspect", "-m", SHIPPED, "--draft-model", SHIPPED).err


def test_a_target_without_its_mode_is_refused(ondevice: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in ((), ("--sparsity", "exact"), ("--sparsity", "dense")):
        refused = ondevice("generate", "-m", SHIPPED, "-p", "a", *chosen, "--predictor-recall", 0.9)
        assert refused.code == 2
        assert "--predictor-recall has no meaning without --sparsity predicted" in refused.err
    with pytest.raises(UsageError, match="predictor_recall has no meaning"):
        api.inspect(SHIPPED, predictor_recall=0.6)
    # What is set for all commands is meant for those that can use it.
    monkeypatch.setenv("ONDEVICE_PREDICTOR_RECALL", "0.9")
    assert ondevice("inspect", "-m", SHIPPED).code == 0


LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_speeds_go_from_the_smallest_budget_to_everything_resident(ondevice: Run) -> None:
    options = ("-m", SHIPPED, "--sparsity", "dense", "--max-context", 512)
    shown = ondevice("inspect", *options, "--json").json
    speeds = shown["speed"]["by_budget"]
    assert speeds[0]["budget_bytes"] == shown["minimum_budget_bytes"]
    assert speeds[-1]["budget_bytes"] == shown["plan"]["full_bytes"]
    rates, read = ([speed[key] for speed in speeds] for key in ("tokens_per_second", "flash_bytes_per_token"))
    assert len(speeds) == 8
    # Between them, a budget first has room for wider chunks of a prompt, and then for weights.
    assert rates[-1] == max(rates)
    assert min(rates) > 0
    assert read[0] > 1e6 > read[-1] == 0
    text = ondevice("inspect", *options).out
    assert len(re.findall(r"^ .* \d+ %  .* dense$", text, re.MULTILINE)) == 8
    assert "flash gives" in text
    assert "DRAM gives" in text


def test_a_model_is_planned_from_its_config_alone(ondevice: Run, tmp_path: Path) -> None:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shown = ondevice("inspect", folder, "--json").json
    assert shown["converted"] is False
    assert (shown["parameters"], shown["quantisation"]) == (70_553_706_496, "q4")
    assert 39e9 < shown["bundle_bytes"] < 41e9
    # The process is that of all tests.
    assert shown["minimum_budget_bytes"] - shown["plan"]["process_bytes"] < 0.45e9
    speeds = shown["speed"]["by_budget"]
    assert speeds[0]["budget_bytes"] == shown["minimum_budget_bytes"]
    assert speeds[0]["flash_bytes_per_token"] > 38e9
    assert speeds[-1]["flash_bytes_per_token"] == 0
    assert speeds[-1]["tokens_per_second"] >= speeds[0]["tokens_per_second"]
    small = ondevice("inspect", folder, "--dram-budget", "50MB")
    assert small.code == 5
    assert "tokens per second to expect" in small.out
    # There is nothing to convert.
    assert "model.safetensors" in ondevice("chat", folder, "--yes", stdin="").err


def test_a_chat_that_does_not_fit_says_what_to_expect(ondevice: Run) -> None:
    refused = ondevice("chat", "-m", SHIPPED, "--dram-budget", "1MB", stdin="Hi\n")
    assert refused.code == 5
    least = ondevice("inspect", "-m", SHIPPED, "--json").json["minimum_budget_bytes"]
    named = re.search(r"smallest that works is (\d+) bytes", refused.err)
    assert named is not None
    assert abs(int(named[1]) - least) < 8e6
    assert re.search(r"what to expect: about [\d.]+ tokens/s in .* which hold everything", refused.err)


def test_speeds_are_drawn_where_matplotlib_is(
    ondevice: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = tmp_path / "speed.svg"
    assert ondevice("inspect", "-m", SHIPPED, "--curve", curve).code == 0
    assert "tokens per second" in curve.read_text()
    assert ondevice("inspect", "-m", SHIPPED, "--curve", tmp_path / "none" / "speed.svg").code == 1
    monkeypatch.setattr(plots.util, "find_spec", lambda name: None)
    refused = ondevice("inspect", "-m", SHIPPED, "--curve", curve)
    assert "ondevice[plots]" in refused.err
