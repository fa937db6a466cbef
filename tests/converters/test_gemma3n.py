"""Gemma 3n's blocks beyond one pass against `transformers`: chunks, trees, flash, budgets, refusals."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import PER_LAYER
from ondevice.bundle.predictors import PREDICTORS_SIDECAR
from ondevice.bundle.reader import Bundle
from ondevice.bundle.sidecar import NO_PREDICTORS, no_streams, sidecar_text
from ondevice.bundle.streams import STREAMS_SIDECAR
from ondevice.bundle.verify import verify
from ondevice.commands.convert import say_trained
from ondevice.commands.inspection import inspection_text
from ondevice.config import RuntimeConfig
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.convert import convert
from ondevice.converters.training.sidecars import check_streams_possible
from ondevice.errors import BackendUnavailableError, CheckpointError, OndeviceError, UnsupportedModelError
from ondevice.kernels import _native
from ondevice.measure.profiling import recorded_gates
from ondevice.model.sequence_state import SequenceState
from ondevice.model_config import AttentionSpec, FeedForwardSpec, ModelConfig
from ondevice.runtime.backend_choice import row_invariance
from ondevice.runtime.models import automatic_modes, sparsity_modes
from ondevice.runtime.resolving import _preferred, resolve
from tests.malformed.rules import put
from tests.support.chat import squeeze
from tests.support.engines import all_logits, always_draft, random_tokens, running
from tests.support.sources import RecordSource, tiny_config

pytest.importorskip("transformers")
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `source` and the bundles `f16` and `q4`."""
    from tests.support.families import CASES, write_model

    folder = tmp_path_factory.mktemp("gemma3n")
    write_model(folder / "source", *CASES["gemma3n"])
    for bits in ("f16", "q4"):
        convert(folder / "source", folder / bits, bits)
    return folder


def bits_of(logits: np.ndarray) -> bytes:
    return logits.astype(np.float32).tobytes()


@pytest.mark.fast("q4")
@pytest.mark.parametrize("bits", ["f16", "q4"])
def test_chunks_and_trees_have_the_bits_of_one_pass(folder: Path, bits: str) -> None:
    with running(folder / bits, "cpu") as model:
        text = random_tokens(model.config, 40)
        whole = all_logits(model, text)
        for cuts in ((1, 2, 3, 30), (17,)):
            kv, edges = SequenceState(KVLayout(model.config, 16)), [0, *cuts, len(text)]
            for first, last in pairwise(edges):
                found = model.forward(text[first:last], kv)
                assert found is not None
                assert bits_of(found[0]) == bits_of(whole[last - 1])
        # Two branches behind 20 tokens; the second one is the text's.
        kv = SequenceState(KVLayout(model.config, 16))
        model.forward(text[:20], kv)
        batch = ForwardBatch([text[20], 7, 9, text[21], text[22]], TokenTree([-1, 0, 1, 0, 3]))
        hidden = model.run(batch, kv).hidden
        for row, position in ((0, 20), (3, 21), (4, 22)):
            assert bits_of(model.checked_logits(hidden[row : row + 1])) == bits_of(whole[position])
        kv.keep(20, [0, 3, 4], lambda source, target: model.backend.kv_move(kv, source, target))
        found = model.forward(text[23:], kv)
        assert found is not None
        assert bits_of(found[0]) == bits_of(whole[-1])


def test_keys_of_sharing_layers_take_no_memory(folder: Path) -> None:
    config = Bundle.open(folder / "f16").config
    own = tuple(replace(layer, attention=replace(layer.attention, keys_of=None)) for layer in config.layers)
    assert [layer.attention.keys_of for layer in config.layers] == [None] * 4 + [2, 3]
    plain = KVLayout(replace(config, layers=own)).block_bytes
    assert KVLayout(config).block_bytes == plain * 4 // 6


