"""The official `openai` client, unchanged, against a server: what it says is what the Python API says."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from tests.support.bundles import EOS
from tests.support.serving import Serving

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def reply(server: Serving, **options: Any) -> Any:
    """What the Python API answers."""
    session = server.model.session("Be brief.")
    return session.respond("Hello", **({"temperature": 0.7, "top_p": 0.9} | options))


def chat(client: Any, server: Serving, **options: Any) -> Any:
    return client.chat.completions.create(**({"model": server.model.name, "messages": MESSAGES} | options))


def test_a_chat_is_the_session_s_reply_with_its_usage(server: Serving, client: Any) -> None:
    """What a request leaves open is as the model's authors recommend (temperature 0.7, top_p 0.9)."""
    expected = reply(server, seed=7, max_tokens=20)
    got = chat(client, server, seed=7, max_tokens=20)
    assert got.choices[0].message.content == expected.text
    assert got.choices[0].finish_reason == expected.finish_reason
    assert got.usage.completion_tokens == expected.stats.generated_tokens
    assert got.usage.prompt_tokens == expected.stats.prompt_tokens
    assert got.model == server.model.name


def test_tokens_of_the_prompt_that_are_kept_are_told(server: Serving, client: Any) -> None:
    messages = [{"role": "user", "content": "Nobody has said this before."}]
    first, again = (chat(client, server, messages=messages, max_tokens=4, n=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < first.prompt_tokens - 20
    # The last token always runs.
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1
    assert again.total_tokens == again.prompt_tokens + again.completion_tokens


def test_a_stream_has_the_same_text_and_then_the_usage(server: Serving, client: Any) -> None:
    chat(client, server, seed=3, max_tokens=24)
    whole = chat(client, server, seed=3, max_tokens=24)
    chunks = list(
        chat(client, server, seed=3, max_tokens=24, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_count_their_seeds_up(server: Serving, client: Any) -> None:
    several = chat(client, server, seed=5, max_tokens=12, n=3)
    alone = [chat(client, server, seed=seed, max_tokens=12) for seed in (5, 6, 7)]
    assert [it.index for it in several.choices] == [0, 1, 2]
    assert [it.message.content for it in several.choices] == [it.choices[0].message.content for it in alone]
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(it.usage.completion_tokens for it in alone)
    parts: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in chat(client, server, seed=5, max_tokens=12, n=3, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == [it.message.content for it in several.choices]


def test_a_stop_string_ends_the_text_before_it_in_a_stream_too(server: Serving, client: Any) -> None:
    """The tokens are bytes, so the stop string lies over several of them."""
    free = reply(server, seed=11, max_tokens=40, logit_bias={EOS: -math.inf}).text
    stop = next(free[at : at + 3] for at in range(8, len(free)) if "\ufffd" not in free[at : at + 3])
    bias = {str(EOS): -100}
    whole = chat(client, server, seed=11, max_tokens=40, stop=[stop], logit_bias=bias)
    assert whole.choices[0].message.content == free[: free.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    chunks = chat(client, server, seed=11, max_tokens=40, stop=stop, logit_bias=bias, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == free[: free.index(stop)]


def test_tokens_behind_a_stop_string_have_no_logprobs(server: Serving, client: Any) -> None:
    """The tokens are bytes: those of the stop string itself are cut off with it."""
    options: dict[str, Any] = {"seed": 11, "max_tokens": 40, "logit_bias": only_letters(server)}
    free = chat(client, server, logprobs=True, **options).choices[0]
    text = free.message.content
    stop = text[9:12]
    asked = options | {"stop": [stop, "never written"], "logprobs": True}
    whole = chat(client, server, **asked).choices[0]
    entries = whole.logprobs.content
    assert shown(entries) == whole.message.content == text[: text.index(stop)]
    assert entries == free.logprobs.content[: len(entries)]
    streamed = []
    for chunk in chat(client, server, stream=True, **asked):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == entries
    # What a stop string has held back and the end sets free has them.
    held = options | {"stop": text[-1] + "\0", "logprobs": True}
    assert chat(client, server, **held).choices[0].logprobs == free.logprobs


def shown(entries: Any) -> str:
    """The text of tokens."""
    return bytes(byte for entry in entries for byte in entry.bytes).decode()


def only_letters(server: Serving) -> dict[str, int]:
    """A bias by which the random model writes letters alone, each a token."""
    return {str(token): 100 for token in server.model.tokenizer.encode("abcdefghijklmnop", add_bos=False)}


def test_logprobs_of_completions_end_with_the_text(server: Serving, client: Any) -> None:
    asked: dict[str, Any] = {"model": "", "prompt": "Once", "max_tokens": 30, "seed": 3, "logprobs": 1}
    asked["logit_bias"] = only_letters(server)
    free = client.completions.create(**asked).choices[0]
    stop = free.text[9:12]
    cut = client.completions.create(stop=stop, **asked).choices[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert "".join(cut.logprobs.tokens) == cut.text
    assert cut.logprobs.token_logprobs == free.logprobs.token_logprobs[: len(cut.text)]


def test_logprobs_are_the_log_softmax_of_the_logits(server: Serving, client: Any) -> None:
    got = chat(client, server, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3)
    expected = reply(server, temperature=0.0, max_tokens=4)
    ids = server.model.chat_ids(MESSAGES)
    logits = server.model.logits([*ids, *expected.tokens])
    content = got.choices[0].logprobs.content
    assert len(content) == len(expected.tokens)
    for at, (entry, token) in enumerate(zip(content, expected.tokens, strict=True)):
        row = logits[len(ids) - 1 + at].astype(float)
        scores = row - row.max() - math.log(sum(math.exp(x) for x in row - row.max()))
        assert entry.logprob == pytest.approx(scores[token], abs=1e-9)
        assert bytes(entry.bytes) == server.model.tokenizer.token_bytes(token)
        best = sorted(scores, reverse=True)[:3]
        assert [it.logprob for it in entry.top_logprobs] == pytest.approx(best, abs=1e-9)
        assert entry.top_logprobs[0].token == entry.token
    streamed = [
        entry
        for chunk in chat(
            client, server, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3, stream=True
        )
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_logit_bias_bans_and_forces(server: Serving, client: Any) -> None:
    forced = chat(client, server, temperature=0, max_tokens=5, logit_bias={"65": 100})
    assert forced.choices[0].message.content == "A" * 5 or len(set(forced.choices[0].message.content)) == 1


def test_completions_continue_texts_and_token_ids(server: Serving, client: Any) -> None:
    def complete(prompt: Any, **options: Any) -> Any:
        return client.completions.create(model=server.model.name, prompt=prompt, **options)

    expected = server.model.generate("Once", max_tokens=16)
    got = complete("Once")
    assert got.choices[0].text == expected.text
    ids = server.model.tokenizer.encode("Once")
    assert complete(ids).choices[0].text == expected.text
    two = complete(["Once", "Twice"], max_tokens=8, n=2, seed=1, temperature=1)
    assert [it.index for it in two.choices] == [0, 1, 2, 3]
    second = server.model.generate("Twice", max_tokens=8, seed=2, temperature=1.0)
    assert two.choices[3].text == second.text
    chunks = list(complete("Once", stream=True, stream_options={"include_usage": True}))
    assert "".join(it.choices[0].text for it in chunks if it.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == expected.stats.generated_tokens
    probed = complete("Once", max_tokens=3, logprobs=2).choices[0].logprobs
    assert len(probed.tokens) == len(probed.token_logprobs) == len(probed.top_logprobs) == 3


def test_an_echo_has_the_log_probabilities_of_the_prompt(server: Serving, client: Any) -> None:
    """As lm-eval asks for them: of token ids, with a token behind them."""
    prompt = [*server.model.tokenizer.encode("Once upon"), 258]
    asked: dict[str, Any] = {"model": "", "max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0}
    got = client.completions.create(prompt=[prompt, prompt[:3]], **asked)
    logits = server.model.logits(prompt).astype(float)
    scores = logits - logits.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    for choice, ids in zip(got.choices, (prompt, prompt[:3]), strict=True):
        told = choice.logprobs
        assert told.token_logprobs[0] is told.top_logprobs[0] is None
        of_prompt = [scores[at, token] for at, token in enumerate(ids[1:])]
        assert told.token_logprobs[1:-1] == pytest.approx(of_prompt, abs=1e-9)
        for at in range(1, len(ids)):
            best = sorted(scores[at - 1])[-2:]
            assert sorted(told.top_logprobs[at].values()) == pytest.approx(best, abs=1e-9)
        # What follows is what follows without an echo.
        alone = client.completions.create(prompt=ids, **(asked | {"echo": False})).choices[0]
        assert told.tokens[-1:] == alone.logprobs.tokens
        assert told.token_logprobs[-1] == alone.logprobs.token_logprobs[0]
        assert len(told.tokens) == len(told.text_offset) == len(ids) + 1
        assert choice.text == "<s>Once upon<|user|>"[: len(choice.text) - len(alone.text)] + alone.text
    assert got.usage.prompt_tokens == len(prompt) + 3
    assert got.usage.prompt_tokens_details.cached_tokens == 0


def test_an_echo_tells_the_token_that_ends_the_text_at_once(server: Serving, client: Any) -> None:
    """lm-eval takes the last token away, whatever it is."""
    made = np.random.default_rng(0).integers(0, 250, (20, 200)).tolist()
    ends = ((ids, server.model.logits(ids).argmax(axis=1).tolist()) for ids in made)
    prompt = next(ids[: found.index(EOS) + 1] for ids, found in ends if EOS in found)
    asked: dict[str, Any] = {"model": "", "prompt": prompt, "max_tokens": 1, "logprobs": 1, "echo": True}
    got = client.completions.create(**asked).choices[0]
    assert (got.finish_reason, got.logprobs.tokens[-1]) == ("stop", "</s>")
    assert len(got.logprobs.tokens) == len(got.logprobs.top_logprobs) == len(prompt) + 1
    assert got.logprobs.top_logprobs[-1] == {"</s>": got.logprobs.token_logprobs[-1]}
    streamed: list[str] = []
    for chunk in client.completions.create(stream=True, **asked):
        streamed += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
    assert streamed == got.logprobs.tokens


def test_an_echo_of_a_text_is_the_text_and_may_stand_alone(server: Serving, client: Any) -> None:
    def echo(prompt: str, **options: Any) -> Any:
        asked = {"model": "", "prompt": prompt, "echo": True} | options
        return client.completions.create(**asked)

    got = echo("<|user|>é!", max_tokens=0, logprobs=0).choices[0]
    assert (got.text, got.finish_reason) == ("<|user|>é!", "length")
    # The token that begins every text has no text of its own here; "é" is two tokens.
    assert got.logprobs.tokens == ["<s>", "<|user|>", "\\xc3", "\\xa9", "!"]
    assert got.logprobs.text_offset == [0, 0, 8, 8, 9]
    assert echo("Once", max_tokens=4).choices[0].text == "Once" + (
        server.model.generate("Once", max_tokens=4).text
    )
    whole = echo("Once", max_tokens=4, logprobs=1).choices[0]
    chunks = [it.choices[0] for it in echo("Once", max_tokens=4, logprobs=1, stream=True)]
    assert "".join(it.text for it in chunks) == whole.text
    streamed: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in (chunk.logprobs.to_dict() if chunk.logprobs else {}).items():
            streamed.setdefault(name, []).extend(values)
    assert streamed == whole.logprobs.to_dict()


def test_completions_and_generate_read_special_tokens(server: Serving, client: Any) -> None:
    ids = [256, 258, *server.model.tokenizer.encode("Once", add_bos=False)]
    expected = server.model.generate(tokens=ids, max_tokens=8)
    for prompt in ("<|user|>Once", "<s><|user|>Once"):
        got = client.completions.create(model="", prompt=prompt, max_tokens=8)
        assert (got.choices[0].text, got.usage.prompt_tokens) == (expected.text, 6)
        raw = {"prompt": prompt, "raw": True, "stream": False, "options": {"num_predict": 8}}
        answer = server.post("/api/generate", raw).json
        assert (answer["response"], answer["prompt_eval_count"]) == (expected.text, 6)
        assert server.model.generate(prompt, max_tokens=8).tokens == expected.tokens
    plain = server.model.generate("<|user|>Once", special=False, max_tokens=8)
    assert plain.stats.prompt_tokens == 1 + len("<|user|>Once")


def test_a_stream_of_completions_has_the_log_probabilities_and_offsets_of_the_whole(
    server: Serving, client: Any
) -> None:
    options = {"prompt": ["Once", "Twice"], "max_tokens": 8, "logprobs": 1, "seed": 1, "temperature": 1}
    whole = client.completions.create(model="", **options).choices
    streamed: list[dict[str, list[Any]]] = [{}, {}]
    for chunk in client.completions.create(model="", stream=True, **options):
        choice = chunk.choices[0]
        for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
            streamed[choice.index].setdefault(name, []).extend(values)
    assert streamed == [choice.logprobs.to_dict() for choice in whole]
    assert all(len(set(choice.logprobs.text_offset)) > 1 for choice in whole)


def test_models_are_listed_and_found(server: Serving, client: Any) -> None:
    assert [it.id for it in client.models.list()] == [server.model.name]
    assert client.models.retrieve(server.model.name).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 9}, "temperature"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"n": 99}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    server: Serving, client: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, server, **options)
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize("token", [-1, 99999])
def test_token_ids_that_the_model_lacks_are_refused_by_name(client: Any, token: int) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="", prompt=[1, token])
    assert caught.value.param == "prompt"
    assert "prompt" in caught.value.message


def test_a_single_neutral_value_is_told_once(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"best_of can only be null, 1: "):
        client.completions.create(model="", prompt="x", best_of=2)


def test_neutral_values_and_nulls_are_accepted(server: Serving, client: Any) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "n": 1,
        "user": "u",
        "metadata": {},
        "logit_bias": {},
        "stop": None,
        "seed": None,
        "logprobs": False,
        "store": True,
        "parallel_tool_calls": True,
        "stream_options": {"include_usage": True},
        "top_k": -1,
        "reasoning_effort": "medium",
    }
    got = server.post(
        "/v1/chat/completions",
        {"messages": MESSAGES, "model": None, "max_tokens": 2, "temperature": 0} | neutral,
    )
    assert got.status == 200, got.body
    assert got.json["choices"][0]["message"]["content"] == reply(server, temperature=0.0, max_tokens=2).text


def test_parts_of_text_are_joined_and_pictures_refused(server: Serving, client: Any) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    got = client.chat.completions.create(
        model="", messages=[MESSAGES[0], {"role": "user", "content": parts}], temperature=0, max_tokens=6
    )
    assert got.choices[0].message.content == reply(server, temperature=0.0, max_tokens=6).text
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="", messages=[{"role": "user", "content": [picture]}])
    assert caught.value.param == "messages[0].content[0].type"


def test_a_prompt_beyond_the_context_says_so(server: Serving, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="", messages=[{"role": "user", "content": "a" * 5000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    model, long = server.model, [{"role": "user", "content": "a" * 5000}]
    count = len(model.chat_template.encode(long, model.tokenizer))
    assert caught.value.body["message"] == (
        f"This model's maximum context length is {model.plan.max_context} tokens. However, your messages "
        f"resulted in {count} tokens. Please reduce the length of the messages. (context_length_exceeded)"
    )


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_the_asynchronous_client_streams_several_at_once(server: Serving, client: Any) -> None:
    """They take turns, and each gets the text that it gets alone."""
    expected = [
        chat(client, server, seed=seed, max_tokens=10).choices[0].message.content for seed in range(4)
    ]

    async def one(made: Any, seed: int) -> str:
        stream = await made.chat.completions.create(
            model="", messages=MESSAGES, seed=seed, max_tokens=10, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            return list(await asyncio.gather(*(one(made, seed) for seed in range(4))))

    assert asyncio.run(main()) == expected


def test_a_conversation_goes_on_with_its_keys_and_values(server: Serving, client: Any) -> None:
    """The second turn, and the first one again, take the cache of the first."""
    first = chat(client, server, temperature=0, max_tokens=8)
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "More"},
    ]
    got = client.chat.completions.create(model="", messages=messages, temperature=0, max_tokens=8)
    # The reply's bytes needn't be encoded as they were drawn.
    assert got.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    session = server.model.session("Be brief.")
    session.respond("Hello", max_tokens=8)
    assert got.choices[0].message.content == session.respond("More", max_tokens=8).text
    assert chat(client, server, temperature=0, max_tokens=8).choices == first.choices


def test_the_raw_stream_is_what_the_standard_says(server: Serving) -> None:
    got = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True})
    assert got.headers["content-type"].startswith("text/event-stream")
    events = got.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] for event in events[:-2])
