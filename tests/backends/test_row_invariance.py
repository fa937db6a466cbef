"""Row invariance: widths are what ops do, faults in rows narrow them, and drafts keep to what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ondevice.backends.row_invariance import MAX_ROWS, RowOp, RowWidths, measured, width_of
from ondevice.errors import BackendUnavailableError
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import Root, grow
from tests.support.engines import always_draft
from tests.support.mlx_models import ON_GPU, break_products, loaded, nudged
from tests.support.paths import SHIPPED

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends import mlx_ops  # noqa: E402

PROMPT = "It was a cold morning, and the old man, the old man went to the"
DRAFTERS: dict[str, dict[str, Any]] = {
    "lookup": {},
    "recycling": {},
    "streams": {},
    "resident": {},
    "model": {"draft_model": SHIPPED},
}
CPU_DEVICE = pytest.mark.skipif(ON_GPU, reason="a GPU may be narrower by itself than the fault makes it")


def op(wrong: Callable[[int, int], bool], name: str = "op", kind: Any = "any") -> RowOp:
    """An op that gives row i of n other bits if wrong(i, n)."""
    values = np.arange(MAX_ROWS, dtype=np.float32)[:, None]

    def together(rows: int) -> Any:
        found = values[:rows].copy()
        for row in range(rows):
            if wrong(row, rows):
                found[row] = np.nextafter(found[row], np.float32(99))
        return found

    return RowOp(name, lambda row: values[row : row + 1], together, kind)


@pytest.mark.parametrize(
    ("wrong", "width"),
    [
        (lambda row, rows: False, MAX_ROWS),
        (lambda row, rows: rows > 5, 5),
        (lambda row, rows: rows > 5 and row == 3, 5),
        (lambda row, rows: rows == 6, 5),
        (lambda row, rows: rows == MAX_ROWS and row == 0, MAX_ROWS - 1),
        (lambda row, rows: rows > 1, 1),
    ],
)
def test_a_width_is_the_most_rows_up_to_which_no_bit_differs(wrong: Any, width: int) -> None:
    assert width_of(op(wrong)) == width


def test_drafts_are_as_wide_as_the_narrowest_op_that_they_are_part_of() -> None:
    ops = [
        op(lambda row, rows: rows > 9, "all"),
        op(lambda row, rows: rows > 12, "chain", "chain"),
        op(lambda row, rows: rows > 4, "tree", "tree"),
    ]
    widths, found = measured(iter(ops))
    assert (widths, found) == (RowWidths(9, 4), {"all": 9, "chain": 12, "tree": 4})
    assert (widths.nodes, widths.branches) == (4, True)
    widths, _ = measured([ops[0], op(lambda row, rows: True, "tree", "tree")])
    assert (widths.nodes, widths.branches) == (9, False)


def test_what_no_draft_depends_on_any_more_is_not_measured() -> None:
    """On a GPU each op takes kernels that are compiled first."""
    two, tree, chain = (
        op(lambda row, rows: rows > 1, "two"),
        op(lambda row, rows: rows > 1, "tree", "tree"),
        op(lambda row, rows: rows > 1, "chain", "chain"),
    )
    fine = op(lambda row, rows: False, "fine")
    assert measured([fine, two, tree]) == (RowWidths(1, 1), {"fine": MAX_ROWS, "two": 1})
    assert measured([tree, chain, fine]) == (RowWidths(1, 1), {"tree": 1, "chain": 1})
    assert measured([tree, fine]) == (RowWidths(MAX_ROWS, 1), {"tree": 1, "fine": MAX_ROWS})


def test_a_draft_that_must_not_branch_is_a_chain() -> None:
    def propose(path: Any) -> list[tuple[int, float]]:
        return [(7, 0.6), (8, 0.4), (9, 0.39)]

    def grown(branches: bool) -> list[int]:
        (draft,) = grow([Root(1, propose, 6, 5)], lambda nodes, chance: True, 6, branches=branches)
        return list(draft.parents)

    assert grown(False) == [-1, 0, 1, 2, 3, 4]
    assert grown(True) != grown(False)


def watch_trees(monkeypatch: pytest.MonkeyPatch, fault: bool) -> list[int]:
    """The rows of each tree that a model attends to. fault: trees have other last bits."""
    true, seen = mlx_ops.MlxOps.attend, []

    def attend(self: Any, qkv: Any, kv: Any, *where: Any, **options: Any) -> Any:
        found = true(self, qkv, kv, *where, **options)
        if options.get("tree") is None and (len(where) < 7 or where[6] is None):
            return found
        if kv.layout.config.num_layers > 1:  # a model's, not what is measured
            seen.append(qkv.shape[0])
        return nudged(found) if fault else found

    monkeypatch.setattr(mlx_ops.MlxOps, "attend", attend)
    return seen


def draft_as_much_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [MAX_ROWS])
    monkeypatch.setattr(TreePolicy, "begin", lambda policy: policy._max_nodes)


def texts(**options: Any) -> tuple[list[Any], Any]:
    """Greedy and sampled tokens, and the last text's stats."""
    with loaded(SHIPPED, sparsity="exact", **options) as model:
        greedy = model.generate(PROMPT, max_tokens=10)
        sampled = model.generate(PROMPT, max_tokens=10, temperature=0.8, seed=3)
        return [greedy.tokens, sampled.tokens], sampled.stats


