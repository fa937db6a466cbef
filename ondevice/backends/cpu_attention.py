"""Attention of the CPU backend, and the projections of latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ondevice.backends.base import Block, Float32, HeadNorms, KVStore, Norm
from ondevice.backends.latent import LatentWeights
from ondevice.backends.token_tree import TokenTree
from ondevice.kernels import _native
from ondevice.model_config import AttentionSpec, LatentSpec


class CpuAttention(Protocol):
    """The ops of `CpuBackend` on keys and values."""

    runner: _native.Runner

    def normed(self, x: Float32, norm: Norm) -> Float32: ...

    def _buffer(self, op: str, shape: tuple[int, int]) -> Float32:
        """An op's output array of this shape, re-used."""

    def kv_move(self, kv: KVStore, source: int, target: int) -> None:
        layout, places = kv.layout, block_addresses(kv)
        for windowed, offset, sizes in layout.stretches:
            _native.kv_move(
                self.runner,
                places[windowed],
                offset,
                sizes.keys,
                sizes.width,
                layout.kv_bits,
                source,
                target,
                sizes.latent,
                sizes.values,
            )

    def attend(
        self,
        qkv: Float32,
        kv: KVStore,
        layer: int,
        position: int,
        cos: Float32,
        sin: Float32,
        spec: AttentionSpec,
        norms: HeadNorms | None = None,
        tree: TokenTree | None = None,
        sinks: Float32 | None = None,
    ) -> Float32:
        layout, sizes = kv.layout, kv.layout.heads[layer]
        out = self._buffer("attention", (len(qkv), sizes.queries * sizes.value_width))
        _native.attend(
            self.runner,
            qkv,
            block_addresses(kv)[layout.windows[layer] > 0],
            layout.layer_offsets[layer],
            layout.kv_bits,
            sizes.queries,
            sizes.keys,
            position,
            spec.window,
            spec.scale,
            spec.soft_cap,
            cos,
            sin,
            norms,
            None if tree is None else (tree.parents, tree.depths),
            out,
            spec.keys_of is None,
            sinks,
            sizes.latent,
            sizes.values,
        )
        return out

    def latent_rows(self, qkv: Float32, spec: LatentSpec, weights: LatentWeights) -> Float32:
        tokens, first = len(qkv), qkv.shape[1] - spec.width
        heads = weights.keys.matrix.rows // spec.rank
        queries = qkv[:, :first]
        if weights.queries is not None:
            matrix = weights.queries.matrix
            queries = self._buffer("queries", (tokens, matrix.rows))
            matrix.forward(self.runner, qkv[:, :first], None, queries, weights.query_norm)
        queries = queries.reshape(tokens, heads, spec.query_width)
        met = self._heads("latent queries", queries[:, :, : spec.key_dim], weights.keys)
        out = self._buffer("latents", (tokens, (heads + 1) * spec.width))
        parts = out.reshape(tokens, heads + 1, spec.width)
        parts[:, :heads, : spec.rank] = met.reshape(tokens, heads, spec.rank)
        parts[:, :heads, spec.rank :] = queries[:, :, spec.key_dim :]
        latents = np.ascontiguousarray(qkv[:, first : first + spec.rank])
        parts[:, heads, : spec.rank] = self.normed(latents, weights.norm)
        parts[:, heads, spec.rank :] = qkv[:, first + spec.rank :]
        return out

    def linear_heads(self, x: Float32, weight: Any, heads: int) -> Float32:
        return self._heads("linear heads", x.reshape(len(x), heads, -1), weight)

    def _heads(self, op: str, x: Float32, weight: Any) -> Float32:
        """(T, N): each head of x (T, H, K) multiplied by the rows of the weight that belong to this head."""
        out = self._buffer(op, (len(x), weight.matrix.rows))
        weight.matrix.forward_heads(self.runner, np.ascontiguousarray(x.swapaxes(0, 1)), out)
        return out


def block_addresses(kv: KVStore) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The addresses of all blocks, (blocks,): first of layers that see all tokens, then of windowed layers,
    with 0 for a missing block.
    """
    if kv.places is None:
        kv.places = (_addresses_of(kv.blocks), _addresses_of(kv.window_blocks))
    places: tuple[NDArray[np.uint64], NDArray[np.uint64]] = kv.places
    return places


def _addresses_of(blocks: Sequence[Block]) -> NDArray[np.uint64]:
    addresses = [0 if block is None else block.__array_interface__["data"][0] for block in blocks]
    return np.array(addresses, dtype=np.uint64)
