"""What each client of the table that only chats can do, one feature at a time, by the client's own Python.

    PYTHON chats.py NAME URL MODEL FEATURE...

Prints a JSON object: for each feature, what came of it by the dialects that the client speaks. It imports
nothing of the project.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

QUESTION = "What is the capital of France?"
MOST_TOKENS = 64
LONG = "pear " * 12_000
"""Text of more tokens than the context of the model."""
CITIES = ["Paris", "Rome", "Oslo"]
CITY = {"type": "string", "enum": CITIES}
SCHEMA: dict[str, Any] = {
    "title": "Answer",
    "description": "The capital of a country",
    "type": "object",
    "properties": {"capital": CITY},
    "required": ["capital"],
    "additionalProperties": False,
}
PARAMETERS = SCHEMA | {"title": "Weather", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
FEATURES = ("answer", "streamed", "tools", "cached", "pings", "structured", "overflow")
BUSY_SECONDS = 14.0
"""How long another text holds the model while a streamed question waits: the server pings after 10."""
Call = tuple[str, Any]
"""A tool's name and arguments."""


def messages(text: str = QUESTION) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Client:
    """A client. A feature is a method that takes one of `dialects`.

    features: those that it has an API for. lacks: pairs of a feature and a dialect that has none there.
    offers: dialects in which it can offer tools, but not ask for a call.
    """

    dialects: tuple[str, ...] = ()
    features: tuple[str, ...] = FEATURES
    lacks: tuple[tuple[str, str], ...] = ()
    offers: tuple[str, ...] = ()
    busy_seconds = BUSY_SECONDS
    errors: tuple[type[BaseException], ...] = ()
    """What the client raises for an error of the server."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        """The answer to a question."""
        raise NotImplementedError

    def streamed(self, dialect: str) -> str:
        """The answer to QUESTION, put together."""
        raise NotImplementedError

    def tools(self, dialect: str) -> list[Call]:
        """The calls of an answer that has a tool."""
        raise NotImplementedError

    def cached(self, dialect: str) -> int:
        """Tokens of a repeated prompt that the client tells were kept."""
        raise NotImplementedError

    def structured(self, dialect: str) -> Any:
        """The object that an answer under SCHEMA is for the client."""
        raise NotImplementedError

    def pings(self, dialect: str) -> str:
        """`streamed`, where the server says for a while only that it is at work."""
        with occupied(self.url, self.model, self.busy_seconds):
            return self.streamed(dialect)

    def overflow(self, dialect: str) -> tuple[str, str]:
        """The error that a prompt beyond the context is for the client: its type, and its words."""
        try:
            said = self.answer(dialect, LONG)
        except self.errors as error:
            return type(error).__name__, str(error)[:400]
        raise SystemExit(f"a prompt of {len(LONG)} characters was answered: {said}")


@contextmanager
def occupied(url: str, model: str, seconds: float) -> Iterator[None]:
    """Another text, which is left to itself, holds the only place of the server for so long."""
    where = urlsplit(url)
    asked = {"model": model, "prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), 60) as other:
        other.sendall(head.encode() + body)
        other.recv(1)
        timer = threading.Timer(seconds, other.shutdown, (socket.SHUT_RDWR,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def answer_type() -> Any:
    """SCHEMA as pydantic's model."""
    from pydantic import create_model

    return create_model("Answer", capital=(Literal["Paris", "Rome", "Oslo"], ...))


