"""Chat templates and settings files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from ondevice.chat_template import ChatTemplate
from ondevice.errors import UsageError
from ondevice.settings import read_settings, runtime_config, sampling_config
from tests.fuzz.bases import Bases
from tests.fuzz.mutations import changed_bytes, changed_text, made_up_text
from tests.support.bundles import TEMPLATE
from tests.support.chat_templates import CONVERSATION, HEADERS, INSTRUCTIONS

SOURCES = [TEMPLATE, INSTRUCTIONS, HEADERS]
LEAVES = [
    "messages", "messages[0]", "messages[0].content", "messages[-1]['role']", "bos_token", "eos_token",
    "true", "add_generation_prompt", "tools", "missing", "none", "0", "1", "-1", "1.5", "'a'", "''",
    "'a b'", "[]", "{}", "x", "[1, 2]", "{'a': 1}", "messages[1:]", "range(100)", "namespace(a=1)", "10**9",
    "2**64",
]  # fmt: skip
ODD_LEAVES = [
    "10**400", "'%s'", "'{}'", "ns", "loop", "loop.index", "self", "range", "range(10**9)", "cycler",
    "joiner", "lipsum", "dict", "caller", "varargs", "message", "raise_exception", "strftime_now", "super",
    "m", "kwargs", "'a' * 10**9", "raise_exception('x')", "strftime_now('%Y')", "range(-5, 5, 0)",
    "'\\ud800'", "1e999", "[[[[[[]]]]]]",
]  # fmt: skip
FILTERS = [
    "upper", "length", "list", "string", "join", "join('a')", "map('upper')", "map(attribute='role')",
    "tojson", "tojson(indent=2)", "indent(3)", "replace('a', 'aaaa')", "sort", "unique",
    "selectattr('role')", "default('x')", "int", "float", "abs", "sum", "first", "last", "reverse", "trim",
    "title", "select", "reject", "items", "min", "max", "round", "capitalize", "lower", "count", "dictsort",
]  # fmt: skip
ODD_FILTERS = [
    "tojson(indent=9999999)", "indent(99999)", "center(10**9)", "format", "format('a', 1)", "batch(1)",
    "wordwrap(1)", "slice(10**9)", "groupby('role')", "xmlattr", "attr('__class__')", "truncate(5)",
    "urlize", "random", "pprint", "filesizeformat", "escape", "safe", "e", "striptags", "wordcount", "nope",
    "forceescape", "join(messages)", "map('tojson')", "map('map')", "replace('', 'aaaaaaaa')",
    "selectattr('a.b.c')", "sum(start=[])", "indent(-1)",
]  # fmt: skip
ATTRIBUTES = [
    "content", "role", "split()", "items()", "upper()", "strip()", "replace('a', 'bb')", "startswith('a')",
    "get('a')", "keys()", "lower()", "split('a')", "lstrip('a')", "endswith('a')", "values()", "title()",
]  # fmt: skip
ODD_ATTRIBUTES = [
    "__class__", "__init__", "__globals__", "mro()", "format('a')", "format_map({})", "join(messages)",
    "append(1)", "update({})", "pop()", "encode()", "zfill(10**9)", "ljust(10**8)", "center(10**8)",
    "replace('', 'aaaaaaaa')", "__subclasses__()", "gi_frame", "copy()", "expandtabs(10**8)",
    "translate({97: 'a' * 9999})", "splitlines()", "extend(messages)", "__format__('99999999')",
    "count('a')", "partition('a')", "insert(0, messages)",
]  # fmt: skip
OPERATORS = ["+", "-", "*", "/", "//", "%", "~", "==", "<", "and", "or", "in", "not in", "if 1 else"]
ODD_OPERATORS = ["**", "is", "<<", "|"]
ODD_STATEMENTS = [
    "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% block a %}{% endblock %}", "{{",
    "%}", "{% raw %}", "{# #}", "{% call m(1) %}{% endcall %}", "{% with a=1 %}{% endwith %}",
    "{% break %}", "{% autoescape true %}{{ x }}{% endautoescape %}", "{% do x %}",
    "{% generation %}{% endgeneration %}",
]  # fmt: skip
ODD_SHARE = 0.08
SETTINGS = [
    "dram-budget", "dram_budget", "backend", "threads", "io", "sparsity", "speculation", "kv-bits",
    "max-context", "temp", "temperature", "top-k", "top_p", "min-p", "seed", "stop", "max-tokens",
    "repetition-penalty", "model", "logit_bias", "prefill_chunk", "memory-pressure", "unknown", "", "a.b",
    "draft-model", "system-prompt", "color",
]  # fmt: skip
TOML_VALUES = [
    "1", "-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "true", '"4GB"', '"auto"', '""', '"\\u0000"',
    "[]", "[1]", '["a"]', '[["a"]]', "{}", "{a=1}", "1979-05-27", "07:32:00", "0x7fffffffffffffffff",
    '"60%"', '"1e5"', "'''x'''", "9" * 5000, '"' + "x" * 5000 + '"', '"dense"', '"off"', "8",
    "[" * 500 + "]" * 500,
]  # fmt: skip


def made_up(rng: random.Random) -> str:
    """A hostile template."""
    how = rng.random()
    if how < 0.4:
        source = rng.choice(SOURCES)
        for _ in range(rng.choice([1, 1, 2])):
            source = changed_text(source, rng)
        return source
    body = "".join(_statement(rng, 0) for _ in range(rng.randint(1, 5)))
    return body + rng.choice(["", rng.choice(SOURCES)])


def make(folder: Path, rng: random.Random, bases: Bases) -> None:
    """A template, or a settings file, in `folder`."""
    if rng.random() < 0.25:
        keys = rng.sample(SETTINGS, rng.randint(1, 4))
        lines = [f"{_key(key, rng)} = {rng.choice(TOML_VALUES)}" for key in keys]
        data = "\n".join(lines).encode()
        (folder / "config.toml").write_bytes(changed_bytes(data, rng) if rng.random() < 0.2 else data)
        return
    data = made_up(rng).encode("utf-8", "surrogatepass")
    (folder / "chat_template.jinja").write_bytes(changed_bytes(data, rng) if rng.random() < 0.05 else data)


def run(folder: Path, rng: random.Random) -> int:
    """Render a conversation, twice alike; or read settings and make options of them."""
    if (folder / "config.toml").exists():
        values = dict(read_settings(folder / "config.toml").values)
        for make_config in (runtime_config, sampling_config):
            make_config(values)
        return 0
    try:
        source = (folder / "chat_template.jinja").read_bytes().decode()
    except UnicodeDecodeError:
        return 0
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    messages: list[Any] = [*CONVERSATION, {"role": "user", "content": made_up_text(rng)}]
    for asked in (CONVERSATION, messages, [messages[0]] * 3):
        for more in (True, False):
            try:
                template.render(asked, add_generation_prompt=more)
            except UsageError:
                continue
    return 0


def _key(key: str, rng: random.Random) -> str:
    return key if rng.random() < 0.9 else f'"{key}"'


def _one(usual: list[str], odd: list[str], rng: random.Random) -> str:
    """Mostly what templates have, so that what they haven't is reached at all."""
    return rng.choice(odd if rng.random() < ODD_SHARE else usual)


