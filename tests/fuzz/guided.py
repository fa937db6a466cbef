"""Coverage-guided fuzzing of the parsers that are written in Python, by atheris: `make fuzz-guided`.

    python -m tests.fuzz.guided TARGET --corpus FOLDER [libFuzzer's options]

One target a process. It may raise OndeviceError; the rest, and what takes too long, are findings, whose input
libFuzzer leaves in the working folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import atheris

with atheris.instrument_imports(include=["ondevice"]):
    import ondevice.chat_template.sandbox  # noqa: F401 (else it comes when a template is compiled)
    from ondevice.bundle.draft_layers import SIDECAR_OF, parse_draft_layer
    from ondevice.bundle.manifest import Manifest, parse_manifest
    from ondevice.bundle.predictors import parse_predictors
    from ondevice.bundle.sidecar import weights_digest
    from ondevice.bundle.streams import parse_streams
    from ondevice.chat_template import ChatTemplate
    from ondevice.converters.checkpoints.opening import open_checkpoint
    from ondevice.errors import OndeviceError
    from ondevice.settings import read_settings
    from ondevice.tokenizer.pattern import pattern_cost
    from ondevice.tokenizer.sentencepiece_file import read_sentencepiece_file
    from ondevice.tokenizer.tokenizer_file import read_tokenizer_file

from tests.fuzz import signing, template_cases
from tests.fuzz.bases import LLAMA3_PATTERN, Bases, make_bases
from tests.fuzz.mutations import changed_json
from tests.support.chat_templates import CONVERSATION
from tests.support.models import tiny_config

SCRATCH = Path(tempfile.mkdtemp(prefix="ondevice-guided-"))
SIDECARS: dict[str, Callable[[bytes, Manifest], object]] = {
    "predictors": parse_predictors,
    "streams": parse_streams,
    **{key: partial(parse_draft_layer, sidecar) for key, sidecar in SIDECAR_OF.items()},
}


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time a change of values, so that JSON stays JSON and comes further than its parser."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return changed_json(data, rng)[:max_size]
    return bytes(atheris.Mutate(data, len(data) or 1))[:max_size]


def _value(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def manifest(data: bytes) -> None:
    """The manifest, its hash made right wherever it can be."""
    content = _value(data)
    if content is not None:
        document = {"manifest": content, "sha256": signing.sha256(signing.canonical(content))}
        data = json.dumps(document).encode()
    parse_manifest(data)


def sidecars(data: bytes) -> None:
    """The JSON files beside a bundle, each of its own weights."""
    content = _value(data)
    for key, parse in SIDECARS.items():
        if isinstance(content, dict):
            whole = content | {"model": _DIGEST}
            document = {key: whole, "sha256": signing.sha256(signing.canonical(whole))}
            with contextlib.suppress(OndeviceError):
                parse(json.dumps(document).encode(), _MANIFEST)


def template(data: bytes) -> None:
    """Compiled, and rendered."""
    ChatTemplate(data.decode("utf-8", "replace"), bos_token="<s>").render(CONVERSATION)


def pattern(data: bytes) -> None:
    """A tokenizer's pattern, and what it costs."""
    pattern_cost(data.decode("utf-8", "replace"))


def settings(data: bytes) -> None:
    """A settings file."""
    (SCRATCH / "config.toml").write_bytes(data)
    read_settings(SCRATCH / "config.toml")


def checkpoint(data: bytes) -> None:
    """A safetensors file: the header's length, the header, and bytes."""
    (SCRATCH / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4096))
    open_checkpoint(SCRATCH).close()


def config(data: bytes) -> None:
    """A checkpoint's configuration."""
    folder = SCRATCH / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    open_checkpoint(folder).close()


def tokenizer(data: bytes) -> None:
    """A `tokenizer.json`."""
    read_tokenizer_file(data)


def sentencepiece(data: bytes) -> None:
    """A `tokenizer.model`."""
    read_sentencepiece_file(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        manifest,
        sidecars,
        tokenizer,
        pattern,
        sentencepiece,
        template,
        settings,
        checkpoint,
        config,
    )
}


def seeds(name: str, bases: Bases) -> list[bytes]:
    """What to begin with: sound ones."""
    headers = [path.read_bytes() for path in bases.folder.glob("checkpoints/*/model*.safetensors")]
    bundles = bases.bundles
    found: dict[str, list[bytes]] = {
        "manifest": [json.dumps(signing.manifest_of(bundle)).encode() for bundle in bundles],
        "sidecars": [
            json.dumps(signing.sidecar_content(bundle, name)).encode()
            for bundle in bundles
            for name in signing.SIDECARS
        ],
        "tokenizer": bases.tokenizers("tokenizers"),
        "pattern": [LLAMA3_PATTERN.encode(), rb"(a+)+b", rb"(?<=x)[^\s\p{L}]{1,3}(?!y)|\d"],
        "sentencepiece": bases.tokenizers("sentencepiece"),
        "template": [source.encode() for source in template_cases.SOURCES],
        "settings": [b'dram-budget = "4GB"\nthreads = 2\nstop = ["a"]\ntemp = 0.5\n'],
        "checkpoint": [data[8 : 8 + int.from_bytes(data[:8], "little")] for data in headers],
        "config": [path.read_bytes() for path in bases.folder.glob("checkpoints/*/config.json")],
    }
    return found[name]


def one_input(data: bytes) -> None:
    """What libFuzzer calls."""
    with contextlib.suppress(OndeviceError):
        _TARGET(data)


if __name__ == "__main__":
    _NAME, _CORPUS = sys.argv[1], Path(sys.argv[sys.argv.index("--corpus") + 1])
    _TARGET = TARGETS[_NAME]
    _BASES = make_bases(SCRATCH / "bases")
    _MANIFEST = parse_manifest((_BASES.bundles[0] / "bundle.json").read_bytes())
    _DIGEST = weights_digest(_MANIFEST)
    (SCRATCH / "config.json").write_text(json.dumps(tiny_config()))
    _CORPUS.mkdir(parents=True, exist_ok=True)
    for _index, _seed in enumerate(seeds(_NAME, _BASES)):
        (_CORPUS / f"sound-{_index}").write_bytes(_seed)
    atheris.Setup([sys.argv[0], str(_CORPUS), *sys.argv[4:]], one_input, custom_mutator=mutated)
    atheris.Fuzz()
