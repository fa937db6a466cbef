"""Keys and values in MLX arrays: what `reference` makes of them, in place, and as large as the plan counts.

On MLX's CPU device, where equal bits are promised.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.backends.kv_layout import BLOCK_TOKENS
from ondevice.backends.reference import ReferenceBackend, _stored
from ondevice.backends.token_tree import TokenTree
from ondevice.budget.mlx_memory import MLX_CACHE_BYTES, MlxMemory
from ondevice.converters.convert import convert
from ondevice.errors import BudgetError
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model_config import ModelConfig
from tests.support.engines import error, random_tokens
from tests.support.models import write_checkpoint
from tests.support.paths import SHIPPED
from tests.support.sources import tiny_config

# A wheel whose shared libraries are missing fails to import too, and is as good as absent.
mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from ondevice.backends import mlx_kv  # noqa: E402
from ondevice.backends.mlx_kv import MlxKV, no_block  # noqa: E402
from ondevice.backends.mlx_ops import MlxOps  # noqa: E402

pytestmark = pytest.mark.usefixtures("mlx_on_cpu")
HEADS = [(4, 4, 8), (6, 2, 10), (8, 1, 64), (2, 2, 128)]
"""Queries' heads, those of keys and values, and their width."""
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 5, 8, 2]


def mlx_cache(config: ModelConfig, kv_bits: Any) -> SequenceState:
    layout = KVLayout(config, kv_bits)
    return SequenceState(layout, no_block, arrays=MlxKV(layout))


def stored_bytes(kv: SequenceState) -> int:
    """Of all arrays."""
    return sum(part.nbytes for layer in kv.arrays._layers for part in layer)


def drawn(config: ModelConfig, tokens: int, seed: int = 3) -> np.ndarray:
    """(T, (H + 2 KVH) Dh) queries, keys and values, some of them large."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, config.qkv_size)) * np.exp(rng.standard_normal((tokens, 1)))
    return values.astype(np.float32)


def attended(
    kv: SequenceState,
    qkv: np.ndarray,
    position: int,
    *,
    layer: int = 1,
    window: int = 0,
    tree: TokenTree | None = None,
    sinks: np.ndarray | None = None,
    backend: Any = None,
) -> np.ndarray:
    """(T, H Dh) after rows were stored from `position` on; nothing is turned, as that would round."""
    kv.reserve(position + len(qkv))
    width = kv.layout.config.head_dim // 2
    turns = np.ones((len(qkv), width), np.float32), np.zeros((len(qkv), width), np.float32)
    backend = backend or MlxOps()
    spec = replace(kv.layout.config.layers[layer].attention, window=window)
    given = qkv.copy() if isinstance(backend, ReferenceBackend) else mx.array(qkv)
    own = None if sinks is None else backend.load_vector(sinks)
    return np.array(backend.attend(given, kv, layer, position, *turns, spec, None, tree, own))


def in_chunks(kv: SequenceState, qkv: np.ndarray, lengths: list[int], **options: Any) -> np.ndarray:
    ends = np.cumsum(lengths).tolist()
    assert ends[-1] == len(qkv)
    return np.concatenate(
        [attended(kv, qkv[end - n : end], end - n, **options) for n, end in zip(lengths, ends, strict=True)]
    )


def held(kv: SequenceState, length: int, layer: int = 1) -> list[np.ndarray]:
    """Keys and values as they are read: (KVH, length, Dh) each."""
    return [np.array(side) for side in kv.arrays.read(layer, length)]


def same(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.fast("6-2-10-16-*", "4-4-8-8-*", "8-1-64-16-5-True", "2-2-128-32-*")
@pytest.mark.parametrize(
    ("window", "has_sinks"), [(0, False), (1, False), (5, False), (70, False), (0, True), (5, True)]
)
@pytest.mark.parametrize("kv_bits", [32, 16, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention_equals_the_reference_on_the_same_stored_keys(
    heads: int, kv_heads: int, width: int, kv_bits: Any, window: int, has_sinks: bool
) -> None:
    """Stored to the bit as `reference` stores them, and read so inside their own chunk too."""
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    qkv, tokens = drawn(config, 150), 150
    qkv[7] = 0  # a largest value of zero has no scale
    theirs = SequenceState(KVLayout(config, kv_bits))
    sinks = np.linspace(-1, 5, heads, dtype=np.float32) if has_sinks else None
    expected = attended(theirs, qkv, 0, window=window, sinks=sinks, backend=ReferenceBackend())
    mine = mlx_cache(config, kv_bits)
    found = in_chunks(mine, qkv, [1, 63, 3, 83], window=window, sinks=sinks)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    assert same(held(mine, tokens), [np.stack(side) for side in _stored(theirs, 1, tokens)])


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_half_precision_is_read_as_it_is_stored(heads: int, kv_heads: int, width: int, kv_bits: Any) -> None:
    """As on a GPU: queries and scores are rounded, large ones by much; what has 16 bits isn't copied."""
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    qkv = drawn(config, 150)
    expected = attended(SequenceState(KVLayout(config, kv_bits)), qkv, 0, backend=ReferenceBackend())
    kv = mlx_cache(config, kv_bits)
    kv.arrays.dtype = mx.float16
    found = in_chunks(kv, qkv, [1, 63, 3, 83])
    assert found.dtype == np.float32
    assert 0 < error(found, expected) < 4e-2
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(kv.arrays.read(1, 150))
    assert (mx.get_peak_memory() > before) == (kv_bits == 8)


