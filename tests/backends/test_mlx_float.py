"""The MLX backend: logits against `reference`, gradients against torch and differences of `reference`.

On MLX's CPU device wherever it runs: other devices round products differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ondevice.backends.base import Backend, Norm
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.reference import activate as reference_activate
from ondevice.bundle.reader import Bundle
from ondevice.errors import UsageError
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import ACTIVATIONS, ModelConfig
from tests.support.engines import all_logits, bundle_weights, error, every_logits, random_tokens, running
from tests.support.models import QUANTS, transformers_model
from tests.support.paths import SHIPPED
from tests.support.sources import RandomWeights, tiny_config

# A wheel whose shared libraries are missing fails to import too, and is as good as absent.
mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends.mlx_float import MlxFloatBackend  # noqa: E402
from ondevice.backends.mlx_kv import MlxKV, no_block  # noqa: E402
from ondevice.backends.mlx_ops import FloatLinear, MlxOps, activate, normed  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")
ALL_OPTIONS = tiny_config(attention_bias=True, attention_output_bias=True, qk_norm=True)


@contextmanager
def mlx_model(folder: Path) -> Iterator[Transformer]:
    bundle, backend = Bundle.open(folder), MlxFloatBackend()
    with FlashReader(bundle_files(bundle), "buffered", 2) as reader:
        yield Transformer(bundle.config, backend, load_weights(bundle, reader, backend))


def test_ops_of_blocks_that_few_models_have() -> None:
    """Of Gemma 3n and 4: they are those of `reference`."""
    random, mine, theirs = np.random.default_rng(3), MlxFloatBackend(), ReferenceBackend()
    x, y, small = (random.standard_normal(shape, np.float32) for shape in ((3, 8), (3, 8), (2, 8)))
    weight = 1 + np.abs(x[0])
    found = {
        "normed": (
            mine.normed(mx.array(x), Norm(mx.array(weight), 1e-5)),
            theirs.normed(x, Norm(weight, 1e-5)),
        ),
        "gated": (mine.gated(mx.array(x), mx.array(y), "gelu_tanh"), theirs.gated(x, y, "gelu_tanh")),
        "small linear": (mine.small_linear(mx.array(x), mx.array(small)), theirs.small_linear(x, small)),
        "RMS": (mine.match_rms(mx.array(x), mx.array(y)), theirs.match_rms(x, y)),
        "RMS of zeros": (mine.match_rms(mx.array(x * 0), mx.array(y)), theirs.match_rms(x * 0, y)),
    }
    for op, (of_mlx, expected) in found.items():
        assert np.abs(np.array(of_mlx) - expected).max() < 1e-5, op


def mlx_cache(config: ModelConfig, kv_bits: Literal[32, 16] = 32) -> SequenceState:
    layout = KVLayout(config, kv_bits)
    return SequenceState(layout, no_block, arrays=MlxKV(layout))


def in_pieces(model: Transformer, tokens: list[int], kv: SequenceState, *lengths: int) -> np.ndarray:
    """(T, V) logits of passes over as many tokens as `lengths` say."""
    ends = np.cumsum(lengths)
    assert ends[-1] == len(tokens)
    return np.concatenate(
        [every_logits(model, tokens[end - n : end], kv) for n, end in zip(lengths, ends, strict=True)]
    )


PIECES = (37, 50, 1, 1, 11)
"""Chunks that cross a key/value block and exceed the sliding windows, with single tokens between them."""


@pytest.mark.fast("qwen3-bias-relu2-*", "llama-tails-*")
@pytest.mark.parametrize(("variant", "quant"), [*QUANTS.items(), ("llama-relu", "q4"), ("qwen3", "q4")])
def test_logits_equal_those_of_reference(variant_bundle: Any, variant: str, quant: str) -> None:
    _, folder = variant_bundle(variant, quant)
    with running(folder) as reference, mlx_model(folder) as model:
        tokens = random_tokens(model.config, sum(PIECES))
        theirs = all_logits(reference, tokens, 32)
        assert error(in_pieces(model, tokens, mlx_cache(model.config), *PIECES), theirs) < 1e-4
        last = model.forward(tokens, mlx_cache(model.config))
        assert last is not None
        assert last.dtype == np.float32
        assert error(last, theirs[-1:]) < 1e-4


@pytest.mark.slow
def test_logits_of_the_shipped_model_equal_those_of_reference() -> None:
    with running(SHIPPED) as reference, mlx_model(SHIPPED) as model:
        tokens = random_tokens(model.config, 72)
        mine = in_pieces(model, tokens, mlx_cache(model.config), 70, 1, 1)
        assert error(mine, all_logits(reference, tokens, 32)) < 1e-4


def test_narrow_keys_and_values_are_rounded_as_reference_rounds_them() -> None:
    weights, tokens = RandomWeights(ALL_OPTIONS), random_tokens(ALL_OPTIONS, 70)
    exact, narrow = (all_logits(weights.load(ReferenceBackend()), tokens, bits) for bits in (32, 16))
    mine = in_pieces(weights.load(MlxFloatBackend()), tokens, mlx_cache(ALL_OPTIONS, 16), 66, 4)
    # A value near the middle of two float16 numbers may go either way, so not as close as with float32.
    assert error(mine, narrow) < 0.5 * error(exact, narrow)


def test_a_fork_and_what_it_came_from_go_their_own_ways() -> None:
    model = RandomWeights(ALL_OPTIONS).load(MlxFloatBackend())
    tokens, others = random_tokens(ALL_OPTIONS, 70), random_tokens(ALL_OPTIONS, 5, seed=8)
    kv = mlx_cache(ALL_OPTIONS)
    model.forward(tokens[:66], kv)
    fork = kv.fork()
    fork.truncate(60)
    forked = every_logits(model, others, fork)
    continued = every_logits(model, tokens[66:], kv)
    assert error(continued, every_logits(model, tokens, mlx_cache(ALL_OPTIONS))[66:]) < 1e-5
    assert error(forked, every_logits(model, tokens[:60] + others, mlx_cache(ALL_OPTIONS))[60:]) < 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_equal_those_of_reference(activation: Any) -> None:
    x = np.concatenate([np.linspace(-9, 9, 181), [-1e4, 1e4]]).astype(np.float32)
    np.testing.assert_allclose(
        np.array(activate(mx.array(x), activation)), reference_activate(x, activation), rtol=1e-5, atol=1e-6
    )


def test_what_enters_the_layers_must_have_the_shape_of_embeddings() -> None:
    model, kv = RandomWeights(ALL_OPTIONS).load(MlxFloatBackend()), mlx_cache(ALL_OPTIONS)
    with pytest.raises(UsageError, match=r"\(1, 40\)"):
        model.hidden_states([1, 2, 3], kv, x=mx.zeros((1, 40)))
    assert (kv.length, kv.blocks) == (0, [])


Parameters = dict[str, Any]
"""Arrays by names such as `1.qkv.weight`; `x` is what enters the first layer."""
PARTS = {
    "qkv": ("weight", "bias"),
    "out": ("weight", "bias"),
    "feed_forward": ("gate", "up", "down"),
}
NORMS = ("attention_norm", "feed_forward_norm")


def parameters(model: Transformer, tokens: list[int]) -> Parameters:
    """Everything in `model` that a gradient may be taken by."""
    found = {
        "x": model.embedding(tokens),
        "final_norm": model.weights.final_norm.weight,
        "head": model.weights.head.weight,
    }
    for i, layer in enumerate(model.weights.layers):
        found |= {f"{i}.{norm}": getattr(layer, norm).weight for norm in NORMS}
        if layer.head_norms is not None:
            found |= {f"{i}.{which}_norm": getattr(layer.head_norms, which).weight for which in "qk"}
        for part, names in PARTS.items():
            found |= {f"{i}.{part}.{name}": getattr(getattr(layer, part), name) for name in names}
    return {name: array for name, array in found.items() if array is not None}


def with_parameters(model: Transformer, given: Parameters) -> Transformer:
    """The model with these parameters for its own."""

    def exchanged(i: int, layer: Any) -> Any:
        changes = {
            norm: getattr(layer, norm)._replace(weight=given[f"{i}.{norm}"])
            for norm in NORMS
            if f"{i}.{norm}" in given
        }
        if f"{i}.q_norm" in given:
            q, k = (
                getattr(layer.head_norms, which)._replace(weight=given[f"{i}.{which}_norm"]) for which in "qk"
            )
            changes["head_norms"] = layer.head_norms._replace(q=q, k=k)
        for part, names in PARTS.items():
            inner = {name: given[f"{i}.{part}.{name}"] for name in names if f"{i}.{part}.{name}" in given}
            changes[part] = replace(getattr(layer, part), **inner)
        return replace(layer, **changes)

    weights = model.weights
    layers = [exchanged(i, layer) for i, layer in enumerate(weights.layers)]
    head = replace(weights.head, weight=given.get("head", weights.head.weight))
    final_norm = weights.final_norm._replace(weight=given.get("final_norm", weights.final_norm.weight))
    weights = replace(weights, layers=layers, final_norm=final_norm, head=head)
    return Transformer(model.config, model.backend, weights)


def next_token_loss(model: Transformer, tokens: list[int], split: int, x: Any = None) -> Any:
    """Mean negative log-likelihood (nats) of tokens[1:], in two passes that share keys and values."""
    kv, hidden = mlx_cache(model.config), []
    for piece in (slice(0, split), slice(split, None)):
        hidden.append(model.hidden_states(tokens[piece], kv, x=None if x is None else x[piece]))
    logits = model.logits(mx.concatenate(hidden)[:-1])
    picked = mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], axis=1)[:, 0]
    return (mx.logsumexp(logits, axis=1) - picked).mean()


def torch_gradients(folder: Path, weights: dict[str, np.ndarray], x: np.ndarray, tokens: list[int]) -> Any:
    """Loss and its gradients by our names, from torch's autograd through `transformers`."""
    torch = pytest.importorskip("torch")
    model = transformers_model(folder, weights)
    entering = torch.tensor(x[None], requires_grad=True)
    logits = model(inputs_embeds=entering).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    loss.backward()

    def gradient(*owners: Any, name: str = "weight") -> np.ndarray:
        return torch.cat([getattr(owner, name).grad for owner in owners]).numpy()

    found = {"x": entering.grad[0].numpy(), "final_norm": gradient(model.model.norm)}
    if not model.config.tie_word_embeddings:
        found["head"] = gradient(model.lm_head)
    for i, layer in enumerate(model.model.layers):
        heads, mlp = layer.self_attn, layer.mlp
        qkv = (heads.q_proj, heads.k_proj, heads.v_proj)
        found |= {
            f"{i}.attention_norm": gradient(layer.input_layernorm),
            f"{i}.feed_forward_norm": gradient(layer.post_attention_layernorm),
            f"{i}.qkv.weight": gradient(*qkv),
            f"{i}.out.weight": gradient(heads.o_proj),
            f"{i}.feed_forward.gate": gradient(mlp.gate_proj),
            f"{i}.feed_forward.up": gradient(mlp.up_proj),
            f"{i}.feed_forward.down": gradient(mlp.down_proj).T,
        }
        if heads.q_proj.bias is not None:
            found[f"{i}.qkv.bias"] = gradient(*qkv, name="bias")
        if heads.o_proj.bias is not None:
            found[f"{i}.out.bias"] = gradient(heads.o_proj, name="bias")
        if hasattr(heads, "q_norm"):
            found |= {f"{i}.q_norm": gradient(heads.q_norm), f"{i}.k_norm": gradient(heads.k_norm)}
    return loss.item(), found


