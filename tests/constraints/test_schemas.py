"""Schemas of others, and made-up ones: every answer that ends is valid, or the schema is refused by name.

The schemas are a sample of JSONSchemaBench (arXiv 2501.10868). Answers are sampled, so that they differ from
what a model would say; most of them end.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
from ondevice import Constraint, ConstraintError
from ondevice.api import Model, load
from tests.support.engines import always_draft
from tests.support.paths import SHIPPED

jsonschema = pytest.importorskip("jsonschema")

MOST_REFUSED = 0.05
MADE_UP = 50
MAX_TOKENS = 300
FAST = 20
"""One schema in this many is the fast test's."""
ENDINGS = {"}": 14.0, "]": 2.0, '"': 13.5}
"""By how much what ends values is made likelier: the model's own texts and lists would fill every answer."""


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with load(SHIPPED, speculation="off", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def collected(shared_data: Path) -> dict[str, Any]:
    file = shared_data / "schemas/jsonschemabench_sample.json.xz"
    if not file.is_file():
        pytest.skip("../shared/data/schemas is absent: this test needs its schemas")
    with lzma.open(file) as stream:
        found: dict[str, Any] = json.load(stream)
    return found


def made_up(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that some value satisfies."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf", "oneOf"]
    kind = rng.choice(kinds)
    if kind == "string":
        limits = {"minLength": rng.randrange(3), "maxLength": 3 + rng.randrange(6)}
        others = [{"pattern": "^[a-c]{1,4}$"}, {"format": "date"}, {"format": "unheard-of", **limits}]
        return {"type": "string"} | rng.choice([limits, *others])
    if kind == "integer":
        least = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(100)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "exclusiveMaximum": 10}
    if kind == "enum":
        return {"enum": rng.sample([1, 2.5, "a", None, True, [1, 2], {"a": 1}], 3)}
    if kind == "array":
        return {"type": "array", "items": made_up(rng, depth + 1), "maxItems": 1 + rng.randrange(3)}
    if kind == "anyOf":
        return {"anyOf": [made_up(rng, depth + 1) for _ in range(2)]}
    if kind == "oneOf":
        return {"oneOf": [_tagged(rng, depth, tag) for tag in ("one", "two", "three")]}
    if kind == "object":
        names = rng.sample(["alpha", "beta", "gamma", "delta"], 1 + rng.randrange(4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: made_up(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
        if len(names) > 1 and rng.random() < 0.3:
            found["dependentRequired"] = {names[0]: [names[1]]}
        return found
    return {"type": kind}


def _tagged(rng: random.Random, depth: int, tag: str) -> dict[str, Any]:
    inner = {"kind": {"const": tag}, "value": made_up(rng, depth + 2)}
    return {"type": "object", "properties": inner, "required": ["value"], "additionalProperties": False}


def check(model: Model, schemas: dict[str, Any]) -> tuple[int, int]:
    """Check an answer to every schema. Returns how many were refused, and how many answers ended."""
    refused = ended = 0
    bias = {model.tokenizer.encode(end)[-1]: more for end, more in ENDINGS.items()}
    for seed, (name, schema) in enumerate(schemas.items()):
        constraint = Constraint.json_schema(schema)
        try:
            answer = model.generate(
                "JSON:",
                constraint=constraint,
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                seed=seed,
                logit_bias=bias,
            )
        except ConstraintError as error:
            if error.keyword is None:
                pytest.fail(f"{name} is refused without a keyword: {error}")
            refused += 1
            continue
        if answer.finish_reason == "stop":
            ended += 1
            validator = jsonschema.validators.validator_for(schema)(schema)
            assert validator.is_valid(json.loads(answer.text)), f"{name}: {answer.text}"
    return refused, ended


def test_answers_to_some_schemas_are_valid(plain: Model, collected: dict[str, Any]) -> None:
    _, ended = check(plain, dict(list(collected.items())[::FAST]))
    assert ended


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_answers_to_all_schemas_are_valid(plain: Model, collected: dict[str, Any]) -> None:
    refused, ended = check(plain, collected)
    assert refused <= MOST_REFUSED * len(collected)
    assert ended > 0.9 * len(collected)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_answers_to_made_up_schemas_are_valid(plain: Model) -> None:
    rng = random.Random(27)
    schemas = {str(number): made_up(rng) for number in range(MADE_UP)}
    refused, ended = check(plain, schemas)
    assert refused <= MOST_REFUSED * MADE_UP
    assert ended > 0.9 * MADE_UP


def answers(model: Model, schemas: list[Any]) -> list[tuple[int, ...]]:
    """The tokens of an answer to each schema; none where it is refused."""
    found = []
    for schema in schemas:
        constraint = Constraint.json_schema(schema)
        try:
            answer = model.generate("JSON:", constraint=constraint, max_tokens=100, temperature=1.0, seed=7)
        except ConstraintError:
            found.append(())
        else:
            found.append(tuple(answer.tokens))
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_drafts_change_no_answer_to_made_up_schemas(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(28)
    schemas = [made_up(rng) for _ in range(MADE_UP)]
    expected = answers(plain, schemas)
    assert all(expected)
    always_draft(monkeypatch, [8, 3, 12, 16])
    for drafter in ("auto", "resident", "recycling", "lookup"):
        with load(SHIPPED, speculation=drafter, threads=1) as model:  # type: ignore[arg-type]
            assert answers(model, schemas) == expected, drafter


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_drafts_change_no_answer_to_collected_schemas(
    plain: Model, collected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = list(collected.values())
    expected = answers(plain, schemas)
    assert sum(not tokens for tokens in expected) <= MOST_REFUSED * len(schemas)
    always_draft(monkeypatch, [8, 3, 12, 16])
    for drafter in ("auto", "lookup"):
        with load(SHIPPED, speculation=drafter, threads=1) as model:  # type: ignore[arg-type]
            assert answers(model, schemas) == expected, drafter
