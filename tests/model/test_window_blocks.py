"""Windowed layers keep a ring of their last blocks; a text that goes back has the bits that it has alone."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.backends.base import Bytes
from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.plan import plan_memory
from ondevice.config import QuantConfig, RuntimeConfig
from ondevice.converters.architectures.registry import read_config
from ondevice.errors import BudgetError
from ondevice.model.sequence_state import SequenceState, allocate_block
from ondevice.model.transformer import Transformer
from ondevice.prompt_cache.store import PromptCache
from tests.backends.test_cpu import load, make_backend
from tests.backends.test_token_tree import drawn, random_tree
from tests.support.sources import tiny_config

GEMMA_3_1B: dict[str, Any] = {
    **{"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4},
    **{"num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262_144},
    **{"max_position_embeddings": 32_768, "sliding_window": 512, "query_pre_attn_scalar": 256},
    **{
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
}
GPT_OSS_20B: dict[str, Any] = {
    **{"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201_088},
    **{"max_position_embeddings": 131_072, "sliding_window": 128, "num_local_experts": 32},
    **{"num_experts_per_tok": 4, "rope_theta": 150_000.0, "swiglu_limit": 7.0, "attention_bias": True},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
MISTRAL_7B: dict[str, Any] = {
    **{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000, "rope_theta": 1e4},
    **{"max_position_embeddings": 32_768, "sliding_window": 4096, "rms_norm_eps": 1e-5},
    **{"hidden_act": "silu", "tie_word_embeddings": False},
}


@pytest.mark.parametrize(
    ("values", "chunk", "context", "megabytes", "of_all"),
    [
        (GEMMA_3_1B, 256, 4096, 35.5, 109.1),
        (GEMMA_3_1B, 64, 4096, 31.2, 109.1),
        (GEMMA_3_1B, 256, 512, 13.63, 13.63),
        (GPT_OSS_20B, 512, 4096, 118.0, 201.3),
        (MISTRAL_7B, 256, 4096, 536.9, 536.9),
        (MISTRAL_7B, 256, 32_768, 578.8, 4295.0),
    ],
)
def test_what_published_models_plan(
    values: dict[str, Any], chunk: int, context: int, megabytes: float, of_all: float
) -> None:
    runtime = RuntimeConfig(speculation="off", max_context=context, prefill_chunk=chunk)
    memory = CpuMemory(read_config(values), QuantConfig(4), runtime)
    plan = plan_memory(memory, budget_bytes=0, process_bytes=0)
    assert plan.kv_cache_bytes / 1e6 == pytest.approx(megabytes, rel=2e-3)
    assert KVLayout(memory.config).nbytes(context) / 1e6 == pytest.approx(of_all, rel=2e-3)
    # Where every layer has a window, blocks of no layer stand for the tokens.
    blocks = 64 * memory.kv.blocks(context)
    assert plan.kv_cache_bytes + plan.kv_marks_bytes <= KVLayout(memory.config).nbytes(context) + blocks
    assert plan.full_bytes - plan.resident_budget_bytes - plan.embedding_bytes == plan.kv_marks_bytes


CONFIG = tiny_config(num_layers=4, layer_windows=(70, 0, 11, 70), max_context=2048)
CHUNK = 40


class Memory:
    """An allocator that counts, and refuses beyond a limit."""

    def __init__(self) -> None:
        self.nbytes, self.limit = 0, 1 << 40
        self.asks_back: Callable[[], object] = lambda: None

    def allocate(self, nbytes: int) -> Bytes:
        self.asks_back()
        if self.nbytes + nbytes > self.limit:
            raise BudgetError("no more", required_bytes=nbytes)
        self.nbytes += nbytes
        block = allocate_block(nbytes)
        block[:] = 0xFF  # NaN, until something is written.
        return block

    def release(self, block: Bytes) -> None:
        self.nbytes -= block.nbytes


def state(kv_bits: Any = 16, memory: Memory | None = None) -> SequenceState:
    memory = memory or Memory()
    layout = KVLayout(CONFIG, kv_bits, pass_tokens=CHUNK)
    return SequenceState(layout, memory.allocate, memory.release)


def model() -> Transformer:
    return load(CONFIG, make_backend(2), 4)


def run(transformer: Transformer, tokens: list[int], kv: SequenceState) -> bytes:
    """The last logits behind `tokens`, of which kv has some."""
    logits = None
    while kv.length < len(tokens):
        logits = transformer.forward(tokens[kv.length : kv.length + CHUNK], kv)
    assert logits is not None
    return logits.tobytes()


def test_a_text_keeps_a_ring() -> None:
    memory = Memory()
    kv = state(memory=memory)
    assert kv.windows is not None
    layout = kv.layout
    assert (layout.ring, layout.windows) == (4, (70, 0, 11, 70))
    assert layout.block_bytes + layout.window_block_bytes == KVLayout(CONFIG).block_bytes
    for length in range(CHUNK, 1000, CHUNK):
        kv.reserve(length)
        kv.extend([1] * CHUNK)
        assert kv.nbytes == memory.nbytes == layout.nbytes(length)
    # Back as far as the ring goes, and else to nothing.
    assert [kv.nearest(n) for n in (960, 900, 773, 772, 300)] == [960, 900, 773, 0, 0]
    kv.truncate(850)
    assert (kv.length, kv.nearest(772)) == (850, 0)
    kv.truncate(500)
    assert (kv.length, kv.nbytes, memory.nbytes) == (0, 0, 0)


def test_marks_are_kept_while_there_is_memory() -> None:
    memory = Memory()
    kv = state(memory=memory)
    losses: list[int] = []
    kv.before_loss = lambda kv, stop: losses.append(stop)
    for length in range(CHUNK, 1001, CHUNK):
        kv.mark([200, 360] if length > 160 else [])
        kv.reserve(length)
        kv.extend([1] * CHUNK)
    marks = kv.layout.marks_bytes(1000)
    assert kv.layout.nbytes(1000) < memory.nbytes <= kv.layout.nbytes(1000) + marks
    assert losses == sorted(losses)
    assert losses[-1] < 1000 - 70
    assert [kv.nearest(n) for n in (1000, 700, 370, 250, 199)] == [1000, 384, 370, 250, 199]
    fork = kv.fork()
    assert (fork.length, fork.nearest(700)) == (1000, 0)
    # What is missing is taken from the marks, and the text goes on.
    memory.limit = memory.nbytes
    for length in range(1040, 1200, CHUNK):
        kv.reserve(length)
        kv.extend([1] * CHUNK)
    assert kv.nearest(700) == 0
    memory.limit = memory.nbytes + kv.layout.block_bytes
    with pytest.raises(BudgetError):
        kv.reserve(2000)
    assert kv.nearest(kv.length) == kv.length
    fork.truncate(0)
    kv.truncate(0)
    assert memory.nbytes == 0


def test_idle_memory_keeps_all_until_it_is_wanted() -> None:
    kv = state()
    kv.is_idle = lambda nbytes: True
    for length in range(CHUNK, 1001, CHUNK):
        kv.reserve(length)
        kv.extend([1] * CHUNK)
    assert [kv.nearest(n) for n in (999, 300, 5)] == [999, 300, 5]
    kv.mark([300])
    assert kv.forget_past(marks=False)
    assert [kv.nearest(n) for n in (999, 320, 5)] == [999, 320, 0]
    assert not kv.forget_past(marks=False)
    assert kv.forget_past()
    assert not kv.forget_past()
    assert (kv.nearest(320), kv.nbytes) == (0, kv.layout.nbytes(1000))


def test_an_allocator_may_take_what_is_about_to_be_given_up() -> None:
    """It asks the text that asks it: what a full pool does."""
    memory = Memory()
    kv = state(memory=memory)
    kv.is_idle = lambda nbytes: kv.length < 500
    for length in range(CHUNK, 1001, CHUNK):
        if length > 500:
            memory.asks_back = kv.forget_past
        kv.reserve(length)
        assert kv.holds_windows(max(0, kv.length - 70), length)
        kv.extend([1] * CHUNK)
    assert kv.nbytes == memory.nbytes == kv.layout.nbytes(1000)


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_every_way_back_has_the_bits_of_a_text_alone(kv_bits: Any) -> None:
    """A random walk: chunks, cuts, marks, forks, drafts of which a path stays, memory that runs short."""
    transformer, rng, tokens = model(), np.random.default_rng(kv_bits), drawn(1200, 1)
    memory = Memory()
    kv, text, back = state(kv_bits, memory), tokens[:700], [0, 0]
    steps: list[Callable[[], None]] = []

    def cut() -> None:
        nonlocal text
        place = int(rng.integers(max(1, len(text) - int(rng.choice([60, 300, 900]))), len(text)))
        kv.truncate(min(place, kv.length))
        back[kv.length == 0] += 1
        text = text[:place] + drawn(int(rng.integers(1, 200)), place)
        text = text[:1000]

    def mark() -> None:
        kv.mark_prompt(len(text))

    def fork() -> None:
        nonlocal kv
        copy = kv.fork(int(rng.integers(kv.length // 2, kv.length + 1)))
        kv.truncate(0)
        kv = copy

    def draft() -> None:
        nonlocal text
        if kv.length < len(text):
            run(transformer, text, kv)
        tree = random_tree(20, len(text))
        start, nodes = kv.length, drawn(20, len(text))
        transformer.hidden_states(nodes, kv, tree=tree)
        path = tree.path(int(rng.integers(20)))
        kv.keep(start, path, partial(transformer.backend.kv_move, kv))
        text = [*text, *(nodes[node] for node in path), 3]

    def shorten() -> None:
        kv.forget_past(marks=bool(rng.integers(2)))

    steps += [cut, cut, mark, fork, draft, draft, shorten]
    # As a pool that runs short does for every block.
    memory.asks_back = lambda: rng.integers(4) or kv.forget_past(marks=bool(rng.integers(2)))
    for step in range(40):
        kv.is_idle = (lambda nbytes: True) if step % 9 == 0 else (lambda nbytes: False)
        steps[int(rng.integers(len(steps)))]()
        kv.truncate(min(kv.length, len(text) - 1))
        logits = run(transformer, text, kv)
        plain = SequenceState(KVLayout(CONFIG, kv_bits))
        assert logits == run(transformer, text, plain), step
    assert min(back) > 0
    kv.truncate(0)
    assert memory.nbytes == 0


def test_a_copy_keeps_what_it_copies_in_the_accounts() -> None:
    """A full pool asks the copied text for memory: its mark's blocks count until they are copied."""
    held: list[weakref.ref[Bytes]] = []
    memory, most = Memory(), 0

    def allocate(nbytes: int) -> Bytes:
        nonlocal most
        block = memory.allocate(nbytes)
        held.append(weakref.ref(block))
        most = max(most, sum(found.nbytes for it in held if (found := it()) is not None))
        return block

    kv = SequenceState(KVLayout(CONFIG, pass_tokens=CHUNK), allocate, memory.release)
    for length in range(CHUNK, 1001, CHUNK):
        kv.mark([400] if length > 160 else [])
        kv.reserve(length)
        kv.extend([1] * CHUNK)
    memory.limit = memory.nbytes
    memory.asks_back = kv.forget_past
    with pytest.raises(BudgetError):
        kv.fork(400)
    assert (most, memory.nbytes, kv.nearest(400)) == (memory.limit, memory.limit, 400)
    memory.limit *= 2
    fork = kv.fork(400)
    assert fork.nearest(400) == 400


