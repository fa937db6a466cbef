"""Options, their one default, the settings file and what a model's authors recommend."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from ondevice.config import RuntimeConfig, RuntimeOptions, SamplingConfig, SamplingOptions
from ondevice.converters.training.streams.options import MultiStreamOptions
from ondevice.errors import UsageError
from ondevice.settings import (
    PROMPT_CACHE_OPTIONS,
    RUNTIME_OPTIONS,
    SAMPLING_OPTIONS,
    SHARING_OPTIONS,
    TEMPLATE_OPTIONS,
    read_settings,
    runtime_config,
    runtime_options,
    sampling_config,
    sampling_options,
    settings_path,
    variable,
    with_model_defaults,
)
from ondevice.training import MultiStreamKeywords


def test_every_option_has_the_default_of_its_dataclass() -> None:
    runtime = {name: option.default for name, option in RUNTIME_OPTIONS.items()}
    others = PROMPT_CACHE_OPTIONS | SHARING_OPTIONS | TEMPLATE_OPTIONS
    runtime |= {name: option.default for name, option in others.items()}
    sampling = {name: option.default for name, option in SAMPLING_OPTIONS.items()}
    assert runtime_config(runtime) == RuntimeConfig()
    assert sampling_config(sampling) == SamplingConfig()
    assert {field.name for field in fields(SamplingConfig)} - set(SAMPLING_OPTIONS) == {
        "constraint",
        "end_tokens",
        "logit_bias",
        "repeat_last_n",
        "top_logprobs",
    }


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (RuntimeOptions, RuntimeConfig),
        (SamplingOptions, SamplingConfig),
        (MultiStreamKeywords, MultiStreamOptions),
    ],
)
def test_typed_options_are_the_fields_of_their_dataclass(options: type, config: type) -> None:
    freer = {"end_tokens", "logit_bias", "stop"}
    expected, found = get_type_hints(config), get_type_hints(options)
    assert list(found) == [field.name for field in fields(config)]
    assert {name: hint for name, hint in found.items() if expected[name] != hint}.keys() <= freer


def test_a_misspelt_option_is_refused_with_what_was_meant() -> None:
    with pytest.raises(UsageError, match="no option 'dram_buget'; did you mean 'dram_budget'"):
        runtime_options({"dram_buget": "4GB"})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(UsageError, match="no option 'temprature'; did you mean 'temperature'"):
        sampling_options(None, {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(UsageError, match="no option 'zzz'; there are temperature, "):
        sampling_options(None, {"zzz": 1.0})  # type: ignore[typeddict-unknown-key]


def test_sampling_of_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="sampling is 5; it must be a SamplingConfig"):
        sampling_options(5, {})  # type: ignore[arg-type]


def test_flags_choices_and_variables_are_the_documented_ones() -> None:
    assert RUNTIME_OPTIONS["dram_budget"].flag == "--dram-budget"
    assert variable("--dram-budget") == "ONDEVICE_DRAM_BUDGET"
    assert RUNTIME_OPTIONS["kv_bits"].choices == ("16", "8")
    assert RUNTIME_OPTIONS["backend"].choices == ("auto", "cpu", "mlx", "reference")
    assert SAMPLING_OPTIONS["temperature"].flag == "--temp"
    assert SAMPLING_OPTIONS["stop"].multiple


def test_values_become_configs() -> None:
    config = runtime_config({"kv_bits": "8", "threads": 2, "prompt": "ignored"})
    assert (config.kv_bits, config.threads) == (8, 2)
    assert sampling_config({"stop": ["a", "b"], "model": "x"}).stop == ("a", "b")
    with pytest.raises(UsageError, match="temperature"):
        sampling_config({"temperature": -1.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "cuda"),
        ("kv_bits", 4),
        ("threads", -1),
        ("threads", 1.5),
        ("predictor_recall", 0),
        ("predictor_recall", 1.5),
        ("predictor_recall", float("nan")),
        ("predictor_recall", True),
        ("predictor_recall", "half"),
        ("sparsity", "threshold"),
        ("prefill_chunk", -1),
        ("io", None),
        ("io", []),
        ("max_context", "x"),
        ("dram_budget", 4.5),
        ("dram_budget", None),
        ("draft_model", 5),
        ("context_share", 1.1),
        ("context_share", -0.1),
        ("context_share", "a quarter"),
    ],
)
def test_values_a_field_cannot_have_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        RuntimeConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 1.5),
        ("max_tokens", "12"),
        ("seed", True),
        ("temperature", "hot"),
        ("top_p", None),
        ("min_p", False),
        ("repetition_penalty", [1.0]),
        ("frequency_penalty", "0"),
        ("presence_penalty", None),
        ("stop", "abc"),
        ("stop", (1,)),
        ("logit_bias", {1: 2.0}),
        ("logit_bias", ((1,),)),
        ("logit_bias", (("a", 1.0),)),
        ("logit_bias", ((1, "b"),)),
    ],
)
def test_sampling_values_of_the_wrong_type_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name} is .* must be a"):
        SamplingConfig(**{name: value})  # type: ignore[arg-type]


def test_an_integer_is_a_number() -> None:
    assert SamplingConfig(temperature=1, logit_bias=((3, -2),)).temperature == 1


def test_one_stop_string_of_a_settings_file_is_a_list_of_one(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('stop = "a b"')
    assert read_settings(path).values == {"stop": ["a b"]}


def test_settings_file_keys_may_be_spelt_like_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(
        'dram-budget = "4GB"\ntemp = 0.5\nkv_bits = 8\nmodel = "m"\noffline = true\nstop = ["x"]\n'
        "prompt-tokens = 7\njson = true\nverbose = true\n"
    )
    settings = read_settings(path)
    assert (settings.keys["dram_budget"], settings.keys["kv_bits"]) == ("dram-budget", "kv_bits")
    assert settings.values == {
        "dram_budget": "4GB",
        "temperature": 0.5,
        "kv_bits": "8",
        "model": "m",
        "offline": True,
        "stop": ["x"],
        "prompt_tokens": 7,
        "as_json": True,
        "verbose": True,
    }


def test_a_settings_file_may_have_tables_of_single_models(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('threads = 2\n[models."qwen2.5-coder"]\nmax-context = 24576\n[models.b]\n')
    settings = read_settings(path)
    assert settings.values == {"threads": 2}
    assert settings.models == {"qwen2.5-coder": {"max_context": 24576}, "b": {}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dram_budget = ", "isn't TOML"),
        ("threads = " + "9" * 5000, "isn't TOML"),
        ("stop = " + "[" * 5000 + "]" * 5000, "isn't TOML"),
        ("dram_buget = '4GB'", "unknown key 'dram_buget'"),
        ("threads = true", "it must be an integer, without quotes"),
        ("threads = [1]", "must be an integer"),
        ("threads = 1.5", "must be an integer"),
        ("json = 1", "must be true or false"),
        ("io = 3", "must be a string"),
        ("offline = 'no'", "must be true or false"),
        ("stop = ['a', 1]", "must be a string or a list of strings"),
        ("dram_budget = 1.5", "must be a string, or a number of bytes"),
        ("temp = '1'", "must be a number, without quotes"),
        ("temp = 1\ntemperature = 1", "both temp and temperature, which are one option; keep one"),
        ("dram_budget = 1\ndram-budget = 1", "both dram_budget and dram-budget"),
        ("models = 3", r"'models', which must be tables: \[models.NAME\]"),
        ("models.a = 3", "must be tables"),
        ("[models.a]\nthreads = 2", "unknown key 'threads' for the model a; known are max_context"),
        ("[models.a]\nmax_context = 'x'", "for the model a: max_context is 'x'"),
        ("[models.a]\nmax_context = -1", "for the model a: max_context is -1"),
    ],
)
def test_a_bad_settings_file_is_refused_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_settings(path)
    assert str(path) in str(caught.value)


def test_a_settings_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    for path in (tmp_path, tmp_path / "latin.toml"):
        with pytest.raises(UsageError, match="can't be read"):
            read_settings(path)


def test_no_settings_file_is_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(tmp_path / "absent.toml").values == {}
    monkeypatch.setenv("ONDEVICE_CONFIG", str(tmp_path / "mine.toml"))
    with pytest.raises(UsageError, match=r"ONDEVICE_CONFIG names .*mine\.toml"):
        settings_path()
    (tmp_path / "mine.toml").touch()
    assert settings_path() == tmp_path / "mine.toml"
    monkeypatch.delenv("ONDEVICE_CONFIG")
    assert settings_path().name == "config.toml"


def test_a_models_recommendations_yield_to_what_was_chosen() -> None:
    recommended = {"temperature": 0.6, "top_p": 0.9}
    config, taken = with_model_defaults(SamplingConfig(top_p=0.5), recommended, {"top_p"})
    assert (config.temperature, config.top_p) == (0.6, 0.5)
    assert taken == {"temperature": 0.6}
    assert with_model_defaults(SamplingConfig(), {}, set()) == (SamplingConfig(), {})
