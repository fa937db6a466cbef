"""Finds the folder of a model by its name, and the modes that the model can have.

A name is a path, a folder in the model folders, or an alias. Nothing is downloaded: the error for an unknown
name has the `convert` line for the model.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ondevice.bundle.draft_layers import SIDECAR_OF, DraftLayer
from ondevice.bundle.files import read_file
from ondevice.bundle.layout import MANIFEST, RESIDENT
from ondevice.bundle.manifest import parse_manifest
from ondevice.bundle.ngrams import Ngrams
from ondevice.bundle.predictors import OperatingPoint, Predictors
from ondevice.bundle.sidecar import NO_PREDICTORS, NO_SIDECARS, no_streams
from ondevice.bundle.streams import MultiStreams
from ondevice.bundle.strict_json import MAX_JSON_BYTES
from ondevice.config import RuntimeConfig, Sparsity
from ondevice.errors import BundleError, ModelNotFoundError, UnsupportedModelError, UsageError
from ondevice.model_config import FULL_MODEL, ZEROING_NAMES, ExpertsSpec, ModelConfig
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import check_backend
from ondevice.runtime.repository import Repository, converted_from, model_name, parse_repository
from ondevice.speculation.registry import DRAFTERS, needs

ALIASES = {
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b-instruct": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-1.5b-instruct": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "gemma-3-270m": "google/gemma-3-270m",
    "llama-7b": "huggyllama/llama-7b",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.2",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "tinyllama-1.1b-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "gemma-2-2b-it": "google/gemma-2-2b-it",
    "gemma-3-1b-it": "google/gemma-3-1b-it",
    "gemma-3-4b-it": "google/gemma-3-4b-it",
    "phi-3.5-mini-instruct": "microsoft/Phi-3.5-mini-instruct",
    "phi-4-mini-instruct": "microsoft/Phi-4-mini-instruct",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "granite-3.3-8b-instruct": "ibm-granite/granite-3.3-8b-instruct",
    "olmo-2-7b-instruct": "allenai/OLMo-2-1124-7B-Instruct",
    "glm-4-9b": "zai-org/GLM-4-9B-0414",
    "phi-2": "microsoft/phi-2",
    "falcon-7b-instruct": "tiiuae/falcon-7b-instruct",
    "stablelm-2-12b-chat": "stabilityai/stablelm-2-12b-chat",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "turbosparse-mistral-7b": "PowerInfer/TurboSparse-Mistral-Instruct",
}
"""Short names of public checkpoints; the last one has ReLU-sparse feed-forward layers."""

SHOWN_CHARS = 80
"""Most characters of an invalid name in an error."""


class ConversionProgress(Protocol):
    """The progress of a conversion, in bytes of the checkpoint."""

    @property
    def step(self) -> str:
        """The file that is being written."""

    @property
    def done_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def fraction(self) -> float: ...

    @property
    def remaining_seconds(self) -> float | None:
        """The estimated time that is left, or None if there is no estimate yet."""


def model_home() -> Path:
    """The folder of converted models: `ONDEVICE_HOME`, or if that isn't set, a folder in the platform's data
    folder.
    """
    home = os.environ.get("ONDEVICE_HOME")
    if home:
        return Path(home).expanduser()
    import platformdirs

    return platformdirs.user_data_path("ondevice", appauthor=False) / "models"


def shipped_folder() -> Path:
    """The folder of shipped models: the installed `weights/`, or that of the source tree."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "weights"
    return installed if installed.is_dir() else package.parent / "weights"


def find_model(name: str | os.PathLike[str] | None = None) -> Path:
    """The bundle folder of `name`; without a name, the shipped model.

    Raises ModelNotFoundError with the `ondevice convert` line for it, UsageError for an empty name, and what
    `file_start` raises for a file that can't be converted.
    """
    if name is None:
        return _shipped_model()
    text = _path_text(name, "a model is a path, a name or an alias")
    if not text:
        raise UsageError("the model's name is empty; give a bundle's folder, or leave --model out")
    with _lookups(text):
        return _find_model(text, isinstance(name, os.PathLike))


