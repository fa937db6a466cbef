"""The server goes on with conversations from before its restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ondevice.api import load

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_a_restarted_server_computes_only_what_is_new(chat_bundle: Path, tmp_path: Path) -> None:
    from tests.support.serving import serving

    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "word " * 20}], "max_tokens": 8, "temperature": 0,
    }  # fmt: skip
    answers, restored = [], []
    for cache in ("", tmp_path, tmp_path):
        with serving(load(chat_bundle, threads=1, speculation="off", prompt_cache=cache)) as running:
            answers.append(running.post("/v1/chat/completions", asked).json["choices"])
            restored.append(running.model.stats.restored_tokens)
            assert running.model.stats.reused_tokens == restored[-1]
            # More conversations than are kept in memory.
            for other in range(5) if cache else ():
                asked_else = asked | {"messages": [{"role": "user", "content": f"{other} other words"}]}
                running.post("/v1/chat/completions", asked_else)
            answers.append(running.post("/v1/chat/completions", asked).json["choices"])
    assert all(answer == answers[0] for answer in answers)
    assert restored[:2] == [0, 0]
    assert restored[2] > 90