class OpenAI(Client):
    dialects = ("chat", "responses")

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import openai

        self.client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.errors = (openai.APIError,)

    def _chat(self, text: str = QUESTION, **more: Any) -> Any:
        options = {"model": self.model, "temperature": 0, "max_tokens": MOST_TOKENS}
        return self.client.chat.completions.create(messages=messages(text), **options, **more)

    def _response(self, text: str = QUESTION, **more: Any) -> Any:
        options = {"model": self.model, "temperature": 0, "max_output_tokens": MOST_TOKENS}
        return self.client.responses.create(input=text, **options, **more)

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        if dialect == "chat":
            return str(self._chat(text).choices[0].message.content)
        return str(self._response(text).output_text)

    def streamed(self, dialect: str) -> str:
        if dialect == "chat":
            chunks = self._chat(stream=True)
            return "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
        events = self._response(stream=True)
        return "".join(it.delta for it in events if it.type == "response.output_text.delta")

    def tools(self, dialect: str) -> list[Call]:
        if dialect == "chat":
            message = self._chat(tools=[TOOL], tool_choice=NAMED).choices[0].message
            return [(it.function.name, json.loads(it.function.arguments)) for it in message.tool_calls or ()]
        flat, named = {"type": "function", **FUNCTION}, {"type": "function", "name": "weather"}
        items = self._response(tools=[flat], tool_choice=named).output
        return [(it.name, json.loads(it.arguments)) for it in items if it.type == "function_call"]

    def cached(self, dialect: str) -> int:
        self.answer(dialect)
        if dialect == "chat":
            return int(self._chat().usage.prompt_tokens_details.cached_tokens)
        return int(self._response().usage.input_tokens_details.cached_tokens)

    def structured(self, dialect: str) -> Any:
        options: dict[str, Any] = {"model": self.model, "temperature": 0}
        if dialect == "chat":
            made = self.client.chat.completions.parse(
                messages=messages(), response_format=answer_type(), **options
            )
            return made.choices[0].message.parsed.model_dump()
        made = self.client.responses.parse(input=QUESTION, text_format=answer_type(), **options)
        return made.output_parsed.model_dump()