def bundle_target(source: str | os.PathLike[str], output: str | os.PathLike[str] | None) -> Path:
    """The folder for a checkpoint's bundle: `output` if given, otherwise `default_output`, whose errors it
    raises.
    """
    return default_output(source) if output is None else output_path(output)


def output_path(output: object) -> Path:
    """The path of an output. Raises UsageError for a value of another type."""
    return Path(_path_text(output, "the output is a path"))


def default_output(source: str | os.PathLike[str]) -> Path:
    """The default folder for a checkpoint's bundle: named after the source, in `model_home`.

    Raises UsageError for a source without a name, ModelNotFoundError for an invalid name.
    """
    text = _path_text(source, "a checkpoint is a path, a repository id or an alias")
    with _lookups(text):
        path, repository = Path(text).expanduser(), parse_repository(text)
        name = path.resolve().name if path.is_dir() else model_name(path) if path.is_file() else path.name
        if repository is not None and not path.exists():
            name = repository.bundle_name
    if not name:
        raise UsageError(f"{text} has no name to give the bundle; name its folder with --output")
    return model_home() / name


def _path_text(value: object, what: str) -> str:
    """A path as text. Raises UsageError, which begins with `what`, for a value of another type."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"{what}, not {value!r}")
    return text


@contextmanager
def _lookups(name: str) -> Iterator[None]:
    """A context that turns the system's errors during a name's lookup into ModelNotFoundError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = name if len(name) <= SHOWN_CHARS else f"{name[:SHOWN_CHARS]}..."
        raise ModelNotFoundError(f"nothing can be found by the name {shown!a}: {reason}") from error


def _find_model(text: str, is_path: bool) -> Path:
    path, repository = Path(text).expanduser(), parse_repository(text)
    is_here = (path / MANIFEST).is_file() or (os.sep in text and (path.is_dir() or repository is None))
    if is_path or is_here:
        return _checked_path(path)
    # A bare name means a model, even if a folder here that isn't a bundle has the same name.
    folder_name = text if repository is None else repository.bundle_name
    for folder in (model_home(), shipped_folder()):
        if (folder / folder_name / MANIFEST).is_file():
            if repository is not None:
                _check_repository(folder / folder_name, repository)
            return folder / folder_name
    if path.exists():
        return _checked_path(path)
    source = ALIASES.get(text, text if repository is not None else None)
    raise ModelNotFoundError(_missing(text, folder_name, source))


def _check_repository(folder: Path, repository: Repository) -> None:
    """Check where a bundle comes from. Raises ModelNotFoundError if it is another repository, or another of
    its files.
    """
    try:
        source = parse_manifest(read_file(folder / MANIFEST, MAX_JSON_BYTES)).provenance.source
    except (BundleError, UnsupportedModelError):
        return
    origin = converted_from(source)
    if origin is not None and not origin.is_same(repository):
        other = folder.with_name(repository.full_bundle_name)
        raise ModelNotFoundError(
            f"{folder} was made from {origin}, not from {repository}. To have both: "
            f"{convert_line(str(repository), other)}; then the model's name is {other.name}"
        )


def known_models() -> dict[str, Path]:
    """The bundles in the model folders, by name: converted ones, then shipped ones.

    If two have the same name, the one that `find_model` returns.
    """
    bundles: dict[str, Path] = {}
    for folder in (shipped_folder(), model_home()):
        bundles |= {path.parent.name: path.parent for path in folder.glob(f"*/{MANIFEST}")}
    return dict(sorted(bundles.items(), key=lambda item: (item[1].parent == shipped_folder(), item[0])))


