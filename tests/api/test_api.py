"""The Python API over small bundles: results, logits, arguments, loading, damage."""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.budget import sizes
from ondevice.config import SamplingConfig
from ondevice.errors import (
    BackendUnavailableError,
    ContextOverflowError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
    WrongThreadError,
)
from tests.support.bundles import CONTEXT, EOS, VOCAB_SIZE
from tests.support.chat import PROMPT, squeeze

LAST_LAYER = "neurons-00002.safetensors"


def test_importing_the_package_imports_nothing_else_and_is_fast() -> None:
    program = (
        "import sys, time; before = set(sys.modules); start = time.process_time(); import ondevice\n"
        "seconds = time.process_time() - start\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "heavy = {'numpy', 'mlx', 'asyncio', 'click', 'jinja2', 'safetensors', 'platformdirs'}\n"
        "assert not new & heavy, new\n"
        "assert seconds < 0.15, seconds\n"
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


def test_a_generation_says_the_seed_that_it_drew(model: Model) -> None:
    drawn = [model.generate(PROMPT, max_tokens=12, temperature=1.0) for _ in range(2)]
    assert drawn[0].stats.seed != drawn[1].stats.seed
    for response in drawn:
        again = model.generate(PROMPT, max_tokens=12, temperature=1.0, seed=response.stats.seed)
        assert again.tokens == response.tokens
    assert model.generate(PROMPT, max_tokens=2, temperature=1.0, seed=0).stats.seed == 0
    assert model.generate(PROMPT, max_tokens=2, seed=5).stats.seed is None
    reply = model.session().respond("Hello", max_tokens=2, temperature=1.0)
    assert reply.stats.seed is not None


def test_a_text_that_the_context_ends_says_so(model: Model) -> None:
    cut = model.generate(tokens=[1] * (CONTEXT - 3), max_tokens=9, logit_bias={EOS: -math.inf})
    assert (cut.finish_reason, len(cut.tokens), cut.stats.context_full) == ("length", 3, True)
    asked = model.generate(tokens=[1] * 8, max_tokens=3, logit_bias={EOS: -math.inf})
    assert (asked.finish_reason, asked.stats.context_full) == ("length", False)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.chat_ids("hi"),
        lambda model: model.chat_ids(5),
        lambda model: model.chat_ids(["hi"]),
        lambda model: model.tokenizer.encode(5),
        lambda model: model.tokenizer.decode(5),
        lambda model: model.tokenizer.decode([10**9]),
        lambda model: model.tokenizer.decode([-1]),
        lambda model: model.tokenizer.decode(["a"]),
        lambda model: model.plan.with_budget("4GB"),
        lambda model: model.generate("a", sampling=5),
    ],
)
def test_wrong_types_are_usage_errors(model: Model, call: Callable[[Model], object]) -> None:
    with pytest.raises(UsageError):
        call(model)


def test_prompts_of_a_wrong_type_never_become_work(model: Model) -> None:
    for wrong in ("ab", [1.5], [None], 5):
        for call in (model.stream, model.astream, model.logits, model.score):
            with pytest.raises(UsageError, match="integers"):
                call(**{"tokens": wrong})
    assert model._prompt_ids(None, np.array([3, 4], np.int32), True, None) == [3, 4]  # type: ignore[arg-type]


def test_logits_are_those_that_generation_follows(model: Model) -> None:
    ids = model.tokenizer.encode(PROMPT)
    logits = model.logits(ids)
    assert logits.shape == (len(ids), VOCAB_SIZE)
    assert logits.dtype == np.float32
    assert model.generate(tokens=ids, max_tokens=1).tokens == (int(logits[-1].argmax()),)


def test_logits_beyond_the_context_are_refused_before_their_memory_is_asked_for(model: Model) -> None:
    with pytest.raises(ContextOverflowError, match="score the text in shorter pieces"):
        model.logits([1] * (10**7))


def test_long_logits_are_computed_in_pieces_with_equal_bits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [(7 * i) % 256 for i in range(100)]
    whole = model.logits(ids)
    monkeypatch.setattr(sizes, "LOGITS_BYTES", 4 * VOCAB_SIZE * 3)
    assert np.array_equal(model.logits(ids), whole)


def test_score_is_the_mean_of_the_log_probabilities(model: Model) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 12
    progress: list[int] = []
    score = model.score(text, on_progress=progress.append)
    ids = model.tokenizer.encode(text)
    assert score.tokens == len(ids) - 1 > CONTEXT
    assert progress[-1] == score.tokens
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
        ({"tokens": [1 << 70]}, UsageError),
        ({"prompt": "a", "logit_bias": {1 << 70: 1.0}}, UsageError),
        ({"prompt": "a", "logit_bias": {-1: 1.0}}, UsageError),
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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "reference", "speculation": "lookup"}, BackendUnavailableError),
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
        # Random weights amplify the 8-bit rounding of activations; single logits are off by a sixth.
        assert np.std(expected - found) < 0.1 * np.std(expected)
        assert reference.generate(PROMPT, max_tokens=2).stats.backend == "reference"


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
    bias = {EOS: -math.inf}
    with load(copy) as model, open(copy / LAST_LAYER, "r+b") as file:
        squeeze(model)
        expected = model.generate(PROMPT, max_tokens=60, logit_bias=bias).tokens
        assert model.stats.neuron_cache_hit_rate < 1.0
        file.seek(-700, 2)
        good = file.read(1)
        for byte in (bytes([good[0] ^ 255]), good):
            file.seek(-700, 2)
            file.write(byte)
            file.flush()
            if byte != good:
                with pytest.raises(ondevice.FlashReadError, match=LAST_LAYER):
                    model.generate(PROMPT, max_tokens=60, logit_bias=bias)
                assert model._engine.kv.nbytes == 0
        assert model.generate(PROMPT, max_tokens=60, logit_bias=bias).tokens == expected


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


def test_an_engine_runs_on_its_owners_thread_only(model: Model) -> None:
    """Elsewhere it refuses before it touches anything: the owner may be filling the cache ahead."""
    expected = model.generate(PROMPT, max_tokens=8).tokens
    engine, tokens = model._engine, model.tokenizer.encode(PROMPT)
    kv = engine.kv.new_state()
    uses: list[Callable[[], Any]] = [
        lambda: engine._generator.transformer.forward(tokens, kv),
        lambda: engine._generator.transformer.run(ForwardBatch(tokens, last_only=True), kv),
        lambda: next(engine.generate(None, tokens, SamplingConfig(), lambda: False)),
        lambda: next(engine.logits(tokens, lambda: False)),
        lambda: engine.fork(0, 1),
        lambda: engine.set_budget(1 << 40),
        lambda: engine.shift_budget(1 << 40),
        engine.fill_ahead,
    ]
    for use in uses:
        with pytest.raises(WrongThreadError, match="MainThread"):
            use()
    assert (kv.length, engine.kv.nbytes) == (0, 0)
    assert model._owner.call(lambda: engine._generator.transformer.forward(tokens, kv)) is not None
    model._owner.call(lambda: kv.truncate(0))
    assert model.generate(PROMPT, max_tokens=8).tokens == expected
