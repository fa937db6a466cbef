"""More sound models to spoil, which `transformers` makes: families with blocks of their own, as folders and
as GGUF files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ondevice.converters.convert import convert
from ondevice.converters.draft_layers.mtp import convert_mtp
from tests.converters.test_gguf_families import MODELS
from tests.fuzz.bases import write_slices
from tests.support.bundles import write_byte_tokenizer
from tests.support.families import CASES, write_model
from tests.support.gguf_families import write_family
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level
from tests.support.mtp_checkpoints import write_mtp_checkpoint

VOCAB = 384
FOLDERS = (
    "gemma3n", "gemma4", "gemma4 e wide", "opt", "opt norms behind", "phi", "persimmon", "olmoe", "qwen2 moe",
    "gemma4 moe", "gpt-oss moe", "deepseek v3 moe", "qwen3.5", "mimo v2 moe wide",
)  # fmt: skip
FILES = {
    "phi": "F16", "phi3 partial": "Q8_0", "glm4": "Q5_0", "smollm3 yarn": "Q8_0", "granite": "Q4_1",
    "olmo2": "Q5_1", "stablelm head norms": "Q4_0", "falcon newer": "F16", "nemotron bias": "Q8_0",
    "gemma3n": "Q8_0", "glm4 moe": "Q5_1", "gpt-oss": "MXFP4", "deepseek v3 moe": "Q4_0",
    "qwen3.5 even": "Q8_0", "mimo2 windows": "Q8_0",
}  # fmt: skip
"""Types of matrices by model."""
AHEAD = ("qwen3.5", "qwen3.5 moe", "glm4 moe head norms", "glm4 moe lite", "mimo v2 moe")
"""Models with a layer that predicts one token more: recurrent, with experts, with latent attention, and with
values narrower than keys.
"""


def add_families(folder: Path) -> None:
    """Add them to the bases in `folder`."""
    for case in FOLDERS:
        family, options = CASES[case]
        checkpoint = folder / "checkpoints" / f"family {case}"
        write_model(checkpoint, family, {**options, "vocab_size": VOCAB})
        write_byte_tokenizer(checkpoint)
    for case, kind in FILES.items():
        family, options = MODELS[case]
        checkpoint = folder / "checkpoints" / f"gguf {case}"
        write_model(checkpoint / "source", family, {**options, "vocab_size": BYTE_LEVEL_TOKENS})
        write_family(checkpoint / "model.gguf", checkpoint / "source", kind, change=add_byte_level)
        shutil.rmtree(checkpoint / "source")
    for case in AHEAD:
        add_layer_ahead(folder, case)
        write_slices(folder / "ahead" / case / "bundle", folder / "slices" / case)


def add_layer_ahead(folder: Path, case: str) -> None:
    """Add a checkpoint with a layer that predicts one token more, and its bundle, to those in `folder`."""
    source = folder / "ahead" / case / "source"
    write_mtp_checkpoint(source, case)
    convert_mtp(source, convert(source, source.parent / "bundle", "q8"))
