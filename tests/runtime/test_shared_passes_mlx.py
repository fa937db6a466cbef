"""Texts that share passes on MLX: each has the bits that it has alone, in no more rows than are measured."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from ondevice.backends.row_invariance import MAX_ROWS
from ondevice.model.shared_passes import SharedPasses
from tests.support.chat import squeeze
from tests.support.engines import always_draft
from tests.support.mlx_models import ON_GPU, break_products, loaded
from tests.support.paths import SHIPPED
from tests.support.shared_texts import ENDS, Parts, alone, asked, at_once, said, together

pytest.importorskip("mlx.core", exc_type=ImportError)

pytestmark = [
    pytest.mark.usefixtures("mlx_device"),
    pytest.mark.skipif(ON_GPU, reason="a GPU's width may be 1, and then texts don't share passes"),
]
MODES = [
    ("dense", "lookup"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("exact", "auto"), ("predicted", "off"), ("experts", "lookup"))
    ),
]


def requests_of(model: Any, most: int = 9) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of all lengths, of which some repeat themselves, with at most `most` tokens behind them."""
    given = asked(model, 4)
    given += [([7, 8, 9, 7, 8, 9, 7 + at], {**ENDS, "temperature": 0.5 * at, "seed": 7}) for at in range(2)]
    return [(ids, options | {"max_tokens": min(most, options["max_tokens"])}) for ids, options in given]


def widest(found: Parts) -> int:
    return max(sum(rows for rows, _ in each) for each in found)


@pytest.mark.parametrize(("mode", "drafter"), MODES)
def test_texts_made_together_have_the_bits_of_each_alone(
    mode: str,
    drafter: str,
    parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Greedy and with seeds, from flash where memory is short, with prompts of all lengths, and drafts."""
    bundle = request.getfixturevalue("expert_bundle") if mode == "experts" else SHIPPED
    own: dict[str, Any] = {} if mode == "experts" else {"sparsity": mode}
    with loaded(bundle, prefill_chunk=29, **own) as model:
        requests = requests_of(model)
        expected = alone(model, requests)
    assert not parts
    if drafter != "off":
        always_draft(monkeypatch, [MAX_ROWS, 5, 9])
    with loaded(bundle, prefill_chunk=29, parallel=4, speculation=drafter, **own) as model:
        assert model.runtime.parallel == 4
        squeeze(model)
        assert together(model, requests) == expected
    assert max(map(len, parts)) == 4
    assert widest(parts) <= MAX_ROWS
    assert any(drafted for each in parts for _, drafted in each) == (drafter != "off")


@pytest.mark.slow
@pytest.mark.usefixtures("rows_measured_anew")
def test_no_more_rows_share_a_pass_than_a_fault_leaves(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts take turns, chunks of prompts run whole, and lost memory is computed to the same bits."""
    break_products(monkeypatch, rows=4)
    options: dict[str, Any] = {"sparsity": "dense", "prefill_chunk": 29}
    with loaded(SHIPPED, **options) as model:
        requests = [(ids, own | {"top_logprobs": 2}) for ids, own in requests_of(model, 12)]
        expected = alone(model, requests)
    with loaded(SHIPPED, parallel=6, **options) as model:
        emptied = empty_some(model, every=7)
        assert together(model, requests) == expected
    assert max(emptied) > 8
    assert widest(parts) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("rows_measured_anew")
def test_the_fault_would_change_texts_if_passes_were_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could not fail."""
    break_products(monkeypatch, rows=4)
    monkeypatch.setattr(SharedPasses, "_is_limited", lambda passes: False)
    options: dict[str, Any] = {"sparsity": "dense", "prefill_chunk": 29}
    with loaded(SHIPPED, **options) as model:
        requests = [(ids, own | {"top_logprobs": 2}) for ids, own in requests_of(model, 6)]
        expected = alone(model, requests)
    with loaded(SHIPPED, parallel=6, **options) as model:
        assert together(model, requests) != expected


@pytest.mark.usefixtures("rows_measured_anew")
def test_where_two_rows_differ_there_is_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    break_products(monkeypatch, rows=2)
    with loaded(SHIPPED, parallel=4) as model:
        assert model.runtime.parallel == 1


@pytest.mark.slow
def test_texts_that_leave_harm_no_other(parts: Parts) -> None:
    with loaded(SHIPPED) as model:
        requests = requests_of(model)
        expected = alone(model, requests)
    with loaded(SHIPPED, parallel=3) as model:

        def leave(at: int, most: int) -> list[Any]:
            ids, options = requests[at]
            events = model.stream(tokens=ids, **options)
            found = said([event for event, _ in zip(events, range(most), strict=False)])
            events.close()
            return found

        works = [partial(leave, at, most) for at, most in enumerate((99, 2, 99, 1, 4, 99))]
        found = at_once(works)
    assert max(map(len, parts)) > 1
    for own, whole, most in zip(found, expected, (99, 2, 99, 1, 4, 99), strict=True):
        assert own == whole[:most]


def empty_some(model: Any, every: int) -> list[int]:
    """Have one text or another lose its keys and values every `every` passes. Returns their lengths."""
    engine, passes, found = model._engine, itertools.count(1), list[int]()
    own = engine._before_pass

    def before(batch: Any) -> None:
        own(batch)
        others = [kv for kv in engine.kv._in_use[1:] if kv.length > 8]
        if next(passes) % every == 0 and others:
            kv = others[len(found) % len(others)]
            found.append(kv.length)
            kv.truncate(0)

    engine._generator = replace(engine._generator, before_pass=before)
    return found