@pytest.mark.fast("4-4-8-0-16", "6-2-10-90-8")
@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_no_bit_depends_on_chunks(heads: int, kv_heads: int, width: int, window: int, kv_bits: Any) -> None:
    config = tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=width)
    qkv = drawn(config, 700)
    whole = in_chunks(mlx_cache(config, kv_bits), qkv, [700], window=window)
    for lengths in ([256, 256, 188], [37] * 18 + [34], [640] + [1] * 60):
        assert np.array_equal(in_chunks(mlx_cache(config, kv_bits), qkv, lengths, window=window), whole)


@pytest.mark.fast("5-6-16", "60-0-8")
@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("prompt", [5, 60])
def test_a_node_has_the_bits_of_its_path_and_the_path_that_stays_those_of_a_text(
    prompt: int, window: int, kv_bits: Any
) -> None:
    config, tree = tiny_config(), TokenTree(PARENTS)
    qkv, after = drawn(config, prompt + len(tree)), drawn(config, 3, seed=4)
    ops = MlxOps()
    for node in range(len(tree)):
        path = tree.path(node)
        plain, kept = mlx_cache(config, kv_bits), mlx_cache(config, kv_bits)
        text = np.concatenate([qkv[:prompt], qkv[prompt:][path]])
        for layer in range(config.num_layers):
            expected = attended(plain, text, 0, layer=layer, window=window)[-1]
            attended(kept, qkv[:prompt], 0, layer=layer, window=window)
            nodes = attended(kept, qkv[prompt:], prompt, layer=layer, window=window, tree=tree)
            assert np.array_equal(nodes[node], expected)
        kept.extend(range(prompt + len(tree)))
        kept.keep(prompt, path, partial(ops.kv_move, kept))
        assert kept.tokens == [*range(prompt), *(prompt + it for it in path)]
        for layer in range(config.num_layers):
            assert same(held(kept, len(text), layer), held(plain, len(text), layer))
            found = attended(kept, after, len(text), layer=layer, window=window)
            assert np.array_equal(found, attended(plain, after, len(text), layer=layer, window=window))


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_forks_and_truncated_caches_go_their_own_ways(kv_bits: Any) -> None:
    config = tiny_config()
    qkv, other = drawn(config, 140), drawn(config, 30, seed=9)
    expected = in_chunks(mlx_cache(config, kv_bits), qkv, [140])
    changed = in_chunks(mlx_cache(config, kv_bits), np.concatenate([qkv[:50], other]), [80])
    kv = mlx_cache(config, kv_bits)
    attended(kv, qkv[:130], 0)
    kv.extend(range(130))
    fork, cut = kv.fork(), kv.fork()
    cut.truncate(50)
    before = held(kv, 130)
    assert np.array_equal(attended(cut, other, 50), changed[50:])
    attended(fork, other, 130)
    assert same(held(kv, 130), before), "what a fork writes reached what it came from"
    written = held(fork, 160)
    assert np.array_equal(attended(kv, qkv[130:], 130), expected[130:])
    assert same(held(fork, 160), written), "what is written after a fork reached it"
    kv.truncate(0)
    assert same(held(fork, 160), written)


