"""A model that several ranks share, each with some of its layers, computes the bits of one machine.

Ranks are threads here, and messages go through queues; `test_ring.py` has processes and sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import ondevice.backends.cpu_layers
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import Cancelled
from ondevice.distributed.layer_server import LayerServer
from ondevice.distributed.remote_layers import RemoteLayers
from ondevice.model.layer_range import SequencePart
from ondevice.model.sequence_state import KVLayout, SequenceState, allocate_block
from ondevice.model.transformer import Transformer
from ondevice.model_config import cut_places
from tests.golden.build import golden_config
from tests.support.engines import BackendName, random_tokens, running
from tests.support.ranks import QueueTransport, end_ring, ring_of
from tests.support.small_models import MODELS, write_small

TREE = TokenTree([-1, 0, 0, 1, 2, 3])


@contextmanager
def shared_model(
    bundle: Bundle, cuts: Sequence[int], backend: BackendName = "cpu", kv_bits: Literal[16, 8] = 16
) -> Iterator[Shared]:
    """The model, of which every part is a thread's own. Without cuts it is all on this one."""
    edges = [0, *cuts, bundle.config.num_layers]
    parts = [bundle.slice(first, stop) for first, stop in pairwise(edges)]
    transports, errors, servers = ring_of(len(parts)), list[BaseException](), list[LayerServer]()

    def serve(rank: int) -> None:
        with end_ring(transports[rank], errors), running(parts[rank], backend) as model:
            layout = KVLayout(model.config, kv_bits, drafts=True)
            server = LayerServer(model, transports[rank], lambda: SequenceState(layout))
            servers.append(server)
            server.run()

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, len(parts))]
    for thread in threads:
        thread.start()
    with ExitStack() as stack:
        model = stack.enter_context(running(parts[0], backend))
        later = RemoteLayers(transports[0], model.config) if cuts else None
        model.later = later
        layout = KVLayout(model.config, kv_bits, drafts=True)
        yield Shared(model, layout, later, servers, transports)
        if later is not None:
            later.end()
    for thread in threads:
        thread.join()
    assert not errors


class Shared:
    """A model that ranks share. `model`: rank 0's part."""

    def __init__(
        self,
        model: Transformer,
        layout: KVLayout,
        later: RemoteLayers | None,
        servers: list[LayerServer],
        transports: list[QueueTransport],
    ) -> None:
        self.model, self.servers, self.transports = model, servers, transports
        self._later, self._layout = later, layout

    def state(self) -> SequenceState:
        if self._later is None:
            return SequenceState(self._layout)
        return self._later.new_state(self._layout, allocate_block, lambda block: None)

    def logits(self, hidden: np.ndarray) -> bytes:
        return np.array(self.model.logits(hidden)).tobytes()


def passes(shared: Shared) -> list[bytes]:
    """The bits that passes of every kind give: prompts in pieces, texts, trees, forks, drafts that fail."""
    model, kv, found = shared.model, shared.state(), list[bytes]()
    tokens = random_tokens(model.config, 60)

    def run(batch: ForwardBatch, state: SequenceState) -> np.ndarray:
        hidden = np.array(model.run(batch, state).hidden)
        found.append(shared.logits(hidden.copy()))
        return hidden

    model.run(ForwardBatch(tokens[:5], last_only=True, silent=True), kv)
    model.run(ForwardBatch(tokens[5:12], last_only=True, silent=True), kv)
    run(ForwardBatch(tokens[12:20], last_only=True), kv)
    run(ForwardBatch(tokens[20:22]), kv)
    for start, path in ((22, [0, 2, 4]), (25, [0]), (26, [0, 1, 3, 5])):
        run(ForwardBatch(tokens[start : start + 6], TREE, drafted=range(1, 6)), kv)
        model.keep(kv, start, path)
        model.accept(ForwardBatch(tokens[start : start + 6], TREE, drafted=range(1, 6)), path)
    copy = kv.fork()
    calls = iter([False, True])
    with pytest.raises(Cancelled):
        model.run(ForwardBatch(tokens[30:33]), copy, lambda: next(calls))
    run(ForwardBatch(tokens[30:33]), copy)
    run(ForwardBatch([tokens[40]], last_only=True), kv)
    kv.truncate(9)
    model.run(ForwardBatch(tokens[kv.length : 14]), kv)
    parts = [SequencePart(ForwardBatch([tokens[it]]), state) for it, state in ((50, kv), (51, copy))]
    found.append(shared.logits(np.array(model.run_each(parts))))
    copy.truncate(0)
    run(ForwardBatch(tokens[3:6]), copy)
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bundle]:
    """Small bundles by the names of `MODELS`."""
    folder, found = tmp_path_factory.mktemp("models"), dict[str, Bundle]()

    def bundle(name: str) -> Bundle:
        if name not in found:
            found[name] = Bundle.open(write_small(folder / name.replace(" ", "-"), MODELS[name]))
        return found[name]

    return bundle


