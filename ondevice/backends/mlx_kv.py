"""Keys and values of one cache as MLX arrays: per layer one for each side, with room in whole blocks.

MLX arrays are values, so a write makes new ones, and gradients pass through. MLX writes in place where nobody
else holds the old array, and nobody does here.
"""

from __future__ import annotations

from contextlib import suppress

import mlx.core as mx

from ondevice.backends.base import BLOCK_TOKENS, KVLayout
from ondevice.backends.mlx_memory import Synchronisations, require_memory

_KV_TYPES = {32: mx.float32, 16: mx.float16, 8: mx.int8}
_POSITIONS = 1
"""The axis of positions."""


def no_block(nbytes: int) -> None:
    """What a `KVCache` over `MlxKV` allocates where no plan counts its blocks: its arrays grow."""


class MlxKV:
    """`KVArrays`: (KVH, room, Dh) keys and as many values of every layer.

    At 8 bits, codes int8 (KVH, room, Dh) and scales float32 (KVH, room, 1), as `KVLayout` says. They are read
    in float32; on a GPU in float16, unless they are stored in float32.
    """

    def __init__(self, layout: KVLayout, waits: Synchronisations | None = None) -> None:
        """waits: where waiting counts, if anybody counts it."""
        self.layout = layout
        self._waits = Synchronisations() if waits is None else waits
        on_gpu = mx.default_device() == mx.gpu
        self.dtype = mx.float16 if on_gpu and layout.kv_bits < 32 else mx.float32
        heads, width = layout.config.num_kv_heads, layout.config.head_dim
        side = [mx.zeros((heads, 0, width), dtype=_KV_TYPES[layout.kv_bits])]
        if layout.kv_bits == 8:
            side.append(mx.zeros((heads, 0, 1)))
        self._layers = [[*side, *side] for _ in range(layout.config.num_layers)]

    def resize(self, blocks: int) -> None:
        """Room for so many blocks of positions; what is stored in them stays.

        A layer's arrays grow when a pass first writes to them, so nobody waits for it, and one layer's at a
        time are there twice; they are cut at once. Raises MemoryError for more room than the system has, and
        then changes nothing.
        """
        room = blocks * BLOCK_TOKENS
        parts = [part for layer in self._layers for part in layer]
        longer = [_nbytes(part, room) for part in parts if room > part.shape[_POSITIONS]]
        if longer:
            require_memory(sum(longer) - sum(part.nbytes for part in parts) + 2 * max(longer))
        del parts
        for layer in self._layers:
            for index, part in enumerate(layer):
                if room > part.shape[_POSITIONS]:
                    layer[index] = _copied(part, room)
                elif not room:
                    layer[index] = mx.zeros((part.shape[0], 0, part.shape[2]), dtype=part.dtype)
                elif room < part.shape[_POSITIONS]:
                    # What can't be cut for want of memory still has room for every block.
                    with suppress(MemoryError):
                        layer[index] = self._known(_copied(part, room))
                del part

    def fork(self, blocks: int) -> MlxKV:
        """An independent copy with room for so many blocks. Raises MemoryError."""
        copy, room = MlxKV(self.layout, self._waits), blocks * BLOCK_TOKENS
        copy._layers = [[self._known(_copied(part, room)) for part in layer] for layer in self._layers]
        return copy

    def _known(self, array: mx.array) -> mx.array:
        require_memory(array.nbytes)
        self._waits.wait(array)
        return array

    def write(self, layer: int, k: mx.array, v: mx.array, position: int) -> None:
        """Keys and values (T, KVH, Dh) of the places from `position` on, for which there is room."""
        start = mx.array([position])
        for index, part in enumerate((*self._parts(k), *self._parts(v))):
            held = self._layers[layer]
            held[index] = mx.slice_update(held[index], part, start, [_POSITIONS])

    def read(self, layer: int, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values of places 0 .. length - 1, as stored: (KVH, length, Dh) each.

        Views, where they are stored in what they are read in.
        """
        parts = [part[:, :length] for part in self._layers[layer]]
        if self.layout.kv_bits == 8:
            k, k_scales, v, v_scales = (part.astype(self.dtype) for part in parts)
            return k * k_scales, v * v_scales
        k, v = (part.astype(self.dtype) for part in parts)
        return k, v

    def move(self, source: int, target: int) -> None:
        """What place `source` holds, of every layer, is stored in place `target` too."""
        moved = [[mx.take(part, mx.array([source]), axis=_POSITIONS) for part in it] for it in self._layers]
        # Known first: as long as a copy of a place is only asked for, its array is held and would be copied.
        self._waits.wait(*(part for parts in moved for part in parts))
        start = mx.array([target])
        for layer, parts in zip(self._layers, moved, strict=True):
            for index, part in enumerate(parts):
                layer[index] = mx.slice_update(layer[index], part, start, [_POSITIONS])

    def _parts(self, x: mx.array) -> list[mx.array]:
        """x (T, KVH, Dh) as one side stores it: codes or values (KVH, T, Dh), and scales (KVH, T, 1)."""
        x = x.swapaxes(0, 1)
        if self.layout.kv_bits != 8:
            return [x.astype(_KV_TYPES[self.layout.kv_bits])]
        largest = mx.abs(x).max(axis=-1, keepdims=True)
        codes = mx.where(largest > 0, mx.round(x * (127.0 / largest)), 0.0)
        return [codes.astype(mx.int8), largest / 127.0]


def _nbytes(part: mx.array, room: int) -> int:
    """Of such an array with room for so many positions."""
    heads, _, width = part.shape
    nbytes: int = heads * room * width * part.dtype.size
    return nbytes


def _copied(part: mx.array, room: int) -> mx.array:
    """(KVH, room, ...) that begins as (KVH, positions, ...) does; a copy of what is cut, too: no view."""
    heads, positions, width = part.shape
    empty = mx.zeros((heads, max(0, room - positions), width), dtype=part.dtype)
    return mx.concatenate([part[:, :room], empty], axis=_POSITIONS)