@pytest.mark.parametrize("kv_bits", [32, 16, 8])
def test_arrays_take_what_the_blocks_say(kv_bits: Any) -> None:
    """Counted by the cache, by the arrays, and by MLX."""
    config = tiny_config(num_layers=3, num_kv_heads=4, head_dim=128)
    kv = mlx_cache(config, kv_bits)
    pages = 4096 * 2 * len(kv.arrays._layers) * len(kv.arrays._layers[0])
    assert pages < kv.layout.block_bytes / 2
    start = mx.get_active_memory()

    def check(*caches: SequenceState) -> None:
        nbytes = sum(cache.nbytes for cache in caches)
        assert sum(stored_bytes(cache) for cache in caches) == nbytes
        mx.eval([cache.arrays._layers for cache in caches])
        mx.synchronize()  # CUDA frees what it computed with a little later
        assert abs(mx.get_active_memory() - start - nbytes) < pages

    for tokens, blocks in ((1, 1), (64, 1), (65, 2), (300, 5)):
        kv.reserve(tokens)
        assert len(kv.blocks) == blocks
        check(kv)
    attended(kv, drawn(config, 300), 0)
    kv.extend(range(300))
    fork = kv.fork()
    fork.truncate(200)
    check(kv, fork)
    kv.truncate(65)
    check(kv, fork)
    kv.truncate(0)
    check(fork)
    fork.truncate(0)
    check()


