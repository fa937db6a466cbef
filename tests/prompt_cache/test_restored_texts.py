"""A text that continues what a prompt cache has is the one without it, to the last bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import load
from ondevice.runtime.backend_choice import has_mlx
from tests.support.bundles import EOS
from tests.support.cached_texts import PROMPT, said, settle, written
from tests.support.chat import squeeze

needs_mlx = pytest.mark.skipif(not has_mlx(), reason="mlx isn't installed")


@pytest.mark.fast("cpu-*", "reference-*")
@pytest.mark.parametrize(
    ("backend", "kv_bits", "length"),
    [("cpu", 16, 150), ("cpu", 8, 150), ("reference", 16, 70), pytest.param("mlx", 8, 70, marks=needs_mlx)],
)
def test_a_restart_restores_what_was_computed(
    chat_bundle: Path, tmp_path: Path, backend: Any, kv_bits: Any, length: int
) -> None:
    options: dict[str, Any] = {"backend": backend, "kv_bits": kv_bits, "prefill_chunk": 32, "threads": 1}
    prompt, other = PROMPT[:length], [*PROMPT[:50], 9, *PROMPT[51:60]]
    with load(chat_bundle, **options) as model:
        expected, others = said(model, prompt)[0], said(model, other)[0]
    assert len(set(expected)) > 5, "the text says nothing"
    with load(chat_bundle, prompt_cache=tmp_path, **options) as model:
        assert said(model, prompt) == (expected, 0)
    # To the token where any split has equal bits, else whole chunks.
    whole, common = (length - 1, 50) if backend == "cpu" else (64, 32)
    with load(chat_bundle, prompt_cache=tmp_path, **options) as model:
        assert said(model, prompt) == (expected, whole)
        assert said(model, other) == (others, common)


WAYS: dict[str, dict[str, Any]] = {
    "dense": {"sparsity": "dense", "speculation": "off", "threads": 1},
    "exact": {"sparsity": "exact", "speculation": "off"},
    "drafts": {"sparsity": "exact", "speculation": "lookup", "prefill_chunk": 7},
    "small chunks": {"sparsity": "dense", "speculation": "recycling", "prefill_chunk": 1},
}


def test_states_are_shared_between_ways_that_change_no_bit(relu_chat_bundle: Path, tmp_path: Path) -> None:
    with load(relu_chat_bundle, **WAYS["dense"]) as model:
        expected = said(model)[0]
    with load(relu_chat_bundle, prompt_cache=tmp_path, **WAYS["drafts"]) as model:
        squeeze(model)
        assert said(model) == (expected, 0)
    for way, options in WAYS.items():
        with load(relu_chat_bundle, prompt_cache=tmp_path, **options) as model:
            assert said(model) == (expected, 149), way
            squeeze(model)
            assert said(model) == (expected, 149), way


LOSSY: list[dict[str, Any]] = [
    {"sparsity": "predicted", "predictor_recall": 0.95},
    {"sparsity": "predicted", "predictor_recall": 0.9},
    {"sparsity": "exact"},
]


def test_every_lossy_mode_has_states_of_its_own(tmp_path: Path) -> None:
    expected = []
    for way in LOSSY:
        with load(speculation="off", **way) as model:
            expected.append(said(model)[0])
    assert len({tuple(each) for each in expected}) == len(LOSSY)
    for restored in (0, 149):
        for way, text in zip(LOSSY, expected, strict=True):
            with load(speculation="off", prompt_cache=tmp_path, **way) as model:
                assert said(model) == (text, restored), way


def test_another_model_finds_nothing(chat_bundle: Path, relu_chat_bundle: Path, tmp_path: Path) -> None:
    for bundle in (chat_bundle, relu_chat_bundle):
        with load(bundle, prompt_cache=tmp_path) as model:
            assert said(model)[1] == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_chat_goes_on_after_a_restart(chat_bundle: Path, tmp_path: Path) -> None:
    def turns(session: ondevice.Session, *texts: str) -> list[ondevice.Response]:
        return [session.respond(text, max_tokens=20, logit_bias={EOS: -math.inf}) for text in texts]

    with load(chat_bundle) as model:
        session = model.session("Be brief. " * 8)
        expected = turns(session, "Hello", "And again")
        session.save(tmp_path / "talk.json", state=False)
    cache = tmp_path / "cache"
    with load(chat_bundle, prompt_cache=cache) as model:
        session = model.session("Be brief. " * 8)
        assert turns(session, "Hello")[0].tokens == expected[0].tokens
        session.save(tmp_path / "first.json", state=False)
    with load(chat_bundle, prompt_cache=cache) as model:
        session = model.session()
        session.load(tmp_path / "first.json")
        again = turns(session, "And again")[0]
        assert again.tokens == expected[1].tokens
        assert again.stats.restored_tokens > 90


@pytest.mark.fast("reference")
@pytest.mark.parametrize("backend", ["reference", pytest.param("mlx", marks=needs_mlx)])
def test_only_chunks_behind_whole_chunks_are_kept(chat_bundle: Path, tmp_path: Path, backend: Any) -> None:
    with load(chat_bundle, backend=backend, prefill_chunk=32, prompt_cache=tmp_path) as model:
        session = model.session()
        session.respond("a" * 100, max_tokens=1)
        kv = model._engine.kv.of_sessions[session._key]
        assert kv.chunked >= 96
        settle(model)
        kept, tokens = set(written(tmp_path)), list(kv.tokens)
        session._messages = []
        session.respond("a" * 40 + "b" * 80, max_tokens=1)
        common = next(
            at for at, pair in enumerate(zip(tokens, kv.tokens, strict=False)) if len(set(pair)) > 1
        )
        # What follows was computed in chunks that begin where the conversations part.
        assert kv.chunked == common
        assert common % 32 > 0
        settle(model)
        assert set(written(tmp_path)) == kept


def test_a_saved_session_keeps_its_state(chat_bundle: Path, tmp_path: Path) -> None:
    with load(chat_bundle) as model:
        session = model.session()
        session.respond("a" * 100, max_tokens=10)
        session.save(tmp_path / "talk.json")
        kept = written(tmp_path / "talk.json.state")
        assert kept
        expected = session.respond("Go on", max_tokens=10).tokens
        session.save(tmp_path / "talk.json")
        assert len(written(tmp_path / "talk.json.state")) >= len(kept)
    for damage in (False, True):
        with load(chat_bundle) as model:
            session = model.session()
            if damage:
                for path in written(tmp_path / "talk.json.state"):
                    path.write_bytes(path.read_bytes()[:5000])
            session.load(tmp_path / "talk.json")
            kv = model._engine.kv.of_sessions.get(session._key)
            assert (kv is not None and kv.length > 100) is not damage
            session._messages = session._messages[:-2]
            assert session.respond("Go on", max_tokens=10).tokens == expected


def test_a_dropped_conversation_is_read_from_disk(chat_bundle: Path, tmp_path: Path) -> None:
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        session = model.session()
        first = session.respond("a" * 100, max_tokens=8)
        engine = model._engine
        # As a session that goes, or memory that runs short, drops it, before there was time to write it.
        model._owner.call(lambda: engine.kv._drop(engine.kv.of_sessions[session._key]))
        assert engine.kv.nbytes == 0
        session._messages = []
        again = session.respond("a" * 100, max_tokens=8)
        assert again.tokens == first.tokens
        assert again.stats.restored_tokens == again.stats.prompt_tokens - 1


def test_the_least_recently_used_leave_first(chat_bundle: Path, tmp_path: Path) -> None:
    texts = [[3 + at, *PROMPT] for at in range(4)]
    with load(chat_bundle, prompt_cache=tmp_path) as model:
        said(model, texts[0])
    one = sum(path.stat().st_size for path in written(tmp_path))
    with load(chat_bundle, prompt_cache=tmp_path, prompt_cache_bytes=2 * one + one // 2) as model:
        said(model, texts[1])
        assert said(model, texts[0])[1] == 150
        said(model, texts[2])
        # The first was used after the second.
        assert said(model, texts[0])[1] == 150
        assert said(model, texts[1])[1] < 150
    assert sum(path.stat().st_size for path in written(tmp_path)) <= 2 * one + one // 2
    with load(chat_bundle, prompt_cache=tmp_path, prompt_cache_bytes=1000) as model:
        assert said(model, texts[3])[1] == 0
    assert not written(tmp_path)
