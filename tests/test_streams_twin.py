"""PyTorch trained the shipped streams, MLX trains users': both have the same logits and gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")
SHIPPED = Path(__file__).resolve().parents[1] / "weights" / "small-relu"
sys.path.insert(0, str(SHIPPED))

from torch.nn import functional  # noqa: E402

from ondevice.backends.base import KVLayout  # noqa: E402
from ondevice.backends.mlx import MlxBackend, MlxLinear, block_allocator  # noqa: E402
from ondevice.bundle.reader import Bundle  # noqa: E402
from ondevice.flash.reader import FlashReader  # noqa: E402
from ondevice.model.kv_cache import KVCache  # noqa: E402
from ondevice.model.loading import bundle_files, load_weights  # noqa: E402
from ondevice.model.stream_loading import load_streams  # noqa: E402
from ondevice.model.transformer import Narrowed, Transformer  # noqa: E402
from ondevice.model.weights import LowRank, StreamLayer, StreamWeights  # noqa: E402
from recipe.export import model_of_bundle  # noqa: E402
from recipe.frozen import Frozen  # noqa: E402
from recipe.multi_stream import Streams, StreamSizes  # noqa: E402

TOKENS = [1, 300, 41, 957, 2048, 77, 12, 3999, 500, 6, 700, 801]
Arrays = dict[str, Any]


def of_mlx(bundle: Bundle, reader: FlashReader) -> tuple[Transformer, Arrays]:
    """The model, and the arrays of its streams by the names of their file."""
    backend = MlxBackend()
    weights = load_weights(bundle, reader, backend)
    streams = load_streams(bundle, reader, backend, len(bundle_files(bundle)))
    arrays: Arrays = {"embeddings": mx.stack(list(streams.embeddings))}
    for layer, adapters in enumerate(streams.layers, streams.first_layer):
        for part in ("qkv", "out", "feed_forward"):
            low = getattr(adapters, part)
            arrays |= {
                f"layers.{layer}.{part}.down": low.down.weight,
                f"layers.{layer}.{part}.up": low.up.weight,
            }
    return Transformer(bundle.config, backend, weights, streams), arrays


def mlx_logits(model: Transformer, arrays: Arrays) -> Any:
    """(tokens, streams, V) with the streams that `arrays` make."""
    first = model.streams.first_layer  # type: ignore[union-attr]

    def low(name: str) -> LowRank:
        return LowRank(*(MlxLinear(arrays[f"{name}.{side}"], None) for side in ("down", "up")))

    layers = tuple(
        StreamLayer(*(low(f"layers.{layer}.{part}") for part in ("qkv", "out", "feed_forward")))
        for layer in range(first, model.config.num_layers)
    )
    streams = StreamWeights(tuple(arrays["embeddings"]), first, layers, None, shared=False)
    transformer = Transformer(model.config, model.backend, model.weights, streams)
    layout = KVLayout(model.config, 32)
    every = range(len(TOKENS))
    found = transformer.run(
        TOKENS, KVCache(layout, block_allocator(layout)), narrow=lambda x: Narrowed(every, every)
    )
    return mx.stack([transformer.logits(found.streams[token]) for token in every])


@pytest.fixture
def shipped() -> Iterator[tuple[Bundle, FlashReader]]:
    bundle = Bundle.open(SHIPPED)
    with FlashReader(bundle_files(bundle, streams=True)) as reader:
        yield bundle, reader


def test_logits_and_gradients_are_those_of_the_recipe(shipped: tuple[Bundle, FlashReader]) -> None:
    bundle, facts = shipped[0], shipped[0].streams
    assert facts is not None
    model, arrays = of_mlx(*shipped)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((len(TOKENS), facts.streams, bundle.config.vocab_size)).astype(np.float32)

    sizes = StreamSizes(
        bundle.config.num_layers - facts.first_layer,
        facts.streams,
        facts.attention_rank,
        facts.feed_forward_rank,
        facts.pruning_rank,
    )
    base = Frozen(model_of_bundle(SHIPPED), torch.float32)
    streams = Streams(base.shape, sizes)
    state = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    streams.load_state_dict(state, strict=False)
    ids = torch.tensor([TOKENS])
    hidden = streams(base, base.trace(ids, streams.first_layer), torch.arange(len(TOKENS))[None])
    expected = functional.linear(hidden[0], base.head)
    np.testing.assert_allclose(np.array(mlx_logits(model, arrays)), expected.detach().numpy(), atol=2e-3)

    (expected * torch.from_numpy(weights)).sum().backward()
    found = mx.grad(lambda given: (mlx_logits(model, given) * mx.array(weights)).sum())(arrays)
    parameters = dict(streams.named_parameters())
    assert set(found) == {name for name in parameters if not name.startswith("pruning")}
    for name, gradient in found.items():
        theirs = parameters[name].grad.numpy()
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(np.array(gradient), theirs, atol=2e-3 * np.abs(theirs).max(), err_msg=name)