def find_source(source: str | os.PathLike[str], offline: bool = False) -> Path | Repository:
    """The checkpoint to convert: a path, or the repository of an id or an alias. Downloads nothing.

    Raises ModelNotFoundError if the path is missing, or a repository can't be read (`offline`, no
    `huggingface_hub`); UnsupportedModelError for a file of a repository that isn't GGUF; UsageError for an
    empty name.
    """
    text = _path_text(source, "a checkpoint is a path, a repository id or an alias")
    if not text:
        raise UsageError("the checkpoint's name is empty; give its folder, file, repository id or alias")
    with _lookups(text):
        path = Path(text).expanduser()
        if path.exists():
            return path
    repository = parse_repository(ALIASES.get(text, text))
    if repository is None:
        raise ModelNotFoundError(
            f"no checkpoint at {text}: give a Hugging Face folder, a GGUF or llama2.c file, a repository id "
            "such as huggyllama/llama-7b, a GGUF file of one (OWNER/NAME:FILE.gguf), or one of "
            f"{', '.join(ALIASES)}"
        )
    if repository.file and not repository.file.endswith(".gguf"):
        raise UnsupportedModelError(
            f"{repository}: of a repository's files, only GGUF files are taken by their names, with .gguf at "
            f"the end; {repository.name} names all of it"
        )
    if offline:
        raise ModelNotFoundError(
            f"{repository} isn't here, and --offline forbids downloading it; "
            "give the path of a downloaded copy"
        )
    if util.find_spec("huggingface_hub") is None:
        raise ModelNotFoundError(
            f"{repository} isn't here; to download it, install the extra: pip install 'ondevice[hub]'"
        )
    return repository


