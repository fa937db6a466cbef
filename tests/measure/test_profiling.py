"""Profiles: figures against direct counts, the optimum against every cache there is, the command."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ondevice.backends.base import Float32, Norm
from ondevice.backends.reference import ReferenceBackend
from ondevice.bundle.reader import Bundle
from ondevice.commands.bench_reports import profile_table
from ondevice.errors import BackendUnavailableError, FlashReadError, UsageError
from ondevice.flash.throughput import measure_throughput, random_extents
from ondevice.measure import plots, profiling
from ondevice.measure.profiling import cache_misses, firing_of, profile, recorded_gates
from ondevice.sparsity.policies import POLICIES
from ondevice.sparsity.replay import Optimum, hit_rate
from ondevice.units import PAGE_BYTES
from tests.support.bundles import convert_bundle, write_chat_checkpoint
from tests.support.command_line import Run
from tests.support.engines import all_logits, bundle_weights, running
from tests.support.flash_files import HEADER_BYTES, PARTS, STRIDE, write_records
from tests.support.models import write_checkpoint

LAYERS, NEURONS = 3, 200
SHAPE = {"num_hidden_layers": LAYERS, "intermediate_size": NEURONS, "hidden_act": "relu"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu")
    return convert_bundle(write_chat_checkpoint(folder / "checkpoint", **SHAPE), folder / "small", "q8")


@pytest.fixture(autouse=True)
def quick_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measure_throughput", partial(measure_throughput, seconds=0.002))


def made_up_gates(tokens: int, layers: int = 2, neurons: int = 60, seed: int = 0) -> Float32:
    """(L, T, F): a fifth fires, some neurons more than others, and what fired is likelier to fire again."""
    rng = np.random.default_rng(seed)
    gates = rng.standard_normal((layers, tokens, neurons)) + rng.standard_normal((layers, 1, neurons))
    for token in range(1, tokens):
        gates[:, token] = 0.7 * gates[:, token - 1] + 0.7 * gates[:, token]
    return (gates - np.quantile(gates, 0.8)).astype(np.float32)


def test_recorded_gates_are_the_model_s(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    pieces = [rng.integers(0, 250, length).tolist() for length in (40, 1, 20)]
    weights = bundle_weights(bundle)
    seen: list[Float32] = []
    plain = ReferenceBackend.feed_forward

    def noting(self: ReferenceBackend, x: Float32, *others: Any, norm: Norm, **named: Any) -> Float32:
        gate = weights[f"model.layers.{len(seen) % LAYERS}.mlp.gate_proj.weight"]
        seen.append(self.normed(x, norm) @ gate.T)
        return plain(self, x, *others, norm=norm, **named)

    monkeypatch.setattr(ReferenceBackend, "feed_forward", noting)
    with running(bundle) as model:
        for piece in pieces:
            all_logits(model, piece)
    expected = np.stack([np.concatenate(seen[layer::LAYERS]) for layer in range(LAYERS)])
    told: list[int] = []
    with recorded_gates(Bundle.open(bundle), pieces, told.append) as gates:
        assert [layer.shape for layer in gates] == [(61, NEURONS)] * LAYERS
        assert told == [40, 41, 61]
        # The engine's activations have 8 bits.
        assert np.abs(np.stack(gates) - expected).mean() < 0.05 * expected.std()
        assert ((np.stack(gates) > 0) == (expected > 0)).mean() > 0.97
        scratch = Path(gates[0].filename).parent
    assert not scratch.exists()


@pytest.mark.parametrize("lengths", [[50], [40, 3, 1, 37], [5, 9, 2]])
def test_figures_of_firing_are_direct_counts(lengths: list[int]) -> None:
    gates = made_up_gates(sum(lengths))
    found = firing_of(gates, lengths)
    ends = list(itertools.accumulate(lengths))
    pieces = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    spans = min(32, max(lengths))
    for layer, values in enumerate(gates):
        fired = [{neuron for neuron in range(60) if row[neuron] > 0} for row in values]
        assert found.active[layer] == pytest.approx(sum(map(len, fired)) / len(fired) / 60)
        again = sum(len(fired[t] & fired[t - 1]) for piece in pieces for t in piece[1:])
        counted = sum(len(fired[t]) for piece in pieces for t in piece[1:])
        assert found.also_before[layer] == pytest.approx(again / counted)
        # The places from which all windows begin have room for the longest in their piece.
        places = [t for piece in pieces for t in piece if t + spans <= piece.stop]
        expected = [
            np.mean([len(set().union(*fired[t : t + span])) / 60 for t in places])
            for span in range(1, spans + 1)
        ]
        assert found.distinct[layer] == pytest.approx(expected)
        assert list(found.distinct[layer]) == sorted(found.distinct[layer])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_everything_misses_what_fires_first_and_one_of_nothing_all(policy: str) -> None:
    gates = made_up_gates(30)
    fired = gates > 0
    later, everything = fired[:, 5:], 2 * 60
    new = (~fired[:, :5].any(axis=1) & later.any(axis=1)).sum()
    for equal in (True, False):
        assert hit_rate(gates, policy, everything, 5, equal) == pytest.approx(1 - new / later.sum())
        assert Optimum(gates, 5, equal).hit_rate(everything) == pytest.approx(1 - new / later.sum())
        assert hit_rate(gates, policy, 0, 5, equal) == Optimum(gates, 5, equal).hit_rate(0) == 0.0
    assert hit_rate(np.full_like(gates, -1), policy, 10, 5) == Optimum(np.full_like(gates, -1), 5).hit_rate(9)


def most_hits(gates: Float32, slots: int, warm_up: int) -> int:
    """Of every cache that there could be: after each layer of each token it may keep any of what it had."""
    layers, tokens, _ = gates.shape
    best: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    for token, layer in itertools.product(range(tokens), range(layers)):
        active = {(layer, int(neuron)) for neuron in np.flatnonzero(gates[layer, token] > 0)}
        following: dict[frozenset[tuple[int, int]], int] = {}
        for held, hits in best.items():
            hits += len(held & active) if token >= warm_up else 0
            at_hand = sorted(held | active)
            for kept in itertools.combinations(at_hand, min(slots, len(at_hand))):
                key = frozenset(kept)
                following[key] = max(hits, following.get(key, 0))
        best = following
    return max(best.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_the_best_of_all_caches(seed: int) -> None:
    gates = np.random.default_rng(seed).standard_normal((2, 7, 4)).astype(np.float32)
    warm_up, slots = seed % 4, 1 + seed % 3
    lookups = int((gates[:, warm_up:] > 0).sum())
    assert Optimum(gates, warm_up).hit_rate(slots) * lookups == pytest.approx(
        most_hits(gates, slots, warm_up)
    )


def test_no_policy_beats_the_optimum_and_larger_caches_miss_less() -> None:
    gates = made_up_gates(120, layers=3)
    # One layer that fires more: shared slots are worth more than equal ones.
    gates[1] += 0.5
    told: list[float] = []
    misses = cache_misses(gates, told.append)
    assert told == sorted(told)
    assert misses.warm_up_tokens == 30
    assert list(misses.policies) == list(POLICIES)
    for rates in (*misses.policies.values(), misses.optimum):
        assert list(rates) == sorted(rates, reverse=True)
        assert rates[0] > rates[-1]
    for rates in misses.policies.values():
        assert all(rate >= best for rate, best in zip(rates, misses.optimum, strict=True))
    for slots in (9, 36, 90):
        shared, equal = (Optimum(gates, 30, equal).hit_rate(slots) for equal in (False, True))
        assert shared >= equal
        for policy in POLICIES:
            assert hit_rate(gates, policy, slots, 30, equal=True) <= equal


def test_reads_are_whole_units_within_their_pages(tmp_path: Path) -> None:
    files = [write_records(tmp_path / str(n), n).checked for n in (2, 50, 400)]
    bounds = {HEADER_BYTES + record * STRIDE + start for record in range(401) for start in (0, PARTS[0])}
    for nbytes in (PAGE_BYTES, 4 * PAGE_BYTES, 64 * PAGE_BYTES):
        extents = random_extents(files, nbytes)
        assert {extent.file for extent in extents} == ({1, 2} if nbytes < 64 * PAGE_BYTES else {2})
        for extent in extents:
            assert {extent.offset, extent.offset + extent.nbytes} <= bounds
            pages = -(-(extent.offset + extent.nbytes) // PAGE_BYTES) - extent.offset // PAGE_BYTES
            assert nbytes // PAGE_BYTES - 2 < pages <= nbytes // PAGE_BYTES
        assert len({extent.offset for extent in extents}) > 15
    found = measure_throughput(files, (2, 5), (PAGE_BYTES, 1 << 20), seconds=0.01)
    assert [(rate.threads, rate.read_bytes) for rate in found.rates] == [
        (2, PAGE_BYTES), (2, 1 << 20), (5, PAGE_BYTES), (5, 1 << 20)
    ]  # fmt: skip
    for rate in found.rates:
        assert (rate.bytes_per_second is None) == (rate.read_bytes == 1 << 20)
        assert rate.bytes_per_second is None or rate.bytes_per_second > 1e4


def test_reads_fail_as_all_reads_do(tmp_path: Path) -> None:
    file = write_records(tmp_path / "damaged", 200).checked
    file.path.write_bytes(bytes(file.nbytes))
    with pytest.raises(FlashReadError, match="checksum"):
        measure_throughput([file], (2,), seconds=0.01)


def checked(found: profiling.Profile, tokens: int) -> dict[str, object]:
    """Its JSON."""
    assert (found.tokens, found.num_layers, found.num_neurons) == (tokens, LAYERS, NEURONS)
    assert found.firing is not None
    assert found.misses is not None
    shown = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert list(shown) == [
        "model", "text", "tokens", "num_layers", "num_neurons", "firing", "misses", "reads", "notes"
    ]  # fmt: skip
    return shown


def test_a_profile_takes_pieces_a_text_or_the_model_s_own_text(bundle: Path, tmp_path: Path) -> None:
    pieces = np.random.default_rng(3).integers(0, 250, (2, 40)).tolist()
    told: list[float] = []
    found = profile(bundle, pieces=pieces, on_progress=lambda fraction, what: told.append(fraction))
    checked(found, 80)
    assert told == sorted(told)
    assert told[-1] == 1.0
    with recorded_gates(Bundle.open(bundle), pieces) as gates:
        assert found.firing == firing_of(gates, [40, 40])
        assert found.misses == cache_misses(gates)
    assert found.text == "the text given"
    checked(profile(bundle, "A short text, but long enough.", tokens=20), 20)
    own = profile(bundle, tokens=30)
    checked(own, 30)
    assert own.text.startswith('the model\'s own at temperature 0.8, continuing "Once upon a time", ')
    mute = convert_bundle(write_checkpoint(tmp_path / "checkpoint", **SHAPE), tmp_path / "mute", "q8")
    assert "made-up token ids" in profile(mute, tokens=20).text


@pytest.mark.slow
def test_the_models_own_text_is_always_the_same(bundle: Path) -> None:
    assert profile(bundle, tokens=70).firing == profile(bundle, tokens=70).firing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "too short"}, "the text has 10 tokens; a profile takes 16 or more"),
        ({"text": ""}, "the text has 0 tokens"),
        ({"pieces": [[1] * 9, []]}, "the text has 9 tokens"),
        ({"text": "x", "pieces": [[1]]}, "either a text or pieces"),
        ({"tokens": 15}, "tokens is 15; it must be 16 or more"),
    ],
)
def test_too_little_is_refused(bundle: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile(bundle, **options)


def svg_texts(path: Path) -> str:
    """All the writing in an SVG file, which is XML."""
    root = ElementTree.fromstring(path.read_bytes())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))


def names(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_command_draws_the_shipped_model(ondevice: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "new" / "plots"
    done = ondevice("profile", "--output", output, "--tokens", 40)
    assert done.code == 0, done.err
    assert names(output) == sorted(
        [plots.SPARSITY, plots.AGGREGATED, plots.MISSES, plots.READS, plots.NUMBERS]
    )
    for part in ("small-relu: 6 layers of 1024 neurons", "40 tokens: the model's own", "Belady", "1024 KiB"):
        assert part in done.out
    for name, part in (
        (plots.SPARSITY, "gates that are zero"),
        (plots.AGGREGATED, "neighbouring tokens"),
        (plots.MISSES, "offline optimum (Belady)"),
        (plots.READS, "32 reader threads"),
    ):
        assert part in svg_texts(output / name)
    numbers = json.loads((output / plots.NUMBERS).read_text())
    assert numbers["misses"]["default_policy"] in numbers["misses"]["policies"]
    assert (numbers["model"], numbers["tokens"]) == ("small-relu", 40)


def test_headings_of_the_table_stand_apart(bundle: Path) -> None:
    text = "A short text, but long enough for thirty-two tokens and more."
    lines = profile_table(profile(bundle, text)).splitlines()
    heads = [line for line in lines if "neurons  " in line]
    assert [re.split(r"\s{2,}", line.strip()) for line in heads] == [
        ["neurons", "fire", "before too", "in 8 tokens", "in 32 tokens"]
    ]


@pytest.mark.slow
def test_equal_numbers_draw_equal_files(bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = profile(bundle, "A short text, but long enough.")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        plots.draw(found, tmp_path / folder)
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in names(tmp_path / "a")
    )


def test_without_matplotlib_there_are_numbers_but_no_plots(
    ondevice: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots.util, "find_spec", lambda name: None)
    monkeypatch.setattr(plots, "profile", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'ondevice\[plots\]'"):
        plots.draw_profile(tmp_path / "plots", bundle)
    refused = ondevice("profile", "-m", bundle, "-o", tmp_path / "plots")
    assert (refused.code, refused.out) == (1, "")
    assert not (tmp_path / "plots").exists()
    monkeypatch.setattr(plots, "profile", profile)
    shown = ondevice("profile", "-m", bundle, "--tokens", 16, "--json").json
    assert shown["tokens"] == 16


def test_an_output_that_holds_something_is_refused_before_any_work(
    ondevice: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    with monkeypatch.context() as patch:
        patch.setattr(plots, "profile", None)
        (tmp_path / "file").touch()
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine").touch()
        for output in ("file", "full"):
            refused = ondevice("profile", "-m", bundle, "-o", tmp_path / output)
            assert refused.code == 2
            assert "isn't an empty folder" in refused.err
        assert ondevice("profile", "-m", bundle, "-o", tmp_path / "file" / "below").code == 1
    assert names(tmp_path / "full") == ["mine"]
    # What fails later leaves no empty folder.
    assert ondevice("profile", "-m", bundle, "-o", tmp_path / "new", "--text", "-", stdin="short").code == 2
    assert not (tmp_path / "new").exists()


def test_of_gates_that_are_hardly_ever_zero_it_measures_reads_and_says_why(
    ondevice: Run, chat_bundle: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    done = ondevice("profile", "-m", chat_bundle, "-o", tmp_path / "plots")
    assert done.code == 0
    assert names(tmp_path / "plots") == sorted([plots.READS, plots.NUMBERS])
    assert "note: silu gates are hardly ever exactly zero" in done.out
    shown = ondevice("profile", "-m", chat_bundle, "--json").json
    assert (shown["firing"], shown["misses"], shown["tokens"], shown["text"]) == (None, None, 0, "none")
    assert any(rate["bytes_per_second"] for rate in shown["reads"]["rates"])
    assert any("no sparsity to show" in note for note in shown["notes"])
