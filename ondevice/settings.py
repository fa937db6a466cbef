"""All options that a user can set. Their defaults come from the config dataclasses.

A flag takes precedence over an environment variable (`ONDEVICE_<OPTION>`), which takes precedence over the
settings file, and this over the default. This module knows the options and the file; the command line reads
flags and variables.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ondevice.config import TARGET_RANGE, RuntimeConfig, RuntimeOptions, SamplingConfig, SamplingOptions
from ondevice.errors import UsageError
from ondevice.records import dataclass
from ondevice.units import parse_budget, parse_size

MAX_FILE_BYTES = 1 << 20
"""Most bytes of a settings file."""
NEAR = 0.6
"""Least `difflib` similarity of a misspelt option and the suggested one."""


@dataclass(frozen=True)
class Option:
    """One option: `name` in Python and the settings file, `flag` in the shell."""

    name: str
    flag: str
    default: Any
    choices: tuple[str, ...]
    """Allowed values; empty if every value of type `kind` is allowed."""
    kind: type
    help: str
    rare: bool
    """Whether only `--help-all` shows it in a command with many options."""

    @property
    def multiple(self) -> bool:
        """True if the option may be given several times."""
        return self.kind is tuple


_RUNTIME_HELP = {
    "dram_budget": "Ceiling for the whole process: 4GB, 3.5GiB, 60%, bytes, or auto.",
    "memory_pressure": "auto: the budget shrinks while other programs need memory; off: it stays as it is.",
    "backend": "What multiplies; auto is mlx on Apple silicon, cpu elsewhere.",
    "threads": "Compute threads; 0: one per core.",
    "io": "How flash is read: past the page cache, or through it.",
    "sparsity": "Which neurons are multiplied; `inspect` says what a model can have.",
    "predictor_recall": f"With --sparsity predicted: share of the firing neurons to find, {TARGET_RANGE}, "
    "one of those that `inspect` lists.",
    "experts": "Fewer experts a token than the model's own, which changes the text; 0: the model's own.",
    "speculation": "How tokens are drafted.",
    "draft_model": "Bundle that drafts; --speculation auto then means model.",
    "kv_bits": "Bits per stored key and value.",
    "max_context": "Tokens a conversation may hold; 0: the model's limit, at most 4096, or what fits. `chat` "
    "and `serve` take more where a quarter of the budget holds them, and of `auto` no more bytes than the "
    "weights have.",
}
_PROMPT_CACHE_HELP = {
    "prompt_cache": "Folder that keeps what was computed, so that no beginning of a text is computed twice.",
    "prompt_cache_bytes": "Most bytes of --prompt-cache; the least recently used leave it first.",
}
_SHARING_HELP = {
    "pass_seconds": "Longest that a part of a prompt, of 32 tokens at least, keeps other requests waiting; "
    "0: no limit, as where weights come from flash or are of experts, and on MLX.",
}
_TEMPLATE_HELP = {
    "chat_template": "File with a Jinja template to take in place of the model's own.",
    "date": "Day that chat templates take for today, as 2026-07-31; today if not given.",
}
_SAMPLING_HELP = {
    "temperature": "0 is greedy.",
    "top_k": "Sample from the k likeliest tokens; 0: off.",
    "top_p": "Sample from the likeliest tokens that hold this probability; 1: off.",
    "min_p": "Drop tokens less likely than this times the likeliest; 0: off.",
    "repetition_penalty": "Divide the logits of tokens seen before; 1: off.",
    "frequency_penalty": "Take this from a token's logit for each time it was generated, -2 to 2; 0: off.",
    "presence_penalty": "Take this from the logits of tokens that were generated, -2 to 2; 0: off.",
    "seed": "Seed of the random numbers: the same seed gives the same text; drawn and shown if not given.",
    "stop": "End the text before this string; may be given several times.",
    "max_tokens": "Most tokens to generate.",
}
_MEANT_FOR = {
    "predictor_recall": ("sparsity", "predicted"),
    "experts": ("sparsity", "experts", "auto"),
    "draft_model": ("speculation", "model", "auto", "all"),
}
"""Options that have a meaning only with some values of another option: its name, then these values."""
_RARE = {
    *("memory_pressure", "io", "sparsity", "predictor_recall", "experts"),
    *("draft_model", "kv_bits", "prompt_cache_bytes"),
    *("pass_seconds", "chat_template", "date", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "stop", "top_k"),
}
"""Options that few people need."""
_SIZES = ("dram_budget", "prompt_cache_bytes")
"""Options whose value is a size: a text, or a number of bytes."""
_FLAGS = {"temperature": "--temp", "as_json": "--json", "listing": "--list"}


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _key(flag: str) -> str:
    """An option's name in the settings file."""
    return flag.lstrip("-").replace("-", "_")


