"""Conversions: estimated before anything large is downloaded or written, and then run.

`prepare` reads only a checkpoint's headers. A `ConversionEstimate` has the sizes of a run.
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
from ondevice.runtime.backend_choice import memory_model, resolved_backend
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
from ondevice.runtime.resolving import MIN_CONTEXT, SMALL_CHUNK, is_auto
from ondevice.tokenizer import import_library, load_tokenizer, loading_bytes
from ondevice.units import format_bytes, memory_rooms, parse_budget, process_memory, trim_heap, usable_cores

# Types of the converters, which are imported only inside functions.
Checkpoint = Any
Listing = Any
BeginTraining = Callable[[Checkpoint], Any]
OnConversion = Callable[[ConversionProgress], None]
DRAFT_LAYER_BITS: dict[str, Literal[4, 8, 16]] = {AUTO_QUANT: 8, "q4": 4, "q8": 8, "f16": 16}
"""Bits of a draft layer's codes by `--quant`."""


@dataclass(frozen=True)
class ConversionEstimate:
    """What a conversion downloads and writes, estimated from the checkpoint's headers. All sizes
    are bytes.
    """

    name: str
    architecture: str
    parameters: int
    quantisation: str
    output: Path
    download_bytes: int
    """Bytes to download; 0 for a checkpoint on this disk."""
    bundle_bytes: int
    present_bytes: int
    """Bytes of the bundle from an interrupted conversion."""
    passing_bytes: int
    """Bytes of temporary files during the conversion."""
    kept_bytes: int
    """Bytes of the source that stay in the hub's cache."""
    is_one_disk: bool
    """Whether the hub's cache is on the bundle's disk."""
    free_bytes: int
    """Free bytes of the bundle's disk."""
    source_bytes: int
    """Bytes of the source's weights on this disk; 0 for a repository."""

    def require_space(self) -> None:
        """Check the disk. Raises OndeviceError if it has no room for the conversion."""
        needed = max(0, self.bundle_bytes - self.present_bytes) + self.passing_bytes
        needed += self.kept_bytes if self.is_one_disk else 0
        if needed > self.free_bytes:
            raise OndeviceError(
                f"{self.name} would take {format_bytes(needed)} ({needed} bytes) of the disk, and "
                f"{self.output.parent} has {format_bytes(self.free_bytes)} ({self.free_bytes} bytes) free; "
                "make room, or choose an --output on another disk. Nothing has been downloaded"
            )


