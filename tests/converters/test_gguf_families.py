"""Families in GGUF files: the bundle of the same weights from Hugging Face's folder, and llama.cpp's
logits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.bundle.reader import Bundle
from ondevice.config import RowFormat
from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.checkpoints.views import ColumnsOf
from ondevice.converters.convert import convert
from ondevice.errors import CheckpointError, OndeviceError, UnsupportedModelError
from tests.converters.test_gguf_model import assert_same_bundle
from tests.support.engines import all_logits, running
from tests.support.families import (
    CASES,
    DEEPSEEK,
    DEEPSEEK_V3,
    DELTA,
    DELTA_EXPERTS,
    FALCON,
    GEMMA3N,
    GEMMA4_E,
    GPT_OSS,
    LATENT_YARN,
    LFM2_MOE,
    LONGROPE,
    MIMO,
    OLMOE,
    PHI_LESS_TURNS,
    PHIMOE,
    QWEN3_MOE,
    write_model,
)
from tests.support.gguf_families import saying, write_family
from tests.support.gguf_hybrids import settle_decays
from tests.support.gguf_models import BYTE_LEVEL_TOKENS, add_byte_level, changed_gguf
from tests.support.mixer_families import FALCON_H1, GRANITE_HYBRID, NEMOTRON_H, blocks
from tests.support.refusals import assert_refused

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

LONG = {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
"""llama.cpp takes the factors for longer texts if it is told of a longer context."""
PHIMOE_MAGNITUDES = {
    "original_max_position_embeddings": 128,
    "short_mscale": math.sqrt(1 + math.log(4) / math.log(128)),
    "long_mscale": math.sqrt(1 + math.log(4) / math.log(128)),
}
"""Files have longrope's usual magnitude, whatever the model's."""
EVEN = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 6}
EVEN |= {"initializer_range": 0.05}
"""llama.cpp's delta rules have keys as wide as values. Smaller weights magnify less of what is rounded."""
EVEN_EXPERTS = {**DELTA, **DELTA_EXPERTS, **EVEN, "num_experts": 4, "num_experts_per_tok": 4}
"""All are chosen: another choice, as rounding makes it, would stay in the states."""
NO_FACTORS: dict[str, Any] = dict.fromkeys((key for key in FALCON_H1 if key.endswith("_multiplier")), 1.0)
NO_FACTORS |= {"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2}
"""Files of Falcon-H1 have its multipliers in the weights."""
UNALIKE = {
    "granite odd factors": (
        "Granite",
        {"head_dim": None, "embedding_multiplier": 12.1, "logits_scaling": 7.7, "residual_multiplier": 0.22},
    ),
    "falcon newer": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 25,
            "num_kv_shared_layers": 5,
            "hidden_size_per_layer_input": 256,
            "laurel_rank": 64,
            "sliding_window": 9,
            "vocab_size_per_layer_input": BYTE_LEVEL_TOKENS,
        },
    ),
    "gemma3n widths": (
        "Gemma3nText",
        {
            **GEMMA3N,
            "intermediate_size": [160, 96, 320, 160, 224, 50],
            "vocab_size_per_layer_input": BYTE_LEVEL_TOKENS,
        },
    ),
    "gemma4 e": ("Gemma4Text", {**GEMMA4_E, "vocab_size_per_layer_input": BYTE_LEVEL_TOKENS}),
    "gemma4 e wide": (
        "Gemma4Text",
        {
            **GEMMA4_E,
            "vocab_size_per_layer_input": BYTE_LEVEL_TOKENS,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
    ),
    "olmoe": ("Olmoe", {**OLMOE, "num_key_value_heads": 4}),
    "qwen3 moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "phimoe longrope": (
        "Phimoe",
        {**PHIMOE, "attention_bias": True, "rope_parameters": {**LONGROPE, **PHIMOE_MAGNITUDES}},
    ),
    "gpt-oss": ("GptOss", {**GPT_OSS, "swiglu_limit": 7.0}),
    "gpt-oss all chosen": (
        "GptOss",
        {**GPT_OSS, "swiglu_limit": 7.0, "num_local_experts": 4, "num_experts_per_tok": 4}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "deepseek v2 lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": LATENT_YARN, "num_hidden_layers": 27}
        | {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 4},
    ),
    "qwen3 next even": ("Qwen3Next", EVEN_EXPERTS),
    "qwen3.5 even": ("Qwen3_5Text", {**DELTA, **EVEN, "tie_word_embeddings": True}),
    "qwen3.5 moe even": ("Qwen3_5MoeText", {**EVEN_EXPERTS, "intermediate_size": None}),
    "lfm2 moe two dense": (
        "Lfm2Moe",
        {**LFM2_MOE, "num_experts": 5, "num_experts_per_tok": 5, "num_dense_layers": 2, "conv_L_cache": 4},
    ),
    "granite hybrid unlimited": ("GraniteMoeHybrid", {**GRANITE_HYBRID, "mamba_n_groups": 2}),
    "nemotron h experts": (
        "NemotronH",
        {**NEMOTRON_H, "layers_block_type": blocks("MEMM*E"), "intermediate_size": 48, "n_groups": 4},
    ),
    "mimo2": (
        "MiMoV2Flash",
        {**MIMO, "sliding_window": 129, "n_routed_experts": 4, "num_experts_per_tok": 4},
    ),
    "mimo2 windows": (
        "MiMoV2Flash",
        {**MIMO, "head_dim": 48, "v_head_dim": 32, "num_key_value_heads": 1, "num_hidden_layers": 6}
        | {"routed_scaling_factor": 2.5, "attention_value_scale": 0.5, "n_group": 4, "topk_group": 2}
        | {"mlp_layer_types": ["sparse", "dense"] * 3},
    ),
    "falcon h1 plain": ("FalconH1", {**FALCON_H1, **NO_FACTORS}),
    "falcon h1 plain norm": (
        "FalconH1",
        {**FALCON_H1, **NO_FACTORS, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
        | {"mamba_n_groups": 2, "rms_norm_eps": 1e-4},
    ),
    "phi": ("Phi", {"head_dim": None, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi less turns": ("Phi", PHI_LESS_TURNS),
    "phi3 longrope": (
        "Phi3",
        {"head_dim": None, "rope_parameters": LONGROPE, **LONG},
    ),
    "phi3 partial": (
        "Phi3",
        {
            "head_dim": None,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75, "short_factor": [1.5] * 6}
            | {"long_factor": [4.0] * 6},
            **LONG,
            "tie_word_embeddings": True,
        },
    ),
}
"""Models that differ from those of `families.CASES`: as llama.cpp can hold them."""
ALIKE = (
    "phi3", "glm4", "glm4 no bias", "glm4 quarter", "smollm3", "smollm3 yarn", "granite",
    "granite tied", "olmo2", "olmo2 all heads", "olmo2 yarn", "stablelm", "stablelm parallel",
    "stablelm whole heads", "stablelm head norms", "falcon", "falcon newer, one norm", 
    "nemotron", "nemotron bias", "nemotron wide heads", "gemma4", "gemma4 six layers",
    "mixtral", "granite moe scaled", "qwen2 moe", "phimoe", "glm4 moe", "glm4 moe head norms",
    "gemma4 moe", "gemma4 moe joint values",
    "deepseek v2 moe groups", "deepseek v2 dense", "deepseek v3 moe", "glm4 moe lite", "glm4 moe lite eps",
    "qwen3 next", "qwen3.5 wide states", "qwen3.5 moe in pairs",
    "lfm2", "lfm2 five taps", "lfm2 adjusted", "lfm2 moe",
    "granite hybrid moe", "granite hybrid moe turning", "nemotron h",
)  # fmt: skip
REFUSED = ("smollm3 yarn", "olmo2 all heads", "stablelm whole heads", "nemotron wide heads", "gemma3n widths")
REFUSED += ("qwen3 next", "qwen3.5 wide states", "qwen3.5 moe in pairs", "glm4 moe lite eps")
REFUSED += ("granite hybrid moe turning",)
"""Models that llama.cpp doesn't load: it knows no biases, no tied head, or one width in these families, and
makes queries of a layer's input in DeepSeek's models of 26 and 27 layers alone. It needs biases of a mixer's
convolution, and ends the process without.
"""
UNLIKE = ("gemma3n", "phimoe", "phimoe longrope", "deepseek v2 moe groups", "mimo2 windows")
"""Models that llama.cpp reads otherwise: it has no sparsemixer, and measures groups by their best two experts
in DeepSeek V2 too. MiMo's windows are a token shorter there. For Gemma 3n see the last test.
"""
FUZZED = ("phi3 partial", "granite", "stablelm head norms", "falcon newer", "nemotron bias", "gemma3n")
FUZZED += ("gemma4", "gemma4 e wide", "qwen2 moe", "glm4 moe", "gemma4 moe", "gpt-oss")
FUZZED += ("deepseek v3 moe", "qwen3.5 moe even", "lfm2")
FUZZED += ("mimo2 windows", "granite hybrid moe turning", "nemotron h experts", "falcon h1 plain norm")
ROUNDS = 40
LIMITS = {"F16": 1e-2, "Q8_0": 1e-1}
"""Largest difference from llama.cpp's logits, of the largest logit."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: CASES[name] for name in ALIKE} | UNALIKE


def written(folder: Path, case: str) -> Path:
    """A random model of the case as `transformers` saves it."""
    family, options = MODELS[case]
    write_model(folder, family, {**options, "vocab_size": BYTE_LEVEL_TOKENS})
    settle_decays(folder)
    return folder


@pytest.mark.fast(
    *("falcon newer", "gemma3n widths", "gemma4 e wide", "phimoe", "gpt-oss", "qwen3 next"),
    *("qwen3.5 even", "mimo2 windows", "falcon h1 plain norm", "nemotron h experts"),
    *("phi less turns", "phi3 partial", "glm4", "smollm3", "granite tied", "olmo2", "stablelm parallel"),
    *("nemotron bias", "mixtral", "granite moe scaled", "qwen2 moe", "glm4 moe", "deepseek v2 dense"),
    *("deepseek v3 moe", "glm4 moe lite", "lfm2 moe two dense", "granite hybrid moe"),
)
@pytest.mark.parametrize("case", MODELS)
def test_a_family_gives_the_bundle_of_its_folder(tmp_path: Path, case: str) -> None:
    source = written(tmp_path / "source", case)
    write_family(tmp_path / "model.gguf", source)
    mine = convert(tmp_path / "model.gguf", tmp_path / "mine", "f16")
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", "f16"))


def test_the_remedy_of_a_file_names_no_config(tmp_path: Path) -> None:
    """A GGUF file comes without one."""

    def fewer_neurons(writer: Any) -> None:
        writer.kv_data[0]["phi3.feed_forward_length"].value = 96

    source = written(tmp_path / "source", "phi3")
    write_family(tmp_path / "model.gguf", source, change=fewer_neurons)
    message = r"^model.gguf, whose metadata .*; that config asks for 192 rows; download it again, or convert"
    assert_refused(tmp_path / "model.gguf", CheckpointError, message)


def test_gemma3ns_neurons_may_be_one_number_or_one_a_layer(tmp_path: Path) -> None:
    """As Gemma 4's. A sliding pattern of one value could be a period, or one for all."""
    source, path = tmp_path / "source", tmp_path / "model.gguf"
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), BYTE_LEVEL_TOKENS)
    write_model(source, "Gemma3nText", {**GEMMA3N, **sizes})

    def change(key: str, value: Any) -> Callable[[Any], None]:
        def changed(writer: Any) -> None:
            writer.kv_data[0].pop(f"gemma3n.{key}")
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            add(f"gemma3n.{key}", value)

        return changed

    found = []
    for neurons in (160, [160] * 6):
        write_family(path, source, change=change("feed_forward_length", neurons))
        found.append(open_checkpoint(path).config)
    assert found[0] == found[1] == open_checkpoint(source).config
    for key, value, message in (
        ("feed_forward_length", [160] * 5, "has 5 values for 6 layers"),
        ("attention.sliding_window_pattern", 5, "is missing or one value; only an array"),
    ):
        write_family(path, source, change=change(key, value))
        with pytest.raises(OndeviceError, match=message):
            open_checkpoint(path)


