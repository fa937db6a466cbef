"""Plain layers of the CPU backend: one native call runs several, without Python between their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import ref

from ondevice.backends.base import Float32
from ondevice.backends.cpu_attention import block_addresses
from ondevice.backends.cpu_matrices import CpuLinear, StreamedLinear
from ondevice.backends.cpu_neurons import CpuSlices, native_form
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.plain_layers import Adapters, PlainWeights, SequencePlace
from ondevice.kernels import _native
from ondevice.model_config import HeadSizes, LayerSpec, ModelConfig

NativeAdapters: TypeAlias = "tuple[_native.LowRank, _native.LowRank, _native.LowRank]"
"""The adapters of queries, keys and values, of attention's output, and of the feed-forward."""
MAX_ROWS = 64
"""Rows of the largest batch that runs here: for longer ones Python takes no time worth saving."""
BYTES_AT_ONCE = 256 << 20
"""Bytes of slices in one native call, if it has several layers. Only between calls a pass is cancelled, and
after each, Python and its data come from DRAM again: in SmolLM2-135M 30 us, whatever it does."""


def cpu_plain_layers(
    runner: _native.Runner,
    config: ModelConfig,
    layers: Sequence[PlainWeights],
    adapters: Adapters,
    buffer: Callable[[str, tuple[int, int]], Float32],
) -> CpuPlainLayers | None:
    """An object that runs the plain ones among a model's layers, whose weights are `layers`. None if none is
    plain.

    A layer that comes before one with prefetching is left out, because it also computes the estimate for
    that.

    buffer: given an op's name and a shape, returns the backend's output array.
    """
    plain = [
        CpuPlainLayer(spec, weights, config.stored_heads(spec), _native_adapters(adapters, layer))
        if has_native_form(spec, weights) and isinstance(after.feed_forward, CpuSlices)
        else None
        for layer, (spec, weights, after) in enumerate(
            zip(config.layers, layers, [*layers[1:], *layers[-1:]], strict=False)
        )
    ]
    sizes = [layer.heads for layer in plain if layer is not None]
    if not sizes:
        return None
    projected = max(config.hidden_size, *(heads.attending for heads in sizes))
    attended = max(heads.queries * heads.width for heads in sizes)
    return CpuPlainLayers(runner, plain, (projected, attended), buffer)


def has_native_form(spec: LayerSpec, weights: PlainWeights) -> bool:
    """Whether a layer consists only of the parts that `_native.PlainLayer` has."""
    attend = spec.attention
    others = (attend.latent, attend.keys_of, spec.experts, spec.recurrent)
    return (
        spec.has_feed_forward
        and all(part is None for part in others)
        and not (spec.parallel or spec.laurel_rank or spec.scaled or attend.gated or attend.value_dim)
        and attend.out_factor == 1.0
        and spec.norms != "residual"
        and isinstance(weights.feed_forward, CpuSlices)
        and isinstance(weights.qkv, CpuLinear | StreamedLinear)
        and isinstance(weights.out, CpuLinear | StreamedLinear)
    )


