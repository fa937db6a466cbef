"""llama.cpp's API to continue texts, `/completion`, and to fill a gap between two, `/infill`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.callbacks import PromptProgress
from ondevice.config import MAX_TOP_LOGPROBS
from ondevice.errors import InfillNotSupportedError
from ondevice.generate import Event
from ondevice.records import dataclass
from ondevice.serve.errors import RequestError
from ondevice.serve.exchange import (
    Generation,
    Service,
    generation,
    json_answer,
    read_object,
    reading_of,
)
from ondevice.serve.fields import Fields
from ondevice.serve.formats import take_schema
from ondevice.serve.generation_request import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS,
    SEEDS,
    GenerationRequest,
    chosen,
    take_penalties,
    take_repeat_last_n,
    take_top_p,
)
from ondevice.serve.llama_cpp import NO_SLOT, RANDOM_SEED, is_id, settings
from ondevice.serve.models import ServedModel
from ondevice.serve.openai_common import MAX_BIASES, MAX_CHOICES, MIN_LOGPROB, ids_of, shown_token
from ondevice.serve.raw_text import spelled
from ondevice.serve.streaming import PromptReading, progress_field, sse, sse_dialect, streamed
from ondevice.settings import sampling_options
from ondevice.stats import GenerationStats, per_second
from ondevice.tokenizer import Tokenizer
from ondevice.tokenizer.infill import SourceFile

MAX_PROMPTS = 64
MAX_FILES = 256
MAX_FIELDS = 64
UNNAMED_FILE = "tmp"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "grammar": ("",),
    "image_data": ([],),
    "lora": ([],),
    "mirostat": (0,),
    "post_sampling_probs": (False,),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}
"""Unsupported fields that would change the text or the answer, with the values that don't."""
INERT = (
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "id_slot",
    "min_keep",
    "mirostat_eta",
    "mirostat_tau",
    "n_cache_reuse",
    "n_discard",
    "n_keep",
    "timings_per_token",
    "xtc_threshold",
)
"""Fields that change no text here."""


@dataclass(frozen=True)
class _LlamaCppRequest:
    generations: tuple[GenerationRequest, ...]
    """One for each choice: all choices of a prompt, then those of the next."""
    stream: bool
    returns_tokens: bool
    tells_progress: bool
    most_tokens: int
    """-1: as many as the context has room for."""
    fields: tuple[str, ...] = field(default=())
    """Paths of the answer's fields that are sent; empty: all."""


def routes(service: Service) -> list[Route]:
    complete, infill = partial(_answer, service, False), partial(_answer, service, True)
    return [
        Route("/completion", complete, methods=["POST"]),
        Route("/completions", complete, methods=["POST"]),
        Route("/infill", infill, methods=["POST"]),
    ]


async def _answer(service: Service, fills_gap: bool, request: Request) -> Response:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    async with service.models.ensure_loaded(model) as loaded:
        # Encoding a long text would block the event loop.
        wanted = await asyncio.to_thread(_read, fields, loaded, fills_gap)
    if wanted.stream:
        reading = reading_of(service, wanted.generations[0])
        dialect = sse_dialect(request.url.path, _progress if wanted.tells_progress else None)
        return await streamed(_parts(service, wanted, reading), reading, dialect)
    results = []
    for index, each in enumerate(wanted.generations):
        async with generation(service, each) as running:
            events = [event async for event in running]
        results.append(_result(index, events, running, wanted, each))
    return json_answer(results if len(results) > 1 else results[0])


def _progress(reading: PromptReading, progress: PromptProgress) -> bytes:
    return sse(_empty_part(reading.index, progress.tokens) | progress_field(progress))


async def _parts(
    service: Service, wanted: _LlamaCppRequest, reading: PromptReading
) -> AsyncGenerator[bytes, None]:
    for index, request in enumerate(wanted.generations):
        events: list[Event] = []
        reading.index = index
        async with generation(service, request, reading) as running:
            async for event in running:
                events.append(event)
                if event.text or event.token is not None:
                    yield sse(_part(index, events, running, request))
                if event.finish_reason is not None:
                    yield sse(_result(index, events, running, wanted, request))


