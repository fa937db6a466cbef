"""llama.cpp's API about a model and its text: tokens, the chat template, properties and slots."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ondevice.chat_template import abilities
from ondevice.config import SamplingConfig
from ondevice.serve.errors import RequestError
from ondevice.serve.exchange import Service, json_answer, read_object
from ondevice.serve.models import ServedModel
from ondevice.serve.openai_chat import take_prompting
from ondevice.serve.openai_common import ids_of, take_messages
from ondevice.serve.raw_text import NamedSpelling, spelled
from ondevice.tokenizer import Tokenizer

RANDOM_SEED = (1 << 32) - 1
"""The seed that stands for a drawn one."""
NO_SLOT = -1
"""The id that stands for any slot: requests have no slots here."""


def routes(service: Service) -> list[Route]:
    return [
        Route("/tokenize", partial(_tokenize, service), methods=["POST"]),
        Route("/detokenize", partial(_detokenize, service), methods=["POST"]),
        Route("/apply-template", partial(_apply_template, service), methods=["POST"]),
        Route("/props", partial(_props, service), methods=["GET"]),
        Route("/slots", partial(_slots, service), methods=["GET"]),
    ]


def is_id(value: Any, loaded: ServedModel) -> bool:
    """Whether a JSON value is one of the model's token ids."""
    return type(value) is int and 0 <= value < loaded.facts.vocab_size


async def _tokenize(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    text = fields.text("content", "") or ""
    add_bos, special = fields.boolean("add_special"), fields.boolean("parse_special", True)
    with_pieces, counts = fields.boolean("with_pieces"), fields.boolean("count")
    fields.close()
    async with service.models.ensure_loaded(model) as loaded:
        tokenizer = loaded.model.tokenizer
        encode = partial(tokenizer.encode, add_bos=add_bos and tokenizer.add_bos, special=special)
        ids = await asyncio.to_thread(encode, text)
    if counts:
        return json_answer({"count": len(ids)})
    if not with_pieces:
        return json_answer({"tokens": ids})
    return json_answer({"tokens": [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]})


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes if these aren't complete characters."""
    data = NamedSpelling(tokenizer).token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _detokenize(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    ids = fields.take("tokens")
    fields.close()
    if not isinstance(ids, list):
        fields.refuse("tokens", "must be a list of token ids")
    async with service.models.ensure_loaded(model) as loaded:
        if not all(is_id(token, loaded) for token in ids):
            fields.refuse("tokens", f"has what isn't a token id; {ids_of(model)}")
        text = "".join(spelled(loaded.model.tokenizer, ids))
    return json_answer({"content": text})


async def _apply_template(service: Service, request: Request) -> Response:
    fields = await read_object(service, request)
    model = service.models.find(fields.text("model"))
    messages, prompting = take_messages(fields), take_prompting(fields, model)
    begins_reply = fields.boolean("add_generation_prompt", True)
    fields.close()
    async with service.models.ensure_loaded(model) as loaded:
        render = partial(
            loaded.model.chat_template.render, options=prompting, add_generation_prompt=begins_reply
        )
        return json_answer({"prompt": await asyncio.to_thread(render, messages)})


async def _props(service: Service, request: Request) -> Response:
    model = service.models.find(request.query_params.get("model"))
    async with service.models.ensure_loaded(model) as loaded:
        tokenizer, names = loaded.model.tokenizer, abilities(model.template)
        slot = _slot(loaded, 0, busy=False)
    bos, ends = tokenizer.bos_id, tokenizer.eos_ids
    return json_answer(
        {
            "default_generation_settings": slot | {"params": settings(SamplingConfig(), stream=True)},
            "total_slots": loaded.parallel,
            "model_alias": model.name,
            "model_path": model.name,
            "chat_template": model.template,
            "chat_template_caps": {
                "supports_tools": "tools" in names,
                "supports_tool_calls": "tools" in names,
            },
            "modalities": {"vision": False, "audio": False},
            "bos_token": "" if bos is None else tokenizer.piece(bos),
            "eos_token": tokenizer.piece(ends[0]) if ends else "",
            "build_info": f"ondevice-{version('ondevice')}",
            "is_sleeping": False,
        }
    )


async def _slots(service: Service, request: Request) -> Response:
    loaded = service.models.loaded
    if loaded is None:
        raise RequestError(503, "no model is loaded; try again")
    busy = min(service.models.running, loaded.parallel)
    if busy == loaded.parallel and request.query_params.get("fail_on_no_slot") == "1":
        raise RequestError(503, "no slot is free; try again")
    return json_answer([_slot(loaded, index, index < busy) for index in range(loaded.parallel)])


def _slot(loaded: ServedModel, index: int, busy: bool) -> dict[str, Any]:
    return {
        "id": index,
        "id_task": -1,
        "n_ctx": loaded.model.plan.max_context,
        "speculative": loaded.model.runtime.speculation != "off",
        "is_processing": busy,
    }


def settings(
    sampling: SamplingConfig, *, stream: bool, most_tokens: int = -1, seed: int | None = None
) -> dict[str, Any]:
    """The options of a generation, under the names that this dialect gives them.

    most_tokens: -1 for as many as the context has room for. seed: the seed that was drawn, if one was.
    """
    return {
        "seed": RANDOM_SEED if seed is None else seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "n_predict": most_tokens,
        "max_tokens": most_tokens,
        "stream": stream,
        # JSON has no infinity; null is a token that is banned.
        "logit_bias": [
            {"token": token, "bias": None if bias == float("-inf") else bias}
            for token, bias in sampling.logit_bias
        ],
        "n_probs": sampling.top_logprobs or 0,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    }
