"""Conversions, foreseen before anything large is downloaded or written, and then run.

`prepare` reads a checkpoint's headers only. `Foreseen` says what a run would download, write and need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import util
from math import prod
from pathlib import Path
from typing import Any, Literal

from ondevice.budget.claims import others
from ondevice.budget.limits import allowance, auto_budget, group_limit, require_fit
from ondevice.budget.plan import Plan, plan_memory
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.layout import PARTIAL
from ondevice.chat_template import read_template
from ondevice.config import AUTO_QUANT, QuantConfig, RuntimeConfig
from ondevice.errors import ModelNotFoundError, OndeviceError, UnsupportedModelError, UsageError
from ondevice.model_config import ModelConfig
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import memory_model, settled_backend
from ondevice.runtime.local_source import weight_files
from ondevice.runtime.models import (
    ConversionProgress,
    automatic_modes,
    bundle_target,
    check_runtime,
    find_model,
    find_source,
    with_chosen_experts,
)
from ondevice.runtime.repository import Repository
from ondevice.runtime.resolving import LEAST_CONTEXT, SMALL_CHUNK, is_auto
from ondevice.tokenizer import import_library, load_tokenizer, loading_bytes
from ondevice.units import format_bytes, memory_rooms, parse_budget, process_memory, trim_heap, usable_cores

# The converters' own types: they are imported only inside the functions that need them.
Checkpoint = Any
Listing = Any
BeginTraining = Callable[[Checkpoint], Any]
OnConversion = Callable[[ConversionProgress], None]
DRAFT_LAYER_BITS: dict[str, Literal[4, 8, 16]] = {AUTO_QUANT: 8, "q4": 4, "q8": 8, "f16": 16}
"""Bits of a draft layer's codes by `--quant`."""


@dataclass(frozen=True)
class Foreseen:
    """What a conversion would download and write, by the checkpoint's headers. All sizes are bytes."""

    name: str
    architecture: str
    parameters: int
    quantisation: str
    output: Path
    download_bytes: int
    """Bytes that come over the network; 0 for a checkpoint on this disk."""
    bundle_bytes: int
    present_bytes: int
    """Bytes of the bundle that an interrupted conversion has left."""
    passing_bytes: int
    """Bytes that lie on the disk while the conversion runs, beside the bundle."""
    kept_bytes: int
    """Bytes of the source that are kept in the hub's cache."""
    is_one_disk: bool
    """True if the hub's cache is on the disk that the bundle goes to."""
    free_bytes: int
    """Free bytes of the disk that the bundle goes to."""
    source_bytes: int
    """Bytes of the source's weights on this disk, which stay beside the bundle; 0 for a repository."""

    def require_space(self) -> None:
        """Raises OndeviceError if the disk has no room."""
        needed = max(0, self.bundle_bytes - self.present_bytes) + self.passing_bytes
        needed += self.kept_bytes if self.is_one_disk else 0
        if needed > self.free_bytes:
            raise OndeviceError(
                f"{self.name} would take {format_bytes(needed)} ({needed} bytes) of the disk, and "
                f"{self.output.parent} has {format_bytes(self.free_bytes)} ({self.free_bytes} bytes) free; "
                "make room, or choose an --output on another disk. Nothing has been downloaded"
            )


