"""Keys and values of one cache as MLX arrays: per layer one for each side, with room in whole blocks.

MLX arrays are values, so a write makes new ones, and gradients pass through. MLX writes in place where nobody
else holds the old array, and copies where somebody does: a fork shares arrays until one of the two writes.
"""

from __future__ import annotations

import mlx.core as mx

from ondevice.backends.base import BLOCK_TOKENS, KVLayout
from ondevice.backends.mlx_weights import allocation

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

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        on_gpu = mx.default_device() == mx.gpu
        self.dtype = mx.float16 if on_gpu and layout.kv_bits < 32 else mx.float32
        heads, width = layout.config.num_kv_heads, layout.config.head_dim
        side = [mx.zeros((heads, 0, width), dtype=_KV_TYPES[layout.kv_bits])]
        if layout.kv_bits == 8:
            side.append(mx.zeros((heads, 0, 1)))
        self._layers = [[*side, *side] for _ in range(layout.config.num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, also of those that a fork shares."""
        return sum(part.nbytes for layer in self._layers for part in layer)

    def resize(self, blocks: int) -> None:
        """Room for so many blocks of positions; what is stored in them stays. Raises MemoryError.

        One array at a time is there twice: the next is copied once the last one's old room is free.
        """
        room = blocks * BLOCK_TOKENS
        for layer in self._layers:
            for index, part in enumerate(layer):
                more = room - part.shape[_POSITIONS]
                if not more:
                    continue
                empty = mx.zeros((part.shape[0], max(0, more), part.shape[2]), dtype=part.dtype)
                # A copy of what is cut, too: a view would hold the whole.
                layer[index] = mx.concatenate([part[:, :room], empty], axis=_POSITIONS)
                del part
                with allocation():
                    mx.eval(layer[index])

    def fork(self, blocks: int) -> MlxKV:
        """An independent copy with room for so many blocks."""
        copy = MlxKV(self.layout)
        copy._layers = [list(layer) for layer in self._layers]
        copy.resize(blocks)
        return copy

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
        mx.eval(moved)
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
