"""Models that draft: the second model of `--speculation model`, and a bundle's draft layer.

A second model is fully resident, within the target's plan. It runs dense, with the target's `--kv-bits`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from ondevice.backends.budgeted import BudgetedBackend
from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.plan import Plan, plan_memory
from ondevice.budget.sizes import prompt_chunk
from ondevice.bundle.draft_layers import DraftLayer
from ondevice.bundle.reader import Bundle
from ondevice.callbacks import IsCancelled, never_cancelled
from ondevice.config import RuntimeConfig
from ondevice.errors import BundleError, ModelNotFoundError, UnsupportedModelError, UsageError
from ondevice.flash.cost_model import UNMEASURED
from ondevice.flash.reader import FlashReader
from ondevice.model.draft_layer import load_draft_layer
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model.weights import ModelWeights
from ondevice.records import dataclass
from ondevice.runtime.backend_choice import make_backend, memory_model
from ondevice.runtime.models import find_model
from ondevice.runtime.neuron_memory import open_neuron_memory
from ondevice.sparsity.fetch import DEFAULT_FETCH
from ondevice.speculation.drafters.draft_layer import DraftLayerState
from ondevice.speculation.drafters.model import DraftModel
from ondevice.speculation.drafters.other_vocabulary import same_vocabulary
from ondevice.tokenizer import Tokenizer

MAX_FILLING_PASSES = 16
"""Most forward passes to fill feed-forward memory at load. Missing weights are read while drafting."""


@dataclass(frozen=True)
class ResolvedDraft:
    """A second model, ready to be loaded.

    plan: its plan, with everything resident. tokenizers: the second model's and the target's, if their tokens
    differ.
    """

    bundle: Bundle
    runtime: RuntimeConfig
    plan: Plan
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the loaded model with a full context."""
        return self.plan.full_bytes - self.plan.process_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the loaded model takes, with a full context."""
        return self.plan.resident_weights_bytes + self.plan.segment.bytes_of(self.plan.segment.total)

    def compared(self, tokenizer: Tokenizer | None, target: Tokenizer | None) -> ResolvedDraft:
        """The model with both tokenizers, if their vocabularies differ.

        Raises UnsupportedModelError if one is missing, so that tokens can't be compared.
        """
        if tokenizer is None or target is None:
            missing = "it" if tokenizer is None else "the model"
            raise UnsupportedModelError(
                f"--draft-model {self.bundle.name}: drafting takes both models' tokenizers, and "
                f"{missing} was converted without one; take --speculation auto"
            )
        return replace(self, tokenizers=None if same_vocabulary(tokenizer, target) else (tokenizer, target))

    def within(self, max_context: int) -> ResolvedDraft:
        """The same second model, planned for texts of at most `max_context` tokens."""
        runtime = replace(self.runtime, max_context=min(max_context, self.bundle.config.max_context))
        return replace(self, runtime=runtime, plan=_resident(self.bundle, runtime))


def open_draft(runtime: RuntimeConfig) -> Bundle:
    """The bundle of the draft model named in `runtime`. Raises UsageError if it is empty, ModelNotFoundError,
    BundleError.
    """
    if not runtime.draft_model:
        raise UsageError(
            "--speculation model needs a second, smaller model: name its bundle with --draft-model, or take "
            "--speculation auto, which needs none"
        )
    try:
        return Bundle.open(find_model(runtime.draft_model))
    except (ModelNotFoundError, BundleError) as error:
        raise type(error)(f"--draft-model {runtime.draft_model}: {error.for_command_line}") from error


def plan_draft(bundle: Bundle, runtime: RuntimeConfig, max_context: int) -> ResolvedDraft:
    """Plan the second model `bundle` for a target, before tokenizers are read.

    runtime: the target's resolved options. max_context: the target's context in tokens.
    Raises UnsupportedModelError for a model with experts.
    """
    if bundle.config.experts is not None:
        raise UnsupportedModelError(
            f"--draft-model {bundle.name}: it has experts, and only models without can draft yet"
        )
    context = min(max_context, bundle.config.max_context)
    settled = replace(
        runtime,
        sparsity="dense",
        speculation="off",
        draft_model="",
        max_context=context,
        prefill_chunk=prompt_chunk(bundle.config, runtime),
        parallel=1,
    )
    return ResolvedDraft(bundle, settled, _resident(bundle, settled))


def _resident(bundle: Bundle, runtime: RuntimeConfig) -> Plan:
    """The plan of a second model with everything resident. runtime: its resolved options."""
    memory = replace(memory_model(bundle.config, bundle.quant, runtime), drafts_itself=True)
    plan = plan_memory(memory, budget_bytes=0, process_bytes=0)
    return plan.with_budget(plan.full_bytes)


def load_draft(
    resolved: ResolvedDraft, target_backend: BudgetedBackend, cancelled: IsCancelled = never_cancelled
) -> DraftModel:
    """Load a second model, on the threads of the target's backend. Raises what loading raises."""
    bundle, runtime, plan = resolved.bundle, resolved.runtime, resolved.plan
    with ExitStack() as undo:
        reader = undo.enter_context(FlashReader(bundle_files(bundle), runtime.io))
        backend = make_backend(bundle.config, bundle.quant, runtime, plan, target_backend)
        undo.callback(backend.close)
        config = bundle.config.within(plan.max_context)
        transformer = Transformer(config, backend, load_weights(bundle, reader, backend, cancelled))
        neurons = open_neuron_memory(bundle, plan, backend, reader, UNMEASURED, DEFAULT_FETCH)
        undo.callback(neurons.close)
        layout = KVLayout(bundle.config, runtime.kv_bits, drafts=True, marks=0)
        kv = SequenceState(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
        neurons.resize(plan.segment.quota(plan.segment.total))
        for _ in range(MAX_FILLING_PASSES):
            if all(layer.resident_neurons == layer.source.num_neurons for layer in backend.feed_forwards):
                break
            transformer.forward([0], kv, "none", cancelled)
            kv.truncate(0)
        reader.trim()
        close = undo.pop_all().close
    tokenizer, target = resolved.tokenizers or (None, None)
    return DraftModel(transformer, kv, plan.max_context, runtime.prefill_chunk, close, tokenizer, target)


def open_draft_layer(
    bundle: Bundle,
    layer: DraftLayer,
    runtime: RuntimeConfig,
    backend: BudgetedBackend,
    target: ModelWeights,
    max_context: int,
    cancelled: IsCancelled,
) -> DraftLayerState:
    """Load a bundle's draft layer into its model's backend, with a key/value cache.

    runtime: resolved options. target: the model's weights. max_context: tokens of the longest text. Raises
    what `load_draft_layer` raises.
    """
    with FlashReader([bundle.sidecar_file(layer.sidecar.tensors)], runtime.io) as reader:
        loaded = load_draft_layer(bundle, layer, reader, backend, target, max_context, cancelled)
    layout = KVLayout(loaded.config, runtime.kv_bits)
    kv = SequenceState(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
    return DraftLayerState(loaded, kv)
