"""Text under a constraint obeys, and is the same with and without drafts; what must come is drafted."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, get_args

import pytest

pytest.importorskip("llguidance")

from ondevice import Constraint, ConstraintError, UsageError, host
from ondevice.api import Model, load
from ondevice.chat_template.channels import Channels
from ondevice.config import SamplingConfig, Speculation
from ondevice.constraints import constrained, grammars
from ondevice.constraints.constrained import Constrained
from ondevice.constraints.grammars import Grammars, GrammarVocabulary, grammars_bytes
from ondevice.errors import BudgetError
from ondevice.speculation.tree import Proposals
from tests.runtime.test_unverified_drafts import Job, run, text
from tests.support.bundles import BOS, EOS
from tests.support.engines import always_draft
from tests.support.paths import SHIPPED
from tests.support.serving import until

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "shape": {"enum": ["circle", "square"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "shape", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": Constraint.json_schema(SCHEMA),
    "object": Constraint.json_object(),
    "pattern": Constraint.regex(r" (\d{4}-){3}[a-f]{2,6}\."),
    "grammar": Constraint.lark('start: item+ "."\nitem: " " (/[a-c]+/ | "(" item ")")'),
}
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.95}]
NEEDY = ("off", "streams", "model", "ngrams", "eagle", "dflash", "mtp")
DRAFTERS = [name for name in get_args(Speculation) if name not in NEEDY]
PROMPT = "A person in JSON:"


def texts(model: Model, drafted: list[int] | None = None) -> list[tuple[int, ...]]:
    """What the model writes under every constraint, greedy and sampled. drafted: gets numbers of tokens."""
    answers = [
        model.generate(PROMPT, constraint=constraint, max_tokens=24, **sampling)
        for constraint in CONSTRAINTS.values()
        for sampling in SAMPLINGS
    ]
    if drafted is not None:
        drafted += [answer.stats.drafting.draft_tokens for answer in answers]
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    """The shipped model, without drafts."""
    with load(SHIPPED, speculation="off", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def expected(plain: Model) -> list[tuple[int, ...]]:
    return texts(plain)


@pytest.mark.fast("recycling")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token_under_a_constraint(
    expected: list[tuple[int, ...]], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [8, 3, 12])
    with load(SHIPPED, speculation=drafter, threads=1) as model:  # type: ignore[arg-type]
        drafted: list[int] = []
        assert texts(model, drafted) == expected
        assert sum(drafted) > 0


def test_made_up_drafts_change_no_token(
    plain: Model, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees that branch everywhere, of tokens that mostly aren't allowed: the grammar goes back and forth."""
    always_draft(monkeypatch, [16])

    def propose(path: Sequence[int]) -> Proposals:
        at = sum(path) + len(path)
        size = plain.config.vocab_size
        return [((at * 37 + step * 101) % size, 0.3) for step in range(size // 8)]

    with load(SHIPPED, speculation="lookup", threads=1) as model:
        assert model._engine._drafting is not None
        monkeypatch.setattr(model._engine._drafting._drafter, "propose", propose)
        assert texts(model) == expected


def test_forced_tokens_take_fewer_passes(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that knows nothing still gains: keys and quotes of a schema are certain."""
    names = [f"a_long_name_of_a_property_{number}" for number in range(6)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    constraint = Constraint.json_schema(schema)
    whole = plain.generate(PROMPT, constraint=constraint, max_tokens=200)
    assert list(json.loads(whole.text)) == names
    always_draft(monkeypatch, [16])
    with load(SHIPPED, speculation="lookup", threads=1) as model:
        assert model._engine._drafting is not None
        monkeypatch.setattr(model._engine._drafting._drafter, "propose", lambda path: [])
        drafted = model.generate(PROMPT, constraint=constraint, max_tokens=200)
    assert drafted.tokens == whole.tokens
    stats = drafted.stats.drafting
    assert stats.accepted_by_depth == stats.drafted_by_depth, "a forced token was judged wrong"
    assert drafted.stats.forward_passes < whole.stats.forward_passes / 3


def test_every_constraint_is_obeyed(plain: Model) -> None:
    schema = plain.generate(PROMPT, constraint=CONSTRAINTS["schema"], temperature=1.0, seed=1)
    assert list(json.loads(schema.text)) == ["name", "age", "shape", "tags"]
    assert schema.finish_reason == "stop"
    pattern = plain.generate(PROMPT, constraint=CONSTRAINTS["pattern"], temperature=1.0, seed=1)
    assert re.fullmatch(r" (\d{4}-){3}[a-f]{2,6}\.", pattern.text)
    # The model may open brackets until its context is full: the first text that ends.
    grammars = (
        plain.generate(PROMPT, constraint=CONSTRAINTS["grammar"], temperature=1.0, seed=seed, max_tokens=60)
        for seed in range(40)
    )
    grammar = next(it for it in grammars if it.finish_reason == "stop")
    text, inner = grammar.text, re.compile(r" \( [a-c]+\)")
    while inner.search(text):
        text = inner.sub(" a", text)
    assert re.fullmatch(r"( [a-c]+)+\.", text)


def test_a_text_ends_where_nothing_can_follow(plain: Model) -> None:
    """Without a pass for the token that says so; where something could follow, the model decides."""
    closed = plain.generate(PROMPT, constraint=Constraint.regex("yes"))
    assert (closed.text, closed.finish_reason) == ("yes", "stop")
    assert closed.stats.forward_passes == len(closed.tokens)
    banned = plain.generate(
        PROMPT,
        constraint=Constraint.regex("a+"),
        max_tokens=5,
        logit_bias=dict.fromkeys(plain.tokenizer.eos_ids, -math.inf),
    )
    assert (set(banned.text), banned.finish_reason) == ({"a"}, "length")


def test_a_session_s_reply_obeys_and_goes_on_as_any_other(plain: Model) -> None:
    session = plain.session("Be brief.")
    first = session.respond("A person?", constraint=CONSTRAINTS["schema"])
    assert json.loads(first.text)["shape"] in ("circle", "square")
    assert session.transcript[-1]["content"] == first.text
    second = session.respond("Go on.", max_tokens=4)
    again = plain.session("Be brief.")
    assert again.respond("A person?", constraint=CONSTRAINTS["schema"]).text == first.text
    assert again.respond("Go on.", max_tokens=4).tokens == second.tokens


@pytest.mark.parametrize("bias", [{}, {EOS: 5.0}])
def test_a_model_of_bytes_obeys_too(chat_bundle: Any, bias: dict[int, float]) -> None:
    with load(chat_bundle, threads=1, speculation="off") as model:
        answer = model.generate(PROMPT, constraint=CONSTRAINTS["schema"], max_tokens=200, logit_bias=bias)
        assert answer.finish_reason == "stop"
        assert set(json.loads(answer.text)) == set(SCHEMA["properties"])


class Marks:
    """A made-up vocabulary: bytes, a token that ends texts, and the marks of channels."""

    channel, message, end, start, eos = 256, 257, 258, 259, 260
    special: ClassVar = {
        "<|channel|>": 256,
        "<|message|>": 257,
        "<|end|>": 258,
        "<|start|>": 259,
        "<eos>": 260,
    }

    @classmethod
    def vocabulary(cls) -> GrammarVocabulary:
        texts = [bytes([byte]) for byte in range(256)] + [b""] * 6
        return GrammarVocabulary(texts, cls.special, (cls.eos,), lambda text: list(text.encode()))


def allowed(constrained: Constrained) -> set[int]:
    return {token for token, may in enumerate(constrained.allowed().tolist()) if may}


def take(constrained: Constrained, *tokens: int | str) -> None:
    for token in tokens:
        for each in token.encode() if isinstance(token, str) else [token]:
            assert each in allowed(constrained)
            constrained.take(each, chr(each) if each < 256 else "")


def test_a_constraint_applies_after_thinking() -> None:
    grammars = Grammars(Marks.vocabulary())
    matcher = grammars.matcher(Constraint.regex("ab"))
    constrained = Constrained(
        matcher, grammars.vocab_size, frozenset({Marks.eos}), Channels(Marks.special, {})
    )
    assert allowed(constrained) == {ord("a"), Marks.channel, Marks.start}
    take(constrained, Marks.channel, "analysis", Marks.message, "Hm, z", Marks.end)
    # Anything but the end of the text may come, until the reply has been begun.
    assert allowed(constrained) == {*range(262)} - {Marks.eos}
    take(constrained, Marks.start, "assistant", Marks.channel, "final", Marks.message)
    assert allowed(constrained) == {ord("a")}
    assert not constrained.is_complete
    take(constrained, "ab")
    assert constrained.is_complete


def test_a_reply_without_channels_obeys_at_once() -> None:
    grammars = Grammars(Marks.vocabulary())
    matcher = grammars.matcher(Constraint.regex("ab?"))
    constrained = Constrained(
        matcher, grammars.vocab_size, frozenset({Marks.eos}), Channels(Marks.special, {})
    )
    take(constrained, "a")
    assert allowed(constrained) == {ord("b"), Marks.eos}


def test_special_tokens_come_only_where_a_grammar_names_them() -> None:
    grammars = Grammars(Marks.vocabulary())
    anything = Constrained(grammars.matcher(Constraint.regex("(.|\n)*")), 262, frozenset({Marks.eos}))
    assert not allowed(anything) & {Marks.channel, Marks.message, Marks.start, 261}
    named = Constrained(grammars.matcher(Constraint.lark('start: <|channel|> "x"')), 262, frozenset())
    assert allowed(named) == {Marks.channel}


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("$ref", {"$ref": "#"}),
        ("$ref", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        ("enum", {"enum": []}),
        ("enum", {"enum": "a"}),
        ("type", {"type": []}),
        ("anyOf", {"anyOf": []}),
        ("oneOf", {"oneOf": []}),
        ("type", {"type": "integer", "enum": ["a"]}),
        ("minLength", {"type": "string", "minLength": 5, "maxLength": 1}),
        ("minItems", {"type": "array", "minItems": 3, "maxItems": 1}),
        ("minProperties", {"type": "object", "minProperties": 3, "maxProperties": 1}),
        ("required", {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}}),
        ("required", {"type": "object", "required": "a"}),
        ("properties", {"properties": []}),
        ("multipleOf", {"type": "integer", "multipleOf": 0}),
    ],
)
def test_schemas_that_nothing_satisfies_are_refused_by_their_keyword(keyword: str, schema: Any) -> None:
    grammars = Grammars(Marks.vocabulary())
    with pytest.raises(ConstraintError, match=rf"keyword {re.escape(keyword)}: ") as error:
        grammars.matcher(Constraint.json_schema(schema))
    assert error.value.keyword == keyword
    assert "Bias" not in str(error.value)


def test_what_cannot_be_enforced_is_refused_by_its_keyword(plain: Model) -> None:
    refused = {
        "not": {"type": "string", "not": {"const": "a"}},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "pattern": {"type": "string", "pattern": "a(?=b)"},
        "$ref": {"$ref": "https://example.com/schema.json"},
    }
    for keyword, schema in refused.items():
        with pytest.raises(ConstraintError, match=re.escape(keyword)) as error:
            plain.generate(PROMPT, constraint=Constraint.json_schema(schema))
        assert error.value.keyword == keyword
    for wrong in (
        Constraint.regex("a("),
        Constraint.lark('start: "a" b'),
        Constraint.lark(""),
        Constraint.lark("start: start"),
    ):
        with pytest.raises(ConstraintError, match="can't be enforced"):
            plain.generate(PROMPT, constraint=wrong)


def test_wrong_constraints_are_refused_where_they_are_made() -> None:
    with pytest.raises(ConstraintError, match="isn't JSON"):
        Constraint.json_schema("{")
    with pytest.raises(ConstraintError, match="isn't JSON"):
        Constraint.json_schema({"const": math.nan})
    with pytest.raises(UsageError, match="must be an object or a bool"):
        Constraint.json_schema("[]")
    with pytest.raises(ConstraintError, match="it may have 65536"):
        Constraint.regex("a" * 70_000)
    with pytest.raises(UsageError, match="must be a string"):
        Constraint.regex(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be one of json_schema"):
        Constraint("yaml", "")  # type: ignore[arg-type]


def test_constraints_count_in_the_budget() -> None:
    """A budget without room for them refuses them; the automatic one makes room."""
    with load(SHIPPED, threads=1) as model:
        before = model.plan
        model.generate(PROMPT, constraint=Constraint.json_object(), max_tokens=4)
        taken = model.plan.constraint_bytes
        assert taken == grammars_bytes(model.config.vocab_size, model.runtime.parallel)
        assert model.plan.minimum_budget_bytes == before.minimum_budget_bytes + taken
        assert model.plan.budget_bytes > before.budget_bytes
        tight = before.minimum_budget_bytes
    with load(SHIPPED, threads=1, dram_budget=tight + (4 << 20)) as model:
        with pytest.raises(BudgetError):
            model.generate(PROMPT, constraint=Constraint.json_object(), max_tokens=4)
        assert model.generate(PROMPT, max_tokens=4).tokens


def test_every_text_has_all_of_a_grammars_limits() -> None:
    """Texts of one constraint share what its lexer has found out, and that is limited; drafts do too."""

    def draft(text: Constrained, chance: random.Random) -> None:
        path: list[int] = []
        while len(path) < 12 and (found := [*text.proposals(path, lambda path: [(32, 0.4), (97, 0.3)])]):
            path.append(chance.choice(found)[0])

    def catch_up(text: Constrained) -> None:
        for _ in text.catch_up():
            pass

    def walk(grammars: Grammars, seed: int, drafts: int = 0) -> list[int]:
        chance, tokens, ends = random.Random(seed), [], frozenset({Marks.eos})
        beside = random.Random(-seed)
        matcher, own = grammars.matcher(hungry), partial(grammars.unshared_matcher, hungry)
        text = Constrained(matcher, grammars.vocab_size, ends, unshared=own)
        try:
            while True:
                catch_up(text)
                if text.is_complete:
                    break
                for _ in range(drafts):
                    draft(text, beside)
                if not text.is_ready():
                    catch_up(text)
                tokens.append(chance.choice([*text.allowed().nonzero()[0].tolist()]))
                text.take(tokens[-1], "")
        except ConstraintError:
            tokens.append(-1)
        return tokens

    hungry = Constraint.regex(r"(.{1,40} ){1,40}!")
    alone = [walk(Grammars(Marks.vocabulary()), seed) for seed in range(3)]
    shared = Grammars(Marks.vocabulary())
    assert any(tokens[-1] == -1 for tokens in alone)
    assert [walk(shared, seed) for seed in range(3)] == alone
    assert [walk(Grammars(Marks.vocabulary()), seed, drafts=2) for seed in range(3)] == alone


LETTERS = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 60} for name in "ab"},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCARCE = 400
"""States with which two of these five texts end, and one does that comes behind others."""


def scarce(monkeypatch: pytest.MonkeyPatch) -> list[SamplingConfig]:
    """Texts for whose grammar there are few states, and which catch up token by token."""
    monkeypatch.setitem(grammars.LIMITS, "max_lexer_states", SCARCE)
    monkeypatch.setattr(constrained, "PIECE_SECONDS", 0.0)
    letters = Constraint.json_schema(LETTERS)
    return [SamplingConfig(max_tokens=60, temperature=1.0, seed=it, constraint=letters) for it in range(5)]


def outcome(model: Model, sampling: SamplingConfig) -> list[int | str | None]:
    """Its tokens, and how it ended."""
    found: list[int | str | None] = []
    try:
        for event in model.stream("A", sampling=sampling):
            found.append(event.finish_reason if event.token is None else event.token)
    except ConstraintError as error:
        found.append(str(error))
    return found


def alone(samplings: Sequence[SamplingConfig]) -> list[list[int | str | None]]:
    """Each with a grammar of its own and without drafts."""
    found = []
    with load(SHIPPED, speculation="off", threads=1) as model:
        for sampling in samplings:
            model._host._grammars = None
            found.append(outcome(model, sampling))
    return found


def noting(monkeypatch: pytest.MonkeyPatch, note: Callable[[], object]) -> None:
    """`note` is called wherever a text that catches up lets others go."""
    catch_up = Constrained.catch_up

    def noted(text: Constrained) -> Iterator[None]:
        for _ in catch_up(text):
            note()
            yield

    monkeypatch.setattr(Constrained, "catch_up", noted)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["off", "lookup"])
def test_shared_limits_change_no_text(monkeypatch: pytest.MonkeyPatch, drafter: Speculation) -> None:
    samplings, pieces = scarce(monkeypatch), list[None]()
    expected = alone(samplings)
    assert {text[-1] for text in expected} > {"stop"}
    always_draft(monkeypatch, [8, 3, 12])
    noting(monkeypatch, lambda: pieces.append(None))
    with load(SHIPPED, speculation=drafter, threads=1) as model:
        for _ in range(2):
            assert [outcome(model, sampling) for sampling in samplings] == expected
    assert len(pieces) > 60


def test_a_text_that_catches_up_lets_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = scarce(monkeypatch)
    last = samplings[-1]
    (expected,) = alone([last])
    written = list[int]()
    with load(SHIPPED, speculation="lookup", threads=1, parallel=2) as model:
        engine, ids = model._engine, model.tokenizer.encode("A")
        for sampling in samplings[:-1]:
            outcome(model, sampling)
        follow = model._host._constraining(last, None)
        assert follow is not None
        endless = tuple((it, -math.inf) for it in model.bundle.manifest.tokenizer.eos_ids)
        other = Job(text(engine, None, ids, SamplingConfig(max_tokens=200, logit_bias=endless)))
        job = Job(engine.steps(None, ids, last, lambda: False, follow()))
        noting(monkeypatch, lambda: written.append(len(other.tokens)))
        model._owner.call(lambda: run(engine, [other, job]))
    assert [*job.tokens, "stop"] == expected
    assert len(written) > 10
    assert all(later > earlier for earlier, later in pairwise(written))


def test_a_text_that_is_cancelled_while_it_catches_up_has_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    samplings, stopped, counts = scarce(monkeypatch), list[bool](), list[tuple[int, int]]()
    always_draft(monkeypatch, [8, 3, 12])
    noting(monkeypatch, lambda: stopped.append(True))
    with load(SHIPPED, speculation="lookup", threads=1) as model:
        engine, ids = model._engine, model.tokenizer.encode("A")
        for sampling in samplings * 2:
            follow = model._host._constraining(sampling, None)
            assert follow is not None
            job = Job(engine.steps(None, ids, sampling, lambda: bool(stopped), follow()))
            model._owner.call(partial(run, engine, [job]))
            if stopped:
                end = job.items[-1]
                assert end.finish_reason == "cancelled"
                counts.append((len(job.tokens), end.stats.generated_tokens))
                stopped.clear()
    assert len(counts) > 2
    assert all(handed_out == generated > 0 for handed_out, generated in counts)


def test_a_text_that_waits_holds_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Constraint] = []

    def counted(*arguments: Any) -> Constrained:
        made.append(arguments[0])
        return Constrained(*arguments)

    monkeypatch.setattr(host, "Constrained", counted)
    with load(SHIPPED, parallel=1, threads=1, memory_pressure="off") as model:
        options: dict[str, Any] = {"max_tokens": 4, "constraint": Constraint.regex("[a-f]{8}")}
        # The first one makes the table of tokens, which changes the budget on the model's thread.
        model.generate("Once", **options)
        made.clear()
        entered, go_on = threading.Event(), threading.Event()

        def work() -> None:
            entered.set()
            go_on.wait(60)

        working = threading.Thread(target=model._owner.call, args=(work,))
        working.start()
        assert entered.wait(60)
        found: list[str] = []

        def text() -> None:
            found.append(model.generate("Once", **options).text)

        texts = [threading.Thread(target=text) for _ in range(3)]
        for thread in texts:
            thread.start()
        until(lambda: model._owner._jobs._queue.qsize() == 3)
        waiting = len(made)
        go_on.set()
        for thread in (*texts, working):
            thread.join(60)
    assert waiting == 0
    assert len(made) == 3
    assert all(re.fullmatch("[a-f]+", text) for text in found)
    assert len(found) == 3


def test_the_beginning_of_a_text_keeps_its_space(plain: Model) -> None:
    """A tokenizer may drop a text's first space; what a pattern asks for stays."""
    answer = plain.generate(tokens=[plain.tokenizer.bos_id or BOS], constraint=Constraint.regex(" ab"))
    assert answer.text == " ab"