class Prepared:
    """A checkpoint whose headers have been read, made by `prepare`. `run` converts it, once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: Path,
        quant: QuantConfig,
        listing: Listing | None = None,
        *,
        process_bytes: Mapping[str | None, int],
        is_kept: bool = True,
        keep_source: bool = False,
        source_bytes: int = 0,
        template: bytes | None = None,
    ) -> None:
        """listing: the repository that it comes from. is_kept: the source is on this disk already.

        process_bytes: as `_process_bytes` measured it before the checkpoint was opened. source_bytes: of the
        weights of a source that is the user's own. template: a chat template in place of the checkpoint's.
        """
        self.output = output
        self._template = template
        self._checkpoint = self._with_template(checkpoint)
        self.quant = quant
        self._listing = listing
        self._is_remote = listing is not None and not is_kept
        self._keep_source = keep_source
        self._source_bytes = source_bytes
        self._process_bytes = process_bytes[checkpoint.tokenizer.info.kind]

    def _with_template(self, checkpoint: Checkpoint) -> Checkpoint:
        from ondevice.converters.checkpoints.tokenizer_files import with_template

        if self._template is None:
            return checkpoint
        return replace(checkpoint, tokenizer=with_template(checkpoint.tokenizer, self._template))

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return str(self._checkpoint.name)

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self._checkpoint.config
        return config

    @property
    def has_tokenizer(self) -> bool:
        return self._checkpoint.tokenizer.info.kind is not None

    @property
    def is_converted(self) -> bool:
        """True if the output is a bundle of this checkpoint already, at any number of bits."""
        from ondevice.converters.convert import is_bundle_of

        return is_bundle_of(self.output, self._checkpoint)

    def require_tokenizer(self) -> None:
        """Raises UsageError for a checkpoint without a tokenizer: its bundle takes token ids alone."""
        if not self.has_tokenizer:
            raise UsageError(
                f"{self._checkpoint.name} has no tokenizer, so its bundle would take token ids and no text; "
                "put its tokenizer.json, or its vocab.json and merges.txt, into the folder, or convert it "
                "with `ondevice convert` and give token ids in Python"
            )

    def foreseen(self, trains: bool = False) -> Foreseen:
        """What `run` will do. trains: it will order and train too, which writes the neurons twice."""
        from shutil import disk_usage

        from ondevice.converters.architectures.tensors import tensor_shapes
        from ondevice.converters.checkpoints.views import passed_nbytes
        from ondevice.converters.convert import bundle_bytes, source_bytes
        from ondevice.converters.reading import held_matrix_bytes

        checkpoint, download, passing, kept = self._checkpoint, 0, 0, 0
        if self._is_remote and self._listing is not None:
            if self._keep_source:
                download = kept = sum(file.nbytes for file in self._listing.files.values())
            else:
                download = sum(source_bytes(checkpoint).values())
                download += sum(map(passed_nbytes, checkpoint.tensors.values()))
                passing = held_matrix_bytes(checkpoint, self.quant)
        return Foreseen(
            name=checkpoint.name,
            architecture=checkpoint.config.architecture,
            parameters=sum(map(prod, tensor_shapes(checkpoint.config).values())),
            quantisation=self.quant.name,
            output=self.output,
            download_bytes=download,
            bundle_bytes=bundle_bytes(checkpoint, self.quant, twice=trains),
            present_bytes=sum(_file_sizes(self.output.with_name(self.output.name + PARTIAL))),
            passing_bytes=passing,
            kept_bytes=kept,
            is_one_disk=kept > 0 and _device(_hub(checkpoint.name).cache_folder()) == _device(self.output),
            free_bytes=disk_usage(_existing(self.output)).free,
            source_bytes=self._source_bytes,
        )

    def least_plan(self, runtime: RuntimeConfig) -> Plan:
        """The plan with the smallest budget that the options allow, under the budget that they name.

        Raises UnsupportedModelError and BackendUnavailableError for options that the new bundle can't have.
        """
        config = with_chosen_experts(self.config, runtime.experts)
        check_runtime(config, runtime, None)
        settled = replace(
            runtime,
            backend=settled_backend(runtime.backend, config),
            threads=runtime.threads or usable_cores(),
            speculation="off" if runtime.speculation in ("auto", "model") else runtime.speculation,
            max_context=runtime.max_context or min(LEAST_CONTEXT, config.original_context),
        )
        if settled.backend == "cpu":
            settled = replace(settled, prefill_chunk=runtime.prefill_chunk or SMALL_CHUNK)
        modes = automatic_modes(config, settled) if settled.sparsity == "auto" else [settled.sparsity]
        process, claimed = self._process_bytes + self._tokenizer_bytes(), others()
        # A run reads the tokenizer only where its bound fits, which may be far more than it then takes.
        opening = max(0, self._process_bytes - claimed.held_bytes) + self._tokenizer_bound()
        plans = []
        for mode in modes:
            memory = memory_model(config, self.quant, replace(settled, sparsity=mode))
            held = max(0, process - claimed.held_bytes)
            plan = plan_memory(memory, budget_bytes=0, process_bytes=held)
            plan = replace(plan, others_bytes=claimed.claimed_bytes, limit=group_limit())
            plans.append(replace(plan, opening_bytes=opening))
        least = min(plans, key=lambda plan: plan.minimum_budget_bytes)
        if is_auto(runtime.dram_budget):
            return least.with_budget(auto_budget(least, allowance(process, memory_rooms())))
        return least.with_budget(parse_budget(runtime.dram_budget))

    def require_fit(self, plan: Plan) -> None:
        """Raises BudgetError if `least_plan` doesn't fit its budget."""
        require_fit(plan, self._checkpoint.name)

    def check_output(self, resume: bool, force: bool) -> None:
        """Raises UsageError if writing would touch files that `resume` and `force` don't allow to touch."""
        from ondevice.converters.output_folder import OutputFolder

        if not (resume and self.output.exists()):
            OutputFolder(self.output).check(resume, force)

    def run(
        self,
        on_progress: OnConversion | None = None,
        *,
        resume: bool = False,
        force: bool = False,
        begin_training: BeginTraining = lambda checkpoint: None,
    ) -> Path:
        """Convert, and return the bundle's folder. The arguments are those of the converter's `convert`."""
        from ondevice.converters.convert import convert

        checkpoint = self._checkpoint
        if self._is_remote and not self.output.exists():
            self.foreseen().require_space()
        if self._is_remote and self._keep_source:
            self.check_output(resume, force)
            checkpoint = self._downloaded(on_progress)
        return convert(
            checkpoint,
            self.output,
            self.quant,
            on_progress,
            resume=resume,
            force=force,
            begin_training=begin_training,
        )

    def _downloaded(self, on_progress: OnConversion | None) -> Checkpoint:
        from ondevice.converters.checkpoints.opening import open_checkpoint
        from ondevice.converters.hub.opening import download
        from ondevice.converters.progress import Progress

        def on_file(name: str, done: int, total: int) -> None:
            if on_progress is not None:
                on_progress(Progress(f"downloading {name}", done, total, 0.0, None))

        assert self._listing is not None, "only a repository is downloaded"
        self._checkpoint.close()
        self._checkpoint = self._with_template(open_checkpoint(download(self._listing, on_file)))
        return self._checkpoint

    def _tokenizer_bound(self) -> int:
        """Most memory that reading the tokenizer takes, as a run counts it before it reads it."""
        files = self._checkpoint.tokenizer
        if files.info.kind is None or files.info.file is None:
            return 0
        return loading_bytes(files.info.kind, [files.blobs[files.info.file]])

    def _tokenizer_bytes(self) -> int:
        """Memory that the tokenizer takes, by loading it as the model will."""
        files = self._checkpoint.tokenizer
        info = files.info
        if info.kind is None or info.file is None:
            return 0
        data, vocabulary = files.blobs[info.file], self.config.vocab_size
        trim_heap()
        before = process_memory().current_bytes
        tokenizer = load_tokenizer(
            info.kind, data, info.bos_id, info.eos_ids, info.add_bos, vocab_size=vocabulary
        )
        trim_heap()
        taken = process_memory().current_bytes - before
        del tokenizer
        return max(0, taken)

    def close(self) -> None:
        self._checkpoint.close()


