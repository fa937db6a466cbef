"""Families in GGUF files: the bundle of the same weights from Hugging Face's folder, and llama.cpp's
logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.convert import convert
from tests.converters.test_families import CASES, FALCON, LONGROPE, write_model
from tests.converters.test_gguf_model import assert_same_bundle
from tests.support.engines import all_logits, running
from tests.support.gguf_families import write_family
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level

pytest.importorskip("gguf")
pytest.importorskip("transformers")

UNALIKE = {
    "granite odd factors": (
        "Granite",
        {"head_dim": None, "embedding_multiplier": 12.1, "logits_scaling": 7.7, "residual_multiplier": 0.22},
    ),
    "falcon newer": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 25,
            "num_kv_shared_layers": 5,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 32,
            "sliding_window": 9,
            "vocab_size_per_layer_input": BYTE_LEVEL_TOKENS,
        },
    ),
    "phi": ("Phi", {"head_dim": None, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi less turns": (
        "Phi",
        {
            "head_dim": None,
            "hidden_size": 80,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        },
    ),
    "phi3 longrope": (
        "Phi3",
        {
            "head_dim": None,
            "rope_parameters": {**LONGROPE, "factor": 4.0},
            "original_max_position_embeddings": 128,
        },
    ),
}
"""Models that differ from those of test_families: as llama.cpp can hold them."""
ALIKE = (
    "phi3", "phi3 partial", "glm4", "glm4 no bias", "glm4 quarter", "smollm3", "smollm3 yarn", "granite",
    "granite tied", "olmo2", "olmo2 all heads", "olmo2 yarn", "stablelm", "stablelm parallel",
    "stablelm whole heads", "stablelm head norms", "falcon", "falcon newer, one norm", 
    "nemotron", "nemotron bias", "nemotron wide heads",
)  # fmt: skip
LIMITS: dict[str, float] = {}
"""Largest difference from llama.cpp's logits, of the largest logit, where it may be more than 0.02."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: CASES[name] for name in ALIKE} | UNALIKE


def written(folder: Path, case: str) -> Path:
    """A random model of the case as `transformers` saves it."""
    family, options = MODELS[case]
    write_model(folder, family, {**options, "vocab_size": BYTE_LEVEL_TOKENS})
    return folder


@pytest.mark.parametrize("case", MODELS)
def test_a_family_gives_the_bundle_of_its_folder(tmp_path: Path, case: str) -> None:
    source = written(tmp_path / "source", case)
    write_family(tmp_path / "model.gguf", source)
    mine = convert(tmp_path / "model.gguf", tmp_path / "mine", "f16")
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", "f16"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("case", MODELS)
def test_a_family_speaks_as_llama_cpp_does(tmp_path: Path, case: str, kind: str) -> None:
    """The very file, by llama.cpp. It rounds activations to float16, or to 8 bits for Q8_0, and GELU too."""
    llama_cpp = pytest.importorskip("llama_cpp")
    source = written(tmp_path / "source", case)
    path = tmp_path / "model.gguf"
    write_family(path, source, kind, add_byte_level)
    tokens = np.random.default_rng(1).integers(0, 256, 100).tolist()
    theirs = llama_cpp.Llama(
        str(path), n_ctx=128, n_threads=1, logits_all=True, verbose=False, n_gpu_layers=0
    )
    theirs.eval(tokens)
    expected = np.array(theirs.scores[: len(tokens)])
    theirs.close()
    with running(convert(path, tmp_path / "mine", "f16")) as model:
        logits = all_logits(model, tokens, 32)
    assert np.abs(logits - expected).max() < LIMITS.get(case, 2e-2) * np.abs(expected).max()
