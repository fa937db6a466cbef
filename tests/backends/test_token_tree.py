"""A tree of tokens in one pass: every node's result is that of its path as a text, and one path can stay."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Float32
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.reference import ReferenceBackend
from ondevice.backends.token_tree import MAX_DEPTH, TokenTree
from ondevice.errors import UsageError
from ondevice.kernels import _native
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from tests.backends.test_cpu import TARGETS, load, make_backend
from tests.support.sources import RandomWeights, every_block, tiny_config, with_sinks

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 5, 8, 2]


def random_tree(nodes: int, seed: int) -> TokenTree:
    """A node follows one of the last few, or the root."""
    rng = np.random.default_rng(seed)
    return TokenTree([-1] + [int(rng.integers(max(0, node - 4), node)) for node in range(1, nodes)])


def hidden(model: Transformer, prompt: list[int], tokens: list[int], tree: TokenTree, bits: Any) -> Float32:
    kv = SequenceState(KVLayout(model.config, bits))
    model.forward(prompt, kv, "none")
    return model.backend.to_numpy(model.hidden_states(tokens, kv, tree=tree)).copy()


def along_paths(
    model: Transformer, prompt: list[int], tokens: list[int], tree: TokenTree, bits: Any
) -> Float32:
    rows = []
    for node in range(len(tokens)):
        kv = SequenceState(KVLayout(model.config, bits))
        text = prompt + [tokens[ancestor] for ancestor in tree.path(node)]
        rows.append(model.backend.to_numpy(model.hidden_states(text, kv))[-1].copy())
    return np.array(rows)


def drawn(count: int, seed: int, vocab_size: int = 50) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, count)]


def test_what_a_node_sees() -> None:
    tree = TokenTree([-1, 0, 0, 1])
    assert tree.depths.tolist() == [0, 1, 1, 2]
    assert tree.path(3) == [0, 1, 3]
    assert not tree.is_chain
    assert tree.visible(1, 0).astype(int).tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]
    assert tree.visible(1, 2).astype(int).tolist() == [
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1],
    ]
    assert TokenTree([-1, 0, 1]).is_chain
    assert not TokenTree([-1, -1]).is_chain


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 5], [-2], list(range(-1, MAX_DEPTH + 1))])
def test_parents_that_form_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="node"):
        TokenTree(parents)


@pytest.mark.fast("heads0-64-8", "heads1-57-16")
@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("prompt_tokens", [1, 40, 57, 63, 64, 90, 128])
@pytest.mark.parametrize("heads", [{}, {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64}, None])
def test_every_node_has_the_bits_of_its_path(
    prompt_tokens: int, kv_bits: Any, heads: dict[str, int] | None
) -> None:
    """heads: changed sizes; None: a model of every kind of block, with attention sinks."""
    config = with_sinks(every_block())
    if heads is not None:
        config = tiny_config(qk_norm=True, layer_windows=(0, 11), **heads)
    prompt = drawn(prompt_tokens, 1)
    # A path as long as one may be, left near its end and near its beginning, and gone back to.
    deep = TokenTree([*range(-1, MAX_DEPTH), MAX_DEPTH - 2, 3, MAX_DEPTH - 1, MAX_DEPTH + 2])
    for seed, tree in enumerate((TokenTree(PARENTS), random_tree(40, 3), TokenTree([-1, -1, 0]), deep)):
        tokens = drawn(len(tree), seed)
        results = {
            hidden(load(config, make_backend(threads, target), 4), prompt, tokens, tree, kv_bits).tobytes()
            for target in TARGETS
            for threads in (1, 2)
        }
        expected = along_paths(load(config, make_backend(), 4), prompt, tokens, tree, kv_bits)
        assert results == {expected.tobytes()}


def test_the_reference_says_the_same() -> None:
    config = tiny_config(layer_windows=(0, 11))
    model = RandomWeights(config).load(ReferenceBackend(), 16)
    prompt, tree = drawn(70, 1), random_tree(20, 4)
    tokens = drawn(len(tree), 2)
    found = hidden(model, prompt, tokens, tree, 16)
    np.testing.assert_allclose(found, along_paths(model, prompt, tokens, tree, 16), rtol=1e-4, atol=1e-4)


@pytest.mark.fast("*-cpu", "5-8-reference")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("prompt_tokens", [5, 60])
def test_the_path_that_stays_is_what_plain_decoding_leaves(
    prompt_tokens: int, kv_bits: Any, backend: str
) -> None:
    config = tiny_config()
    model = (
        load(config, make_backend(), 8)
        if backend == "cpu"
        else RandomWeights(config).load(ReferenceBackend(), 8)
    )
    prompt, tree = drawn(prompt_tokens, 1), TokenTree(PARENTS)
    tokens = drawn(len(tree), 2)
    for node in range(len(tree)):
        path = tree.path(node)
        plain, kept = SequenceState(KVLayout(config, kv_bits)), SequenceState(KVLayout(config, kv_bits))
        model.forward(prompt + [tokens[ancestor] for ancestor in path], plain, "none")
        model.forward(prompt, kept, "none")
        model.hidden_states(tokens, kept, tree=tree)
        kept.keep(len(prompt), path, partial(model.backend.kv_move, kept))
        assert kept.tokens == plain.tokens
        assert len(kept.blocks) == len(plain.blocks)
        expected, found = model.forward([7, 8], plain), model.forward([7, 8], kept)
        assert expected is not None
        assert found is not None
        if backend == "cpu":
            assert found.tobytes() == expected.tobytes()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_tree_has_as_many_nodes_as_tokens() -> None:
    model = load(tiny_config(), make_backend(), 8)
    kv = SequenceState(KVLayout(model.config, 8))
    with pytest.raises(UsageError, match="3 nodes"):
        model.hidden_states([1, 2], kv, tree=TokenTree([-1, 0, 0]))
    assert kv.length == 0


def test_the_kernel_refuses_what_is_no_tree() -> None:
    runner, q, out = make_backend().runner, np.zeros((2, 1, 8), np.float32), np.zeros((2, 8), np.float32)
    blocks = np.array([], dtype=np.uint64)
    for parents, depths in (([0, 0], [0, 1]), ([-1, 0], [0, 0]), ([-1], [0])):
        tree = (np.array(parents, np.int32), np.array(depths, np.int32))
        with pytest.raises(ValueError, match=r"parents|parent|depths|past"):
            _native.testing.attention(runner, q, blocks, 0, 16, 1, 0, 0, tree, out)
