"""The command line: from a checkpoint to a chat, and the shapes of its JSON."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest

from ondevice.api import Model
from ondevice.bundle.reader import Bundle
from ondevice.commands import terminal
from ondevice.commands.reports import harmless
from ondevice.scoring import Score
from tests.support.bundles import write_chat_checkpoint
from tests.support.command_line import Run

STATS = [
    "prompt_tokens", "generated_tokens", "prefill_tokens_per_second", "decode_tokens_per_second",
    "time_to_first_token_seconds", "peak_memory_bytes", "flash_bytes_read", "flash_read_seconds",
    "flash_cpu_seconds", "neuron_cache_hit_rate", "prefetch_recall", "prefetch_wasted_bytes",
    "forward_passes", "accepted_tokens_per_pass",
    "backend", "sparsity", "speculation", "io", "seed", "context_full",
    "decode_passes", "decode_seconds", "synchronisations",
    "synchronised_seconds", "experts", "restored_tokens",
    "reused_tokens",
    "drafting",
]  # fmt: skip
PLAN = [
    "budget_bytes", "total_bytes", "resident_weights_bytes", "kv_cache_bytes", "neuron_cache_bytes",
    "predictor_bytes", "draft_bytes", "constraint_bytes", "staging_bytes", "process_bytes",
    "other_models_bytes", "sparsity", "fits", "wanted_context", "limit_bytes",
]  # fmt: skip


def test_a_converted_checkpoint_generates_chats_and_is_measured(
    ondevice: Run, shared_data: Path, tmp_path: Path
) -> None:
    source, bundle = shared_data / "models" / "stories260K", tmp_path / "home" / "stories"
    converted = ondevice("convert", source, "--output", bundle, "--quant", "q8")
    assert (converted.code, converted.out) == (0, f"{bundle}\n")

    told = ondevice("generate", "--model", "stories", "--prompt", "Once upon a time", "--max-tokens", 40)
    assert told.code == 0
    assert told.out.startswith(", there was a little girl named Lily.")
    assert "plan: budget" in told.err
    assert "40 tokens," in told.err

    options = ("--model", "stories", "--max-tokens", 5, "--temp", 0)
    chatted = ondevice("chat", *options, stdin="Hello\n\nWho are you?\n")
    assert chatted.code == 0
    assert chatted.out.count("\n") == 2

    plan = ondevice("inspect", "--model", "stories", "--json").json
    assert plan["plan"]["fits"] is True
    assert plan["minimum_budget_bytes"] <= plan["plan"]["budget_bytes"]

    report = ondevice("bench", "--model", "stories", "--runs", 1, "--max-tokens", 4, "--json").json
    assert report["generated_tokens"] == 4

    story = tmp_path / "story.txt"
    story.write_text(" Once upon a time" + told.out)
    score = ondevice("eval", "--model", "stories", "--text", story, "--json").json
    assert 1.0 < score["perplexity"] < 4.0

    assert ondevice("verify", "--model", "stories").out.startswith("ok: ")


def test_convert_says_how_far_it_is_and_resumes(ondevice: Run, tmp_path: Path) -> None:
    source, output = write_chat_checkpoint(tmp_path / "hf"), tmp_path / "out"
    first = ondevice("convert", source, "-o", output, "--no-calibrate")
    assert first.code == 0
    assert "100 %" in first.err
    assert ondevice("convert", source, "-o", output).code == 2
    assert ondevice("convert", source, "-o", output, "--resume").code == 0
    assert ondevice("convert", source, "-o", output, "--force", "--quant", "f16").code == 0
    assert Bundle.open(output).quant.bits == 16
    refused = ondevice("convert", source, "-o", tmp_path / "b", "--text", "corpus.txt")
    assert refused.code == 2
    assert "no file corpus.txt" in refused.err
    assert not (tmp_path / "b").exists()
    (tmp_path / "text").write_text("words " * 200)
    dense = ondevice("convert", source, "-o", tmp_path / "b", "--text", tmp_path / "text")
    assert dense.code == 0
    assert "silu gates are hardly ever exactly zero" in dense.err


def test_convert_with_text_trains_predictors(ondevice: Run, tmp_path: Path) -> None:
    source = write_chat_checkpoint(tmp_path / "hf", hidden_act="relu", num_hidden_layers=1)
    letters = np.random.default_rng(2).integers(97, 122, 700).astype(np.uint8).tobytes()
    (tmp_path / "text").write_bytes(letters.replace(b"e", b" "))
    arguments = ("convert", source, "-o", tmp_path / "out", "--text", tmp_path / "text")
    without = ondevice(*arguments, "--no-calibrate")
    assert without.code == 0
    assert Bundle.open(tmp_path / "out").predictors is None
    assert Bundle.open(tmp_path / "out").manifest.provenance.ordered_tokens is None
    trained = ondevice(*arguments, "--force")
    assert trained.code == 0, trained.err
    assert "agrees with dense" in trained.err
    assert Bundle.open(tmp_path / "out").predictors is not None
    assert (Bundle.open(tmp_path / "out").manifest.provenance.ordered_tokens or 0) > 500
    both = ondevice(*arguments, "--force", "--random-text")
    assert both.code == 2
    assert "give one of them" in both.err
    assert ondevice(*arguments[:4], "--force", "--random-text").code == 0
    assert "random tokens" in Bundle.open(tmp_path / "out").manifest.provenance.notes[0]
    again = ondevice(*arguments[:4], "--force")
    assert again.code == 0, again.err
    assert Bundle.open(tmp_path / "out").predictors is None


@pytest.mark.parametrize(("flags", "tokens"), [((), 2 + 5), (("--no-special",), 1 + len("<|user|>Hello"))])
def test_generate_reads_special_tokens_unless_told_otherwise(
    ondevice: Run, chat_bundle: Path, flags: tuple[str, ...], tokens: int
) -> None:
    given = ("-m", chat_bundle, "-p", "<|user|>Hello", "--max-tokens", 1, "--json")
    result = ondevice("generate", *given, *flags)
    assert result.json["stats"]["prompt_tokens"] == tokens


def test_generate_prints_the_text_and_stats_as_json(ondevice: Run, chat_bundle: Path) -> None:
    result = ondevice("generate", "-m", chat_bundle, "-p", "Hello", "--max-tokens", 7, "--json")
    assert list(result.json) == ["text", "tokens", "finish_reason", "stats"]
    assert list(result.json["stats"]) == STATS
    assert len(result.json["tokens"]) == 7
    plain = ondevice("generate", "-m", chat_bundle, "-p", "Hello", "--max-tokens", 7)
    assert plain.out == result.json["text"] + "\n"


def test_inspect_prints_the_plan_as_json_and_text(ondevice: Run, chat_bundle: Path) -> None:
    shown = ondevice("inspect", "-m", chat_bundle, "--dram-budget", "4GB", "--json").json
    assert list(shown) == [
        "model", "part", "architecture", "parameters", "bundle_bytes", "quantisation", "neurons",
        "sparsity_modes", "predictor_recalls", "experts", "expert_costs", "streams", "ngrams", "draft_layers",
        "damaged", "speculation", "minimum_budget_bytes", "minimum_budget_sparsity",
        "minimum_budget_speculation", "minimum_budget_context", "fitting_context", "mode_change", "plan",
        "speed",
    ]  # fmt: skip
    assert [key for key in PLAN if key not in shown["plan"]] == []
    assert shown["plan"]["budget_bytes"] == 4 * 10**9
    assert shown["sparsity_modes"] == ["dense"]
    assert (shown["experts"], shown["expert_costs"], shown["streams"]) == (None, None, None)
    assert shown["neurons"] == [700] * 3
    assert shown["bundle_bytes"] == sum(path.stat().st_size for path in chat_bundle.iterdir())
    text = ondevice("inspect", "-m", chat_bundle)
    assert text.code == 0
    for part in ("tiny-chat", "exact     no: silu", str(shown["bundle_bytes"]), "fits: yes"):
        assert part in text.out


@pytest.mark.usefixtures("steady_process")
def test_inspect_shows_a_plan_that_does_not_fit(ondevice: Run, chat_bundle: Path) -> None:
    shown = ondevice("inspect", "-m", chat_bundle, "--dram-budget", "1MB", "--json").json
    assert shown["plan"]["fits"] is False
    enough = ondevice(
        "inspect", "-m", chat_bundle, "--dram-budget", shown["minimum_budget_bytes"], "--json"
    ).json
    assert enough["plan"]["fits"] is True


def test_bench_prints_the_rates_as_json(ondevice: Run, chat_bundle: Path) -> None:
    result = ondevice(
        "bench", "-m", chat_bundle, "--runs", 2, "--prompt-tokens", 20, "--max-tokens", 5, "--json"
    )
    shown = result.json
    assert list(shown) == [*STATS, "runs", "flash_bytes_per_token", "machine"]
    assert (shown["runs"], shown["prompt_tokens"], shown["generated_tokens"]) == (2, 20, 5)
    assert {"system", "cores", "memory_bytes", "kernel_target"} <= set(shown["machine"])
    assert result.err.count("run ") == 2


def test_bench_shows_what_reading_costs_the_processors(ondevice: Run, chat_bundle: Path) -> None:
    shown = ondevice("bench", "-m", chat_bundle, "--runs", 1, "--prompt-tokens", 5, "--max-tokens", 3)
    assert re.search(
        r"; flash \S+ k?B to fill memory, read in \d+\.\d\d s with \d+\.\d\d s of CPU; ", shown.out
    )


def test_eval_prints_the_perplexity_as_json(ondevice: Run, chat_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A short text, scored.")
    shown = ondevice("eval", "-m", chat_bundle, "--text", tmp_path / "text", "--json").json
    assert list(shown) == ["perplexity", "nll_per_token", "tokens"]
    assert shown["tokens"] == len("A short text, scored.")
    piped = ondevice("eval", "-m", chat_bundle, "--text", "-", "--json", stdin="A short text, scored.").json
    assert piped == shown
    assert "perplexity" in ondevice("eval", "-m", chat_bundle, "--text", tmp_path / "text").out


def test_eval_json_has_no_infinity(ondevice: Run, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "score", lambda *_, **__: Score(math.inf, 800.0, 3))
    result = ondevice("eval", "-m", chat_bundle, "--text", "-", "--json", stdin="text")
    assert result.json == {"perplexity": None, "nll_per_token": 800.0, "tokens": 3}


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_for_a_terminal_loses_what_could_steer_it_and_no_other_text_does() -> None:
    assert (
        harmless("a\tb\nc\x1b]52;c;aGk=\x07 \x9b2J\r\u00e9")
        == "a\tb\nc\ufffd]52;c;aGk=\ufffd \ufffd2J\ufffd\u00e9"
    )
    colours = "\x1b[31mred"
    for stream, expected in ((io.StringIO(), colours), (TerminalText(), "\ufffd[31mred")):
        with contextlib.redirect_stdout(stream):
            terminal._writer()(colours)
        assert stream.getvalue() == expected
