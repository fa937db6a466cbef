"""A real model's prompt that was computed before is read from the prompt cache, and the text stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.api import load

pytestmark = pytest.mark.real

PROMPT = " ".join(
    f"On day {day} the ferry left the island at {day + 5} with {7 * day} people." for day in range(6)
)


def test_a_second_run_computes_the_newest_token_alone(smollm2: Path, tmp_path: Path) -> None:
    with load(smollm2) as model:
        expected = model.generate(PROMPT, max_tokens=6)
        expected_longer = model.generate(PROMPT + " On day 6", max_tokens=4)
    assert expected.stats.restored_tokens == 0
    with load(smollm2, prompt_cache=tmp_path) as model:
        first = model.generate(PROMPT, max_tokens=6)
    assert any(tmp_path.rglob("*"))
    with load(smollm2, prompt_cache=tmp_path) as model:
        second = model.generate(PROMPT, max_tokens=6)
        longer = model.generate(PROMPT + " On day 6", max_tokens=4)
    assert first.stats.restored_tokens == 0
    assert second.stats.restored_tokens == second.stats.prompt_tokens - 1
    assert longer.stats.restored_tokens + longer.stats.reused_tokens > 64
    assert first.tokens == second.tokens == expected.tokens
    assert longer.tokens == expected_longer.tokens