def test_per_layer_inputs_are_read_from_flash(folder: Path) -> None:
    """However much memory there is: the file is in the bundle, checked, and never held."""
    bundle = Bundle.open(folder / "q4")
    names = [name for name, _ in verify(folder / "q4", _native.crc32c).files]
    assert PER_LAYER in names
    with ondevice.load(folder / "q4", dram_budget="2GB", backend="cpu", speculation="off") as model:
        stats = model.generate(tokens=[5, 6, 7, 8, 9], max_tokens=8, temperature=0.0).stats
    assert stats.flash_bytes_read >= 8 * bundle.per_layer_layout.stride


def test_no_draft_changes_the_text(folder: Path) -> None:
    options: dict[str, Any] = {"backend": "cpu", "max_context": 128, "dram_budget": "2GB"}
    prompt, texts = [5, 6, 7, 5, 6, 7, 5, 6], []
    for speculation, sparsity in (("off", "dense"), ("lookup", "dense"), ("lookup", "exact")):
        with ondevice.load(folder / "q4", speculation=speculation, sparsity=sparsity, **options) as model:
            texts.append(model.generate(tokens=prompt, max_tokens=24, temperature=0.0).tokens)
    assert len(texts[0]) > 1
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("bits", ["f16", "q4"])
def test_neurons_from_flash_have_the_bits_of_resident_ones(folder: Path, bits: str) -> None:
    """Cutoffs take all of a token's gates, wherever the neurons are that they belong to."""
    text = random_tokens(Bundle.open(folder / bits).config, 20)
    with running(folder / bits, "cpu") as model:
        whole = all_logits(model, text)
        for layer in model.backend.feed_forwards:
            del layer.segments[1:]
            layer.neurons = RecordSource(layer)
        assert bits_of(all_logits(model, text)) == bits_of(whole)


@pytest.mark.parametrize(
    ("bits", "settings"),
    [
        ("f16", ({},)),
        ("q4", ({"prefill_chunk": 7, "threads": 2},)),
        pytest.param("q4", ({}, {"kernel_target": "scalar"}), marks=pytest.mark.slow),
    ],
)
def test_exact_mode_has_the_dense_bits(folder: Path, bits: str, settings: tuple[dict[str, Any], ...]) -> None:
    """Zeros of cutoffs are skipped in the layers that have one; the others multiply every neuron."""
    text = random_tokens(Bundle.open(folder / bits).config, 40)
    with ondevice.load(folder / bits, backend="cpu", sparsity="dense") as model:
        logits = model.logits(text)
        expected = model.generate(tokens=text[:9], max_tokens=12, temperature=0.0).tokens
    for options in settings:
        with ondevice.load(folder / bits, backend="cpu", sparsity="exact", **options) as model:
            for segments in (model.plan.segment.total, 0):
                squeeze(model, segments)
                assert model.logits(text).tobytes() == logits.tobytes(), (options, segments)
                response = model.generate(tokens=text[:9], max_tokens=12, temperature=0.0)
                assert response.tokens == expected, (options, segments)
                assert response.stats.sparsity == "exact"


def test_exact_mode_leaves_out_what_the_cutoffs_cut(folder: Path) -> None:
    """As many neurons a token as the layers' shares say: 0.1, 0.05, 0.5 of three layers, all of three."""
    bundle = Bundle.open(folder / "q4")
    text = random_tokens(bundle.config, 40)
    with ondevice.load(folder / "q4", backend="cpu", sparsity="exact", prefill_chunk=1) as model:
        neurons = 160 * len(text)
        model.logits(text)
        assert 3.4 * neurons < model._engine._neurons.lookups < 3.9 * neurons
    with recorded_gates(bundle, [text]) as gates:
        shares = [(layer > 0).mean() for layer in gates]
        assert np.allclose(shares, [0.1, 0.05, 0.5, 1.0, 1.0, 1.0], atol=0.05)