def variable(flag: str) -> str:
    """The environment variable of an option."""
    return f"ONDEVICE_{_key(flag).upper()}"


def _options(config: type, helps: Mapping[str, str]) -> dict[str, Option]:
    hints = get_type_hints(config)
    by_name = {field.name: field for field in fields(config)}
    return {name: _option(by_name[name], hints[name], text) for name, text in helps.items()}


def _option(field: Field[Any], hint: Any, text: str) -> Option:
    default = field.default
    if default is MISSING and field.default_factory is not MISSING:
        default = field.default_factory()
    choices = tuple(str(choice) for choice in get_args(hint)) if get_origin(hint) is Literal else ()
    kind = int if default is None else type(default)
    return Option(field.name, _flag(field.name), default, choices, kind, text, field.name in _RARE)


RUNTIME_OPTIONS = _options(RuntimeConfig, _RUNTIME_HELP)
PROMPT_CACHE_OPTIONS = _options(RuntimeConfig, _PROMPT_CACHE_HELP)
"""Options of RuntimeConfig for commands that write texts for people."""
SHARING_OPTIONS = _options(RuntimeConfig, _SHARING_HELP)
"""Options of RuntimeConfig for commands in which several texts run at once."""
TEMPLATE_OPTIONS = _options(RuntimeConfig, _TEMPLATE_HELP)
"""Options of RuntimeConfig for commands that hold conversations."""
_RUNTIME_TABLES = RUNTIME_OPTIONS | PROMPT_CACHE_OPTIONS | SHARING_OPTIONS | TEMPLATE_OPTIONS
SAMPLING_OPTIONS = _options(SamplingConfig, _SAMPLING_HELP)
_OPTIONS = _RUNTIME_TABLES | SAMPLING_OPTIONS
OTHER_SETTINGS: dict[str, type] = {
    name: kind
    for kind, names in (
        (str, "model system_prompt when_full prompt text json_schema grammar output hosts quant draft_for"),
        (str, "curve host api_key ssl_certfile ssl_keyfile ssl_keyfile_password"),
        (bool, "no_think no_special ablation parts chat random_text no_calibrate resume force offline"),
        (bool, "keep_source remove_source yes as_json listing strict verbose"),
        (int, "prompt_tokens runs prompts tokens port queue parallel"),
        (tuple, "allow_host allow_origin alias warm"),
    )
    for name in names.split()
}
"""Types of the command line's settings that aren't fields of a config dataclass, by name. A setting of type
tuple may be given several times."""
MODEL_TABLES = "models"
"""Key of the settings file's tables of single models: `[models.NAME]`."""
MODEL_OPTIONS = ("max_context",)
"""Options that such a table may have."""


@dataclass(frozen=True)
class Settings:
    """The content of a settings file: its `values`, and the `keys` as the file spells them, both by option
    name.

    models: the values in the tables of single models, by the model's name.
    """

    path: Path
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def runtime_config(values: Mapping[str, Any]) -> RuntimeConfig:
    """A RuntimeConfig with these option values. Other keys are ignored. Raises UsageError."""
    chosen = {name: values[name] for name in _RUNTIME_TABLES if name in values}
    if "kv_bits" in chosen:
        chosen["kv_bits"] = int(chosen["kv_bits"])
    config = RuntimeConfig(**chosen)
    parse_budget(config.dram_budget, auto=0)
    parse_size(config.prompt_cache_bytes)
    return config


