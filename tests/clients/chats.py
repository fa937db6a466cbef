"""One question by each client of the table that only chats, run by the client's own Python.

    PYTHON chats.py NAME URL MODEL

Prints a JSON object of ways of asking, and the answers. It imports nothing of the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
MOST_TOKENS = 24
MESSAGES = [{"role": "user", "content": QUESTION}]
Answers = Iterator[tuple[str, str]]
"""Ways of asking, and the answers."""


def ask_openai(url: str, model: str) -> Answers:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "temperature": 0}
    chat = asked | {"messages": MESSAGES, "max_tokens": MOST_TOKENS}
    yield "chat", client.chat.completions.create(**chat).choices[0].message.content
    chunks = client.chat.completions.create(**chat, stream=True)
    yield "chat, streamed", "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    response = asked | {"input": QUESTION, "max_output_tokens": MOST_TOKENS}
    yield "responses", client.responses.create(**response).output_text
    events = client.responses.create(**response, stream=True)
    yield "responses, streamed", "".join(it.delta for it in events if it.type == "response.output_text.delta")


def ask_anthropic(url: str, model: str) -> Answers:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": MOST_TOKENS}
    cold = {"temperature": 0}
    yield "messages", client.messages.create(**asked, extra_body=cold).content[0].text
    with client.messages.stream(**asked, extra_body=cold) as stream:
        yield "messages, streamed", "".join(stream.text_stream)


def ask_ollama(url: str, model: str) -> Answers:
    import ollama

    client = ollama.Client(host=url)
    asked: dict[str, Any] = {"model": model, "options": {"temperature": 0, "num_predict": MOST_TOKENS}}
    yield "chat", client.chat(messages=MESSAGES, **asked).message.content or ""
    parts = client.chat(messages=MESSAGES, stream=True, **asked)
    yield "chat, streamed", "".join(part.message.content or "" for part in parts)


def ask_llm(url: str, model: str) -> Answers:
    folder = Path("settings")
    folder.mkdir(exist_ok=True)
    known = {"model_id": "local", "model_name": model, "api_base": f"{url}/v1"}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([known]))
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OLLAMA_HOST": url}

    def answer(name: str, *options: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", name, "-o", "temperature", "0", *options, QUESTION]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout.strip()

    most = ("-o", "max_tokens", str(MOST_TOKENS))
    yield "chat", answer("local", "--no-stream", "--key", "none", *most)
    yield "chat, streamed", answer("local", "--key", "none", *most)
    yield "Ollama's", answer(f"ollama/{model}", "-o", "num_predict", str(MOST_TOKENS))


def ask_litellm(url: str, model: str) -> Answers:
    import litellm

    litellm.telemetry = False
    for dialect, base in (("openai", f"{url}/v1"), ("anthropic", url), ("ollama_chat", url)):
        asked: dict[str, Any] = {
            "model": f"{dialect}/{model}",
            "api_base": base,
            "api_key": "none",
            "messages": MESSAGES,
            "max_tokens": MOST_TOKENS,
            "temperature": 0,
        }
        yield dialect, litellm.completion(**asked).choices[0].message.content
        chunks = litellm.completion(**asked, stream=True)
        yield f"{dialect}, streamed", "".join(it.choices[0].delta.content or "" for it in chunks)


def ask_langchain(url: str, model: str) -> Answers:
    from langchain_anthropic import ChatAnthropic
    from langchain_ollama import ChatOllama
    from langchain_openai import ChatOpenAI

    chats: dict[str, Any] = {
        "openai": ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=MOST_TOKENS
        ),
        "anthropic": ChatAnthropic(
            base_url=url, api_key="none", model=model, temperature=0, max_tokens=MOST_TOKENS
        ),
        "ollama": ChatOllama(base_url=url, model=model, temperature=0, num_predict=MOST_TOKENS),
    }
    for dialect, chat in chats.items():
        yield dialect, chat.invoke(QUESTION).text
        yield f"{dialect}, streamed", "".join(part.text for part in chat.stream(QUESTION))


def ask_pydantic_ai(url: str, model: str) -> Answers:
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none"))
    models = {
        "openai": OpenAIChatModel(model, provider=openai),
        "responses": OpenAIResponsesModel(model, provider=openai),
        "anthropic": AnthropicModel(model, provider=anthropic),
    }
    for dialect, each in models.items():
        agent = Agent(each, model_settings={"temperature": 0.0, "max_tokens": MOST_TOKENS})
        yield dialect, agent.run_sync(QUESTION).output
        yield f"{dialect}, streamed", "".join(agent.run_stream_sync(QUESTION).stream_text(delta=True))


def ask_lm_eval(url: str, model: str) -> Answers:
    task = """
task: capital
dataset_path: json
dataset_kwargs: {data_files: {test: questions.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24}
metric_list: [{metric: exact_match}]
"""
    Path("tasks").mkdir(exist_ok=True)
    Path("tasks", "capital.yaml").write_text(task)
    Path("questions.json").write_text(json.dumps({"question": QUESTION, "answer": "Paris"}))
    where = f"model={model},base_url={url}/v1/chat/completions,num_concurrent=1,tokenizer_backend=None"
    flags = ["--model", "local-chat-completions", "--model_args", where, "--tasks", "capital"]
    flags += ["--include_path", "tasks", "--apply_chat_template", "--log_samples", "--output_path", "results"]
    environment = os.environ | {"OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *flags], env=environment, capture_output=True, text=True
    )
    samples = sorted(Path("results").rglob("samples_*.jsonl"))
    if done.returncode or not samples:
        raise SystemExit(done.stderr[-4000:])
    yield "chat", json.loads(samples[-1].read_text().splitlines()[0])["resps"][0][0]


CHATS = {
    "openai": ask_openai,
    "anthropic": ask_anthropic,
    "ollama": ask_ollama,
    "llm": ask_llm,
    "litellm": ask_litellm,
    "langchain": ask_langchain,
    "pydantic-ai": ask_pydantic_ai,
    "lm-eval": ask_lm_eval,
}

if __name__ == "__main__":
    print(json.dumps(dict(CHATS[sys.argv[1]](*sys.argv[2:]))))