def test_auto_is_exact_where_neurons_come_from_flash(folder: Path) -> None:
    """With everything in memory, packed neurons are faster in the layers without a cutoff."""
    config, runtime = Bundle.open(folder / "q4").config, RuntimeConfig(backend="cpu")
    modes = automatic_modes(config, runtime)
    resident, reads, misfit = (
        SimpleNamespace(fits=fits, offloads_weights=offloads)
        for fits, offloads in ((True, False), (True, True), (False, True))
    )
    for exact, dense, chosen in (
        (resident, resident, "dense"),
        (reads, resident, "dense"),
        (resident, reads, "exact"),
        (reads, reads, "exact"),
        (misfit, reads, "dense"),
    ):
        plans = {"exact": exact, "dense": dense}
        possible: list[Any] = [
            SimpleNamespace(
                plan=plans[mode],
                runtime=replace(runtime, sparsity=mode),
                bundle=SimpleNamespace(config=config, streams=None),
                draft_layer=None,
            )
            for mode in modes
        ]
        assert modes[_preferred(possible)] == chosen


def test_damage_to_a_row_is_found_before_it_is_used(folder: Path, tmp_path: Path) -> None:
    convert(folder / "source", tmp_path / "bundle", "q4")
    bundle = Bundle.open(tmp_path / "bundle")
    file = tmp_path / "bundle" / PER_LAYER
    data = bytearray(file.read_bytes())
    data[4096 + 9 * bundle.per_layer_layout.stride + 3] ^= 1
    file.write_bytes(data)
    with running(tmp_path / "bundle", "cpu") as model:
        all_logits(model, [8, 10])
        with pytest.raises(OndeviceError, match=PER_LAYER):
            all_logits(model, [9])


@pytest.mark.fast("q4")
@pytest.mark.parametrize("bits", ["f16", "q4"])
def test_mlx_logits_are_those_of_the_reference(folder: Path, bits: str) -> None:
    """Also with neurons from flash: cutoffs take all of a token's gates, wherever the neurons are."""
    pytest.importorskip("mlx.core")
    text = random_tokens(Bundle.open(folder / bits).config, 40)
    with running(folder / bits, "reference") as model:
        expected = all_logits(model, text, 16)
    options: dict[str, Any] = {"backend": "mlx", "max_context": 128, "kv_bits": 16}
    # `auto` is dense: whether skipped zeros change bits there isn't measured for such models.
    for sparsity, mode in (("auto", "dense"), ("exact", "exact")):
        with ondevice.load(folder / bits, sparsity=sparsity, **options) as model:
            assert model.plan.sparsity == mode
            found = model.logits(text)
            squeeze(model)
            assert model.logits(text).tobytes() == found.tobytes()
        assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["f16", "q4"])