@pytest.mark.fast("gemma4 moe", "deepseek v3 moe", "nemotron h experts")
@pytest.mark.parametrize("case", FUZZED)
def test_changed_headers_are_refused_or_read(tmp_path: Path, case: str) -> None:
    """Any bytes of a family's header changed: a checkpoint or a typed error, nothing else."""
    path, rng = tmp_path / "model.gguf", random.Random(case)
    write_family(path, written(tmp_path / "source", case), "Q8_0")
    data = path.read_bytes()
    end = data.rfind(b".weight") + 50
    refused = 0
    for _ in range(ROUNDS):
        path.write_bytes(changed_gguf(data, end, rng))
        try:
            open_checkpoint(path).close()
        except OndeviceError:
            refused += 1
    assert refused > ROUNDS // 2


def test_factors_of_longrope_come_in_twos_and_alone(tmp_path: Path) -> None:
    """One that is left out, or divided by others too, would change every position."""
    source, path = written(tmp_path / "source", "phi3"), tmp_path / "model.gguf"

    def factors(*names: str, yarn: bool = False) -> Callable[[Any], None]:
        def add(writer: Any) -> None:
            writer.add_rope_scaling_orig_ctx_len(64)
            if yarn:
                writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
                writer.add_rope_scaling_factor(2.0)
            for name in names:
                writer.add_tensor(f"{name}.weight", np.full(8, 2.0, dtype=np.float32))

        return add

    for names, message in (
        (["rope_factors_long"], "no vector rope_factors_short"),
        (["rope_factors_short"], "no vector rope_factors_long"),
        (["rope_factors_long", "rope_factors_short", "rope_freqs"], "one or the others"),
    ):
        write_family(path, source, change=factors(*names))
        with pytest.raises(OndeviceError, match=message):
            open_checkpoint(path)
    write_family(path, source, change=factors("rope_factors_long", "rope_factors_short", yarn=True))
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling is .*yarn.* only one of the two"):
        open_checkpoint(path)


