"""Drafting by streams, half-way through a pass: which nodes get streams there, and which go no further."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ondevice.backends.base import Float32
from ondevice.model.stream_pruning import PrunedDraft
from ondevice.speculation import drafters
from ondevice.speculation.tree import DRAFT_NODES, STREAM_ROWS, Draft
from tests.speculation.test_stream_drafter import COUNT, VOCAB, FakeTransformer, drafter_of, numbered, prepare

DRAFT = Draft((9, 1, 2, 3, 4, 5), (-1, 0, 1, 1, 0, 0), (1.0, 0.6, 0.1, 0.08, 0.18, 0.16))
"""The accepted path ends in the root with a chance of 0.06, and then in 0.42, 0.1, 0.08, 0.18 and 0.16."""


def pruned(
    draft: Draft,
    row_share: float = 0.0,
    places: int = 64,
    pruning: Float32 | None = None,
    draft_tokens: NDArray[np.int64] | None = None,
    **options: Any,
) -> PrunedDraft:
    drafter = drafter_of(FakeTransformer(pruning=pruning, draft_tokens=draft_tokens), **options)
    prepare(drafter, places)
    prune = drafter.pruner(draft, row_share)
    assert prune is not None
    return prune(numbered(*range(len(draft))))


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ({"max_ends": 1}, [1]),
        ({"max_ends": 2}, [1, 4]),
        ({}, [1, 4]),
        ({"max_ends": 3}, [1, 4, 5]),
        ({"max_ends": 6}, [1, 4, 5]),
        ({"max_ends": 6, "min_end_chance": 0.09}, [1, 2, 4, 5]),
        # Six nodes' streams would be 18 rows, and STREAM_ROWS is 16.
        ({"max_ends": 6, "min_end_chance": 0.0}, [1, 2, 3, 4, 5]),
        ({"max_ends": 6, "min_end_chance": 0.17}, [1, 4]),
        ({"max_ends": 0}, []),
    ],
)
def test_the_likeliest_ends_get_streams(options: dict[str, Any], streams: list[int]) -> None:
    chosen = pruned(DRAFT, **options)
    assert (list(chosen.tokens), list(chosen.streams)) == (list(range(6)), streams)


def test_the_dearer_rows_are_the_likelier_an_end_must_be() -> None:
    """Three rows of 0.3 plain passes each, against a pass of their own of 1.6: from 0.5625 on."""
    assert list(pruned(DRAFT, row_share=0.3).streams) == []
    for chance, streams in ((0.56, []), (0.57, [1])):
        assert list(pruned(Draft((9, 1), (-1, 0), (1.0, chance)), row_share=0.3).streams) == streams
    # 3 * 0.1 / 1.2 = 0.25
    assert list(pruned(DRAFT, row_share=0.1).streams) == [1]
    assert list(pruned(DRAFT, row_share=0.06).streams) == [1, 4]


@pytest.mark.parametrize(("places", "streams"), [(4, []), (8, []), (9, [1]), (11, [1]), (12, [1, 4])])
def test_streams_have_the_places_that_the_draft_leaves(places: int, streams: list[int]) -> None:
    """Of the cache, or of a backend on which rows of wider passes have other bits."""
    assert list(pruned(DRAFT, places=places).streams) == streams
    assert list(pruned(DRAFT, max_rows=places).streams) == streams


def test_a_backend_that_a_tree_changes_has_no_streams_in_a_draft_s_pass() -> None:
    assert list(pruned(DRAFT, max_rows=0).streams) == []


@pytest.mark.parametrize(("rows", "streams"), [(2, []), (3, [1]), (5, [1]), (6, [1, 4])])
def test_streams_have_rows_of_their_own(
    rows: int, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many nodes the draft has: they don't count."""
    monkeypatch.setattr(drafters.streams, "STREAM_ROWS", rows)
    assert list(pruned(DRAFT).streams) == streams


def test_the_largest_draft_has_rows_for_streams() -> None:
    chain = Draft(tuple(range(DRAFT_NODES)), tuple(range(-1, DRAFT_NODES - 1)), (1.0,) * DRAFT_NODES)
    chosen = pruned(chain, max_ends=9, min_end_chance=0.0)
    assert len(chosen.tokens) == DRAFT_NODES
    assert len(chosen.streams) == STREAM_ROWS // COUNT


def test_a_pass_without_draft_tokens_gets_no_streams() -> None:
    assert pruned(Draft((9,), (-1,)), pruning=np.zeros((1, VOCAB), np.float32), pruning_threshold=0.5) == (
        PrunedDraft([0])
    )


