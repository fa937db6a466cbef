"""What texts leave is a prefix for later ones: each begins with most of its tokens, and says what it says
alone, to the last bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.callbacks import Cancelled
from ondevice.config import SamplingConfig
from ondevice.converters.convert import convert
from ondevice.model.sequence_state import common_prefix
from ondevice.prompt_cache.store import PromptCache
from ondevice.runtime import state_pool
from tests.support.bundles import EOS, write_byte_tokenizer
from tests.support.cached_texts import settle, written
from tests.support.chat import squeeze
from tests.support.families import CASES, write_model
from tests.support.joint_jobs import Job, run

LONG = [(7 * at * at + 3 * at) % 250 + 3 for at in range(300)]
EDITED = [*LONG[:200], 9, *LONG[201:]]
BRANCH = [*LONG[:120], 5, 6, 7, 8]
OTHER = [4, 4, 9, *LONG[50:90]]
ROOMY: dict[str, Any] = {"dram_budget": "2GB", "threads": 1, "speculation": "off", "prefill_chunk": 32}
Said = list[tuple[int | None, float | None]]


@pytest.fixture(scope="module", params=["gemma", "gemma3", "qwen3.5", "lfm2"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of a small model: dense, with windows, or with recurrent layers of two kinds."""
    return made(tmp_path_factory.mktemp("kept"), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("dense"), "gemma")


def made(folder: Path, case: str) -> Path:
    family, options = CASES[case]
    write_model(folder / "source", family, {**options, "vocab_size": 320})
    write_byte_tokenizer(folder / "source")
    return convert(folder / "source", folder / case, "q4")


def said(model: Model, tokens: Sequence[int], keep: bool = True, count: int = 8) -> tuple[Said, int]:
    """Tokens drawn by chance with their exact log-probabilities, and how many of the prompt's were kept."""
    options: dict[str, Any] = {"max_tokens": count, "temperature": 0.9, "seed": 3, "top_logprobs": 0}
    bias = {EOS: -math.inf}
    *events, last = model.stream(tokens=list(tokens), cache_prompt=keep, logit_bias=bias, **options)
    assert last.stats is not None
    return [(event.token, event.logprob) for event in events], last.stats.reused_tokens


def nearest(model: Model, count: int) -> int:
    """The fewest tokens that a text can take of a state with which it has `count` in common."""
    states = model._engine.kv.layout.states
    return count // states.spacing * states.spacing if states.nbytes else count


def test_a_text_says_the_same_whatever_it_begins_with(bundle: Path) -> None:
    texts = [LONG, EDITED, BRANCH, OTHER, LONG, [*LONG, 1, 2, 3], EDITED, BRANCH]
    common = [0, 200, 120, 0, 299, 300, 299, 123]
    with load(bundle, **ROOMY) as model:
        expected = [said(model, text, keep=False) for text in texts]
        assert [reused for _, reused in expected] == [0] * len(texts)
        assert len(set(map(tuple, ([token for token, _ in text] for text, _ in expected)))) > 3
        for text, alone, most in zip(texts, expected, common, strict=True):
            drawn, reused = said(model, text)
            assert drawn == alone[0]
            assert nearest(model, most) <= reused <= most
            if model._engine.kv.layout.states.nbytes == 0:
                assert reused == most


def test_a_state_that_goes_another_way_is_copied_where_there_is_room(dense: Path) -> None:
    with load(dense, **ROOMY) as model:
        pool = model._engine.kv
        said(model, LONG)
        said(model, BRANCH)
        assert sorted(kv.length for kv in pool.prefixes) == [len(BRANCH) + 7, len(LONG) + 7]
        # A few tokens of a reply are no loss beside the copy of a long text.
        said(model, LONG)
        said(model, [*LONG, 3])
        assert len(pool.prefixes) == 2
        assert pool.nbytes == pool.prefix_bytes == sum(kv.nbytes for kv in pool.prefixes)
        model.drop_prefixes()
        assert pool.nbytes == model.state_bytes == 0


