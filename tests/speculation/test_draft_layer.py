"""Draft layers: what they read and draft, and that no text depends on them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.api import Model, load, open_model
from ondevice.backends.base import RowChunk
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.bundle.draft_layers import EAGLE_SIDECAR, EMBEDDINGS
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import never_cancelled
from ondevice.config import RowFormat, RuntimeConfig, SamplingConfig, Sparsity, Speculation
from ondevice.converters.draft_layers.eagle import convert_eagle
from ondevice.errors import BundleError, UnsupportedModelError
from ondevice.flash.reader import FlashReader
from ondevice.measure.prompts import BUILT_IN
from ondevice.model.draft_layer import LoadedDraftLayer, load_draft_layer
from ondevice.model.layer_range import ForwardPass
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.tensor_file import TensorFile
from ondevice.model.transformer import Transformer
from ondevice.runtime.resolving import ResolvedModel, _preferred
from ondevice.speculation.drafters.draft_layer import DraftLayerDrafter
from ondevice.speculation.drafting import Drafting, DraftRequest
from ondevice.speculation.policy import TreePolicy
from ondevice.speculation.tree import DRAFT_NODES, Draft
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze
from tests.support.eagle_heads import head_config, head_tensors, write_eagle_head
from tests.support.engines import always_draft, running
from tests.support.paths import SHIPPED
from tests.support.shared_texts import alone, together

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "repetition_penalty": 1.2, "seed": 7},
]
LONG = [5 + index * 7 % 240 for index in range(150)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of random weights, whose drafts are seldom right."""
    folder = tmp_path_factory.mktemp("eagle")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", hidden_act="relu")
    found = convert_bundle(checkpoint, folder / "bundle")
    convert_eagle(write_eagle_head(folder / "head"), found)
    return found


def write(model: Model, count: int = 40, **options: Any) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=count, logit_bias={EOS: -math.inf}, **options).tokens


@pytest.mark.fast("exact-eagle")
@pytest.mark.parametrize(
    ("sparsity", "speculation"), [("dense", "eagle"), ("exact", "eagle"), ("exact", "auto")]
)
def test_no_token_depends_on_drafts(
    bundle: Path, sparsity: Sparsity, speculation: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch, [DRAFT_NODES])
    monkeypatch.setattr("ondevice.runtime.engine.MIN_PASS_SECONDS", 0.0)
    with (
        load(bundle, sparsity=sparsity, speculation="off") as plain,
        load(bundle, sparsity=sparsity, speculation=speculation, threads=2) as drafting,
        load(bundle, sparsity=sparsity, speculation=speculation, prefill_chunk=7) as small,
    ):
        squeeze(small, small.plan.segment.least + 1)
        for sampling in SAMPLINGS:
            expected = write(plain, 20, **sampling)
            for model in (drafting, small):
                found = model.generate(PROMPT, max_tokens=20, logit_bias={EOS: -math.inf}, **sampling)
                assert found.tokens == expected
                assert found.stats.speculation == speculation
                assert found.stats.drafting.draft_tokens > 28
        conversations = []
        for model in (plain, drafting, small):
            session = model.session()
            conversations.append([session.respond(words, max_tokens=8).tokens for words in ("A?", "And b?")])
        assert conversations[0] == conversations[1] == conversations[2]


@contextmanager
def layer_of(folder: Path, transformer: Transformer) -> Iterator[LoadedDraftLayer]:
    """The bundle's head, loaded beside its model."""
    found = Bundle.open(folder)
    assert found.eagle is not None
    with FlashReader([found.sidecar_file(EAGLE_SIDECAR.tensors)], "buffered") as reader:
        yield load_draft_layer(found, found.eagle, reader, transformer.backend, transformer.weights, 256)


