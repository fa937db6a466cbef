"""`bench --parts`: the parts of a pass add up to its time, and products count what the model multiplies."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.api import inspect
from ondevice.bundle.reader import Bundle
from ondevice.commands.bench_reports import parts_table
from ondevice.config import RuntimeConfig
from ondevice.kernels import _native
from ondevice.measure.passes import SplitPass, split_passes
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.paths import SHIPPED

COUNTS = {"prompt_tokens": 80, "max_tokens": 6, "runs": 1}


def assert_whole(split: SplitPass) -> None:
    """Parts take up the time of a clock of its own, and none takes less than nothing."""
    assert all(part.seconds >= 0 for part in split.parts.values())
    assert sum(part.seconds for part in split.parts.values()) == pytest.approx(split.seconds, rel=0.05)


def test_parts_of_the_shipped_model_add_up() -> None:
    config = Bundle.open(SHIPPED).config
    result = split_passes(None, RuntimeConfig(), **COUNTS)
    assert [(it.name, it.tokens, it.position) for it in result.passes] == [
        ("prompt", 80, 0),
        ("token", 1, 82),
    ]
    heads, width = config.heads(config.layers[0].attention), config.hidden_size
    for split in result.passes:
        assert_whole(split)
        of_token = config.num_layers * width * split.tokens
        assert split.parts["qkv"].macs == of_token * heads.attending
        assert split.parts["output"].macs == of_token * heads.queries * heads.width
        assert split.parts["head"].macs == width * config.vocab_size
        assert 0 < split.parts["down"].macs <= of_token * config.num_neurons
        assert split.parts["other_products"].macs == 0
        for timed in ("attention", "packing", "python", "gate_up"):
            assert split.parts[timed].seconds > 0
    lines = parts_table(result).splitlines()
    assert [line for line in lines if line.startswith("token behind 82")]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated model without zeros, whose feed-forwards take most of its bytes."""
    folder = tmp_path_factory.mktemp("parts")
    shape = {"hidden_size": 512, "head_dim": 64, "num_hidden_layers": 4, "intermediate_size": 4096}
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "bundle")


def test_plain_layers_and_offloaded_ones_multiply_the_same(bundle: Path, ondevice: Run) -> None:
    plan = inspect(bundle)
    budget = (plan.minimum_budget_bytes + plan.full_bytes) // 2
    resident = split_passes(bundle, RuntimeConfig(), **COUNTS)
    offloaded = split_passes(bundle, RuntimeConfig(dram_budget=budget), **COUNTS)
    assert [it.name for it in resident.passes] == ["prompt", "token"]
    assert [it.name for it in offloaded.passes] == ["prompt", "token", "draft"]
    for split in (*resident.passes, *offloaded.passes):
        assert_whole(split)
    *passes, draft = offloaded.passes
    for one, other in zip(resident.passes, passes, strict=True):
        assert {name: part.macs for name, part in one.parts.items()} == {
            name: part.macs for name, part in other.parts.items()
        }
        assert other.parts["flash"].seconds > one.parts["flash"].seconds == 0
    # A draft multiplies high planes alone, or what is in memory.
    assert 0 < draft.parts["down"].nbytes < passes[1].parts["down"].nbytes
    assert draft.parts["flash"].seconds == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-m", "no-such-model"], 3, "no-such-model"),
        (["--dram-budget", "1MB"], 5, "budget"),
        (["--backend", "reference"], 1, "use --backend cpu"),
        (["--max-tokens", 1], 2, "ask for 2 or more"),
        (["--ablation"], 2, "two benchmarks"),
        (["--speculation", "all"], 2, "--parts has no meaning"),
    ],
)
def test_what_cannot_be_split_is_a_typed_error(
    ondevice: Run, options: list[object], code: int, message: str
) -> None:
    refused = ondevice("bench", "--parts", *options)
    assert (refused.code, refused.out) == (code, "")
    assert message in refused.err


def test_the_command_prints_parts_and_peaks(ondevice: Run) -> None:
    shown = ondevice("bench", "--parts", "--max-tokens", 4, "--runs", 1, "--json").json
    prompt, token = shown["passes"]
    assert (prompt["pass"], prompt["tokens"], token["pass"], token["tokens"]) == ("prompt", 256, "token", 1)
    assert token["parts"]["qkv"]["macs_per_second"] > 0
    assert all(rate > 0 for rate in shown["peaks"].values())


def test_a_runner_counts_only_while_it_is_asked_to() -> None:
    runner = _native.Runner(1)
    with pytest.raises(ValueError, match="doesn't count"):
        runner.step_times()
    runner.time_steps(True)
    with pytest.raises(ValueError, match="no step"):
        runner.name_products("queries")
    assert {name for name, seconds, *_ in runner.step_times() if seconds} == {"python"}
    runner.time_steps(False)
    with pytest.raises(ValueError, match="doesn't count"):
        runner.step_times()
