"""Opens a checkpoint with the reader of its format, recognised by content, not by suffix."""

from __future__ import annotations

from pathlib import Path

from ondevice.bundle.layout import MANIFEST
from ondevice.converters.checkpoints.base import PICKLES, Checkpoint
from ondevice.converters.checkpoints.gguf_model import open_gguf
from ondevice.converters.checkpoints.gguf_parts import gguf_models
from ondevice.converters.checkpoints.huggingface import INDEX, SINGLE, open_config, open_huggingface
from ondevice.converters.checkpoints.llama2c import is_llama2c, open_llama2c
from ondevice.converters.checkpoints.source_folder import SourceFolder
from ondevice.converters.checkpoints.stand_ins import START_BYTES, refuse_stand_in
from ondevice.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, reading_failed

_USE_SAFETENSORS = "use the model's safetensors files, or save it again with safetensors"
_PACKED = (b"\x1f\x8b", b"7z\xbc\xaf", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"BZh", b"Rar!")
"""First bytes of gzip, 7-Zip, xz, zstd, bzip2 and RAR files."""


def open_checkpoint(source: Path, needs_weights: bool = True) -> Checkpoint:
    """Open a Hugging Face folder, a GGUF file, a llama2.c `.bin` file, or a folder with one such model.

    A GGUF file in several parts is opened by the name of any part. needs_weights: whether a folder with a
    config.json and no weights is refused; otherwise it gives a checkpoint without tensors.

    Raises ModelNotFoundError if nothing is there, UnsupportedModelError for another format (a pickle, which
    is never opened), CheckpointError for a damaged checkpoint.
    """
    if not source.exists():
        raise ModelNotFoundError(
            f"no checkpoint at {source}; give a Hugging Face folder on this disk, a GGUF file, or a llama2.c "
            ".bin file"
        )
    if source.is_file():
        return _open_file(source)
    if not source.is_dir():
        raise CheckpointError(f"{source} is neither a folder nor a regular file; it is no checkpoint")
    models = [source / files[0] for files in _gguf_files(source).values()]
    has_config = (source / "config.json").exists() or (source / "config.json").is_symlink()
    has_weights = any((source / name).is_symlink() or (source / name).exists() for name in (SINGLE, INDEX))
    if has_config and (has_weights or not models):
        opened = open_huggingface if has_weights or needs_weights else open_config
        return opened(SourceFolder(source))
    if (source / MANIFEST).exists():
        raise UnsupportedModelError(f"{source} is a bundle already; it needs no conversion")
    if models:
        if len(models) > 1:
            raise CheckpointError(f"{source} has {len(models)} GGUF models; name one, as {models[0]}")
        SourceFolder(source).file(models[0].name)  # refuses a link that leads out
        return _open_file(models[0])
    paths = [path for path in sorted(source.glob("*.bin")) if path.is_file() and is_llama2c(path)]
    if len(paths) == 1:
        return open_llama2c(paths[0])
    if paths:
        raise CheckpointError(f"{source} has {len(paths)} llama2.c checkpoints; name one, as {paths[0]}")
    for path in sorted(source.iterdir()):
        if path.suffix in PICKLES and path.is_file():
            return _open_file(path)
    raise CheckpointError(f"{source} has no config.json; it isn't a Hugging Face folder, or isn't complete")


def _gguf_files(folder: Path) -> dict[str, list[str]]:
    """The GGUF models of a folder. Links may lead out of it, because nothing is opened."""
    return gguf_models(path.name for path in folder.glob("*.gguf") if path.is_file())


def file_start(path: Path) -> bytes:
    """The first START_BYTES of a checkpoint's file.

    Raises CheckpointError for a placeholder in place of the file (`refuse_stand_in`), UnsupportedModelError
    for a pickle and for an archive.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(START_BYTES)
        nbytes = path.stat().st_size
    except OSError as error:
        refused = CheckpointError(f"{path} can't be read: {error.strerror}")
        raise reading_failed(error, refused) from error
    refuse_stand_in(str(path), start, nbytes)
    # A llama2.c file of width 128 or 640 begins so too, with zeros behind.
    if start[:1] == b"\x80" and start[2:4] != bytes(2):
        raise UnsupportedModelError(
            f"{path} is a pickle, which can run code when it is opened, so it never is; {_USE_SAFETENSORS}"
        )
    if start[:2] == b"PK":
        raise UnsupportedModelError(
            f"{path} is a zip archive. If PyTorch saved it, it has a pickle, which can run code when it is "
            f"opened, so it never is; {_USE_SAFETENSORS}. If a model's file was packed in it, unpack that"
        )
    if start.startswith(_PACKED):
        raise UnsupportedModelError(f"{path} is a compressed archive; unpack it, and give the model's file")
    return start


def _open_file(path: Path) -> Checkpoint:
    magic = file_start(path)
    if magic[:4] == b"GGUF":
        return open_gguf(path)
    if magic[:4] == b"24ka":
        raise UnsupportedModelError(f"{path} is in llama2.c's newer format; export it in version 0")
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} doesn't begin as a GGUF file does; download it again")
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a checkpoint; give the folder it is in")
    return open_llama2c(path)
