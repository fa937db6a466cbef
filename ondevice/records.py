"""`dataclass`, like the standard library's, but four times as fast to create classes.

The standard library compiles six methods of every frozen class, a third of the time to load a model. Here
only `__init__` is compiled; the others are closures over the names of the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, eq: bool = True) -> Any:
        """A class decorator with these options of `dataclasses.dataclass`."""
        if cls is None:
            return lambda decorated: _with_methods(decorated, frozen, eq)
        return _with_methods(cls, frozen, eq)


def _with_methods(cls: type, frozen: bool, eq: bool) -> type:
    """The class with fields and methods added. Methods that it defines stay."""
    given = set(vars(cls))
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    methods: dict[str, Any] = {"__init__": _init(cls, frozen), "__repr__": _repr(cls)}
    if eq:
        methods |= _comparisons(cls, frozen)
    if frozen:
        methods |= _refusals(cls)
    for name, method in methods.items():
        if name not in given:
            if callable(method):
                method.__name__, method.__qualname__ = name, f"{cls.__qualname__}.{name}"
            setattr(cls, name, method)
    return cls


def _init(cls: type, frozen: bool) -> Callable[..., None]:
    scope: dict[str, Any] = {"_set": object.__setattr__, "_unset": dataclasses.MISSING}
    parameters, lines = ["self"], []
    for it in dataclasses.fields(cls):
        name, value, default = it.name, it.name, ""
        if it.default_factory is not dataclasses.MISSING:
            scope[f"_make_{name}"], default = it.default_factory, "=_unset"
            value = f"_make_{name}() if {name} is _unset else {name}" if it.init else f"_make_{name}()"
        elif it.default is not dataclasses.MISSING:
            scope[f"_default_{name}"], default = it.default, f"=_default_{name}"
        if it.init:
            parameters.append(name + default)
        if it.init or it.default_factory is not dataclasses.MISSING:
            lines.append(f" _set(self, {name!r}, {value})" if frozen else f" self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    exec("\n".join([f"def __init__({', '.join(parameters)}):", *(lines or [" pass"])]), scope)
    init: Callable[..., None] = scope["__init__"]
    return init


def _repr(cls: type) -> Callable[[Any], str]:
    names = [it.name for it in dataclasses.fields(cls) if it.repr]

    def shown(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return shown


def _comparisons(cls: type, frozen: bool) -> dict[str, Callable[..., Any] | None]:
    """`__eq__`, and `__hash__` for frozen classes. Without fields, all objects of a class are equal."""
    names = [it.name for it in dataclasses.fields(cls) if it.compare]
    values: Callable[[Any], Any] = attrgetter(*names) if names else type

    def equal(self: Any, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    def hashed(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": equal, "__hash__": hashed if frozen else None}


def _refusals(cls: Any) -> dict[str, Callable[..., None]]:
    """Methods that raise if a field changes, or anything of an object of exactly this class."""
    names = {it.name for it in dataclasses.fields(cls)}

    def assign(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": assign, "__delattr__": delete}