def sampling_config(values: Mapping[str, Any]) -> SamplingConfig:
    """A SamplingConfig with these option values. Other keys are ignored. Raises UsageError."""
    chosen = {name: values[name] for name in SAMPLING_OPTIONS if name in values}
    if "stop" in chosen:
        chosen["stop"] = tuple(chosen["stop"])
    return SamplingConfig(**chosen)


def check_value(name: str, value: Any) -> None:
    """Check an option's value. Raises UsageError if no model can have it."""
    config = sampling_config if name in SAMPLING_OPTIONS else runtime_config
    config({name: value})


def runtime_options(options: RuntimeOptions) -> RuntimeConfig:
    """A RuntimeConfig with `options` as its fields.

    Raises UsageError for an unknown name, or for an option without meaning in the chosen modes.
    """
    require_fields(RuntimeConfig, options)
    config, default = RuntimeConfig(**options), RuntimeConfig()
    changed = {name for name in options if getattr(config, name) != getattr(default, name)}
    require_meaning(changed, {"sparsity": config.sparsity, "speculation": config.speculation})
    return config


def sampling_options(sampling: SamplingConfig | None, options: SamplingOptions) -> SamplingConfig:
    """`sampling`, or the defaults, with the fields in `options` changed. Raises UsageError.

    `stop` may be one string, `logit_bias` a mapping from token id to bias.
    """
    require_fields(SamplingConfig, options)
    if sampling is not None and not isinstance(sampling, SamplingConfig):
        raise UsageError(f"sampling is {sampling!r}; it must be a SamplingConfig")
    changed: dict[str, Any] = {**options}
    if isinstance(changed.get("stop"), str):
        changed["stop"] = (changed["stop"],)
    if isinstance(changed.get("logit_bias"), Mapping):
        changed["logit_bias"] = changed["logit_bias"].items()
    for name in {"stop", "end_tokens", "logit_bias"} & changed.keys():
        if isinstance(changed[name], Iterable):
            changed[name] = tuple(tuple(item) if isinstance(item, list) else item for item in changed[name])
    return replace(sampling or SamplingConfig(), **changed)


def require_fields(config: type, options: Iterable[str]) -> None:
    """Check that options are fields of the dataclass `config`. Raises UsageError if not."""
    known = [field.name for field in fields(config)]
    for name in options:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(name, known, 1, NEAR)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no option {name!r}; {advice}")


def require_meaning(given: Container[str], chosen: Mapping[str, Any]) -> None:
    """Check that each option in `given` has a meaning with the other options' values. Raises UsageError if
    not.

    chosen: values of `sparsity` and `speculation`. If one is missing, options that depend on it pass the
    check.
    """
    for name, (option, *modes) in _MEANT_FOR.items():
        if name in given and chosen.get(option, modes[0]) not in modes:
            raise UsageError(f"{_flag(name)} has no meaning without {_flag(option)} {modes[0]}")


def with_model_defaults(
    config: SamplingConfig, generation: Mapping[str, Any], chosen: set[str]
) -> tuple[SamplingConfig, dict[str, Any]]:
    """Replace default values in `config` by what the model's authors recommend for sampling.

    Args:
        config: the chosen values, and defaults for the other fields.
        generation: the bundle's recommendations by SamplingConfig field.
        chosen: names of the fields that were chosen; recommendations don't replace them.

    Returns the config, and the recommendations that were applied.
    """
    taken = {name: value for name, value in generation.items() if name not in chosen}
    return replace(config, **taken), taken