@pytest.mark.fast("cpu-many blocks", "cpu-mixers beside attention", "cpu-delta", "cpu-latent", "cpu-experts")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_every_kind_of_model_has_the_bits_of_one_machine(
    name: str, backend: BackendName, made: Callable[[str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two or three layers in a native call, and a pass is cancelled between two calls.
    monkeypatch.setattr(ondevice.backends.cpu_layers, "BYTES_AT_ONCE", 48 << 10)
    bundle = made(name)
    with shared_model(bundle, (), backend) as alone:
        expected = passes(alone)
    places = cut_places(bundle.config)
    for cuts in {places[:1], places[-1:], places[:2]}:
        with shared_model(bundle, cuts, backend) as shared:
            assert passes(shared) == expected, cuts
            # Its copy and the text itself.
            held = [sum(kv.length > 0 for kv in server._states.values()) for server in shared.servers]
            assert held == [2] * len(cuts)


@pytest.mark.fast("16-order1", "8-order2")
@pytest.mark.parametrize("order", [(0, 1, 1), (1, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_ranks_go_back_to_the_same_states(
    order: Sequence[int], kv_bits: Literal[16, 8], tmp_path: Path
) -> None:
    """Those of the whole model, whatever each rank's share of its recurrent layers is."""
    plain, delta = MODELS["delta"].layers[2], MODELS["delta"].layers[0]
    config = replace(MODELS["delta"], layers=tuple((plain, delta)[it] for it in order))
    bundle = Bundle.open(write_small(tmp_path / "model", config))
    spacing = KVLayout(config, kv_bits).states.spacing
    tokens = random_tokens(config, 2 * spacing + 10)
    found = []
    for cuts in ((), (1,), (1, 2)):
        with shared_model(bundle, cuts, kv_bits=kv_bits) as shared:
            kv, model = shared.state(), shared.model
            kv.mark_prompt(spacing + 24)
            while kv.length < len(tokens):
                chunk = tokens[kv.length : kv.end_of_chunk(len(tokens))]
                model.run(ForwardBatch(chunk, last_only=True, silent=True), kv)
            # To where the prompt is marked, near its end, and to the last multiple of the distance.
            for kept in (spacing + 16, spacing):
                kv.truncate(kept + 3)
                assert kv.length == kept
                hidden = model.run(ForwardBatch(tokens[kept:][:20], last_only=True), kv).hidden
                found.append(shared.logits(np.array(hidden)))
    assert found[:2] == found[2:4] == found[4:]


def test_61_layers_run_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(write_small(tmp_path / "model", golden_config(num_layers=61)))
    ran: list[int] = []
    own = Transformer._layer

    def noted(model: Transformer, layer: int, *rest: object) -> object:
        ran.append(model.first + layer)
        return own(model, layer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "_layer", noted)
    with shared_model(bundle, ()) as alone:
        expected = alone.logits(np.array(alone.model.run(ForwardBatch([5, 6, 7]), alone.state()).hidden))
    for cuts in ((30,), (15, 16, 46)):
        ran.clear()
        with shared_model(bundle, cuts) as shared:
            found = shared.model.run(ForwardBatch([5, 6, 7]), shared.state())
        assert shared.logits(np.array(found.hidden)) == expected
        assert ran == list(range(61))


def test_a_chunk_that_nobody_asks_of_is_not_waited_for(made: Callable[[str], Bundle]) -> None:
    with shared_model(made("dense"), (2,)) as shared:
        kv = shared.state()
        for _ in range(3):
            shared.model.run(ForwardBatch([5, 6, 7], last_only=True, silent=True), kv)
        assert not shared.transports[1].hops
        found = shared.model.run(ForwardBatch([8], last_only=True), kv)
        assert len(shared.transports[1].hops) == 1
        with shared_model(made("dense"), ()) as alone:
            expected = alone.model.run(ForwardBatch([5, 6, 7] * 3 + [8], last_only=True), alone.state())
            assert np.array(found.hidden).tobytes() == np.array(expected.hidden).tobytes()