@pytest.mark.fast("llama-relu", "qwen2-window-tied", "qwen3-bias-relu2")
@pytest.mark.parametrize(
    "variant", ["llama-llama3-rope", "llama-relu", "mistral-window", "qwen2-window-tied", "qwen3-bias-relu2"]
)
def test_gradients_equal_those_of_torch(variant_bundle: Any, variant: str) -> None:
    """By the embeddings and by every weight; the second pass looks at keys and values of the first."""
    folder, bundle = variant_bundle(variant, "q8")
    with mlx_model(bundle) as model:
        tokens = random_tokens(model.config, 80)
        given = parameters(model, tokens)

        def loss(changed: Parameters) -> Any:
            return next_token_loss(with_parameters(model, changed), tokens, 41, changed["x"])

        mine, gradients = mx.value_and_grad(loss)(given)
        theirs, expected = torch_gradients(folder, bundle_weights(bundle), np.array(given["x"]), tokens)
    assert mine.item() == pytest.approx(theirs, rel=1e-5)
    assert gradients.keys() - expected.keys() <= {"head"}
    for name, values in expected.items():
        assert np.abs(values).max() > 1e-6, f"{name} has no gradient to speak of"
        assert error(np.array(gradients[name]), values) < 1e-4, name


class AdaptedBackend(MlxFloatBackend):
    """One Linear gets a low-rank product beside its own: x W^T + x A^T B^T (LoRA, arXiv 2106.09685)."""

    def __init__(self, adapted: FloatLinear, a: Any, b: Any) -> None:
        super().__init__()
        self._adapted, self._a, self._b = adapted, a, b

    def linear(self, x: Any, weight: FloatLinear, norm: Norm | None = None, added: Any = None) -> Any:
        x = normed(x, norm)
        product = super().linear(x, weight, None, added)
        return product + x @ self._a.T @ self._b.T if weight is self._adapted else product