LYING_GEMMA4: list[tuple[str, Any, str]] = [
    ("attention.shared_kv_layers", 6, "shared_kv_layers is 6 of 6 layers"),
    ("block_count", 1 << 31, "of 2147483648 layers; there may be 1024"),
    ("feed_forward_length", [160] * 5 + [320], r"feed_forward_length is \[160.*twice those of the first"),
    ("feed_forward_length", [160] * 5, "feed_forward_length has 5 values for 6 layers"),
    ("attention.head_count_kv", [2] * 7, "head_count_kv has 7 values for 6 layers"),
    ("attention.sliding_window_pattern", [True], "sliding_window_pattern has 1 values for 6 layers"),
    ("attention.sliding_window_pattern", 6, "sliding_window_pattern is missing or one value; only an array"),
    ("attention.key_length_swa", 8, "value_length_swa is 16"),
    ("rope.dimension_count_swa", 8, "dimension_count_swa is 8"),
    ("expert_count", 8, "moe_intermediate_size|expert_feed_forward_length|expert_used_count"),
    ("attention.a_new_scale", 2.0, "a_new_scale"),
]
"""Metadata of Gemma 4 that are refused."""


def test_lying_metadata_of_gemma4_are_refused(tmp_path: Path) -> None:
    source, path = written(tmp_path / "source", "gemma4 e wide"), tmp_path / "model.gguf"
    for key, value, message in LYING_GEMMA4:

        def change(writer: Any, name: str = f"gemma4.{key}", value: Any = value) -> None:
            writer.kv_data[0].pop(name, None)
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)

        write_family(path, source, change=change)
        with pytest.raises(OndeviceError, match=message):
            open_checkpoint(path)

    def turn_by_halves(writer: Any) -> None:
        writer.tensors[0]["rope_freqs.weight"].tensor[0] = 2.0

    write_family(path, source, change=turn_by_halves)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight must be 16 factors"):
        open_checkpoint(path)


