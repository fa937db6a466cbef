"""Chooses and makes the backend that runs a model, and its memory model.

A backend is imported only where it runs, MLX also where `auto` may choose it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from ondevice.backends.budgeted import BudgetedBackend
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.row_invariance import ANY_ROWS, BY_CONSTRUCTION, UNKNOWN, RowInvariance
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.memory_model import MemoryModel
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import context_tokens, segment_shape
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.layout import projection_matrices
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.streams import MultiStreams
from ondevice.bundle.tiles import rows_format
from ondevice.bundle.weight_shapes import extra_matrices
from ondevice.config import SELECTING, QuantConfig, RowFormat, RuntimeConfig
from ondevice.errors import BackendUnavailableError
from ondevice.model_config import ModelConfig
from ondevice.runtime.owner import OwnerThread
from ondevice.speculation.registry import runs_streams

if TYPE_CHECKING:
    from ondevice.budget.mlx_memory import MlxMemory


def has_mlx() -> bool:
    """True if MLX can be imported. This imports it."""
    try:
        import_module("mlx.core")
    except ImportError:
        return False
    return True


def settled_backend(backend: str, config: ModelConfig | None = None) -> Literal["cpu", "mlx", "reference"]:
    """The backend that `auto` means on this machine: MLX on Apple's GPU if there is one, else cpu.

    Models with experts, recurrent layers or latent attention run on `cpu`.
    """
    own = config is not None and (config.experts is not None or config.recurrent_layers or _is_latent(config))
    if backend == "auto" and own:
        return "cpu"
    if backend == "auto":
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        return "mlx" if apple and has_mlx() else "cpu"
    return backend  # type: ignore[return-value]


def _is_latent(config: ModelConfig) -> bool:
    return config.any_layer(lambda layer: layer.attention.latent is not None)


def check_backend(runtime: RuntimeConfig, config: ModelConfig | None = None) -> None:
    """Raises BackendUnavailableError for what the backend can't run, or a missing package."""
    backend = settled_backend(runtime.backend, config)
    if runtime.sparsity in SELECTING and backend == "reference":
        raise BackendUnavailableError(
            "--backend reference multiplies every neuron: it takes --sparsity dense"
        )
    if backend == "mlx" and not has_mlx():
        raise BackendUnavailableError(
            "--backend mlx needs the package mlx, which can't be imported here: pip install 'ondevice[mlx]', "
            "or use --backend cpu"
        )


def on_kernels(runtime: RuntimeConfig, what: str) -> RuntimeConfig:
    """`runtime` with the cpu backend, which `what` needs. Raises BackendUnavailableError for another."""
    if runtime.backend not in ("auto", "cpu"):
        raise BackendUnavailableError(
            f"--backend {runtime.backend}: {what} is made of our own kernels; use --backend cpu"
        )
    return replace(runtime, backend="cpu")


def check_drafts(runtime: RuntimeConfig, rows: RowInvariance) -> None:
    """Raises BackendUnavailableError if drafts are asked for where they could change the text.

    runtime: with the backend settled.
    """
    asked = f"--speculation {runtime.speculation}"
    if runtime.speculation == "auto" and runtime.draft_model:
        asked = f"--draft-model {os.fspath(runtime.draft_model)}"
    elif runtime.speculation in ("auto", "off"):
        return
    if rows.widths.nodes < 2:
        which = f" (in: {rows.narrowest})" if rows.narrowest else ""
        raise BackendUnavailableError(
            f"{asked}: with --backend {runtime.backend} a token's last bits depend here on what goes through "
            f"the model beside it{which}, so drafts could change the text; use --backend cpu"
        )


def allowed_draft_layer(
    config: ModelConfig, runtime: RuntimeConfig, layer: DraftLayer | None, rows: RowInvariance
) -> DraftLayer | None:
    """The draft layer; None where its taps would change the text and `auto` goes without.

    Where a row's bits depend on those beside it, the last row of a prompt is by itself from the last
    feed-forward on; what models with per-layer inputs add behind it takes all rows that are tapped. Raises
    BackendUnavailableError where the options name the layer.
    """
    if layer is None or rows.widths.chain >= ANY_ROWS:
        return layer
    if config.model_layers not in layer.taps or not config.per_layer_width:
        return layer
    if runtime.speculation == "auto":
        return None
    raise BackendUnavailableError(
        f"--speculation {layer.kind} reads what leaves this model's last layer, which has inputs of its "
        f"own, so that on this backend drafts could change the text; use --backend cpu"
    )


def settled_parallel(runtime: RuntimeConfig, rows: RowInvariance) -> int:
    """How many texts may share passes: one alone where a text would depend on those beside it."""
    return 1 if rows.widths.chain < 2 else runtime.parallel


