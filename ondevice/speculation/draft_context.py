"""A second model at work on a text: what it thinks follows, with its own keys and values in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ondevice.backends.base import Float32
from ondevice.model.kv_cache import KVCache, common_prefix
from ondevice.model.transformer import Transformer
from ondevice.tokenizer import Tokenizer


@dataclass(frozen=True)
class DraftModel:
    """A loaded second model. max_context: tokens that `kv` may come to hold; chunk: of them in a pass.

    tokenizer, target_tokenizer: its own and the target's where their vocabularies differ, else None: then
    its tokens are the target's. close: gives back what it holds.
    """

    transformer: Transformer
    kv: KVCache
    max_context: int
    chunk: int
    close: Callable[[], None]
    tokenizer: Tokenizer | None = None
    target_tokenizer: Tokenizer | None = None


class DraftContext:
    """Logits behind any run of tokens; those that follow what it saw last take only what is new."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def logits(self, tokens: Sequence[int], cancelled: Callable[[], bool] | None = None) -> Float32 | None:
        """(V,) what may follow `tokens`. None for none, and where context or vocabulary don't hold them.

        Raises what a pass raises.
        """
        transformer, kv, chunk = self._model.transformer, self._model.kv, self._model.chunk
        if not 0 < len(tokens) <= self._model.max_context:
            return None
        kept = common_prefix(kv.tokens, tokens, len(tokens) - 1)
        if max(tokens[kept:]) >= transformer.config.vocab_size:
            return None
        kv.truncate(kept)
        while len(tokens) - kept > chunk:
            transformer.forward(tokens[kept : kept + chunk], kv, "none", cancelled)
            kept += chunk
        logits = transformer.forward(tokens[kept:], kv, "last", cancelled)
        assert logits is not None
        last: Float32 = logits[0]
        return last