def _expression(rng: random.Random, depth: int = 0) -> str:
    how = rng.random() + depth / 6
    inner = lambda: _expression(rng, depth + 1)  # noqa: E731
    if how < 0.2:
        return f"({inner()} {_one(OPERATORS, ODD_OPERATORS, rng)} {inner()})"
    if how < 0.4:
        return f"({inner()} | {_one(FILTERS, ODD_FILTERS, rng)})"
    if how < 0.55:
        return f"{inner()}.{_one(ATTRIBUTES, ODD_ATTRIBUTES, rng)}"
    if how < 0.62:
        return f"{inner()}[{inner()}]"
    if how < 0.68:
        return f"{inner()}[::{inner()}]"
    if how < 0.69:
        return f"{inner()}({inner()})"
    if how < 0.8:
        return f"[{inner()}, {inner()}]"
    return _one(LEAVES, ODD_LEAVES, rng)


def _statement(rng: random.Random, depth: int) -> str:
    how = rng.choices(range(9), [4, 2, 1, 4, 1, 4, 1, 0.2, 1])[0]
    body = "" if depth > 3 else "".join(_statement(rng, depth + 1) for _ in range(rng.randint(0, 2)))
    one = _expression(rng)
    count = rng.choice([3, 1000, 10**6])
    statements = [
        f"{{{{ {one} }}}}",
        f"{{% set x = {one} %}}",
        f"{{% set ns = namespace(a={one}) %}}{{% set ns.a = ns.a ~ ns.a %}}",
        f"{{% for x in {one} %}}{body}{{{{ x }}}}{{% endfor %}}",
        f"{{% for x in range({count}) recursive %}}{body}{{{{ loop([1]) }}}}{{% endfor %}}",
        f"{{% if {one} %}}{body}{{% else %}}{{{{ x }}}}{{% endif %}}",
        f"{{% macro m(a, b={one}) %}}{body}{{{{ m(a) }}}}{{% endmacro %}}{{{{ m({one}) }}}}",
        f"{{% filter {_one(FILTERS, ODD_FILTERS, rng)} %}}{body}{{% endfilter %}}",
        f"{{% set x %}}{body}{{{{ x ~ x }}}}{{% endset %}}",
    ]
    return rng.choice(ODD_STATEMENTS) if rng.random() < 0.04 else statements[how]
