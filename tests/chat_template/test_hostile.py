"""Hostile chat templates: each ends in a typed error, within its limits of time and memory."""

from __future__ import annotations

import re
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ondevice.chat_template
from ondevice.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, Message
from ondevice.errors import BundleError, UsageError
from ondevice.units import process_memory
from tests.support.chat_templates import CONVERSATION, HEADERS, INSTRUCTIONS

MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"
MEGA = "{% set s = 'a' * 1000000 %}"


def doubling(start: str, step: str) -> str:
    """Sixty-four times over, n.x becomes `step`."""
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(64) %}}{{% set n.x = {step} %}}{END}"


# n.x is a namespace that holds two, which hold two each, and so on.
NAMESPACES = (
    "{% set n = namespace(x=namespace(x=1)) %}{% for i in range(12) %}"
    "{% set n.x = namespace(x=[n.x, n.x]) %}" + END
)

HOSTILE = {
    # Out of the sandbox.
    "class": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "__class__"),
    "class as an item": ("{{ ''['__class__'] }}", "__class__"),
    "class by attr": ("{{ '' | attr('__class__') }}", "No filter named 'attr'"),
    "class by map": ("{{ [''] | map(attribute='__class__') | list }}", "__class__"),
    "class by sort": ("{{ ['', ''] | sort(attribute='__class__') }}", "__class__"),
    "class by format": ("{{ '{0.__class__}'.format('') }}", "str.format"),
    "item by format": ("{{ '{0[0]}'.format(['']) }}", "str.format"),
    "class by a conversion": ("{{ '{!r:.{n}}'.format('', n=5) }}", "str.format"),
    "class by indirect format": ("{{ ['{0.__class__}'] | map('format', '') | list }}", "too many values"),
    "globals of a function": ("{{ raise_exception.__globals__ }}", "__globals__"),
    "globals of a macro": ("{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}", "_func"),
    "self": ("{{ self.__init__.__globals__ }}", "`self` isn't allowed"),
    "inside of a loop": ("{% for x in [1] %}{{ loop._iterable }}{% endfor %}", "_iterable"),
    "underscore name": ("{{ __builtins__ }}", "isn't allowed"),
    "file": ("{% include '/etc/passwd' %}", "`Include` isn't allowed"),
    "import": ("{% import 'os' as os %}", "`Import` isn't allowed"),
    "inheritance": ("{% extends 'x' %}", "`Extends` isn't allowed"),
    "mutation": ("{% set x = messages.append(1) %}", "append"),
    "filler text": ("{{ lipsum(n=1000) }}", "undefined"),
    "hidden arguments": ("{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}", "`varargs`"),
    "unpacking": ("{{ namespace(**{'a': 1}) }}", r"\* or \*\*"),
    # Too large.
    "repetition": ("{{ 'a' * 10**9 }}", "too much text"),
    "repetition, reversed": ("{{ 1000000000 * 'a' }}", "too much text"),
    "list": ("{{ ([0] * 10**9) | length }}", "too much"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "exponent": ("{{ 10 ** (10 ** 10) }}", "bits"),
    "exponent by steps": (doubling("10", "n.x * n.x"), "bits"),
    "float exponent": ("{{ 10.0 ** 400 }}", "OverflowError"),
    "width of %": ("{{ '%1000000000d' % 1 }}", "formatting with %"),
    "width of % by name": ("{{ '%(a)01000000000d' % {'a': 1} }}", "formatting with %"),
    "decimals of %": ("{{ '%.1000000000f' % 1.5 }}", "formatting with %"),
    "width of the format filter": ("{{ '%1000000000s' | format('x') }}", "formatting with %"),
    "width of format": ("{{ '{:>1000000000}'.format('') }}", "str.format"),
    "width of format by format": ("{{ '{:>{w}}'.format('', w=10**9) }}", "str.format"),
    "decimals of format": ("{{ '{:.1000000000f}'.format(1.5) }}", "str.format"),
    "wide fields of format": ("{{ ('{0:999}' * 300000).format('x') }}", "too much text"),
    "wide fields of %": ("{{ ('%(a)999d' * 300000) % {'a': 1} }}", "too much text"),
    "text by format": (doubling("'aa'", "'{0}{0}'.format(n.x)"), "too much text"),
    "text by %": (doubling("'aa'", "'%s%s' % (n.x, n.x)"), "too much text"),
    "text by a filter block": (
        doubling("'aa'", "n.x") + MEGA + MANY + "{% filter upper %}{{ s }}{% endfilter %}" + END,
        "too much text",
    ),
    "list by sum": (doubling("[1]", "[n.x, n.x] | sum(start=[])"), "too much|nests|seconds"),
    "decimals of round": ("{{ 1 | round(10**9, 'ceil') }}", "limit is 100"),
    "sum of a text": ("{{ (['a' * 1000000] * 100) | sum(start='') }}", "too much text"),
    "width of format_map": ("{{ '{a:>1000000000}'.format_map({'a': ''}) }}", "str.format"),
    "width of center": ("{{ ''.center(1000000000) }}", "center"),
    "width of indent": ("{{ ('a\n' * 1000) | indent(10**8) }}", "too much text"),
    "width of json": ("{{ [1] | tojson(indent=10**9) }}", "limit is 16"),
    "text by +": (doubling("'aa'", "n.x + n.x"), "too much text"),
    "text by ~": (doubling("'aa'", "n.x ~ n.x"), "too much text"),
    "text by replace": (doubling("'aa'", "n.x.replace('a', 'aa')"), "too much text"),
    "text by the replace filter": (doubling("'aa'", "n.x | replace('a', 'aa')"), "too much text"),
    "text by join": (doubling("'aa'", "n.x.join([n.x, n.x])"), "too much text"),
    "text by the join filter": (doubling("'aa'", "[n.x, n.x] | join(n.x)"), "too much text"),
    "lists in lists": (doubling("[]", "[n.x, n.x]"), "nests lists"),
    "tuples in tuples": (doubling("()", "(n.x, n.x)"), "nests lists"),
    "dicts in dicts": (doubling("{}", "{1: n.x, 2: n.x}"), "nests lists"),
    "list by +": (doubling("[1]", "n.x + n.x"), "too much|nests|seconds"),
    "shared text printed": (MEGA + "{{ [s] * 100000 }}", "too much text"),
    "shared text as json": (MEGA + "{{ ([s] * 100000) | tojson }}", "too much text"),
    "shared text in capitals": (MEGA + "{{ ([s] * 100000) | upper }}", "too much text"),
    "namespaces in a printed list": (NAMESPACES + "{{ [n.x] }}", "prints a Namespace"),
    "namespaces in a list as text": (NAMESPACES + "{{ [n.x] | string }}", "prints a Namespace"),
    "namespaces in a printed dict": (NAMESPACES + "{{ {'a': n.x} }}", "prints a Namespace"),
    "namespaces in text by ~": (NAMESPACES + "{{ [n.x] ~ '' }}", "prints a Namespace"),
    "namespaces as json": (NAMESPACES + "{{ [n.x] | tojson }}", "prints a Namespace"),
    "namespaces in a printed key": (NAMESPACES + "{{ {(n.x, 1): 1} }}", "prints a Namespace"),
    "long numbers printed": ("{{ [" + "9" * 4000 + "] * 100000 }}", "too much text"),
    "escapes printed": ("{{ ['\u0001' * 1000000] }}", "too much text"),
    "escapes as json": ("{{ ('\u0001' * 1000000) | tojson }}", "too much text"),
    "separators of json": ("{{ ([1] * 90000) | tojson(separators=('a' * 9000, 'b')) }}", "too much text"),
    "levels of json": (
        "{% set n = namespace(x=[1] * 9000) %}{% for i in range(99) %}{% set n.x = [n.x] %}{% endfor %}"
        "{{ n.x | tojson(indent=16) }}",
        "too much text",
    ),
    "another json encoder": ("{{ [1] | tojson(cls=namespace) }}", "TypeError"),
    "slices": (
        MEGA + "{% set n = namespace(l=[]) %}" + MANY + "{% set n.l = n.l + [s[1:]] %}" + END,
        "too much text",
    ),
    "meter turned back": (
        "{% set x = [1] | map('tick ', -1000000000000) | list %}" + "{{ 'a' * 10**9 }}",
        "too much text",
    ),
    "output": (MEGA + MANY + "{{ s }}" + END, "too much text"),
    "output of a macro": (
        MEGA + "{% macro m() %}" + MANY + "{{ s }}" + END + "{% endmacro %}{% set x = m() %}",
        "too much text",
    ),
    "output of a constant": (MANY + "a" * 50_000 + END, "too much"),
    "output of a printed constant": (MANY + "{{ '" + "a" * 50_000 + "' }}" + END, "too much text"),
    "output into a variable": ("{% set x %}" + MANY + "a" * 50_000 + END + "{% endset %}", "too much"),
    # Too long.
    "nested loops": (MANY * 3 + END * 3, "too much|seconds"),
    "recursive macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "`m` calls itself"),
    "branching macro": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(45) }}",
        "too much|seconds",
    ),
    "recursive loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursive loop"),
    "comparison": (
        MEGA + "{% set t = 'a' * 1000000 %}" + MANY + "{% if s == t %}{% endif %}" + END,
        "too much|seconds",
    ),
    "membership": (MEGA + MANY + "{% if 'ab' in s %}{% endif %}" + END, "too much|seconds"),
    "selection": (
        MEGA + MANY + "{% set x = (['ab'] * 99) | select('in', s) | list %}" + END,
        "too much|seconds",
    ),
    "many operations": ("{{ [" + "1," * 12_000 + "1] }}", "more than 12000 operations"),
    "deep nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError|Memory|Syntax"),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "RecursionError|Memory|Syntax"),
    "deep loops": ("{% for x in [1] %}" * 30 + END * 30, "nested blocks"),
    # Broken.
    "function printed": ("{{ raise_exception }}", "prints a function"),
    "generator printed": ("{{ messages | map('upper') }}", "prints a generator"),
    "syntax": ("{% if %}", "TemplateSyntaxError.*line 1"),
    "unclosed": ("{{ ", "TemplateSyntaxError"),
    "unknown tag": ("{% debug %}", "debug"),
    "missing attribute": ("{{ messages[0].name.first }}", "UndefinedError"),
    "missing item": ("{{ [][3].x }}", "UndefinedError"),
    "division": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "types": ("{{ 1 + 'a' }}", "TypeError"),
    "arguments": ("{{ 'a'.replace('b') }}", "TypeError"),
}


