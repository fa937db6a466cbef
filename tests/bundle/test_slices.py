"""Slices of bundles: every layer once, the bits of the whole model, plans of what they have alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.plan import Plan, plan_memory
from ondevice.budget.sizes import SegmentShape
from ondevice.bundle.layout import EMBEDDING, gate_file_name, neuron_file_name
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.training.hotness import write_hotness
from ondevice.errors import BundleError, UnsupportedModelError, UsageError
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import FULL_MODEL, ModelConfig, cut_places
from ondevice.model_config.part import part_config
from tests.golden.build import golden_config
from tests.support.bundles import open_sound
from tests.support.engines import BackendName, random_tokens, running
from tests.support.made_up_predictors import add_predictors
from tests.support.made_up_streams import add_streams
from tests.support.small_models import MODELS, write_small

TOKENS = 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("small")
    return {name: write_small(made / name.replace(" ", "-"), config) for name, config in MODELS.items()}


def slices(bundle: Bundle, cuts: Sequence[int]) -> list[Bundle]:
    """The bundle's slices between these cuts."""
    ends = [0, *cuts, bundle.config.num_layers]
    return [bundle.slice(first, stop) for first, stop in pairwise(ends)]


def all_cuts(config: ModelConfig) -> list[tuple[int, ...]]:
    """Ways to cut a model: everywhere, and in two at each place."""
    places = cut_places(config)
    return [places, *((place,) for place in places if len(places) > 1)]


def through(
    model: Transformer, tokens: list[int], copies: list[np.ndarray], inputs: np.ndarray | None
) -> list[np.ndarray]:
    """What leaves a part's last layer, layer by layer."""
    kv, width = SequenceState(KVLayout(model.config, 16)), model.config.per_layer_width
    first = model.config.part.first
    for layer in range(model.config.num_layers):
        if kv.states is None:
            # `truncate` would free keys that later layers share.
            kv.tokens.clear()
        else:
            kv.truncate(0)
        own = None if inputs is None else inputs[:, (first + layer) * width :][:, :width]
        copies = [np.array(copy) for copy in model.layer(layer, copies, tokens, kv, own)]
    return copies


