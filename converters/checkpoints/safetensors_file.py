"""Tensors of one safetensors file: the header is judged by the safetensors library, the bytes are read by us.

The library's numpy front end can't give bfloat16, and its mapping would count against a memory cgroup.
"""

from __future__ import annotations

import json
from typing import Any, get_args

from safetensors import SafetensorError, safe_open

from ondevice.bundle.strict_json import unique_keys
from ondevice.converters.checkpoints.base import SourceFile, SourceTensor, StoredType
from ondevice.errors import CheckpointError, UnsupportedModelError

MAX_HEADER_BYTES = 32 << 20
"""Far above any real header, and far below what parsing one could do to memory."""


def read_tensors(file: SourceFile) -> dict[str, SourceTensor]:
    """Every tensor of `file`, by name.

    Raises CheckpointError if the file is truncated or its header isn't sound, UnsupportedModelError for a
    stored type other than F32, F16 and BF16.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.path.name} isn't a safetensors file: its header would be {length} bytes"
        )
    try:
        with safe_open(file.path, framework="numpy") as opened:
            names = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file.path.name} is truncated or isn't a safetensors file ({error}); download it again"
        ) from error
    try:
        header: dict[str, Any] = json.loads(file.read(8, length), object_pairs_hook=unique_keys)
    except ValueError as error:
        raise CheckpointError(f"{file.path.name} has no sound header: {error}; download it again") from error
    header.pop("__metadata__", None)
    if set(header) != names:
        raise CheckpointError(f"{file.path.name} changed while it was read")
    return {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}


def _tensor(name: str, entry: dict[str, Any], file: SourceFile, data_start: int) -> SourceTensor:
    dtype = entry["dtype"]
    if dtype not in get_args(StoredType):
        raise UnsupportedModelError(
            f"{file.path.name}: {name} is stored as {dtype}; only F32, F16 and BF16 can be converted, so "
            "start from the checkpoint before it was quantised"
        )
    return SourceTensor(name, dtype, tuple(entry["shape"]), file, data_start + entry["data_offsets"][0])
