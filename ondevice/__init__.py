"""Run a language model that is larger than the memory you give it.

Importing this package loads nothing else. Each public name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    """The installed release."""

    from ondevice.api import Model as Model
    from ondevice.api import convert as convert
    from ondevice.api import inspect as inspect
    from ondevice.api import load as load
    from ondevice.api import verify as verify
    from ondevice.budget.plan import Plan as Plan
    from ondevice.chat_template.tools import PromptOptions as PromptOptions
    from ondevice.chat_template.tools import Tool as Tool
    from ondevice.chat_template.tools import ToolCall as ToolCall
    from ondevice.config import RuntimeConfig as RuntimeConfig
    from ondevice.config import SamplingConfig as SamplingConfig
    from ondevice.constraints.constraint import Constraint as Constraint
    from ondevice.doctor import examine as examine
    from ondevice.errors import BackendUnavailableError as BackendUnavailableError
    from ondevice.errors import BudgetError as BudgetError
    from ondevice.errors import BundleError as BundleError
    from ondevice.errors import CheckpointError as CheckpointError
    from ondevice.errors import ConstraintError as ConstraintError
    from ondevice.errors import ContextOverflowError as ContextOverflowError
    from ondevice.errors import DownloadError as DownloadError
    from ondevice.errors import FlashReadError as FlashReadError
    from ondevice.errors import InfillNotSupportedError as InfillNotSupportedError
    from ondevice.errors import ModelNotFoundError as ModelNotFoundError
    from ondevice.errors import OndeviceError as OndeviceError
    from ondevice.errors import UnsupportedModelError as UnsupportedModelError
    from ondevice.errors import UsageError as UsageError
    from ondevice.generate import Event as Event
    from ondevice.response import Response as Response
    from ondevice.runtime.budget_watch import MemoryPressure as MemoryPressure
    from ondevice.scoring import Score as Score
    from ondevice.session import Session as Session
    from ondevice.stats import GenerationStats as GenerationStats
    from ondevice.training import train_expert_costs as train_expert_costs
    from ondevice.training import train_expert_use as train_expert_use
    from ondevice.training import train_ngrams as train_ngrams
    from ondevice.training import train_predictors as train_predictors
    from ondevice.training import train_streams as train_streams

_MODULES = {
    "api": ("Model", "convert", "inspect", "load", "verify"),
    "runtime.budget_watch": ("MemoryPressure",),
    "chat_template.tools": ("PromptOptions", "Tool", "ToolCall"),
    "config": ("RuntimeConfig", "SamplingConfig"),
    "constraints.constraint": ("Constraint",),
    "doctor": ("examine",),
    "errors": (
        "BackendUnavailableError",
        "BudgetError",
        "BundleError",
        "CheckpointError",
        "ConstraintError",
        "ContextOverflowError",
        "DownloadError",
        "FlashReadError",
        "InfillNotSupportedError",
        "ModelNotFoundError",
        "OndeviceError",
        "UnsupportedModelError",
        "UsageError",
    ),
    "generate": ("Event",),
    "budget.plan": ("Plan",),
    "response": ("Response",),
    "scoring": ("Score",),
    "session": ("Session",),
    "stats": ("GenerationStats",),
    "training": (
        "train_expert_costs",
        "train_expert_use",
        "train_ngrams",
        "train_predictors",
        "train_streams",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted((*_HOMES, "__version__"))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("importlib.metadata").version(__name__)
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
