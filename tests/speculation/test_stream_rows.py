"""Drafting by streams, which nodes of a draft get streams in its pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ondevice.speculation import drafters
from ondevice.speculation.tree import DRAFT_NODES, STREAM_ROWS, Draft
from tests.speculation.test_stream_drafter import COUNT, FakeTransformer, drafter_of, prepare

DRAFT = Draft((9, 1, 2, 3, 4, 5), (-1, 0, 1, 1, 0, 0), (1.0, 0.6, 0.1, 0.08, 0.18, 0.16))
"""The accepted path ends in the root with a chance of 0.06, and then in 0.42, 0.1, 0.08, 0.18 and 0.16."""


def streamed(draft: Draft, row_share: float = 0.0, places: int = 64, **options: Any) -> Sequence[int] | None:
    drafter = drafter_of(FakeTransformer(), **options)
    prepare(drafter, places)
    return drafter.streamed(draft, row_share)


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
    assert streamed(DRAFT, **options) == streams


def test_the_dearer_rows_are_the_likelier_an_end_must_be() -> None:
    """Three rows of 0.3 plain passes each, against a pass of their own of 1.6: from 0.5625 on."""
    assert streamed(DRAFT, row_share=0.3) == []
    for chance, streams in ((0.56, []), (0.57, [1])):
        assert streamed(Draft((9, 1), (-1, 0), (1.0, chance)), row_share=0.3) == streams
    # 3 * 0.1 / 1.2 = 0.25
    assert streamed(DRAFT, row_share=0.1) == [1]
    assert streamed(DRAFT, row_share=0.06) == [1, 4]


@pytest.mark.parametrize(("places", "streams"), [(4, []), (8, []), (9, [1]), (11, [1]), (12, [1, 4])])
def test_streams_have_the_places_that_the_draft_leaves(places: int, streams: list[int]) -> None:
    """Of the cache, or of a backend on which rows of wider passes have other bits."""
    assert streamed(DRAFT, places=places) == streams
    assert streamed(DRAFT, max_rows=places) == streams


def test_a_backend_that_a_tree_changes_has_no_streams_in_a_draft_s_pass() -> None:
    assert streamed(DRAFT, max_rows=0) == []


@pytest.mark.parametrize(("rows", "streams"), [(2, []), (3, [1]), (5, [1]), (6, [1, 4])])
def test_streams_have_rows_of_their_own(
    rows: int, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many nodes the draft has: they don't count."""
    monkeypatch.setattr(drafters.streams, "STREAM_ROWS", rows)
    assert streamed(DRAFT) == streams


def test_the_largest_draft_has_rows_for_streams() -> None:
    chain = Draft(tuple(range(DRAFT_NODES)), tuple(range(-1, DRAFT_NODES - 1)), (1.0,) * DRAFT_NODES)
    assert len(streamed(chain, max_ends=9, min_end_chance=0.0) or ()) == STREAM_ROWS // COUNT


def test_a_pass_without_draft_tokens_gets_no_streams() -> None:
    assert streamed(Draft((9,), (-1,))) == ()
