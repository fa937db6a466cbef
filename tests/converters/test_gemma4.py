"""Gemma 4's blocks beyond one pass against `transformers`: what is stored, what is noted, what is refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ondevice
from ondevice.backends.forward_batch import ForwardBatch
from ondevice.backends.kv_layout import KVLayout
from ondevice.backends.token_tree import TokenTree
from ondevice.bundle.layout import DATA_OFFSET, neuron_file_name
from ondevice.bundle.model_section import model_section, parse_model
from ondevice.bundle.reader import Bundle
from ondevice.bundle.strict_json import Section
from ondevice.bundle.verify import verify
from ondevice.converters.architectures.registry import describe, read_config
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.kernels import _native
from ondevice.model.sequence_state import SequenceState
from ondevice.model_config.model import HeadSizes
from tests.support.engines import all_logits, always_draft, random_tokens, running
from tests.support.stored_matrices import resident_matrix

pytest.importorskip("transformers")
pytest.importorskip("torch")

# fmt: off
DENSE: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "sliding_window": 1024, "final_logit_softcapping": 30.0, "enable_moe_block": False, "num_experts": None,
}
E: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}
# fmt: on


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.families import CASES, write_model

    folder = tmp_path_factory.mktemp("gemma4")
    write_model(folder / "source", *CASES["gemma4 e wide"])
    return convert(folder / "source", folder / "bundle", "f16")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_without_conditioning_keys_in_16_bits_are_all_that_differs(tmp_path: Path, seed: int) -> None:
    """Against `transformers` in float64: `reference` is off by the order of sums, and by keys in 16 bits."""
    import torch

    from tests.support.families import GEMMA4_E, write_model

    options = {**GEMMA4_E, "initializer_range": 0.1 + seed / 1000}
    model = write_model(tmp_path / "source", "Gemma4Text", options, conditioned=False)
    text = random_tokens(read_config(json.loads((tmp_path / "source" / "config.json").read_text())), 40)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        theirs, expected = (it(torch.tensor([text])).logits[0].double().numpy() for it in (model, exact))
    bundle, found = convert(tmp_path / "source", tmp_path / "bundle", "f16"), {}
    for backend, bits in (("reference", 32), ("reference", 16), ("cpu", 16)):
        with running(bundle, backend) as loaded:
            found[backend, bits] = all_logits(loaded, text, bits)
    off = {key: np.abs(logits - expected).max() / np.abs(expected).max() for key, logits in found.items()}
    own = np.abs(theirs - expected).max() / np.abs(expected).max()
    # The rows of per-layer inputs are stored as they are: multiplied by their factor they would cost 5e-4.
    assert max(own, off["reference", 32]) < 1e-4
    assert 2e-3 < off["reference", 16] < 2e-2
    between = np.abs(found["reference", 16] - found["cpu", 16]).max()
    assert between < 1e-3 * np.abs(expected).max()


@pytest.mark.slow
def test_drafts_leave_the_text_of_mlx(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have heads of two sizes, and share keys."""
    pytest.importorskip("mlx.core")
    always_draft(monkeypatch, (5, 8))
    texts = []
    for speculation in ("off", "recycling"):
        options: dict[str, Any] = {"backend": "mlx", "max_context": 128, "speculation": speculation}
        with ondevice.load(bundle, **options) as model:
            texts.append(model.generate(tokens=[5, 6, 7, 5, 6], max_tokens=40, logit_bias={2: -math.inf}))
    assert texts[0].tokens == texts[1].tokens
    assert texts[1].stats.drafting is not None
    assert texts[1].stats.drafting.drafts > 0


def test_layers_have_heads_of_their_own_size() -> None:
    config = read_config(DENSE)
    local, last = config.layers[0], config.layers[-1]
    assert config.heads(local.attention) == HeadSizes(32, 16, 256)
    assert config.heads(last.attention) == HeadSizes(32, 4, 512)
    assert (local.attention.window, last.attention.window) == (1024, 0)
    assert (config.out_cols(local), config.out_cols(last)) == (32 * 256, 32 * 512)
    layout = KVLayout(config, 16)
    assert layout.layer_bytes(0) == 64 * 16 * 2 * 256 * 2
    assert layout.layer_bytes(59) == 64 * 4 * 2 * 512 * 2
    assert layout.block_bytes == 50 * layout.layer_bytes(0) + 10 * layout.layer_bytes(59)
    assert layout.head_offset(59, 3) == layout.block_bytes - layout.head_bytes(59)
    # A quarter of the pairs turn, by the frequencies that they would have if all did.
    turning, local_rope = config.ropes
    assert turning.turning == 128
    assert turning.frequencies[1] == np.float32(1e6 ** (-2 / 512))
    assert local_rope.turning == 256
    assert parse_model(Section(model_section(config), "model")) == config


