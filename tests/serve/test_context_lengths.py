"""How long a context may be, as each dialect tells it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.serve.config import ServeConfig
from tests.support.serving import Serving, serving

CONTEXT = 200
"""Tokens of the served model's context, below its own."""
OTHER = "other"


@pytest.fixture(scope="module")
def server(chat_bundle: Path) -> Iterator[Serving]:
    """One model that is loaded, and one that isn't."""
    model = load(chat_bundle, threads=1, speculation="off", max_context=CONTEXT)
    assert model.config.max_context > CONTEXT
    with serving(model, others={OTHER: lambda budget: load(chat_bundle)}) as running:
        yield running


def test_openai_s_list_has_the_names_that_known_servers_give_it(server: Serving) -> None:
    listed = server.request("GET", "/v1/models").json["data"]
    assert [it["id"] for it in listed] == [server.model.name, OTHER]
    for shown in (*listed, server.request("GET", f"/v1/models/{server.model.name}").json):
        meta = shown["meta"]
        assert shown["max_model_len"] == shown["context_length"] == meta["n_ctx"] == CONTEXT
        assert meta["n_ctx_train"] == server.model.config.max_context
        assert (meta["n_vocab"], meta["n_params"]) == (
            server.model.config.vocab_size,
            server.model.bundle.parameters,
        )


def test_anthropic_s_list_has_its_own(server: Serving) -> None:
    listed = server.request("GET", "/v1/models", **{"anthropic-version": "2023-06-01"}).json
    assert [(it["max_input_tokens"], it["type"]) for it in listed["data"]] == [(CONTEXT, "model")] * 2


def test_ollama_shows_the_model_s_own_and_what_it_runs_with(server: Serving) -> None:
    for name in (server.model.name, OTHER):
        shown = server.post("/api/show", {"model": name}).json
        own = shown["model_info"][f"{server.model.config.architecture}.context_length"]
        assert own == server.model.config.max_context
        assert shown["parameters"].split() == ["num_ctx", str(CONTEXT)]


def test_lm_studio_s_list_tells_which_is_loaded(server: Serving) -> None:
    listed = server.request("GET", "/api/v0/models").json
    assert listed["object"] == "list"
    loaded, other = listed["data"]
    own = server.model.config.max_context
    assert (loaded["id"], loaded["state"], loaded["loaded_context_length"]) == (
        server.model.name,
        "loaded",
        CONTEXT,
    )
    assert (other["id"], other["state"], "loaded_context_length" in other) == (OTHER, "not-loaded", False)
    for shown in listed["data"]:
        assert (shown["object"], shown["type"], shown["max_context_length"]) == ("model", "llm", own)
        assert shown["quantization"] == server.model.bundle.quant.name
        assert {"publisher", "arch", "compatibility_type"} <= shown.keys()
        assert server.request("GET", f"/api/v0/models/{shown['id']}").json == shown
    assert server.request("GET", "/api/v0/models/nobody").status == 404


def test_a_strict_server_only_tells_of_a_num_ctx_above_its_context(chat_bundle: Path) -> None:
    model = load(chat_bundle, threads=1, speculation="off", max_context=CONTEXT)
    with serving(model, ServeConfig(port=0, strict=True)) as strict:
        for options, status in (({"num_ctx": 4 * CONTEXT}, 200), ({"num_context": CONTEXT}, 400)):
            messages = [{"role": "user", "content": "Hi"}]
            asked = {"model": model.name, "messages": messages, "options": {"num_predict": 1} | options}
            assert strict.post("/api/chat", asked | {"stream": False}).status == status