class Rows:
    """The rows that a draft layer ran, by what its cache held before."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[int, list[int], np.ndarray]] = []
        run = LoadedDraftLayer.run

        def note(layer: LoadedDraftLayer, tokens: Sequence[int], hidden: Any, kv: SequenceState) -> Any:
            before = np.array(layer.backend.to_numpy(hidden))
            self.ran.append((kv.length, list(tokens), before))
            return run(layer, tokens, hidden, kv)

        patch.setattr(LoadedDraftLayer, "run", note)


def test_a_row_has_a_token_and_the_state_before_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a text came about, the layer's rows are those of one pass over it, but for the newest."""
    always_draft(monkeypatch, [6])
    with load(bundle, speculation="eagle", prefill_chunk=32) as model:
        rows = Rows(monkeypatch)
        text = [*LONG, *model.generate(tokens=LONG, max_tokens=30, logit_bias={EOS: -math.inf}).tokens]
        drafter = model._engine._drafting._drafter
        assert isinstance(drafter, DraftLayerDrafter)
        state = drafter._kv.tokens[: len(drafter._positions)]
        assert drafter._positions == list(range(len(state)))
        assert len(state) >= len(text) - 8
        assert state == text[1 : len(state) + 1]
        # Rows of the text come in order; what a draft ran behind them is gone.
        known: dict[int, np.ndarray] = {}
        for start, tokens, hidden in rows.ran:
            for at, (token, row) in enumerate(zip(tokens, hidden, strict=True), start):
                if at + 1 < len(text) and text[at + 1] == token:
                    known[at] = row
    with running(bundle, "cpu") as transformer, layer_of(bundle, transformer) as layer:
        transformer.taps = layer.taps
        output = transformer.run(ForwardBatch(text), SequenceState(KVLayout(transformer.config, 16)))
        expected = transformer.backend.to_numpy(layer.mixed(output.tapped))
    assert len(state) > 150
    for at in range(len(state)):
        np.testing.assert_array_equal(known[at], expected[at])


def test_a_text_that_goes_on_keeps_its_rows(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [6])
    with load(bundle, speculation="eagle") as model:
        session = model.session()
        session.respond("Tell me.", max_tokens=20)
        drafter = model._engine._drafting._drafter
        before = len(drafter._positions)
        rows = Rows(monkeypatch)
        session.respond("More.", max_tokens=4)
        # Random bytes aren't encoded as they were drawn, so that the second prompt has the first one's begin.
        assert min(start for start, _, _ in rows.ran) >= len("Tell me.")
        assert len(drafter._positions) > before


