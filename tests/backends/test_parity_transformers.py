"""Logits and greedy text against `transformers` in float32, on the same weights. What may differ, and why:

- `reference` with float32 keys and values, every storage format: 1e-4 of the largest logit (measured: 6e-6),
  against `transformers` holding the weights that the bundle stands for. Only the order of sums differs.
- Keys and values rounded to float16 (2^-11 of each) or int8 (1/254 of the head's largest), and in `cpu` the
  activations of quantised matrices rounded to int8 (1/254 of the largest of 64): root mean square limits, a
  third above what was measured. The random models have twice the usual gain and show such rounding more
  than trained ones do; stories260K is a trained one.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.config import SamplingConfig
from ondevice.converters.convert import convert
from ondevice.generate import Generator
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.runtime.opening import open_tokenizer
from tests.support.engines import BackendName, all_logits, bundle_weights, running
from tests.support.mlx_folders import MXFP4, Scheme, write_mlx_folder
from tests.support.models import (
    VARIANTS,
    random_tensors,
    tiny_config,
    transformers_logits,
    transformers_model,
    write_checkpoint,
)

pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = 100
"""More than a key/value block and than the sliding windows."""


@pytest.fixture
def models(variant_bundle: Any) -> Any:
    """models(variant, quant) -> (checkpoint folder, bundle folder), each made once."""
    return variant_bundle


def tokens_for(folder: Path) -> list[int]:
    vocab_size = Bundle.open(folder).config.vocab_size
    return [int(token) for token in np.random.default_rng(7).integers(0, vocab_size, TOKENS)]


def error(mine: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(mine - theirs).max() / np.abs(theirs).max())


def rms_error(mine: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.sqrt(((mine - theirs) ** 2).mean() / (theirs**2).mean()))


def half_rounded(variant: str) -> dict[str, np.ndarray]:
    """The checkpoint's own weights, its matrices rounded to float16 as an f16 bundle holds them."""
    tensors = random_tensors(tiny_config(**VARIANTS[variant]))
    return {
        name: values.astype(np.float16).astype(np.float32) if values.ndim == 2 else values
        for name, values in tensors.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_f16_logits_equal_those_of_transformers(models: Any, variant: str) -> None:
    source, bundle = models(variant, "f16")
    tokens = tokens_for(bundle)
    theirs = transformers_logits(transformers_model(source, half_rounded(variant)), tokens)
    with running(bundle) as model:
        assert error(all_logits(model, tokens, 32), theirs) < 1e-4
    assert theirs.std() > 0.3 * np.abs(theirs).max() / math.sqrt(theirs.shape[1]), "the model says nothing"


@pytest.mark.fast(
    "llama-q[48]", "qwen3-bias-relu2-q4", "qwen2-window-tied-q4", "mistral-head-dim-gelu-tanh-q4"
)
@pytest.mark.parametrize("quant", ["q4", "q8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_logits_equal_transformers_on_the_dequantised_weights(
    models: Any, variant: str, quant: str
) -> None:
    source, bundle = models(variant, quant)
    tokens, weights = tokens_for(bundle), bundle_weights(bundle)
    theirs = transformers_logits(transformers_model(source, weights), tokens)
    with running(bundle) as model:
        assert error(all_logits(model, tokens, 32), theirs) < 1e-4
    for name, exact in random_tensors(tiny_config(**VARIANTS[variant])).items():
        worst = np.abs(weights[name] - exact).max() / np.abs(exact).max()
        # A group spans at most twice the largest weight; a code of its own for zero costs up to a step.
        # At 4 bits the ends of a range may miss by more, so that the sum of squares is the least.
        assert worst <= (0.0 if exact.ndim == 1 else {"q4": 4 / 15, "q8": 2 / 255}[quant]), name


@pytest.mark.parametrize(("scheme", "family"), [
    (Scheme(4), "llama"), (Scheme(8, scales="BF16"), "qwen3"), (Scheme(3, 128, "F32"), "qwen2"),
    (Scheme(6), "mistral"), (MXFP4, "llama"),
], ids=str)  # fmt: skip
def test_mlx_folders_compute_with_the_values_of_their_codes(
    tmp_path: Path, scheme: Scheme, family: str
) -> None:
    """Down projections of 4 and 8 bits are on a grid, so that rounding them again changes nothing."""
    options: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": True}
    exact = scheme in (Scheme(4), Scheme(8, scales="BF16"))
    grid_bits = scheme.bits if exact else 0
    source = write_mlx_folder(tmp_path / "s", scheme, family=family, grid_bits=grid_bits, **options)
    bundle = convert(source.path, tmp_path / "b")
    tokens, weights = tokens_for(bundle), source.values
    if not exact:
        stored = bundle_weights(bundle)
        again = [name for name in weights if "down_proj" in name]
        weights = weights | {name: stored[name] for name in again}
    plain = write_checkpoint(tmp_path / "plain", family, **options)
    theirs = transformers_logits(transformers_model(plain, weights), tokens)
    with running(bundle) as model:
        assert error(all_logits(model, tokens, 32), theirs) < 1e-4


CPU_LIMITS = {"f16": 0.002, "q8": 0.08, "q4": 0.08}


@pytest.mark.fast(
    "llama-f16",
    "llama-q[48]",
    "llama-relu-q4",
    "llama-tails-*",
    "llama-gqa-tied-q8",
    "llama-gelu-q4",
    "llama-llama3-rope-f16",
    "qwen3-bias-relu2-q4",
    "qwen2-window-tied-q4",
    "mistral-head-dim-gelu-tanh-q4",
    "llama-linear-rope-bias-f16",
)
@pytest.mark.parametrize("quant", CPU_LIMITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cpu_logits_stay_near_transformers(models: Any, variant: str, quant: str) -> None:
    source, bundle = models(variant, quant)
    tokens = tokens_for(bundle)
    theirs = transformers_logits(transformers_model(source, bundle_weights(bundle)), tokens)
    with running(bundle, "cpu") as model:
        assert 0 < rms_error(all_logits(model, tokens), theirs) < CPU_LIMITS[quant]


KV_LIMITS: dict[Literal[16, 8], float] = {16: 0.002, 8: 0.04}


@pytest.mark.fast("llama-*-8", "qwen2-window-tied-*-16")
@pytest.mark.parametrize("kv_bits", KV_LIMITS)
@pytest.mark.parametrize("backend", get_args(BackendName))
@pytest.mark.parametrize("variant", ["llama", "qwen2-window-tied", "qwen3"])
def test_narrow_keys_and_values_stay_near_transformers(
    models: Any, variant: str, backend: BackendName, kv_bits: Literal[16, 8]
) -> None:
    source, bundle = models(variant, "f16")
    tokens = tokens_for(bundle)
    theirs = transformers_logits(transformers_model(source, bundle_weights(bundle)), tokens)
    with running(bundle, backend) as model:
        assert 0 < rms_error(all_logits(model, tokens, kv_bits), theirs) < KV_LIMITS[kv_bits]


STORIES_CONFIG = {
    "family": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 172,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
BEGINNINGS = (
    "",
    "Once upon a time",
    "Lily and Tom went to the park",
    "One day, a little dog named Max",
    "There was a big red ball",
    "The sun was shining and the birds",
    '"Can I play with you?" asked',
    "Mom said it was time for bed, but",
    "In the forest there lived an old bear who",
    "Ben did not like to share his toys",
)


def stories_weights(path: Path) -> dict[str, np.ndarray]:
    """llama2.c's file under Hugging Face's names; its rotary pairs go from adjacent to half a head apart."""
    header, floats = np.fromfile(path, "<i4", 7), np.fromfile(path, "<f4", offset=28)
    assert header.tolist() == [64, 172, 5, 8, 4, 512, 512]
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += math.prod(shape)
        return floats[at - math.prod(shape) : at].reshape(shape)

    def halves(matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape(-1, 4, 2, 64).transpose(0, 2, 1, 3).reshape(-1, 64)

    layers: dict[str, np.ndarray] = {"embed_tokens": take(512, 64), "input_layernorm": take(5, 64)}
    for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
        layers[f"self_attn.{name}_proj"] = take(5, rows, 64)
    layers["post_attention_layernorm"] = take(5, 64)
    for name, shape in (("gate", (172, 64)), ("down", (64, 172)), ("up", (172, 64))):
        layers[f"mlp.{name}_proj"] = take(5, *shape)
    weights = {"model.norm.weight": take(64), "model.embed_tokens.weight": layers.pop("embed_tokens")}
    for name, stack in layers.items():
        for i, values in enumerate(stack):
            turned = halves(values) if name in ("self_attn.q_proj", "self_attn.k_proj") else values
            weights[f"model.layers.{i}.{name}.weight"] = turned
    return weights


@pytest.fixture(scope="module")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """stories(quant) -> bundle folder; stories("") -> folder of an equal Hugging Face checkpoint's config."""
    root = tmp_path_factory.mktemp("stories")
    write_checkpoint(root / "config-only", **STORIES_CONFIG)

    @cache
    def made(quant: str) -> Path:
        if quant:
            convert(shared_data / "models" / "stories260K", root / quant, quant=quant)
        return root / (quant or "config-only")

    return made


@pytest.fixture(scope="module")
def stories_oracle(stories: Any, shared_data: Path) -> Any:
    """`transformers` holding the float16-rounded weights of stories260K."""
    weights = stories_weights(shared_data / "models" / "stories260K" / "stories260K.bin")
    rounded = {
        name: values.astype(np.float16).astype(np.float32) if values.ndim == 2 else values
        for name, values in weights.items()
    }
    stored = bundle_weights(stories("f16"))
    assert stored.keys() == rounded.keys()
    assert all((stored[name] == values).all() for name, values in rounded.items())
    return transformers_model(stories(""), rounded)


def prompts(bundle: Path) -> list[list[int]]:
    tokenizer = open_tokenizer(Bundle.open(bundle))
    assert tokenizer is not None
    return [tokenizer.encode(text, add_bos=True) for text in BEGINNINGS]


def continued(model: Transformer, prompt: list[int], **sampling: Any) -> list[int]:
    """The 200 tokens that follow a prompt (fewer if the text ends)."""
    generator = Generator(model, None, frozenset(), max_context=model.config.max_context)
    layout = KVLayout(model.config)
    kv = SequenceState(layout, arrays=model.backend.new_arrays(layout))
    events = generator.stream(prompt, kv, SamplingConfig(max_tokens=200, **sampling))
    return [event.token for event in events if event.token is not None]


@pytest.mark.fast("cpu")
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "reference")) for name in get_args(BackendName)],
)
def test_stories_greedy_tokens_are_those_of_transformers(
    stories: Any, stories_oracle: Any, backend: BackendName
) -> None:
    """Every token is the oracle's best after the same tokens, or within 1e-3 of the best."""
    texts = prompts(stories("f16"))
    differing = 0
    with running(stories("f16"), backend) as model:
        for prompt in texts:
            tokens = continued(model, prompt)
            assert len(tokens) == 200
            theirs = transformers_logits(stories_oracle, prompt + tokens)[len(prompt) - 1 : -1]
            gaps = theirs.max(axis=1) - theirs[np.arange(200), tokens]
            differing += int((gaps > 0).sum())
            assert gaps.max() <= 1e-3
    assert differing <= 2


@pytest.fixture(scope="module")
def stories_samples(stories: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    """Text of the model's own kind, ten times 200 tokens that it sampled, and its float logits for it."""
    with running(stories("f16"), "cpu") as model:
        texts = [
            prompt + continued(model, prompt, temperature=1.0, seed=9) for prompt in prompts(stories("f16"))
        ]
    with running(stories("f16")) as model:
        return texts, [log_probabilities(model, text) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quant", "perplexity_limit", "kl_limit"), [("f16", 1e-4, 1e-6), ("q8", 0.005, 2e-3)]
)
def test_stories_distribution_on_cpu_is_near_float(
    stories: Any, stories_samples: Any, quant: str, perplexity_limit: float, kl_limit: float
) -> None:
    """float is the reference engine on float16 weights. KL divergence in nats per token."""
    texts, exact = stories_samples
    with running(stories(quant), "cpu") as model:
        mine = [log_probabilities(model, text) for text in texts]
    assert 1.5 < perplexity(exact, texts) < 8.0
    assert abs(perplexity(mine, texts) / perplexity(exact, texts) - 1.0) <= perplexity_limit
    divergences = [(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(exact, mine, strict=True)]
    assert 0 <= np.concatenate(divergences).mean() <= kl_limit


def log_probabilities(model: Transformer, tokens: list[int]) -> np.ndarray:
    """(T, V) in float64, of what follows each token."""
    wide = all_logits(model, tokens).astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def perplexity(predictions: list[np.ndarray], texts: list[list[int]]) -> float:
    losses = [-p[np.arange(len(text) - 1), text[1:]] for p, text in zip(predictions, texts, strict=True)]
    return float(np.exp(np.concatenate(losses).mean()))