def _empty_part(index: int, prompt_tokens: int) -> dict[str, Any]:
    """The object that a stream sends before the first token."""
    return {
        "index": index,
        "content": "",
        "tokens": [],
        "stop": False,
        "id_slot": NO_SLOT,
        "tokens_predicted": 0,
        "tokens_evaluated": prompt_tokens,
    }


def _part(
    index: int, events: Sequence[Event], running: Generation, request: GenerationRequest
) -> dict[str, Any]:
    """The object that a stream sends for its newest token."""
    newest = events[-1]
    part = _empty_part(index, len(running.prompt)) | {
        "content": newest.text,
        "tokens": [] if newest.token is None else [newest.token],
        "tokens_predicted": sum(event.token is not None for event in events),
    }
    return part | _probabilities([newest], running.tokenizer, request)


def _result(
    index: int,
    events: Sequence[Event],
    running: Generation,
    wanted: _LlamaCppRequest,
    request: GenerationRequest,
) -> dict[str, Any]:
    """The object that ends a reply. In a stream its `content` is empty, because the text has already been
    sent.
    """
    last, tokenizer = events[-1], running.tokenizer
    stats = last.stats
    assert stats is not None
    text = "".join(event.text for event in events)
    tokens = [event.token for event in events if event.token is not None]
    sampling = sampling_options(None, request.options)  # type: ignore[arg-type]
    stop_type = "limit" if last.finish_reason == "length" else "eos" if last.stop is None else "word"
    result = {
        "index": index,
        "content": "" if wanted.stream else text,
        "tokens": tokens if wanted.returns_tokens and not wanted.stream else [],
        "id_slot": NO_SLOT,
        "stop": True,
        "model": request.model.name,
        "tokens_predicted": stats.generated_tokens,
        "tokens_evaluated": stats.prompt_tokens,
        "generation_settings": settings(
            sampling, stream=wanted.stream, most_tokens=wanted.most_tokens, seed=stats.seed
        ),
        "prompt": "".join(spelled(tokenizer, running.prompt)),
        "has_new_line": "\n" in text,
        "truncated": False,
        "stop_type": stop_type,
        "stopping_word": last.stop or "",
        "tokens_cached": stats.reused_tokens,
        "timings": _timings(stats),
    }
    if not wanted.stream:
        result |= _probabilities(events, tokenizer, request)
    return _told(result, wanted.fields) if wanted.fields else result


def _told(result: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The values of `result` at these paths, such as `timings/prompt_n`, by path. Missing ones
    are left out.
    """
    told = {}
    for path in paths:
        value: Any = result
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            told[path] = value
    return told


def _probabilities(
    events: Sequence[Event], tokenizer: Tokenizer, request: GenerationRequest
) -> dict[str, Any]:
    """The log-probabilities of the events' tokens; empty if they aren't requested."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "id": token,
            "token": shown_token(tokenizer, token),
            "bytes": list(tokenizer.token_bytes(token)),
            "logprob": max(logprob, MIN_LOGPROB),
        }

    entries = [
        entry(event.token, event.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in event.top_logprobs]}
        for event in events
        if event.token is not None and event.logprob is not None
    ]
    return {"completion_probabilities": entries} if entries and "top_logprobs" in request.options else {}


def _timings(stats: GenerationStats) -> dict[str, Any]:
    """The times of one generation, in milliseconds, and its counts of draft tokens."""
    computed = stats.prompt_tokens - stats.reused_tokens
    prompt_seconds, seconds = stats.time_to_first_token_seconds, stats.decode_seconds
    timings = {
        "cache_n": stats.reused_tokens,
        "prompt_n": computed,
        "prompt_ms": 1e3 * prompt_seconds,
        "prompt_per_token_ms": 1e3 * per_second(prompt_seconds, computed),
        "prompt_per_second": per_second(computed, prompt_seconds),
        "predicted_n": stats.generated_tokens,
        "predicted_ms": 1e3 * seconds,
        "predicted_per_token_ms": 1e3 * per_second(seconds, stats.generated_tokens),
        "predicted_per_second": per_second(stats.generated_tokens, seconds),
    }
    if drafted := stats.drafting.draft_tokens:
        accepted = sum(stats.drafting.accepted_by_depth)
        timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
    return timings


