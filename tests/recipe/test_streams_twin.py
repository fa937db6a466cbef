"""PyTorch trained the shipped streams, MLX trains users': both have the same logits, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.paths import SHIPPED

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")

from torch.nn import functional  # noqa: E402

from ondevice.backends.forward_batch import ForwardBatch  # noqa: E402
from ondevice.backends.kv_layout import KVLayout  # noqa: E402
from ondevice.backends.mlx_float import MlxFloatBackend  # noqa: E402
from ondevice.backends.mlx_kv import MlxKV, no_block  # noqa: E402
from ondevice.backends.mlx_ops import FloatLinear  # noqa: E402
from ondevice.bundle.reader import Bundle  # noqa: E402
from ondevice.bundle.streams import MultiStreams as MultiStreamFacts  # noqa: E402
from ondevice.converters.training.streams.loss import TrainingWindow, load_top, stream_loss  # noqa: E402
from ondevice.flash.reader import FlashReader  # noqa: E402
from ondevice.model.loading import bundle_files, load_weights  # noqa: E402
from ondevice.model.sequence_state import SequenceState  # noqa: E402
from ondevice.model.stream_loading import load_streams  # noqa: E402
from ondevice.model.transformer import Transformer  # noqa: E402
from ondevice.model.weights import LowRank, MultiStreamLayer, MultiStreamWeights  # noqa: E402
from recipe import stream_loss as recipe_loss  # noqa: E402
from recipe.export import model_of_bundle  # noqa: E402
from recipe.frozen import Frozen  # noqa: E402
from recipe.multi_stream import MultiStreams, MultiStreamSizes  # noqa: E402

TOKENS = [1, 300, 41, 957, 2048, 77, 12, 3999, 500, 6, 700, 801]
LONGER, RUN = [*TOKENS, 17, 5, 2500, 92, 431, 1100, 8, 3071, 64], range(8, 16)
"""A window, and those of its tokens whose streams are trained."""
Arrays = dict[str, Any]


def of_mlx(bundle: Bundle, reader: FlashReader) -> tuple[Transformer, Arrays]:
    """The model, and the arrays of its streams by the names of their file."""
    backend = MlxFloatBackend()
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
        return LowRank(*(FloatLinear(arrays[f"{name}.{side}"], None) for side in ("down", "up")))

    layers = tuple(
        MultiStreamLayer(*(low(f"layers.{layer}.{part}") for part in ("qkv", "out", "feed_forward")))
        for layer in range(first, model.config.num_layers)
    )
    streams = MultiStreamWeights(tuple(arrays["embeddings"]), first, layers, False, len(arrays["embeddings"]))
    transformer = Transformer(model.config, model.backend, model.weights, streams)
    layout = KVLayout(model.config, 32)
    every = range(len(TOKENS))
    kv = SequenceState(layout, no_block, arrays=MlxKV(layout))
    found = transformer.run(ForwardBatch(TOKENS), kv, streamed=every)
    return mx.stack([transformer.logits(found.streams[token]) for token in every])


@pytest.fixture
def shipped() -> Iterator[tuple[Bundle, FlashReader]]:
    bundle = Bundle.open(SHIPPED)
    with FlashReader(bundle_files(bundle, streams=True)) as reader:
        yield bundle, reader


def of_recipe(bundle: Bundle, facts: MultiStreamFacts, arrays: Arrays) -> tuple[Frozen, MultiStreams]:
    """The same model and streams there."""
    sizes = MultiStreamSizes(
        bundle.config.num_layers - facts.first_layer,
        facts.streams,
        facts.attention_rank,
        facts.feed_forward_rank,
    )
    base = Frozen(model_of_bundle(SHIPPED), torch.float32)
    streams = MultiStreams(base.shape, sizes)
    state = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    streams.load_state_dict(state)
    return base, streams


def compare(found: Arrays, streams: MultiStreams, part: float) -> None:
    """Every gradient, within `part` of its largest value."""
    for name, gradient in found.items():
        theirs = streams.get_parameter(name).grad.numpy()
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(np.array(gradient), theirs, atol=part * np.abs(theirs).max(), err_msg=name)


def test_logits_and_gradients_are_those_of_the_recipe(shipped: tuple[Bundle, FlashReader]) -> None:
    bundle, facts = shipped[0], shipped[0].streams
    assert facts is not None
    model, arrays = of_mlx(*shipped)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((len(TOKENS), facts.streams, bundle.config.vocab_size)).astype(np.float32)
    base, streams = of_recipe(bundle, facts, arrays)
    ids = torch.tensor([TOKENS])
    hidden = streams(base, base.trace(ids, streams.first_layer), torch.arange(len(TOKENS))[None])
    expected = functional.linear(hidden[0], base.head)
    np.testing.assert_allclose(np.array(mlx_logits(model, arrays)), expected.detach().numpy(), atol=2e-3)

    (expected * torch.from_numpy(weights)).sum().backward()
    found = mx.grad(lambda given: (mlx_logits(model, given) * mx.array(weights)).sum())(arrays)
    assert set(found) == {name for name, _ in streams.named_parameters()}
    compare(found, streams, 2e-3)


def entering(model: Transformer, tokens: list[int]) -> Any:
    """(tokens, D) what enters the stream layers."""
    layout = KVLayout(model.config, 32)
    kv = SequenceState(layout, no_block, arrays=MlxKV(layout))
    output, streams = model.run(ForwardBatch(tokens), kv, streamed=()), model.streams
    assert output.branches is not None
    assert streams is not None
    return output.branches[:: streams.count] - streams.embeddings[0]


@pytest.mark.slow
@pytest.mark.parametrize("resident_tokens", [0, 1, 5])
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_losses_and_their_gradients_are_those_of_the_recipe(
    shipped: tuple[Bundle, FlashReader],
    mode: Any,
    resident_tokens: int,
) -> None:
    """All of it at once, as an update has it, by every parameter.

    Both take the mean over the positions that are trained, and of all streams there (lossless) or a tenth of
    each beside the mean over all of the text's next tokens (shared). MLX takes a run of positions, the recipe
    one in every few: here those of the run. Where what a stream drafts lies behind the window, the recipe
    leaves that stream out, and MLX takes no such position, nor does this run, which goes as far as may be.
    """
    bundle = shipped[0]
    assert bundle.streams is not None
    facts = replace(bundle.streams, mode=mode)
    assert RUN.stop + facts.streams == len(LONGER) - 1
    model, arrays = of_mlx(*shipped)
    window = TrainingWindow(LONGER, entering(model, LONGER))
    top = load_top(bundle, facts.first_layer)
    loss, found = mx.value_and_grad(stream_loss)(arrays, facts, top, window, RUN, resident_tokens)

    base, streams = of_recipe(bundle, facts, arrays)
    batch = recipe_loss.Batch(
        torch.tensor([LONGER]), torch.tensor([list(RUN)]), len(LONGER), (resident_tokens,)
    )
    expected, _ = recipe_loss.Judge(base, streams, mode).loss(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    assert set(found) == {name for name, _ in streams.named_parameters()}
    compare(found, streams, 1e-4)
    if resident_tokens:
        # Masks take neurons from streams, and that makes a difference.
        unmasked = mx.grad(stream_loss)(arrays, facts, top, window, RUN)["embeddings"]
        assert mx.abs(unmasked - found["embeddings"]).max() > 0.01 * mx.abs(unmasked).max()
