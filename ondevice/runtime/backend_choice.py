"""Which engine runs a model, and its making. MLX is imported only where it is what runs, or may be."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias

from ondevice.backends.cpu import CpuBackend, make_engine
from ondevice.backends.reference import ReferenceBackend
from ondevice.budget.mlx_sizes import MLX_CACHE_BYTES, MLX_STAGES, mlx_segment_shape, mlx_stage_neurons
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import segment_shape
from ondevice.config import ModelConfig, QuantConfig, RuntimeConfig
from ondevice.errors import BackendUnavailableError

if TYPE_CHECKING:
    from ondevice.backends.mlx import MlxBackend

BudgetBackend: TypeAlias = "CpuBackend | MlxBackend"
"""A backend whose neurons get memory by the plan."""


def has_mlx() -> bool:
    """Whether MLX can be imported; it then is."""
    try:
        import_module("mlx.core")
    except ImportError:
        return False
    return True


def settled_backend(backend: str) -> Literal["cpu", "mlx", "reference"]:
    """What `auto` means on this machine: Apple's GPU where there is one."""
    if backend == "auto":
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        return "mlx" if apple and has_mlx() else "cpu"
    return backend  # type: ignore[return-value]


def check_backend(runtime: RuntimeConfig) -> None:
    """Raises BackendUnavailableError for what a backend can't do, or this machine lacks for it."""
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
            "on what goes through the model beside it, so guesses could change the text; use "
            "--backend cpu"
        )


def on_kernels(runtime: RuntimeConfig, what: str) -> RuntimeConfig:
    """`runtime` with our own kernels, which `what` takes. Raises BackendUnavailableError for another."""
    if runtime.backend not in ("auto", "cpu"):
        raise BackendUnavailableError(
            f"--backend {runtime.backend}: {what} is made of our own kernels; use --backend cpu"
        )
    return replace(runtime, backend="cpu")


def is_row_invariant(backend: str) -> bool:
    """Whether a token's bits don't depend on what goes through the model beside it: guesses are exact."""
    if backend != "mlx":
        return backend == "cpu"
    from ondevice.backends import mlx

    return mlx.is_row_invariant()


def operand_bytes(backend: str) -> int:
    """Of what MLX's matrices multiply in on its default device; 0 for the other backends."""
    if backend != "mlx":
        return 0
    from ondevice.backends.mlx import compute_type

    return int(compute_type().size)


def make_backend(
    config: ModelConfig, quant: QuantConfig, runtime: RuntimeConfig, plan: Plan
) -> ReferenceBackend | BudgetBackend:
    """The engine that `runtime`, which is settled, asks for. Raises BackendUnavailableError."""
    match runtime.backend:
        case "reference":
            return ReferenceBackend()
        case "mlx":
            from ondevice.backends.mlx import MlxBackend

            operands = operand_bytes("mlx")
            return MlxBackend(
                segment_neurons=mlx_segment_shape(config, quant, operands).neurons,
                stage_neurons=mlx_stage_neurons(config, quant, operands),
                stages=MLX_STAGES,
                cache_bytes=MLX_CACHE_BYTES,
                budget_bytes=plan.budget_bytes,
                resident_embedding=plan.embedding_resident,
            )
    return CpuBackend(
        make_engine(runtime.threads, runtime.kernel_target),
        segment_neurons=segment_shape(config, quant).neurons,
        stream_neurons=plan.stream.neurons,
        resident_embedding=plan.embedding_resident,
    )
