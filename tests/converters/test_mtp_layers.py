"""Multi-token-prediction layers in a bundle: equal to plain PyTorch, and no text depends on them."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import ondevice
from ondevice.api import Model, load
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.row_invariance import BY_CONSTRUCTION, RowInvariance, RowWidths
from ondevice.budget.draft_layers import loaded_bytes
from ondevice.bundle.draft_layers import MTP_SIDECAR, check_draft_layer
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig
from ondevice.converters.draft_layers.write import Pieces, write_draft_layer
from ondevice.errors import BackendUnavailableError, BudgetError, BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import GATED, load_draft_layer
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.model_config import ExpertsSpec, LatentSpec
from ondevice.runtime.backend_choice import allowed_draft_layer
from ondevice.speculation.tree import DRAFT_NODES
from tests.support.bundles import EOS, convert_bundle, copy_files, write_chat_checkpoint
from tests.support.chat import PROMPT
from tests.support.eagle_heads import add_mtp_layer, mtp_arrays, mtp_twin
from tests.support.engines import BackendName, always_draft, running
from tests.support.models import transformers_model

WIDTH, NEURONS, HEADS, HEAD_DIM, VOCABULARY, LAYERS = 64, 80, 4, 16, 272, 3
TOKENS = [3, 250, 7, 7, 90, 14, 200, 3, 41, 5, 66, 250, 1]
FED = [17, 33, 8]
LATENT = LatentSpec(16, 8, 16, 16)
PUBLISHED = {
    "Qwen3.5, Qwen3.6 35B-A3B": (2048, 16, 2, 256, 512, ExpertsSpec(256, 8, 512, shared_gate=True), None),
    "Qwen3-Next 80B-A3B": (2048, 16, 2, 256, 512, ExpertsSpec(512, 10, 512, shared_gate=True), None),
    "GLM-4.7-Flash": (2048, 20, 1, 576, 1536, ExpertsSpec(64, 4, 1536), LatentSpec(512, 64, 192, 256, 768)),
    "GLM-4.5-Air": (4096, 96, 8, 128, 1408, ExpertsSpec(128, 8, 1408), None),
    "DeepSeek V3": (7168, 128, 1, 576, 2048, ExpertsSpec(256, 8, 2048), LatentSpec(512, 64, 128, 128, 1536)),
    "MiMo V2 Flash, without experts": (4096, 64, 8, 192, 16384, None, None),
}
"""Widths, heads, keys, widths of heads, neurons and experts of layers, as their config.json has them."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("mtp") / "checkpoint", dtype="F16")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    """A model with a layer of random weights, which reads what leaves the last layer."""
    folder = convert_bundle(checkpoint, checkpoint.parent / "bundle", "f16")
    add_mtp_layer(folder, NEURONS)
    return folder


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_are_those_of_plain_pytorch(checkpoint: Path, bundle: Path, backend: BackendName) -> None:
    """Rows of a text in pieces, then three that go on from the layer's own output."""
    kv_bits: Literal[32, 16] = 32 if backend == "reference" else 16
    opened = Bundle.open(bundle)
    assert opened.mtp is not None
    with running(bundle, backend) as transformer:
        transformer.taps = (LAYERS,)
        kv = SequenceState(KVLayout(transformer.config, kv_bits))
        # Where the last row alone is wanted, the layer gets all of them.
        output = transformer.run(ForwardBatch(TOKENS, last_only=True), kv)
        assert output.hidden.shape[0] == 1
        (tapped,) = output.tapped
        with FlashReader([opened.sidecar_file(MTP_SIDECAR.tensors)], "buffered") as reader:
            loaded = load_draft_layer(
                opened, opened.mtp, reader, transformer.backend, transformer.weights, 256
            )
        own, found = SequenceState(KVLayout(loaded.config, kv_bits)), []
        states = np.array(transformer.backend.to_numpy(tapped), np.float64)
        rows, mixed = TOKENS[1:], loaded.mixed(output.tapped)
        for start, stop in ((0, 1), (1, 6), (6, len(rows))):
            hidden = loaded.run(rows[start:stop], transformer.backend.rows(mixed, range(start, stop)), own)
            found.append(loaded.logits(hidden))
        for token in FED:
            hidden = loaded.run([token], transformer.backend.rows(hidden, [hidden.shape[0] - 1]), own)
            found.append(loaded.logits(hidden))
    model = transformers_model(checkpoint)
    table, head = (it.weight.detach().numpy() for it in (model.get_input_embeddings(), model.lm_head))
    arrays, expected = mtp_arrays(WIDTH, NEURONS, HEADS, HEAD_DIM), states[:-1]
    given = arrays, HEADS, 1e-6, 10000.0, table, head
    after, logits = mtp_twin(*given, rows, expected)
    for count in range(1, len(FED) + 1):
        expected = np.vstack([expected, after[-1:]])
        after, logits = mtp_twin(*given, [*rows, *FED[:count]], expected)
    got = np.concatenate(found)
    assert got.shape == logits.shape
    assert np.abs(got - logits).max() < 1e-3 * np.abs(logits).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": WIDTH // 2, "own_head": True}, "hidden_size is 32; .* must be 64"),
        ({"residual_normed": True}, "residual_normed is true"),
        ({"neurons": 0}, "neurons is 0"),
        ({"experts": ExpertsSpec(8, 2, 16, layout="neurons")}, "must be stored as matrices"),
        ({"experts": ExpertsSpec(8, 2, 16, bias=True)}, "without biases"),
        ({"experts": ExpertsSpec(8, 2, 16, shared_gate=True), "neurons": 0}, "gate .* of shared experts"),
        ({"experts": ExpertsSpec(8, 2, 16), "activation": "relu"}, "stored as 'neurons'"),
        ({"experts": ExpertsSpec(8, 2, 16), "kind": "eagle", "taps": (0, 1, 2)}, "latent or experts"),
        ({"latent": LATENT, "scale": 0.1, "head_norm": False}, "num_kv_heads and head_dim are 4 and 16"),
        ({"latent": LATENT, "scale": 0.1, "qkv_bias": True}, "runs without qkv_bias"),
        ({"latent": LATENT, "scale": 0.1, "num_kv_heads": 1, "head_dim": 24}, "norms of heads"),
        ({"latent": LATENT, "scale": 0.0, "num_kv_heads": 1, "head_dim": 24}, "scale is 0"),
        ({"latent": LATENT, "scale": None}, "lacks 'scale'"),
        ({"scale": 0.1}, "scale"),
        ({"window": -1}, "window"),
        ({"value_dim": HEAD_DIM}, "value_dim is 16; it must be below a key's 16"),
        ({"out_factor": 0.0}, "out_factor"),
        ({"sinks": True, "kind": "eagle", "taps": (0, 1, 2)}, "which eagle layers don't have"),
        ({"sinks": True, "latent": LATENT, "scale": 0.1, "num_kv_heads": 1, "head_dim": 24}, "sinks"),
    ],
)
def test_facts_that_no_such_layer_can_have_are_refused(
    bundle: Path, changes: dict[str, Any], message: str
) -> None:
    opened = Bundle.open(bundle)
    assert opened.mtp is not None
    check_draft_layer(opened.mtp, opened.config)
    with pytest.raises(BundleError, match=message):
        check_draft_layer(replace(opened.mtp, **changes), opened.config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_memory_of_published_layers_is_what_the_document_says(bundle: Path, name: str) -> None:
    opened = Bundle.open(bundle)
    assert opened.mtp is not None
    width, heads, keys, head_dim, neurons, experts, latent = PUBLISHED[name]
    target = replace(opened.config, hidden_size=width)
    layer = replace(
        opened.mtp,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=keys,
        head_dim=head_dim,
        neurons=neurons,
        experts=experts,
        latent=latent,
        output_gates=experts is not None and experts.shared_gate,
        value_dim=0 if experts is not None else 128,
    )
    matrices = layer.matrices(target).values()
    parameters = sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices) / 1e9
    at_4, at_8 = (loaded_bytes(replace(layer, bits=bits), target) / 1e9 for bits in (4, 8))
    row = f"| {name} | {parameters:.2f} billion | {at_4:.2f} GB | {at_8:.2f} GB |"
    assert row in (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()


def test_experts_are_in_the_plan_and_a_budget_without_room_is_refused(bundle: Path, tmp_path: Path) -> None:
    folder, experts = copy_files(bundle, tmp_path / "bundle"), ExpertsSpec(64, 2, 512)
    before = Bundle.open(folder).mtp
    assert before is not None
    arrays = {name: it for name, it in mtp_arrays(WIDTH, 1, HEADS, HEAD_DIM).items() if name not in GATED}
    layer = replace(before, experts=experts, neurons=0)
    for name, matrix in layer.matrices(Bundle.open(folder).config).items():
        if name == "router" or name.startswith("experts."):
            arrays[name] = np.full(matrix.shape, 0.01, np.float32)
    write_draft_layer(folder, layer, arrays)
    pieces: dict[str, Pieces] = {}
    off, mtp = (ondevice.inspect(folder, speculation=it) for it in ("off", "mtp"))
    added, size = mtp.minimum_budget_bytes - off.minimum_budget_bytes, 3 * 64 * 512 * WIDTH * 2
    assert min(added, mtp.draft_bytes - off.draft_bytes) > size
    with pytest.raises(BudgetError, match=r'drafting .* take speculation="off"'):
        load(folder, speculation="mtp", dram_budget=mtp.minimum_budget_bytes - added // 2)
    # Written again from experts that are read one by one: no matrix is in memory twice.
    stored = (folder / MTP_SIDECAR.tensors).read_bytes()
    for name in (f"experts.{it}" for it in GATED):
        whole = arrays[name]
        read = partial(np.full, (len(whole) // experts.count, whole.shape[1]), 0.01, np.float32)
        pieces[name] = Pieces(whole.shape, (read,) * experts.count)
    tracemalloc.start()
    try:
        write_draft_layer(folder, layer, arrays | pieces)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size < peak < 1.1 * size
    assert (folder / MTP_SIDECAR.tensors).read_bytes() == stored


def test_no_token_depends_on_drafts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch, [DRAFT_NODES])
    bias = {EOS: -math.inf}
    with (
        load(bundle, speculation="off") as plain,
        load(bundle, speculation="mtp", prefill_chunk=7) as drafting,
    ):
        for sampling in ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}):
            expected = plain.generate(PROMPT, max_tokens=40, logit_bias=bias, **sampling)
            found = drafting.generate(PROMPT, max_tokens=40, logit_bias=bias, **sampling)
            assert found.tokens == expected.tokens
            assert found.stats.drafting.draft_tokens > 40


def test_mlx_drafts_with_it_too(bundle: Path, monkeypatch: pytest.MonkeyPatch, mlx_on_cpu: None) -> None:
    """In the smallest budget that the plan has, but for what its steps round."""
    pytest.importorskip("mlx.core", exc_type=ImportError)
    always_draft(monkeypatch, [6])
    bias, texts = {EOS: -math.inf}, []
    for speculation in ("off", "mtp"):
        plan = ondevice.inspect(bundle, backend="mlx", speculation=speculation)
        budget = plan.minimum_budget_bytes + (2 << 20)
        with load(bundle, backend="mlx", speculation=speculation, dram_budget=budget) as model:
            found = model.generate(PROMPT, max_tokens=16, logit_bias=bias, temperature=0.9, seed=5)
            texts.append(found.tokens)
    assert texts[0] == texts[1]
    assert found.stats.drafting.draft_tokens > 15


def test_the_last_row_of_a_prompt_is_alone_where_rows_differ_by_their_number(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, mlx_on_cpu: None
) -> None:
    """As in a pass without taps: in the last feed-forward, of which the layer gets all rows."""
    pytest.importorskip("mlx.core", exc_type=ImportError)
    from ondevice.backends.mlx import MlxBackend

    always_draft(monkeypatch, [6])
    real, ran = MlxBackend.feed_forward, list[tuple[int, int]]()

    def note(
        backend: Any, x: Any, weight: Any, spec: Any, batch: ForwardBatch, *rest: Any, **named: Any
    ) -> Any:
        assert x.shape[0] == len(batch.tokens)
        ran.append((weight.index, x.shape[0]))
        return real(backend, x, weight, spec, batch, *rest, **named)

    monkeypatch.setattr(MlxBackend, "feed_forward", note)
    prompt = [5 + index * 7 % 240 for index in range(40)]

    def prompted(model: Model) -> np.ndarray:
        transformer, drafting = model._engine.transformer, model._engine._drafting
        assert drafting is not None
        transformer.taps = drafting.taps
        with model._engine.kv.use(None) as kv:
            found = transformer.run(ForwardBatch(prompt, last_only=True), kv)
            (tapped,) = (np.array(transformer.backend.to_numpy(it)) for it in found.tapped)
            np.testing.assert_array_equal(tapped[-1:], transformer.backend.to_numpy(found.hidden))
            return tapped

    states = []
    for backend in ("mlx", "cpu"):
        with load(bundle, backend=backend, speculation="mtp") as model:
            states.append(model._owner.call(partial(prompted, model)))
    assert ran == [(0, 40), (1, 40), (2, 39), (2, 1)]
    assert states[0].shape == (40, WIDTH)
    assert np.abs(states[0] - states[1]).max() < 2e-2 * np.abs(states[1]).max()


def test_layers_with_inputs_of_their_own_are_not_read_where_rows_differ(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    config = replace(opened.config, per_layer_width=8)
    limited = RowInvariance("", RowWidths(16, 1), {}, False)
    named, auto = RuntimeConfig(speculation="mtp"), RuntimeConfig()
    assert opened.mtp is not None
    for runtime in (named, auto):
        assert allowed_draft_layer(config, runtime, opened.mtp, BY_CONSTRUCTION) is opened.mtp
        assert allowed_draft_layer(opened.config, runtime, opened.mtp, limited) is opened.mtp
        assert allowed_draft_layer(config, runtime, None, limited) is None
    assert allowed_draft_layer(config, auto, opened.mtp, limited) is None
    with pytest.raises(BackendUnavailableError, match='speculation="mtp" reads what leaves'):
        allowed_draft_layer(config, named, opened.mtp, limited)
