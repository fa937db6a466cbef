"""The ops of the MLX backend in the shapes of one model, to be measured for row invariance.

On a GPU, MLX chooses kernels by a matrix's shape and by the numbers of rows and keys, so all of these are the
same as in a real pass. On MLX's CPU device a few outputs of each matrix are enough, as each is computed
separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd
from types import SimpleNamespace
from typing import Literal

import mlx.core as mx
import numpy as np

from ondevice.backends.base import Float32, HeadNorms, Int32, Norm
from ondevice.backends.feed_forward_layer import BLOCK_NEURONS
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.mlx import all_of, compute_type, product_of_selected
from ondevice.backends.mlx_experts import MlxExpertMatrix, MlxExperts, route
from ondevice.backends.mlx_kv import MlxKV
from ondevice.backends.mlx_matrix import MlxMatrix
from ondevice.backends.mlx_memory import MlxLimits, known
from ondevice.backends.mlx_ops import MlxOps, cut_off, hidden, normed
from ondevice.backends.mlx_states import MlxBuffer, Slot, state_shapes
from ondevice.backends.mlx_weights import MlxNeurons
from ondevice.backends.recurrent import Ahead, DeltaWeights, MixerWeights
from ondevice.backends.row_invariance import MAX_ROWS, RowInvariance, RowOp, measured
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.matrix_layout import RowLayout, padded
from ondevice.bundle.tiles import rows_format
from ondevice.config import GROUP_SIZE, QuantConfig, RowFormat, Scales
from ondevice.model_config import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertsSpec,
    FeedForwardSpec,
    Mamba2Spec,
    ModelConfig,
    RecurrentSpec,
)
from ondevice.records import dataclass

KEYS = (1, 1016, 1025, 4088)
"""Numbers of keys before the rows. Attention kernels change at 1,024 and 4,096 keys; from 1,016 and 4,088 on,
a row alone is below the limit and rows together are above it."""
CPU_OUTPUTS = 64
"""Outputs of a matrix computed on MLX's CPU device."""
CPU_NEURONS = 256
"""Neurons to select from on MLX's CPU device."""
FIRING = 0.1
"""Share of neurons that a row selects, unless the activation gives zeros."""
MAX_BYTES = 1 << 30
"""Bytes of MLX's memory limit while measuring: more than the largest matrix, the output head."""
BINARY = TokenTree([-1, *((node - 1) // 2 for node in range(1, MAX_ROWS))])


@dataclass(frozen=True)
class ModelShapes:
    """The shapes that decide the ops of a model's pass.

    linears: (rows, columns, format) of the matrices that every token multiplies, including neurons' gate and
    up rows. segment_sizes: numbers of neurons multiplied at once. selects: whether neurons are selected.
    """

    config: ModelConfig
    quant: QuantConfig
    kv_bits: Literal[32, 16, 8]
    max_context: int
    linears: tuple[tuple[int, int, RowFormat], ...]
    segment_sizes: tuple[int, ...]
    selects: bool


def row_invariance(shapes: ModelShapes) -> RowInvariance:
    """The row invariance of a model's ops on MLX's default device, measured once per process."""
    return _measured(shapes, f"mlx-{mx.default_device().type.name}", mx.__version__)


@lru_cache(maxsize=64)
def _measured(shapes: ModelShapes, device: str, version: str) -> RowInvariance:
    """The row invariance, measured now. device, version: MLX's device and version, which are keys of the
    cache.

    It isn't stored in a file, because a file would outlive MLX's libraries, and a wrong width changes texts.
    """
    # MLX's cache is off, so that measuring leaves no memory allocated.
    limits = MlxLimits(cache_bytes=0, budget_bytes=MAX_BYTES)
    try:
        ops = _Ops(shapes)
        widths, op_widths = measured(ops)
        return RowInvariance(device, widths, op_widths, ops.skips_zeros())
    finally:
        mx.synchronize()
        limits.restore()


class _Ops:
    """The ops of one model over random weights and inputs."""

    def __init__(self, shapes: ModelShapes) -> None:
        self._shapes = shapes
        self._config = shapes.config
        self._dtype = compute_type()
        self._on_gpu = mx.default_device() == mx.gpu
        self._random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[RowOp]:
        """Yields every op; only one op's weights are in memory at a time."""
        config, shapes = self._config, self._shapes
        weight = mx.array(self._values(config.hidden_size))
        norm = Norm(weight, config.norm.eps, None, config.norm.kind == "layer")
        yield _row_op("norm", lambda it: normed(it, norm), self._input(config.hidden_size))
        widest = config.widest
        if config.experts is not None:
            widest = max(config.experts.neurons, *map(config.dense_neurons, config.layers))
        activated = self._input(widest)
        yield _row_op("activation", lambda it: hidden(it, None, config.feed_forward), activated)
        for rows, cols, stored in sorted(set(shapes.linears)):
            matrix = self._matrix(self._outputs(rows), cols, stored)
            name = f"product {rows} x {cols} {stored.bits}-bit"
            if stored.mxfp4:
                name += " MXFP4"
            elif stored.group_size != GROUP_SIZE:
                name += f" in groups of {stored.group_size}"
            yield _row_op(name, matrix.rows_product, self._input(cols))
        for count in shapes.segment_sizes:
            for down in self._downs(count):
                name = f"down projection of {count} neurons"
                if config.is_sliced:
                    name += f", {down.down.layout.bits}-bit"
                yield _row_op(name, down.outputs, self._input(count))
        if shapes.selects:
            yield self._selected()
        yield from self._blocks()
        # A layer that reads the keys of another attends as that one does.
        attending = (layer.attention for layer in config.layers if layer.attends)
        for spec in sorted({replace(it, keys_of=None) for it in attending}, key=repr):
            for keys in sorted({min(it, shapes.max_context) for it in KEYS}):
                yield self._chain(keys, spec)
                yield self._tree(keys, spec)
        with_states = {layer.recurrent for layer in config.layers if layer.recurrent is not None}
        for recurrent in sorted(with_states, key=repr):
            yield from self._recurrent(recurrent)

    def _blocks(self) -> Iterator[RowOp]:
        """The ops of parts that few models have, without the products of their matrices."""
        config, ops = self._config, MlxOps()
        hidden, width, streams = config.hidden_size, config.per_layer_width, config.residual_copies
        if width:
            norm = Norm(mx.array(self._values(width)), config.norm.eps)

            def normed_inputs(x: mx.array) -> mx.array:
                rows = x.reshape(-1, width)
                return ops.add_normed(rows, rows, norm).reshape(x.shape)

            yield _row_op("norm of per-layer inputs", normed_inputs, self._input(config.per_layer_size))
            gated = self._input(2 * width)
            yield _row_op(
                "gated inputs", lambda x: ops.gated(x[:, :width], x[:, width:], config.activation), gated
            )
        if streams > 1:
            pairs = self._input(2 * hidden)
            yield _row_op("size of copies", lambda x: ops.match_rms(x[:, :hidden], x[:, hidden:]), pairs)
            for rows, cols in ((streams, hidden), (streams * streams, streams), (streams, streams)):
                weight = mx.array(self._values(rows, cols))
                yield _row_op(
                    f"product {rows} x {cols} of the copies",
                    lambda x, weight=weight: ops.soft_cap(ops.small_linear(x, weight), 1.0),  # type: ignore[misc]
                    self._input(cols),
                )
        if config.experts is not None:
            yield from self._mixture(config.experts)
        for latent in filter(None, {layer.attention.latent for layer in config.layers}):
            for width in filter(None, (latent.rank, latent.query_rank)):
                yield self._norm(f"norm of {width} latent values", width, latent.eps)
            for rows, cols in ((latent.rank, latent.key_dim), (latent.value_dim, latent.rank)):
                yield self._of_heads(rows, cols)
        for width in sorted({config.out_cols(layer) for layer in config.layers if layer.attention.gated}):
            gated = self._input(2 * width)
            yield _row_op(
                f"gates of {width}",
                lambda x, width=width: ops.sigmoid_gated(x[:, :width], x[:, width:]),  # type: ignore[misc]
                gated,
            )
        for neurons in sorted(set(map(config.neurons, config.cut_off_layers))):
            yield _row_op(f"cutoff of {neurons}", lambda x: cut_off(x, 0.5), self._input(neurons))

    def _norm(self, name: str, width: int, eps: float) -> RowOp:
        norm = Norm(mx.array(self._values(width)), eps)
        return _row_op(name, lambda x: normed(x, norm), self._input(width))

    def _of_heads(self, rows: int, cols: int) -> RowOp:
        """The op of latent attention that multiplies each head by a matrix (rows, cols)."""
        heads = self._config.num_heads
        matrix = self._matrix(heads * rows, cols, self._shapes.quant.plain)

        def product(x: mx.array) -> mx.array:
            out = matrix.heads_product(x.reshape(x.shape[0], heads, cols).swapaxes(0, 1))
            return out.swapaxes(0, 1)

        return _row_op(f"product {rows} x {cols} of {heads} heads", product, self._input(heads * cols))

    def _mixture(self, spec: ExpertsSpec) -> Iterator[RowOp]:
        """The choice of experts, and the products of a token's experts."""
        config, quant = self._config, self._shapes.quant
        bias = mx.array(self._values(spec.count)) if spec.choice_bias else None

        def chosen(logits: mx.array) -> mx.array:
            ids, weights = route(logits, spec, bias)
            return mx.concatenate([ids.astype(mx.float32), weights], axis=1)

        yield _row_op("choice of experts", chosen, self._input(spec.count))
        if spec.layout == "neurons":
            # Their products are those of segments of neurons.
            return

        def stack(rows: int, cols: int, stored: RowFormat) -> MlxExpertMatrix:
            matrix = self._matrix(spec.chosen * rows, cols, stored)
            parts = (array.reshape(spec.chosen, rows, -1) for array in matrix.arrays)
            return MlxExpertMatrix(matrix.layout, self._dtype, tuple(parts))

        formats = {(quant.of("experts", it), quant.of("experts_down", it)) for it in config.expert_layers}
        for of_rows, of_down in sorted(formats):
            by_rows = [
                stack(spec.neurons, config.hidden_size, of_rows)
                for _ in range(config.feed_forward.num_rows - 1)
            ]
            experts = MlxExperts.of(
                [*by_rows, stack(self._outputs(config.hidden_size), spec.neurons, of_down)]
            )

            def outputs(x: mx.array, experts: MlxExperts = experts) -> mx.array:
                ids = mx.broadcast_to(mx.arange(spec.chosen, dtype=mx.int32), (x.shape[0], spec.chosen))
                return experts.outputs(x, ids, config.feed_forward).reshape(x.shape[0], -1)

            yield _row_op("experts", outputs, self._input(config.hidden_size))

    def skips_zeros(self) -> bool:
        """Whether a row's product over neurons has the same bits without neurons whose gate is zero."""
        if not self._config.zeros_gates:
            return False
        selected = _Selected(
            self._neurons(), self._input(self._config.hidden_size), self._config.feed_forward
        )
        return all(selected.alone(row).tobytes() == selected.dense(row).tobytes() for row in range(MAX_ROWS))

    def _outputs(self, rows: int) -> int:
        return rows if self._on_gpu else min(rows, CPU_OUTPUTS)

    def _values(self, *shape: int) -> Float32:
        return self._random.standard_normal(shape, dtype=np.float32)

    def _input(self, width: int) -> mx.array:
        return mx.array(self._values(MAX_ROWS, width))

    def _matrix(self, rows: int, cols: int, stored: RowFormat) -> MlxMatrix:
        # MLX multiplies rows, not tiles.
        stored = rows_format(stored)
        kind: Scales = "mxfp4" if stored.mxfp4 else "affine"
        layout, dtype = RowLayout(cols, stored.bits, stored.group_size, kind), self._dtype
        if layout.bits == 16:
            return MlxMatrix(layout, dtype, (mx.array(self._values(rows, layout.padded_cols)).astype(dtype),))
        codes = self._random.integers(0, 1 << 32, (rows, layout.codes_bytes // 4), dtype=np.uint32)
        if layout.mxfp4:
            scales = self._random.integers(120, 130, (rows, layout.groups), dtype=np.uint8)
            return MlxMatrix(layout, dtype, (mx.array(codes), mx.array(scales)))
        pairs = (mx.array(self._values(rows, layout.groups)).astype(dtype) for _ in range(2))
        return MlxMatrix(layout, dtype, (mx.array(codes), *pairs))

    def _neurons(self) -> MlxNeurons:
        count, width = max(self._shapes.segment_sizes), self._config.hidden_size
        spec = self._config.feed_forward
        count = count if self._on_gpu else min(count, CPU_NEURONS)
        stored = self._shapes.quant.of("feed_forward")
        gate, *up = (self._matrix(count, width, stored) for _ in range(2 if spec.gated else 1))
        return replace(next(self._downs(count)), gate=gate, up=up[0] if up else None)

    def _downs(self, count: int) -> Iterator[MlxNeurons]:
        """The down projection of `count` neurons, in each format that the model's feed-forwards have."""
        quant, outputs = self._shapes.quant, self._outputs(self._config.hidden_size)
        if not self._config.is_sliced:
            yield MlxNeurons(None, None, self._matrix(count, outputs, quant.plain))
            return
        formats = {quant.of("down", layer) for layer in range(self._config.num_layers)}
        for stored in sorted({rows_format(it) for it in formats}):
            yield MlxNeurons(None, None, self._matrix(outputs, count, stored), sliced=True)

    def _selected(self) -> RowOp:
        """The op that multiplies the neurons which a row selects: these neurons only, or together with those
        that other rows select.
        """
        selected = _Selected(
            self._neurons(), self._input(self._config.hidden_size), self._config.feed_forward
        )
        return RowOp("selected neurons", selected.alone, selected.together)

    def _chain(self, keys: int, spec: AttentionSpec) -> RowOp:
        """Attention of a chain of rows after `keys` keys."""
        attention = _Attention(self._shapes, self._random, keys, spec)
        name = f"attention, chain behind {keys} keys" + (f", window {spec.window}" if spec.window else "")
        return RowOp(name, attention.after_chain, attention.chain, "chain")

    def _tree(self, keys: int, spec: AttentionSpec) -> RowOp:
        """Attention of a binary tree of rows after `keys` keys."""
        attention = _Attention(self._shapes, self._random, keys, spec)
        name = f"attention, tree behind {keys} keys" + (f", window {spec.window}" if spec.window else "")
        return RowOp(name, attention.after_path, attention.tree, "tree")

    def _recurrent(self, spec: RecurrentSpec) -> Iterator[RowOp]:
        """The recurrent rule over a chain of rows, and over a binary tree."""
        name = "short convolution"
        if isinstance(spec, Mamba2Spec):
            name = f"mixer of {spec.heads} heads, norm {spec.norm}"
            if not self._on_gpu:
                # Fewer groups, without changing the width that is normed together.
                shared = gcd(spec.groups, spec.norm_groups)
                spec = replace(
                    spec,
                    groups=spec.groups // shared,
                    heads=spec.heads // shared,
                    norm_groups=spec.norm_groups // shared,
                )
        elif isinstance(spec, DeltaSpec):
            name = f"delta rule of {spec.value_heads} heads"
            if not self._on_gpu:
                spec = replace(spec, key_heads=1, value_heads=spec.value_heads // spec.key_heads)
        states = _Recurrence(spec, self._random, self._config.norm.eps)
        yield RowOp(f"{name}, chain", states.after_chain, states.chain, "chain")
        yield RowOp(f"{name}, tree", states.after_path, states.tree, "tree")


class _Recurrence:
    """A recurrent layer's state, and rows that either run ahead of it together or change it one by one."""

    def __init__(self, spec: RecurrentSpec, random: np.random.Generator, eps: float) -> None:
        def values(*shape: int) -> mx.array:
            return mx.array(random.standard_normal(shape, dtype=np.float32))

        conv = values(spec.taps, spec.channels)
        self._spec, self._ops, self._weights = spec, MlxOps(), conv
        self._projected = values(MAX_ROWS, sum(spec.projections.values()))
        self._gates = values(MAX_ROWS, spec.gate_floats)
        if isinstance(spec, DeltaSpec):
            heads, norm = spec.value_heads, Norm(mx.ones(spec.value_width), eps)
            self._weights = DeltaWeights(conv, -mx.exp(values(heads)), values(heads), norm)
        elif isinstance(spec, Mamba2Spec):
            bias = values(spec.channels) if spec.conv_bias else None
            time_bias, skip = values(spec.heads), values(spec.heads)
            decay, norm = -mx.exp(values(spec.heads)), Norm(mx.ones(spec.value_size), eps)
            self._weights = MixerWeights(conv, bias, decay, time_bias, skip, norm)
        first = tuple(0.1 * values(*shape) for shape in state_shapes(spec))
        self._states_after: dict[tuple[int, ...], tuple[mx.array, ...]] = {(): first}

    def after_chain(self, row: int) -> Float32:
        """The result of a row in a chain, where each row before it ran in a separate pass."""
        return self._alone(tuple(range(row + 1)))

    def after_path(self, row: int) -> Float32:
        """The result of a row in a binary tree, where each row on its path ran in a separate pass."""
        return self._alone(tuple(BINARY.path(row)))

    def chain(self, rows: int) -> Float32:
        return self._ahead(np.arange(-1, rows - 1, dtype=np.int32))

    def tree(self, rows: int) -> Float32:
        return self._ahead(BINARY.parents[:rows])

    def _alone(self, path: tuple[int, ...]) -> Float32:
        if path[:-1] not in self._states_after:
            self._alone(path[:-1])
        after = MlxBuffer(0)
        out = self._passed(list(path[-1:]), self._states_after[path[:-1]], after, None)
        self._states_after[path] = after.arrays[0]
        return out

    def _ahead(self, parents: Int32) -> Float32:
        buffer = MlxBuffer(0)
        ahead = Ahead(Slot(buffer, "channels"), Slot(buffer, "gates"), parents)  # type: ignore[arg-type]
        return self._passed(list(range(len(parents))), self._states_after[()], MlxBuffer(0), ahead)

    def _passed(
        self, rows: list[int], before: tuple[mx.array, ...], after: MlxBuffer, ahead: Ahead | None
    ) -> Float32:
        held = MlxBuffer(0)
        held.arrays[0] = before
        states = SimpleNamespace(
            state=lambda layer: Slot(held, layer),
            next_state=lambda layer: Slot(after, layer),
            ahead=lambda layer: ahead,
        )
        x = self._projected[mx.array(rows)]
        if isinstance(self._spec, ConvSpec):
            return _host(self._ops.short_conv(x, states, 0, self._spec, self._weights))
        gates = self._gates[mx.array(rows)]
        if isinstance(self._spec, Mamba2Spec):
            return _host(self._ops.mamba2(x, gates, states, 0, self._spec, self._weights))
        return _host(self._ops.gated_delta(x, gates, states, 0, self._spec, self._weights))


class _Selected:
    """Selected neurons, gathered and padded to blocks as in `MlxBackend`."""

    def __init__(self, neurons: MlxNeurons, x: mx.array, spec: FeedForwardSpec) -> None:
        assert neurons.gate is not None
        self._neurons, self._x, self._spec = neurons, x, spec
        self._gates = neurons.gate.rows_product(x)
        scores = np.array(self._gates)
        self._fires = scores > np.quantile(scores, 1 - FIRING, axis=1, keepdims=True)
        if spec.zeros_gates:
            self._fires = scores > spec.threshold

    def alone(self, row: int) -> Float32:
        return self._product(row, row + 1)

    def together(self, rows: int) -> Float32:
        return self._product(0, rows)

    def dense(self, row: int) -> Float32:
        """The product of all neurons."""
        return _host(all_of(self._x[row : row + 1], self._neurons, self._spec))

    def _product(self, start: int, stop: int) -> Float32:
        fires = self._fires[start:stop]
        ids = np.flatnonzero(fires.any(axis=0))
        # Padding takes any neuron: it isn't chosen.
        padding = padded(len(ids), BLOCK_NEURONS) - len(ids)
        chosen = np.pad(fires[:, ids], [(0, 0), (0, padding)]).astype(np.float32)
        where = mx.array(np.pad(ids, (0, padding)))
        up, down = self._neurons.up, self._neurons.down
        neurons = MlxNeurons(None, None if up is None else _gathered(up, where), _gathered(down, where))
        gates = self._gates[start:stop][:, where]
        product = product_of_selected(self._x[start:stop], neurons, gates, mx.array(chosen), self._spec)
        return _host(product)


class _Attention:
    """Attention of one key/value head over stored keys and values."""

    def __init__(
        self, shapes: ModelShapes, random: np.random.Generator, keys: int, spec: AttentionSpec
    ) -> None:
        model, sizes = shapes.config, shapes.config.heads(spec)
        layer = replace(
            model.layers[0],
            attention=replace(spec, rope=0, head_dim=0, num_kv_heads=0),
            delta=None,
            conv=None,
            mamba2=None,
        )
        config = replace(
            model,
            num_heads=sizes.queries // sizes.keys,
            num_kv_heads=1,
            head_dim=sizes.width,
            ropes=(model.ropes[spec.rope],),
            layers=(layer,),
        )
        self._config, self._keys, self._spec = config, keys, layer.attention
        self._ops = MlxOps()
        layout = KVLayout(config, shapes.kv_bits)
        self._kv = SimpleNamespace(layout=layout, arrays=MlxKV(layout))
        self._kv.arrays.resize(layout.blocks(keys + MAX_ROWS))
        of_key, turning = config.heads(layer.attention), sizes.width - sizes.latent
        self._qkv = mx.array(random.standard_normal((MAX_ROWS, of_key.attending), dtype=np.float32))
        angles = np.pi * random.random((MAX_ROWS, turning // 2), dtype=np.float32)
        self._rope_tables = np.cos(angles), np.sin(angles)
        lengths, biased = config.head_norm_sizes(layer), spec.head_norm_bias
        q, k = (
            Norm(mx.ones(length), model.norm.eps, mx.ones(length) if biased else None, biased)
            for length in lengths
        )
        v = Norm(mx.ones(sizes.width), model.norm.eps) if spec.value_norm else None
        together = spec.head_norm == "projection"
        self._norms = None if spec.head_norm == "none" else HeadNorms(q, k, together, v)
        heads = random.standard_normal(config.num_heads, dtype=np.float32)
        self._sinks = mx.array(heads) if spec.sinks else None
        before = mx.array(random.standard_normal((2, keys, 1, sizes.width), dtype=np.float32))
        values = None if sizes.latent else before[1, :, :, : sizes.value_width]
        self._kv.arrays.write(0, before[0], values, 0)

    def after_chain(self, row: int) -> Float32:
        """The result of a row in a chain, where each row before it ran in a separate pass."""
        return self._attend([row], self._keys + row)

    def after_path(self, row: int) -> Float32:
        """The result of a row in a binary tree, where each row on its path ran in a separate pass."""
        for depth, node in enumerate(BINARY.path(row)):
            out = self._attend([node], self._keys + depth)
        return out

    def chain(self, rows: int) -> Float32:
        return self._attend(list(range(rows)), self._keys)

    def tree(self, rows: int) -> Float32:
        return self._attend(list(range(rows)), self._keys, TokenTree(BINARY.parents[:rows].tolist()))

    def _attend(self, rows: list[int], position: int, tree: TokenTree | None = None) -> Float32:
        depths = np.arange(len(rows)) if tree is None else tree.depths
        cos, sin = (table[position - self._keys + depths] for table in self._rope_tables)
        x = self._qkv[mx.array(rows)]
        norms, sinks = self._norms, self._sinks
        return _host(self._ops.attend(x, self._kv, 0, position, cos, sin, self._spec, norms, tree, sinks))


def _row_op(name: str, compute: Callable[[mx.array], mx.array], x: mx.array) -> RowOp:
    """An op whose only input is rows of `x`."""
    return RowOp(name, lambda row: _host(compute(x[row : row + 1])), lambda rows: _host(compute(x[:rows])))


def _gathered(matrix: MlxMatrix, rows: mx.array) -> MlxMatrix:
    return replace(matrix, arrays=tuple(array[rows] for array in matrix.arrays))


def _host(x: mx.array) -> Float32:
    known(x)
    return np.array(x)