WHOLE = {"deepseek v3 moe": "attn_kv_b", "qwen3 next": "ssm_in"}
"""Cases whose older files have projections in one tensor that newer ones divide."""


@pytest.mark.fast("deepseek v3 moe")
@pytest.mark.parametrize("case", WHOLE)
def test_older_files_have_projections_in_one(tmp_path: Path, case: str) -> None:
    source, path = written(tmp_path / "source", case), tmp_path / "model.gguf"
    write_family(path, source, whole=True)
    assert f"{WHOLE[case]}.weight".encode() in path.read_bytes()
    mine = convert(path, tmp_path / "mine", "q8")
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", "q8"))


def test_layers_that_predict_ahead_are_left_out(tmp_path: Path) -> None:
    """Files of Qwen3.5 hold them behind the others."""
    source, path = written(tmp_path / "source", "qwen3.5 even"), tmp_path / "model.gguf"

    def one_more(writer: Any) -> None:
        writer.kv_data[0]["qwen35.block_count"].value = 5
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm", "attn_q"):
            writer.add_tensor(f"blk.4.{name}.weight", np.ones((4, 32), np.float32))

    write_family(path, source, change=one_more)
    assert_same_bundle(convert(path, tmp_path / "mine"), convert(source, tmp_path / "theirs"))
    with closing(open_checkpoint(path)) as checkpoint:
        assert "mtp" in " ".join(checkpoint.notes)


