"""What the state of a sequence depends on apart from its tokens, so that only matching states are reused.

Settings for memory and speed aren't included, because they change no bit: states may be used with other
budgets, other numbers of threads, and with and without drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ondevice.backends.kv_layout import KVLayout
from ondevice.bundle.manifest import manifest_text
from ondevice.hashing import sha256_hex
from ondevice.prompt_cache.store import NO_LIMIT, PromptCache
from ondevice.runtime.models import operating_point
from ondevice.runtime.resolving import ResolvedModel
from ondevice.units import parse_size

STATE_VERSION = 2
"""Version of the states' file format."""
_LIBRARIES = {"mlx": "mlx", "reference": "numpy"}


def state_binding(resolved: ResolvedModel, target: str) -> dict[str, Any]:
    """Everything that states depend on apart from tokens, as JSON. target: the backend's `target`."""
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
        # The `cpu` backend's kernels have equal bits on every target.
        "target": "" if library is None else f"{target} {metadata.version(library)}",
        "kv_bits": runtime.kv_bits,
        "sparsity": _mode(resolved),
        "streams": "" if streams is None or streams.mode == "lossless" else streams.sha256,
        "experts": runtime.experts,
        "long_context": [rope.within(context) != rope.within(0) for rope in bundle.config.ropes],
        "chunk": reuse_chunk(resolved),
        **_rows_of_prompts(resolved),
    }


def reuse_chunk(resolved: ResolvedModel) -> int:
    """The number of tokens in a chunk, if states may be reused only at multiples of it; 0 if any prefix may
    be reused.

    With recurrent layers, it is the distance between checkpoints.
    """
    runtime, states = resolved.runtime, KVLayout(resolved.bundle.config, resolved.runtime.kv_bits).states
    if states.nbytes:
        return states.spacing
    return 0 if _any_split(resolved) else runtime.prefill_chunk


def shared_chunk(resolved: ResolvedModel) -> int:
    """The number of tokens in a chunk, if another text may begin only with multiples of it; 0 if any prefix
    gives equal bits.
    """
    return 0 if _any_split(resolved) else reuse_chunk(resolved)


def _any_split(resolved: ResolvedModel) -> bool:
    """Whether a token has the same bits however its prompt is divided into chunks."""
    return resolved.runtime.backend == "cpu"


def _rows_of_prompts(resolved: ResolvedModel) -> dict[str, int]:
    """The size of prompts' chunks, if it may change recurrent states; otherwise empty."""
    runtime, config = resolved.runtime, resolved.bundle.config
    split = config.recurrent_layers and runtime.backend != "cpu"
    return {"prefill_chunk": runtime.prefill_chunk} if split else {}


def open_prompt_cache(resolved: ResolvedModel, target: str) -> PromptCache | None:
    """The prompt cache that the options name, or None."""
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
        chunk=reuse_chunk(resolved),
        marks=_any_split(resolved),
        limit_bytes=limit_bytes,
        io=resolved.runtime.io,
    )


def _mode(resolved: ResolvedModel) -> list[str]:
    """The sparsity mode and a digest of its predictors, as far as they change bits."""
    bundle, runtime = resolved.bundle, resolved.runtime
    point = operating_point(runtime, bundle.predictors)
    if point is None or bundle.predictors is None:
        # On `cpu`, modes that only skip zeros have equal bits.
        return ["exact" if runtime.backend == "cpu" else runtime.sparsity]
    return [runtime.sparsity, sha256_hex(f"{bundle.predictors.sha256} {point!r}".encode())]