class Anthropic(Client):
    dialects = ("messages",)

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import anthropic

        self.client: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        self.errors = (anthropic.APIError,)

    def _options(self, text: str = QUESTION) -> dict[str, Any]:
        options: dict[str, Any] = {"model": self.model, "messages": messages(text), "max_tokens": MOST_TOKENS}
        return options | {"extra_body": {"temperature": 0}}

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        return str(self.client.messages.create(**self._options(text)).content[0].text)

    def streamed(self, dialect: str) -> str:
        with self.client.messages.stream(**self._options()) as stream:
            return "".join(stream.text_stream)

    def tools(self, dialect: str) -> list[Call]:
        tool = {"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
        choice = {"type": "tool", "name": "weather"}
        made = self.client.messages.create(**self._options(), tools=[tool], tool_choice=choice)
        return [(block.name, block.input) for block in made.content if block.type == "tool_use"]

    def cached(self, dialect: str) -> int:
        self.answer(dialect)
        return int(self.client.messages.create(**self._options()).usage.cache_read_input_tokens)

    def structured(self, dialect: str) -> Any:
        made = self.client.messages.parse(**self._options(), output_format=answer_type())
        return made.parsed_output.model_dump()


class Ollama(Client):
    dialects = ("ollama",)
    features = tuple(name for name in FEATURES if name != "cached")
    offers = ("ollama",)

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import ollama

        self.client: Any = ollama.Client(host=url)
        self.errors = (ollama.ResponseError,)

    def _chat(self, text: str = QUESTION, **more: Any) -> Any:
        options = {"temperature": 0, "num_predict": MOST_TOKENS}
        return self.client.chat(model=self.model, messages=messages(text), options=options, **more)

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        return self._chat(text).message.content or ""

    def streamed(self, dialect: str) -> str:
        return "".join(part.message.content or "" for part in self._chat(stream=True))

    def tools(self, dialect: str) -> list[Call]:
        calls = self._chat(tools=[TOOL]).message.tool_calls or ()
        return [(it.function.name, it.function.arguments) for it in calls]

    def structured(self, dialect: str) -> Any:
        return json.loads(self._chat(format=SCHEMA).message.content)


class LLM(Client):
    """The command line of `llm`, with its plugin for Ollama, which offers tools to models that list them."""

    dialects = ("chat", "ollama")
    lacks = (("cached", "ollama"), ("tools", "ollama"))
    offers = ("chat",)
    busy_seconds = 20.0
    errors = (RuntimeError,)

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        self.folder = Path("settings")
        self.folder.mkdir(exist_ok=True)
        known = {"model_id": "local", "model_name": model, "api_base": f"{url}/v1"}
        known |= {"supports_tools": True, "supports_schema": True}
        (self.folder / "extra-openai-models.yaml").write_text(json.dumps([known]))

    def _run(self, dialect: str, *flags: str, text: str = QUESTION) -> subprocess.CompletedProcess[str]:
        name, most = ("local", "max_tokens") if dialect == "chat" else (f"ollama/{self.model}", "num_predict")
        options = ["-o", "temperature", "0", "-o", most, str(MOST_TOKENS)]
        options += ["--key", "none"] if dialect == "chat" else []
        done = subprocess.run(
            [sys.executable, "-m", "llm", "-m", name, *options, *flags, text],
            env=os.environ | {"LLM_USER_PATH": str(self.folder), "OLLAMA_HOST": self.url},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        return self._run(dialect, "--no-stream", text=text).stdout.strip()

    def streamed(self, dialect: str) -> str:
        return self._run(dialect).stdout.strip()

    def tools(self, dialect: str) -> list[Call]:
        code = 'def weather(city: str) -> str:\n    "The weather of a city"\n    return f"called for {city}"'
        done = self._run(dialect, "--no-stream", "--functions", code, "--td")
        return [("weather", {"city": city}) for city in re.findall(r"called for (\w+)", done.stderr)]

    def cached(self, dialect: str) -> int:
        self.answer(dialect)
        told = self._run(dialect, "--no-stream", "--usage").stderr
        return max(map(int, re.findall(r'"cached_tokens": (\d+)', told)), default=0)

    def structured(self, dialect: str) -> Any:
        return json.loads(self._run(dialect, "--no-stream", "--schema", json.dumps(SCHEMA)).stdout)

    def overflow(self, dialect: str) -> tuple[str, str]:
        return "exit status 1", super().overflow(dialect)[1]


class LiteLLM(Client):
    dialects = ("chat", "messages", "ollama")
    lacks = (("cached", "ollama"),)
    offers = ("ollama",)

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import litellm
        import openai

        litellm.telemetry = False
        self.complete: Any = litellm.completion
        self.errors = (openai.APIError,)

    def _chat(self, dialect: str, text: str = QUESTION, **more: Any) -> Any:
        provider = {"chat": "openai", "messages": "anthropic", "ollama": "ollama_chat"}[dialect]
        return self.complete(
            model=f"{provider}/{self.model}",
            api_base=f"{self.url}/v1" if dialect == "chat" else self.url,
            api_key="none",
            messages=messages(text),
            max_tokens=MOST_TOKENS,
            temperature=0,
            **more,
        )

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        return str(self._chat(dialect, text).choices[0].message.content)

    def streamed(self, dialect: str) -> str:
        return "".join(it.choices[0].delta.content or "" for it in self._chat(dialect, stream=True))

    def tools(self, dialect: str) -> list[Call]:
        choice = {} if dialect in self.offers else {"tool_choice": NAMED}
        calls = self._chat(dialect, tools=[TOOL], **choice).choices[0].message.tool_calls or ()
        return [(it.function.name, json.loads(it.function.arguments)) for it in calls]

    def cached(self, dialect: str) -> int:
        self.answer(dialect)
        return int(self._chat(dialect).usage.prompt_tokens_details.cached_tokens)

    def structured(self, dialect: str) -> Any:
        return json.loads(self._chat(dialect, response_format=JSON_FORMAT).choices[0].message.content)


class LangChain(Client):
    dialects = ("chat", "messages", "ollama")
    lacks = (("cached", "ollama"),)
    offers = ("ollama",)

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        import anthropic
        import ollama
        import openai
        from langchain_anthropic import ChatAnthropic
        from langchain_ollama import ChatOllama
        from langchain_openai import ChatOpenAI

        most: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": MOST_TOKENS,
            "api_key": "none",
        }
        self.chats: dict[str, Any] = {
            "chat": ChatOpenAI(base_url=f"{url}/v1", **most),
            "messages": ChatAnthropic(base_url=url, **most),
            "ollama": ChatOllama(base_url=url, model=model, temperature=0, num_predict=MOST_TOKENS),
        }
        self.errors = (openai.APIError, anthropic.APIError, ollama.ResponseError)

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        return str(self.chats[dialect].invoke(text).text)

    def streamed(self, dialect: str) -> str:
        return "".join(part.text for part in self.chats[dialect].stream(QUESTION))

    def tools(self, dialect: str) -> list[Call]:
        choice = {} if dialect in self.offers else {"tool_choice": "weather"}
        made = self.chats[dialect].bind_tools([TOOL], **choice).invoke(QUESTION)
        return [(it["name"], it["args"]) for it in made.tool_calls]

    def cached(self, dialect: str) -> int:
        self.answer(dialect)
        return int(self.chats[dialect].invoke(QUESTION).usage_metadata["input_token_details"]["cache_read"])

    def structured(self, dialect: str) -> Any:
        return self.chats[dialect].with_structured_output(SCHEMA, method="json_schema").invoke(QUESTION)


class PydanticAI(Client):
    dialects = ("chat", "responses", "messages")

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        from anthropic import AsyncAnthropic
        from pydantic_ai.exceptions import AgentRunError
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none"))
        # What it believes of Claude's newest models, and of no model that it doesn't know.
        profile: Any = {"supports_json_schema_output": True}
        self.models: dict[str, Any] = {
            "chat": OpenAIChatModel(model, provider=openai),
            "responses": OpenAIResponsesModel(model, provider=openai),
            "messages": AnthropicModel(model, provider=anthropic, profile=profile),
        }
        self.errors = (AgentRunError,)

    def _agent(self, dialect: str, **more: Any) -> Any:
        from pydantic_ai import Agent

        settings: Any = {"temperature": 0.0, "max_tokens": MOST_TOKENS}
        return Agent(self.models[dialect], model_settings=settings, **more)

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        return str(self._agent(dialect).run_sync(text).output)

    def streamed(self, dialect: str) -> str:
        return "".join(self._agent(dialect).run_stream_sync(QUESTION).stream_text(delta=True))

    def tools(self, dialect: str) -> list[Call]:
        from pydantic import create_model
        from pydantic_ai import ToolOutput

        place = create_model("Weather", city=(Literal["Paris", "Rome", "Oslo"], ...))
        made = self._agent(dialect, output_type=ToolOutput(place, name="weather")).run_sync(QUESTION)
        return [("weather", made.output.model_dump())]

    def cached(self, dialect: str) -> int:
        self.answer(dialect)
        usage = self._agent(dialect).run_sync(QUESTION).usage
        return int((usage() if callable(usage) else usage).cache_read_tokens)

    def structured(self, dialect: str) -> Any:
        from pydantic_ai import NativeOutput

        made = self._agent(dialect, output_type=NativeOutput(answer_type())).run_sync(QUESTION)
        return made.output.model_dump()


class LMEval(Client):
    """A task of one question. It streams nothing and has no tools."""

    dialects = ("chat",)
    features = ("answer",)

    def answer(self, dialect: str, text: str = QUESTION) -> str:
        task = f"""
task: capital
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions.json}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: {MOST_TOKENS}}}
metric_list: [{{metric: exact_match}}]
"""
        Path("tasks").mkdir(exist_ok=True)
        Path("tasks", "capital.yaml").write_text(task)
        Path("questions.json").write_text(json.dumps({"question": text, "answer": "Paris"}))
        where = f"model={self.model},base_url={self.url}/v1/chat/completions"
        where += ",num_concurrent=1,tokenizer_backend=None"
        flags = ["--model", "local-chat-completions", "--model_args", where, "--tasks", "capital"]
        flags += ["--include_path", "tasks", "--apply_chat_template", "--log_samples"]
        flags += ["--output_path", "results"]
        offline = {"OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "lm_eval", *flags],
            env=os.environ | offline,
            capture_output=True,
            text=True,
        )
        samples = sorted(Path("results").rglob("samples_*.jsonl"))
        if done.returncode or not samples:
            raise SystemExit(done.stderr[-4000:])
        return str(json.loads(samples[-1].read_text().splitlines()[0])["resps"][0][0])


CHATS: dict[str, type[Client]] = {
    "openai": OpenAI,
    "anthropic": Anthropic,
    "ollama": Ollama,
    "llm": LLM,
    "litellm": LiteLLM,
    "langchain": LangChain,
    "pydantic-ai": PydanticAI,
    "lm-eval": LMEval,
}


def outcomes(client: Client, feature: str) -> dict[str, Any]:
    """What comes of a feature, by dialects. What is streamed must be the answer that isn't."""
    results = {
        dialect: getattr(client, feature)(dialect)
        for dialect in client.dialects
        if (feature, dialect) not in client.lacks
    }
    for dialect, text in results.items() if feature in ("streamed", "pings") else ():
        expected = client.answer(dialect)
        if text != expected:
            raise SystemExit(f"{dialect}: {text!r} streamed, {expected!r} else")
    return results


if __name__ == "__main__":
    tried = CHATS[sys.argv[1]](*sys.argv[2:4])
    print(json.dumps({feature: outcomes(tried, feature) for feature in sys.argv[4:]}))
