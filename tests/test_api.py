"""The Python API over small bundles: results, streams, threads, asyncio, sessions, budgets, errors."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice import memory_plan
from ondevice.api import Model, load
from ondevice.errors import (
    BackendUnavailableError,
    BudgetError,
    ContextOverflowError,
    ModelNotFoundError,
    OndeviceError,
    UnsupportedModelError,
    UsageError,
)
from ondevice.generate import Event
from tests.bundles import CONTEXT, EOS, VOCAB_SIZE

PROMPT = "Once upon a time"
LAST_LAYER = "neurons-00002.safetensors"


@pytest.fixture(scope="module")
def model(chat_bundle: Path) -> Iterator[Model]:
    with load(chat_bundle, threads=1) as loaded:
        yield loaded


def greedy(model: Model, count: int = 24, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=count, logit_bias={EOS: -math.inf}, **options).tokens


def budget_between(bundle: Path, quarters: int) -> int:
    """A budget from the smallest (0) to everything resident (4), by what this process holds right now."""
    plan = ondevice.inspect(bundle)
    return plan.minimum_budget_bytes + (plan.full_bytes - plan.minimum_budget_bytes) * quarters // 4


def test_importing_the_package_imports_nothing_else_and_is_fast() -> None:
    program = (
        "import sys, time; before = set(sys.modules); start = time.perf_counter(); import ondevice\n"
        "seconds = time.perf_counter() - start\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'numpy', 'click', 'jinja2', 'safetensors', 'platformdirs'}, new\n"
        "assert seconds < 0.5, seconds\n"
        "assert 'load' in dir(ondevice) and ondevice.BudgetError.exit_code == 5\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there() -> None:
    assert all(getattr(ondevice, name) is not None for name in ondevice.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        ondevice.no_such_name  # noqa: B018


def test_generate_and_stream_say_the_same(model: Model) -> None:
    response = model.generate(PROMPT, max_tokens=12)
    events = list(model.stream(PROMPT, max_tokens=12))
    assert "".join(event.text for event in events) == response.text
    assert tuple(event.token for event in events[:-1]) == response.tokens
    assert events[-1].finish_reason == response.finish_reason
    assert response.stats.generated_tokens == len(response.tokens)
    assert response.stats.prompt_tokens == len(model.tokenizer.encode(PROMPT))
    assert response.stats.backend == "cpu"
    assert model.stats.generated_tokens == len(response.tokens)
    assert json.loads(json.dumps(response.to_dict()))["tokens"] == list(response.tokens)


def test_text_and_its_tokens_are_the_same_prompt(model: Model) -> None:
    ids = model.tokenizer.encode(PROMPT)
    assert model.generate(tokens=ids, max_tokens=5).tokens == model.generate(PROMPT, max_tokens=5).tokens


def test_prompts_of_a_wrong_type_never_become_work(model: Model) -> None:
    for wrong in ("ab", [1.5], [None], 5):
        for call in (model.stream, model.astream, model.logits, model.score):
            with pytest.raises(UsageError, match="integers"):
                call(**{"tokens": wrong})
    assert model.prompt_ids(None, np.array([3, 4], np.int32)) == [3, 4]  # type: ignore[arg-type]


def test_logits_are_those_that_generation_follows(model: Model) -> None:
    ids = model.tokenizer.encode(PROMPT)
    logits = model.logits(ids)
    assert logits.shape == (len(ids), VOCAB_SIZE)
    assert logits.dtype == np.float32
    assert model.generate(tokens=ids, max_tokens=1).tokens == (int(logits[-1].argmax()),)


def test_long_logits_are_computed_in_pieces_with_equal_bits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(7 * i) % 256 for i in range(100)]
    whole = model.logits(ids)
    monkeypatch.setattr(memory_plan, "LOGITS_BYTES", 4 * VOCAB_SIZE * 3)
    assert np.array_equal(model.logits(ids), whole)


def test_score_is_the_mean_of_the_log_probabilities(model: Model) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 12
    progress: list[tuple[int, int]] = []
    score = model.score(text, on_progress=lambda done, total: progress.append((done, total)))
    ids = model.tokenizer.encode(text)
    assert score.tokens == len(ids) - 1 > CONTEXT
    assert progress[-1] == (score.tokens, score.tokens)
    nll = 0.0
    for start in range(1, len(ids), CONTEXT - 1):
        piece = [ids[0], *ids[start : start + CONTEXT - 1]]
        logits = model.logits(piece[:-1]).astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        nll -= logits[np.arange(len(piece) - 1), piece[1:]].sum()
    assert score.nll_per_token == pytest.approx(nll / score.tokens, rel=1e-9)
    assert score.perplexity == pytest.approx(math.exp(nll / score.tokens))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, UsageError),
        ({"prompt": "a", "tokens": [1]}, UsageError),
        ({"tokens": []}, UsageError),
        ({"tokens": "ab"}, UsageError),
        ({"tokens": [1.5]}, UsageError),
        ({"tokens": 5}, UsageError),
        ({"prompt": b"a"}, UsageError),
        ({"prompt": 7}, UsageError),
        ({"prompt": "a", "max_tokens": "3"}, UsageError),
        ({"prompt": "a", "logit_bias": 3}, UsageError),
        ({"prompt": "a", "stop": 3}, UsageError),
        ({"tokens": [VOCAB_SIZE]}, UsageError),
        ({"tokens": [-1]}, UsageError),
        ({"prompt": "a", "temperature": -1.0}, UsageError),
        ({"prompt": "a", "temprature": 1.0}, UsageError),
        ({"prompt": "a", "stop": [""]}, UsageError),
        ({"prompt": "a" * CONTEXT}, ContextOverflowError),
    ],
)
def test_bad_arguments_are_typed_errors_and_the_model_goes_on(
    model: Model, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        model.generate(**arguments)
    assert len(model.generate(PROMPT, max_tokens=2).tokens) <= 2


def test_a_context_that_fills_ends_with_length(model: Model) -> None:
    response = model.generate(PROMPT, max_tokens=10_000, logit_bias={EOS: -math.inf})
    assert response.finish_reason == "length"
    assert len(response.tokens) + response.stats.prompt_tokens == CONTEXT


def test_a_model_without_a_tokenizer_takes_ids_and_says_so(token_bundle: Path) -> None:
    with load(token_bundle) as mute:
        response = mute.generate(tokens=[1, 2, 3], max_tokens=4)
        assert response.text == ""
        assert 1 <= len(response.tokens) <= 4 or response.finish_reason == "stop"
        assert mute.logits([1, 2]).shape == (2, 256)
        for call in (lambda: mute.generate("text"), lambda: mute.session().respond("text")):
            with pytest.raises(UsageError, match="no tokenizer"):
                call()


# --- streams, threads, asyncio --------------------------------------------------------------------------


def test_closing_a_stream_cancels_it(model: Model) -> None:
    events = model.stream(PROMPT, max_tokens=200, logit_bias={EOS: -math.inf})
    first = [next(events), next(events)]
    events.close()  # type: ignore[attr-defined]
    assert [event.token for event in first] == list(greedy(model, 2))
    assert model.stats.generated_tokens == 2


def test_the_figures_of_a_cancelled_reply_are_its_own(model: Model) -> None:
    model.generate("x", max_tokens=1)
    session = model.session()
    bias = {EOS: -math.inf}
    for events in (
        model.stream(PROMPT, max_tokens=200, logit_bias=bias),
        session.stream_response("Hello", max_tokens=200, logit_bias=bias),
    ):
        next(events)
        events.close()  # type: ignore[attr-defined]
        prompt_tokens = model.stats.prompt_tokens
        assert prompt_tokens > len(model.tokenizer.encode("x"))
        assert 1 <= model.stats.generated_tokens <= 200
    assert prompt_tokens == len(model.chat_ids(session.transcript[:1]))

    async def cancelled() -> None:
        events = model.astream("xyz", max_tokens=200, logit_bias=bias)
        await anext(events)
        await events.aclose()

    asyncio.run(cancelled())
    assert model.stats.prompt_tokens == len(model.tokenizer.encode("xyz"))


def test_a_stream_that_was_never_begun_leaves_the_figures(model: Model) -> None:
    model.generate("x", max_tokens=1)
    before = model.stats
    model.stream(PROMPT).close()  # type: ignore[attr-defined]
    assert model.stats is before


def test_many_threads_get_their_own_answers(model: Model) -> None:
    prompts = [PROMPT, "In the beginning", "x", "zzzz"]
    expected = {prompt: model.generate(prompt, max_tokens=8).tokens for prompt in prompts}
    wrong: list[str] = []

    def ask(prompt: str) -> None:
        if model.generate(prompt, max_tokens=8).tokens != expected[prompt]:
            wrong.append(prompt)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_asyncio(model: Model) -> None:
    async def both() -> tuple[list[int | None], tuple[int, ...]]:
        streamed = [event.token async for event in model.astream(PROMPT, max_tokens=6)]
        response = await model.agenerate(PROMPT, max_tokens=6)
        return streamed[:-1], response.tokens

    streamed, tokens = asyncio.run(both())
    assert tuple(streamed) == tokens == model.generate(PROMPT, max_tokens=6).tokens


def test_cancelling_a_task_cancels_the_generation(model: Model) -> None:
    async def cancelled() -> None:
        bias = {EOS: -math.inf}
        task = asyncio.create_task(model.agenerate(PROMPT, max_tokens=240, logit_bias=bias))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    start = time.monotonic()
    assert len(greedy(model, 1)) == 1
    assert time.monotonic() - start < 5.0


def test_close_ends_everything_and_is_idempotent(chat_bundle: Path) -> None:
    before = threading.active_count()
    model = load(chat_bundle)
    events = model.stream(PROMPT, max_tokens=240, logit_bias={EOS: -math.inf})
    next(events)
    model.close()
    model.close()
    rest = list(events)
    assert rest[-1].finish_reason in ("cancelled", "length")
    for call in (lambda: model.generate(PROMPT), lambda: model.logits([1]), lambda: model.score("ab")):
        with pytest.raises(OndeviceError, match="closed"):
            call()
    assert threading.active_count() == before


def test_a_closed_model_refuses_everything(chat_bundle: Path) -> None:
    model = load(chat_bundle)
    session, events = model.session(), model.stream(PROMPT)
    model.close()

    async def ask() -> None:
        await model.agenerate(PROMPT)

    uses: list[Callable[[], object]] = [
        model.__enter__,
        model.session,
        session.fork,
        lambda: session.respond("Hello"),
        lambda: next(events),
        lambda: model.stream(PROMPT),
        lambda: model.astream(PROMPT),
        lambda: asyncio.run(ask()),
        lambda: model.generate(PROMPT, max_tokens=0),
        lambda: model.generate(),
        lambda: model.logits([]),
        lambda: model.score(""),
        lambda: model.measure(1, 1),
        lambda: model.set_dram_budget("8GB"),
    ]
    for use in uses:
        with pytest.raises(OndeviceError, match="the model is closed; load it again"):
            use()


def test_a_forgotten_model_frees_its_thread(chat_bundle: Path) -> None:
    before = threading.active_count()
    load(chat_bundle).generate(PROMPT, max_tokens=2)
    deadline = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert threading.active_count() == before


def test_an_unfinished_stream_does_not_keep_the_interpreter(chat_bundle: Path) -> None:
    program = (
        "import sys, ondevice; model = ondevice.load(sys.argv[1])\n"
        "events = model.stream('Once', max_tokens=200); next(events)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(chat_bundle)], capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_nothing_is_printed(chat_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with load(chat_bundle) as model:
        model.generate(PROMPT, max_tokens=3)
        model.session("Be brief.").respond("Hello", max_tokens=3)
    assert capfd.readouterr() == ("", "")


# --- budgets --------------------------------------------------------------------------------------------


def test_the_text_is_the_same_whatever_the_settings(chat_bundle: Path, model: Model) -> None:
    expected = greedy(model, 100)
    sampled = greedy(model, 40, temperature=0.9, seed=3)
    settings: list[dict[str, Any]] = [
        {"threads": 2},
        {"prefill_chunk": 1},
        {"prefill_chunk": 7},
        {"io": "buffered"},
        {"kernel_target": "scalar"},
    ]
    for options in settings:
        with load(chat_bundle, **options) as other:
            assert greedy(other, 100) == expected, options
            assert greedy(other, 40, temperature=0.9, seed=3) == sampled, options
    for quarters in range(5):
        with load(chat_bundle, dram_budget=budget_between(chat_bundle, quarters), threads=1) as other:
            assert greedy(other, 100) == expected, quarters


def test_a_real_models_two_hundred_tokens_whatever_the_settings(stories_bundle: Path) -> None:
    def tokens(**options: Any) -> tuple[int, ...]:
        with load(stories_bundle, **options) as model:
            return model.generate("Once upon a time", max_tokens=200).tokens

    expected = tokens()
    assert len(expected) == 200
    ways: list[dict[str, Any]] = [{"prefill_chunk": chunk} for chunk in (1, 7, 64)]
    ways += [{"threads": 1}, {"threads": 2}, {"io": "buffered"}]
    assert [way for way in ways if tokens(**way) != expected] == []
    for quarters in range(5):
        assert tokens(dram_budget=budget_between(stories_bundle, quarters)) == expected, quarters
    with load(stories_bundle) as model:
        changed = []
        for index, event in enumerate(model.stream("Once upon a time", max_tokens=200)):
            changed.append(event.token)
            if index % 50 == 25:
                smallest = model.plan.minimum_budget_bytes
                model.set_dram_budget("1GB" if model.plan.streams else smallest)
        assert tuple(changed[:-1]) == expected


def test_the_smallest_budget_streams_and_the_largest_does_not(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    with load(chat_bundle, dram_budget=plan.minimum_budget_bytes) as model:
        stats = model.generate(PROMPT, max_tokens=150, logit_bias={EOS: -math.inf}).stats
        assert stats.flash_bytes_read > 0
        assert stats.flash_read_seconds > 0
        assert stats.flash_cpu_seconds > 0
        assert stats.neuron_cache_hit_rate < 1.0
        assert stats.io in ("direct", "buffered")
        model.set_dram_budget("8GB")
        assert not model.plan.streams
        deadline = time.monotonic() + 30.0
        while model.stats.neuron_cache_hit_rate < 1.0 and time.monotonic() < deadline:
            model.generate(PROMPT, max_tokens=20, logit_bias={EOS: -math.inf})
        assert model.stats.neuron_cache_hit_rate == 1.0
        assert model.generate(PROMPT, max_tokens=5).stats.flash_bytes_read < 100 * 8192


def test_a_budget_that_cannot_be_met_names_the_one_that_can(chat_bundle: Path) -> None:
    assert not ondevice.inspect(chat_bundle, dram_budget="1MB").fits
    with pytest.raises(BudgetError) as caught:
        load(chat_bundle, dram_budget=0)
    with load(chat_bundle, dram_budget=caught.value.required_bytes) as model:
        assert greedy(model, 2)
        with pytest.raises(BudgetError):
            model.set_dram_budget("1MB")
        assert model.plan.budget_bytes == caught.value.required_bytes


def test_the_budget_may_change_while_a_text_is_made(chat_bundle: Path, model: Model) -> None:
    expected = greedy(model, 120)
    with load(chat_bundle, threads=1, dram_budget="8GB") as other:
        smallest = other.plan.minimum_budget_bytes - memory_plan.REPEAT_MARGIN_BYTES
        tokens: list[int | None] = []
        rates = []
        bias = {EOS: -math.inf}
        for index, event in enumerate(other.stream(PROMPT, max_tokens=120, logit_bias=bias)):
            tokens.append(event.token)
            if index in (20, 60):
                plan = other.set_dram_budget(smallest if index == 20 else "8GB")
                rates.append(plan.streams)
        assert tuple(tokens[:-1]) == expected
        assert rates == [True, False]


def test_residency_yields_to_the_kv_cache_and_comes_back(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    bare = plan.minimum_budget_bytes - memory_plan.REPEAT_MARGIN_BYTES
    with load(chat_bundle, dram_budget=bare + plan.segment.nbytes) as model:
        at_start = model._engine._segments
        greedy(model, 230)
        after = model._engine._segments
        greedy(model, 2)
        assert at_start > after
        assert model._engine._segments > after
        assert model._engine._kv_bytes == 0


def test_auto_is_what_the_model_can_use(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    assert plan.budget_bytes == plan.full_bytes == plan.total_bytes


def test_the_process_stays_below_its_budget(chat_bundle: Path) -> None:
    program = (
        "import sys, ondevice\n"
        "plan = ondevice.inspect(sys.argv[1])\n"
        "with ondevice.load(sys.argv[1], dram_budget=plan.minimum_budget_bytes) as model:\n"
        "    stats = model.generate('Once', max_tokens=250, logit_bias={257: -1e9}).stats\n"
        "    print(stats.peak_memory_bytes, model.plan.budget_bytes, model.plan.total_bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(chat_bundle)], capture_output=True, text=True, check=True
    )
    peak, budget, total = map(int, done.stdout.split())
    assert peak <= budget
    assert abs(peak - total) <= max(0.05 * total, 16 << 20)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "mlx"}, BackendUnavailableError),
        ({"backend": "cuda"}, UsageError),
        ({"sparsity": "exact"}, UnsupportedModelError),
        ({"speculation": "streams"}, UnsupportedModelError),
        ({"kernel_target": "altivec"}, UsageError),
        ({"max_context": CONTEXT + 1}, UsageError),
        ({"dram_budget": "lots"}, UsageError),
        ({"threads": -1}, UsageError),
        ({"dram_bugdet": "4GB"}, UsageError),
    ],
)
def test_impossible_options_are_refused_before_loading(
    chat_bundle: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        load(chat_bundle, **options)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="ondevice convert"):
        load(tmp_path / "nowhere")


def test_the_reference_backend_says_nearly_the_same(chat_bundle: Path, model: Model) -> None:
    with load(chat_bundle, backend="reference") as reference:
        ids = model.tokenizer.encode(PROMPT)
        expected, found = reference.logits(ids), model.logits(ids)
        assert np.abs(expected - found).max() < 0.1 * np.abs(expected).max()
        assert reference.generate(PROMPT, max_tokens=2).stats.backend == "reference"


# --- sessions -------------------------------------------------------------------------------------------


def test_a_session_remembers_and_computes_only_what_is_new(model: Model) -> None:
    session = model.session("Be brief.")
    first = session.respond("Hello there", max_tokens=10)
    second = session.respond("And again", max_tokens=10)
    assert [message["role"] for message in session.transcript] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert session.transcript[2]["content"] == first.text
    prompt = model.chat_ids(session.transcript[:-1])
    assert second.stats.prompt_tokens == len(prompt)
    assert second.tokens == model.generate(tokens=prompt, max_tokens=10).tokens
    assert second.stats.prefill_tokens_per_second > 0


def test_a_turn_reuses_the_common_prefix(model: Model) -> None:
    session = model.session()
    session.respond("a" * 100, max_tokens=4)
    kv = model._engine._caches[session._key]
    assert kv.length >= 100
    held = kv.blocks[0]
    session.respond("b", max_tokens=4)
    assert kv.blocks[0] is held


def test_a_fork_goes_its_own_way(model: Model) -> None:
    session = model.session()
    session.respond("Hello", max_tokens=6)
    other = session.fork()
    assert other.transcript == session.transcript
    same = [branch.respond("Go on", max_tokens=6).tokens for branch in (session, other)]
    assert same[0] == same[1]
    other.respond("More", max_tokens=3)
    assert len(other.transcript) == len(session.transcript) + 2


def test_save_load_and_reset(model: Model, tmp_path: Path) -> None:
    session = model.session("Système 🦙")
    session.respond("Hello", max_tokens=5)
    session.save(tmp_path / "talk.json")
    other = model.session()
    other.load(tmp_path / "talk.json")
    assert other.transcript == session.transcript
    again = [branch.respond("Go on", max_tokens=6).tokens for branch in (session, other)]
    assert again[0] == again[1]
    other.reset()
    assert other.transcript == [{"role": "system", "content": "Système 🦙"}]
    assert list(tmp_path.iterdir()) == [tmp_path / "talk.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"format": "ondevice-session", "version": 2, "messages": []}',
        '{"format": "ondevice-session", "version": 1}',
        '{"format": "ondevice-session", "version": 1, "messages": [{"role": "root", "content": "x"}]}',
        '{"format": "ondevice-session", "version": 1, "messages": [{"role": "user", "content": 1}]}',
        '{"format": "ondevice-session", "version": 1, "messages": [{"role": "user"}]}',
    ],
)
def test_a_file_that_is_no_session_is_refused(model: Model, tmp_path: Path, content: str) -> None:
    (tmp_path / "talk.json").write_text(content)
    session = model.session("Keep me.")
    for path in (tmp_path / "talk.json", tmp_path / "absent.json"):
        with pytest.raises(UsageError):
            session.load(path)
    assert session.transcript == [{"role": "system", "content": "Keep me."}]


def test_a_cancelled_reply_is_remembered_as_far_as_it_was_heard(model: Model) -> None:
    session = model.session()
    events = session.stream_response("Tell me", max_tokens=100, logit_bias={EOS: -math.inf})
    heard = [next(events).text for _ in range(5)]
    with pytest.raises(UsageError, match="answering already"):
        session.respond("Me too")
    events.close()  # type: ignore[attr-defined]
    assert session.transcript[-1] == {"role": "assistant", "content": "".join(heard)}
    assert session.respond("Go on", max_tokens=2).finish_reason in ("length", "stop")


def test_a_turn_that_fails_leaves_the_transcript(model: Model) -> None:
    session = model.session()
    session.respond("Hello", max_tokens=3)
    before = session.transcript
    with pytest.raises(ContextOverflowError):
        session.respond("x" * CONTEXT)
    assert session.transcript == before
    assert session.respond("Shorter", max_tokens=3).stats.generated_tokens <= 3


def test_closing_a_sessions_async_stream_closes_the_work_under_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def endless(*_: Any) -> AsyncGenerator[Event, None]:
        try:
            while True:
                yield Event(text="a", token=1)
        finally:
            await asyncio.sleep(0)  # A generator that is merely forgotten is closed later, by the loop.
            closed.append("inner")

    async def ask() -> None:
        events = session.astream_response("Hello")
        await anext(events)
        await events.aclose()
        closed.append("outer")

    session = model.session()
    monkeypatch.setattr(model, "astream_ids", endless)
    asyncio.run(ask())
    assert closed == ["inner", "outer"]


def test_asyncio_sessions(model: Model) -> None:
    plain, awaited = model.session(), model.session()
    expected = plain.respond("Hello", max_tokens=5).tokens

    async def ask() -> tuple[tuple[int, ...], int]:
        response = await awaited.arespond("Hello", max_tokens=5)
        events = [event async for event in awaited.astream_response("More", max_tokens=3)]
        return response.tokens, len(events)

    tokens, count = asyncio.run(ask())
    assert tokens == expected
    assert count >= 1
    assert len(awaited.transcript) == 4


def test_idle_sessions_yield_their_memory_and_come_back_with_the_same_text(chat_bundle: Path) -> None:
    plan = ondevice.inspect(chat_bundle)
    with load(chat_bundle, dram_budget=plan.minimum_budget_bytes) as model:
        limit = model.plan.kv_limit_bytes // model.plan.kv_block_bytes
        sessions = [model.session() for _ in range(limit)]
        first = [session.respond("a" * 120, max_tokens=3).tokens for session in sessions]
        assert model._engine._kv_bytes <= model.plan.kv_limit_bytes
        assert len(set(first)) == 1
        second = {session.respond("b", max_tokens=3).tokens for session in sessions}
        assert len(second) == 1
        assert model._engine._kv_bytes <= model.plan.kv_limit_bytes


def test_a_dropped_session_gives_its_cache_back(chat_bundle: Path) -> None:
    with load(chat_bundle) as model:
        session = model.session()
        session.respond("Hello", max_tokens=3)
        assert model._engine._kv_bytes > 0
        del session
        gc.collect()
        model.generate(PROMPT, max_tokens=1)
        assert model._engine._kv_bytes == 0


def test_damage_found_while_running_is_a_typed_error(chat_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(chat_bundle, tmp_path / "damaged")
    target = copy / "neurons-00001.safetensors"
    data = bytearray(target.read_bytes())
    data[4096 + 600] ^= 1
    target.write_bytes(data)
    with load(copy) as model, pytest.raises(ondevice.FlashReadError, match="neurons-00001"):
        model.generate(PROMPT, max_tokens=1)


def test_damage_found_while_generating_is_a_typed_error_and_passes(chat_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(chat_bundle, tmp_path / "damaged")
    plan = ondevice.inspect(copy)
    bias = {EOS: -math.inf}
    bare = plan.minimum_budget_bytes - memory_plan.REPEAT_MARGIN_BYTES
    with load(copy, dram_budget=bare) as model, open(copy / LAST_LAYER, "r+b") as file:
        expected = model.generate(PROMPT, max_tokens=200, logit_bias=bias).tokens
        assert model.stats.neuron_cache_hit_rate < 1.0
        file.seek(-700, 2)
        good = file.read(1)
        for byte in (bytes([good[0] ^ 255]), good):
            file.seek(-700, 2)
            file.write(byte)
            file.flush()
            if byte != good:
                with pytest.raises(ondevice.FlashReadError, match=LAST_LAYER):
                    model.generate(PROMPT, max_tokens=200, logit_bias=bias)
                assert model._engine._kv_bytes == 0
        assert model.generate(PROMPT, max_tokens=200, logit_bias=bias).tokens == expected


def test_loading_logs_and_does_not_configure_logging(
    chat_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = list(logging.getLogger().handlers)
    with caplog.at_level(logging.INFO, logger="ondevice"), load(chat_bundle):
        pass
    assert any("tiny-chat" in record.getMessage() for record in caplog.records)
    assert logging.getLogger().handlers == handlers


def test_loading_keeps_no_buffers(chat_bundle: Path) -> None:
    with load(chat_bundle) as model:
        assert model._engine._reader.staging_bytes == 0