def holds_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a checkpoint, or has one in a file."""
    return path.is_dir() and (
        (path / "config.json").is_file() or any(path.glob("*.bin")) or any(path.glob("*.gguf"))
    )


def _shipped_model() -> Path:
    folder = shipped_folder()
    bundles = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if bundles:
        return bundles[0]
    line = convert_line("CHECKPOINT", model_home() / "NAME")
    raise ModelNotFoundError(
        f"no model ships with this version, so --model is needed. To convert one first: {line}"
    )


def _checked_path(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    if path.is_file() and path.name == MANIFEST:
        raise ModelNotFoundError(f"{path} is a bundle's manifest; give its folder, {path.parent}")
    if path.is_file():
        from ondevice.converters.checkpoints.opening import file_start

        file_start(path)
        line = convert_line(str(path), model_home() / model_name(path))
        raise ModelNotFoundError(f"{path} is a file, and a bundle is a folder. If it is a checkpoint: {line}")
    if path.is_dir() and (path / RESIDENT).is_file():
        raise BundleError(f"{path} is a damaged bundle: {MANIFEST} is missing; convert the model again")
    if holds_checkpoint(path):
        line = convert_line(str(path), model_home() / path.resolve().name)
        raise ModelNotFoundError(f"{path} is a checkpoint, not a bundle. Convert it first: {line}")
    if path.is_dir():
        raise ModelNotFoundError(f"{path} holds no {MANIFEST}, so it isn't a (finished) bundle")
    line = convert_line("CHECKPOINT", path)
    raise ModelNotFoundError(f"no bundle at {path}. To make it: {line}")


def _missing(name: str, folder_name: str, source: str | None) -> str:
    if name.endswith(".gguf") and not source:
        return f"no file {name} here, and no model of that name in {model_home()}; give the file's path"
    line = convert_line(source or "CHECKPOINT", model_home() / folder_name)
    aliases = ", ".join(ALIASES)
    known = "" if source else f"; names known without a checkpoint of your own: {aliases}"
    if source and util.find_spec("huggingface_hub") is None:
        known = "; that takes huggingface_hub: pip install 'ondevice[hub]'"
    here = ", ".join(known_models())
    return (
        f"no model called {name} in {model_home()} or {shipped_folder()}, where there are: {here or 'none'}. "
        f"To make it: {line}{known}"
    )


def convert_line(source: str, output: Path) -> str:
    return f"ondevice convert {shlex.quote(source)} --output {shlex.quote(str(output))}"


NOTHING_DAMAGED: Mapping[str, BundleError] = MappingProxyType({})


@dataclass(frozen=True)
class SparsityMode:
    """A sparsity mode, whether a model can run in it, and the reason why or why not."""

    name: str
    available: bool
    reason: str


def sparsity_modes(
    config: ModelConfig, predictors: Predictors | None, damaged: Mapping[str, BundleError] = NOTHING_DAMAGED
) -> tuple[SparsityMode, ...]:
    """Every sparsity mode, and whether this model can run in it. damaged: errors of damaged sidecars, as in a
    Bundle.
    """
    if config.experts is not None:
        return _modes_of_experts(config.experts)
    relu, threshold = config.zeros_gates, config.feed_forward.threshold
    limit = f"{threshold:.4g}" if threshold else "zero"
    cut = len(config.cut_off_layers)
    exact = (
        f"only neurons whose gate is above {limit}; the same text as dense"
        if relu
        else f"in {cut} of its {config.num_layers} layers only neurons whose gate its cutoff leaves; "
        "the same text as dense"
        if cut
        else f"{config.activation} gates are hardly ever exactly zero; it takes {ZEROING_NAMES}"
    )
    predicted = (
        "only neurons that predictors select; not the same text as dense; --predictor-recall "
        + predictors.listed_recalls
        if predictors is not None
        else damaged["predictors"].for_command_line
        if "predictors" in damaged
        else "its bundle holds no predictors; `ondevice train predictors` makes them"
        if relu
        else NO_PREDICTORS
        if cut
        else f"predictors say which gates are zero, and {config.activation} gates hardly ever are"
    )
    return (
        SparsityMode("dense", True, "every neuron of every token; exact"),
        SparsityMode("exact", config.has_exact_zeros, exact),
        SparsityMode("predicted", predictors is not None, predicted),
        SparsityMode("experts", False, "its layers have no experts that a router chooses among"),
    )


def _modes_of_experts(experts: ExpertsSpec) -> tuple[SparsityMode, ...]:
    """The sparsity modes of a model with experts."""
    chosen = f"only the {experts.chosen} of {experts.count} experts that each token chooses; exact"
    if _min_chosen(experts) < experts.chosen:
        chosen += "; --experts 1" if experts.chosen == 2 else f"; --experts 1 to {experts.chosen - 1}"
        chosen += ": fewer, and not the same text"
    return (
        SparsityMode("dense", False, "a token is defined by the experts that it chooses, not by all of them"),
        SparsityMode("exact", False, "`experts` is exact, and leaves out neurons that add nothing as well"),
        SparsityMode("predicted", False, NO_SIDECARS),
        SparsityMode("experts", True, chosen),
    )


def _min_chosen(experts: ExpertsSpec) -> int:
    """The smallest allowed number of experts per token. Weights of a sparsemixer are defined only for two."""
    return experts.chosen if experts.scoring == "sparsemixer" else 1


def with_chosen_experts(config: ModelConfig, chosen: int) -> ModelConfig:
    """The config with `chosen` experts for each token, those with the highest scores; 0: unchanged.

    Raises UsageError for more than the model's number, UnsupportedModelError for a model without experts and
    for a sparsemixer.
    """
    experts = config.experts
    if not chosen or (experts is not None and chosen == experts.chosen):
        return config
    if experts is None:
        raise UnsupportedModelError(f"--experts {chosen} isn't possible with this model: it has no experts")
    min_chosen = _min_chosen(experts)
    if not min_chosen <= chosen < experts.chosen:
        if min_chosen == 1:
            raise UsageError(f"--experts {chosen}: each token of this model chooses 1 to {experts.chosen}")
        raise UnsupportedModelError(
            f"--experts {chosen} isn't possible with this model: it can have {min_chosen} alone, as its "
            "router is a sparsemixer"
        )
    layers = (replace(it, experts=it.experts and replace(it.experts, chosen=chosen)) for it in config.layers)
    part = config.part
    if part.experts is not None:
        part = replace(part, experts=replace(experts, chosen=chosen))
    return replace(config, layers=tuple(layers), part=part)


def for_slice(config: ModelConfig, runtime: RuntimeConfig) -> RuntimeConfig:
    """The options for a slice: mode `exact` becomes `dense` if none of the slice's layers has exact zeros."""
    if config.part != FULL_MODEL and runtime.sparsity == "exact" and not config.has_exact_zeros:
        return replace(runtime, sparsity="dense")
    return runtime


