"""A stored prefix is read in pieces, between which the other texts' passes go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.callbacks import IsCancelled
from ondevice.config import SamplingConfig
from ondevice.generate import Event
from ondevice.model.shared_passes import PassRequest
from ondevice.model.transformer import Transformer
from ondevice.prompt_cache import store
from ondevice.prompt_cache.store import PromptCache
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

    def noted(owner: type, name: str, word: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            found.append(word)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(PromptCache, "_read", "read")
    noted(Transformer, "run", "pass")
    noted(Transformer, "run_each", "pass")
    return found


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
