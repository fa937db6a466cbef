"""The trained mixture of experts, whose routing is real, against `transformers` and against llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.bundle.reader import Bundle
from ondevice.converters.convert import convert
from tests.converters.test_expert_parity import CPU, EXACT, logits_and_margins
from tests.converters.test_gguf_llama_cpp import POSITIONS, check, quantised
from tests.converters.test_gguf_model import add_pieces
from tests.support.engines import all_logits, running
from tests.support.gguf_families import write_family
from tests.support.trained_models import MIXTURE, own_text, write_mixture

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TOKENS = 120
TEXT = 48
"""Tokens of a greedy text, after PROMPT tokens."""
PROMPT = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture") / "small-olmoe")


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    return convert(source, source.with_name("bundle"), "f16")


@pytest.fixture(scope="module")
def theirs(source: Path) -> Any:
    return transformers.OlmoeForCausalLM.from_pretrained(source, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What the model itself says."""
    return own_text(MIXTURE, TOKENS)


def write_mixture_gguf(path: Path, source: Path) -> Path:
    vocabulary = (source / "tokenizer.model").read_bytes()
    write_family(path, source, change=lambda writer: add_pieces(writer, vocabulary))
    return path


def test_logits_and_perplexity_are_those_of_transformers(bundle: Path, theirs: Any, text: list[int]) -> None:
    """At positions before the first near tie of a router within 1e-3, and in the middle at all."""
    logits, margin = logits_and_margins(theirs, text)
    for kept, most in ((EXACT, EXACT.most), (CPU, CPU.limit)):
        with running(bundle, kept.backend) as loaded:
            mine = all_logits(loaded, text, kept.kv_bits)
        far = np.abs(mine - logits).max(axis=1) / np.abs(logits).max()
        decided = margin >= EXACT.tie
        print(f"{kept.backend}: {far[decided].max():.1e} at {decided.sum()}, median {np.median(far):.1e}")
        assert far[decided].max() < most
        assert np.median(far) < most
        assert (mine.argmax(axis=1) == logits.argmax(axis=1)).mean() > 0.99
    chances = torch.log_softmax(torch.from_numpy(logits[:-1]), -1).numpy()
    perplexity = math.exp(-chances[np.arange(TOKENS - 1), text[1:]].mean())
    with ondevice.load(bundle) as model:
        assert model.score(tokens=text).perplexity == pytest.approx(perplexity, rel=1e-3)


@pytest.mark.slow
def test_its_greedy_text_is_that_of_transformers(bundle: Path, theirs: Any, text: list[int]) -> None:
    options = {"max_new_tokens": TEXT, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [1, 2]}
    with torch.no_grad():
        said = theirs.generate(torch.tensor([text[:PROMPT]]), **options)[0, PROMPT:].tolist()
    with ondevice.load(bundle) as model:
        made = model.generate(
            tokens=text[:PROMPT], max_tokens=TEXT, temperature=0.0, logit_bias={1: -math.inf, 2: -math.inf}
        )
    assert list(made.tokens) == said


@pytest.mark.slow
def test_its_gguf_file_gives_the_bundle_of_its_folder(source: Path, bundle: Path, tmp_path: Path) -> None:
    """But for what of a tokenizer a file can't hold."""
    path = write_mixture_gguf(tmp_path / "small-olmoe.gguf", source)
    mine = convert(path, tmp_path / "mine", "f16")
    assert Bundle.open(mine).config == Bundle.open(bundle).config
    for file in bundle.glob("*.safetensors"):
        assert (mine / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.fixture(scope="module")
def plain_gguf(source: Path) -> Path:
    return write_mixture_gguf(source.with_name("plain.gguf"), source)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q5_1", "Q4_0"])
def test_its_likeliest_tokens_are_those_of_llama_cpp(
    plain_gguf: Path, tmp_path: Path, kind: str, record_property: Any
) -> None:
    """500 positions of the very file. llama.cpp's activations of 8 bits move routers too."""
    path = plain_gguf if kind == "F16" else quantised(plain_gguf, tmp_path / "model.gguf", kind)
    check(path, tmp_path / "bundle", own_text(MIXTURE, POSITIONS), kind, record_property)