class Prepared:
    """A checkpoint that is ready to be converted, returned by `prepare`. `run` converts it, once."""

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
        """listing: the files of the source repository, or None. is_kept: whether the source is already on
        this disk.

        process_bytes: the result of `_process_bytes` before the checkpoint was opened. source_bytes: size of
        a local source's weights. template: a chat template instead of the checkpoint's.
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
        """Whether the output is already a bundle of this checkpoint, at any number of bits."""
        from ondevice.converters.convert import is_bundle_of

        return is_bundle_of(self.output, self._checkpoint)

    def require_tokenizer(self) -> None:
        """Check that the checkpoint has a tokenizer. Raises UsageError if not, since its bundle would take
        only token ids.
        """
        if not self.has_tokenizer:
            raise UsageError(
                f"{self._checkpoint.name} has no tokenizer, so its bundle would take token ids and no text; "
                "put its tokenizer.json, or its vocab.json and merges.txt, into the folder, or convert it "
                "with `ondevice convert` and give token ids in Python"
            )

    def estimate(self, trains: bool = False) -> ConversionEstimate:
        """What `run` will download and write. trains: whether it also orders neurons and trains, which writes
        neurons twice.
        """
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
        return ConversionEstimate(
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

    def smallest_plan(self, runtime: RuntimeConfig) -> Plan:
        """The plan that needs the smallest budget among those that the options allow.

        Raises UnsupportedModelError and BackendUnavailableError for options that the bundle can't have.
        """
        config = with_chosen_experts(self.config, runtime.experts)
        check_runtime(config, runtime, None)
        resolved = replace(
            runtime,
            backend=resolved_backend(runtime.backend, config),
            threads=runtime.threads or usable_cores(),
            speculation="off" if runtime.speculation in ("auto", "model") else runtime.speculation,
            max_context=runtime.max_context or min(MIN_CONTEXT, config.original_context),
        )
        if resolved.backend == "cpu":
            resolved = replace(resolved, prefill_chunk=runtime.prefill_chunk or SMALL_CHUNK)
        modes = automatic_modes(config, resolved) if resolved.sparsity == "auto" else [resolved.sparsity]
        process, claimed = self._process_bytes + self._tokenizer_bytes(), others()
        # A run reads the tokenizer only if its upper bound fits, which may be far above the actual size.
        opening = max(0, self._process_bytes - claimed.held_bytes) + self._tokenizer_bound()
        plans = []
        for mode in modes:
            memory = memory_model(config, self.quant, replace(resolved, sparsity=mode))
            held = max(0, process - claimed.held_bytes)
            plan = plan_memory(memory, budget_bytes=0, process_bytes=held)
            plan = replace(plan, others_bytes=claimed.claimed_bytes, limit=group_limit())
            plans.append(replace(plan, opening_bytes=opening))
        smallest = min(plans, key=lambda plan: plan.minimum_budget_bytes)
        if is_auto(runtime.dram_budget):
            return smallest.with_budget(auto_budget(smallest, allowance(process, memory_rooms())))
        return smallest.with_budget(parse_budget(runtime.dram_budget))

    def require_fit(self, plan: Plan) -> None:
        """Check a plan from `smallest_plan`. Raises BudgetError if it doesn't fit its budget."""
        require_fit(plan, self._checkpoint.name)

    def check_output(self, resume: bool, force: bool) -> None:
        """Check the output folder. Raises UsageError if writing would touch files, unless `resume` or `force`
        permits it.
        """
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
        """Convert. Returns the bundle's folder. The arguments are those of the converter's `convert`."""
        from ondevice.converters.convert import convert

        checkpoint = self._checkpoint
        if self._is_remote and not self.output.exists():
            self.estimate().require_space()
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
        """An upper bound of the memory for reading the tokenizer, in bytes."""
        files = self._checkpoint.tokenizer
        if files.info.kind is None or files.info.file is None:
            return 0
        return loading_bytes(files.info.kind, [files.blobs[files.info.file]])

    def _tokenizer_bytes(self) -> int:
        """The bytes that the loaded tokenizer takes, measured by loading it."""
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
    """A context with a checkpoint that is ready to be converted. Reads only its headers.

    Args:
        source: a path, a repository id, a GGUF file of a repository, or an alias.
        output: the bundle's folder. The default is the source's name in the folder of models.
        quant: `q4`, `q5`, `q6`, `q8` or `f16`; `auto`: the converter's `chosen_quant`.
        offline: use only the hub's cache, without requests.
        keep_source: download a repository's files to the hub's cache. Otherwise weights are read over the
            network while they are converted, without being stored.
        chat_template: a file with a Jinja template instead of the checkpoint's.
        needs_weights: whether a folder with a config.json and no weights is refused. Otherwise such a folder
            can be planned, by default at 4 bits, but not converted.

    Raises CheckpointError, UnsupportedModelError, ModelNotFoundError, DownloadError and UsageError.
    """
    template = None if chat_template is None else read_template(chat_template)
    target = bundle_target(source, output)
    chosen = None if quant == AUTO_QUANT else QuantConfig.parse(quant)
    opened = _opened(source, target.absolute(), chosen, offline, keep_source, template, needs_weights)
    with closing(opened) as prepared:
        yield prepared