def test_a_refused_block_and_refused_memory_leave_the_cache_as_it_was(monkeypatch: Any) -> None:
    config, out = tiny_config(), []

    def allocate(nbytes: int) -> None:
        if len(out) == 3:
            raise BudgetError("no more", required_bytes=1)
        out.append(nbytes)

    layout = KVLayout(config, 16)
    kv = SequenceState(layout, allocate, lambda block: out.pop(), MlxKV(layout))
    attended(kv, drawn(config, 128), 0)
    kv.extend(range(128))
    before = held(kv, 128)
    with pytest.raises(BudgetError):
        kv.reserve(4 * BLOCK_TOKENS)
    with pytest.raises(BudgetError):
        kv.fork()

    def refused(*arrays: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(mlx_kv, "require_memory", refused)
    with pytest.raises(MemoryError):
        kv.reserve(3 * BLOCK_TOKENS)
    kv.tokens = kv.tokens[:64]  # a fork cuts what it doesn't need
    with pytest.raises(MemoryError):
        kv.fork()
    monkeypatch.undo()
    assert (len(kv.blocks), len(out)) == (2, 2)
    assert same(held(kv, 128), before)
    kv.reserve(3 * BLOCK_TOKENS)
    assert stored_bytes(kv) == kv.nbytes == 3 * layout.block_bytes


def test_a_token_is_written_in_place_and_growing_copies_a_layer_at_a_time() -> None:
    config = tiny_config(num_layers=4, num_heads=2, num_kv_heads=2, head_dim=128)
    kv, qkv = mlx_cache(config, 32), drawn(config, 4096)
    for layer in range(config.num_layers):
        kv.reserve(4096)
        attended(kv, qkv[:1], 0, layer=layer)
    array = kv.nbytes // (2 * config.num_layers)
    for layer in range(config.num_layers):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        attended(kv, qkv[4000:4001], 4000, layer=layer)
        assert mx.get_peak_memory() - before < array // 4, "a token's pass copied what is stored"
        kv.arrays.move(4000, 17)
        mx.eval(kv.arrays._layers)
        assert mx.get_peak_memory() - before < array // 4, "moving a place copied what is stored"
    mx.reset_peak_memory()
    kv.reserve(4097)
    for layer in range(config.num_layers):
        attended(kv, qkv[4000:4001], 4000, layer=layer)
    more = mx.get_peak_memory() - before
    assert array < more < kv.layout.block_bytes + 2 * array + array // 4


@pytest.fixture(scope="module")
def long_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys and values and attention are what a pass over it takes."""
    folder = tmp_path_factory.mktemp("long")
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    source = write_checkpoint(
        folder / "checkpoint", intermediate_size=64, vocab_size=128, max_position_embeddings=4096, **shape
    )
    return convert(source, folder / "bundle", "q8")


def loaded(folder: Path, backend: str = "mlx", **options: Any) -> Any:
    options = {
        "speculation": "off",
        "io": "buffered",
        "memory_pressure": "off",
        "sparsity": "dense",
    } | options
    return ondevice.load(folder, backend=backend, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "kv_bits"), [(8, 16), (128, 8)])
def test_what_a_long_context_takes_is_what_is_planned(long_bundle: Path, chunk: int, kv_bits: Any) -> None:
    context = 800
    with loaded(long_bundle, kv_bits=kv_bits, max_context=context, prefill_chunk=chunk) as model:
        config, engine, plan = model.config, model._engine, model.plan
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model.generate(tokens=random_tokens(config, context - 10), max_tokens=5)
        taken = mx.get_peak_memory() - before - plan.kv_cache_bytes
        memory = MlxMemory(config, engine._bundle.quant, engine._runtime, operand_bytes=4)
        planned = memory.activation_bytes(chunk) - MLX_CACHE_BYTES
        assert 0.4 * planned < taken < planned


def test_the_engine_counts_what_its_caches_hold(chat_bundle: Path) -> None:
    with loaded(chat_bundle, kv_bits=8) as model:
        engine = model._engine

        def held() -> list[int]:
            found = [stored_bytes(kv) for kv in engine.kv.of_sessions.values()]
            assert engine.kv.nbytes == sum(found) == sum(kv.nbytes for kv in engine.kv.of_sessions.values())
            return found

        session = model.session()
        session.respond("a" * 100, max_tokens=4)
        other = session.fork()
        assert held() == [2 * engine.kv.layout.block_bytes] * 2
        turns = [branch.respond("b" * 20, max_tokens=4).tokens for branch in (session, other)]
        assert turns[0] == turns[1]
        assert held() == [3 * engine.kv.layout.block_bytes] * 2
        model._owner.call(lambda: engine.kv._drop_idle(0))
        assert held() == [0, 0]
        assert session.respond("c", max_tokens=4).tokens == other.respond("c", max_tokens=4).tokens


TOLERANCE = 1e-2
"""Of logits at 8 bits, of the largest: a value near the middle of two codes goes either way, and a code is a
127th of the largest of its head. Most texts have none such, and are as near as float32."""


def check_8_bits(folder: Path) -> None:
    found = {}
    for backend, kv_bits in (("reference", 8), ("reference", 16), ("mlx", 8)):
        with loaded(folder, backend, kv_bits=kv_bits, prefill_chunk=37) as model:
            found[backend, kv_bits] = model.logits(random_tokens(model.config, 100))
    theirs = found["reference", 8]
    assert error(found["mlx", 8], theirs) < min(TOLERANCE, 0.3 * error(found["reference", 16], theirs))


@pytest.mark.fast("mistral-window-q8")
@pytest.mark.parametrize(
    ("variant", "quant"), [("llama-tails", "q4"), ("mistral-window", "q8"), ("qwen3", "f16")]
)
def test_logits_at_8_bits_are_those_of_reference(variant_bundle: Any, variant: str, quant: str) -> None:
    check_8_bits(variant_bundle(variant, quant)[1])


def test_logits_at_8_bits_with_heads_of_8_are_those_of_reference(stories_bundle: Path) -> None:
    check_8_bits(stories_bundle)


@pytest.mark.fast("streams")
@pytest.mark.parametrize("drafter", ["lookup", "streams"])
def test_drafts_change_no_bit_at_8_bits(drafter: str) -> None:
    """Of the SHIPPED model: trees, paths that stay, and streams behind them."""
    prompt, texts = "It was a cold morning, and the old man, the old man went to the", []
    for speculation in ("off", drafter):
        with loaded(SHIPPED, speculation=speculation, kv_bits=8) as model:
            found = model.generate(prompt, max_tokens=16)
            texts.append(found.tokens)
    assert texts[0] == texts[1]
    assert found.stats.drafting.drafts >= 1
