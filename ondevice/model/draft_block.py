"""Layers that draft a block of tokens at once: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

Keys and values of the text are projections of a mixture of the target's hidden states. A block is the text's
last token followed by mask tokens. Its rows see the text and each other, and each drafts a token. DSpark adds
logits that depend on the token before, computed by two low-rank matrices, the Markov head.

Legend: n rows, B tokens of a block, D width of the layers, H query heads, Dh head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ondevice.backends.base import Array, Float32, HeadNorms
from ondevice.model.draft_layer import LoadedDraftLayer
from ondevice.model.sequence_state import SequenceState


class DraftBlock:
    """Runs the layers of `loaded`. It runs on the backend's thread."""

    def __init__(self, loaded: LoadedDraftLayer) -> None:
        self._loaded = loaded
        self._layers = range(len(loaded.layer.windows))
        self._attention = loaded.config.layers[0].attention

    def add_rows(self, tokens: Sequence[int], hidden: Array, kv: SequenceState) -> None:
        """Add the keys and values of a text's tokens to kv. hidden: (n, D), from `LoadedDraftLayer.mixed`.

        Raises the errors of the cache's allocator; kv is then as before.
        """
        loaded, position = self._loaded, kv.length
        kv.reserve(position + len(tokens))
        for layer in self._layers:
            qkv = loaded.backend.linear(hidden, loaded.weights[f"{layer}.qkv"])
            self._store(layer, qkv, kv, position)
        kv.extend(tokens)

    def logits(self, token: int, drafts: int, kv: SequenceState) -> Float32:
        """Logits (drafts, V) of the tokens after `token`, the next token after those in kv, which stays as it
        is.

        Raises the errors of the cache's allocator, and BundleError for logits that aren't finite.
        """
        loaded, spec, position = self._loaded, self._loaded.layer, kv.length
        kv.reserve(position + spec.block)
        x = loaded.embedded([token, *[spec.mask] * (spec.block - 1)])
        for layer in self._layers:
            norm, weights = loaded.norm(f"{layer}.attention_norm"), loaded.weights
            seen = self._attended(layer, loaded.backend.linear(x, weights[f"{layer}.qkv"], norm), kv)
            x = loaded.backend.linear(seen, weights[f"{layer}.out"], added=x)
            norm, gated = loaded.norm(f"{layer}.feed_forward_norm"), loaded.gated(f"{layer}.")
            x = gated.product(loaded.backend, x, spec.activation, norm, x)
        first = 0 if spec.anchored else 1
        return loaded.logits(loaded.backend.rows(x, range(first, first + drafts)))

    def after(self, token: int, logits: Float32) -> Float32:
        """The logits (V,) of a draft token that follows `token` in a block, with what the Markov
        head adds.
        """
        loaded = self._loaded
        if not loaded.layer.markov_rank:
            return logits
        added: Float32 = loaded.backend.to_numpy(
            loaded.backend.linear(loaded.table_rows([token]), loaded.weights["markov"])
        )[0]
        return logits + added

    def _attended(self, layer: int, qkv: Array, kv: SequenceState) -> Array:
        """Attention's output (B, H * Dh) for the rows of a block after kv. Each row sees all others."""
        loaded, spec, position = self._loaded, self._loaded.layer, kv.length
        cos, sin = loaded.rope.run(position, spec.block)
        queries = loaded.backend.rows(qkv, range(spec.block))[:, : spec.query_size]
        self._store(layer, qkv, kv, position)
        window, last, seen = spec.windows[layer], spec.block - 1, []
        for row in range(spec.block):
            # A window reaches back from the row's place, and what is stored ends with the block's last row.
            attention = replace(self._attention, keys_of=layer, window=window + last - row if window else 0)
            at = slice(row, row + 1)
            attended = loaded.backend.attend(
                queries[at], kv, layer, position + last, cos[at], sin[at], attention, self._norms(layer)
            )
            # A copy, as the next result overwrites it.
            seen.append(loaded.backend.rows(attended, [0]))
        return loaded.backend.stacked(seen)

    def _store(self, layer: int, qkv: Array, kv: SequenceState, position: int) -> None:
        """Store the keys and values of rows, (n, queries, keys and values), without attention to
        other rows.
        """
        cos, sin = self._loaded.rope.run(position, qkv.shape[0])
        attention = replace(self._attention, window=1)
        self._loaded.backend.attend(qkv, kv, layer, position, cos, sin, attention, self._norms(layer))

    def _norms(self, layer: int) -> HeadNorms:
        return HeadNorms(self._loaded.norm(f"{layer}.q_norm"), self._loaded.norm(f"{layer}.k_norm"))
