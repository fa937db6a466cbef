"""Reads constraints as grammars over one model's tokens. The only module that needs llguidance.

llguidance (https://github.com/guidance-ai/llguidance) walks a trie of all tokens with an Earley parser over
regular expressions' derivatives. This module sets its limits, so that every constraint, whoever wrote it, is
bounded in time and memory.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ondevice.constraints.constraint import KINDS, Constraint
from ondevice.constraints.digits import DigitBound, NumberTokens, most_digits
from ondevice.constraints.schema import SPELLING, exact_grammar, prepared
from ondevice.errors import (
    BackendUnavailableError,
    ConstraintError,
    LibraryErrors,
    thread_refused,
)
from ondevice.records import dataclass

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_KEPT = 4
"""Grammars kept for later texts under the same constraint."""
GRAMMAR_BYTES = 7 << 20
"""Most memory of a grammar in use, with all states that its lexer may have."""
STACK_BYTES = 256 << 20
"""Stack of the thread that reads grammars. llguidance recurses along rules and references, with about 10 KB
for each; a constraint of MAX_SOURCE_CHARS has room for 6,000. Only what is used becomes memory."""
LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 5_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""llguidance's limits, except for states, which take up to 1.2 KB each, and initial fuel.

Half as many states did for random texts of 106 of others' schemas, with 151,643 tokens. With a fuel of
1,000,000, `((a{1000}){1000}){1000}` took 141 MB and four times as long before it was refused."""
_NO_TEXT = "it allows no text in this model's tokens"
_PLAIN_PREFIX = "\x02"
"""Text that tokenizers don't merge with what follows. After it, no space is added for a text's beginning."""
_KEYWORDS = (
    (re.compile(r'Unimplemented keys: \["([^"]+)"'), None),
    (re.compile(r"oneOf constraints"), "oneOf"),
    (re.compile(r"Unknown format"), "format"),
    (re.compile(r"for '(\w+)'"), None),
    (re.compile(r"Resource '|Pointer '|\$ref|registry"), "$ref"),
    (re.compile(r"regex parse error|look-around|invalid regex"), "pattern"),
    (re.compile(r"multipleOf"), "multipleOf"),
    (re.compile(r"float range|integer range|minimum"), "minimum"),
    (re.compile(r"Invalid type"), "type"),
    (re.compile(r"'?(\w+)'? must be an? (?:array|object)$"), None),
    (re.compile(r"invalid multiple of"), "multipleOf"),
    (re.compile(r"schema: ((?:min|max)[A-Z]\w+)"), None),
    (re.compile(r"(required) property"), None),
    (re.compile(r"incompatible types"), "type"),
    (re.compile(r"Unsatisfiable|intersection"), "allOf"),
)
"""Patterns of llguidance's messages, with the keyword that each is about."""
_EMPTY = re.compile(r'"(enum|type|anyOf|oneOf)": \[\]')
"""An empty list of choices, in a schema's JSON."""