class CpuPlainLayer:
    """One plain layer, and its native form while all of it is in memory."""

    def __init__(
        self, spec: LayerSpec, weights: PlainWeights, heads: HeadSizes, adapters: NativeAdapters | None
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._adapters = adapters
        self.heads = heads
        self.qkv, self.out = weights.qkv, weights.out
        self.slices: CpuSlices = weights.feed_forward
        self._num_segments = self.slices.num_segments
        self._native: _native.PlainLayer | None = None
        self._parts: tuple[Callable[[], Any], ...] = ()
        """Weak references, as a budget may free these parts: both matrices, and the last slice, which goes
        before the others."""

    @property
    def most_rank(self) -> int:
        """The largest rank of the layer's adapters; 0 if it has none."""
        return max((down.rows for down, _ in self._adapters or ()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        slices: int = self._num_segments * self.slices.slices.stride
        return slices

    def in_memory(self) -> _native.PlainLayer | None:
        """The layer's native form, valid while its matrices and slices stay in memory; None if one of them
        isn't there.
        """
        qkv, out, segments = self.qkv.held, self.out.held, self.slices.segments
        if qkv is None or out is None or len(segments) < self._num_segments:
            return None
        if self._native is not None:
            of_qkv, of_out, of_last = self._parts
            if of_qkv() is qkv and of_out() is out and of_last() is segments[-1]:
                return self._native
        self._native = self._made(qkv, out)
        self._parts = ref(qkv), ref(out), ref(segments[-1])
        return self._native

    def _made(self, qkv: _native.Matrix, out: _native.Matrix) -> _native.PlainLayer:
        weights, heads, slices = self._weights, self.heads, self.slices
        attend = self._spec.attention
        return _native.PlainLayer(
            attention_norm=weights.attention_norm,
            qkv=qkv,
            qkv_bias=self.qkv.bias,
            heads=heads.queries,
            kv_heads=heads.keys,
            head_dim=heads.width,
            rope=attend.rope,
            window=attend.window,
            scale=attend.scale,
            soft_cap=attend.soft_cap,
            norms=weights.head_norms,
            sinks=weights.sinks,
            out=out,
            out_bias=self.out.bias,
            attention_output_norm=weights.attention_output_norm,
            feed_forward_norm=weights.feed_forward_norm,
            slice=slices.native,
            slices=slices.segments,
            form=native_form(self._spec.feed_forward),
            gate_bias=slices.gate_bias,
            output_bias=slices.output_bias,
            feed_forward_output_norm=weights.feed_forward_output_norm,
            adapters=self._adapters,
        )


class CpuPlainLayers:
    """`PlainLayers` over the native kernels.

    Args:
        runner: the kernels' threads and instruction set.
        layers: each layer, or None for one that isn't plain.
        widths: the largest width of a row of projected queries, keys and values, and that of a row of
            attention's output.
        buffer: given an op's name and a shape, returns the backend's output array.
    """

    def __init__(
        self,
        runner: _native.Runner,
        layers: Sequence[CpuPlainLayer | None],
        widths: tuple[int, int],
        buffer: Callable[[str, tuple[int, int]], Float32],
    ) -> None:
        self._runner = runner
        self._layers = layers
        self._layers_at_once = max(1, BYTES_AT_ONCE // max(it.nbytes for it in layers if it is not None))
        self._widths = widths
        self._most_rank = max(it.most_rank for it in layers if it is not None)
        self._buffer = buffer

    def run(
        self,
        layers: range,
        x: Float32,
        batch: ForwardBatch,
        places: Sequence[SequencePlace],
        rope_tables: Sequence[tuple[Float32, Float32]],
        adapted: int,
    ) -> int:
        if len(x) > MAX_ROWS:
            return 0
        forms = []
        for layer in layers[: self._layers_at_once]:
            plain = self._layers[layer]
            form = None if plain is None else plain.in_memory()
            if plain is None or form is None:
                break
            # Counts the layer's neurons.
            plain.slices.neurons.offloaded(plain.slices.index, batch)
            forms.append(form)
        if not forms:
            return 0
        projected, attended = self._widths
        # One model's sequences have one layout.
        layout, ran = places[0].kv.layout, slice(layers.start, layers.start + len(forms))
        _native.run_layers(
            self._runner,
            forms,
            x,
            [_sequence_rows(place) for place in places],
            layout.windows[ran],
            layout.layer_offsets[ran],
            layout.kv_bits,
            rope_tables,
            self._buffer("linear", (len(x), projected)),
            self._buffer("attention", (len(x), attended)),
            adapted,
            self._buffer("low rank", (len(x) - adapted, self._most_rank)) if adapted < len(x) else None,
        )
        return len(forms)


def _native_adapters(adapters: Adapters, layer: int) -> NativeAdapters | None:
    """The matrices of a layer's adapters; None if it has none."""
    of_layer = None if adapters is None else adapters.layer(layer)
    if of_layer is None:
        return None

    def matrices(adapter: Any) -> _native.LowRank:
        return adapter.down.matrix, adapter.up.matrix

    return matrices(of_layer.qkv), matrices(of_layer.out), matrices(of_layer.feed_forward)


def _sequence_rows(place: SequencePlace) -> _native.SequenceRows:
    tree = None if place.tree is None else (place.tree.parents, place.tree.depths)
    return place.size, block_addresses(place.kv), place.position, tree
