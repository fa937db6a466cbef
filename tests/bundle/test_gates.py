"""A bundle whose maker means harm: gates that differ between files and scales that are no numbers, all hashes
true. No mode may give a text that another wouldn't."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ondevice.api import Model, load
from ondevice.bundle.gates import GateDigest
from ondevice.bundle.layout import (
    DATA_OFFSET,
    gate_file_name,
    head_matrix,
    neuron_file_name,
)
from ondevice.bundle.reader import Bundle
from ondevice.errors import BundleError, FlashReadError
from tests.malformed.rules import manifest_of, overwrite, reseal, seal
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT, squeeze

GATES, NEURONS = gate_file_name(2), neuron_file_name(2)
DIFFERS = f"{GATES} is not the gate rows that were read"


@pytest.fixture
def copy(relu_chat_bundle: Path, tmp_path: Path) -> Path:
    return copy_files(relu_chat_bundle, tmp_path / "copy")


def text(model: Model, tokens: int = 8) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=tokens, logit_bias={EOS: -math.inf}).tokens


def turn_gate_codes(folder: Path, name: str, stride: int, record: int) -> None:
    """Other codes in a gate row of a record file; its hashes are made true."""
    offset = DATA_OFFSET + record * stride
    codes = (folder / name).read_bytes()[offset : offset + 8]
    overwrite(name, offset, bytes(code ^ 0xFF for code in codes))(folder)
    reseal(folder, name)


@pytest.mark.fast("450")
@pytest.mark.parametrize("record", [0, 450, 899])
def test_records_with_other_gates_are_refused_where_they_are_multiplied(copy: Path, record: int) -> None:
    turn_gate_codes(copy, NEURONS, Bundle.open(copy).neuron_layouts[0].stride, record)
    with load(copy, sparsity="dense", threads=1) as model:
        for _ in range(3):  # by neurons that stay in memory it doesn't become sound
            with pytest.raises(BundleError, match=DIFFERS):
                text(model)
    with pytest.raises(BundleError, match=DIFFERS):
        load(copy, backend="reference")


def test_a_mode_that_reads_the_gate_file_alone_says_what_it_always_said(
    relu_chat_bundle: Path, copy: Path
) -> None:
    turn_gate_codes(copy, NEURONS, Bundle.open(copy).neuron_layouts[0].stride, 7)
    with load(relu_chat_bundle, sparsity="exact", threads=1) as sound:
        expected = text(sound)
    with load(copy, sparsity="exact", threads=1) as model:
        assert text(model) == expected


def test_a_gate_file_with_other_gates_is_refused_by_dense_mode_alone(copy: Path) -> None:
    """Its hash is the attacker's, and so it is the bundle's gates: the records' are others."""
    turn_gate_codes(copy, GATES, Bundle.open(copy).gate_layout.stride, 7)
    with load(copy, sparsity="exact", threads=1) as model:
        text(model)
    with load(copy, sparsity="dense", threads=1) as model, pytest.raises(BundleError, match=DIFFERS):
        text(model)


def test_a_gate_file_that_only_its_checksums_match_is_refused_on_loading(copy: Path) -> None:
    """The sha256 in the manifest stays that of the gates in the records."""
    entry = Bundle.open(copy).manifest.files[GATES].sha256
    turn_gate_codes(copy, GATES, Bundle.open(copy).gate_layout.stride, 7)
    content = manifest_of(copy)
    content["files"][GATES]["sha256"] = entry
    seal(copy, content)
    with pytest.raises(BundleError, match=DIFFERS):
        load(copy, sparsity="exact", threads=1)
    with load(copy, sparsity="dense", threads=1) as model:
        text(model)


def test_passes_that_were_cut_short_and_budgets_that_change_confuse_nothing(relu_chat_bundle: Path) -> None:
    with load(relu_chat_bundle, sparsity="dense", threads=1) as model:
        events = model.stream(PROMPT, max_tokens=4)
        next(events)
        events.close()  # type: ignore[attr-defined]
        squeeze(model)
        expected = text(model, 20)
        squeeze(model, 2)
        assert text(model, 20) == expected


@pytest.mark.parametrize("size", [1, 7, 300, 900])
def test_pieces_in_any_order_make_the_same_digest(relu_chat_bundle: Path, size: int) -> None:
    bundle = Bundle.open(relu_chat_bundle)
    files = {
        GATES: bundle.gate_layout.stride,
        NEURONS: bundle.neuron_layouts[0].stride,
    }
    for name, stride in files.items():
        records = np.fromfile(relu_chat_bundle / name, np.uint8, offset=DATA_OFFSET).reshape(-1, stride)
        starts = np.random.default_rng(size).permutation(range(0, 900, size))
        digest, wrong = GateDigest(bundle, 2), GateDigest(bundle, 1)
        for first in starts[:-1]:
            digest.take(int(first), records[first : first + size])
            wrong.take(int(first), records[first : first + size])
        assert digest.rows < 900
        last = int(starts[-1])
        digest.take(last, records[last : last + size])
        digest.take(0, records)
        assert digest.rows == 900
        for _ in range(2):
            with pytest.raises(BundleError):
                wrong.take(last, records[last : last + size])


INFINITY, NAN = b"\x00\x7c", b"\x01\xfe"


@pytest.mark.fast("dense-q4-*", "exact-f16-*")
@pytest.mark.parametrize("value", [INFINITY, NAN])
@pytest.mark.parametrize("quant", ["q4", "f16"])
@pytest.mark.parametrize("sparsity", ["dense", "exact"])
def test_a_scale_that_is_not_finite_is_damage_in_every_mode(
    tmp_path: Path, sparsity: str, quant: str, value: bytes
) -> None:
    checkpoint = write_chat_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1, hidden_act="relu")
    sound = convert_bundle(checkpoint, tmp_path / "sound", quant)
    bundle = Bundle.open(sound)
    neurons = bundle.neuron_layouts[0]
    down = neurons.part_offsets[1] + neurons.parts[1][0].nbytes + neurons.parts[1][1].halves[0]
    embedding, head = bundle.embedding_layout, head_matrix(bundle.config, bundle.quant)
    last = embedding.halves[0]
    places = {
        neuron_file_name(0): DATA_OFFSET + 699 * neurons.stride + down,
        "embedding.safetensors": DATA_OFFSET
        + 16 * embedding.stride
        + last.stop
        + (last.times - 1) * last.step
        - 2,
        "resident.safetensors": bundle.tensor_span("head").offset + head.halves.start + 2,
    }
    for name, offset in places.items():
        broken = copy_files(sound, tmp_path / name)
        overwrite(name, offset, value)(broken)
        reseal(broken, name)
        with (
            pytest.raises(FlashReadError, match=f"{name}.*not finite"),
            load(broken, sparsity=sparsity, threads=1) as model,
        ):
            model.logits(list(range(16, 272)))