def pruning_logits(chances: Mapping[tuple[int, int], float]) -> Float32:
    """(6, V) by (node, token); the rest of each row shares what is left."""
    found = np.zeros((len(DRAFT), VOCAB))
    for node in range(len(DRAFT)):
        own = {token: chance for (at, token), chance in chances.items() if at == node}
        found[node] = (1 - sum(own.values())) / (VOCAB - len(own))
        found[node, list(own)] = list(own.values())
    # What is added to all of a row changes nothing, however large.
    return (np.log(found) + np.arange(len(DRAFT))[:, None] * 300).astype(np.float32)


CHANCES = {(0, 1): 0.5, (1, 2): 0.3, (1, 3): 0.1, (0, 4): 0.2, (0, 5): 0.05}
"""By the pruning adapter, of every node of DRAFT behind its parent."""


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (0.01, [0, 1, 2, 3, 4, 5]),
        (0.07, [0, 1, 2, 3, 4]),
        (0.15, [0, 1, 2, 4]),
        (0.25, [0, 1, 2]),
        (0.4, [0, 1]),
        # With the subtree: node 2 would stay by itself.
        (0.6, [0]),
    ],
)
def test_what_the_pruning_adapter_does_not_expect_goes_no_further(threshold: float, kept: list[int]) -> None:
    logits = pruning_logits(CHANCES)
    chosen = pruned(DRAFT, pruning=logits, pruning_threshold=threshold, max_ends=0)
    assert list(chosen.tokens) == kept


def test_a_node_that_goes_takes_what_is_behind_it() -> None:
    logits = pruning_logits(CHANCES | {(0, 1): 0.01})
    chosen = pruned(DRAFT, pruning=logits, pruning_threshold=0.04, max_ends=6, min_end_chance=0.17)
    assert list(chosen.tokens) == [0, 4, 5]
    # Indices are into those that stay; the root is likelier to be the end by what went.
    assert list(chosen.streams) == [0, 1]
    chosen = pruned(DRAFT, pruning=logits, pruning_threshold=0.04, max_ends=6, places=8)
    assert list(chosen.streams) == [0]


def test_ends_are_counted_among_those_that_stay() -> None:
    draft = Draft((9, 1, 4, 5), (-1, 0, 0, 2), (1.0, 0.2, 0.75, 0.4))
    logits = pruning_logits({(0, 1): 0.01, (0, 4): 0.5, (2, 5): 0.5})
    found = [
        pruned(draft, pruning=logits, pruning_threshold=0.04, max_ends=n, min_end_chance=0.0) for n in (1, 2)
    ]
    # 0.25, 0.35 and 0.4.
    assert [(list(chosen.tokens), list(chosen.streams)) for chosen in found] == [
        ([0, 2, 3], [2]),
        ([0, 2, 3], [1, 2]),
    ]


def test_a_draft_head_prunes_only_what_it_knows() -> None:
    """Chances are those among its tokens: of 1, 2, 3 and 4, each twice as high as 0.5, 0.3, 0.1 and 0.2."""
    logits, listed = pruning_logits(CHANCES), np.array([1, 2, 3, 4, *range(20, 40)])
    every = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    own = every[:, listed] / every[:, listed].sum(axis=1, keepdims=True)
    first, second, third, fourth = own[0, 0], own[1, 1], own[1, 2], own[0, 3]
    assert first > second > fourth > third > 0.1
    for threshold, kept in (
        (0.05, [0, 1, 2, 3, 4, 5]),
        ((third + fourth) / 2, [0, 1, 2, 4, 5]),
        ((fourth + second) / 2, [0, 1, 2, 5]),
        (0.99, [0, 5]),
    ):
        # The head lacks token 5, of which nothing is known.
        chosen = pruned(DRAFT, pruning=logits, draft_tokens=listed, pruning_threshold=threshold, max_ends=0)
        assert list(chosen.tokens) == kept


def test_nothing_is_pruned_unasked_or_without_an_adapter() -> None:
    every = list(range(6))
    hopeless = np.full((6, VOCAB), -math.log(VOCAB), np.float32)
    assert list(pruned(DRAFT, pruning=hopeless).tokens) == every
    assert list(pruned(DRAFT, pruning=hopeless, pruning_threshold=0.5).tokens) == [0]
    assert list(pruned(DRAFT, pruning_threshold=0.5).tokens) == every
