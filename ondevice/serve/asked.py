"""What a request comes to: a generation that it asks for; and the fields that most dialects have."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any

from ondevice.chat_template.messages import Message
from ondevice.chat_template.tools import PLAIN, PromptOptions
from ondevice.records import dataclass
from ondevice.serve.fields import Fields
from ondevice.serve.models import ModelFacts

SEEDS = 1 << 64
MAX_TOKENS = 1 << 24
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
MOST_PENALTY = 2.0
LEAST_TOP_P = 1e-6
"""A share of the probability that only the likeliest token can hold."""


@dataclass(frozen=True)
class Asked:
    """A generation that a request asks for: a reply to `messages`, or what continues `prompt`.

    prompting: tools, and whether to think, where messages are answered.
    suffix: a text behind a gap that `prompt` stands before; what belongs between them is generated.
    scores: how many of the likeliest tokens the prompt's own tokens are scored with; None: they aren't.
    messages_field, constraint_field: where the request has the messages and the constraint, for errors.
    options: fields of SamplingConfig that the request sets. Without `max_tokens` the context alone is the
    limit. Where messages are answered, fields that aren't set are as the model's authors recommend.
    cache_prompt: whether a prompt goes on from what an earlier text has left of it, and leaves it
    for later ones.
    follows: whether its request has had a turn already, for another generation.
    least_context: tokens of context that the request asks for; 0: it doesn't say.
    """

    model: ModelFacts
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    suffix: str | None = None
    scores: int | None = None
    prompting: PromptOptions = PLAIN
    options: dict[str, Any] = field(default_factory=dict)
    messages_field: str = "messages"
    constraint_field: str | None = None
    cache_prompt: bool = True
    follows: bool = False
    least_context: int = 0

    def again(self, index: int) -> Asked:
        """The same for choice `index` of several: from a seed, the choices' seeds count up."""
        if index == 0:
            return self
        seed = self.options.get("seed")
        counted = {} if seed is None else {"seed": (seed + index) % SEEDS}
        return replace(self, options=self.options | counted, follows=True)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a request sets, of all that it may set."""
    return {name: value for name, value in options.items() if value is not None}


def take_limit(fields: Fields, name: str, least: int = 1) -> int | None:
    """The most tokens to generate; None where there is no limit, which -1 says too."""
    if fields.peek(name) == -1:
        fields.ignore(name)
    return fields.integer(name, least, MAX_TOKENS, also="-1 for no limit")


def take_top_k(fields: Fields) -> int | None:
    """How many of the likeliest tokens count. 0 and -1 are all of them."""
    value = fields.integer("top_k", -1, MAX_TOKENS)
    return None if value is None else max(value, 0)


def take_penalties(fields: Fields) -> dict[str, float | None]:
    """The penalties of tokens that were generated before, by their number and by their presence."""
    names = ("frequency_penalty", "presence_penalty")
    return {name: fields.number(name, -MOST_PENALTY, MOST_PENALTY) for name in names}


def take_repeat_last_n(fields: Fields) -> int | None:
    """How many of the newest tokens penalties look at. -1 is all of them, 0 none."""
    return fields.integer("repeat_last_n", -1, MAX_TOKENS)


def take_temperature(fields: Fields, most: float) -> float | None:
    """The temperature. One too low to differ from 0 is 0."""
    value = fields.number("temperature", 0.0, most)
    return 0.0 if value is not None and value < 1e-6 else value


def take_top_p(fields: Fields) -> float | None:
    """The share of the probability. 0 keeps the likeliest token, as other servers have it."""
    value = fields.number("top_p", 0.0, 1.0)
    return None if value is None else max(value, LEAST_TOP_P)


def take_seed(fields: Fields) -> int | None:
    """The seed. Negative ones count down from 2^64."""
    value = fields.integer("seed", -(1 << 63), SEEDS - 1)
    return None if value is None else value % SEEDS
