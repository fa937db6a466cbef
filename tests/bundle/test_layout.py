"""Layout arithmetic, against numbers worked out by hand from weights/README.md."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.bundle.file_layouts import (
    file_layout,
    record_header,
    resident_header,
    resident_tensors,
)
from ondevice.bundle.layout import RecordLayout, SliceLayout, embedding_layout, neuron_layout
from ondevice.bundle.matrix_layout import RowLayout, padded
from ondevice.config import QuantConfig, RowFormat
from ondevice.converters.architectures.common import llama_config
from ondevice.model_config import FeedForwardSpec
from tests.golden.build import CONFIG, golden_config
from tests.support.sources import with_feed_forward

LLAMA_7B = llama_config(
    architecture="llama",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
    max_context=4096,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


@pytest.mark.parametrize(
    ("cols", "bits", "padded_cols", "codes", "scales"),
    [
        (64, 4, 64, 32, 2),
        (65, 4, 128, 64, 4),
        (1, 8, 64, 64, 2),
        (100, 16, 128, 256, 0),
        (4096, 8, 4096, 4096, 128),
    ],
)
def test_a_row_pads_its_columns_to_whole_groups(
    cols: int, bits: int, padded_cols: int, codes: int, scales: int
) -> None:
    row = RowLayout(cols, bits)
    assert (row.padded_cols, row.groups) == (padded_cols, padded_cols // 64)
    assert (row.codes_bytes, row.scales_bytes, row.biases_bytes) == (codes, scales, scales)
    assert row.nbytes == codes + 2 * scales


def test_records_of_a_7b_model() -> None:
    config = with_feed_forward(LLAMA_7B, FeedForwardSpec("relu"))
    layout = neuron_layout(config, QuantConfig(4), 0)
    assert layout.alignment == 512
    assert layout.row_bytes == (2304, 4608)
    assert layout.part_bytes == (2560, 4608)
    assert layout.part_offsets == (0, 2560)
    assert layout.stride == 7168
    assert layout.padding == ((2304, 2560),)
    embedding = embedding_layout(config, QuantConfig(4))
    assert embedding.part_bytes == (16 * 2304,)
    assert file_layout("embedding.safetensors", config, QuantConfig(4)).nbytes == 4096 + 2000 * 16 * 2304
    assert neuron_layout(config, QuantConfig(16), 0).part_bytes == (8192, 16384)
    neurons = file_layout("neurons-00031.safetensors", config, QuantConfig(4))
    assert neurons.nbytes == 4096 + 11008 * 7168
    assert neurons.crc_count(4096 + 11008 * 7168) == 2 * 11008


def test_a_slice_of_a_7b_model_has_256_neurons() -> None:
    """A unit of 256 neurons has 1.7 MiB, and 43 of them are a layer: a prime number, so a slice has one."""
    quant = QuantConfig(4, (("down", RowFormat(6, 32)),))
    layout = neuron_layout(LLAMA_7B, quant, 0)
    assert layout.neurons == 256
    assert isinstance(layout, SliceLayout)
    # Two bits of a code in the high plane, with the scales; in the low one two of gate and up, four of down.
    high = (2 * 256 * (4096 // 4 + 64 * 4), 4096 * (256 // 4 + 256 // 32 * 4))
    assert layout.part_bytes == (sum(high), 2 * 256 * 4096 // 4 + 4096 * 256 // 2) == (1048576, 1048576)
    assert layout.places == ((0, 0), (327680, 262144), (655360, 524288))
    assert layout.tiles.part_bytes == (589824, 589824, 917504)
    neurons = file_layout("neurons-00031.safetensors", LLAMA_7B, quant)
    assert neurons.nbytes == 4096 + 43 * layout.stride
    assert neurons.crc_count(neurons.nbytes or 0) == 2 * 43


@pytest.mark.parametrize(
    ("hidden", "neurons", "of_slice"),
    [(576, 1536, 256), (1536, 8960, 256), (896, 4864, 256), (64, 96, 64), (40, 72, 64), (128, 2048, 256)],
)
def test_a_slice_takes_the_neurons_that_pad_least(hidden: int, neurons: int, of_slice: int) -> None:
    """Whole units, near 2 MiB or an eighth of a layer, with as little padding as can be."""
    config = replace(LLAMA_7B, hidden_size=hidden, intermediate_size=neurons)
    layout = neuron_layout(config, QuantConfig(4), 0)
    assert layout.neurons == of_slice
    assert layout.num_records(neurons) * of_slice - neurons < of_slice


def test_small_records_pack_at_64_bytes() -> None:
    layout = neuron_layout(CONFIG, QuantConfig(4), 0)
    assert layout.alignment == 64
    assert layout.part_bytes == (64, 128)
    assert layout.padding == ((36, 64), (64 + 72, 192))


@given(st.lists(st.lists(st.integers(1, 20_000), min_size=1, max_size=3), min_size=1, max_size=3))
def test_parts_align_to_512_bytes_where_that_costs_at_most_an_eighth(parts: list[list[int]]) -> None:
    layout = RecordLayout(tuple(tuple(RowLayout(cols, 8) for cols in part) for part in parts))
    used = [sum(row.nbytes for row in part) for part in layout.parts]
    at_512 = sum(padded(nbytes, 512) for nbytes in used)
    assert layout.alignment == (512 if at_512 <= 1.125 * sum(used) else 64)
    assert all(nbytes % layout.alignment == 0 for nbytes in layout.part_bytes)
    assert layout.stride == sum(layout.part_bytes)
    zeros = sum(stop - start for start, stop in layout.padding)
    assert zeros == layout.stride - sum(used)


def test_every_option_adds_its_resident_tensors() -> None:
    config = golden_config(
        num_layers=1,
        hidden_size=100,
        attention_bias=True,
        attention_output_bias=True,
        qk_norm=True,
        tie_embeddings=False,
    )
    expected = {
        "layers.0.attention_norm.weight": ("F32", (100,)),
        "layers.0.attention.q": ("U8", (4, 2 * 16 * 36)),
        "layers.0.attention.k": ("U8", (2, 2 * 16 * 36)),
        "layers.0.attention.v": ("U8", (2, 2 * 16 * 36)),
        "layers.0.attention.qkv.bias": ("F32", (128,)),
        "layers.0.attention.q_norm.weight": ("F32", (16,)),
        "layers.0.attention.k_norm.weight": ("F32", (16,)),
        "layers.0.attention.out": ("U8", (7, 16 * 36)),
        "layers.0.attention.out.bias": ("F32", (100,)),
        "layers.0.feed_forward_norm.weight": ("F32", (100,)),
        "final_norm.weight": ("F32", (100,)),
        "head": ("U8", (4, 2 * 16 * 36)),
    }
    tensors = resident_tensors(config, QuantConfig(4))
    assert [(name, (spec.dtype, spec.shape)) for name, spec in tensors.items()] == list(expected.items())
    halves = resident_tensors(config, QuantConfig(16))
    assert (halves["head"].dtype, halves["head"].shape) == ("F16", (64, 128))
    assert halves["layers.0.attention.out"].shape == (112, 64)
    parts = QuantConfig(4, (("qkv", RowFormat(6, 32, "symmetric")), ("head", RowFormat(5, 32, "two_level"))))
    tensors = resident_tensors(replace(config, hidden_size=256), parts)
    assert tensors["layers.0.attention.k"].shape == (2, 16 * (192 + 2 * 8))
    assert tensors["head"].shape == (4, 16 * 176)


def test_headers_fill_pages_and_their_tensors_are_contiguous() -> None:
    header = record_header(96, 192)
    assert len(header) == 4096
    assert header[:8] == (4088).to_bytes(8, "little")
    assert header[8:].rstrip(b" ") == b'{"records":{"dtype":"U8","shape":[96,192],"data_offsets":[0,18432]}}'
    many = resident_header(resident_tensors(LLAMA_7B, QuantConfig(4)))
    assert len(many) % 4096 == 0
    entries = list(json.loads(many[8:]).values())
    for before, after in pairwise(entries):
        assert before["data_offsets"][1] == after["data_offsets"][0]
