"""`ondevice.records.dataclass` beside the standard library's: equal objects, texts, hashes and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from functools import cached_property
from typing import Any

import pytest

from ondevice.records import dataclass


def classes(decorate: Callable[..., Any]) -> dict[str, Any]:
    """Classes of every form that there is."""

    @decorate(frozen=True)
    class Point:
        x: int
        y: int = 2
        """Its height."""
        names: list[str] = field(default_factory=list, compare=False)
        hidden: str = field(default="h", repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError(self.x)

        @cached_property
        def twice(self) -> int:
            return 2 * self.x

    @decorate(frozen=True)
    class Further(Point):
        z: int = 3

        def __repr__(self) -> str:
            return "further"

    @decorate
    class Count:
        of: str
        seen: set[int] = field(default_factory=set)
        total: int = field(init=False, default=0)

    @decorate(frozen=True, eq=False)
    class Same:
        x: int

    @decorate(frozen=True)
    class Empty:
        pass

    return {it.__name__: it for it in (Point, Further, Count, Same, Empty)}


OURS, THEIRS = classes(dataclass), classes(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Point", (1,), {}),
    ("Point", (1, 5), {"names": ["a"], "hidden": "x"}),
    ("Point", (), {"x": 1, "y": 2}),
    ("Further", (1, 2, [], "h", 9), {}),
    ("Further", (1,), {}),
    ("Count", ("a",), {"seen": {1}}),
    ("Count", ("a",), {}),
    ("Same", (1,), {}),
    ("Empty", (), {}),
]


def test_objects_are_as_the_standard_librarys() -> None:
    ours = [OURS[name](*args, **kwargs) for name, args, kwargs in CALLS]
    theirs = [THEIRS[name](*args, **kwargs) for name, args, kwargs in CALLS]
    assert [repr(it) for it in ours] == [repr(it) for it in theirs]
    assert [dataclasses.asdict(it) for it in ours] == [dataclasses.asdict(it) for it in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert [mine == it for it in ours] == [other == it for it in theirs]
        assert (type(mine).__hash__ is None) == (type(other).__hash__ is None)
        assert dataclasses.replace(mine) == mine or "Same" in repr(mine)
    assert len({it for it in ours if type(it).__hash__}) == len({it for it in theirs if type(it).__hash__})
    assert OURS["Point"](1).names is not OURS["Point"](1).names
    assert OURS["Point"](4).twice == 8


WRONG = [("Point", ()), ("Point", (1, 2, [], "h", 5)), ("Empty", (1,)), ("Count", ("a", set(), 1))]


@pytest.mark.parametrize(("name", "args"), WRONG)
def test_wrong_arguments_are_refused(name: str, args: tuple[Any, ...]) -> None:
    for made in (OURS, THEIRS):
        with pytest.raises(TypeError):
            made[name](*args)
    with pytest.raises(ValueError, match="-1"):
        OURS["Point"](-1)


def test_a_frozen_object_refuses_to_change() -> None:
    class Subclass(OURS["Point"]):  # type: ignore[misc]
        pass

    for point in (OURS["Point"](1), OURS["Further"](1), Subclass(1)):
        with pytest.raises(FrozenInstanceError, match="'x'"):
            point.x = 2
        with pytest.raises(FrozenInstanceError, match="'x'"):
            del point.x
    with pytest.raises(FrozenInstanceError):
        OURS["Point"](1).other = 2
    free = Subclass(1)
    free.other = 2
    assert free.other == 2
    count = OURS["Count"]("a")
    count.of = "b"
    assert count == OURS["Count"]("b")
