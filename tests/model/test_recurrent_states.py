"""Texts of a model with recurrent layers: any split, truncation, fork and saved state gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.backends import recurrent
from ondevice.backends.base import Block
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.backends.recurrent import AHEAD_TOKENS, PROMPT_TAIL
from ondevice.backends.token_tree import TokenTree
from ondevice.callbacks import Cancelled
from ondevice.converters.convert import convert
from ondevice.errors import BudgetError, UsageError
from ondevice.model.layer_range import SequencePart
from ondevice.model.sequence_state import SequenceState, allocate_block
from ondevice.model.transformer import Transformer
from ondevice.prompt_cache.store import PromptCache
from tests.conftest import mlx_on
from tests.support.cached_texts import written
from tests.support.engines import every_logits, random_tokens, running
from tests.support.families import CASES, write_model
from tests.support.small_models import MODELS, write_small

LENGTH = 300


KINDS = ["qwen3.5", "lfm2", "mixers", "mixers beside attention"]
"""Families with delta rules, and with short convolutions; models with Mamba-2 mixers, of no family."""


def made(folder: Path, kind: str) -> Path:
    if kind in MODELS:
        return write_small(folder / "bundle", replace(MODELS[kind], max_context=512, vocab_size=320))
    write_model(folder / "source", *CASES[kind])
    return convert(folder / "source", folder / "bundle", "q4")


ON_MLX = [pytest.param(f"{kind} on mlx", marks=() if kind == "lfm2" else pytest.mark.slow) for kind in KINDS]
"""The same on MLX's CPU device; `tests/backends/test_mlx_recurrent.py` has the rules by themselves."""