def test_drafts_go_on_after_passes_that_were_not_seen(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttled passes leave gaps; only what a draft goes on from must be known."""
    always_draft(monkeypatch, [6])
    turns = iter([True, True, True, False] * 100)
    with load(bundle, speculation="off") as plain:
        expected = write(plain)
    with load(bundle, speculation="eagle") as model:
        monkeypatch.setattr(TreePolicy, "throttle", lambda policy: next(turns))
        found = model.generate(PROMPT, max_tokens=40, logit_bias={EOS: -math.inf})
        assert found.tokens == expected
        assert found.stats.drafting.drafts > 5
        drafter = model._engine._drafting._drafter
        assert drafter._positions != list(range(len(drafter._positions)))


@pytest.mark.parametrize("fails_after", [0, 3])
def test_a_layer_that_fails_ends_drafts_and_no_text(
    bundle: Path, fails_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails on a pass over a prompt or behind a draft's, it isn't asked again."""
    always_draft(monkeypatch, [6])
    with load(bundle, speculation="off") as plain:
        expected = write(plain)
    mixed, calls = LoadedDraftLayer.mixed, list[int]()

    def failing(layer: LoadedDraftLayer, tapped: Sequence[Any]) -> Any:
        calls.append(len(calls))
        if len(calls) > fails_after:
            raise MemoryError("made up")
        return mixed(layer, tapped)

    monkeypatch.setattr(LoadedDraftLayer, "mixed", failing)
    with load(bundle, speculation="eagle") as model:
        found = model.generate(PROMPT, max_tokens=40, logit_bias={EOS: -math.inf})
        assert found.tokens == expected
        assert found.stats.drafting.decision.startswith("no drafts: ")
        assert write(model) == expected
    assert len(calls) == fails_after + 1


def test_one_text_drafts_at_a_time(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one; another takes its place when it ends, and those that wait have no drafts."""
    always_draft(monkeypatch, [6])
    requests = [
        (LONG[:20], {"max_tokens": count, "logit_bias": {EOS: -math.inf}, "temperature": 0.9, "seed": seed})
        for seed, count in enumerate((20, 60, 5))
    ]
    with load(bundle, speculation="off") as plain:
        expected = alone(plain, requests)
    drafted_for: list[int] = []
    begun: list[tuple[int, bool]] = []
    begin, propose = Drafting.begin, Drafting.propose

    def note_begin(drafting: Drafting, text: list[int], sampling: SamplingConfig, *rest: Any) -> Any:
        found = begin(drafting, text, sampling, *rest)
        begun.append((sampling.max_tokens, found is not None))
        return found

    def note_drafts(drafting: Drafting, asked: Sequence[DraftRequest], max_nodes: int) -> Any:
        found = propose(drafting, asked, max_nodes)
        sizes = [len(draft) for draft in found if isinstance(draft, Draft)]
        assert sum(each.text is not None for each in asked) <= 1
        for each, size in zip(asked, sizes, strict=True):
            assert size == 1 or each.text is not None
        drafted_for.append(sum(size > 1 for size in sizes))
        return found

    monkeypatch.setattr(Drafting, "begin", note_begin)
    monkeypatch.setattr(Drafting, "propose", note_drafts)
    with load(bundle, speculation="eagle", parallel=3) as model:
        assert together(model, requests) == expected
        own = model._engine._drafting
        assert own is not None
        assert not any(text.is_used for text in own._texts)
    assert set(drafted_for) == {0, 1}
    # Those beside the first asked in vain; the longest had its turn in any case.
    assert begun[0][1]
    assert not all(has for _, has in begun)
    assert (60, True) in begun


@pytest.mark.parametrize("is_shared", [False, True])
def test_hidden_states_of_one_pass_live_at_once(
    bundle: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plan has it: those of a pass are gone when the next one begins."""
    always_draft(monkeypatch, [6])
    rows, tap = 64, Transformer._tap
    tapped: list[tuple[weakref.ref[Any], int]] = []
    peak = 0

    def note(
        transformer: Transformer, own: ForwardPass, layer: int, x: Any, count: int, into: list[Any]
    ) -> None:
        nonlocal peak
        tap(transformer, own, layer, x, count, into)
        if layer in own.taps:
            tapped.append((weakref.ref(into[-1]), into[-1].nbytes))
            peak = max(peak, sum(nbytes for found, nbytes in tapped if found() is not None))

    monkeypatch.setattr(Transformer, "_tap", note)
    with load(bundle, speculation="eagle", prefill_chunk=rows) as model:
        sampling = SamplingConfig(max_tokens=10, logit_bias=((EOS, -math.inf),))
        if is_shared:
            model.generate(tokens=LONG[: 2 * rows], sampling=sampling)
        else:
            alone = model._engine.generate
            model._owner.call(lambda: list(alone(None, LONG[: 2 * rows], sampling, never_cancelled)))
        width = model.bundle.config.hidden_size
    assert len(tapped) > 3 * 3
    assert peak == 4 * rows * 3 * width


def test_a_plan_counts_the_layer(bundle: Path) -> None:
    plans = {name: ondevice.inspect(bundle, speculation=name) for name in ("off", "lookup", "eagle")}
    assert plans["eagle"].draft_bytes > plans["lookup"].draft_bytes + 100_000
    for plan in plans.values():
        needed = plan.minimum_budget_bytes - plan.process_bytes - plan.draft_bytes
        assert needed == plans["off"].minimum_budget_bytes - plans["off"].process_bytes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a head, whose neurons are most of it."""
    folder = tmp_path_factory.mktemp("wide")
    checkpoint = write_chat_checkpoint(folder / "checkpoint", hidden_act="relu", intermediate_size=1 << 15)
    bundle = convert_bundle(checkpoint, folder / "bundle")
    convert_eagle(write_eagle_head(folder / "head"), bundle)
    return bundle


@pytest.mark.usefixtures("steady_process")
def test_auto_takes_the_layer_where_there_is_room(wide: Path) -> None:
    """The memory of a layer never costs `auto` its other drafters, nor a place without flash."""

    def taken(budget: str | int) -> ResolvedModel:
        return open_model(wide, RuntimeConfig(dram_budget=budget, sparsity="dense", max_context=64))

    found = taken("4GB")  # More than a process that ran all other tests holds.
    layered, bare, off = (it.plan for it in found.alternatives)
    assert found.draft_layer == found.bundle.eagle is not None
    assert layered.draft_bytes > bare.draft_bytes > off.draft_bytes
    for budget, offloads in ((layered.resident_budget_bytes, False), (layered.least_budget_bytes, True)):
        less = taken(budget - 1)
        assert (less.runtime.speculation, less.draft_layer) == ("auto", None)
        assert less.plan.fits
        assert less.plan.offloads_weights == offloads
    # Where flash is read in any case, the layer saves reads.
    assert taken(off.resident_budget_bytes - 1).draft_layer == found.draft_layer


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("sparsity", ["dense", "exact", "predicted", "experts"])
def test_a_layer_comes_last_where_selected_neurons_are_read(sparsity: Sparsity, offloads: bool) -> None:
    """Models with experts keep it."""
    config = SimpleNamespace(zeros_gates=True)
    possible: list[Any] = [
        SimpleNamespace(
            plan=SimpleNamespace(fits=True, offloads_weights=offloads),
            runtime=RuntimeConfig(sparsity=mode),
            bundle=SimpleNamespace(config=config, streams=None),
            draft_layer=layer,
        )
        for mode in (sparsity, "dense")
        for layer in (object(), None)
    ]
    without = offloads and sparsity in ("exact", "predicted")
    assert _preferred(possible) == (1 if without else 0)


@pytest.mark.usefixtures("steady_process")
def test_auto_goes_without_the_layer_where_selected_neurons_are_read(wide: Path) -> None:
    """Its memory would be theirs."""

    def taken(budget: str | int, speculation: Speculation = "auto") -> ResolvedModel:
        runtime = RuntimeConfig(dram_budget=budget, sparsity="exact", speculation=speculation, max_context=64)
        return open_model(wide, runtime)

    whole = taken("4GB")
    layered, _, off = (it.plan for it in whole.alternatives)
    assert whole.draft_layer is not None
    for budget in (off.resident_budget_bytes - 1, layered.least_budget_bytes):
        found = taken(budget)
        assert found.plan.fits
        assert found.plan.offloads_weights
        assert (found.runtime.speculation, found.draft_layer) == ("auto", None)
        # Asked for by name, it is there.
        assert taken(budget, "eagle").draft_layer == whole.draft_layer


@pytest.mark.usefixtures("steady_process")
def test_auto_goes_without_streams_where_selected_neurons_are_read() -> None:
    """The shipped model has a layer and streams. Dense neurons are read once for all of a draft."""

    def taken(budget: int, sparsity: Sparsity, speculation: Speculation = "auto") -> ResolvedModel:
        options: Any = {"sparsity": sparsity, "speculation": speculation, "max_context": 512}
        return open_model(SHIPPED, RuntimeConfig(backend="cpu", dram_budget=budget, **options))

    for sparsity in ("exact", "predicted", "dense"):
        off = taken(1 << 40, sparsity, "off").plan
        whole, bare = taken(1 << 40, sparsity), taken(off.resident_budget_bytes - 1, sparsity)
        assert whole.draft_layer is not None
        assert whole.runs_streams
        assert bare.plan.fits
        assert bare.plan.offloads_weights
        assert bare.runtime.speculation == "auto"
        assert bare.draft_layer is None
        assert bare.runs_streams == (sparsity == "dense")
        # Asked for by name, they are there. What isn't loaded isn't planned.
        named = taken(off.resident_budget_bytes - 1, sparsity, "streams")
        assert named.runs_streams
        assert (bare.loaded_bytes < named.loaded_bytes) == (sparsity != "dense")
        with_streams = next(it for it in bare.alternatives if it.draft_layer is None and it.runs_streams)
        less = with_streams.plan.minimum_budget_bytes - bare.plan.minimum_budget_bytes
        assert (less > 0) == (sparsity != "dense")


def test_auto_drafts_with_the_layer(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [6])
    monkeypatch.setattr("ondevice.runtime.engine.MIN_PASS_SECONDS", 0.0)
    with load(bundle) as model:
        rows = Rows(monkeypatch)
        model.generate(tokens=LONG, max_tokens=20, logit_bias={EOS: -math.inf})
        assert model._engine.transformer.taps
    # The prompt's rows, in pieces, and those of drafts.
    assert sum(len(tokens) for start, tokens, _ in rows.ran if start < len(LONG) - 1) >= len(LONG) - 1
    assert len(rows.ran) > 20
    monkeypatch.setattr("ondevice.runtime.engine.MIN_PASS_SECONDS", 60.0)
    with load(bundle) as model:
        rows.ran.clear()
        model.generate(tokens=LONG, max_tokens=20, logit_bias={EOS: -math.inf})
        # Passes that are too short for drafts hand nothing out.
        assert not model._engine.transformer.taps
    assert not rows.ran


def test_embeddings_of_its_own_are_read_and_checked_in_pieces(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that loading them takes no more than themselves and what is read ahead."""
    folder = copy_files(bundle, tmp_path / "bundle")
    tensors = head_tensors(head_config(), embeddings=True)
    convert_eagle(write_eagle_head(tmp_path / "head", tensors), folder)
    rows, ran = TensorFile.rows, list[int]()
    is_spoilt = False

    def note(file: TensorFile, name: str, stored: RowFormat, row0: int, count: int) -> RowChunk:
        chunk = rows(file, name, stored, row0, count)
        if name.endswith(EMBEDDINGS):
            ran.append(count)
            if is_spoilt and row0:
                chunk.codes.view(np.float16)[-1, -1] = np.inf
        return chunk

    monkeypatch.setattr(TensorFile, "rows", note)
    monkeypatch.setattr("ondevice.model.parts.CHUNK_BYTES", 16 << 10)
    with running(folder, "cpu") as transformer:
        with layer_of(folder, transformer) as layer:
            found = layer.weights[EMBEDDINGS][:, :64]
        np.testing.assert_array_equal(found, tensors["embed_tokens.weight"])
        # In any order, as several threads read ahead.
        assert sorted(ran) == [16, 128, 128]
        is_spoilt = True
        with (
            pytest.raises(BundleError, match="embeddings hold values that are not finite"),
            layer_of(folder, transformer),
        ):
            pass


def test_a_model_without_a_head_is_refused(bundle: Path, tmp_path: Path) -> None:
    folder = copy_files(bundle, tmp_path / "bundle")
    (folder / EAGLE_SIDECAR.manifest).unlink()
    with pytest.raises(UnsupportedModelError, match=r"no eagle layer; `ondevice convert HEADS --draft-for"):
        load(folder, speculation="eagle")
    with pytest.raises(UnsupportedModelError, match="no mtp layer"):
        load(bundle, speculation="mtp")


def test_a_damaged_head_is_refused_and_hurts_nothing_else(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_files(bundle, tmp_path / "bundle")
    tensors = folder / EAGLE_SIDECAR.tensors
    data = bytearray(tensors.read_bytes())
    data[-1000] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(BundleError, match=r"eagle\.safetensors"):
        load(folder, speculation="eagle")
    with caplog.at_level("WARNING"), load(folder) as model:
        assert write(model, 4)
        assert model.plan.draft_bytes < ondevice.inspect(bundle).draft_bytes
    assert "eagle.safetensors" in caplog.text


def test_the_shipped_head_drafts_two_tokens_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests.benchmarks.explain.draft_layer` has the figures over more text."""
    always_draft(monkeypatch, [DRAFT_NODES])
    asked = [words for task in BUILT_IN if task.chat for words in task.at_most(1).prompts]
    with load(SHIPPED, speculation="off") as plain, load(SHIPPED, speculation="eagle") as drafting:
        tokens = passes = 0
        for words in asked:
            expected = plain.session().respond(words, max_tokens=40, temperature=0.0)
            found = drafting.session().respond(words, max_tokens=40, temperature=0.0)
            assert found.tokens == expected.tokens
            tokens, passes = tokens + len(found.tokens) - 1, passes + found.stats.decode_passes
    assert tokens / passes > 2
