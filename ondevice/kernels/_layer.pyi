"""The types of what `_native` has for layers that run with no Python in between (`bindings_layer.cc`)."""

from collections.abc import Sequence

from ondevice.kernels._matrix import Matrix
from ondevice.kernels._native import Addresses, Bytes, Expert, Float32, GateForm, Norm, Runner, Tree

LowRank = tuple[Matrix, Matrix]
"""An adapter's matrices: (rank, columns) and (rows, rank)."""

class PlainLayer:
    """Attention, then a feed-forward in slices, each with a norm before and after it, or without.

    It points into its arguments and keeps none of them. Arguments are those of `Matrix.forward`, `attend` and
    `SlicePass`; rope: number of the layer's rotary tables. adapters: of qkv, of out, and of the feed-forward,
    which has ReLU between its matrices.
    """

    def __init__(
        self,
        attention_norm: Norm | None,
        qkv: Matrix,
        qkv_bias: Float32 | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: int,
        window: int,
        scale: float,
        soft_cap: float,
        norms: tuple[Norm, Norm | None, bool, Norm | None] | None,
        sinks: Float32 | None,
        out: Matrix,
        out_bias: Float32 | None,
        attention_output_norm: Norm | None,
        feed_forward_norm: Norm | None,
        slice: Expert,
        slices: Sequence[Bytes],
        form: GateForm,
        gate_bias: Float32 | None,
        output_bias: Float32 | None,
        feed_forward_output_norm: Norm | None,
        adapters: tuple[LowRank, LowRank, LowRank] | None,
    ) -> None: ...

SequenceRows = tuple[int, tuple[Addresses, Addresses], int, Tree | None]
"""Rows of one sequence: their number, the addresses of its KV blocks (of layers that keep all tokens, and of
windowed ones), the number of tokens before them, and their tree."""

def run_layers(
    runner: Runner,
    layers: Sequence[PlainLayer],
    x: Float32,
    sequences: Sequence[SequenceRows],
    windows: Sequence[int],
    offsets: Sequence[int],
    bits: int,
    ropes: Sequence[tuple[Float32, Float32]],
    projected: Float32,
    attended: Float32,
    adapted: int,
    narrow: Float32 | None,
) -> None:
    """Layers one after the other over x (T, hidden), in place.

    sequences: whose rows x has, in their order. windows: of each layer, 0 for those that keep all tokens.
    offsets: of each layer, as in `attend`. ropes: cosines and sines, (T, head_dim / 2).
    projected, attended: scratch memory of T rows, as wide as the widest layer's. adapted: the first row to
    which adapters are added. narrow: scratch memory of the adapted rows, as wide as the largest rank; None if
    no row is adapted.
    """