def slope(f: Callable[[float], float], step: float = 1e-2) -> float:
    """f'(0) from differences of fourth order: what float32 rounds off is small beside so large a step."""
    near, far = f(step) - f(-step), f(2 * step) - f(-2 * step)
    return (8 * near - far) / (12 * step)


@pytest.mark.parametrize("part", ["qkv", "out"])
def test_gradients_of_a_low_rank_adapter_equal_differences_of_reference(part: str) -> None:
    weights, tokens, rank = RandomWeights(ALL_OPTIONS), random_tokens(ALL_OPTIONS, 70), 3
    model, oracle = weights.load(MlxFloatBackend()), weights.load(ReferenceBackend())
    adapted = getattr(model.weights.layers[0], part)
    rng = np.random.default_rng(0)
    rows, cols = adapted.weight.shape
    a, b, da, db = (
        rng.standard_normal(shape).astype(np.float32) / 10 for shape in [(rank, cols), (rows, rank)] * 2
    )

    def loss(pair: list[Any]) -> Any:
        backend = AdaptedBackend(adapted, *pair)
        return next_token_loss(Transformer(model.config, backend, model.weights), tokens, 66)

    def oracle_loss(move: float) -> float:
        first, *others = oracle.weights.layers
        matrix = getattr(first, part)
        moved = replace(matrix, weight=matrix.weight + (b + move * db) @ (a + move * da))
        changed = replace(oracle.weights, layers=[replace(first, **{part: moved}), *others])
        logits = all_logits(Transformer(oracle.config, oracle.backend, changed), tokens, 32).astype(float)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return float(-logits[np.arange(len(tokens) - 1), tokens[1:]].mean())

    value, (ga, gb) = mx.value_and_grad(loss)([mx.array(a), mx.array(b)])
    assert value.item() == pytest.approx(oracle_loss(0.0), rel=1e-5)
    along = float((np.array(ga) * da).sum() + (np.array(gb) * db).sum())
    assert abs(along) > 1e-3, "a direction in which nothing changes shows nothing"
    assert along == pytest.approx(slope(oracle_loss), rel=1e-2)


def test_logits_are_had_without_leaving_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Backend = MlxFloatBackend()
    monkeypatch.delattr(MlxOps, "to_numpy")
    model = RandomWeights(ALL_OPTIONS).load(backend)
    logits = model.logits(model.hidden_states([1, 2, 3], mlx_cache(ALL_OPTIONS)))
    assert isinstance(logits, mx.array)
    assert logits.shape == (3, ALL_OPTIONS.vocab_size)
