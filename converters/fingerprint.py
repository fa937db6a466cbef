"""The fingerprint of a checkpoint, which tells it from others without reading all of it."""

from __future__ import annotations

import hashlib

from ondevice.converters.checkpoints.base import Checkpoint

_SAMPLE_BYTES = 512


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 (hex) of every tensor's name, type, shape, beginning and middle, and of the tokenizer files.

    A fine-tuned model differs from its base at least in the middle of some tensor. Times and paths are not
    part of it.
    """
    digest = hashlib.sha256(checkpoint.source_format.encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.sample(0, _SAMPLE_BYTES))
        digest.update(tensor.sample(tensor.stored_nbytes // 2, _SAMPLE_BYTES))
    for name, blob in sorted(checkpoint.tokenizer.blobs.items()):
        digest.update(f"{name} {len(blob)}\n".encode())
        digest.update(blob)
    digest.update(repr((checkpoint.tokenizer.info, sorted(checkpoint.generation.items()))).encode())
    return digest.hexdigest()
