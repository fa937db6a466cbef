"""Drafts with the model itself, restricted to the weights in memory, so that drafting reads nothing.

These weights are the high planes of all neurons if the budget holds them, otherwise the neurons in memory.
(Draft & Verify, arXiv 2309.08168, and SWIFT, arXiv 2410.06916, which leave out layers, have similar ideas.)
Each pass continues a path of the draft after the text's keys and values, and runs only if its chance is worth
its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ondevice.backends.base import Float32
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.recurrent import AHEAD_TOKENS
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import SamplingConfig
from ondevice.model.sequence_state import SequenceState, common_prefix
from ondevice.model.transformer import Transformer
from ondevice.speculation.drafter import Drafter
from ondevice.speculation.ranking import Ranking
from ondevice.speculation.tree import Proposals

PRIOR_CHANCE = 0.8
"""Chance of the likeliest token before a text's first pass: two bits of four agree on 8 of 10 tokens."""
CHANCE_WEIGHT = 0.1
"""EMA weight of the newest pass in that chance."""
FREQUENT_SHARE = 0.8
"""Smallest share of frequent tokens in a text with which drafts are chosen from frequent tokens alone."""
RECENT_TOKENS = 128
"""Number of a text's newest tokens that count in that share."""


class ResidentDrafter(Drafter):
    """Computes draft tokens with the target's keys and values, which are truncated again afterwards."""

    def __init__(self, transformer: Transformer, is_partial: Callable[[], bool] = lambda: True) -> None:
        """is_partial: whether some of the weights are on flash. If none are, a draft's pass saves nothing."""
        self._transformer = transformer
        self._is_partial = is_partial
        self._ranking = Ranking()
        self._text: list[int] = []
        self._kv: SequenceState | None = None
        """State of the text except its last token, and of the draft's passes. None between drafts."""
        self._start = self._most = 0
        """Length of `_kv` without the draft's passes, and most tokens that these may add."""
        self._cancelled: IsCancelled = never_cancelled
        self._chance = PRIOR_CHANCE
        self._recent: deque[bool] = deque(maxlen=RECENT_TOKENS)
        """For each of the text's newest tokens, whether it is a frequent one."""

    def begin(self, text: list[int], sampling: SamplingConfig, prompt_tokens: int | None = None) -> None:
        self._text = list(text)
        self._chance = PRIOR_CHANCE
        frequent = self._transformer.frequent_tokens
        self._recent.clear()
        self._recent.extend(token < frequent for token in text[-RECENT_TOKENS:])
        self._ranking.begin(sampling, len(text) if prompt_tokens is None else prompt_tokens)

    def observe(self, token: int, logits: Float32 | None) -> None:
        self._text.append(token)
        self._recent.append(token < self._transformer.frequent_tokens)

    def spawn(self) -> ResidentDrafter:
        return ResidentDrafter(self._transformer, self._is_partial)

    def prepare(self, kv: SequenceState, max_nodes: int, cancelled: IsCancelled) -> None:
        self._kv, self._start, self._cancelled = kv, kv.length, cancelled
        self._most = min(kv.room - kv.length, AHEAD_TOKENS)

    def propose(self, path: Sequence[int]) -> Proposals:
        return ()

    @property
    def computed_chance(self) -> float:
        if not self._is_partial() or not (self._chooses_frequent or self._transformer.holds_head):
            return 0.0
        return self._chance

    @property
    def _chooses_frequent(self) -> bool:
        return sum(self._recent) >= FREQUENT_SHARE * len(self._recent)

    def compute(self, path: Sequence[int]) -> Proposals:
        kv, tokens = self._kv, [self._text[-1], *path]
        if kv is None or len(tokens) > self._most:
            return ()
        kept = common_prefix(kv.tokens[self._start :], tokens, len(tokens) - 1)
        kv.truncate(self._start + kept)
        batch = ForwardBatch(tokens[kept:], resident_only=True, last_only=True)
        hidden = self._transformer.run(batch, kv, self._cancelled).hidden
        model = self._transformer
        logits = (model.frequent_logits if self._chooses_frequent else model.checked_logits)(hidden)[0]
        history = [*self._text, *path]
        proposals = self._ranking.rank(logits, len(history), history)
        self._chance += CHANCE_WEIGHT * (proposals[0][1] - self._chance)
        return proposals

    def grown(self) -> None:
        if self._kv is not None:
            self._kv.truncate(self._start)
            self._kv = None
