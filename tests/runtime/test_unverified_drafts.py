"""Until a draft is verified a state holds tokens that aren't its text's: nothing else sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.config import SamplingConfig
from ondevice.converters.convert import convert
from ondevice.model.sequence_state import SequenceState
from ondevice.prompt_cache import store
from ondevice.prompt_cache.entry import RunName
from ondevice.prompt_cache.store import PromptCache
from ondevice.runtime.engine import Engine
from tests.support.bundles import EOS, write_byte_tokenizer
from tests.support.engines import always_draft
from tests.support.families import CASES, write_model
from tests.support.joint_jobs import Job, Work, run
from tests.support.paths import SHIPPED

WORDS = "Once upon a time there was a little girl who liked to play. "
SESSION, FORK, OTHER = 1, 2, 3
GREEDY = SamplingConfig(max_tokens=40)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Every pass of a text has a draft."""
    always_draft(monkeypatch, [16])
    with load(SHIPPED, speculation="lookup", parallel=3, threads=1) as model:
        yield model


def text(engine: Engine, key: int | None, ids: list[int], sampling: SamplingConfig = GREEDY) -> Work:
    return engine.steps(key, ids, sampling, lambda: False)


def told(engine: Engine, key: int, ids: list[int], count: int = 8) -> list[Any]:
    """The `count` tokens that follow `ids`, bit for bit."""
    sampling = SamplingConfig(max_tokens=count, top_logprobs=0)
    return [(it.token, it.logprob) for it in engine.generate(key, ids, sampling, lambda: False)]


def test_a_fork_has_the_text_s_tokens_alone(model: Model) -> None:
    engine, ids, kept = model._engine, model.tokenizer.encode(WORDS * 10), []

    def fork(turn: int) -> None:
        if turn == 5:
            engine.fork(SESSION, FORK)
            kept.extend(engine.kv.state_of(FORK).tokens)

    job = Job(text(engine, SESSION, ids))
    model._owner.call(lambda: run(engine, [job], fork))
    assert len(kept) > len(ids)
    assert kept == [*ids, *job.tokens][: len(kept)]
    follows = [*kept, 7]
    expected = model._owner.call(lambda: told(engine, OTHER, follows))
    assert model._owner.call(lambda: told(engine, FORK, follows)) == expected


def test_a_session_is_saved_without_its_drafts(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save comes first in each round, before the text has verified what its pass had."""
    written, write = list[tuple[int, int, list[int]]](), PromptCache._write

    def noted(cache: PromptCache, kv: SequenceState, name: RunName, stop: int, before: Any) -> bool:
        start = stop - name.tokens
        written.append((start, stop, kv.tokens[start:stop]))
        return write(cache, kv, name, stop, before)

    monkeypatch.setattr(store, "PIECE_SECONDS", 0.0)
    monkeypatch.setattr(PromptCache, "_write", noted)
    engine, ids = model._engine, model.tokenizer.encode(WORDS * 25)
    model._owner.call(lambda: told(engine, SESSION, ids, count=1))
    save = Job(engine.save_state(SESSION, tmp_path, lambda: False))
    job = Job(text(engine, SESSION, [*ids, 9]))
    model._owner.call(lambda: run(engine, [save, job]))
    assert (save.error, job.error) == (None, None)
    whole = [*ids, 9, *job.tokens]
    assert max(stop for _, stop, _ in written) > len(ids)
    assert [tokens for _, _, tokens in written] == [whole[start:stop] for start, stop, _ in written]


def test_a_session_that_is_saved_goes_on_answering(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doesn't wait until a text before it has ended."""
    monkeypatch.setattr(store, "PIECE_SECONDS", 0.0)
    engine, ids, ended = model._engine, model.tokenizer.encode(WORDS * 25), list[str]()

    def named(name: str, work: Work) -> Work:
        yield from work
        ended.append(name)

    model._owner.call(lambda: told(engine, SESSION, ids, count=1))
    first = Job(named("first", text(engine, OTHER, ids[:20], SamplingConfig(max_tokens=200))))
    save = Job(named("save", engine.save_state(SESSION, tmp_path, lambda: False)))
    job = Job(named("text", text(engine, SESSION, [*ids, 9])))
    model._owner.call(lambda: run(engine, [first, save, job]))
    assert ended[-1] == "first"


def test_the_first_text_gets_the_memory_that_states_of_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of a recurrent model may hold states and no block of keys and values."""
    family, options = CASES["qwen3.5"]
    write_model(tmp_path / "source", family, {**options, "vocab_size": 320})
    write_byte_tokenizer(tmp_path / "source")
    bundle = tmp_path / "bundle"
    convert(tmp_path / "source", bundle, "q4")
    wanted: dict[str, Any] = {"threads": 1, "parallel": 3, "max_context": 256, "prefill_chunk": 64}
    with load(bundle, speculation="lookup", **wanted) as model:
        engine = model._engine
        allowed, room = engine.plan.kv_cache_bytes, engine.kv._claimed
        monkeypatch.setattr(engine.kv, "_claimed", lambda nbytes: nbytes <= allowed and room(nbytes))

        def job(seed: int, length: int, count: int) -> Job:
            ids = [5 + (at * 7 * seed) % 240 for at in range(length)]
            sampling = SamplingConfig(max_tokens=count, logit_bias=((EOS, -math.inf),))
            return Job(text(engine, None, ids, sampling))

        jobs = [job(1, 100, 150), job(3, 100, 50), job(2, 100, 50)]
        model._owner.call(lambda: run(engine, jobs, late=20))
        assert [it.error for it in jobs] == [None] * 3
        assert [len(it.tokens) for it in jobs] == [150, 50, 50]
