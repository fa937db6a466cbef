"""Jinja2's immutable sandbox with a meter: a template can compute, but not escape, hang or exhaust memory.

The sandbox guards attributes. In addition, a template is checked against a list of allowed constructs,
filters and methods. Every operation that can make text or containers, or repeat, is charged to a meter before
it happens.

This module is imported only when a template is compiled, because it imports jinja2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import LoopControlExtension as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from ondevice.chat_template.formatting import filled_in, percent_filled_in
from ondevice.chat_template.given_text import GivenText, concatenated, given_alike, joined, made_of, replaced
from ondevice.chat_template.meter import MessagesRefused, TemplateLimit, TemplateMeter

_MAX_NODES = 12_000
_MAX_INTEGER_BITS = 4096
_MAX_MACRO_DEPTH = 50
_MAX_DECIMALS = 100
# The space makes these filter names impossible to write in a template; through `map` they do no harm.
_TICK, _WEIGH, _CONCAT, _SLICE, _CONTAINER = "tick ", "weigh ", "concat ", "slice ", "container "

_NODES = """Template Output TemplateData Const Name NSRef Getattr Getitem Slice Filter Test Compare Operand
    And Or Not Neg Pos Add Sub Mul Div FloorDiv Mod Pow Concat CondExpr List Tuple Dict Pair Keyword Call
    For If Assign AssignBlock FilterBlock Macro With Break Continue"""
_ALLOWED_NODES = frozenset(_NODES.split())
_HIDDEN_NAMES = {"self", "super", "varargs", "kwargs", "caller"}
_STR_METHODS = """strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith
    removeprefix removesuffix replace join upper lower title capitalize find rfind index rindex count isdigit
    isalpha isalnum isspace isupper islower isnumeric isdecimal"""
_LOOP = "index index0 revindex revindex0 first last length previtem nextitem cycle changed depth depth0"
_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset({"items", "keys", "values", "get"}),
    list: frozenset({"index", "count"}),
    tuple: frozenset({"index", "count"}),
    LoopContext: frozenset(_LOOP.split()),
}
_TEXT_FILTERS = ("capitalize", "lower", "title", "trim", "upper")
_FILTERS = """abs dictsort float int items list map max min reject rejectattr reverse select selectattr sort
    unique"""
_CONSTANT_TIME_FILTERS = ("count", "d", "default", "first", "last", "length")


class _Guard(NodeTransformer):
    """Refuses constructs that aren't on the list of allowed ones, and meters those that make text or
    containers.
    """

    _seen = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._seen += 1
        if self._seen > _MAX_NODES:
            raise TemplateLimit(f"it has more than {_MAX_NODES} operations")
        name = type(node).__name__
        if name not in _ALLOWED_NODES:
            raise TemplateLimit(f"line {node.lineno}: `{name}` isn't allowed in a chat template")
        return super().generic_visit(node, *args, **kwargs)

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802
        if node.name.startswith("__") or node.name in _HIDDEN_NAMES:
            raise TemplateLimit(
                f"line {node.lineno}: the name `{node.name}` isn't allowed in a chat template"
            )
        return self._visited(node)  # type: ignore[no-any-return]

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise TemplateLimit(f"line {node.lineno}: a call with * or ** isn't allowed in a chat template")
        return self._visited(node)  # type: ignore[no-any-return]

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.recursive:
            raise TemplateLimit(f"line {node.lineno}: a recursive loop isn't allowed in a chat template")
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._ticking(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        constant = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        visited: Any = self._visited(node)
        visited.nodes = [self._filter(nodes.Const(""), _TICK, constant), *visited.nodes]
        return visited  # type: ignore[no-any-return]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        visited: Any = self._visited(node)
        return self._filter(nodes.List(visited.nodes), _CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        visited: Any = self._visited(node)
        if not isinstance(visited.arg, nodes.Slice):
            return visited  # type: ignore[no-any-return]
        bounds = (visited.arg.start, visited.arg.stop, visited.arg.step)
        return self._filter(visited.node, _SLICE, *(nodes.Const(None) if b is None else b for b in bounds))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        visited: Any = self._visited(node)
        visited.expr = self._filter(visited.expr, _WEIGH)
        for operand in visited.ops:
            operand.expr = self._filter(operand.expr, _WEIGH)
        return visited  # type: ignore[no-any-return]

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._container(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._container(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return node if node.ctx == "store" else self._container(node)

    def _container(self, node: Any) -> nodes.Node:
        return self._filter(self._visited(node), _CONTAINER)

    def _visited(self, node: nodes.Node) -> Any:
        return self.generic_visit(node)

    def _ticking(self, node: nodes.Node) -> nodes.Node:
        visited: Any = self._visited(node)
        visited.body = [nodes.ExprStmt(self._filter(nodes.Const(None), _TICK, 1)), *visited.body]
        return visited  # type: ignore[no-any-return]

    @staticmethod
    def _filter(value: Any, name: str, *args: Any) -> nodes.Filter:
        arguments = [arg if isinstance(arg, nodes.Node) else nodes.Const(arg) for arg in args]
        return nodes.Filter(value, name, arguments, [], None, None)


class GenerationTag(Extension):
    """`{% generation %}` marks the text that a model is trained on; rendering keeps only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The jinja2 environment of one chat template. `meter` must be set before compiling and rendering."""

    meter: TemplateMeter
    concat = staticmethod(concatenated)
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            # With `pass_context`, jinja2 can't print constants at compile time, past the meter.
            finalize=pass_context(lambda context, value: self.meter.text(value)),
            extensions=[LoopControls, GenerationTag],
        )
        self._depth = 0
        self.globals = {
            "range": safe_range,
            "dict": lambda *pairs, **named: dict(*pairs, **named),
            "namespace": Namespace,
            "raise_exception": _raise_exception,
        }
        builtin: dict[str, Any] = self.filters
        tests: dict[str, Any] = self.tests
        self.filters = {name: self._charged(builtin[name]) for name in _FILTERS.split()}
        self.filters |= {name: builtin[name] for name in _CONSTANT_TIME_FILTERS}
        self.filters |= {name: self._on_text(builtin[name]) for name in _TEXT_FILTERS}
        self.filters |= {
            "string": self._on_text(lambda text: text),
            "safe": self._on_text(lambda text: text),
            "tojson": lambda value, **options: self.meter.json(value, **options),
            "join": self._join,
            "format": lambda value, *values, **named: percent_filled_in(
                self.meter.text(value), named or values, self.meter
            ),
            "round": self._round,
            "sum": pass_context(lambda context, *values, **named: self._sum(context, *values, **named)),
            "replace": lambda value, old, new, count=-1: self._replace(
                self.meter.text(value), old, new, count
            ),
            "indent": self._indent,
            _TICK: pass_context(lambda context, value, units: self._tick(value, units)),
            _WEIGH: self._weigh,
            _CONCAT: lambda values: concatenated([self.meter.text(value) for value in values]),
            _SLICE: self._slice,
            _CONTAINER: self._container,
        }
        self.tests = {name: self._charged(test) for name, test in tests.items()}

    def compile_guarded(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """The checked and metered template, and the names that it reads. Raises jinja2.TemplateError."""
        tree: Any = _Guard().visit(self.parse(source))
        tree.set_environment(self)
        names = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
        return jinja2.Template.from_code(self, self.compile(tree), dict(self.globals)), names

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, Namespace | Undefined):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES.items())

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A version of `str.format` without attributes and huge widths, for which jinja2 has no guard."""
        if super().wrap_str_format(value) is None:
            return None
        if value.__name__ != "format":
            raise SecurityError("str.format_map isn't allowed in a chat template")
        form: str = value.__self__
        return lambda *values, **named: filled_in(form, values, named, self.meter)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        kind = "str" if isinstance(obj, str) else type(obj).__name__
        raise SecurityError(f"attribute {attribute!r} of {kind!r} isn't allowed in a chat template")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return percent_filled_in(left, right, self.meter)
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.meter.charge(len(left) + len(right), "text")
        elif operator == "*" and isinstance(left, str | list | tuple) and isinstance(right, int):
            self.meter.charge(len(left) * max(0, right), "text")
        elif operator == "*" and isinstance(right, str | list | tuple) and isinstance(left, int):
            self.meter.charge(len(right) * max(0, left), "text")
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise TemplateLimit(
                    f"it computes an integer of {bits} bits; the limit is {_MAX_INTEGER_BITS}"
                )
        return self._container(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        self = __self
        self.meter.charge(1, "calls")
        # Without the arguments that jinja2 passes for itself, which str methods don't accept.
        arguments = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return self._replace(owner, *args, **arguments)
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            return self._join(args[0], owner)
        if isinstance(owner, str):
            self.meter.charge(len(owner), "text")
        if not isinstance(__obj, Macro):
            return self._container(super().call(__context, __obj, *args, **kwargs))
        if self._depth == _MAX_MACRO_DEPTH:
            raise TemplateLimit(f"macro `{__obj.name}` calls itself more than {_MAX_MACRO_DEPTH} deep")
        self._depth += 1
        try:
            return super().call(__context, __obj, *args, **kwargs)
        finally:
            self._depth -= 1

    def _charged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with charges to the meter: for the sizes of its arguments before each call, of its
        result after it.
        """

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                self._weigh(value)
            return self._container(_still_given(function(*args, **kwargs), args[0], made_of))

        return charged

    def _on_text(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def charged(value: Any, *args: Any, **kwargs: Any) -> Any:
            text = self.meter.text(value)
            return _still_given(function(text, *args, **kwargs), text, given_alike)

        return charged

    def _tick(self, value: Any, units: int) -> Any:
        self.meter.charge(units)
        return value

    def _weigh(self, value: Any) -> Any:
        """`value` itself, after charging for one scan of it."""
        length = len(value) if isinstance(value, str | range) else self.meter.elements(value)
        self.meter.charge(1 + length // 16)
        return value

    def _container(self, value: Any) -> Any:
        self.meter.elements(value)
        return value

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = slice(start, stop, step)
        if isinstance(value, str | list | tuple):
            self.meter.charge(len(range(*part.indices(len(value)))), "text")
        return self._container(value[part])

    def _join(self, values: Sequence[Any], separator: str = "") -> str:
        texts = [self.meter.text(value) for value in values]
        self.meter.charge(len(separator) * len(texts), "text")
        return joined(separator, texts)

    def _round(self, value: Any, precision: int = 0, method: str = "common") -> Any:
        if not isinstance(precision, int) or abs(precision) > _MAX_DECIMALS:
            raise TemplateLimit(f"it rounds to {precision} decimals; the limit is {_MAX_DECIMALS}")
        return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]

    def _sum(self, context: Any, values: Any, attribute: str | None = None, start: Any = 0) -> Any:
        if attribute is not None:
            values = map(jinja2.filters.make_attrgetter(self, attribute), values)
        for value in values:
            self.meter.charge(1)
            start = self.call_binop(context, "+", start, value)
        return start

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        replacements = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self.meter.charge(len(text) + replacements * len(new), "text")
        return replaced(text, old, new, -1 if count is None else count)

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text, margin = self.meter.text(value), len(width) if isinstance(width, str) else width
        self.meter.charge(max(0, margin) * (text.count("\n") + 1), "text")
        return made_of(str(jinja2.filters.do_indent(text, width, first, blank)), text)


def _still_given(result: Any, source: Any, made: Callable[[str, str], str]) -> Any:
    """A filter's result. If the filter's input was given text, `made` marks the result as given."""
    is_plain = isinstance(result, str) and not isinstance(result, GivenText)
    return made(result, source) if is_plain and isinstance(source, str) else result


def _raise_exception(message: object) -> None:
    raise MessagesRefused(str(message)[:500])