def test_a_text_goes_on_from_one_that_is_at_work(bundle: Path) -> None:
    """A text that begins while another is read or written takes what that has by then."""
    with load(bundle, parallel=2, **ROOMY) as model:
        expected = [
            said(model, text, keep=False, count=count)[0] for text, count in ((LONG, 60), (EDITED, 8))
        ]
        events = model.stream(
            tokens=LONG, cache_prompt=True, max_tokens=60, temperature=0.9, seed=3, top_logprobs=0,
            logit_bias={EOS: -math.inf},
        )  # fmt: skip
        first = next(events)
        drawn, reused = said(model, EDITED)
        rest = [(event.token, event.logprob) for event in (first, *events) if event.token is not None]
        assert [rest, drawn] == expected
        assert reused >= nearest(model, 200)


class _Text(Job):
    """A job that reads a prompt, and is given up after some rounds."""

    def __init__(self, model: Model, tokens: Sequence[int], given_up_after: int = 1000) -> None:
        self.rounds, self._most = 0, given_up_after
        sampling = SamplingConfig(max_tokens=4)
        super().__init__(model._engine.steps(None, list(tokens), sampling, self.is_cancelled, keep=True))

    def is_cancelled(self) -> bool:
        return self.rounds >= self._most


@pytest.mark.parametrize("overlapping", [False, True])
def test_an_abandoned_prompt_is_read_once(bundle: Path, overlapping: bool) -> None:
    """overlapping: the same prompt comes again before the one that is given up has ended."""
    with load(bundle, parallel=3, **ROOMY) as model:
        expected = [it.token for it in model.stream(tokens=LONG, max_tokens=4) if it.token is not None]
        engine, rows = model._engine, 0
        before = engine._generator.before_pass

        def count(batch: Any) -> None:
            nonlocal rows
            rows += len(batch.tokens)
            before(batch)

        engine._generator.passes._before_pass = count

        def both() -> tuple[Job, Job]:
            gone, again = _Text(model, LONG, given_up_after=6), _Text(model, LONG)

            def between(turn: int) -> None:
                gone.rounds = turn

            if overlapping:
                run(engine, [gone, again], between, late=6)
            else:
                run(engine, [gone], between)
                run(engine, [again])
            return gone, again

        gone, again = model._owner.call(both)
        assert gone.items[-1].finish_reason == "cancelled"
        assert again.tokens == expected
        reused = again.items[-1].stats.reused_tokens
        assert 96 <= reused < len(LONG)
        assert rows <= len(LONG) + 4
        # A recurrent state that has gone on can't come back to where it was left.
        assert len(engine.kv.prefixes) == (2 if engine.kv.layout.states.nbytes else 1)


def test_kept_texts_never_exceed_the_budget(relu_chat_bundle: Path) -> None:
    """They yield to texts that run and to neurons, from their ends, and what is lost is computed again."""
    rng = random.Random(1)
    heads = [[rng.randrange(3, 250) for _ in range(70)] for _ in range(3)]
    texts = [
        [*rng.choice(heads), *(rng.randrange(3, 250) for _ in range(rng.randrange(60)))] for _ in range(14)
    ]
    with load(relu_chat_bundle, threads=1, speculation="off") as model:
        expected = [said(model, text, keep=False)[0] for text in texts]
        squeeze(model)
        pool, kept = model._engine.kv, 0
        for text, alone in zip(texts, expected, strict=True):
            drawn, reused = said(model, text)
            kept += reused
            assert drawn == alone
            assert pool.nbytes <= model.plan.kv_limit_bytes
            assert pool.prefix_bytes <= model.plan.kv_cache_bytes
            assert model.plan.offloads_weights
        assert kept > 70 * 7
        for text, alone in zip(texts, expected, strict=True):
            assert said(model, text, keep=False) == (alone, 0)


def test_few_prefixes_are_kept(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pool, "MAX_PREFIXES", 3)
    with load(dense, **ROOMY) as model:
        for at in range(5):
            said(model, [10 + at, *OTHER])
        assert [kv.tokens[0] for kv in model._engine.kv.prefixes] == [12, 13, 14]


