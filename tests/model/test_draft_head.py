"""The draft head: rows copied from the head, planned where drafters use it, and no text depends on it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import load
from ondevice.budget.sizes import draft_head_bytes
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.tensors import HEAD_BIAS
from ondevice.converters.training.token_counts import count_tokens, write_token_counts
from ondevice.model import parts
from ondevice.runtime.models import shipped_folder
from ondevice.speculation.drafting import Drafting
from ondevice.speculation.tree import DRAFT_NODES
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.engines import always_draft
from tests.support.models import add_tensor, change_family

SHIPPED = shipped_folder() / "small-relu"
PROMPT, TOKENS = "What is the number of people in the town?", 28
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.3}]
ROWS = 37


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships, with the counts of what it writes."""
    folder = copy_files(SHIPPED, tmp_path_factory.mktemp("counted") / "bundle")
    pieces = [list(text) for text in texts(folder, "off")]
    write_token_counts(Bundle.open(folder), count_tokens(pieces), folder)
    return folder


def texts(folder: Path, speculation: Any, **options: Any) -> list[tuple[int, ...]]:
    chosen: dict[str, Any] = {"sparsity": "dense", "threads": 1, "speculation": speculation} | options
    with load(folder, **chosen) as model:
        return [model.generate(PROMPT, max_tokens=TOKENS, **sampling).tokens for sampling in SAMPLINGS]


@pytest.mark.fast("biased-True", "q4-False", "f16-False", "q8-True")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quant", ["q4", "q8", "f16", "biased"])
def test_its_logits_have_the_bits_of_the_head_s(
    tmp_path: Path, quant: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """biased: at 4 bits, of a head with a bias, which no Llama has."""
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied)
    if quant == "biased":
        change_family(monkeypatch, head_bias=True)
        size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        add_tensor(checkpoint, HEAD_BIAS, np.linspace(-3, 3, size, dtype=np.float32))
    bundle = convert_bundle(checkpoint, tmp_path / "bundle", "q4" if quant == "biased" else quant)
    ids = np.random.default_rng(4).integers(0, Bundle.open(bundle).config.vocab_size, (3, 40)).tolist()
    write_token_counts(Bundle.open(bundle), count_tokens(ids), bundle)
    # Chunks of a few rows: some have no chosen row, and chosen ones begin within a tile of sixteen.
    monkeypatch.setattr(parts, "CHUNK_BYTES", 500)
    with load(bundle, speculation="resident", draft_head=ROWS, max_context=64, threads=2) as model:
        transformer = model._engine._generator.transformer
        tokens = transformer.draft_tokens
        assert tokens is not None
        counted = Counter(token for piece in ids for token in piece)
        most = sorted(counted, key=lambda token: (-counted[token], token))[:ROWS]
        assert tokens.tolist() == sorted(most)
        states = np.random.default_rng(5).standard_normal((3, transformer.config.hidden_size), np.float32)

        def logits() -> tuple[bytes, bytes]:
            whole = transformer.checked_logits(states)
            return whole[:, tokens].tobytes(), transformer.draft_logits(states).tobytes()

        expected, found = model._owner.call(logits)
    assert found == expected


@pytest.mark.fast("auto")
@pytest.mark.parametrize("speculation", ["streams", "resident", "auto"])
def test_no_text_depends_on_it(counted: Path, speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts(counted, "off")
    always_draft(monkeypatch, [DRAFT_NODES, 5])
    proposed: set[int] = set()
    propose = Drafting.propose

    def noted(drafting: Drafting, *arguments: Any) -> Any:
        drafts = propose(drafting, *arguments)
        for draft in drafts:
            proposed.update(draft.tokens[1:])
        return drafts

    monkeypatch.setattr(Drafting, "propose", noted)
    assert texts(counted, speculation, draft_head=8) == expected
    # Eight tokens are few: nearly every other draft ends with a token that the head lacks.
    assert proposed
    assert speculation == "auto" or len(proposed) <= 8
    proposed.clear()
    assert texts(counted, speculation) == expected
    assert len(proposed) > 8


def test_it_is_planned_where_a_drafter_uses_it(counted: Path) -> None:
    config, quant = Bundle.open(counted).config, Bundle.open(counted).quant
    extra = {}
    for speculation in ("resident", "streams", "auto"):
        plans = [
            ondevice.inspect(counted, speculation=speculation, draft_head=rows)  # type: ignore[arg-type]
            for rows in (0, ROWS, config.vocab_size)
        ]
        assert plans[2].draft_bytes == plans[0].draft_bytes
        extra[speculation] = plans[1].draft_bytes - plans[0].draft_bytes
    used = draft_head_bytes(config, quant, ROWS)
    assert used > ROWS * config.hidden_size // 2
    assert extra == dict.fromkeys(("resident", "streams", "auto"), used)
    with load(counted, speculation="lookup") as model:
        assert model._engine._generator.transformer.draft_head is None


def test_a_head_of_one_token_drafts_that_token(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [DRAFT_NODES])
    options: Any = {"speculation": "resident", "draft_head": 1, "sparsity": "dense"}
    with load(counted, **options) as model:
        found = model.generate(PROMPT, max_tokens=TOKENS, logit_bias={EOS: -math.inf})
    assert found.stats.drafting.draft_tokens > 0
