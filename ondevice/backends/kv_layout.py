"""Where keys and values lie in memory, and how many of them a text keeps."""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import Literal

from ondevice.backends.recurrent import MARKS, StateLayout
from ondevice.model_config import FULL_MODEL, HeadSizes, ModelConfig
from ondevice.records import dataclass

BLOCK_TOKENS = 64
"""Tokens per key/value block: position p lies in block p // 64, slot p % 64."""


@dataclass(frozen=True)
class KVLayout:
    """Byte layout of one key/value block: `BLOCK_TOKENS` positions of every head of every layer with keys.

    With `pass_tokens`, windowed layers have separate blocks, of which a text keeps the last ones.

    Each (layer, kv head) has, from `head_offset` on, [K codes][K scales][V codes][V scales]. Key codes are
    (4, Dh, 16), so that a kernel scores 16 neighbouring positions side by side and a write touches few cache
    lines. Value codes are (64, value width). Codes are float16 at 16 bits, int8 at 8 bits, and float32 at 32
    bits (for `reference` and training). Scales, 64 float32, exist at 8 bits only. Every offset is a multiple
    of 64 bytes. `KVArrays` take the same number of bytes, in another order.

    In latent attention there are [codes][latent scales][rotary scales] instead: a key is the latent, which is
    also the value, and a rotary part.

    Quantisation to 8 bits, per token and head, all in float32: m = max|x|, scale = m / 127,
    q = rint(x * (127 / m)), which reads back as q * scale; m == 0 gives q = 0 and scale = 0.
    """

    config: ModelConfig
    kv_bits: Literal[32, 16, 8] = 16
    drafts: bool = False
    marks: int = MARKS
    """Whether texts have drafts, and the most marks of a text: recurrent states take memory for both."""
    pass_tokens: int = 0
    """Most tokens of a text in a pass, where blocks before a window are given up; 0: all are kept."""

    @cached_property
    def heads(self) -> tuple[HeadSizes, ...]:
        """The heads of each layer that stores keys and values."""
        return tuple(map(self.config.stored_heads, self.config.layers[: self.config.num_kv_layers]))

    def codes_bytes(self, layer: int) -> int:
        """Bytes of one head's key codes in a block."""
        return BLOCK_TOKENS * self.heads[layer].width * self.kv_bits // 8

    @cached_property
    def scales_bytes(self) -> int:
        """Bytes of one head's key (or value) scales in a block; 0 unless at 8 bits."""
        return BLOCK_TOKENS * 4 if self.kv_bits == 8 else 0

    def head_bytes(self, layer: int) -> int:
        """Bytes of one (layer, kv head) in a block: keys, then values."""
        codes = BLOCK_TOKENS * self.heads[layer].stored_width * self.kv_bits // 8
        return codes + 2 * self.scales_bytes

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer in a block."""
        return self.heads[layer].keys * self.head_bytes(layer)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer that stores keys and values: the number of tokens that a token sees. 0 if
        the layer keeps all tokens' keys and values.

        All are 0 if texts go back to states of recurrent layers, or if other machines hold a part of each
        text, since then all layers must be able to go back to the same place.
        """
        config, windows = self.config, [0] * len(self.heads)
        if not self.pass_tokens or config.recurrent_layers or config.part != FULL_MODEL:
            return tuple(windows)
        readers = [
            (it if (by := spec.attention.keys_of) is None else by, spec)
            for it, spec in enumerate(config.layers)
        ]
        for layer in range(len(windows)):
            seen = [spec.attention.window for owner, spec in readers if owner == layer and spec.attends]
            windows[layer] = max(seen, default=0) if all(seen) else 0
        return tuple(windows)

    @cached_property
    def ring(self) -> int:
        """Most blocks of windowed layers that a text needs for one pass and for the drafts that run ahead of
        it.
        """
        if not any(self.windows):
            return 0
        return self.window_span(max(self.pass_tokens, BLOCK_TOKENS))

    def window_span(self, n_tokens: int) -> int:
        """Most blocks of windowed layers that n_tokens consecutive tokens lie in or see."""
        return 1 + self.blocks(max(self.windows) + n_tokens - 2)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """The offset in bytes of each layer within its block, then the end of the last layer that keeps all
        tokens.
        """
        return (*self._ends[0], self._ends[1])

    @property
    def block_bytes(self) -> int:
        # Blocks of layers without keys still have an address.
        return self.layer_offsets[-1] or 64

    @property
    def window_block_bytes(self) -> int:
        """Bytes of a block of windowed layers; 0 where there are none."""
        return self._ends[2]

    @cached_property
    def _ends(self) -> tuple[list[int], int, int]:
        """The offset in bytes of each layer within its block, then the sizes of both kinds of block: of
        layers that keep all tokens, and of windowed ones.
        """
        offsets, ends = [], [0, 0]
        for layer, window in enumerate(self.windows):
            kind = int(window > 0)
            offsets.append(ends[kind])
            ends[kind] += self.layer_bytes(layer)
        return offsets, ends[0], ends[1]

    @cached_property
    def states(self) -> StateLayout:
        """Layout of the states that recurrent layers have instead of keys and values."""
        token_bytes, model_states = self.block_bytes // BLOCK_TOKENS, self.config.part.states
        if model_states:
            _, values, heads = model_states
            token_bytes = values * self.kv_bits // 8 + (8 * heads if self.kv_bits == 8 else 0)
        return StateLayout(self.config, token_bytes, self.drafts, self.marks)

    def nbytes(self, n_tokens: int) -> int:
        """Bytes of the blocks and states that a text of n_tokens needs."""
        blocks = self.blocks(n_tokens)
        windowed = min(blocks, self.ring) * self.window_block_bytes
        return blocks * self.block_bytes + windowed + self.states.text_bytes(n_tokens)

    def marks_bytes(self, n_tokens: int) -> int:
        """Most additional bytes of windowed layers that a text of n_tokens keeps for its marks."""
        if not self.ring:
            return 0
        dropped = self.blocks(n_tokens) - self.ring
        return max(0, min(dropped, self.marks * self.window_span(1))) * self.window_block_bytes

    def head_offset(self, layer: int, head: int) -> int:
        """Bytes from the start of a block to those of (layer, kv head)."""
        return self.layer_offsets[layer] + head * self.head_bytes(layer)

    @cached_property
    def stretches(self) -> tuple[tuple[bool, int, HeadSizes], ...]:
        """(windowed, offset, heads) of each run of adjacent layers whose heads have one width."""
        stretches = []
        kinds = [
            (window > 0, sizes._replace(keys=0))
            for window, sizes in zip(self.windows, self.heads, strict=True)
        ]
        layers = sorted(range(len(kinds)), key=lambda it: kinds[it][0])
        for (windowed, kind), group in groupby(layers, key=kinds.__getitem__):
            together = list(group)
            keys = sum(self.heads[it].keys for it in together)
            if keys:
                stretches.append((windowed, self.layer_offsets[together[0]], kind._replace(keys=keys)))
        return tuple(stretches)

    def blocks(self, n_tokens: int) -> int:
        """Number of blocks that hold n_tokens positions."""
        return -(-n_tokens // BLOCK_TOKENS)