def row_invariance(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    predictors: Predictors | None = None,
    streams: MultiStreams | None = None,
) -> RowInvariance:
    """How many rows a forward pass may have for each to have the bits that it has alone.

    Our kernels are made so. MLX's are measured, in the shapes of this model and on its default device, if the
    options leave anything to decide. The arguments are those of `memory_model`.
    """
    if runtime.backend == "cpu":
        return BY_CONSTRUCTION
    if runtime.backend == "reference":
        return UNKNOWN
    chooses_mode = runtime.sparsity == "auto" and config.zeros_gates and config.experts is None
    if runtime.speculation == "off" and not chooses_mode and runtime.parallel == 1:
        return UNKNOWN
    from ondevice.backends.mlx_row_ops import ModelShapes, row_invariance

    memory = _mlx_memory(config, quant, runtime, predictors, streams)
    if memory.selects_neurons and not config.zeros_gates and config.cut_off_layers:
        # Its layers select few neurons or nearly all; products of so different sizes aren't measured.
        return UNKNOWN
    segment, widths = memory.ranges.neurons, set(map(config.dense_neurons, config.layers))
    together = {min(segment, width) for width in widths} | {width % segment for width in widths}
    if config.is_sliced:
        together = {segment}  # zeros fill the last slice of a layer
    if config.experts is not None and not config.expert_layers:
        together.add(config.experts.neurons)
    shapes = ModelShapes(
        config,
        quant,
        runtime.kv_bits,
        context_tokens(config, runtime),
        tuple(_linears(memory)),
        tuple(sorted(together - {0})),
        selects=memory.selects_neurons or chooses_mode,
    )
    # MLX keeps a thread for every thread that ever computed, so this one is left to the model's.
    owner: OwnerThread[RowInvariance] = OwnerThread("ondevice-rows", kept=True)
    try:
        return owner.call(lambda: row_invariance(shapes))
    finally:
        owner.close()


def _linears(memory: MlxMemory) -> Iterator[tuple[int, int, RowFormat]]:
    """(rows, columns, format) of the matrices that a token meets, a neuron's gate and up rows among them."""
    config, quant = memory.config, memory.quant
    hidden = config.hidden_size
    for index, layer in enumerate(config.layers):
        parts = projection_matrices(config, quant, index).values()
        for stored, joined in groupby(parts, key=lambda part: rows_format(part.row.stored)):
            yield sum(part.rows for part in joined), hidden, stored
        yield hidden, config.out_cols(layer), quant.of("out", index)
        if neurons := config.dense_neurons(layer):
            rows = memory.ranges.neurons if config.is_sliced else neurons
            yield rows, hidden, quant.of("feed_forward", index)
    if config.part.heads:
        yield config.vocab_size, config.embedding_size, quant.head(config.tie_embeddings)
    for weight in extra_matrices(config):
        matrix = weight.tiled(quant)
        if matrix is not None and not weight.of_heads:
            yield *weight.shape, matrix.row.stored  # type: ignore[misc]
    if memory.predictors is not None and memory.runtime.sparsity == "predicted":
        for rank, neurons in zip(memory.predictors.ranks, config.widths, strict=True):
            yield rank, hidden, RowFormat(memory.predictors.bits)
            yield neurons, rank, RowFormat(memory.predictors.bits)
    if memory.streams is not None and runs_streams(memory.runtime.speculation, memory.streams):
        for rows, cols in memory.streams.matrices(config).values():
            yield rows, cols, RowFormat(memory.streams.bits)


def memory_model(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    predictors: Predictors | None = None,
    streams: MultiStreams | None = None,
) -> MemoryModel:
    """The memory of a model under the backend that `runtime` names.

    Args:
        config: The model's shape.
        quant: How its weights are quantised.
        runtime: The options, with the backend settled.
        predictors: Predictors of the bundle, if it has any.
        streams: Multi-stream adapters of the bundle, if it has any.
    """
    match runtime.backend:
        case "mlx":
            return _mlx_memory(config, quant, runtime, predictors, streams)
        case "reference":
            from ondevice.budget.reference_memory import ReferenceMemory

            return ReferenceMemory(config, quant, runtime, predictors, streams)
    return CpuMemory(config, quant, runtime, predictors, streams)


def make_backend(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    plan: Plan,
    beside: BudgetedBackend | None = None,
) -> BudgetedBackend:
    """Make the backend that `runtime`, already settled, names.

    beside: the backend of the model that this one drafts for, whose threads and limits it shares.
    """
    match runtime.backend:
        case "reference":
            from ondevice.backends.reference import ReferenceBackend

            return ReferenceBackend()
        case "mlx":
            from ondevice.backends.mlx import MlxBackend
            from ondevice.budget.mlx_memory import MLX_CACHE_BYTES, MLX_STAGES

            memory = _mlx_memory(config, quant, runtime)
            return MlxBackend(
                segment_neurons=memory.ranges.neurons,
                stage_neurons=memory.stage_neurons,
                stages=MLX_STAGES,
                cache_bytes=MLX_CACHE_BYTES,
                budget_bytes=0 if beside is not None else plan.budget_bytes,
                resident_embedding=plan.embedding_resident,
                copies_reads=memory.cuda,
            )
    shared = beside.runner if isinstance(beside, CpuBackend) else None
    return CpuBackend(
        shared or make_runner(runtime.threads, runtime.kernel_target),
        segment_neurons=segment_shape(config, quant).neurons,
        piece_neurons=plan.buffers.neurons,
        resident_embedding=plan.embedding_resident,
        dense_neurons=0 if plan.dense is None else plan.dense.neurons,
    )


def _mlx_memory(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    predictors: Predictors | None = None,
    streams: MultiStreams | None = None,
) -> MlxMemory:
    """The memory of a model on MLX's default device. The arguments are those of `memory_model`."""
    from ondevice.backends import mlx_memory
    from ondevice.backends.mlx import compute_type
    from ondevice.budget.mlx_memory import MlxMemory

    operands, cuda = int(compute_type().size), mlx_memory.on_cuda()
    return MlxMemory(config, quant, runtime, predictors, streams, operand_bytes=operands, cuda=cuda)
