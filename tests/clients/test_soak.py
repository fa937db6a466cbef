"""Four agents' requests at once on a small model: nothing is lost, and the budget holds."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette")

from tests.clients.soak import AGENTS, soak
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.chat_templates import TOOLS

CONTEXT = 32768
"""The model has one token for each byte."""


@pytest.mark.slow
def test_nothing_is_lost_while_four_agents_ask(tmp_path: Path) -> None:
    shape = {"max_position_embeddings": CONTEXT, "num_hidden_layers": 1}
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", TOOLS, **shape)
    bundle = convert_bundle(checkpoint, tmp_path / "tooled")
    result = soak(bundle, "512MB", 0.2, tmp_path / "log.jsonl", CONTEXT)
    assert (result["lost"], result["server_died"]) == (0, False), result
    assert all(result["by_agent"][name]["answered"] > 0 for name in AGENTS)
    assert 0 < result["peak_bytes"] <= result["budget_bytes"]
