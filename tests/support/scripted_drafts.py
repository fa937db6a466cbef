"""Drafts from a text that is known ahead: trees of all shapes, however slow they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ondevice.api import Model
from ondevice.backends.base import Float32
from ondevice.config import SamplingConfig
from ondevice.model.transformer import ForwardOutput
from ondevice.response import Response
from ondevice.speculation.drafted_text import PassOutcome
from ondevice.speculation.drafting import DraftRequest
from ondevice.speculation.tree import DRAFT_NODES, STREAM_ROWS, Draft, plain
from ondevice.stats import DraftStats

STREAMS = 3
"""Streams of the models that these drafts are for, if they have any."""


class Scripted:
    """Drafts that are right for a while and wrong beside it: trees of all shapes, from a text known ahead."""

    taps: tuple[int, ...] = ()

    def __init__(self, text: Sequence[int], vocab_size: int, seed: int) -> None:
        self._text = list(text)
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)
        self.sizes: list[int] = []
        self.draft = plain(0)
        self.streamed: Sequence[int] | None = None
        self.streams = 0
        """Nodes that had streams in their pass."""

    def begin(
        self,
        text: list[int],
        sampling: SamplingConfig,
        constrained: object = None,
        prompt_tokens: int | None = None,
    ) -> Scripted:
        self._length = len(text)
        return self

    def end(self, text: Scripted) -> None:
        pass

    def read(self, text: Scripted, output: ForwardOutput) -> None:
        pass

    def stats(self, text: Scripted) -> DraftStats:
        return DraftStats()

    def propose(self, asked: Sequence[DraftRequest], rows: int) -> list[Draft]:
        (_, root, kv, max_nodes, max_tokens, _), *_ = asked
        rng, known = self._random, self._text[self._length :]
        self._places = min(max_nodes, max(1, kv.room - kv.length))
        tokens, parents, depths = [root], [-1], [0]
        for _ in range(int(rng.integers(0, min(DRAFT_NODES, self._places)))):
            parent = int(rng.integers(max(0, len(tokens) - 5), len(tokens)))
            depth = depths[parent] + 1
            right = depth <= len(known) and rng.random() < 0.6
            token = known[depth - 1] if right else int(rng.integers(self._vocab_size))
            taken = [tokens[i] for i, its_parent in enumerate(parents) if its_parent == parent]
            if depth < max_tokens and token not in taken:
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
        self.sizes.append(len(tokens))
        self.draft = Draft(tuple(tokens), tuple(parents), (1.0,) * len(tokens))
        self.streamed = self._some(self.draft)
        return [self.draft]

    def _some(self, draft: Draft) -> Sequence[int]:
        """Nodes that get streams."""
        most = min(STREAM_ROWS, self._places - len(draft)) // STREAMS
        return sorted(self._random.permutation(len(draft))[: max(0, most)].tolist())

    def drew(self, token: int, logits: Float32) -> None:
        self._length += 1

    def observe(self, text: Scripted, outcome: PassOutcome) -> None:
        self.streams += len(outcome.output.streams)


def draft_by(model: Model, text: Sequence[int], seed: int) -> Scripted:
    """Make the model draft from what it is known to write."""
    engine = model._engine
    scripted: Any = Scripted(text, engine._bundle.config.vocab_size, seed)
    engine._generator = dataclasses.replace(engine._generator, drafting=scripted)
    return scripted  # type: ignore[no-any-return]


def drafted(
    model: Model,
    prompt: str,
    samplings: Sequence[dict[str, Any]],
    texts: Sequence[tuple[int, ...]],
    **options: Any,
) -> Iterator[tuple[Scripted, Response]]:
    """What is written with trees drafted from `texts`, those of plain decoding: they must be the same."""
    start = model.tokenizer.encode(prompt)
    for seed, (sampling, expected) in enumerate(zip(samplings, texts, strict=True)):
        scripted = draft_by(model, [*start, *expected], seed)
        answer = model.generate(prompt, max_tokens=len(expected), **options, **sampling)
        assert answer.tokens == expected
        yield scripted, answer