@pytest.fixture(scope="module", params=[*KINDS, *ON_MLX])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transformer]:
    kind, _, mlx = request.param.partition(" on ")
    bundle = made(tmp_path_factory.mktemp("recurrent"), kind)
    with mlx_on(gpu=False) if mlx else nullcontext(), running(bundle, "mlx" if mlx else "cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(model: Transformer) -> list[int]:
    return random_tokens(model.config, LENGTH)


@pytest.fixture(scope="module")
def whole(model: Transformer, text: list[int]) -> np.ndarray:
    return every_logits(model, text, empty(model))


def empty(
    model: Transformer,
    allocate: Callable[[int], Block] = allocate_block,
    release: Callable[[Block], None] = lambda block: None,
    drafts: bool = False,
) -> SequenceState:
    backend: Any = model.backend
    layout = KVLayout(model.config, 16, drafts)
    return SequenceState(layout, allocate, release, arrays=backend.new_arrays(layout))


def continued(model: Transformer, kv: SequenceState, text: list[int], step: int = 64) -> np.ndarray:
    """Logits of the tokens of `text` that kv lacks, in chunks that end where kv wants them to."""
    found = []
    while kv.length < len(text):
        found.append(every_logits(model, text[kv.length : kv.end_of_chunk(kv.length + step)], kv))
    return np.concatenate(found)


@pytest.mark.fast(
    "lfm2-1", "lfm2-64", "qwen3.5-7", "qwen3.5-512", "mixers-7", "mixers beside attention-7", "lfm2 on mlx-64"
)
@pytest.mark.parametrize("step", [1, 7, 64, 512])
def test_chunks_of_any_size_give_the_same_bits(
    model: Transformer, text: list[int], whole: np.ndarray, step: int
) -> None:
    kv = empty(model)
    found = [every_logits(model, text[at : at + step], kv) for at in range(0, LENGTH, step)]
    assert np.concatenate(found).tobytes() == whole.tobytes()
    assert continued(model, empty(model), text, step).tobytes() == whole.tobytes()


@pytest.mark.fast("lfm2", "qwen3.5", "mixers beside attention")
def test_a_text_goes_on_from_any_place(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    rng, kv, other = np.random.default_rng(2), empty(model), random_tokens(model.config, LENGTH, 8)
    continued(model, kv, text)
    for place in rng.integers(0, LENGTH, 12).tolist():
        kv.truncate(place)
        kept = kv.length
        assert kept <= place
        assert place - kept < kv.layout.states.spacing
        assert continued(model, kv, [*text[:place], *other[: 1 + place % 90]]).shape[0] > place - kept
        kv.truncate(place)
        kept = kv.length
        assert continued(model, kv, text).tobytes() == whole[kept:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_a_fork_is_independent(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    kv = empty(model)
    continued(model, kv, text[:150])
    copy = kv.fork()
    assert copy.nbytes == kv.nbytes
    continued(model, kv, [*text[:150], 3, 4, 5])
    assert continued(model, copy, text).tobytes() == whole[150:].tobytes()
    spacing = copy.layout.states.spacing
    copy.truncate(spacing + 6)
    assert copy.length == spacing
    assert continued(model, copy, text).tobytes() == whole[spacing:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_saved_states_are_found_again(
    model: Transformer, text: list[int], whole: np.ndarray, tmp_path: Path
) -> None:
    kv, spacing = empty(model), KVLayout(model.config, 16).states.spacing
    assert spacing % BLOCK_TOKENS == 0
    continued(model, kv, text)
    list(PromptCache(tmp_path, {"model": "tiny"}, chunk=spacing).write(kv))
    store, back = PromptCache(tmp_path, {"model": "tiny"}, chunk=spacing), empty(model)
    list(store.restore(back, text))
    assert back.length == LENGTH // spacing * spacing
    assert continued(model, back, text).tobytes() == whole[LENGTH // spacing * spacing :].tobytes()
    back.truncate(spacing + 5)
    assert back.length == spacing
    list(store.restore(back, text[: 2 * spacing + 9]))
    assert back.length == 2 * spacing
    assert continued(model, back, text).tobytes() == whole[2 * spacing :].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_texts_that_share_passes_are_those_that_they_are_alone(
    model: Transformer, text: list[int], whole: np.ndarray
) -> None:
    other = random_tokens(model.config, 40, 9)
    alone = every_logits(model, other, empty(model))
    first, second = empty(model), empty(model)
    continued(model, first, text[:90])
    batches = ForwardBatch(text[90:97]), ForwardBatch(other[:33])
    states = model.run_each([SequencePart(batches[0], first), SequencePart(batches[1], second)])
    assert np.array_equal(model.logits(states), np.concatenate([whole[90:97], alone[:33]]))
    assert continued(model, first, text).tobytes() == whole[97:].tobytes()
    assert continued(model, second, other).tobytes() == alone[33:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_a_cancelled_pass_leaves_the_states(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    kv = empty(model)
    continued(model, kv, text[:100])
    asked = iter([False, False, True])
    with pytest.raises(Cancelled):
        model.forward(text[100:140], kv, cancelled=lambda: next(asked))
    assert kv.length == 100
    assert continued(model, kv, text).tobytes() == whole[100:].tobytes()


class Memory:
    """The blocks that a state holds."""

    def __init__(self) -> None:
        self.held: list[Block] = []

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.held)

    def allocate(self, nbytes: int) -> Block:
        self.held.append(allocate_block(nbytes))
        return self.held[-1]

    def release(self, block: Block) -> None:
        same = [at for at, it in enumerate(self.held) if it is block]
        if not isinstance(block, np.ndarray):
            # A buffer of MLX's arrays stands for the block of its size.
            same = [at for at, it in enumerate(self.held) if it.nbytes == block.nbytes]
        del self.held[same[0]]


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_every_buffer_is_counted_and_released(model: Transformer, text: list[int]) -> None:
    memory = Memory()
    kv = empty(model, memory.allocate, memory.release)
    for length in (1, 63, 64, 130, 300):
        continued(model, kv, text[:length])
        assert kv.nbytes == memory.nbytes == replace(kv.layout, marks=0).nbytes(length)
    for place in (290, 200, 65, 3):
        kv.truncate(min(place, kv.length))
        assert kv.nbytes == memory.nbytes
    for length in (100, 200, 260):
        kv.mark_prompt(length)
        continued(model, kv, text[:length])
        assert kv.nbytes == memory.nbytes <= kv.layout.nbytes(length)
    assert kv.nbytes == kv.layout.nbytes(260)
    kv.truncate(0)
    assert not memory.held


def ends_of(kv: SequenceState) -> list[int]:
    """Where the text has states because its last prompt wanted them."""
    assert kv.states is not None
    return kv.states.ends


@pytest.mark.fast("lfm2-1", "qwen3.5-7", "mixers-64", "mixers beside attention-7", "lfm2 on mlx-64")
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_text_goes_back_to_its_last_prompt(
    model: Transformer, text: list[int], whole: np.ndarray, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """To where what was new of it began, and to just before its end; no bit changes."""
    monkeypatch.setattr(recurrent, "MIN_SPACING", 1024)
    kv, other = empty(model), random_tokens(model.config, LENGTH, 8)
    kv.mark_prompt(150)
    assert continued(model, kv, text[:150], step).tobytes() == whole[:150].tobytes()
    assert ends_of(kv) == [150 - PROMPT_TAIL]
    assert continued(model, kv, text[:163], 1).tobytes() == whole[150:163].tobytes()
    # Its answer is rendered otherwise in the next prompt.
    kv.truncate(151)
    assert kv.length == 142
    continued(model, kv, text[:163])
    kv.mark_prompt(250)
    assert continued(model, kv, text[:270], step).tobytes() == whole[163:270].tobytes()
    assert ends_of(kv) == [163, 242]
    kv.truncate(249)
    assert kv.length == 242
    continued(model, kv, [*text[:245], *other[:9]], step)
    kv.truncate(200)
    assert kv.length == 163
    kv.mark_prompt(260)
    assert continued(model, kv, text, step).tobytes() == whole[163:].tobytes()
    assert ends_of(kv) == [163, 252]
    kv.mark_prompt(LENGTH + 2)
    kv.reserve(LENGTH + 2)
    assert ends_of(kv) == [LENGTH]


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_a_fork_has_the_marks(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    kv = empty(model)
    kv.mark_prompt(100)
    continued(model, kv, text[:100])
    copy = kv.fork()
    assert ends_of(copy) == [92]
    continued(model, kv, [*text[:100], 3, 4, 5])
    copy.truncate(95)
    assert copy.length == 92
    assert continued(model, copy, text).tobytes() == whole[92:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_a_prompt_that_is_cancelled_begins_anew(
    model: Transformer, text: list[int], whole: np.ndarray
) -> None:
    memory = Memory()
    kv = empty(model, memory.allocate, memory.release)
    kv.mark_prompt(60)
    for most in range(4):
        asked = iter([False] * most + [True] * 9)
        with pytest.raises(Cancelled):
            model.forward(text[:60], kv, cancelled=lambda asked=asked: next(asked))  # type: ignore[misc]
        assert (kv.length, ends_of(kv)) == (0, [])
        if most == 2:
            kv.truncate(0)
            assert not memory.held
    assert continued(model, kv, text[:70]).tobytes() == whole[:70].tobytes()
    assert kv.nbytes == memory.nbytes
    kv.truncate(55)
    assert kv.length == 52
    assert continued(model, kv, text).tobytes() == whole[52:].tobytes()


def test_prompts_of_texts_that_share_passes(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    first, second = empty(model), empty(model)
    continued(model, first, text[:20])
    for kv, length in ((first, 50), (second, 40)):
        kv.mark_prompt(length)
    batches = ForwardBatch(text[20:60]), ForwardBatch(text[:44])
    states = model.run_each([SequencePart(batches[0], first), SequencePart(batches[1], second)])
    assert np.array_equal(model.logits(states), np.concatenate([whole[20:60], whole[:44]]))
    assert (ends_of(first), ends_of(second)) == ([20, 42], [32])
    for kv, cut, kept in ((first, 43, 42), (first, 30, 20), (second, 40, 32)):
        kv.truncate(cut)
        assert kv.length == kept
        assert continued(model, kv, text[:62]).tobytes() == whole[kept:62].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_what_lies_before_a_mark_is_found_again(
    model: Transformer, text: list[int], whole: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "MIN_SPACING", 128)
    kv, spacing = empty(model), 128
    assert kv.layout.states.spacing == spacing
    store = PromptCache(tmp_path, {"model": "tiny"}, chunk=spacing, marks=True)
    kv.mark_prompt(110)
    continued(model, kv, text[:110])
    list(store.write(kv))
    kv.mark_prompt(230)
    continued(model, kv, text)
    list(store.write(kv))
    assert len(written(tmp_path)) == 2 + 2
    for asked, found in ((LENGTH, 256), (255, 222), (222, 222), (221, 128), (127, 102), (101, 0)):
        back = empty(model)
        list(store.restore(back, text[:asked]))
        assert back.length == found
        assert back.chunked == found // spacing * spacing
        assert continued(model, back, text).tobytes() == whole[found:].tobytes()
        # What was read is a place to go back to, and is written again.
        back.truncate(LENGTH - 1)
        if found == 222:
            back.truncate(240)
            assert back.length == 222
            again = PromptCache(tmp_path / "again", {"model": "tiny"}, chunk=spacing, marks=True)
            list(again.write(back))
            assert len(written(tmp_path / "again")) == 2
    plain, back = PromptCache(tmp_path, {"model": "tiny"}, chunk=spacing), empty(model)
    list(plain.restore(back, text[:230]))
    assert back.length == 128


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_states_that_tokens_run_ahead_of_reach_a_mark(
    model: Transformer, text: list[int], whole: np.ndarray
) -> None:
    kv = empty(model)
    continued(model, kv, text[:70])
    model.run(ForwardBatch(text[70:80], drafted=range(10)), kv)
    assert kv.states is not None
    kv.drafted = 0
    kv.mark_prompt(100)
    assert (kv.length, kv.states.position) == (80, 70)
    assert continued(model, kv, text).tobytes() == whole[80:].tobytes()
    assert ends_of(kv) == [80, 92]
    kv.truncate(90)
    assert kv.length == 80
    assert continued(model, kv, text).tobytes() == whole[80:].tobytes()


def test_an_allocator_that_refuses_leaves_the_text_as_it_was(
    model: Transformer, text: list[int], whole: np.ndarray
) -> None:
    left = [100]

    def allocate(nbytes: int) -> Block:
        if not left[0]:
            raise BudgetError("no more", required_bytes=1)
        left[0] -= 1
        return allocate_block(nbytes)

    kv = empty(model, allocate)
    continued(model, kv, text[:100])
    for granted in (0, 1, 2):
        left[0], before = granted, kv.nbytes
        with pytest.raises(BudgetError):
            kv.reserve(300)
        assert (kv.length, kv.nbytes) == (100, before)
    left[0] = 100
    assert continued(model, kv, text).tobytes() == whole[100:].tobytes()


def drafted(text: list[int], start: int, rng: np.random.Generator) -> tuple[ForwardBatch, list[int]]:
    """A draft of random shape behind `start` tokens of a text, and its nodes that the text takes."""
    count = int(rng.integers(2, 1 + min(AHEAD_TOKENS, len(text) - start)))
    tokens, parents, path = [text[start]], [-1], [0]
    for node in range(1, count):
        if rng.random() < 0.5:
            parents.append(path[-1])
            path.append(node)
            tokens.append(text[start + len(path) - 1])
        else:
            parents.append(int(rng.integers(node)))
            tokens.append(int(rng.integers(256)))
    return ForwardBatch(tokens, TokenTree(parents), drafted=range(1, count)), path


@pytest.mark.fast("lfm2", "qwen3.5", "mixers beside attention")
def test_drafts_leave_the_bits(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    """Also behind a checkpoint that lies within a draft's path, and where the path is cut short."""
    rng, kv = np.random.default_rng(5), empty(model)
    spacing = kv.layout.states.spacing
    while kv.length < LENGTH - 1:
        start = kv.length
        batch, path = drafted(text, start, rng)
        found = model.checked_logits(model.run(batch, kv).hidden)
        assert np.array_equal(found[path], whole[start : start + len(path)])
        model.keep(kv, start, path[: int(rng.integers(1, 1 + len(path)))])
        assert kv.tokens == text[: kv.length]
        assert list(kv.states.checkpoints) == list(range(spacing, kv.length + 1, spacing))  # type: ignore[union-attr]
    assert kv.chunked == LENGTH // spacing * spacing
    kv.truncate(2 * spacing + 5)
    assert continued(model, kv, text).tobytes() == whole[2 * spacing :].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_a_draft_that_fails_leaves_the_states(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    rng, kv = np.random.default_rng(6), empty(model)
    continued(model, kv, text[:100])
    asked = iter([False, False, True])
    batch, _ = drafted(text, 100, rng)
    with pytest.raises(Cancelled):
        model.run(batch, kv, lambda: next(asked))
    assert kv.length == 100
    model.run(batch, kv)
    kv.truncate(100)
    assert kv.length == 100
    with pytest.raises(UsageError, match="run ahead"):
        model.run(ForwardBatch(text[100:120], drafted=range(20)), kv)
    assert continued(model, kv, text).tobytes() == whole[100:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_tokens_ahead_are_taken_back(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    """As the chain of a drafter that runs the model itself: a pass for each token, each behind the others."""
    kv = empty(model)
    continued(model, kv, text[:120])
    for place in range(120, 128):
        found = model.run(ForwardBatch(text[place : place + 1], drafted=[0]), kv)
        assert np.array_equal(model.checked_logits(found.hidden), whole[place : place + 1])
    copy = kv.fork()
    kv.truncate(125)
    assert kv.length == 125
    model.commit(kv, 123)
    batch = ForwardBatch([text[125], 9, text[126], 8], TokenTree([-1, 0, 0, 2]), drafted=[1, 2, 3])
    found = model.run(batch, kv)
    assert np.array_equal(model.checked_logits(found.hidden)[[0, 2]], whole[125:127])
    model.keep(kv, 125, [0, 2])
    assert continued(model, kv, text).tobytes() == whole[127:].tobytes()
    assert continued(model, copy, text).tobytes() == whole[128:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers beside attention", "lfm2 on mlx")
def test_drafts_of_texts_that_share_a_pass(model: Transformer, text: list[int], whole: np.ndarray) -> None:
    rng = np.random.default_rng(8)
    kvs = [empty(model) for _ in range(3)]
    for kv, length in zip(kvs, (70, 90, 127), strict=True):
        continued(model, kv, text[:length])
    for _ in range(8):
        drafts = [drafted(text, kv.length, rng) for kv in kvs[:2]]
        starts = [kv.length for kv in kvs]
        plain = ForwardBatch([text[kvs[2].length]])
        batches = [*(batch for batch, _ in drafts), plain]
        model.run_each([SequencePart(batch, kv) for batch, kv in zip(batches, kvs, strict=True)])
        for kv, start, (_, path) in zip(kvs, starts, drafts, strict=False):
            model.keep(kv, start, path)
    for kv in kvs:
        length = kv.length
        assert continued(model, kv, text).tobytes() == whole[length:].tobytes()


@pytest.mark.fast("qwen3.5", "mixers")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_drafts_too(tmp_path: Path, kind: str) -> None:
    with running(made(tmp_path, kind)) as model:
        text = random_tokens(model.config, LENGTH)
        expected, kv, rng = (
            every_logits(model, text[:40], empty(model)),
            empty(model),
            np.random.default_rng(4),
        )
        while kv.length < 38:
            start = kv.length
            batch, path = drafted(text[:40], start, rng)
            found = model.checked_logits(model.run(batch, kv).hidden)
            np.testing.assert_allclose(found[path], expected[start : start + len(path)], rtol=1e-4, atol=1e-4)
            model.keep(kv, start, path)


def test_inputs_are_counted_and_released(model: Transformer, text: list[int]) -> None:
    memory = Memory()
    for planned in (True, False):
        kv = empty(model, memory.allocate, memory.release, planned)
        continued(model, kv, text[:70])
        without = kv.nbytes
        model.run(ForwardBatch(text[70:74], drafted=range(1, 4)), kv)
        model.keep(kv, 70, [0, 1])
        assert kv.nbytes == memory.nbytes
        assert kv.nbytes - without == (0 if planned else kv.layout.states.ahead_bytes)
        assert kv.nbytes == KVLayout(model.config, 16, drafts=True, marks=0).nbytes(72)
        kv.truncate(0)
        assert not memory.held


@pytest.mark.slow
@pytest.mark.parametrize("spacing", [64, 256])
def test_a_text_that_is_changed_at_random_keeps_its_bits(
    model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spacing: int
) -> None:
    """By prompts, passes of any size, drafts, cuts, forks and a prompt cache; all it holds is planned."""
    monkeypatch.setattr(recurrent, "MIN_SPACING", spacing)
    text, compared = random_tokens(model.config, 420), 0
    whole = every_logits(model, text, empty(model))
    for seed in range(12):
        rng, memory = np.random.default_rng(seed), Memory()
        kv = empty(model, memory.allocate, memory.release, drafts=True)
        store = PromptCache(tmp_path, {"model": "tiny"}, chunk=kv.layout.states.spacing, marks=True)
        for _ in range(60):
            start, states = kv.length, kv.states
            assert states is not None
            match int(rng.integers(8)):
                case 0:
                    kv.mark_prompt(int(rng.integers(start, 421)))
                case 1 | 2 if start < 420:
                    stop = int(rng.integers(start + 1, 1 + min(start + 100, 420)))
                    stop = kv.end_of_chunk(stop) if rng.random() < 0.5 else stop
                    found = every_logits(model, text[start:stop], kv)
                    assert found.tobytes() == whole[start:stop].tobytes()
                    compared += stop - start
                case 3 if start < 410:
                    batch, path = drafted(text, start, rng)
                    found = model.checked_logits(model.run(batch, kv).hidden)
                    assert np.array_equal(found[path], whole[start : start + len(path)])
                    model.keep(kv, start, path[: int(rng.integers(1, 1 + len(path)))])
                    compared += len(path)
                case 4:
                    kv.truncate(int(rng.integers(start + 1)))
                case 5:
                    copy = kv.fork()
                    kv.truncate(0)
                    kv = copy
                case 6:
                    list(store.write(kv))
                case 7:
                    list(store.restore(kv, text[: int(rng.integers(1, 421))]))
            assert kv.tokens == text[: kv.length]
            assert kv.nbytes == memory.nbytes <= kv.layout.nbytes(420)
            assert set(ends_of(kv)) <= set(kv.states.marks)  # type: ignore[union-attr]
    assert compared > 5000
