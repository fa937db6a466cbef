"""The yardstick of real models: what is measured, how runs are stored, and what the page says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.lib import measure
from tests.benchmarks.lib.measure import limit_hits, signal_name
from tests.benchmarks.lib.oracle import Agreement, Float32
from tests.benchmarks.real import texts
from tests.benchmarks.real.cases import ENGINES, FIRST_TOKENS, QUICK, WHOLE, Case, quality_windows
from tests.benchmarks.real.engines import draft_figures, kept
from tests.benchmarks.real.page import PAGE, STORED, number, page, with_stored_parts
from tests.benchmarks.real.real_models import Bench
from tests.benchmarks.real.results import Results, Row, RunId, document, put_aside, read
from tests.support.paths import SHARED_DATA

HEADER: Row = {
    "benchmark": "real_models",
    "size": "quick",
    "date": "2026-11-28 20:15:00",
    "machine": {"cpu": "A CPU", "cores": 2, "memory_bytes": 16 << 30, "system": "Linux"},
    "threads": 2,
    "skipped": "",
    "versions": {
        "ondevice": "0.1.0",
        "commit": "abc",
        "llama-cpp-python": "0.3.36",
        "transformers": "5.24.0",
        "llama.cpp flags": "CPU : AVX2 = 1 | F16C = 1",
    },
}
OFF = RunId("smollm2", "drafts-resident", "off", 0)


def row(of: RunId, **figures: Any) -> Row:
    return {**of._asdict(), "survived": True, **figures}


def test_stored_runs_are_not_repeated(tmp_path: Path) -> None:
    calls: list[str] = []

    def run(name: str) -> Callable[[], Row]:
        def measured() -> Row:
            calls.append(name)
            return {"survived": True, "tokens_per_second": 5.0}

        return measured

    path = tmp_path / "real/runs.jsonl"
    first = Bench(QUICK, Results(path, HEADER), tmp_path, 2)
    first.once(OFF, run("off"))
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"model": "smollm2", "case": "drafts-res')
    later = HEADER | {"date": "2026-11-29 08:00:00"}
    resumed = Bench(QUICK, Results(path, later), tmp_path, 2)
    resumed.once(OFF, run("off again"))
    resumed.once(OFF._replace(arm="auto"), run("auto"))
    assert calls == ["off", "auto"]
    header, rows = read(path)
    assert header["date"] == HEADER["date"]
    assert [stored["arm"] for stored in rows] == ["off", "auto"]
    assert all(0 <= stored["others"] <= 1 for stored in rows)


def test_runs_of_another_commit_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    Results(path, HEADER)
    versions = HEADER["versions"] | {"commit": "def"}
    with pytest.raises(SystemExit, match="another versions"):
        Results(path, HEADER | {"versions": versions})
    put_aside(path)
    Results(path, HEADER | {"versions": versions})
    assert sorted(it.name for it in tmp_path.iterdir()) == ["runs-20261128201500.jsonl", "runs.jsonl"]


def test_what_failed_once_is_not_tried_in_the_next_pair(tmp_path: Path) -> None:
    bench = Bench(QUICK, Results(tmp_path / "runs.jsonl", HEADER), tmp_path, 2)
    killed = RunId("smollm2", "budget-35", "llama.cpp", 0)
    bench.once(killed, lambda: {"survived": False, "reason": "killed"})
    bench.once(killed._replace(pair=1), lambda: pytest.fail("tried again"))
    bench.once(killed._replace(arm="ondevice", pair=1), lambda: {"survived": True})
    assert list(bench.results.rows) == [killed, killed._replace(arm="ondevice", pair=1)]


def test_a_document_has_medians_reasons_and_changed_texts() -> None:
    start = RunId("smollm2", "start", "ondevice", 0)
    rows = [row(start._replace(pair=pair), load_seconds=value) for pair, value in enumerate((3.0, 1.0, 1.5))]
    rows.append({**start._replace(arm="llama.cpp")._asdict(), "survived": False, "reason": "no /tmp/x.gguf"})
    rows.append(row(OFF, texts={"code": "a", "sql": "b"}))
    rows.append(row(OFF._replace(arm="auto"), texts={"code": "a", "sql": "c"}))
    rows.append(row(OFF._replace(arm="lookup"), texts={"code": "a", "sql": "b"}))
    rows.append(row(OFF._replace(case="drafts-57"), texts={"code": "a", "sql": "b"}))
    made = document(HEADER, rows)
    cases = {(case["case"], case["arm"]): case for case in made["cases"]}
    assert cases["start", "ondevice"]["figures"] == {"load_seconds": [1.5, 1, 3]}
    assert cases["start", "llama.cpp"] == {
        "model": "smollm2",
        "case": "start",
        "arm": "llama.cpp",
        "runs": 0,
        "failed": "no PATH",
        "figures": {},
    }
    assert made["changed_texts"] == ["smollm2, drafts-resident, auto"]
    assert made["crashes"] == ["smollm2, start, llama.cpp: no PATH"]


def example() -> Row:
    """A document with each kind of figure and failure."""
    quick = RunId("smollm2", "convert", "ondevice", 0)
    rows = [row(quick, convert_seconds=4.0, gguf_bytes=98_362_432, bundle_bytes=100_573_142, others=0.01)]
    rows.append(row(quick._replace(case="facts"), least_budget_bytes=182_000_000))
    for arm, rates in (("ondevice", (60.0, 62.0)), ("llama.cpp", (40.0, 40.0))):
        for pair, rate in enumerate(rates):
            start = RunId("smollm2", "start", arm, pair)
            rows.append(row(start, decode_tokens_per_second=rate, load_seconds=120 / rate))
    refused = RunId("smollm2", "budget-35", "ondevice", 0)
    rows.append({**refused._asdict(), "survived": False, "reason": "refused: needs 221 MB"})
    rows.append({**refused._replace(arm="llama.cpp")._asdict(), "survived": False, "reason": "killed"})
    rows.append(row(OFF, tokens_per_pass=1.0, tokens_per_second=50.0, texts={"code": "a"}))
    auto = {"tokens_per_pass": 1.5, "tokens_per_second": 60.0, "code.tokens_per_pass": 2.0}
    auto |= {"code.tokens_per_second": 80.0}
    rows.append(row(OFF._replace(arm="auto"), **auto, texts={"code": "a"}))
    agreement = {"perplexity": 20.2, "float32_perplexity": 20.0, "kl_nats": 0.0639, "top1": 0.869}
    rows.append(row(RunId("smollm2", "quality", "ondevice", 0), **agreement, positions=16_384))
    return document(HEADER, rows)


def test_the_page_says_what_the_document_holds() -> None:
    text = page(example())
    for line in (
        "A CPU, 2 cores, AVX2, 17 GB of memory, Linux; 2 threads; 2026-11-28.",
        "| 98.4 | 101 | 4.00 | 182 |",
        "| steady behind them, tokens/s | 61.0 (60.0 to 62.0) | 40.0 (40.0 to 40.0) | 1.52 |",
        "| loading, s | 1.97 (1.94 to 2.00) | 3.00 (3.00 to 3.00) | 1.52 |",
        "| 35 %, 34.4 MB | refused: needs 221 MB | not measured | killed |  |  |  |",
        "| resident | auto | 1.50, 60.0 | 2.00, 80.0 |  |  |  |  | 1.20 |",
        "| ondevice | 20.000 | 20.200 (+1.0 %) | 0.0639 | 86.9 % | 16,384 |",
    ):
        assert line in text
    assert "went wrong" not in text
    assert "can be trusted" not in text


def test_the_page_says_that_the_machine_was_busy_and_what_went_wrong() -> None:
    made = example() | {"others": {"median": 0.5, "max": 0.9}, "crashes": ["smollm2, start, ondevice: no"]}
    text = page(made | {"changed_texts": ["smollm2, drafts-57, auto"]})
    assert "no speed on this page can be trusted" in text
    assert "- smollm2, start, ondevice: no\n- smollm2, drafts-57, auto: CHANGED TEXT\n" in text


def test_parts_that_were_not_run_stay_and_say_their_commit() -> None:
    stored = example()
    rows = [row(RunId("smollm2", "start", "ondevice", 0), load_seconds=0.5)]
    newer = {**HEADER, "versions": {**HEADER["versions"], "commit": "def"}, "date": "2026-12-01 08:00:00"}
    newer["machine"] = {**HEADER["machine"], "cpu": "Another"}
    made = with_stored_parts(document(newer, rows), stored)
    text = page(made)
    assert "| loading, s | 0.50 | not measured |  |" in text
    assert "| resident | auto | 1.50, 60.0 | 2.00, 80.0 |  |  |  |  | 1.20 |" in text
    kept = ", ".join(f"{part} of `smollm2`" for part in ("files", "budgets", "drafts", "quality"))
    earlier = f"Of commit abc (2026-11-28, {HEADER['machine']['cpu']}): {kept}."
    assert f"at commit def, llama-cpp-python 0.3.36, transformers 5.24.0. {earlier}" in text
    # Every run converts the model, whatever part of it is measured.
    converted = row(RunId("smollm2", "convert", "ondevice", 0), convert_seconds=1.0)
    text = page(with_stored_parts(document(newer, [converted]), stored))
    assert f"2026-11-28, {HEADER['machine']['cpu']}): speed of" in text
    again = with_stored_parts(document(newer, rows), made)
    assert {case["commit"] for case in again["cases"] if case["case"] == "quality"} == {"abc"}


def test_the_page_in_docs_is_made_of_the_stored_runs() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(stored), "run `make bench-real-page`"


def test_a_context_leaves_out_cases_and_rounds_up() -> None:
    names = [case.name for case in WHOLE.cases(32_768)]
    assert {"start", "prompt-256", "prompt-2048", "depth-128", "depth-4096", "budget-80"} <= set(names)
    assert "depth-4096" not in [case.name for case in WHOLE.cases(4_096)]
    assert len(QUICK.cases(32_768)) < len(names)
    assert {case.context % 256 for case in WHOLE.cases(32_768)} == {0}


def test_first_tokens_have_a_rate_of_their_own() -> None:
    case = Case("start", 256, 72, 1, warm_up=0, left_out=FIRST_TOKENS)
    times = [5.0 + 0.5 * index for index in range(72)]
    assert kept({"survived": True, "token_seconds": times, "text": [1]}, case) == {
        "survived": True,
        "first_tokens_per_second": 2.0,
    }


def test_draft_figures_are_by_kind_and_in_all() -> None:
    each = [{"tokens": 8, "seconds": 2.0, "passes": 4}, {"tokens": 0, "seconds": 0.0, "passes": 0}]
    whole = {"decoded_tokens": 8, "decode_seconds": 2.0, "decode_passes": 4, "peak_memory_bytes": 9}
    figures = draft_figures({"survived": True, "each": each, "texts": [[1], []], **whole}, ["code", "sql"])
    assert figures["code.tokens_per_pass"] == figures["tokens_per_pass"] == 2.0
    assert figures["code.tokens_per_second"] == 4.0
    assert "sql.tokens_per_pass" not in figures
    assert figures["texts"]["code"] != figures["texts"]["sql"]


def test_windows_begin_as_texts_do() -> None:
    windows = quality_windows([2], list(range(10, 10 + 2_000)), 1_024)
    assert [len(window) for window in windows] == [512, 512]
    assert [window[:2] for window in windows] == [[2, 10], [2, 521]]


def test_agreement_is_what_its_definition_says() -> None:
    rng = np.random.default_rng(0)
    oracle, engine = (rng.normal(0, 3, (6, 11)).astype(np.float32) for _ in ENGINES)
    tokens = [3, 1, 4, 1, 5]
    agreement = Agreement()
    agreement.add(oracle[:4], engine[:4], tokens[:4])
    agreement.add(oracle[4:], engine[4:], tokens[4:])

    def chances(logits: Float32) -> np.ndarray[Any, np.dtype[np.float64]]:
        raised = np.exp(logits.astype(np.float64))
        return np.asarray(raised / raised.sum(axis=1, keepdims=True))

    p, q = chances(oracle), chances(engine)
    figures = agreement.figures()
    assert figures["kl_nats"] == pytest.approx((p * np.log(p / q)).sum() / 6, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(np.exp(-np.log(q[range(5), tokens]).mean()), rel=1e-5)
    expected = np.exp(-np.log(p[range(5), tokens]).mean())
    assert figures["float32_perplexity"] == pytest.approx(expected, rel=1e-5)
    assert figures["top1"] == (p.argmax(axis=1) == q.argmax(axis=1)).mean()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the shared data")
def test_prompts_are_those_of_five_kinds() -> None:
    chosen = texts.prompts(SHARED_DATA, 2)
    assert list(chosen) == list(texts.KINDS)
    assert all(len(set(prompts)) == 2 for prompts in chosen.values())
    assert "def " in chosen["code"][0]
    assert chosen["summaries"][0].startswith("Summarize:")


def test_numbers_keep_the_digits_that_count() -> None:
    assert [number(value) for value in (1234.5, 98.36, 4.0, 0.0639)] == ["1,234", "98.4", "4.00", "0.0639"]


def test_hits_of_a_limit_are_read_from_either_version(tmp_path: Path) -> None:
    first, second = tmp_path / "memory.failcnt", tmp_path / "memory.events"
    first.write_text("12\n")
    second.write_text("low 0\nhigh 0\nmax 34\noom 1\noom_kill 1\n")
    assert [limit_hits(it) for it in (first, second, tmp_path / "none")] == [12, 34, 0]


def test_a_limit_of_version_2_is_memory_and_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEMORY_CGROUP", tmp_path / "none")
    monkeypatch.setattr(measure, "UNIFIED_CGROUP", tmp_path)
    monkeypatch.setattr(measure, "cgroup_version", lambda: 2)
    made: list[Path] = []

    def mkdtemp(prefix: str, dir: Path) -> str:
        folder = dir / f"{prefix}1"
        folder.mkdir()
        made.append(folder)
        for name in ("max", "swap.max", "events"):
            (folder / f"memory.{name}").write_text("max 0\n")
        return str(folder)

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    group = measure.MemoryCgroup(1_000_000)
    assert (made[0] / "memory.max").read_text() == "1000000"
    assert (made[0] / "memory.swap.max").read_text() == "0"
    assert (group.read("failcnt"), group.read("max_usage_in_bytes")) == (0, 0)


def test_a_run_that_a_signal_ended_says_which() -> None:
    assert [signal_name(number) for number in (9, 4)] == ["killed", "ended by SIGILL"]