def remove(folder: Path) -> int:
    """Delete a bundle, finished or not. Returns its size in bytes.

    Raises UsageError if the folder holds anything else, OndeviceError if a conversion is writing to it.
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
    """Open a checkpoint for `prepare`.

    quant: None for the checkpoint's `chosen_quant`. template: None for the checkpoint's.
    """
    from ondevice.converters.checkpoints.opening import open_checkpoint
    from ondevice.converters.chosen_quant import chosen_quant
    from ondevice.converters.output_folder import check_names

    # After these imports: a run imports most of the same modules.
    before = _process_bytes()
    try:
        origin = find_source(source, offline)
    except ModelNotFoundError:
        cached = _cached_offline(source) if offline else None
        if cached is None:
            raise
        origin = cached
    check_names(target)
    listing, is_kept, source_bytes = None, True, 0
    if not isinstance(origin, Repository):
        checkpoint = open_checkpoint(origin, needs_weights)
        source_bytes = sum(file.stat().st_size for file in weight_files(origin))
    elif (hub := _hub(origin.name)).hub_is_offline() and (
        cached := hub.cached_offline(origin.name, origin.file)
    ):
        checkpoint = open_checkpoint(cached)
    else:
        opened = hub.open_repository(origin.name, origin.file, target.parent)
        checkpoint, listing, is_kept = opened.checkpoint, opened.listing, opened.is_kept
    return Prepared(
        checkpoint,
        target,
        quant or chosen_quant(checkpoint),
        listing,
        process_bytes=before,
        is_kept=is_kept,
        keep_source=keep_source,
        source_bytes=source_bytes,
        template=template,
    )


def _process_bytes() -> dict[str | None, int]:
    """Bytes of memory of a process before it runs a model, by the kind of its tokenizer, or None for no
    tokenizer.

    Each includes at most one library of tokenizers.
    """
    trim_heap()
    plain = before = process_memory().current_bytes
    process_bytes: dict[str | None, int] = {None: plain, "byte_pairs": plain}
    for kind in ("sentencepiece", "tokenizers"):
        import_library(kind)
        trim_heap()
        after = process_memory().current_bytes
        process_bytes[kind] = plain + after - before
        before = after
    return process_bytes


def _cached_offline(source: Any) -> Path | None:
    """The folder of a repository's checkpoint in the hub's cache, or None. Makes no requests."""
    if util.find_spec("huggingface_hub") is None:
        return None
    repository = find_source(source)
    if not isinstance(repository, Repository):
        return None
    cached: Path | None = _hub(repository.name).cached_offline(repository.name, repository.file)
    return cached


def _hub(repository: str) -> Any:
    """The module that opens repositories. Raises ModelNotFoundError if huggingface_hub is missing
    or too old.
    """
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
    """The number of the device that a path lies on, or would lie on."""
    return _existing(path).stat().st_dev


def _existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return path


def _no_folder(source: str) -> OndeviceError:
    """The error for a draft layer's source that isn't a folder."""
    from ondevice.converters.checkpoints.base import PICKLES

    wanted = "--draft-for reads a folder with the authors' config.json and safetensors files"
    if not Path(source).exists():
        return ModelNotFoundError(f"no folder {source}; {wanted}: download these from the repository first")
    is_pickle = source.endswith(PICKLES)
    why = "a pickle, which can run code when it is opened, so it never is" if is_pickle else "a file"
    return UnsupportedModelError(f"{source} is {why}; {wanted}")


def add_draft_layer(source: str, model: str, quant: str = AUTO_QUANT) -> tuple[Path, DraftLayer]:
    """Add a draft layer to its model's bundle. Returns the bundle's folder and the layer.

    source: a folder with an EAGLE-3, DFlash or DSpark head, or the model's checkpoint with a
        multi-token-prediction layer.
    quant: as `--quant`.

    Raises UsageError for bits that a draft layer can't have, UnsupportedModelError for a file,
    ModelNotFoundError, and what `convert_eagle`, `convert_dflash` or `convert_mtp` raises.
    """
    from ondevice.converters.draft_layers.dflash import convert_dflash, is_block_head
    from ondevice.converters.draft_layers.eagle import convert_eagle
    from ondevice.converters.draft_layers.mtp import convert_mtp, has_layers_ahead

    if quant not in DRAFT_LAYER_BITS:
        raise UsageError(
            f"--quant {quant} isn't possible with --draft-for; take {', '.join(DRAFT_LAYER_BITS)}"
        )
    if not Path(source).is_dir():
        raise _no_folder(source)
    path = find_model(model)
    if is_block_head(source):
        add = convert_dflash
    else:
        add = convert_mtp if has_layers_ahead(source) else convert_eagle
    return path, add(source, path, DRAFT_LAYER_BITS[quant])
