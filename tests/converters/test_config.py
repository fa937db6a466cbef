"""`config.json` to ModelConfig: what each family's keys mean, and which are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ondevice.converters.architectures import tensors
from ondevice.converters.architectures.registry import read_config
from ondevice.converters.architectures.rotary import RopeScaling, rope_spec
from ondevice.errors import CheckpointError, UnsupportedModelError
from ondevice.model_config import ModelConfig, RopeSpec
from tests.support.models import LINEAR_ROPE, LLAMA3_ROPE, VARIANTS, tensor_shapes, tiny_config


def read(family: str = "llama", **options: Any) -> ModelConfig:
    return read_config(tiny_config(family, **options))


def windows_of(config: ModelConfig) -> tuple[int, ...]:
    return tuple(layer.attention.window for layer in config.layers)


def without(family: str, *keys: str) -> ModelConfig:
    return read_config({k: v for k, v in tiny_config(family).items() if k not in keys})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rope_style", ["legacy", "parameters"])
def test_both_rope_styles_give_the_same_config_for_every_variant(variant: str, rope_style: str) -> None:
    options = VARIANTS[variant]
    config = read_config(tiny_config(**options, rope_style=rope_style))
    assert config == read_config(tiny_config(**options))
    assert config.architecture == options["family"]
    assert tensors.tensor_shapes(config) == tensor_shapes(tiny_config(**options))
    scaled = config.ropes != (rope_spec(options.get("rope_theta", 10000.0), config.head_dim),)
    assert scaled == bool(options.get("rope_scaling"))


def test_transformers_reads_the_same_out_of_its_own_config(tmp_path: Any) -> None:
    """Configs as `transformers` itself saves them, whole, with every default written out."""
    transformers = pytest.importorskip("transformers")
    for variant, options in VARIANTS.items():
        values = tiny_config(**options)
        saved = transformers.AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
        assert read_config(saved) == read_config(tiny_config(**options)), variant


def test_llama_biases_are_on_the_output_too() -> None:
    attention = read(attention_bias=True).layers[0].attention
    assert (attention.bias, attention.output_bias, attention.head_norm) == (True, True, "none")


def test_qwen2_has_biases_on_queries_keys_and_values_only() -> None:
    attention = read("qwen2").layers[0].attention
    assert (attention.bias, attention.output_bias, attention.head_norm) == (True, False, "none")


def test_qwen3_norms_heads() -> None:
    config = read("qwen3")
    attention = config.layers[0].attention
    assert (attention.bias, attention.head_norm, config.head_dim) == (False, "head", 16)
    assert without("qwen3", "head_dim").head_dim == 128


@pytest.mark.parametrize(("options", "windows"), [
    ({"sliding_window": 9}, (9, 9)),
    ({"sliding_window": None}, (0, 0)),
])  # fmt: skip
def test_every_layer_of_mistral_has_the_configured_window(
    options: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert windows_of(read("mistral", **options)) == windows


def test_mistral_without_the_key_means_the_first_release() -> None:
    assert windows_of(without("mistral", "sliding_window")) == (4096, 4096)


def test_mistral_has_8_key_value_heads_where_it_does_not_say() -> None:
    values = tiny_config("mistral", num_attention_heads=16)
    del values["num_key_value_heads"]
    assert read_config(values).num_kv_heads == 8


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("options", "windows"), [
    ({"sliding_window": 9, "max_window_layers": 1}, (0, 0, 0)),
    ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (0, 9, 9)),
    ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (0, 0, 0)),
    ({"use_sliding_window": True, "sliding_window": 9,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (9, 0, 9)),
    ({"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 3}, (0, 0, 0)),
    ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}, (0, 0, 0)),
    ({"use_sliding_window": True, "sliding_window": None, "layer_types": ["full_attention"] * 3}, (0, 0, 0)),
])  # fmt: skip
def test_qwen_has_windows_only_in_the_configured_layers(
    family: str, options: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert windows_of(read(family, num_hidden_layers=3, **options)) == windows


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_without_the_key_has_a_window_of_4096(family: str) -> None:
    values = tiny_config(family, use_sliding_window=True, max_window_layers=1)
    values.pop("sliding_window", None)
    assert windows_of(read_config(values)) == (0, 4096)


@pytest.mark.parametrize(("name", "activation"), [
    ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"), ("relu2", "relu2"),
])  # fmt: skip
def test_an_activation_is_known_by_each_of_its_names(name: str, activation: str) -> None:
    assert read(hidden_act=name).activation == activation


def test_rope_is_read_with_its_base_and_scaling() -> None:
    def spec(theta: float = 10000.0, scaling: RopeScaling | None = None) -> tuple[RopeSpec]:
        return (rope_spec(theta, 16, scaling),)

    assert read(rope_scaling=LINEAR_ROPE).ropes == spec(scaling=RopeScaling("linear", 4.0))
    llama3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    assert read(rope_scaling=LLAMA3_ROPE).ropes == spec(scaling=llama3)
    older = {"type": "linear", "factor": 2}
    assert read(rope_scaling=older).ropes == spec(scaling=RopeScaling("linear", 2.0))
    assert read(rope_scaling={"rope_type": "default"}).ropes == spec()
    short = {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"}
    assert read(rope_scaling=short).ropes == spec(scaling=replace(llama3, original_max_context=512))
    assert read(rope_theta=5e5).ropes == spec(5e5)
    assert without("llama", "rope_theta", "rope_scaling").ropes == spec()


@pytest.mark.parametrize(("key", "values", "named"), [
    ("long_factor", [1.0] * 7, "long_factor has 7 values for 8 pairs"),
    ("long_factor", [], "long_factor is missing"),
    ("long_factor", [0.5] * 8, "long_factor has 0.5"),
    ("short_factor", [1.0] * 7, "short_factor has 7"),
])  # fmt: skip
def test_factors_of_longrope_are_checked(key: str, values: list[float], named: str) -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, key: values}
    with pytest.raises(CheckpointError, match=named):
        read(rope_scaling=scaling, original_max_position_embeddings=64)


@pytest.mark.parametrize(("scaling", "theta", "named"), [
    ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}, 1e4, "is 0"),
    ({"rope_type": "yarn", "factor": 2.0}, 1e4, "is 0"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 1.0, "rope_theta is 1"),
])  # fmt: skip
def test_contexts_and_bases_that_nothing_can_be_divided_by(
    scaling: dict[str, Any], theta: float, named: str
) -> None:
    scaling = {"original_max_position_embeddings": 0, **scaling}
    with pytest.raises(CheckpointError, match=named):
        read(rope_scaling=scaling, rope_theta=theta)


def test_missing_and_null_keys_take_the_familys_defaults() -> None:
    config = without("llama", "num_key_value_heads", "rms_norm_eps", "hidden_act", "tie_word_embeddings")
    assert (config.num_kv_heads, config.norm.eps, config.activation) == (4, 1e-6, "silu")
    assert not config.tie_embeddings
    assert read(num_key_value_heads=None, head_dim=None).head_dim == 16
    assert without("llama", "max_position_embeddings").max_context == 2048


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_harmless_and_switched_off_keys_are_ignored(family: str) -> None:
    extras = {
        "torch_dtype": "bfloat16", "dtype": "float16", "transformers_version": "4.1", "_name_or_path": "x/y",
        "use_cache": False, "pad_token_id": 0, "initializer_range": 0.1, "attention_dropout": 0.1,
        "quantization_config": None, "some_new_switch": None, "auto_map": {}, "pruned_heads": {},
        "is_decoder": False, "add_cross_attention": False, "torchscript": False, "rope_interleaved": False,
    }  # fmt: skip
    assert read(family, **extras) == read(family)


@pytest.mark.parametrize(("family", "key", "value"), [
    ("llama", "final_logit_softcapping", 30.0), ("llama", "attn_logit_softcapping", 50.0),
    ("llama", "query_pre_attn_scalar", 256), ("llama", "embedding_multiplier", 12.0),
    ("llama", "residual_multiplier", 0.22), ("llama", "logits_scaling", 0),
    ("llama", "pretraining_tp", 2), ("llama", "mlp_bias", True), ("llama", "partial_rotary_factor", 0.5),
    ("llama", "sliding_window", 4096), ("llama", "quantization_config", {"bits": 4}),
    ("llama", "auto_map", {"AutoModel": "evil.Model"}), ("llama", "is_encoder_decoder", True),
    ("mistral", "attention_bias", True), ("mistral", "num_local_experts", 8),
    ("llama", "layer_norm_elementwise_affine", False), ("llama", "use_bias", False),
    ("llama", "scale_attn_weights", False), ("llama", "partial_rotary_factor", False),
    ("llama", "pretraining_tp", True), ("llama", "use_parallel_residual", False),
    ("qwen2", "use_mrope", True), ("qwen3", "layer_norm_scale", 1.0), ("llama", "is_causal", False),
])  # fmt: skip
def test_what_changes_the_arithmetic_is_refused_by_name(family: str, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read(family, **{key: value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("llama", {"rms_norm_eps": 0.0}, "norm eps is 0.0"),
        ("llama", {"intermediate_size": -96}, "intermediate_size is -96"),
        ("gemma2", {"query_pre_attn_scalar": 1e-80}, "attention scale is inf"),
        ("gemma2", {"query_pre_attn_scalar": 1e290}, "attention scale is 0"),
        (
            "gemma3n_text",
            {"hidden_size_per_layer_input": -1, "num_kv_shared_layers": 0},
            "per_layer_width is -1",
        ),
    ],
)
def test_what_no_model_can_have_names_the_file_and_a_remedy(
    family: str, changes: dict[str, Any], match: str
) -> None:
    """ModelConfig and its specs know of no file, and numpy warns of what they refuse."""
    values = tiny_config() | {"model_type": family, "architectures": None} | changes
    with pytest.raises(UnsupportedModelError, match=f"^config.json: {match}.*; take config.json from"):
        read_config(values)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "proportional", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5},
    {"rope_type": "default", "partial_rotary_factor": 0.25},
    {"rope_type": "default", "mrope_section": [1, 2, 3]},
])  # fmt: skip
def test_other_rope_scalings_are_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="rope_scaling"):
        read(rope_scaling=scaling)
    with pytest.raises(UnsupportedModelError, match="rope_parameters"):
        read(rope_scaling=scaling, rope_style="parameters")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"head_dim": 1 << 31}, "a head would have 2147483648 dimensions; the most is 1024"),
        ({"hidden_size": 1 << 40, "head_dim": None}, "a head would have"),
        ({"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 10**18}}, "the most is 1677"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-310}}, "beta_slow is 1e-310"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e290}}, "beta_fast 1e"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": -8.0}}, "mscale is -8.0"),
    ],
)
def test_numbers_that_nothing_can_be_computed_with(changes: dict[str, Any], match: str) -> None:
    """They ended in an overflow, or a list of a billion frequencies."""
    with pytest.raises(CheckpointError, match=match):
        read("qwen3", **changes)


def test_rope_parameters_by_layer_type_are_refused() -> None:
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(UnsupportedModelError, match="full_attention"):
        read("qwen3", rope_scaling=nested, rope_style="parameters")


@pytest.mark.parametrize(("changes", "match"), [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, "model_type"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"hidden_act": "tanh"}, "hidden_act 'tanh'"),
    ({"num_key_value_heads": 3}, "it must divide"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"head_dim": 15}, "odd"),
])  # fmt: skip
def test_unsupported_values_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        read(**changes)


@pytest.mark.parametrize(("changes", "match"), [
    ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
    ({"hidden_size": 64.0}, "hidden_size"), ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": None}, "no hidden_size"), ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"), ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"), ({"hidden_act": ["silu"]}, "hidden_act"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
    ({"rope_scaling": {"rope_type": 7}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 2.0}}, "contradict"),
    ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 0.5}}, "high_freq_factor"),
    ({"rope_scaling": LINEAR_ROPE, "rope_parameters": LLAMA3_ROPE}, "contradict"),
])  # fmt: skip
def test_damaged_values_are_refused(changes: dict[str, Any], match: str) -> None:
    scaling = changes.pop("rope_scaling", None)
    with pytest.raises(CheckpointError, match=match):
        read_config(tiny_config("llama") | changes | ({"rope_scaling": scaling} if scaling else {}))


@pytest.mark.parametrize(("options", "match"), [
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    ({"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
     "sliding_window is null; take config.json from"),
])  # fmt: skip
def test_contradictory_windows_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read("qwen2", **options)
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read("qwen2", layer_types=["chunked_attention"] * 2)


@pytest.mark.parametrize(("family", "key"), [
    ("gemma", "hidden_size"), ("gemma3_text", "hidden_size"), ("gemma3n_text", "hidden_size"),
    ("gemma4_text", "hidden_size"), ("phi3", "max_position_embeddings"),
])  # fmt: skip
def test_integers_that_are_no_floats_are_refused(family: str, key: str) -> None:
    """JSON has integers of any length, and some families take roots and quotients of theirs."""
    values = {**tiny_config("llama"), "model_type": family, "architectures": None, key: 10**400}
    if family == "phi3":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        values |= {"rope_scaling": {"rope_type": "longrope", **factors}}
        values |= {"original_max_position_embeddings": 64}
    with pytest.raises(CheckpointError, match=f"{key} is 1000.*an integer of at most 64 bits"):
        read_config(values)


NEMOTRON_4B: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "bos_token_id": 2, "eos_token_id": 3,
    "hidden_act": "relu2", "hidden_size": 3072, "initializer_range": 0.0134, "intermediate_size": 9216,
    "kv_channels": 128, "max_position_embeddings": 4096, "norm_eps": 1e-5, "num_attention_heads": 24,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.48.0",
    "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
"""The keys of the 4-billion model as TensorRT-LLM's tests quote them."""


