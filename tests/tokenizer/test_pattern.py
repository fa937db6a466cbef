"""What a tokenizer's pattern can cost is known before it is compiled: against a matcher that counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ondevice.errors import UnsupportedModelError
from ondevice.tokenizer.pattern import pattern_cost
from ondevice.tokenizer.tokenizer_file import MAX_COST

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS, UPPER, LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLIC = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": rf"{CONTRACTIONS}|{LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "o200k": (
        rf"{LETTERS}{UPPER}*{LOWER}+{CONTRACTIONS}?|{LETTERS}{UPPER}+{LOWER}*{CONTRACTIONS}?|"
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
    ),
    "han_apart": rf"[\p{{Han}}]+|[{UPPER}&&[^\p{{Han}}]]*[{LOWER}&&[^\p{{Han}}]]+|{SPACES}",
    "deepseek": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
    ),
    "white_space_in_steps": "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, -1, -1)),
    "words_of_words": r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
    "digits_from_the_right": r"\d{1,3}(?=(?:\d{3})*\b)",
    "digits_by_three": r"(?=(\d{3})+(?!\d))",
    "possessive": rf"'(?i:[sdmt]|ll|ve|re)|{LETTERS}+\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|{SPACES}",
    "no_classes": r"[^\r\n]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|\p{N}",
    "image_tokens": r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "nested_class": r" ?[^(\s|[.,!?…。、।،])]+",
    "end": r"\s+$",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_patterns_of_public_tokenizers_pass(name: str) -> None:
    cost = pattern_cost(PUBLIC[name])
    assert cost.fixed <= MAX_COST.fixed / 2
    assert cost.linear <= MAX_COST.linear / 2


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+$", "(a*)*b", "(a|a)*b", "(?:a|ab)*c", "(a|b|ab)*c", "((a|b)*)*c", "(?:(?:a*b)*c)*d"),
        *("a*a*b", "a*b*c", r"\s*\s+x", ".*.*=.*", "a*(?:b*c)", "x*(?=a*b)", "(?=a*b)*", "a(?=b*c)*d"),
        *("(?>a*)*b", "a{2,}{2,}b", "(a{1000}){1000}", "a{,9}{,9}{,9}{,9}b", "a" * 8193),
        *(
            r"(a)\1",
            "(?<n>a)",
            r"(?<n>a)\g<n>",
            "(?~a)",
            "(?x: a )",
            "(?#c)a",
            r"\Xa",
            r"\R",
            r"a\K",
            "(?(1)a)",
        ),
        *("\\", "(", ")", "[", "[]a]", "a{5,2}", "a{x}", "*a", r"\p", r"\p{", "(" * 100 + ")" * 100),
        "[" * 100 + "a" + "]" * 100,
    ],
)
def test_what_may_take_long_or_no_tokenizer_needs_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedModelError, match="pattern"):
        pattern_cost(pattern)


def test_ways_that_multiply_are_counted() -> None:
    """As many ways as a text could be matched in, though there is no loop: the limit is the caller's."""
    assert pattern_cost("(a?){30}a{30}").fixed > 1 << 30 > MAX_COST.fixed
    assert pattern_cost("(?:a|b){8}c").fixed >= 2**8


@pytest.mark.parametrize(
    ("pattern", "empty"),
    [
        ("a*", True),
        ("(?=a)", True),
        ("^b?", True),
        ("a|b?", True),
        ("(?:a?b?)+", True),
        ("a{0}b", False),
        ("(?!a)b", False),
    ],
)
def test_whether_a_pattern_matches_without_a_character(pattern: str, empty: bool) -> None:
    assert pattern_cost(pattern).matches_empty is empty


@dataclass
class Part:
    """A pattern both as text and as a backtracking matcher: from `at`, the ends it finds, in order."""

    source: str
    ends: Callable[[str, int, list[int]], Iterator[int]]


def character(letters: str) -> Part:
    def ends(text: str, at: int, steps: list[int]) -> Iterator[int]:
        steps[0] += 1
        if at < len(text) and text[at] in letters:
            yield at + 1

    return Part(f"[{letters}]", ends)


def sequence(parts: list[Part]) -> Part:
    def ends(text: str, at: int, steps: list[int]) -> Iterator[int]:
        def rest(index: int, at: int) -> Iterator[int]:
            if index == len(parts):
                yield at
                return
            for end in parts[index].ends(text, at, steps):
                yield from rest(index + 1, end)

        return rest(0, at)

    return Part("".join(f"(?:{part.source})" for part in parts), ends)


def choice(parts: list[Part]) -> Part:
    def ends(text: str, at: int, steps: list[int]) -> Iterator[int]:
        for part in parts:
            yield from part.ends(text, at, steps)

    return Part("|".join(f"(?:{part.source})" for part in parts), ends)


def repeat(part: Part, least: int, most: int | None) -> Part:
    def ends(text: str, at: int, steps: list[int]) -> Iterator[int]:
        def more(count: int, at: int) -> Iterator[int]:
            if most is None or count < most:
                for end in part.ends(text, at, steps):
                    # As Oniguruma does: a round that consumes nothing ends the repetition.
                    if end > at:
                        yield from more(count + 1, end)
                    elif count + 1 >= least:
                        yield end
            if count >= least:
                yield at

        return more(0, at)

    return Part(f"(?:{part.source}){{{least},{'' if most is None else most}}}", ends)


def look(part: Part, negative: bool) -> Part:
    def ends(text: str, at: int, steps: list[int]) -> Iterator[int]:
        steps[0] += 1
        if (next(part.ends(text, at, steps), None) is None) == negative:
            yield at

    return Part(f"(?{'!' if negative else '='}{part.source})", ends)


def random_part(draw: random.Random, depth: int) -> Part:
    kind = draw.choice(("character", "sequence", "sequence", "choice", "repeat", "repeat", "look"))
    if depth == 0 or kind == "character":
        return character(draw.choice(("a", "b", "ab", "bc", "abc")))
    parts = [random_part(draw, depth - 1) for _ in range(draw.randint(2, 3))]
    if kind == "sequence":
        return sequence(parts)
    if kind == "choice":
        return choice(parts)
    if kind == "look":
        return sequence([look(parts[0], draw.random() < 0.5), parts[1]])
    return repeat(parts[0], *draw.choice(((0, 1), (0, None), (0, None), (1, None), (0, 3))))


def steps_over(part: Part, text: str) -> int:
    """Of finding all matches from left to right, as a pre-tokenizer does."""
    steps, at = [0], 0
    while at <= len(text):
        end = next(part.ends(text, at, steps), None)
        at = at + 1 if end is None or end == at else end
    return steps[0]


def test_no_pattern_that_passes_takes_more_steps_than_it_is_said_to() -> None:
    draw = random.Random(7)
    passed = refused = 0
    tightest = 0.0
    while passed < 150:
        part = random_part(draw, 4)
        try:
            cost = pattern_cost(part.source)
        except UnsupportedModelError:
            refused += 1
            continue
        if cost.fixed > MAX_COST.fixed or cost.linear > MAX_COST.linear:
            continue
        passed += 1
        for unit in ("a", "b", "ab", "abc", "aab"):
            text = (unit * 48)[:48] + draw.choice(("", "c", ".c"))
            allowed = (len(text) + 1) * (cost.fixed + cost.linear * len(text))
            steps = steps_over(part, text)
            assert steps <= allowed, (part.source, text, cost)
            tightest = max(tightest, steps / allowed)
    assert refused > 15, "what isn't refused ever is no test"
    assert tightest > 0.2, "a bound that nothing comes near says little"
