"""One text for every setting of memory and speed, over models whose blocks aren't a Llama's.

Random models with ReLU gates, so that all exact modes have them: norms on both sides and capped scores,
norms over whole projections, norms of the residual, parallel blocks under LayerNorms, a local window, heads
that turn in part, by neighbouring pairs, by yarn or longrope, in some layers only; multipliers, norms of
1 + w, feed-forwards without a gate, with a threshold, with ReLU on ups too, keys that are values. Gemma 3n's
blocks, whose zeros are those of a cutoff, in the modes that they have.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import Model, load
from ondevice.converters.convert import convert
from ondevice.training import train_predictors
from tests.converters.test_relu_families import FatRelu, activations, change
from tests.support.bundles import VOCAB_SIZE, made_up_pieces, write_byte_tokenizer
from tests.support.chat import squeeze
from tests.support.engines import always_draft
from tests.support.families import (
    FALCON,
    GEMMA,
    GEMMA3N,
    GEMMA4,
    GEMMA4_E,
    LONGROPE,
    OLMOE,
    OPT,
    PERSIMMON,
    YARN,
    write_model,
)
from tests.support.made_up_streams import add_streams

pytest.importorskip("transformers")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"hidden_activation": "relu", "sliding_window": 9, "num_hidden_layers": 4}),
    "gemma4": (
        "Gemma4Text",
        {**GEMMA4, "hidden_activation": "relu", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4 e": ("Gemma4Text", {**GEMMA4_E, "hidden_activation": "relu", "use_double_wide_mlp": True}),
    "olmo2": ("Olmo2", {"hidden_act": "relu", "head_dim": None}),
    "opt": (
        "OPT",
        {**OPT, "max_position_embeddings": 512, "do_layer_norm_before": False, "word_embed_proj_dim": 40},
    ),
    "prosparse": ("Llama", {"hidden_act": "fatrelu", "hidden_act_param": 0.2}),
    "drelu": ("Mistral", {"hidden_act": "relu"}),
    "stablelm": (
        "StableLm",
        {"hidden_act": "relu", "head_dim": None, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "falcon": ("Falcon", {**FALCON, "activation": "relu"}),
    "phi": ("Phi", {"head_dim": None, "partial_rotary_factor": 0.5, "hidden_act": "relu"}),
    "persimmon": ("Persimmon", PERSIMMON),
    "nemotron": ("Nemotron", {"head_dim": None, "hidden_act": "relu2"}),
    "glm4": ("Glm4", {"hidden_act": "relu"}),
}
DRAFTED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"hidden_act": "relu"}),
    "gemma3": (
        "Gemma3Text",
        {**GEMMA, "hidden_activation": "relu", "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "glm4": MODELS["glm4"],
    "smollm3": (
        "SmolLM3",
        {"hidden_act": "relu", "head_dim": None, "no_rope_layers": [1, 0, 1], "rope_parameters": YARN},
    ),
    "granite": (
        "Granite",
        {
            "hidden_act": "relu",
            "head_dim": None,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
        },
    ),
    "phi3": (
        "Phi3",
        {"hidden_act": "relu", "head_dim": None, "rope_parameters": LONGROPE}
        | {"original_max_position_embeddings": 128},
    ),
}
"""Models that draft with streams and with a second model, which is the same one."""
NEURONS = {"opt": "ffn_dim", "falcon": "ffn_hidden_size"}
"""What families call the number of neurons, where it isn't `intermediate_size`."""
PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17, 61, 5, 9]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"sparsity": "exact"},
    {"sparsity": "exact", "prefill_chunk": 3, "threads": 2, "speculation": "lookup"},
    {"sparsity": "exact", "speculation": "resident", "threads": 1},
    {"sparsity": "dense", "speculation": "recycling", "io": "buffered"},
    {"sparsity": "dense", "speculation": "auto", "kernel_target": "scalar"},
)
PREDICTED = ("gemma3",)


def endless(model: Model) -> dict[int, float]:
    """The bias under which no text ends by itself."""
    return dict.fromkeys(model.bundle.manifest.tokenizer.eos_ids, -math.inf)


def texts(model: Model) -> list[tuple[int, ...]]:
    options: dict[str, Any] = {"max_tokens": 16, "logit_bias": endless(model)}
    sampled = model.generate(tokens=PROMPT, temperature=0.9, seed=3, **options)
    return [model.generate(tokens=PROMPT, temperature=0.0, **options).tokens, sampled.tokens]