@pytest.mark.fast("DeepseekV3-256-*", "DeepseekV2-64-*")
@pytest.mark.parametrize(
    ("family", "experts", "groups", "chosen"),
    [
        ("DeepseekV3", 256, 8, 4),
        ("DeepseekV2", 160, 8, 3),
        ("DeepseekV2", 64, 1, 1),
        ("DeepseekV3", 64, 1, 1),
    ],
)
def test_groups_that_a_file_lacks_are_the_published_models(
    tmp_path: Path, family: str, experts: int, groups: int, chosen: int
) -> None:
    """Files from before October 2025 say nothing of groups; without them other experts would be chosen."""
    source, path = tmp_path / "source", tmp_path / "model.gguf"
    small = {"num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 32, "n_group": groups}
    small |= {"n_routed_experts": experts, "topk_group": chosen, "vocab_size": BYTE_LEVEL_TOKENS}
    method = "group_limited_greedy" if groups > 1 else "greedy"
    own = {**DEEPSEEK, "topk_method": method} if family == "DeepseekV2" else DEEPSEEK_V3
    write_model(source, family, {**own, **small})

    def of_before(writer: Any) -> None:
        for key in ("expert_group_count", "expert_group_used_count"):
            del writer.kv_data[0][f"deepseek2.{key}"]

    write_family(path, source, change=of_before)
    with closing(open_checkpoint(path)) as checkpoint, closing(open_checkpoint(source)) as oracle:
        assert checkpoint.config == oracle.config
        spec = checkpoint.config.experts
        assert spec is not None
        assert (spec.groups, spec.chosen_groups) == (groups, chosen)
        taken = f"{chosen} of {groups} groups" if groups > 1 else "one group"
        assert (
            f"experts are chosen from {taken}, as in published models with {experts}" in checkpoint.notes[-1]
        )
    write_family(path, source)
    with closing(open_checkpoint(path)) as checkpoint:
        assert "experts are chosen" not in " ".join(checkpoint.notes)


def test_a_file_with_groups_says_how_many_are_chosen(tmp_path: Path) -> None:
    source, path = written(tmp_path / "source", "deepseek v3 moe"), tmp_path / "model.gguf"
    write_family(path, source, change=lambda it: it.kv_data[0].pop("deepseek2.expert_group_used_count"))
    with pytest.raises(CheckpointError, match="expert_group_used_count"):
        open_checkpoint(path)


@pytest.mark.fast("Q4_1")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_codes_of_columns_in_another_order_are_copied(tmp_path: Path, kind: str) -> None:
    """Value heads are 32 wide, as blocks are: columns of a delta rule's output keep their codes."""
    source, path = written(tmp_path / "source", "qwen3.5 even"), tmp_path / "model.gguf"
    write_family(path, source, kind)
    stored = RowFormat(8, 32, "symmetric") if kind == "Q8_0" else RowFormat(4, 32)
    with closing(open_checkpoint(path)) as checkpoint:
        tensor = checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"]
        assert isinstance(tensor, ColumnsOf)
        found, exact = tensor.quantized_rows(3, 9, stored), tensor.rows(3, 9)
        assert np.array_equal(tensor.columns(40, 130), tensor.rows(0, 64)[:, 40:130])
    assert found is not None
    if kind == "Q8_0":
        groups = found.codes.reshape(6, 6, 32).astype(np.float32) - 128
    else:
        nibbles = np.stack([found.codes & 15, found.codes >> 4], axis=2)
        groups = nibbles.reshape(6, 6, 32).astype(np.float32)
    groups *= found.scales.astype(np.float32)[:, :, None]
    if kind == "Q4_1":
        groups += found.biases.astype(np.float32)[:, :, None]
    assert np.array_equal(groups.reshape(6, -1), exact)
    notes = Bundle.open(convert(path, tmp_path / "mine")).manifest.provenance.notes
    assert "attention: codes and scales copied" in notes


LYING = [
    ("qwen3.5 even", "ssm.time_step_rank", 5, r"inner_size is 192, for qwen35.ssm.time_step_rank, 5 heads"),
    ("qwen3.5 even", "ssm.time_step_rank", 0, "time_step_rank, 0 heads"),
    ("qwen3.5 even", "ssm.group_count", 4, "value_heads|linear_num_key_heads|multiple"),
    ("qwen3.5 even", "ssm.conv_kernel", 1 << 31, "taps|linear_conv_kernel_dim"),
    ("qwen3.5 even", "ssm.state_size", 1 << 31, "key_width|linear_key_head_dim"),
    ("qwen3.5 even", "ssm.inner_size", 96, r"in_proj_qkv.weight has shape \[320, 64\]"),
    ("qwen3.5 even", "full_attention_interval", 0, "full_attention_interval is 0"),
    ("qwen3.5 even", "nextn_predict_layers", 4, "nextn_predict_layers is 4 of 4 layers"),
    ("qwen3.5 even", "attention.recurrent_layers", [True] * 5, "has 5 values for 4 layers"),
    ("qwen3.5 even", "attention.recurrent_layers", [True] * 4, "names no full_attention"),
    ("qwen3.5 even", "rope.dimension_sections", ["a"], "dimension_sections"),
    ("qwen3.5 even", "ssm.dt_b_c_rms", True, "ssm.dt_b_c_rms"),
    ("qwen3.5 moe even", "expert_gating_func", 2, "expert_gating_func is 2; only 1, softmax"),
    ("qwen3.5 moe even", "expert_count", 1 << 31, "num_experts is 2147483648"),
    ("deepseek v3 moe", "attention.head_count_kv", 2, "head_count_kv is 2; .* it is 1, or 4"),
    ("deepseek v3 moe", "attention.key_length", 55, "attention.key_length is 55"),
    ("deepseek v3 moe", "attention.value_length", 16, "attention.value_length is 16"),
    ("deepseek v3 moe", "rope.dimension_count", 28, "key_length is 56|dimension_count is 28"),
    ("deepseek v3 moe", "attention.key_length_mla", 8, "dimension_count is 8; of a key's 8"),
    ("deepseek v3 moe", "attention.kv_lora_rank", 64, "attention.key_length is 56"),
    ("deepseek v3 moe", "attention.q_lora_rank", 1 << 31, "q_lora_rank|query_rank"),
    ("deepseek v3 moe", "expert_gating_func", 3, "expert_gating_func is 3"),
    ("deepseek v3 moe", "expert_group_count", 3, "n_group|groups"),
    ("deepseek v3 moe", "leading_dense_block_count", 3, "lacks 6 tensors .*ffn_gate.weight"),
    ("deepseek v3 moe", "rope.scaling.type", "linear", "yarn_log_multiplier is there without yarn"),
    ("deepseek v3 moe", "rope.scaling.yarn_log_multiplier", -1.0, "mscale"),
    ("deepseek v3 moe", "attention.temperature_length", 8192, "temperature_length"),
    ("lfm2", "shortconv.l_cache", 1, "taps"),
    ("lfm2", "shortconv.l_cache", 1 << 31, "taps"),
    ("lfm2", "shortconv.l_cache", 4, r"conv.conv.weight has shape \[64, 3\]; that config asks for \[64, 4\]"),
    ("lfm2", "attention.head_count_kv", [0, 2, 0], "head_count_kv has 3 values for 4 layers"),
    ("lfm2", "attention.head_count_kv", [0, 0, 0, 0], r"head_count_kv names \[\]; layers with attention"),
    ("lfm2", "attention.head_count_kv", [0, 2, 0, 1], r"head_count_kv names \[1, 2\]"),
    ("lfm2", "attention.head_count_kv", [0.0, 2.0, 0.0, 0.0], "head_count_kv is 0.0; it must be an in"),
    ("lfm2", "attention.head_count_kv", [0, -2, 0, 0], "num_key_value_heads is -2|num_kv_heads"),
    ("lfm2", "attention.head_count_kv", ["a"] * 4, "head_count_kv"),
    ("lfm2", "attention.head_count_kv", [2, 0, 0, 0], r"blk.1.shortconv.in_proj.weight.* is missing"),
    ("lfm2", "attention.head_count_kv", 2, r"tensors that its metadata ask for, blk.0.attn_q.weight"),
    ("lfm2", "attention.sliding_window", 16, "attention.sliding_window is 16"),
    ("lfm2", "feed_forward_length", 1 << 31, "intermediate_size"),
    ("lfm2", "expert_count", 8, "mixture of experts"),
    ("lfm2 moe", "expert_gating_func", 1, "expert_gating_func is 1; only 2, sigmoid"),
    ("lfm2 moe", "expert_count", 7, r"blk\.1\.ffn_gate_exps\.weight has shape \[8, 48, 64\]"),
    ("lfm2 moe", "expert_count", 1 << 31, "num_experts is 2147483648"),
    ("lfm2 moe", "leading_dense_block_count", 0, r"blk\.0\.ffn_gate_exps\.weight, .* is missing"),
    ("lfm2 moe", "expert_shared_count", 1, "expert_shared_count is 1; only 0"),
    ("lfm2 moe", "attention.head_count_kv", [0, 2, 0, 1], r"head_count_kv names \[1, 2\]"),
]  # fmt: skip
"""Case, key, value, and what the refusal says."""


def test_lying_metadata_of_latents_and_delta_rules_are_refused(tmp_path: Path) -> None:
    sources = {case: written(tmp_path / case, case) for case in {row[0] for row in LYING}}
    path = tmp_path / "model.gguf"
    for case, key, value, message in LYING:
        write_family(path, sources[case], change=saying(key, value))
        with pytest.raises(OndeviceError, match=message):
            open_checkpoint(path).close()


def test_decays_that_no_exponential_gives_are_refused(tmp_path: Path) -> None:
    source, path = written(tmp_path / "source", "qwen3.5 even"), tmp_path / "model.gguf"
    write_family(path, source)
    reader = gguf.GGUFReader(path, "r+")
    next(it for it in reader.tensors if it.name == "blk.1.ssm_a").data[2] = 0.0
    reader.data.flush()
    with pytest.raises(CheckpointError, match=r"decays of .*layers\.1.*go up to 0; they must be below 0"):
        convert(path, tmp_path / "mine")


def llama_cpp_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits of a file's model, (T, V)."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options = {"n_ctx": 512, "n_batch": 512, "n_threads": 1, "n_gpu_layers": 0}
    model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)
    model.eval(tokens)
    logits = np.array(model.scores[: len(tokens)])
    model.close()
    return logits


