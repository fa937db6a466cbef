"""Chooses and makes the backend that runs a model, and its memory model.

MLX is imported only where it runs, or where `auto` may choose it.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from importlib import import_module
from typing import Literal

from ondevice.backends.budgeted import BudgetedBackend
from ondevice.backends.cpu import CpuBackend, make_runner
from ondevice.backends.reference import ReferenceBackend
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.memory_model import MemoryModel
from ondevice.budget.mlx_memory import MLX_CACHE_BYTES, MLX_STAGES, MlxMemory
from ondevice.budget.plan import Plan
from ondevice.budget.reference_memory import ReferenceMemory
from ondevice.budget.sizes import segment_shape
from ondevice.bundle.predictors import Predictors
from ondevice.bundle.streams import MultiStreams
from ondevice.config import ModelConfig, QuantConfig, RuntimeConfig
from ondevice.errors import BackendUnavailableError


def has_mlx() -> bool:
    """True if MLX can be imported. This imports it."""
    try:
        import_module("mlx.core")
    except ImportError:
        return False
    return True


def settled_backend(backend: str) -> Literal["cpu", "mlx", "reference"]:
    """The backend that `auto` means on this machine: MLX on Apple's GPU if there is one, else cpu."""
    if backend == "auto":
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        return "mlx" if apple and has_mlx() else "cpu"
    return backend  # type: ignore[return-value]


def check_backend(runtime: RuntimeConfig) -> None:
    """Raises BackendUnavailableError for an option that the backend can't run, or a missing package."""
    backend = settled_backend(runtime.backend)
    if runtime.sparsity in ("exact", "predicted", "threshold") and backend == "reference":
        raise BackendUnavailableError(
            "--backend reference multiplies every neuron: it takes --sparsity dense"
        )
    if backend == "mlx" and not has_mlx():
        raise BackendUnavailableError(
            "--backend mlx needs the package mlx, which can't be imported here: pip install 'ondevice[mlx]', "
            "or use --backend cpu"
        )
    if runtime.draft_model and runtime.speculation in ("auto", "model") and backend != "cpu":
        raise BackendUnavailableError(
            f"--draft-model {os.fspath(runtime.draft_model)}: a second model drafts with --backend cpu only, "
            f"not with {backend}"
        )
    if runtime.speculation not in ("auto", "off") and not is_row_invariant(backend):
        raise BackendUnavailableError(
            f"--speculation {runtime.speculation}: with --backend {backend} a token's last bits depend here "
            "on what goes through the model beside it, so drafts could change the text; use "
            "--backend cpu"
        )


def on_kernels(runtime: RuntimeConfig, what: str) -> RuntimeConfig:
    """`runtime` with the cpu backend, which `what` needs. Raises BackendUnavailableError for another."""
    if runtime.backend not in ("auto", "cpu"):
        raise BackendUnavailableError(
            f"--backend {runtime.backend}: {what} is made of our own kernels; use --backend cpu"
        )
    return replace(runtime, backend="cpu")


def is_row_invariant(backend: str) -> bool:
    """True if rows are exact: a token's bits don't depend on other tokens of its forward pass.

    Only then do drafts leave the text as it is.
    """
    if backend != "mlx":
        return backend == "cpu"
    from ondevice.backends import mlx

    return mlx.is_row_invariant()


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
            operands = _operand_bytes()
            return MlxMemory(config, quant, runtime, predictors, streams, operand_bytes=operands)
        case "reference":
            return ReferenceMemory(config, quant, runtime, predictors, streams)
    return CpuMemory(config, quant, runtime, predictors, streams)


def make_backend(
    config: ModelConfig, quant: QuantConfig, runtime: RuntimeConfig, plan: Plan
) -> BudgetedBackend:
    """Make the backend that `runtime`, already settled, names. Raises BackendUnavailableError."""
    match runtime.backend:
        case "reference":
            return ReferenceBackend()
        case "mlx":
            from ondevice.backends.mlx import MlxBackend

            memory = MlxMemory(config, quant, runtime, operand_bytes=_operand_bytes())
            return MlxBackend(
                segment_neurons=memory.ranges.neurons,
                stage_neurons=memory.stage_neurons,
                stages=MLX_STAGES,
                cache_bytes=MLX_CACHE_BYTES,
                budget_bytes=plan.budget_bytes,
                resident_embedding=plan.embedding_resident,
            )
    return CpuBackend(
        make_runner(runtime.threads, runtime.kernel_target),
        segment_neurons=segment_shape(config, quant).neurons,
        piece_neurons=plan.buffers.neurons,
        resident_embedding=plan.embedding_resident,
    )


def _operand_bytes() -> int:
    """Bytes of one element of MLX's matrix operands on its default device."""
    from ondevice.backends.mlx import compute_type

    return int(compute_type().size)
