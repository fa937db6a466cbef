"""The memory arithmetic: parts that add up, a ceiling that holds, residency that yields to the KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.backends.kv_layout import KVLayout
from ondevice.budget.cpu_memory import CpuMemory
from ondevice.budget.limits import require_fit, verdict
from ondevice.budget.memory_model import NEURON_TABLE_BYTES, PROMPT_CACHE_BYTES
from ondevice.budget.plan import (
    PROCESS_ALLOWANCE_BYTES,
    QUOTA_MARGIN_BYTES,
    REPEAT_MARGIN_BYTES,
    Held,
    Plan,
    plan_memory,
)
from ondevice.budget.reference_memory import ReferenceMemory
from ondevice.budget.sizes import (
    DECODE_TOKENS,
    SlotShape,
    buffer_shape,
    context_tokens,
    interleaved_bytes,
    segment_shape,
    stream_bytes,
)
from ondevice.bundle.layout import neuron_layout
from ondevice.bundle.streams import MultiStreams
from ondevice.config import MXFP4, QuantConfig, RowFormat, RuntimeConfig
from ondevice.converters.architectures.common import llama_config
from ondevice.errors import BudgetError, UsageError
from ondevice.model_config import FeedForwardSpec, ModelConfig, part_config
from ondevice.speculation.registry import drafter_bytes
from ondevice.speculation.tree import DRAFT_NODES, STREAM_ROWS
from tests.support.sources import with_feed_forward
from tests.support.widths import with_widths

LLAMA_7B = llama_config("llama", 4096, 32, 32, 32, 128, 11008, 32000, 4096, "silu", 1e-5, 1e4)
TINY = llama_config("llama", 64, 5, 8, 4, 8, 172, 512, 512, "silu", 1e-5, 1e4, tie_embeddings=True)
Q4, F16 = QuantConfig(4), QuantConfig(16)
MB = 10**6


def plan_for(
    config: ModelConfig, quant: QuantConfig, budget: int, streams: MultiStreams | None = None, **options: Any
) -> Plan:
    """Without drafts: what they hold is added as it is."""
    runtime = RuntimeConfig(**{"speculation": "off", **options})
    kind = ReferenceMemory if runtime.backend == "reference" else CpuMemory
    memory = kind(config, quant, runtime, streams=streams)
    return plan_memory(memory, budget_bytes=budget, process_bytes=60 * MB)


def streams_of(mode: Any, bits: Any = 8) -> MultiStreams:
    """Four in the last eight layers of the 7B shape, of ranks 32 and 80."""
    text = {"trained_tokens": 0, "measured_tokens": 0, "acceptance": (0.0,) * 4, "sha256": "", "crcs": ()}
    return MultiStreams("", mode, bits, 4, 24, 32, 80, **text)  # type: ignore[arg-type]


def configs() -> st.SearchStrategy[ModelConfig]:
    return st.builds(
        lambda width, layers, heads, neurons, vocab, others: with_widths(
            llama_config(
                "llama", width * 8, layers, heads * 2, heads, 16, neurons, vocab, 2048, "silu", 1e-5, 1e4
            ),
            others,
        ),
        st.integers(1, 1100),
        st.integers(1, 90),
        st.integers(1, 8),
        st.integers(1, 30000),
        st.integers(2, 200000),
        st.lists(st.one_of(st.none(), st.integers(1, 30000)), max_size=4),
    )


def test_a_matrix_costs_whole_tiles_of_sixteen_rows() -> None:
    # 2 tiles x 2 groups x (16 rows x 64 codes of 4 bits + 16 scales and biases of 2 bytes)
    assert interleaved_bytes(17, 65, RowFormat(4)) == 2 * 2 * (16 * 64 // 2 + 16 * 4)
    assert interleaved_bytes(16, 64, RowFormat(8)) == 16 * 64 + 16 * 4
    assert interleaved_bytes(16, 64, RowFormat(16)) == 16 * 64 * 2
    assert interleaved_bytes(17, 65, RowFormat(4, 32)) == 2 * 2 * (16 * 64 // 2 + 2 * 16 * 4)
    assert interleaved_bytes(16, 64, RowFormat(4, 32, "symmetric")) == 16 * 64 // 2 + 2 * 16 * 2
    assert interleaved_bytes(17, 65, MXFP4) == 2 * 2 * (16 * 64 // 2 + 2 * 16)


def test_the_7b_shape_costs_what_a_hand_count_says() -> None:
    plan = plan_for(LLAMA_7B, Q4, 4000 * MB)
    per_weight = 4.5 / 8
    attention_and_head = 32 * 4 * 4096 * 4096 + 32000 * 4096
    assert plan.matrices is not None
    assert plan.matrices.total_bytes == pytest.approx(attention_and_head * per_weight, rel=0.001)
    # Vectors, and a checksum for each of the two parts of a slice, a tile of the embedding, and 16 KiB.
    checksums = 32 * 43 * 2 + 2000 + attention_and_head * per_weight / (16 << 10)
    assert plan.weights_bytes == pytest.approx(4 * (65 * 4096 + checksums), rel=0.01)
    # Twelve slots of 512 KiB, a tile and a page on each side; a layer, and a tenth of the head.
    shared = (4 * 4096 * 4096 + 3200 * 4096) * per_weight
    assert plan.matrices.shared_bytes == pytest.approx(shared, rel=0.001)
    streaming = 12 * ((512 << 10) + 2 * (36864 + 4096)) + plan.matrices.shared_bytes
    assert plan.matrices.streaming_bytes == streaming
    feed_forward = 32 * 3 * 4096 * 11008 * per_weight
    assert plan.segment.bytes_of(plan.segment.total) == pytest.approx(feed_forward, rel=0.02)
    assert plan.kv_cache_bytes == 2 * 32 * 4096 * 4096 * 2
    assert plan.embedding_bytes == 2000 * 16 * 2304
    assert plan.process_bytes == 60 * MB + PROCESS_ALLOWANCE_BYTES
    # Twelve slots, each of a slice of 256 neurons of 3 x 4096 weights.
    assert plan.buffers.nbytes == pytest.approx(12 * 256 * 3 * 4096 * per_weight, rel=0.01)
    # A chunk of 256 tokens: residual, projections and feed-forward; then 16 rows of logits, twice.
    # Hidden values are there as floats and as int8 with a scale and two sums for 64. Tokens are looked up in
    # tiles, 28 at a time.
    per_token = 4 * (3.25 * 4096 + 3 * 4096 + 4096) + 64 * 128 + 4096 * 1.2 + 2 * 128
    working = 256 * per_token + 2 * 4 * 16 * 32000 + 4 * 32 * (4096 + 256) + (2 << 20) * (1 + 76 / 256)
    working += 28 * 16 * 2304
    assert plan.activation_bytes == pytest.approx(1.25 * working, rel=0.01)
    needed = (
        plan.weights_bytes + plan.buffers.nbytes + plan.kv_cache_bytes + plan.activation_bytes + streaming
    )
    assert plan.minimum_budget_bytes == needed + plan.process_bytes + REPEAT_MARGIN_BYTES
    assert plan.full_bytes == (
        plan.minimum_budget_bytes
        - REPEAT_MARGIN_BYTES
        + plan.matrices.total_bytes
        - plan.matrices.shared_bytes
        + plan.segment.bytes_of(plan.segment.total)
        + plan.embedding_bytes
    )


@settings(max_examples=60)
@given(configs(), st.sampled_from([4, 8, 16]), st.integers(0, 1 << 33))
def test_matrices_are_held_within_the_budget(config: ModelConfig, bits: Any, budget: int) -> None:
    plan = plan_for(config, QuantConfig(bits), budget)
    shape = plan.matrices
    if shape is None:
        assert (plan.held_units, plan.holds_matrices) == (0, True)
        return
    assert shape.streaming_bytes < shape.total_bytes == sum(shape.unit_bytes)
    assert plan.with_budget(plan.least_budget_bytes).fits
    assert plan.with_budget(plan.resident_budget_bytes).holds_matrices
    larger = plan.with_budget(budget + (1 << 20))
    assert larger.held_units >= plan.held_units
    if plan.fits:
        assert plan.total_bytes <= budget
        spare = budget - plan.total_bytes
        # Another unit wouldn't fit beside a full context, where neurons have what is left, or those of the
        # head that drafts don't need come behind high planes.
        if not plan.holds_matrices:
            needed = 0 if plan.held_units < shape.draft_units else plan.segment.high_planes
            left = spare + plan.neuron_cache_bytes - plan.segment.bytes_of(needed)
            assert left < shape.unit_bytes[plan.held_units]


def test_what_drafts_need_is_held_first() -> None:
    """Of a head so large that the rest of it is more than copies of matrices."""
    plan = plan_for(replace(LLAMA_7B, vocab_size=64000), Q4, 1 << 40)
    shape, planes = plan.matrices, plan.segment.high_planes
    assert shape is not None
    assert shape.draft_units == 32 + 4
    assert len(shape.unit_bytes) == 32 + 10
    assert 0 < planes < plan.segment.total
    stages = set()
    held = Held(0, 0)
    for budget in range(plan.least_budget_bytes, plan.full_bytes, 25 * MB):
        more = plan.with_budget(budget).held_weights(plan.kv_cache_bytes)
        assert more >= held
        held = more
        if held.units < shape.draft_units:
            assert plan.segment.bytes_of(held.segments) < shape.unit_bytes[held.units]
        elif held.segments < planes:
            assert held.units == shape.draft_units
            stages.add("planes")
        else:
            stages.add("others")
    assert stages == {"planes", "others"}


def test_all_matrices_are_held_where_fewer_and_copies_of_the_others_take_more() -> None:
    plan = plan_for(LLAMA_7B, Q4, 0)
    shape = plan.matrices
    assert shape is not None
    assert shape.bytes_of(shape.draft_units) > shape.total_bytes
    room = plan.with_budget(plan.least_budget_bytes - shape.shared_bytes + shape.total_bytes)
    assert room.held_weights(room.kv_cache_bytes) == Held(len(shape.unit_bytes), 0)
    assert room.total_bytes == room.budget_bytes
    less = room.with_budget(room.budget_bytes - 1)
    assert less.held_units < shape.draft_units
    assert less.total_bytes <= less.budget_bytes


def test_a_text_begins_with_a_block_of_keys_and_values() -> None:
    full = plan_for(LLAMA_7B, Q4, 1 << 40)
    assert full.start_bytes == full.total_bytes - full.kv_cache_bytes + full.kv_block_bytes
    assert full.kv_block_bytes * (full.max_context // 64) == full.kv_cache_bytes
    # Neurons have what keys and values will take.
    offloaded = full.with_budget(3700 * MB)
    assert offloaded.total_bytes - offloaded.start_bytes < 2 * offloaded.segment.nbytes


def test_loading_is_the_peak_of_a_short_context() -> None:
    wide = replace(TINY, hidden_size=1024, tie_embeddings=False)
    for vocab, ahead in ((50_000, 52 << 20), (2_000, None)):
        plan = plan_for(replace(wide, vocab_size=vocab), F16, 0, max_context=64, backend="reference")
        held = 2 * plan.weights_bytes if ahead is None else ahead
        assert plan.minimum_budget_bytes == (
            plan.weights_bytes + plan.process_bytes + held + REPEAT_MARGIN_BYTES
        )
        assert sum(plan.minimum_parts.values()) == plan.minimum_budget_bytes
        # Others leave it that memory too, although the model holds less once it is loaded.
        resident = plan.with_budget(1 << 40)
        assert resident.total_bytes < plan.least_budget_bytes
        assert resident.claim_bytes == plan.least_budget_bytes - plan.process_bytes


@pytest.mark.parametrize(("bits", "beside"), [(8, 0), (16, 4 * 4096)])
def test_adapters_take_working_memory_for_every_row_that_has_them(bits: Any, beside: int) -> None:
    # Between their matrices, what they add to queries, keys and values, and a copy; inputs of another width.
    row = 4 * (80 + 3 * 4096 + 4096) + beside
    plain, shared = (plan_for(LLAMA_7B, Q4, 0, of) for of in (None, streams_of("shared", bits)))
    assert shared.activation_bytes == plain.activation_bytes + 256 * row * 5 // 4
    assert shared.decode_activation_bytes == plain.decode_activation_bytes + 16 * row * 5 // 4
    assert shared.draft_bytes == stream_bytes(LLAMA_7B, streams_of("shared", bits))
    lossless = streams_of("lossless", bits)
    assert plan_for(LLAMA_7B, Q4, 0, lossless) == plain
    for name, nodes in (("streams", 16), ("auto", 16), ("streams", 2)):
        options = {"speculation": name, "sparsity": "dense", "prefill_chunk": nodes}
        drafting, without = (plan_for(LLAMA_7B, Q4, 0, of, **options) for of in (lossless, None))
        held = stream_bytes(LLAMA_7B, lossless) + STREAM_ROWS * row
        held += drafter_bytes("streams", LLAMA_7B, 4096, nodes) if name == "auto" else 0
        assert drafting.draft_bytes == without.draft_bytes + held
        assert sum(drafting.minimum_parts.values()) == drafting.minimum_budget_bytes
    assert sum(shared.minimum_parts.values()) == shared.minimum_budget_bytes


@pytest.mark.fast("20-*", "2-auto-*", "256-streams-*")
@pytest.mark.parametrize("mode", ["lossless", "shared"])
@pytest.mark.parametrize("speculation", ["off", "lookup", "resident", "streams", "auto"])
@pytest.mark.parametrize("chunk", [2, 20, 256])
def test_rows_of_streams_are_planned_beside_the_largest_draft_where_streams_draft(
    mode: Any, speculation: Any, chunk: int
) -> None:
    streams, runtime = streams_of(mode), RuntimeConfig(speculation=speculation, prefill_chunk=chunk)
    memory = CpuMemory(LLAMA_7B, Q4, runtime, streams=streams)
    plan = plan_memory(memory, budget_bytes=0, process_bytes=0)
    rows = STREAM_ROWS if speculation in ("streams", "auto") else 0
    decoded = min(chunk, DRAFT_NODES) + rows
    assert plan.decode_activation_bytes == memory.activation_bytes(decoded)
    assert plan.activation_bytes == memory.activation_bytes(max(chunk, decoded))
    assert plan.working_bytes(min(chunk, DRAFT_NODES)) >= plan.decode_activation_bytes
    # Without streams there is nothing to plan for them.
    alone = plan_memory(CpuMemory(LLAMA_7B, Q4, runtime), budget_bytes=0, process_bytes=0)
    widths = [CpuMemory(LLAMA_7B, Q4, runtime).activation_bytes(min(chunk, n)) for n in (256, DRAFT_NODES)]
    assert [alone.activation_bytes, alone.decode_activation_bytes] == widths


@pytest.mark.parametrize("budget", [0, 1000 * MB, 3700 * MB, 4000 * MB, 6000 * MB, 20000 * MB])
def test_the_parts_add_up_to_the_total(budget: int) -> None:
    plan = plan_for(LLAMA_7B, Q4, budget)
    assert sum(plan.minimum_parts.values()) == plan.minimum_budget_bytes
    shown = plan.to_json()
    parts = ("resident_weights", "kv_cache", "neuron_cache", "predictor", "draft", "staging", "activation")
    assert shown["total_bytes"] == sum(int(shown[f"{part}_bytes"]) for part in (*parts, "process"))


@settings(max_examples=40)
@given(
    configs(),
    st.sampled_from([4, 8, 16]),
    st.integers(0, 1 << 40),
    st.sampled_from([8, 16]),
    st.sampled_from(["dense", "exact"]),
    st.integers(1, 256),
)
def test_the_ceiling_holds_at_every_size_of_the_kv_cache(
    config: ModelConfig, bits: Any, budget: int, kv_bits: Any, sparsity: str, tokens: int
) -> None:
    if sparsity == "exact":
        config = with_feed_forward(config, FeedForwardSpec("relu"))
    plan = plan_for(config, QuantConfig(bits), budget, kv_bits=kv_bits, sparsity=sparsity)
    assert plan.selects_neurons == (sparsity == "exact")
    assert plan.fits == (budget >= plan.minimum_budget_bytes - REPEAT_MARGIN_BYTES)
    if plan.fits:
        assert_under_the_ceiling(plan, tokens)
    else:
        # Loading may take more for a while than the total, which is what is held afterwards.
        assert max(plan.total_bytes, plan._loading_bytes, plan._opening_bytes) >= plan.budget_bytes
    assert_under_the_ceiling(plan.with_budget(plan.least_budget_bytes + budget % (4 * MB)), tokens)


def assert_under_the_ceiling(plan: Plan, tokens: int) -> None:
    """Of a plan that fits: in the widest pass, and in one of `tokens`, whose other scratch weights have."""
    assert plan.total_bytes <= plan.budget_bytes
    blocks = plan.kv_cache_bytes // plan.kv_block_bytes
    counts = range(0, blocks + 1, 7)

    def matrix_bytes(units: int) -> int:
        return 0 if plan.matrices is None else plan.matrices.bytes_of(units)

    fixed = plan.total_bytes - plan.kv_cache_bytes - plan.neuron_cache_bytes - matrix_bytes(plan.held_units)
    for width in (None, tokens):
        held = [plan.held_weights(count * plan.kv_block_bytes, width) for count in counts]
        # Units of matrices come first: one more of them may take the place of segments.
        assert held == sorted(held, reverse=True)
        scratch = plan.activation_bytes if width is None else plan.working_bytes(width)
        for count, (units, segments) in zip(counts, held, strict=True):
            assert plan.segment.least <= segments <= plan.segment.total
            weights = matrix_bytes(units) + plan.segment.bytes_of(segments)
            others = fixed - plan.activation_bytes + scratch
            assert others + count * plan.kv_block_bytes + weights <= plan.budget_bytes
    if isinstance(plan.segment, SlotShape):
        assert plan.segment.least * plan.segment.slots >= plan.segment.reserve
        slots = plan.segments_for(plan.kv_cache_bytes, DECODE_TOKENS) * plan.segment.slots
        assert plan.kept_slots + plan.segment.reserve <= slots


@pytest.mark.parametrize("part", ["process", "unread", "others", "constraint", "predictor", "draft"])
def test_what_is_beside_a_model_takes_nothing_of_its_room(part: str) -> None:
    """A larger part needs a budget larger by as much, and then everything else is as it was."""
    plan, name = plan_for(LLAMA_7B, Q4, 4000 * MB), f"{part}_bytes"
    larger = replace(plan, **{name: getattr(plan, name) + 7 * MB})
    assert larger.minimum_budget_bytes == plan.minimum_budget_bytes + 7 * MB
    assert sum(larger.minimum_parts.values()) == larger.minimum_budget_bytes
    raised = larger.with_budget(plan.budget_bytes + 7 * MB)
    assert raised.total_bytes == plan.total_bytes + 7 * MB
    assert raised.held_weights(0) == plan.held_weights(0)
    assert raised.kv_limit_bytes == plan.kv_limit_bytes


@pytest.mark.parametrize(
    ("config", "options"),
    [(LLAMA_7B, {"parallel": 4}), (part_config(LLAMA_7B, 0, 16, True, True), {})],
    ids=["texts at once", "several machines"],
)
def test_passes_are_planned_with_what_other_texts_and_machines_add(
    config: ModelConfig, options: dict[str, Any]
) -> None:
    memory = CpuMemory(config, Q4, RuntimeConfig(speculation="off", **options))
    plan = plan_memory(memory, budget_bytes=0, process_bytes=0)
    assert memory.joined_bytes(256) + memory.message_bytes(256) > MB
    expected = memory.activation_bytes(256) + memory.joined_bytes(256) + memory.message_bytes(256)
    assert plan.activation_bytes == expected


def test_libraries_and_a_prompt_cache_are_counted_with_the_process() -> None:
    class WithLibraries(CpuMemory):
        @property
        def library_bytes(self) -> int:
            return 5 * MB

    runtime = RuntimeConfig(prompt_cache="/somewhere")
    plan = plan_memory(WithLibraries(TINY, Q4, runtime), budget_bytes=0, process_bytes=60 * MB)
    assert plan.process_bytes == 65 * MB + PROCESS_ALLOWANCE_BYTES + PROMPT_CACHE_BYTES


@settings(max_examples=40)
@given(configs(), st.sampled_from([4, 8, 16]))
def test_segments_cover_a_layer_and_waste_little(config: ModelConfig, bits: Any) -> None:
    quant = QuantConfig(bits)
    shape = segment_shape(config, quant)
    assert shape.neurons % 64 == 0
    for segments, neurons in zip(shape.per_layer, config.widths, strict=True):
        assert (segments - 1) * shape.neurons < neurons <= segments * shape.neurons
    assert shape.nbytes >= neuron_layout(config, quant, 0).row_bytes[0]
    assert shape.nbytes <= 16 << 20 or shape.neurons <= 256
    if len(set(config.widths)) == 1 and config.widest >= 64 * 64:
        assert shape.per_layer[0] * shape.neurons <= config.widest * 1.05 + 64


@settings(max_examples=40)
@given(configs(), st.sampled_from([4, 8, 16]))
def test_a_stream_slot_holds_its_records_widened_to_pages(config: ModelConfig, bits: Any) -> None:
    quant = QuantConfig(bits)
    shape = buffer_shape(config, quant)
    layout = neuron_layout(config, quant, 0)
    assert shape.neurons % 64 == 0
    assert shape.slot_bytes % 4096 == 0
    # Slices lie on pages.
    assert shape.slot_bytes >= layout.nbytes(shape.neurons) + (0 if config.is_sliced else 4096)
    assert shape.slots >= 2


@settings(max_examples=40)
@given(
    configs(),
    st.sampled_from([4, 8, 16]),
    st.sampled_from(["dense", "exact"]),
    st.integers(1, 600),
    st.integers(1, 600),
)
def test_a_pass_is_counted_with_what_it_takes_or_more(
    config: ModelConfig, bits: Any, sparsity: Any, chunk: int, tokens: int
) -> None:
    quant, runtime = QuantConfig(bits), RuntimeConfig(prefill_chunk=chunk, sparsity=sparsity)
    if sparsity == "exact":
        config = with_feed_forward(config, FeedForwardSpec("relu"))
    memory = CpuMemory(config, quant, runtime)
    plan = plan_memory(memory, budget_bytes=1 << 40, process_bytes=0)
    tokens = min(tokens, plan.pass_tokens)
    assert memory.activation_bytes(tokens) <= plan.working_bytes(tokens) <= plan.activation_bytes
    assert plan.working_bytes(plan.pass_tokens) == plan.activation_bytes
    decoding = min(plan.activation_bytes, plan.decode_activation_bytes + QUOTA_MARGIN_BYTES)
    assert plan.working_bytes(1) == plan.working_bytes(DECODE_TOKENS) == decoding


def test_segments_are_divided_evenly() -> None:
    shape = segment_shape(LLAMA_7B, Q4)
    for segments in (0, 1, 5, 31, 32, 33, 100, shape.total - 1, shape.total):
        quota = shape.quota(segments)
        assert sum(quota) == segments
        assert max(quota) - min(quota) <= 1
        fewer = shape.quota(segments - 1)
        assert all(less <= more for less, more in zip(fewer, quota, strict=True))
    # Each slice counts twice: high planes of all of them come first, then what makes them whole.
    assert shape.quota(shape.total + 5) == (2 * shape.per_layer[0],) * 32
    assert shape.quota(shape.total // 2) == shape.per_layer
    assert shape.bytes_of(shape.total // 2) == sum(shape.high_bytes) * shape.per_layer[0]
    assert shape.bytes_of(shape.total) == sum(shape.layer_bytes) * shape.per_layer[0]
    assert shape.quota(-1) == (0,) * 32


def test_layers_of_other_widths_have_the_same_share_of_their_neurons() -> None:
    config = with_widths(LLAMA_7B, [None] * 16 + [2 * LLAMA_7B.intermediate_size] * 16)
    shape, equal = segment_shape(config, Q4), segment_shape(LLAMA_7B, Q4)
    assert shape.total == 1.5 * equal.total
    for segments in (0, 1, 5, 31, 33, 100, shape.total // 2, shape.total - 1, shape.total):
        quota = shape.quota(segments)
        assert sum(quota) == segments
        shares = [held / most for held, most in zip(quota, shape.per_layer, strict=True)]
        assert max(shares) - min(shares) < 1 / min(shape.per_layer) + 1e-9
        fewer = shape.quota(segments - 1)
        assert all(less <= more for less, more in zip(fewer, quota, strict=True))


def test_wider_layers_cost_what_they_have_more() -> None:
    widths = [None] * 16 + [2 * LLAMA_7B.intermediate_size] * 16
    uneven, equal = (plan_for(it, Q4, 1 << 40) for it in (with_widths(LLAMA_7B, widths), LLAMA_7B))
    neurons = 16 * LLAMA_7B.intermediate_size
    assert uneven.segment.bytes_of(uneven.segment.total) == pytest.approx(
        1.5 * equal.segment.bytes_of(equal.segment.total), rel=0.01
    )
    # Two checksums of each slice of 256 neurons, one of each plane.
    assert uneven.weights_bytes == equal.weights_bytes + 2 * 4 * (neurons // 256)
    relu = with_feed_forward(LLAMA_7B, FeedForwardSpec("relu"))
    exact = [
        plan_memory(CpuMemory(it, Q4, RuntimeConfig(sparsity="exact")), budget_bytes=1 << 40, process_bytes=0)
        for it in (with_widths(relu, widths), relu)
    ]
    gates = neurons * (interleaved_bytes(16, 4096, RowFormat(4)) // 16 + 4)
    more = exact[0].weights_bytes - exact[1].weights_bytes
    assert more == 2 * 4 * neurons + neurons * NEURON_TABLE_BYTES + gates


def test_the_embedding_goes_to_flash_before_feed_forward_does() -> None:
    full = plan_for(LLAMA_7B, Q4, 1 << 40).full_bytes
    at_full = plan_for(LLAMA_7B, Q4, full)
    assert (at_full.offloads_weights, at_full.total_bytes) == (False, full)
    assert at_full.staging_bytes == at_full.buffers.nbytes
    assert at_full.matrices is not None
    matrices = at_full.matrices.total_bytes + at_full.matrices.slots_bytes
    assert at_full.resident_weights_bytes == at_full.weights_bytes + matrices + at_full.embedding_bytes
    below = plan_for(LLAMA_7B, Q4, full - 1)
    assert not below.offloads_weights
    assert below.resident_weights_bytes == below.weights_bytes + matrices
    assert below.segments_for(below.kv_cache_bytes) == below.segment.total
    streaming = plan_for(LLAMA_7B, Q4, below.total_bytes - 1)
    assert streaming.offloads_weights
    assert streaming.staging_bytes == streaming.buffers.nbytes
    assert streaming.segments_for(streaming.kv_cache_bytes) < streaming.segment.total
    assert streaming.total_bytes < below.total_bytes


def test_a_budget_below_the_minimum_names_the_one_that_works() -> None:
    plan = plan_for(LLAMA_7B, Q4, 0)
    assert not plan.fits
    with pytest.raises(BudgetError) as caught:
        require_fit(plan, "llama-7b")
    assert caught.value.required_bytes == plan.minimum_budget_bytes
    assert str(plan.minimum_budget_bytes) in str(caught.value)
    assert "llama-7b" in str(caught.value)
    nearly = plan.with_budget(plan.least_budget_bytes - 1)
    with pytest.raises(BudgetError, match=r"Raise dram_budget, or lower max_context or kv_bits, or take"):
        require_fit(nearly, "llama-7b", fitting_context=64, fitting_options=["--kv-bits 8"])
    with pytest.raises(BudgetError, match=r"\)\. Raise dram_budget\.$"):
        require_fit(nearly, "llama-7b", fitting_context=64, fitting_options=["--kv-bits 8"], only_budget=True)
    enough = plan.with_budget(caught.value.required_bytes)
    require_fit(enough, "llama-7b")
    # The margin has room for one high plane.
    assert enough.segments_for(enough.kv_cache_bytes) <= 1
    with pytest.raises(BudgetError):
        require_fit(plan.with_budget(enough.budget_bytes - REPEAT_MARGIN_BYTES - 1), "llama-7b")


def test_inspect_says_where_another_run_may_refuse_a_budget() -> None:
    plan = plan_for(LLAMA_7B, Q4, 1 << 40)
    assert verdict(plan.with_budget(plan.minimum_budget_bytes), 0) == "yes"
    within = verdict(plan.with_budget(plan.least_budget_bytes), 0)
    assert within == "yes, as measured now; another run may measure more, and refuse it"
    assert verdict(plan.with_budget(plan.least_budget_bytes - 1), 64) == "no; --max-context 64 would fit"


def test_only_the_budget_changes_with_the_budget() -> None:
    plan = plan_for(TINY, F16, 1 << 40)
    assert plan.with_budget(123) == replace(plan, budget_bytes=123)
    assert plan.with_budget(123).with_budget(1 << 40) == plan


def test_a_short_context_and_8_bit_keys_lower_the_minimum() -> None:
    usual = plan_for(LLAMA_7B, Q4, 0).minimum_budget_bytes
    short = plan_for(LLAMA_7B, Q4, 0, max_context=512)
    assert short.kv_cache_bytes == KVLayout(LLAMA_7B, 16).block_bytes * 8
    assert short.minimum_budget_bytes < usual - 1500 * MB
    assert plan_for(LLAMA_7B, Q4, 0, kv_bits=8).minimum_budget_bytes < usual - 900 * MB


def test_the_context_is_bounded_by_the_model() -> None:
    assert context_tokens(LLAMA_7B, RuntimeConfig()) == 4096
    assert context_tokens(replace(LLAMA_7B, max_context=131072), RuntimeConfig()) == 4096
    assert context_tokens(TINY, RuntimeConfig()) == 512
    assert context_tokens(TINY, RuntimeConfig(max_context=100)) == 100
    for wrong, named in ((513, "512"), (-1, "max_context is -1")):
        with pytest.raises(UsageError, match=named):
            context_tokens(TINY, RuntimeConfig(max_context=wrong))


def test_sessions_may_share_what_one_context_leaves() -> None:
    streaming = plan_for(LLAMA_7B, Q4, 4000 * MB)
    assert streaming.kv_limit_bytes > streaming.kv_cache_bytes
    fixed = streaming.total_bytes - streaming.kv_cache_bytes - streaming.neuron_cache_bytes
    # Where the text takes more, matrices come from flash.
    assert streaming.matrices is not None
    fixed += streaming.matrices.shared_bytes - streaming.matrices.bytes_of(streaming.held_units)
    assert fixed + streaming.kv_limit_bytes == streaming.budget_bytes
    full = plan_for(TINY, F16, 1 << 40)
    assert full.total_bytes - full.kv_cache_bytes + full.kv_limit_bytes == full.budget_bytes


def test_the_reference_backend_holds_everything_in_float32() -> None:
    plan = plan_for(TINY, Q4, 1 << 40, backend="reference")
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 172
    assert plan.weights_bytes == 4 * (5 * per_layer + 512 * 64)
    assert plan.full_bytes == plan.minimum_budget_bytes
    assert plan.total_bytes == plan.minimum_budget_bytes - REPEAT_MARGIN_BYTES
    assert plan.segments_for(0) == 0


def test_a_budget_that_one_run_named_does_for_a_slightly_larger_process() -> None:
    plan = plan_for(LLAMA_7B, Q4, 0)
    next_time = replace(plan, process_bytes=plan.process_bytes + REPEAT_MARGIN_BYTES)
    assert next_time.with_budget(plan.minimum_budget_bytes).fits
    assert not next_time.with_budget(plan.minimum_budget_bytes - 1).fits
