"""The generation that a request asks for, and readers for the fields that most dialects have."""

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
MAX_PENALTY = 2.0
MIN_TOP_P = 1e-6
"""A `top_p` that keeps the likeliest token only."""


@dataclass(frozen=True)
class GenerationRequest:
    """A generation that a request asks for: a reply to `messages`, or a continuation of `prompt`.

    prompting: tools, and whether to think, for replies. suffix: the text after a gap; the text between
    `prompt` and it is generated. scores: number of likeliest tokens in the scores of the prompt's tokens;
    None: no scores. options: fields of SamplingConfig that the request sets. Without `max_tokens` only the
    context limits the text. In replies, fields that aren't set get the values that the model's authors
    recommend. messages_field, constraint_field: the request's fields of the messages and the constraint, for
    errors. cache_prompt: whether the prompt's state is reused from earlier texts, and left for later ones.
    follows: whether the HTTP request has been admitted already, for another generation. least_context: tokens
    of context that the request asks for; 0: it doesn't say.
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

    def again(self, index: int) -> GenerationRequest:
        """The same generation for choice `index`. If there is a seed, it is higher by `index`."""
        if index == 0:
            return self
        seed = self.options.get("seed")
        counted = {} if seed is None else {"seed": (seed + index) % SEEDS}
        return replace(self, options=self.options | counted, follows=True)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def take_limit(fields: Fields, name: str, least: int = 1) -> int | None:
    """The most tokens to generate; None without a limit, which may be given as -1."""
    if fields.peek(name) == -1:
        fields.ignore(name)
    return fields.integer(name, least, MAX_TOKENS, also="-1 for no limit")


def take_top_k(fields: Fields) -> int | None:
    """How many of the likeliest tokens count; 0 and -1 stand for all."""
    value = fields.integer("top_k", -1, MAX_TOKENS)
    return None if value is None else max(value, 0)


def take_penalties(fields: Fields) -> dict[str, float | None]:
    """The penalties of generated tokens: for how often they occur, and for whether they occur."""
    names = ("frequency_penalty", "presence_penalty")
    return {name: fields.number(name, -MAX_PENALTY, MAX_PENALTY) for name in names}


def take_repeat_last_n(fields: Fields) -> int | None:
    """How many of the newest tokens penalties look at; -1 stands for all, 0 for none."""
    return fields.integer("repeat_last_n", -1, MAX_TOKENS)


def take_temperature(fields: Fields, most: float) -> float | None:
    """The temperature. Values that are too low to differ from 0 become 0."""
    value = fields.number("temperature", 0.0, most)
    return 0.0 if value is not None and value < 1e-6 else value


def take_top_p(fields: Fields) -> float | None:
    """The value of `top_p`. With 0 only the likeliest token is kept, as on other servers."""
    value = fields.number("top_p", 0.0, 1.0)
    return None if value is None else max(value, MIN_TOP_P)


def take_seed(fields: Fields) -> int | None:
    """The seed. Negative values count down from 2^64."""
    value = fields.integer("seed", -(1 << 63), SEEDS - 1)
    return None if value is None else value % SEEDS