def test_nemotrons_keys_are_read() -> None:
    config = read_config(NEMOTRON_4B)
    assert (config.head_dim, config.ropes[0].turning, config.activation) == (128, 64, "relu2")
    with pytest.raises(UnsupportedModelError, match="kv_channels is 64"):
        read_config(NEMOTRON_4B | {"kv_channels": 64})


LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "ignore_index": -100,
    "image_token_index": 32000, "pad_token_id": 32001, "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-5,
        "torch_dtype": "float16", "vocab_size": 32064,
    },
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0",
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip
"""The keys of `llava-1.5-7b-hf`, which leaves out what is Llama's default."""


@pytest.mark.parametrize("text", ["llama", "mistral", "qwen2"])
def test_llavas_text_model_has_the_defaults_of_its_family(text: str) -> None:
    """As `transformers` fills them in."""
    transformers = pytest.importorskip("transformers")
    values = LLAVA | {"text_config": LLAVA["text_config"] | {"model_type": text}}
    theirs = transformers.LlavaConfig(**values).text_config.to_dict()
    kept = {key: value for key, value in theirs.items() if key != "architectures"}
    assert read_config(values) == read_config(kept)
    assert read_config(values).layers == read_config(values | {"text_config": kept}).layers


@pytest.mark.parametrize("depth", [1, 490])
def test_towers_within_towers_are_refused(depth: int) -> None:
    """Without a limit, a deep nest of them ended in a traceback."""
    values = tiny_config("llama") | {"model_type": "gemma3_text"}
    for _ in range(depth + 1):
        values = {"model_type": "gemma3", "text_config": values}
    with pytest.raises(UnsupportedModelError, match="'gemma3'; of gemma3 only gemma3_text can be"):
        read_config(values)
