"""Texts that several ranks write together are those of one machine, whatever drafts for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ondevice.backends.base import Bytes
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import BLOCK_TOKENS, KVLayout
from ondevice.backends.row_invariance import ANY_ROWS, RowWidths
from ondevice.budget.memory_model import MESSAGE_HEADER_BYTES, MESSAGES
from ondevice.budget.plan import Held, Plan
from ondevice.budget.sizes import PREFILL_CHUNK
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import never_cancelled
from ondevice.config import RuntimeConfig, SamplingConfig
from ondevice.converters.draft_layers.dflash import convert_dflash
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.distributed.remote_layers import RemoteLayers, StateRoom
from ondevice.errors import BudgetError, OndeviceError, RankError, UsageError
from ondevice.model.sequence_state import allocate_block
from ondevice.model_config import cut_places
from ondevice.model_config.part import part_config
from ondevice.runtime.backend_choice import memory_model
from ondevice.runtime.resolving import ResolvedModel, resolve
from ondevice.speculation.tree import DRAFT_NODES
from ondevice.stats import RankStats
from ondevice.training import train_ngrams
from tests.support import ranks as ranks_support
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.dflash_heads import dflash_config, write_dflash_head
from tests.support.eagle_heads import add_mtp_layer, write_eagle_head
from tests.support.engines import always_draft
from tests.support.joint_jobs import Job, run
from tests.support.made_up_streams import add_streams
from tests.support.paths import SHIPPED
from tests.support.ranks import Ranks, ring_of, running_ranks
from tests.support.small_models import MODELS

DATA = Path(__file__).parents[1] / "benchmarks" / "data"
PROMPT = [5 + index * 7 % 240 for index in range(40)]
ENDLESS = ((EOS, -math.inf),)
DRAFTERS = (
    "off", "lookup", "recycling", "streams", "resident", "ngrams", "model", "eagle", "dflash", "mtp", "auto"
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five ReLU layers with all that drafters need; its streams begin in the third."""
    folder = tmp_path_factory.mktemp("shared")
    shape = {"hidden_act": "relu", "num_hidden_layers": 5, "intermediate_size": 320}
    found = convert_bundle(write_chat_checkpoint(folder / "checkpoint", **shape), folder / "bundle")
    convert_eagle(write_eagle_head(folder / "head"), found)
    convert_dflash(write_dflash_head(folder / "block", dflash_config(num_target_layers=5)), found)
    add_mtp_layer(found, 64)
    add_streams(found, layers=3)
    train_ngrams(found, pieces=[PROMPT * 3])
    return found


def texts(ranks: Ranks) -> list[list[int]]:
    """A greedy text, a sampled one, and two turns of a session."""
    first = ranks.text(PROMPT[:9], key=1, max_tokens=6, logit_bias=ENDLESS)
    return [
        ranks.text(PROMPT, logit_bias=ENDLESS),
        ranks.text(PROMPT, logit_bias=ENDLESS, temperature=0.9, seed=3),
        first,
        ranks.text([*PROMPT[:9], *first[:-2], 30, 31], key=1, max_tokens=6, logit_bias=ENDLESS),
    ]


@pytest.fixture(scope="module")
def one_machine() -> Callable[..., list[list[int]]]:
    """What one machine writes without drafts."""
    found: dict[str, list[list[int]]] = {}

    def write(folder: Path, **options: Any) -> list[list[int]]:
        key = f"{folder} {options}"
        if key not in found:
            with running_ranks(folder, (), **options, speculation="off") as ranks:
                found[key] = texts(ranks)
        return found[key]

    return write


FAST = {("lookup", (2,)), ("streams", (1, 3)), ("resident", (4,)), ("eagle", (2, 3, 4))}