def test_drafts_leave_the_text_of_mlx(folder: Path, bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core")
    always_draft(monkeypatch, (5, 8))
    options: dict[str, Any] = {"backend": "mlx", "max_context": 128, "dram_budget": "2GB"}
    prompt, texts = [5, 6, 7, 5, 6, 7, 5, 6], []
    for speculation in ("off", "recycling"):
        with ondevice.load(folder / bits, speculation=speculation, **options) as model:
            texts.append(model.generate(tokens=prompt, max_tokens=40, logit_bias={2: -math.inf}))
    assert texts[0].tokens == texts[1].tokens
    assert texts[1].stats.drafting is not None
    assert texts[1].stats.drafting.drafts > 0


@pytest.mark.slow
@pytest.mark.usefixtures("mlx_device", "rows_measured_anew")
@pytest.mark.parametrize("op", ["match_rms", "small_linear", "gated", "add_normed"])
def test_every_op_of_these_blocks_is_measured(folder: Path, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives a row other bits beside five rows than beside four narrows drafts to four."""
    from ondevice.backends import mlx_ops, mlx_row_ops

    bundle, runtime = Bundle.open(folder / "f16"), RuntimeConfig(backend="mlx", speculation="lookup")
    true = getattr(mlx_ops.MlxOps, op)
    # A token has a row for each layer there.
    least = 5 * bundle.config.num_layers if op == "add_normed" else 5

    def nudged(self: Any, x: Any, *others: Any) -> Any:
        found = true(self, x, *others)
        return found if x.shape[0] < least else found * (1.0 + 2.0**-21)

    with monkeypatch.context() as patch:
        patch.setattr(mlx_ops.MlxOps, op, nudged)
        assert row_invariance(bundle.config, bundle.quant, runtime).widths.nodes == 4
    mlx_row_ops._measured.cache_clear()
    assert row_invariance(bundle.config, bundle.quant, runtime).widths.nodes > 1


def test_what_cannot_run_these_blocks_says_so(folder: Path) -> None:
    bundle = Bundle.open(folder / "f16")
    pytest.importorskip("mlx.core")
    with pytest.raises(BackendUnavailableError, match="drafts could change the text"):
        resolve(bundle, RuntimeConfig(backend="mlx", speculation="lookup", sparsity="exact"))
    blocks = (
        "per-layer inputs, copies of the residual, low-rank blocks beside attention, normed values, "
        "keys that layers share and statistical cutoffs"
    )
    with pytest.raises(UnsupportedModelError, match=blocks):
        check_streams_possible(bundle)


def test_inspection_says_why_modes_are_missing(folder: Path) -> None:
    modes = {mode.name: mode for mode in sparsity_modes(Bundle.open(folder / "f16").config, None)}
    assert [name for name, mode in modes.items() if mode.available] == ["dense", "exact"]
    assert modes["exact"].reason.startswith("in 3 of its 6 layers only neurons whose gate its cutoff leaves")
    # No advice to make what would be refused.
    assert modes["predicted"].reason == NO_PREDICTORS
    resolved = resolve(Bundle.open(folder / "q4"), RuntimeConfig(backend="cpu"))
    assert f"streams: none: {no_streams(resolved.bundle.config)}" in inspection_text(resolved)


def test_conversion_with_a_text_says_why_it_trained_no_predictors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_trained(Bundle.open(folder / "q4"))
    said = " ".join(capsys.readouterr().err.split())
    assert NO_PREDICTORS in said
    assert "hardly ever" not in said


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("altup_active_idx", 1, "altup_active_idx is 1"),
        ("altup_correct_scale", False, "altup_correct_scale"),
        ("altup_num_inputs", 1, "altup_num_inputs is 1"),
        ("altup_num_inputs", 17, "altup_num_inputs is 17"),
        ("num_kv_shared_layers", 6, "num_kv_shared_layers is 6"),
        ("num_kv_shared_layers", 5, "full_attention has no layer"),
        ("num_kv_shared_layers", -1, "num_kv_shared_layers is -1"),
        ("activation_sparsity_pattern", [0.5], "names 1 layers of 6"),
        ("activation_sparsity_pattern", [1.0] * 6, "shares are from 0"),
        ("intermediate_size", [160] * 5 + [0], "must be whole numbers from 1 on"),
        ("intermediate_size", [160] * 5 + [1 << 21], "a layer's neurons is 2097152"),
        ("intermediate_size", [160] * 5 + [True], "must be whole numbers"),
        ("intermediate_size", [-1] * 6, "intermediate_size is -1"),
        ("intermediate_size", [160] * 5, "names 5 layers of 6"),
        ("intermediate_size", [], "must be whole numbers"),
        ("hidden_size", -1, "hidden_size is -1"),
        ("laurel_rank", 0, "laurel_rank is 0"),
        ("hidden_size_per_layer_input", 0, "without per-layer inputs"),
        ("hidden_size_per_layer_input", -4, "per_layer_width is -4"),
        ("vocab_size_per_layer_input", 257, "vocab_size_per_layer_input is 257"),
    ],
)
def test_configs_that_are_refused(folder: Path, key: str, value: Any, message: str) -> None:
    values = json.loads((folder / "source" / "config.json").read_text())
    read_config(values)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_config(values | {key: value})


PUBLISHED: dict[str, Any] = {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
    "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02, "intermediate_size": [8192] * 30, "laurel_rank": 64,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6, "max_position_embeddings": 32768,
    "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2,
    "num_kv_shared_layers": 10, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
"""The keys of the published E2B, older than those that `transformers` writes."""


def test_published_keys_are_known() -> None:
    config = read_config(PUBLISHED)
    assert (config.num_layers, config.num_kv_layers, config.residual_copies) == (30, 20, 4)
    assert [layer.feed_forward.cutoff is not None for layer in config.layers] == [True] * 10 + [False] * 20


def changed(config: ModelConfig, layer: int, **attention: Any) -> ModelConfig:
    layers = list(config.layers)
    layers[layer] = replace(layers[layer], attention=replace(layers[layer].attention, **attention))
    return replace(config, layers=tuple(layers))


def test_models_that_no_backend_runs_are_refused(folder: Path) -> None:
    config = Bundle.open(folder / "f16").config
    for layer, owner, message in (
        (5, 4, "can be shared"),
        (5, 5, "can be shared"),
        (1, 0, "come last"),
        (4, -1, "can be shared"),
        (5, None, "come last"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            changed(config, layer, keys_of=owner)
    with pytest.raises(UnsupportedModelError, match="values are normed need 'head'"):
        AttentionSpec(1.0, value_norm=True)
    with pytest.raises(UnsupportedModelError, match="cutoff of gates is 11"):
        FeedForwardSpec("gelu", cutoff=11.0)
    with pytest.raises(UnsupportedModelError, match="before 'relu'"):
        FeedForwardSpec("relu", cutoff=1.0)
    with pytest.raises(UnsupportedModelError, match="per_layer_multiplier is of per-layer inputs"):
        replace(tiny_config(), per_layer_multiplier=2.0)
    with pytest.raises(UnsupportedModelError, match="residual_copies is 17"):
        replace(config, residual_copies=17)
    with pytest.raises(UnsupportedModelError, match="different feed-forwards"):
        replace(
            config,
            layers=(*config.layers[:5], replace(config.layers[5], feed_forward=FeedForwardSpec("silu"))),
        )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("per_layer", "stride"), 64, "per_layer"),
        (("per_layer",), None, "per_layer"),
        (("model", "per_layer_width"), 13, "manifest"),
        (("model", "per_layer_multiplier"), 0.0, "per_layer_multiplier is 0"),
        (("model", "per_layer_multiplier"), 1e7, "per_layer_multiplier"),
        (("model", "residual_copies"), 99, "residual_copies is 99"),
        (("model", "layers", 0, "laurel_rank"), 17, "resident"),
        (("model", "layers", 0, "laurel_rank"), 0, "laurel_rank"),
        (("model", "layers", 5, "attention", "keys_of"), 4, "can be shared"),
        (("model", "layers", 5, "attention", "keys_of"), "3", "keys_of"),
        (("model", "layers", 5, "attention", "value_norm"), 1, "value_norm"),
        (("model", "layers", 0, "feed_forward", "cutoff"), 11.0, "cutoff"),
        (("model", "layers", 0, "feed_forward", "threshold"), 1.0, "threshold"),
    ],
)
def test_manifests_that_are_refused(
    folder: Path, tmp_path: Path, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    shutil.copytree(folder / "q4", tmp_path / "bundle")
    put(*path, value=value)(tmp_path / "bundle")
    with pytest.raises(OndeviceError, match=message):
        Bundle.open(tmp_path / "bundle")


def test_sidecars_of_such_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "q4", tmp_path / "bundle")
    for sidecar in (PREDICTORS_SIDECAR, STREAMS_SIDECAR):
        content = {"version": 1, "mode": "lossless"}
        (tmp_path / "bundle" / sidecar.manifest).write_bytes(sidecar_text(sidecar, content))
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.predictors is bundle.streams is None
    assert set(bundle.damaged) == {"predictors", "streams"}
    assert NO_PREDICTORS in str(bundle.damaged["predictors"])
    assert no_streams(bundle.config) in str(bundle.damaged["streams"])
