"""Families that others made sparse, against `transformers` models with the same feed-forward put in.

`transformers` knows neither ProSparse's activation (arXiv 2402.13516) nor dReLU (arXiv 2406.05955), so the
oracle is its Llama or Mistral with that arithmetic in PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ondevice.bundle.reader import Bundle
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.convert import convert
from ondevice.errors import UnsupportedModelError
from ondevice.runtime.models import sparsity_modes
from tests.converters.test_families import expected, tokens
from tests.support.engines import all_logits, running
from tests.support.families import SIZES, write_model

torch = pytest.importorskip("torch")
activations = pytest.importorskip("transformers.activations")

PROSPARSE: dict[str, dict[str, Any]] = {
    "fatrelu": {"hidden_act_param": 0.05},
    "fatrelu, high": {"hidden_act_param": 0.4, "head_dim": 24, "tie_word_embeddings": True},
    "fatrelu of nothing": {"hidden_act_param": 0.0, "attention_bias": True},
}
BAMBOO: dict[str, dict[str, Any]] = {
    "drelu": {"sliding_window": None},
    "drelu, windows": {"sliding_window": 9},
    "drelu, heads": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
}
BAMBOO_CODE = {
    "AutoConfig": "configuration_bamboo.BambooConfig",
    "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
}


class FatRelu(torch.nn.Module):  # type: ignore[misc]
    """Gates below a threshold become zero."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Any) -> Any:
        return torch.where(x >= self.least, x, 0.0)


def prosparse(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(activations.ACT2FN, "fatrelu", (FatRelu, {"least": options["hidden_act_param"]}))
    model = write_model(folder, "Llama", {"hidden_act": "fatrelu", **options})
    change(folder, architectures=["SparseLlamaForCausalLM"], model_type="sparsellama")
    return model


def bamboo(folder: Path, options: dict[str, Any]) -> Any:
    model = write_model(folder, "Mistral", {"hidden_act": "relu", **options})
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(mlp.gate_proj(x).relu() * mlp.up_proj(x).relu())
    change(folder, architectures=["BambooForCausalLM"], model_type="bamboo", auto_map=BAMBOO_CODE)
    return model


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def check(model: Any, folder: Path, backend: Any, limit: float) -> None:
    theirs = expected(model, tokens())
    with running(folder, backend) as loaded:
        mine = all_logits(loaded, tokens(), 32 if backend == "reference" else 16)
    assert np.abs(mine - theirs).max() < limit * np.abs(theirs).max()
    assert np.abs(theirs).max() > 0.05


BACKENDS = [("reference", 1e-3), ("cpu", 2e-3)]
JUMPING = [("reference", 1e-3), ("cpu", 0.2)]
"""With fatrelu, a gate that rounding moves over the threshold adds a step to what its neuron adds."""


@pytest.mark.fast("fatrelu")
@pytest.mark.parametrize("case", PROSPARSE)
def test_prosparse_logits_are_those_of_its_authors_activation(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prosparse(tmp_path / "source", PROSPARSE[case], monkeypatch)
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "f16")
    for backend, limit in JUMPING:
        check(model, bundle, backend, limit)
    modes = sparsity_modes(Bundle.open(bundle).config, None)
    assert [mode.name for mode in modes if mode.available] == ["dense", "exact"]


@pytest.mark.fast("drelu, windows")
@pytest.mark.parametrize("case", BAMBOO)
def test_bamboo_logits_are_those_of_drelu(case: str, tmp_path: Path) -> None:
    model = bamboo(tmp_path / "source", BAMBOO[case])
    if case == "drelu":
        # TurboSparse's own predictors are left out.
        file = tmp_path / "source" / "model.safetensors"
        extra = {f"model.layers.{i}.mlp.predictor.fc1.weight": np.ones((4, 64), np.float32) for i in range(3)}
        save_file(load_file(file) | extra, file)
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "f16")
    for backend, limit in BACKENDS:
        check(model, bundle, backend, limit)


def test_a_gate_equal_to_the_parameter_counts() -> None:
    values = {**SIZES, "model_type": "llama", "hidden_act": "fatrelu", "hidden_act_param": 0.01}
    spec = read_config(values).feed_forward
    assert (
        np.float32(spec.threshold)
        < np.float32(0.01)
        == np.nextafter(np.float32(spec.threshold), np.float32(1))
    )


SPARSE = {"architectures": ["SparseLlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (SPARSE, "'silu' isn't known"),
        ({**SPARSE, "hidden_act": "shiftrelu"}, "shiftrelu"),
        ({**SPARSE, "hidden_act": "relu", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"hidden_act": "fatrelu", "hidden_act_param": -0.5}, "threshold"),
        ({"hidden_act": "relu", "hidden_act_param": 0.5}, "hidden_act_param"),
        ({"model_type": "bamboo"}, "relu gates"),
        ({"model_type": "bamboo", "hidden_act": "relu", "auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_config({**SIZES, "model_type": "llama", **changes})
