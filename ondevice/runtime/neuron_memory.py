"""What holds a model's neurons in memory, and feeds them to its layers, by the plan of the model."""

from __future__ import annotations

from collections.abc import Sequence

from ondevice.backends.feed_forward_layer import FeedForwardLayer
from ondevice.budget.plan import Plan
from ondevice.budget.sizes import SegmentShape, fetch_neurons, prefetch_neurons
from ondevice.bundle.reader import Bundle
from ondevice.flash.cost_model import CostModel
from ondevice.flash.reader import FlashReader
from ondevice.sparsity.fetch import FetchOptions, NeuronFetcher
from ondevice.sparsity.neuron_cache import NeuronCache
from ondevice.sparsity.policies import make_policy
from ondevice.sparsity.segments import SegmentPool


def neuron_memory(
    bundle: Bundle,
    plan: Plan,
    layers: Sequence[FeedForwardLayer],
    reader: FlashReader,
    costs: CostModel,
    options: FetchOptions,
) -> SegmentPool | NeuronFetcher:
    """No memory yet: whole ranges of a layer's neurons, or single ones where some are selected.

    reader: of the bundle's files. costs: of its reads, where neurons are selected.
    """
    config, segment, stream = bundle.config, plan.segment, plan.stream
    if isinstance(segment, SegmentShape):
        return SegmentPool(
            layers,
            reader,
            segment_bytes=segment.nbytes,
            stream_neurons=stream.neurons,
            slot_bytes=stream.slot_bytes,
            slots=stream.slots,
        )
    neurons = config.intermediate_size
    cache = NeuronCache(
        config.num_layers,
        neurons,
        slot_bytes=segment.slot_bytes,
        segment_slots=segment.slots,
        reserve=segment.reserve,
        policy=make_policy(options.policy, config.num_layers, neurons, bundle.frequencies()),
        keep=options.keep,
    )
    return NeuronFetcher(
        layers,
        reader,
        cache,
        part_bytes=bundle.neuron_file(0).crc_units,
        batch=fetch_neurons(config),
        prefetched=prefetch_neurons(config),
        costs=costs,
        options=options,
    )