@contextmanager
def growing_at_most(nbytes: int) -> Iterator[None]:
    """Fails where this process takes more memory meanwhile, if only for a moment."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # No Linux, which can begin a peak anew: Python counts its objects, eight times slower.
        tracemalloc.start()
        try:
            yield
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    else:
        before = process_memory().current_bytes
        yield
        taken = process_memory().peak_bytes - before
    assert taken < nbytes, f"it has taken {taken} bytes"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_a_typed_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused within its time limit and without making much; a slow machine's limit is its time."""
    monkeypatch.setattr(ondevice.chat_template, "MAX_SECONDS", 1.0)
    source, message = HOSTILE[name]
    start = time.monotonic()
    refusal = f"(?s)({message}|runs for more than 1 seconds).*; give another with chat_template FILE"
    with growing_at_most(192 << 20), pytest.raises(BundleError, match=refusal):
        ChatTemplate(source).render(CONVERSATION)
    assert time.monotonic() - start < 15.0


def test_what_takes_too_much_memory_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="has taken"), growing_at_most(8 << 20):
        assert len(b"x" * (32 << 20)) == 32 << 20


FRAGMENTS = re.findall(
    r"\{[{%]-?|-?[%}]\}|\w+|\s+|[^\w\s]", INSTRUCTIONS + HEADERS + doubling("1", "n.x * 2")
)


