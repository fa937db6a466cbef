"""Keys and values of one cache as MLX arrays: one of keys and one of values per layer, in blocks.

A write gives a new array, so that gradients pass through. MLX writes in place, as nothing else holds the old
array.
"""

from __future__ import annotations

from contextlib import suppress

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Bytes
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.backends.mlx_memory import Synchronisations, require_memory
from ondevice.backends.mlx_states import MlxStates

_KV_TYPES = {32: mx.float32, 16: mx.float16, 8: mx.int8}
_NUMPY_TYPES = {mx.float32: np.float32, mx.float16: np.float16, mx.int8: np.int8}
_POSITIONS = 1
"""The axis of positions."""


def no_block(nbytes: int) -> None:
    """None. The block allocator of a `SequenceState` over `MlxKV`, which needs no blocks."""


class MlxKV:
    """`KVArrays`: keys (KVH, room, Dh) and values (KVH, room, value width) for every layer that stores them.

    At 8 bits they are int8 codes of these shapes and float32 scales (KVH, room, 1), as in `KVLayout`. They
    are read as float32; on a GPU as float16, unless stored in float32. In latent attention a layer has one
    array of latents and rotary parts (1, room, width), and at 8 bits a scale of each. Layers without keys
    have none.
    """

    def __init__(self, layout: KVLayout, waits: Synchronisations | None = None) -> None:
        """Empty arrays. waits: counts the synchronisations, if given."""
        self.layout = layout
        self._waits = Synchronisations() if waits is None else waits
        on_gpu = mx.default_device() == mx.gpu
        self.dtype = mx.float16 if on_gpu and layout.kv_bits < 32 else mx.float32
        self.states = MlxStates(layout.states)
        self._layers: list[list[mx.array]] = []
        for sizes in layout.heads:
            codes = mx.zeros((sizes.keys, 0, sizes.width), dtype=_KV_TYPES[layout.kv_bits])
            scales = [mx.zeros((sizes.keys, 0, 1))] if layout.kv_bits == 8 else []
            if not sizes.keys:
                self._layers.append([])
            elif sizes.latent:
                self._layers.append([codes, *scales, *scales])
            else:
                values = mx.zeros((sizes.keys, 0, sizes.value_width), dtype=codes.dtype)
                self._layers.append([codes, *scales, values, *scales])

    def resize(self, blocks: int) -> None:
        """Make room for `blocks` blocks of positions; stored ones that still fit stay.

        A layer's arrays grow when a pass first writes to them: growing costs no wait, and only one layer's
        arrays exist twice at a time. Arrays shrink at once. Raises MemoryError for more room than the system
        has, and then changes nothing.
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
                    # Without memory for the smaller copy, the larger array stays.
                    with suppress(MemoryError):
                        layer[index] = self._known(_copied(part, room))
                del part

    def fork(self, blocks: int) -> MlxKV:
        """An independent copy with room for `blocks` blocks. Raises MemoryError."""
        copy, room = MlxKV(self.layout, self._waits), blocks * BLOCK_TOKENS
        copy._layers = [[self._known(_copied(part, room)) for part in layer] for layer in self._layers]
        return copy

    def _known(self, array: mx.array) -> mx.array:
        require_memory(array.nbytes)
        self._waits.wait(array)
        return array

    def write(self, layer: int, k: mx.array, v: mx.array | None, position: int) -> None:
        """Write keys and values (T, KVH, Dh) at the places from `position` on, for which there is room.

        v: None in latent attention, whose keys are (T, 1, width).
        """
        start = mx.array([position])
        parts = self._latent_parts(layer, k) if v is None else [*self._parts(k), *self._parts(v)]
        for index, part in enumerate(parts):
            held = self._layers[layer]
            held[index] = mx.slice_update(held[index], part, start, [_POSITIONS])

    def read(self, layer: int, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values at places 0 .. length - 1: (KVH, length, Dh) each. In latent attention both are the
        keys, (1, length, width), whose first dimensions are the values. Views, if the stored type is the type
        read.
        """
        parts, latent = [part[:, :length] for part in self._layers[layer]], self.layout.heads[layer].latent
        if latent:
            keys, *scales = (part.astype(self.dtype) for part in parts)
            if scales:
                both = [keys[:, :, :latent] * scales[0], keys[:, :, latent:] * scales[1]]
                keys = mx.concatenate(both, axis=-1)
            return keys, keys
        if self.layout.kv_bits == 8:
            k, k_scales, v, v_scales = (part.astype(self.dtype) for part in parts)
            return k * k_scales, v * v_scales
        k, v = (part.astype(self.dtype) for part in parts)
        return k, v

    def move(self, source: int, target: int) -> None:
        """Copy the keys and values at place `source`, of every layer, to place `target`."""
        moved = [[mx.take(part, mx.array([source]), axis=_POSITIONS) for part in it] for it in self._layers]
        # Evaluated first: a pending copy holds its array, so the update would copy all of it.
        self._waits.wait(*(part for parts in moved for part in parts))
        start = mx.array([target])
        for layer, parts in zip(self._layers, moved, strict=True):
            for index, part in enumerate(parts):
                layer[index] = mx.slice_update(layer[index], part, start, [_POSITIONS])

    def part_sizes(self, positions: int) -> list[int]:
        """Bytes of each layer's arrays at this many positions."""
        return [_nbytes(part, positions) for layer in self._layers for part in layer]

    def part(self, index: int, start: int, stop: int) -> Bytes:
        """A copy of one array's bytes at positions start .. stop - 1."""
        layer, array = self._place(index)
        return np.array(self._layers[layer][array][:, start:stop]).reshape(-1).view(np.uint8)

    def load_part(self, index: int, start: int, stop: int, data: Bytes) -> None:
        """Store the bytes of one array, at positions start .. stop - 1."""
        layer, array = self._place(index)
        held = self._layers[layer]
        heads, _, width = held[array].shape
        stored = data.view(_NUMPY_TYPES[held[array].dtype]).reshape(heads, stop - start, width)
        held[array] = mx.slice_update(held[array], mx.array(stored), mx.array([start]), [_POSITIONS])
        self._waits.wait(held[array])

    def _place(self, index: int) -> tuple[int, int]:
        """The layer that part `index` belongs to, and the part's index among that layer's arrays."""
        layer = 0
        while index >= len(self._layers[layer]):
            index -= len(self._layers[layer])
            layer += 1
        return layer, index

    def _latent_parts(self, layer: int, x: mx.array) -> list[mx.array]:
        """Latents and rotary parts x (T, 1, width) in their stored form: values, or codes and two scales."""
        rank = self.layout.heads[layer].latent
        codes, *scales = zip(self._parts(x[:, :, :rank]), self._parts(x[:, :, rank:]), strict=True)
        return [mx.concatenate(list(codes), axis=-1), *(scale for both in scales for scale in both)]

    def _parts(self, x: mx.array) -> list[mx.array]:
        """Keys or values x (T, KVH, Dh) in their stored form: codes or floats (KVH, T, Dh), and at 8 bits
        scales (KVH, T, 1).
        """
        x = x.swapaxes(0, 1)
        if self.layout.kv_bits != 8:
            return [x.astype(_KV_TYPES[self.layout.kv_bits])]
        largest = mx.abs(x).max(axis=-1, keepdims=True)
        codes = mx.where(largest > 0, mx.round(x * (127.0 / largest)), 0.0)
        return [codes.astype(mx.int8), largest / 127.0]


def _nbytes(part: mx.array, room: int) -> int:
    """The bytes of an array like `part` if it had room for `room` positions."""
    heads, _, width = part.shape
    nbytes: int = heads * room * width * part.dtype.size
    return nbytes


def _copied(part: mx.array, room: int) -> mx.array:
    """A copy, never a view, of `part` (KVH, positions, ...), padded or cut to (KVH, room, ...)."""
    heads, positions, width = part.shape
    empty = mx.zeros((heads, max(0, room - positions), width), dtype=part.dtype)
    return mx.concatenate([part[:, :room], empty], axis=_POSITIONS)
