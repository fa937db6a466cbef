"""The forward pass of a decoder-only transformer, written once over the backend ops: the file to open first.

    x = embedding(tokens)
    for each layer:  x += attention(norm(x));  x += feed_forward(norm(x))
    logits = head(norm(x))

It knows nothing of prompts, sampling, budgets or files. Legend: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal

import numpy as np

from ondevice.backends.base import Array, Backend, Float32, Norm
from ondevice.backends.token_tree import TokenTree
from ondevice.config import ModelConfig
from ondevice.errors import BundleError, UsageError
from ondevice.model.attention import attention
from ondevice.model.ffn import feed_forward, foresee
from ondevice.model.kv_cache import KVCache
from ondevice.model.rope import Rope
from ondevice.model.weights import ModelWeights

WantedLogits = Literal["none", "last"]


class Cancelled(Exception):  # noqa: N818 - an outcome the decode loop handles, never an error a user sees
    """A pass was given up between two layers; the cache is as it was before it."""


class Transformer:
    """A loaded model: shapes, an engine and the weights that engine loaded.

    To run it with others, as training does, make another from `weights` with parts replaced.
    """

    def __init__(self, config: ModelConfig, backend: Backend, weights: ModelWeights) -> None:
        self.config = config
        self.backend = backend
        self.weights = weights
        self._rope = Rope(config)

    def forward(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        logits: WantedLogits = "last",
        cancelled: Callable[[], bool] | None = None,
    ) -> Float32 | None:
        """Run T tokens at positions kv.length, kv.length + 1, ... and leave their keys and values in kv.

        Returns float32 logits (1, V) of the last token, or None where none are wanted.
        Raises Cancelled when `cancelled()` holds between two layers, UsageError for an id outside the
        vocabulary, BundleError for logits that aren't finite, and what a read or the cache's allocator
        raises. Whatever it raises, kv is as before.
        """
        with ExitStack() as undo:
            undo.callback(kv.truncate, kv.length)
            x = self._layers(tokens, kv, "last", cancelled)
            result = None if logits == "none" else self.checked_logits(x)
            undo.pop_all()
        return result

    def every_logits(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        rows: int,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Float32]:
        """Like `forward`, but yields the logits of every token, (at most rows, V) at a time.

        The layers have run, and kv holds the tokens, when the first piece comes.
        """
        hidden = self.hidden_states(tokens, kv, cancelled)
        for start in range(0, len(tokens), rows):
            yield self.checked_logits(hidden[start : start + rows])

    def embedding(self, tokens: Sequence[int]) -> Array:
        """What enters the first layer, (T, D). Raises UsageError for an id outside the vocabulary."""
        return self.backend.embedding(self.weights.embedding, self._checked(tokens))

    def hidden_states(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        cancelled: Callable[[], bool] | None = None,
        x: Array | None = None,
        tree: TokenTree | None = None,
    ) -> Array:
        """Like `forward`, but returns what leaves the last layer for every token, (T, D), for `logits`.

        tree: how the T tokens follow each other, if they don't just follow. kv then holds all of them until
        `KVCache.keep` says which path stays. x: (T, D) enters the first layer in place of
        `embedding(tokens)`, and may be overwritten; UsageError for another shape. Over `mlx` the result is
        differentiable by x, by the weights, and through the keys and values that earlier passes left in kv.
        """
        with ExitStack() as undo:
            undo.callback(kv.truncate, kv.length)
            hidden = self._layers(tokens, kv, "all", cancelled, x, tree)
            undo.pop_all()
        return hidden

    def logits(self, hidden: Array) -> Array:
        """hidden: (n, D) from `hidden_states`. Returns (n, V), the backend's own array, unchecked."""
        norm = Norm(self.weights.final_norm, self.config.rms_norm_eps)
        return self.backend.linear(hidden, self.weights.head, norm)

    def _layers(
        self,
        tokens: Sequence[int],
        kv: KVCache,
        wanted: Literal["last", "all"],
        cancelled: Callable[[], bool] | None,
        x: Array | None = None,
        tree: TokenTree | None = None,
    ) -> Array:
        """Hidden states after the last layer, (T, D) or only the last token's (1, D). Extends kv."""
        backend, config, position = self.backend, self.config, kv.length
        ids = self._checked(tokens)
        kv.reserve(position + len(ids))
        if tree is not None and len(tree) != len(ids):
            raise UsageError(f"a tree of {len(tree)} nodes can't hold {len(ids)} tokens")
        if tree is not None and tree.is_chain:
            tree = None
        ahead = np.arange(len(ids)) if tree is None else tree.depths
        cos, sin = self._rope.tables(position + ahead)
        if x is None:
            x = backend.embedding(self.weights.embedding, ids)
        elif tuple(x.shape) != (len(ids), config.hidden_size):
            raise UsageError(f"x is {tuple(x.shape)}; it must be {(len(ids), config.hidden_size)}")
        for layer, weights in enumerate(self.weights.layers):
            if cancelled is not None and cancelled():
                raise Cancelled
            x = attention(backend, config, weights, x, kv, layer, position, cos, sin, tree)
            if layer == config.num_layers - 1 and wanted == "last":
                x = x[-1:]
            if layer + 1 < config.num_layers:
                foresee(backend, config, self.weights.layers[layer + 1], x)
            x = feed_forward(backend, config, weights, x)
        kv.extend(ids.tolist())
        return x

    def checked_logits(self, hidden: Array) -> Float32:
        """hidden: (n, D) from `hidden_states`. Returns (n, V). Raises BundleError if they aren't finite."""
        logits = self.backend.to_numpy(self.logits(hidden))
        if not np.isfinite(logits).all():
            raise BundleError(
                "the model computes logits that are not finite: its weights are not a usable model's; "
                "check the checkpoint and convert it again"
            )
        return logits

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        """tokens as (T,) int32. An id out of range would be read as some other record."""
        if not len(tokens):
            raise UsageError("a forward pass needs at least one token")
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest >= self.config.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise UsageError(f"token id {bad} is not from 0 to {self.config.vocab_size - 1}")
        return np.array(tokens, dtype=np.int32)