@contextmanager
def prepare(
    source: Any,
    output: Any = None,
    quant: str = AUTO_QUANT,
    *,
    offline: bool = False,
    keep_source: bool = False,
    chat_template: Any = None,
    needs_weights: bool = True,
) -> Iterator[Prepared]:
    """Open a checkpoint to convert: a path, a repository id, a GGUF file of one, or an alias.

    Only headers are read.

    Args:
        source: the checkpoint.
        output: the bundle's folder. The default has the source's name, where models are found by name.
        quant: `q4`, `q5`, `q6`, `q8` or `f16`; `auto` is what the converter's `chosen_quant` takes.
        offline: ask the hub for nothing, and take only what its cache holds.
        keep_source: download a repository's files into the hub's cache, and keep them there. Otherwise,
            weights are read over the network as they are converted, and none of them is stored.
        chat_template: a file with a Jinja template to take in place of the checkpoint's.
        needs_weights: whether a folder with a config.json and no weights is refused. Without them it can be
            planned, at 4 bits unless `quant` says otherwise, and not run.

    Raises CheckpointError, UnsupportedModelError, ModelNotFoundError, DownloadError and UsageError.
    """
    template = None if chat_template is None else read_template(chat_template)
    target = bundle_target(source, output)
    chosen = None if quant == AUTO_QUANT else QuantConfig.parse(quant)
    opened = _opened(source, target.absolute(), chosen, offline, keep_source, template, needs_weights)
    with closing(opened) as prepared:
        yield prepared


def remove(folder: Path) -> int:
    """Delete a bundle or an unfinished one, and return the bytes that it took.

    Raises UsageError if it holds anything else, OndeviceError if a conversion is at work in it.
    """
    from ondevice.converters.output_folder import remove_bundle

    return remove_bundle(folder)