@dataclass(frozen=True)
class GrammarVocabulary:
    """A model's tokens, as grammars need them.

    token_bytes: the bytes that each id adds to a text; empty for ids that add nothing. special: ids of
    special tokens by name. eos_ids: ids that end a text. encode: returns the ids of a text, in which names of
    special tokens are plain text.
    """

    token_bytes: Sequence[bytes]
    special: Mapping[str, int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


def grammars_bytes(vocab_size: int, texts: int) -> int:
    """Most memory in bytes that a model's constraints take.

    Measured (`tests/benchmarks/explain/constraint_memory.py`): a token takes 123 to 136 bytes in llguidance's
    table, and some 45 as Python's bytes.

    vocab_size: number of the model's tokens. texts: number of texts that may run together.
    """
    return (4 << 20) + 200 * vocab_size + (MAX_KEPT + texts) * GRAMMAR_BYTES


class Grammars:
    """Turns constraints into matchers for one model's tokens. Safe from any thread."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        """vocabulary: the model's tokens. Raises BackendUnavailableError if llguidance isn't installed,
        OndeviceError if it can't use the vocabulary.
        """
        require_package()
        import llguidance

        self.vocab_size = len(vocabulary.token_bytes)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        """Unused matchers by constraint, least recently used first."""
        self._numbers = NumberTokens(vocabulary.token_bytes)
        self._limits = llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        with LibraryErrors(partial(_refusal, "the vocabulary")):
            self._tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Spelling(vocabulary)),
                # A model without a token that ends texts gets one for llguidance alone, behind its own.
                n_vocab=self.vocab_size + (not vocabulary.eos_ids),
                eos_token=list(vocabulary.eos_ids) or [self.vocab_size],
                slices=[],
            )

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher for a new text. It shares the states of its lexer with other texts.

        Raises ConstraintError for a constraint that can't be enforced, takes too much time or memory, or
        allows no text.
        """
        with self._lock:
            grammar = self._kept.pop(constraint, None)
            if grammar is None:
                grammar = _on_deep_stack(lambda: self._read(constraint))
            self._kept[constraint] = grammar
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return grammar.deep_copy()

    def unshared_matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher for a new text that shares nothing with other texts. Raises what `matcher` raises."""
        with self._lock:
            # What the limits have stopped once isn't kept for others.
            self._kept.pop(constraint, None)
            return _on_deep_stack(lambda: self._read(constraint))

    def digit_bound(self, constraint: Constraint) -> DigitBound | None:
        """The limit on digits for a new text of JSON; None for a constraint that has no such limit."""
        is_schema = constraint.kind == "json_schema"
        most = most_digits(json.loads(constraint.source)) if is_schema else constraint.most_digits
        return DigitBound(self._numbers, most) if most else None

    def _read(self, constraint: Constraint) -> LLMatcher:
        import llguidance

        kind, source = constraint.kind, constraint.source
        refusal = partial(_refusal, f"the {KINDS[kind]}", source=source)
        with LibraryErrors(refusal):
            if kind == "json_schema":
                schema: Any = prepared(source)
                exact = exact_grammar(constraint)
                if exact is not None:
                    grammar = llguidance.LLMatcher.grammar_from_lark(exact)
                else:
                    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=SPELLING)  # type: ignore[arg-type]
            elif kind == "regex":
                grammar = llguidance.LLMatcher.grammar_from_regex(source)
            else:
                grammar = llguidance.LLMatcher.grammar_from_lark(source)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise refusal(matcher.get_error())
            # The first mask tells whether any text is allowed, and whether the limits hold so far.
            first = matcher.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                raise refusal(first.get_error() or _NO_TEXT)
        return matcher


def require_package() -> None:
    """Check that the extra `constrain` is installed. Raises BackendUnavailableError if not."""
    if find_spec("llguidance") is None:
        raise BackendUnavailableError(
            "text under a constraint needs llguidance: pip install llguidance, or ondevice[constrain]"
        )


class _Spelling:
    """A vocabulary in the form that llguidance's TokenizerWrapper takes."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = list(vocabulary.token_bytes)
        for name, token in vocabulary.special.items():
            # A byte that no text has marks tokens that stand for no text.
            self.tokens[token] = b"\xff" + name.encode()
        self.special_token_ids = sorted(vocabulary.special.values())
        if not vocabulary.eos_ids:
            self.tokens.append(b"\xff<eos>")
        self.eos_token_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else len(self.tokens) - 1
        self.bos_token_id = None
        self._encode = vocabulary.encode
        self._prefix = vocabulary.encode(_PLAIN_PREFIX)

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text. Raises TypeError for bytes, from which the wrapper learns that it must pass
        texts.
        """
        if not isinstance(text, str):
            raise TypeError("a str is needed")
        ids = self._encode(_PLAIN_PREFIX + text)
        length = len(self._prefix)
        return ids[length:] if ids[:length] == self._prefix else self._encode(text)


def _refusal(what: str, message: str, source: str = "") -> ConstraintError:
    """The error for a message of llguidance about `source`. It names the keyword at fault, if
    there is one.
    """
    message = message.partition("\n<state>")[0].strip()[:300]
    if message.startswith("NoExtensionBias"):
        message = _NO_TEXT
    keyword = _keyword(message, source)
    about = f", for its keyword {keyword}" if keyword and "schema" in what else ""
    return ConstraintError(f"{what} can't be enforced{about}: {message}", keyword)


def _keyword(message: str, source: str) -> str | None:
    """The keyword that a message is about, or None."""
    if message == _NO_TEXT:
        # Of schemas, only references that lead to themselves are read without another complaint.
        return "$ref" if '"$ref"' in source else None
    if "anyOf is empty" in message and (empty := _EMPTY.search(source)):
        return empty[1]
    matches = ((named, pattern.search(message)) for pattern, named in _KEYWORDS)
    return next((named or match[1] for named, match in matches if match), None)


_starting = threading.Lock()


def _on_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of `work`, on a thread with a stack of STACK_BYTES."""
    with ThreadPoolExecutor(1, "ondevice-grammar") as pool:
        with _starting:
            # A setting of the process, which a thread begins with.
            before = threading.stack_size(STACK_BYTES)
            try:
                future = pool.submit(work)
            except RuntimeError as error:
                raise thread_refused(error) from error
            finally:
                threading.stack_size(before)
        return future.result()