def test_an_e_model_keeps_few_keys() -> None:
    config = read_config(E)
    assert (config.num_kv_layers, config.per_layer_width, config.intermediate_size) == (15, 256, 6144)
    assert config.widths == (6144,) * 15 + (12288,) * 20
    assert not describe(E).notes
    assert {layer.attention.keys_of for layer in config.layers[15:]} == {13, 14}
    assert config.per_layer_multiplier == np.float32(128**0.5)
    assert parse_model(Section(model_section(config), "model")) == config


def test_wide_layers_alone_have_more_records(bundle: Path) -> None:
    """Those that share keys. What such a model says is compared in `test_families.py`."""
    opened = Bundle.open(bundle)
    layout, records = opened.neuron_layouts[0], opened.manifest.files
    assert opened.config.widths == (160, 160, 320, 320, 320, 320)
    for layer, neurons in enumerate(opened.config.widths):
        assert records[neuron_file_name(layer)].nbytes == DATA_OFFSET + layout.nbytes(neurons)
    verify(bundle, _native.crc32c)


def test_a_tree_has_the_bits_of_one_pass(bundle: Path) -> None:
    """Kept nodes move in every layer's own rows."""
    with running(bundle, "cpu") as model:
        text = random_tokens(model.config, 30)
        whole, kv = all_logits(model, text), SequenceState(KVLayout(model.config, 16))
        model.forward(text[:20], kv)
        batch = ForwardBatch([text[20], 7, 9, text[21], text[22]], TokenTree([-1, 0, 1, 0, 3]))
        model.run(batch, kv)
        kv.keep(20, [0, 3, 4], lambda source, target: model.backend.kv_move(kv, source, target))
        found = model.forward(text[23:], kv)
        assert found is not None
        assert found[0].astype(np.float32).tobytes() == whole[-1].astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"enable_moe_block": True, "num_experts": 128}, CheckpointError, "has no top_k_experts"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            UnsupportedModelError,
            "chosen is 5",
        ),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_attention"),
        ({"global_head_dim": 1 << 20}, CheckpointError, "head_dim"),
        ({"global_head_dim": 255}, UnsupportedModelError, "255"),
        ({"num_global_key_value_heads": 5}, UnsupportedModelError, "num_kv_heads 5"),
        ({"num_global_key_value_heads": 0}, CheckpointError, "num_kv_heads"),
        ({"num_kv_shared_layers": 58}, UnsupportedModelError, "num_kv_shared_layers"),
        ({"per_layer_config": {"60": {"head_dim": 4}}}, CheckpointError, "per_layer_config"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, UnsupportedModelError, "different sizes"),
        ({"per_layer_config": {"5": {"window": 64}}}, UnsupportedModelError, "window"),
        ({"per_layer_config": {"5": 7}}, CheckpointError, "per_layer_config.5"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 0.0}}},
            CheckpointError,
            "factor",
        ),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        read_config({**DENSE, **changes})


def test_old_and_new_keys_of_heads_mean_the_same() -> None:
    values = json.loads(json.dumps(DENSE))
    for key in ("global_head_dim", "num_global_key_value_heads"):
        del values[key]
    heads = {"head_dim": 512, "num_key_value_heads": 4}
    values["per_layer_config"] = {str(layer): heads for layer in range(5, 60, 6)}
    assert read_config(values) == read_config(DENSE)


def test_values_that_are_keys_are_stored_as_both(tmp_path: Path) -> None:
    """One projection of the checkpoint stands twice in the fused one, quantised too."""
    from tests.support.families import GEMMA4, write_model

    write_model(tmp_path / "source", "Gemma4Text", {**GEMMA4, "attention_k_eq_v": True})
    bundle = Bundle.open(convert(tmp_path / "source", tmp_path / "bundle", "q4"))
    spec = bundle.config.layers[1]
    sizes = bundle.config.projection_sizes(spec)
    keys, values = (resident_matrix(bundle, f"layers.1.attention.{which}").codes for which in "kv")
    assert len(keys) == sizes["k"]
    np.testing.assert_array_equal(keys, values)
    assert keys.any()