def _read(fields: Fields, loaded: ServedModel, fills_gap: bool) -> _LlamaCppRequest:
    """The parsed request. Raises RequestError, and what encoding raises."""
    most = _take_most_tokens(fields)
    options = _take_options(fields, loaded)
    if most >= 0:
        options["max_tokens"] = most
    choices = fields.integer("n_cmpl", 1, MAX_CHOICES) or fields.integer("n", 1, MAX_CHOICES) or 1
    stream, returns_tokens = fields.boolean("stream"), fields.boolean("return_tokens")
    cache_prompt = fields.boolean("cache_prompt", True)
    tells_progress = fields.boolean("return_progress")
    paths = fields.strings("response_fields", MAX_FIELDS, MAX_STOP_CHARS) or ()
    if fills_gap:
        prompts = [_take_gap(fields, loaded, most)]
        options["end_tokens"] = loaded.model.infill.ends
    else:
        prompts = _take_prompts(fields, loaded)
    for name, values in NEUTRAL.items():
        fields.neutral(name, *values)
    fields.ignore("n", *INERT)
    fields.close()
    first, *rest = (
        GenerationRequest(loaded.facts, prompt=prompt, options=options, cache_prompt=cache_prompt).again(
            index
        )
        for prompt in prompts
        for index in range(choices)
    )
    requests = (first, *(replace(each, follows=True) for each in rest))
    return _LlamaCppRequest(requests, stream, returns_tokens, tells_progress, most, paths)


def _take_most_tokens(fields: Fields) -> int:
    """The most tokens to generate; -1: as many as the context has room for."""
    older, newer = fields.integer("max_tokens", -1, MAX_TOKENS), fields.integer("n_predict", -2, MAX_TOKENS)
    most = older if newer is None else newer
    return -1 if most is None else max(most, -1)


def _take_options(fields: Fields, loaded: ServedModel) -> dict[str, Any]:
    """The options of SamplingConfig. Values that switch an option off in this dialect are replaced by those
    that do so here.
    """
    temperature = fields.number("temperature", -100.0, 100.0)
    top_k = fields.integer("top_k", -MAX_TOKENS, MAX_TOKENS)
    seed = fields.integer("seed", -(1 << 63), SEEDS - 1)
    options = {
        "temperature": None if temperature is None else temperature if temperature >= 1e-6 else 0.0,
        "top_k": None if top_k is None else max(top_k, 0),
        "top_p": take_top_p(fields),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "repetition_penalty": fields.number("repeat_penalty", 1e-3, 100.0),
        "repeat_last_n": take_repeat_last_n(fields),
        "seed": None if seed in (None, -1, RANDOM_SEED) else seed % SEEDS,
        "stop": _take_stop(fields),
        "constraint": take_schema(fields, "json_schema"),
        "logit_bias": _take_biases(fields, loaded),
    }
    options |= take_penalties(fields)
    if most := fields.integer("n_probs", 0, MAX_TOP_LOGPROBS):
        options["top_logprobs"] = most
    return chosen(options)


def _take_stop(fields: Fields) -> tuple[str, ...] | None:
    """The stop strings. Empty ones are dropped."""
    value = fields.take("stop")
    if isinstance(value, list):
        value = [text for text in value if text != ""]
    return Fields({"stop": value}, fields.path).strings("stop", MAX_STOPS, MAX_STOP_CHARS) or None