def test_the_nearest_place_is_found_in_one_walk() -> None:
    """Behind the ring of a long text every block is a gap."""
    kv = state()
    for _ in range(128 * 1024 // 64):
        kv.reserve(kv.length + 64)
        kv.extend([1] * 64)
    begun = time.process_time()
    assert [kv.nearest(kv.length - 1000), kv.nearest(kv.length)] == [0, kv.length]
    assert time.process_time() - begun < 0.04


def test_a_text_that_went_back_is_saved_with_what_its_end_sees(tmp_path: Path) -> None:
    """Its runs were saved before, when a longer text had given up what windowed layers see of them."""
    store, kv, tokens = PromptCache(tmp_path, {}), state(), drawn(1000, 4)
    for text in (tokens, tokens[:400]):
        kv.truncate(0)
        while kv.length < len(text):
            kv.reserve(kv.length + CHUNK)
            kv.extend(text[kv.length : kv.length + CHUNK])
        assert [*store.write(kv)] == []
    loaded = state()
    assert [*store.restore(loaded, tokens[:400])] == []
    assert (loaded.length, loaded.nearest(400)) == (400, 400)


def test_a_damaged_run_without_windows_leaves_nothing_behind(tmp_path: Path) -> None:
    store, kv, tokens, transformer = PromptCache(tmp_path, {}), state(), drawn(600, 5), model()
    logits = run(transformer, tokens, kv)
    assert [*store.write(kv)] == []
    first = min(tmp_path.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(first.read_bytes())
    data[-1] ^= 0xFF
    first.write_bytes(data)
    loaded = state()
    assert [*store.restore(loaded, tokens)] == []
    assert (loaded.length, loaded.nbytes) == (0, 0)
    assert run(transformer, tokens, loaded) == logits


def test_a_kernel_refuses_blocks_that_are_gone() -> None:
    transformer, kv = model(), state()
    run(transformer, drawn(200, 2), kv)
    kv.give_up_windows(128, 192)
    with pytest.raises(ValueError, match="isn't there"):
        transformer.hidden_states([1], kv)