@pytest.mark.fast("lookup")
@CPU_DEVICE
@pytest.mark.usefixtures("mlx_device", "rows_measured_anew")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_keep_to_the_width_that_a_fault_leaves(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_products(monkeypatch, rows=6)
    draft_as_much_as_fits(monkeypatch)
    widest = 0
    true = mlx_ops.MlxOps.attend

    def attend(self: Any, qkv: Any, kv: Any, layer: int, position: int, *rest: Any, **options: Any) -> Any:
        nonlocal widest
        if kv.layout.config.num_layers > 1 and position:
            widest = max(widest, qkv.shape[0])
        return true(self, qkv, kv, layer, position, *rest, **options)

    expected, _ = texts()
    monkeypatch.setattr(mlx_ops.MlxOps, "attend", attend)
    found, stats = texts(speculation=drafter, **DRAFTERS[drafter])
    assert found == expected
    assert stats.drafting.drafts > 0
    assert 1 < widest <= 5


@CPU_DEVICE
@pytest.mark.usefixtures("mlx_device", "rows_measured_anew")
def test_the_fault_would_change_texts_if_widths_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could not fail."""
    with loaded(SHIPPED, sparsity="dense") as model:
        alone = model.logits(list(range(5, 25)))
    break_products(monkeypatch, rows=6)
    with loaded(SHIPPED, sparsity="dense") as model:
        assert (model.logits(list(range(5, 25))) != alone).any()


@pytest.mark.slow
@CPU_DEVICE
@pytest.mark.usefixtures("mlx_device", "rows_measured_anew")
@pytest.mark.parametrize("fault", [True, False])
@pytest.mark.parametrize("drafter", ["recycling", "streams"])
def test_where_only_trees_differ_drafts_are_chains(
    drafter: str, fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = watch_trees(monkeypatch, fault)
    draft_as_much_as_fits(monkeypatch)
    expected, _ = texts()
    found, stats = texts(speculation=drafter)
    assert found == expected
    assert stats.drafting.drafts > 0
    assert bool(trees) != fault


@CPU_DEVICE
@pytest.mark.usefixtures("mlx_device", "rows_measured_anew")
def test_nothing_drafts_where_two_rows_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    break_products(monkeypatch, rows=2)
    for drafter, options in DRAFTERS.items():
        with pytest.raises(BackendUnavailableError, match=r"product .* so drafts could change the text"):
            loaded(SHIPPED, speculation=drafter, **options)
    with pytest.raises(BackendUnavailableError, match="draft_model"):
        loaded(SHIPPED, speculation="auto", draft_model=SHIPPED)
    with loaded(SHIPPED, speculation="auto") as model:
        assert model.generate(PROMPT, max_tokens=4).stats.speculation == "off"


@CPU_DEVICE
@pytest.mark.usefixtures("mlx_device", "rows_measured_anew")
def test_auto_drafts_on_mlx_and_reference_does_not() -> None:
    for backend, speculation in (("mlx", "auto"), ("reference", "off")):
        with loaded(SHIPPED, backend, speculation="auto") as model:
            assert model.generate(PROMPT, max_tokens=4).stats.speculation == speculation
    with pytest.raises(BackendUnavailableError, match="use backend="):
        loaded(SHIPPED, "reference", speculation="lookup")