def test_sessions_share_their_beginnings(dense: Path) -> None:
    with load(dense, **ROOMY) as model:
        first, other = model.session("Be brief. " * 12), model.session("Be brief. " * 12)
        begun = first.respond("Hello", max_tokens=8)
        answer = other.respond("Something else that is longer than that", max_tokens=8)
        # Both conversations go on with what they have.
        for session in (first, other):
            went = session.respond("Go on", max_tokens=4)
            prompt = model.chat_ids(session.transcript[:-1])
            assert went.tokens == model.generate(tokens=prompt, max_tokens=4).tokens
            assert went.stats.reused_tokens > len(prompt) - 40
    assert begun.stats.reused_tokens == 0
    assert answer.stats.reused_tokens > 120


def test_only_whole_chunks_are_shared_where_a_split_changes_bits(dense: Path) -> None:
    with load(dense, backend="reference", **ROOMY) as model:
        expected = [said(model, text, keep=False, count=3)[0] for text in (LONG, EDITED)]
        assert said(model, LONG, count=3) == (expected[0], 0)
        assert said(model, EDITED, count=3) == (expected[1], 192)
        # All of a text is taken, as in a conversation that goes on.
        assert said(model, [*LONG, *(token for token, _ in expected[0][:2]), 7])[1] == len(LONG) + 2  # type: ignore[list-item]


def test_texts_that_ended_are_written_beside_those_that_run(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an eviction finds them on the disk already."""
    running, real = [], PromptCache._write

    def write(store: PromptCache, *arguments: Any) -> Any:
        running.append(model._engine.joint.running)
        return real(store, *arguments)

    monkeypatch.setattr(PromptCache, "_write", write)
    with load(dense, parallel=2, prompt_cache=tmp_path, **ROOMY) as model:
        events = model.stream(tokens=OTHER, cache_prompt=True, max_tokens=400, logit_bias={EOS: -math.inf})
        next(events)
        alone = said(model, LONG)[0]
        list(events)
        assert any(running)
        settle(model)
        kept = len(written(tmp_path))
        model.drop_prefixes()
        assert len(written(tmp_path)) == kept
        assert said(model, EDITED)[1] == 200
        assert said(model, LONG) == (alone, 299)


def test_a_copy_of_a_part_has_its_bits(bundle: Path) -> None:
    """Of a state whose text goes on, up to any place, and it takes no more memory than it needs."""
    with load(bundle, **ROOMY) as model:
        pool = model._engine.kv
        expected = said(model, EDITED, keep=False)[0]
        said(model, LONG)

        def copied(count: int) -> int:
            (kv,) = [it for it in pool.prefixes if it.length == len(LONG) + 7]
            before = pool.nbytes
            copy = kv.fork(count)
            assert copy.length == kv.nearest(count)
            assert copy.tokens == LONG[: copy.length]
            assert pool.nbytes - before == copy.nbytes <= pool.layout.nbytes(max(1, copy.length))
            assert common_prefix(copy.tokens, kv.tokens) == copy.length
            pool.of_sessions[1000 + count] = copy
            length = copy.length
            return length

        for count in (290, 200, 130):
            length = model._owner.call(lambda count=count: copied(count))  # type: ignore[misc]
            assert length >= nearest(model, count)
        model._owner.call(pool.drop_prefixes)
        assert said(model, EDITED)[0] == expected


def test_a_cancelled_wait_for_others_ends_the_text(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(dense, **ROOMY) as model:
        monkeypatch.setattr(type(model._engine.joint), "is_leaving", property(lambda joint: True))

        def ended() -> Any:
            steps = model._engine.steps(None, LONG, SamplingConfig(), lambda: True, keep=True)
            next(steps)
            steps.throw(Cancelled())
            return steps.throw(Cancelled())

        assert model._owner.call(ended).finish_reason == "cancelled"
