"""Opens a checkpoint with the reader of its format, which is told by its content, not its suffix."""

from __future__ import annotations

from pathlib import Path

from ondevice.converters.checkpoints.base import Checkpoint
from ondevice.converters.checkpoints.huggingface import open_huggingface
from ondevice.converters.checkpoints.llama2c import is_llama2c, open_llama2c
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, reading_failed


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a Hugging Face folder, a llama2.c `.bin` file, or a folder with one such file.

    Raises ModelNotFoundError if nothing is there, UnsupportedModelError for another format (a pickle, which
    is never opened, or a GGUF file), CheckpointError for a damaged checkpoint.
    """
    if not source.exists():
        raise ModelNotFoundError(
            f"no checkpoint at {source}; give a Hugging Face folder on this disk, or a llama2.c .bin file"
        )
    if source.is_file():
        return _open_file(source)
    if not source.is_dir():
        raise CheckpointError(f"{source} is neither a folder nor a regular file; it is no checkpoint")
    if (source / "config.json").exists() or (source / "config.json").is_symlink():
        return open_huggingface(SourceFolder(source))
    if (source / "bundle.json").exists():
        raise UnsupportedModelError(f"{source} is a bundle already; it needs no conversion")
    found = [path for path in sorted(source.glob("*.bin")) if path.is_file() and is_llama2c(path)]
    if len(found) == 1:
        return open_llama2c(found[0])
    if found:
        raise CheckpointError(f"{source} has {len(found)} llama2.c checkpoints; name one, as {found[0]}")
    for path in sorted(source.iterdir()):
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf") and path.is_file():
            return _open_file(path)
    raise CheckpointError(f"{source} has no config.json; it isn't a Hugging Face folder, or isn't complete")


def _open_file(path: Path) -> Checkpoint:
    try:
        with path.open("rb") as stream:
            magic = stream.read(8)
    except OSError as error:
        refused = CheckpointError(f"{path} can't be read: {error.strerror}")
        raise reading_failed(error, refused) from error
    if magic[:4] == b"GGUF":
        raise UnsupportedModelError(f"{path} is a GGUF file; start from the model's safetensors files")
    if magic[:2] == b"PK" or magic[:1] == b"\x80":
        raise UnsupportedModelError(
            f"{path} is a pickle, which can run code when it is opened, so it never is; use the model's "
            "safetensors files, or save it again with safetensors"
        )
    if magic[:4] == b"24ka":
        raise UnsupportedModelError(f"{path} is in llama2.c's newer format; export it in version 0")
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a checkpoint; give the folder it is in")
    return open_llama2c(path)
