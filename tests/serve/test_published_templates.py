"""Calls as published templates write them in a history are calls where a model writes them, in every dialect.

`TEMPLATES=DIR` of the environment is a folder of more templates, `*.jinja`, such as llama.cpp's
`models/templates`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from ondevice.api import load
from ondevice.chat_template import ChatTemplate
from ondevice.chat_template.tools import PromptOptions
from ondevice.converters.checkpoints.end_tokens import ENDS as ENDS_OF_TURNS
from ondevice.converters.checkpoints.end_tokens import PLAIN_ENDS
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.errors import UsageError
from tests.serve.test_call_forms import DIALECTS, MARKS, NOW, OSLO, ROME, USER, WEATHER
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.chat_templates import TOOLS
from tests.support.paths import SHARED_DATA
from tests.support.real_models import real_model
from tests.support.scripted_replies import Script
from tests.support.serving import Serving, serving

REAL = ("qwen2.5-coder-0.5b",)
FOLDER = os.environ.get("TEMPLATES")
FILES = {path.stem: path for path in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
NAMES = re.compile(r"<\|\w+\|>|</?think>|\[/?INST\]")
"""Names that are special tokens where templates have them."""
SAID = "All is well."
ENDS = re.compile(f"(?:{'|'.join(map(re.escape, (*ENDS_OF_TURNS, *PLAIN_ENDS)))}|\\s)+\\Z")
THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")
"""Thinking at the end of a prompt, which histories are without."""


def published(name: str) -> str:
    """The source of a template. Skips where it isn't there."""
    if name in FILES:
        return FILES[name].read_text()
    if name in REAL:
        with closing(open_checkpoint(real_model(name))) as checkpoint:
            return checkpoint.tokenizer.blobs["chat_template.jinja"].decode()
    path = SHARED_DATA / "tokenizers" / name / "tokenizer_config.json"
    if not path.is_file():
        pytest.skip(f"{path} isn't there")
    source: str = json.loads(path.read_text())["chat_template"]
    return source


def reply(template: ChatTemplate, calls: list[tuple[str, Any]]) -> str:
    """What a model has written where the template shows these calls in a history.

    Raises UsageError for a template that takes no such history.
    """
    tools = [{"type": "function", "function": each} for each in (WEATHER, NOW)]
    options = PromptOptions.checked(tools, None)
    asked = [
        {
            "id": f"call{at:05}",
            "type": "function",
            "function": {"name": name, "arguments": json.loads(json.dumps(arguments))},
        }
        for at, (name, arguments) in enumerate(calls)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": asked}
    prompt = template.render([USER], options=options)
    history = template.render([USER, said], options=options, add_generation_prompt=False)
    # What stands behind any reply in a history isn't the model's, nor are marks of an end.
    other = template.render([USER, said | {"content": SAID, "tool_calls": []}], add_generation_prompt=False)
    history = ENDS.sub("", history.removesuffix(other.partition(SAID)[2]))
    begins = prompt if history.startswith(prompt) else THOUGHT.sub("", prompt)
    if not history.startswith(begins):
        pytest.skip("a reply in a history begins otherwise than one that is written")
    thought = "</think>\n" if prompt.rstrip().endswith("<think>") and begins != prompt else ""
    return thought + history.removeprefix(begins)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("published")
    names = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    names += tuple(name for path in FILES.values() for name in NAMES.findall(path.read_text()))
    marks = [name for name in dict.fromkeys((*MARKS, *names)) if name not in ("<|user|>", "<|assistant|>")]
    shape = {"max_position_embeddings": 16384, "vocab_size": 260 + len(marks), "num_hidden_layers": 1}
    checkpoint = write_chat_checkpoint(folder / "checkpoint", TOOLS, marks, **shape)
    with serving(
        load(convert_bundle(checkpoint, folder / "spoken"), threads=1, speculation="off")
    ) as running:
        yield running


@pytest.mark.fast("minimind-*", "*-one")
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize(
    "name", ["minimind", *(pytest.param(name, marks=pytest.mark.real) for name in REAL), *FILES]
)
def test_calls_of_a_published_template_are_told_in_every_dialect(
    spoken: Serving, monkeypatch: pytest.MonkeyPatch, name: str, several: bool
) -> None:
    template = ChatTemplate.load(published(name).encode(), spoken.model.tokenizer)
    monkeypatch.setitem(spoken.model._host.__dict__, "chat_template", template)
    calls = [OSLO, ROME] if several else [OSLO]
    try:
        written = reply(template, calls)
    except UsageError as error:
        pytest.skip(f"it takes no such history: {error}")
    if several and "Rome" not in written:
        pytest.skip("it shows one call of several")
    script = Script([written]).put_into(spoken.model, monkeypatch)
    for dialect, (ask, reason, _, _) in DIALECTS.items():
        for stream in (False, True):
            text, found, why = ask(spoken, stream)
            assert (text.strip(), found, why) == ("", calls, reason), (dialect, stream, written)
    assert all("The weather of a city" in prompt for prompt in script.asked)
