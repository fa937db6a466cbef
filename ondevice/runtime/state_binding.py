"""What the state of a sequence depends on beside its tokens, so that no other model's state is ever used.

Memory and speed settings aren't part of it, since they change no bit: states are found again under another
budget, with other threads, with and without drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ondevice.backends.base import KVLayout
from ondevice.bundle.manifest import manifest_text
from ondevice.hashing import sha256_hex
from ondevice.prompt_cache.store import NO_LIMIT, PromptCache
from ondevice.runtime.models import operating_point
from ondevice.runtime.resolving import ResolvedModel
from ondevice.units import parse_size

STATE_VERSION = 1
"""Version of how states are laid out in files."""
_LIBRARIES = {"mlx": "mlx", "reference": "numpy"}


def state_binding(resolved: ResolvedModel, target: str) -> dict[str, Any]:
    """All that keys and values depend on beside tokens, as JSON. target: what the backend multiplies with."""
    from importlib import metadata

    bundle, runtime = resolved.bundle, resolved.runtime
    context = resolved.plan.max_context
    streams = bundle.streams if resolved.runs_streams else None
    library = _LIBRARIES.get(runtime.backend)
    return {
        "version": STATE_VERSION,
        "release": metadata.version("ondevice"),
        "byteorder": sys.byteorder,
        "bundle": sha256_hex(manifest_text(bundle.manifest)),
        "backend": runtime.backend,
        # Our own kernels have equal bits on every target.
        "target": "" if library is None else f"{target} {metadata.version(library)}",
        "kv_bits": runtime.kv_bits,
        "sparsity": _mode(resolved),
        "streams": "" if streams is None or streams.mode == "lossless" else streams.sha256,
        "experts": runtime.experts,
        "long_context": [rope.within(context) != rope.within(0) for rope in bundle.config.ropes],
        "chunk": whole_chunk(resolved),
        **_rows_of_prompts(resolved),
    }


def whole_chunk(resolved: ResolvedModel) -> int:
    """Tokens of a prompt's chunks where only whole ones may be used again; 0 where any split may.

    Where layers have states, those are at checkpoints.
    """
    runtime, states = resolved.runtime, KVLayout(resolved.bundle.config, resolved.runtime.kv_bits).states
    if states.nbytes:
        return states.spacing
    return 0 if _any_split(resolved) else runtime.prefill_chunk


def shared_chunk(resolved: ResolvedModel) -> int:
    """Tokens of a prompt's chunks where another text may begin with whole ones alone; 0 where any number of
    tokens gives it equal bits.
    """
    return 0 if _any_split(resolved) else whole_chunk(resolved)


def _any_split(resolved: ResolvedModel) -> bool:
    """Whether a token has the same bits in any chunk of a prompt."""
    return resolved.runtime.backend == "cpu"


def _rows_of_prompts(resolved: ResolvedModel) -> dict[str, int]:
    """How prompts are split, where that may change states that are kept by checkpoints."""
    runtime, config = resolved.runtime, resolved.bundle.config
    split = config.recurrent_layers and runtime.backend != "cpu"
    return {"prefill_chunk": runtime.prefill_chunk} if split else {}


def open_prompt_cache(resolved: ResolvedModel, target: str) -> PromptCache | None:
    """The prompt cache that the options name; None if they name none."""
    folder = resolved.runtime.prompt_cache
    if not folder:
        return None
    limit = parse_size(resolved.runtime.prompt_cache_bytes)
    return prompt_cache_at(Path(folder).expanduser(), resolved, target, limit)


def prompt_cache_at(
    folder: Path, resolved: ResolvedModel, target: str, limit_bytes: int = NO_LIMIT
) -> PromptCache:
    """The states of this model in a folder."""
    return PromptCache(
        folder,
        state_binding(resolved, target),
        chunk=whole_chunk(resolved),
        marks=_any_split(resolved),
        limit_bytes=limit_bytes,
        io=resolved.runtime.io,
    )


def _mode(resolved: ResolvedModel) -> list[str]:
    """The sparsity mode as far as it changes bits, and a digest of what it is run with."""
    bundle, runtime = resolved.bundle, resolved.runtime
    point = operating_point(runtime, bundle.predictors)
    if point is None or bundle.predictors is None:
        # Modes that leave out zeros alone have equal bits in our own kernels.
        return ["exact" if runtime.backend == "cpu" else runtime.sparsity]
    return [runtime.sparsity, sha256_hex(f"{bundle.predictors.sha256} {point!r}".encode())]