def settings_path() -> Path:
    """The path of the settings file: `ONDEVICE_CONFIG`, or if that isn't set, `config.toml` in the platform's
    config folder.

    Raises UsageError if `ONDEVICE_CONFIG` names a missing file. The default file needn't exist.
    """
    chosen = os.environ.get("ONDEVICE_CONFIG")
    if chosen:
        path = Path(chosen).expanduser()
        if not path.exists():
            raise UsageError(f"ONDEVICE_CONFIG names the settings file {path}, and there is none")
        return path
    import platformdirs

    return platformdirs.user_config_path("ondevice", appauthor=False) / "config.toml"


def read_settings(path: Path) -> Settings:
    """The settings in a TOML file; empty settings if there is no file.

    Raises UsageError for text that isn't TOML, a key that is unknown or set twice in two spellings, a value
    of the wrong type, and in a model's table a value that no model can have.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"the settings file {path} has more than {MAX_FILE_BYTES} bytes: too many")
        text = data.decode("utf-8")
    except FileNotFoundError:
        return Settings(path, {}, {})
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings file {path} can't be read: {error}") from error
    import tomllib

    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Huge integers and deep nesting raise these.
        raise UsageError(f"the settings file {path} isn't TOML: {error}") from error
    names = {_key(_flag(name)): name for name in (*_OPTIONS, *OTHER_SETTINGS)} | {
        name: name for name in _OPTIONS
    }
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    models = _model_tables(path, parsed.pop(MODEL_TABLES, {}))
    for key, value in parsed.items():
        name = names.get(key.replace("-", "_"))
        if name is None:
            known = ", ".join(sorted(_key(_flag(name)) for name in (*_OPTIONS, *OTHER_SETTINGS)))
            raise UsageError(f"the settings file {path} has an unknown key {key!r}; known are {known}")
        if name in keys:
            raise UsageError(
                f"the settings file {path} has both {keys[name]} and {key}, which are one option; keep one"
            )
        if not _has_type(name, value):
            raise UsageError(f"the settings file {path} has {key} = {value!r}; it must be {_wanted(name)}")
        values[name], keys[name] = _as_option(name, value), key
    return Settings(path, values, keys, models)


def _model_tables(path: Path, tables: Any) -> dict[str, dict[str, Any]]:
    """The values of `[models.NAME]` tables. Raises UsageError."""
    where = f"the settings file {path}"
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError(f"{where} has {MODEL_TABLES!r}, which must be tables: [{MODEL_TABLES}.NAME]")
    models: dict[str, dict[str, Any]] = {}
    for model, table in tables.items():
        values = {key.replace("-", "_"): value for key, value in table.items()}
        for name, value in values.items():
            if name not in MODEL_OPTIONS:
                known = ", ".join(MODEL_OPTIONS)
                raise UsageError(
                    f"{where} has an unknown key {name!r} for the model {model}; known are {known}"
                )
            try:
                check_value(name, value)
            except UsageError as error:
                raise UsageError(f"{where}, for the model {model}: {error}") from error
        models[model] = values
    return models


def _kind(name: str) -> type:
    """The type of an option's values; tuple if it may be given several times."""
    return _OPTIONS[name].kind if name in _OPTIONS else OTHER_SETTINGS[name]


def _wanted(name: str) -> str:
    """The type of this option's TOML value, in words."""
    if name in _SIZES:
        return "a string, or a number of bytes"
    names = {
        tuple: "a string or a list of strings",
        int: "an integer, without quotes",
        float: "a number, without quotes",
        bool: "true or false",
    }
    return names.get(_kind(name), "a string")


def _has_type(name: str, value: Any) -> bool:
    kind = _kind(name)
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, list):
        return kind is tuple and all(isinstance(item, str) for item in value)
    allowed: dict[type, tuple[type, ...]] = {int: (int,), float: (int, float), bool: ()}
    return isinstance(value, (str, int) if name in _SIZES else allowed.get(kind, (str,)))


def _as_option(name: str, value: Any) -> Any:
    """The value of an option from the settings file, converted to the form in which the command line passes
    it.
    """
    if _kind(name) is tuple and isinstance(value, str):
        return [value]
    return str(value) if name in _OPTIONS and _OPTIONS[name].choices else value