@pytest.mark.parametrize(
    ("drafter", "cuts"),
    [
        pytest.param(
            drafter,
            cuts,
            id=f"{drafter}-{'-'.join(map(str, cuts))}",
            marks=() if (drafter, cuts) in FAST else pytest.mark.slow,
        )
        for drafter in DRAFTERS
        for cuts in ((2,), (3,), (4,), (1, 3), (2, 3, 4))
    ],
)
def test_no_drafter_changes_the_text(
    drafter: str,
    cuts: Sequence[int],
    bundle: Path,
    one_machine: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = one_machine(bundle, sparsity="exact")
    always_draft(monkeypatch, [DRAFT_NODES, 3, 8])
    options: dict[str, Any] = {"speculation": drafter, "sparsity": "exact", "prefill_chunk": 16}
    if drafter == "model":
        options["draft_model"] = str(bundle)
    with running_ranks(bundle, cuts, **options) as ranks:
        assert texts(ranks) == expected
        assert (ranks.draft_tokens > 20) == (drafter != "off")


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [
        ("relu", "predicted"),
        ("olmoe", "experts"),
        pytest.param("relu", "dense", marks=pytest.mark.slow),
        pytest.param("silu", "dense", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("cuts", [(3,), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_ranks_with_few_segments_make_the_same_texts(
    name: str,
    sparsity: str,
    cuts: Sequence[int],
    one_machine: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = SHIPPED if name == "relu" else DATA / f"small-{name}"
    expected = one_machine(folder, sparsity=sparsity)
    always_draft(monkeypatch, [4])
    # Ranks are one process here, and each would count the others' memory.
    few = lambda plan, kv_bytes, tokens=None: Held(0, plan.segment.least + 1)  # noqa: E731
    monkeypatch.setattr(Plan, "held_weights", few)
    with running_ranks(folder, cuts, sparsity=sparsity, speculation="lookup") as ranks:
        assert texts(ranks) == expected
        segments = ranks.engine._quota.segments
        assert segments == ranks.engine.plan.segment.least + 1 < ranks.engine.plan.segment.total


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "mlx"])
@pytest.mark.parametrize("cuts", [(2,), (1, 3)])
def test_ranks_of_other_backends_make_the_same_texts(
    backend: str, cuts: Sequence[int], bundle: Path, one_machine: Callable[..., list[list[int]]]
) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    options = {"backend": backend, "sparsity": "dense", "prefill_chunk": 16}
    expected = one_machine(bundle, **options)
    with running_ranks(bundle, cuts, **options, speculation="auto") as ranks:
        assert texts(ranks) == expected


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(2,), (3,), (1, 4)])
def test_streams_that_are_part_of_the_model(
    cuts: Sequence[int], bundle: Path, tmp_path: Path, one_machine: Callable[..., list[list[int]]]
) -> None:
    """In shared mode their adapters apply to the text's own tokens, on every rank with such layers."""
    folder = copy_files(bundle, tmp_path / "bundle")
    add_streams(folder, layers=3, mode="shared")
    expected = one_machine(folder, sparsity="exact")
    assert expected != one_machine(bundle, sparsity="exact")
    for speculation in ("off", "streams"):
        with running_ranks(folder, cuts, sparsity="exact", speculation=speculation) as ranks:
            assert texts(ranks) == expected


def test_texts_share_passes_and_forks_go_on(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [6])
    found = []
    for cuts in ((), (2, 4)):
        with running_ranks(bundle, cuts, speculation="lookup", parallel=3) as ranks:
            engine = ranks.engine
            samplings = [SamplingConfig(max_tokens=12, temperature=0.8, seed=it) for it in range(3)]
            jobs = [
                Job(engine.steps(10 + at, PROMPT[: 5 + 9 * at], sampling, never_cancelled))
                for at, sampling in enumerate(samplings)
            ]
            run(engine, jobs, lambda turn, it=engine: it.fork(11, 20) if turn == 4 else None)  # type: ignore[misc]
            assert all(job.error is None for job in jobs)
            found.append([job.tokens for job in jobs])
            found[-1].append(ranks.text([*PROMPT[:14], 9, 9], key=20, max_tokens=5))
    assert found[0] == found[1]


@pytest.mark.slow
def test_states_that_give_way_do_so_on_every_rank(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts of three blocks each have three together: each waits, and computes its own again."""
    always_draft(monkeypatch, [6])
    found, emptied = [], 0
    for cuts, blocks in (((), 99), ((2,), 3), ((1, 3), 3)):
        limit = property(
            lambda plan, most=blocks: most * plan.kv_cache_bytes // -(-plan.max_context // BLOCK_TOKENS)
        )
        monkeypatch.setattr(Plan, "kv_limit_bytes", limit)
        with running_ranks(bundle, cuts, speculation="lookup", parallel=3, prefill_chunk=32) as ranks:
            samplings = [
                SamplingConfig(max_tokens=70, temperature=0.8, seed=at, logit_bias=ENDLESS) for at in range(3)
            ]
            prompts = [(PROMPT * 2)[: 70 + 3 * at] for at in range(3)]
            given = enumerate(zip(prompts, samplings, strict=True))
            engine = ranks.engine
            jobs = [Job(engine.steps(10 + at, *each, never_cancelled)) for at, each in given]
            run(engine, jobs)
            assert [job.error for job in jobs] == [None] * 3
            found.append([job.tokens for job in jobs])
            emptied += sum(not engine.kv.state_of(10 + at).length for at in range(3))
    assert found[0] == found[1] == found[2]
    assert emptied >= 4


def test_what_needs_every_rank_s_states_is_refused(bundle: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="prompt_cache"),
        running_ranks(bundle, (2,), prompt_cache=str(tmp_path), expected=RankError),
    ):
        pass
    with running_ranks(bundle, (2,)) as ranks:
        ranks.text(PROMPT, key=1, max_tokens=2)
        with pytest.raises(UsageError, match="saving and loading a session"):
            list(ranks.engine.save_state(1, tmp_path / "session", never_cancelled))


def test_an_error_on_another_rank_ends_the_run(bundle: Path) -> None:
    with running_ranks(bundle, (2, 3), expected=RankError) as ranks:
        ranks.text(PROMPT[:6], key=1, max_tokens=3)
        # A sequence that the others don't know.
        ranks.engine.kv.state_of(1).number = 99  # type: ignore[attr-defined]
        with pytest.raises(RankError, match="another rank"):
            ranks.text(PROMPT[:6], key=1, max_tokens=3)
        with pytest.raises(RankError, match="start the ranks anew"):
            ranks.text(PROMPT[:6], max_tokens=3)


@pytest.mark.parametrize("kind", ["pass", "stats"])
def test_an_error_that_rank_0_alone_sees_ends_the_run(
    kind: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_ranks(bundle, (2,), expected=RankError) as ranks:
        ranks.text(PROMPT[:6], max_tokens=3)
        later, failures = ranks.engine.transformer.later, list[Exception]()
        assert isinstance(later, RemoteLayers)
        later.on_failure = failures.append
        exchanges: dict[str, Callable[[], Any]] = {
            "pass": lambda: list(ranks.engine.logits(PROMPT[:6], never_cancelled)),
            "stats": lambda: later.stats(RankStats()),
        }

        def receive() -> Any:
            raise MemoryError("no room for a message")

        with monkeypatch.context() as patch:
            patch.setattr(ranks.transports[0], "receive", receive)
            with pytest.raises((MemoryError, OndeviceError)):
                exchanges[kind]()
        assert [type(it) for it in failures] == [MemoryError]
        with pytest.raises(RankError, match="start the ranks anew"):
            ranks.text(PROMPT[:6], max_tokens=3)
        assert len(failures) == 1


def test_passes_are_no_wider_than_any_rank_allows(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ranks_support.state_room
    monkeypatch.setattr(
        ranks_support, "state_room", lambda part: replace(own(part), chain_rows=3, tree_rows=1)
    )
    always_draft(monkeypatch, [DRAFT_NODES])
    with running_ranks(bundle, (2,), speculation="recycling", parallel=2) as ranks:
        widest = 0
        own_run = ranks.engine.transformer.run

        def run(batch: ForwardBatch, *arguments: Any, **named: Any) -> Any:
            nonlocal widest
            widest = max(widest, len(batch.drafted) + 1)
            return own_run(batch, *arguments, **named)

        monkeypatch.setattr(ranks.engine.transformer, "run", run)
        ranks.text(PROMPT, max_tokens=20, logit_bias=ENDLESS)
        assert ranks.engine.transformer.equal_rows == widest == 3


@pytest.mark.parametrize(("drafter", "rows"), [("off", [128, 72]), ("mtp", [160, 40])])
def test_passes_of_a_prompt_are_narrower_where_they_are_pipelined(
    drafter: str, rows: list[int], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They aren't where a drafter reads each of them."""
    with running_ranks(bundle, (3,), speculation=drafter, prefill_chunk=160) as ranks:
        seen: list[int] = []
        run = ranks.engine.transformer.run

        def counting(batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(batch.tokens))
            return run(batch, *args, **kwargs)

        monkeypatch.setattr(ranks.engine.transformer, "run", counting)
        ranks.text((PROMPT * 5)[:200], max_tokens=1)
        assert seen == rows


@pytest.mark.parametrize(
    ("equal_rows", "flash_on", "rows"),
    [(ANY_ROWS, None, 128), (ANY_ROWS, 0, 256), (ANY_ROWS, 1, 256), (8, None, 256)],
)
def test_passes_of_a_prompt_are_whole_where_narrower_ones_cost(
    equal_rows: int, flash_on: int | None, rows: int
) -> None:
    """Weights are read from flash once a pass; and on MLX bits depend on a pass's tokens."""
    config = MODELS["dense"]
    room = StateRoom.of(KVLayout(config, 16), 1 << 30, RowWidths(8, 8), offloads=flash_on == 1)
    ring = RemoteLayers(ring_of(2)[0], config, [room])
    assert ring.prompt_rows(256, equal_rows, offloads=flash_on == 0) == rows


@pytest.mark.parametrize("blocks", [3, 4])
def test_states_have_room_on_every_rank(blocks: int, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions of two blocks each, where a rank has room for three, and for four."""
    own = ranks_support.state_room

    def few_blocks(part: ResolvedModel) -> StateRoom:
        room = own(part)
        return replace(room, limit_bytes=blocks * room.block_bytes)

    monkeypatch.setattr(ranks_support, "state_room", few_blocks)
    with running_ranks(bundle, (4,)) as ranks:
        pool = ranks.engine.kv
        texts = [[key, *PROMPT, *PROMPT][:70] for key in (1, 2)]
        expected = [ranks.text(text, key=key, max_tokens=4) for key, text in enumerate(texts, 1)]
        assert len(pool.state_of(1).blocks) == blocks - 2
        assert len(pool.state_of(2).blocks) == 2
        assert ranks.text(texts[0], key=1, max_tokens=4) == expected[0]
        missing = pytest.raises(BudgetError, match="rank 1 has no room")
        with missing if blocks == 3 else nullcontext():
            assert len(ranks.text(PROMPT * 6, key=3, max_tokens=4, logit_bias=ENDLESS)) == 4


@pytest.mark.parametrize("name", ["delta", "convolutions", "dense"])
@pytest.mark.parametrize("drafts", [False, True])
def test_one_context_of_states_fits_wherever_layers_are_cut(name: str, drafts: bool) -> None:
    """Exactly one, also where a rank has layers without keys alone, or none with recurrent states."""
    config, tokens = MODELS[name], 200
    for cut in cut_places(config):
        first, later = (
            KVLayout(part_config(config, *layers, embeds=not layers[0], heads=not layers[0]), 16, drafts)
            for layers in ((0, cut), (cut, config.num_layers))
        )
        room = StateRoom.of(later, later.nbytes(tokens), RowWidths(1, 1), offloads=False)
        ring = RemoteLayers(ring_of(2)[0], first.config, [room])
        ring.require_context(first, tokens)
        with pytest.raises(BudgetError, match=r"rank 1 has room for .* a context of"):
            ring.require_context(first, tokens + BLOCK_TOKENS)

        def allocate(nbytes: int, ring: RemoteLayers = ring, first: KVLayout = first) -> Bytes:
            assert not ring.short_of_room(first, nbytes)
            return allocate_block(nbytes)

        kv = ring.new_state(first, allocate, lambda block: None)
        kv.mark([70, 130])
        kv.reserve(tokens)
        assert ring.short_of_room(first, first.block_bytes) == "rank 1"
        kv.truncate(0)
        kv.reserve(tokens)


def test_messages_are_in_the_plan(bundle: Path) -> None:
    """A rank holds copies of what a prompt's chunk hands on; the whole model hands nothing on."""
    whole, runtime = (
        Bundle.open(bundle),
        RuntimeConfig(backend="cpu", sparsity="dense", speculation="off", threads=1, max_context=256),
    )
    part = whole.slice(2, 4)
    chunk = 4 * PREFILL_CHUNK * whole.config.hidden_size
    for it, least in ((whole, 0), (part, MESSAGES * chunk)):
        memory = memory_model(it.config, it.quant, runtime)
        scratch = memory.activation_bytes(memory.pass_tokens)
        planned = resolve(it, runtime).plan.activation_bytes - scratch
        assert least <= planned <= least + (least > 0) * MESSAGES * MESSAGE_HEADER_BYTES