@settings(max_examples=120)
@given(
    st.lists(
        st.sampled_from(FRAGMENTS) | st.sampled_from(["1e999", "-1", "{{", "}}", "{%", "%}"]), max_size=30
    )
)
def test_any_other_template_renders_or_is_refused(fragments: list[str]) -> None:
    inside = "".join(fragments)
    for source in (inside, "{{ " + inside + " }}", "{% set x = " + inside + " %}"):
        try:
            assert isinstance(ChatTemplate(source).render(CONVERSATION), str)
        except (BundleError, UsageError):
            continue


def test_the_clock_has_the_day_alone() -> None:
    """In English, whatever the machine's language, with what else Python's `strftime` knows."""
    source = "{{ strftime_now(form) if strftime_now is defined else '26 Jul 2024' }}"
    for form in ("%d %b %Y", "%A, %B %-d, %Y", "%a %y-%m-%e day %j of week %w %u", "%F %H:%M:%S %I %p %T%%"):
        for day in (date(2024, 7, 6), date(2026, 12, 31)):
            template = ChatTemplate(source.replace("form", repr(form), 1), day=day)
            assert template.render([]) == datetime(day.year, day.month, day.day).strftime(form)
    before = date.today()
    assert before.isoformat() <= ChatTemplate("{{ strftime_now('%F') }}").render([]) <= str(date.today())


def test_templates_above_the_size_limit_are_not_parsed() -> None:
    ChatTemplate("a" * MAX_TEMPLATE_CHARS)
    with pytest.raises(BundleError, match="the limit is 65536"):
        ChatTemplate("a" * (MAX_TEMPLATE_CHARS + 1))


def test_long_conversations_and_messages_stay_within_the_limits() -> None:
    template = ChatTemplate(INSTRUCTIONS)
    turns: list[Message] = [
        {"role": ("user", "assistant")[i % 2], "content": "word " * 40} for i in range(2001)
    ]
    assert template.render(turns).count("[INST]") == 1001
    assert len(template.render([{"role": "user", "content": "word " * 1_000_000}])) > 4_999_000


def test_a_template_renders_the_same_after_a_failure() -> None:
    template = ChatTemplate(
        "{% if messages | length > 1 %}{{ 'a' * 10**9 }}{% endif %}{{ messages[0].content }}"
    )
    for _ in range(3):
        with pytest.raises(BundleError):
            template.render(CONVERSATION)
        assert template.render(CONVERSATION[:1]) == "Be brief."