def _opened(
    source: Any,
    target: Path,
    quant: QuantConfig | None,
    offline: bool,
    keep_source: bool,
    template: bytes | None,
    needs_weights: bool,
) -> Prepared:
    """quant: None for the one that suits the checkpoint. template: None for the checkpoint's."""
    from ondevice.converters.checkpoints.opening import open_checkpoint
    from ondevice.converters.chosen_quant import chosen_quant
    from ondevice.converters.output_folder import check_names

    # Behind these: a run imports most of what they import.
    before = _process_bytes()
    try:
        found = find_source(source, offline)
    except ModelNotFoundError:
        kept = _cached_offline(source) if offline else None
        if kept is None:
            raise
        found = kept
    check_names(target)
    if not isinstance(found, Repository):
        checkpoint = open_checkpoint(found, needs_weights)
        return Prepared(
            checkpoint,
            target,
            quant or chosen_quant(checkpoint),
            process_bytes=before,
            source_bytes=sum(file.stat().st_size for file in weight_files(found)),
            template=template,
        )
    hub = _hub(found.name)
    if hub.hub_is_offline() and (kept := hub.cached_offline(found.name, found.file)):
        checkpoint = open_checkpoint(kept)
        return Prepared(
            checkpoint,
            target,
            quant or chosen_quant(checkpoint),
            process_bytes=before,
            template=template,
        )
    opened = hub.open_repository(found.name, found.file, target.parent)
    return Prepared(
        opened.checkpoint,
        target,
        quant or chosen_quant(opened.checkpoint),
        opened.listing,
        process_bytes=before,
        is_kept=opened.is_kept,
        keep_source=keep_source,
        template=template,
    )


def _process_bytes() -> dict[str | None, int]:
    """Memory of a process that runs a model, by the kind of its tokenizer; None for a model without one.

    It has one library of tokenizers at most, and none for a table.
    """
    trim_heap()
    plain = before = process_memory().current_bytes
    found: dict[str | None, int] = {None: plain, "byte_pairs": plain}
    for kind in ("sentencepiece", "tokenizers"):
        import_library(kind)
        trim_heap()
        after = process_memory().current_bytes
        found[kind] = plain + after - before
        before = after
    return found


def _cached_offline(source: Any) -> Path | None:
    """The checkpoint of a repository in the hub's cache, for when nothing may be asked; None without one."""
    if util.find_spec("huggingface_hub") is None:
        return None
    found = find_source(source)
    if not isinstance(found, Repository):
        return None
    kept: Path | None = _hub(found.name).cached_offline(found.name, found.file)
    return kept


def _hub(repository: str) -> Any:
    """The module that opens repositories. Raises ModelNotFoundError if huggingface_hub is too old for it."""
    try:
        from ondevice.converters.hub import opening
    except ImportError as error:
        raise ModelNotFoundError(
            f"{repository} can't be downloaded with this huggingface_hub ({error}): "
            "pip install -U 'ondevice[hub]'"
        ) from error
    return opening


def _file_sizes(folder: Path) -> Iterable[int]:
    if not folder.is_dir():
        return []
    return [path.stat().st_size for path in folder.iterdir() if path.is_file()]


def _device(path: Path) -> int:
    """The system's number of the disk that a path is or would be on."""
    return _existing(path).stat().st_dev


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def _no_folder(source: str) -> OndeviceError:
    """The error of a draft layer's source that is no folder: a file, or a repository's name."""
    from ondevice.converters.checkpoints.base import PICKLES

    wanted = "--draft-for reads a folder with the authors' config.json and safetensors files"
    if not Path(source).exists():
        return ModelNotFoundError(f"no folder {source}; {wanted}: download these from the repository first")
    is_pickle = source.endswith(PICKLES)
    why = "a pickle, which can run code when it is opened, so it never is" if is_pickle else "a file"
    return UnsupportedModelError(f"{source} is {why}; {wanted}")


def add_draft_layer(source: str, model: str, quant: str = AUTO_QUANT) -> tuple[Path, DraftLayer]:
    """Add the draft layer in the folder `source` to the bundle of the model that it was trained for.

    source: a folder with an EAGLE-3 head, or the checkpoint of the model, with a layer that predicts one
    token more. quant: as `--quant` has it. Returns the bundle's folder and the layer.

    Raises UsageError for bits that a draft layer can't have, UnsupportedModelError for a file,
    ModelNotFoundError, and what `convert_eagle` or `convert_mtp` raises.
    """
    from ondevice.converters.draft_layers.eagle import convert_eagle
    from ondevice.converters.draft_layers.mtp import convert_mtp, has_layers_ahead

    if quant not in DRAFT_LAYER_BITS:
        raise UsageError(
            f"--quant {quant} isn't possible with --draft-for; take {', '.join(DRAFT_LAYER_BITS)}"
        )
    if not Path(source).is_dir():
        raise _no_folder(source)
    path = find_model(model)
    add = convert_mtp if has_layers_ahead(source) else convert_eagle
    return path, add(source, path, DRAFT_LAYER_BITS[quant])
