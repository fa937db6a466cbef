"""llama.cpp's API: its answers' keys, and tokens and texts as the Python API has them."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from tests.serve.test_openapi import LEVELS
from tests.support.bundles import (
    BOS,
    EOS,
    FIRST_MARK,
    INFILL_MARKS,
    convert_bundle,
    write_chat_checkpoint,
)
from tests.support.serving import Serving, serving

PRE, SUF, MID, REPO, FILE = range(FIRST_MARK, FIRST_MARK + 5)
RESULT = set(
    [
        "index",
        "content",
        "tokens",
        "id_slot",
        "stop",
        "model",
        "tokens_predicted",
        "tokens_evaluated",
        "generation_settings",
        "prompt",
        "has_new_line",
        "truncated",
        "stop_type",
        "stopping_word",
        "tokens_cached",
        "timings",
    ]
)
"""Keys of a whole answer of llama.cpp's server."""
PART = set(["index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"])
"""Keys of a part of its streams."""
TIMINGS = set(
    [
        "cache_n",
        "prompt_n",
        "prompt_ms",
        "prompt_per_token_ms",
        "prompt_per_second",
        "predicted_n",
        "predicted_ms",
        "predicted_per_token_ms",
        "predicted_per_second",
    ]
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model with marks of prefix, suffix and middle, resident, one thread, a token a pass."""
    folder = tmp_path_factory.mktemp("marked")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", LEVELS, INFILL_MARKS)
    bundle = convert_bundle(checkpoint, folder / "marked")
    with serving(load(bundle, threads=1, speculation="off")) as running:
        yield running


def complete(server: Serving, prompt: Any, **options: Any) -> Any:
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 8} | options)
    assert answer.status == 200, answer.body
    return answer.json


def plain(server: Serving, text: str) -> list[int]:
    return server.model.tokenizer.encode(text, add_bos=False)


def test_a_completion_has_the_text_of_generate_and_llama_cpp_s_keys(server: Serving) -> None:
    expected = server.model.generate("<|user|>Once", max_tokens=8)
    got = complete(server, "<|user|>Once", return_tokens=True)
    assert set(got) == RESULT
    assert set(got["timings"]) == TIMINGS
    assert (got["content"], got["tokens"]) == (expected.text, list(expected.tokens))
    assert got["tokens_predicted"] == len(expected.tokens) == got["timings"]["predicted_n"] == 8
    # A special token's name is that token, and one begins the text.
    assert got["tokens_evaluated"] == got["timings"]["prompt_n"] == 2 + len("Once")
    assert got["prompt"] == "<s><|user|>Once"
    assert (got["stop"], got["stop_type"], got["truncated"]) == (True, "limit", False)
    assert got["generation_settings"]["n_predict"] == 8
    assert server.post("/completions", {"prompt": "<|user|>Once", "n_predict": 8}).json["content"] == (
        expected.text
    )


def test_prompts_are_texts_token_ids_or_both(server: Serving) -> None:
    once = plain(server, "Once")
    texts = [
        complete(server, prompt)["prompt"]
        for prompt in ("Once", [BOS, *once], [BOS, "On", *plain(server, "ce")], {"prompt_string": "Once"})
    ]
    assert texts == ["<s>Once"] * 4
    # Ids alone are taken as they are.
    assert complete(server, once)["tokens_evaluated"] == 4
    several = complete(server, ["Once", [BOS, "On", 65], once], n_predict=2)
    assert [it["index"] for it in several] == [0, 1, 2]
    assert [it["tokens_evaluated"] for it in several] == [5, 4, 4]
    two = complete(server, "Once", n_predict=3, n_cmpl=2, seed=4, temperature=1)
    assert [it["generation_settings"]["seed"] for it in two] == [4, 5]


def test_a_stream_has_the_parts_of_the_whole(server: Serving) -> None:
    options = {"prompt": "Once", "n_predict": 8, "n_probs": 2, "seed": 5, "temperature": 1.0}
    whole = server.post("/completion", options | {"return_tokens": True}).json
    body = server.post("/completion", options | {"stream": True}).body.decode()
    events = [json.loads(line[6:]) for line in body.split("\n\n") if line]
    *parts, last = events
    assert all(set(part) == PART | {"completion_probabilities"} for part in parts[:1])
    assert all(set(part) >= PART and part["stop"] is False for part in parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    told = [entry for part in parts for entry in part.get("completion_probabilities", ())]
    assert told == whole["completion_probabilities"]
    assert set(last) == RESULT
    assert (last["content"], last["stop"]) == ("", True)


def test_n_probs_are_the_log_softmax_of_the_logits(server: Serving) -> None:
    got = complete(server, "Once", n_predict=3, n_probs=2, return_tokens=True)
    ids = server.model.prompt_ids("Once")
    logits = server.model.logits([*ids, *got["tokens"]])
    for at, entry in enumerate(got["completion_probabilities"]):
        row = logits[len(ids) - 1 + at].astype(float)
        scores = row - row.max() - math.log(sum(math.exp(x) for x in row - row.max()))
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert entry["logprob"] == pytest.approx(scores[entry["id"]], abs=1e-9)
        assert bytes(entry["bytes"]) == server.model.tokenizer.token_bytes(entry["id"])
        best = sorted(range(len(scores)), key=lambda token: -scores[token])[:2]
        assert [it["id"] for it in entry["top_logprobs"]] == best


def test_stops_biases_and_response_fields(server: Serving) -> None:
    options: dict[str, Any] = {"logit_bias": [["abc", 50.0], [EOS, False]], "temperature": 1.0, "seed": 2}
    free = complete(server, "Once", **options)
    assert set(free["content"]) <= set("abc")
    stop = free["content"][3:5]
    cut = complete(server, "Once", stop=["", stop], **options)
    assert cut["content"] == free["content"][: free["content"].index(stop)]
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)
    ended = complete(server, "Once", logit_bias={str(EOS): 1000})
    assert (ended["content"], ended["stop_type"]) == ("", "eos")
    going_on = complete(server, "Once", logit_bias={str(EOS): 1000}, ignore_eos=True)
    assert going_on["stop_type"] == "limit"
    told = complete(server, "Once", response_fields=["content", "timings/prompt_n", "none/such"])
    assert set(told) == {"content", "timings/prompt_n"}


def test_what_changes_nothing_is_taken_and_what_would_is_refused(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    expected = complete(server, "Once")["content"]
    neutral = {"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75, "repeat_last_n": 9}
    unknown = {"t_max_predict_ms": 500, "samplers": ["top_k", "infill"], "cache_prompt": True, "id_slot": -1}
    with caplog.at_level(logging.INFO, "ondevice.serve"):
        assert complete(server, "Once", **neutral, **unknown, seed=-1)["content"] == expected
    logged = [json.loads(it.message) for it in caplog.records if '"ignored"' in it.message]
    assert [it["fields"] for it in logged] == [["t_max_predict_ms", "samplers"]]
    for name, value in (("mirostat", 2), ("grammar", "root ::= x"), ("lora", [{"id": 0}]), ("n_probs", 99)):
        answer = server.post("/completion", {"prompt": "Once", name: value})
        assert answer.status == 400
        assert set(answer.json["error"]) == {"code", "message", "type"}
        assert name in answer.json["error"]["message"]
    long = server.post("/completion", {"prompt": "x" * 300}).json["error"]
    most = server.model.plan.max_context
    assert (long["type"], long["n_ctx"]) == ("exceed_context_size_error", most)
    assert long["n_prompt_tokens"] == 301


def test_texts_beyond_the_context_are_told_with_all_of_their_tokens(server: Serving) -> None:
    prefix, suffix = "a long text " * 4000, "b" * 5000
    count = len(prefix) + len(suffix)
    for path, body in (
        ("/completion", {"prompt": [prefix, 65, suffix]}),
        ("/infill", {"input_prefix": prefix, "input_suffix": suffix, "input_extra": [{"text": "x" * 999}]}),
        ("/v1/completions", {"prompt": prefix, "suffix": suffix}),
        ("/v1/completions", {"prompt": prefix, "suffix": suffix, "stream": True}),
        ("/api/generate", {"prompt": prefix, "suffix": suffix}),
    ):
        answer = server.post(path, body)
        assert answer.status == 400, path
        # With BOS, and the three marks or the id between them.
        tokens = count + 2 if path == "/completion" else count + 4
        assert re.search(rf"\b{tokens} tokens", answer.body.decode()), (path, answer.body)


@pytest.mark.parametrize("prompt", [[], [[]], [1.5], [-1], [10**9], None, {}, [["a", True]], ["a"] * 65])
def test_what_is_no_prompt_is_refused(server: Serving, prompt: Any) -> None:
    answer = server.post("/completion", {"prompt": prompt})
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


def test_infill_asks_for_what_belongs_between(server: Serving) -> None:
    asked = {
        "input_prefix": "a\n",
        "input_suffix": "b",
        "prompt": "c",
        "input_extra": [{"filename": "x.py", "text": "one"}, {"text": "two"}],
        "n_predict": 6,
    }
    got = server.post("/infill", asked).json
    names = "<s><|repo_name|>myproject\n<|file_sep|>x.py\none<|file_sep|>tmp\ntwo<|file_sep|>filename\n"
    assert got["prompt"] == f"{names}<|fim_prefix|>a\nc<|fim_suffix|>b<|fim_middle|>"
    ids = [BOS, PRE, *plain(server, "a\nc"), SUF, *plain(server, "b"), MID]
    alone = server.post("/infill", asked | {"input_extra": []}).json
    expected = server.model.generate(tokens=ids, max_tokens=6, end_tokens=(PRE, SUF, MID, REPO, FILE))
    assert (alone["content"], alone["tokens_evaluated"]) == (expected.text, len(ids))
    # A mark ends it.
    ended = server.post("/infill", asked | {"logit_bias": [[FILE, 1000]]}).json
    assert (ended["content"], ended["stop_type"]) == ("", "eos")


def test_suffixes_of_other_dialects_are_the_same_text(server: Serving) -> None:
    expected = server.model.generate("a", suffix="b", max_tokens=6)
    got = server.post("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 6}).json
    assert got["choices"][0]["text"] == expected.text
    assert got["usage"]["prompt_tokens"] == expected.stats.prompt_tokens == 6
    for raw in (False, True):
        asked = {"prompt": "a", "suffix": "b", "raw": raw, "stream": False, "options": {"num_predict": 6}}
        assert server.post("/api/generate", asked).json["response"] == expected.text
    assert "insert" in server.post("/api/show", {"model": server.model.name}).json["capabilities"]
    refused = server.post("/v1/completions", {"prompt": [65], "suffix": "b"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "suffix")


def test_tokens_and_texts_are_the_tokenizer_s(server: Serving) -> None:
    def tokenize(**options: Any) -> Any:
        return server.post("/tokenize", {"content": "<|user|>é"} | options).json["tokens"]

    # "é" is two tokens of a byte each.
    special, spelt = [258, *plain(server, "é")], plain(server, "<|user|>é")
    assert tokenize() == special
    assert tokenize(parse_special=False) == spelt
    assert tokenize(add_special=True) == [BOS, *special]
    assert server.post("/tokenize", {"content": "<|user|>é", "count": True}).json == {"count": len(special)}
    pieces = tokenize(with_pieces=True)
    assert [it["id"] for it in pieces] == special
    assert [it["piece"] for it in pieces] == ["<|user|>", [0xC3], [0xA9]]
    assert server.post("/detokenize", {"tokens": special}).json == {"content": "<|user|>é"}
    assert server.post("/detokenize", {"tokens": []}).json == {"content": ""}
    for tokens in ("x", [10**6], [True], [-1]):
        assert server.post("/detokenize", {"tokens": tokens}).status == 400


def test_the_template_s_text_gives_the_chat_s_ids(server: Serving) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = server.post("/apply-template", {"messages": messages}).json["prompt"]
    assert server.post("/tokenize", {"content": prompt}).json["tokens"] == (server.model.chat_ids(messages))


def test_properties_and_slots_have_llama_cpp_s_keys(server: Serving) -> None:
    props = server.request("GET", "/props").json
    given = props["default_generation_settings"]
    assert {"id", "id_task", "n_ctx", "speculative", "is_processing", "params"} <= set(given)
    assert given["n_ctx"] == server.model.plan.max_context
    assert given["params"].keys() == complete(server, "Once")["generation_settings"].keys()
    slots = server.request("GET", "/slots").json
    assert props["total_slots"] == len(slots) == server.model.runtime.parallel
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    assert props["chat_template_caps"] == {"supports_tools": True, "supports_tool_calls": True}
    assert [slot["is_processing"] for slot in slots] == [False] * len(slots)
    assert server.request("GET", "/slots?fail_on_no_slot=1").status == 200


def test_metrics_have_llama_cpp_s_names_too(server: Serving) -> None:
    def metrics() -> dict[str, float]:
        lines = server.request("GET", "/metrics").body.decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("llamacpp:")}

    before = metrics()
    got = complete(server, "Once")
    after = metrics()
    changed = {name: after[name] - before[name] for name in after}
    assert changed["llamacpp:prompt_tokens_total"] == got["tokens_evaluated"]
    assert changed["llamacpp:tokens_predicted_total"] == got["tokens_predicted"]
    # The prompt's pass gives the first token.
    assert changed["llamacpp:n_decode_total"] == got["tokens_predicted"]
    assert after["llamacpp:n_tokens_max"] >= got["tokens_evaluated"] + got["tokens_predicted"]
    assert after["llamacpp:requests_processing"] == 0


def test_a_model_without_marks_says_what_is_missing(chat_bundle: Any) -> None:
    with serving(load(chat_bundle, threads=1, speculation="off")) as server:
        answer = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert (answer.status, answer.json["error"]["type"]) == (501, "not_supported_error")
        assert "<|fim_prefix|>" in answer.json["error"]["message"]
        refused = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "suffix")
        assert "<|fim_prefix|>" in refused.json["error"]["message"]
        refused = server.post("/api/generate", {"prompt": "a", "suffix": "b", "stream": False})
        assert (refused.status, list(refused.json)) == (400, ["error"])
        assert "insert" not in server.post("/api/show", {"model": server.model.name}).json["capabilities"]