def sliced_states(
    parts: list[Bundle], tokens: list[int], backend: BackendName
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and logits of a model that is run slice by slice, each of them loaded alone."""
    with ExitStack() as stack:
        first = stack.enter_context(running(parts[0], backend))
        entering, inputs = first.embed_residuals(tokens)
        copies, inputs = [np.array(copy) for copy in entering], None if inputs is None else np.array(inputs)
        copies = through(first, tokens, copies, inputs)
        for part in parts[1:]:
            with running(part, backend) as model:
                copies = through(model, tokens, copies, inputs)
        hidden = np.array(first.merge_residuals(copies))
        return hidden, np.array(first.logits(hidden.copy()))


@pytest.mark.fast(
    "cpu-dense", "cpu-mixers", "cpu-many blocks", "cpu-experts", "cpu-latent", "cpu-convolutions"
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_slices_give_the_bits_of_the_whole(name: str, backend: BackendName, folders: dict[str, Path]) -> None:
    bundle, tokens = Bundle.open(folders[name]), random_tokens(MODELS[name], TOKENS)
    with running(bundle, backend) as whole:
        hidden = np.array(whole.hidden_states(tokens, SequenceState(KVLayout(whole.config, 16))))
        logits = np.array(whole.logits(hidden.copy()))
    for cuts in all_cuts(bundle.config)[: 2 if backend == "reference" else None]:
        found, found_logits = sliced_states(slices(bundle, cuts), tokens, backend)
        assert found.tobytes() == hidden.tobytes(), cuts
        assert found_logits.tobytes() == logits.tobytes(), cuts


@pytest.fixture(scope="module")
def prime(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model of 61 layers with streams, predictors and hotness."""
    folder = write_small(tmp_path_factory.mktemp("prime") / "model", golden_config(num_layers=61))
    bundle = Bundle.open(folder)
    rng = np.random.default_rng(3)
    values = rng.random((61, 96), np.float32)
    add_predictors(folder)
    write_hotness(bundle, [own / 2 for own in values], 100, folder)
    add_streams(folder, layers=30)
    return open_sound(folder)


@pytest.mark.fast("cuts3")
@pytest.mark.parametrize("cuts", [(30,), (1,), (20, 41), (15, 16, 46)])
def test_61_layers_lie_in_one_slice_each(prime: Bundle, cuts: tuple[int, ...]) -> None:
    parts, config = slices(prime, cuts), prime.config
    assert [part.config.part.first for part in parts] == [0, *cuts]
    assert sum((part.config.layers for part in parts), ()) == config.layers
    assert {part.config.part.layers for part in parts} == {61}
    names = [part.neuron_file(layer).path.name for part in parts for layer in range(part.config.num_layers)]
    assert names == [neuron_file_name(layer) for layer in range(61)]
    gates = [part.gate_file(layer).path.name for part in parts for layer in range(part.config.num_layers)]
    assert gates == [gate_file_name(layer) for layer in range(61)]
    spans = [
        part.tensor_span(f"layers.{layer}.attention.q")
        for part in parts
        for layer in range(part.config.num_layers)
    ]
    assert spans == [prime.tensor_span(f"layers.{layer}.attention.q") for layer in range(61)]
    with pytest.raises(BundleError, match="no tensor"):
        parts[-1].tensor_span(f"layers.{parts[-1].config.num_layers}.attention.q")
    assert {name for part in parts[1:] for name in part.manifest.files}.isdisjoint({EMBEDDING})
    assert EMBEDDING in parts[0].manifest.files


@pytest.mark.fast("cuts1")
@pytest.mark.parametrize("cuts", [(30,), (31, 46), (20, 41)])
def test_sidecars_are_divided_by_layers(prime: Bundle, cuts: tuple[int, ...]) -> None:
    parts = slices(prime, cuts)
    whole, shares = prime.predictors, prime.frequencies()
    assert whole is not None
    assert shares is not None
    found = [part.predictors for part in parts]
    assert sum((it.ranks for it in found if it is not None), ()) == whole.ranks
    for at, point in enumerate(whole.points):
        assert sum((it.points[at].offsets for it in found if it is not None), ()) == point.offsets
    divided = [own for part in parts for own in part.frequencies() or ()]
    assert [own.tobytes() for own in divided] == [own.tobytes() for own in shares]
    begins = [part.streams is not None and part.streams.begins for part in parts]
    assert begins == [
        part.config.part.first <= 31 < part.config.part.first + part.config.num_layers for part in parts
    ]
    adapters = [
        (part.config.part.first + layer, part.tensor_span(f"layers.{layer}.out.up.codes"))
        for part in parts
        if part.streams is not None
        for layer in part.streams.layers(part.config)
    ]
    assert adapters == [(layer, prime.tensor_span(f"layers.{layer}.out.up.codes")) for layer in range(31, 61)]


def test_a_slice_of_a_slice_is_the_slice(prime: Bundle) -> None:
    direct, twice = prime.slice(35, 40), prime.slice(20, 50).slice(35, 40)
    assert twice.config == direct.config
    assert twice.manifest == direct.manifest
    assert twice.streams == direct.streams
    assert twice.tensor_span("layers.4.attention.out") == direct.tensor_span("layers.4.attention.out")
    with pytest.raises(UsageError, match="layers 10 to 39 aren't some of the layers 20 to 49"):
        prime.slice(20, 50).slice(10, 40)
    with pytest.raises(UsageError, match="without the embedding"):
        prime.slice(0, 5, embeds=False).slice(0, 2, embeds=True)


def test_all_layers_are_the_whole_bundle(prime: Bundle) -> None:
    assert prime.slice(0, 61) is prime
    assert prime.config.part == FULL_MODEL


def test_keys_and_the_layers_that_read_them_stay_together(folders: dict[str, Path]) -> None:
    bundle = Bundle.open(folders["many blocks"])
    assert cut_places(bundle.config) == (1, 2)
    assert bundle.slice(2, 5).config.layers[1].attention.keys_of == 0
    for first, stop in ((0, 3), (3, 5), (0, 4)):
        with pytest.raises(UnsupportedModelError, match="cut before one of 0, 1, 2, 5"):
            bundle.slice(first, stop)


@pytest.mark.fast("dense", "mixers", "many blocks", "experts", "delta")
@pytest.mark.parametrize("name", MODELS)
def test_plans_of_slices_add_up(name: str, folders: dict[str, Path]) -> None:
    bundle = Bundle.open(folders[name])
    for cuts in all_cuts(bundle.config):
        parts = slices(bundle, cuts)
        whole, *plans = (plan(it) for it in (bundle, *parts))
        assert sum(it.embedding_bytes for it in plans) == whole.embedding_bytes
        # Rows of a tied embedding are looked up in the head.
        assert plans[0].looks_up_head == whole.looks_up_head == bundle.config.tie_embeddings
        apart = [not whole.looks_up_head, *(False for _ in cuts)]
        assert [it.embedding_bytes > 0 for it in plans] == apart
        blocks = [KVLayout(it.config).layer_offsets[-1] for it in (bundle, *parts)]
        assert sum(blocks[1:]) == blocks[0]
        if bundle.config.experts is None:
            segments = [it.segment.per_layer for it in plans if isinstance(it.segment, SegmentShape)]
            assert isinstance(whole.segment, SegmentShape)
            assert sum(segments, ()) == whole.segment.per_layer
            assert {it.segment.nbytes for it in plans} == {whole.segment.nbytes}
        # Each part is rounded once more, by a checksum; experts' tables are there for each layer.
        assert abs(sum(it.weights_bytes for it in plans) - whole.weights_bytes) <= 8 * len(plans)


def plan(bundle: Bundle) -> Plan:
    memory = CpuMemory(bundle.config, bundle.quant, RuntimeConfig(threads=1), None, bundle.streams)
    return plan_memory(memory, budget_bytes=1 << 30, process_bytes=0)


@pytest.mark.parametrize(
    ("name", "cut", "change"),
    [
        ("experts", 2, {"widths": (1, 1, 1, 1)}),
        ("experts", 0, {"widths": ()}),
        ("experts", 2, {"experts": None}),
        ("delta", 2, {"states": ()}),
        ("delta", 2, {"states": (1, 64, 2)}),
        ("delta", 2, {"states": (4224, 64, 0)}),
        ("delta", 0, {"states": (4240, 64, 2)}),
        ("dense", 0, {"states": (4224, 64, 2)}),
    ],
)
def test_parts_that_contradict_their_layers_are_refused(name: str, cut: int, change: dict[str, Any]) -> None:
    config = MODELS[name]
    found = part_config(config, cut, config.num_layers, embeds=False, heads=False)
    with pytest.raises(UnsupportedModelError, match="a part has"):
        replace(found, part=replace(found.part, **change))
