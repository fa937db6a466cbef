"""Quantised GGUF files against llama.cpp on the very file: 500 positions.

The file's values are kept as they are, in 16 bits. llama.cpp rounds activations to 8 bits where weights are
quantised, so logits differ a little. The likeliest token must be the same, but for near ties: positions where
our logits of the two candidates lie less than a share of the largest logit apart.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from tests.converters.test_gguf_families import llama_cpp_logits
from tests.converters.test_gguf_model import write_llama, write_stories
from tests.support.engines import all_logits, bundle_weights, running
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, gguf_name, permuted, write_gguf
from tests.support.models import write_checkpoint
from tests.support.trained_models import TWIN, own_text

pytest.importorskip("gguf")
POSITIONS = 500
NEAR = {"F16": 0.01, "wide": 0.05}
"""Gap of a near tie, of the largest logit; 0.02 for those that aren't named. `wide`: of random weights, whose
logits are nearly alike."""
MOST_NEAR = {"F16": 3, "wide": 75}
"""Most near ties of 500 positions; 20 for those that aren't named."""
TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}
"""llama.cpp's numbers of file types."""


def quantised(source: Path, path: Path, kind: str) -> Path:
    """The file `source` as llama.cpp quantises it, every matrix alike."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.pure = TYPES[kind], 1, True
    result = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options))
    assert result == 0
    return path


def write_twin(path: Path) -> None:
    """Write the twin, whose head is its embedding, with its vocabulary."""
    bundle = Bundle.open(TWIN)
    heads, tensors = {"q": bundle.config.num_heads, "k": bundle.config.num_kv_heads}, {}
    for name, values in bundle_weights(TWIN).items():
        which = name.removesuffix("_proj.weight")[-1]
        moved = (
            permuted(values, heads[which]) if name.endswith(("q_proj.weight", "k_proj.weight")) else values
        )
        tensors[gguf_name(name)] = np.ascontiguousarray(moved, np.float32)
    write_llama(path, bundle.config, (TWIN / "tokenizer.model").read_bytes(), tensors)


def differences(path: Path, bundle: Path, tokens: list[int], near: float) -> tuple[int, int, float]:
    """Positions of another likeliest token, those of them that are no near ties, and the largest difference
    of logits, of the largest one."""
    expected = llama_cpp_logits(path, tokens)
    with running(convert(path, bundle, "f16")) as model:
        logits = all_logits(model, tokens, 32)
    rows = np.arange(len(tokens))
    mine, theirs = logits.argmax(axis=1), expected.argmax(axis=1)
    gaps = logits[rows, mine] - logits[rows, theirs]
    largest = np.abs(expected).max()
    other = int((mine != theirs).sum())
    return other, int((gaps > near * largest).sum()), float(np.abs(logits - expected).max() / largest)


def check(path: Path, bundle: Path, tokens: list[int], case: str, note: Any) -> None:
    other, far, largest = differences(path, bundle, tokens, NEAR.get(case, 0.02))
    note("largest difference", f"{largest:.5f}")
    note("other likeliest tokens", other)
    assert far == 0
    assert other <= MOST_NEAR.get(case, 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stories_in_every_small_block_match_llama_cpp(
    shared_data: Path, tmp_path: Path, kind: str, record_property: Any
) -> None:
    theirs = shared_data / "models" / "stories260K"
    write_stories(tmp_path / "plain.gguf", theirs)
    path = quantised(tmp_path / "plain.gguf", tmp_path / "model.gguf", kind)
    vocabulary = open_checkpoint(theirs).config.vocab_size
    with running(convert(path, tmp_path / "text", "f16")) as model:
        tokens = [1]
        # A text of the model's own, as random ids would tell little.
        while len(tokens) < POSITIONS:
            logits = all_logits(model, tokens[-100:], 32)[-1]
            tokens += np.argsort(logits)[-3:].tolist()
    assert max(tokens) < vocabulary
    check(path, tmp_path / "bundle", tokens[:POSITIONS], kind, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_random_weights_in_large_blocks(tmp_path: Path, kind: str, record_property: Any) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    source = write_checkpoint(
        tmp_path / "source", vocab_size=BYTE_LEVEL_TOKENS, num_key_value_heads=4, **sizes
    )
    write_gguf(tmp_path / "plain.gguf", source, change=add_byte_level)
    path = quantised(tmp_path / "plain.gguf", tmp_path / "model.gguf", kind)
    tokens = np.random.default_rng(1).integers(0, 256, POSITIONS).tolist()
    check(path, tmp_path / "bundle", tokens, "wide", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q4_K", "Q5_K", "Q6_K"])
def test_a_trained_model_in_large_blocks(tmp_path: Path, kind: str, record_property: Any) -> None:
    write_twin(tmp_path / "plain.gguf")
    path = quantised(tmp_path / "plain.gguf", tmp_path / "model.gguf", kind)
    check(path, tmp_path / "bundle", own_text(TWIN, POSITIONS), kind, record_property)
