"""Multi-token-prediction layers in a bundle: equal to plain PyTorch, and no text depends on them."""

from __future__ import annotations

import math
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
from ondevice.bundle.draft_layers import MTP_SIDECAR, DraftLayer, check_draft_layer
from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.rotary import rope_spec
from ondevice.converters.draft_layers.write import write_draft_layer
from ondevice.errors import BackendUnavailableError, BundleError
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.sequence_state import KVLayout, SequenceState
from ondevice.runtime.backend_choice import check_draft_layer_rows
from ondevice.speculation.tree import DRAFT_NODES
from tests.support.bundles import EOS, convert_bundle, write_chat_checkpoint
from tests.support.chat import PROMPT
from tests.support.eagle_heads import mtp_arrays, mtp_twin
from tests.support.engines import BackendName, always_draft, running
from tests.support.models import transformers_model

WIDTH, NEURONS, HEADS, HEAD_DIM, VOCABULARY, LAYERS = 64, 80, 4, 16, 272, 3
TOKENS = [3, 250, 7, 7, 90, 14, 200, 3, 41, 5, 66, 250, 1]
FED = [17, 33, 8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_checkpoint(tmp_path_factory.mktemp("mtp") / "checkpoint", dtype="F16")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    """A model with a layer of random weights, which reads what leaves the last layer."""
    folder = convert_bundle(checkpoint, checkpoint.parent / "bundle", "f16")
    layer = DraftLayer(
        kind="mtp",
        model="",
        bits=16,
        taps=(LAYERS,),
        hidden_size=WIDTH,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        neurons=NEURONS,
        activation="silu",
        eps=1e-6,
        frequencies=rope_spec(10000.0, HEAD_DIM).frequencies,
        magnitude=1.0,
        qkv_bias=False,
        output_bias=False,
        head_norm=True,
        output_gates=False,
        residual_normed=False,
        states_normed=False,
        own_head=False,
        own_embeddings=False,
        tokens=VOCABULARY,
    )
    write_draft_layer(folder, layer, mtp_arrays(WIDTH, NEURONS, HEADS, HEAD_DIM))
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
        with FlashReader([opened.added_file(MTP_SIDECAR.tensors)], "buffered") as reader:
            loaded = load_draft_layer(
                opened, opened.mtp, reader, transformer.backend, transformer.weights, 0, 256
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
            found = model.generate(PROMPT, max_tokens=40, logit_bias=bias, temperature=0.9, seed=5)
            texts.append(found.tokens)
    assert texts[0] == texts[1]
    assert found.stats.drafting.draft_tokens > 40


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
        transformer = model._engine._generator.transformer
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
    check_draft_layer_rows(config, opened.mtp, BY_CONSTRUCTION)
    check_draft_layer_rows(opened.config, opened.mtp, limited)
    check_draft_layer_rows(config, None, limited)
    with pytest.raises(BackendUnavailableError, match="speculation mtp reads what leaves"):
        check_draft_layer_rows(config, opened.mtp, limited)