def _take_biases(fields: Fields, loaded: ServedModel) -> dict[int, float] | None:
    """The biases by token id, from pairs or an object. A text's bias applies to all of its tokens."""
    value, no_end = fields.take("logit_bias"), fields.boolean("ignore_eos")
    tokenizer = loaded.model.tokenizer
    biases: dict[int, float] = {}
    pairs = list(value.items()) if isinstance(value, dict) else [] if value is None else value
    wanted = "must be pairs of a token id or a text and a number or false, or an object of these"
    if not isinstance(pairs, list):
        fields.refuse("logit_bias", wanted)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            fields.refuse("logit_bias", wanted)
        name, bias = pair
        if isinstance(value, dict) and name.isascii() and name.isdecimal() and len(name) <= 9:
            name = int(name)
        if bias is not False and (type(bias) not in (int, float) or not abs(bias) <= 1e9):
            fields.refuse("logit_bias", wanted)
        if not isinstance(name, str) and not is_id(name, loaded):
            fields.refuse("logit_bias", f"names what isn't a token id; {ids_of(loaded.facts)}")
        ids = tokenizer.encode(name, add_bos=False, most=MAX_BIASES) if isinstance(name, str) else [name]
        biases |= dict.fromkeys(ids, -math.inf if bias is False else float(bias))
        if len(biases) > MAX_BIASES:
            fields.refuse("logit_bias", f"has more than {MAX_BIASES} tokens")
    if no_end:
        biases |= dict.fromkeys(tokenizer.eos_ids, -math.inf)
    return biases or None


def _take_prompts(fields: Fields, loaded: ServedModel) -> list[tuple[int, ...]]:
    """The token ids of each prompt. A list that contains a number is one prompt."""
    value = fields.take("prompt")
    several = isinstance(value, list) and not any(type(part) is int for part in value)
    prompts = value if several else [value]
    if not prompts or len(prompts) > MAX_PROMPTS:
        fields.refuse("prompt", f"has {len(prompts)} prompts; it must have 1 to {MAX_PROMPTS}")
    return [tuple(_prompt_ids(fields, prompt, loaded)) for prompt in prompts]


def _prompt_ids(fields: Fields, prompt: Any, loaded: ServedModel) -> list[int]:
    """The token ids of a text, or of a list of texts and ids. If a text comes first, the beginning-of-text
    token precedes it.
    """
    if isinstance(prompt, dict):
        parted = fields.inner(prompt, "prompt")
        prompt = parted.required_text("prompt_string")
        parted.neutral("multimodal_data", [])
        parted.close()
    parts = prompt if isinstance(prompt, list) else [prompt]
    if not parts or not all(isinstance(part, str) or is_id(part, loaded) for part in parts):
        fields.refuse("prompt", f"must be a text, token ids, or a list of both; {ids_of(loaded.facts)}")
    # Encoded to its end, as an answer that refuses it tells the number of tokens.
    tokenizer = loaded.model.tokenizer
    ids: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        elif index == 0:
            ids += tokenizer.encode(part, special=True)
        else:
            ids += tokenizer.encode(part, add_bos=False, special=True, at_start=False)
    return ids


def _take_gap(fields: Fields, loaded: ServedModel, most_tokens: int) -> tuple[int, ...]:
    """The token ids of a prompt to fill the gap between `input_prefix` plus `prompt`, and `input_suffix`.

    `prompt` is an editor's line up to the cursor.
    """
    prefix, suffix = fields.text("input_prefix", "") or "", fields.text("input_suffix", "") or ""
    prefix += fields.text("prompt", "") or ""
    files = [_file(each) for each in fields.objects("input_extra")] if fields.peek("input_extra") else []
    fields.ignore("input_extra")
    if len(files) > MAX_FILES:
        fields.refuse("input_extra", f"has {len(files)} files; it may have {MAX_FILES}")
    model, context = loaded.model, loaded.model.plan.max_context
    reserved = min(max(most_tokens, 0), context // 2)
    try:
        ids = model.infill.prompt(model.tokenizer, prefix, suffix, files, context, reserved)
        if len(ids) > context:
            # Encoded to their ends, as the answer tells the number of tokens.
            ids = model.infill.prompt(model.tokenizer, prefix, suffix)
        return tuple(ids)
    except InfillNotSupportedError as error:
        raise RequestError(501, error.for_command_line, code="unsupported_parameter") from error


def _file(fields: Fields) -> SourceFile:
    file = SourceFile(fields.text("filename") or UNNAMED_FILE, fields.text("text", "") or "")
    fields.close()
    return file