def automatic_modes(config: ModelConfig, runtime: RuntimeConfig) -> list[Sparsity]:
    """The modes that `auto` chooses from, in order of preference. All of them are exact.

    `exact` isn't among them on MLX with a cutoff, because it isn't measured whether skipping a cutoff's zeros
    changes bits.
    """
    if config.experts is not None:
        return ["experts"]
    exact = config.zeros_gates if runtime.backend == "mlx" else config.has_exact_zeros
    return ["exact", "dense"] if exact and runtime.backend != "reference" else ["dense"]


def operating_point(runtime: RuntimeConfig, predictors: Predictors | None) -> OperatingPoint | None:
    """The operating point of `predicted`; None in other modes.

    Raises UnsupportedModelError for a recall target that wasn't measured.
    """
    if runtime.sparsity == "predicted" and predictors is not None:
        return predictors.point(runtime.predictor_recall)
    return None


def check_runtime(
    config: ModelConfig,
    runtime: RuntimeConfig,
    predictors: Predictors | None,
    streams: MultiStreams | None = None,
    damaged: Mapping[str, BundleError] = NOTHING_DAMAGED,
    ngrams: Ngrams | None = None,
    draft_layers: Mapping[str, DraftLayer] = MappingProxyType({}),
) -> None:
    """Check the options before anything is loaded.

    Raises UnsupportedModelError for a sparsity or speculation mode that the model can't have, BundleError for
    a mode whose files are damaged, BackendUnavailableError for a backend that can't run it.
    """
    for mode, key, is_used in (
        (f"--sparsity {runtime.sparsity}", "predictors", runtime.sparsity == "predicted"),
        (f"--speculation {runtime.speculation}", "streams", needs(runtime.speculation) == "streams"),
        *(
            (f"--speculation {runtime.speculation}", key, needs(runtime.speculation) == key)
            for key in ("ngrams", *SIDECAR_OF)
        ),
    ):
        if is_used and key in damaged:
            raise BundleError(f"{mode} isn't possible with this model: {damaged[key].for_command_line}")
    modes = {mode.name: mode for mode in sparsity_modes(config, predictors)}
    if runtime.sparsity != "auto" and not modes[runtime.sparsity].available:
        have = ", ".join(mode.name for mode in modes.values() if mode.available)
        raise UnsupportedModelError(
            f"--sparsity {runtime.sparsity} isn't possible with this model: "
            f"{modes[runtime.sparsity].reason}. It can have: {have}"
        )
    operating_point(runtime, predictors)
    added = {"streams": streams, "ngrams": ngrams, **dict.fromkeys(SIDECAR_OF), **draft_layers}
    wanted = needs(runtime.speculation)
    possible = ["off", *(name for name in DRAFTERS if added.get(needs(name), True) is not None)]
    if config.experts is not None:
        possible.remove("resident")
    have = ", ".join(possible)
    if config.part.embeds and wanted in added and added[wanted] is None:
        lacks = f"its bundle has no {wanted}; `ondevice train {wanted}` makes them"
        if wanted in SIDECAR_OF:
            command = SIDECAR_OF[wanted].command.format(model="BUNDLE")
            lacks = f"its bundle has no {wanted} layer; `{command}` adds one"
        if wanted == "streams" and not config.is_plain:
            lacks = no_streams(config)
        raise UnsupportedModelError(
            f"--speculation {runtime.speculation} isn't possible with this model: {lacks}. It can have: "
            f"{have}"
        )
    if runtime.speculation == "resident" and config.experts is not None:
        raise UnsupportedModelError(
            "--speculation resident isn't possible with this model: its drafts would take other experts than "
            f"the model's own. It can have: {have}"
        )
    check_backend(runtime, config)
