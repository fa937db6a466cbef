"""Streams in a pass: rows that change nothing of the text, and are what the definition says they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.cpu import CpuBackend
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.token_tree import TokenTree
from ondevice.kernels import _native
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import ForwardOutput, Transformer
from ondevice.model.weights import LowRank, MultiStreamLayer, MultiStreamWeights
from ondevice.model_config import ModelConfig
from tests.backends.test_cpu import TARGETS, load, make_backend
from tests.backends.test_token_tree import PARENTS, drawn
from tests.support.made_up_streams import made_up_arrays
from tests.support.sources import ArrayLinear, RandomWeights, tiny_config

GAMMA, LAYERS, BITS = 3, 2, 16
PROMPT = drawn(9, 1)
TREE = TokenTree(PARENTS)
TOKENS = drawn(len(PARENTS), 2)


def config(**changes: Any) -> ModelConfig:
    return tiny_config(num_layers=3, hidden_act="relu", **changes)


def with_streams(model: Transformer, shared: bool = False) -> Transformer:
    """The model with made-up streams in its last layers."""
    backend, arrays = model.backend, made_up_arrays(model.config, GAMMA, LAYERS, scale=0.3, seed=5)

    def low_rank(name: str) -> LowRank:
        sides = (ArrayLinear(arrays[f"{name}.{side}"], BITS) for side in ("down", "up"))
        return LowRank(*map(backend.load_linear, sides))

    first = model.config.num_layers - LAYERS
    layers = tuple(
        MultiStreamLayer(*(low_rank(f"layers.{layer}.{part}") for part in ("qkv", "out", "feed_forward")))
        for layer in range(first, model.config.num_layers)
    )
    vectors = tuple(backend.load_vector(row) for row in arrays["embeddings"])
    streams = MultiStreamWeights(vectors, first, layers, shared, len(vectors))
    return Transformer(model.config, backend, model.weights, streams)


def reference(shared: bool = False, **changes: Any) -> Transformer:
    return with_streams(RandomWeights(config(**changes)).load(ReferenceBackend(), BITS), shared)


def cpu(target: str = "auto", segments: int = 99) -> Transformer:
    return with_streams(load(config(), make_backend(2, target), 8, segments))


def cache(model: Transformer) -> SequenceState:
    return SequenceState(KVLayout(model.config, 32 if model.backend.name == "reference" else 16))


def keep(model: Transformer, kv: SequenceState, path: Sequence[int]) -> None:
    kv.keep(len(PROMPT), path, partial(model.backend.kv_move, kv))


def run(model: Transformer, streams: Sequence[int] = ()) -> tuple[ForwardOutput, SequenceState]:
    """The tree behind the prompt, with streams at nodes `streams`."""
    kv = cache(model)
    model.forward(PROMPT, kv, "none")
    return model.run(ForwardBatch(TOKENS, TREE), kv, streamed=streams), kv


# --- an oracle: one token, one stream, one head at a time -------------------------------------------------


def oracle(model: Transformer, text: list[int]) -> Float32:
    """What the streams of the last token of `text` become, (GAMMA, D), by the definition, in float64."""
    c, weights, streams = model.config, model.weights, model.streams
    assert streams is not None
    half = c.head_dim // 2
    turns = np.array(c.ropes[0].frequencies, np.float64)

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt(np.mean(x * x) + c.norm.eps) * weight

    def rotated(x: Any, position: int) -> Any:
        cos, sin = np.cos(position * turns), np.sin(position * turns)
        a, b = x[:half], x[half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    def low(adapter: LowRank, x: Any, relu: bool = False) -> Any:
        inner = adapter.down.weight.astype(np.float64) @ x
        return adapter.up.weight.astype(np.float64) @ (np.maximum(inner, 0) if relu else inner)

    def step(x: Any, layer: int, position: int, seen: list[Any], adapters: MultiStreamLayer | None) -> Any:
        """One row through a layer; what it leaves for later rows is appended to `seen`."""
        w = weights.layers[layer]
        h = norm(x, w.attention_norm.weight)
        qkv = w.qkv.weight.astype(np.float64) @ h + (0 if adapters is None else low(adapters.qkv, h))
        heads = qkv.reshape(-1, c.head_dim)
        q, k, v = np.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads])
        seen.append(([rotated(head, position) for head in k], list(v)))
        context = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            query = rotated(q[head], position)
            scores = np.array([query @ keys[group] for keys, _ in seen]) / np.sqrt(c.head_dim)
            chances = np.exp(scores - scores.max())
            values = np.array([values[group] for _, values in seen])
            context.append(chances / chances.sum() @ values)
        mixed = np.concatenate(context)
        x = x + w.out.weight.astype(np.float64) @ mixed
        x = x + (0 if adapters is None else low(adapters.out, mixed))
        g, f = norm(x, w.feed_forward_norm.weight), w.feed_forward
        change = (np.maximum(f.gate @ g, 0) * (f.up @ g)) @ f.down
        return x + change + (0 if adapters is None else low(adapters.feed_forward, g, relu=True))

    rows = [row.astype(np.float64) for row in model.embedding(text)]
    branches: list[Any] = []
    for layer in range(c.num_layers):
        adapters = streams.layer(layer)
        if layer == streams.first_layer:
            branches = [rows[-1] + embedding for embedding in streams.embeddings]
        seen: list[Any] = []
        shared = adapters if streams.shared else None
        rows = [step(x, layer, position, seen, shared) for position, x in enumerate(rows)]
        places = range(len(rows), len(rows) + len(branches))
        branches = [step(x, layer, place, seen, adapters) for place, x in zip(places, branches, strict=True)]
    return np.array(branches)


@pytest.mark.parametrize("shared", [False, True])
def test_streams_are_what_the_definition_says(shared: bool) -> None:
    model = reference(shared)
    for nodes in ([0], [4, 9], list(range(len(TREE)))):
        found, _ = run(model, nodes)
        assert sorted(found.streams) == nodes
        for node in nodes:
            expected = oracle(model, PROMPT + [TOKENS[i] for i in TREE.path(node)])
            np.testing.assert_allclose(found.streams[node], expected, atol=1e-4)


def test_an_oracle_that_is_wrong_would_be_seen() -> None:
    model = reference()
    found, _ = run(model, [4])
    other = oracle(model, PROMPT + [TOKENS[i] for i in TREE.path(3)])
    assert np.abs(found.streams[4] - other).max() > 0.1


# --- what they leave alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_the_text_has_the_same_bits_with_and_without_streams(target: str) -> None:
    model = cpu(target)
    plain = Transformer(model.config, model.backend, model.weights)
    kv = cache(model)
    plain.forward(PROMPT, kv, "none")
    expected = plain.hidden_states(TOKENS, kv, tree=TREE).copy()
    found, streamed = run(model, [0, 3, 10])
    assert found.hidden.tobytes() == expected.tobytes()
    # And so have the keys and values of a path that stays.
    path = TREE.path(9)
    results = []
    for held in (kv, streamed):
        keep(model, held, path)
        logits = plain.forward([7, 8], held)
        assert logits is not None
        results.append(logits.tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("target", TARGETS)
def test_streams_have_the_same_bits_in_the_pass_and_after_it(target: str) -> None:
    model = cpu(target)
    for node in (0, 4, 9):
        found, kv = run(model, [1, node] if node > 1 else [node])
        expected = found.streams[node].copy()
        branches = found.branches[GAMMA * node : GAMMA * (node + 1)].copy()  # type: ignore[index]
        keep(model, kv, TREE.path(node))
        length = kv.length
        assert model.stream_states(branches, kv).tobytes() == expected.tobytes()
        assert kv.length == length


@pytest.mark.parametrize("shared", [False, True])
def test_streams_have_the_bits_of_ops_where_layers_run_in_one_call(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    config = tiny_config(num_layers=3, intermediate_size=200, attention_bias=True)
    adapted, run_layers = list[tuple[int, int]](), _native.run_layers

    def counted(runner: _native.Runner, layers: Any, x: Float32, *others: Any) -> None:
        adapted.append((len(layers), len(x) - others[-2]))
        run_layers(runner, layers, x, *others)

    def results(backend: CpuBackend) -> list[bytes]:
        model = with_streams(load(config, backend, 4), shared)
        output, kv = run(model, [0, 4, 9])
        rows = [output.hidden, output.branches, *(output.streams[node] for node in (0, 4, 9))]
        kept = [np.array(row).tobytes() for row in rows]
        keep(model, kv, TREE.path(9))
        return [*kept, model.stream_states(np.array(output.branches)[-GAMMA:], kv).tobytes()]

    by_ops = make_backend()
    monkeypatch.setattr(by_ops, "plain_layers", lambda config, layers, adapters: None)
    expected = results(by_ops)
    monkeypatch.setattr(_native, "run_layers", counted)
    assert results(make_backend()) == expected
    # Both stream layers: the tree with the streams of three nodes, and streams alone.
    assert adapted[-2:] == [(LAYERS, shared * len(TREE) + 3 * GAMMA), (LAYERS, GAMMA)]


def test_the_last_token_of_a_prompt_has_streams_too() -> None:
    model = cpu()
    kv = cache(model)
    found = model.run(ForwardBatch(PROMPT, last_only=True), kv)
    assert found.branches is not None
    assert found.branches.shape == (GAMMA, model.config.hidden_size)
    after = model.stream_states(found.branches.copy(), kv).copy()
    whole = cache(model)
    last = len(PROMPT) - 1
    inside = model.run(ForwardBatch(PROMPT), whole, streamed=[last])
    assert after.tobytes() == inside.streams[last].tobytes()
    assert found.hidden.tobytes() == inside.hidden[-1:].tobytes()


def test_shared_adapters_are_the_text_s_own() -> None:
    model, plain = reference(shared=True), reference()
    kvs = [cache(model) for _ in range(2)]
    shared, base = (m.forward(PROMPT, kv) for m, kv in zip((model, plain), kvs, strict=True))
    assert shared is not None
    assert base is not None
    assert np.abs(shared - base).max() > 0.1
    # However the text is split.
    split = cache(model)
    model.forward(PROMPT[:4], split, "none")
    np.testing.assert_allclose(model.forward(PROMPT[4:], split), shared, atol=1e-4)


def test_a_pass_over_resident_neurons_streams_nothing() -> None:
    """In dense mode, the neurons that aren't in memory count as nothing."""
    model, whole = cpu(segments=1), cpu()
    sources = [layer.neurons for layer in model.backend.feed_forwards]  # type: ignore[attr-defined]
    kvs = [cache(model) for _ in range(2)]
    batch = ForwardBatch(PROMPT, resident_only=True)
    some = model.run(batch, kvs[0]).hidden
    assert [source.streams for source in sources] == [0, 0, 0]
    assert np.abs(some - whole.run(batch, kvs[1]).hidden).max() > 0.01
