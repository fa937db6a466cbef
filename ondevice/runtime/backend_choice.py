"""Chooses and creates the backend that runs a model, and its memory model.

A backend is imported only if it will run; MLX also if `auto` may choose it.
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
from ondevice.model_config import FULL_MODEL, ModelConfig
from ondevice.runtime.owner import OwnerThread
from ondevice.speculation.registry import runs_streams

if TYPE_CHECKING:
    from ondevice.budget.mlx_memory import MlxMemory


def has_mlx() -> bool:
    """Whether MLX can be imported. Imports it to find out."""
    try:
        import_module("mlx.core")
    except ImportError:
        return False
    return True


def resolved_backend(backend: str, config: ModelConfig | None = None) -> Literal["cpu", "mlx", "reference"]:
    """The backend to use. `auto` becomes MLX if this machine has a GPU of Apple's, otherwise cpu.

    Models with experts, recurrent layers or latent attention run on `cpu`.
    """
    if backend != "auto":
        return backend  # type: ignore[return-value]
    if config is not None and (
        config.experts is not None
        or config.recurrent_layers
        or config.any_layer(lambda layer: layer.attention.latent is not None)
    ):
        return "cpu"
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return "mlx" if apple and has_mlx() else "cpu"


def check_backend(runtime: RuntimeConfig, config: ModelConfig | None = None) -> None:
    """Check a backend. Raises BackendUnavailableError for a mode that it can't run, or a missing package."""
    backend = resolved_backend(runtime.backend, config)
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
    """`runtime` with the cpu backend, which `what` needs. Raises BackendUnavailableError if it
    names another.
    """
    if runtime.backend not in ("auto", "cpu"):
        raise BackendUnavailableError(
            f"--backend {runtime.backend}: {what} is made of our own kernels; use --backend cpu"
        )
    return replace(runtime, backend="cpu")


def check_drafts(runtime: RuntimeConfig, rows: RowInvariance) -> None:
    """Check the options for drafts. Raises BackendUnavailableError if they name drafts that could change the
    text.
    """
    option = f"--speculation {runtime.speculation}"
    if runtime.speculation == "auto" and runtime.draft_model:
        option = f"--draft-model {os.fspath(runtime.draft_model)}"
    elif runtime.speculation in ("auto", "off"):
        return
    if rows.widths.nodes < 2:
        which = f" (in: {rows.narrowest})" if rows.narrowest else ""
        raise BackendUnavailableError(
            f"{option}: with --backend {runtime.backend} a token's last bits depend here on what goes "
            f"through the model beside it{which}, so drafts could change the text; use --backend cpu"
        )


def allowed_draft_layer(
    config: ModelConfig, runtime: RuntimeConfig, layer: DraftLayer | None, rows: RowInvariance
) -> DraftLayer | None:
    """The draft layer. None if reading hidden states for it would change the text, or if `auto` has no memory
    for that.

    If a row's bits depend on other rows, the last row of a prompt runs alone from the last feed-forward on,
    but the per-layer block after it takes all rows that the draft layer reads. Raises BackendUnavailableError
    if the options name the layer.
    """
    if layer is not None and layer.block and runtime.speculation == "auto" and config.part != FULL_MODEL:
        # Machines that share a model keep room in their messages for the fewer taps of the other kinds.
        return None
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


def resolved_parallel(runtime: RuntimeConfig, rows: RowInvariance) -> int:
    """Number of texts that may share passes. 1 if a text's bits depend on other texts."""
    return 1 if rows.widths.chain < 2 else runtime.parallel


def row_invariance(
    config: ModelConfig,
    quant: QuantConfig,
    runtime: RuntimeConfig,
    predictors: Predictors | None = None,
    streams: MultiStreams | None = None,
) -> RowInvariance:
    """The numbers of rows of a pass up to which each row has the same bits as alone.

    For `cpu` they are unlimited. For MLX they are measured in the shapes of this model, if the options depend
    on them. The arguments are those of `memory_model`.
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
        # Layers with a cutoff select few neurons, others nearly all. Products of both sizes aren't measured.
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
    # MLX leaks a thread for every thread that ever computed, so the model's owner re-uses this one.
    owner: OwnerThread[RowInvariance] = OwnerThread("ondevice-rows", kept=True)
    try:
        return owner.call(lambda: row_invariance(shapes))
    finally:
        owner.close()


def _linears(memory: MlxMemory) -> Iterator[tuple[int, int, RowFormat]]:
    """Yields (rows, columns, format) of the matrices that a token multiplies, including neurons' gate and up
    rows.
    """
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
    """The memory of a model under the backend of `runtime`.

    Args:
        config: the model's description.
        quant: the quantisation of its weights.
        runtime: the options, with the backend resolved.
        predictors: the bundle's predictors, or None.
        streams: the bundle's multi-stream adapters, or None.
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
    target: BudgetedBackend | None = None,
) -> BudgetedBackend:
    """Create the backend of `runtime`, whose options are resolved.

    target: the backend of the model that this one drafts for, whose threads and limits it shares.
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
                budget_bytes=0 if target is not None else plan.budget_bytes,
                resident_embedding=plan.embedding_resident,
                copies_reads=memory.cuda,
            )
    shared = target.runner if isinstance(target, CpuBackend) else None
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