def bytes_of(count: int) -> list[int]:
    """Random ids of byte tokens."""
    tokens: list[int] = np.random.default_rng(1).integers(0, 256, count).tolist()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize(
    "case",
    [name for name in MODELS if name not in REFUSED + UNLIKE],
)
def test_a_family_speaks_as_llama_cpp_does(tmp_path: Path, case: str, kind: str) -> None:
    """The very file, by llama.cpp. It rounds activations to float16, or to 8 bits for Q8_0, and GELU too.

    Among experts, rounding to 8 bits changes some choices.
    """
    source = written(tmp_path / "source", case)
    path = tmp_path / "model.gguf"
    write_family(path, source, kind, add_byte_level)
    expected = llama_cpp_logits(path, bytes_of(100))
    with running(convert(path, tmp_path / "mine", "f16")) as model:
        logits = all_logits(model, bytes_of(100), 32)
    far = np.abs(logits - expected).max(axis=1) >= LIMITS[kind] * np.abs(expected).max()
    assert far.mean() <= (0.1 if kind == "Q8_0" and "expert" in path.read_bytes().decode("latin1") else 0.0)
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.9


@pytest.mark.slow
def test_gemma3n_is_as_far_from_llama_cpp_as_transformers_is(tmp_path: Path) -> None:
    """llama.cpp takes the deviation of a layer's gates with n - 1, which shows in a model this small."""
    torch = pytest.importorskip("torch")
    family, options = MODELS["gemma3n"]
    options = {**options, "vocab_size": BYTE_LEVEL_TOKENS, "initializer_range": 0.02}
    model, path = write_model(tmp_path / "source", family, options), tmp_path / "model.gguf"
    write_family(path, tmp_path / "source", "F16", add_byte_level)
    with torch.no_grad():
        reference = model(torch.tensor([bytes_of(100)])).logits[0].numpy()
    with running(convert(path, tmp_path / "mine", "f16")) as loaded:
        logits = all_logits(loaded, bytes_of(100), 32)
    expected = llama_cpp_logits(path, bytes_of(100))
    largest, theirs = np.abs(expected).max(), np.abs(reference - expected).max()
    assert np.abs(logits - reference).max() < 1e-3 * largest
    assert np.abs(logits - expected).max() < theirs + 1e-3 * largest
    assert theirs < 0.3 * largest
