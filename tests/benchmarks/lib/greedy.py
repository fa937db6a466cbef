"""Verification of a chain of draft tokens by a greedy model."""

from __future__ import annotations


def verified(draft: list[int], found: list[int], end: set[int]) -> list[int]:
    """The tokens that a pass gives. found: the likeliest token after the root and after each draft token."""
    right = 0
    while right < len(draft) and draft[right] == found[right] and found[right] not in end:
        right += 1
    return found[: right + 1]
