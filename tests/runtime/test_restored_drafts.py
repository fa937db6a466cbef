"""Texts of recurrent models, saved, loaded, forked and cut at random places, go on with drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.config import SamplingConfig, Speculation
from ondevice.converters.draft_layers.dflash import convert_dflash
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.generate import Event
from ondevice.speculation.tree import DRAFT_NODES
from tests.api.test_recurrent import made
from tests.support.bundles import EOS
from tests.support.dflash_heads import dflash_config, write_dflash_head
from tests.support.eagle_heads import write_eagle_head
from tests.support.engines import always_draft

DRAFTERS: list[Speculation] = ["lookup", "recycling", "model", "auto", "eagle", "dflash"]
LIVES, ACTS, SAID = 3, 4, 12
"""How often the model is loaded, what happens to its texts in each of these lives, and tokens of a reply."""
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "top_p": 0.9, "seed": 7},
]
Bits = list[tuple[int | None, float | None]]


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with delta rules or short convolutions, and two heads of random weights."""
    folder = tmp_path_factory.mktemp("restored")
    bundle = made(folder, request.param)
    convert_eagle(write_eagle_head(folder / "head", vocab_size=320), bundle)
    block = dflash_config(vocab_size=320, num_target_layers=None)
    convert_dflash(write_dflash_head(folder / "block", block), bundle)
    return bundle


@pytest.fixture(scope="module")
def plain(hybrid: Path) -> Iterator[Model]:
    """It decodes without drafts, and every text from its beginning."""
    with load(hybrid, speculation="off", threads=1) as model:
        yield model


def sampling(rng: random.Random) -> SamplingConfig:
    bias = ((2, -math.inf), (EOS, -math.inf))
    return SamplingConfig(max_tokens=SAID, top_logprobs=0, logit_bias=bias, **rng.choice(SAMPLINGS))


def bits(events: Iterator[Event]) -> Bits:
    return [(it.token, it.logprob) for it in events if it.token is not None]


class Life:
    """Texts of a model that drafts, each with the key of its state, from one load to the next.

    Each may be cut or prolonged before it goes on; what it says is compared with `plain`.
    """

    def __init__(self, model: Model, plain: Model, folder: Path, rng: random.Random) -> None:
        self.model, self.plain, self.folder, self.rng = model, plain, folder, rng
        self.texts: dict[int, list[int]] = {}
        self.drafted = self.restored = 0

    def open(self, texts: list[list[int]]) -> None:
        """Take up texts, whose states may be in folders of their own, or the prompt cache alone has them."""
        host = self.model._host
        for index, text in enumerate(texts):
            key = host.new_key()
            self.texts[key] = text
            if not index or self.rng.random() < 0.5:
                host._run_jointly(partial(self.model._engine.load_state, key, text, self.folder / str(index)))
                self.restored += self.model._engine.kv.state_of(key).length

    def act(self) -> None:
        """A text goes on, perhaps from an earlier place, and perhaps to its end in the midst of a draft."""
        rng, host = self.rng, self.model._host
        key = rng.choice(list(self.texts))
        ids = list(self.texts[key])
        if rng.random() < 0.4:
            del ids[rng.randrange(1, len(ids)) :]
        ids += [rng.randrange(3, 250) for _ in range(rng.choice([0, 1, 5, 40]))]
        config, leaves = sampling(rng), rng.randrange(2 * SAID)
        events, said = host.stream_ids(key, ids, config), Bits()
        expected = bits(self.plain._host.stream_ids(None, ids, config))
        for event in events:
            if event.token is None:
                assert event.stats is not None
                self.drafted += event.stats.drafting.draft_tokens
                self.restored += event.stats.restored_tokens
                break
            said.append((event.token, event.logprob))
            if len(said) == leaves:
                self._beside(key, [*ids, *(token for token, _ in said if token is not None)])
                if rng.random() < 0.5:
                    events.close()  # type: ignore[attr-defined]
                    break
        assert said == expected[: len(said)], config
        assert len(said) in (SAID, leaves)
        self.texts[key] = [*ids, *(token for token, _ in said if token is not None)]

    def _beside(self, key: int, text: list[int]) -> None:
        """A fork of a text that is being written, or its state in a folder, without what isn't verified."""
        if self.rng.random() < 0.7:
            fork = self.model._host.new_key()
            self.model._host.copy_cache(key, fork)
            self.texts[fork] = text
        else:
            self.model._host.save_state(key, self.folder / "beside")

    def close(self) -> list[list[int]]:
        """The three longest texts, whose states are now in folders."""
        kept = sorted(self.texts, key=lambda key: len(self.texts[key]), reverse=True)[:3]
        for index, key in enumerate(kept):
            self.model._host.save_state(key, self.folder / str(index))
        return [self.texts[key] for key in kept]


@pytest.mark.fast("qwen3.5-model")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_that_are_restored_go_on_as_plain_decoding(
    hybrid: Path, plain: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: Speculation
) -> None:
    always_draft(monkeypatch, [DRAFT_NODES, 3, 8])
    rng = random.Random(f"{hybrid.name} {drafter}")
    options: dict[str, Any] = {"draft_model": hybrid} if drafter == "model" else {}
    start = [rng.randrange(3, 250) for _ in range(40)]
    # Prompts repeat themselves, so that what looks for repetitions finds some.
    texts, drafted, restored = [start * 3, start * 4 + [9] * 30], 0, 0
    for life in range(LIVES):
        options["prefill_chunk"] = rng.choice([7, 64, 512])
        # Between two lives with one, the folders are all that is left of the states.
        cache: dict[str, Any] = {} if life == 1 else {"prompt_cache": tmp_path / "cache"}
        with load(hybrid, speculation=drafter, threads=1, parallel=3, **options, **cache) as model:
            held = Life(model, plain, tmp_path, rng)
            held.open(texts)
            for _ in range(ACTS):
                held.act()
            texts, drafted, restored = held.close(), drafted + held.drafted, restored + held.restored
    assert drafted > 20
    assert restored >= 64
