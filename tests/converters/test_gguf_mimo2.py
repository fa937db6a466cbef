"""MiMo V2 in GGUF files: older and later ones, and metadata that can't be true."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.converters.checkpoints.opening import open_checkpoint
from ondevice.converters.convert import convert
from ondevice.errors import OndeviceError
from tests.converters.test_gguf_families import written
from tests.converters.test_gguf_model import assert_same_bundle
from tests.support.gguf_families import saying, write_family

pytest.importorskip("gguf")

AHEAD = 3
OF_ONE = ("attn_qkv", "attn_output", "attn_norm", "attn_sinks", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
OF_ONE += ("layer_output_norm", "nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
"""Tensors of a layer that predicts a token ahead."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("mimo2") / "source", "mimo2")


def later(writer: Any) -> None:
    """Queries, keys and values in one matrix, and layers that predict tokens ahead behind the others."""
    add, parts, layers = writer.add_tensor, {}, 4

    def fused(name: str, values: np.ndarray, raw_dtype: Any = None) -> None:
        found = re.fullmatch(r"(blk\.\d+\.attn_)([qkv])\.weight", name)
        if found is None:
            add(name, values, raw_dtype=raw_dtype)
            return
        its = parts.setdefault(found[1], {})
        its[found[2]] = values
        if len(its) == 3:
            add(f"{found[1]}qkv.weight", np.concatenate([its[it] for it in "qkv"]), raw_dtype=raw_dtype)

    values = writer.kv_data[0]
    values["mimo2.block_count"].value = layers + AHEAD
    for key, more in (("attention.head_count_kv", 4), ("attention.sliding_window_pattern", True)):
        values[f"mimo2.{key}"].value = [*values[f"mimo2.{key}"].value, *[more] * AHEAD]
    writer.add_nextn_predict_layers(AHEAD)
    for layer in range(layers, layers + AHEAD):
        for name in OF_ONE:
            add(f"blk.{layer}.{name}.weight", np.ones((4, 32), np.float32))
    writer.add_tensor = fused


@pytest.mark.fast("q4")
@pytest.mark.parametrize("quant", ["f16", "q4"])
def test_later_files_give_the_bundle_of_the_folder(source: Path, tmp_path: Path, quant: str) -> None:
    path = tmp_path / "model.gguf"
    write_family(path, source, change=later)
    assert b"attn_qkv" in path.read_bytes()
    mine = convert(path, tmp_path / "mine", quant)
    assert_same_bundle(mine, convert(source, tmp_path / "theirs", quant))
    with closing(open_checkpoint(path)) as checkpoint:
        assert any("(mtp) were left out" in note for note in checkpoint.notes)
        assert not any("values are scaled" in note for note in checkpoint.notes)


def test_a_factor_that_a_file_lacks_is_the_published_models(source: Path, tmp_path: Path) -> None:
    """Without it llama.cpp computes something else than the model's authors."""
    path = tmp_path / "model.gguf"
    write_family(path, source, change=lambda it: it.kv_data[0].pop("mimo2.attention.value_scale"))
    assert b"value_scale" not in path.read_bytes()
    with closing(open_checkpoint(path)) as checkpoint, closing(open_checkpoint(source)) as oracle:
        assert checkpoint.config == oracle.config
        assert checkpoint.config.layers[0].attention.out_factor == float(np.float32(0.707))
        assert "values are scaled by 0.707, as in published models" in checkpoint.notes[-1]


LYING: list[tuple[str, Any, str]] = [
    ("attention.head_count_kv", [2, 4, 4], "head_count_kv has 3 values for 4 layers"),
    ("attention.head_count_kv", [2, 4, 4, 2], r"head_count_kv is \[2, 4, 4, 2\]; layers with windows"),
    ("attention.head_count_kv", [2, 3, 3, 3], "num_heads 4 is not a multiple"),
    ("attention.sliding_window_pattern", 1, "is missing or one value; only an array"),
    ("attention.sliding_window_pattern", [True] * 4, "head_count_kv is .*; layers with windows"),
    ("attention.sliding_window_pattern", [False] * 4, "head_count_kv is .*; layers with windows"),
    ("attention.value_length", 25, "it must be from 1 to 24"),
    ("attention.value_length", 8, r"attn_v\.weight has shape"),
    ("attention.key_length", 48, r"q_proj\.weight has shape \[96, 64\]"),
    ("attention.value_scale", -1.0, "out_factor"),
    ("rope.dimension_count", 0, "dimension_count is 0; heads have 24"),
    ("rope.dimension_count", 7, "7 of a head's 24 dimensions"),
    ("rope.scaling.type", "yarn", "factor|rope_scaling"),
    ("nextn_predict_layers", 4, "nextn_predict_layers is 4 of 4 layers"),
    ("expert_gating_func", 1, "expert_gating_func is 1; only 2, sigmoid"),
    ("expert_shared_count", 1, "expert_shared_count is 1; only 0"),
    ("expert_count", 5, r"ffn_gate_exps\.weight has shape \[4, 48, 64\]"),
    ("expert_group_count", 3, "groups"),
]
"""Key, value, and what the refusal says."""


def test_lying_metadata_are_refused(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for key, value, message in LYING:
        write_family(path, source, change=saying(key, value))
        with pytest.raises(OndeviceError, match=message):
            open_checkpoint(path).close()