@pytest.mark.fast("gemma4 e")
@pytest.mark.parametrize("name", MODELS)
def test_no_setting_changes_the_text(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, options = MODELS[name]
    monkeypatch.setitem(activations.ACT2FN, "fatrelu", (FatRelu, {"least": 0.2}))
    write_model(tmp_path / "source", family, {**options, NEURONS.get(name, "intermediate_size"): 700})
    if name == "drelu":
        change(tmp_path / "source", architectures=["BambooForCausalLM"], model_type="bamboo")
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with load(bundle, sparsity="dense", speculation="off") as model:
        expected, logits = texts(model), model.logits(PROMPT)
    assert len(set(expected[1])) > 5, "the text says nothing"
    for settings in SETTINGS:
        with load(bundle, **settings) as model:
            assert texts(model) == expected, settings
            assert model.logits(PROMPT).tobytes() == logits.tobytes(), settings
            squeeze(model)
            assert texts(model) == expected, settings
            assert model.logits(PROMPT).tobytes() == logits.tobytes(), settings


def converted(folder: Path, name: str) -> Path:
    """Its bundle, with few neurons and a tokenizer."""
    family, options = DRAFTED[name]
    sizes = {"intermediate_size": 300, "vocab_size": VOCAB_SIZE}
    write_model(folder / "source", family, {**options, **sizes})
    write_byte_tokenizer(folder / "source")
    return convert(folder / "source", folder / "bundle", "q4")


@pytest.mark.fast("phi3")
@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_that_run_in_the_model_leave_one_text(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = converted(tmp_path, name)
    add_streams(bundle)
    always_draft(monkeypatch, [7, 3])
    with load(bundle, sparsity="dense", speculation="off", threads=1) as model:
        expected = texts(model)
    for settings in (
        {"sparsity": "exact", "speculation": "streams", "prefill_chunk": 3},
        {"sparsity": "dense", "speculation": "model", "draft_model": bundle, "prefill_chunk": 5},
    ):
        with load(bundle, threads=1, **settings) as model:
            squeeze(model)
            assert texts(model) == expected, settings
            stats = model.generate(tokens=PROMPT, max_tokens=12, logit_bias=endless(model)).stats
            assert stats.speculation == settings["speculation"]
            assert stats.drafting.drafts > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PREDICTED)
def test_no_setting_changes_the_text_of_predicted_neurons(tmp_path: Path, name: str) -> None:
    """It isn't that of all neurons, but the same one for every setting."""
    bundle = converted(tmp_path, name)
    train_predictors(bundle, pieces=made_up_pieces(4))
    plain: dict[str, Any] = {"sparsity": "predicted", "predictor_recall": 0.9}
    with load(bundle, speculation="off", threads=1, **plain) as model:
        expected, logits = texts(model), model.logits(PROMPT)
    assert len(set(expected[1])) > 5, "the text says nothing"
    for settings in (
        {"speculation": "lookup", "prefill_chunk": 3, "threads": 2},
        {"speculation": "recycling", "prefill_chunk": 1, "io": "buffered", "kernel_target": "scalar"},
    ):
        with load(bundle, **plain, **settings) as model:
            assert texts(model) == expected, settings
            squeeze(model)
            assert texts(model) == expected, settings
            assert model.logits(PROMPT).tobytes() == logits.tobytes(), settings


@pytest.mark.slow
def test_no_setting_changes_the_text_of_experts(tmp_path: Path) -> None:
    write_model(tmp_path / "source", "Olmoe", {**OLMOE, "intermediate_size": 100, "num_experts": 12})
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with load(bundle, speculation="off", threads=1) as model:
        expected, logits = texts(model), model.logits(PROMPT)
    assert len(set(expected[1])) > 5, "the text says nothing"
    for settings in (
        {"threads": 2, "prefill_chunk": 3, "speculation": "lookup"},
        {"kernel_target": "scalar", "speculation": "recycling", "io": "buffered"},
        {"speculation": "auto", "prefill_chunk": 1},
    ):
        with load(bundle, **settings) as model:
            assert texts(model) == expected, settings
            for segments in (0, 3):
                squeeze(model, segments)
                assert texts(model) == expected, settings
                assert model.logits(PROMPT).tobytes() == logits.tobytes(), settings
            model.set_dram_budget(model.plan.full_bytes)
            assert texts(model) == expected, settings


@pytest.mark.slow
def test_no_setting_changes_the_text_of_gemma3n(tmp_path: Path) -> None:
    write_model(tmp_path / "source", "Gemma3nText", GEMMA3N)
    bundle = convert(tmp_path / "source", tmp_path / "bundle", "q4")
    with load(bundle, sparsity="dense", speculation="off", threads=1) as model:
        expected, logits = texts(model), model.logits(PROMPT)
    assert len(set(expected[1])) > 5, "the text says nothing"
    for settings in (
        {"sparsity": "dense", "threads": 2, "prefill_chunk": 3, "speculation": "lookup"},
        {"sparsity": "exact", "kernel_target": "scalar", "speculation": "recycling", "io": "buffered"},
    ):
        with load(bundle, **settings) as model:
            assert texts(model) == expected, settings
            squeeze(model)
            assert texts(model) == expected, settings
            assert model.logits(PROMPT).tobytes() == logits.tobytes(), settings
