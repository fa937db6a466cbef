"""Measures how fast this machine can run a model, on one of its layers and on the disk that holds it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.limits import allowance, require_fit
from ondevice.budget.plan import plan_memory
from ondevice.budget.token_costs import flash_rate, token_bytes
from ondevice.bundle.reader import Bundle
from ondevice.config import RuntimeConfig, Sparsity
from ondevice.distributed.division import RankResources
from ondevice.flash.cost_model import CostModel, device_costs
from ondevice.flash.reader import FlashReader
from ondevice.model.loading import bundle_files, load_weights
from ondevice.model.sequence_state import SequenceState
from ondevice.model.transformer import Transformer
from ondevice.model_config import cut_places
from ondevice.runtime.backend_choice import make_backend, memory_model
from ondevice.runtime.neuron_memory import open_neuron_memory
from ondevice.runtime.resolving import held_bytes
from ondevice.sparsity.fetch import DEFAULT_FETCH
from ondevice.units import memory_rooms, parse_budget, trim_heap

WARM_UP_PASSES = 3
"""Passes that aren't timed: they read the layer and let libraries load."""
TIMED_PASSES = 20
MAX_SECONDS = 0.5
"""Seconds after which no more timed pass begins."""


def measured_resources(bundle: Bundle, runtime: RuntimeConfig, name: str) -> RankResources:
    """This machine's resources for a model under these options, including `runtime.dram_budget`.

    bundle: the complete model or a slice. One of its layers is loaded, and its memory is freed afterwards.
    runtime: settled options, except for the budget. Takes about a second, or longer if the disk hasn't been
    measured yet. Raises what loading raises.
    """
    held = held_bytes()
    budget = parse_budget(runtime.dram_budget, auto=usable_bytes())
    computed = compute_rate(bundle, runtime, budget, held)
    read = flash_rate(bundle.config, bundle.quant, runtime.sparsity, device_costs_of(bundle))
    # What measuring leaves counts, as libraries that a pass needs, but for freed memory in the heap.
    trim_heap()
    return RankResources(name, budget, held_bytes(), computed, read)


def usable_bytes() -> int:
    """The bytes that `auto` means as a budget on this machine, for a model that needs more."""
    return allowance(held_bytes(), memory_rooms()).usable_bytes


def device_costs_of(bundle: Bundle) -> CostModel:
    """The read costs of the disk that holds the bundle's neurons."""
    return device_costs([bundle.neuron_file(layer) for layer in range(bundle.config.num_layers)])


def compute_rate(bundle: Bundle, runtime: RuntimeConfig, budget_bytes: int, process_bytes: int) -> float:
    """Bytes of weights per second that this machine multiplies by one token's activations, with all weights
    in memory.

    Measured in mode `dense`, or `experts`, on the fewest layers that can be cut out of the model's middle.

    bundle, runtime: as in `measured_resources`. budget_bytes: memory that these layers and the process may
    take. Weights that don't fit are read from flash, which lowers the rate. Raises BudgetError if it isn't
    enough for a context and a layer.
    """
    part = _middle(bundle)
    config = part.config
    sparsity: Sparsity = "experts" if config.experts is not None else "dense"
    # A context of the one token that is timed: whether a longer one fits is for plans to say.
    runtime = replace(
        runtime, sparsity=sparsity, speculation="off", max_context=1, parallel=1, prompt_cache=""
    )
    memory = memory_model(config, part.quant, runtime)
    plan = plan_memory(memory, budget_bytes=0, process_bytes=process_bytes)
    plan = plan.with_budget(min(plan.full_bytes, budget_bytes))
    require_fit(plan, f"a layer of {bundle.name}")
    with ExitStack() as stack:
        reader = stack.enter_context(FlashReader(bundle_files(part), runtime.io))
        backend = make_backend(config, part.quant, runtime, plan)
        stack.callback(backend.close)
        model = Transformer(config, backend, load_weights(part, reader, backend))
        neurons = open_neuron_memory(part, plan, backend, reader, device_costs_of(part), DEFAULT_FETCH)
        stack.callback(neurons.close)
        neurons.resize(plan.segment.quota(plan.segments_for(plan.kv_block_bytes, 1)))
        layout = KVLayout(config, runtime.kv_bits)
        kv = SequenceState(layout, backend.allocate_block, arrays=backend.new_arrays(layout))
        seconds = _pass_seconds(model, kv)
    of_token = token_bytes(config, part.quant, plan, [1.0] * config.num_layers)
    return of_token.computed / seconds


def _middle(bundle: Bundle) -> Bundle:
    """The smallest slice near the model's middle, with experts if the model has any."""
    config, first = bundle.config, bundle.config.part.first
    bounds = (first, *cut_places(config), first + config.num_layers)
    middle = first + config.num_layers / 2

    def rank(pair: tuple[int, int]) -> tuple[bool, int, float]:
        layers = config.layers[pair[0] - first : pair[1] - first]
        lacks = config.experts is not None and all(layer.experts is None for layer in layers)
        return lacks, pair[1] - pair[0], abs(pair[0] - middle)

    return bundle.slice(*min(pairwise(bounds), key=rank), embeds=False, heads=False)


def _pass_seconds(model: Transformer, kv: SequenceState) -> float:
    """Seconds of a pass of one token through all layers: the fastest of several, as others are disturbed."""
    config, backend = model.config, model.backend
    x = np.random.default_rng(1).standard_normal(config.hidden_size).astype(np.float32)
    row = np.ones(config.per_layer_width, np.float32)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < WARM_UP_PASSES + TIMED_PASSES:
        if len(times) > WARM_UP_PASSES and time.perf_counter() - begun > MAX_SECONDS:
            break
        copies = [backend.load_vector(x).reshape(1, -1) for _ in range(config.residual_copies)]
        inputs = backend.load_vector(row).reshape(1, -1) if config.per_layer_width else None
        start = time.perf_counter()
        for layer in range(config.num_layers):
            kv.truncate(0)
            copies = [backend.rows(copy, [0]) for copy in model.layer(layer, copies, [0], kv, inputs)]
        backend.to_numpy(copies[0])
        times.append(time.perf_counter() - start)
    return min(times[WARM_UP_PASSES:])
