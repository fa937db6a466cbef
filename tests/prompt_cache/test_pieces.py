"""States are read and written in pieces, between which the other texts' passes go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.callbacks import Cancelled, IsCancelled
from ondevice.config import SamplingConfig
from ondevice.generate import Event
from ondevice.model.shared_passes import PassRequest
from ondevice.model.transformer import Transformer
from ondevice.prompt_cache import store
from ondevice.prompt_cache.store import PromptCache
from ondevice.runtime.engine import Engine
from tests.support.cached_texts import PROMPT, said

OPTIONS: dict[str, Any] = {"threads": 1, "speculation": "off", "parallel": 2}
OTHER = [5, 9, 4, 77]


@pytest.fixture
def cached(chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prompt cache that has the prompt, in three files, of which a piece is one."""
    monkeypatch.setattr(store, "PIECE_SECONDS", 0.0)
    with load(chat_bundle, prompt_cache=tmp_path, **OPTIONS) as model:
        said(model)
    return tmp_path


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model does, in its order: `read` for a file, `pass` for a pass."""
    found: list[str] = []
    note(monkeypatch, found, PromptCache, "_read", "read")
    note(monkeypatch, found, Transformer, "run", "pass")
    note(monkeypatch, found, Transformer, "run_each", "pass")
    return found


def note(monkeypatch: pytest.MonkeyPatch, found: list[str], owner: type, name: str, word: str) -> None:
    """Have every call of a method add a word to `found`."""
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        found.append(word)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


class Beside:
    """A text that runs while another one is read from the disk."""

    def __init__(self, model: Model, count: int) -> None:
        self.tokens: list[int | None] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(model, count))

    def _run(self, model: Model, count: int) -> None:
        for event in model.stream(tokens=OTHER, max_tokens=count):
            self.tokens.append(event.token)
            self._begun.set()

    def __enter__(self) -> Beside:
        self._thread.start()
        assert self._begun.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_the_passes_of_others_go_between_two_pieces(
    chat_bundle: Path, cached: Path, order: list[str]
) -> None:
    with load(chat_bundle, **OPTIONS) as model:
        expected, others = said(model)[0], [it.token for it in model.stream(tokens=OTHER, max_tokens=200)]
    with load(chat_bundle, prompt_cache=cached, **OPTIONS) as model:
        order.clear()
        with Beside(model, 200) as beside:
            assert said(model) == (expected, 149)
        assert beside.tokens == others
    first = order.index("read")
    assert order[first : first + 5] == ["read", "pass", "read", "pass", "read"]


def test_a_text_alone_loses_no_pass_to_its_pieces(chat_bundle: Path, cached: Path, order: list[str]) -> None:
    with load(chat_bundle, prompt_cache=cached, **OPTIONS) as model:
        order.clear()
        said(model, count=3)
    # The prompt's last token, and then one for each but the last.
    assert order == ["read"] * 3 + ["pass"] * 3


def test_a_text_is_cancelled_between_two_pieces(chat_bundle: Path, cached: Path, order: list[str]) -> None:
    with load(chat_bundle, prompt_cache=cached, **OPTIONS) as model:
        order.clear()
        items = model._owner.call(lambda: list(_steps(model, lambda: len(order) == 1)))
    assert [it.finish_reason for it in items if isinstance(it, Event)] == ["cancelled"]
    assert order == ["read"]


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_text_that_loses_its_memory_between_two_pieces_is_computed(
    chat_bundle: Path, cached: Path, pieces: int
) -> None:
    def tokens(emptied: int) -> list[int | None]:
        found, asked = [], 0
        for item in _steps(model):
            if isinstance(item, Event):
                found.append(item.token)
            elif not item.batch.tokens:
                asked += 1
                if asked == emptied:
                    item.kv.truncate(0)
        assert asked == (emptied or 2)
        return found

    with load(chat_bundle, prompt_cache=cached, **OPTIONS) as model:
        expected = model._owner.call(lambda: tokens(0))
        assert model._owner.call(lambda: tokens(pieces)) == expected


def test_a_session_is_written_and_read_between_the_passes_of_others(
    chat_bundle: Path, tmp_path: Path, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PIECE_SECONDS", 0.0)
    note(monkeypatch, order, PromptCache, "_write", "write")
    saved = tmp_path / "talk.json"
    with load(chat_bundle, **OPTIONS) as model:
        others = [it.token for it in model.stream(tokens=OTHER, max_tokens=200)]
        session = model.session()
        session.respond("a" * 150, max_tokens=4)
        with Beside(model, 200) as beside:
            order.clear()
            session.save(saved)
            written = order.copy()
        assert beside.tokens == others
        expected = session.respond("Go on", max_tokens=6).tokens
    with load(chat_bundle, **OPTIONS) as model:
        session = model.session()
        with Beside(model, 200) as beside:
            order.clear()
            session.load(saved)
            read = order.copy()
        assert beside.tokens == others
        assert session.respond("Go on", max_tokens=6).tokens == expected
    for found, word in ((written, "write"), (read, "read")):
        first = found.index(word)
        assert found[first : first + 5] == [word, "pass", word, "pass", word]


@pytest.mark.parametrize("end", ["emptied", "rewound", "grown", "cancelled"])
def test_a_session_that_changes_while_it_is_written(
    chat_bundle: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder keeps what was its beginning then; what is gone is computed again."""
    monkeypatch.setattr(store, "PIECE_SECONDS", 0.0)
    with load(chat_bundle, **OPTIONS) as model:
        engine = model._engine
        model._owner.call(lambda: _fill(engine, 1, PROMPT))
        others = [*PROMPT[:70], 9, 9, 9]

        def write() -> int:
            steps = engine.save_state(1, tmp_path, lambda: False)
            request = next(steps)
            match end:
                case "emptied":
                    request.kv.truncate(0)
                case "rewound":
                    _fill(engine, 1, others)
                case "grown":
                    _fill(engine, 1, [*PROMPT, *others])
            if end == "cancelled":
                with pytest.raises(StopIteration):
                    steps.throw(Cancelled())
            return len(list(steps))

        def read(tokens: list[int]) -> int:
            list(engine.load_state(2, tokens, tmp_path, lambda: False))
            return engine.kv.state_of(2).length

        assert (model._owner.call(write) > 0) == (end == "grown")
        whole = len(PROMPT) + len(others)
        assert model._owner.call(lambda: read([*PROMPT, *others])) == (whole if end == "grown" else 64)


def _fill(engine: Engine, key: int, tokens: list[int]) -> None:
    """Have the cache of a key hold these tokens."""
    with engine.kv.use(key) as kv:
        engine.kv.rewind(kv, tokens)
        engine._generator.transformer.run(ForwardBatch(tokens[kv.length :]), kv)


def _steps(model: Model, cancelled: IsCancelled = lambda: False) -> Iterator[Event | PassRequest]:
    """The items of a text, whose passes are answered here, on the owner thread."""
    engine = model._engine
    steps = engine.steps(None, PROMPT, SamplingConfig(max_tokens=6), cancelled)
    answer: Any = None
    while True:
        try:
            item = steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer)
        except StopIteration:
            return
        yield item
        answer = engine._answered([item])[0] if isinstance(item, PassRequest) else None
