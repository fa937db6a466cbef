"""Models with recurrent layers through the API: no way of running one changes its text."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.converters.convert import convert
from ondevice.errors import BackendUnavailableError, FlashReadError, OndeviceError, UnsupportedModelError
from ondevice.model.transformer import Transformer
from tests.support.bundles import EOS, write_byte_tokenizer
from tests.support.cached_texts import PROMPT, said, settle, written
from tests.support.families import CASES, write_model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q4 bundle of a small Qwen3.5 with a byte tokenizer and a chat template."""
    return made(tmp_path_factory.mktemp("hybrid"), "qwen3.5")


@pytest.fixture(scope="module")
def hybrid_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts."""
    return made(tmp_path_factory.mktemp("experts"), "qwen3.5 moe")


def made(folder: Path, case: str) -> Path:
    family, options = CASES[case]
    write_model(folder / "source", family, {**options, "vocab_size": 320})
    write_byte_tokenizer(folder / "source")
    return convert(folder / "source", folder / case.replace(" ", "-"), "q4")


WAYS: list[dict[str, Any]] = [
    {"threads": 2},
    {"prefill_chunk": 1, "threads": 1},
    {"prefill_chunk": 7},
    {"prefill_chunk": 64, "parallel": 3},
]


def test_no_way_of_running_it_changes_the_text(hybrid: Path, hybrid_experts: Path) -> None:
    for bundle in (hybrid, hybrid_experts):
        with load(bundle, threads=1) as model:
            expected = said(model)
        with pytest.raises(ondevice.BudgetError) as refused:
            load(bundle, dram_budget="1MB").close()
        for way in (*WAYS, {"dram_budget": refused.value.required_bytes + (4 << 20)}):
            with load(bundle, **way) as model:
                assert said(model) == expected, way


def test_a_chat_goes_on_and_goes_back(hybrid: Path, tmp_path: Path) -> None:
    def reply(session: ondevice.Session, text: str) -> tuple[int, ...]:
        return tuple(session.respond(text, max_tokens=20, logit_bias={EOS: -math.inf}).tokens)

    with load(hybrid) as model:
        session = model.session("Be brief. " * 12)
        first = reply(session, "Hello")
        branch = session.fork()
        others = reply(branch, "Something else")
        second = reply(session, "And again")
        session.save(tmp_path / "talk.json")
        assert written(tmp_path / "talk.json.state")
        third = reply(session, "And so on")
    with load(hybrid) as model:
        session = model.session()
        session.load(tmp_path / "talk.json")
        assert reply(session, "And so on") == third
        # A conversation that parts from an earlier one goes back to a checkpoint.
        again = model.session("Be brief. " * 12)
        assert (reply(again, "Hello"), reply(again, "Something else")) == (first, others)
        again._messages = again._messages[:-2]
        assert reply(again, "And again") == second


def test_a_prompt_cache_has_what_lies_before_a_checkpoint(hybrid: Path, tmp_path: Path) -> None:
    prompt = [*PROMPT, *PROMPT]
    with load(hybrid) as model:
        expected = said(model, prompt)[0]
        spacing = model._engine.kv.layout.states.spacing
    assert spacing < len(prompt)
    with load(hybrid, prompt_cache=tmp_path) as model:
        assert said(model, prompt) == (expected, 0)
        settle(model)
    for chunk in (512, 7):
        with load(hybrid, prompt_cache=tmp_path, prefill_chunk=chunk) as model:
            assert said(model, prompt) == (expected, (len(prompt) - 1) // spacing * spacing)


def test_logits_that_fail_end_the_texts_that_share_a_pass(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state can't go back by a token: the pass must not run again for what failed behind it."""
    logits, passes = Transformer.logits, [0]

    def failing(self: Transformer, *arguments: Any) -> Any:
        if passes[0] > 12:
            raise FlashReadError("made up")
        return logits(self, *arguments)

    run_each = Transformer.run_each

    def counted(self: Transformer, *arguments: Any) -> Any:
        passes[0] += 1
        return run_each(self, *arguments)

    monkeypatch.setattr(Transformer, "logits", failing)
    monkeypatch.setattr(Transformer, "run_each", counted)
    found: list[OndeviceError] = []

    def text(model: Model, first: int) -> None:
        with pytest.raises(FlashReadError, match="made up") as caught:
            model.generate(tokens=[first] * 100, max_tokens=200, logit_bias={EOS: -math.inf})
        found.append(caught.value)

    with load(hybrid, threads=1, parallel=2, max_context=400, prefill_chunk=32) as model:
        threads = [threading.Thread(target=text, args=(model, first), daemon=True) for first in (5, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 2
    assert passes[0] < 40


def test_the_plan_has_the_states(hybrid: Path) -> None:
    with load(hybrid, max_context=512) as model:
        layout = model._engine.kv.layout
        blocks = layout.blocks(512) * layout.block_bytes
        assert model.plan.kv_cache_bytes == blocks + (2 + 512 // layout.states.spacing) * layout.states.nbytes
        said(model, [*PROMPT, *PROMPT])
        assert model._engine.kv.nbytes <= model.plan.kv_cache_bytes


def test_what_it_cant_do_is_refused(hybrid: Path) -> None:
    with load(hybrid) as model:
        assert model.generate("Hello", max_tokens=8).stats.speculation == "off"
    for options in ({"speculation": "lookup"}, {"speculation": "resident"}, {"draft_model": hybrid}):
        with pytest.raises(UnsupportedModelError, match="take back"):
            load(hybrid, **options).close()  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailableError, match="recurrent layers"):
        load(hybrid, backend="mlx").close()
