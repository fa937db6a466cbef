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
ENDS = re.compile(
    r"(<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|</s>|<\|end\|>|<\|end_of_text\|>|<\|return\|>|<\|user\|>"
    r"|<\|END_OF_TURN_TOKEN\|>|<end_of_turn>|<turn\|>|<seed:eos>|<\|observation\|>|\[e~\[|\[/?INST\]"
    "|<\uff5cend\u2581of\u2581sentence\uff5c>|<\\|message_sep\\|>|\\s)+\\Z"
)
"""What stands behind a reply in a history, and isn't the model's."""
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
    begins = prompt if history.startswith(prompt) else THOUGHT.sub("", prompt)
    if not history.startswith(begins):
        pytest.skip("a reply in a history begins otherwise than one that is written")
    thought = "</think>\n" if prompt.rstrip().endswith("<think>") and begins != prompt else ""
    return thought + ENDS.sub("", history.removeprefix(begins))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("published")
    shape = {"max_position_embeddings": 16384, "vocab_size": 320, "num_hidden_layers": 1}
    checkpoint = write_chat_checkpoint(folder / "checkpoint", TOOLS, MARKS, **shape)
    with serving(
        load(convert_bundle(checkpoint, folder / "spoken"), threads=1, speculation="off")
    ) as running:
        yield running


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("name", ["minimind", *REAL, *FILES])
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
    script = Script([written]).put_into(spoken.model, monkeypatch)
    for dialect, (ask, reason, _, _) in DIALECTS.items():
        for stream in (False, True):
            text, found, why = ask(spoken, stream)
            assert (text.strip(), found, why) == ("", calls, reason), (dialect, stream, written)
    assert all("The weather of a city" in prompt for prompt in script.asked)
